"""The compile cache: the same report from a warm cache in another process, and never the program of another pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.compiler import cache
from lightning_thunder_strategy.compiler.report import Program
from lightning_thunder_strategy.compiler.trace import Trace

SCRIPT = Path(__file__).with_name("cached_programs.py")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes printed that ran one after the other with one cache, and the cache's folder."""
    folder = tmp_path_factory.mktemp("cache")
    root = str(Path(__file__).parent.parent.parent)
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": paths, "PYTHONHASHSEED": "random"}
    found = []
    for _ in range(2):
        ended = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=280)
        assert ended.returncode == 0, ended.stderr
        found.append((json.loads(ended.stdout.splitlines()[-1]), ended.stderr))
    return *found, folder


def steady(report):
    """A report without what differs from run to run: times, and whether it came from the cache."""
    return {
        **report,
        "steps": {
            name: {k: v for k, v in step.items() if k not in ("compile_seconds", "compile_stages", "from_cache")}
            for name, step in report["steps"].items()
        },
    }


def test_the_second_process_reuses_the_programs_and_reports_the_same(processes):
    (cold, _), (warm, _), _ = processes
    for name in ("plain", "positive", "negative", "random"):
        assert not cold[name]["report"]["steps"]["Sequential"]["from_cache"], name
        assert warm[name]["report"]["steps"]["Sequential"]["from_cache"], name
        assert steady(warm[name]["report"]) == steady(cold[name]["report"]), name
        for key in ("result", "gradient", "traces", "inputs"):
            without_times = [[str(x).split(" ms")[0][:20] for x in run[name][key]] for run in (cold, warm)]
            assert without_times[0] == without_times[1], (name, key)
        assert warm[name]["result"] == cold[name]["result"] and warm[name]["gradient"] == cold[name]["gradient"]


def test_traces_from_the_cache_are_complete_and_run(processes):
    _, (warm, _), _ = processes
    stages = [text.split(":")[0].removeprefix("# ") for text in warm["positive"]["traces"]]
    both = ["forward", "backward"]
    assert stages == ["acquired", "joint", *both, *both, "final forward", "final backward"]
    assert warm["plain"]["rerun"] and "inductor_forward(" in warm["plain"]["traces"][-2]


def test_a_pass_with_other_options_never_gets_the_program_of_another(processes):
    for run, _ in processes[:2]:
        assert run["plain"]["result"] == run["positive"]["result"]
        assert run["negative"]["result"] == [-value for value in run["plain"]["result"]]


def test_a_pass_without_a_key_is_never_taken_from_the_cache(processes):
    for run, errors in processes[:2]:
        assert errors.count("joint was called") == 1
        assert not run["secret"]["report"]["steps"]["Sequential"]["from_cache"]


def test_records_are_private_json_files_beside_the_compile_cache(processes):
    folder = processes[2] / "lightning_thunder_strategy"
    files = list(folder.iterdir())
    assert len(files) == 4 and {file.suffix for file in files} == {".json"}
    assert folder.stat().st_mode & 0o077 == 0


# ------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "lightning_thunder_strategy"


def test_what_is_stored_is_loaded(folder):
    compiled = lts.compile(lambda x: x.sin(), executors=["eager"])
    compiled(torch.ones(2))
    program = compiled.record.programs[0]
    cache.store("key", program)
    again = Program()
    again.restore(cache.load("key"))
    assert [str(trace) for trace in again.traces] == [str(trace) for trace in program.traces]
    assert again.traces[0].inputs == program.traces[0].inputs and again.traces[1].outputs == program.traces[1].outputs
    assert again.executors == program.executors and again.from_cache
    assert cache.load("other") is None


def test_a_damaged_record_is_ignored_with_a_notice(folder):
    cache.store("key", Program())
    for damaged in ("{half", '{"traces": []}', "[]"):
        (folder / "key.json").write_text(damaged)
        with pytest.warns(lts.CompileWarning, match="key.json cannot be read and is ignored"):
            assert cache.load("key") is None


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(lts.CompileWarning, match="could not be stored"):
        cache.store("key", Program())


def test_what_cannot_be_written_leaves_no_half_file(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.warns(lts.CompileWarning, match="could not be stored beside the compile cache: disk full"):
        cache.store("key", Program())
    assert list(folder.iterdir()) == []
    monkeypatch.undo()


def test_a_trace_from_another_process_says_which_constants_it_lacks():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("table"))))
    owner = torch.nn.Module()
    owner.table = torch.arange(99.0)
    trace = Trace("forward", torch.fx.GraphModule(owner, graph)).snapshot("")
    again = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert str(again) == str(trace)
    with pytest.raises(RuntimeError, match="Another process made this trace, and its constants table_constant"):
        again.run(torch.ones(99))


def test_keys_depend_on_every_part_and_vanish_with_any_unknown_part():
    assert cache.pipeline_key(["a", "b"]) == cache.pipeline_key(["a", "b"]) != cache.pipeline_key(["a", "c"])
    assert cache.pipeline_key(["a", None]) is None
