"""Where gathers start and where results are awaited, in the printed program."""

from typing import Optional

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.transforms.bucketing import Bucket
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.overlap import Overlap
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from tests.transforms.programs import compiled
from tests.transforms.test_bucketing import KIB, Model

_WORDS = {
    "all_gather_into_tensor.default": "gather", "reduce_scatter_tensor.default": "scatter",
    "wait_tensor.default": "wait", "aten.addmm.default": "compute", "aten.mm.default": "compute",
    "all_reduce.default": "reduce",
}  # fmt: skip


def order(program: Program, stage: str) -> str:
    """What the printed program does, in order; equal steps that follow each other are one."""
    text = [trace for trace in program.traces if trace.stage == f"final {stage}"][-1].python()
    steps: list[str] = []
    for line in text.splitlines():
        word = next((word for name, word in _WORDS.items() if name in line), None)
        if word is not None and not (word == "compute" and steps[-1:] == ["compute"]):
            steps.append(word)
    return " ".join(steps)


def ordered(mesh: DeviceMesh, prefetch: int, limit: Optional[float], *more: object, ddp: bool = False) -> Program:
    model = Model()
    passes = [DeduplicateUnshard(), *more, Bucket("block"), Overlap(prefetch, limit)]
    return compiled(model.forward, model, mesh, passes, torch.ones(2, 16), ddp=ddp)


USED = "gather wait compute"
FORWARD = {
    "where they are used": (0, None, " ".join([USED] * 5)),
    "the next one": (1, None, "gather gather wait compute" + " gather wait compute" * 3 + " wait compute"),
    "the next two": (2, None, "gather gather gather wait compute" + " gather wait compute" * 2 + " wait compute" * 2),
    "as the bound allows": (
        1, 4 * KIB, f"gather gather wait compute wait compute {USED} gather gather wait compute wait compute"
    ),
    "of a small bound": (3, 0.0, " ".join([USED] * 5)),
}  # fmt: skip


@pytest.mark.parametrize("prefetch, limit, expected", FORWARD.values(), ids=FORWARD)
def test_gathers_start_before_they_are_needed(
    mesh: DeviceMesh, prefetch: int, limit: Optional[float], expected: str
) -> None:
    assert order(ordered(mesh, prefetch, limit), "forward") == expected


def test_the_backward_of_zero3_gathers_ahead_too(mesh: DeviceMesh) -> None:
    steps = order(ordered(mesh, 1, None, GatherAgain()), "backward").split()
    assert steps[:4] == ["gather", "gather", "wait", "compute"]
    assert steps.count("gather") == 4


BACKWARD = {"late": (None, 5), "one after another": (0.0, 1), "two at once": (4 * KIB, 2)}


@pytest.mark.parametrize("limit, most", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("ddp", [False, True])
def test_reductions_are_awaited_late(mesh: DeviceMesh, limit: Optional[float], most: int, ddp: bool) -> None:
    word = "reduce" if ddp else "scatter"
    steps = [step for step in order(ordered(mesh, 0, limit, ddp=ddp), "backward").split() if step in (word, "wait")]
    assert steps.count(word) == steps.count("wait") == 5
    under_way = [steps[: place + 1].count(word) - steps[: place + 1].count("wait") for place in range(len(steps))]
    assert max(under_way) == most
    assert limit is not None or steps == [word] * 5 + ["wait"] * 5
