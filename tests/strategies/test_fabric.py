"""Fabric on one process: same values as eager Fabric, and what is compiled is what the user handed over."""

import copy
import pickle
import re
import warnings
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder
from tests.strategies.fabric_helpers import Net, batches, fabric, gradients, seeded


def train(runner: L.Fabric, make: Any = Net, apart: bool = False, steps: int = 4) -> tuple[list[Tensor], nn.Module]:
    """Losses and module after a few steps with clipping, on the same data from the same seed."""
    module = seeded(make)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    if apart:
        model = runner.setup_module(module)
        optimizer = runner.setup_optimizers(optimizer)
    else:
        model, optimizer = runner.setup(module, optimizer)
    losses = []
    torch.manual_seed(3)
    for x in batches(steps):
        loss = model(x).float().square().mean()
        runner.backward(loss)
        runner.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        losses.append(loss.detach())
        losses.extend(gradients(module).values())
        optimizer.zero_grad()
    return losses, module


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("make", [Net, WithState])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("mode", ["forward", "submodules", "off"])
def test_training_is_bit_equal_to_eager_fabric(make: Any, apart: bool, mode: str) -> None:
    expected, reference = train(fabric("auto"), make, apart)
    actual, module = train(fabric(thunder.ThunderStrategy(executors=["eager"], compile=mode)), make, apart)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precision_is_that_of_eager_fabric(precision: Any) -> None:
    expected, reference = train(fabric("auto", precision=precision))
    actual, module = train(fabric(precision=precision))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert {p.dtype for p in module.parameters()} == {p.dtype for p in reference.parameters()}


def test_inductor_trains_as_eager_does() -> None:
    expected, _ = train(fabric("auto"), steps=2)
    runner = fabric(thunder.ThunderStrategy(executors=["inductor"]))
    actual, _ = train(runner, steps=2)
    torch.testing.assert_close(actual, expected)
    assert lts.explain(runner).to_dict()["steps"]["forward"]["executors"].keys() == {"inductor"}


def test_a_scheduler_given_to_setup_drives_the_optimizer() -> None:
    module = seeded(Net)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = fabric().setup(module, optimizer, scheduler=schedule)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_module_may_be_set_up_again() -> None:
    runner, module = fabric(), seeded(Net)
    (x,) = batches(1)
    first = runner.setup(module)
    expected = first(x)
    again = runner.setup(first.module)
    assert torch.equal(again(x), expected)
    assert torch.equal(first(x), expected)


# ------------------------------------------------------------------------------------------------- what is compiled


def test_forward_and_marked_methods_are_one_program_each() -> None:
    runner, module = fabric(), seeded(Net)
    model = runner.setup(module)
    model.mark_forward_method("loss")
    (x,) = batches(1)
    model(x)
    model.loss(x, factor=2.0)
    steps = lts.explain(model).to_dict()["steps"]
    assert steps.keys() == {"forward", "loss"}
    assert all(step["graphs"] == 1 and not step["graph_breaks"] for step in steps.values())
    assert all(step["mode"] == "forward" for step in steps.values())
    assert lts.explain(runner).to_dict() == lts.explain(model).to_dict()
    assert len(lts.traces(model)) == 2


def test_a_marked_method_gives_its_own_result_each_time() -> None:
    runner, module = fabric(), seeded(Net)
    model = runner.setup(module)
    model.mark_forward_method(module.loss)
    (x,) = batches(1)
    for _ in range(2):
        assert torch.equal(model.loss(x, factor=3.0), module.loss(x, factor=3.0))
        assert torch.equal(model(x), module(x))
    assert "forward" not in vars(module)


