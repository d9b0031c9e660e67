"""In which element types parameters and gradients travel."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.transforms.bucketing import Bucket
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from lightning_thunder_strategy.transforms.wire_dtype import CastBeforeGather, ReduceIn
from tests.transforms.programs import GATHER, REDUCE, SCATTER, compiled


class Normed(nn.Module):
    """Matrices and a norm: under autocast the norm's parameters are used in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.norm(self.first(x)))


def on_the_wire(program: Program, op: str) -> list[str]:
    """The element type of each collective of a kind, forward then backward."""
    return [line.split()[1].split("[")[0].removeprefix("torch.") for line in program.sequence if line.startswith(op)]


def program(mesh: DeviceMesh, *passes: object, ddp: bool = False, grad: bool = True) -> Program:
    model = Normed()
    with torch.set_grad_enabled(grad):
        return compiled(model.forward, model, mesh, [DeduplicateUnshard(), *passes], torch.ones(2, 4), ddp=ddp)


def test_without_the_pass_float32_travels(mesh: DeviceMesh) -> None:
    assert on_the_wire(program(mesh), GATHER) == ["float32"] * 6


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_only_used_in_bfloat16_travels_so(mesh: DeviceMesh, grad: bool) -> None:
    found = on_the_wire(program(mesh, CastBeforeGather(), grad=grad), GATHER)
    assert found == ["bfloat16", "bfloat16", "float32", "float32", "bfloat16", "bfloat16"]


def test_gathered_again_in_bfloat16(mesh: DeviceMesh) -> None:
    made = program(mesh, CastBeforeGather(), GatherAgain(), Bucket(1.0))
    backward = made.sequence[made.sequence.index("--") :]
    assert [line.split()[1].split("[")[0] for line in backward if line.startswith(GATHER)].count("torch.bfloat16") == 1
    saved = [trace for trace in made.traces if trace.stage == "backward"][-1].inputs
    assert 8 * 6 not in [torch.Size(item.shape).numel() for item in saved if item.shape is not None]


def test_buckets_of_both_types(mesh: DeviceMesh) -> None:
    assert on_the_wire(program(mesh, CastBeforeGather(), Bucket(1.0)), GATHER) == ["bfloat16", "float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op, ddp", [(SCATTER, False), (REDUCE, True)])
def test_gradients_are_reduced_in_the_type_asked_for(mesh: DeviceMesh, dtype: str, op: str, ddp: bool) -> None:
    for bucket in ((), (Bucket(1.0),)):
        made = program(mesh, ReduceIn(dtype), *bucket, ddp=ddp)
        assert set(on_the_wire(made, op)) == {dtype}
        gradients = [trace for trace in made.traces if trace.stage == "final backward"][-1].python()
        assert "f32[6" in gradients or "f32[2" in gradients  # as the parameters are
