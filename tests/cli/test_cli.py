"""LightningCLI: every option of our strategies from YAML and from the command line."""

import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_thunder_strategy as lts
from lightning_thunder_strategy.executors.eager import EagerExecutor
from lightning_thunder_strategy.precision.recipe import resolve_recipe
from lightning_thunder_strategy.strategies.options import Communication

PACKAGE = "lightning_thunder_strategy"


@dataclass(frozen=True)
class Renames(lts.Transform):
    """A user's pass with options."""

    prefix: str = "x"
    count: int = 1


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py"])


def cli(*args: str, **options: Any) -> LightningCLI:
    """Parse ``args`` and make model and Trainer, without running anything."""
    return LightningCLI(
        BoringModel,
        run=False,
        args=["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", *args],
        save_config_callback=None,
        seed_everything_default=False,
        **options,
    )


def written(tmp_path: Path, strategy: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return str(path)


def printed(*args: str) -> str:
    """What ``--print_config`` prints."""
    output = StringIO()
    with redirect_stdout(output), pytest.raises(SystemExit) as ended:
        cli(*args, "--print_config")
    assert ended.value.code == 0
    return output.getvalue()


def error_of(capsys: pytest.CaptureFixture, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli(*args)
    assert ended.value.code == 2
    return capsys.readouterr().err


EVERY_OPTION = {
    "sharding": "zero2",
    "executors": ["inductor", "eager"],
    "transforms": [{"class_path": "tests.cli.test_cli.Renames", "init_args": {"prefix": "y", "count": 3}}],
    "compile": {
        "mode": "forward", "fullgraph": True, "dynamic": True, "cudagraphs": False, "on_error": "raise",
        "eager_random": True, "fuel": 50,
    },
    "compile_optimizer": "auto",
    "unshard_on_teardown": True,
    "state_dict_type": "sharded",
    "async_save": True,
    "report": True,
    "broadcast_buffers": False,
    "replicas": 2,
    "bucket_size_mb": 12.5,
    "reduce_dtype": "bfloat16",
    "prefetch": 2,
    "tensor_parallel_size": 1,  # not allowed together with replicas
    "plan": "auto",
    "in_flight_mb": 64.0,
    "nonfinite_gradients": "raise",
    "process_group_backend": "gloo",
    "timeout": "0:07:30",
    "start_method": "spawn",
}  # fmt: skip


def assert_every_option(strategy: Any) -> None:
    assert type(strategy) is lts.ThunderFSDPStrategy
    options = strategy._engine.options
    assert strategy._engine.parallelism == "zero2"
    assert options.executors == ["inductor", "eager"]
    assert options.transforms == (Renames("y", 3),)
    assert strategy.compile_config == lts.CompileConfig(
        mode="forward", fullgraph=True, dynamic=True, cudagraphs=False, on_error="raise", eager_random=True, fuel=50
    )
    assert (options.unshard_on_teardown, options.state_dict_type, options.report) == (True, "sharded", True)
    assert options.async_save is True
    assert options.compile_optimizer == "auto"
    assert options.nonfinite_gradients == "raise"
    assert strategy._engine.replicas == 2
    assert strategy._engine.communication == Communication(12.5, "bfloat16", 2, 64.0)
    assert strategy._broadcast_buffers is False
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(minutes=7, seconds=30)
    assert strategy._start_method == "spawn"


def test_executors_have_options_of_their_own(tmp_path: Path) -> None:
    mine = {"class_path": f"{PACKAGE}.executors.SdpaExecutor", "init_args": {"backend": "math"}}
    tuned = {
        "class_path": f"{PACKAGE}.executors.InductorExecutor",
        "init_args": {"mode": "max-autotune", "options": {"epilogue_fusion": False}},
    }
    options = {"executors": [mine, "chunked_loss", tuned, "eager"]}
    config = written(tmp_path, {"class_path": f"{PACKAGE}.ThunderStrategy", "init_args": options})
    found = cli("--config", config).trainer.strategy._engine.options.executors
    inductor = lts.executors.InductorExecutor("max-autotune", {"epilogue_fusion": False})
    assert found == [lts.executors.SdpaExecutor("math"), "chunked_loss", inductor, "eager"]
    assert yaml.safe_load(printed("--config", config))["trainer"]["strategy"]["init_args"]["executors"] == [
        mine, "chunked_loss", tuned, "eager",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["block", 4.5])
def test_passes_have_options_of_their_own(tmp_path: Path, policy: Any) -> None:
    mine = {"class_path": f"{PACKAGE}.ActivationCheckpointing", "init_args": {"policy": policy, "blocks": ["*.h.*"]}}
    config = written(tmp_path, {"class_path": f"{PACKAGE}.ThunderStrategy", "init_args": {"transforms": [mine]}})
    found = cli("--config", config).trainer.strategy._engine.options.transforms
    assert list(found) == [lts.ActivationCheckpointing(policy, ["*.h.*"])]


def test_every_option_round_trips_through_print_config(tmp_path: Path) -> None:
    config = written(tmp_path, {"class_path": f"{PACKAGE}.ThunderFSDPStrategy", "init_args": EVERY_OPTION})
    assert_every_option(cli("--config", config).trainer.strategy)
    text = printed("--config", config)
    assert yaml.safe_load(text)["trainer"]["strategy"]["init_args"] == EVERY_OPTION
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert printed("--config", str(again)) == text
    assert_every_option(cli("--config", str(again)).trainer.strategy)


def test_plans_of_tensor_parallelism_from_yaml(tmp_path: Path) -> None:
    plan = {"*.attn.qkv": "colwise", "*.proj": "rowwise"}
    options = {"tensor_parallel_size": 2, "plan": plan}
    for name, parallelism in (("ThunderTPStrategy", "tp"), ("ThunderFSDPStrategy", "zero3")):
        config = written(tmp_path, {"class_path": f"{PACKAGE}.{name}", "init_args": options})
        engine = cli("--config", config).trainer.strategy._engine
        assert engine.parallelism == parallelism and (engine.tensor.size, engine.tensor.plan) == (2, plan)
        init_args = yaml.safe_load(printed("--config", config))["trainer"]["strategy"]["init_args"]
        assert {key: init_args[key] for key in options} == options


@pytest.mark.parametrize("name", ["ThunderStrategy", "ThunderDDPStrategy", "ThunderFSDPStrategy", "ThunderTPStrategy"])
def test_defaults_round_trip(tmp_path: Path, name: str) -> None:
    text = printed("--config", written(tmp_path, {"class_path": f"{PACKAGE}.{name}"}))
    again = tmp_path / "again.yaml"
    again.write_text(text)
    strategy = cli("--config", str(again)).trainer.strategy
    default = getattr(lts, name)()
    assert strategy._engine.options == default._engine.options
    assert strategy._engine.parallelism == default._engine.parallelism
    init_args = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]
    assert init_args["executors"] == "auto"
    assert init_args["compile"] == "step"


def test_every_option_of_the_constructor_is_printed(tmp_path: Path) -> None:
    text = printed("--config", written(tmp_path, {"class_path": f"{PACKAGE}.ThunderFSDPStrategy"}))
    assert yaml.safe_load(text)["trainer"]["strategy"]["init_args"].keys() == EVERY_OPTION.keys()


@pytest.mark.parametrize("mode", ["step", "forward", "submodules", "off"])
def test_compile_is_a_word_or_a_mapping(tmp_path: Path, mode: str) -> None:
    for value in (mode, {"mode": mode}):
        strategy = {"class_path": f"{PACKAGE}.ThunderStrategy", "init_args": {"compile": value}}
        assert cli("--config", written(tmp_path, strategy)).trainer.strategy.compile_config == lts.CompileConfig(mode)


def test_an_executor_can_be_given_by_class(tmp_path: Path) -> None:
    executor = {"class_path": f"{PACKAGE}.executors.eager.EagerExecutor"}
    strategy = {"class_path": f"{PACKAGE}.ThunderStrategy", "init_args": {"executors": ["inductor", executor]}}
    first, second = cli("--config", written(tmp_path, strategy)).trainer.strategy._engine.options.executors
    assert first == "inductor"
    assert type(second) is EagerExecutor


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("thunder", lts.ThunderStrategy),
        ("thunder_ddp", lts.ThunderDDPStrategy),
        ("thunder_fsdp", lts.ThunderFSDPStrategy),
    ],
)
def test_registered_names_work_in_yaml_and_on_the_command_line(tmp_path: Path, name: str, cls: type) -> None:
    assert type(cli(f"--trainer.strategy={name}").trainer.strategy) is cls
    assert type(cli("--config", written(tmp_path, name)).trainer.strategy) is cls


