"""Checks of setup, teardown, errors, later stages and callbacks on two ranks."""

import copy
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.strategies import engine as engines
from tests.distributed.checkpoints import _folder
from tests.distributed.models import MLP, Regression, Smooth, make, vectors
from tests.distributed.parity import EXACT, _float64
from tests.distributed.training import assert_equal_results, fit, fit_case, loader, thunder, trainer

SHORT: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}


def _rank() -> int:
    return torch.distributed.get_rank()


def _is_the_users_own(module: nn.Module, sharded: bool) -> None:
    """Classes, attributes and methods are what the user made; parameters are plain, or sharded."""
    assert type(module).__module__ == "tests.distributed.models", type(module)
    assert [type(layer) for layer in module.net][:2] == [nn.Linear, nn.Tanh]
    for child in module.modules():
        added = {"log", "log_dict", "_compiled_call_impl", "training_step", "forward"} & vars(child).keys()
        assert not any(vars(child)[name] for name in added), added
        for name, parameter in child._parameters.items():
            assert getattr(child, name) is parameter
            assert isinstance(parameter, DTensor) == sharded
            assert isinstance(parameter, nn.Parameter)


@contextmanager
def _no_collectives() -> Iterator[list[str]]:
    """Notes every collective of torch.distributed that is called meanwhile."""
    names = (
        "all_gather_into_tensor", "all_reduce", "broadcast", "barrier", "all_gather", "scatter", "all_gather_object",
        "broadcast_object_list", "reduce_scatter_tensor",
    )  # fmt: skip
    called: list[str] = []
    before = {name: getattr(torch.distributed, name) for name in names}

    def noting(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return before[name](*args, **kwargs)

        return call

    full_tensor = DTensor.full_tensor
    try:
        for name in names:
            setattr(torch.distributed, name, noting(name))
        DTensor.full_tensor = noting_full = noting_method(full_tensor, called)
        yield called
    finally:
        del noting_full
        DTensor.full_tensor = full_tensor
        for name, function in before.items():
            setattr(torch.distributed, name, function)


def noting_method(method: Callable, called: list[str]) -> Callable:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(method.__name__)
        return method(self, *args, **kwargs)

    return call


# ---------------------------------------------------------------------------------------------------------- teardown


def check_after_fit_the_module_is_plain_again() -> None:
    for kind in ("ddp", "zero3"):
        result = fit_case(thunder(kind), "smooth", **SHORT)
        _is_the_users_own(result.module, sharded=False)
        pickled = pickle.loads(pickle.dumps(result.module.net))
        copied = copy.deepcopy(result.module)
        x = torch.ones(2, 6)
        expected = result.module(x)
        assert torch.equal(pickled(x), expected) and torch.equal(copied(x), expected)
        with torch.no_grad():
            copied.net[0].weight.zero_()
        assert torch.equal(result.module(x), expected)
        torch.testing.assert_close(dict(result.module.state_dict()), result.weights, rtol=0, atol=0)


def _messages(function: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(item.message) for item in caught if item.category is lts.CompileWarning]


def check_unshard_on_teardown() -> None:
    limit = engines._AUTO_UNSHARD_LIMIT
    for unshard, allowed, sharded in (
        (True, 1, False),
        (False, limit, True),
        ("auto", limit, False),
        ("auto", 1, True),
    ):
        modules = []
        try:
            engines._AUTO_UNSHARD_LIMIT = allowed
            said = _messages(
                lambda unshard=unshard, modules=modules: modules.append(
                    fit_case(thunder("zero3", unshard_on_teardown=unshard), "smooth", **SHORT).module
                )
            )
        finally:
            engines._AUTO_UNSHARD_LIMIT = limit
        _is_the_users_own(modules[0], sharded)
        about = [message for message in said if "stay sharded" in message]
        assert len(about) == (1 if sharded and _rank() == 0 else 0), said
        if about:
            assert f"unshard_on_teardown={unshard!r}" in about[0]


@_float64
def check_training_goes_on_from_parameters_that_stayed_sharded() -> None:
    """Two fits of one epoch, with new optimizers, in each way to leave the parameters between them."""
    results = []
    for strategy in (
        lambda: "ddp", lambda: thunder("ddp"), lambda: thunder("zero3"),
        lambda: thunder("zero3", unshard_on_teardown=False),
    ):  # fmt: skip
        module, data = make("smooth")
        first = fit(strategy(), module, data, **SHORT)
        results.append((first, fit(strategy(), module, data, **SHORT)))
    module, data = make("smooth")
    first = fit(thunder("zero3", unshard_on_teardown=False), module, data, **SHORT)
    results.append((first, fit(thunder("ddp"), module, data, **SHORT)))
    for first, second in results[1:]:
        assert_equal_results(first, results[0][0], **EXACT)
        assert_equal_results(second, results[0][1], **EXACT)


@_float64
def check_one_trainer_for_several_fits_and_stages() -> None:
    """validate, fit, test, predict and fit again in one Trainer, with two validation dataloaders."""

    class Stages(Smooth):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch) * (1 + dataloader_idx), sync_dist=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    def stages(strategy: Any) -> list[Any]:
        torch.manual_seed(3)
        module, data = Stages(), vectors()
        made = trainer(strategy, max_epochs=1)
        found: list[Any] = [made.validate(module, [loader(data), loader(data)], verbose=False)]
        made.fit(module, loader(data), [loader(data), loader(data)])
        found.append({name: value.clone() for name, value in made.callback_metrics.items()})
        found.append(made.test(module, loader(data), verbose=False))
        found.append(made.predict(module, loader(data)))
        made.fit_loop.max_epochs = 2
        made.fit(module, loader(data), [loader(data), loader(data)])
        found.append(module.state_dict())
        return found

    theirs = stages("ddp")
    for kind in ("ddp", "zero3"):
        torch.testing.assert_close(stages(thunder(kind)), theirs, **EXACT)


