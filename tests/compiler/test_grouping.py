"""Operations of one executor that depend on each other are put together, and the program stays the same program."""

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.grouping import grouped, reorder
from tests.compiler.executors import Pointwise, overload
from tests.compiler.parity import assert_same
from tests.executors.reference import compiled_with


class Gathering(Pointwise):
    name = "gathering"
    gathers = True


class Reluctant(Gathering):
    """Takes regions of two operations and more."""

    def worthwhile(self, nodes):
        return None if len(nodes) > 1 else "one operation is not worth it"


def regions(function, *executors, inputs):
    """The forward's regions of the first executor; values are compared with eager's."""
    compiled = compiled_with(function, *executors)
    assert_same(compiled(*inputs), function(*inputs))
    return executors[0].regions, compiled


def test_an_activation_joins_the_product_that_uses_it():
    a, b, x = (torch.randn(4, 4) for _ in range(3))
    found, _ = regions(lambda x, a, b: (x @ a).sigmoid() * (x @ b), Gathering(), inputs=(x, a, b))
    assert found == [["sigmoid", "mul"]]


def test_what_is_computed_from_a_regions_result_alone_joins_it():
    def function(x, a):
        y = x.sin()
        z = (y + 1) @ a
        return z, y.cos(), z * 2

    found, _ = regions(function, Gathering(), inputs=(torch.randn(4, 4), torch.randn(4, 4)))
    assert sorted(found) == [["mul"], ["sin", "add", "cos"]]


def test_what_needs_nothing_of_a_region_stays_where_it_is():
    """Or all parameters would be cast at the start of a program."""

    def function(x, a, b):
        return (x.sin() @ a.exp()) @ b.exp()

    found, _ = regions(function, Gathering(), inputs=[torch.randn(4, 4) for _ in range(3)])
    assert found == [["sin", "exp"], ["exp"]]


def test_a_reduced_value_is_not_kept_in_its_large_form_for_a_later_region():
    class Sums(Gathering):
        def supports(self, node):
            return None if overload(node) in ("sum", "sin", "mul") else "no"

    def function(x, a):
        small = x.sin().cumsum(0).sum(0)  # cumsum is not supported
        return (a @ a) * small

    found, _ = regions(function, Sums(), inputs=(torch.randn(64, 4), torch.randn(4, 4)))
    assert found == [["sin"], ["sum"], ["mul"]]


def test_regions_of_an_executor_that_does_not_gather_are_runs_of_the_program():
    a, b, x = (torch.randn(4, 4) for _ in range(3))
    found, _ = regions(lambda x, a, b: (x @ a).sigmoid() * (x @ b), Pointwise(), inputs=(x, a, b))
    assert found == [["sigmoid"], ["mul"]]


def test_a_region_that_is_not_worth_it_goes_to_the_next_executor_with_the_reason():
    first, second = Reluctant(), Pointwise()

    def function(x, a):
        return ((x.sin() + 1) @ a).cos() @ a

    _, compiled = regions(function, first, second, inputs=(torch.randn(4, 4), torch.randn(4, 4)))
    assert first.regions == [["sin", "add"]] and second.regions == [["cos"]]
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    reasons = {(claim["operation"], claim["reason"]) for claim in step["claims"] if claim["executor"] == "gathering"}
    assert ("aten.cos.default", "one operation is not worth it") in reasons


def test_an_edit_of_a_buffer_is_passed_by_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            before = self.seen.sin()
            self.seen.add_(x)
            return F.relu(before * 2) @ x, self.seen.cos() + before

    ours, theirs = Net(), Net()
    compiled = compiled_with(ours, Gathering())
    for _ in range(3):
        x = torch.randn(4)
        assert_same(compiled(x), theirs(x))
        assert_same(ours.seen, theirs.seen)


# -------------------------------------------------------------------------------------------------------- any program


@dataclass(eq=False)
class Unit:
    operation: fx.Node
    executor: int
    nodes: list[fx.Node] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(30))
def test_any_program_keeps_its_values_its_fixed_order_and_has_no_more_runs(seed):
    draw = random.Random(seed)
    graph = fx.Graph()
    values = [graph.placeholder(f"x{index}") for index in range(3)]
    for node in values:
        node.meta["val"] = torch.ones(draw.choice([1, 100]))
    units = []
    for _ in range(25):
        node = graph.call_function(torch.add, tuple(draw.choices(values[-9:], k=2)))
        node.meta["val"] = torch.ones(draw.choice([1, 100]))
        values.append(node)
        units.append(Unit(node, draw.choice([0, 0, 1, 2]), [node]))
    graph.output(tuple(draw.choices(values, k=3)))
    edits = set(draw.sample(units, 2))
    result = grouped(units, lambda unit: unit.executor == 0 and unit not in edits, lambda unit: unit in edits)
    fixed = [unit for unit in units if unit.executor or unit in edits]
    assert [unit for unit in result if unit in set(fixed)] == fixed and len(result) == len(units)
    for edit in edits:  # what stands before an edit stays before it
        assert set(units[: units.index(edit)]) == set(result[: result.index(edit)])
    reorder(graph, result)
    graph.lint()  # each value is computed before it is used
    assert _runs(result) <= _runs(units)


def _runs(units):
    return sum(a.executor == 0 and (b is None or b.executor != 0) for a, b in zip(units, [*units[1:], None]))
