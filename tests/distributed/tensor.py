"""Checks of tensor parallelism on two ranks: training equals one process, programs have the collectives they must."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.distributed.together import RanksDifferError
from tests.distributed.models import Base, LanguageModel, Regression, sequences, vectors
from tests.distributed.parity import EXACT, NORMS_IN_FLOAT32, _float64
from tests.distributed.training import PATIENCE, Result, Watch, assert_equal_results, thunder, trainer


class LitGPT(LanguageModel):
    """Grouped queries, biases and LayerNorm, whose arithmetic is float64 throughout."""

    def __init__(self, length: int = 7, **changes: Any) -> None:
        super().__init__()
        self.length = length
        from litgpt import GPT, Config

        options = {
            "block_size": 16, "vocab_size": 12, "padded_vocab_size": 12, "n_layer": 2, "n_head": 8, "n_embd": 32,
            "n_query_groups": 4, "rotary_percentage": 1.0, "norm_class_name": "LayerNorm", "bias": True,
            "mlp_class_name": "LLaMAMLP", "intermediate_size": 20, "parallel_residual": False, **changes,
        }  # fmt: skip
        self.net = GPT(Config(**options))

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class Llama(LanguageModel):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=12, hidden_size=32, intermediate_size=20, num_hidden_layers=1, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=16, tie_word_embeddings=tied,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        return self.net(input_ids=tokens, labels=tokens).loss


class Plain(Regression):
    """No model that is known."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


TWO_LAYERS = {"net.0": "colwise", "net.2": "rowwise"}


def data_of(module: Base) -> Any:
    return vectors() if isinstance(module, Regression) else sequences(8, getattr(module, "length", 7), vocabulary=12)


def strategy(**options: Any) -> Any:
    """``ThunderFSDPStrategy`` if ``sharding`` is among the options, else ``ThunderTPStrategy``."""
    options = {"executors": ["eager"], "timeout": PATIENCE, "tensor_parallel_size": 2, **options}
    return lts.ThunderFSDPStrategy(**options) if "sharding" in options else lts.ThunderTPStrategy(**options)


def fit(module: Base, chosen: Any, batch_size: int = 4, **options: Any) -> Result:
    """Fit on batches that Lightning's sampler deals out."""
    callbacks, ckpt_path = options.pop("callbacks", []), options.pop("ckpt_path", None)
    result = Result(module, None)
    options = {"use_distributed_sampler": True, "devices": torch.distributed.get_world_size(), **options}
    result.trainer = made = trainer(chosen, **options, callbacks=[*callbacks, Watch(result)])
    loader = DataLoader(data_of(module), batch_size=batch_size)
    made.fit(module, loader, loader, ckpt_path=ckpt_path)
    if not result.weights:
        result.weights = {name: whole(value.detach()).clone() for name, value in module.state_dict().items()}
    result.metrics = {key: value.clone() for key, value in made.callback_metrics.items()}
    return result


def alone(module: Base, batch_size: int = 4, clip: float = 0.0, accumulate: int = 1) -> Result:
    """One epoch of the same in a plain loop."""
    result = Result(module, None)
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    data = data_of(module)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)  # Lightning shuffles as this does
    for index, batch in enumerate(DataLoader(data, batch_size=batch_size, sampler=sampler)):
        loss = module.training_step(batch, index)
        (loss / accumulate).backward()
        result.losses.append(loss.detach())
        if (index + 1) % accumulate:
            continue
        result.gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    return result


