"""Buckets: how many collectives, of how many bytes, in which order, for each setting."""

from typing import Union

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.transforms.bucketing import Bucket
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.parameter_collectives import block_of
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from tests.transforms.programs import GATHER, REDUCE, SCATTER, compiled

KIB = 1 / 1024  # of a mebibyte


class Model(nn.Module):
    """Something in front (256 + 16 floats), three blocks (two of 256 + 16) and something behind (32 + 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        self.behind = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = x + block(x)
        return self.behind(x)


WEIGHT, BIAS = 16 * 16 * 4, 16 * 4  # bytes
FRONT, BLOCK, BEHIND = WEIGHT + BIAS, 2 * (WEIGHT + BIAS), 4 * 16 * 4 + 4 * 4  # rows padded to the four ranks


def sizes(program: Program, stage: str) -> list[int]:
    """Bytes of the whole tensor of each collective, in the order in which they are issued."""
    lines = program.sequence[: program.sequence.index("--")] if stage == "forward" else None
    lines = lines if lines is not None else program.sequence[program.sequence.index("--") + 1 : -1]
    found = []
    for line in lines:
        shape = line.split("[")[1].split("]")[0]
        found.append(4 * int(torch.tensor([int(part) for part in shape.split(",")]).prod()))
    return found


def counts(program: Program, stage: str) -> dict[str, tuple[int, int]]:
    return {item.op: (item.count, item.bytes) for item in program.collectives[stage]}


def bucketed(mesh: DeviceMesh, size: Union[float, str], *more: object, ddp: bool = False) -> Program:
    model = Model()
    passes = [DeduplicateUnshard(), *more, *([Bucket(size)] if size else [])]
    return compiled(model.forward, model, mesh, passes, torch.ones(2, 16), ddp=ddp)


TOTAL = FRONT + 3 * BLOCK + BEHIND
SETTINGS: dict[str, tuple[Union[float, str], list[int]]] = {
    "each by itself": (0, [WEIGHT, BIAS] * 7 + [256, 16]),
    "of a block": ("block", [FRONT, BLOCK, BLOCK, BLOCK, BEHIND]),
    "of all": (1.0, [TOTAL]),
    "of two kibibytes": (2 * KIB, [FRONT, FRONT, FRONT, FRONT, FRONT, FRONT, FRONT + BEHIND]),
    "of 2.5 kibibytes": (2.5 * KIB, [2 * (WEIGHT + BIAS)] * 3 + [WEIGHT + BIAS + BEHIND]),
}


@pytest.mark.parametrize("size, expected", SETTINGS.values(), ids=SETTINGS)
def test_gathers_and_reduce_scatters(mesh: DeviceMesh, size: Union[float, str], expected: list[int]) -> None:
    program = bucketed(mesh, size)
    assert sizes(program, "forward") == expected
    assert counts(program, "forward") == {GATHER: (len(expected), TOTAL)}
    assert counts(program, "backward")[SCATTER] == (len(expected), TOTAL)


@pytest.mark.parametrize("size, expected", SETTINGS.values(), ids=SETTINGS)
def test_all_reduces(mesh: DeviceMesh, size: Union[float, str], expected: list[int]) -> None:
    program = bucketed(mesh, size, ddp=True)
    unpadded = TOTAL - BEHIND + 2 * 16 * 4 + 2 * 4
    assert counts(program, "forward") == {}
    assert counts(program, "backward") == {REDUCE: (len(expected), unpadded)}


def test_blocks_of_the_backward_are_in_its_order(mesh: DeviceMesh) -> None:
    program = bucketed(mesh, "block", GatherAgain())
    issued = [line.split()[0] for line in program.sequence[program.sequence.index("--") + 1 : -1]]
    assert issued.count(SCATTER) == 5
    assert sizes(program, "backward")[issued.index(SCATTER)] == BEHIND
    assert issued.count(GATHER) == 4  # weights of behind and of three blocks; the front's is not needed


def test_element_types_are_not_mixed(mesh: DeviceMesh) -> None:
    model = Model()
    model.behind.double()

    def step(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(model.front(x))
        return model.behind(x.double())

    program = compiled(step, model, mesh, [DeduplicateUnshard(), Bucket(1.0)], torch.ones(2, 16))
    assert counts(program, "forward")[GATHER] == (2, TOTAL + BEHIND)


def test_a_program_is_the_same_for_other_batch_sizes(mesh: DeviceMesh) -> None:
    model = Model()
    passes = [DeduplicateUnshard(), Bucket("block")]
    first = compiled(model.forward, model, mesh, passes, torch.ones(2, 16)).sequence
    assert compiled(model.forward, model, mesh, passes, torch.ones(5, 16)).sequence == first


def test_names_of_blocks() -> None:
    assert block_of("model.layers.3.attention.weight") == "model.layers.3"
    assert block_of("net.0.weight") == "net.0"
    assert block_of("stages.1.blocks.2.weight") == "stages.1"
    assert block_of("embedding.weight") == block_of("norms.0") == ""
