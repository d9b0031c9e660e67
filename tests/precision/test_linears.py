"""The pass over whole programs, and what it reports."""

import copy
from typing import Any

import pytest
import torch
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.differentiate import Differentiation
from lightning_thunder_strategy.precision import linears
from lightning_thunder_strategy.precision.linear import scaled_linear
from lightning_thunder_strategy.precision.linears import LowPrecisionLinears
from lightning_thunder_strategy.precision.recipe import RECIPES, Recipe

SMALL = Recipe(min_features=16)


class Net(nn.Module):
    """Linears of several kinds."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32, bias=False))
        self.free = nn.Parameter(torch.randn(32, 32) / 6)
        self.narrow = nn.Linear(32, 8)
        self.wide = nn.Linear(8, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))
        x = torch.nn.functional.linear(x, self.free)
        return self.lm_head(x + self.wide(self.narrow(x)))


class Reference(Net):
    """The same, with the low-precision linears written out."""

    def __init__(self, recipe: Recipe, native: bool) -> None:
        super().__init__()
        self.recipe, self.native = recipe, native

    def low(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return scaled_linear(x, weight, bias, **self.recipe.arguments(), native=self.native, dtype=x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, second = self.body
        x = x + self.low(nn.functional.gelu(self.low(x, first.weight, first.bias)), second.weight, None)
        x = self.low(x, self.free, None)
        return self.lm_head(x + self.wide(self.narrow(x)))


def results(module: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def compiled(module: nn.Module, recipe: Any = SMALL, executors: Any = ("eager",), **options: Any) -> nn.Module:
    return lts.compile(module, list(executors), transforms=[LowPrecisionLinears(recipe, **options)])


def decisions(module: nn.Module) -> dict[str, dict]:
    (step,) = lts.explain(module).to_dict()["steps"].values()
    return {item["subject"]: item for item in step["decisions"]}


@pytest.mark.parametrize(
    "name, checkpointed", [("fp8", False), ("fp8", True), ("fp8-block", True), ("mxfp6-e2m3", False)]
)
def test_same_values_as_written_out(name: str, checkpointed: bool) -> None:
    recipe = Recipe(**{**vars(RECIPES[name]), "min_features": 16})
    module = Net(checkpointed)
    low = compiled(module, recipe)
    x = torch.randn(5, 7, 32)
    found = results(module, low, x)
    native = decisions(low)["body.0"]["choice"].endswith("native")
    written = Reference(recipe, native)
    for a, b in zip(found, results(written, written, x)):
        torch.testing.assert_close(a, b)
    plain = results(module, module, x)
    assert not torch.allclose(found[0], plain[0], rtol=1e-3, atol=1e-3)  # it did compute otherwise


def test_under_inductor() -> None:
    module = Net()
    x = torch.randn(5, 7, 32)
    found = results(module, compiled(module, executors=["inductor"]), x)
    expected = results(module, compiled(module), x)
    for a, b in zip(found, expected):
        assert (a - b).norm() <= 1e-2 * b.norm()  # an amax may differ in its last bit


def test_every_linear_is_listed() -> None:
    module = Net()
    low = compiled(module)
    low(torch.randn(3, 32))
    found = decisions(low)
    assert list(found) == ["body.0", "body.2", "free", "narrow", "wide", "lm_head"]
    assert all(found[name]["choice"].startswith("fp8") for name in ("body.0", "free"))
    assert found["body.0"]["shape"] == "32 to 48 features"
    assert found["narrow"]["choice"] == found["lm_head"]["choice"] == "left alone"
    assert "min_features=16" in found["narrow"]["reason"]
    assert "skip='*lm_head'" in found["lm_head"]["reason"]
    assert "body.*, 32 to 48 features" not in str(lts.explain(low))  # different shapes are lines of their own
    assert "lm_head, 32 to 64 features: left alone" in str(lts.explain(low))


def test_names_may_have_other_characters_than_identifiers() -> None:
    module = nn.Sequential(nn.ModuleDict({"a-b": nn.Linear(16, 16)}))
    low = lts.compile(lambda x: module[0]["a-b"](x), ["eager"], transforms=[LowPrecisionLinears(SMALL, ["*a-b"])])
    low(torch.randn(3, 16))
    (only,) = decisions(low).values()
    assert only["reason"] == "its name is in skip='*a-b'"


def test_linears_in_checkpointed_regions_are_listed() -> None:
    module = Net(checkpointed=True)
    low = compiled(module, skip=["body.2", "fre?"])
    low(torch.randn(3, 32).requires_grad_())
    found = decisions(low)
    assert found["body.0"]["choice"] != "left alone"
    assert found["body.2"]["reason"] == "its name is in skip='body.2'"
    assert found["lm_head"]["choice"] != "left alone"


def test_the_module_stays_as_it_is() -> None:
    module = Net()
    before = copy.deepcopy(module)
    low = compiled(module)
    low(torch.randn(3, 32)).sum().backward()
    assert isinstance(low.body[0], nn.Linear)
    assert [type(m) for m in module.modules()] == [type(m) for m in before.modules()]
    assert list(module.state_dict()) == list(before.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before.parameters()))
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_autocast_decides_the_type_of_the_result(name: str) -> None:
    module = nn.Linear(128, 128)
    low = compiled(module, name)
    with torch.autocast("cpu", torch.bfloat16):
        y = low(torch.randn(4, 128))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_float64_and_inference() -> None:
    low = compiled(nn.Linear(16, 16).double())
    x = torch.randn(4, 16, dtype=torch.float64)
    assert torch.equal(low(x), torch.nn.functional.linear(x, low.weight, low.bias))
    (only,) = decisions(low).values()
    assert only["reason"] == "it computes in float64"
    low = compiled(nn.Linear(128, 128), "fp8")
    with torch.inference_mode():
        y = low(torch.randn(4, 128))
    assert not y.requires_grad
    (only,) = decisions(low).values()
    assert only["choice"].startswith("fp8")


def test_changing_numbers_of_tokens() -> None:
    module = Net()
    low = compiled(module)
    written = Reference(SMALL, decisions_native(low))
    for tokens in (16, 7, 33):
        x = torch.randn(tokens, 32)
        for a, b in zip(results(module, low, x), results(written, written, x)):
            torch.testing.assert_close(a, b)
    (step,) = lts.explain(low).to_dict()["steps"].values()
    assert step["graphs"] <= 3


def decisions_native(low: nn.Module) -> bool:
    low(torch.randn(2, 32))
    return decisions(low)["body.0"]["choice"].endswith("native")


def test_adapters_stay_in_the_base_precision_and_are_trained() -> None:
    config = Config(block_size=8, padded_vocab_size=32, n_layer=1, n_head=2, n_embd=32, intermediate_size=64,
                    mlp_class_name="LLaMAMLP", lora_r=4, lora_alpha=8, lora_query=True, lora_value=True,
                    lora_projection=True)  # fmt: skip
    torch.manual_seed(0)
    module = GPT(config)
    mark_only_lora_as_trainable(module)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # LitGPT's zeros would give lora_A no gradient
    plain = copy.deepcopy(module)
    tokens = torch.arange(8)[None]
    low = compiled(module)
    for model in (low, plain):
        model(tokens).square().mean().backward()
    found = decisions(low)
    low_names = {name for name, item in found.items() if item["choice"].startswith("fp8")}
    block = "transformer.h.0"
    assert low_names == {f"{block}.{n}.linear" for n in ("attn.qkv", "attn.proj", "mlp.fc_1", "mlp.fc_2", "mlp.proj")}
    assert all("too small" in found[n]["reason"] for n in found if "lora" in n)
    for (name, mine), other in zip(module.named_parameters(), plain.parameters()):
        assert (mine.grad is None) == (other.grad is None) == ("lora" not in name), name
        if mine.grad is not None:
            assert 1e-4 < (mine.grad - other.grad).norm() / other.grad.norm() < 0.2, name


def test_emulation_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    linears._announced.clear()
    compiled(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), "nvfp4")(torch.randn(4, 128))
    compiled(nn.Linear(128, 128), "nvfp4")(torch.randn(4, 128))
    said = [str(w.message) for w in recwarn if "emulated" in str(w.message)]
    assert len(said) == 1
    assert "precision 'nvfp4' is emulated on cpu" in said[0]


def test_a_program_that_falls_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(128, 128)
    low = compiled(module, "fp8")

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Differentiation, "compile", fail)
    with pytest.warns(lts.CompileWarning, match="runs eagerly"):
        low(torch.randn(4, 128))
    (only,) = decisions(low).values()
    assert only["choice"] == "left alone" and "eagerly" in only["reason"]


@pytest.mark.parametrize("options", [{"precision": "fp9"}, {"precision": "fp8", "skip": "*lm_head"}])
def test_refused_options(options: dict) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        LowPrecisionLinears(**options)
