"""Memory over a step as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_thunder_strategy.planner.report import Plan

_COLORS = {"forward": "tab:blue", "backward": "tab:orange", "optimizer": "tab:green"}


def draw(plan: "Plan", path: Path) -> Path:
    """Draw memory over the operations of a step; lines show what is there all the time, and the GPU's memory.

    Raises:
        ModuleNotFoundError: If matplotlib is missing.
        ValueError: If the name does not end in ``.png``.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    memory = plan.memory
    unit, name = (2**30, "GiB") if memory.peak >= 2**30 else (2**20, "MiB")
    start = 0
    for phase, color in _COLORS.items():
        sizes = [point.bytes / unit for point in memory.timeline if point.phase == phase]
        axes.fill_between(range(start, start + len(sizes)), sizes, step="mid", color=color, alpha=0.6, label=phase)
        if len(sizes) == 1:
            axes.bar(start, sizes, color=color, alpha=0.6)
        start += len(sizes)
    held = (memory.parameters + memory.buffers + memory.batch + memory.optimizer) / unit
    axes.axhline(held, color="black", linestyle=":", label="parameters, optimizer state, buffers, batch")
    if memory.peak > 0.5 * plan.capacity:
        axes.axhline(plan.capacity / unit, color="tab:red", label=f"memory of {plan.gpu}")
    axes.set(xlabel="kernels of the step, in order", ylabel=name, ylim=(0, 1.3 * memory.peak / unit))
    axes.set_title(f"{plan.module}, {plan.strategy}, rank 0 of {plan.devices}: peak {memory.peak / unit:.2f} {name}")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=100)
    return path


def check(path: Path) -> None:
    """Raise unless a picture can be written there, before anything long is done."""
    if path.suffix != ".png":
        raise ValueError(f"{path} is not the name of a PNG file: let it end in .png.")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A plot of memory needs matplotlib: pip install matplotlib, or this package with [plot]."
        ) from None
