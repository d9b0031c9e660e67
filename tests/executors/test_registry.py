"""Names of executors, and what a wrong name says."""

import pytest

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors import registry
from lightning_thunder_strategy.executors.inductor import InductorExecutor
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
    with pytest.raises(ValueError) as caught:
        lts.compile(lambda x: x, executors=["inductor"])
    text = str(caught.value)
    assert "'inductor' cannot run here: No C++ compiler." in text
    assert "inductor: not available: No C++ compiler." in text and "eager: available" in text


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
    assert listed["eager"].available and listed["eager"].reason == "" and listed["eager"].claims