def check_predictions_come_in_the_order_of_the_data() -> None:
    module, data = make("smooth")
    expected = module(data.tensors[0][_rank() :: 2])
    rows = [row for row, _ in data]
    found = torch.cat(trainer(thunder("zero3")).predict(module, loader(rows)))
    torch.testing.assert_close(found, expected.detach())
    _is_the_users_own(module, sharded=False)


# ------------------------------------------------------------------------------------------------------------ errors


class Failing(Regression):
    """Raises in a step. In ``models`` by name, as the module that is left is compared with those."""

    __module__ = "tests.distributed.models"

    def __init__(self, error: type[BaseException], where: Callable[[int], bool]) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)))
        self.error, self.where = error, where

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.where(self.global_step):
            raise self.error("on purpose")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def check_an_error_on_all_ranks() -> None:
    """Nothing stays patched, nothing is gathered, and training can start again."""
    for kind in ("ddp", "zero3"):
        for mode in ("step", "off"):
            module = Failing(ValueError, lambda step: step == 2)
            in_teardown = []
            strategy = thunder(kind, compile=mode)
            teardown = strategy.teardown

            def watched(teardown: Callable = teardown, seen: list = in_teardown) -> None:
                with _no_collectives() as called:
                    teardown()
                seen += called

            strategy.teardown = watched
            try:
                fit(strategy, module, vectors(), **SHORT)
            except ValueError as error:
                assert "on purpose" in str(error)
            else:
                raise AssertionError("no error")
            assert in_teardown == [], in_teardown
            _is_the_users_own(module, sharded=kind == "zero3")
            module.where = lambda step: False
            assert len(fit(thunder(kind), module, vectors(), **SHORT).losses) == 3
            _is_the_users_own(module, sharded=False)