def test_after_an_error_in_a_marked_method_the_module_is_as_before() -> None:
    module = seeded(Net)
    model = fabric().setup(module)
    model.mark_forward_method("fails")
    (x,) = batches(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the user's own error"):
            model.fails(x)
        assert "forward" not in vars(module)
    assert torch.equal(model(x), module(x))


def test_training_and_evaluation_have_a_program_each() -> None:
    module = seeded(WithState)
    model = fabric().setup(module)
    (x,) = batches(1)
    model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
    with torch.inference_mode():
        assert torch.equal(model(x), module(x))
    model.train()
    model(x).sum().backward()
    assert lts.explain(model).to_dict()["steps"]["forward"]["graphs"] == 3
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_cannot_be_one_program_runs_in_parts_and_is_reported() -> None:
    class Prints(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            print("hidden", tuple(hidden.shape))
            return self.second(hidden)

    runner, module = fabric(), seeded(Prints)
    model = runner.setup(module)
    (x,) = batches(1)
    assert torch.equal(model(x), module(x))
    step = lts.explain(model).to_dict()["steps"]["forward"]
    assert step["graphs"] == 2
    assert [item["file"] for item in step["graph_breaks"]] == [__file__]


def test_fullgraph_makes_a_break_an_error() -> None:
    class Prints(Net):
        def forward(self, x: Tensor) -> Tensor:
            print("x")
            return self.second(self.first(x))

    config = lts.CompileConfig(mode="forward", fullgraph=True)
    module = seeded(Prints)
    model = fabric(thunder.ThunderStrategy(executors=["eager"], compile=config)).setup(module)
    with pytest.raises(lts.CompileError, match=rf"forward cannot be compiled as one program: {re.escape(__file__)}"):
        model(batches(1)[0])


def test_mode_submodules_compiles_what_the_forward_calls() -> None:
    runner = fabric(thunder.ThunderStrategy(executors=["eager"], compile="submodules"))
    module = seeded(Net)
    model = runner.setup(module)
    for x in batches(3):
        assert torch.equal(model(x), module(x))
    step = lts.explain(model).to_dict()["steps"]["forward"]
    assert (step["mode"], step["graphs"]) == ("submodules", 2)


def test_mode_off_compiles_nothing() -> None:
    runner = fabric(thunder.ThunderStrategy(executors=["eager"], compile="off"))
    model = runner.setup(seeded(Net))
    model(batches(1)[0])
    step = lts.explain(model).to_dict()["steps"]["forward"]
    assert (step["mode"], step["graphs"]) == ("off", 0)
    assert runner.strategy.compile_function(len) is len


# ----------------------------------------------------------------------------------------------- compiled functions


def test_a_compiled_function_is_one_program_with_the_model_inside() -> None:
    runner, module = fabric(), seeded(Net)
    model = runner.setup(module)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    compiled = runner.strategy.compile_function(objective)
    for x in batches(3):
        loss = compiled(model, x)
        runner.backward(loss)
        actual = gradients(module)
        module.zero_grad()
        expected = objective(module, x)
        expected.backward()
        assert torch.equal(loss, expected)
        torch.testing.assert_close(actual, gradients(module), rtol=0, atol=0)
        module.zero_grad()
    name = objective.__qualname__
    assert lts.explain(compiled).to_dict()["steps"][name]["graphs"] == 1
    assert lts.explain(compiled).to_dict()["steps"][name]["graph_breaks"] == []
    inputs = lts.traces(compiled)[0][0].inputs
    assert {"first.weight", "second.bias"} <= {item.origin for item in inputs}
    assert name in lts.explain(runner).to_dict()["steps"]


def test_functions_of_the_same_name_are_both_reported() -> None:
    runner = fabric()
    model = runner.setup(seeded(Net))
    first, second = (runner.strategy.compile_function(lambda model, x, k=k: model(x).sum() * k) for k in (1, 2))
    (x,) = batches(1)
    assert torch.equal(first(model, x) * 2, second(model, x))
    steps = lts.explain(runner).to_dict()["steps"]
    assert sum("<lambda>" in name for name in steps) == 2
    assert len(lts.traces(runner)) == 2


# ---------------------------------------------------------------------------------------------------- several models


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6))


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))


