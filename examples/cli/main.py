"""A LightningCLI program that knows nothing of our strategies: a YAML file chooses them.

cd examples/cli
python main.py fit --config ddp_eager.yaml          # Lightning's own DDP
python main.py fit --config fsdp.yaml               # the same model, data and options under ThunderFSDPStrategy
python main.py fit --config fsdp.yaml --trainer.strategy.sharding zero2 --print_config
"""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))  # the text of the other examples
from text_data import VOCABULARY, PythonSource


class NextByte(L.LightningModule):
    """Guesses each byte from the ones before it.

    Args:
        context: How many bytes before it are seen.
        width: Size of the hidden layer.
        learning_rate: Of AdamW.
    """

    def __init__(self, context: int = 8, width: int = 128, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.context = context
        self.learning_rate = learning_rate
        self.bytes = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(16 * context, width), nn.ReLU(), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        seen = tokens.unfold(1, self.context, 1)[:, :-1]
        return self.layers(self.bytes(seen).flatten(2))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens[:, self.context :].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(NextByte, PythonSource, seed_everything_default=0, save_config_kwargs={"overwrite": True})
