"""States and checkpoints of Fabric on several ranks."""

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.strategies.storage import CheckpointWriteError
from tests.distributed.fabric_scenarios import Odd, batch, fabric, objective, weights, whole
from tests.strategies.fabric_helpers import Net, seeded

EQUAL = {"rtol": 0, "atol": 0}


@contextmanager
def folder(runner: L.Fabric) -> Iterator[Path]:
    """One empty folder for all ranks."""
    path = Path(runner.broadcast(tempfile.mkdtemp()))
    yield path
    runner.barrier()


def start(runner: L.Fabric, make: Any = Odd, seed: int = 0) -> tuple[Any, Any, nn.Module]:
    module = seeded(make, seed)
    model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
    return model, optimizer, module


def step(runner: L.Fabric, model: Any, optimizer: Any, number: int) -> None:
    runner.backward(objective(model, batch(number, runner.global_rank)))
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: Any) -> dict:
    return {
        (number, name): whole(value)
        for number, entry in optimizer.optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }


def check_save_and_load_in_both_formats() -> None:
    for kind in ("ddp", "zero3"):
        for state_dict_type in ("full", "sharded"):
            runner = fabric(kind, state_dict_type=state_dict_type)
            make = Odd if kind == "zero3" else Net
            with folder(runner) as path:
                model, optimizer, module = start(runner, make)
                for number in range(2):
                    step(runner, model, optimizer, number)
                runner.save(path / "checkpoint", {"model": model, "optimizer": optimizer, "step": 2, "note": "x"})
                assert (path / "checkpoint").is_dir() == (state_dict_type == "sharded")
                kept = weights(module), moments(optimizer)
                for number in range(2, 4):
                    step(runner, model, optimizer, number)

                again, other_optimizer, other = start(fabric(kind, state_dict_type=state_dict_type), make, seed=5)
                state = {"model": again, "optimizer": other_optimizer, "step": 0}
                assert runner.load(path / "checkpoint", state) == {"note": "x"}
                assert state["step"] == 2
                torch.testing.assert_close(weights(other), kept[0], **EQUAL)
                torch.testing.assert_close(moments(other_optimizer), kept[1], **EQUAL)
                for number in range(2, 4):
                    step(runner, again, other_optimizer, number)
                torch.testing.assert_close(weights(other), weights(module), **EQUAL)
                everything = runner.load(path / "checkpoint")
                assert everything["step"] == 2
                torch.testing.assert_close(everything["model"]["first.weight"], kept[0]["first.weight"], **EQUAL)


def check_a_full_file_is_that_of_a_plain_module() -> None:
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        with folder(runner) as path:
            model, optimizer, module = start(runner)
            step(runner, model, optimizer, 0)
            runner.save(path / "file", {"model": model, "optimizer": optimizer, "copy": model.state_dict()})
            saved = torch.load(path / "file", weights_only=True)
            plain = Odd()
            plain.load_state_dict(saved["model"], strict=True)
            plain.load_state_dict(saved["copy"], strict=True)
            torch.testing.assert_close(plain.state_dict(), weights(module), **EQUAL)
            alone = torch.optim.AdamW(plain.parameters(), lr=0.05)
            alone.load_state_dict(saved["optimizer"])
            for parameter, entry in zip(plain.parameters(), saved["optimizer"]["state"].values()):
                assert entry["exp_avg"].shape == parameter.shape


def check_filter_and_strict() -> None:
    for state_dict_type in ("full", "sharded"):
        runner = fabric("zero3", state_dict_type=state_dict_type)
        with folder(runner) as path:
            model, _, module = start(runner, Net)
            before = weights(module)
            state = {"model": model, "numbers": {"a": 1, "b": 2}}
            chosen = {"model": lambda name, value: "first" in name, "numbers": lambda name, value: value > 1}
            runner.save(path / "part", state, filter=chosen)
            assert runner.load(path / "part")["numbers"] == {"b": 2}
            other_model, other_optimizer, other = start(runner, Net, seed=5)
            with pytest.raises(RuntimeError, match="Missing key.*second.weight"):
                runner.load(path / "part", {"model": other_model})
            with pytest.raises(KeyError, match="'optimizer'"):
                runner.load(path / "part", {"model": other_model, "optimizer": other_optimizer})
            runner.load(path / "part", {"model": other_model, "optimizer": other_optimizer}, strict=False)
            assert torch.equal(weights(other)["first.weight"], before["first.weight"])
            assert not torch.equal(weights(other)["second.weight"], before["second.weight"])


def check_load_raw() -> None:
    plain = seeded(Odd, 4)
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        with folder(runner) as path:
            if runner.is_global_zero:
                torch.save(plain.state_dict(), path / "plain.pth")
            runner.barrier()
            model, optimizer, module = start(runner)
            runner.load_raw(path / "plain.pth", model)
            torch.testing.assert_close(weights(module), plain.state_dict(), **EQUAL)
            with pytest.raises(RuntimeError, match="Unexpected key"):
                runner.load_raw(path / "plain.pth", runner.setup(Net()))
            step(runner, model, optimizer, 0)
            runner.save(path / "raw.pth", model.state_dict())
            again = seeded(Odd, 6)
            again.load_state_dict(torch.load(path / "raw.pth", weights_only=True), strict=True)
            torch.testing.assert_close(again.state_dict(), weights(module), **EQUAL)