def compare(make: Any, tolerance: dict = EXACT, groups: int = 1, clip: float = 0.0, **options: Any) -> Result:
    """Fit the module that ``make`` makes under tensor parallelism and in a plain loop, and compare.

    Args:
        make: Of equal modules, with equal random numbers.
        tolerance: Of the comparison.
        groups: Data-parallel groups.
        clip: Norm of the gradients at most.
        options: Of the strategy; ``accumulate``: micro-batches of an optimizer step.
    """
    accumulate, callbacks = options.pop("accumulate", 1), options.pop("callbacks", [])
    torch.manual_seed(3)
    theirs = alone(make(), 4 * groups, clip, accumulate)
    torch.manual_seed(3)
    trainer_options: dict = {"gradient_clip_val": clip} if clip else {}
    trainer_options.update(max_epochs=1, limit_val_batches=0, accumulate_grad_batches=accumulate)
    trainer_options["callbacks"] = callbacks
    ours = fit(make(), strategy(**options), **trainer_options)
    for name, value in ours.module.state_dict().items():
        assert type(value) is Tensor and torch.equal(value, ours.weights[name]), name  # plain again after fit
    assert_equal_results(ours, theirs, losses=groups * accumulate == 1, **tolerance)
    return ours


def collectives(result: Result) -> dict[tuple[str, str], tuple[int, int]]:
    """By stage and operator, count and bytes."""
    step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]["collectives"]
    return {(stage, item["op"]): (item["count"], item["bytes"]) for stage, items in step.items() for item in items}


@_float64
def check_litgpt_equals_one_process() -> None:
    """Grouped queries in one projection, which is gathered; a layer has two sums forward and two backward."""
    result = compare(LitGPT)
    activation = 4 * 6 * 32 * 8  # bytes: batch, tokens, width, float64
    shapes = result.module.net.transformer.h[0].attn.qkv
    found = collectives(result)
    # Forward: two layers with two sums each, the embedding's, and the loss's: a maximum and two sums at once of each
    # row. The fused projections are gathered at once.
    assert found["forward", "all_reduce"] == (7, 5 * activation + 3 * 4 * 6 * 8)
    projections = 2 * (shapes.weight.numel() + shapes.bias.numel()) * 8
    assert found["forward", "all_gather_into_tensor"] == (1, projections)
    # Backward: a sum for what each of the two projections of a layer and the head read; projections are scattered.
    assert found["backward", "all_reduce"] == (5, 5 * activation)
    assert found["backward", "reduce_scatter_tensor"] == (1, projections)


@_float64
def check_hf_llama_equals_one_process() -> None:
    """Its own plan, tied embeddings: the head splits the vocabulary that the embedding reads whole."""
    compare(lambda: Llama(tied=True), NORMS_IN_FLOAT32, clip=0.1)


@_float64
def check_own_plan_with_accumulation() -> None:
    compare(Plain, plan=TWO_LAYERS, accumulate=3, clip=0.1)
    compare(Plain, plan={"*.0": "colwise_rep", "*.2": "rowwise_split_input"}, compile="off")


@_float64
def check_sequence_parallel() -> None:
    """What lies between the layers is split along the sequence."""
    plan = {
        "*.wte": "split_sequence_output", "*.norm_1": "sequence_parallel", "*.norm_2": "sequence_parallel",
        "*.ln_f": "sequence_parallel_gather_output", "*.lm_head": "colwise_gather_output",
        "*.attn": "gather_sequence_input", "*.attn.qkv": "local_colwise", "*.attn.proj": "rowwise_scatter_sequence",
        "*.mlp": "gather_sequence_input", "*.mlp.fc_?": "local_colwise", "*.mlp.proj": "rowwise_scatter_sequence",
    }  # fmt: skip
    compare(lambda: LitGPT(n_layer=1, length=9), plan=plan)


class DroppingOut(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(0.5))


def check_dropout_is_the_same_on_all_ranks() -> None:
    """Also if ranks have drawn other random numbers before."""
    torch.manual_seed(torch.distributed.get_rank())
    module = DroppingOut()
    result = fit(module, strategy(plan=TWO_LAYERS), max_epochs=1, limit_val_batches=0)
    everywhere: list = [None, None]
    torch.distributed.all_gather_object(everywhere, [result.losses, result.weights])
    torch.testing.assert_close(everywhere[0], everywhere[1], rtol=0, atol=0)


def check_different_batches_on_the_ranks_of_a_group_are_an_error() -> None:
    with pytest.raises(RanksDifferError, match=r"training_step: the ranks \[0, 1\].*different batches"):
        sampler = DistributedSampler(vectors(), shuffle=False)
        made = trainer(strategy(plan=TWO_LAYERS), limit_val_batches=0)
        made.fit(Plain(), DataLoader(vectors(), batch_size=4, sampler=sampler))


