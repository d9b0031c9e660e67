"""Checks that ranks that differ train right, or stop with an error that says which ranks differ. Never a hang."""

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, Dataset

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.differentiate import Differentiation
from lightning_thunder_strategy.distributed.agreement import RanksDisagreeError
from lightning_thunder_strategy.executors.base import FusionExecutor
from tests.distributed.models import Base, Regression, vectors
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import Result, Watch, assert_equal_results, fit, thunder, trainer

SHORT: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
FEW = 3  # programs of a step until the limit is reached; torch's 8 take as long as all else here


def _rank() -> int:
    return torch.distributed.get_rank()


class Sequences(Base):
    """Sums over sequences, whose length differs from batch to batch and from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).square().mean()


class Lengths(Dataset):
    """Batches of this rank: (length, 6) with lengths that the other rank does not have."""

    def __init__(self, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(_rank())
        dtype = torch.get_default_dtype()
        self.batches = [torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


def _fit_lengths(strategy: Any, lengths: Sequence[int]) -> Result:
    torch.manual_seed(3)
    module = Sequences()
    result = Result(module, None)
    result.trainer = made = trainer(strategy, callbacks=[Watch(result)], **SHORT)
    made.fit(module, DataLoader(Lengths(lengths), batch_size=None))
    return result


@_float64
def check_ranks_with_different_batch_lengths() -> None:
    """One rank compiles again for other lengths, also for length one; the other has one length."""
    lengths = [5, 7, 1, 9, 12, 3] if _rank() == 0 else [4] * 6
    other = _fit_lengths("ddp", lengths)
    for kind in ("ddp", "zero2", "zero3"):
        result = _fit_lengths(thunder(kind), lengths)
        assert_equal_results(result, other, **EXACT)
        graphs = lts.explain(result.trainer).to_dict()["steps"]["training_step"]["graphs"]
        assert graphs in (2, 3) if _rank() == 0 else graphs == 1, graphs


class Differing(Regression):
    """A step in which something is done on one rank only."""

    def __init__(self, action: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)))
        self.second = nn.Linear(6, 1)
        self.action = action

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.action(self, self.net[0](x), batch_idx)
        loss = F.mse_loss(self.net[2](torch.tanh(hidden)).squeeze(-1), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


def _fit_differing(strategy: Any, action: Callable) -> tuple[Result, list[str]]:
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(strategy, Differing(action), vectors(48), batch_size=2, **SHORT)
    return result, [str(item.message) for item in caught if item.category is lts.CompileWarning]


def _trains_right(action: Callable, kinds: Sequence[str] = ("ddp", "zero2", "zero3")) -> dict[str, list[str]]:
    """The step trains as under DDP; the warnings of each kind."""
    other, _ = _fit_differing("ddp_find_unused_parameters_true", action)
    said = {}
    for kind in kinds:
        result, said[kind] = _fit_differing(thunder(kind), action)
        assert_equal_results(result, other, **EXACT)
    return said


def _print_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    if _rank() == 1:
        print("rank one prints")
    return hidden


@_float64
def check_a_print_on_one_rank() -> None:
    for messages in _trains_right(_print_on_rank_one).values():
        if _rank() == 0:
            assert any("another rank could not compile it" in message for message in messages), messages


def _as_it_is(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    return hidden


class PrintsAtTheEnd(Differing):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if _rank() == 1:
            print("loss", float(loss))
        return loss * 2


@_float64
def check_a_print_after_all_parameters_were_used() -> None:
    results = []
    for strategy in ("ddp_find_unused_parameters_true", thunder("ddp"), thunder("zero3")):
        torch.manual_seed(3)
        results.append(fit(strategy, PrintsAtTheEnd(_as_it_is), vectors(48), **SHORT))
    for result in results[1:]:
        assert_equal_results(result, results[0], **EXACT)


def _numpy_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    if _rank() == 1:
        torch.serialization.get_default_load_endianness()
        time.sleep(0)
        hidden.detach().tolist()
    return hidden


@_float64
def check_an_operation_that_dynamo_rejects_on_one_rank() -> None:
    _trains_right(_numpy_on_rank_one, kinds=("zero3",))


def _other_branch_at_step_five(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    return hidden * module.second.weight.sum() if batch_idx == 5 else hidden


@_float64
def check_a_branch_that_all_ranks_take_at_step_five() -> None:
    """It uses a parameter that other steps do not: another sequence of collectives, taken by all."""
    said = _trains_right(_other_branch_at_step_five, kinds=("ddp", "zero3"))
    assert said == {"ddp": [], "zero3": []}, said


def _other_number_each_step(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    module.value = getattr(module, "value", 1.0) * 0.9
    return hidden * module.value


@_float64
@torch._dynamo.config.patch(recompile_limit=FEW)
def check_all_ranks_exceed_the_recompile_limit() -> None:
    said = _trains_right(_other_number_each_step, kinds=("ddp", "zero3"))
    for kind, messages in said.items():
        if _rank() == 0:
            assert sum("make it a tensor" in message for message in messages) == 1, (kind, messages)


def _numbers_on_rank_zero_and_print_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    if _rank() == 1 and batch_idx == FEW:
        print("rank one prints")
    return _other_number_each_step(module, hidden, batch_idx)


@_float64
@torch._dynamo.config.patch(recompile_limit=FEW)
def check_ranks_that_fall_back_at_the_same_step_for_different_reasons() -> None:
    """They go on with the same unit."""
    for kind in ("ddp", "zero3"):
        result, _ = _fit_differing(thunder(kind), _numbers_on_rank_zero_and_print_on_rank_one)
        other, _ = _fit_differing("ddp_find_unused_parameters_true", _numbers_on_rank_zero_and_print_on_rank_one)
        assert_equal_results(result, other, **EXACT)


class Failing(FusionExecutor):
    """Cannot compile on one rank."""

    name = "failing"

    def supports(self, node: fx.Node) -> str | None:
        return None if "tanh" in str(node.target) else "not tanh"

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        if _rank() == 1:
            raise RuntimeError("no compiler on this rank")
        return lambda args: region(*args)


@_float64
def check_an_executor_that_fails_on_one_rank() -> None:
    plain, _ = _fit_differing("ddp_find_unused_parameters_true", _as_it_is)
    for kind in ("ddp", "zero3"):
        result, messages = _fit_differing(thunder(kind, executors=[Failing()]), _as_it_is)
        assert_equal_results(result, plain, **EXACT)
        if _rank() == 1:
            assert any("no compiler on this rank" in message for message in messages), messages


@_float64
def check_a_program_that_one_rank_cannot_compile() -> None:
    plain, _ = _fit_differing("ddp_find_unused_parameters_true", _as_it_is)
    compile_program = Differentiation.compile

    def fail(*args: Any) -> Callable:
        raise RuntimeError("this rank cannot")

    for kind in ("ddp", "zero2", "zero3"):
        try:
            Differentiation.compile = fail if _rank() == 1 else compile_program
            result, messages = _fit_differing(thunder(kind), _as_it_is)
        finally:
            Differentiation.compile = compile_program
        assert_equal_results(result, plain, **EXACT)
        assert any("ranks [1] could not compile it" in message for message in messages), messages


# ----------------------------------------------------------------------------------------------- what must be an error


def _disagreement(action: Callable, kind: str, seconds: float = 10, **options: Any) -> tuple[str, float]:
    """The error that fitting raises on this rank, and after how long."""
    started = time.monotonic()
    try:
        _fit_differing(thunder(kind, timeout=timedelta(seconds=seconds), **options), action)
    except (RanksDisagreeError, RuntimeError, torch.distributed.DistBackendError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    raise AssertionError("no error was raised")


def _other_layer_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    x = torch.ones(2, 6, dtype=hidden.dtype)
    layer = module.second if _rank() == 1 else module.net[0]
    return hidden + layer(x).sum()


def check_ranks_that_use_other_parameters() -> None:
    for kind in ("ddp", "zero3"):
        text, seconds = _disagreement(_other_layer_on_rank_one, kind)
        assert text.startswith("RanksDisagreeError: training_step: ranks do not use the same parameters"), text
        assert "ranks [1]" in text or "ranks [0]" in text and "second" in text, text
        assert seconds < 15


def _alternating_branch(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    """Both ways are compiled and agreed on in the first two steps; then the ranks part."""
    way = batch_idx if batch_idx < 3 else batch_idx + _rank()
    return hidden * module.second.weight.sum() if way % 2 else hidden


class FailsOnRankOne(lts.Transform):
    """A pass with a bug that shows on one rank."""

    def joint(self, trace: lts.Trace) -> None:
        if _rank() == 1:
            raise KeyError("a bug in a pass")

    def cache_key(self) -> None:
        return None


def check_a_pass_that_fails_on_one_rank() -> None:
    text, seconds = _disagreement(_as_it_is, "zero3", transforms=[FailsOnRankOne()])
    assert ("a bug in a pass" in text) if _rank() == 1 else ("ranks [1] raise an error" in text), text
    assert seconds < 10


def check_ranks_that_part_between_programs_agreed_on_before() -> None:
    for kind in ("ddp", "zero3"):
        text, seconds = _disagreement(_alternating_branch, kind)
        assert text.startswith("RanksDisagreeError"), text
        assert seconds < 15


def _print_later_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    if _rank() == 1 and batch_idx == 3:
        print("rank one prints")
    return hidden


def _many_values_on_rank_one(module: Any, hidden: Tensor, batch_idx: int) -> Tensor:
    module.value = getattr(module, "value", 1.0) * (0.9 if _rank() == 1 else 1.0)
    return hidden * module.value


def _silent_ranks_are_named(action: Callable) -> None:
    """The others are in a program already: all stop within the timeouts, and the error names the silent rank."""
    text, seconds = _disagreement(action, "zero3", seconds=5)
    if _rank() == 1:
        assert text.startswith("RanksDisagreeError") and "ranks [0]" in text, text
    assert seconds < 60
    torch.distributed.destroy_process_group()  # the other rank's collective has failed


def check_one_rank_that_prints_later() -> None:
    _silent_ranks_are_named(_print_later_on_rank_one)


@torch._dynamo.config.patch(recompile_limit=FEW)
def check_one_rank_that_exceeds_the_recompile_limit() -> None:
    _silent_ranks_are_named(_many_values_on_rank_one)
