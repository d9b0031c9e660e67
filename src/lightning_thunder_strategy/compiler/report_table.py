"""The report as a table for people."""

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lightning_thunder_strategy.compiler.report import Report


def size_text(size: float) -> str:
    """Bytes for people: ``3.1 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def render(report: "Report") -> Any:
    """A rich renderable of the report."""
    data = report.to_dict()
    table = Table(title="Compile report", title_justify="left", expand=False)
    for column in (
        "step",
        "mode",
        "graphs",
        "breaks",
        "recompiles",
        "compile s",
        "operations by executor",
        "collectives",
    ):
        table.add_column(column, overflow="fold")
    for name, step in data["steps"].items():
        executors = ", ".join(f"{executor} {count}" for executor, count in step["executors"].items()) or "-"
        lines = [
            f"{stage}: {item['count']} {item['op']} ({size_text(item['bytes'])})"
            for stage, items in step["collectives"].items()
            for item in items
        ]
        seconds = f"{step['compile_seconds']:.1f}{' (cached)' if step['from_cache'] else ''}"
        table.add_row(
            name, step["mode"], str(step["graphs"]), str(len(step["graph_breaks"])), str(len(step["recompiles"])),
            seconds, executors, "\n".join(lines) or "-",
        )  # fmt: skip
    notes = []
    for name, step in data["steps"].items():
        if step["note"]:
            notes.append(f"{name}: {step['note']}")
        stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in step["compile_stages"].items())
        if stages:
            notes.append(f"{name} compiled in: {stages}")
        notes += [f"{name} breaks at {item['file']}:{item['line']}: {item['reason']}" for item in step["graph_breaks"]]
        notes += [f"{name} recompiled: {item['reason']}" for item in step["recompiles"]]
    notes += [f"{item['executor']} failed on {item['region']}: {item['error']}" for item in data["fallbacks"]]
    sizes = data["parameters"]
    notes.append(f"parameters: {size_text(sizes['total_bytes'])}, on this rank {size_text(sizes['local_bytes'])}")
    return Group(table, *(Text(note) for note in notes))
