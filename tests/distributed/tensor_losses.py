"""Checks of losses of logits that ranks have parts of: equal to one process, and no logits on the wire."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.distributed.schemes import whole
from tests.distributed.models import LanguageModel
from tests.distributed.parity import EXACT, _float64
from tests.distributed.tensor import Llama, collectives, compare, fit, strategy
from tests.distributed.training import PATIENCE

CLASSES = 12
PLAN = {"*.head": "colwise_loss_parallel"}
Loss = Callable[[Any, Tensor, Tensor], Tensor]  # of the module, logits [2, 6, classes] and targets [2, 6]


class Small(LanguageModel):
    """An embedding and a head, with a loss of its own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"wte": nn.Embedding(CLASSES, 8), "head": nn.Linear(8, CLASSES)})
        self.own_loss = loss

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        return self.own_loss(self, self.net["head"](self.net["wte"](tokens[:, :-1])), tokens[:, 1:])


def _flat(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def _shifted(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """As in Hugging Face's code."""
    rows = logits.float()[..., :-1, :].contiguous().double()
    return F.cross_entropy(rows.view(-1, CLASSES), targets[..., 1:].reshape(-1))


def _capped(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """As in Gemma's code."""
    return _flat(torch.tanh(logits / 3.0) * 3.0, targets)


def _square(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """As many rows as classes."""
    return F.cross_entropy(logits[:, :3].reshape(CLASSES, CLASSES), targets[:, :3].reshape(CLASSES))


SPLIT: dict[str, Loss] = {
    "mean": lambda module, logits, targets: _flat(logits, targets),
    "ignored": lambda module, logits, targets: _flat(logits, targets, ignore_index=3),
    "sum, smoothed": lambda module, logits, targets: _flat(
        logits, targets, ignore_index=3, reduction="sum", label_smoothing=0.2
    ),
    "module, smoothed": lambda module, logits, targets: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    ),
    "scaled": lambda module, logits, targets: _flat(2.0 * logits / 3, targets),
    "as many rows as classes": _square,
    "shifted": _shifted,
    "capped": _capped,
    "chunks": lambda module, logits, targets: chunked_cross_entropy(logits, targets, chunk_size=5),
    "last token": lambda module, logits, targets: F.cross_entropy(logits[:, -1], targets[:, -1]),
}


def _read(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """Something else reads the logits too."""
    module.log("right", (logits.argmax(-1) == targets).double().mean())
    return _flat(logits, targets)


def _edited(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
    logits[..., 0] = -1.0
    return _flat(logits, targets)


GATHERED: dict[str, tuple[Loss, str]] = {
    "weights": (
        lambda module, logits, targets: _flat(logits, targets, weight=torch.arange(1.0, CLASSES + 1)),
        "the loss weighs the classes",
    ),
    "probabilities": (
        lambda module, logits, targets: F.cross_entropy(logits[:, 0], F.one_hot(targets[:, 0], CLASSES).double()),
        "the loss's targets are probabilities",
    ),
    "classes in the middle": (
        lambda module, logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
        "the loss's logits have 3 dimensions: flatten all but the last",
    ),
    "edited": (_edited, "values may be changed in place inside it (setitem)"),
    "some classes": (
        lambda module, logits, targets: _flat(logits[..., :10], targets.clamp(max=9)),
        "a part of each row of logits is taken",
    ),
    "masked": (
        lambda module, logits, targets: _flat(torch.where(targets.unsqueeze(-1) > 4, logits, -logits), targets),
        "the logits go through where",
    ),
    "another row's": (
        lambda module, logits, targets: _flat(logits.softmax(-1), targets),
        "the logits go through softmax",
    ),
    "another loss": (
        lambda module, logits, targets: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten()),
        "no call of F.cross_entropy in this program reads them",
    ),
}  # fmt: skip


def _decision(result: Any) -> tuple[str, str]:
    step = lts.explain(result.trainer).to_dict()["steps"]["training_step"]
    (found,) = [item for item in step["decisions"] if "logits" in item["shape"]]
    assert found["subject"].endswith("head") and found["shape"] == f"{CLASSES} logits on 2 ranks"
    return found["choice"], found["reason"]


@_float64
def check_losses_of_parts_equal_one_process() -> None:
    for name, loss in SPLIT.items():
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if name == "shifted" else EXACT  # it rounds to float32
        result = compare(lambda loss=loss: Small(loss), tolerance, plan=PLAN)
        assert _decision(result) == ("loss of the parts", ""), name
        found = collectives(result)
        assert ("forward", "all_gather_into_tensor") not in found, name
        assert [stage for stage, op in found if op == "all_reduce"] == ["forward", "backward"], name


@_float64
def check_what_a_loss_of_one_chunk_communicates() -> None:
    """The largest of each row and two sums, and in the backward what the head's input gets."""
    found = collectives(compare(lambda: Small(SPLIT["mean"]), plan=PLAN))
    rows = 4 * 6
    assert found == {("forward", "all_reduce"): (2, 3 * rows * 8), ("backward", "all_reduce"): (1, rows * 8 * 8)}


@_float64
def check_other_losses_gather_and_equal_one_process() -> None:
    for name, (loss, reason) in GATHERED.items():
        result = compare(lambda loss=loss: Small(loss), plan=PLAN)
        assert _decision(result) == ("gathered", reason), name
        assert collectives(result)["forward", "all_gather_into_tensor"][0] == 1, name


@_float64
def check_logits_that_others_read_are_gathered_for_them() -> None:
    result = compare(lambda: Small(_read), plan=PLAN)
    assert _decision(result) == ("loss of the parts", "and gathered for others that read them (argmax)")
    assert collectives(result)["forward", "all_gather_into_tensor"][0] == 1


@_float64
def check_a_target_that_is_no_class_gives_nan() -> None:
    module = Small(lambda module, logits, targets: _flat(logits, targets + CLASSES))
    result = fit(module, strategy(plan=PLAN), max_epochs=1, limit_val_batches=0, limit_train_batches=1)
    assert all(loss.isnan() for loss in result.losses)


def check_plans_that_models_bring_split_the_loss() -> None:
    """Hugging Face's, with bfloat16 logits: as near to float32 as a gathered loss is."""
    torch.manual_seed(3)
    state = Llama().state_dict()
    losses = {}
    for precision in ("32-true", "bf16-true"):
        module = Llama()
        module.load_state_dict(state)
        options = {"max_epochs": 1, "limit_val_batches": 0, "limit_train_batches": 1, "precision": precision}
        result = fit(module, strategy(), **options)
        choices = [d["choice"] for d in lts.explain(result.trainer).to_dict()["steps"]["training_step"]["decisions"]]
        assert choices == ["loss of the parts"]
        losses[precision] = result.losses[0]
    assert losses["32-true"].isfinite()
    torch.testing.assert_close(losses["bf16-true"].float(), losses["32-true"], rtol=2e-2, atol=2e-2)


@_float64
def check_shards_of_parts_and_regions_that_are_computed_again() -> None:
    """The loss inside of ``torch.utils.checkpoint``, under ZeRO-3 over one group of two."""

    def again(module: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda x: _flat(module.net["head"](x), targets), logits[..., :8] * 2, use_reentrant=False)

    result = compare(lambda: Small(again), plan=PLAN, sharding="zero3")
    choices = [d["choice"] for d in lts.explain(result.trainer).to_dict()["steps"]["training_step"]["decisions"]]
    assert sorted(choices) == ["gathered", "loss of the parts"]


@_float64
def check_fabric_computes_the_loss_outside_of_the_program_from_all_logits() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
    chosen = lts.fabric.ThunderTPStrategy(2, {"1": "colwise_loss_parallel"}, executors=["eager"], timeout=PATIENCE)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    module = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
    module.load_state_dict(plain.state_dict())
    wrapped, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    tokens = torch.arange(CLASSES)
    for net, backward in ((plain, torch.Tensor.backward), (wrapped, fabric.backward)):
        backward(F.cross_entropy(net(tokens), tokens.flip(0)))
    for mine, theirs in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, **EXACT)
    (found,) = lts.explain(wrapped).to_dict()["steps"]["forward"]["decisions"]
    assert found["choice"] == "gathered"
