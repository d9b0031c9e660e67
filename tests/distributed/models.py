"""LightningModules and data for tests on several ranks: each is a user's way to write a model."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

WIDTH = 6


class Base(L.LightningModule):
    """A module with a ``loss`` that is logged in the ways people log."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def units(self) -> list[nn.Module]:
        """What FSDP2 shards one by one."""
        return list(self.children())


class Regression(Base):
    """``net`` on vectors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x).squeeze(-1), y)


def vectors(count: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
    return TensorDataset(x, x.sum(1).sin())


def sequences(count: int = 16, length: int = 7, vocabulary: int = 11) -> Dataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(torch.randint(0, vocabulary, (count, length), generator=generator))


class MLP(Regression):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Linear(WIDTH, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 1)
            )
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Smooth(Regression):
    """Without random numbers or batch statistics: equal to one process on the whole batch."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Resumable(Regression):
    """Odd sizes, a frozen layer, two parameter groups, batch statistics, a scheduler, hyperparameters."""

    def __init__(self, width: int = 9) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        )
        self.save_hyperparameters()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.net[0].bias.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.net.parameters() if p.requires_grad]
        groups = [{"params": trained, "weight_decay": 0.1}, {"params": [self.scale], "lr": 0.001}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class LanguageModel(Base):
    def logits(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class LitGPT(LanguageModel):
    def __init__(self, tied: bool, vocabulary: int = 11) -> None:
        super().__init__()
        from litgpt import GPT, Config

        config = Config(
            block_size=16, vocab_size=11, padded_vocab_size=vocabulary, n_layer=1, n_head=2, n_embd=12,
            rotary_percentage=1.0, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=20,
            bias=False, parallel_residual=False,
        )  # fmt: skip
        self.net = GPT(config)
        if tied:
            self.net.lm_head.weight = self.net.transformer.wte.weight

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class Llama(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.net = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=11, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=16,
            )
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        return self.net(input_ids=tokens, labels=tokens).loss


class TiedEmbeddings(LanguageModel):
    """A weight under two names, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(5, 5)
        self.net = nn.Sequential(nn.Embedding(11, 5), inner, nn.Tanh(), inner, nn.Linear(5, 11, bias=False))
        self.net[4].weight = self.net[0].weight

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class Autoencoder(Base):
    """Calls submodules directly, as Lightning's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class GAN(Base):
    """Manual optimization, two optimizers, toggling, clipping inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generator, discriminator = self.optimizers()
        z = torch.cos(torch.arange(len(x) * 3, dtype=x.dtype)).view(len(x), 3) + batch_idx
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        self.log("generator", loss, sync_dist=True)
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        real, fake = self.discriminator(x), self.discriminator(self.generator(z).detach())
        loss = (F.softplus(-real) + F.softplus(fake)).mean()
        self.log("discriminator", loss, sync_dist=True)
        self.manual_backward(loss)
        self.clip_gradients(discriminator, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.discriminator(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.01),
        )


class OddShapes(Regression):
    """A parameter without dimensions, dimensions smaller than the world, and dimensions that it does not divide. Two
    parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 19), nn.Tanh(), nn.Linear(19, 3), nn.Linear(3, 1)
            )
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.left, self.right = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + (self.left + self.right)) * self.scale + self.shift + self.empty.sum()


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        states, _ = self.gru(self.lstm(x.view(-1, 3, 2))[0])
        return F.mse_loss(self.head(states[:, -1]).squeeze(-1), y)


class Attention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 7, dropout=0.1, batch_first=True)
        self.inner = nn.Linear(1, 4)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        states = self.inner(x.unsqueeze(-1))
        return F.mse_loss(self.layer(self.attention(states, states, states)[0]).mean((1, 2)), y)


class Lists(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(WIDTH) * 0.5 + i / 10) for i in range(3)])
        self.named = nn.ParameterDict(
            {"bias": nn.Parameter(torch.ones(WIDTH)), "last": nn.Parameter(torch.ones(WIDTH))}
        )

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.named["bias"])
        return F.mse_loss(x @ self.named["last"], y)


