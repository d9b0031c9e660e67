"""``doctor``: what this machine can run, and exactly why not."""

import argparse
import platform
from typing import Any

import lightning
import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_thunder_strategy.executors.registry import auto, list_executors


def add_command(commands: Any) -> None:
    command = commands.add_parser("doctor", help="every executor, its version, and whether it can run here")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; the exit status is 0."""
    console = Console()
    console.print(report(), soft_wrap=False)
    return 0


def report() -> Group:
    """The machine, every executor, and what ``executors="auto"`` means here."""
    table = Table(title="Executors", title_justify="left", show_lines=True)
    for column in ("name", "version", "state", "what it runs"):
        table.add_column(column, overflow="fold")
    for info in list_executors():
        state = Text("available", style="green")
        if not info.available:
            state = Text(f"not available: {info.reason}", style="red")
            if info.install:
                state.append(f"\nto install: {info.install}", style="default")
        table.add_row(Text(info.name), Text(info.version or "not installed"), state, Text(info.claims))
    names, reason = auto()
    return Group(
        *map(Text, _machine()), table, Text(f'executors="auto" is {", ".join(names)} on this machine: {reason}.')
    )


def _machine() -> list[str]:
    lines = [
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}",
        f"CUDA of torch: {torch.version.cuda or 'none'}",
    ]
    if not torch.cuda.is_available():
        return [*lines, "GPUs: none that torch can use"]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = found.total_memory / 2**30
        lines.append(f"GPU {index}: {found.name}, compute capability {found.major}.{found.minor}, {memory:.0f} GiB")
    return lines
