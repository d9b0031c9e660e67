"""Liger's kernels: which operations of real models they take, and values and gradients of float64 eager.

Patterns are tested everywhere, with torch in the place of the kernels; the kernels on a GPU, or in Triton's interpreter
where liger-kernel is installed (``make triton``).
"""

import contextlib
import sys

import pytest
import torch
import torch.nn.functional as F

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import LigerExecutor, liger_operators
from lightning_thunder_strategy.executors.packages import import_problem
from lightning_thunder_strategy.executors.triton import interpreted
from tests.executors import liger_stand_in, reference
from tests.executors.reference import check, claims, compiled_with
from tests.executors.test_chunked_loss import loss
from tests.executors.test_chunked_loss import targets as targets_on_cpu

TAKEN = [(True, "")]
MODULE = "lightning_thunder_strategy.executors.liger_kernels"
DEVICE = "cpu" if interpreted() or not torch.cuda.is_available() else "cuda"
PROBLEM = import_problem("triton") or import_problem("liger_kernel.ops")
if PROBLEM is None and not interpreted() and not torch.cuda.is_available():
    PROBLEM = "there is no GPU, and TRITON_INTERPRET is not set"
KINDS = ["in torch", pytest.param("kernels", marks=pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)))]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def in_torch(monkeypatch):
    """The operators of the executor compute in torch, on a CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, MODULE, liger_stand_in)
    monkeypatch.setattr(LigerExecutor, "unavailable", lambda self: None)
    monkeypatch.setattr(liger_operators, "_equal_halves", {})


@pytest.fixture(params=KINDS)
def device(request):
    """The device to test on, with Liger's kernels or with torch in their place."""
    if request.param == "in torch":
        request.getfixturevalue("in_torch")
        return "cpu"
    if interpreted():
        request.getfixturevalue("interpreter")
    return DEVICE


@pytest.fixture
def interpreter(monkeypatch):
    """What Liger's kernels use and Triton's interpreter lacks: methods of numbers, and libdevice."""
    import liger_kernel.ops.rms_norm
    import triton.language as tl
    from triton.runtime import interpreter as found

    class Number(float):
        def to(self, dtype):
            return self

    as_before = found._implicit_cvt
    monkeypatch.setattr(found, "_implicit_cvt", lambda arg: Number(arg) if type(arg) is float else as_before(arg))
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", lambda value: 1 / tl.sqrt(value))


def operators(compiled):
    """How often each operator of ours is in the forward."""
    names = ("rms_norm", "swiglu", "rope", "cross_entropy", "linear_cross_entropy")
    text = str(lts.traces(compiled)[0][-2])
    found = {name: text.count(f"lts.liger_{name}.default(") for name in names}
    return {name: count for name, count in found.items() if count}


def litgpt_model():
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "intermediate_size": 48}
    return GPT(Config.from_name("Llama-3.2-1B", padded_vocab_size=64, block_size=16, **sizes))


def hugging_face_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes))


@pytest.mark.parametrize("name", ["litgpt", "hugging_face"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_what_is_taken_of_real_models(in_torch, name, kind):
    torch.manual_seed(0)
    model = litgpt_model() if name == "litgpt" else hugging_face_model()
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    tokens, target = torch.randint(64, (2, 9)), torch.randint(64, (2, 9))
    target[0, :4] = -100

    def step(model, tokens, target):
        logits = model(tokens) if name == "litgpt" else model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    compiled = compiled_with(step, LigerExecutor(8))
    found = []
    for call in (compiled, step):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext():
            value = call(model, tokens, target)
        value.backward()
        found.append((value.detach(), [parameter.grad for parameter in model.parameters()]))
    assert operators(compiled) == {"rms_norm": 5, "swiglu": 2, "rope": 4, "linear_cross_entropy": 1}
    tolerance = 1e-5 if kind == "float32" else 3e-2
    torch.testing.assert_close(found[0][0], found[1][0], rtol=tolerance, atol=tolerance)
    for one, other in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(float(other.abs().max()), 1e-2))


def litgpt_norm(x, weight, eps=1e-5):
    wide = x.float()
    mean = torch.mean(wide * wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean + eps) * weight.float()).to(dtype=x.dtype)


def llama_norm(x, weight, eps=1e-5):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma_norm(x, weight, eps=1e-5):
    wide = x.float()
    output = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (output * (1.0 + weight.float())).type_as(x)


def bare_norm(x, weight, eps=1e-5):
    return (x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) + 0 * weight.sum()


