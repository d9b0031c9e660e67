"""Traces: what is printed, and that it runs and gives what the compiled program gives."""

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler import _torch_aot
from lightning_thunder_strategy.compiler.surgery import copy_program
from tests.compiler.parity import assert_same
from tests.compiler.test_compile_language_models import small_gpt


class Capture(lts.Transform):
    """Keeps a copy of each live program beside its printed record."""

    def __init__(self):
        self.programs = []

    def keep(self, *traces):
        self.programs += [(t.stage, copy_program(t.graph_module), t.snapshot("")) for t in traces if t is not None]

    def acquired(self, trace):
        self.keep(trace)

    def joint(self, trace):
        self.keep(trace)

    def partitioned(self, forward, backward):
        self.keep(forward, backward)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, y):
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return x**3 * scale, x * y

    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * 10 * x * ctx.scale + other * y, None, other * x


class Indexed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.shape = x.shape
        return x * 2, index

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 5


BIG = torch.arange(40.0)
SMALL = torch.tensor([1.0, float("inf"), float("nan"), -float("inf")])


def _checkpoint(x, w):
    def block(y):
        return F.dropout((y @ w).sin(), 0.5)

    return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)


def _cond(x):
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (x,))


def _autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y.float() + x


def _no_grad(x):
    with torch.no_grad():
        scale = x.abs().max()
    return x / scale


def _edits(x):
    y = x * 2
    y[0] = 1
    y[..., 1:3] += 5
    y.view(-1)[2].zero_()
    return y[::2, ..., None], y[:, -1]


def _hooked(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    return y.sin()


def _names(operator, torch_, program, input, sum, tensor):  # names that a printed program uses itself
    return (operator * torch_).sum() + program.dtype.itemsize + input + sum + tensor / 2


KINDS: dict[str, tuple[Callable, tuple, dict]] = {
    "arithmetic": (lambda x, y: (x + y * 2 - 1) / 3 % 2 + x**2 - (-x) @ y.T, (leaf(4, 4), leaf(4, 4)), {}),
    "comparisons": (lambda x: torch.where((x > 0) & (x <= 1) | (x != x), x, -x), (leaf(4, 4),), {}),
    "constants": (lambda x: x * BIG + torch.tensor(2.5) + torch.arange(40), (leaf(40),), {}),
    "infinite": (lambda x: torch.nan_to_num(x * SMALL) + x.clamp(max=float("inf")), (leaf(4),), {}),
    "masked": (lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1), (leaf(3, 4),), {}),
    "complex": (lambda x: torch.fft.rfft(x) * (1 + 2j), (leaf(3, 8),), {}),
    "dropout": (lambda x: F.dropout(x, 0.5) + torch.rand_like(x), (leaf(3, 4),), {}),
    "custom function": (lambda x, y: Cube.apply(x.sin(), 2.0, y), (leaf(3, 4), leaf(3, 4)), {}),
    "custom function with index": (lambda x: Indexed.apply(x)[0], (leaf(3, 4),), {}),
    "custom function twice": (lambda x, y: Cube.apply(Cube.apply(x, 3.0, y)[0], 2.0, x), (leaf(3), leaf(3)), {}),
    "checkpoint": (_checkpoint, (leaf(4, 4), leaf(4, 4)), {}),
    "condition": (_cond, (leaf(3, 4).detach(),), {}),
    "symbolic sizes": (
        lambda x: x.view(-1, 2).expand(x.numel() // 2, 2) * x.shape[0], (leaf(6, 2),), {"dynamic": True},
    ),
    "symbolic padding": (lambda x: F.pad(x, (1, x.shape[0]))[:, : x.shape[0] + 1], (leaf(6, 2),), {"dynamic": True}),
    "dtypes and devices": (
        lambda x: x.to(torch.float64).to("cpu", torch.bfloat16) + torch.zeros(4, dtype=torch.bfloat16, device=x.device),
        (leaf(3, 4),), {},
    ),
    "edits": (_edits, (leaf(4, 4),), {}),
    "memory formats": (
        lambda x: x.contiguous(memory_format=torch.channels_last).clone(memory_format=torch.preserve_format),
        (leaf(2, 3, 4, 4),), {},
    ),
    "autocast": (_autocast, (leaf(4, 4), leaf(4, 4)), {}),
    "no grad": (_no_grad, (leaf(4, 4),), {}),
    "hook": (_hooked, (leaf(4),), {}),
    "several results": (lambda x: (*x.split([1, 3]), x.max(0), x.topk(2)[0]), (leaf(4, 4),), {}),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (leaf(1, 2, 4, 8),) * 3, {},
    ),
    "convolution": (lambda x, w: F.conv2d(x, w, padding="same").relu(), (leaf(1, 2, 5, 5), leaf(3, 2, 3, 3)), {}),
    "names": (_names, (leaf(4), leaf(4), leaf(4), leaf(4), leaf(4), leaf(4)), {}),
    "text arguments": (lambda x: F.gelu(torch.einsum("ij,kj->ik", x, x), approximate="tanh"), (leaf(3, 4),), {}),
}  # fmt: skip


