"""Our Triton kernels on a GPU or in Triton's interpreter on a CPU (``make triton``), and what is said without both."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import TritonExecutor
from lightning_thunder_strategy.executors.packages import import_problem
from lightning_thunder_strategy.executors.triton import interpreted
from tests.executors import reference
from tests.executors.reference import check, claims, compiled_with
from tests.executors.test_chunked_loss import loss
from tests.executors.test_chunked_loss import targets as targets_on_cpu
from tests.opinfo import sweep

TAKEN = [(True, "")]
DEVICE = "cpu" if interpreted() or not torch.cuda.is_available() else "cuda"
HERE = import_problem("triton") is None and (interpreted() or torch.cuda.is_available())
needs_kernels = pytest.mark.skipif(not HERE, reason="needs a GPU, or Triton's interpreter: make triton")
laid_out = functools.partial(reference.laid_out, device=DEVICE)
TYPES = [torch.float32, torch.bfloat16]


def written_norm(x, weight):
    wide = x.float()
    mean = torch.mean(wide * wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean + 1e-5) * weight.float()).to(dtype=x.dtype)


def targets(*args, **options):
    return targets_on_cpu(*args, **options).to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize(("reduction", "ignored"), [("mean", -100), ("sum", 3)])
def test_the_loss_and_its_gradients_are_those_of_float64(dtype, layout, reduction, ignored):
    torch.manual_seed(0)
    inputs = [laid_out(shape, dtype, layout) for shape in ((11, 6), (9, 6), (9,))]
    compiled = check(
        lambda x, w, b, t: loss(x, w, b, t, ignore_index=ignored, reduction=reduction),
        [*inputs, targets(11, 9, ignored)], TritonExecutor(4),
    )  # fmt: skip
    assert claims(compiled, "triton") == TAKEN
    assert "lts.triton_linear_cross_entropy" in str(lts.traces(compiled)[0][-2])


@needs_kernels
@pytest.mark.parametrize("classes", [1, 2, 4095, 4096, 4097, 9000])
def test_the_loss_over_several_blocks_of_classes(classes):
    torch.manual_seed(0)
    inputs = [laid_out(shape, torch.float32, "dense") for shape in ((3, 4), (classes, 4))]
    check(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), [*inputs, targets(3, classes)], TritonExecutor(2))


@needs_kernels
@pytest.mark.parametrize(("rows", "classes", "features"), [(0, 5, 4), (1, 1, 1), (1, 5, 4), (8, 5, 1)])
def test_the_loss_of_sizes_of_zero_and_one(rows, classes, features):
    torch.manual_seed(0)
    inputs = [laid_out(shape, torch.float32, "dense") for shape in ((rows, features), (classes, features), (classes,))]
    check(loss, [*inputs, targets(rows, classes, share=0)], TritonExecutor(4))


@needs_kernels
def test_large_logits_do_not_overflow_and_ignored_rows_count_for_nothing():
    x = torch.full((4, 2), 90.0, requires_grad=True, device=DEVICE)
    weight = torch.tensor([[10.0, 10], [-10, -10]], requires_grad=True, device=DEVICE)
    check(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        [x, weight, torch.tensor([0, 1, -100, 0], device=DEVICE)], TritonExecutor(),
    )  # fmt: skip
    ignored = torch.full((4,), -100, device=DEVICE)
    check(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), [x, weight, ignored], TritonExecutor())


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_and_its_gradients_are_those_of_float64(dtype, layout, weighted):
    torch.manual_seed(0)
    x = laid_out((3, 4, 10), dtype, layout)
    weights = [laid_out((10,), dtype, layout)] if weighted else []
    function = lambda x, *w: F.rms_norm(x, (10,), *w, eps=1e-5)  # noqa: E731
    compiled = check(function, [x, *weights], TritonExecutor())
    assert claims(compiled, "triton") == TAKEN
    assert "lts.triton_rms_norm.default" in str(lts.traces(compiled)[0][-2])


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 1), (4,), (300, 3), (2, 1025)])
def test_rms_norm_of_other_sizes(shape):
    torch.manual_seed(0)
    inputs = [laid_out(shape, torch.float32, "dense"), laid_out(shape[-1:], torch.float32, "dense")]
    compiled = check(lambda x, w: F.rms_norm(x, shape[-1:], w, eps=1e-5), inputs, TritonExecutor())
    assert claims(compiled, "triton") == TAKEN


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_that_is_written_out(dtype):
    x, weight = laid_out((5, 8), dtype, "dense"), laid_out((8,), dtype, "dense")
    compiled = compiled_with(written_norm, TritonExecutor())
    check(lambda x, w: F.rms_norm(x, (8,), w, 1e-5), [x, weight], compiled=compiled)
    assert claims(compiled, "triton") == TAKEN


@pytest.mark.skipif(not HERE or not interpreted(), reason="needs Triton's interpreter: make triton")
def test_torchs_own_samples_of_rms_norm():
    (op,) = sweep.operators(["nn.functional.rms_norm"])
    outcome = sweep.check(op, torch.float32, [TritonExecutor()], samples=20)
    assert outcome.result == "equal", outcome


@needs_kernels
def test_both_inside_a_checkpoint_with_symbolic_sizes():
    torch.manual_seed(0)
    norm, weight = laid_out((8,), torch.float32, "dense"), laid_out((7, 8), torch.float32, "dense")

    def function(x, norm, weight, target):
        inner = lambda x: F.cross_entropy(F.linear(F.rms_norm(x, (8,), norm, 1e-5), weight), target)  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)

    compiled = compiled_with(function, TritonExecutor(4), dynamic=True)
    for rows in (5, 9):
        inputs = [laid_out((rows, 8), torch.float32, "dense"), norm, weight, targets(rows, 7)]
        torch._dynamo.mark_static(norm)
        check(function, inputs, compiled=compiled)


DECLINED = {
    "take float32 and bfloat16, and this is torch.float64": lambda x, w: F.rms_norm(x.double(), (4,)),
    "it normalizes 2 dimensions": lambda x, w: F.rms_norm(x, (6, 4)),
    "it mixes types": lambda x, w: F.rms_norm(x.bfloat16(), (4,), w),
}


@needs_kernels
@pytest.mark.parametrize("reason", DECLINED)
def test_what_it_declines_runs_as_before_with_the_reason_in_the_report(reason):
    inputs = [laid_out(shape, torch.float32, "dense") for shape in ((6, 4), (4,))]
    compiled = compiled_with(DECLINED[reason], TritonExecutor())
    torch.testing.assert_close(compiled(*inputs), DECLINED[reason](*inputs), rtol=0, atol=0)
    ((accepted, found),) = claims(compiled, "triton")
    assert not accepted and reason in found


@needs_kernels
def test_a_users_triton_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y, size, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size)
        tl.store(y + at, value / (1 + tl.exp(-value)), mask=at < size)

    def backward(gradient, x):
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))

    @lts.executors.register("triton_silu", replaces=F.silu, fake=torch.empty_like, backward=backward)
    def silu(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
        return y

    compiled = check(F.silu, [laid_out((20, 30), torch.float32, "dense")], "triton_silu")
    assert claims(compiled, "triton_silu") == TAKEN


@pytest.mark.skipif(import_problem("triton") is None, reason="Triton is installed")
def test_where_triton_is_missing_the_install_command_is_named():
    message = (
        "'triton' cannot run here: The package 'triton' is not installed.*"
        "triton: not available: The package 'triton' is not installed. To install: pip install triton"
    )
    with pytest.raises(ValueError, match=f"(?s){message}"):
        lts.compile(F.silu, executors=["triton"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("lightning_thunder_strategy.executors.triton.import_problem", lambda module: None)
    with pytest.raises(ValueError, match="'triton' cannot run here: (This torch .* without CUDA|No CUDA GPU is found)"):
        lts.compile(F.silu, executors=["triton"])


@pytest.mark.parametrize("rows", [0, True, 2.5])
def test_bad_chunks_are_refused(rows):
    with pytest.raises(ValueError, match="chunk_rows=.* is not allowed: give 1 or more"):
        TritonExecutor(rows)
