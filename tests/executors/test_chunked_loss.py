"""The chunked loss: values and gradients of float64 eager, what it declines, and that all logits never exist."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import ChunkedLossExecutor
from lightning_thunder_strategy.executors.chunked_loss import _rows
from lightning_thunder_strategy.executors.linear_cross_entropy import loss_and_gradients
from tests.compiler.test_compile_language_models import small_gpt
from tests.executors.reference import check, claims, compiled_with, laid_out

TAKEN = [(True, "")]


def targets(rows, classes, ignored=-100, share=0.25):
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(classes, (rows,), generator=generator)
    return torch.where(torch.rand(rows, generator=generator) < share, ignored, values)


def loss(x, weight, bias, target, **options):
    return F.cross_entropy(F.linear(x, weight, bias), target, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_and_gradients_are_those_of_float64(dtype, reduction):
    torch.manual_seed(0)
    ignored = -100 if reduction == "sum" else 3
    for layout in ("dense", "transposed", "sliced", "expanded"):
        inputs = [laid_out(shape, dtype, layout) for shape in ((11, 6), (9, 6), (9,))]
        compiled = check(
            lambda x, w, b, t: loss(x, w, b, t, ignore_index=ignored, reduction=reduction),
            [*inputs, targets(11, 9, ignored)], ChunkedLossExecutor(4),
        )  # fmt: skip
        assert claims(compiled, "chunked_loss") == TAKEN


@pytest.mark.parametrize(("rows", "classes", "features"), [(0, 5, 4), (1, 1, 1), (1, 5, 4), (8, 5, 1), (4, 1, 3)])
def test_sizes_of_zero_and_one(rows, classes, features):
    torch.manual_seed(0)
    inputs = [laid_out(shape, torch.float64, "dense") for shape in ((rows, features), (classes, features), (classes,))]
    for options in ({}, {"reduction": "sum"}):
        compiled = check(
            lambda *args, options=options: loss(*args, **options),
            [*inputs, targets(rows, classes, share=0)], ChunkedLossExecutor(4),
        )  # fmt: skip
        assert claims(compiled, "chunked_loss") == TAKEN


def test_rows_that_are_all_ignored_give_what_eager_gives():
    inputs = [laid_out(shape, torch.float64, "dense") for shape in ((3, 4), (5, 4), (5,))]
    check(loss, [*inputs, torch.full((3,), -100)], ChunkedLossExecutor(2))  # nan, and gradients of zero


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_the_gradients_that_are_needed(needed):
    shapes = ((5, 4), (6, 4), (6,))
    inputs = [laid_out(shape, torch.float64, "dense", need) for shape, need in zip(shapes, needed)]
    compiled = check(loss, [*inputs, targets(5, 6)], ChunkedLossExecutor(2))
    assert f"[{', '.join(map(str, needed))}]" in str(lts.traces(compiled)[0][-1 if not any(needed) else -2])


def causal(x, weight, target):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, logits.size(-1)), target[:, 1:].flatten())


def test_without_the_last_position_without_bias_and_with_a_cast():
    torch.manual_seed(0)
    target = targets(15, 7).view(3, 5)
    x, weight = laid_out((3, 5, 4), torch.bfloat16, "dense"), laid_out((7, 4), torch.bfloat16, "dense")

    def function(x, weight, target):
        logits = F.linear(x, weight)[:, :-1]
        logits = logits if x.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.reshape(-1, 7), target[:, 1:].flatten())

    compiled = compiled_with(causal, ChunkedLossExecutor(4))
    check(function, [x, weight, target], compiled=compiled)
    assert claims(compiled, "chunked_loss") == TAKEN
    assert compiled(x, weight, target).dtype == torch.float32


def test_symbolic_sizes_run_other_sizes_without_compiling_again():
    weight, bias = laid_out((7, 4), torch.float64, "dense"), laid_out((7,), torch.float64, "dense")
    compiled = compiled_with(loss, ChunkedLossExecutor(4), dynamic=True)
    for rows in (5, 9, 4):
        check(loss, [laid_out((rows, 4), torch.float64, "dense"), weight, bias, targets(rows, 7)], compiled=compiled)
    assert len(compiled.record.programs) == 1 and claims(compiled, "chunked_loss") == TAKEN


def test_under_autocast_the_layer_is_cast_and_the_loss_is_float32():
    x, weight = laid_out((6, 4), torch.float32, "dense"), laid_out((7, 4), torch.float32, "dense")
    target = targets(6, 7)

    def function(x, weight, target):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(x, weight), target)

    compiled = compiled_with(function, ChunkedLossExecutor(4))
    results = [call(x, weight, target) for call in (compiled, function)]
    assert results[0].dtype == results[1].dtype and claims(compiled, "chunked_loss") == TAKEN
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
    for a, b in zip(*(torch.autograd.grad(result, [x, weight]) for result in results)):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-3)


def test_a_language_model_and_its_loss_inside_a_checkpoint():
    torch.manual_seed(0)
    net = small_gpt("llama").double()
    other = copy.deepcopy(net)
    tokens = torch.randint(10, (2, 9))

    def step(net):
        def inner(tokens):
            logits = net(tokens[:, :-1])
            return F.cross_entropy(logits.reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))

        return lambda tokens: checkpoint(inner, tokens, use_reentrant=False)

    compiled = compiled_with(step(net), ChunkedLossExecutor(4))
    compiled(tokens).backward()
    step(other)(tokens).backward()
    assert claims(compiled, "chunked_loss") == TAKEN
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


class Largest(TorchDispatchMode):
    """The largest floating tensor that operations return."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_all_logits_never_exist():
    rows, classes, features = 64, 50, 4
    net = nn.Linear(features, classes)
    x, target = torch.randn(rows, features), targets(rows, classes)
    for executors in ([ChunkedLossExecutor(8)], []):
        compiled = compiled_with(lambda x, t: F.cross_entropy(net(x), t), *executors)
        compiled(x, target).backward()
        printed = "".join(str(trace) for trace in lts.traces(compiled)[0] if trace.stage.startswith("final"))
        assert ("f32[64, 50]" in printed) == (not executors)
    with Largest() as seen:
        loss_and_gradients(_rows, x, net.weight.detach(), net.bias.detach(), target, -100, True, 8, [True] * 3)
    assert seen.elements == 8 * classes