def check_states_are_transparent() -> None:
    """Whole, plain states of another model load directly; keys are those of the plain module."""
    plain = seeded(Odd, 4)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    objective(plain, batch(0, 0)).backward()
    plain_optimizer.step()
    for kind in ("ddp", "zero3"):
        runner = fabric(kind)
        model, optimizer, module = start(runner)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in plain.state_dict().items()
        }
        for target in (model, model.module):
            target.load_state_dict(plain.state_dict())
            torch.testing.assert_close(weights(module), plain.state_dict(), **EQUAL)
        optimizer.load_state_dict(plain_optimizer.state_dict())
        expected = {
            (number, name): value
            for number, entry in plain_optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        torch.testing.assert_close(moments(optimizer), expected, **EQUAL)
        step(runner, model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        assert not any(isinstance(value, DTensor) for entry in saved["state"].values() for value in entry.values())
        kept = moments(optimizer)
        step(runner, model, optimizer, 2)
        optimizer.load_state_dict(saved)
        torch.testing.assert_close(moments(optimizer), kept, **EQUAL)


def check_two_models_with_equal_names_under_one_optimizer() -> None:
    for state_dict_type in ("full", "sharded"):
        runner = fabric("zero3", state_dict_type=state_dict_type)
        with folder(runner) as path:

            def make(seed: int, runner: L.Fabric = runner) -> tuple[dict, list[nn.Module]]:
                modules = [seeded(Net, seed), seeded(Net, seed + 1)]
                models = [runner.setup(module) for module in modules]
                parameters = [parameter for module in modules for parameter in module.parameters()]
                optimizer = runner.setup_optimizers(torch.optim.AdamW(parameters, lr=0.05))
                return {"a": models[0], "b": models[1], "optimizer": optimizer}, modules

            state, modules = make(0)
            runner.backward(objective(state["a"], batch(0, 0)) + 3 * objective(state["b"], batch(1, 0)))
            state["optimizer"].step()
            runner.save(path / "both", state)
            other, others = make(7)
            runner.load(path / "both", other)
            torch.testing.assert_close(moments(other["optimizer"]), moments(state["optimizer"]), **EQUAL)
            torch.testing.assert_close([weights(m) for m in others], [weights(m) for m in modules], **EQUAL)


def check_a_file_and_a_folder_replace_each_other() -> None:
    runners = {name: fabric("zero3", state_dict_type=name) for name in ("full", "sharded")}
    with folder(runners["full"]) as path:
        for number, name in enumerate(("full", "sharded", "sharded", "full", "full")):
            model, _, module = start(runners[name], Net, seed=number)
            runners[name].save(path / "checkpoint", {"model": model, "number": number})
            assert (path / "checkpoint").is_dir() == (name == "sharded")
            other_model, _, other = start(runners[name], Net, seed=9)
            assert runners[name].load(path / "checkpoint", {"model": other_model}) == {"number": number}
            torch.testing.assert_close(weights(other), weights(module), **EQUAL)
            assert os.listdir(path) == ["checkpoint"]
            runners[name].barrier()


def check_a_write_that_fails_on_rank_zero_is_an_error_on_all_and_keeps_the_old_file() -> None:
    runner = fabric("zero3")
    with folder(runner) as path:
        model, _, _ = start(runner, Net)
        runner.save(path / "file", {"model": model, "number": 1})

        def fails(name: str, value: Tensor) -> bool:
            raise OSError("disk full")

        with pytest.raises(CheckpointWriteError, match="disk full"):
            runner.save(path / "file", {"model": model, "number": 2}, filter={"model": fails})
        assert runner.load(path / "file")["number"] == 1


# ------------------------------------------------------------------------------------------- worlds of different sizes


def resume_and_save() -> dict[str, Any]:
    """Loads the checkpoint in ``FABRIC_FROM`` (if any) into the strategies of this world, steps, and saves again."""
    source, target = os.environ.get("FABRIC_FROM"), Path(os.environ["FABRIC_TO"])
    result = {}
    for name in ("full", "sharded"):
        runner = fabric("zero3", state_dict_type=name)
        model, optimizer, module = start(runner, seed=0 if source is None else 5)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if source is not None:
            runner.load(Path(source) / name, state)
        for number in range(state["step"], state["step"] + 2):  # every rank has the same batch: any world is equal
            runner.backward(objective(model, batch(number, 0)))
            optimizer.step()
            optimizer.zero_grad()
        runner.save(target / name, {**state, "step": state["step"] + 2})
        result[name] = {"weights": weights(module), "moments": moments(optimizer), "step": state["step"] + 2}
    return result
