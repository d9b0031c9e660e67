"""Checks of activation checkpointing on sharded modules."""

import torch

import lightning_thunder_strategy as lts
from tests.distributed.parity import NORMS_IN_FLOAT32, _float64
from tests.distributed.training import assert_equal_results, fit_alone, fit_case, thunder

SHORT = {"limit_val_batches": 0, "max_epochs": 1}


@_float64
def check_checkpointed_shards_train_as_one_process() -> None:
    """Gathers are as often as the sharding says; a checkpointed block gathers in the backward what it needs."""
    alone = fit_alone("litgpt_tied", epochs=1)
    for kind in ("zero2", "zero3"):
        kept, gathered = {}, {}
        for policy in ("none", "selective", "block"):
            blocks = [] if policy == "none" else ["*.h.*"]
            transforms = [lts.ActivationCheckpointing(policy, blocks)]
            strategy = thunder(kind, transforms=transforms, bucket_size_mb=0)
            result = fit_case(strategy, "litgpt_tied", **SHORT)
            assert_equal_results(result, alone, losses=False, **NORMS_IN_FLOAT32)
            step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]
            kept[policy] = step["saved_bytes"]
            for stage in ("forward", "backward"):
                counts = {item["op"]: item["count"] for item in step["collectives"][stage]}
                gathered[policy, stage] = counts.get("all_gather_into_tensor", 0)
        if kind == "zero2":  # gathered parameters, which it keeps, do not count
            transforms = [lts.ActivationCheckpointing((kept["none"] - 1) / 2**30, ["*.h.*"])]
            result = fit_case(thunder(kind, transforms=transforms, bucket_size_mb=0), "litgpt_tied", **SHORT)
            assert lts.explain(result.trainer).to_dict()["steps"]["training_step"]["decisions"] == []
        parameters = len(list(result.module.parameters()))
        assert kept["none"] > kept["selective"] > kept["block"], kept
        assert {gathered[policy, "forward"] for policy in kept} == {parameters}, gathered
        for policy in kept:
            again = gathered[policy, "backward"]
            assert (0 < again <= parameters) if kind == "zero3" else again == 0, (kind, gathered)
        assert torch.distributed.get_world_size() == 2
