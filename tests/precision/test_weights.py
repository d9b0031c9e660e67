"""Linears whose weights are stored in few bits, under every way in."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from torch import nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.fabric import ThunderStrategy as FabricStrategy
from lightning_thunder_strategy.precision.storage import STORAGES, decode, encode
from lightning_thunder_strategy.precision.weights import StoredLinear

ROWS = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 3))


def with_rounded_weights(net: nn.Sequential, name: str) -> nn.Sequential:
    """The same network computed by plain linears with the values that the bits stand for."""
    plain, storage = copy.deepcopy(net), STORAGES[name]
    for index in (0, 2):
        weight = decode(encode(net[index].weight, storage), storage, torch.float32)
        plain[index].weight = nn.Parameter(weight)
    return plain


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def strategy(name: str, executor: str = "eager", **options: Any) -> lts.ThunderStrategy:
    return lts.ThunderStrategy(executors=[executor], transforms=[lts.QuantizeWeights(name)], **options)


@pytest.mark.parametrize("name", STORAGES)
def test_values_and_gradients_are_those_of_rounded_weights(name: str) -> None:
    net = network()
    other = with_rounded_weights(net, name)
    step = lts.compile(net, executors=["eager"], transforms=[lts.QuantizeWeights(name)])
    x, y = ROWS.clone().requires_grad_(), ROWS.clone().requires_grad_()
    step(x).square().sum().backward()
    other(y).square().sum().backward()
    torch.testing.assert_close(step(x), other(y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    for ours, theirs in ((net[0].bias, other[0].bias), (net[3].weight, other[3].weight)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    (found,) = lts.explain(step).to_dict()["steps"].values()
    assert found["graphs"] == 1 and found["graph_breaks"] == []


def test_the_compiled_program_holds_only_bits_until_the_backward() -> None:
    """What the forward saves for the backward does not grow by the matrices."""
    net = network()
    step = lts.compile(net, executors=["eager"], transforms=[lts.QuantizeWeights("nf4")])
    step(ROWS.clone().requires_grad_()).sum().backward()
    traces = {trace.stage: trace for trace in lts.traces(step)[0]}
    types = [item.type for item in traces["final backward"].inputs]
    assert any("u8[" in text for text in types)
    assert not any("[128, 64]" in text or "[64, 128]" in text for text in types), types


def test_under_inductor() -> None:
    net = network()
    other = with_rounded_weights(net, "nf4")
    step = lts.compile(net, executors=["inductor"], transforms=[lts.QuantizeWeights("nf4")])
    with torch.no_grad():
        torch.testing.assert_close(step(ROWS), other(ROWS), rtol=1e-5, atol=1e-5)


def test_the_module_stays_what_it_was() -> None:
    net = network()
    transform = lts.QuantizeWeights("int4", skip=["2"])
    transform.module(net)
    assert isinstance(net[0], nn.Linear) and isinstance(net[0], StoredLinear) and type(net[2]) is nn.Linear
    assert net[0].weight.shape == (128, 64) and "weight stored as int4" in repr(net[0])
    reasons = {item.name: item.reason for item in transform.stored}
    assert reasons["0"] == "" and "skip='2'" in reasons["2"] and "min_features=64" in reasons["3"]
    assert "1 weights, 0.03 MiB before, 0.00 MiB now; left alone: 2 (" in transform.summary()
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(made(ROWS), net(ROWS))
    codes = net[0].weight_codes.clone()
    net.to(torch.bfloat16)
    assert net[0].weight.dtype == torch.bfloat16 and torch.equal(net[0].weight_codes, codes)
    assert net(ROWS.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(KeyError, match="already exists"):
        net[0].weight = nn.Parameter(torch.zeros(128, 64))


def test_plain_and_stored_weights_load() -> None:
    plain, net = network(), network()
    lts.QuantizeWeights("nf4").module(net)
    wanted = net(ROWS)
    state = net.state_dict()
    assert "0.weight" not in state and {"0.weight_codes", "0.weight_scale", "0.bias"} <= state.keys()
    other = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 3))
    lts.QuantizeWeights("nf4").module(other)
    other.load_state_dict(state)
    assert torch.equal(other(ROWS), wanted)
    torch.nn.init.ones_(other[0].bias)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(ROWS), wanted)
    lts.restore_weights(other)
    assert list(other.state_dict()) == list(plain.state_dict()) and type(other[0]) is nn.Linear
    network().load_state_dict(other.state_dict())
    assert torch.equal(other(ROWS), wanted)


def test_predict_and_test_and_a_smaller_checkpoint(tmp_path: Path) -> None:
    module = Classifier()
    other = with_rounded_weights(module.net, "nf4")
    trainer = L.Trainer(strategy=strategy("nf4"), **QUIET)
    (found,) = trainer.predict(module, DataLoader(ROWS, batch_size=8))
    torch.testing.assert_close(found, other(ROWS), rtol=1e-6, atol=1e-6)
    metrics = trainer.test(module, DataLoader(ROWS, batch_size=8), verbose=False)
    assert metrics[0]["mean"] == pytest.approx(other(ROWS).mean().item(), abs=1e-6)
    torch.save(module.state_dict(), tmp_path / "small.pt")
    torch.save(Classifier().state_dict(), tmp_path / "plain.pt")
    small, plain = ((tmp_path / name).stat().st_size for name in ("small.pt", "plain.pt"))
    assert small < plain / 3
    torch.load(tmp_path / "small.pt", weights_only=True)


def test_lora_beside_stored_weights_trains_and_resumes(tmp_path: Path) -> None:
    """The base stays as it was stored; LoRA's matrices learn; a resumed run goes on as the first."""

    class Tuning(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "padded_vocab_size": 64, "block_size": 8}
            lora = {"lora_r": 4, "lora_alpha": 8, "lora_query": True, "lora_value": True, "lora_mlp": True}
            self.model = GPT(Config(**sizes, **lora))
            mark_only_lora_as_trainable(self.model)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            logits = self.model(batch)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    tokens = (torch.arange(4 * 8) % 13).view(4, 8)

    def run(epochs: int, ckpt_path: Any = None) -> tuple[Tuning, L.Trainer]:
        losses.clear()
        module = Tuning()
        trainer = L.Trainer(strategy=strategy("nf4", compile="forward"), max_epochs=epochs, **QUIET)
        trainer.fit(module, DataLoader(tokens, batch_size=4), ckpt_path=ckpt_path)
        return module, trainer

    losses: list[float] = []
    start, trainer = run(10)
    trainer.save_checkpoint(tmp_path / "ten.ckpt")
    assert losses[-1] < losses[0] * 0.9
    stored = {name for name in start.state_dict() if name.endswith("weight_codes")}
    assert any("attn.qkv" in name for name in stored) and any("mlp" in name for name in stored)
    untrained = Tuning()
    lts.QuantizeWeights("nf4").module(untrained)
    for name in stored:
        assert torch.equal(start.state_dict()[name], untrained.state_dict()[name])
    whole, _ = run(12)
    resumed, _ = run(12, tmp_path / "ten.ckpt")
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_fabric_refuses_an_optimizer_that_holds_what_is_stored() -> None:
    def fabric() -> L.Fabric:
        transforms = [lts.QuantizeWeights("int8")]
        return L.Fabric(accelerator="cpu", strategy=FabricStrategy(executors=["eager"], transforms=transforms))

    net = network()
    with pytest.raises(ValueError, match="give it only the parameters that are to be trained"):
        fabric().setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net = network()
    model, _ = fabric().setup(net, torch.optim.SGD(net[3].parameters(), lr=0.1))
    assert model(ROWS).shape == (8, 3)


