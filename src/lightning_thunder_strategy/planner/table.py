"""A plan as a table."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_thunder_strategy.planner.report import Plan


def render(plan: Plan) -> Group:
    """Tables of memory, collectives and time."""
    return Group(_title(plan), _memory(plan), _largest(plan), _collectives(plan), _time(plan))


def _title(plan: Plan) -> Text:
    nodes = max(1, plan.devices // plan.devices_per_node)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    where = f"{plan.devices} x {plan.gpu} on {nodes} node{'s' if nodes > 1 else ''}"
    text = f"{plan.module}, {plan.strategy}, rank 0 of {where} ({plan.interconnect}), compiled by {plan.compiled_by}: "
    sizes = f"{gib(plan.total)} of {gib(plan.capacity)}, {verdict}"
    return Text(text).append(sizes, style="bold green" if plan.fits else "bold red")


def _memory(plan: Plan) -> Table:
    table = Table("memory of a rank", "", title_justify="left")
    table.columns[1].justify = "right"
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters), ("gradients, all", memory.gradients), ("optimizer state", memory.optimizer),
        ("optimizer step, for a while", memory.optimizer_temporary), ("buffers", memory.buffers),
        ("batch", memory.batch), ("saved for the backward", memory.saved),
        ("activations, gathered parameters and gradients at the peak", memory.activations),
        ("workspace of libraries", plan.workspace),
    ]  # fmt: skip
    for name, size in rows:
        table.add_row(name, gib(size))
    table.add_row(f"peak: {memory.peak_phase}, {memory.peak_operation}", gib(plan.total), style="bold")
    return table


def _largest(plan: Plan) -> Table:
    table = Table("largest values at the peak", "", "from")
    table.columns[1].justify = "right"
    for item in plan.memory.largest[:6]:
        table.add_row(item.name, gib(item.bytes), item.source.rsplit("/", 1)[-1])
    return table


def _collectives(plan: Plan) -> Table:
    table = Table("collectives", "op", "type", "ranks", "count", "bytes", "time", "waited for")
    for column in table.columns[3:]:
        column.justify = "right"
    for item in plan.collective_totals():
        table.add_row(
            item.direction, item.op, item.dtype, str(item.ranks), str(item.count), gib(item.bytes), ms(item.seconds),
            ms(item.exposed_seconds),
        )  # fmt: skip
    return table


def _time(plan: Plan) -> Table:
    assumed = f"at {plan.efficiency:.0%} of the datasheets"
    table = Table(f"time of a step, {assumed}", "")
    table.columns[1].justify = "right"
    time = plan.time
    for name, seconds in (
        ("forward", time.forward), ("backward", time.backward), ("optimizer", time.optimizer),
        ("of forward and backward: kernels", time.compute), ("collectives", time.communication),
        ("waiting for collectives", time.exposed), ("step", time.step),
    ):  # fmt: skip
        table.add_row(name, ms(seconds))
    table.add_row("floating-point operations", f"{time.flops / 1e12:.2f} TFLOP")
    table.add_row("model FLOPs utilisation", f"{time.mfu:.1%}")
    return table


def gib(size: int) -> str:
    """Bytes, for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def ms(seconds: float) -> str:
    """Seconds, for people."""
    return f"{1e3 * seconds:.2f} ms"
