"""``bisect``: finds the claim of an executor that makes a script fail, by running it with less and less fuel."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lightning_thunder_strategy.compiler.fuel import LIMIT, LOG

_UNLIMITED = 2**31


@dataclass(frozen=True)
class Run:
    """One run of the script.

    Attributes:
        succeeded: Whether it exited with status 0.
        claims: What executors took, in order, each once.
        last_line: The last line that it printed.
    """

    succeeded: bool
    claims: list[dict[str, Any]]
    last_line: str


def add_command(commands: Any) -> None:
    command = commands.add_parser("bisect", help="find the claim of an executor that makes a script fail")
    command.add_argument("--timeout", type=float, default=None, help="seconds after which a run counts as failed")
    command.add_argument("script", help="a Python file that fails if values are wrong")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Search, and print what was found; the exit status is 0 if a claim was found, else 1."""
    command = [sys.executable, options.script, *options.arguments]
    everything = run_with(command, _UNLIMITED, options.timeout)
    _say(_UNLIMITED, everything)
    if everything.succeeded:
        print(f"The script succeeds with all {len(everything.claims)} claims: there is nothing to find.")
        return 1
    if not everything.claims:
        print("The script fails before an executor has claimed anything.")
        return 1
    nothing = run_with(command, 0, options.timeout)
    _say(0, nothing)
    if not nothing.succeeded:
        print("The script fails without any claim too: no executor is to blame.")
        return 1
    good, bad, worst = 0, len(everything.claims), everything
    while bad - good > 1:
        middle = (good + bad) // 2
        found = run_with(command, middle, options.timeout)
        _say(middle, found)
        if found.succeeded:
            good = middle
        else:
            bad, worst = middle, found
    claim = worst.claims[bad - 1]
    total = len(everything.claims)
    print(f"claim {bad} of {total} breaks it: {claim['executor']} takes {claim['operation']} in the {_stage(claim)}")
    if claim["source"]:
        print(f"  {claim['source']}")
    print(f"  with it: {worst.last_line}")
    return 0


def run_with(command: Sequence[str], limit: int, timeout: Optional[float]) -> Run:
    """Run the script while executors may make ``limit`` claims."""
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder) / "claims", Path(folder) / "output"
        environment = {**os.environ, LIMIT: str(limit), LOG: str(log)}
        with output.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                _end(process)  # with the processes that it has started
        lines = log.read_text().splitlines() if log.exists() else []
        printed = output.read_text(errors="replace").strip().splitlines()
    claims = {claim["number"]: claim for claim in map(json.loads, lines)}  # every rank counts its own
    return Run(status == 0, [claims[number] for number in sorted(claims)], printed[-1] if printed else "")


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say(limit: int, found: Run) -> None:
    name = "all" if limit == _UNLIMITED else str(limit)
    print(f"{name} claims: {'succeeds' if found.succeeded else 'fails'} {found.last_line}".rstrip(), flush=True)


def _stage(claim: dict[str, Any]) -> str:
    return "acquired program" if claim["stage"] == "acquired" else str(claim["stage"])