def compile_and_run(function: Callable, arguments: tuple, config: dict) -> tuple[Capture, Any, Any]:
    capture = Capture()
    options = lts.CompileConfig(fullgraph=True, **config)
    compiled = lts.compile(function, executors=["eager"], transforms=[capture], config=options)
    torch.manual_seed(0)
    return capture, compiled, compiled(*arguments)


def values_for(trace: lts.Trace) -> list[Any]:
    torch.manual_seed(3)
    values: list[Any] = []
    for item in trace.inputs:
        if item.shape is None:
            values.append(item.value)
            continue
        if item.kind == "random state":
            values.append(torch.get_rng_state())
            continue
        dtype = getattr(torch, item.dtype.removeprefix("torch."))
        size = 1 + sum((n - 1) * s for n, s in zip(item.shape, item.stride))
        value = torch.randn(size).to(dtype) if dtype.is_floating_point else torch.zeros(size, dtype=dtype)
        values.append(value.as_strided(item.shape, item.stride).requires_grad_(item.requires_grad))
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_printed_programs_of_every_stage_are_bit_equal_to_the_programs(kind):
    capture, _, _ = compile_and_run(*KINDS[kind])
    assert [stage for stage, _, _ in capture.programs][0] == "acquired"
    for stage, program, record in capture.programs:
        _torch_aot.eager_checkpoints(program)
        inputs = values_for(record)
        outcomes = []
        for run in (program, record.run):
            torch.manual_seed(1)
            values = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in inputs]
            result = run(*map(differentiable, values))
            leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            torch.manual_seed(2)
            loss = sum(x.abs().nan_to_num(0, 0, 0).double().sum() for x in leaves if x.requires_grad)
            if isinstance(loss, torch.Tensor):
                loss.backward()
            grads = [v.grad if isinstance(v, torch.Tensor) else None for v in values]
            outcomes.append([[x.detach() for x in leaves], grads])
        assert_same(outcomes[1], outcomes[0], f"{kind}, {stage}")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_programs_run_as_imported_modules(kind, tmp_path):
    _, compiled, _ = compile_and_run(*KINDS[kind])
    for number, trace in enumerate(lts.traces(compiled)[0]):
        module = load(trace.save(tmp_path / f"trace{number}.py"))
        values = values_for(trace)
        outcomes = []
        for run in (module.program, trace.run):
            torch.manual_seed(1)
            outcomes.append(torch.utils._pytree.tree_leaves(run(*(differentiable(value) for value in values))))
        assert outcomes[0] or kind == "no tensors"
        assert_same(*outcomes)


def differentiable(value: Any) -> Any:
    """A copy with the same strides that is no leaf, so that programs may edit it and register hooks on it."""
    return value.clone(memory_format=torch.preserve_format) if isinstance(value, torch.Tensor) else value


def load(path: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------ stages, names


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, batch, *, scale):
        return self.head(F.dropout(self.norm(self.embed(batch["tokens"])), 0.2) * scale)