def own_norm(x, weight, eps=1e-5):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


NORMS = [litgpt_norm, llama_norm, gemma_norm, own_norm]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_float64(device, dtype, norm):
    torch.manual_seed(0)
    for layout in ("dense", "transposed", "sliced", "expanded"):
        inputs = [reference.laid_out(shape, dtype, layout, device=device) for shape in ((3, 4, 10), (10,))]
        compiled = check(_in_float64(norm), inputs, LigerExecutor())
        assert claims(compiled, "liger") == TAKEN
        assert operators(compiled) == {"rms_norm": 1}


def _in_float64(norm):
    """The oracle computes in float64, so it must not cast to float32."""
    return lambda x, w: own_norm(x, w + 1 if norm is gemma_norm else w) if x.dtype == torch.float64 else norm(x, w)


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_round_where_eager_does(in_torch, dtype, norm):
    """Bit by bit: a mode that rounds elsewhere differs in bfloat16."""
    torch.manual_seed(0)
    x, weight = (reference.laid_out(shape, dtype, "dense") for shape in ((64, 32), (32,)))
    found, expected = compiled_with(norm, LigerExecutor())(x, weight), norm(x, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 1), (4,), (300, 3), (2, 1025)])
def test_norms_of_other_sizes(device, shape):
    torch.manual_seed(0)
    inputs = [reference.laid_out(size, torch.float32, "dense", device=device) for size in (shape, shape[-1:])]
    for norm in NORMS:
        assert claims(check(_in_float64(norm), inputs, LigerExecutor()), "liger") == TAKEN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [32768, 32768 + 5])
def test_norms_of_many_short_rows(rows):
    torch.manual_seed(0)
    inputs = [reference.laid_out(size, torch.float32, "dense", device=DEVICE) for size in ((rows, 64), (64,))]
    check(own_norm, inputs, LigerExecutor())


def test_a_norm_without_weight(device):
    x = reference.laid_out((6, 8), torch.bfloat16, "dense", device=device)
    compiled = check(lambda x: F.rms_norm(x, (8,), eps=1e-5), [x], LigerExecutor())
    assert operators(compiled) == {"rms_norm": 1}
    written = compiled_with(lambda x: bare_norm(x, torch.zeros((), device=x.device)), LigerExecutor())
    torch.testing.assert_close(written(x), bare_norm(x, torch.zeros((), device=device)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("first", [True, False])
def test_swiglu_is_that_of_float64(device, dtype, first):
    torch.manual_seed(0)
    function = lambda a, b: F.silu(a) * b if first else b * F.silu(a)  # noqa: E731
    for layout in ("dense", "transposed", "sliced", "expanded"):
        inputs = [reference.laid_out((3, 4, 10), dtype, layout, device=device) for _ in range(2)]
        compiled = check(function, inputs, LigerExecutor())
        assert claims(compiled, "liger") == TAKEN
    for shape in ((0, 4), (1, 1), (5, 1), (4,), (2, 1025)):
        inputs = [reference.laid_out(shape, dtype, "dense", device=device) for _ in range(2)]
        assert claims(check(function, inputs, LigerExecutor()), "liger") == TAKEN


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(x, angles):
    angles = torch.cat((angles, angles), dim=-1)
    return x * angles.cos().unsqueeze(1) + rotate_half(x) * angles.sin().unsqueeze(1)


@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "expanded", "swapped"])
@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (3, 2), (4, 1)])
def test_rotations_are_those_of_float64(device, layout, heads, batch):
    torch.manual_seed(0)
    x = reference.laid_out((2, heads, 5, 6), torch.float32, layout, device=device)
    angles = torch.randn(batch, 5, 3, device=device)
    compiled = check(rotate, [x, angles], LigerExecutor())
    assert claims(compiled, "liger") == TAKEN
    assert operators(compiled) == {"rope": 1}


@pytest.mark.skipif(interpreted(), reason="Triton's interpreter computes products of bfloat16 wrongly")
@pytest.mark.parametrize("dtype", TYPES[1:])
def test_rotations_in_low_precision(device, dtype):
    torch.manual_seed(0)
    x = reference.laid_out((2, 3, 5, 6), dtype, "swapped", device=device)
    for angles in (torch.randn(2, 5, 3, device=device, dtype=dtype), torch.randn(2, 5, 3, device=device)):
        compiled = check(rotate, [x, angles], LigerExecutor())
        assert claims(compiled, "liger") == TAKEN


