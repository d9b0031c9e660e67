"""Options are checked when the strategy is made; errors name the option, the value and what is allowed."""

import importlib
import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric
from tests.strategies.modules import Classifier
from tests.strategies.training import classification_data, fit, make_trainer, thunder

STRATEGIES = [lts.ThunderStrategy, lts.ThunderDDPStrategy, lts.ThunderFSDPStrategy]

WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "compile": ({"compile": "graph"}, ("compile", "'graph'", "'step'", "'forward'", "'submodules'", "'off'")),
    "compile type": ({"compile": True}, ("compile", "True", "'step'")),
    "executors name": ({"executors": ["inductr"]}, ("executors", "'inductr'", "inductor", "eager")),
    "executors text": ({"executors": "inductor"}, ("executors", "'inductor'", '["inductor"]')),
    "executors twice": ({"executors": ["eager", "eager"]}, ("executors", "'eager' appears twice")),
    "executors order": ({"executors": ["eager", "inductor"]}, ("executors", "'eager'", "last")),
    "executors number": ({"executors": 3}, ("executors", "3")),
    "executors item": ({"executors": [3]}, ("executors", "3")),
    "transforms": ({"transforms": [print]}, ("transforms", "print", "Transform")),
    "transforms single": ({"transforms": 3}, ("transforms", "3", "Transform")),
    "state_dict_type": ({"state_dict_type": "shard"}, ("state_dict_type", "'shard'", "'full'", "'sharded'")),
    "compile_optimizer": ({"compile_optimizer": True}, ("compile_optimizer", "True", "'auto'", "False")),
    "report": ({"report": "yes"}, ("report", "'yes'", "True", "False")),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options, parts", WRONG.values(), ids=WRONG)
def test_a_bad_value_is_an_error_naming_option_value_and_choices(strategy: Any, options: dict, parts: tuple) -> None:
    with pytest.raises(ValueError) as caught:
        strategy(**options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


DISTRIBUTED_WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "start_method": ({"start_method": "thread"}, ("start_method", "'thread'", "'popen'", "'spawn'")),
    "timeout": ({"timeout": 30}, ("timeout", "30", "timedelta")),
    "process_group_backend": ({"process_group_backend": "smoke"}, ("process_group_backend", "'smoke'", "'gloo'")),
    "broadcast_buffers": ({"broadcast_buffers": "no"}, ("broadcast_buffers", "'no'", "True")),
    "bucket_size_mb": ({"bucket_size_mb": "layer"}, ("bucket_size_mb", "'layer'", "'block'")),
    "bucket_size_mb number": ({"bucket_size_mb": -1}, ("bucket_size_mb", "-1", "'block'")),
    "reduce_dtype": ({"reduce_dtype": "bf16"}, ("reduce_dtype", "'bf16'", "'bfloat16'")),
    "reduce_dtype alone": (
        {"reduce_dtype": "float32", "compile": "off"},
        ("reduce_dtype", "'float32'", "compile='off'"),
    ),
    "nonfinite_gradients": ({"nonfinite_gradients": "stop"}, ("nonfinite_gradients", "'stop'", "'ignore'", "'raise'")),
    "in_flight_mb": ({"in_flight_mb": "all"}, ("in_flight_mb", "'all'", "None")),
}


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("options, parts", DISTRIBUTED_WRONG.values(), ids=DISTRIBUTED_WRONG)
def test_a_bad_value_of_a_distributed_option_is_an_error(strategy: Any, options: dict, parts: tuple) -> None:
    with pytest.raises(ValueError) as caught:
        strategy(**options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("sharding", "zero4", "'zero1', 'zero2'"),
        ("prefetch", -1, "0 or more"),
        ("replicas", 0, "divisor"),
        ("unshard_on_teardown", "no", "'auto'"),
    ],
)
def test_a_bad_value_of_an_fsdp_option_is_an_error(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}={value!r}.*{allowed}"):
        lts.ThunderFSDPStrategy(**{option: value})


CONFIG_WRONG = {
    "mode": "whole", "fullgraph": 1, "dynamic": "yes", "cudagraphs": None, "on_error": "ignore", "eager_random": "on",
}  # fmt: skip


@pytest.mark.parametrize("option", CONFIG_WRONG)
def test_a_bad_value_of_the_compile_config_is_an_error(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}={CONFIG_WRONG[option]!r}"):
        lts.CompileConfig(**{option: CONFIG_WRONG[option]})


