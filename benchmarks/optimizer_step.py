"""One step of AdamW on all parameters of a model: torch's implementations, a compiled one, compile_optimizer="auto".

python benchmarks/optimizer_step.py                          # bf16 Llama-3.2-1B and Llama-3-8B shapes, on a GPU
python benchmarks/optimizer_step.py --only fused auto        # without the one that takes long to compile
python benchmarks/optimizer_step.py --models 30M --dtype float32 --device cpu --only default foreach fused auto
TRITON_INTERPRET=1 python benchmarks/optimizer_step.py --tiny --device cpu     # small shapes, to see that it runs

A step moves 7 values a parameter: it reads and writes the parameter and two averages, and reads the gradient. "Copy" is
what a copy between two large tensors moves in the same run. Each variant is first compared, on small parameters of the
same type, with AdamW in float64 after 5 steps: the largest error in units of the largest value's rounding.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_thunder_strategy.optimizers.steps import OptimizerSteps

# vocabulary, width, layers, intermediate width, rows of keys and values; embedding and head are not tied
MODELS = {
    "30M": (8192, 512, 8, 1408, 128),
    "Llama-3.2-1B": (128256, 2048, 16, 8192, 512),
    "Llama-3-8B": (128256, 4096, 32, 14336, 1024),
}
VARIANTS = ("default", "foreach", "fused", "compiled foreach", "auto")


def shapes(model: str) -> list[tuple[int, ...]]:
    vocabulary, width, layers, inner, keys = MODELS[model]
    block = [(width,), (width + 2 * keys, width), (width, width), (width,), (inner, width), (inner, width)]
    return [(vocabulary, width), *(block + [(width, inner)]) * layers, (width,), (vocabulary, width)]


def made(sizes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    found = [torch.randn(size, dtype=dtype, device=device).mul_(0.02).requires_grad_() for size in sizes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    return found


def step_of(variant: str, parameters: list[Tensor]) -> Callable[[], object]:
    choice = {"foreach": {"foreach": True}, "compiled foreach": {"foreach": True}, "fused": {"fused": True}}
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **choice.get(variant, {}))
    if variant == "compiled foreach":
        return torch.compile(optimizer.step)
    if variant != "auto":
        return optimizer.step
    steps = OptimizerSteps("auto", on_error="raise")

    def step() -> None:
        with steps.taken(optimizer):
            optimizer.step()

    return step


def error(variant: str, dtype: torch.dtype, device: str) -> float:
    """The largest error after 5 steps, in units of the rounding of the largest value."""
    torch.manual_seed(0)
    parameters = made([(33, 65), (4096,), (7,)], dtype, device)
    exact = [parameter.detach().double().requires_grad_() for parameter in parameters]
    step, reference = step_of(variant, parameters), step_of("foreach", exact)
    for _ in range(5):
        for parameter, wide in zip(parameters, exact):
            parameter.grad = torch.randn_like(parameter).mul_(1e-3)
            wide.grad = parameter.grad.double()
        step(), reference()
    unit = torch.finfo(dtype).eps
    pairs = [(p.detach().double(), e.detach()) for p, e in zip(parameters, exact)]
    return max(float((p - e).abs().max() / (e.abs().max() * unit)) for p, e in pairs)


def milliseconds(call: Callable[[], object], device: str, steps: int) -> tuple[float, float]:
    """Median and host time of a call."""
    device_times, host_times = [], []
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started = time.perf_counter()
            begin.record(), call(), end.record()
            host_times.append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()
            device_times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            call()
            host_times.append((time.perf_counter() - started) * 1e3)
            device_times.append(host_times[-1])
    return statistics.median(device_times), statistics.median(host_times)


def copy_speed(device: str, size: int) -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    median, _ = milliseconds(lambda: target.copy_(source), device, 20)
    return 2 * source.numel() * source.element_size() / median * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS)[1:], choices=MODELS, metavar="MODEL")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--tiny", action="store_true", help="a few small shapes in place of --models")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    cases = {"tiny": [(33, 65), (4096,), (7,)]} if args.tiny else {name: shapes(name) for name in args.models}
    copied = copy_speed(args.device, 10_000 if args.tiny else 2**30)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.dtype}; copy: {copied / 1e9:,.1f} GB/s\n")
    print("| model | variant | ms | GB/s | of copy | host ms | first step s | error, roundings |")
    print("|---|---|---|---|---|---|---|---|")
    for model, sizes in cases.items():
        for variant in args.only:
            wrong = error(variant, dtype, args.device)
            torch.compiler.reset()
            parameters = made(sizes, dtype, args.device)
            step = step_of(variant, parameters)
            started = time.perf_counter()
            step()
            if args.device == "cuda":
                torch.cuda.synchronize()
            first = time.perf_counter() - started
            for _ in range(2):
                step()
            median, host = milliseconds(step, args.device, args.steps)
            moved = 7 * sum(parameter.numel() for parameter in parameters) * dtype.itemsize / median * 1e3
            print(
                f"| {model} | {variant} | {median:.2f} | {moved / 1e9:,.1f} | {moved / copied:.2f} | {host:.2f} | "
                f"{first:.2f} | {wrong:.2f} |",
                flush=True,
            )
            del parameters, step
            gc.collect()


if __name__ == "__main__":
    main()