class Scaled(Regression):
    """A parameter that the plan does not name scales what is split."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), Scale(), nn.Linear(8, 1)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@_float64
def check_a_parameter_of_which_ranks_have_a_part_of_the_gradient() -> None:
    """Is an error, unless the plan says so."""
    with pytest.raises(RanksDifferError, match="gradients of net.1.scale differ"):
        fit(Scaled(), strategy(plan=TWO_LAYERS), max_epochs=1, limit_val_batches=0)
    compare(Scaled, plan={**TWO_LAYERS, "net.1": "replicated_with_grad_allreduce"})


def check_a_plan_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"(?s)plan='auto' knows.*net.0: 6 -> 8.*\"net.0\": colwise"):
        fit(Plain(), strategy())


@_float64
def check_fabric() -> None:
    """Trains as the plain module does, clips by the whole norm, and saves the plain module's keys and shapes."""
    torch.manual_seed(3)
    plain, module = Plain(), Plain()
    module.load_state_dict(plain.state_dict())
    chosen = lts.fabric.ThunderTPStrategy(2, TWO_LAYERS, executors=["eager"], timeout=PATIENCE)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    assert chosen.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    assert module.net[0].weight.to_local().shape == (4, 6)
    for index, (x, y) in enumerate(DataLoader(vectors(), batch_size=6)):
        nn.functional.mse_loss(plain(x), y).backward()
        with fabric.no_backward_sync(wrapped, enabled=index % 2 == 0):
            fabric.backward(nn.functional.mse_loss(wrapped(x), y))
        if index % 2 == 0:
            continue
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(fabric.clip_gradients(wrapped, optimizer, max_norm=0.1), norm, **EXACT)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    state = fabric.strategy.get_module_state_dict(module)
    torch.testing.assert_close(state, dict(plain.state_dict()), **EXACT)


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.net[3](checkpoint(self.net[:3], x, use_reentrant=False))


@_float64
def check_activation_checkpointing() -> None:
    for mode in ("step", "off"):
        compare(Checkpointed, plan=TWO_LAYERS, compile=mode)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        return loss


@_float64
def check_manual_optimization_and_submodules() -> None:
    torch.manual_seed(3)
    ours = fit(Manual(), strategy(plan=TWO_LAYERS), max_epochs=1, limit_val_batches=0)
    torch.manual_seed(3)
    theirs = alone(Plain(), clip=0.1)
    torch.testing.assert_close(ours.weights, theirs.weights, **EXACT)
    compare(lambda: LitGPT(n_layer=1), compile="submodules")


@_float64
def check_averages_of_weights_equal_ddp() -> None:
    results = []
    for chosen, rows in ((strategy(plan=TWO_LAYERS, compile="off"), 4), (thunder("ddp", compile="off"), 2)):
        torch.manual_seed(3)
        module = Plain()
        fit(module, chosen, rows, max_epochs=1, limit_val_batches=0, callbacks=[EMAWeightAveraging()])
        results.append(dict(module.state_dict()))
    torch.testing.assert_close(*results, **EXACT)


@_float64
def check_one_strategy_after_another() -> None:
    """Parameters that one leaves distributed are taken over by the next; classes are the user's own afterwards."""
    module = Plain()
    options: dict = {"max_epochs": 1, "limit_val_batches": 0}
    fit(module, strategy(plan=TWO_LAYERS, compile="off", unshard_on_teardown=False), **options)
    left = whole(module.net[0].weight).detach().clone()
    fit(module, thunder("zero3", compile="off"), **{**options, "max_epochs": 0})
    assert torch.equal(module.net[0].weight, left) and type(module.net[0]) is nn.Linear
    fit(module, strategy(plan={"net.0": "colwise_gather_output"}, compile="off"), **options)
    assert type(module.net[0].weight) is nn.Parameter and not torch.equal(module.net[0].weight, left)