def test_short_class_names_work_once_the_package_is_imported(tmp_path: Path) -> None:
    strategy = {"class_path": "ThunderFSDPStrategy", "init_args": {"sharding": "zero2"}}
    assert type(cli("--config", written(tmp_path, strategy)).trainer.strategy) is lts.ThunderFSDPStrategy
    made = cli(
        "--trainer.strategy=ThunderFSDPStrategy", "--trainer.strategy.sharding=zero2",
        "--trainer.strategy.executors=[eager]", "--trainer.strategy.compile.mode=forward",
    ).trainer.strategy  # fmt: skip
    assert type(made) is lts.ThunderFSDPStrategy
    assert (made._engine.parallelism, made._engine.options.executors) == ("zero2", ["eager"])
    assert made.compile_config.mode == "forward"


def test_options_on_the_command_line_change_those_of_the_file(tmp_path: Path) -> None:
    config = written(tmp_path, {"class_path": f"{PACKAGE}.ThunderFSDPStrategy", "init_args": {"executors": ["eager"]}})
    strategy = cli("--config", config, "--trainer.strategy.compile=off", "--trainer.strategy.report=true")
    options = strategy.trainer.strategy._engine.options
    assert (options.executors, options.compile_config.mode, options.report) == (["eager"], "off", True)


