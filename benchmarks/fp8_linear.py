"""Times linears and a GPT's training step in bf16, in our low precisions and in torchao's float8, in one process.

python benchmarks/fp8_linear.py                       # the linears of Llama-3-8B, then a GPT of four such blocks
python benchmarks/fp8_linear.py --only step --model llama-3-8b --batch 1
python benchmarks/fp8_linear.py --only step --model llama-3.2-1b --batch 4
python benchmarks/fp8_linear.py --tiny                # small sizes, to see that it runs

Prints Markdown tables. Times are the median of --steps calls after --warmup calls; forward and backward together.
"""

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, Optional

import torch
from litgpt import GPT, Config
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.precision import LowPrecisionLinears

LINEARS = {"qkv": (4096, 6144), "attention out": (4096, 4096), "gate": (4096, 14336), "down": (14336, 4096)}
TINY_LINEARS = {"a": (128, 256), "b": (256, 144)}

BLOCK = {
    "block_size": 8192, "padded_vocab_size": 128256, "n_head": 32, "n_query_groups": 8, "n_embd": 4096, "bias": False,
    "rotary_percentage": 1.0, "parallel_residual": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 14336, "rope_base": 500000, "norm_eps": 1e-5,
}  # fmt: skip
MODELS = {
    "four-blocks": {**BLOCK, "n_layer": 4},
    "llama-3-8b": {**BLOCK, "n_layer": 32},
    "llama-3.2-1b": {**BLOCK, "n_layer": 16, "n_embd": 2048, "intermediate_size": 8192},
    "tiny": {**BLOCK, "n_layer": 2, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "intermediate_size": 256,
             "padded_vocab_size": 256, "block_size": 64},
}  # fmt: skip

HEAD_TOO = "fp8, lm_head too"
OURS = ("fp8", HEAD_TOO, "fp8-rowwise", "fp8-block")
TORCHAO = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}


class Variant:
    """One way to compute: prepares a module, and compiles a function that calls it."""

    def __init__(self, name: str, executors: list[str]) -> None:
        self.name, self.executors = name, executors

    def prepare(self, module: nn.Module) -> nn.Module:
        if self.name in TORCHAO:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                module,
                config=Float8LinearConfig.from_recipe_name(TORCHAO[self.name]),
                module_filter_fn=lambda child, name: "lm_head" not in name,
            )
        return module

    def compile(self, function: Callable) -> Callable:
        if self.name in TORCHAO or self.name == "bf16 torch.compile":
            return torch.compile(function)
        transforms = []
        if self.name == HEAD_TOO:
            transforms = [LowPrecisionLinears("fp8", skip=())]
        elif self.name in OURS:
            transforms = [LowPrecisionLinears(self.name)]
        return lts.compile(function, self.executors, transforms=transforms)


def variants(args: argparse.Namespace) -> list[Variant]:
    names = ["bf16 torch.compile", "bf16", *OURS]
    if importlib.util.find_spec("torchao") is not None:
        names += TORCHAO
    return [Variant(name, args.executors) for name in names if args.variants is None or name in args.variants]


