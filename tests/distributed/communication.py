"""Checks that how parameters and gradients are communicated changes the programs, and not the results."""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lightning_thunder_strategy as lts
from tests.distributed.models import make
from tests.distributed.parity import EXACT, NORMS_IN_FLOAT32, _float64
from tests.distributed.training import Result, assert_equal_results, fit, fit_case, thunder

SHORT = {"limit_val_batches": 0, "max_epochs": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "each by itself": {"bucket_size_mb": 0, "prefetch": 0},
    "blocks": {"bucket_size_mb": "block", "prefetch": 2},
    "small": {"bucket_size_mb": 0.002, "prefetch": 1, "in_flight_mb": 0.01},
    "all": {"bucket_size_mb": 25},
}


def _counts(result: Result) -> tuple[int, ...]:
    """Gathers of the forward, gathers and reductions of the backward."""
    step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]["collectives"]
    found = {(stage, item["op"]): item["count"] for stage, items in step.items() for item in items}
    keys = [("forward", "all_gather_into_tensor"), ("backward", "all_gather_into_tensor")]
    reduced = found.get(("backward", "reduce_scatter_tensor"), 0) + found.get(("backward", "all_reduce"), 0)
    return (*(found.get(key, 0) for key in keys), reduced)


@_float64
def check_settings_change_the_programs_and_not_the_results() -> None:
    """A language model with a tied embedding, against Lightning's DDP."""
    other = fit_case("ddp", "litgpt_tied", **SHORT)
    for kind, names in (("ddp", ("blocks", "all")), ("zero3", OPTIONS)):
        counts = {}
        for name in names:
            options = {key: value for key, value in OPTIONS[name].items() if kind != "ddp" or key != "prefetch"}
            result = fit_case(thunder(kind, **options), "litgpt_tied", **SHORT)
            assert_equal_results(result, other, **NORMS_IN_FLOAT32)
            counts[name] = _counts(result)
        assert len(set(counts.values())) == len(counts), counts
        assert counts["all"][2] == 1 < counts["blocks"][2] < counts.get("each by itself", (0, 0, 99))[2], counts


@_float64
def check_odd_shapes_and_frozen_parameters_in_buckets() -> None:
    for case, size in (("odd_shapes", 25), ("lora", "block")):
        other = fit_case("ddp", case, **SHORT)
        result = fit_case(thunder("zero3", bucket_size_mb=size), case, **SHORT)
        assert_equal_results(result, other, **EXACT)
        assert _counts(result)[2] < sum(p.requires_grad for p in result.module.parameters())


@_float64
def check_inductor_runs_bucketed_programs() -> None:
    other = fit_case("ddp", "smooth", **SHORT)
    config = lts.CompileConfig(on_error="raise")
    result = fit_case(thunder("zero3", executors=["inductor"], compile=config, bucket_size_mb=25), "smooth", **SHORT)
    assert_equal_results(result, other, rtol=1e-7, atol=1e-9)
    assert _counts(result)[2] == 1


def check_autocast_gathers_bfloat16() -> None:
    """Casting before the gather gives the same values, and half the bytes for matrices and their biases."""
    results = {}
    for kind in ("ddp", "zero3"):
        results[kind] = fit_case(thunder(kind), "smooth", precision="bf16-mixed", **SHORT)
    assert_equal_results(results["zero3"], results["ddp"], rtol=1e-5, atol=1e-6)
    program = results["zero3"].trainer.strategy.records()[0].programs[0]
    wire = {line.split()[1].split("[")[0] for line in program.sequence if line.startswith("all_gather")}
    assert wire == {"torch.bfloat16"}
    wire = {line.split()[1].split("[")[0] for line in program.sequence if line.startswith("reduce_scatter")}
    assert wire == {"torch.float32"}


def check_reduce_dtype_is_that_of_fsdp2() -> None:
    """bfloat16 parameters whose gradients are summed in float32, and float32 ones summed in bfloat16."""
    for precision, reduced in (("bf16-true", torch.float32), ("32-true", torch.bfloat16)):
        name = str(reduced).removeprefix("torch.")
        result = fit_case(thunder("zero3", reduce_dtype=name), "smooth", precision=precision, **SHORT)
        module, data = make("smooth")
        original = type(module)
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)

        def configure_model(self: Any, policy: MixedPrecisionPolicy = policy) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

        module.__class__ = type(original.__name__, (original,), {"configure_model": configure_model})
        other = fit(ModelParallelStrategy(2, 1), module, data, precision=precision, **SHORT)
        for mine, theirs in zip(result.gradients, other.gradients):
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-2, atol=1e-4)
        program = result.trainer.strategy.records()[0].programs[0]
        lines = [line for line in program.sequence if line.startswith("reduce_scatter")]
        assert lines and all(f"torch.{name}" in line for line in lines)
        torch.testing.assert_close(result.gradients[0], other.gradients[0], rtol=1e-2, atol=1e-5)
