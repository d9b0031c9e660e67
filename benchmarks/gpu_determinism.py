"""``Trainer(deterministic=True)`` on one GPU: whether two runs are equal bit for bit, as a table in Markdown.

python benchmarks/gpu_determinism.py                                        # the rows below, on CUDA
python benchmarks/gpu_determinism.py --accelerator cpu --rows eager --steps 4

Each row trains twice from the same seed, compiling each time for itself, and compares losses, gradients and weights.
The model adds rows at equal places in the forward and in backwards (``index_add``, embedding, indexing), and has
attention, dropout and a cross-entropy loss. The last rows are run without the flag: ``differs`` there shows that the
check can fail, ``equal`` that this GPU happened to give the same bits.
"""

import argparse
import logging
import time
import warnings
from typing import Any, NamedTuple

import lightning as L
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_thunder_strategy as lts

CLASSES, LENGTH = 97, 64


class Row(NamedTuple):
    """One way to train."""

    strategy: str
    executors: list[str]
    precision: str
    deterministic: bool = True


ROWS = {
    "eager": Row("thunder", ["eager"], "32-true"),
    "eager bf16": Row("thunder", ["eager"], "bf16-true"),
    "inductor": Row("thunder", ["inductor"], "32-true"),
    "inductor bf16": Row("thunder", ["inductor"], "bf16-true"),
    "inductor bf16-mixed": Row("thunder", ["inductor"], "bf16-mixed"),
    "sdpa flash": Row("thunder", ["sdpa", "inductor"], "bf16-true"),
    "chunked loss": Row("thunder", ["chunked_loss", "inductor"], "bf16-true"),
    "triton": Row("thunder", ["triton", "inductor"], "bf16-true"),
    "sharded eager": Row("thunder_fsdp", ["eager"], "32-true"),
    "sharded inductor bf16": Row("thunder_fsdp", ["inductor"], "bf16-true"),
    "eager, no flag": Row("thunder", ["eager"], "32-true", deterministic=False),
    "inductor bf16, no flag": Row("thunder", ["inductor"], "bf16-true", deterministic=False),
}
STRATEGIES = {"thunder": lts.ThunderStrategy, "thunder_fsdp": lts.ThunderFSDPStrategy}


class Model(L.LightningModule):
    """One block of a transformer beside sums over equal places."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(CLASSES, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.tokens(tokens)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(attended), 0.1, self.training)
        rows = x.flatten(0, 1)
        sums = torch.zeros_like(rows[:CLASSES]).index_add(0, tokens.flatten(), rows)
        x = self.norm(rows + sums[tokens.flatten()])
        return F.cross_entropy(self.head(x), targets.flatten(), ignore_index=0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = [_local(parameter.grad).clone() for parameter in self.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _local(value: Any) -> Tensor:
    return value.detach().to_local() if hasattr(value, "to_local") else value.detach()


def train(row: Row, args: argparse.Namespace) -> tuple[list[Tensor], dict[str, Any]]:
    """Losses, last gradients and weights of one run, and which executors ran what."""
    torch._dynamo.reset()
    L.seed_everything(7, verbose=False)
    model = Model(args.width)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        *(torch.randint(CLASSES, (args.steps * args.batch, LENGTH), generator=generator) for _ in "xy")
    )
    trainer = L.Trainer(
        accelerator=args.accelerator, devices=1, precision=row.precision, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        deterministic=row.deterministic, strategy=STRATEGIES[row.strategy](executors=row.executors),
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, args.batch))
    found = [*model.losses, *model.gradients, *(_local(value) for value in model.state_dict().values())]
    return [value.cpu() for value in found], lts.explain(trainer).to_dict()["steps"]["training_step"]


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """NaN equals NaN, and 0 is not -0."""
    return first.dtype == second.dtype and torch.equal(_bytes(first), _bytes(second))


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def compare(name: str, row: Row, args: argparse.Namespace) -> str:
    """One row of the table."""
    start = time.perf_counter()
    try:
        (first, report), (second, _) = train(row, args), train(row, args)
        different = [(a, b) for a, b in zip(first, second) if not equal_bits(a, b)]
        finite = all(bool(torch.isfinite(value).all()) for value in first if value.is_floating_point())
        most = max((float((a.double() - b.double()).abs().max()) for a, b in different), default=0.0)
        said = (
            f"{len(different)} of {len(first)} differ, by {most:.1e}" if different else f"equal ({len(first)} tensors)"
        )
        used = ", ".join(f"{executor} {count}" for executor, count in report["executors"].items())
        said += "" if finite else "; not finite"
    except Exception as error:
        said, used = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}", ""
    finally:
        torch.use_deterministic_algorithms(False)
    seconds = time.perf_counter() - start
    return f"| {name} | {row.precision} | {'yes' if row.deterministic else 'no'} | {said} | {used} | {seconds:.0f} |"


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a batch")
    parser.add_argument("--width", type=int, default=256, help="features")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    device = torch.cuda.get_device_name() if args.accelerator == "cuda" else "CPU"
    print(f"torch {torch.__version__}, lightning {L.__version__}, {device}, {args.steps} steps\n")
    print("| what | precision | deterministic=True | two runs | operations by executor | seconds |")
    print("|---|---|---|---|---|---|")
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in args.rows:
            print(compare(name, ROWS[name], args), flush=True)


if __name__ == "__main__":
    main()