class WeightNorm(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(weight_norm(nn.Linear(WIDTH, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 1))))


class Convolution(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.Conv1d(3, 5, 3), nn.Flatten())
        self.head = nn.Bilinear(20, WIDTH, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.net(x.unsqueeze(1)), x).squeeze(-1), y)


class LoRALinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs) / 3)
        self.up = nn.Parameter(torch.randn(outputs, 2) / 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRA(Regression):
    """Frozen layers with small trained ones beside them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(LoRALinear(WIDTH, 7), nn.Tanh(), LoRALinear(7, 5), nn.Tanh(), LoRALinear(5, 1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Unused(Regression):
    """One layer is never used, another only in odd batches."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 1))
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 2:
            loss = loss + self.sometimes(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Penalty(Regression):
    """Weight penalties in the ways people write them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)))

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        named = sum(p.abs().sum() for name, p in self.net.named_parameters() if "weight" in name)
        norm = parameters_to_vector(self.net.parameters()).norm()
        return super().loss(batch) + 0.01 * penalty + 0.02 * named + 0.03 * norm


class Checkpointed(Regression):
    """Activation checkpointing over dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(9, 1))
        self.block = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(checkpoint(self.block, x, use_reentrant=False))


class Hooked(Regression):
    """Hooks on parameters, put there before the strategy sees the module."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)))
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        self.net[2].bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class Stateful(Regression):
    """Buffers that the step changes, in place and by assignment, one in validation too, and host integers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        if self.training:
            self.steps += 1
        self.average = 0.9 * self.average + 0.1 * batch[0].mean(0).detach()
        return super().loss(batch) * (1 + 0.01 * self.global_step) + self.average.sum()


class Functional(Regression):
    """The network on other weights, and weights taken while gradients are not recorded."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        halves = {name: value * 0.5 for name, value in self.net.named_parameters()}
        other = F.mse_loss(torch.func.functional_call(self.net, halves, (x,)).squeeze(-1), y)
        with torch.no_grad():
            weight = self.net[2].weight
        trained = sum(p.abs().sum() for p in self.net.parameters() if p.requires_grad)
        return super().loss(batch) + other + weight.square().sum() + 0.01 * trained


CASES: dict[str, Callable[[], tuple[Base, Dataset]]] = {
    "mlp": lambda: (MLP(), vectors()),
    "smooth": lambda: (Smooth(), vectors()),
    "resumable": lambda: (Resumable(), vectors()),
    "litgpt": lambda: (LitGPT(tied=False), sequences()),
    "litgpt_even": lambda: (LitGPT(tied=False, vocabulary=12), sequences()),
    "litgpt_tied": lambda: (LitGPT(tied=True), sequences()),
    "llama": lambda: (Llama(), sequences()),
    "gan": lambda: (GAN(), vectors()),
    "autoencoder": lambda: (Autoencoder(), vectors()),
    "tied": lambda: (TiedEmbeddings(), sequences()),
    "odd_shapes": lambda: (OddShapes(), vectors()),
    "recurrent": lambda: (Recurrent(), vectors()),
    "attention": lambda: (Attention(), vectors()),
    "lists": lambda: (Lists(), vectors()),
    "weight_norm": lambda: (WeightNorm(), vectors()),
    "convolution": lambda: (Convolution(), vectors()),
    "lora": lambda: (LoRA(), vectors()),
    "unused": lambda: (Unused(), vectors()),
    "penalty": lambda: (Penalty(), vectors()),
    "checkpointed": lambda: (Checkpointed(), vectors()),
    "hooked": lambda: (Hooked(), vectors()),
    "functional": lambda: (Functional(), vectors()),
    "stateful": lambda: (Stateful(), vectors()),
}


def make(name: str) -> tuple[Base, Dataset]:
    """A new module, equal each time, and its data."""
    torch.manual_seed(3)
    return CASES[name]()