def train_gan(runner: L.Fabric) -> tuple[list[Tensor], list[nn.Module]]:
    modules = [seeded(Generator, 1), seeded(Discriminator, 2)]
    generator, optimizer_g = runner.setup(modules[0], torch.optim.Adam(modules[0].parameters(), lr=0.02))
    discriminator, optimizer_d = runner.setup(modules[1], torch.optim.Adam(modules[1].parameters(), lr=0.02))
    losses = []
    for x in batches(3):
        fake = generator(x[:, :3])
        loss = nn.functional.softplus(-discriminator(fake)).mean()
        runner.backward(loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        optimizer_d.zero_grad()
        real = discriminator(x)
        loss_d = (nn.functional.softplus(-real) + nn.functional.softplus(discriminator(fake.detach()))).mean()
        runner.backward(loss_d)
        optimizer_d.step()
        optimizer_d.zero_grad()
        losses += [loss.detach(), loss_d.detach()]
    return losses, modules


def test_two_models_train_as_eager_and_are_reported_apart() -> None:
    expected, references = train_gan(fabric("auto"))
    runner = fabric()
    actual, modules = train_gan(runner)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for module, reference in zip(modules, references):
        torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert lts.explain(runner).to_dict()["steps"].keys() == {"Generator[0].forward", "Discriminator[1].forward"}
    assert lts.explain(runner).to_dict()["parameters"]["total_bytes"] == 4 * sum(
        parameter.numel() for module in modules for parameter in module.parameters()
    )


def test_one_of_two_models_explained_alone_has_plain_keys() -> None:
    runner = fabric()
    first, second = runner.setup(seeded(Net)), runner.setup(seeded(Net))
    first(batches(1)[0])
    lts.explain(runner)
    assert lts.explain(first).to_dict()["steps"].keys() == {"forward"}
    assert lts.explain(second).to_dict()["steps"] == {}


# -------------------------------------------------------------------------------------------------- LightningModules


class Lightning(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Net)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()


class KeepsMetrics:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def log_metrics(self, metrics: dict, step: Any = None) -> None:
        self.seen.append({name: float(value) for name, value in metrics.items()})


def test_steps_of_a_lightning_module_are_compiled_and_log() -> None:
    loggers = {"eager": KeepsMetrics(), "thunder": KeepsMetrics()}
    losses = {}
    for kind, logger in loggers.items():
        runner = fabric("auto" if kind == "eager" else None, loggers=[logger])
        module = Lightning()
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        losses[kind] = []
        for index, x in enumerate(batches(4)):
            loss = model.training_step(x, index)
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
        with torch.no_grad():
            losses[kind].append(model.validation_step(x, 0).item())
        assert "forward" not in vars(module)
    assert losses["thunder"] == losses["eager"]
    assert loggers["thunder"].seen == loggers["eager"].seen
    steps = lts.explain(model).to_dict()["steps"]
    assert steps.keys() == {"training_step", "validation_step"}
    assert all(step["graphs"] == 1 and not step["graph_breaks"] for step in steps.values())
    assert lts.explain(module).to_dict()["steps"] == steps


# ------------------------------------------------------------------------------------------- other ways to compile


def test_a_model_compiled_by_torch_before_setup_is_compiled_by_us() -> None:
    runner = fabric()
    module = seeded(Net)
    model = runner.setup(torch.compile(module, backend="eager"))
    for x in batches(2):
        assert torch.equal(model(x), module(x))
    assert lts.explain(model).to_dict()["steps"]["forward"]["graphs"] == 1
    assert model.state_dict().keys() == module.state_dict().keys()


def test_torch_compile_around_the_result_is_harmless() -> None:
    runner = fabric()
    module = seeded(Net)
    model = runner.setup(module)
    outer = torch.compile(model, backend="eager")
    for x in batches(2):
        assert torch.equal(outer(x), module(x))
    assert lts.explain(runner).to_dict()["steps"]["forward"]["graphs"] == 1


def test_a_model_compiled_by_lts_is_refused() -> None:
    compiled = lts.compile(seeded(Net), executors=["eager"])
    with pytest.raises(TypeError, match=r"Net is already compiled with lts\.compile.*pass the plain module"):
        fabric().setup(compiled)


# -------------------------------------------------------------------------------------------------------- the module


def test_the_module_stays_the_users() -> None:
    runner, module = fabric(), seeded(Net)
    names = [name for name, _ in module.named_parameters()]
    model = runner.setup(module)
    model(batches(1)[0])
    assert model.module is module
    assert type(module) is Net
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.module.named_parameters()] == names
    assert [name for name, _ in model._forward_module.named_parameters()] == names
    assert repr(model._forward_module) == repr(module)
    assert vars(module).keys() == vars(Net()).keys()


