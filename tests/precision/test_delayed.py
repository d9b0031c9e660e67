"""Delayed scaling: the state, and training with it against a loop that is written out in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.precision import LowPrecisionLinears
from lightning_thunder_strategy.precision.delayed import DelayedScales
from lightning_thunder_strategy.precision.recipe import Recipe
from tests.precision.test_linears import decisions

RECIPE = Recipe(min_features=8, amax_history_len=2)
LARGEST = (448.0, 448.0, 57344.0)
FIRST = (448.0, 4.0, 1.0)  # amaxes that are assumed at first
CPU = torch.device("cpu")


class Net(nn.Module):
    """Two linears, one of which is used twice."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(16, 32), nn.Linear(32, 32, bias=False)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 16, generator=generator) * (step + 1) for step in range(count)]


class Oracle(torch.autograd.Function):
    """A linear with given scales in float64, which keeps the amaxes it sees."""

    @staticmethod
    def rounded(x: Tensor, scale: float, kind: int) -> Tensor:
        dtype = torch.float8_e5m2 if kind == 2 else torch.float8_e4m3fn
        return (x / scale).clamp(-LARGEST[kind], LARGEST[kind]).to(dtype).double() * scale

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: list[float], seen: list[float]) -> Tensor:
        for kind, tensor in enumerate((x, weight)):
            seen[kind] = max(seen[kind], tensor.abs().max().item())
        ctx.scales, ctx.seen = scales, seen
        x, weight = Oracle.rounded(x, scales[0], 0), Oracle.rounded(weight, scales[1], 1)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        ctx.seen[2] = max(ctx.seen[2], gradient.abs().max().item())
        x, weight = ctx.saved_tensors
        gradient = Oracle.rounded(gradient, ctx.scales[2], 2)
        return gradient @ weight, gradient.t() @ x, None, None


def oracle(data: list[Tensor], accumulate: int = 1) -> tuple[list[float], Net, dict[str, list[list[float]]]]:
    """Losses, the trained module, and the scales of each step."""
    net = Net().double()
    histories: dict[str, list[list[float]]] = {"first": [], "twice": []}
    losses, used = [], {name: [] for name in histories}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in range(0, len(data), accumulate):
        seen = {name: [0.0, 0.0, 0.0] for name in histories}
        scales = {}
        for name, history in histories.items():
            window = history[-2:]
            largest = [max(row[k] for row in window) if window else FIRST[k] for k in range(3)]
            scales[name] = [amax / limit for amax, limit in zip(largest, LARGEST)]
            used[name].append(scales[name])
        for batch in data[start : start + accumulate]:

            def linear(name: str, x: Tensor) -> Tensor:
                module = getattr(net, name)
                y = Oracle.apply(x, module.weight, scales[name], seen[name])  # noqa: B023
                return y if module.bias is None else y + module.bias

            x = torch.tanh(linear("first", batch.double()))
            loss = linear("twice", torch.tanh(linear("twice", x))).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        for name, history in histories.items():
            history.append(seen[name])
    return losses, net, used


def trained(
    net: Net, data: list[Tensor], accumulate: int = 1, executors: Any = ("eager",), transforms: Any = ()
) -> tuple[list[float], dict[str, list[Tensor]], nn.Module]:
    low = LowPrecisionLinears(RECIPE)
    step = lts.compile(net, list(executors), transforms=[low, *transforms])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: low.delayed.update())
    losses, used = [], {"first": [], "twice": []}
    for start in range(0, len(data), accumulate):
        for batch in data[start : start + accumulate]:
            loss = step(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
        for name, scales in used.items():
            scales.append(low.delayed.scales(low.delayed.rows([name], CPU))[0])
        optimizer.step()
        optimizer.zero_grad()
    return losses, used, step


def assert_equals_the_oracle(net: Net, found: tuple, data: list[Tensor], accumulate: int = 1) -> None:
    losses, used, step = found
    expected, other, scales = oracle(data, accumulate)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)
    for name, values in scales.items():
        torch.testing.assert_close(torch.stack(used[name]).double(), torch.tensor(values).double(), rtol=1e-4, atol=0.0)
    for (name, mine), right in zip(net.named_parameters(), other.parameters()):
        assert (mine.double() - right).norm() < 1e-4 * right.norm(), name
    (record,) = lts.explain(step).to_dict()["steps"].values()
    assert record["graphs"] == 1  # scales are not constants


