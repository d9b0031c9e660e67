"""Results, gradients and side effects of compiled functions are those of eager PyTorch."""

import collections
import copy
import dataclasses
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import lightning_thunder_strategy as lts
from tests.compiler.parity import assert_same, check_function, check_module, eager_compiled

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    extra: Any = None


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


OUTPUTS = {
    "tensor": lambda x: x.sin(),
    "nothing": lambda x: None,
    "tuple": lambda x: (x.sin(), x.cos()),
    "list with none": lambda x: [x.sin(), None, 3, "text", 2.5, True],
    "named tuple": lambda x: Pair(x.sin(), x.cos()),
    "nested": lambda x: {"a": [x.sin(), {"b": (x.cos(), None)}], "c": ()},
    "dataclass": lambda x: Result(x.sum(), {"inner": Result(x.mean())}),
    "model output": lambda x: BaseModelOutput(last_hidden_state=x.exp(), attentions=(x.sin(), x.cos())),
    "ordered dict": lambda x: collections.OrderedDict(b=x.sin(), a=x.cos()),
    "torch objects": lambda x: (x.dtype, x.device, x.shape, x.layout, x.sin()),
    "input itself": lambda x: (x, x.sin()),
    "view of input": lambda x: (x[0], x.view(-1)),
    "same twice": lambda x: (lambda y: (y, y))(x.sin()),
    "detached": lambda x: (x.sin().detach(), x.cos()),
    "integers": lambda x: (x.argmax(), x.sin()),
    "no tensor": lambda x: (1, "a"),
    "empty": lambda x: [],
    "sizes": lambda x: (x.shape[0] * 2, x.numel(), x.dim(), x.sin()),
    "constant": lambda x: (torch.arange(3), torch.tensor(float("inf")), x.sin()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_kind_of_output_has_the_type_values_and_gradients_of_eager(name):
    check_function(OUTPUTS[name], leaf(3, 4))


def _kwargs(x, *rest, scale=2.0, **more):
    return x * scale + sum(rest) + more.get("bias", 0) + len(more)


def test_positional_keyword_and_variable_arguments():
    x, y, b = leaf(3), leaf(3), leaf(3)
    compiled = eager_compiled(_kwargs)
    for args, kwargs in [((x,), {}), ((x, y, 1), {}), ((x, y), {"scale": 3.0, "bias": b}), ((x,), {"other": "text"})]:
        assert_same(compiled(*args, **kwargs), _kwargs(*args, **kwargs))


def test_structured_arguments():
    def function(batch, config):
        return batch["x"] * config.first + batch["list"][1].sum() - config.second

    check_function(function, {"x": leaf(3), "list": [leaf(2), leaf(2)]}, Pair(2, 0.5))


def _chained_inplace(x):
    y = x * 2
    y.add_(1).mul_(3)
    y[0] = 7
    y[:, 1] += x[:, 0]
    y.view(-1)[2].zero_()
    return y.relu_()


def _edits_argument(x):
    x.mul_(2)
    x[0].add_(1)
    return x.sum() + x.t()[1].sum()


def _edits_view_of_argument(x):
    v = x.view(2, 6)
    v[:, 0] = -1
    first, second = x.chunk(2)
    first.copy_(second)
    return v * 2


def test_in_place_edits_of_intermediates():
    check_function(_chained_inplace, leaf(3, 4))


@pytest.mark.parametrize("function", [_edits_argument, _edits_view_of_argument])
def test_in_place_edits_of_arguments_reach_the_caller(function):
    check_function(function, torch.arange(12.0).view(4, 3))


def test_an_argument_passed_twice_is_edited_once():
    def function(x, y):
        x.add_(1)
        return x + y

    x, z = torch.ones(3), torch.ones(3)
    compiled = eager_compiled(function)
    assert_same(compiled(x, x), function(z, z))
    assert_same(x, z)
    assert_same(compiled(x, torch.zeros(3)), function(z, torch.zeros(3)))


def test_aliased_arguments_see_each_others_edits():
    def function(x, y):
        x.mul_(2)
        return y + 1

    base, other = torch.arange(4.0), torch.arange(4.0)
    assert_same(eager_compiled(function)(base, base[1:3]), function(other, other[1:3]))
    assert_same(base, other)


def test_lists_and_dicts_edited_by_the_function():
    def function(x, seen):
        seen["sum"] = x.sum()
        seen.setdefault("all", []).append(x * 2)
        return x.sin()

    mine, eager = {}, {}
    compiled = eager_compiled(function)
    for _ in range(2):
        x = leaf(3)
        assert_same(compiled(x, mine), function(x, eager))
        assert_same(mine, eager)


def test_random_numbers_are_those_of_eager():
    def function(x):
        noise = torch.rand_like(x) + torch.randn(4) + torch.randperm(4) + torch.bernoulli(x.sigmoid())
        return F.dropout(x, 0.4) + noise

    check_function(function, leaf(3, 4))


def test_dropout_and_attention_dropout_gradients_are_those_of_eager():
    def function(q, k, v):
        return F.dropout(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True), 0.5)

    check_function(function, *(leaf(2, 2, 5, 4) for _ in range(3)))


def test_complex_numbers():
    def function(x, w):
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(w)
        return torch.fft.irfft(spectrum, n=8), torch.view_as_real(spectrum), spectrum.abs()

    check_function(function, leaf(3, 8), leaf(3, 5, 2))


def test_no_grad_region_inside_a_function_that_trains():
    def function(x):
        with torch.no_grad():
            scale = x.abs().max()
        y = x.sin() / scale
        with torch.no_grad():
            z = y * 2
            with torch.enable_grad():
                w = x.cos()
        return y, z, w

    check_function(function, leaf(3, 4))


def test_set_grad_enabled_is_restored_after_an_early_return():
    def function(x):
        torch.set_grad_enabled(False)
        y = x * 2
        torch.set_grad_enabled(True)
        return y, x * 3

    check_function(function, leaf(3))
    assert torch.is_grad_enabled()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 10 * x * ctx.scale, None  # not the true derivative: must be used as it is


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        index = x.argmax()
        ctx.mark_non_differentiable(index)
        return x * y, index

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        return grad * y * 7, None


def test_custom_autograd_functions_keep_their_own_backward():
    check_function(lambda x: Cube.apply(x.sin(), 2.0).cos(), leaf(3, 4))
    check_function(lambda x, y: TwoResults.apply(x, y)[0], leaf(3), torch.ones(3))


def test_tensor_hooks():
    def function(x, y):
        z = x * 2
        z.register_hook(lambda grad: grad * 10)
        w = z * y
        w.register_hook(lambda grad: grad + 1)
        return w

    check_function(function, leaf(3), leaf(3))


def test_hook_on_a_parameter_registered_before_the_call():
    net = nn.Linear(3, 2)
    compiled = eager_compiled(net)
    handle = net.weight.register_hook(lambda grad: grad * 5)
    x = torch.randn(4, 3)
    compiled(x).sum().backward()
    got = net.weight.grad.clone()
    net.weight.grad = None
    net(x).sum().backward()
    assert_same(got, net.weight.grad)
    handle.remove()
    net.weight.grad = None
    compiled(x).sum().backward()
    assert_same(net.weight.grad * 5, got)


def test_retained_gradient_of_an_intermediate():
    def function(x):
        return x * 2

    x, z = leaf(3), leaf(3)
    y, w = eager_compiled(function)(x), function(z)
    for value in (y, w):
        value.retain_grad()
        value.sin().sum().backward()
    assert_same(y.grad, w.grad)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoint(dropout, reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def block(self, x):
            return self.b(F.dropout(self.a(x).sin(), dropout, self.training))

        def forward(self, x):
            x = checkpoint(self.block, x, use_reentrant=reentrant)
            return checkpoint(self.block, x, use_reentrant=reentrant)

    # A reentrant checkpoint adds each region's gradients to a parameter in an order of its own.
    check_module(Net, [(leaf(3, 4),), (leaf(3, 4),)], rtol=1e-5 * reentrant, atol=1e-6 * reentrant)


def test_activation_checkpoints_save_less_for_the_backward():
    def block(x):
        return x.sin().exp().tanh().sigmoid()

    def saved(function):
        compiled = eager_compiled(function)
        compiled(leaf(3)).sum().backward()
        forward = next(trace for trace in lts.traces(compiled)[0] if trace.stage == "final forward")
        return [output.kind for output in forward.outputs].count("saved")

    def once(x):
        return block(block(block(x)))

    def in_parts(x):
        for _ in range(3):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert saved(in_parts) == 3 < saved(once)


def test_data_dependent_control_flow_breaks_the_program_and_keeps_the_result():
    def function(x):
        y = x * 2
        if y.sum() > 0:
            return y.sin()
        return y.cos()

    compiled = eager_compiled(function, fullgraph=False)
    for x in (torch.ones(3, requires_grad=True), -torch.ones(3, requires_grad=True)):
        assert_same(compiled(x), function(x))
    assert len(compiled.record.graph_breaks) == 1


def test_python_numbers_as_arguments():
    def function(x, n, f, flag, text):
        y = x * n + f
        if flag:
            y = y.sin()
        return (y if text == "a" else -y), n + 1, f * 2

    compiled = eager_compiled(function)
    for n in range(6):
        for args in ((n, 0.5, True, "a"), (n, 1.5 + n, False, "b")):
            x = leaf(3)
            assert_same(compiled(x, *args), function(x, *args))


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_changing_shapes(dynamic):
    def function(x, w):
        return (x @ w).relu().mean(0) * x.shape[0]

    compiled = eager_compiled(function, dynamic=dynamic)
    w = leaf(4, 5)
    for n in (3, 4, 5, 6, 1, 3, 7):
        x = leaf(n, 4)
        assert_same(compiled(x, w), function(x, w))
    graphs = len(compiled.record.programs)
    assert graphs == {None: 3, True: 2, False: 6}[dynamic]


ORDERS = [
    ("inference", "no_grad", "train"),
    ("train", "no_grad", "inference", "train"),
    ("no_grad", "train", "inference", "no_grad"),
    ("inference", "train", "inference", "train"),
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_gradient_modes_in_any_order(order):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    x = torch.randn(5, 4)
    contexts = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "train": torch.enable_grad}
    for step, mode in enumerate(order):
        results = []
        for candidate in (compiled, other):
            candidate.train(mode == "train")
            torch.manual_seed(step)
            with contexts[mode]():
                result = candidate(x)
            if mode == "train":
                result.sum().backward()
            results.append((result.detach(), result.requires_grad, result.is_inference()))
        assert_same(results[0], results[1])
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters()):
        assert_same(mine.grad, theirs.grad, name)
    assert_same(dict(net.named_buffers()), dict(other.named_buffers()))


def test_input_gradients_only_for_inputs_that_require_them():
    def function(x, y):
        return x * y

    compiled = eager_compiled(function)
    for a, b in [(True, False), (False, True), (True, True), (False, False)]:
        x, y = torch.ones(3).requires_grad_(a), torch.full((3,), 2.0).requires_grad_(b)
        result = compiled(x, y)
        assert result.requires_grad == (a or b)
        if a or b:
            result.sum().backward()
        assert_same([x.grad, y.grad], [y.detach() if a else None, x.detach() if b else None])


def test_second_backward_through_the_same_result_is_the_error_of_eager():
    result = eager_compiled(lambda x: x.sin().exp())(leaf(3)).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


def test_retain_graph_allows_a_second_backward():
    x, z = leaf(3), leaf(3)
    for function, value in ((eager_compiled(lambda x: x.sin().exp()), x), (lambda x: x.sin().exp(), z)):
        loss = function(value).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(x.grad, z.grad)


def test_second_derivatives_are_refused_clearly_and_not_wrong():
    x = leaf(3)
    (grad,) = torch.autograd.grad(eager_compiled(lambda x: x**3)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_autocast_regions(where):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=where != "outside"):
                y = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    z = self.b(y.float())
                w = self.b(y)
            return y, z, w, self.a(z)

    context = torch.autocast("cpu", torch.bfloat16, enabled=where != "inside")
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    x = torch.randn(3, 4)
    results = []
    for candidate in (compiled, other):
        with context:
            result = candidate(x)
            assert torch.is_autocast_enabled("cpu") == (where != "inside")
        sum(r.float().sum() for r in result).backward()
        results.append([*result, *(p.grad for p in candidate.parameters())])
        assert not torch.is_autocast_enabled("cpu")
    # Eager autocast casts a weight once for all its uses in an outer region; a program casts it for each use.
    assert_same(results[0][:4], results[1][:4])
    assert_same(results[0], results[1], rtol=1e-2 if where == "both" else 0.0)
    assert compiled(x)[3].dtype == net(x)[3].dtype  # without the outer region again


def test_autocast_for_another_device_changes_nothing():
    def function(x, w):
        with torch.autocast("cuda", torch.bfloat16):
            return x @ w

    if torch.cuda.is_available():
        assert function(leaf(2, 3), leaf(3, 2)).dtype == torch.float32
    else:
        with pytest.warns(UserWarning):
            assert function(leaf(2, 3), leaf(3, 2)).dtype == torch.float32
    check_function(function, leaf(2, 3), leaf(3, 2))


def test_mixed_dtypes_under_autocast():
    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w), F.layer_norm(x, (4,)), torch.cat([x, w])

    check_function(function, leaf(3, 4).detach().bfloat16().requires_grad_(), leaf(3, 4))


