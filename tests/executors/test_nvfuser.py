"""nvFuser: what it takes, the arithmetic it is given (computed by a stand-in), and on a GPU what it computes."""

import copy
import re
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.report import CompileWarning
from lightning_thunder_strategy.executors import NvfuserExecutor, SdpaExecutor, nvfuser
from tests.compiler.executors import Running
from tests.executors import nvfuser_standin
from tests.executors.reference import check, claims, compiled_with, laid_out
from tests.opinfo import sweep

aten = torch.ops.aten


class OnCpu(NvfuserExecutor):
    """Gives fusions to the stand-in."""

    device_type: ClassVar[str] = "cpu"

    def unavailable(self):
        return None

    def version(self):
        return "0"

    def package(self):
        return nvfuser_standin


def fusions(function):
    """What ``function`` returns, and the fusions that were made meanwhile."""
    nvfuser_standin.FusionDefinition.made.clear()
    result = function()
    return result, list(nvfuser_standin.FusionDefinition.made)


# --------------------------------------------------------------------------------------------- operations and layouts

FUNCTIONS = {
    "pointwise": lambda x: (x * 2 + 1).sin() / (x.abs() + 1) - x,
    "activations": lambda x: F.silu(x) + F.gelu(x) * F.gelu(x, approximate="tanh") + torch.sigmoid(x) * x.tanh(),
    "powers": lambda x: x**2 + x.abs().sqrt() + (x.abs() + 1).rsqrt() + (x.abs() + 1) ** 1.5 + x.abs().log1p(),
    "clamped": lambda x: x.clamp(-0.5, 0.5) * x.relu() + F.leaky_relu(x, 0.1) + torch.where(x > 0, x, x * x),
    "compared": lambda x: (x > 0).to(x.dtype) * x + (x <= 0.1).to(x.dtype) * x.exp(),
    "sums": lambda x: x.sum(0, keepdim=True) * x + x.mean(-1, keepdim=True) - x.square().sum(),
    "softmax": lambda x: x.softmax(-1) * x + (x * 2).log_softmax(0),
    "amax": lambda x: (x - x.amax(-1, keepdim=True)) * x.amin(0),
    "layer norm": lambda x: F.layer_norm(x * 2, x.shape[-1:]) + x,
    "rms norm": lambda x: F.rms_norm(x * 2, x.shape[-1:], eps=1e-5) + x,
    "variance": lambda x: x.var(-1, keepdim=True) * x + (x * 3).std(0),
    "views": lambda x: (x.transpose(0, 1) * 2).unsqueeze(0).expand(2, -1, -1).sum(0).permute(1, 0) + x,
    "slices": lambda x: torch.cat([-x[:, 1:] * 2, x[:, :1] + 1], dim=1) * x,
    "types": lambda x: (x.double().mul(2).float() + 1).to(x.dtype) * x,
    "reshapes": lambda x: (x.reshape(-1) * 2).view(x.shape).exp().flatten() + 1,
}


OPERATORS = (
    *("add", "sub", "mul", "div", "pow", "exp", "log", "sin", "cos", "tanh", "sigmoid", "rsqrt", "sqrt", "abs", "neg"),
    *("erf", "floor", "round", "sign", "where", "clamp", "maximum", "minimum", "sum", "mean", "amax", "amin", "var"),
    *("var_mean", "softmax", "log_softmax", "nn.functional.silu", "nn.functional.gelu", "nn.functional.layer_norm"),
    *("nn.functional.rms_norm", "nn.functional.softplus", "permute", "cat", "narrow", "expand", "squeeze", "unsqueeze"),
)


class Block(nn.Module):
    """LitGPT's RMSNorm and SwiGLU, written out as there."""

    def __init__(self, width=64, hidden=128):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.fc_1, self.fc_2 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        dtype = x.dtype
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype) * self.weight
        return x + self.proj(F.silu(self.fc_1(normed)) * self.fc_2(normed))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_eager_in_float64(name):
    def run():
        for dtype, layout in ((torch.float64, "sliced"), (torch.bfloat16, "transposed")):
            check(FUNCTIONS[name], [laid_out((4, 6), dtype, layout)], OnCpu())

    _, made = fusions(run)
    assert len(made) >= 4 and all(fusion.runs >= 1 for fusion in made)


