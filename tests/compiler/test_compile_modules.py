"""Compiled modules: layers with state, hooks, changes after compilation, and what is shared with the given module."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_thunder_strategy as lts
from tests.compiler.parity import assert_same, check_module, eager_compiled


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, requires_grad=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask, need_weights=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.net(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens).tanh())


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.total = self.total * 0.9 + x.detach().mean(0)
        self.calls += 1
        self.hidden.mul_(0.5)
        return x * self.weight * self.hidden + self.total, self.calls


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = None
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.noise is None:
            self.noise = torch.randn(4)
            self.register_buffer("scale", torch.full((4,), 2.0))
        return x * self.weight * self.scale + self.noise


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.b(self.a(x))


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.named = nn.ModuleDict({"relu": nn.ReLU(), "gelu": nn.GELU()})
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales):
            x = self.named["gelu"](layer(x)) * scale
        return self.named["relu"](x)


TOKENS = torch.tensor([[0, 1, 2], [3, 0, 6]])
MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)), [(leaf(5, 4),)] * 3),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        [(leaf(2, 3, 8, 8),)] * 2,
    ),
    "attention": (Attention, [(leaf(2, 5, 8),)] * 2),
    "tied embedding with padding": (Tied, [(TOKENS,)] * 2),
    "buffers": (Counter, [(leaf(3, 4),)] * 4),
    "buffer made in the first call": (Lazy, [(leaf(3, 4),)] * 3),
    "weight and spectral norm": (Parametrized, [(leaf(3, 4),)] * 2),
    "containers": (Containers, [(leaf(3, 4),)]),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(leaf(2, 5, 8),)] * 2),
    "group and layer norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm([4, 6]), nn.Softmax(-1)), [(leaf(3, 4, 6),)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_training_is_bit_equal_to_eager(name):
    make, calls = MODULES[name]
    compiled = check_module(make, calls)
    report = lts.explain(compiled).to_dict()
    (step,) = report["steps"].values()
    assert step["graph_breaks"] == [] and report["fallbacks"] == []


BROKEN = {
    "lstm with dropout": (Recurrent, [(leaf(3, 6, 4),)] * 2),
    "gru between layers": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 5, batch_first=True)), [(torch.ones(3, 6, 4),)] * 2,
    ),
    "batch norm with cumulative average": (lambda: nn.BatchNorm1d(4, momentum=None), [(leaf(5, 4),)] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_part_of_one_program_is_recorded_and_bit_equal_to_eager(name):
    make, calls = BROKEN[name]
    compiled = check_module(make, calls, compiler=lambda m: eager_compiled(m, fullgraph=False))
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert len(step["graph_breaks"]) == 1
    with pytest.raises(lts.CompileError, match=r"\.py:\d+: .*(RNN|data-dependent)"):
        check_module(make, calls)


@pytest.mark.parametrize("name", ["mlp", "convolution", "attention", "transformer layer", "buffers"])
def test_evaluation_without_gradients_is_bit_equal_to_eager(name):
    make, calls = MODULES[name]
    with torch.no_grad():
        check_module(make, [tuple(x.detach() for x in call) for call in calls], train=False, backward=False)


def test_switching_between_training_and_evaluation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    for index, mode in enumerate([True, False, True, False]):
        compiled.train(mode)  # also reaches the module that was given
        assert net.training == net[2].training == mode
        other.train(mode)
        x = torch.randn(5, 4)
        torch.manual_seed(index)
        got = compiled(x)
        torch.manual_seed(index)
        assert_same(got, other(x))
    assert len(compiled._lts_records()[0].programs) == 2  # one a mode, then reused


# ------------------------------------------------------------------------------------------------------------- hooks


def test_forward_hooks_and_pre_hooks():
    def make():
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        net.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        net[0].register_forward_hook(lambda m, args, out: out + args[0])
        net.register_forward_hook(lambda m, args, kwargs, out: out * 3, with_kwargs=True)
        return net

    check_module(make, [(leaf(3, 4),)] * 2)


@pytest.mark.parametrize("place", ["module", "child"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_added_and_removed_after_compilation_take_effect(place, kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = eager_compiled(net)
    target = net if place == "module" else net[0]
    x = torch.randn(3, 4)
    before = compiled(x)
    if kind == "forward":
        handle = target.register_forward_hook(lambda m, args, out: out + 1)
    else:
        handle = target.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    hooked = compiled(x)
    assert_same(hooked, net(x))
    assert not torch.equal(hooked, before)
    handle.remove()
    assert_same(compiled(x), before)


def test_hook_added_through_the_compiled_module_is_on_the_module():
    net = nn.Linear(4, 4)
    compiled = eager_compiled(net)
    compiled.register_forward_hook(lambda m, args, out: out * 0)
    assert compiled(torch.randn(2, 4)).abs().sum() == 0
    assert net(torch.randn(2, 4)).abs().sum() == 0


def test_full_backward_hooks():
    def make():
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        net[0].register_full_backward_hook(lambda m, gin, gout: tuple(None if g is None else g * 2 for g in gin))
        net[2].register_full_backward_pre_hook(lambda m, gout: tuple(g * 3 for g in gout))
        return net

    check_module(make, [(leaf(3, 4),)] * 2, compiler=lambda m: eager_compiled(m, fullgraph=False))


def test_hook_with_side_effects_sees_every_call():
    seen = []
    net = nn.Linear(4, 4)
    net.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    compiled = eager_compiled(net)
    for _ in range(3):
        compiled(torch.randn(2, 4))
    assert len(seen) == 3


# ------------------------------------------------------------------------------------- changes after the compilation


def test_frozen_parameters_and_flips_of_requires_grad():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    x = torch.randn(3, 4)
    for frozen in ([], ["0.weight"], ["0.weight", "0.bias", "2.bias"], [], ["2.weight"]):
        for module in (net, other):
            module.zero_grad()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name not in frozen)
        compiled(x).square().sum().backward()
        other(x).square().sum().backward()
        assert_same({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in other.named_parameters()})


def test_replaced_parameters_data_and_submodules_are_used():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = eager_compiled(net)
    x = torch.randn(3, 4)
    compiled(x)
    changes = [
        lambda: setattr(net[0], "weight", nn.Parameter(torch.ones(4, 4))),
        lambda: net[0].weight.data.fill_(3.0),
        lambda: setattr(net[0].weight, "data", torch.full((4, 4), 2.0)),
        lambda: net.load_state_dict({"0.weight": torch.eye(4), "0.bias": torch.ones(4)}),
        lambda: net.load_state_dict({"0.weight": torch.eye(4) * 2, "0.bias": torch.ones(4)}, assign=True),
        lambda: net.__setitem__(0, nn.Linear(4, 3)),
        lambda: net.append(nn.Linear(3, 2)),
        lambda: net.double(),
    ]
    for change in changes:
        change()
        value = x.to(next(net.parameters()).dtype)
        net.zero_grad()
        compiled(value).sum().backward()
        got = {n: p.grad for n, p in net.named_parameters()}
        assert_same(compiled(value), net(value))
        net.zero_grad()
        net(value).sum().backward()
        assert_same(got, {n: p.grad for n, p in net.named_parameters()})


def test_optimizer_steps_between_calls():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (net, other)]
    for _ in range(5):
        x = torch.randn(3, 4)
        for call, optimizer in zip((compiled, other), optimizers):
            optimizer.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
    assert_same(net.state_dict(), other.state_dict())


def test_gradients_accumulate_over_calls():
    net = nn.Linear(4, 2)
    other = copy.deepcopy(net)
    compiled = eager_compiled(net)
    for index in range(3):
        x = torch.randn(3, 4) + index
        compiled(x).sum().backward()
        other(x).sum().backward()
    assert_same(net.weight.grad, other.weight.grad)


def test_python_attributes_changed_between_calls():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.kind, self.calls = 1.0, "sin", 0

        def forward(self, x):
            self.calls += 1
            return getattr(x, self.kind)() * self.scale

    net = Net()
    compiled = eager_compiled(net)
    x = torch.ones(3)
    assert_same(compiled(x), x.sin())
    net.scale = 2.0
    assert_same(compiled(x), x.sin() * 2)
    compiled.kind = "cos"
    assert_same(compiled(x), x.cos() * 2)
    assert net.calls == compiled.calls == 3


# ------------------------------------------------------------------------------------------------------ shared state


class Odd(nn.Module):
    """A module with its own ideas."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.tag = "mine"

    def forward(self, x, *, scale=1.0):
        return self.linear(x) * scale

    def other(self, x):
        return self(x) + 1

    @property
    def width(self):
        return self.linear.in_features