DECLINED = {
    "it weighs the classes": lambda x, w, t: F.cross_entropy(F.linear(x, w), t, weight=w[:, 0].detach().abs()),
    "label_smoothing=0.1": lambda x, w, t: F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1),
    "reduction='none'": lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="none").sum(),
    "targets are probabilities": lambda x, w, t: F.cross_entropy(F.linear(x, w), torch.rand(6, 7, dtype=x.dtype)),
    "not come straight from a linear layer, but from tanh": lambda x, w, t: F.cross_entropy(F.linear(x, w).tanh(), t),
    "but from matmul": lambda x, w, t: F.cross_entropy(x @ w.t(), t),
    "used elsewhere too (argmax)": lambda x, w, t: F.cross_entropy((z := F.linear(x, w)), t) + z.argmax(-1).sum() * 0,
    "not a matrix of rows": lambda x, w, t: F.cross_entropy(F.linear(x, w).view(2, 3, 7).mT, t.view(2, 3)),
    "reshaped across rows": lambda x, w, t: F.cross_entropy(F.linear(x, w).view(7, 6).view(6, 7), t),
    "a part of a part of its logits": lambda x, w, t: F.cross_entropy(
        F.linear(x.view(3, 2, 4), w)[:2][:, :1].flatten(0, 1), t[:2]
    ),
    "float16: gradients would underflow": lambda x, w, t: F.cross_entropy(F.linear(x.half(), w.half()), t),
}  # fmt: skip


@pytest.mark.parametrize("reason", DECLINED)
def test_what_it_declines_runs_as_before_with_the_reason_in_the_report(reason):
    torch.manual_seed(0)
    inputs = [*(laid_out(shape, torch.float32, "dense") for shape in ((6, 4), (7, 4))), targets(6, 7, share=0)]
    compiled = compiled_with(DECLINED[reason], ChunkedLossExecutor())
    results = []
    for call in (compiled, DECLINED[reason]):
        torch.manual_seed(0)
        results.append(call(*inputs))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    ((accepted, found),) = claims(compiled, "chunked_loss")
    assert not accepted and reason in found


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_bad_chunks_are_refused(rows):
    with pytest.raises(ValueError, match="chunk_rows=.* is not allowed: give 1 or more"):
        ChunkedLossExecutor(rows)


def test_a_part_without_gradients_gets_none():
    def function(x, weight, target):
        with torch.no_grad():
            logits = F.linear(x, weight)
        return F.cross_entropy(logits, target) + x.sum()

    x, weight = laid_out((6, 4), torch.float64, "dense"), laid_out((7, 4), torch.float64, "dense")
    compiled = compiled_with(function, ChunkedLossExecutor(4))
    gradients = torch.autograd.grad(compiled(x, weight, targets(6, 7)), [x, weight], allow_unused=True)
    assert gradients[1] is None or not gradients[1].any()
    torch.testing.assert_close(gradients[0], torch.ones_like(x))
    assert claims(compiled, "chunked_loss") == TAKEN


def test_a_gradient_of_a_gradient_is_never_computed_from_constants():
    """A penalty on the gradient of the loss: the program runs eagerly, with the reason, and equals eager."""
    torch.manual_seed(0)
    head, target = nn.Linear(4, 7), targets(6, 7)

    def function(x):
        value = F.cross_entropy(head(x), target)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + 100 * gradient.square().sum()

    found = []
    for call in (lts.compile(function, executors=[ChunkedLossExecutor(), "eager"]), function):
        torch.manual_seed(1)
        x = laid_out((6, 4), torch.float32, "dense")
        if call is not function:
            with pytest.warns(lts.CompileWarning, match="no second derivative"):
                call(x).backward()
        else:
            call(x).backward()
        found.append((x.grad, head.weight.grad))
        head.weight.grad = None
    torch.testing.assert_close(*found)


def test_an_input_that_is_edited_before_the_loss_is_not_read_late():
    def function(x, weight, target):
        x = x * 1
        logits = F.linear(x, weight)
        x.mul_(3)
        return F.cross_entropy(logits, target) + x.sum()

    inputs = [laid_out(size, torch.float32, "dense", requires_grad=False) for size in ((6, 4), (7, 4))]
    compiled = compiled_with(function, ChunkedLossExecutor(4))
    torch.testing.assert_close(compiled(*inputs, targets(6, 7)), function(*inputs, targets(6, 7)))
    assert claims(compiled, "chunked_loss") == [(False, "values may be changed in place inside it (mul_)")]