def test_unknown_options_are_refused() -> None:
    for strategy in STRATEGIES:
        with pytest.raises(TypeError, match="cudagraphs"):
            strategy(cudagraphs=True)


def test_cuda_graphs_need_the_inductor_executor() -> None:
    with pytest.raises(ValueError, match="cudagraphs=True needs the 'inductor' executor"):
        thunder(compile=lts.CompileConfig(cudagraphs=True))


@pytest.mark.parametrize("value", ["step", "forward", "submodules", "off"])
def test_a_mode_is_short_for_a_config(value: Any) -> None:
    assert thunder(compile=value).compile_config == lts.CompileConfig(mode=value)
    assert thunder(compile=lts.CompileConfig(mode=value, dynamic=True)).compile_config.dynamic is True


@pytest.mark.parametrize("registry, namespace", [(StrategyRegistry, lts), (STRATEGY_REGISTRY, fabric)])
def test_names_are_registered_with_trainer_and_fabric(registry: Any, namespace: Any) -> None:
    for name, cls in (
        ("thunder", "ThunderStrategy"),
        ("thunder_ddp", "ThunderDDPStrategy"),
        ("thunder_fsdp", "ThunderFSDPStrategy"),
    ):
        assert type(registry.get(name)) is getattr(namespace, cls)
        assert registry[name]["description"]


def test_a_registered_name_selects_the_strategy() -> None:
    trainer = make_trainer("thunder")
    assert type(trainer.strategy) is lts.ThunderStrategy
    assert type(make_trainer("THUNDER").strategy) is lts.ThunderStrategy  # Lightning lowers names


def test_importing_again_and_reloading_is_fine() -> None:
    code = (
        "import importlib, sys, lightning_thunder_strategy as lts; importlib.reload(lts);"
        "importlib.reload(sys.modules['lightning_thunder_strategy.strategies.trainer']);"
        "importlib.reload(lts); import lightning as L;"
        "t = L.Trainer(accelerator='cpu', strategy='thunder', logger=False);"
        "assert type(t.strategy) is lts.ThunderStrategy, type(t.strategy);"
        "t = L.Trainer(accelerator='cpu', strategy=lts.ThunderStrategy(), logger=False)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    importlib.import_module("lightning_thunder_strategy")


def test_a_strategy_of_the_other_namespace_gets_lightnings_error() -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        make_trainer(fabric.ThunderStrategy())
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Fabric(accelerator="cpu", devices=1, strategy=thunder())


def test_more_devices_than_one_are_refused_with_the_strategies_that_take_them() -> None:
    with pytest.raises(ValueError, match=r"devices=2.*ThunderStrategy.*ThunderDDPStrategy.*ThunderFSDPStrategy"):
        make_trainer(thunder(), devices=2)
    with pytest.raises(ValueError, match="devices=2"):
        make_trainer("thunder", devices=2)


def test_a_module_compiled_by_the_user_is_refused_with_the_fix() -> None:
    module = torch.compile(Classifier(), backend="eager")
    trainer = make_trainer(thunder())
    for stage in (trainer.fit, trainer.validate):
        with pytest.raises(TypeError, match=r"Classifier is already compiled.*pass the plain module"):
            stage(module, classification_data())


def test_a_submodule_compiled_by_the_user_trains() -> None:
    class Compiled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.compile(backend="eager")

    run = fit(Compiled, thunder())
    assert run.step()["mode"] == "step" and run.step()["graphs"] >= 1
    assert list(run.module.state_dict()) == list(Classifier().state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not allowed: give a divisor"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True is not allowed"),
        ({"plan": "automatic", "tensor_parallel_size": 2}, "plan='automatic' is not allowed: give 'auto', or entries"),
        ({"plan": {"a": "cols"}, "tensor_parallel_size": 2}, "'cols' is not an entry that is known. Known are: col"),
        ({"plan": {"a": "colwise"}}, "plan is given with tensor_parallel_size=1"),
        ({"tensor_parallel_size": 2, "sharding": "zero1"}, "sharding='zero1' is not allowed with tensor_"),
        ({"tensor_parallel_size": 2, "replicas": 2}, "replicas=2 is not allowed with tensor_parallel_size=2"),
    ],
)
@pytest.mark.parametrize("namespace", [lts, lts.fabric])
def test_tensor_parallel_options(namespace: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        namespace.ThunderFSDPStrategy(**options)
    if not {"sharding", "replicas"} & set(options) and "tensor_parallel_size" in options:
        with pytest.raises(ValueError, match=message):
            namespace.ThunderTPStrategy(**options)