def test_help_lists_every_option_with_its_description() -> None:
    output = StringIO()
    with redirect_stdout(output), pytest.raises(SystemExit):
        cli("--trainer.strategy.help=ThunderFSDPStrategy")
    text = re.sub(r"\s+", " ", output.getvalue())
    for option in EVERY_OPTION:
        assert f"--trainer.strategy.{option}" in text
    assert "gathers a parameter again in the backward" in text
    assert "names in priority order" in text


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("compile", "everything", ["compile", "everything", "step", "submodules"]),
        ("state_dict_type", "half", ["state_dict_type", "half", "full", "sharded"]),
        ("shardings", "zero3", ["shardings"]),
        ("timeout", "soon", ["timeout", "soon"]),
        ("report", "perhaps", ["report", "perhaps"]),
    ],
)
def test_a_bad_value_is_a_readable_error(
    tmp_path: Path, capsys: pytest.CaptureFixture, option: str, value: str, words: list[str]
) -> None:
    strategy = {"class_path": f"{PACKAGE}.ThunderFSDPStrategy", "init_args": {option: value}}
    text = error_of(capsys, "--config", written(tmp_path, strategy))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executors": ["nvfuzer"]}, "executors: 'nvfuzer' is not a known executor"),
        ({"prefetch": -1}, "prefetch=-1 is not allowed: give how many gathers start early, 0 or more."),
        ({"replicas": 0}, "replicas=0 is not allowed"),
        ({"compile": "off", "reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16' is a property of compiled programs"),
    ],
)
def test_what_a_constructor_refuses_is_an_error_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, options: dict, words: str
) -> None:
    """Values that parse, and that only the strategy knows to be wrong: one line, no traceback."""
    config = written(tmp_path, {"class_path": f"{PACKAGE}.ThunderFSDPStrategy", "init_args": options})
    text = error_of(capsys, "--config", config)
    assert f"error: ThunderFSDPStrategy: {words}" in " ".join(text.split()) and "Traceback" not in text, text
    with pytest.raises(ValueError, match=re.escape(words)):
        cli("--config", config, parser_kwargs={"exit_on_error": False})
    if "compile" not in options:
        with pytest.raises(ValueError, match=re.escape(words.split(":")[0])):
            lts.ThunderFSDPStrategy(**options)


def plugin(**options: Any) -> dict[str, Any]:
    return {"strategy": "thunder", "plugins": [{"class_path": f"{PACKAGE}.ThunderPrecision", "init_args": options}]}


def strategy(**options: Any) -> dict[str, Any]:
    return {"strategy": {"class_path": f"{PACKAGE}.ThunderFSDPStrategy", "init_args": options}}


def made(name: str, **options: Any) -> list[dict[str, Any]]:
    return [{"class_path": f"{PACKAGE}.{name}", "init_args": options}]


