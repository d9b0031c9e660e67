"""A pytest plugin that runs Lightning's own tests with our strategies in place of Lightning's.

``tests/conformance/run.py`` loads it. Two environment variables steer it, which processes that a test starts inherit:

- ``CONFORMANCE_STRATEGY`` says what takes the place of what: a key of ``KINDS``, or ``baseline`` for nothing.
- ``CONFORMANCE_RESULTS`` names a file to which one line of JSON is added after each test: its name, its outcome, how
  often a strategy of one device was chosen, how often one of several was asked for by name, and how many programs were
  compiled. A run that compiled nothing proves nothing.
- ``CONFORMANCE_SELECTED`` names a file with a list, in JSON, of the only tests to run.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import lightning.fabric.utilities.imports
import lightning.pytorch.utilities.imports
import pytest


class Kind(NamedTuple):
    """What takes the place of Lightning's strategies."""

    compile: bool
    several: str = ""  # the strategy for tests of several processes


KINDS = {
    "baseline": None,
    "thunder": Kind(True),
    "thunder-off": Kind(False),
    "thunder-ddp": Kind(True, "ThunderDDPStrategy"),
    "thunder-fsdp": Kind(True, "ThunderFSDPStrategy"),
}
VARIABLE = "CONFORMANCE_STRATEGY"
RESULTS = "CONFORMANCE_RESULTS"
SELECTED = "CONFORMANCE_SELECTED"
# Forking is much faster than spawning, for which a child imports everything again; spawning has tests of its own.
NAMES = (("ddp", "popen"), ("ddp_spawn", "fork"), ("ddp_fork", "fork"), ("ddp_notebook", "fork"))
SUFFIXES = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")

_counts = {"single": 0, "several": 0, "programs": 0}
_before: dict[str, int] = {}
_outcomes: dict[str, list[str]] = {}
_reasons: dict[str, str] = {}


def install() -> None:
    """Replace the strategies in this process."""
    # Tests of Lightning's main branch import a name that the released package does not have yet.
    for imports in (lightning.fabric.utilities.imports, lightning.pytorch.utilities.imports):
        if not hasattr(imports, "_TORCH_GREATER_EQUAL_2_11"):
            imports._TORCH_GREATER_EQUAL_2_11 = True
    import lightning.fabric.connector as fabric_connector
    import lightning.fabric.strategies as fabric
    import lightning.pytorch.strategies as trainer
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector

    single, several = _ours(KINDS[os.environ.get(VARIABLE, "baseline")])
    _replace_chosen(trainer_connector._AcceleratorConnector, trainer.SingleDeviceStrategy, single[0])
    _replace_chosen(fabric_connector._Connector, fabric.SingleDeviceStrategy, single[1])
    _replace_named(trainer.StrategyRegistry, several[0])
    _replace_named(fabric.STRATEGY_REGISTRY, several[1])


def _ours(kind: Optional[Kind]) -> tuple[tuple, tuple]:
    """What makes our strategies of one device and of several, each for Trainer and Fabric; ``None``: nothing does."""
    if kind is None:
        return (None, None), (None, None)
    import lightning_thunder_strategy as lts
    from lightning_thunder_strategy.compiler.pipeline import Pipeline

    warnings.simplefilter("ignore", lts.CompileWarning)
    call = Pipeline.__call__

    @functools.wraps(call)
    def counted(self: Any, *args: Any) -> Any:
        _counts["programs"] += 1
        return call(self, *args)

    Pipeline.__call__ = counted  # type: ignore[method-assign]
    spaces = ((lts, "step" if kind.compile else "off"), (lts.fabric, "forward" if kind.compile else "off"))

    def both(name: str) -> tuple:
        return tuple(functools.partial(getattr(at, name), executors=["eager"], compile=mode) for at, mode in spaces)

    return both("ThunderStrategy"), both(kind.several) if kind.several else (None, None)


def _replace_chosen(connector: type, single: type, make: Optional[Callable[[], Any]]) -> None:
    choose = connector._choose_strategy  # type: ignore[attr-defined]

    @functools.wraps(choose)
    def replaced(self: Any) -> Any:
        strategy = choose(self)
        if type(strategy) is not single:
            return strategy
        _counts["single"] += 1
        if make is None:
            return strategy
        ours = make()
        ours._root_device = strategy.root_device
        return ours

    connector._choose_strategy = replaced  # type: ignore[attr-defined]


def _replace_named(registry: Any, make: Optional[Callable[..., Any]]) -> None:
    for name, method in NAMES:
        for suffix in SUFFIXES:
            if name + suffix in registry:
                registry[name + suffix]["strategy"] = _counted(registry[name + suffix]["strategy"], make, method)


def _counted(theirs: Callable[..., Any], make: Optional[Callable[..., Any]], method: str) -> Callable[..., Any]:
    def made(**options: Any) -> Any:
        _counts["several"] += 1
        return theirs(**{**options, "start_method": method}) if make is None else make(start_method=method)

    return made


install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky(reruns, reruns_delay): of a plugin that is not needed here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SELECTED not in os.environ:
        return
    selected = set(json.loads(Path(os.environ[SELECTED]).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected])
    items[:] = [item for item in items if item.nodeid in selected]


def pytest_runtest_logstart(nodeid: str) -> None:
    _before.update(_counts)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down the outcome of a test after its teardown."""
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    _outcomes.setdefault(report.nodeid, []).append(outcome)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _reasons.setdefault(report.nodeid, str(crash.message if crash else report.longrepr).strip()[:600])
    if report.when != "teardown" or RESULTS not in os.environ:
        return
    outcomes = _outcomes.pop(report.nodeid)
    worst = next((each for each in ("failed", "skipped", "xfailed") if each in outcomes), "passed")
    counts = {name: _counts[name] - _before[name] for name in _counts}
    line = {"test": report.nodeid, "outcome": worst, "reason": _reasons.pop(report.nodeid, ""), **counts}
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")
