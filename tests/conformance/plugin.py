"""A pytest plugin that runs Lightning's own tests with our strategies in place of Lightning's.

Load it with ``-p tests.conformance.plugin`` from the folder that holds Lightning's ``tests_pytorch`` or
``tests_fabric``. ``CONFORMANCE_STRATEGY`` says what takes the place of what:

- ``baseline``: nothing is replaced.
- ``thunder``, ``thunder-off``: one device, steps compiled with the eager executor or not at all.
- ``thunder-ddp``, ``thunder-fsdp``: also every DDP strategy that the tests ask for by name on CPU.

The number of compiled calls is printed at the end: a run that compiled nothing proves nothing.
"""

import functools
import os
import warnings
from typing import Any

import lightning.fabric.utilities.imports
import lightning.pytorch.utilities.imports
import pytest

KIND = os.environ.get("CONFORMANCE_STRATEGY", "baseline")

# Tests of Lightning's main branch import a name that the released package does not have yet.
for imports in (lightning.fabric.utilities.imports, lightning.pytorch.utilities.imports):
    if not hasattr(imports, "_TORCH_GREATER_EQUAL_2_11"):
        imports._TORCH_GREATER_EQUAL_2_11 = True

_calls = {"programs": 0, "replaced": 0}


def _mode(highest: str) -> str:
    return "off" if KIND.endswith("-off") else highest


def _replace(connector: type, single: type, make: Any) -> None:
    choose = connector._choose_strategy  # type: ignore[attr-defined]

    @functools.wraps(choose)
    def replaced(self: Any) -> Any:
        strategy = choose(self)
        if type(strategy) is not single:
            return strategy
        _calls["replaced"] += 1
        ours = make()
        ours._root_device = strategy.root_device
        return ours

    connector._choose_strategy = replaced  # type: ignore[attr-defined]


def _replace_names(registry: Any, strategy: type, highest: str) -> None:
    for name, method in (("ddp", "popen"), ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")):
        for suffix in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
            if name + suffix in registry:
                options = {"executors": ["eager"], "compile": _mode(highest), "start_method": method}
                registry.register(name + suffix, strategy, override=True, **options)


if KIND != "baseline":
    import lightning.fabric.connector
    import lightning.fabric.strategies
    import lightning.pytorch.strategies
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector

    import lightning_thunder_strategy as lts
    from lightning_thunder_strategy.compiler.pipeline import Pipeline

    warnings.simplefilter("ignore", lts.CompileWarning)
    _replace(
        trainer_connector._AcceleratorConnector,
        lightning.pytorch.strategies.SingleDeviceStrategy,
        lambda: lts.ThunderStrategy(executors=["eager"], compile=_mode("step")),
    )
    _replace(
        lightning.fabric.connector._Connector,
        lightning.fabric.strategies.SingleDeviceStrategy,
        lambda: lts.fabric.ThunderStrategy(executors=["eager"], compile=_mode("forward")),
    )
    if KIND.startswith(("thunder-ddp", "thunder-fsdp")):
        name = "ThunderDDPStrategy" if "ddp" in KIND else "ThunderFSDPStrategy"
        _replace_names(lightning.pytorch.strategies.StrategyRegistry, getattr(lts, name), "step")
        _replace_names(lightning.fabric.strategies.STRATEGY_REGISTRY, getattr(lts.fabric, name), "forward")
    call = Pipeline.__call__

    @functools.wraps(call)
    def counted(self: Any, *args: Any) -> Any:
        _calls["programs"] += 1
        return call(self, *args)

    Pipeline.__call__ = counted  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"conformance {KIND}: {_calls['replaced']} strategies replaced, {_calls['programs']} programs compiled"
    )
