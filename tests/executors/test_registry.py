"""Names of executors, and what a wrong name says."""

import pytest
import torch

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import registry
from lightning_thunder_strategy.executors.inductor import InductorExecutor
from lightning_thunder_strategy.executors.packages import gpu_problem, import_problem
from tests.compiler.executors import Pointwise


def names(executors):
    return [executor.name for executor in registry.resolve(executors)]


def test_eager_always_comes_last():
    assert names([]) == names(["eager"]) == ["eager"]
    assert names(["inductor"]) == names(["inductor", "eager"]) == ["inductor", "eager"]
    with pytest.raises(ValueError, match="'eager' runs whatever is left, so it must be last"):
        names(["eager", "inductor"])


def test_auto_is_inductor_where_it_can_run(monkeypatch):
    assert names("auto") == ["inductor", "eager"]
    monkeypatch.setattr(InductorExecutor, "unavailable", lambda self: "No C++ compiler.")
    assert names("auto") == ["eager"]


def test_instances_and_names_mix_in_the_order_given():
    mine = Pointwise()
    resolved = registry.resolve([mine, "inductor"])
    assert resolved[0] is mine and [executor.name for executor in resolved] == ["pointwise", "inductor", "eager"]


def test_an_unknown_name_lists_all_executors():
    with pytest.raises(ValueError) as caught:
        lts.compile(lambda x: x, executors=["inductr"])
    text = str(caught.value)
    assert "'inductr' is not a known executor" in text and "inductor: available" in text and "eager: available" in text


def test_an_unavailable_executor_says_why_and_lists_all(monkeypatch):
    monkeypatch.setattr(InductorExecutor, "unavailable", lambda self: "No C++ compiler.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as caught:
        lts.compile(lambda x: x, executors=["inductor"])
    text = str(caught.value)
    assert "'inductor' cannot run here: No C++ compiler." in text
    assert "inductor: not available: No C++ compiler. To install: apt install g++" in text
    assert "eager: available" in text


def test_an_instance_that_cannot_run_is_refused_as_its_name_would_be():
    class Missing(Pointwise):
        name = "missing"

        def unavailable(self):
            return "The package 'nothing' is not installed."

    with pytest.raises(ValueError, match="'missing' cannot run here: The package 'nothing' is not installed."):
        lts.compile(lambda x: x, executors=[Missing()])


def test_the_report_says_what_auto_stands_for_and_why():
    compiled = lts.compile(lambda x: x.sin() + 1, executors="auto")
    compiled(torch.ones(2))
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    (found,) = [item for item in step["decisions"] if item["subject"] == 'executors="auto"']
    assert (found["shape"], found["choice"]) == ("on cpu", "inductor, eager")
    assert "has the compiler it needs on this machine" in found["reason"]
    named = lts.compile(lambda x: x.sin() + 1, executors=["eager"])
    named(torch.ones(2))
    (step,) = lts.explain(named).to_dict()["steps"].values()
    assert step["decisions"] == []


# ------------------------------------------------------------------------------------------------------------ reasons


def test_a_missing_package_and_one_that_fails_to_import_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "lts_broken.py").write_text("raise OSError('libfoo.so: undefined symbol\\nmore')")
    (tmp_path / "lts_needs.py").write_text("import lts_absent")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_problem("torch") is None
    assert import_problem("lts_absent.part") == "The package 'lts_absent' is not installed."
    assert import_problem("lts_broken") == "Importing 'lts_broken' fails: OSError: libfoo.so: undefined symbol."
    assert import_problem("lts_needs") == (
        "Importing 'lts_needs' fails: ModuleNotFoundError: No module named 'lts_absent'."
    )


def test_why_there_is_no_gpu_to_use(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_problem((8, 0)) == f"This torch ({torch.__version__}) is built without CUDA."
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_problem((8, 0)) == "No CUDA GPU is found."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert gpu_problem((7, 5)) is None
    assert gpu_problem((8, 0)) == "The GPU T4 is too old: compute capability 7.5, and 8.0 is needed."


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("inductor", 'give "auto" or a list of names'),
        (["inductor", "inductor"], "'inductor' appears twice"),
        ([Pointwise(), Pointwise()], "'pointwise' appears twice"),
        ([3], r"\[3\] is not allowed.*inductor: available"),
        ([Pointwise], "is not allowed: .*instances of Executor"),
        (None, "None is not allowed"),
    ],
)
def test_bad_values_name_the_option_and_what_is_allowed(value, message):
    with pytest.raises(ValueError, match=f"(?s)executors.*{message}"):
        lts.compile(lambda x: x, executors=value)


def test_the_list_tells_name_state_and_what_is_claimed():
    listed = {info.name: info for info in lts.executors.list()}
    assert {"inductor", "eager"} <= set(listed)
    eager = listed["eager"]
    assert eager.available and (eager.reason, eager.install) == ("", "")
    assert eager.claims and eager.version == torch.__version__
