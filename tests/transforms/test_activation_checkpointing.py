"""Less is kept for the backward, and losses and gradients stay the same."""

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.fabric import ThunderStrategy as FabricStrategy

WIDTH = 16
POLICIES = ("none", "selective", "block")


class Layer(nn.Module):
    """A layer of a transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(attended)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, depth: int = 4, user_checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.user_checkpoint = user_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.user_checkpoint else layer(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Residual(), Residual(), Residual(), nn.Flatten())


class Step(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Model)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def seeded(make: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(*args)


def tokens(batch: int = 40) -> Tensor:
    return torch.randn(batch, 7, WIDTH, generator=torch.Generator().manual_seed(1))


def train(net: nn.Module, x: Tensor, call: Any = None) -> list[Tensor]:
    """Loss, gradients, buffers and the next random number after a step."""
    torch.manual_seed(3)
    loss = (call or net)(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters()), *net.buffers(), torch.rand(1)]


def compiled(net: nn.Module, policy: str, executor: str = "eager", **options: Any) -> nn.Module:
    config = lts.CompileConfig(fullgraph=True, on_error="raise", eager_random=True)
    return lts.compile(net, [executor], [lts.ActivationCheckpointing(policy, **options)], config)


def figures(call: nn.Module) -> dict[str, Any]:
    (step,) = lts.explain(call).to_dict()["steps"].values()
    return step


def backward_targets(call: nn.Module) -> str:
    return [trace for trace in lts.traces(call)[0] if trace.stage == "backward"][-1].python()


@pytest.mark.parametrize(("executor", "tolerance"), [("eager", 0.0), ("inductor", 1e-12)])
def test_values_stay_and_less_is_kept(executor: str, tolerance: float) -> None:
    depth = 4 if executor == "eager" else 2
    expected = train(seeded(Model, depth), tokens())
    kept, again = [], []
    for policy in POLICIES:
        net = seeded(Model, depth)
        call = compiled(net, policy, executor)
        torch.testing.assert_close(train(net, tokens(), call), expected, rtol=tolerance, atol=tolerance)
        kept.append(figures(call)["saved_bytes"])
        again.append(figures(call)["computed_again"])
    assert kept[0] > kept[1] > kept[2] > 0, kept
    assert again[0] < min(again[1:]), again


def test_a_block_keeps_only_what_goes_into_it() -> None:
    net = seeded(Model)
    call = compiled(net, "block")
    x = tokens()
    train(net, x, call)
    saved = [t for t in lts.traces(call)[0] if t.stage == "backward"][-1].inputs
    activations = [item for item in saved if item.kind == "saved"]
    assert [torch.Size(item.shape).numel() for item in activations] == [x.numel()] * 4  # ends of all layers
    assert sum(item.kind == "random state" for item in saved) == 12
    source = backward_targets(call)
    assert source.count("aten.gelu.default") == 4 and source.count("native_dropout.default") == 8
    report = str(lts.explain(call))
    assert "kept for the backward: " in report and "layers.* (4 times)" in report


def test_selective_keeps_products_and_computes_pointwise_operations_again() -> None:
    net = seeded(Model)
    call = compiled(net, "selective")
    train(net, tokens(), call)
    source = backward_targets(call)
    assert source.count("aten.gelu.default") == 4 and source.count("aten.native_layer_norm.default") == 4
    assert "aten.addmm.default(" not in source and "flash_attention_for_cpu.default(" not in source


def kept_by(policy: Any, depth: int = 4) -> tuple[nn.Module, int]:
    net = seeded(Model, depth)
    call = compiled(net, policy)
    torch.testing.assert_close(train(net, tokens(), call), train(seeded(Model, depth), tokens()), rtol=0, atol=0)
    return call, figures(call)["saved_bytes"]


def test_a_budget_takes_as_few_blocks_as_it_needs() -> None:
    (none, everything), (_, products), (_, least) = (kept_by(policy) for policy in POLICIES)
    assert figures(kept_by(everything / 2**30)[0])["decisions"] == figures(none)["decisions"] == []
    found = {}
    for budget in (
        everything - 1,
        (everything + products) // 2,
        products,
        products - 1,
        (products + least) // 2,
        least,
    ):
        call, bytes_kept = kept_by(budget / 2**30)
        assert bytes_kept <= budget
        reasons = [item["reason"] for item in figures(call)["decisions"]]
        assert all(f"{bytes_kept / 2**30:.3g} GiB are kept" in reason for reason in reasons)
        found[budget] = [sum(f"as {policy!r}" in reason for reason in reasons) for policy in ("selective", "block")]
    assert list(found.values()) == [[1, 0], [2, 0], [4, 0], [3, 1], [2, 2], [0, 4]]


def test_a_budget_that_cannot_be_kept_is_told() -> None:
    least = kept_by("block", 2)[1]
    with pytest.warns(lts.CompileWarning, match="GiB are kept for the backward even if all blocks are computed again"):
        assert kept_by((least - 1) / 2**30, 2)[1] == least


def test_a_program_for_batches_of_any_size_computes_all_blocks_again() -> None:
    """What it would keep for another batch is not known."""
    everything = kept_by("none", 2)[1]
    net = seeded(Model, 2)
    call = compiled(net, everything / 2**30)
    train(net, tokens(), call)
    net.zero_grad()
    with pytest.warns(lts.CompileWarning, match="all blocks are computed again in a program for batches of any size"):
        found = train(net, tokens(11), call)
    torch.testing.assert_close(found, train(seeded(Model, 2), tokens(11)), rtol=0, atol=0)
    reasons = [item["reason"] for item in figures(call)["decisions"]]
    assert len(reasons) == 2 and all("as 'block', because batches may have any size" in reason for reason in reasons)


def test_only_the_joint_program_can_be_partitioned_on_trial() -> None:
    class Asks(lts.Transform):
        def acquired(self, trace: lts.Trace) -> None:
            trace.would_keep()

    with pytest.raises(RuntimeError, match="'acquired' trace cannot be partitioned: call it in Transform.joint"):
        lts.compile(torch.sin, ["eager"], [Asks()])(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_are_updated_once(policy: str) -> None:
    x = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    reference, net = seeded(Convolutions), seeded(Convolutions)
    call = compiled(net, policy)
    for _ in range(2):
        expected, found = train(reference, x), train(net, x, call)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["selective", "block"])
def test_users_own_checkpoints_stay(policy: str) -> None:
    expected = train(seeded(Model), tokens())
    net = seeded(Model, 4, True)
    call = compiled(net, policy)
    torch.testing.assert_close(train(net, tokens(), call), expected, rtol=0, atol=0)
    assert backward_targets(call).count("aten.gelu.default") == 4


def test_a_layer_that_is_called_twice_is_two_blocks() -> None:
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return x

    expected = train(seeded(Twice, 2), tokens())
    net = seeded(Twice, 2)
    call = compiled(net, "block")
    torch.testing.assert_close(train(net, tokens(), call)[0], expected[0], rtol=0, atol=0)
    saved = [t for t in lts.traces(call)[0] if t.stage == "backward"][-1].inputs
    assert sum(item.kind == "saved" for item in saved) >= 3


def test_patterns_name_other_blocks() -> None:
    net = seeded(Model)
    some = compiled(net, "block", blocks=["layers.[01]"])
    train(net, tokens(), some)
    names = {item["subject"] for item in figures(some)["decisions"]}
    assert names == {"layers.0", "layers.1"}
    assert backward_targets(some).count("aten.native_dropout.default") == 4


def test_selective_takes_a_model_without_blocks_as_one() -> None:
    net = seeded(Layer)
    expected = train(seeded(Layer), tokens())
    call = compiled(net, "selective")
    torch.testing.assert_close(train(net, tokens(), call), expected, rtol=0, atol=0)
    assert [item["subject"] for item in figures(call)["decisions"]] == ["the whole program"]


def test_under_the_trainer_and_under_fabric() -> None:
    data = DataLoader(list(tokens(8)), batch_size=4)
    weights = []
    for transforms in ([], [lts.ActivationCheckpointing("block")]):
        module = Step()
        strategy = lts.ThunderStrategy(executors=["eager"], transforms=transforms)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, enable_model_summary=False, **quiet)
        torch.manual_seed(5)
        trainer.fit(module, data)
        weights.append([p.detach() for p in module.parameters()])
        step = lts.explain(trainer).to_dict()["steps"]["training_step"]
        assert {"net.layers.0", "net.layers.3"} <= {d["subject"] for d in step["decisions"]} or not transforms
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)

    expected, net = train(seeded(Model), tokens()), seeded(Model)
    strategy = FabricStrategy(executors=["eager"], transforms=[lts.ActivationCheckpointing("block")])
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    module, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.manual_seed(3)
    loss = module(tokens()).square().mean()
    fabric.backward(loss)
    found = [loss.detach(), *(p.grad for p in net.parameters())]
    torch.testing.assert_close(found, expected[:-1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "all"}, "policy='all' is not allowed: choose one of 'none', 'selective', 'block'"),
        ({"policy": 0}, "policy=0 is not allowed: .* or a positive number of GiB"),
        ({"policy": True}, "policy=True is not allowed"),
        ({"policy": float("nan")}, "policy=nan is not allowed"),
        ({"policy": "block", "blocks": "layers.*"}, r"blocks='layers.\*' is not allowed: give a list of patterns"),
        (
            {"policy": "none", "blocks": ["layers.*"]},
            "not allowed with policy='none': choose 'selective', 'block' or a number",
        ),
    ],
)
def test_refused_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lts.ActivationCheckpointing(**options)


def test_models_without_such_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="policy='block'.*blocks=\\['pattern'\\], or choose policy='selective'"):
        compiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "block")
    with pytest.raises(ValueError, match="matches blocks=\\['h.\\*'\\]: correct the patterns"):
        compiled(Model(), "block", blocks=["h.*"])
