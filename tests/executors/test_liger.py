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


def skip_products_of_bfloat16(dtype):
    if dtype == torch.bfloat16 and sys.modules.get(MODULE) is not liger_stand_in and interpreted():
        pytest.skip("Triton's interpreter computes products of bfloat16 wrongly")


def layouts():
    """One is enough where torch computes, which takes any."""
    in_torch = sys.modules.get(MODULE) is liger_stand_in
    return ["transposed"] if in_torch else ["dense", "transposed", "sliced", "expanded"]


def operators(compiled):
    """How often each operator of ours is in the forward."""
    names = ("rms_norm", "swiglu", "rope", "cross_entropy", "linear_cross_entropy")
    text = str(lts.traces(compiled)[0][-2])
    found = {name: text.count(f"lts.liger_{name}.default(") for name in names}
    return {name: count for name, count in found.items() if count}


def litgpt_model():
    from litgpt import GPT, Config

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "intermediate_size": 48}
    return GPT(Config.from_name("Llama-3.2-1B", padded_vocab_size=64, block_size=16, **sizes))


def hugging_face_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
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
    assert operators(compiled) == {"rms_norm": 3, "swiglu": 1, "rope": 2, "linear_cross_entropy": 1}
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


def bare_norm(x, eps=1e-5):
    wide = x.float()
    return (wide / torch.sqrt(eps + torch.square(wide).mean((-1,), True))).to(x.dtype)


def own_norm(x, weight, eps=1e-5):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


NORMS = [litgpt_norm, llama_norm, gemma_norm, own_norm]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_float64(device, dtype, norm):
    skip_products_of_bfloat16(dtype if norm is llama_norm else None)
    torch.manual_seed(0)
    for layout in layouts():
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
    written = compiled_with(bare_norm, LigerExecutor())
    torch.testing.assert_close(written(x), bare_norm(x), rtol=1e-2, atol=1e-2)
    written(x).sum().backward()
    assert operators(written) == {"rms_norm": 1}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("first", [True, False])
def test_swiglu_is_that_of_float64(device, dtype, first):
    skip_products_of_bfloat16(dtype)
    torch.manual_seed(0)
    function = lambda a, b: F.silu(a) * b if first else b * F.silu(a)  # noqa: E731
    for layout in layouts():
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


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_rotations_in_low_precision(device, dtype):
    skip_products_of_bfloat16(dtype)
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
    for _ in range(2):  # often where the first ones were in memory
        check(function, [x, *torch.randn(2, 1, 5, 6, device=device)], compiled=compiled)


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize(("reduction", "ignored"), [("mean", -100), ("sum", 3)])
def test_losses_are_those_of_float64(device, dtype, reduction, ignored):
    torch.manual_seed(0)
    options = {"reduction": reduction, "ignore_index": ignored}
    for layout in layouts():
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
        torch.testing.assert_close(torch.autograd.grad(found, inputs, retain_graph=True), wanted, rtol=1e-4, atol=1e-5)
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


def halves_in_another_order(x, weight):
    x, angles = x[None, None], x[None, :, :2].detach()
    angles = torch.cat((angles, angles.flip(-1)), dim=-1)
    return x * angles.cos().unsqueeze(1) + rotate_half(x) * angles.sin().unsqueeze(1)


def interleaved(x, angles):
    angles = torch.cat((angles, angles), dim=-1)
    pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angles.cos().unsqueeze(1) + pairs * angles.sin().unsqueeze(1)


def edited_norm(x, weight):
    wide = x.detach().float() * 1
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    wide.mul_(2)
    return (wide * scale * weight).to(x.dtype)


def norm_of_an_edited_cast(x, weight):
    wide = (x * 1).bfloat16().float()
    wide.mul_(2)
    return llama_norm(wide, weight)


def norm_with_a_constant_scale(x, weight):
    wide = x.float() * 1
    with torch.no_grad():
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return wide * scale * weight


def norm_whose_scale_is_used(x, weight):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale * weight + scale


