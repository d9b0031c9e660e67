"""Optimization fuel, and the command ``bisect``, which finds the claim that breaks a script."""

import copy
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.cli import bisect
from lightning_thunder_strategy.cli.main import main
from tests.compiler.executors import Pointwise, Sine
from tests.compiler.parity import assert_same

SCRIPT = """
import sys

import torch
import lightning_thunder_strategy as lts
from tests.compiler.executors import Pointwise, overload


class Wrong(Pointwise):
    name = "wrong"

    def fuse(self, region, inputs):
        for node in region.graph.nodes:
            if overload(node) == sys.argv[1]:
                node.args = (node.args[0], 1.0)
        region.recompile()
        return super().fuse(region, inputs)


@lts.executors.register("spoilt", replaces=torch.cos)
def spoilt(x):
    return x.cos() + float(sys.argv[2])


def function(x):
    y = x.sin() * 2
    return (y.cos() + x.cos()).exp() - 1


x = torch.randn(3, 4, requires_grad=True)
compiled = lts.compile(function, executors=["spoilt", Wrong()])
for call in (compiled, function):
    x.grad = None
    result = call(x)
    result.sum().backward()
    print(float(result.sum()))
torch.testing.assert_close(compiled(x), function(x))
"""


def test_a_run_of_a_script_is_limited_and_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "script.py").write_text(SCRIPT)
    found = bisect.run_with([sys.executable, str(tmp_path / "script.py"), "mul", "0"], 4, 100)
    assert not found.succeeded  # the fourth claim is the wrong one
    assert [claim["number"] for claim in found.claims] == [1, 2, 3, 4]
    assert [claim["executor"] for claim in found.claims] == ["spoilt", "spoilt", "wrong", "wrong"]
    last = found.claims[-1]
    assert (last["operation"], last["stage"]) == ("aten.mul.Tensor", "forward")
    assert last["source"].endswith("script.py:26 in function: y = x.sin() * 2")


@pytest.mark.parametrize("wrong", [1, 2, 7, 11])
def test_the_claim_that_breaks_a_script_is_found(wrong, monkeypatch, capsys):
    claims = [
        {"number": n, "executor": f"e{n}", "operation": "aten.mul", "stage": "forward", "source": f"a.py:{n}"}
        for n in range(1, 12)
    ]
    limits = []

    def run_with(command, limit, timeout):
        limits.append(limit)
        assert command == [sys.executable, "script.py", "--its", "argument"]
        return bisect.Run(limit < wrong, claims[:limit], f"said with {limit}")

    monkeypatch.setattr(bisect, "run_with", run_with)
    assert main(["bisect", "script.py", "--its", "argument"]) == 0
    text = capsys.readouterr().out
    assert f"claim {wrong} of 11 breaks it: e{wrong} takes aten.mul in the forward\n  a.py:{wrong}\n" in text
    assert "0 claims: succeeds said with 0" in text and "all claims: fails" in text
    assert len(limits) <= 6


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({2**31: True}, "succeeds with all 1 claims: there is nothing to find"),
        ({2**31: False, 0: False}, "fails without any claim too: no executor is to blame"),
    ],
)
def test_nothing_is_blamed_where_no_claim_matters(runs, message, monkeypatch, capsys):
    monkeypatch.setattr(bisect, "run_with", lambda command, limit, timeout: bisect.Run(runs[limit], [{}], ""))
    assert main(["bisect", "script.py"]) == 1
    assert message in capsys.readouterr().out


def test_a_script_that_fails_before_any_claim_is_not_searched(tmp_path, capsys):
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    assert main(["bisect", str(tmp_path / "script.py")]) == 1
    assert "fails before an executor has claimed anything" in capsys.readouterr().out


def test_a_run_that_takes_too_long_leaves_no_process(tmp_path):
    script, number = tmp_path / "script.py", tmp_path / "number"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(number)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    found = bisect.run_with([sys.executable, str(script)], 0, timeout=5)
    assert not found.succeeded
    child = int(number.read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process that the script had started still runs")


# --------------------------------------------------------------------------------------------------------------- fuel


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 4, 100])
def test_executors_stop_when_the_fuel_is_used_up(fuel):
    def function(x):
        return (x.sin() * 2).cos() + 1

    x = torch.randn(3, 4)
    compiled = lts.compile(function, executors=[Sine(), Pointwise()], config=lts.CompileConfig(fuel=fuel))
    result = compiled(x)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    operators = [claim for claim in step["claims"] if claim["executor"] == "sine"]
    assert len(operators) == min(fuel, 1)
    taken = step["executors"].get("pointwise", 0)
    # sine takes the first operation, whose function is three operations that Pointwise may take; then *, cos and +.
    assert taken == max(0, min(fuel - 1, 6 if fuel > 6 else fuel))
    expected = function(x) if fuel == 0 else (x.sin() * x.sin() * 2).cos() + 1
    assert_same(result, expected)


def test_part_of_a_program_under_inductor_is_as_exact():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)).double()
    other = copy.deepcopy(net)
    x = torch.randn(3, 4, dtype=torch.float64)
    compiled = lts.compile(net, executors=["inductor"], config=lts.CompileConfig(fuel=5, on_error="raise"))
    compiled(x).square().sum().backward()
    other(x).square().sum().backward()
    for mine, theirs in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert step["executors"]["inductor"] == 5 and step["executors"]["eager"] > 5
