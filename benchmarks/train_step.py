"""Training steps side by side: eager PyTorch, torch.compile, torchao's float8, and our strategy under a real Trainer.

python benchmarks/train_step.py --model Llama-3.2-1B --batch 4 --output benchmarks/results/train_step_1b
python benchmarks/train_step.py --tiny --device cpu      # small sizes, to see that it runs

Each variant runs in a process of its own with an empty compile cache; ``--warm`` runs ours once more with the cache it
left. ``--sets`` adds our strategy with other executors, as ``liger,inductor``, ``sdpa:cudnn,inductor`` (an attention
backend of torch) or ``inductor+cudagraphs``. Model, optimizer and data are equal: bf16 parameters, fused AdamW, random
tokens that are on the device already. The baselines are bare loops, ours is ``Trainer.fit`` of a LightningModule that
logs its loss. A step is the time from one step's start to the next one's, on the device's clock; the table has the
median of the steps after --warmup steps. MFU is against what a bf16 matrix product of 8192 x 8192 x 8192 reaches in the
same run, energy is the GPU's own counter.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from litgpt import GPT, Config
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

BASELINE = "torch.compile (whole step)"
VARIANTS = (
    "eager", "eager, Trainer", BASELINE, "ours, Trainer", "torchao float8", "ours fp8, Trainer",
    "ours fp8-rowwise, Trainer", "ours fp8-delayed, Trainer",
)  # fmt: skip
TINY = {
    "n_layer": 2, "n_embd": 128, "n_head": 4, "n_query_groups": 2, "intermediate_size": 256, "padded_vocab_size": 256,
    "rotary_percentage": 1.0, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False,
    "parallel_residual": False,
}  # fmt: skip


class Clock:
    """When steps began."""

    def __init__(self, device: torch.device, watched: tuple[int, ...] = ()) -> None:
        self.watched = watched  # marks between which energy is measured
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._joules: list[float] = []
        self.begun = time.perf_counter()
        self.first_step_seconds = 0.0

    def mark(self) -> None:
        if len(self._marks) == 1:
            if self._cuda:
                torch.cuda.synchronize()
            self.first_step_seconds = time.perf_counter() - self.begun
        if self._cuda:
            if len(self._marks) in self.watched:
                torch.cuda.synchronize()
                self._joules.append(joules())
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if len(self._marks) == 1:
            self.begun = time.perf_counter()

    def energy(self) -> float:
        """Joules of a step, on average."""
        return (self._joules[1] - self._joules[0]) / (self.watched[1] - self.watched[0])

    def seconds(self) -> list[float]:
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:])]
        return [b - a for a, b in zip(self._marks, self._marks[1:])]


def joules() -> float:
    """What the GPU has used since its driver was loaded."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000