def test_rotations_of_no_rows(device):
    x = reference.laid_out((2, 3, 0, 6), torch.float32, "dense", device=device)
    check(rotate, [x, torch.randn(2, 0, 3, device=device)], LigerExecutor())


def test_rotations_by_inputs_are_right_for_unequal_halves_too(device):
    torch.manual_seed(0)
    function = lambda x, cos, sin: x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)  # noqa: E731
    x = reference.laid_out((2, 3, 5, 6), torch.float32, "dense", device=device)
    half = torch.randn(2, 1, 5, 3, device=device)
    compiled = check(function, [x, *torch.cat((half, half), -1)], LigerExecutor())
    assert claims(compiled, "liger") == TAKEN
    check(function, [x, *torch.randn(2, 1, 5, 6, device=device)], compiled=compiled)


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize(("reduction", "ignored"), [("mean", -100), ("sum", 3)])
def test_losses_are_those_of_float64(device, dtype, reduction, ignored):
    torch.manual_seed(0)
    options = {"reduction": reduction, "ignore_index": ignored}
    for layout in ("dense", "transposed", "sliced", "expanded"):
        inputs = [reference.laid_out(shape, dtype, layout, device=device) for shape in ((11, 6), (9, 6), (9,))]
        target = targets_on_cpu(11, 9, ignored).to(device)
        compiled = check(lambda *args: loss(*args, **options), [*inputs, target], LigerExecutor(4))
        assert operators(compiled) == {"linear_cross_entropy": 1}
        logits = reference.laid_out((11, 9), dtype, layout, device=device)
        compiled = check(lambda x, t: F.cross_entropy(x * 1, t, **options), [logits, target], LigerExecutor())
        assert operators(compiled) == {"cross_entropy": 1}
        assert claims(compiled, "liger") == TAKEN


@pytest.mark.parametrize(("rows", "classes"), [(0, 5), (1, 1), (1, 5), (8, 1), (3, 1025)])
def test_losses_of_other_sizes(device, rows, classes):
    torch.manual_seed(0)
    logits = reference.laid_out((rows, classes), torch.float32, "dense", device=device)
    for share in (0, 1):
        target = targets_on_cpu(rows, classes, share=share).to(device)
        check(lambda x, t: F.cross_entropy(x, t), [logits, target], LigerExecutor())


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_a_target_that_is_no_class_writes_nowhere_and_gives_nan():
    logits = torch.zeros(3, 4, device=DEVICE, requires_grad=True)
    compiled = compiled_with(lambda x, t: F.cross_entropy(x, t), LigerExecutor())
    assert compiled(logits, torch.tensor([0, 10**9, 2], device=DEVICE)).isnan()


def test_nothing_that_others_use_is_overwritten(device):
    """All inputs are used again, and the backward runs twice."""
    torch.manual_seed(0)
    sizes = ((8, 6), (8, 6), (6,))
    inputs = [reference.laid_out(size, torch.float32, "dense", device=device) for size in sizes]
    target = targets_on_cpu(8, 6).to(device)

    def function(a, b, weight, target):
        norm = own_norm(a, weight)
        product = F.silu(norm) * b
        return F.cross_entropy(product, target) + (a * b * norm * product).sum()

    compiled = compiled_with(function, LigerExecutor())
    before = [value.detach().clone() for value in inputs]
    found, expected = compiled(*inputs, target), function(*inputs, target)
    wanted = torch.autograd.grad(expected, inputs)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(found, inputs, retain_graph=True), wanted)
    torch.testing.assert_close([value.detach() for value in inputs], before, rtol=0, atol=0)
    assert operators(compiled) == {"rms_norm": 1, "swiglu": 1, "cross_entropy": 1}


def test_symbolic_sizes(device):
    torch.manual_seed(0)
    weight = reference.laid_out((6,), torch.float32, "dense", device=device)

    def function(x, weight):
        norm = own_norm(x, weight)
        turned = rotate(norm.unsqueeze(1), norm[..., :3].detach())
        return (F.silu(turned) * norm.exp().unsqueeze(1)).sum()

    compiled = compiled_with(function, LigerExecutor(), dynamic=True)
    for rows in (5, 9, 11):
        x = reference.laid_out((2, rows, 6), torch.float32, "dense", device=device)
        torch._dynamo.mark_static(x, 2)
        torch._dynamo.mark_static(weight)
        check(function, [x, weight], compiled=compiled)
    assert operators(compiled) == {"rms_norm": 1, "rope": 1, "swiglu": 1}
