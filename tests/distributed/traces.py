"""Checks of the programs that sharded and replicated training compiles."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.sharding import gathering
from tests.distributed.models import Base, Regression, make, vectors
from tests.distributed.ranks import ROOT
from tests.distributed.training import Result, fit, fit_case
from tests.distributed.training import thunder as bucketed

ONE_STEP: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}


def thunder(kind: str) -> Any:
    """A strategy with a collective for each parameter."""
    return bucketed(kind, bucket_size_mb=0)


def _counts(result: Result) -> dict[str, dict[str, int]]:
    """How often each collective is in the forward and in the backward."""
    step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]
    assert step["graphs"] == 1 and step["mode"] == "step", step
    return {stage: {item["op"]: item["count"] for item in items} for stage, items in step["collectives"].items()}


def _one_step(kind: str, case: str) -> dict[str, dict[str, int]]:
    return _counts(fit_case(thunder(kind), case, **ONE_STEP))


class Deep(Regression):
    """Four layers: the backward needs the weights of all but the first."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
            )
        )


def check_zero2_gathers_in_the_forward_only() -> None:
    counts = _counts(fit(thunder("zero2"), Deep(), vectors(), **ONE_STEP))
    assert counts == {"forward": {"all_gather_into_tensor": 8}, "backward": {"reduce_scatter_tensor": 8}}, counts


def check_zero3_gathers_again_what_the_backward_needs() -> None:
    counts = _counts(fit(thunder("zero3"), Deep(), vectors(), **ONE_STEP))
    assert counts["forward"] == {"all_gather_into_tensor": 8}
    assert counts["backward"] == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 8}, counts


def check_zero3_saves_no_gathered_parameter() -> None:
    """What the forward hands to the backward has no tensor of a whole weight's size."""

    class Wide(Regression):
        def __init__(self) -> None:
            super().__init__(
                nn.Sequential(nn.Linear(6, 101), nn.Tanh(), nn.Linear(101, 103), nn.Tanh(), nn.Linear(103, 1))
            )

    whole_size = 101 * 103
    found = {}
    for kind in ("zero2", "zero3"):
        result = fit(thunder(kind), Wide(), vectors(), **ONE_STEP)
        backward = [trace for trace in lts.traces(result.trainer)[-1] if trace.stage == "backward"][-1]
        sizes = [torch.Size(item.shape).numel() for item in backward.inputs if item.shape is not None]
        found[kind] = [size for size in sizes if size >= whole_size]
    assert found["zero2"] and not found["zero3"], found


def check_ddp_reduces_each_parameter_once() -> None:
    counts = _counts(fit(thunder("ddp"), Deep(), vectors(), **ONE_STEP))
    assert counts == {"forward": {}, "backward": {"all_reduce": 8}}, counts


def check_tied_and_reused_weights_are_gathered_and_reduced_once() -> None:
    """Three parameters: one under two names, two in a layer that is used twice."""
    assert _one_step("zero2", "tied") == {
        "forward": {"all_gather_into_tensor": 3}, "backward": {"reduce_scatter_tensor": 3},
    }  # fmt: skip
    assert _one_step("ddp", "tied") == {"forward": {}, "backward": {"all_reduce": 3}}
    zero3 = _one_step("zero3", "tied")
    assert zero3["backward"]["reduce_scatter_tensor"] == 3 and zero3["forward"] == {"all_gather_into_tensor": 3}


def check_tied_weights_are_one_shard() -> None:
    module, data = make("tied")
    seen = []

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.net[0].weight is pl_module.net[4].weight)
            seen.append(len(list(pl_module.parameters())) == 3)

    result = fit(thunder("zero3"), module, data, callbacks=[Look()], **ONE_STEP)
    assert seen == [True, True]
    assert result.module.net[0].weight is result.module.net[4].weight, "the tie is kept by teardown"


def check_frozen_parameters_have_no_gradient_communication() -> None:
    """Six small trained parameters, six frozen ones."""
    zero2 = _one_step("zero2", "lora")
    assert zero2 == {"forward": {"all_gather_into_tensor": 12}, "backward": {"reduce_scatter_tensor": 6}}, zero2
    assert _one_step("ddp", "lora") == {"forward": {}, "backward": {"all_reduce": 6}}