DECLINED = {
    "changed in place inside it (mul_)": edited_norm,
    "the mode of autograd or autocast changes inside it": norm_with_a_constant_scale,
    "a value inside it is used elsewhere too (": norm_whose_scale_is_used,
    "it is computed in torch.bfloat16": lambda x, w: in_bfloat16(x, w),
    "it takes torch.bfloat16 and gives torch.float32": lambda x, w: llama_norm(x.bfloat16(), w),
    "it mixes types": lambda x, w: F.silu(x) * x.bfloat16(),
    "its factors are [6, 4] and [4]": lambda x, w: F.silu(x) * w,
    "it multiplies a SiLU with itself": lambda x, w: (lambda y: y * y)(F.silu(x)),
    "its SiLU works in place": lambda x, w: F.silu(x + 1, inplace=True) * x,
    "and this is torch.float64": lambda x, w: F.silu(x.double()) * x.double(),
    "does not show that its two halves are equal": halves_in_another_order,
    "it takes [batch, heads, tokens, features]": lambda x, w: rotate(x, x[:, :2].detach())[0],
    "label_smoothing=0.1": lambda x, w: F.cross_entropy(x, x[:, 0].long() * 0, label_smoothing=0.1),
}  # fmt: skip


def in_bfloat16(x, weight):
    x, weight = x.bfloat16(), weight.bfloat16()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined_runs_as_before_with_the_reason_in_the_report(in_torch, reason):
    inputs = [reference.laid_out(shape, torch.float32, "dense") for shape in ((6, 4), (4,))]
    compiled = compiled_with(DECLINED[reason], LigerExecutor())
    torch.testing.assert_close(compiled(*inputs), DECLINED[reason](*inputs), rtol=0, atol=0)
    reasons = [found for accepted, found in claims(compiled, "liger") if not accepted]
    assert any(reason in found for found in reasons), claims(compiled, "liger")


def test_an_edit_of_a_cast_is_not_lost(in_torch):
    inputs = [reference.laid_out(shape, torch.float32, "dense") for shape in ((6, 4), (4,))]
    compiled = compiled_with(norm_of_an_edited_cast, LigerExecutor())
    torch.testing.assert_close(compiled(*inputs), norm_of_an_edited_cast(*inputs), rtol=1e-6, atol=1e-6)
    assert claims(compiled, "liger") == TAKEN


@torch.library.custom_op("lts_tests::double_it", mutates_args=("x",))
def double_it(x: torch.Tensor) -> None:
    x.mul_(2)


def _edited_by_an_operator(gate, up):
    value = F.silu(gate)
    double_it(value)
    return value * up


def _edited_by_position(gate, up):
    value = F.silu(gate * 1)
    F.relu(value, True)
    return value * up


@pytest.mark.parametrize("function", [_edited_by_an_operator, _edited_by_position])
def test_edits_by_operators_and_by_position_are_seen(in_torch, function):
    torch.manual_seed(0)
    compiled = compiled_with(function, LigerExecutor())
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(compiled(gate, up), function(gate, up))
    assert claims(compiled, "liger") != TAKEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_eps_takes_that_of_its_computation(in_torch, dtype):
    torch.manual_seed(0)
    x = (0.05 * torch.randn(3, 8)).to(dtype)
    compiled = compiled_with(lambda x: F.rms_norm(x, (8,)), LigerExecutor())
    torch.testing.assert_close(compiled(x), F.rms_norm(x, (8,)))
    assert claims(compiled, "liger") == TAKEN


def test_tables_that_are_edited_after_they_were_put_together(in_torch):
    def function(x, angles):
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        cos[..., 3:] = 1
        sin[..., 3:] = 0
        return x * cos + rotate_half(x) * sin

    torch.manual_seed(0)
    x, angles = torch.randn(2, 3, 5, 6), torch.randn(1, 1, 5, 3)
    torch.testing.assert_close(compiled_with(function, LigerExecutor())(x, angles), function(x, angles))


