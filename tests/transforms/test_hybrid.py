"""Programs of hybrid sharding on a mesh of two replicas."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.schemes import HybridSharded
from lightning_thunder_strategy.distributed.sharding import gathering, parallelize
from lightning_thunder_strategy.transforms.bucketing import Bucket
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.overlap import Overlap
from lightning_thunder_strategy.transforms.refuse_lost_edits import RefuseLostEdits
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from lightning_thunder_strategy.transforms.wire_dtype import ReduceIn
from tests.transforms.test_bucketing import Model, counts
from tests.transforms.test_overlap import order


@pytest.fixture
def hybrid(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def programs(mesh: DeviceMesh, *passes: object):
    model = Model()
    parallelize(model, HybridSharded(mesh))
    before = [RefuseLostEdits(), DeduplicateUnshard(), GatherAgain()]
    run = lts.compile(model.forward, ["eager"], [*before, *passes], lts.CompileConfig(fullgraph=True))
    with gathering():
        loss = run(torch.ones(2, 16)).sum()
    loss.backward()
    (program,) = run.record.programs
    return model, program


def test_shards_are_reduced_among_replicas(hybrid: DeviceMesh) -> None:
    model, program = programs(hybrid)
    assert counts(program, "forward")["all_gather_into_tensor"][0] == 16
    backward = counts(program, "backward")
    assert backward["reduce_scatter_tensor"][0] == backward["all_reduce"][0] == 16
    assert backward["all_reduce"][1] * 2 == backward["reduce_scatter_tensor"][1]  # only the shards
    assert all(p.grad.placements == p.placements for p in model.parameters())


def test_buckets_of_both_reductions(hybrid: DeviceMesh) -> None:
    backward = counts(programs(hybrid, Bucket("block"))[1], "backward")
    assert backward["reduce_scatter_tensor"][0] == backward["all_reduce"][0] == 5


def test_each_bucket_is_reduced_further_beside_the_next(hybrid: DeviceMesh) -> None:
    _, program = programs(hybrid, Bucket("block"), Overlap(0, None))
    steps = order(program, "backward")
    reductions = [step for step in steps.split() if step in ("scatter", "reduce")]
    assert reductions == ["scatter", *["scatter", "reduce"] * 4, "reduce"]
    assert steps.endswith("reduce" + " wait" * 5)


def test_the_type_of_both_reductions(hybrid: DeviceMesh) -> None:
    _, program = programs(hybrid, ReduceIn("bfloat16"))
    lines = [line for line in program.sequence if line.startswith(("reduce_scatter", "all_reduce"))]
    assert len(lines) == 32 and all("torch.bfloat16" in line for line in lines)


def test_uneven_shards_have_the_same_sequence_everywhere(hybrid: DeviceMesh) -> None:
    """A rank whose shard is smaller all-reduces less, in another group: ranks compare the rest."""
    _, program = programs(hybrid, Bucket(2.5 / 1024), Overlap(1, 4 / 1024))
    reduced = [line for line in program.sequence if line.startswith("all_reduce")]
    assert len(reduced) > 1 and set(reduced) == {"all_reduce torch.float32 shards avg 2x2"}
