"""Checks of low precision on two ranks."""

import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder_fabric
from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.precision import LowPrecisionLinears
from lightning_thunder_strategy.precision.recipe import RECIPES
from tests.distributed.models import Regression, vectors
from tests.distributed.training import PATIENCE, Result, Watch, thunder, trainer

EVERY = {name: lts.Recipe(**{**vars(recipe), "min_features": 1}) for name, recipe in RECIPES.items()}


class Net(Regression):
    """Rows that two ranks cannot share evenly, and a layer of one row: nothing is left for the second rank."""

    def __init__(self, checkpointed: bool = False) -> None:
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 32, bias=False), nn.Tanh()))
        self.one = nn.Linear(32, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net, x, use_reentrant=False) if self.checkpointed else self.net(x)
        return self.one(x)


def same_batches() -> DataLoader:
    """The same for every rank: then both take the same scales for activations as one process does."""
    return DataLoader(vectors(), batch_size=8)


def fit(kind: str, module: Any, precision: Any, base: str = "32-true", **options: Any) -> Result:
    result = Result(module, None)
    plugin = lts.ThunderPrecision(precision, base)
    result.trainer = trainer(
        thunder(kind, **options), plugins=[plugin], max_epochs=1, limit_val_batches=0, callbacks=[Watch(result)]
    )
    torch.manual_seed(3)
    result.trainer.fit(module, same_batches())
    return result


def alone(module: Any, precision: Any) -> Result:
    """One process, compiled, in a plain loop."""
    result = Result(module, None)
    step = lts.compile(module.loss, ["eager"], transforms=[LowPrecisionLinears(precision)])
    optimizer = module.configure_optimizers()
    for batch in same_batches():
        loss = step(batch)
        loss.backward()
        result.losses.append(loss.detach())
        result.gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return result


def _equal(found: Result, expected: Result, what: str) -> None:
    torch.testing.assert_close(found.losses, expected.losses, msg=lambda text: f"{what}, losses: {text}")
    for index, (mine, other) in enumerate(zip(found.gradients, expected.gradients)):
        for name in other:
            torch.testing.assert_close(mine[name], other[name], msg=lambda t, n=name: f"{what} {index}, {n}: {t}")  # noqa: B023


def _decisions(x: Any) -> dict[str, str]:
    (step,) = lts.explain(x).to_dict()["steps"].values()
    return {item["subject"]: item["choice"] for item in step["decisions"]}


def _gathers(result: Result) -> dict[str, list[str]]:
    """Element types of the gathers in the final forward and backward."""
    found = {}
    for trace in lts.traces(result.trainer)[-1]:
        if trace.stage in ("final forward", "final backward"):
            lines = [line for line in trace.python().splitlines() if "all_gather_into_tensor.default(" in line]
            found[trace.stage] = [line.split("# ")[1].split("[")[0] for line in lines]
    return found


def check_training_equals_one_process() -> None:
    expected = alone(Net(), EVERY["fp8"])
    for kind in ("ddp", "zero2", "zero3"):
        _equal(fit(kind, Net(), EVERY["fp8"]), expected, kind)


def check_scales_of_blocks_equal_one_process() -> None:
    _equal(fit("zero3", Net(), EVERY["fp8-block"]), alone(Net(), EVERY["fp8-block"]), "fp8-block")


def check_checkpointed_regions_equal_one_process() -> None:
    found = fit("zero3", Net(checkpointed=True), EVERY["fp8"])
    _equal(found, alone(Net(), EVERY["fp8"]), "checkpointed")
    assert all("gathered as e4m3" in choice for choice in _decisions(found.trainer).values())


