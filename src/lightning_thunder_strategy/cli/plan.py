"""``plan``: what a training step of a program takes on any number of devices."""

import argparse
import contextlib
import functools
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Optional, get_args

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.cli import SaveConfigCallback

from lightning_thunder_strategy.planner import plot
from lightning_thunder_strategy.planner.capture import capture
from lightning_thunder_strategy.planner.hollow import meta_parameters
from lightning_thunder_strategy.planner.machines import GPUName, InterconnectName
from lightning_thunder_strategy.planner.observe import PlanError
from lightning_thunder_strategy.planner.plan import machine_of, plan_of, quiet
from lightning_thunder_strategy.planner.rank import LoneRank, prepare, trainer_options, world
from lightning_thunder_strategy.planner.report import Plan
from lightning_thunder_strategy.planner.timing import Machine


def add_command(commands: Any) -> None:
    command = commands.add_parser(
        "plan", help="what a program's training step takes on any number of devices, without any of them"
    )
    command.add_argument("--devices", type=int, default=512, help="how many devices train (default: 512)")
    command.add_argument("--devices-per-node", type=int, default=8, help="of which a node has (default: 8)")
    command.add_argument("--gpu", choices=get_args(GPUName), default="H100", help="which GPU (default: H100)")
    command.add_argument(
        "--interconnect", choices=get_args(InterconnectName), default="infiniband-ndr",
        help="what connects nodes (default: infiniband-ndr)",
    )  # fmt: skip
    command.add_argument(
        "--efficiency", type=float, default=1.0, help="the part of the datasheets' speeds that is reached (default: 1)"
    )
    command.add_argument("--png", type=Path, help="draw memory over the step to this file (needs matplotlib)")
    command.add_argument("--json", type=Path, help="write the plan to this file")
    command.add_argument("program", nargs="+", help="after --: a script with a Trainer, and its arguments")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program up to its first training step and print the plan; the exit status is 1 if that failed."""
    try:
        if options.png is not None:
            plot.check(options.png)
        machine = machine_of(
            options.devices, options.devices_per_node, options.gpu, options.interconnect, options.efficiency
        )
        plan = plan_program(options.program, options.devices, machine)
        if options.json is not None:
            options.json.write_text(json.dumps(plan.to_dict(), indent=1))
        if options.png is not None:
            plan.plot(options.png)
    except (PlanError, ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError) as error:
        print(f"plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(plan)
    return 0


class _Done(BaseException):
    """Ends the user's program when its step is known."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def plan_program(program: Sequence[str], devices: int, machine: Machine) -> Plan:
    """Run a program until a Trainer in it is about to take its first training step.

    Args:
        program: A Python file and its arguments.
        devices: How many devices train.
        machine: What they are.

    Raises:
        PlanError: If it ends before, or the step cannot be planned.
    """
    script = Path(program[0])
    if not script.is_file():
        raise PlanError(f"there is no file {script}: give a Python script after --.")

    def fit_once(trainer: "pl.Trainer", fit: Callable[[], Any]) -> None:
        prepare(trainer)
        captured = capture(trainer, fit)
        raise _Done(plan_of(captured, devices, machine.devices_per_node, machine))

    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(world(devices))
        stack.enter_context(meta_parameters())
        stack.enter_context(_trainers(trainer_options(devices, machine.devices_per_node), devices, fit_once))
        stack.enter_context(_arguments(program))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            runpy.run_path(str(script.resolve()), run_name="__main__")
        except _Done as done:
            return done.plan
        except SystemExit as ended:
            raise PlanError(f"{script} ended with status {ended.code} before a training step.") from ended
    raise PlanError(f"{script} ended without a call of Trainer.fit.")


@contextmanager
def _trainers(options: dict[str, Any], devices: int, fit_once: Callable) -> Iterator[None]:
    """While open, Trainers are rank 0 of many, and ``fit`` calls ``fit_once`` with what it would do."""
    make, fit = pl.Trainer.__init__, pl.Trainer.fit

    @functools.wraps(make)
    def init(self: "pl.Trainer", *args: Any, **kwargs: Any) -> None:
        plugins = kwargs.pop("plugins", None) or []
        plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        plugins = [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)]
        if devices > 1:
            plugins.append(LoneRank(devices))
        kwargs["callbacks"] = _kept(kwargs.get("callbacks"))
        make(self, *args, **{**kwargs, **options, "plugins": plugins})

    @functools.wraps(fit)
    def fit_planned(self: "pl.Trainer", *args: Any, **kwargs: Any) -> None:
        kwargs.pop("ckpt_path", None)  # values do not matter
        fit_once(self, lambda: fit(self, *args, **kwargs))

    pl.Trainer.__init__, pl.Trainer.fit = init, fit_planned  # type: ignore[method-assign]
    try:
        yield
    finally:
        pl.Trainer.__init__, pl.Trainer.fit = make, fit  # type: ignore[method-assign]


def _kept(callbacks: Any) -> Optional[list[Any]]:
    """Callbacks that do not write: nothing is trained."""
    if callbacks is None:
        return None
    listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    averaging = [item for item in listed if isinstance(item, pl.callbacks.WeightAveraging)]
    if averaging:
        raise PlanError(
            f"{type(averaging[0]).__name__} keeps a second model, which a plan does not know: leave it out."
        )
    writing = (
        pl.callbacks.Checkpoint, pl.callbacks.LearningRateMonitor, pl.callbacks.DeviceStatsMonitor, SaveConfigCallback,
    )  # fmt: skip
    return [item for item in listed if not isinstance(item, (*writing, pl.callbacks.ProgressBar))]


@contextmanager
def _arguments(program: Sequence[str]) -> Iterator[None]:
    """While open, ``sys.argv`` and the import path are those of the program."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(program)
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
