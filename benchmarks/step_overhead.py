"""What a compiled step costs besides its arithmetic: steps a second of tiny models under Lightning's strategy and ours.

Both train in one process, in turns, with one thread on the CPU; the eager executor runs the same operations as eager
PyTorch, so the difference is guards, autograd wrappers and the recording of logs. CPU time is measured, so that other
work on the machine counts little. Run: python benchmarks/step_overhead.py
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from litgpt import GPT, Config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_thunder_strategy as lts

WARM_UP = 50


class Tiny(L.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def data(steps: int) -> TensorDataset:
        return TensorDataset(torch.randn(8 * steps, 8), torch.randint(0, 4, (8 * steps,)))


class TwelveBlocks(Tiny):
    """A GPT with many small layers: many operations, many guards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(
            Config(
                block_size=16,
                vocab_size=32,
                padded_vocab_size=32,
                n_layer=12,
                n_head=2,
                n_embd=16,
                intermediate_size=32,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        loss = F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    @staticmethod
    def data(steps: int) -> TensorDataset:
        return TensorDataset(torch.randint(0, 32, (8 * steps, 17)))


class Clock(Callback):
    """CPU seconds of the process from the end of warm-up to the end of training."""

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == WARM_UP:
            self.started = time.process_time()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.process_time() - self.started


def steps_a_second(make: type[Tiny], strategy: Any, steps: int) -> float:
    torch.manual_seed(0)
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(make(), DataLoader(make.data(WARM_UP + steps), batch_size=8))
    return steps / clock.seconds


def main(steps: int, rounds: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    strategies: dict[str, Callable[[], Any]] = {
        "auto": lambda: "auto",
        "compile='off'": lambda: lts.ThunderStrategy(compile="off"),
        "compile='step'": lambda: lts.ThunderStrategy(executors=["eager"]),
        "compile='submodules'": lambda: lts.ThunderStrategy(executors=["eager"], compile="submodules"),
    }
    for make in (Tiny, TwelveBlocks):
        count = steps if make is Tiny else max(1, steps // 10)
        best = dict.fromkeys(strategies, 0.0)
        for _ in range(rounds):  # in turns, so that a busy machine slows all of them alike
            for name, strategy in strategies.items():
                best[name] = max(best[name], steps_a_second(make, strategy(), count))
        print(f"{make.__name__}, best of {rounds} runs of {count} steps")
        for name, rate in best.items():
            more = 1e6 / rate - 1e6 / best["auto"]
            print(f"  {name:22} {rate:8.0f} steps/CPU s  {1e6 / rate:8.0f} us a step  {more:+8.0f} us against auto")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    main(options.steps, options.rounds)
