"""Runs LitGPT's own ``pretrain`` with our Fabric strategy: its command line cannot choose one, its function can.

python examples/pretrain_litgpt.py                  # two processes on the CPU, or all GPUs
torchrun --nproc-per-node 2 examples/pretrain_litgpt.py
"""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from litgpt import GPT, Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from text_data import VOCABULARY, PythonSource
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts


class Loader(DataLoader):
    """LitGPT writes its loader into each checkpoint. This one has no state: after a restart it shuffles anew."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class LitGPTSource(PythonSource):
    """The same text, as LitGPT takes it."""

    def train_dataloader(self) -> DataLoader:
        plain = super().train_dataloader()
        return Loader(plain.dataset, self.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = torch.cuda.device_count() or 2
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", devices)))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    parser.add_argument("--executors", nargs="+", default="auto", help="such as: inductor, or eager")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/pretrain_litgpt"))
    args = parser.parse_args()

    strategy = lts.fabric.ThunderFSDPStrategy(executors=args.executors)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = L.Fabric(accelerator=accelerator, devices=args.devices, strategy=strategy, precision="32-true")
    fabric.launch()

    config = Config.from_name(
        "pythia-14m", n_layer=2, block_size=args.length, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY
    )
    micro_batch = 8
    batch = 2 * micro_batch * args.devices  # two micro-batches a step
    # At each checkpoint LitGPT reads its own command line again to write it down; there is none here.
    pretrain.save_hyperparameters = lambda function, folder: None
    pretrain.main(
        fabric=fabric,
        devices=args.devices,
        seed=0,
        initial_checkpoint_dir=None,
        resume=False,
        config=config,
        data=LitGPTSource(),
        out_dir=args.out,
        tokenizer_dir=None,
        tokenizer=None,
        train=TrainArgs(
            global_batch_size=batch, micro_batch_size=micro_batch, max_tokens=args.steps * batch * args.length,
            max_seq_length=args.length, max_norm=1.0, save_interval=None, lr_warmup_steps=5, log_interval=10,
        ),
        eval=EvalArgs(interval=args.steps, max_iters=10),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-3}},
    )  # fmt: skip
    fabric.print(lts.explain(fabric))

    if fabric.is_global_zero:
        file = args.out / "final" / "lit_model.pth"
        GPT(config).load_state_dict(torch.load(file, weights_only=True)["model"], strict=True)
        print(f"{file} is loaded into a plain GPT, all keys match.")


if __name__ == "__main__":
    main()