def test_symbolic_sizes_make_one_fusion_for_all_sizes():
    def function(x, w):
        y = F.rms_norm(x, x.shape[-1:], w) * x.shape[0]
        return y[1:] + x.mean(0, keepdim=True).expand(x.shape[0] - 1, -1)

    def run():
        compiled = None
        for size in (5, 9, 4):
            inputs = [laid_out((size, 6), torch.float64, "dense"), laid_out((6,), torch.float64, "dense")]
            compiled = check(function, inputs, OnCpu(), compiled=compiled, dynamic=True)
        return compiled

    compiled, made = fusions(run)
    assert len(lts.traces(compiled)) == 1 and made and all(fusion.runs == 4 for fusion in made)  # one run to compile
    assert not any(static for fusion in made for static in fusion.static)


@pytest.mark.parametrize("shape", [(1, 6), (4, 1), (1, 1), (6,), ()])
def test_sizes_of_1_and_numbers(shape):
    def function(x):
        y = (x * 2 + 1).exp()
        return y * x.sum() + y.mean(-1, keepdim=True) if x.dim() else y * 3

    _, made = fusions(lambda: check(function, [laid_out(shape, torch.float64, "dense")], OnCpu()))
    assert made


def test_a_tensor_without_elements_is_left_to_eager():
    x = torch.randn(0, 4, requires_grad=True)
    compiled = check(lambda x: (x * 2 + 1).exp() + 1, [x], OnCpu())
    assert {reason for _, reason in claims(compiled, "nvfuser")} == {"it has a tensor without elements"}


def test_results_have_the_strides_of_eager_and_memory_of_their_own():
    def function(x):
        y = (x.t() * 2).exp()
        return y, y.t(), x.clone(), x[1:], y + 1, y[:, 0], y.reshape(-1).view(3, 2, 4), x.expand(2, 4, 6), x.t() + x.t()

    x = torch.randn(4, 6)
    (compiled, results), made = fusions(lambda: _called(function, x))
    expected = function(x)
    assert len(made) == 1 and len(made[0].outputs) == 4
    for mine, theirs in zip(results, expected):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    results[2].zero_()  # no other result and no input is in its memory
    assert torch.equal(x, compiled(x)[2])


def test_a_region_of_views_of_its_inputs_is_no_fusion():
    def function(x):
        return x.split(2, dim=1)[1].transpose(0, 1), x[0]

    region = fx.symbolic_trace(lambda x: (aten.permute.default(aten.slice.Tensor(x, 1, 2, 4), [1, 0]), x))
    x = torch.randn(4, 4)
    call, made = fusions(lambda: OnCpu().fuse(region, [x]))
    assert not made and torch.equal(call([x])[0], function(x)[0]) and call([x])[1] is x
    (_, results), made = fusions(lambda: _called(function, x))
    assert not made and torch.equal(results[0], function(x)[0])


def _called(function, *inputs):
    compiled = compiled_with(function, OnCpu())
    return compiled, compiled(*inputs)


def test_a_result_that_lies_in_an_inputs_memory_is_copied():
    """nvFuser may give back an input for an operation that changes nothing, as the stand-in does."""

    def function(x):
        return x**1, x * 2 + 1

    x = torch.randn(4)
    (_, results), made = fusions(lambda: _called(function, x))
    assert "set" in made[0].ops.calls
    results[0].zero_()
    assert x.abs().min() > 0


# ----------------------------------------------------------------------------------------------------- what is declined


def reasons(function, *inputs, executor=None):
    """Operation to the reason why nvFuser's executor declines it."""
    compiled = lts.compile(function, executors=[executor or OnCpu(), "eager"])
    compiled(*inputs)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    return {c["operation"]: c["reason"] for c in step["claims"] if c["executor"] == "nvfuser" and not c["accepted"]}


