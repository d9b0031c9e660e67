"""Errors while a compiled program runs name the executor, the region and the saved trace."""

import os

import pytest
import torch
import torch.nn.functional as F

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.failures import ExecutorError
from lightning_thunder_strategy.executors import OperatorExecutor
from tests.compiler.executors import Pointwise


class FailsLater(Pointwise):
    """Compiles, and fails when it runs a region with the named operation."""

    name = "later"

    def __init__(self, operation, error):
        super().__init__()
        self.operation, self.error = operation, error

    def fuse(self, region, inputs):
        run = super().fuse(region, inputs)

        def call(args):
            if self.operation in self.regions[index]:
                raise self.error
            return run(args)

        index = len(self.regions) - 1
        return call


def function(x, w):
    return (x.sin() * 2) @ w.exp()


def compiled_with(executor, f=function):
    return lts.compile(f, executors=[executor], config=lts.CompileConfig(fullgraph=True))


def test_a_region_that_fails_in_the_forward_is_named_and_saved_as_a_script():
    compiled = compiled_with(FailsLater("sin", RuntimeError("illegal memory access.\nmore")))
    with pytest.raises(ExecutorError) as caught:
        compiled(torch.randn(3, 4), torch.randn(4, 5))
    error = caught.value
    assert error.executor == "later" and error.region in str(lts.traces(compiled)[0][-1])
    assert str(error) == (
        f"later failed while it ran {error.region}: RuntimeError: illegal memory access. "
        f"That part of the program is in {error.trace}."
    )
    assert isinstance(error.__cause__, RuntimeError)
    assert "torch.ops.aten.sin.default" in error.trace.read_text()
    if os.name == "posix":
        assert error.trace.parent.stat().st_mode & 0o077 == 0
    exec(compile(error.trace.read_text(), "saved", "exec"), {"__name__": "__main__"})


def test_a_region_that_fails_in_the_backward_is_named_too():
    compiled = compiled_with(FailsLater("cos", KeyError("cos")))
    result = compiled(torch.randn(3, 4, requires_grad=True), torch.randn(4, 5))
    with pytest.raises(ExecutorError, match="later failed while it ran later_backward.*: KeyError: 'cos'") as caught:
        result.sum().backward()
    assert "aten.cos.default" in caught.value.trace.read_text()


def test_running_out_of_memory_stays_what_it_is():
    compiled = compiled_with(FailsLater("sin", torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError, match="^no memory$"):
        compiled(torch.randn(3, 4), torch.randn(4, 5))


@torch.library.custom_op("lts_tests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("bad launch")


failing.register_fake(torch.empty_like)


class Failing(OperatorExecutor):
    name = "failing"

    def considers(self, node):
        return node.target is F.silu

    def replacement(self, node):
        return failing


@pytest.mark.parametrize("executors", [[Failing()], [Failing(), Pointwise()]])
def test_an_opaque_operator_that_fails_is_named(executors):
    compiled = lts.compile(lambda x: F.silu(x.sin()) * 2, executors=executors)
    with pytest.raises(ExecutorError, match="failing failed while it ran failing: ValueError: bad launch") as caught:
        compiled(torch.randn(3))
    assert "torch.ops.lts_tests.failing.default(" in caught.value.trace.read_text()


def test_errors_of_eager_operations_stay_what_they_are():
    compiled = compiled_with(Pointwise(), lambda x, i: F.embedding(i, x).sin())
    with pytest.raises(IndexError):
        compiled(torch.randn(3, 4), torch.tensor([7]))