def trained(**config):
    compiled = lts.compile(Net(), executors=["eager"], config=lts.CompileConfig(fullgraph=True, **config))
    result = compiled({"tokens": torch.tensor([1, 2, 3])}, scale=torch.ones(4))
    result.sum().backward()
    return compiled


def test_stages_come_in_order_and_say_what_made_them():
    class First(lts.Transform):
        def acquired(self, trace):
            pass

        def partitioned(self, forward, backward):
            pass

    class Second(lts.Transform):
        def joint(self, trace):
            pass

    compiled = lts.compile(Net(), executors=["eager"], transforms=[First(), Second()])
    compiled({"tokens": torch.tensor([1, 2, 3])}, scale=torch.ones(4)).sum().backward()
    (stages,) = lts.traces(compiled)
    assert [(t.stage, t.provenance.split(",")[0]) for t in stages] == [
        ("acquired", "as read by TorchDynamo"),
        ("acquired", "after First"),
        ("joint", "forward and backward as one program"),
        ("joint", "after Second"),
        ("forward", "after the partition"),
        ("backward", "after the partition"),
        ("forward", "after First"),
        ("backward", "after First"),
        ("final forward", "after dispatch"),
        ("final backward", "after dispatch"),
    ]
    assert stages[1].provenance.endswith(" ms") and float(stages[1].provenance.split(", ")[1].split()[0]) >= 0
    assert str(stages[1]).startswith(f"# acquired: {stages[1].provenance}\n")


def test_a_program_without_gradients_has_a_forward_only():
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"])
    compiled(torch.ones(3))
    assert [t.stage for t in lts.traces(compiled)[0]] == ["acquired", "forward", "final forward"]


def test_inputs_are_named_after_parameters_buffers_and_arguments():
    stages = {trace.stage: trace for trace in lts.traces(trained())[0]}
    kinds = {item.origin: item.kind for item in stages["acquired"].inputs}
    assert kinds == {
        "embed.weight": "parameter", "norm.weight": "parameter", "norm.bias": "parameter", "head.bias": "parameter",
        "norm.running_mean": "buffer", "norm.running_var": "buffer", "norm.num_batches_tracked": "buffer",
        "L['args'][0]['tokens']": "argument", "L['kwargs']['scale']": "argument",
    }  # fmt: skip
    for stage in ("joint", "forward", "final forward"):
        assert {item.origin: item.kind for item in stages[stage].inputs if item.kind != "gradient"} == kinds
    backward = {item.kind for item in stages["final backward"].inputs}
    assert {"saved", "gradient", "parameter"} <= backward
    embed = next(item for item in stages["acquired"].inputs if item.origin == "embed.weight")
    assert (embed.name, embed.type, embed.shape, embed.dtype) == ("embed_weight", "f32[7, 4]", (7, 4), "torch.float32")
    assert embed.requires_grad and embed.device == "cpu" and embed.stride == (4, 1)


def test_outputs_say_whose_gradient_or_new_value_they_are():
    stages = {trace.stage: trace for trace in lts.traces(trained())[0]}
    forward = [str(output) for output in stages["forward"].outputs]
    states = ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert forward[:4] == [*(f"new value of {name}" for name in states), "result"]
    assert set(forward[4:]) == {"saved"}
    gradients = {output.origin for output in stages["final backward"].outputs if output.kind == "gradient"}
    assert gradients == {"embed.weight", "norm.weight", "norm.bias", "head.bias"}
    assert "# gradient of embed.weight" in str(stages["final backward"])


def test_a_trace_prints_types_source_lines_and_executors():
    stages = {trace.stage: trace for trace in lts.traces(trained())[0]}
    text = str(stages["acquired"])
    assert "    embed_weight,  # f32[7, 4], parameter embed.weight" in text
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, code in enumerate(lines, 1) if "return self.head(F.dropout" in code)
    assert f"# {__file__}:{line} in forward: return self.head(F.dropout(" in text
    assert "torch.nn.functional.dropout(" in text and "# f32[3, 4]" in text
    final = str(stages["final forward"])
    assert "torch.ops.aten.addmm.default(" in final and ", eager" in final


