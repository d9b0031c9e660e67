"""The report as a table for people."""

import re
from collections.abc import Sequence
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
    table = Table(title="Compile report", title_justify="left", show_lines=True)
    table.add_column("step", overflow="fold")
    table.add_column("what was compiled", overflow="fold")
    for name, step in data["steps"].items():
        table.add_row(Text(name), Text("\n".join(_step_lines(step))))
    notes = [f"{item['executor']} failed on {item['region']}: {item['error']}" for item in data["fallbacks"]]
    notes += [_optimizer_line(item) for item in data["optimizers"]]
    sizes = data["parameters"]
    notes.append(f"parameters: {size_text(sizes['total_bytes'])}, on this rank {size_text(sizes['local_bytes'])}")
    return Group(table, *(Text(note) for note in notes))


def _step_lines(step: dict[str, Any]) -> list[str]:
    counts = [_count(step["graphs"], "graph"), _count(len(step["graph_breaks"]), "break")]
    counts.append(_count(len(step["recompiles"]), "recompilation"))
    lines = [f"mode {step['mode']}: {', '.join(counts)}"]
    if step["note"]:
        lines.append(step["note"])
    stages = ", ".join(f"{stage} {value:.1f} s" for stage, value in step["compile_stages"].items())
    cached = ", from the compile cache" if step["from_cache"] else ""
    lines.append(f"compiled in {step['compile_seconds']:.1f} s ({stages or 'nothing'}){cached}")
    executors = ", ".join(f"{executor} {count}" for executor, count in step["executors"].items())
    lines.append(f"operations: {executors or 'none'}")
    for stage, items in step["collectives"].items():
        if items:
            texts = [f"{item['count']} {item['op']} of {size_text(item['bytes'])}" for item in items]
            lines.append(f"collectives in the {stage}: {', '.join(texts)}")
    if step["saved_tensors"]:
        what = f"{size_text(step['saved_bytes'])} in {_count(step['saved_tensors'], 'tensor')}"
        lines.append(f"kept for the backward: {what}; operations computed again: {step['computed_again']}")
    lines += decision_lines(step["decisions"])
    lines += _claim_lines(step["claims"])
    lines += [f"break at {item['file']}:{item['line']}: {item['reason']}" for item in step["graph_breaks"]]
    lines += [f"recompiled: {item['reason']}" for item in step["recompiles"]]
    return lines


def _optimizer_line(item: dict[str, Any]) -> str:
    """How the newest step of an optimizer was taken."""
    parts = []
    for implementation, count in item["parameters"].items():
        reasons = f" ({'; '.join(item['reasons'])})" if implementation == "torch" and item["reasons"] else ""
        parts.append(f"{_count(count, 'parameter')} by {implementation}{reasons}")
    return f"{item['name']}: {', '.join(parts) or 'no step'}"


def decision_lines(decisions: Sequence[dict[str, str]]) -> list[str]:
    """What passes did with parts of the program: those that only differ in numbers of their names are one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in decisions:
        what = f"{item['shape']}: {item['choice']}{f' ({why})' if (why := item['reason']) else ''}"
        groups.setdefault((re.sub(r"\d+", "*", item["subject"]), what), []).append(item["subject"])
    return [
        f"{names[0] if len(names) == 1 else f'{pattern} ({len(names)} times)'}, {what}"
        for (pattern, what), names in groups.items()
    ]


def _claim_lines(claims: Sequence[dict[str, Any]]) -> list[str]:
    """What executors took and declined: operations with the same reason are one line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for claim in claims:
        key = (claim["executor"], "runs" if claim["accepted"] else "declined", claim["reason"])
        groups.setdefault(key, []).append(f"{claim['operation']} ({_count(claim['count'], 'time')})")
    lines = []
    for (executor, verb, reason), names in groups.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{executor} {verb} {', '.join(names[:3])}{more}{f': {reason}' if reason else ''}")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