def timed(call: Callable[[], Any], device: torch.device, warmup: int, steps: int) -> float:
    """Median seconds of a call."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(steps):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def peak_memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device.type == "cuda" else "-"


def clean(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def print_table(title: str, rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print(f"|{'---|' * len(row)}")


def choices(compiled: Any) -> str:
    """What the report says the linears compute in."""
    try:
        (step,) = lts.explain(compiled).to_dict()["steps"].values()
    except TypeError:
        return ""
    found = {item["choice"] for item in step["decisions"]}
    return "; ".join(sorted(found))


# ------------------------------------------------------------------------------------------------------------- linears


def linear_row(variant: Variant, size: tuple[int, int], args: argparse.Namespace) -> tuple[float, Optional[float], str]:
    """Seconds of forward and backward, error of the output against float32, and what it computed in."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(*size, bias=False, device=args.device, dtype=torch.bfloat16))
    x = torch.randn(args.tokens, size[0], device=args.device, dtype=torch.bfloat16)
    gradient = torch.randn(args.tokens, size[1], device=args.device, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = F.linear(x.float(), module[0].weight.float())
    module = variant.prepare(module)
    compiled = variant.compile(lambda x: module(x))
    x.requires_grad_()

    def call() -> Tensor:
        x.grad = None
        module.zero_grad()
        y = compiled(x)
        y.backward(gradient)
        return y.detach()

    error = ((call().float() - exact).norm() / exact.norm()).item()
    return timed(call, args.device, args.warmup, args.steps), error, choices(compiled)


def linears(args: argparse.Namespace) -> None:
    for name, size in (TINY_LINEARS if args.tiny else LINEARS).items():
        rows = [["variant", "ms", "TFLOP/s", "x bf16", "error", "computes in"]]
        base: Optional[float] = None
        for variant in variants(args):
            if variant.name == HEAD_TOO:
                continue
            clean(args.device)
            try:
                seconds, error, what = linear_row(variant, size, args)
            except Exception as failure:
                rows.append([variant.name, "failed", "", "", "", f"{type(failure).__name__}: {str(failure)[:120]}"])
                continue
            base = base or seconds
            flops = 6 * args.tokens * size[0] * size[1]
            rows.append([
                variant.name, f"{1e3 * seconds:.3f}", f"{flops / seconds / 1e12:.0f}", f"{base / seconds:.2f}",
                f"{error:.4f}", what,
            ])  # fmt: skip
        print_table(f"{name}: {args.tokens} x {size[0]} by {size[0]} x {size[1]}", rows)


# ---------------------------------------------------------------------------------------------------------------- step


def step_row(variant: Variant, args: argparse.Namespace) -> list[str]:
    torch.manual_seed(0)
    config = Config(name=args.model, **MODELS[args.model])
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = GPT(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.max_seq_length = args.length
    model = variant.prepare(model)
    cuda = args.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    generator = torch.Generator().manual_seed(1)
    shape = args.batch, args.length + 1
    batch = torch.randint(0, config.padded_vocab_size, shape, generator=generator).to(args.device)

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    compiled = variant.compile(loss_of)
    losses: list[Tensor] = []

    def step() -> None:
        loss = compiled(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    started = time.perf_counter()
    step()
    first = losses[0].item()
    compile_seconds = time.perf_counter() - started
    seconds = timed(step, args.device, args.warmup, args.steps)
    tokens = args.batch * args.length / seconds
    last = losses[-1].item()
    return [
        variant.name, f"{1e3 * seconds:.1f}", f"{tokens:,.0f}", peak_memory(args.device), f"{compile_seconds:.0f}",
        f"{first:.3f} to {last:.3f}", choices(compiled),
    ]  # fmt: skip


def steps(args: argparse.Namespace) -> None:
    rows = [["variant", "ms", "tokens/s", "peak GiB", "first step s", "loss", "linears"]]
    for variant in variants(args):
        clean(args.device)
        try:
            rows.append(step_row(variant, args))
        except Exception as failure:
            rows.append([variant.name, "failed", "", "", "", "", f"{type(failure).__name__}: {str(failure)[:120]}"])
    print_table(f"training step: {args.model}, batch {args.batch} x {args.length}, AdamW", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["linears", "step"])
    parser.add_argument("--model", choices=list(MODELS), default="four-blocks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096, help="of the linears")
    parser.add_argument("--variants", nargs="+", help='such as: "bf16" fp8 "torchao tensorwise"')
    parser.add_argument("--executors", nargs="+", default=["inductor"])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiny:
        args.model, args.length, args.tokens, args.warmup, args.steps = "tiny", 32, 48, 1, 2
    name = torch.cuda.get_device_name() if args.device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}")
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed, so its variants are left out")
    if args.only != "step":
        linears(args)
    if args.only != "linears":
        steps(args)


if __name__ == "__main__":
    main()
