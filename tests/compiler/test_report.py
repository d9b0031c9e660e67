"""The report: its keys, its figures, and how it is shown."""

import io
import json
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler.collectives import Collective
from lightning_thunder_strategy.compiler.report import Fallback, GraphBreak, Program, Recompile, Record, Report
from tests.compiler.executors import Pointwise, Refusing
from tests.compiler.parity import eager_compiled

STEP_KEYS = {
    "graphs": int, "graph_breaks": list, "recompiles": list, "compile_seconds": float, "mode": str, "executors": dict,
    "collectives": dict,
}  # fmt: skip


def trained(*executors):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = lts.compile(net, executors=list(executors) or ["eager"])
    compiled(torch.ones(3, 4)).sum().backward()
    return compiled


def test_the_keys_and_types_are_those_of_the_interface():
    data = lts.explain(trained()).to_dict()
    assert set(data) == {"steps", "parameters", "fallbacks", "optimizers"}
    (step,) = data["steps"].values()
    for key, kind in STEP_KEYS.items():
        assert type(step[key]) is kind, key
    assert set(step["collectives"]) == {"forward", "backward"}
    assert data["parameters"] == {"total_bytes": 58 * 4, "local_bytes": 58 * 4}
    assert json.loads(json.dumps(data)) == data


def test_figures_follow_what_happens():
    compiled = eager_compiled(lambda x, flag: x.sin() if flag else x.cos(), fullgraph=False)
    assert lts.explain(compiled).to_dict()["steps"]["test_figures_follow_what_happens.<locals>.<lambda>"]["graphs"] == 0

    def step():
        (found,) = lts.explain(compiled).to_dict()["steps"].values()
        return found

    for flag, graphs, recompiles in [(True, 1, 0), (True, 1, 0), (False, 2, 1)]:
        compiled(torch.ones(2), flag)
        assert (step()["graphs"], len(step()["recompiles"])) == (graphs, recompiles)
    assert step()["executors"] == {"eager": 2}
    assert step()["mode"] == "step" and step()["graph_breaks"] == []


def test_compile_seconds_by_stage_add_up_to_no_more_than_the_wall_time():
    started = time.perf_counter()
    compiled = trained(Pointwise())
    wall = time.perf_counter() - started
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    stages = step["compile_stages"]
    assert {"acquire", "differentiate", "dispatch"} <= set(stages) and all(value >= 0 for value in stages.values())
    assert step["compile_seconds"] == pytest.approx(sum(stages.values()))
    assert wall / 4 < step["compile_seconds"] <= wall


def test_the_time_of_passes_is_a_stage_of_its_own():
    class Slow(lts.Transform):
        def acquired(self, trace):
            time.sleep(0.1)

        def joint(self, trace):
            time.sleep(0.1)

    started = time.perf_counter()
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"], transforms=[Slow()])
    compiled(torch.ones(2, requires_grad=True))
    wall = time.perf_counter() - started
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    assert 0.2 <= step["compile_stages"]["transform"] < 0.3
    assert step["compile_seconds"] <= wall


def test_calls_that_compile_nothing_add_no_time():
    compiled = trained()

    def seconds():
        (step,) = lts.explain(compiled).to_dict()["steps"].values()
        return step["compile_seconds"]

    before = seconds()
    compiled(torch.ones(3, 4)).sum().backward()
    assert seconds() == before


def test_operations_are_counted_by_executor():
    (step,) = lts.explain(trained(Pointwise())).to_dict()["steps"].values()
    (eager,) = lts.explain(trained()).to_dict()["steps"].values()
    assert set(step["executors"]) == {"pointwise", "eager"} and set(eager["executors"]) == {"eager"}
    assert sum(step["executors"].values()) == sum(eager["executors"].values())


def test_fallbacks_name_region_executor_and_error():
    with pytest.warns(lts.CompileWarning):
        compiled = trained(Refusing("tanh"))
    (fallback,) = lts.explain(compiled).to_dict()["fallbacks"]
    assert set(fallback) == {"region", "executor", "error"} and "tanh" in fallback["region"]


def full_report() -> Report:
    program = Program(
        collectives={"forward": [Collective("all_gather_into_tensor", 3, 5 * 2**20)], "backward": []},
        fallbacks=[Fallback("aten.mm.default in the forward", "inductor", "RuntimeError: [bold]no[/bold]")],
    )
    program.executors.update({"inductor": 12, "eager": 1})
    program.seconds.update({"acquire": 0.25, "dispatch": 1.5})
    record = Record("training_step", note="not one compiled program: it prints.", programs=[program])
    record.graph_breaks.append(GraphBreak("/home/me/model.py", 12, "print"))
    record.recompiles.append(Recompile("batch[key] has another size"))
    return Report([record, Record("validation_step", mode="off")], {"total_bytes": 3 * 2**30, "local_bytes": 3 * 2**29})


def test_the_table_shows_everything_that_was_recorded():
    text = str(full_report())
    for shown in (
        "training_step", "mode step: 1 graph, 1 break, 1 recompilation", "not one compiled program: it prints.",
        "compiled in 1.8 s (acquire 0.2 s, dispatch 1.5 s)", "operations: inductor 12, eager 1",
        "collectives in the forward: 3 all_gather_into_tensor of 5.0 MiB", "break at /home/me/model.py:12: print",
        "recompiled: batch[key] has another size", "validation_step", "mode off: 0 graphs",
        "inductor failed on aten.mm.default in the forward: RuntimeError: [bold]no[/bold]",
        "parameters: 3.0 GiB, on this rank 1.5 GiB",
    ):  # fmt: skip
        assert shown in text, shown


@pytest.mark.parametrize("width", [40, 200])
def test_the_table_fits_any_terminal(width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    console.print(full_report())
    text = console.file.getvalue()
    assert "Compile report" in text and "inductor 12" in text
