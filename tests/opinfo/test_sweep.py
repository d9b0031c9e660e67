"""A few dozen of the operators that ``make opinfo`` sweeps, and whether the sweep can find a fault."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from tests.compiler.executors import Running
from tests.opinfo.sweep import check, operators

NAMES = (
    "all", "amax", "argsort", "as_strided", "bernoulli", "cat", "cumprod", "diagonal", "fill", "gather", "linalg.qr",
    "masked_fill", "mean", "nn.functional.batch_norm", "nn.functional.conv1d", "nn.functional.cross_entropy",
    "nn.functional.dropout", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.scaled_dot_product_attention", "randn_like", "roll", "scatter_add", "softmax", "sort", "split",
    "std_mean", "topk", "transpose", "unbind", "var",
)  # fmt: skip
OTHER_TYPES = ("matmul", "nn.functional.gelu", "nn.functional.layer_norm", "sort")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in NAMES]
    + [(name, dtype) for name in OTHER_TYPES for dtype in (torch.float64, torch.bfloat16)],
    ids=str,
)
def test_operators_give_eagers_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    found = operators([name])
    assert found, "torch has no operator of this name"
    outcome = check(found[0], dtype)
    assert outcome.result == "equal", outcome


class TooLarge(Running):
    """Every result is two percent off."""

    def fuse(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], Sequence[Any]]:
        run = super().fuse(region, inputs)
        return lambda args: [value * 1.02 for value in run(args)]


@pytest.mark.parametrize("name", ["sin", "matmul"])
def test_a_wrong_value_is_found(name: str) -> None:
    outcome = check(operators([name])[0], torch.float32, [TooLarge()])
    assert outcome.result == "wrong" and "not close" in outcome.reason


def test_an_operator_that_cannot_be_one_program_is_counted_as_declined() -> None:
    assert check(operators(["nn.functional.ctc_loss"])[0], torch.float32).result == "declined"


def test_other_tests_of_this_process_can_still_set_flags() -> None:
    assert not torch.backends.flags_frozen()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
