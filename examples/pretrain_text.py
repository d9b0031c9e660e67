"""Trains a small LitGPT model on real text with ``Trainer(strategy=ThunderFSDPStrategy())``.

python examples/pretrain_text.py                    # two processes on the CPU, or all GPUs
torchrun --nproc-per-node 2 examples/pretrain_text.py
python examples/pretrain_text.py --help
"""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from litgpt import GPT, Config
from text_data import VOCABULARY, PythonSource, unigram_entropy
from torch import Tensor
from torch.nn import functional as F

import lightning_thunder_strategy as lts


class TextModel(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of the strategy."""

    def __init__(self, config: Config, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.learning_rate = learning_rate
        self.steps = steps

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.gpt(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            values = self.trainer.callback_metrics
            self.print(f"step {self.global_step}: loss {values['loss']:.3f}, validation loss {values['val_loss']:.3f}")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def model_config(length: int, layers: int, width: int) -> Config:
    """A small Llama over bytes."""
    return Config(
        name="text", block_size=length, padded_vocab_size=VOCABULARY, n_layer=layers, n_head=width // 32, n_embd=width,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=width * 8 // 3 // 32 * 32,
    )  # fmt: skip


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int) -> str:
    """The prompt and what the model writes after it."""
    tokens = torch.tensor(list(prompt.encode()))
    while tokens.numel() < length:
        logits = model(tokens[None, -model.max_seq_length :])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(torch.softmax(logits / 0.7, 0), 1)])
    return bytes(tokens.tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = torch.cuda.device_count() or 2
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", devices)))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="windows on each device")
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--executors", nargs="+", default="auto", help="such as: inductor, or eager")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/pretrain_text.ckpt"))
    args = parser.parse_args()
    nodes = int(os.environ.get("WORLD_SIZE", args.devices)) // args.devices if "LOCAL_WORLD_SIZE" in os.environ else 1

    L.seed_everything(0, verbose=False)
    config = model_config(args.length, args.layers, args.width)
    model = TextModel(config, args.learning_rate, args.steps)
    data = PythonSource(args.batch_size, args.length)
    trainer = L.Trainer(
        strategy=lts.ThunderFSDPStrategy(sharding="zero3", executors=args.executors, report=True),
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=nodes,
        precision=args.precision,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 4),
        limit_val_batches=10,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    trainer.save_checkpoint(args.checkpoint, weights_only=False)

    if trainer.is_global_zero:
        saved = torch.load(args.checkpoint, weights_only=True)
        plain = GPT(config)  # no strategy, no Lightning, one process
        weights = {key.removeprefix("gpt."): value for key, value in saved["state_dict"].items()}
        plain.load_state_dict(weights, strict=True)
        print(f"\nThe checkpoint {args.checkpoint} is loaded into a plain GPT, which writes:\n")
        print(generate(plain.eval(), "def ", args.length))
        print(f"\nunigram entropy of the text: {unigram_entropy(data.training):.3f} nats per byte")
        print(f"final validation loss:       {trainer.callback_metrics['val_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
