"""Checks of hybrid sharding on four ranks."""

from typing import Any

import lightning as L
import pytest
import torch

import lightning_thunder_strategy as lts
from tests.distributed.checkpoints import _fit_saving, _folder, _resume
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import assert_equal_results, fit_alone, fit_case, thunder

OPTIONS: dict[str, Any] = {"devices": 4, "batch_size": 3, "limit_val_batches": 0}


def hybrid(kind: str = "zero3", replicas: int = 2, **options: Any) -> lts.ThunderFSDPStrategy:
    return thunder(kind, replicas=replicas, **options)


@_float64
def check_training_equals_one_process() -> None:
    for case in ("smooth", "odd_shapes"):
        alone = fit_alone(case, batch_size=12)
        result = fit_case(hybrid("zero2" if case == "smooth" else "zero3"), case, **OPTIONS)
        assert_equal_results(result, alone, losses=False, **EXACT)


@_float64
def check_accumulation_and_clipping_equal_ddp() -> None:
    options = {**OPTIONS, "batch_size": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    other = fit_case("ddp", "smooth", **options)
    assert_equal_results(fit_case(hybrid("zero1"), "smooth", **options), other, **EXACT)


def check_shards_and_programs() -> None:
    """Each rank has half of each parameter; gathers stay within a replica."""
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(tuple(pl_module.net[0].weight.to_local().shape))

    result = fit_case(hybrid(), "smooth", callbacks=[Look()], **OPTIONS)
    assert seen[0] in [(5, 6), (4, 6)]
    step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]["collectives"]["backward"]
    found = {item["op"]: item for item in step}
    assert found["all_reduce"]["count"] == found["reduce_scatter_tensor"]["count"] == 2  # two blocks
    assert 0 < found["all_reduce"]["bytes"] <= found["reduce_scatter_tensor"]["bytes"] / 2
    issued = [line.split() for line in result.trainer.strategy.records()[0].programs[0].sequence]
    groups = {(words[0], words[-1]) for words in issued if len(words) > 1}
    assert groups == {
        ("all_gather_into_tensor", "2x1"), ("reduce_scatter_tensor", "2x1"), ("all_reduce", "2x2"),
    }  # fmt: skip


@_float64
def check_checkpoints_move_between_meshes() -> None:
    """What two replicas of two shards save goes on as four shards, as four replicas and under DDP."""
    options = {"devices": 4, "batch_size": 3}
    straight = fit_case(hybrid(compile="off"), "resumable", **options)
    for kind in ("full", "sharded"):
        with _folder() as folder:
            _fit_saving(hybrid(state_dict_type=kind, compile="off"), folder, max_epochs=1, **options)
            (path,) = list(folder.iterdir())
            others = [thunder("zero3", compile="off"), thunder("ddp", compile="off")]
            for strategy in [hybrid(replicas=4, compile="off"), *(others if kind == "full" else [])]:
                resumed = _resume(strategy, path, **options)
                for name, value in straight.weights.items():
                    torch.testing.assert_close(resumed.weights[name], value, **EXACT)


def check_replicas_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"replicas=3 does not divide the 4 processes: choose one of \[1, 2, 4\]"):
        fit_case(hybrid(replicas=3), "smooth", **OPTIONS)
