"""Checks of what a sharded module's parameters are outside and inside a step."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning, ModelSummary
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from lightning_thunder_strategy.distributed.schemes import whole
from lightning_thunder_strategy.distributed.sharding import ParameterReplacedError
from lightning_thunder_strategy.transforms.refuse_lost_edits import LostEditError
from tests.distributed.models import Base, Regression, make, vectors
from tests.distributed.training import assert_equal_results, fit, fit_case, thunder

SHORT: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}


class At(L.Callback):
    """Calls a function at one hook."""

    def __init__(self, hook: str, function: Callable[[Any], None]) -> None:
        self.called = 0

        def call(trainer: Any, module: Any, *args: Any) -> None:
            self.called += 1
            function(module)

        setattr(self, hook, call)


def _during_training(
    function: Callable[[Any], None], case: str = "smooth", kind: str = "zero3", executor: str = "eager", **options: Any
) -> Any:
    callback = At("on_train_batch_start", function)
    result = fit_case(thunder(kind, executors=[executor]), case, callbacks=[callback], **{**SHORT, **options})
    assert callback.called
    return result


def check_attributes_are_the_parameters_themselves() -> None:
    def look(module: Any) -> None:
        layer = module.net[0]
        assert layer.weight is layer._parameters["weight"] is dict(layer.named_parameters())["weight"]
        assert layer.weight is module.get_parameter("net.0.weight") is next(module.parameters())
        assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, DTensor)
        assert layer.weight.shape == (9, 6)
        assert type(layer).__name__ == "Linear" and isinstance(layer, nn.Linear)
        assert repr(layer) == "Linear(in_features=6, out_features=9, bias=True)"
        assert layer.weight.to_local().shape[0] == (5 if torch.distributed.get_rank() == 0 else 4)
        assert all(parameter in set(module.parameters()) for parameter in module.optimizers().param_groups[0]["params"])

    _during_training(look)


def check_optimizers_and_hooks_see_sharded_gradients() -> None:
    def look(module: Any) -> None:
        for parameter in module.parameters():
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
            assert parameter.grad is not None

    callback = At("on_after_backward", look)
    fit_case(thunder("zero3"), "odd_shapes", callbacks=[callback], **SHORT)
    assert callback.called == 2


def check_edits_outside_a_step_take_effect() -> None:
    """Initialisation and in-place edits before training, in float64, equal those of a plain module."""

    def edit(module: Any) -> None:
        nn.init.constant_(module.net[0].weight, 0.25)
        nn.init.zeros_(module.net[2].bias)
        with torch.no_grad():
            module.net[0].bias.mul_(0.5)
            module.net[2].weight.add_(0.125)
        module.net[2].weight.data.mul_(2)
        module.net[2].weight.data.copy_(module.net[2].weight.data + 0.5)

    ours = fit_case(thunder("zero3"), "smooth", callbacks=[At("on_train_start", edit)], **SHORT)
    plain = fit_case("ddp", "smooth", callbacks=[At("on_train_start", edit)], **SHORT)
    assert_equal_results(ours, plain)
    untouched = fit_case("ddp", "smooth", **SHORT)
    assert not torch.allclose(untouched.losses[0], plain.losses[0])


def check_forward_outside_a_step_equals_eager() -> None:
    """A sample drawn in a hook, with and without gradients."""
    samples: list[Tensor] = []

    def sample(module: Any) -> None:
        plain, _ = make("mlp")
        plain.load_state_dict({name: whole(value) for name, value in module.state_dict().items()})
        x = torch.linspace(-1, 1, 12).view(2, 6)
        for training in (False, True):
            module.train(training), plain.train(training)
            torch.manual_seed(1)
            ours = module(x)
            torch.manual_seed(1)
            theirs = plain(x)
            torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            module.eval(), plain.eval()
            torch.testing.assert_close(module.net[4](x.repeat(1, 2)[:, :9]), plain.net[4](x.repeat(1, 2)[:, :9]))
        module.train()
        samples.append(ours)
        ours.sum().backward()
        theirs.sum().backward()
        for mine, other in zip(module.parameters(), plain.parameters()):
            torch.testing.assert_close(whole(mine.grad), other.grad)
        module.zero_grad()

    callback = At("on_train_epoch_end", sample)
    fit_case(thunder("zero3"), "mlp", callbacks=[callback])
    assert len(samples) == 2


def check_model_summary_with_example_input() -> None:
    class Shown(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 1)))
            self.example_input_array = torch.zeros(2, 6)

    summaries = []

    class Summary(ModelSummary):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            summaries.append(self._summary(trainer, pl_module))

    fit(thunder("zero3"), Shown(), vectors(), callbacks=[Summary(max_depth=2)], **SHORT)
    (summary,) = summaries
    assert summary.total_parameters == summary.trainable_parameters == 73
    assert summary.layer_types == ["Sequential", "Linear", "Linear"]
    assert summary.in_sizes == [[2, 6], [2, 6], [2, 9]] and summary.out_sizes == [[2, 1], [2, 9], [2, 1]]


def check_deepcopy_while_sharded() -> None:
    def look(module: Any) -> None:
        twin = copy.deepcopy(module.net)
        assert type(twin[0]).__name__ == "Linear" and isinstance(twin[0].weight, DTensor)
        assert twin[0].weight is not module.net[0].weight
        x = torch.ones(2, 6)
        torch.testing.assert_close(twin(x), module.net(x))
        with torch.no_grad():
            twin[0].weight.zero_()
        assert not torch.allclose(twin(x), module.net(x)), "the copy must use its own weights"
        copied = copy.deepcopy(module.net)
        for name, parameter in module.net.named_parameters():
            if parameter.grad is not None:  # a gradient is copied with its parameter
                gradient = dict(copied.named_parameters())[name].grad
                assert gradient is not parameter.grad and whole(gradient).equal(whole(parameter.grad))
                counts.append(name)

    for executor in ("eager", "inductor"):
        counts: list[str] = []
        _during_training(look, executor=executor)
        assert len(counts) == 4


def check_pickle_while_sharded() -> None:
    def look(module: Any) -> None:
        twin = pickle.loads(pickle.dumps(module.net))
        buffer = io.BytesIO()
        torch.save(module.net, buffer)
        buffer.seek(0)
        third = torch.load(buffer, weights_only=False)
        for other in (twin, third):
            x = torch.ones(2, 6)
            torch.testing.assert_close(other(x), module.net(x))
            assert type(other[0]).__name__ == "Linear"

    _during_training(look)


def check_values_loaded_by_load_state_dict() -> None:
    """A plain state dict loads into the sharded module by the ordinary method, strictly."""

    def load(module: Any) -> None:
        plain, _ = make("smooth")
        state = {name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()}
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
        for parameter in module.parameters():
            assert torch.equal(parameter.full_tensor(), torch.full(parameter.shape, 0.5))
        raised = False
        try:
            module.load_state_dict({**state, "net.0.weight": torch.zeros(2, 2)})
        except RuntimeError as error:
            raised = "size mismatch for net.0.weight" in str(error)
        assert raised

    _during_training(load)


def check_missing_attributes_are_as_in_plain_modules() -> None:
    class NoBias(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 1, bias=False))

    def look(module: Any) -> None:
        assert module.net.bias is None
        for name in ("nothing", "weights"):
            try:
                getattr(module.net, name)
            except AttributeError as error:
                assert f"'Linear' object has no attribute '{name}'" in str(error), error
            else:
                raise AssertionError(name)
        try:
            module.get_parameter("net.bias")
        except AttributeError:
            pass
        else:
            raise AssertionError("get_parameter of a parameter that is None")

    callback = At("on_train_batch_start", look)
    fit(thunder("zero3"), NoBias(), vectors(), callbacks=[callback], **SHORT)
    assert callback.called


# ------------------------------------------------------------------------------------------------ what must be refused


def _raises(expected: type, function: Callable[[], Any], *words: str) -> None:
    try:
        function()
    except expected as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        return
    raise AssertionError(f"no {expected.__name__} was raised")


def check_a_parameter_replaced_in_training_is_refused() -> None:
    def replace(module: Any) -> None:
        module.net[2].bias = nn.Parameter(torch.zeros(1))

    for mode in ("step", "off"):
        _raises(
            ParameterReplacedError,
            lambda mode=mode: fit_case(
                thunder("zero3", compile=mode), "smooth", callbacks=[At("on_train_start", replace)], **SHORT
            ),
            "`bias`", "Linear", "in place",
        )  # fmt: skip


def check_pruning_in_training_is_refused_and_before_it_trains_as_under_ddp() -> None:
    def cut(module: Any) -> None:
        prune.l1_unstructured(module.net[2], "weight", amount=0.4)

    callbacks = (At("on_train_epoch_end", cut), ModelPruning("l1_unstructured", amount=0.4))
    fits = [lambda each=each: fit_case(thunder("ddp"), "smooth", callbacks=[each], **SHORT) for each in callbacks]
    _raises(ParameterReplacedError, fits[0], "`weight` of Linear", "as pruning does", "Prune before `fit`")
    _raises(TypeError, fits[1], "ModelPruning replaces parameters", "prune before `fit`")
    results = []
    for strategy in ("ddp", thunder("ddp"), thunder("zero3")):
        module, data = make("smooth")
        cut(module)
        results.append(fit(strategy, module, data, **SHORT))
    for ours in results[1:]:
        torch.testing.assert_close(ours.weights, results[0].weights, rtol=1e-5, atol=1e-6)
        assert ours.weights["net.2.weight_mask"].sum() < ours.weights["net.2.weight_mask"].numel()


class Editing(Base):
    """Edits a parameter in a step in one of many ways."""

    def __init__(self, edit: Callable[[Any], None], training: bool = True) -> None:
        super().__init__()
        self.edit, self.in_training = edit, training
        self.layer = nn.Linear(6, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training == self.in_training:
            self.edit(self)
        return F.mse_loss(self.layer(x).squeeze(-1), y)


def _no_grad(function: Callable[[Any], Any]) -> Callable[[Any], None]:
    def edit(module: Any) -> None:
        with torch.no_grad():
            function(module)

    return edit


EDITS: dict[str, Callable[[Any], Any]] = {
    "mul_": _no_grad(lambda m: m.layer.weight.mul_(0.5)),
    "item assignment": _no_grad(lambda m: m.layer.weight.__setitem__((0, 0), 1.0)),
    "init": lambda m: nn.init.ones_(m.layer.weight),
    "view": _no_grad(lambda m: m.layer.weight.view(-1)[:2].zero_()),
    "data": lambda m: m.layer.weight.data.clamp_(-0.1, 0.1),
    "out": _no_grad(lambda m: torch.add(m.layer.bias, 1.0, out=m.layer.bias)),
    "foreach": _no_grad(lambda m: torch._foreach_mul_([m.layer.weight, m.layer.bias], 0.9)),
    "parameters": _no_grad(lambda m: [p.mul_(0.9) for p in m.parameters()]),
}


def check_edits_in_a_compiled_step_are_refused() -> None:
    for name, edit in EDITS.items():
        try:
            _raises(
                LostEditError, lambda edit=edit: fit(thunder("zero3"), Editing(edit), vectors(), **SHORT), "in place"
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _assign(module: Any) -> None:
    module.layer.weight.data = torch.zeros(1, 6)


def check_new_data_in_a_step_is_refused() -> None:
    """Also where parameters are whole: what a step computes with is not the parameter itself."""
    for kind in ("ddp", "zero3"):
        for mode in ("step", "off"):
            editing = Editing(_assign)
            strategy = thunder(kind, compile=mode)
            _raises(LostEditError, lambda m=editing, s=strategy: fit(s, m, vectors(), **SHORT), "new data")


def check_edits_in_an_eager_step_are_refused() -> None:
    for name, edit in EDITS.items():
        try:
            _raises(
                LostEditError,
                lambda edit=edit: fit(thunder("zero3", compile="off"), Editing(edit), vectors(), **SHORT),
                "`bias`" if name == "out" else "`weight`",
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_edits_in_evaluation_are_refused() -> None:
    for mode in ("step", "off"):
        module = Editing(EDITS["mul_"], training=False)
        _raises(LostEditError, lambda mode=mode, module=module: fit(thunder("zero3", compile=mode), module, vectors()))


def check_edits_in_a_ddp_step_are_kept() -> None:
    """Every rank has the whole parameter, so that an edit in the step does what it does in eager PyTorch."""

    def scale(module: Any) -> None:
        with torch.no_grad():
            module.layer.bias.mul_(0.5)

    results = []
    for strategy in ("ddp_find_unused_parameters_true", thunder("ddp"), thunder("ddp", compile="off")):
        torch.manual_seed(1)
        results.append(fit(strategy, Editing(scale), vectors(), **SHORT))
    for result in results[1:]:
        assert_equal_results(result, results[0])


def check_lists_of_parameters_are_refused() -> None:
    class Listed(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 1))
            self.all_weights = [self.net.weight, self.net.bias]

    class InDictionary(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 1))
            self.by_name = {"weight": self.net.weight}

    class Nested(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 1))
            self.groups = [{"params": [self.net.weight], "lr": 0.1}]

    for cls in (Listed, InDictionary, Nested):
        attribute = {"Listed": "all_weights", "InDictionary": "by_name", "Nested": "groups"}[cls.__name__]
        _raises(
            ValueError, lambda cls=cls: fit(thunder("zero3"), cls(), vectors(), **SHORT),
            f"`{attribute}`", "ParameterList",
        )  # fmt: skip


def check_lazy_and_scripted_modules_are_refused() -> None:
    _raises(TypeError, lambda: fit(thunder("zero3"), Regression(nn.LazyLinear(1)), vectors(), **SHORT), "lazy")
    scripted = torch.jit.script(nn.Linear(6, 1))
    _raises(TypeError, lambda: fit(thunder("zero3"), Regression(scripted), vectors(), **SHORT), "TorchScript")


def check_embeddings_that_cannot_be_right_are_refused() -> None:
    for option in ({"max_norm": 0.1}, {"sparse": True}):
        module = Regression(nn.Linear(6, 1))
        module.embedding = nn.Embedding(4, 6, **option)
        words = ("`embedding`", "max_norm=0.1" if "max_norm" in option else "sparse=True")
        _raises(TypeError, lambda module=module: fit(thunder("zero3"), module, vectors(), **SHORT), *words)