def test_attributes_set_on_the_result_reach_the_module_and_its_program() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    module = seeded(Scaled)
    model = fabric().setup(module)
    (x,) = batches(1)
    before = model(x)
    model.scale = 6.0
    assert module.scale == 6.0
    assert torch.equal(model(x), before * 3)


def test_submodules_replaced_after_setup_are_used() -> None:
    module = seeded(Net)
    model = fabric().setup(module)
    (x,) = batches(1)
    model(x)
    module.second = nn.Linear(5, 1)
    assert torch.equal(model(x), module(x))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("part", ["module", "_forward_module"])
def test_copies_are_plain_modules_with_weights_of_their_own(copier: Any, part: str) -> None:
    module = seeded(Net)
    model = fabric().setup(module)
    (x,) = batches(1)
    expected = model(x)
    other = copier(getattr(model, part))
    assert type(other) is Net
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        module.first.weight.zero_()
    assert torch.equal(other(x), expected)
    assert not torch.equal(model(x), expected)


def test_forward_hooks_fire_on_compiled_calls() -> None:
    module = seeded(Net)
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append("root"))
    module.second.register_forward_hook(lambda module, args, output: seen.append("second"))
    model = fabric().setup(module)
    for x in batches(2):
        model(x)
    assert seen == ["second", "root"] * 2


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_save_and_load_restore_everything(tmp_path: Any, state_dict_type: Any) -> None:
    def run(path: Any, save_at: int, resume: bool) -> tuple[nn.Module, Any]:
        runner = fabric(thunder.ThunderStrategy(executors=["eager"], state_dict_type=state_dict_type))
        module = seeded(Net, seed=5 if resume else 0)
        model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
        state = {"model": model, "optimizer": optimizer, "step": 0, "note": "x"}
        if resume:
            rest = runner.load(path, state)
            assert rest == {}
            assert state["step"] == save_at
        for step, x in enumerate(batches(6)):
            if step < state["step"]:
                continue
            runner.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if not resume and step + 1 == save_at:
                runner.save(path, {**state, "step": step + 1})
        return module, optimizer

    path = tmp_path / "checkpoint"
    module, optimizer = run(path, 3, resume=False)
    assert path.is_dir() == (state_dict_type == "sharded")
    resumed, resumed_optimizer = run(path, 3, resume=True)
    torch.testing.assert_close(resumed.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert str(resumed_optimizer.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_checkpoints_with_a_gradient_scaler_hold_no_state_of_it_as_with_eager_fabric(
    tmp_path: Any, state_dict_type: Any
) -> None:
    def run(strategy: Any) -> tuple[L.Fabric, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        runner = fabric(strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        module = seeded(Net)
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
        runner.backward(model(batches(1)[0]).square().mean())
        optimizer.step()
        return runner, {"model": model, "optimizer": optimizer, "step": 1}

    kinds = {
        "ours": lambda: thunder.ThunderStrategy(executors=["eager"], state_dict_type=state_dict_type),
        "eager": lambda: "auto",
    }
    for name, make in kinds.items():
        runner, state = run(make())
        runner.save(tmp_path / name, state)
    for name, reader in [("ours", "ours"), ("eager", "ours"), *([("ours", "eager")] * (state_dict_type == "full"))]:
        runner, state = run(kinds[reader]())
        expected = {key: value.clone() for key, value in state["model"].state_dict().items()}
        for parameter in state["model"].parameters():
            parameter.data.zero_()
        assert runner.load(tmp_path / name, state) == {}, "no entry besides those that were saved"
        torch.testing.assert_close(state["model"].state_dict(), expected, rtol=0, atol=0)


def test_a_filter_chooses_what_is_saved(tmp_path: Any) -> None:
    runner = fabric()
    model = runner.setup(seeded(Net))
    runner.save(tmp_path / "file", {"model": model, "n": 1}, filter={"model": lambda name, value: "first" in name})
    saved = torch.load(tmp_path / "file", weights_only=True)
    assert saved["model"].keys() == {"first.weight", "first.bias"}
    with pytest.raises(RuntimeError, match="Missing key"):
        runner.load(tmp_path / "file", {"model": model})
    with pytest.raises(KeyError, match="'optimizer'"):
        runner.load(tmp_path / "file", {"optimizer": 1})
    assert runner.load(tmp_path / "file", {"model": model}, strict=False) == {"n": 1}


def test_load_raw_reads_a_plain_state_dict(tmp_path: Any) -> None:
    source = seeded(Net, 4)
    torch.save(source.state_dict(), tmp_path / "plain.pth")
    runner = fabric()
    module = seeded(Net)
    model = runner.setup(module)
    runner.load_raw(tmp_path / "plain.pth", model)
    torch.testing.assert_close(module.state_dict(), source.state_dict(), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executors": "inductor"}, ["executors='inductor'", '"auto" or a list']),
        ({"executors": ["nvfuzer"]}, ["'nvfuzer'", "inductor", "eager"]),
        ({"executors": ["eager", "inductor"]}, ["'eager'", "must be last"]),
        ({"compile": "step"}, ["compile='step'", "'forward', 'submodules', 'off'"]),
        ({"compile": lts.CompileConfig()}, ["compile.mode='step'", "'forward'"]),
        ({"state_dict_type": "half"}, ["state_dict_type='half'", "'full', 'sharded'"]),
        ({"transforms": [len]}, ["transforms", "Transform"]),
    ],
)
@pytest.mark.parametrize("name", ["ThunderStrategy", "ThunderDDPStrategy", "ThunderFSDPStrategy"])
def test_bad_values_are_named(name: str, options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        getattr(thunder, name)(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_sharding_is_named() -> None:
    with pytest.raises(ValueError, match="sharding='zero4' is not allowed: choose one of 'zero1', 'zero2', 'zero3'"):
        thunder.ThunderFSDPStrategy(sharding="zero4")


def test_more_devices_than_one_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="devices=2 is not allowed with ThunderStrategy.*thunder_ddp"):
        L.Fabric(accelerator="cpu", devices=2, strategy=thunder.ThunderStrategy())


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("thunder", thunder.ThunderStrategy),
        ("thunder_ddp", thunder.ThunderDDPStrategy),
        ("thunder_fsdp", thunder.ThunderFSDPStrategy),
    ],
)
def test_registered_names_select_our_strategies(name: str, cls: type) -> None:
    assert type(L.Fabric(accelerator="cpu", devices=1, strategy=name).strategy) is cls
    assert STRATEGY_REGISTRY[name]["description"]


def test_timeout_and_backend_reach_the_process_group() -> None:
    strategy = thunder.ThunderFSDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=7))
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=7)


def test_a_strategy_of_the_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid strategy"):
        L.Fabric(accelerator="cpu", devices=1, strategy=lts.ThunderStrategy())


def test_nothing_is_warned_in_an_ordinary_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lts.CompileWarning)
        train(fabric())
