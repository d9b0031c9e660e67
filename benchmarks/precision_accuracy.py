"""How exact each low precision is: errors of numbers and products against float64, and the loss of a GPT.

python benchmarks/precision_accuracy.py               # errors, seconds
python benchmarks/precision_accuracy.py --train       # and the GPT of examples/pretrain_text.py, minutes a precision
python benchmarks/precision_accuracy.py --only-train --plot loss.png   # its losses while it trains (matplotlib)

Prints Markdown tables.
"""

import argparse
import logging
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.precision.formats import FORMATS
from lightning_thunder_strategy.precision.linear import scaled_linear
from lightning_thunder_strategy.precision.recipe import RECIPES
from lightning_thunder_strategy.precision.scaling import dequantize, quantize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
KINDS = ("tensor", "row", "1x128", "128x128", "1x32", "1x16")


def matrix(rows: int, columns: int, outliers: bool, seed: int) -> Tensor:
    """Normal numbers; with outliers one column in a hundred is thirty times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if outliers:
        x[:, torch.randperm(columns, generator=generator)[: columns // 100]] *= 30
    return x


def relative(found: Tensor, exact: Tensor) -> str:
    return f"{100 * ((found.double() - exact).norm() / exact.norm()).item():.2f}"


def print_table(title: str, rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print(f"|{'---|' * len(row)}")


def numbers(outliers: bool) -> None:
    x = matrix(1024, 1024, outliers, 0)
    rows = [["format", *KINDS]]
    for name in FORMATS:
        rows.append([name, *(relative(dequantize(quantize(x, name, kind)), x.double()) for kind in KINDS)])
    print_table(f"error of numbers in per cent, by what shares a scale; {_kind(outliers)}", rows)


def products(outliers: bool) -> None:
    x, w, g = matrix(512, 1024, outliers, 0), matrix(768, 1024, False, 1), matrix(512, 768, False, 2)
    exact = [t.double().requires_grad_() for t in (x, w)]
    (expected := F.linear(*exact)).backward(g.double())
    rows = [["precision", "output", "gradient of input", "gradient of weight"]]
    bf16 = [t.bfloat16().requires_grad_() for t in (x, w)]
    (y := F.linear(*bf16)).backward(g.bfloat16())
    rows.append(["bf16", *_errors(y, bf16, expected, exact)])
    for name, recipe in RECIPES.items():
        if recipe.amax_history_len:
            continue  # its scales come from steps before
        torch.manual_seed(0)
        low = [t.clone().requires_grad_() for t in (x, w)]
        y = scaled_linear(*low, None, **recipe.arguments(), native=False, dtype=torch.float32)
        y.backward(g)
        rows.append([name, *_errors(y, low, expected, exact)])
    print_table(f"error of the three products of a linear in per cent; {_kind(outliers)}", rows)


def _errors(y: Tensor, inputs: list[Tensor], expected: Tensor, exact: list[Tensor]) -> list[str]:
    gradients = [relative(found.grad, right.grad) for found, right in zip(inputs, exact)]
    return [relative(y.detach(), expected.detach()), *gradients]


def _kind(outliers: bool) -> str:
    return "1 % of columns 30 times as large" if outliers else "normal numbers"


# ------------------------------------------------------------------------------------------------------------ training


class Curve(Callback):
    """The validation loss in nats a byte at each validation."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses[trainer.global_step] = trainer.callback_metrics["val_loss"].item()


def validation_losses(precision: str, args: argparse.Namespace) -> tuple[dict[int, float], float]:
    """Validation loss in nats a byte by step, and seconds."""
    from pretrain_text import TextModel, model_config
    from text_data import PythonSource

    L.seed_everything(0, verbose=False)
    model = TextModel(model_config(128, 2, 128), 8e-3, args.steps)
    data = PythonSource(16, 128)
    plugin: Any = {"precision": "bf16-true"}
    if precision != "bf16":
        plugin = {"plugins": [lts.ThunderPrecision(precision, "bf16-true")]}
    curve = Curve()
    interval = max(1, args.steps // 10) if args.plot else args.steps
    trainer = L.Trainer(
        strategy=lts.ThunderStrategy(executors=args.executors), devices=1, max_steps=args.steps, limit_val_batches=20,
        val_check_interval=interval, callbacks=[curve], num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="auto", **plugin,
    )  # fmt: skip
    started = time.perf_counter()
    trainer.fit(model, data)
    return curve.losses, time.perf_counter() - started


def training(args: argparse.Namespace) -> None:
    rows = [["precision", "validation loss", "over bf16, %", "seconds"]]
    base, curves = math.nan, {}
    for precision in ["bf16", *(args.precisions or RECIPES)]:
        curves[precision], seconds = validation_losses(precision, args)
        loss = curves[precision][args.steps]
        base = loss if precision == "bf16" else base
        rows.append([precision, f"{loss:.4f}", f"{100 * (loss / base - 1):+.2f}", f"{seconds:.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
        torch._dynamo.reset()
    print_table(f"the GPT of examples/pretrain_text.py after {args.steps} steps on one device", rows)
    if args.plot:
        plot(curves, args.plot)


def plot(curves: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (whole, end) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, losses in curves.items():
        steps, values = list(losses), list(losses.values())
        whole.plot(steps, values, label=name)
        end.plot(steps[len(steps) // 2 :], values[len(steps) // 2 :], marker=".", label=name)
    for axis, title in ((whole, "the whole run"), (end, "its second half")):
        axis.set(title=title, xlabel="optimizer steps", ylabel="validation loss, nats a byte")
    end.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only-train", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precisions", nargs="+")
    parser.add_argument("--plot", type=Path, help="writes validation losses over the steps to this file")
    parser.add_argument("--executors", nargs="+", default=["eager"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}")
    if not args.only_train:
        for outliers in (False, True):
            numbers(outliers)
            products(outliers)
    if args.train or args.only_train:
        training(args)


if __name__ == "__main__":
    main()