def check_penalty_over_parameters_costs_no_more_collectives() -> None:
    zero2 = _one_step("zero2", "penalty")
    assert zero2 == {"forward": {"all_gather_into_tensor": 4}, "backward": {"reduce_scatter_tensor": 4}}, zero2


def check_gathered_activations_of_the_user_are_left_alone() -> None:
    """A user's own all-gather of an activation is saved, not issued again, and parameters are still gathered again."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    class Contrastive(Base):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5)
            self.second = nn.Linear(5, 5)

        def loss(self, batch: Any) -> Tensor:
            states = torch.tanh(self.first(batch[0]))
            everyone = all_gather_tensor_autograd(states, 0, torch.distributed.group.WORLD)
            return F.mse_loss(self.second(states) @ self.second(everyone.square()).T, torch.zeros(4, 8))

    torch.manual_seed(0)
    counts = _counts(fit(thunder("zero3"), Contrastive(), vectors(), **ONE_STEP))
    assert counts["forward"]["all_gather_into_tensor"] == 5
    assert counts["backward"]["all_gather_into_tensor"] == 1  # the weight of `second`


def _training_stages(trainer: Any) -> list:
    stages = [stages for stages in lts.traces(trainer) if any(trace.stage == "final backward" for trace in stages)]
    return stages[-1] if stages else []


def check_printed_sharded_programs_run_and_agree() -> None:
    """Each printed stage, run by the group, gives the forward's outputs and the backward's gradients."""
    module, data = make("odd_shapes")
    inputs: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            parameters = dict(pl_module.named_parameters())
            stages = _training_stages(trainer)
            if not stages:
                return
            inputs.update(stages=stages, parameters=parameters, batch=batch)
            pl_module.zero_grad()
            with gathering():
                expected = pl_module.loss(batch)
            expected.backward()
            gradients = {name: value.grad.to_local() for name, value in parameters.items()}
            pl_module.zero_grad()
            _run_stages(stages, parameters, batch, expected, gradients)
            inputs["ran"] = True

    fit(thunder("zero3"), module, data, callbacks=[Look()], **{**ONE_STEP, "limit_train_batches": 2})
    assert inputs["ran"]


def _run_stages(stages: list, parameters: dict, batch: Any, loss: Tensor, gradients: dict) -> None:
    values: dict[str, Any] = {**parameters, "batch_0": batch[0], "batch_1": batch[1]}
    by_stage = {trace.stage: trace for trace in stages}
    forward, backward = by_stage["final forward"], by_stage["final backward"]
    arguments = [_value(item, values, batch) for item in forward.inputs]
    outputs = forward.run(*arguments)
    assert any(isinstance(out, Tensor) and out.shape == loss.shape and torch.equal(out, loss) for out in outputs)
    saved = list(outputs)
    tangents = [item for item in backward.inputs if item.kind == "gradient"]
    kept = saved[len(saved) - (len(backward.inputs) - len(tangents)) :]
    results = backward.run(*kept, *[torch.ones(()) for _ in tangents])
    found = [result for result in results if isinstance(result, Tensor)]
    for name, gradient in gradients.items():
        same = [result for result in found if result.shape == gradient.shape and torch.allclose(result, gradient)]
        assert same, f"the printed backward gives no gradient of {name}"


def _value(item: Any, values: dict, batch: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if item.kind == "parameter":
        parameter = values[item.origin]
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if item.kind == "object":
        return next(p.device_mesh for p in values.values() if isinstance(p, DTensor))
    matching = [tensor for tensor in batch if tuple(tensor.shape) == item.shape]
    assert len(matching) == 1, item
    return matching[0]


def check_a_saved_sharded_program_is_a_script_for_torchrun() -> None:
    module, data = make("odd_shapes")
    result = fit(thunder("zero3"), module, data, **ONE_STEP)
    forward = next(trace for trace in _training_stages(result.trainer) if trace.stage == "final forward")
    assert "all_gather_into_tensor" in forward.python()
    if torch.distributed.get_rank() != 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = forward.save(Path(folder) / "forward.py")
        paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert ran.stdout.count("tensor(") >= 2, ran.stdout
