"""Checks of Trainer options and precisions on two ranks against Lightning's own strategies."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors.triton import interpreted
from tests.distributed.models import make, vectors
from tests.distributed.parity import EXACT, KINDS, _float64
from tests.distributed.training import assert_equal_results, fit, fit_alone, fit_case, thunder


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def _check_clipping(algorithm: str, value: float) -> None:
    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "limit_val_batches": 0}
    other = fit_case("ddp", "odd_shapes", **options)
    assert max(_norm(gradients) for gradients in other.gradients) > value, "nothing would be clipped"
    for kind in KINDS:
        assert_equal_results(fit_case(thunder(kind), "odd_shapes", **options), other, **EXACT)


@_float64
def check_clipping_by_norm() -> None:
    _check_clipping("norm", 0.2)


@_float64
def check_clipping_by_value() -> None:
    _check_clipping("value", 0.02)


@_float64
def check_accumulated_batches_equal_one_large_batch() -> None:
    alone = fit_alone("smooth", batch_size=12)
    options = {"accumulate_grad_batches": 2, "batch_size": 3, "limit_val_batches": 0}
    other = fit_case("ddp", "smooth", **options)
    for kind in KINDS:
        result = fit_case(thunder(kind), "smooth", **options)
        assert_equal_results(result, other, **EXACT)
        assert_equal_results(result, alone, losses=False, **EXACT)


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


@_float64
def check_layers_unfrozen_in_the_middle_of_training() -> None:
    """Lightning's DDP would not average the gradients of what was frozen when it wrapped the module."""
    other = fit_alone("smooth", before_epoch=lambda module, epoch: module.net[0].requires_grad_(epoch == 1))
    assert "net.0.weight" not in other.gradients[0] and "net.0.weight" in other.gradients[-1]
    for kind in ("ddp", "zero3"):
        result = fit_case(thunder(kind), "smooth", callbacks=[Unfreeze()], limit_val_batches=0)
        assert_equal_results(result, other, losses=False, **EXACT)
        assert "net.0.weight" not in result.gradients[0]


def check_bf16_true() -> None:
    other = fit_case("ddp", "smooth", precision="bf16-true")
    for kind in KINDS:
        result = fit_case(thunder(kind), "smooth", precision="bf16-true")
        assert {weight.dtype for weight in result.weights.values()} == {torch.bfloat16}
        assert_equal_results(result, other, rtol=0.02, atol=0.02)


def check_bf16_mixed() -> None:
    other = fit_case("ddp", "smooth", precision="bf16-mixed")
    for kind in KINDS:
        result = fit_case(thunder(kind), "smooth", precision="bf16-mixed")
        assert {weight.dtype for weight in result.weights.values()} == {torch.float32}
        assert_equal_results(result, other, rtol=0.01, atol=0.005)


@_float64
def check_inductor_equals_ddp() -> None:
    """Also where the programs come from the compile cache: the ranks' shards differ in size, so their programs do."""
    with _compile_cache_of_this_group():
        _check_inductor_equals_ddp("ddp", "zero3")
        torch._dynamo.reset()
        _check_inductor_equals_ddp("zero3", cached=True)


@contextmanager
def _compile_cache_of_this_group() -> Iterator[None]:
    """A folder without compiled programs, the same on all ranks. It shares what Inductor finds out about the compiler
    and its compiled headers with other tests: seconds of a compiler each."""
    pick_vec_isa()  # this process remembers it
    folders = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    if folders[0]:
        for name in ("precompiled_headers", "locks"):
            shared = Path(cache_dir()) / name
            shared.mkdir(parents=True, exist_ok=True)
            (Path(folders[0]) / name).symlink_to(shared)
    torch.distributed.broadcast_object_list(folders)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[0]
    try:
        yield
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        torch.distributed.barrier()
        shutil.rmtree(folders[0], ignore_errors=True)


def _check_inductor_equals_ddp(*kinds: str, cached: bool = False) -> None:
    options = {"max_epochs": 1, "limit_val_batches": 0}
    other = fit_case("ddp", "mlp", **options)
    config = lts.CompileConfig(eager_random=True, on_error="raise")
    for kind in kinds:
        result = fit_case(thunder(kind, executors=["inductor"], compile=config), "mlp", **options)
        assert_equal_results(result, other, rtol=1e-7, atol=1e-9)
        step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]
        assert step["executors"].keys() == {"inductor"} and step["graphs"] == 1
        assert step["from_cache"] == cached


def check_litgpt_under_inductor_equals_eager() -> None:
    """With shards of one size, so that the ranks share what is compiled; for others see the check above."""
    options = {"max_epochs": 1, "limit_train_batches": 3, "batch_size": 2, "limit_val_batches": 0}
    eager = fit_case(thunder("zero3"), "litgpt_even", **options)
    inductor = fit_case(thunder("zero3", executors=["inductor"]), "litgpt_even", **options)
    assert len(inductor.losses) == 3
    assert_equal_results(inductor, eager, rtol=1e-4, atol=1e-5)
    step = lts.explain(inductor.trainer).to_dict()["steps"]["training_step"]
    assert step["executors"].get("inductor", 0) > 100 and step["graph_breaks"] == []


@_float64
def check_forward_and_submodule_modes_equal_the_step_mode() -> None:
    other = fit_case("ddp", "mlp")
    for kind in ("ddp", "zero3"):
        for mode in ("forward", "submodules", "off"):
            result = fit_case(thunder(kind, compile=mode), "mlp")
            assert_equal_results(result, other, **EXACT)
            assert lts.explain(result.trainer).to_dict()["steps"]["training_step"]["mode"] == mode


@_float64
def check_last_batch_shorter_and_of_one_row() -> None:
    for count, batch_size in ((22, 4), (18, 4)):  # 11 rows a rank: 4, 4, 3; and 9: 4, 4, 1
        other = fit("ddp", make("smooth")[0], vectors(count), batch_size)
        result = fit(thunder("zero3"), make("smooth")[0], vectors(count), batch_size)
        assert_equal_results(result, other, **EXACT)


def check_deterministic_training_is_bit_equal() -> None:
    exact = {"rtol": 0, "atol": 0}
    for kind in ("ddp", "zero3"):
        try:
            runs = [fit_case(thunder(kind), "mlp", deterministic=True, max_epochs=1) for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert_equal_results(*runs, **exact)


@_float64
def check_optimizers_by_one_kernel_update_shards() -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2, "limit_val_batches": 0, "batch_size": 3}
    for case, name in (("odd_shapes", "SGD"), ("smooth", "AdamW")):
        other = fit_case("ddp", case, **options)
        for kind in ("ddp", "zero1", "zero3"):
            result = fit_case(thunder(kind, compile="off", compile_optimizer="auto"), case, **options)
            assert_equal_results(result, other, **EXACT)
            (record,) = lts.explain(result.trainer).to_dict()["optimizers"]
            updated = {"triton" if interpreted() else "torch fused": len(result.gradients[-1])}
            assert record == {"name": name, "parameters": updated, "reasons": {}}