MODES = "choose one of 'step', 'forward', 'submodules', 'off'."
IN_ONE_LINE = [
    (strategy(sharding="zero4"), "ThunderFSDPStrategy: sharding='zero4' is not allowed: choose one of 'zero1',"),
    (strategy(compile={"mode": "everything"}), f"CompileConfig: mode='everything' is not allowed: {MODES}"),
    (strategy(compile={"dynamic": "so"}), "CompileConfig: dynamic='so' is not allowed: choose None, True or False."),
    (strategy(compile={"fuel": -1}), "CompileConfig: fuel=-1 is not allowed: give a number of operations"),
    (strategy(compile={"modes": 1}), "CompileConfig: 'modes' is an unexpected keyword argument: choose from mode,"),
    (strategy(compile=[1]), f"ThunderFSDPStrategy: compile=[1] is not allowed: {MODES}"),
    (strategy(executors="triton"), "ThunderFSDPStrategy: executors='triton' is not allowed: give"),
    (strategy(executors=made("executors.SdpaExecutor", backend="maths")), "SdpaExecutor.backend='maths' is not"),
    (strategy(transforms=made("QuantizeWeights", storage="int3")), "QuantizeWeights: storage='int3' is not known:"),
    (plugin(base="16-true"), "ThunderPrecision: base='16-true' is not allowed: choose one of 'bf16-true',"),
    (plugin(precision="fp7"), "ThunderPrecision: precision='fp7' is not allowed: choose one of 'fp8', 'fp8-rowwise'"),
    (plugin(precision={"input": "e9m9"}), "Recipe: input='e9m9' is not allowed: choose one of 'e4m3', 'e5m2', "),
    (plugin(precision={"hadamard": "no way"}), "Recipe: hadamard='no way' is not allowed: choose True or False."),
    (plugin(precision={"min_features": 0}), "Recipe: min_features=0 is not allowed: choose a whole number from 1."),
    (plugin(skip=3), "ThunderPrecision: skip=3 is not allowed: give a list of patterns, such as ['*lm_head']."),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "words"), IN_ONE_LINE, ids=[words[:40] for _, words in IN_ONE_LINE])
def test_a_bad_value_at_any_depth_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, trainer: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    text = error_of(capsys, "--config", str(path))
    line = text.rstrip("\n").rpartition("\nerror: ")[2]
    assert words in line and "\n" not in line and "Traceback" not in text, text[-2000:]


@pytest.mark.parametrize("name", [name for name in lts.__all__ if name.endswith("Strategy")])
def test_every_strategy_refuses_on_the_command_line(name: str, capsys: pytest.CaptureFixture) -> None:
    text = error_of(capsys, f"--trainer.strategy={name}", "--trainer.strategy.executors=[nvfuzer]")
    assert f"error: {name}: executors: 'nvfuzer' is not a known executor" in " ".join(text.split())


def test_a_model_trains_from_a_config(tmp_path: Path) -> None:
    strategy = {"class_path": f"{PACKAGE}.ThunderStrategy", "init_args": {"executors": ["eager"]}}
    made = cli("--config", written(tmp_path, strategy), "--trainer.fast_dev_run=true")
    made.trainer.fit(made.model)
    assert isinstance(made.trainer, L.Trainer)
    assert lts.explain(made.trainer).to_dict()["steps"]["training_step"]["graphs"] == 1


PLUGINS = [
    {"precision": "fp8-rowwise", "base": "bf16-mixed", "skip": ["*lm_head", "*.gate"]},
    {
        "precision": {"input": "e4m3", "weight": "e5m2", "gradient": "e5m2", "scaling": "row",
                      "power_of_two_scales": True, "scale_up": False, "gradient_rounding": "stochastic",
                      "hadamard": False, "min_features": 64, "amax_history_len": 0},
        "base": "32-true", "skip": [],
    },
    {"precision": "fp8-delayed", "base": "bf16-true", "skip": ["*lm_head"]},
]  # fmt: skip


@pytest.mark.parametrize("options", PLUGINS)
def test_precision_round_trips_through_print_config(tmp_path: Path, options: dict) -> None:
    path = tmp_path / "config.yaml"
    plugin = {"class_path": f"{PACKAGE}.ThunderPrecision", "init_args": options}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": "thunder", "plugins": [plugin]}}))
    text = printed("--config", str(path))
    assert yaml.safe_load(text)["trainer"]["plugins"][0]["init_args"] == options
    again = tmp_path / "again.yaml"
    again.write_text(text)
    found = cli("--config", str(again)).trainer.precision_plugin
    assert type(found) is lts.ThunderPrecision
    assert (found.precision, list(found.passes[0].skip)) == (options["base"], options["skip"])
    expected = options["precision"]
    assert found.recipe == (resolve_recipe(expected) if isinstance(expected, str) else lts.Recipe(**expected))


def test_precision_on_the_command_line(capsys: pytest.CaptureFixture) -> None:
    arguments = ["--trainer.strategy=thunder", f"--trainer.plugins={PACKAGE}.ThunderPrecision"]
    found = cli(*arguments, "--trainer.plugins.init_args.precision=nvfp4").trainer.precision_plugin
    assert found.recipe == resolve_recipe("nvfp4")
    assert "fp7" in error_of(capsys, *arguments, "--trainer.plugins.init_args.precision=fp7")
