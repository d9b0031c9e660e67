"""Graph breaks, recompilations and the recompile limit are recorded and never silent."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler import events
from tests.compiler.parity import assert_same, eager_compiled

HERE = Path(__file__)


def line_of(code: str) -> int:
    """The line of this file that ends with the comment ``# code``."""
    return next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {code}"))


def steps(compiled):
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    return step


def helper(x):
    print("side effect")  # inside the helper
    return x + 1


def test_a_graph_break_is_recorded_with_file_line_and_reason(capsys):
    def function(x):
        return helper(x * 2) * 3

    compiled = eager_compiled(function, fullgraph=False)
    for n in range(3):
        x = torch.ones(3) + n
        assert_same(compiled(x), (x * 2 + 1) * 3)
    assert capsys.readouterr().out == "side effect\n" * 3
    (found,) = steps(compiled)["graph_breaks"]
    assert found["file"] == str(HERE) and found["line"] == line_of("inside the helper")
    assert "print" in found["reason"] and "Hint" not in found["reason"] and "\n" not in found["reason"]


def test_a_break_inside_torch_is_placed_at_the_users_own_line():
    net = nn.GRU(4, 4)

    def function(x):
        return net(x)[0] + 1  # calls the GRU

    compiled = eager_compiled(function, fullgraph=False)
    compiled(torch.ones(2, 4))
    (found,) = steps(compiled)["graph_breaks"]
    assert (found["file"], found["line"]) == (str(HERE), line_of("calls the GRU"))


def test_breaks_of_every_kind_are_recorded_once():
    def function(x):
        if x.sum() > 0:  # branch
            x = x * 2
        value = x.max().item()  # item
        return x + value

    compiled = eager_compiled(function, fullgraph=False)
    for _ in range(3):
        compiled(torch.ones(3))
    lines = {item["line"] for item in steps(compiled)["graph_breaks"]}
    assert lines == {line_of("branch"), line_of("item")}


def test_a_function_that_cannot_be_cut_says_that_it_runs_eagerly():
    def function(x):
        try:
            for index in range(2):
                x = x + 1
                print(index)
        finally:
            x = x * 2
        return x

    compiled = eager_compiled(function, fullgraph=False)
    assert_same(compiled(torch.zeros(1)), torch.tensor([4.0]))
    (found,) = steps(compiled)["graph_breaks"]
    assert found["reason"].endswith("The whole function runs eagerly.")


def test_fullgraph_raises_an_error_with_file_line_and_reason():
    def function(x):
        return helper(x)

    compiled = eager_compiled(function)
    place = re.escape(f"{HERE}:{line_of('inside the helper')}: ")
    with pytest.raises(lts.CompileError, match=f"function cannot be compiled as one program: {place}.*print") as caught:
        compiled(torch.ones(2))
    assert (caught.value.file, caught.value.line) == (str(HERE), line_of("inside the helper"))
    assert caught.value.reason and not caught.value.recompile_limit


def test_recompilations_are_recorded_with_the_guard_that_failed():
    def function(x, flag):
        return x.sin() if flag else x.cos()

    compiled = eager_compiled(function)
    for shape, flag in [((3,), True), ((3,), False), ((3, 2), True), ((3,), True)]:
        compiled(torch.ones(shape), flag)
    step = steps(compiled)
    assert step["graphs"] == 3 and len(step["recompiles"]) == 2
    assert "flag" in step["recompiles"][0]["reason"]
    assert "x" in step["recompiles"][1]["reason"]


def test_a_second_function_does_not_see_the_events_of_the_first():
    def function(x):
        return helper(x)

    first, second = eager_compiled(function, fullgraph=False), eager_compiled(torch.sin)
    first(torch.ones(2))
    second(torch.ones(2))
    assert len(steps(first)["graph_breaks"]) == 1
    assert steps(second)["graph_breaks"] == [] and steps(second)["recompiles"] == []


def test_breaks_outside_of_our_functions_are_not_recorded():
    ours = eager_compiled(torch.sin)
    ours(torch.ones(2))
    theirs = torch.compile(lambda x: helper(x), backend="eager")
    theirs(torch.ones(2))
    assert steps(ours)["graph_breaks"] == [] and steps(ours)["graphs"] == 1