class Marks(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.mark()


class Pretrains(L.LightningModule):
    """What a user writes."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self.model)


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def config_of(args: argparse.Namespace) -> Config:
    return Config(block_size=args.length, **TINY) if args.tiny else Config.from_name(args.model)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one variant in this process."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = GPT(config_of(args))
    torch.set_default_dtype(torch.float32)
    model.max_seq_length = args.length
    vocabulary = model.config.padded_vocab_size
    batches = [torch.randint(0, vocabulary, (args.batch, args.length + 1), device=device) for _ in range(args.steps)]
    clock = Clock(device, (args.warmup, args.steps - 1))
    (with_trainer if name.endswith("Trainer") else bare_loop)(name, model, batches, clock, args)
    seconds = sorted(clock.seconds()[args.warmup :])
    tokens, median = args.batch * args.length, statistics.median(seconds)
    result = {
        "variant": name, "torch": torch.__version__, "first_step_seconds": clock.first_step_seconds,
        "tokens_per_second": tokens / median, "step_seconds": median, "fastest": seconds[0], "slowest": seconds[-1],
        "tflops": flops(model, args) / median / 1e12,
    }  # fmt: skip
    if device.type == "cuda":
        result |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "device": torch.cuda.get_device_name()}
        result["joules_per_token"] = clock.energy() / tokens
    return result


def bare_loop(name: str, model: GPT, batches: list[Tensor], clock: Clock, args: argparse.Namespace) -> None:
    step: Callable = loss_of
    if name == "torchao float8":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda module, path: "lm_head" not in path)
    if name != "eager":
        step = torch.compile(loss_of)
    optimizer = adamw(model)
    for batch in batches:
        clock.mark()
        step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.mark()


def with_trainer(name: str, model: GPT, batches: list[Tensor], clock: Clock, args: argparse.Namespace) -> None:
    import lightning_thunder_strategy as lts

    strategy: Any = "auto"
    options: dict[str, Any] = {"precision": "bf16-true"}
    if name.startswith("ours"):
        recipe = name.removeprefix("ours").removesuffix(", Trainer").strip()
        executors = recipe[1:-1] if recipe.startswith("[") else "inductor"
        names, _, graphs = executors.partition("+")
        strategy = lts.ThunderStrategy(
            executors=[
                lts.executors.SdpaExecutor(item.partition(":")[2]) if item.startswith("sdpa:") else item
                for item in names.split(",")
            ],
            compile=lts.CompileConfig(cudagraphs=graphs == "cudagraphs"),
        )
        if recipe and not recipe.startswith("["):
            options = {"plugins": lts.ThunderPrecision(recipe, base="bf16-true")}
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Marks(clock)],
        **options,
    )
    trainer.fit(Pretrains(model), DataLoader(batches, batch_size=None))


def flops(model: GPT, args: argparse.Namespace) -> float:
    """Of a step: 6 a weight of a linear and token, and causal attention forward and backward (half of the scores)."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    config = model.config
    attention = 6 * config.n_layer * config.n_head * config.head_size * args.length
    return (6 * weights + attention) * args.batch * args.length


def in_a_process(name: str, cache: Path, argv: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv, "--run", name]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        reason = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        return {"variant": name, "error": reason, "stderr": ran.stderr[-4000:]}
    return json.loads(lines[-1])


def matmul_tflops(device: str) -> float:
    """What a large bf16 matrix product of random numbers reaches: the median of 20."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    clock = Clock(torch.device(device))
    for _ in range(25):
        clock.mark()
        a @ b
    clock.mark()
    return 2 * size**3 / statistics.median(clock.seconds()[5:]) / 1e12


def plot(results: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib import pyplot as plt

    shown = [result for result in results if "error" not in result][::-1]
    figure, axes = plt.subplots(1, 3, figsize=(13, 1 + 0.4 * len(shown)), sharey=True, layout="constrained")
    columns = {"tokens/s": "tokens_per_second", "peak GiB": "peak_gib", "first step, s": "first_step_seconds"}
    for axis, (label, key) in zip(axes, columns.items()):
        values = [result.get(key, 0.0) for result in shown]
        bars = axis.barh([result["variant"] for result in shown], values)
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values], padding=2)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def table(results: list[dict[str, Any]], ceiling: float) -> str:
    base = next((r for r in results if r["variant"] == BASELINE and "error" not in r), None)
    lines = [
        "| variant | tokens/s | slowest, fastest | vs torch.compile | TFLOP/s | MFU | peak GiB | first step s | "
        "mJ a token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if "error" in result:
            lines.append(f"| {result['variant']} | failed: {result['error']} | | | | | | | |")
            continue
        ratio = f"{result['tokens_per_second'] / base['tokens_per_second']:.3f}" if base else "not run"
        peak = f"{result['peak_gib']:.1f}" if "peak_gib" in result else "-"
        energy = f"{1000 * result['joules_per_token']:.2f}" if "joules_per_token" in result else "-"
        tokens = result["tokens_per_second"] * result["step_seconds"]
        mfu = f"{result['tflops'] / ceiling:.2f}" if ceiling else "-"
        lines.append(
            f"| {result['variant']} | {result['tokens_per_second']:,.0f} | {tokens / result['slowest']:,.0f}, "
            f"{tokens / result['fastest']:,.0f} | {ratio} | {result['tflops']:.0f} | {mfu} | {peak} | "
            f"{result['first_step_seconds']:.1f} | {energy} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--tiny", action="store_true", help="a small model in place of --model")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--sets", nargs="+", default=[], help="executors of more variants of ours")
    parser.add_argument("--plot", action="store_true", help="writes OUTPUT.png")
    parser.add_argument("--warm", action="store_true", help="run our bf16 variant again with its compile cache")
    parser.add_argument("--output", type=Path, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measure(args.run, args)))
        return
    results: list[dict[str, Any]] = []
    ceiling = matmul_tflops(args.device) if args.device == "cuda" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate([*args.only, *(f"ours [{names}], Trainer" for names in args.sets)]):
            cache = Path(folder) / str(index)
            results.append(in_a_process(name, cache, sys.argv[1:]))
            print(json.dumps(results[-1]), flush=True)
            if args.warm and name == "ours, Trainer":
                results.append(in_a_process(name, cache, sys.argv[1:]))
                results[-1]["variant"] += ", warm cache"
                print(json.dumps(results[-1]), flush=True)
            write(results, ceiling, args)  # what there is, if the time is up later
    print(table(results, ceiling))


def write(results: list[dict[str, Any]], ceiling: float, args: argparse.Namespace) -> None:
    if not args.output:
        return
    command = f"python benchmarks/train_step.py {shlex.join(sys.argv[1:])}"
    said = f"A bf16 matrix product reaches {ceiling:.0f} TFLOP/s in this run.\n\n" if ceiling else ""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    everything = {"command": command, "matmul_tflops": ceiling, "results": results}
    args.output.with_suffix(".json").write_text(json.dumps(everything, indent=2) + "\n")
    args.output.with_suffix(".md").write_text(f"{table(results, ceiling)}\n\n{said}`{command}`\n")
    if args.plot:
        shape = "a tiny model" if args.tiny else args.model
        plot(results, f"{shape}, batch {args.batch} x {args.length}", args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