def test_the_compiled_module_looks_like_the_given_one():
    net = Odd()
    compiled = lts.compile(net, executors=["eager"])
    assert type(compiled).__name__ == type(compiled).__qualname__ == "Odd"
    assert isinstance(compiled, Odd) and type(compiled).__doc__ == Odd.__doc__
    assert list(compiled.state_dict()) == ["linear.weight", "linear.bias"] == list(net.state_dict())
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert all(a is b for a, b in zip(compiled.parameters(), net.parameters()))
    assert compiled.width == 4 and compiled.tag == "mine" and str(compiled) == str(net)
    compiled.tag = "yours"
    assert net.tag == "yours"
    net.extra = nn.Linear(2, 2)
    assert "extra.weight" in compiled.state_dict()
    assert net(torch.ones(1, 4)).shape == (1, 2)  # the given module stays as it is
    assert type(net) is Odd and "_compiled_call_impl" not in vars(net)


def test_methods_of_the_compiled_module_that_call_it_run_compiled():
    net = Odd()
    compiled = eager_compiled(net)
    x = torch.randn(3, 4)
    assert_same(compiled.other(x), net.other(x))
    assert_same(compiled(x, scale=2.0), net(x, scale=2.0))
    assert lts.explain(compiled).to_dict()["steps"]["Odd"]["graphs"] == 2  # with scale=1.0 and scale=2.0


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "copy", "pickle"]
)
def test_copies_and_pickles_are_plain_modules(duplicate):
    net = Odd()
    compiled = eager_compiled(net)
    x = torch.randn(3, 4)
    result = compiled(x)
    twin = duplicate(compiled)
    assert type(twin) is Odd
    assert_same(twin(x), result)
    assert "_lts_records" not in vars(twin)
    again = eager_compiled(twin)
    assert_same(again(x), result)