def test_what_is_declined_is_declined_with_the_reason():
    x = torch.randn(4, 4)
    assert reasons(lambda x: (x @ x).exp() + 1, x) == {"aten.mm.default": "nvFuser has nothing for aten.mm.default"}
    assert "it draws random numbers" in reasons(lambda x: torch.rand_like(x) * 2 + 1, x).values()
    assert "uint8" in str(reasons(lambda x: x * 2 + 1, torch.ones(4, dtype=torch.uint8)))
    assert "steps of 1" in reasons(lambda x: (x * 2)[::2] + 1, x)["aten.slice.Tensor"]
    assert "correction=0.5" in str(reasons(lambda x: torch.var_mean(x, correction=0.5), x))
    assert "aten.cumsum.default" in reasons(lambda x: x.cumsum(0) * 2 + 1, x)


def test_a_region_of_one_operation_is_left_to_the_next_executor():
    x = torch.randn(4, 4)
    found = reasons(lambda x: (x * 2).t() @ x, x)
    assert found["aten.mul.Tensor"] == "a region with 1 operations is not worth a kernel of nvFuser's"
    assert reasons(lambda x: (x * 2).t() @ x, x, executor=OnCpu(fewest_operations=1)).keys() == {"aten.mm.default"}


def test_the_executor_itself_takes_nothing_on_a_cpu():
    x = torch.randn(4)

    class Anywhere(NvfuserExecutor):
        def unavailable(self):
            return None

    assert set(reasons(lambda x: x * 2 + 1, x, executor=Anywhere()).values()) == {
        "nvFuser runs on cuda, and this is on cpu"
    }


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_a_number_of_operations_that_is_not_allowed(number):
    with pytest.raises(ValueError, match=r"NvfuserExecutor.fewest_operations=.* is not allowed"):
        NvfuserExecutor(fewest_operations=number)


# --------------------------------------------------------------------------------------------------------- availability


def test_why_it_cannot_run(monkeypatch):
    executor = NvfuserExecutor()
    monkeypatch.setattr(nvfuser, "_installed", lambda: False)
    monkeypatch.setattr(nvfuser, "_distribution", lambda: None)
    assert executor.unavailable() == "The package 'nvfuser_direct' is not installed."
    assert executor.version() is None and executor.install_command().startswith("pip install nvfuser-cu130-torch210")
    monkeypatch.setattr(nvfuser, "_installed", lambda: True)
    monkeypatch.setattr(nvfuser, "_distribution", lambda: "nvfuser-cu130-torch210 0.2.36")
    monkeypatch.setattr(nvfuser, "gpu_problem", lambda capability: "The GPU is too old.")
    assert executor.unavailable() == "The GPU is too old." and executor.version() == "0.2.36"
    monkeypatch.setattr(nvfuser, "gpu_problem", lambda capability: None)
    monkeypatch.setattr(nvfuser, "import_problem", lambda name: "Importing 'nvfuser_direct' fails: undefined symbol.")
    assert executor.unavailable() == (
        "Importing 'nvfuser_direct' fails: undefined symbol. nvfuser-cu130-torch210 0.2.36 may be built for another "
        f"torch than this, {torch.__version__}."
    )
    monkeypatch.setattr(nvfuser, "import_problem", lambda name: None)
    assert executor.unavailable() is None


def test_a_failure_of_nvfuser_at_compile_time_is_the_next_executors(monkeypatch):
    def failing(self, *args, **kwargs):
        raise RuntimeError("no schedule\nmore")

    monkeypatch.setattr(nvfuser_standin.FusionDefinition, "execute", failing)
    compiled = lts.compile(lambda x: x * 2 + 1, executors=[OnCpu(), "eager"])
    x = torch.randn(4)
    with pytest.warns(CompileWarning, match="nvfuser could not compile .*: RuntimeError: no schedule"):
        assert torch.equal(compiled(x), x * 2 + 1)


# ----------------------------------------------------------------------------------------------------------- mixed sets


class Rest(Running):
    name = "rest"


