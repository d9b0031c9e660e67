"""Runs PyTorch's own operator samples through the compiler and compares with eager PyTorch.

    python -m tests.opinfo.sweep --dtypes float32 float64 bfloat16 --output opinfo.json

For each operator and element type: forward, and backward where the operator has one. Results are

- ``equal``: compiled as one program, and values and gradients equal eager's;
- ``declined``: TorchDynamo cannot read it, so it runs eagerly, and says so;
- ``wrong``: a value or gradient differs, or the compiled call raises where eager does not;
- ``skipped``: eager PyTorch itself has no sample, or fails on it.
"""

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import lightning_thunder_strategy as lts

with mock.patch("torch.backends.disable_global_flags"):  # or no other test in this process could set cudnn's flags
    from torch.testing._internal import common_methods_invocations

SAMPLES = 2
TOLERANCES = {torch.float64: (1e-7, 1e-7), torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 2e-2)}


def _unseeded(op: Callable, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# Random operators seed themselves, which no program can; here every call is seeded from outside.
common_methods_invocations.wrapper_set_seed = _unseeded


@dataclass
class Outcome:
    """What one operator did for one element type."""

    name: str
    dtype: str
    result: str
    backward: bool
    reason: str = ""


def operators(names: Optional[Sequence[str]] = None) -> list[Any]:
    """Torch's operator descriptions, all or those named."""
    return [op for op in common_methods_invocations.op_db if names is None or op.full_name in names or op.name in names]


def check(
    op: Any, dtype: torch.dtype, executors: Sequence[Any] = ("eager",), samples: int = SAMPLES, device: str = "cpu"
) -> Outcome:
    """Compare one operator with eager PyTorch on its first samples."""
    label = str(dtype).removeprefix("torch.")
    if dtype not in op.supported_dtypes(device):
        return Outcome(op.full_name, label, "skipped", False, "eager does not support the element type")
    backward = bool(op.supports_autograd and dtype in op.supported_backward_dtypes(device))
    try:
        torch.manual_seed(0)
        first = list(op.sample_inputs(device, dtype, requires_grad=backward))[:samples]
    except Exception as error:
        return Outcome(op.full_name, label, "skipped", backward, f"no samples: {_line(error)}")
    if not first:
        return Outcome(op.full_name, label, "skipped", backward, "no samples")
    for sample in first:
        outcome = _check_sample(op, dtype, sample, backward, executors)
        if outcome is not None and outcome[0] != "equal":
            return Outcome(op.full_name, label, outcome[0], backward, outcome[1])
    return Outcome(op.full_name, label, "equal", backward)


def _check_sample(op: Any, dtype: torch.dtype, sample: Any, backward: bool, executors: Sequence[Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        process = sample.output_process_fn_grad if backward else None
        return result if process is None else process(result)

    arguments = (sample.input, *sample.args)
    try:
        expected = _run(call, arguments, sample.kwargs, backward)
    except Exception as error:
        return "skipped", f"eager fails: {_line(error)}"
    torch._dynamo.reset()
    config = lts.CompileConfig(fullgraph=True, eager_random=True)
    compiled = lts.compile(call, executors=list(executors), config=config)
    try:
        found = _run(compiled, arguments, sample.kwargs, backward)
    except lts.CompileError as error:
        return "declined", error.reason.splitlines()[0]
    except Exception as error:
        return "wrong", f"raises {_line(error)}"
    if compiled.record.all_fallbacks():
        return "declined", compiled.record.all_fallbacks()[0].error
    if any(word in op.name for word in ("empty",)):
        return "equal", ""
    return _compare(expected, found, dtype)


def _run(call: Callable, args: Any, kwargs: Any, backward: bool) -> tuple[list[Any], list[Any]]:
    """Values and gradients of one call on copies of the arguments."""
    args, kwargs = tree_map(_copy, (args, kwargs))
    torch.manual_seed(1)
    result = call(*args, **kwargs)
    values = tree_leaves(result)
    gradients: list[Any] = []
    if backward:
        roots = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        leaves = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.requires_grad]
        if roots and leaves:
            torch.manual_seed(2)
            grads = [torch.randn_like(root) for root in roots]
            gradients = list(torch.autograd.grad(roots, leaves, grads, allow_unused=True))
    return [v.detach() if isinstance(v, torch.Tensor) else v for v in values], gradients


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _compare(expected: Any, found: Any, dtype: torch.dtype) -> tuple[str, str]:
    rtol, atol = TOLERANCES.get(dtype, (1e-4, 1e-4))
    for what, first, second in zip(("value", "gradient"), expected, found):
        if len(tree_flatten(first)[0]) != len(tree_flatten(second)[0]):
            return "wrong", f"another number of {what}s"
        for a, b in zip(first, second):
            try:
                torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
            except (AssertionError, TypeError) as error:
                if type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b:
                    continue
                return "wrong", f"{what}: {_line(error)}"
    return "equal", ""


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else ''}"


def main() -> None:
    """Run the sweep and print counts by result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--ops", nargs="*", default=None, help="only these operators")
    parser.add_argument("--executors", nargs="+", default=["eager"])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="how many of an operator's samples")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    outcomes = []
    for dtype in args.dtypes:
        for op in operators(args.ops):
            outcomes.append(check(op, getattr(torch, dtype), args.executors, args.samples, args.device))
            if outcomes[-1].result == "wrong":
                print(outcomes[-1], flush=True)
    for dtype in args.dtypes:
        counts = Counter(outcome.result for outcome in outcomes if outcome.dtype == dtype)
        results = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
        print(f"{dtype}: {sum(counts.values())} tried, {results}")
    print(f"{time.perf_counter() - started:.0f} s with executors {args.executors}, torch {torch.__version__}")
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