def test_training_equals_the_oracle() -> None:
    net = Net()
    assert_equals_the_oracle(net, trained(net, batches()), batches())


def test_accumulated_gradients_are_one_step_of_the_history() -> None:
    net = Net()
    assert_equals_the_oracle(net, trained(net, batches(6), accumulate=3), batches(6), accumulate=3)


@pytest.mark.parametrize("way", ["torch.utils.checkpoint", "ActivationCheckpointing"])
def test_what_is_computed_again_is_observed_once(way: str) -> None:
    net = Net(checkpointed=way == "torch.utils.checkpoint")
    transforms = [] if net.checkpointed else [lts.ActivationCheckpointing("block", ["first", "twice"])]
    found = trained(net, batches(), transforms=transforms)  # the amaxes of a step are noted once, whatever is repeated
    assert_equals_the_oracle(net, found, batches())
    (record,) = lts.explain(found[2]).to_dict()["steps"].values()
    assert record["computed_again"] > 0


def test_names_are_those_of_the_parameters_everywhere() -> None:
    first, second = (nn.Linear(16, 16) for _ in range(2))
    low = LowPrecisionLinears(RECIPE)

    def both(x: Tensor) -> Tensor:
        return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)

    lts.compile(both, ["eager"], transforms=[low])(torch.ones(4, 16))
    lts.compile(lambda x: second(first(x)), ["eager"], transforms=[low])(torch.ones(4, 16))
    assert low.delayed.state_dict().keys() == {"first", "second"}


def test_the_backwards_of_several_forwards_may_come_later() -> None:
    low, net = LowPrecisionLinears(RECIPE), Net()
    step = lts.compile(net, ["eager"], transforms=[low])
    losses = [step(batch).square().mean() for batch in batches(3)]
    low.delayed.update()  # as the step of another optimizer would
    for loss in losses:
        loss.backward()
    found = low.delayed._observed.clone()
    assert found[:, :2].count_nonzero() == 0 and (found[:, 2] > 0).all()
    expected = torch.zeros(2)
    for batch in batches(3):
        low = LowPrecisionLinears(RECIPE)
        lts.compile(net, ["eager"], transforms=[low])(batch).square().mean().backward()
        expected = expected.maximum(low.delayed._observed[:, 2])
    torch.testing.assert_close(found[:, 2], expected)


def test_under_inductor() -> None:
    """One program, from its cache too, with scales that change."""
    net = Net()
    found = trained(net, batches(3), executors=["inductor"])
    assert_equals_the_oracle(net, found, batches(3))


def test_without_gradients_scales_come_from_the_tensor_itself() -> None:
    low, net = LowPrecisionLinears(RECIPE), Net()
    plain = LowPrecisionLinears(Recipe(min_features=8))
    x = batches(1)[0]
    step = lts.compile(net, ["eager"], transforms=[low])
    with torch.no_grad():
        found = step(x)
        expected = lts.compile(net, ["eager"], transforms=[plain])(x)
    assert torch.equal(found, expected)
    assert not low.delayed.state_dict()
    frozen = copy.deepcopy(net).requires_grad_(False)
    assert not lts.compile(frozen, ["eager"], transforms=[low])(x).requires_grad