def check_weights_are_cast_before_they_are_gathered() -> None:
    for kind in ("zero2", "zero3"):
        result = fit(kind, Net(), EVERY["fp8"])
        assert set(_decisions(result.trainer).values()) == {"fp8, emulated, weight gathered as e4m3"}
        gathers = _gathers(result)
        # weights as bytes, biases as they are
        assert sorted(gathers["final forward"]) == ["f32", "f32", "u8", "u8", "u8"], gathers
        # the first layer's input needs no gradient
        assert gathers["final backward"] == (["u8", "u8"] if kind == "zero3" else []), gathers
        counts = lts.explain(result.trainer).to_dict()["steps"]["training_step"]["collectives"]
        reduced = [item for item in counts["forward"] if item["op"] == "all_reduce"]
        assert [(item["count"], item["bytes"]) for item in reduced] == [(1, 12)], counts  # three scales at once


def check_a_weight_that_something_else_uses_is_gathered_whole() -> None:
    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.one.weight.square().sum()

    found = fit("zero3", Tied(), EVERY["fp8"])
    _equal(found, alone(Tied(), EVERY["fp8"]), "tied")
    choices = _decisions(found.trainer)
    assert choices["one"] == "fp8, emulated" and "gathered" in choices["net.0"]


def check_validation_without_gradients() -> None:
    module = Net()
    plain = copy.deepcopy(module)
    strategy, plugin = thunder("zero3"), lts.ThunderPrecision(EVERY["fp8"], "32-true")
    made = trainer(strategy, plugins=[plugin])
    found = made.validate(module, same_batches(), verbose=False)[0]["val"]
    (traces,) = lts.traces(made)
    final = next(trace for trace in traces if trace.stage == "final forward").python()
    assert final.count("all_gather_into_tensor.default(") == 5
    step = lts.compile(plain.loss, ["eager"], transforms=[LowPrecisionLinears(EVERY["fp8"])])
    with torch.no_grad():
        expected = torch.stack([step(batch) for batch in same_batches()]).mean()
    assert abs(found - expected.item()) < 1e-6


def check_fabric() -> None:
    strategy = thunder_fabric.ThunderFSDPStrategy(executors=["eager"], timeout=PATIENCE)
    plugin = thunder_fabric.ThunderPrecision(EVERY["fp8"], "32-true")
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
    fabric.launch()
    module = Net()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    expected = alone(Net(), EVERY["fp8"])
    for batch, gradients in zip(same_batches(), expected.gradients):
        fabric.backward(model.loss(batch))
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), gradients[name])
        optimizer.step()
        optimizer.zero_grad()
    assert all("gathered as e4m3" in choice for choice in _decisions(model).values())


class Wide(Regression):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 67), nn.Tanh(), nn.Linear(67, 1)))


def check_weights_in_few_bits_equal_one_process() -> None:
    for storage in ("int4", "nvfp4"):
        transform = lts.QuantizeWeights(storage, min_features=64)  # type: ignore[arg-type]
        expected = Result(Wide(), None)
        transform.module(expected.module)
        assert [item.name for item in transform.stored if not item.reason] == ["net.2"]
        optimizer = expected.module.configure_optimizers()
        for batch in same_batches():
            loss = expected.module.loss(batch)
            loss.backward()
            expected.losses.append(loss.detach())
            expected.gradients.append({name: p.grad.clone() for name, p in expected.module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        for kind in ("ddp", "zero2", "zero3"):
            found = Result(Wide(), None)
            strategy = thunder(kind, transforms=[lts.QuantizeWeights(storage)])  # type: ignore[arg-type]
            found.trainer = trainer(strategy, max_epochs=1, limit_val_batches=0, callbacks=[Watch(found)])
            found.trainer.fit(found.module, same_batches())
            _equal(found, expected, f"{storage}, {kind}")
            codes = found.module.net[2].weight_codes
            assert torch.equal(codes, expected.module.net[2].weight_codes)
            (step,) = lts.explain(found.trainer).to_dict()["steps"].values()
            sent = sum(item["bytes"] for stage in step["collectives"].values() for item in stage)
            assert sent < 4 * codes.numel(), "weights in few bits are never sent"