def test_rotations_in_inference_mode_and_views_of_their_results(in_torch):
    def function(x, cos, sin):
        return (x * cos + rotate_half(x) * sin).view(6, 5, 6)

    torch.manual_seed(0)
    half = torch.randn(1, 1, 5, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x, table = torch.randn(2, 3, 5, 6), torch.cat((half, half), -1)
            compiled = compiled_with(function, LigerExecutor())
            torch.testing.assert_close(compiled(x, table, table), function(x, table, table))
            assert claims(compiled, "liger") == TAKEN


@pytest.mark.parametrize("layout", ["expanded", "part"])
def test_the_backward_of_rotations_by_views_of_tables(device, layout):
    torch.manual_seed(0)
    half = torch.randn(2, 1, 9, 3, device=device)
    table = torch.cat((half, half), -1)
    table = table[:1, :, :5].expand(2, 1, 5, 6) if layout == "expanded" else table[:, :, :5]
    x = reference.laid_out((2, 3, 5, 6), torch.float32, "dense", device=device)
    compiled = check(lambda x, t: x * t + rotate_half(x) * t, [x, table], LigerExecutor())
    assert claims(compiled, "liger") == TAKEN


def test_other_rotations_are_none(in_torch):
    x, angles = torch.randn(2, 3, 5, 6), torch.randn(2, 5, 3)
    compiled = compiled_with(interleaved, LigerExecutor())
    torch.testing.assert_close(compiled(x, angles), interleaved(x, angles), rtol=0, atol=0)
    assert claims(compiled, "liger") == []


SECOND = {
    "liger_rms_norm": lambda x: own_norm(x, None),
    "liger_swiglu": lambda x: F.silu(x) * x.cos(),
    "liger_rope": lambda x: rotate(x[None, None], x[None, :, :2].detach()).square(),
    "liger_cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_gradient_of_a_gradient_is_never_computed_from_constants(in_torch, name):
    """A penalty on the gradient: the program runs eagerly, with the reason, and equals eager."""

    def function(x):
        value = SECOND[name](x).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    found = []
    for call in (lts.compile(function, executors=[LigerExecutor(), "eager"]), function):
        torch.manual_seed(0)
        x = reference.laid_out((6, 4), torch.float32, "dense")
        context = contextlib.nullcontext() if call is function else pytest.warns(lts.CompileWarning, match=name)
        with context:
            call(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.skipif(import_problem("liger_kernel.ops") is None, reason="Liger is installed")
def test_where_it_is_missing_the_install_command_is_named(monkeypatch):
    monkeypatch.setattr(
        "lightning_thunder_strategy.executors.liger.import_problem",
        lambda module: None if module == "triton" else import_problem(module),
    )
    message = (
        "'liger' cannot run here: The package 'liger_kernel' is not installed.*"
        "liger: not available: The package 'liger_kernel' is not installed. To install: pip install 'liger-kernel>=0.8'"
    )
    with pytest.raises(ValueError, match=f"(?s){message}"):
        lts.compile(F.silu, executors=["liger"])


def test_versions_that_are_too_old_and_a_missing_gpu_are_named(monkeypatch):
    monkeypatch.setattr("lightning_thunder_strategy.executors.liger.import_problem", lambda module: None)
    monkeypatch.setattr(LigerExecutor, "version", lambda self: "0.7.1")
    assert LigerExecutor().unavailable() == "liger-kernel 0.7.1 is too old: 0.8 or newer is needed."
    assert LigerExecutor().install_command() == "pip install 'liger-kernel>=0.8'"
    monkeypatch.setattr(LigerExecutor, "version", lambda self: "0.8.5")
    monkeypatch.setattr("lightning_thunder_strategy.executors.liger.gpu_problem", lambda capability: "No GPU.")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert (LigerExecutor().unavailable(), LigerExecutor().install_command()) == ("No GPU.", "")
    assert "0.8.5" in LigerExecutor().cache_key()


@pytest.mark.parametrize("rows", [0, True, 2.5])
def test_bad_chunks_are_refused(rows):
    with pytest.raises(ValueError, match="chunk_rows=.* is not allowed: give 1 or more"):
        LigerExecutor(rows)