def test_saving_and_loading_the_whole_module(tmp_path):
    net = Odd()
    torch.save(eager_compiled(net), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert type(loaded) is Odd
    assert_same(loaded.state_dict(), net.state_dict())


def test_submodules_mode_compiles_the_children_and_runs_the_rest_eagerly():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
            self.seen = []

        def forward(self, x):
            y = self.a(x)
            self.seen.append(float(y.sum()))  # would break one program
            return self.b(y)

    compiled = check_module(Net, [(leaf(3, 4),)] * 2, compiler=lambda m: eager_compiled(m, mode="submodules"))
    step = lts.explain(compiled).to_dict()["steps"][Net.__qualname__]
    assert step["mode"] == "submodules" and step["graphs"] == 2 and step["graph_breaks"] == []
    assert len(compiled.seen) == 2


def test_a_module_compiled_twice_is_compiled_independently():
    net = nn.Linear(4, 2)
    first, second = eager_compiled(net), eager_compiled(net)
    x = torch.randn(3, 4)
    assert_same(first(x), second(x))
    assert len(lts.traces(first)) == len(lts.traces(second)) == 1


def test_compiling_a_compiled_module_again_works():
    net = nn.Linear(4, 2)
    again = eager_compiled(eager_compiled(net))
    x = torch.randn(3, 4)
    assert_same(again(x), net(x))


def test_modules_of_the_same_class_do_not_share_what_was_learned_of_shapes():
    first, second = eager_compiled(nn.Linear(4, 2)), eager_compiled(nn.Linear(6, 2))
    for n in (2, 3, 5):
        first(torch.randn(n, 4))
    second(torch.randn(3, 6))
    ((trace, *_),) = lts.traces(second)
    assert "f32[3, 6]" in str(trace)


def test_functional_call_of_the_module_inside_a_function():
    net = nn.Linear(4, 2)

    def function(weights, x):
        return torch.func.functional_call(net, weights, (x,))

    weights = {"weight": leaf(2, 4), "bias": leaf(2)}
    x = leaf(3, 4)
    assert_same(eager_compiled(function)(weights, x), function(weights, x))


def test_inference_mode_parameters():
    with torch.inference_mode():
        net = nn.Linear(4, 2)
        x = torch.randn(3, 4)
        assert_same(eager_compiled(net)(x), net(x))


def test_float_tensors_moved_into_the_loss():
    net = nn.Linear(4, 3)

    def loss(x, y):
        return F.cross_entropy(net(x), y, label_smoothing=0.1)

    compiled = eager_compiled(loss)
    x, y = leaf(5, 4), torch.tensor([0, 1, 2, 0, 1])
    compiled(x, y).backward()
    got = net.weight.grad
    net.weight.grad = None
    loss(x, y).backward()
    assert_same(got, net.weight.grad)
    names = [item.origin for item in lts.traces(compiled)[0][0].inputs if item.kind == "parameter"]
    assert sorted(names) == ["net.bias", "net.weight"]
