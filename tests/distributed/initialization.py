"""Checks that models come into being right and without a rank ever holding the whole of one."""

import gc
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thunder_strategy.distributed.schemes import whole
from tests.distributed.models import Attention, Base, Regression, sequences, vectors
from tests.distributed.training import Result, fit, loader, thunder, trainer

SHORT: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}


def _same_on_all_ranks(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        both = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(both, tensor.contiguous())
        assert torch.equal(*both), name


class Starts(L.Callback):
    """Notes the weights that training starts from, and where they are."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.sharded: dict[str, bool] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        state = pl_module.state_dict()
        self.weights = {name: whole(value.detach()).clone() for name, value in state.items()}
        self.sharded = {name: isinstance(value, DTensor) for name, value in state.items()}


def _start(module: L.LightningModule, kind: str = "zero3", data: Any = None, **options: Any) -> tuple[Starts, Result]:
    start = Starts()
    data = vectors() if data is None else data
    return start, fit(thunder(kind), module, data, callbacks=[start], **{**SHORT, **options})


# --------------------------------------------------------------------------------------------------- configure_model


class Configured(Base):
    """Builds its network in ``configure_model``."""

    def __init__(self, build: Callable[[], nn.Module], x_first: bool = True) -> None:
        super().__init__()
        self.build = build
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(21)
            self.net = self.build()

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()


def _live_bytes() -> int:
    """Bytes of all tensors with storage that exist in this process, each storage once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and not item.is_meta:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def check_configure_model_never_holds_the_whole_model() -> None:
    """Sixteen layers of 1 MiB: a rank holds its half and little more, at every layer that is built and afterwards."""
    before, peak, layers = _live_bytes(), [0], 16

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(512, 512, bias=False)
            peak[0] = max(peak[0], _live_bytes() - before)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 512)
            self.layers = nn.ModuleList()
            for _ in range(layers):
                self.layers.append(Layer())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.inner(x))

    class Watched(Configured):
        def on_fit_start(self) -> None:
            peak.append(_live_bytes() - before)

    start, _ = _start(Watched(Deep))
    assert start.sharded["net.layers.3.weight"]
    model = layers * 2**20
    assert peak[0] < 0.6 * model + 2 * 2**20, f"{peak[0] / model:.2f} of the model"
    assert peak[1] < 0.6 * model + 2**20, f"{peak[1] / model:.2f} of the model"


