"""A graph that cannot be compiled at all runs as eager PyTorch would, and it is said once."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.differentiate import Differentiation
from tests.compiler.parity import assert_same


@pytest.fixture
def nothing_compiles(monkeypatch):
    def fail(self, *args):
        raise NotImplementedError("no such thing\nas this")

    monkeypatch.setattr(Differentiation, "compile", fail)


def test_a_graph_that_cannot_be_compiled_runs_eagerly_with_one_warning(nothing_compiles):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    compiled = lts.compile(net, executors=["eager"], config=lts.CompileConfig(fullgraph=True))
    with pytest.warns(lts.CompileWarning) as caught:
        for index in range(3):
            x = torch.randn(5, 4)
            torch.manual_seed(index)
            result = compiled(x)
    (warning,) = caught
    assert str(warning.message) == (
        "Sequential: one graph could not be compiled and runs eagerly (eager: NotImplementedError: no such thing)."
    )
    net[1].reset_running_stats()
    torch.manual_seed(2)
    assert_same(result, net(x))
    report = lts.explain(compiled).to_dict()
    (step,) = report["steps"].values()
    assert step["graphs"] == 1 and set(step["executors"]) == {"eager"}
    assert report["fallbacks"] == [
        {
            "region": "one graph of Sequential", "executor": "eager", "error": "NotImplementedError: no such thing",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("fullgraph", [True, False])
def test_on_error_raise_makes_it_an_error(nothing_compiles, fullgraph):
    config = lts.CompileConfig(on_error="raise", fullgraph=fullgraph)
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"], config=config)
    with pytest.raises(NotImplementedError, match="no such thing"):
        compiled(torch.ones(2))


def _plain(block, x):
    return checkpoint(block, x, use_reentrant=False)


def _policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def _selective(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=_contexts)


@pytest.mark.parametrize("way", [_plain, _selective])
def test_checkpoints_with_dropout_in_such_a_graph_compute_the_same_mask_again(nothing_compiles, way):
    w = torch.randn(4, 4, requires_grad=True)

    def block(x):
        return F.dropout((x @ w).sin(), 0.5)

    def function(x):
        return way(block, way(block, x))

    compiled = lts.compile(function, executors=["eager"])
    outcomes = []
    x = torch.randn(3, 4, requires_grad=True)
    for call in (compiled, function):
        torch.manual_seed(0)
        if call is compiled:
            with pytest.warns(lts.CompileWarning, match="one graph could not be compiled"):
                result = call(x)
        else:
            result = call(x)
        torch.manual_seed(1)  # other numbers than in the forward
        outcomes.append([result, *torch.autograd.grad(result.sum(), [x, w])])
    assert_same(*outcomes)


def test_a_graph_is_compiled_again_for_a_new_shape_after_another_could_not_be(monkeypatch):
    real = Differentiation.compile

    def fail_for_three(self, gm, example_inputs, *args):
        if any(isinstance(x, torch.Tensor) and x.shape == (3,) for x in example_inputs):
            raise NotImplementedError("not three")
        return real(self, gm, example_inputs, *args)

    monkeypatch.setattr(Differentiation, "compile", fail_for_three)
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"], config=lts.CompileConfig(dynamic=False))
    with pytest.warns(lts.CompileWarning, match="not three"):
        assert_same(compiled(torch.ones(3)), torch.ones(3).sin())
    assert_same(compiled(torch.ones(2)), torch.ones(2).sin())
    assert lts.traces(compiled)[1][-1].stage == "final forward"