def test_from_the_command_line() -> None:
    arguments = {
        "trainer": {
            **QUIET,
            "strategy": {
                "class_path": "lightning_thunder_strategy.ThunderStrategy",
                "init_args": {
                    "executors": ["eager"],
                    "transforms": [
                        {
                            "class_path": "lightning_thunder_strategy.QuantizeWeights",
                            "init_args": {"storage": "fp6", "skip": ["net.2"]},
                        }
                    ],
                },
            },
        }
    }
    cli = LightningCLI(Classifier, run=False, args=arguments, save_config_callback=None)
    cli.trainer.predict(cli.model, DataLoader(ROWS, batch_size=8))
    assert isinstance(cli.model.net[0], StoredLinear) and not isinstance(cli.model.net[2], StoredLinear)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "int3"}, "'int3' is not known"),
        ({"storage": "int8", "skip": "lm_head"}, "skip='lm_head' is not allowed"),
        ({"storage": "int8", "min_features": 0}, "min_features=0 is not allowed"),
    ],
)
def test_options_that_are_not_allowed(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lts.QuantizeWeights(**options)


def test_weights_that_cannot_be_stored_are_named() -> None:
    net = network()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="The weight of `0`: NaN or infinity"):
        lts.QuantizeWeights("int8").module(net)
    with pytest.raises(ValueError, match=r"`0` has no values yet \(meta device\)"):
        lts.QuantizeWeights("int8").module(network().to("meta"))
    tied = network()
    tied.other = nn.Linear(64, 128)
    tied.other.weight = tied[0].weight
    transform = lts.QuantizeWeights("nf4", skip=[])
    transform.module(tied)
    assert "shared with another module" in transform.summary()
    odd = nn.Sequential(nn.Linear(65, 64))
    transform.module(odd)
    assert type(odd[0]) is nn.Linear
