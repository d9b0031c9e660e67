"""Executors take operations and regions by priority; what one cannot compile the next one runs, and it is said."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import lightning_thunder_strategy as lts
from tests.compiler.executors import EveryThird, Pointwise, Refusing, Running, Sine, opaque_sine, sine
from tests.compiler.parity import assert_same
from tests.compiler.test_compile_language_models import small_gpt


def compiled_with(function, *executors, **config):
    return lts.compile(function, executors=list(executors), config=lts.CompileConfig(fullgraph=True, **config))


def final(compiled, stage="forward", graph=0):
    return str(next(trace for trace in lts.traces(compiled)[graph] if trace.stage == f"final {stage}"))


def step(compiled):
    (found,) = lts.explain(compiled).to_dict()["steps"].values()
    return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.norm(self.a(x)).sin() * 2
        first, second = (y.cos() + 1).split(4, dim=-1)
        values, index = first.max(-1)
        return self.b(torch.cat([first * second, second], -1)), values * 3, index


def train(net, call, x):
    """Results, gradients and buffers of one step."""
    net.zero_grad()
    torch.manual_seed(1)
    results = call(x)
    sum(r.square().sum() for r in results if r.requires_grad).backward()
    return [
        [r.detach() for r in results],
        {name: p.grad.clone() for name, p in net.named_parameters()},
        dict(net.named_buffers()),
    ]


def check_net(*executors, dynamic=None, sizes=(5, 5)):
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, *executors, dynamic=dynamic)
    for size in sizes:
        x = torch.randn(size, 4)
        assert_same(train(net, compiled, x), train(other, other, x))
    return compiled


# ----------------------------------------------------------------------------------------------------------- regions


def test_an_executor_that_takes_everything_gets_the_whole_program():
    executor = Running()
    compiled = check_net(executor)
    assert len(executor.regions) == 2  # forward and backward
    assert set(step(compiled)["executors"]) <= {"running", "eager"}
    assert "def running_forward(" in final(compiled) and "# f32[5, 8], running" in final(compiled)


def test_an_executor_gets_regions_of_what_it_supports_and_eager_runs_the_rest():
    executor = Pointwise()
    compiled = check_net(executor)
    assert all(len(region) > 0 for region in executor.regions)
    assert {name for region in executor.regions for name in region} <= {"sin", "mul", "cos", "add", "neg", "pow", "div"}
    text = final(compiled)
    assert re.search(r"torch\.ops\.aten\.sin\.default\(.*\)  # f32\[5, 8\], pointwise", text)
    assert re.search(r"torch\.ops\.aten\.addmm\.default\(.*\)  # f32\[5, 8\], eager", text)
    counts = step(compiled)["executors"]
    assert counts["pointwise"] == sum(map(len, executor.regions)) and counts["eager"] > 5


def test_inputs_of_regions_keep_the_names_of_parameters():
    compiled = compiled_with(Net(), Running())
    compiled(torch.randn(5, 4))
    region = final(compiled).split("def program(")[0]
    assert "    a_weight,  # f32[8, 4]" in region


def test_the_first_executor_in_the_list_has_priority():
    first, second = Pointwise(), Running()
    compiled = check_net(first, second)
    taken = {name for region in first.regions for name in region}
    assert "sin" in taken and not any("sin" in region for region in second.regions)
    assert any("addmm" in region for region in second.regions)
    alone, never = Running(), Pointwise()
    check_net(alone, never)
    assert never.regions == []
    assert list(step(compiled)["executors"]) != []


def test_why_a_fusion_executor_declined_is_in_the_claim_log():
    compiled = check_net(Pointwise())
    claims = compiled._lts_records()[0].programs[0].claims
    declined = [claim for claim in claims if claim.operation == "aten.addmm.default"]
    assert declined and not declined[0].accepted
    assert (declined[0].executor, declined[0].reason) == ("pointwise", "it is not pointwise")


@pytest.mark.parametrize("executors", [[Running], [Pointwise], [Pointwise, Running]])
def test_regions_with_symbolic_sizes_run_other_sizes_without_compiling_again(executors):
    compiled = check_net(*(executor() for executor in executors), dynamic=True, sizes=(5, 7, 3))
    assert step(compiled)["graphs"] == 1


def test_parts_of_a_tuple_stay_with_the_operation_that_returns_it():
    def function(x):
        values, index = x.max(-1)
        y = x.sin()
        return values * y.sum(), index + 1

    class TakesMax(Running):
        name = "max"

        def supports(self, node):
            return None if "max" in str(node.target) else "no"

    x = torch.randn(3, 4, requires_grad=True)
    for executors in ([TakesMax()], [Pointwise()], [TakesMax(), Pointwise()]):
        assert_same(compiled_with(function, *executors)(x), function(x))


def test_edits_of_inputs_are_never_part_of_a_region():
    executor = Running()
    net = nn.BatchNorm1d(4).eval()

    def function(x, state):
        state.add_(x.sum(0))
        return net(x) + state

    state, other = torch.zeros(4), torch.zeros(4)
    compiled = compiled_with(function, executor)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(x, state), function(x, other))
    assert_same(state, other)
    assert not any("copy_" in region for region in executor.regions)


def test_constants_and_nested_programs_are_part_of_their_region():
    table = torch.arange(20.0)

    def function(x):
        y = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))
        return y * table + torch.tensor([2.0])

    executor = Running()
    compiled = compiled_with(function, executor)
    for x in (torch.ones(20), -torch.ones(20)):
        assert_same(compiled(x), function(x))
    assert len(executor.regions) == 1


def test_regions_that_return_other_strides_than_traced_are_exact():
    class Transposing(Pointwise):
        name = "transposing"

        def fuse(self, region, inputs):
            run = super().fuse(region, inputs)
            return lambda args: [v.t().contiguous().t() if v.dim() == 2 else v for v in run(args)]

    def function(x, w):
        return (x.sin() @ w).cos().view(-1), (x * 2).t().contiguous()

    for dynamic in (False, True):
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        compiled = compiled_with(function, Transposing(), dynamic=dynamic)
        results = compiled(x, w), function(x, w)
        assert_same(*results)
        assert results[0][1].stride() == results[1][1].stride()
        assert_same(*(torch.autograd.grad([v.sum() for v in result], [x, w]) for result in results))


def test_dropout_draws_the_random_numbers_of_eager_across_regions():
    def function(x):
        return F.dropout(F.dropout(x.sin(), 0.5).cos(), 0.3) + torch.rand_like(x)

    x = torch.randn(6, 4, requires_grad=True)
    results = []
    for call in (compiled_with(function, Pointwise()), function):
        torch.manual_seed(0)
        result = call(x)
        results.append([result, *torch.autograd.grad(result.sum(), x), torch.rand(1)])
    assert_same(*results)


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failing_operation_goes_to_the_next_executor_with_one_warning():
    first, second = Refusing("cat"), Running()
    with pytest.warns(lts.CompileWarning) as caught:
        compiled = check_net(first, second)
    (warning,) = [str(item.message) for item in caught if issubclass(item.category, lts.CompileWarning)]
    assert warning.startswith("refusing could not compile aten.cat.default in the forward, which the next executor")
    assert warning.endswith("NotImplementedError: no kernel for cat")
    assert "\n" not in warning and "more lines" not in warning
    assert ["cat"] in second.regions and not any("cat" in region for region in first.regions)
    fallbacks = lts.explain(compiled).to_dict()["fallbacks"]
    assert fallbacks[0] == {
        "region": "aten.cat.default in the forward", "executor": "refusing",
        "error": "NotImplementedError: no kernel for cat",
    }  # fmt: skip
    assert re.search(r"aten\.cat\.default\(.*\)  # .*, running", final(compiled))


def test_without_another_executor_the_failing_operation_runs_eagerly():
    with pytest.warns(lts.CompileWarning, match="refusing could not compile aten.sin.default in the forward"):
        compiled = check_net(Refusing("sin"))
    assert [item["region"] for item in lts.explain(compiled).to_dict()["fallbacks"]] == [
        "aten.sin.default in the forward", "aten.sin.default (2 times) in the backward",  # computed again
    ]  # fmt: skip
    assert re.search(r"aten\.sin\.default\(.*\)  # .*, eager", final(compiled))
    assert re.search(r"aten\.cos\.default\(.*\)  # .*, refusing", final(compiled))


def test_an_operation_that_fails_many_times_is_named_once():
    def function(x):
        for _ in range(5):
            x = x.sin() * 2
        return x

    with pytest.warns(lts.CompileWarning, match=re.escape("aten.sin.default (5 times) in the forward")) as caught:
        compiled = compiled_with(function, Refusing("sin"))
        x = torch.ones(3)
        assert_same(compiled(x), function(x))
    assert len(caught) == 1 and len(lts.explain(compiled).to_dict()["fallbacks"]) == 1


def test_every_third_region_refusing_still_gives_exact_results():
    with pytest.warns(lts.CompileWarning, match=r"third could not compile \d+ operations of the \w+ at once"):
        compiled = check_net(EveryThird(), Pointwise())
    assert lts.explain(compiled).to_dict()["fallbacks"]


def test_on_error_raise_raises_the_executors_error():
    for fullgraph in (True, False):
        config = lts.CompileConfig(on_error="raise", fullgraph=fullgraph)
        compiled = lts.compile(lambda x: x.sin() + 1, executors=[Refusing("sin")], config=config)
        with pytest.raises(NotImplementedError, match="no kernel for sin"):
            compiled(torch.ones(2))


def test_the_error_of_a_backward_region_is_raised_in_the_backward():
    config = lts.CompileConfig(on_error="raise")
    compiled = lts.compile(lambda x: x.sin(), executors=[Refusing("cos")], config=config)
    with pytest.raises(NotImplementedError, match="no kernel for cos"):
        compiled(torch.ones(2, requires_grad=True)).sum().backward()


def test_a_gpt_in_regions_trains_as_eager():
    class Products(Running):
        name = "products"

        def supports(self, node):
            return None if any(word in str(node.target) for word in ("mm", "mul", "add", "view")) else "no"

    net = small_gpt("llama").double()
    other = copy.deepcopy(net)
    compiled = compiled_with(net, Products(), Pointwise())
    tokens = torch.randint(0, 61, (2, 16))
    for call in (compiled, other):
        call(tokens).square().mean().backward()
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters()):
        assert_same(mine.grad, theirs.grad, name)
    assert {"products", "pointwise", "eager"} == set(step(compiled)["executors"])


# --------------------------------------------------------------------------------------------------------- operators


def test_an_operator_executor_replaces_what_its_checker_accepts():
    def function(x, v):
        return x.sin() + torch.sin(v) * x.sum()

    compiled = compiled_with(function, Sine())
    x, v = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)

    def expected(x, v):
        return sine(x) + torch.sin(v) * x.sum()

    results = [call(x, v) for call in (compiled, expected)]
    assert_same(*results)
    assert not torch.allclose(results[0], function(x, v))
    assert_same(*(torch.autograd.grad(result.square().sum(), [x, v]) for result in results))
    claims = [claim for claim in compiled.record.programs[0].claims if claim.executor == "sine"]
    assert [(claim.operation, claim.accepted, claim.reason) for claim in claims] == [
        ("sin", True, ""), ("sin", False, "it takes matrices, and this has 1 dimensions"),
    ]  # fmt: skip
    stages = {trace.provenance: trace for trace in lts.traces(compiled)[0]}
    assert "tests.compiler.executors.sine(x)" in str(stages["after operator claims"])


def test_the_first_operator_executor_that_accepts_wins():
    class Other(Sine):
        name = "other"

    x = torch.randn(2, 3)
    compiled = compiled_with(lambda x: x.sin(), Other(opaque_sine), Sine())
    assert_same(compiled(x), x.sin() * 10)
    assert [claim.executor for claim in compiled.record.programs[0].claims] == ["other"]


def test_an_opaque_operator_has_its_backward_and_its_executors_name_in_the_final_trace():
    compiled = compiled_with(lambda x: x.sin() * 2, Sine(opaque_sine), Pointwise())
    x = torch.randn(2, 3, requires_grad=True)
    result = compiled(x)
    assert_same(result, x.sin() * 10 * 2)
    assert_same(*torch.autograd.grad(result.sum(), x), x.cos().detach() * 20)
    text = final(compiled)
    assert re.search(r"lts_tests\.opaque_sine\.default\(.*\)  # f32\[2, 3\], sine", text)
    assert re.search(r"aten\.mul\.Tensor\(.*\)  # f32\[2, 3\], pointwise", text)
    assert step(compiled)["executors"]["sine"] >= 1


def test_a_fusion_executor_edits_its_own_copy_of_a_region():
    class Spoiling(Running):
        name = "spoiling"

        def fuse(self, region: fx.GraphModule, inputs):
            region.graph.output_node().args = ((),)
            region.recompile()
            raise RuntimeError("spoiled")

    with pytest.warns(lts.CompileWarning, match="spoiling could not compile aten"):
        check_net(Spoiling())