class Mutating(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale if isinstance(self.scale, float) else x


def storm(compiled, net):
    results = []
    for index in range(14):
        net.kind = f"kind {index}"
        results.append(compiled(torch.ones(2)))
    return results


class Text(nn.Module):
    kind = ""

    def forward(self, x):
        return x + len(self.kind)


def test_a_recompile_storm_is_one_loud_warning_that_names_the_guard():
    net = Text()
    compiled = eager_compiled(net, fullgraph=False)
    with pytest.warns(lts.CompileWarning) as caught:
        results = storm(compiled, net)
        storm(compiled, net)
    ours = [str(item.message) for item in caught if issubclass(item.category, lts.CompileWarning)]
    assert len(ours) == 1
    assert "Text" in ours[0] and "compiled too often" in ours[0] and "kind" in ours[0] and "\n" not in ours[0]
    assert results[-1].tolist() == [8.0, 8.0] and results[0].tolist() == [7.0, 7.0]


def test_a_recompile_storm_with_fullgraph_is_an_error_that_names_the_guard():
    net = Text()
    with pytest.raises(lts.CompileError, match="compiled too often.*kind") as caught:
        storm(eager_compiled(net), net)
    assert caught.value.recompile_limit


def test_a_float_on_the_module_that_changes_every_call_is_correct():
    net = Mutating()
    compiled = eager_compiled(net, fullgraph=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lts.CompileWarning)
        for index in range(12):
            net.scale = index / 10
            assert_same(compiled(torch.ones(2)), torch.ones(2) * (index / 10))


def test_a_failure_of_dynamo_itself_is_one_warning_and_the_function_runs_eagerly(monkeypatch):
    from torch._dynamo import convert_frame

    def fail(*args, **kwargs):
        raise IndexError("list index out of range\nmore")

    monkeypatch.setattr(convert_frame, "CheckFunctionManager", fail)  # after the backend has compiled
    compiled = eager_compiled(lambda x: x.sin(), fullgraph=False)
    with pytest.warns(lts.CompileWarning) as caught:
        for _ in range(2):
            assert_same(compiled(torch.ones(2)), torch.ones(2).sin())
    (warning,) = caught
    assert "TorchDynamo failed on the function <lambda>, which runs eagerly: " in str(warning.message)
    assert str(warning.message).endswith("IndexError: list index out of range")
    report = lts.explain(compiled).to_dict()
    assert steps(compiled)["graphs"] == 0 and report["fallbacks"][0]["executor"] == "TorchDynamo"


def test_a_reset_of_the_compiler_loses_neither_settings_nor_reports():
    compiled = eager_compiled(lambda x: x.sin())
    compiled(torch.ones(2))
    torch.compiler.reset()
    again = eager_compiled(lambda x, n: x.cos() * n.count)
    again(torch.ones(2), Counts(1))
    for function in (compiled, again):
        function(torch.ones(3), *([Counts(2)] if function is again else []))
    assert steps(compiled)["graphs"] >= 2 and steps(again)["compile_seconds"] > 0
    assert [item["reason"] for item in steps(again)["recompiles"]], "recompiles are still seen"


class Counts:
    def __init__(self, count):
        self.count = count


def test_settings_of_dynamo_are_those_of_the_user_again_after_compiling():
    before = torch._dynamo.config.get_hash()
    compiled = eager_compiled(lambda x: helper(x), fullgraph=False)
    compiled(torch.ones(2))
    with pytest.raises(lts.CompileError):
        eager_compiled(lambda x: helper(x))(torch.ones(2))
    assert torch._dynamo.config.get_hash() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Data-dependent branching\n  Explanation: Cannot.\n\n  Hint: Do.", "Data-dependent branching: Cannot."),
        ("one\ntwo\n  File \"x.py\", line 3", "one two"),
        ("Encountered graph break when attempting to trace CALL:\n\nreason\n\nUser code traceback:\n a", "reason"),
    ],
)  # fmt: skip
def test_reasons_are_one_line_without_hints_for_developers_of_torch(text, expected):
    assert events.dynamo_reason(text) == expected
