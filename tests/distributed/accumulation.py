"""Checks that micro-batches accumulate without communication and give what one large batch gives."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from tests.distributed import fabric_scenarios as scenarios
from tests.distributed.models import Smooth, vectors
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import assert_equal_results, fit, fit_alone, fit_case, thunder

KINDS = ("ddp", "zero1")
REDUCTION = {"ddp": "all_reduce", "zero1": "reduce_scatter_tensor"}
ACCUMULATE = {"accumulate_grad_batches": 3, "batch_size": 2, "limit_val_batches": 0}


def _reductions(trainer: L.Trainer, kind: str) -> list[int]:
    """How often the backward of each program of the training step reduces gradients."""
    record = next(record for record in trainer.strategy.records() if record.name == "training_step")
    return [sum(c.count for c in p.collectives["backward"] if c.op == REDUCTION[kind]) for p in record.programs]


@_float64
def check_only_the_last_micro_batch_reduces() -> None:
    alone, other = fit_alone("smooth", batch_size=12), fit_case("ddp", "smooth", **ACCUMULATE)
    for kind in KINDS:
        result = fit_case(thunder(kind, bucket_size_mb=0), "smooth", **ACCUMULATE)
        assert_equal_results(result, other, **EXACT)
        assert_equal_results(result, alone, losses=False, **EXACT)
        assert _reductions(result.trainer, kind) == [0, 4], kind  # four parameters


@_float64
def check_the_last_batch_of_an_epoch_may_be_alone() -> None:
    """Windows of three batches and a last one of one, with clipping and a validation in between."""
    options = {"accumulate_grad_batches": 3, "batch_size": 3, "gradient_clip_val": 0.2, "val_check_interval": 2}
    other = fit_case("ddp", "smooth", **options)
    result = fit_case(thunder("zero1", bucket_size_mb=0), "smooth", **options)
    assert_equal_results(result, other, **EXACT)
    assert _reductions(result.trainer, "zero1") == [0, 4, 4]  # accumulating, adding, alone


@_float64
def check_buffers_are_shared_when_ddp_shares_them() -> None:
    """Before the first micro-batch of a window, unless a validation came in between."""
    options = {"accumulate_grad_batches": 2, "batch_size": 2, "val_check_interval": 4}
    other = fit_case("ddp", "stateful", **options)
    for kind in ("ddp", "zero3"):
        assert_equal_results(fit_case(thunder(kind), "stateful", **options), other, **EXACT)


CASES = {"tied": ("zero1",), "checkpointed": ("ddp",)}


@_float64
def check_kinds_of_modules_accumulate_as_under_ddp() -> None:
    options = {"accumulate_grad_batches": 2, "batch_size": 2, "limit_val_batches": 0, "max_epochs": 1}
    for case, kinds in CASES.items():
        other = fit_case("ddp", case, **options)
        for kind in kinds:
            assert_equal_results(fit_case(thunder(kind), case, **options), other, **EXACT)


@_float64
def check_hooks_see_averaged_gradients_of_each_micro_batch() -> None:
    alone = fit_alone("hooked", batch_size=4, epochs=1, accumulate=2)
    options = {"accumulate_grad_batches": 2, "batch_size": 2, "limit_val_batches": 0, "max_epochs": 1}
    for kind in KINDS:
        result = fit_case(thunder(kind, bucket_size_mb=0), "hooked", **options)
        assert_equal_results(result, alone, losses=False, **EXACT)
        assert _reductions(result.trainer, kind) == [2, 4], kind  # two of four parameters have hooks


@_float64
def check_smaller_units_accumulate() -> None:
    other = fit_case("ddp", "smooth", **ACCUMULATE)
    for kind, mode in (("ddp", "submodules"), ("zero1", "off")):
        assert_equal_results(fit_case(thunder(kind, compile=mode), "smooth", **ACCUMULATE), other, **EXACT)


@_float64
def check_two_parameters_with_one_gradient_accumulate_uncompiled() -> None:
    other = fit_case("ddp", "odd_shapes", **ACCUMULATE)
    assert_equal_results(fit_case(thunder("zero1", compile="off"), "odd_shapes", **ACCUMULATE), other, **EXACT)


class Sometimes(Smooth):
    """A layer that only some micro-batches use: every second, or all but the last of three."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period, self.extra = period, nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % self.period != self.period - 1:
            loss = loss + self.extra(batch[0]).square().mean()
        return loss


@_float64
def check_parameters_that_the_last_micro_batch_does_not_use() -> None:
    options = {"accumulate_grad_batches": 3, "limit_val_batches": 0, "batch_size": 2}
    for period in (2, 3):
        torch.manual_seed(1)
        module = Sometimes(period)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        results = []
        for strategy in ("ddp_find_unused_parameters_true", *(thunder(kind) for kind in KINDS)):
            module = Sometimes(period)
            module.load_state_dict(state)
            results.append(fit(strategy, module, vectors(), **options))
        for result in results[1:]:
            assert_equal_results(result, results[0], **EXACT)


class Manual(Smooth):
    """Two micro-batches a step, of which the first does not communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        first, second = zip(*(item.chunk(2) for item in batch))
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(first) / 2)
        with optimizer.toggle_model(sync_grad=True):
            self.manual_backward(self.loss(second) / 2)
        optimizer.step()
        optimizer.zero_grad()


@_float64
def check_manual_optimization_accumulates() -> None:
    alone = fit_alone("smooth")
    for kind in KINDS:
        module = Manual()
        module.load_state_dict(_initial("smooth"))
        result = fit(thunder(kind), module, vectors(), limit_val_batches=0)
        assert_equal_results(result, alone, losses=False, **EXACT)


def _initial(case: str) -> dict[str, Tensor]:
    from tests.distributed.models import make

    return make(case)[0].state_dict()


def check_gradients_are_never_stepped_unreduced() -> None:
    """A step without a synchronizing backward still takes averaged gradients."""
    for kind in KINDS:
        runner = scenarios.fabric(kind)
        module = scenarios.seeded(scenarios.Net)
        model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
        with runner.no_backward_sync(model):
            runner.backward(model(scenarios.batch(0, runner.global_rank)).square().mean())
        optimizer.step()
        mine = torch.cat([value.flatten() for value in scenarios.weights(module).values()])
        others = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(others, mine)
        assert torch.equal(*others)


def check_fabric_accumulates_without_communication() -> None:
    with scenarios.float64():
        expected = scenarios.train_alone()
        for kind in KINDS:
            runner = scenarios.fabric(kind, "64-true")
            module = scenarios.seeded(scenarios.Net)
            model, optimizer = runner.setup(module, torch.optim.AdamW(module.parameters(), lr=0.05))
            for step in range(3):
                for index, half in enumerate(scenarios.batch(step, runner.global_rank).chunk(2)):
                    with runner.no_backward_sync(model, enabled=index == 0):
                        runner.backward(model(half).square().mean() / 2)
                torch.testing.assert_close(scenarios.gradients(module), expected["gradients"][step], **scenarios.EXACT)
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(scenarios.weights(module), expected["weights"], **scenarios.EXACT)
            collectives = lts.explain(model).to_dict()["steps"]["forward"]["collectives"]
            assert collectives["backward"] == [], kind  # of the program that accumulates