def test_float64_and_default_dtype():
    def function(x):
        return x * torch.ones(3) + torch.tensor(0.5)

    compiled = eager_compiled(function)
    assert compiled(leaf(3)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(leaf(3)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(leaf(3)).dtype == torch.float32


def test_exceptions_of_the_function_are_the_users_own():
    def function(x, n):
        if n > 2:
            raise KeyError("too large")
        return x * n

    compiled = eager_compiled(function, fullgraph=False)
    assert_same(compiled(torch.ones(2), 1), torch.ones(2))
    with pytest.raises(KeyError, match="too large"):
        compiled(torch.ones(2), 3)
    assert_same(compiled(torch.ones(2), 2), torch.full((2,), 2.0))


def test_shape_errors_are_raised_and_name_the_problem():
    compiled = eager_compiled(lambda x, w: x @ w, fullgraph=False)
    with pytest.raises(RuntimeError, match="mat1 and mat2|shape|size"):
        compiled(torch.ones(2, 3), torch.ones(2, 3))


def test_generators_and_outer_functions_called_from_compiled_code():
    def function(x):
        return sum(value * i for i, value in enumerate(y for y in (x, x.sin(), x.cos())))

    check_function(function, leaf(3))


def test_a_compiled_function_called_by_another_is_part_of_its_program():
    inner = eager_compiled(lambda x: x.sin() * 2)
    outer = eager_compiled(lambda x: inner(x) + 1, fullgraph=False)
    x = leaf(3)
    assert_same(outer(x), x.sin() * 2 + 1)


def test_methods_of_objects_and_callables():
    class Thing:
        def __init__(self):
            self.w = leaf(3)

        def method(self, x):
            return x * self.w

        def __call__(self, x):
            return x + self.w

    thing = Thing()
    for function in (thing.method, thing):
        x = leaf(3)
        assert_same(eager_compiled(function)(x), function(x))


@lts.compile
def decorated(x):
    """Doc."""
    return x * 3


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.function = eager_compiled(undecorated)

    @functools.partial(lts.compile, executors=["eager"])
    def forward(self, x, *, shift=0):
        return x * self.scale + shift


def undecorated(x):
    return x + 1


def test_a_decorated_method_is_a_method():
    first, second = Decorated(), Decorated()
    second.scale.data.fill_(5.0)
    x = torch.ones(2)
    assert_same(first(x, shift=1).detach(), x * 3)
    assert_same(second(x).detach(), x * 5)
    assert Decorated.forward.__name__ == "forward"
    assert list(inspect.signature(decorated).parameters) == ["x"] and decorated.__doc__ == "Doc."


def test_compiled_functions_are_copied_and_pickled_like_functions():
    net = copy.deepcopy(Decorated())
    assert_same(net.function(torch.ones(1)), torch.tensor([2.0]))
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    plain = pickle.loads(pickle.dumps(net.function))
    assert plain is undecorated


def test_off_gives_back_what_was_given():
    def function(x):
        return x

    net = nn.Linear(2, 2)
    off = lts.CompileConfig(mode="off")
    assert lts.compile(function, config=off) is function
    assert lts.compile(net, config=off) is net
