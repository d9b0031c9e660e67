"""Compares a compiled function with eager PyTorch in float64: values and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import lightning_thunder_strategy as lts

TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}


def compiled_with(function: Callable, *executors: Any, **config: Any) -> Callable:
    """One program with these executors, in which a failure of any is an error."""
    config = lts.CompileConfig(**{"fullgraph": True, "on_error": "raise", **config})
    return lts.compile(function, executors=list(executors), config=config)


def check(
    function: Callable, inputs: Sequence[torch.Tensor], *executors: Any, compiled: Any = None, **config: Any
) -> Any:
    """Call ``function`` compiled, and eagerly on the same numbers in float64.

    Args:
        function: Of tensors.
        inputs: Floating ones that require gradients get them compared.
        executors: For the compiled call.
        compiled: A compiled function to call again.
        config: Options of the compiled call.

    Returns:
        The compiled function.
    """
    compiled = compiled or compiled_with(function, *executors, **config)
    wide = [_wide(value) for value in inputs]
    results = [compiled(*inputs), function(*wide)]
    rtol, atol = TOLERANCES[next(value.dtype for value in inputs if value.is_floating_point())]
    _close(results[0], results[1], rtol, atol, "value")
    if results[1].requires_grad:
        assert results[0].requires_grad
        torch.manual_seed(1)
        gradient = torch.randn(results[1].shape, dtype=torch.float64).to(results[0].device, results[0].dtype)
        found, expected = (
            torch.autograd.grad(result, [v for v in values if v.requires_grad], gradient.to(result.dtype))
            for result, values in zip(results, (inputs, wide))
        )
        for place, (a, b) in enumerate(zip(found, expected)):
            _close(a, b, rtol, atol, f"gradient {place}")
    else:
        assert not results[0].requires_grad
    return compiled


def _wide(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float, what: str) -> None:
    scale = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
    assert found.shape == expected.shape, what
    torch.testing.assert_close(
        found.double(), expected, rtol=rtol, atol=atol * max(scale, 1e-1), equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def claims(compiled: Any, executor: str) -> list[tuple[bool, str]]:
    """What one executor took or declined, with the reasons."""
    (step,) = lts.explain(compiled).to_dict()["steps"].values()
    return [(claim["accepted"], claim["reason"]) for claim in step["claims"] if claim["executor"] == executor]


def laid_out(
    shape: Sequence[int], dtype: torch.dtype, layout: str, requires_grad: bool = True, device: str = "cpu"
) -> torch.Tensor:
    """A random leaf of this shape: dense, or a view with other strides."""
    shape = tuple(shape)
    if layout == "transposed":
        value = torch.randn(shape[::-1], dtype=torch.float64).permute(*reversed(range(len(shape))))
    elif layout == "swapped":
        value = torch.randn((shape[0], shape[2], shape[1], shape[3]), dtype=torch.float64).transpose(1, 2)
    elif layout == "sliced":
        value = torch.randn([2 * size + 1 for size in shape], dtype=torch.float64)[
            tuple(slice(1, None, 2) for _ in shape)
        ]
    elif layout == "expanded":
        value = torch.randn((1, *shape[1:]), dtype=torch.float64).expand(shape)
    else:
        value = torch.randn(shape, dtype=torch.float64)
    strides = value.stride()
    result = value.to(device, dtype)
    if result.stride() != strides:
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
        result = torch.empty(size, dtype=dtype, device=device).as_strided(shape, strides)
        if layout != "expanded":
            result.copy_(value)
        else:
            result[:1].copy_(value[:1])
    if device != "cpu":  # ``to`` would make it dense
        moved = torch.empty_strided(shape, result.stride(), dtype=dtype, device=device)
        result = (moved[:1].copy_(result[:1]) if layout == "expanded" else moved.copy_(result)).expand(shape)
    return result.detach().requires_grad_(requires_grad)
