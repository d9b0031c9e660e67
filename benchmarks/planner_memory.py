"""The planner's peak memory against the measured one: rank 0 of 8 on one GPU, under torch's fake process group.

    python benchmarks/planner_memory.py
    python benchmarks/planner_memory.py --layers 2 --length 512      # a smaller model
    python benchmarks/planner_memory.py --device cpu --model pythia-14m --layers 2 --length 256 --precision 32-true

Three configurations of the Llama-3.2-1B shape in bf16 with fused AdamW. Each is planned on the CPU and run under a
real Trainer, in processes of their own, all at once; the measured peak is ``torch.cuda.max_memory_allocated`` of the
steps after the second. On a CPU it is what torch's allocator has given out, by torch's profiler. Collectives give
arbitrary values; programs, their order and memory are those of a real rank.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from litgpt import GPT, Config
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.planner.plan import plan
from lightning_thunder_strategy.planner.rank import LoneEngine, LoneRank, prepare, trainer_options, world

CONFIGURATIONS = {"zero3": (8, 1), "zero2": (8, 1), "none": (1, 2)}  # devices, batch


class Pretrains(L.LightningModule):
    def __init__(self, name: str, layers: int, length: int) -> None:
        super().__init__()
        self.config = Config.from_name(name, **({"n_layer": layers} if layers else {}))
        self.length = length
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT(self.config)
            self.model.max_seq_length = self.length

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class PeakOnGPU(Callback):
    """Measures from the third step on."""

    bytes = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.bytes = torch.cuda.max_memory_allocated()


class PeakOnCPU(Callback):
    """The same on a CPU. What was allocated before the first step must be added."""

    bytes = 0

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.bytes = sum(tensor_bytes(p) for p in (*module.parameters(), *module.buffers(), batch))
            self._profile.__enter__()
        elif batch_idx == 2:
            with record_function("third step"):
                pass

    def on_train_end(self, *_: Any) -> None:
        self._profile.__exit__(None, None, None)
        events = sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        begun = next(event.start_ns() for event in events if event.name() == "third step")
        now = most = 0
        for event in events:
            now += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, now) if event.start_ns() >= begun else most
        self.bytes += most


def tensor_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def strategy_of(name: str) -> Any:
    if name == "none":
        return lts.ThunderStrategy(executors=["inductor"])
    return lts.ThunderFSDPStrategy(sharding=name, executors=["inductor"])


def predicted(name: str, args: argparse.Namespace) -> dict[str, Any]:
    devices, batch = CONFIGURATIONS[name]
    tokens = torch.randint(0, 1000, (batch, args.length + 1))
    module = Pretrains(args.model, args.layers, args.length)
    found = plan(module, tokens, strategy_of(name), devices=devices, precision=args.precision, gpu="H200").to_dict()
    memory = found["memory"]
    memory.pop("timeline")
    workspace = found["workspace"] if args.device == "cuda" else 0
    return {"bytes": memory["peak"] + workspace, **memory}


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    devices, batch = CONFIGURATIONS[name]
    tokens = torch.randint(0, 1000, (batch, args.length + 1))
    options = {**trainer_options(devices, 1), "accelerator": args.device}
    peak = PeakOnGPU() if args.device == "cuda" else PeakOnCPU()
    with world(devices):
        trainer = L.Trainer(
            strategy=strategy_of(name), plugins=[LoneRank(devices)] if devices > 1 else [], precision=args.precision,
            max_steps=5, callbacks=[peak], use_distributed_sampler=False, **options,
        )  # fmt: skip
        prepare(trainer, LoneEngine)
        trainer.fit(Pretrains(args.model, args.layers, args.length), DataLoader([tokens] * 5, batch_size=None))
    return {"bytes": peak.bytes}


def main() -> None:
    """Plan and measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model, 0 for all")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="one part, such as predicted:zero3, in this process")
    args = parser.parse_args()
    if args.only:
        what, name = args.only.split(":")
        print("RESULT", json.dumps({"predicted": predicted, "measured": measured}[what](name, args)))
        return
    begun = time.perf_counter()
    options = ("model", "layers", "length", "precision", "device")
    sizes = [word for option in options for word in (f"--{option}", str(getattr(args, option)))]
    whats = ["predicted", "measured"]
    parts = {(what, name): None for name in CONFIGURATIONS for what in whats}
    running = {
        part: subprocess.Popen(
            [sys.executable, __file__, *sizes, "--only", ":".join(part)], stdout=subprocess.PIPE, text=True
        )
        for part in parts
    }
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for part, process in running.items():
        output, _ = process.communicate()
        found = [line for line in output.splitlines() if line.startswith("RESULT ")]
        results[part] = json.loads(found[-1].removeprefix("RESULT ")) if found else {"bytes": 0}
    print(f"torch {torch.__version__}, {args.model}, {args.layers or 'all'} layers, length {args.length}")
    for name, (devices, batch) in CONFIGURATIONS.items():
        plan_bytes, real_bytes = (
            results.get((what, name), {"bytes": 0})["bytes"] for what in ("predicted", "measured")
        )
        ratio = f"{plan_bytes / real_bytes:.3f}" if real_bytes else "not measured"
        print(
            f"{name:6} rank 0 of {devices}, batch {batch}: predicted {plan_bytes / 2**30:.3f} GiB, "
            f"measured {real_bytes / 2**30:.3f} GiB, ratio {ratio}"
        )
    print(json.dumps({":".join(part): result for part, result in results.items()}))
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