class InitialisedLater(nn.Module):
    """Initialises its parts after they were built, in the ways people do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.own = nn.Parameter(torch.randn(3))
        self.apply(self._init)
        self.embedding.weight.data[3].zero_()
        with torch.no_grad():
            self.embedding.weight[0] = 1.5
            self.blocks[0].weight.copy_(torch.eye(3))
            self.blocks[1].bias.add_(torch.arange(3.0))
        nn.init.trunc_normal_(self.blocks[1].weight, std=0.02)
        self.layers[0].weight.data = self.layers[0].weight.data * 2
        self.layers[2].weight.data.mul_(1 / math.sqrt(2 * len(self.blocks)))
        for name, parameter in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(parameter, std=0.1)
        weight, bias = self.blocks[0].weight.data, self.blocks[0].bias.data  # held while others are edited
        row = self.blocks[1].weight.data[1]
        self.own.data.fill_(0.5)
        weight.add_(1)
        bias.copy_(weight[0])
        row.fill_(0.25)
        self.total = sum(p.numel() for p in self.parameters())

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.uniform_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        for block in self.blocks:
            x = block(x)
        return x * self.own + self.embedding.weight[3, :3]


def _equals_ordinary_construction(build: Callable[[], nn.Module], **options: Any) -> None:
    torch.manual_seed(21)
    ordinary = build().state_dict()
    for kind in ("zero3", "ddp"):
        start, result = _start(Configured(build), kind, **options)
        assert any(start.sharded.values()) == (kind == "zero3")
        assert start.weights.keys() == {f"net.{name}" for name in ordinary}
        for name, value in ordinary.items():
            torch.testing.assert_close(
                start.weights[f"net.{name}"], value, rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}"
            )
        assert len(result.losses) == 1


def check_values_of_configure_model_are_those_of_ordinary_construction() -> None:
    _equals_ordinary_construction(InitialisedLater)


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1), x.unsqueeze(1))


def check_transformer_in_configure_model() -> None:
    _equals_ordinary_construction(Translation)


def check_tied_weights_in_configure_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    _equals_ordinary_construction(Tied)
    _, result = _start(Configured(Tied))
    assert result.module.net.first.weight is result.module.net.second.weight


def check_configure_model_on_every_stage() -> None:
    """It is called again for each stage, and the user returns early: nothing is built or spread twice."""
    module = Configured(InitialisedLater)
    made = trainer(thunder("zero3"), max_epochs=1)
    made.fit(module, loader(vectors()))
    first = {name: value.clone() for name, value in module.state_dict().items()}

    class Validates(type(module)):
        pass

    made.validate(module, loader(vectors()), verbose=False)
    torch.testing.assert_close(dict(module.state_dict()), first, rtol=0, atol=0)
    assert type(module.net.layers[0]) is nn.Linear


# -------------------------------------------------------------------------------------------------------------- meta


class Custom(nn.Module):
    """A parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.register_buffer("shift", torch.empty(6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Forgets(NoReset):
    """Initialises some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def _net() -> nn.Module:
    return nn.Sequential(Custom(), nn.Linear(6, 9), nn.LayerNorm(9), nn.BatchNorm1d(9), nn.Linear(9, 1))


def check_empty_modules_are_initialised_alike_on_all_ranks() -> None:
    """With other random seeds on each rank, by ``init_module`` and by ``torch.device("meta")``."""
    for kind in ("zero3", "ddp"):
        for by_trainer in (True, False):
            torch.manual_seed(50 + torch.distributed.get_rank())
            strategy = thunder(kind)
            start = Starts()
            made = trainer(strategy, callbacks=[start], **SHORT)
            with made.init_module(empty_init=True) if by_trainer else torch.device("meta"):
                module = Regression(_net())
            if kind == "zero3" or not by_trainer:
                assert all(parameter.is_meta for parameter in module.parameters())
            made.fit(module, loader(vectors()))
            _same_on_all_ranks(start.weights)
            weights = start.weights
            if kind == "zero3" or not by_trainer:
                assert torch.equal(weights["net.0.shift"], torch.full((6,), 0.25))
                assert torch.equal(weights["net.2.weight"], torch.ones(9))
                assert 0.3 < weights["net.0.scale"].std() < 3
                assert 0 < weights["net.1.weight"].abs().max() <= 1 / math.sqrt(6)
                assert torch.equal(weights["net.3.running_var"], torch.ones(9))
            assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def check_meta_modules_without_reset_parameters_are_named() -> None:
    for layer in (NoReset, Forgets):
        for kind in ("zero3", "ddp"):
            with torch.device("meta"):
                module = Regression(nn.Sequential(nn.Linear(6, 6), layer()))
            try:
                fit(thunder(kind), module, vectors(), **SHORT)
            except TypeError as error:
                assert f"`net.1` ({layer.__name__})" in str(error) and "reset_parameters" in str(error), error
            else:
                raise AssertionError("no error")


def check_attention_on_meta() -> None:
    with torch.device("meta"):
        module = Attention()
    start, result = _start(module)
    _same_on_all_ranks(start.weights)
    assert torch.equal(start.weights["attention.in_proj_bias"], torch.zeros(12))
    assert start.weights["attention.in_proj_weight"].abs().max() < 1.5
    assert len(result.losses) == 1


def check_tied_weights_on_meta() -> None:
    class Tied(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1)))
            self.net[2].weight = self.net[0].weight

    with torch.device("meta"):
        module = Tied()
    start, result = _start(module)
    assert torch.equal(start.weights["net.0.weight"], start.weights["net.2.weight"])
    assert result.module.net[0].weight is result.module.net[2].weight
    assert len(list(result.module.parameters())) == 5


class HuggingFace(Base):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, tie_word_embeddings=tied,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


def check_hugging_face_models_on_meta() -> None:
    """By their ``_init_weights``: norms are one, weights have the configured spread, buffers are computed."""
    for tied in (False, True):
        torch.manual_seed(1)
        plain = HuggingFace(tied)
        with torch.device("meta"):
            module = HuggingFace(tied)
        start, result = _start(module, data=sequences())
        _same_on_all_ranks(start.weights)
        assert torch.equal(start.weights["net.model.norm.weight"], torch.ones(32))
        assert 0.015 < start.weights["net.model.embed_tokens.weight"].std() < 0.025
        assert 0.015 < start.weights["net.model.layers.0.mlp.up_proj.weight"].std() < 0.025
        theirs = dict(plain.named_buffers())
        for name, buffer in result.module.named_buffers():
            torch.testing.assert_close(buffer, theirs[name])
        assert (result.module.net.lm_head.weight is result.module.net.model.embed_tokens.weight) == tied
        assert 3.5 < result.losses[0] < 4.8  # log(64) is 4.2


def check_litgpt_on_meta() -> None:
    from litgpt import GPT, Config

    config = Config(
        block_size=16, vocab_size=11, padded_vocab_size=11, n_layer=1, n_head=2, n_embd=12, rotary_percentage=1.0,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=20, bias=False, parallel_residual=False,
    )  # fmt: skip

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT(config)

        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch[0][:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    with torch.device("meta"):
        module = Model()
    start, result = _start(module, data=sequences())
    _same_on_all_ranks(start.weights)
    plain = GPT(config)
    torch.testing.assert_close(result.module.net.cos, plain.cos)
    torch.testing.assert_close(result.module.net.sin, plain.sin)
    assert torch.equal(start.weights["net.transformer.ln_f.weight"], torch.ones(12))
    assert 2 < result.losses[0] < 3


def check_meta_in_configure_model_never_holds_the_whole_model() -> None:
    """Layers on the meta device are filled one at a time."""
    before, peak, layers = _live_bytes(), [0], 16

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                peak[0] = max(peak[0], _live_bytes() - before)
            super().reset_parameters()

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 512)
            self.layers = nn.Sequential(*[Layer(512, 512, bias=False) for _ in range(layers)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.inner(x))

    def build() -> nn.Module:
        with torch.device("meta"):
            return Deep()

    start, _ = _start(Configured(build))
    assert start.sharded["net.layers.3.weight"] and peak[0] > 2**20
    assert peak[0] < 0.6 * layers * 2**20 + 2 * 2**20, f"{peak[0] / layers / 2**20:.2f} of the model"
