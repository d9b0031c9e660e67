"""Checks of tensor and data parallelism together, on four ranks."""

import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from tests.distributed.checkpoints import _each_epoch, _folder
from tests.distributed.models import vectors
from tests.distributed.parity import EXACT, NORMS_IN_FLOAT32, _float64
from tests.distributed.tensor import TWO_LAYERS, LitGPT, Llama, Plain, collectives, compare, fit, strategy
from tests.distributed.training import Result, thunder, trainer


@_float64
def check_two_groups_equal_one_process() -> None:
    """Parameters repeated in each group; gradients are averaged over the groups."""
    result = compare(lambda: LitGPT(n_layer=1), groups=2, clip=0.1)
    module = result.module
    halved = ("lm_head", "fc_", "wte", "qkv", "mlp.proj.weight", "attn.proj.weight")
    sizes = {name: p.numel() * 8 for name, p in module.named_parameters()}
    averaged = sum(size // (2 if any(key in name for key in halved) else 1) for name, size in sizes.items())
    activations = 3 * 4 * 6 * 32 * 8  # two layers' inputs and that of the head
    assert collectives(result)["backward", "all_reduce"][1] == averaged + activations


@_float64
def check_shards_of_parts_equal_one_process() -> None:
    """Parameters split by the plan, and each part over the groups."""
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update({name: tuple(p.to_local().shape) for name, p in pl_module.named_parameters()})

    compare(lambda: LitGPT(n_layer=1), groups=2, clip=0.1, sharding="zero3", compile="off", callbacks=[Look()])
    assert seen["net.transformer.h.0.attn.qkv.weight"] == (16, 32)  # of 64
    assert seen["net.transformer.h.0.mlp.proj.weight"] == (16, 10)  # of [32, 20]
    assert seen["net.transformer.h.0.norm_1.weight"] == (16,)


@_float64
def check_hf_llama_with_shards_of_parts() -> None:
    compare(lambda: Llama(tied=True), NORMS_IN_FLOAT32, groups=2, sharding="zero3")


@_float64
def check_programs_gather_shards_of_parts() -> None:
    for kind in ("zero2", "zero3"):
        result = compare(lambda: LitGPT(n_layer=1), groups=2, clip=0.1, sharding=kind)
        again = collectives(result).get(("backward", "all_gather_into_tensor"), (0, 0))[1]
        assert (again > 0) == (kind == "zero3")


@_float64
def check_programs_of_a_small_model() -> None:
    """Counts and bytes: gathers of parts over the groups, sums of activations within a group."""
    result = compare(Plain, groups=2, plan=TWO_LAYERS, sharding="zero2", bucket_size_mb=0)
    issued = [line.split() for line in result.trainer.strategy.records()[0].programs[0].sequence]
    groups = {(words[0], words[-1]) for words in issued if len(words) > 1}
    assert groups == {("all_gather_into_tensor", "2x2"), ("reduce_scatter_tensor", "2x2"), ("all_reduce", "2x1")}
    found, parts = collectives(result), (8 * 6 + 8 + 8 * 4) // 2
    padded = parts + 4 + 2 * 4 + 2  # the biases and the last layer, whose one row is padded to one on each rank
    assert found["forward", "all_gather_into_tensor"] == (6, padded * 8)
    assert found["backward", "reduce_scatter_tensor"] == (6, padded * 8)
    assert found["forward", "all_reduce"] == (1, 4 * 4 * 8) and ("backward", "all_reduce") not in found


@_float64
def check_sampler_and_sums_are_over_groups() -> None:
    class Sums(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", torch.tensor(float(len(batch[0]))), on_epoch=True, sync_dist=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    result = fit(Sums(), strategy(plan=TWO_LAYERS), max_epochs=1, limit_val_batches=0)
    assert result.metrics["rows_epoch"] == 24
    rank = torch.distributed.get_rank()
    assert result.trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank // 2}


def _run(name: str, epochs: int, kind: str = "full", **options: Any) -> Result:
    """Train under the strategy called ``name``; the batch of all ranks has 12 rows under each."""
    rows = {"2d": 6, "tp": 6, "tp4": 12}.get(name, 3)
    own: dict[str, Any] = {"compile": "off", "state_dict_type": kind}
    torch.manual_seed(3)
    if name == "2d":
        own["sharding"] = "zero3"
    if name == "tp4":
        own["tensor_parallel_size"] = 4
    chosen = strategy(plan=TWO_LAYERS, **own) if name in ("2d", "tp", "tp4") else thunder(name, **own)
    return fit(Plain(), chosen, rows, max_epochs=epochs, limit_val_batches=0, **options)


def _assert_goes_on(straight: Result, name: str, kind: str, others: tuple[str, ...]) -> None:
    """What is saved under one strategy goes on under others, the optimizer's state too."""
    with _folder() as folder:
        _run(name, 1, kind, callbacks=[_each_epoch(folder)], enable_checkpointing=True)
        (path,) = list(folder.iterdir())
        if kind == "full":
            saved = torch.load(path, weights_only=False)["state_dict"]
            plain = {key: value.shape for key, value in Plain().state_dict().items()}
            assert {key: value.shape for key, value in saved.items()} == plain
        for other in others:
            resumed = _run(other, 2, kind, ckpt_path=path)
            for key, value in straight.weights.items():
                torch.testing.assert_close(resumed.weights[key], value, **EXACT)


@_float64
def check_checkpoints_move_between_meshes() -> None:
    straight = _run("2d", 2)
    _assert_goes_on(straight, "2d", "full", ("tp4", "ddp"))
    _assert_goes_on(straight, "2d", "sharded", ("tp",))


@_float64
def check_more_checkpoints_move_between_meshes() -> None:
    straight = _run("tp", 2)
    _assert_goes_on(straight, "zero3", "full", ("2d", "tp"))
    _assert_goes_on(straight, "tp", "sharded", ("2d", "zero3"))


def check_groups_may_have_batches_of_different_shapes() -> None:
    """Ranks compare programs without the sizes of activations, so all run compiled."""
    group = torch.distributed.get_rank() // 2
    made = trainer(strategy(plan=TWO_LAYERS), devices=4, max_epochs=1, limit_val_batches=0, limit_train_batches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lts.CompileWarning)
        made.fit(Plain(), DataLoader(vectors(), batch_size=3 + group))
    assert lts.explain(made).to_dict()["steps"]["training_step"]["graphs"] >= 1


class Penalized(Plain):
    """A penalty that is not a sum over elements, and an encoder layer that torch has a fast path for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.encoder(x[:, None])[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * sum(p.norm() for p in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PENALIZED = {**TWO_LAYERS, "encoder.linear1": "colwise", "encoder.linear2": "rowwise"}


@_float64
def check_penalties_and_layers_with_a_fast_path() -> None:
    """And a second fit by another plan, over what the first one left in parts."""
    compare(Penalized, groups=2, plan=PENALIZED)
    torch.manual_seed(3)
    plain, module = Penalized().eval(), Penalized()
    module.load_state_dict(plain.state_dict())
    batches = DataLoader(vectors(), batch_size=24)
    with torch.no_grad():
        wanted = plain.loss(next(iter(batches)))
    for plan in (PENALIZED, {"encoder.linear1": "colwise_gather_output"}, {"net.0": "rowwise_split_input"}):
        made = trainer(strategy(plan=plan, sharding="zero3", unshard_on_teardown=False), devices=4)
        (found,) = made.validate(module, batches, verbose=False)
        torch.testing.assert_close(torch.tensor(found["val"]), wanted, **EXACT)