def test_in_a_mixed_set_the_trace_names_the_executor_of_each_line():
    torch.manual_seed(0)
    block = Block(16, 32)

    def function(x):
        y = block(x).unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return x + y.transpose(1, 2).flatten(2) * 2

    compiled = compiled_with(function, SdpaExecutor(backend="math"), OnCpu(), Rest())
    x = torch.randn(2, 4, 16, requires_grad=True)
    result = compiled(x)
    torch.testing.assert_close(result, function(x), rtol=1e-5, atol=1e-5)
    result.sum().backward()
    text = str([trace for trace in lts.traces(compiled)[0] if trace.stage == "final forward"][-1])
    lines = [line for line in text.splitlines() if "torch.ops." in line]
    assert lines and all(re.search(r", (nvfuser|rest|sdpa)$", line) for line in lines)
    named = {name: [line for line in lines if line.endswith(name)] for name in ("nvfuser", "rest", "sdpa")}
    assert all("mm.default" not in line for line in named["nvfuser"]) and any("mm" in line for line in named["rest"])
    regions = [found for found in re.split(r"\ndef ", text) if found.startswith("nvfuser")]
    assert "rsqrt" in regions[0] and "mul_1" in regions[0]
    assert "silu" in regions[1] and "mul_2" in regions[1]  # with the product that stands behind another matrix product


# ----------------------------------------------------------------------------------------------------------------- GPU

_REASON = NvfuserExecutor().unavailable()
gpu = pytest.mark.skipif(_REASON is not None, reason=f"nvFuser cannot run: {_REASON}")


@gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_gpu_values_and_gradients_are_those_of_eager_in_float64(name):
    for dtype, layout in ((torch.float32, "sliced"), (torch.bfloat16, "transposed")):
        check(FUNCTIONS[name], [laid_out((16, 32), dtype, layout, device="cuda")], "nvfuser")


@gpu
@pytest.mark.parametrize("layout", ["dense", "expanded", "sliced"])
@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (5, 7)])
def test_on_a_gpu_sizes_of_1_and_strides(shape, layout):
    check(FUNCTIONS["sums"], [laid_out(shape, torch.float32, layout, device="cuda")], "nvfuser")


@gpu
def test_on_a_gpu_symbolic_sizes_are_compiled_once():
    compiled = None
    for size in (6, 10, 33):
        value = laid_out((size, 16), torch.float32, "dense", device="cuda")
        compiled = check(FUNCTIONS["layer norm"], [value], "nvfuser", compiled=compiled, dynamic=True)
    assert len(lts.traces(compiled)) == 1


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_norm_and_a_gated_mlp(dtype):
    torch.manual_seed(0)
    net = Block().to("cuda", dtype)
    wide = copy.deepcopy(net).double()
    x = torch.randn(2, 8, 64, dtype=torch.float64, device="cuda")
    results = []
    for module, value in ((compiled_with(net, "nvfuser"), x.to(dtype)), (wide, x.to(dtype).double())):
        result = module(value)
        result.square().mean().backward()
        results.append(result)
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (5e-2, 5e-2)
    torch.testing.assert_close(results[0].double(), results[1], rtol=rtol, atol=atol)
    for mine, theirs in zip(net.parameters(), wide.parameters()):
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=rtol, atol=atol * scale)


@gpu
def test_on_a_gpu_a_mixed_set_names_the_executor_of_each_line():
    torch.manual_seed(0)
    blocks = Block().cuda()

    def function(x):
        y = blocks(x).unflatten(-1, (4, 16)).transpose(1, 2)
        y = y.bfloat16()  # FlashAttention takes no float32
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True).float()
        return blocks(x + y.transpose(1, 2).flatten(2)).cumsum(1)

    compiled = compiled_with(function, "sdpa", "nvfuser", "inductor")
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    result = compiled(x)
    torch.testing.assert_close(result, function(x), rtol=2e-2, atol=2e-2)
    result.sum().backward()
    text = "\n".join(str(trace) for trace in lts.traces(compiled)[0][-2:])
    assert ", nvfuser" in text and ", inductor" in text
    assert any(accepted for accepted, _ in claims(compiled, "sdpa"))
    assert not compiled.record.all_fallbacks()


@gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_on_a_gpu_torchs_own_samples(name):
    for op in sweep.operators([name]):
        outcome = sweep.check(op, torch.bfloat16, [NvfuserExecutor(fewest_operations=1)], device="cuda")
        assert outcome.result in ("equal", "skipped"), outcome
