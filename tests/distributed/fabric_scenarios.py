"""What Fabric does on several ranks under our strategies: training, gradients, programs."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric as thunder
from lightning_thunder_strategy.compiler._torch_compat import TORCH_VERSION
from tests.strategies.fabric_helpers import Net, seeded

KINDS = ("ddp", "zero2", "zero3")
EXACT = {"rtol": 1e-9, "atol": 1e-11}


class Odd(Net):
    """Rows that two ranks cannot share evenly, a parameter without dimensions, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 5)
        self.fourth = nn.Linear(5, 3)
        self.fourth.weight = self.second.weight
        self.factor = nn.Parameter(torch.tensor(0.7))

    def reset_parameters(self) -> None:
        self.factor.fill_(0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(torch.tanh(self.third(super().forward(x)))) * self.factor


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def strategy(kind: str, **options: Any) -> Any:
    """A strategy by a short name: ours, or one of Lightning's as an independent reference."""
    if kind == "eager ddp":
        return "ddp"
    if kind == "fsdp2":
        return ModelParallelStrategy(_fully_shard, data_parallel_size=2, tensor_parallel_size=1)
    options.setdefault("executors", ["eager"])
    if kind == "ddp":
        return thunder.ThunderDDPStrategy(**options)
    return thunder.ThunderFSDPStrategy(sharding=kind, **options)


def _fully_shard(module: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(module, mesh=mesh["data_parallel"])


def fabric(kind: str = "zero3", precision: Any = "32-true", **options: Any) -> L.Fabric:
    runner = L.Fabric(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy(kind, **options),
        precision=precision,
    )
    runner.launch()
    return runner


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in module.state_dict().items()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def batch(step: int, rank: int, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)
    return torch.randn(size, 6, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


def objective(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return (output if output.dtype == torch.float64 else output.float()).square().mean()


def train(
    runner: L.Fabric,
    make: Callable[[], nn.Module] = Net,
    steps: int = 3,
    apart: bool = False,
    clip: Any = None,
    loss_of: Any = objective,
) -> dict[str, Any]:
    """Losses, norms, gradients and weights of a short training; every rank has batches of its own."""
    module = seeded(make)
    if apart:
        model = runner.setup_module(module)
        optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    else:
        model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(steps):
        x = batch(step, runner.global_rank)
        loss = loss_of(model, x)
        runner.backward(loss)
        if clip is not None:
            norm = runner.clip_gradients(model, optimizer, **clip)
            result["norms"].append(norm if norm is None else whole(norm))
        result["losses"].append(loss.detach())
        result["gradients"].append(gradients(module))
        optimizer.step()
        optimizer.zero_grad()
    result["weights"] = weights(module)
    return result


def train_alone(make: Callable[[], nn.Module] = Net, steps: int = 3, clip: Any = None) -> dict[str, Any]:
    """The same training on one process, with the batches of all ranks as one."""
    world = torch.distributed.get_world_size()
    module = seeded(make)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    result: dict[str, Any] = {"norms": [], "gradients": []}
    for step in range(steps):
        x = torch.cat([batch(step, rank) for rank in range(world)])
        objective(module, x).backward()
        if clip is not None and "max_norm" in clip:
            result["norms"].append(torch.nn.utils.clip_grad_norm_(module.parameters(), **clip))
        elif clip is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip["clip_val"])
            result["norms"].append(None)
        result["gradients"].append(gradients(module))
        optimizer.step()
        optimizer.zero_grad()
    result["weights"] = weights(module)
    return result


def assert_equal(actual: dict, expected: dict, **tolerance: float) -> None:
    shared = actual.keys() & expected.keys()
    torch.testing.assert_close(
        {key: actual[key] for key in shared}, {key: expected[key] for key in shared}, **(tolerance or EXACT)
    )


# ------------------------------------------------------------------------------------------------------------ training


def check_training_equals_ddp_fsdp2_and_one_process() -> None:
    with float64():
        references = {
            "eager ddp": train(fabric("eager ddp", "64-true"), Odd),
            "fsdp2": train(fabric("fsdp2"), Net, apart=True),
            "one process": train_alone(Odd),
        }
        plain = {"one process": train_alone(Net)}
        for kind in KINDS:
            result = train(fabric(kind, "64-true"), Odd)
            assert_equal(result, references["eager ddp"])
            assert_equal(result, references["one process"])
            result = train(fabric(kind, "64-true"), Net, apart=True)
            assert_equal(result, references["fsdp2"])
            assert_equal(result, plain["one process"])


def check_inductor_trains_as_eager_does() -> None:
    expected = train(fabric("eager ddp"), Odd, steps=2)
    runner = fabric("zero3", executors=["inductor"])
    assert_equal(train(runner, Odd, steps=2), expected, rtol=1e-4, atol=1e-5)
    assert lts.explain(runner).to_dict()["steps"]["forward"]["executors"].keys() == {"inductor"}


def check_modes_give_the_same() -> None:
    with float64():
        expected = train_alone(Odd)
        for kind in ("ddp", "zero3"):
            for mode in ("submodules", "off"):
                assert_equal(train(fabric(kind, "64-true", compile=mode), Odd), expected)


def check_precision_is_that_of_ddp() -> None:
    for precision in ("bf16-true", "bf16-mixed"):
        expected = train(fabric("eager ddp", precision), Odd)
        for kind in ("ddp", "zero3"):
            result = train(fabric(kind, precision), Odd)
            assert_equal(result, expected, rtol=3e-2, atol=1e-2)
            for name, value in expected["weights"].items():
                assert result["weights"][name].dtype == value.dtype, name


def check_a_model_compiled_by_torch_before_setup() -> None:
    with float64():
        expected = train_alone(Odd)
        for kind in ("ddp", "zero3"):
            runner = fabric(kind, "64-true")
            module = seeded(Odd)
            model = runner.setup(torch.compile(module, backend="eager"))
            optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
            for step in range(3):
                runner.backward(objective(model, batch(step, runner.global_rank)))
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(weights(module), expected["weights"], **EXACT)
            assert model.state_dict().keys() == expected["weights"].keys()
            assert lts.explain(model).to_dict()["steps"]["forward"]["graphs"] == 1


def check_two_models() -> None:
    """A GAN: two models and two optimizers, and gradients that flow through both."""

    def gan(runner: L.Fabric) -> dict[str, Any]:
        generator, discriminator = seeded(lambda: nn.Linear(6, 6), 1), seeded(Net, 2)
        g, g_optimizer = runner.setup(generator, torch.optim.Adam(generator.parameters(), lr=0.02))
        d, d_optimizer = runner.setup(discriminator, torch.optim.Adam(discriminator.parameters(), lr=0.02))
        losses = []
        for step in range(3):
            x = batch(step, runner.global_rank)
            fake = g(x)
            loss = nn.functional.softplus(-d(fake)).mean()
            runner.backward(loss)
            g_optimizer.step()
            g_optimizer.zero_grad()
            d_optimizer.zero_grad()
            loss_d = nn.functional.softplus(-d(x)).mean() + nn.functional.softplus(d(fake.detach())).mean()
            runner.backward(loss_d)
            d_optimizer.step()
            d_optimizer.zero_grad()
            losses += [loss.detach(), loss_d.detach()]
        return {"losses": losses, "weights": [weights(generator), weights(discriminator)]}

    with float64():
        expected = gan(fabric("eager ddp", "64-true"))
        for kind in ("ddp", "zero3"):
            runner = fabric(kind, "64-true")
            assert_equal(gan(runner), expected)
            assert lts.explain(runner).to_dict()["steps"].keys() == {"Linear[0].forward", "Net[1].forward"}


class Lightning(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Odd()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = objective(self.net, batch)
        self.log("loss", loss)
        return loss


def check_steps_of_a_lightning_module() -> None:
    with float64():
        expected = train(fabric("eager ddp", "64-true"), Lightning, loss_of=lambda model, x: model.training_step(x, 0))
        for kind in ("ddp", "zero3"):
            runner = fabric(kind, "64-true")
            assert_equal(train(runner, Lightning, loss_of=lambda model, x: model.training_step(x, 0)), expected)
            assert lts.explain(runner).to_dict()["steps"]["training_step"]["graphs"] == 1


# ----------------------------------------------------------------------------------------------------------- gradients


def check_accumulation_equals_one_large_batch() -> None:
    with float64():
        expected = train_alone()
        for kind in ("ddp", "zero3"):
            runner = fabric(kind, "64-true")
            module = seeded(Net)
            model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
            for step in range(3):
                halves = batch(step, runner.global_rank).chunk(2)
                for index, half in enumerate(halves):
                    with runner.no_backward_sync(model, enabled=index == 0):
                        runner.backward(model(half).square().mean() / 2)
                torch.testing.assert_close(gradients(module), expected["gradients"][step], **EXACT)
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(weights(module), expected["weights"], **EXACT)


def check_clipping_equals_one_process() -> None:
    with float64():
        for clip in ({"max_norm": 0.05}, {"max_norm": 0.02, "norm_type": float("inf")}, {"clip_val": 0.003}):
            expected = train_alone(Odd, clip=clip)
            for kind in ("ddp", "zero3"):
                result = train(fabric(kind, "64-true"), Odd, clip=clip)
                assert all(type(norm) in (Tensor, type(None)) for norm in result["norms"])
                assert_equal(result, expected)


def check_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    for kind in KINDS:
        runner = fabric(kind)
        module = seeded(Net)
        model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters()))
        factor = float("nan") if runner.global_rank == 1 else 1.0
        runner.backward((model(batch(0, runner.global_rank)) * factor).mean())
        with pytest.raises(RuntimeError, match="non-finite"):
            runner.clip_gradients(model, optimizer, max_norm=1.0)
        norm = runner.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        assert norm.isnan()


def check_frozen_parameters_get_no_gradient_communication() -> None:
    for kind in KINDS:
        runner = fabric(kind, bucket_size_mb=0)
        module = seeded(Net)
        module.first.requires_grad_(False)
        model = runner.setup(module)
        runner.backward(model(batch(0, runner.global_rank)).mean())
        assert gradients(module).keys() == {"second.weight", "second.bias"}
        backward = lts.explain(model).to_dict()["steps"]["forward"]["collectives"]["backward"]
        reduced = {"ddp": "all_reduce", "zero2": "reduce_scatter_tensor", "zero3": "reduce_scatter_tensor"}[kind]
        assert [item["count"] for item in backward if item["op"] == reduced] == [2]


# ------------------------------------------------------------------------------------------------------------ programs


def check_marked_methods_and_errors() -> None:
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        module = seeded(Net)
        plain = copy.deepcopy(module)
        model = runner.setup(module)
        model.mark_forward_method("loss")
        model.mark_forward_method("fails")
        x = batch(0, runner.global_rank)
        for _ in range(2):
            torch.testing.assert_close(model.loss(x, factor=2.0), plain.loss(x, factor=2.0))
            with pytest.raises(RuntimeError, match="the user's own error"):
                model.fails(x)
            torch.testing.assert_close(model(x), plain(x))
        assert "forward" not in vars(module)
        steps = lts.explain(model).to_dict()["steps"]
        assert {name for name, step in steps.items() if step["graphs"]} == {"forward", "loss"}
        assert isinstance(module.first.weight, DTensor) == (kind != "ddp")


def check_a_compiled_function_holds_model_loss_and_collectives() -> None:
    with float64():
        expected = train_alone()
        for kind in KINDS:
            runner = fabric(kind, "64-true", bucket_size_mb=0)
            compiled = runner.strategy.compile_function(objective)
            assert_equal(train(runner, Net, loss_of=compiled), expected)
            step = lts.explain(compiled).to_dict()["steps"][objective.__qualname__]
            assert (step["graphs"], step["graph_breaks"]) == (1, [])
            counts = {
                stage: {item["op"]: item["count"] for item in items} for stage, items in step["collectives"].items()
            }
            parameters = 4
            if kind == "ddp":
                assert counts == {"forward": {}, "backward": {"all_reduce": parameters}}
            else:
                assert counts["forward"] == {"all_gather_into_tensor": parameters}
                assert counts["backward"]["reduce_scatter_tensor"] == parameters
                assert ("all_gather_into_tensor" in counts["backward"]) == (kind == "zero3")
            final = {trace.stage: str(trace) for trace in lts.traces(compiled)[0]}
            word = "all_reduce" if kind == "ddp" else "reduce_scatter"
            assert word in final["final backward"]


def check_the_report_knows_the_sizes() -> None:
    runner = fabric("zero3")
    model = runner.setup(seeded(lambda: nn.Linear(8, 6, bias=False)))
    model(torch.ones(2, 8))
    assert lts.explain(model).to_dict()["parameters"] == {"total_bytes": 192, "local_bytes": 96}
    gathers = lts.explain(model).to_dict()["steps"]["forward"]["collectives"]["forward"]
    assert gathers == [{"op": "all_gather_into_tensor", "count": 1, "bytes": 192}]


def check_ranks_with_batches_of_different_sizes() -> None:
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        module = seeded(Net)
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(4):
            runner.backward(model(batch(step, runner.global_rank, size=3 + runner.global_rank + step)).mean())
            optimizer.step()
            optimizer.zero_grad()
        everywhere = runner.all_gather(torch.cat([value.flatten() for value in weights(module).values()]))
        assert torch.equal(everywhere[0], everywhere[1])


# -------------------------------------------------------------------------------------------------------------- modules


def check_an_empty_module_gets_the_same_values_on_all_ranks() -> None:
    for apart in (False, True):
        runner = fabric("zero3")
        with runner.init_module(empty_init=True):
            module = Odd()
        assert all(parameter.is_meta for parameter in module.parameters())
        torch.manual_seed(runner.global_rank)  # ranks need not have the same seed
        if apart:
            model = runner.setup_module(module)
            optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
        else:
            model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
        assert not any(parameter.is_meta for parameter in module.parameters())
        assert module.fourth.weight is module.second.weight
        before = weights(module)
        everywhere = runner.all_gather(torch.cat([value.flatten() for value in before.values()]))
        assert torch.equal(everywhere[0], everywhere[1])
        assert before["first.weight"].std() > 0
        runner.backward(model(batch(0, runner.global_rank)).square().mean())
        optimizer.step()
        assert not torch.equal(weights(module)["first.weight"], before["first.weight"])


def check_buffers_follow_rank_zero_as_in_ddp() -> None:
    """Evaluation uses rank zero's BatchNorm statistics on every rank; two forwards may precede a backward."""

    def evaluate(runner: L.Fabric) -> tuple[Tensor, dict]:
        module = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for number in range(2):
            runner.backward(model(batch(number, runner.global_rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            output = model(batch(7, 0))
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        first, second = model(batch(8, 0)), model(batch(9, 0))
        if type(runner.strategy) is DDPStrategy and TORCH_VERSION < (2, 12):
            return output, buffers  # Lightning's DDP cannot differentiate these: a forward edits buffers in place
        runner.backward((first + second).sum())
        return output, buffers

    with float64():
        expected = evaluate(fabric("eager ddp", "64-true"))
        for kind in ("ddp", "zero3"):
            torch.testing.assert_close(evaluate(fabric(kind, "64-true")), expected, **EXACT)
        own = evaluate(fabric("ddp", "64-true", broadcast_buffers=False))[1]["1.running_mean"]
        everywhere = fabric("ddp").all_gather(own)
        assert not torch.equal(everywhere[0], everywhere[1])


def check_the_module_can_be_copied_and_pickled() -> None:
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        module = seeded(Odd)
        plain = copy.deepcopy(module)
        model = runner.setup(module)
        x = batch(0, runner.global_rank)
        expected = plain(x)
        torch.testing.assert_close(model(x), expected)
        duplicate = copy.deepcopy(model.module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        torch.testing.assert_close(duplicate(x), expected)
        assert type(duplicate).__name__ == "Odd"
        assert isinstance(duplicate, Odd)
        torch.testing.assert_close(pickle.loads(pickle.dumps(duplicate))(x), expected)


def check_an_optimizer_that_has_stepped_is_refused() -> None:
    runner = fabric("zero3")
    module = seeded(Net)
    optimizer = torch.optim.AdamW(module.parameters())
    module(batch(0, 0)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="Set the optimizer up before its first step"):
        runner.setup(module, optimizer)


def check_optimizers_that_need_whole_parameters_are_refused() -> None:
    runner = fabric("zero3")
    model = runner.setup(seeded(Net))
    for make in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(TypeError, match=f"{make.__name__} cannot work on sharded parameters"):
            runner.setup_optimizers(make(model.parameters()))


def check_data_is_split_between_ranks() -> None:
    runner = fabric("zero3")
    loader = runner.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = torch.cat([x for (x,) in loader])
    assert sorted(runner.all_gather(seen).flatten().tolist()) == list(range(8))