def check_an_error_on_one_rank() -> None:
    """The other rank's collective fails after its timeout; neither communicates in teardown or stays patched."""
    module = Failing(ValueError, lambda step: step == 1 and _rank() == 1)
    try:
        fit(thunder("zero3", compile="off"), module, vectors(), **SHORT)
    except Exception as error:
        assert isinstance(error, ValueError if _rank() == 1 else RuntimeError), error
    else:
        raise AssertionError("no error")
    _is_the_users_own(module, sharded=True)
    torch.distributed.destroy_process_group()


def check_keyboard_interrupt() -> None:
    module = Failing(KeyboardInterrupt, lambda step: step == 1)
    handler = signal.getsignal(signal.SIGINT)
    try:
        fit(thunder("zero3"), module, vectors(), **SHORT)
    except (SystemExit, KeyboardInterrupt):
        pass
    else:
        raise AssertionError("not interrupted")
    finally:
        signal.signal(signal.SIGINT, handler)
    _is_the_users_own(module, sharded=True)


# --------------------------------------------------------------------------------------------- ranks, data, callbacks


def check_ranks_and_samplers() -> None:
    """Without a sampler of the user's, each rank sees its own part of the data, and all of it is seen."""
    seen: list[Tensor] = []

    class Looks(Smooth):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch[1])

    for kind in ("ddp", "zero3"):
        seen.clear()
        strategy = thunder(kind)
        made = trainer(strategy, use_distributed_sampler=True, **SHORT)
        assert strategy.is_distributed and made._accelerator_connector.is_distributed
        assert (made.world_size, strategy.world_size, strategy.num_nodes, made.num_nodes) == (2, 2, 1, 1)
        assert made.global_rank == strategy.global_rank == _rank() and strategy.local_rank == _rank()
        assert strategy.is_global_zero == (_rank() == 0) and strategy.root_device == torch.device("cpu")
        data = vectors()
        made.fit(Looks(), DataLoader(data, batch_size=4))
        mine = torch.cat(seen)
        both = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(both, mine)
        assert len(mine) == 12
        assert torch.equal(torch.cat(both).sort().values, data.tensors[1].sort().values)


def check_batch_norm_is_replaced_by_synchronized_layers() -> None:
    """torch has no SyncBatchNorm for the CPU; that it is there, and what it is afterwards, can be seen."""
    for strategy in (thunder("ddp"), thunder("zero3"), thunder("zero3", unshard_on_teardown=False)):
        seen = []

        class Looks(MLP):
            def on_fit_start(self, seen: list = seen) -> None:
                seen.append(type(self.net[1]).__name__)

        module = Looks()
        trainer(strategy, sync_batchnorm=True, max_epochs=0).fit(module, loader(vectors()))
        assert seen == ["SyncBatchNorm"]
        assert isinstance(module.net[1], nn.modules.batchnorm._BatchNorm)
        assert not isinstance(module.net[1], nn.SyncBatchNorm)


def check_ranks_start_from_the_same_weights_whatever_their_seeds() -> None:
    for kind in ("ddp", "zero3"):
        torch.manual_seed(100 + _rank())
        result = fit(thunder(kind), Smooth(), vectors(), **SHORT)
        weight = result.weights["net.0.weight"]
        both = [torch.empty_like(weight) for _ in range(2)]
        torch.distributed.all_gather(both, weight)
        assert torch.equal(*both)


def check_early_stopping_stops_both_ranks() -> None:
    """Each rank would stop at another epoch; together they stop when one wants to."""

    class Stops(Smooth):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            patience = 1 if _rank() == 1 else 5
            self.log("score", float(min(self.current_epoch, patience)))

    ends = {}
    for name, strategy in (("theirs", "ddp"), ("ddp", thunder("ddp")), ("zero3", thunder("zero3"))):
        stopping = EarlyStopping("score", mode="max", patience=1)
        result = fit(strategy, Stops(), vectors(), callbacks=[stopping], max_epochs=7, limit_train_batches=1)
        ends[name] = result.trainer.current_epoch
        assert result.trainer.strategy.reduce_boolean_decision(_rank() == 0, all=True) is False
        assert result.trainer.strategy.reduce_boolean_decision(_rank() == 0, all=False) is True
    assert ends["ddp"] == ends["zero3"] == ends["theirs"] < 7, ends


