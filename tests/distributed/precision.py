"""Checks of low precision on two ranks."""

import copy
import dataclasses
import tempfile
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder_fabric
from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.precision import LowPrecisionLinears
from lightning_thunder_strategy.precision.linear import scaled_linear
from lightning_thunder_strategy.precision.recipe import RECIPES
from tests.distributed.models import Base, Regression, vectors
from tests.distributed.training import PATIENCE, Result, Watch, loader, thunder, trainer

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


def fit(kind: str, module: Any, precision: Any, max_epochs: int = 1, ckpt_path: Any = None, **options: Any) -> Result:
    result = Result(module, None)
    plugin = lts.ThunderPrecision(precision, "32-true")
    result.trainer = trainer(
        thunder(kind, **options), plugins=[plugin], max_epochs=max_epochs, limit_val_batches=0,
        callbacks=[Watch(result)],
    )  # fmt: skip
    torch.manual_seed(3)
    result.trainer.fit(module, same_batches(), ckpt_path=ckpt_path)
    return result


def alone(module: Any, precision: Any) -> Result:
    """One process, compiled, in a plain loop."""
    result = Result(module, None)
    low = LowPrecisionLinears(precision)
    step = lts.compile(module.loss, ["eager"], transforms=[low])
    optimizer = module.configure_optimizers()
    for batch in same_batches():
        loss = step(batch)
        loss.backward()
        result.losses.append(loss.detach())
        result.gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if low.delayed is not None:
            low.delayed.update()
    if low.delayed is not None:
        result.metrics = low.delayed.state_dict()
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


def _histories(result: Result) -> dict[str, Tensor]:
    return result.trainer.precision_plugin.state_dict()["amax_histories"]


def check_delayed_scales_equal_one_process() -> None:
    expected = alone(Net(), EVERY["fp8-delayed"])
    for kind, checkpointed in (("ddp", False), ("zero3", True)):
        found = fit(kind, Net(checkpointed), EVERY["fp8-delayed"])
        _equal(found, expected, f"{kind}, checkpointed={checkpointed}")
        assert _histories(found).keys() == expected.metrics.keys() == {"net.0", "net.2", "one"}
        for name, history in expected.metrics.items():
            assert (history[:3] > 0).all()
            torch.testing.assert_close(_histories(found)[name], history, msg=lambda t, n=name: f"{kind} {n}: {t}")  # noqa: B023
    gathers = _gathers(found)
    assert sorted(gathers["final forward"]) == ["f32", "f32", "u8", "u8", "u8"], gathers
    counts = lts.explain(found.trainer).to_dict()["steps"]["training_step"]["collectives"]
    assert not [item for item in counts["forward"] if item["op"] == "all_reduce"], "scales are known"


def check_delayed_scales_are_those_of_all_ranks() -> None:
    """Each rank has other batches; a gradient of a mean over half of them is twice as large."""
    result = Result(Net(), None)
    plugin = lts.ThunderPrecision(EVERY["fp8-delayed"], "32-true")
    result.trainer = trainer(
        thunder("zero3"), plugins=[plugin], max_epochs=1, limit_val_batches=0, accumulate_grad_batches=3
    )
    result.trainer.fit(result.module, loader(vectors(), 4))
    whole_batch = DataLoader(vectors(), batch_size=24)
    low = LowPrecisionLinears(EVERY["fp8-delayed"])
    module = Net()
    for batch in whole_batch:
        lts.compile(module.loss, ["eager"], transforms=[low])(batch).backward()
    low.delayed.update()
    found, expected = _histories(result), low.delayed.state_dict()
    for name, history in found.items():
        mine = [torch.empty_like(history) for _ in range(2)]
        torch.distributed.all_gather(mine, history)
        assert torch.equal(mine[0], mine[1]) and not history[1:].any()
        torch.testing.assert_close(history[0, :2], expected[name][0, :2])
        torch.testing.assert_close(history[0, 2], 2 * expected[name][0, 2], rtol=1e-4, atol=0.0)


def check_delayed_scaling_resumes_sharded() -> None:
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    expected = fit("zero3", Net(), EVERY["fp8-delayed"], max_epochs=2)
    path = f"{folder[0]}/state"
    first = fit("zero3", Net(), EVERY["fp8-delayed"], state_dict_type="sharded")
    first.trainer.save_checkpoint(path)
    found = fit("zero3", Net(), EVERY["fp8-delayed"], max_epochs=2, ckpt_path=path, state_dict_type="sharded")
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    for name, history in _histories(expected).items():
        assert torch.equal(_histories(found)[name], history), name


