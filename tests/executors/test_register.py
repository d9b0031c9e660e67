"""Operators and executors of users', under a name: values, gradients, reasons, checkpoints, and what is refused."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import registration, registry
from tests.compiler.executors import Pointwise, opaque_sine
from tests.compiler.parity import assert_same


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    monkeypatch.setattr(registration, "_implementations", {})


def compiled_with(function, *executors, **config):
    return lts.compile(function, executors=list(executors), config=lts.CompileConfig(fullgraph=True, **config))


def step(compiled):
    (found,) = lts.explain(compiled).to_dict()["steps"].values()
    return found


def claims(compiled):
    return {(c["operation"], c["accepted"], c["reason"], c["count"]) for c in step(compiled)["claims"]}


def register_cube(**options):
    """``F.silu`` becomes ``s * x ** 3``, so that its use shows."""

    def cube_backward(gradient, x, scale):
        return gradient * 3 * scale * x * x

    @lts.executors.register(
        "cube", replaces=F.silu, fake=lambda x, s=2.0: torch.empty_like(x), backward=cube_backward, **options
    )
    def cube(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return scale * x**3

    return cube


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_opaque_function_stands_for_an_operation_with_its_backward(dynamic):
    register_cube()
    compiled = compiled_with(lambda x: F.silu(x.sin()) * 2, "cube", dynamic=dynamic)
    for size in (3, 5):
        x = torch.randn(size, 4, requires_grad=True, dtype=torch.float64)
        result = compiled(x)
        expected = 2 * x.sin() ** 3 * 2
        assert_same(result, expected, rtol=1e-12, atol=1e-12)
        assert_same(
            *(torch.autograd.grad(value.square().sum(), x)[0] for value in (result, expected)), rtol=1e-12, atol=1e-12
        )
    assert ("silu", True, "", 1) in claims(compiled)
    assert re.search(r"torch\.ops\.lts_cube\.cube\.default\(sin\)  # f64\[.*\], cube", str(lts.traces(compiled)[0][-2]))


def test_a_module_passes_arguments_that_have_their_default_value():
    register_cube()
    x = torch.randn(3)
    assert_same(compiled_with(nn.SiLU(), "cube")(x), 2 * x**3)
    edits = compiled_with(lambda x: F.silu(x.clone(), inplace=True), "cube")
    assert_same(edits(x), F.silu(x))
    ((_, accepted, reason, _),) = claims(edits)
    assert not accepted and "'cube' cannot take these arguments: got an unexpected keyword argument" in reason


def test_when_says_why_not_in_the_report_and_sees_shapes():
    register_cube(when=lambda x, scale=2.0: None if x.dim() == 2 else f"it has {x.dim()} dimensions")
    compiled = compiled_with(lambda x: F.silu(x).sum() + F.silu(x.sum()), "cube")
    x = torch.randn(2, 3)
    assert_same(compiled(x), (2 * x**3).sum() + F.silu(x.sum()), rtol=1e-6, atol=1e-6)
    assert claims(compiled) == {("silu", True, "", 1), ("silu", False, "it has 0 dimensions", 1)}
    assert "cube declined silu (1 time): it has 0 dimensions" in str(lts.explain(compiled))


def test_a_function_of_plain_torch_operations_is_traced_through_and_may_fuse():
    @lts.executors.register("plain", replaces=F.rms_norm)
    def rms(x, shape, weight=None, eps=None):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    x, w = (torch.randn(*shape, requires_grad=True, dtype=torch.float64) for shape in ((5, 8), (8,)))
    function = lambda x, w: F.rms_norm(x, (8,), w, 1e-5)  # noqa: E731
    compiled = compiled_with(function, "plain", Pointwise())
    results = [call(x, w) for call in (compiled, function)]
    assert_same(*results, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(result.square().sum(), [x, w]) for result in results)):
        assert_same(a, b, rtol=1e-12, atol=1e-12)
    assert step(compiled)["executors"]["pointwise"] > 0
    assert ("rms_norm", True, "", 1) in claims(compiled)


@pytest.mark.parametrize("call", [torch.sin, torch.Tensor.sin, lambda x: opaque_sine(x) / 10])
def test_one_operation_has_many_names(call):
    @lts.executors.register("mine", replaces=(torch.sin, opaque_sine))
    def hyperbolic(x):
        return torch.sinh(x)

    x = torch.randn(3)
    expected = torch.sinh(x) / 10 if call not in (torch.sin, torch.Tensor.sin) else torch.sinh(x)
    assert_same(compiled_with(lambda x: call(x), "mine")(x), expected)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def inner(self, x):
        return checkpoint(lambda y: F.silu(self.b(y)), F.silu(x), use_reentrant=False)

    def forward(self, x):
        return checkpoint(lambda y: self.inner(F.silu(self.a(y))), x, use_reentrant=False) + F.silu(x)


def test_operations_inside_activation_checkpoints_are_claimed_too():
    register_cube()
    torch.manual_seed(0)
    net = Checkpointed().double()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, "cube")
    x = torch.randn(3, 4, dtype=torch.float64)
    real = F.silu
    for module, call in ((net, compiled), (other, other)):
        try:
            F.silu = real if module is net else lambda x: 2 * x**3
            call(x).square().sum().backward()
        finally:
            F.silu = real
    for (name, mine), theirs in zip(net.named_parameters(), other.named_parameters()):
        assert_same(mine.grad, theirs[1].grad, name, rtol=1e-12, atol=1e-12)
    assert claims(compiled) == {("silu", True, "", 4)}
    assert step(compiled)["executors"]["cube"] >= 8  # the four in the forward, and in the backward


def test_without_its_claims_a_checkpointed_program_is_the_one_that_was_read(monkeypatch):
    """The graph that runs if compiling fails shares nothing that claims edit."""
    register_cube()
    from lightning_thunder_strategy.compiler import differentiate

    def failing(*args, **kwargs):
        raise RuntimeError("not today")

    monkeypatch.setattr(differentiate, "dispatch", failing)
    net = Checkpointed()
    x = torch.randn(3, 4)
    compiled = compiled_with(net, "cube")
    with pytest.warns(lts.CompileWarning, match="one graph could not be compiled"):
        assert_same(compiled(x), net(x), rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- failures


def fails_at_once(x):
    raise NotImplementedError("no kernel\nfor this")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no backward kernel")


FAULTS = {
    "it raises": (fails_at_once, "no kernel"),
    "its backward raises": (FailsBackward.apply, "no backward kernel"),
    "another shape": (lambda x: x.sin().sum(0), r"mine gives f32\[4\] where the operation gives f32\[3, 4\]"),
    "another type": (lambda x: x.sin().double(), r"mine gives f64\[3, 4\] where the operation gives f32\[3, 4\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_where_an_executor_fails_the_next_one_is_asked_and_one_warning_says_so(fault):
    function, message = FAULTS[fault]
    lts.executors.register("mine", replaces=torch.sin)(lambda x: function(x))

    @lts.executors.register("next", replaces=torch.sin)
    def hyperbolic(x):
        return torch.sinh(x)

    def program(x):
        return x.sin() + x.cos().sin()

    compiled = compiled_with(program, "mine", "next")
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.warns(lts.CompileWarning) as caught:
        assert_same(compiled(x), torch.sinh(x) + torch.sinh(x.cos()))
    (warning,) = [item for item in caught if issubclass(item.category, lts.CompileWarning)]
    assert re.match(
        rf"mine could not compile sin \(2 times\) in the acquired program, which the next executor runs: .*{message}",
        str(warning.message),
    )
    (fallback,) = lts.explain(compiled).to_dict()["fallbacks"]
    assert (fallback["executor"], fallback["region"]) == ("mine", "sin (2 times) in the acquired program")
    with pytest.raises(Exception, match=message):
        compiled_with(program, "mine", "next", on_error="raise")(x)


# ------------------------------------------------------------------------------------------------------------ classes


def test_a_class_is_known_by_its_name():
    @lts.executors.register
    class Mine(Pointwise):
        """Takes what is pointwise."""

        name = "mine"

    (info,) = [info for info in lts.executors.list() if info.name == "mine"]
    assert info.available and info.claims == "Takes what is pointwise."
    x = torch.randn(3)
    compiled = compiled_with(lambda x: x.sin() * 2, "mine")
    assert_same(compiled(x), x.sin() * 2)
    assert step(compiled)["executors"] == {"mine": 2}


class Nameless(Pointwise):
    name = ""


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("mine",), {}, "needs replaces="),
        (("inductor",), {"replaces": torch.sin}, "the name of an executor of ours"),
        (("eager",), {"replaces": torch.sin}, "the name of an executor of ours"),
        ((Nameless,), {}, "has no name"),
        ((3,), {"replaces": torch.sin}, "give a name, or a subclass"),
        (("mine",), {"replaces": step}, "a torch.library operator"),
        (("mine",), {"replaces": "sin"}, "a torch.library operator"),
        (("mine",), {"replaces": torch.sin, "backward": step}, "needs fake= too"),
    ],
)
def test_what_cannot_be_registered_says_why(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        lts.executors.register(*arguments, **options)(lambda x: x)