def test_only_what_has_a_gradient_observes_one() -> None:
    net = Net()
    net.first.requires_grad_(False)
    low = LowPrecisionLinears(RECIPE)
    step = lts.compile(net, ["eager"], transforms=[low])
    step(batches(1)[0]).sum().backward()
    assert net.first.weight.grad is None
    low.delayed.update()
    history = {name: state[0] for name, state in low.delayed.state_dict().items()}
    assert (history["first"] > 0).tolist() == [True, True, False]
    assert (history["twice"] > 0).tolist() == [True, True, True]


def test_linears_of_a_branch_are_left_alone() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.net(x), lambda x: x + 1.0, (x,))

    step = lts.compile(Branch(), ["eager"], transforms=[LowPrecisionLinears(RECIPE)])
    with torch.no_grad():
        step(torch.ones(4, 16))
    (decision,) = decisions(step).values()
    assert "does not reach inside" in decision["reason"]


# ----------------------------------------------------------------------------------------------------------- the state


def observed(delayed: DelayedScales, name: str, values: list[float]) -> None:
    rows = delayed.rows([name], CPU)
    delayed.observe(rows, torch.tensor([values]), slice(0, 3))
    delayed.update()


def scales_of(delayed: DelayedScales, name: str) -> list[float]:
    return (delayed.scales(delayed.rows([name], CPU))[0] * torch.tensor(LARGEST)).tolist()


def test_history() -> None:
    delayed = DelayedScales(RECIPE)
    assert scales_of(delayed, "a") == list(FIRST)
    observed(delayed, "a", [2.0, 3.0, 4.0])
    assert scales_of(delayed, "a") == [2.0, 3.0, 4.0]
    observed(delayed, "a", [1.0, 8.0, 0.0])  # no gradient: its history stays
    assert scales_of(delayed, "a") == [2.0, 8.0, 4.0]
    observed(delayed, "a", [1.0, float("inf"), float("nan")])  # nor do these say anything
    assert scales_of(delayed, "a") == [1.0, 8.0, 4.0]
    delayed.update()  # nothing was computed
    assert scales_of(delayed, "a") == [1.0, 8.0, 4.0]
    observed(delayed, "b", [5.0, 5.0, 5.0])
    assert scales_of(delayed, "a") == [1.0, 8.0, 4.0] and scales_of(delayed, "b") == [5.0, 5.0, 5.0]


def test_powers_of_two() -> None:
    delayed = DelayedScales(Recipe(amax_history_len=1, power_of_two_scales=True))
    observed(delayed, "a", [3.0, 3.0, 3.0])
    found = delayed.scales(delayed.rows(["a"], CPU))
    assert (found.log2() % 1 == 0).all() and (found * torch.tensor(LARGEST) >= 3.0).all()


@pytest.mark.parametrize("length, expected", [(1, 1.0), (2, 4.0), (5, 4.0)])
def test_state_moves_to_another_length(length: int, expected: float) -> None:
    delayed = DelayedScales(RECIPE)
    for value in (9.0, 4.0, 1.0):
        observed(delayed, "a", [value] * 3)
    state = delayed.state_dict()
    assert state["a"].shape == (2, 3)
    before, after = (DelayedScales(Recipe(amax_history_len=length)) for _ in range(2))
    before.load_state_dict(state)  # the linear is met later
    assert scales_of(before, "a") == [expected] * 3
    observed(after, "a", [7.0] * 3)
    observed(after, "b", [7.0] * 3)
    after.load_state_dict(state)
    assert scales_of(after, "a") == [expected] * 3
    assert scales_of(after, "b") == list(FIRST)  # the state does not know it
    with pytest.raises(ValueError, match="instead of an amax history of \\[steps, 3\\] numbers"):
        after.load_state_dict({"a": torch.ones(3)})


def test_a_loop_that_never_updates_is_told() -> None:
    delayed = DelayedScales(RECIPE)
    rows = delayed.rows(["a"], CPU)
    with pytest.warns(lts.CompileWarning, match="must call `update\\(\\)`"):
        for _ in range(1000):
            delayed.scales(rows)
