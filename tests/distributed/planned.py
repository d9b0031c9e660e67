"""What real ranks issue and hold in a training step, for comparison with plans.

python -m tests.distributed.planned 4     # every way to spread parameters, on four processes, with its plan
"""

import math
import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.planner.liveness import ROUND
from lightning_thunder_strategy.planner.report import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Small(L.LightningModule):
    """An odd number of rows, a tied weight, blocks and a norm."""

    def __init__(self, vocabulary: int = 53, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def strategy_of(kind: str, **options: Any) -> Any:
    """A strategy by a short name."""
    options = {"executors": ["eager"], **options}
    makers = {
        "ddp": lambda: lts.ThunderDDPStrategy(**options),
        "zero1": lambda: lts.ThunderFSDPStrategy(sharding="zero1", **options),
        "zero2": lambda: lts.ThunderFSDPStrategy(sharding="zero2", **options),
        "zero3": lambda: lts.ThunderFSDPStrategy(sharding="zero3", **options),
        "each": lambda: lts.ThunderFSDPStrategy(sharding="zero3", bucket_size_mb=0, prefetch=0, **options),
        "replicas": lambda: lts.ThunderFSDPStrategy(sharding="zero3", replicas=2, **options),
        "tensor": lambda: lts.ThunderTPStrategy(plan=PLAN, **options),
        "2d": lambda: lts.ThunderFSDPStrategy(sharding="zero3", tensor_parallel_size=2, plan=PLAN, **options),
    }
    return makers[kind]()


def kinds(ranks: int) -> list[str]:
    """Ways to spread parameters that so many ranks allow."""
    return ["ddp", "zero1", "zero2", "zero3", "each", "tensor", *(["replicas", "2d"] if ranks > 2 else [])]


DTYPES = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16"}  # torch's profiler to ours


class Watch(L.Callback):
    """Has torch's profiler write down each collective of the second step: name, type, bytes of the whole tensors."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, int]] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._profile.__enter__()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._profile.__exit__(None, None, None)
        for event in self._profile.profiler.kineto_results.events():
            space, _, name = event.name().partition("::")
            if space == "_c10d_functional" and name != "wait_tensor":
                dtype = DTYPES[event.dtypes()[0]]
                times = event.concrete_inputs()[1] if name == "all_gather_into_tensor" else 1
                size = math.prod(event.shapes()[0]) * times * getattr(torch, dtype).itemsize
                self.lines.append((name, dtype, size))
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.held = {"parameters": _bytes(module.parameters()), "optimizer": _bytes(states)}


def batch_of() -> Tensor:
    return torch.arange(48).view(4, 12) % 53


def run(kind: str) -> dict[str, Any]:
    """Train two steps as this rank of a process group, and say what was issued and is held."""
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy_of(kind), max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(Small(), DataLoader([batch_of()] * 2, batch_size=None))
    return {"collectives": watch.lines, **watch.held}


def _bytes(tensors: Any) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(-(-t.numel() * t.element_size() // ROUND) * ROUND for t in local)


def everything() -> dict[str, Any]:
    """What this rank does in each way to spread parameters."""
    return {kind: run(kind) for kind in kinds(torch.distributed.get_world_size())}


def some() -> dict[str, Any]:
    """The same for those that the test suite has time for."""
    return {kind: run(kind) for kind in ("zero3", "tensor")}


def planned(kind: str, ranks: int) -> Plan:
    """The plan of the same run."""
    return lts.plan(Small(), batch_of(), strategy_of(kind), devices=ranks)


def compare(kind: str, real: dict[str, Any], ranks: int) -> str:
    """Raise unless a plan says what a rank did."""
    plan = planned(kind, ranks)
    issued = sorted((item.op, item.dtype, item.bytes) for item in plan.collectives)
    assert issued == sorted(map(tuple, real["collectives"])), (kind, issued, real["collectives"])
    assert (plan.memory.parameters, plan.memory.optimizer) == (real["parameters"], real["optimizer"]), kind
    return f"{kind}: {len(issued)} collectives, {sum(size for _, _, size in issued)} bytes"


def main(ranks: int) -> None:
    """Run on ``ranks`` processes and compare."""
    from tests.distributed.ranks import run_ranks

    real = run_ranks("planned:everything", world_size=ranks, timeout=480)["planned:everything"][0]
    for kind in kinds(ranks):
        print(compare(kind, real[kind], ranks), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