@_float64
def check_optimizers_that_need_whole_parameters_are_refused() -> None:
    class Chooses(Smooth):
        def __init__(self, optimizer: type) -> None:
            super().__init__()
            self.chosen = optimizer

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.chosen(self.parameters(), lr=0.01)

    for optimizer in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop):
        module = Chooses(optimizer)
        try:
            fit(thunder("zero3"), module, vectors(), **SHORT)
        except TypeError as error:
            assert optimizer.__name__ in str(error) and "ThunderDDPStrategy" in str(error), error
        else:
            raise AssertionError(optimizer)
        assert all(type(layer) in (nn.Linear, nn.Tanh) for layer in module.net)
    torch.manual_seed(3)
    theirs = fit("ddp", Chooses(torch.optim.Adafactor), vectors(), **SHORT)
    torch.manual_seed(3)
    assert_equal_results(fit(thunder("ddp"), Chooses(torch.optim.Adafactor), vectors(), **SHORT), theirs, **EXACT)


@_float64
def check_other_optimizers_equal_ddp() -> None:
    for optimizer in ("NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "ASGD", "Adadelta"):

        class Chooses(Smooth):
            def configure_optimizers(self, optimizer: str = optimizer) -> torch.optim.Optimizer:
                return getattr(torch.optim, optimizer)(self.parameters(), lr=0.01)

        results = []
        for strategy in ("ddp", thunder("zero3", compile="off")):
            torch.manual_seed(3)
            results.append(fit(strategy, Chooses(), vectors(), **SHORT))
        try:
            assert_equal_results(results[1], results[0], **EXACT)
        except AssertionError as error:
            raise AssertionError(f"{optimizer}: {error}") from error


@_float64
def check_weight_averaging() -> None:
    """An average of the weights, used in validation, saved, resumed and left in the module; shards are averaged too."""
    make_callback = lambda: EMAWeightAveraging(decay=0.8)  # noqa: E731
    theirs = fit_case("ddp", "smooth", callbacks=[make_callback()], max_epochs=3)
    for kind in ("ddp", "zero3"):
        ours = fit_case(thunder(kind), "smooth", callbacks=[make_callback()], max_epochs=3)
        torch.testing.assert_close(dict(ours.module.state_dict()), dict(theirs.module.state_dict()), **EXACT)
        torch.testing.assert_close(ours.metrics["val"], theirs.metrics["val"], **EXACT)
    for kind, options in (("ddp", {}), ("zero3", {}), ("zero3", {"state_dict_type": "sharded"})):
        options = {"compile": "off", **options}  # what is saved does not depend on it
        with _folder() as folder:
            saving = [make_callback(), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
            strategy = thunder(kind, **options)
            fit_case(strategy, "smooth", callbacks=saving, max_epochs=2, enable_checkpointing=True)
            path = folder / "epoch=1.ckpt"
            resumed = fit_case(
                thunder(kind, **options), "smooth", callbacks=[make_callback()], max_epochs=3, ckpt_path=path
            )
        torch.testing.assert_close(dict(resumed.module.state_dict()), dict(theirs.module.state_dict()), **EXACT)


@_float64
def check_stochastic_weight_averaging_needs_whole_parameters() -> None:
    options = {"max_epochs": 3, "limit_val_batches": 0}
    theirs = fit_case("ddp", "smooth", callbacks=[StochasticWeightAveraging(0.01, 1)], **options)
    ours = fit_case(thunder("ddp"), "smooth", callbacks=[StochasticWeightAveraging(0.01, 1)], **options)
    torch.testing.assert_close(dict(ours.module.state_dict()), dict(theirs.module.state_dict()), **EXACT)
    with pytest.raises(TypeError, match="StochasticWeightAveraging averages a copy.*EMAWeightAveraging"):
        fit_case(thunder("zero3"), "smooth", callbacks=[StochasticWeightAveraging(0.01, 1)], **options)