class Branches(Base):
    """A small net for each precision that has no state, and a loss that is the sum of theirs."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.nets = nn.ModuleDict({
            name: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 64)) for name in _stateless()
        })  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return sum(F.mse_loss(net(x).mean(1), y) for net in self.nets.values())

    def written_out(self, batch: Any) -> Tensor:
        """The same loss in eager PyTorch, of linears in low precision."""
        (x, y), losses = batch, []
        for recipe, net in zip(_stateless().values(), self.nets.values()):
            options: Any = {**recipe.arguments(), "native": False, "dtype": torch.float32}
            middle = torch.tanh(scaled_linear(x, net[0].weight, net[0].bias, **options))
            losses.append(F.mse_loss(scaled_linear(middle, net[2].weight, net[2].bias, **options).mean(1), y))
        return sum(losses)

    @staticmethod
    def passes() -> list[LowPrecisionLinears]:
        names = _stateless()
        return [LowPrecisionLinears(r, [f"nets.{other}" for other in names if other != n]) for n, r in names.items()]


def _stateless() -> dict[str, lts.Recipe]:
    """Without randomness, so that one run can be compared with another."""
    known = {name: recipe for name, recipe in EVERY.items() if not recipe.amax_history_len}
    return {name: dataclasses.replace(recipe, gradient_rounding="nearest") for name, recipe in known.items()}


def _branches(strategy: Any, width: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first step under a strategy, and in one process."""
    found, module = Result(Branches(width), None), Branches(width)
    found.trainer = trainer(strategy, max_steps=1, limit_val_batches=0, callbacks=[Watch(found)])
    found.trainer.fit(found.module, same_batches())
    module.written_out(next(iter(same_batches()))).backward()
    choices = {subject.split(".")[1]: choice.split(",")[0] for subject, choice in _decisions(found.trainer).items()}
    assert choices == {name: recipe.name for name, recipe in _stateless().items()}
    return found.gradients[0], {name: p.grad for name, p in module.named_parameters()}


def check_every_precision_under_fsdp_equals_one_process() -> None:
    found, expected = _branches(thunder("zero3", transforms=Branches.passes()), width=33)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


# Twice the largest difference from float32 that rounding makes in a gradient of these layers, in parts of its norm.
_ROUNDING = {"fp8": 0.2, "fp8-rowwise": 0.1, "fp8-block": 0.1, "mxfp8": 0.1, "mxfp6-e2m3": 0.12, "mxfp6-e3m2": 0.2,
             "mxfp4": 0.8, "nvfp4": 0.8}  # fmt: skip


def check_every_precision_under_tensor_parallelism_is_near_one_process() -> None:
    """Scales are each rank's own: parts of a weight, or of the sum that a product is, round in another way."""
    strategy = lts.ThunderTPStrategy(
        executors=["eager"], timeout=PATIENCE, tensor_parallel_size=2, transforms=Branches.passes(),
        plan={"nets.*.0": "colwise", "nets.*.2": "rowwise"},
    )  # fmt: skip
    found, expected = _branches(strategy, width=256)
    for name, value in expected.items():
        error, bound = (found[name] - value).norm() / value.norm(), _ROUNDING[name.split(".")[1]]
        assert error < bound, f"{name}: {error}"


def check_delayed_scaling_under_tensor_parallelism_equals_one_process() -> None:
    class Layers(Regression):
        def __init__(self) -> None:
            torch.manual_seed(2)
            super().__init__(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 1)))

    found = Result(Layers(), None)
    strategy = lts.ThunderTPStrategy(
        executors=["eager"], timeout=PATIENCE, tensor_parallel_size=2, plan={"net.0": "colwise", "net.2": "rowwise"}
    )
    plugin = lts.ThunderPrecision(EVERY["fp8-delayed"], "32-true")
    found.trainer = trainer(strategy, plugins=[plugin], max_epochs=1, limit_val_batches=0, callbacks=[Watch(found)])
    found.trainer.fit(found.module, same_batches())
    expected = alone(Layers(), EVERY["fp8-delayed"])
    _equal(found, expected, "tensor parallel")
    for name, history in expected.metrics.items():
        torch.testing.assert_close(_histories(found)[name], history, msg=lambda text, n=name: f"{n}: {text}")


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
