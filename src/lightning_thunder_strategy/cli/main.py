"""The command line: one subcommand a file."""

import argparse
from collections.abc import Sequence
from typing import Optional

from lightning_thunder_strategy.cli import bisect, doctor, export, plan


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command.

    Args:
        arguments: Words after the program's name; by default those of this process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_thunder_strategy", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor.add_command(commands)
    bisect.add_command(commands)
    export.add_command(commands)
    plan.add_command(commands)
    options = parser.parse_args(arguments)
    return options.run(options)