def test_names_are_the_same_in_every_compilation():
    def statements(compiled):
        return [str(trace) for trace in lts.traces(compiled)[0]]

    assert statements(trained()) == statements(trained())


def test_records_are_not_editable_but_live_traces_are():
    with pytest.raises(RuntimeError, match="'acquired' trace is a record"):
        lts.traces(trained())[0][0].graph  # noqa: B018 - the property raises


def test_traces_can_be_pickled():
    trace = lts.traces(trained())[0][0]
    again = pickle.loads(pickle.dumps(trace))
    assert str(again) == str(trace) and again.inputs == trace.inputs


def test_symbolic_sizes_are_printed_and_recorded_with_the_value_they_had():
    compiled = lts.compile(lambda x: x.sum() * x.shape[0], executors=["eager"], config=lts.CompileConfig(dynamic=True))
    compiled(leaf(6, 2))
    acquired = lts.traces(compiled)[0][0]
    size = next(item for item in acquired.inputs if item.kind == "integer")
    tensor = next(item for item in acquired.inputs if item.kind == "argument")
    assert size.value in (6, 2) and tensor.shape == (6, 2) and "f32[s" in tensor.type


# ------------------------------------------------------------------------------------------------------------ saving


def module_values(trace: lts.Trace, module: nn.Module, arguments: dict) -> list[Any]:
    """The real inputs of a trace, by what it says of them."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = []
    for item in trace.inputs:
        found = named[item.origin] if item.kind in ("parameter", "buffer") else eval(item.origin, {"L": arguments})
        values.append(found.detach() if isinstance(found, torch.Tensor) else found)
    return values


@pytest.mark.parametrize("where", ["before dispatch", "final"])
def test_saved_forward_and_backward_give_the_results_and_gradients_of_the_compiled_model(where, tmp_path):
    prefix = "final " if where == "final" else ""
    net = small_gpt("llama").double()
    tokens = torch.randint(0, 61, (2, 16))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = net

        def forward(self, batch):
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), logits

    module = Loss()
    compiled = lts.compile(module, executors=["eager"], config=lts.CompileConfig(fullgraph=True))
    loss, logits = compiled(tokens)
    cotangents = (torch.tensor(2.0, dtype=torch.float64), torch.randn_like(logits))
    gradients = torch.autograd.grad((loss, logits), list(module.parameters()), cotangents)
    expected = dict(zip([name for name, _ in module.named_parameters()], gradients))
    stages = {trace.stage: trace for trace in lts.traces(compiled)[0]}
    arguments = {"args": (tokens,)}

    forward = stages[f"{prefix}forward"]
    outputs = load(forward.save(tmp_path / "forward.py")).program(*module_values(forward, module, arguments))
    results = [value for value, kind in zip(outputs, forward.outputs) if kind.kind == "result"]
    saved = [value for value, kind in zip(outputs, forward.outputs) if kind.kind == "saved"]
    assert_same([value.detach() for value in results], [loss.detach(), logits.detach()])

    backward = stages[f"{prefix}backward"]
    returned = load(backward.save(tmp_path / "backward.py")).program(*saved, *cotangents)
    assert len(returned) == len(backward.outputs)
    got = {kind.origin: value for value, kind in zip(returned, backward.outputs) if kind.kind == "gradient"}
    assert_same({name: got[name] for name in expected}, expected)

    acquired = stages["acquired"]
    program = load(acquired.save(tmp_path / "acquired.py")).program
    values = [v.requires_grad_(v.is_floating_point()) for v in module_values(acquired, module, arguments)]
    again = program(*values)
    assert_same([value.detach() for value in again], [loss.detach(), logits.detach()])
    torch.autograd.backward(again, cotangents)
    kinds = [item.origin for item in acquired.inputs]
    assert_same({name: values[kinds.index(name)].grad for name in expected}, expected)


SCRIPTS = ["constants", "custom function with index", "checkpoint", "symbolic sizes", "dtypes and devices", "hook"]


def test_saved_files_run_as_scripts_on_inputs_of_the_recorded_shapes(tmp_path):
    files = []
    compiled = [compile_and_run(*KINDS[kind])[1] for kind in SCRIPTS] + [trained()]
    for number, item in enumerate(compiled):
        for stage, trace in enumerate(lts.traces(item)[0]):
            files.append(trace.save(tmp_path / f"trace_{number}_{stage}.py"))
    assert len(files) > 30
    runner = (
        "import runpy, sys, io, contextlib\n"
        "for file in sys.argv[1:]:\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        runpy.run_path(file, run_name='__main__')\n"
        "    assert 'tensor(' in out.getvalue(), file\n"
    )
    command = [sys.executable, "-c", runner, *map(str, files)]
    ended = subprocess.run(command, cwd=tmp_path, timeout=200, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    alone = subprocess.run([sys.executable, str(files[0])], check=True, cwd=tmp_path, capture_output=True, timeout=200)
    assert b"tensor(" in alone.stdout


def test_small_constants_are_printed_and_big_ones_are_written_beside_the_file(tmp_path):
    _, compiled, result = compile_and_run(*KINDS["constants"])
    acquired = lts.traces(compiled)[0][0]
    named = [item for item in acquired.inputs if item.kind != "argument"]
    path = acquired.save(tmp_path / "trace.py")
    assert "BIG" in str([item.origin for item in acquired.inputs]) or named == []

    table = torch.arange(30.0)
    program = torch.fx.symbolic_trace(lambda x: x)
    program.table, program.small = table, torch.tensor([0.5, float("inf")])
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.mul, (x, graph.get_attr("table")))
    graph.output((y, graph.get_attr("small")))
    trace = lts.Trace("forward", torch.fx.GraphModule(program, graph))
    path = trace.save(tmp_path / "constant.py")
    assert "torch.tensor([0.5, float('inf')], dtype=torch.float32)" in path.read_text()
    assert (tmp_path / "constant.py.constants.pt").exists()
    assert_same(list(load(path).program(torch.ones(30))), [table, program.small])


def local_function(x):
    return x * 2


def test_saving_a_program_with_an_object_that_has_no_expression_names_it(tmp_path):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(lambda x: x + 1, (graph.placeholder("x"),)))
    trace = lts.Trace("forward", torch.fx.GraphModule(nn.Module(), graph))
    assert trace.run(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"no Python expression: .*constant \(function .*<lambda>\).*Trace.run"):
        trace.save(tmp_path / "trace.py")
    assert not (tmp_path / "trace.py").exists()


def test_functions_that_can_be_imported_are_printed_by_their_path():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(local_function, (graph.placeholder("x"),)))
    trace = lts.Trace("forward", torch.fx.GraphModule(nn.Module(), graph))
    assert "import tests.compiler.test_trace\n" in str(trace)
    assert "tests.compiler.test_trace.local_function(x)" in str(trace)


def test_custom_operators_import_the_module_that_defines_them():
    @torch.library.custom_op("lts_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    compiled = lts.compile(lambda x: twice(x) + 1, executors=["eager"])
    assert_same(compiled(torch.ones(2)), torch.full((2,), 3.0))
    final = lts.traces(compiled)[0][-1]
    assert f"import {__name__}\n" in str(final) and "torch.ops.lts_tests.twice.default(" in str(final)
    assert_same(final.run(torch.ones(2))[0], torch.full((2,), 3.0))


def test_an_error_in_a_printed_program_shows_its_line():
    _, compiled, _ = compile_and_run(*KINDS["arithmetic"])
    import traceback

    try:
        lts.traces(compiled)[0][0].run(torch.ones(2, 2), torch.ones(3, 3))
    except RuntimeError as error:
        assert "in program\n" in "".join(traceback.format_exception(error))
        assert "  # f32[4, 4]" in "".join(traceback.format_exception(error))
    else:
        raise AssertionError("shapes do not fit")
