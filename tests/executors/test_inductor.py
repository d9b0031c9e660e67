"""Inductor: nothing lost against plain torch.compile, regions, random numbers, and what it fails to compile."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.report import CompileWarning
from lightning_thunder_strategy.executors import InductorExecutor
from tests.compiler.executors import Pointwise, overload
from tests.compiler.parity import assert_same
from tests.compiler.test_compile_language_models import small_gpt


def compiled_with(function, *executors, **config):
    return lts.compile(function, executors=list(executors), config=lts.CompileConfig(fullgraph=True, **config))


def step(compiled):
    (found,) = lts.explain(compiled).to_dict()["steps"].values()
    return found


# ------------------------------------------------------------------------------------------- parity with torch.compile


class WrittenOutAttention(nn.Module):
    def forward(self, x):
        q, k, v = x.unbind(0)
        return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


CASES = {
    "mlp, inference": (mlp, [(3, 8)], False, None),
    "mlp, training with symbolic sizes": (mlp, [(3, 8), (5, 8)], True, True),
    "written out attention, inference": (WrittenOutAttention, [(3, 1, 2, 8, 16)], False, None),
    "convolution and batch norm, training": (convolution, [(2, 3, 8, 8)], True, None),
    "gpt block, training": (lambda: small_gpt("llama").transformer.h[0], [], True, None),
}


@pytest.fixture
def no_program_caches():
    import torch._functorch.config

    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.mark.parametrize("name", CASES)
def test_a_whole_program_becomes_the_code_that_torch_compile_makes(name, no_program_caches):
    make, shapes, trains, dynamic = CASES[name]

    def run(compiler):
        torch.manual_seed(0)
        net = make()
        inputs = [(torch.randn(shape),) for shape in shapes]
        if not shapes:
            gpt = small_gpt("llama")
            inputs = [(torch.randn(2, 16, 32), gpt.cos[None, :16], gpt.sin[None, :16])]
        call = compiler(net)

        def steps():
            results = []
            for arguments in inputs:
                with torch.set_grad_enabled(trains):
                    results.append(call(*arguments))
                if trains:
                    results[-1].square().sum().backward()
            return results

        results, code = run_and_get_code(steps)
        values = [*results, *(p.grad for p in net.parameters()), *net.buffers()]
        return values, [re.sub(r"AOT ID: .*|\['\d+_\w+'\]", "", text) for text in code]

    values, code = run(lambda net: torch.compile(net, dynamic=dynamic, fullgraph=True))
    ours, our_code = run(lambda net: compiled_with(net, "inductor", dynamic=dynamic))
    assert len(code) == (2 if trains else 1)
    assert our_code == code
    assert_same(ours, values)


# ----------------------------------------------------------------------------------------------------------- options


class Products(Pointwise):
    name = "products"

    def supports(self, node):
        return None if "mm" in overload(node) else "it is no product"


@pytest.mark.parametrize("others", [[], [Products()]], ids=["whole program", "regions"])
def test_options_of_inductor_are_set_for_forward_and_backward(others, no_program_caches):
    def run(executor):
        torch.manual_seed(0)
        net = mlp()
        x = torch.randn(3, 8)

        def trained():
            result = compiled_with(net, *others, executor)(x)
            result.square().sum().backward()
            return [result, *(p.grad for p in net.parameters())]

        return run_and_get_code(trained)

    expected, code = run("inductor")
    values, other_code = run(InductorExecutor(options={"size_asserts": False}))
    assert len(code) == len(other_code)
    assert sum("assert_size_stride(" in text for text in code) >= 2  # the forward's and the backward's
    assert not any("assert_size_stride(" in text for text in other_code)
    assert_same(values, expected)


def test_a_mode_sets_what_the_mode_of_torch_compile_sets():
    patches = InductorExecutor(mode="max-autotune", options={"coordinate_descent_tuning": False}).config_patches()
    expected = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert patches == {**expected, "coordinate_descent_tuning": False} and patches["max_autotune"]
    assert InductorExecutor().config_patches() == {}


def test_programs_of_other_options_are_other_entries_of_the_compile_cache():
    keys = [InductorExecutor(mode).cache_key() for mode in ("default", "max-autotune")]
    keys += [InductorExecutor(options={"size_asserts": value}).cache_key() for value in (True, False)]
    assert None not in keys and len(set(keys)) == 4


def test_another_class_of_the_same_name_is_refused():
    other = type("Mine", (Products,), {"name": "inductor"})()
    with pytest.raises(ValueError, match="Mine has the name 'inductor' of an executor of ours; choose another"):
        compiled_with(mlp(), other)


TIMEOUT = "max_autotune_subproc_result_timeout_seconds"  # an option whose default is a float


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fast"}, r"InductorExecutor.mode='fast' is not allowed: choose one of 'default', 'max-autotune'."),
        ({"options": ["x"]}, r"InductorExecutor.options=['x'] is not allowed: give options of Inductor by name."),
        ({"options": {"size_assert": False}}, "Inductor has no such option, but 'size_asserts'."),
        ({"options": {"size_asserts": "no"}}, "'no' is of another type than Inductor's default True."),
        ({"options": {"max_fusion_size": True}}, "True is of another type than Inductor's default 64."),
        ({"options": {"max_fusion_size": 64.0}}, "64.0 is of another type than Inductor's default 64."),
        ({"options": {"max_fusion_size": None}}, "None is of another type than Inductor's default 64."),
        ({"options": {"size_asserts": None}}, "None is of another type than Inductor's default True."),
        ({"options": {TIMEOUT: True}}, "True is of another type than Inductor's default 60.0."),
        ({"options": {TIMEOUT: None}}, "None is of another type than Inductor's default 60.0."),
        ({"options": {TIMEOUT: math.nan}}, "nan is not allowed: it is no number."),
        ({"options": {"cpp.simdlen": math.nan}}, "nan is not allowed: it is no number."),
        ({"options": {"custom_partitioner_fn": None}}, "this package sets it, to its own partitioner; leave it out."),
        (
            {"options": {"unsafe_marked_cacheable_functions": {}}},
            "this package sets it, for its own operators; leave it out.",
        ),
        ({"options": {"triton.cudagraphs": True}}, "use CompileConfig(cudagraphs=...)."),
        ({"options": {"fallback_random": True}}, "use CompileConfig(eager_random=...)."),
        ({"options": {"deterministic": True}}, "use Trainer(deterministic=...) or torch.use_deterministic_algorithms."),
    ],
)
def test_a_bad_option_is_one_line_that_says_what_to_do(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        InductorExecutor(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [(TIMEOUT, 1.5), (TIMEOUT, 2), ("cpp.simdlen", None), ("cpp.simdlen", 8)])
def test_values_of_the_defaults_type_are_taken(name, value):
    assert InductorExecutor(options={name: value}).config_patches() == {name: value}


# ---------------------------------------------------------------------------------------------------------- programs


def test_training_is_close_to_eager_and_all_operations_are_inductors():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, "inductor")
    for index in range(2):
        x = torch.randn(5, 4, dtype=torch.float64) + index
        results = [call(x) for call in (compiled, other)]
        assert_same(*results, rtol=1e-12, atol=1e-12)
        for result in results:
            result.square().sum().backward()
    for mine, theirs in zip(net.parameters(), other.parameters()):
        assert_same(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert_same(dict(net.named_buffers()), dict(other.named_buffers()), rtol=1e-12, atol=1e-12)
    assert set(step(compiled)["executors"]) == {"inductor"}
    assert "def inductor_backward(" in str(lts.traces(compiled)[0][-1])


@pytest.mark.parametrize("eager_random", [True, False])
def test_dropout_draws_the_random_numbers_of_eager_if_asked_to(eager_random):
    def function(x):
        return F.dropout(x, 0.5) * 2 + torch.rand_like(x)

    compiled = compiled_with(function, "inductor", eager_random=eager_random)
    outcomes = []
    for call in (compiled, function):
        x = torch.ones(16, 4, requires_grad=True)
        torch.manual_seed(0)
        result = call(x)
        result.sum().backward()
        outcomes.append([result, x.grad, torch.rand(2)])
    if eager_random:
        assert_same(*outcomes)
    else:
        assert not torch.equal(outcomes[0][0], outcomes[1][0])
        values = outcomes[0][1].unique().tolist()
        assert values == [0.0, 4.0]  # the mask of the forward is that of the backward


def test_saved_traces_of_a_program_with_dropout_run(tmp_path):
    compiled = compiled_with(lambda x: F.dropout(x.sin(), 0.5), "inductor")
    x = torch.ones(8, requires_grad=True)
    compiled(x).sum().backward()
    for number, trace in enumerate(lts.traces(compiled)[0]):
        assert trace.save(tmp_path / f"{number}.py").exists()
        assert trace.run(*([torch.ones(8)] * len(trace.inputs))) is not None or trace.stage == "joint"


# ----------------------------------------------------------------------------------------------------------- regions


@pytest.mark.parametrize("dynamic", [False, True])
def test_another_executor_takes_regions_and_inductor_the_rest(dynamic):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).double()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, Products(), "inductor", dynamic=dynamic)
    for size in (5, 7) if dynamic else (5,):
        x = torch.randn(size, 4, dtype=torch.float64)
        for module, call in ((net, compiled), (other, other)):
            module.zero_grad()
            call(x).square().sum().backward()
        for mine, theirs in zip(net.parameters(), other.parameters()):
            assert_same(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    counts = step(compiled)["executors"]
    assert counts["products"] == 5 and counts["inductor"] > 5 and step(compiled)["graphs"] == 1
    assert re.search(r"addmm\.default\(.*\)  # f64\[.*\], products", str(lts.traces(compiled)[0][-2]))


# ---------------------------------------------------------------------------------------------------------- failures


def test_an_operation_that_inductor_cannot_compile_runs_eagerly_and_the_rest_does_not(monkeypatch):
    from lightning_thunder_strategy.compiler import _torch_inductor

    compile_program = _torch_inductor.inductor_compile

    def failing(gm, inputs, **kwargs):
        if any(overload(node) == "cumsum" for node in gm.graph.nodes):
            raise RuntimeError("no kernel\nfor this")
        return compile_program(gm, inputs, **kwargs)

    monkeypatch.setattr(_torch_inductor, "inductor_compile", failing)

    def function(x):
        return (x.sin() * 2).cumsum(0).cos() + 1

    compiled = compiled_with(function, "inductor")
    x = torch.randn(4, 3)
    with pytest.warns(CompileWarning) as caught:
        assert_same(compiled(x), function(x), rtol=1e-6, atol=1e-6)
    (warning,) = [item for item in caught if issubclass(item.category, CompileWarning)]
    assert str(warning.message) == (
        "inductor could not compile aten.cumsum.default in the forward, which the next executor runs: "
        "RuntimeError: no kernel"
    )
    assert step(compiled)["executors"] == {"inductor": 4, "eager": 1}
    assert lts.explain(compiled).to_dict()["fallbacks"] == [
        {"region": "aten.cumsum.default in the forward", "executor": "inductor", "error": "RuntimeError: no kernel"}
    ]
    raising = compiled_with(function, "inductor", on_error="raise")
    with pytest.raises(RuntimeError, match="no kernel"):
        raising(x)


def test_a_fault_of_inductor_in_bf16_gradients_is_passed_by_compiling_in_pieces():
    """Torch 2.13 writes C++ that does not compile where two biases have the same bf16 gradient."""
    if torch.__version__.split("+")[0] not in ("2.13.0",):
        pytest.skip("the fault was seen in torch 2.13.0")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, q):
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return self.a(y) + self.b(q)

    torch.manual_seed(0)
    net = Net().bfloat16()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, "inductor")
    q = torch.randn(1, 2, 16, 32, dtype=torch.bfloat16)
    with pytest.warns(CompileWarning, match="inductor could not compile .* in pieces: .*CppCompileError") as caught:
        compiled(q).float().square().sum().backward()
    assert sum(issubclass(item.category, CompileWarning) for item in caught) == 1
    other(q).float().square().sum().backward()
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters()):
        assert_same(mine.grad, theirs.grad, name, rtol=2e-2, atol=2e-1)
    assert set(step(compiled)["executors"]) == {"inductor"}
