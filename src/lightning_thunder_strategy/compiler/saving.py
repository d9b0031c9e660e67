"""Writes a trace to a Python file that other programs import, and that runs as a script."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_thunder_strategy.compiler.expressions import literal

if TYPE_CHECKING:
    from lightning_thunder_strategy.compiler.trace import TraceInput

_MAKE_TENSOR = """

def tensor(shape, stride, dtype, device, requires_grad=False):
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride)) if all(shape) else 0
    filled = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    values = filled(size, device=device).to(dtype).as_strided(shape, stride)
    return values.requires_grad_(requires_grad)

"""


def save(path: Path, source: str, inputs: Sequence["TraceInput"], constants: Mapping[str, Any]) -> Path:
    """Write a printed program.

    Args:
        path: The file. Constants too big to print are written beside it.
        source: The printed program.
        inputs: Its inputs.
        constants: What it uses without a definition.

    Raises:
        ValueError: If a constant cannot be written to a file.
    """
    unsaved = {name: value for name, value in constants.items() if not isinstance(value, torch.Tensor)}
    if unsaved:
        names = ", ".join(f"{name} ({_called(value)})" for name, value in unsaved.items())
        raise ValueError(f"This trace holds objects that have no Python expression: {names}. Use Trace.run instead.")
    if constants:
        beside = path.with_name(path.name + ".constants.pt")
        torch.save({name: value.detach() for name, value in constants.items()}, beside)
        load = 'torch.load(__file__ + ".constants.pt", weights_only=True)'
        source = source.replace("import torch\n", f"import torch\n\nglobals().update({load})\n", 1)
    path.write_text(source + _script(source, inputs))
    return path


def _called(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {value.__module__}.{name}" if name else type(value).__name__


def _script(source: str, inputs: Sequence["TraceInput"]) -> str:
    """What the saved file does when it is run as a script."""
    values = [_value(item) for item in inputs]
    lines = [_MAKE_TENSOR, 'if __name__ == "__main__":']
    if "torch.ops._c10d_functional" in source or any(item.layout or item.kind == "object" for item in inputs):
        device = next((item.device for item in inputs if item.device), "cpu")
        backend = "gloo" if (device or "cpu").startswith("cpu") else "nccl"
        lines += [
            "    import torch.distributed.tensor  # this program has collectives: start it with torchrun",
            f'    torch.distributed.init_process_group("{backend}")',
        ]
    lines += ["    torch.manual_seed(0)", "    inputs = ["]
    lines += [f"        {value},  # {item.name}: {item.type}" for value, item in zip(values, inputs)]
    lines += ["    ]", "    for output in torch.utils._pytree.tree_leaves(program(*inputs)):", "        print(output)"]
    return "\n".join(lines) + "\n"


def _value(item: "TraceInput") -> str:
    """An expression for a value of an input's type and shape."""
    if item.layout is not None:
        full = f"torch.randn({item.shape}, dtype={item.dtype})"
        return f"torch.distributed.tensor.distribute_tensor({full}, {item.layout})"
    if item.kind == "random state":
        on_cpu = item.shape == tuple(torch.get_rng_state().shape)
        return "torch.get_rng_state()" if on_cpu else "torch.cuda.get_rng_state()"
    if item.shape is not None:
        stride = item.stride if item.stride is not None else _contiguous(item.shape)
        gradient = ", requires_grad=True" if item.requires_grad else ""
        return f"tensor({item.shape}, {stride}, {item.dtype}, {item.device!r}{gradient})"
    if item.kind == "object" and item.origin:
        return item.origin
    return str(literal(item.value))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return tuple(stride) if shape else ()
