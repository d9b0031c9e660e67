"""Random configurations: they work, or one error names the option; never an error from somewhere inside."""

import inspect
import linecache
import traceback
from contextlib import redirect_stderr
from datetime import timedelta
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningArgumentParser

import lightning_thunder_strategy as lts
from lightning_thunder_strategy import fabric

PACKAGE = Path(lts.__file__).parent
STRATEGIES = [
    *(lts.ThunderStrategy, lts.ThunderDDPStrategy, lts.ThunderFSDPStrategy, lts.ThunderTPStrategy),
    *(fabric.ThunderStrategy, fabric.ThunderDDPStrategy, fabric.ThunderFSDPStrategy, fabric.ThunderTPStrategy),
]
OPTIONS = sorted({option for cls in STRATEGIES for option in inspect.signature(cls).parameters})
WORDS = [
    *("auto", "eager", "inductor", "zero2", "zero3", "step", "forward", "submodules", "off", "full", "sharded"),
    *("popen", "spawn", "fork", "forkserver", "gloo", "nccl", "cpu:gloo,cuda:nccl", "0:10:00", "true", "null", "", "ü"),
    *("$(touch x)", "a: b", "lightning_thunder_strategy.ThunderStrategy", "os.system", "-1", "1e3", "[]", "x" * 300),
]
RECIPE = {
    "input": ["e4m3", "e2m3", "e9m9"],
    "gradient": ["e5m2", "e2m1"],
    "scaling": ["tensor", "row", "mx", "nvfp4", "rows"],
    "power_of_two_scales": [True, "maybe"],
    "gradient_rounding": ["stochastic", "up"],
    "min_features": [1, 256, 0, "many"],
    "inputs": ["e4m3"],
}
PLUGIN = {
    "precision": ["fp8", "mxfp6-e2m3", "fp7"],
    "base": ["bf16-true", "32-true", "16-true"],
    "skip": [[], ["*lm_head"], "lm_head", 3],
}
CONFIG = [*inspect.signature(lts.CompileConfig).parameters, "modes"]
EAGER = "lightning_thunder_strategy.executors.eager.EagerExecutor"

plain = st.one_of(st.sampled_from(WORDS), st.none(), st.booleans(), st.integers(-2, 3), st.floats(allow_nan=False))
classes = st.fixed_dictionaries(
    {"class_path": st.sampled_from([*WORDS, EAGER, "builtins.dict", "torch.nn.Linear", "tests.cli.test_cli.Renames"])},
    optional={"init_args": st.dictionaries(st.sampled_from(["prefix", "count", "mode"]), plain, max_size=2)},
)
values = st.one_of(
    plain,
    st.lists(st.one_of(plain, classes), max_size=3),
    st.dictionaries(st.sampled_from(CONFIG), plain, max_size=3),
    classes,
)
GOOD: dict[str, list[Any]] = {
    "executors": ["auto", ["eager"], []],
    "compile": ["step", "off", {"mode": "forward", "dynamic": True}, {"fullgraph": True}, {"fuel": 3}],
    "transforms": [
        [],
        [{"class_path": "tests.cli.test_cli.Renames", "init_args": {"count": 2}}],
        [{"class_path": "lightning_thunder_strategy.QuantizeWeights", "init_args": {"storage": "nf4"}}],
    ],
    "state_dict_type": ["full", "sharded"],
    "async_save": [True, False],
    "compile_optimizer": ["auto", False],
    "timeout": ["0:01:00", None],
    "sharding": ["zero1", "zero2", "zero3"],
    "start_method": ["popen", "spawn"],
    "replicas": [1, 2],
    "tensor_parallel_size": [1, 2, "auto"],
    "plan": ["auto", {"*.qkv": "colwise", "*.proj": "rowwise"}],
    "bucket_size_mb": ["block", 0, 12.5],
    "reduce_dtype": [None, "float32", "bfloat16"],
    "prefetch": [0, 2],
    "in_flight_mb": [None, 64],
    "nonfinite_gradients": ["ignore", "raise"],
    "unshard_on_teardown": ["auto", True, False],
}


@st.composite
def options(draw: Any) -> dict[str, Any]:
    """Options of a strategy: most of them good, so that the others are reached."""
    names = draw(st.lists(st.sampled_from([*OPTIONS, "shardings"]), max_size=4, unique=True))
    good = {name: st.sampled_from(GOOD[name]) for name in names if name in GOOD}
    return {name: draw(st.one_of(good[name], good[name], values) if name in good else values) for name in names}


@st.composite
def plugin_options(draw: Any) -> dict[str, Any]:
    """Options of ``ThunderPrecision``, most of them good."""
    drawn = draw(st.fixed_dictionaries({}, optional={name: st.sampled_from(PLUGIN[name]) for name in PLUGIN}))
    recipe = st.fixed_dictionaries({}, optional={name: st.sampled_from(RECIPE[name]) for name in RECIPE})
    return {**drawn, "precision": draw(recipe)} if draw(st.booleans()) else drawn


def assert_clear(error: BaseException, names: list[str]) -> None:
    """The error is one of ours, raised on purpose, about one of the options, in few lines."""
    error = behind_unions(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename}:{frame.lineno}"
    assert isinstance(error, (ValueError, TypeError)), f"{error!r} at {place}"
    statement = linecache.getline(frame.filename, frame.lineno).strip()
    ours = Path(frame.filename).is_relative_to(PACKAGE) and statement.startswith("raise ")
    by_python = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
    assert ours or by_python, f"{error!r} at {place}"
    assert by_python or any(name in str(error) for name in names), str(error)
    listed = len(lts.executors.list()) if "Known here:" in str(error) else 0  # a line for each executor
    assert len(str(error).splitlines()) <= 6 + listed, str(error)


def behind_unions(error: BaseException) -> BaseException:
    """jsonargparse collects the errors of all types of a union in one; the last is that of the class."""
    while error.__traceback__ is not None:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        found = last.tb_frame.f_locals.get("exceptions")
        if not found:
            break
        assert str(found[-1]).splitlines()[0] in str(error), "the user can read it"
        error = found[-1]
    return error


@settings(max_examples=10 * settings().max_examples)
@given(st.sampled_from(STRATEGIES), options())
def test_constructors_take_options_or_name_them(strategy: type, given_options: dict[str, Any]) -> None:
    compile_options = given_options.get("compile")
    names = [*given_options, *CONFIG]
    try:
        if isinstance(compile_options, dict) and compile_options.keys() <= set(CONFIG):
            given_options = {**given_options, "compile": lts.CompileConfig(**compile_options)}
        strategy(**given_options)
    except Exception as error:
        assert_clear(error, names)


@lru_cache(maxsize=1)
def parser() -> LightningArgumentParser:
    """What LightningCLI parses the Trainer's options with."""
    made = LightningArgumentParser(exit_on_error=True)
    made.add_lightning_class_args(L.Trainer, "trainer")
    return made


named = st.sampled_from(
    [
        *(f"lightning_thunder_strategy.{cls.__name__}" for cls in STRATEGIES[:4]),
        *("thunder", "thunder_ddp", "thunder_fsdp", "ThunderFSDPStrategy", "lightning_thunder_strategy.Nothing"),
        *("lightning_thunder_strategy.fabric.ThunderStrategy", "lightning_thunder_strategy.compile"),
    ]
)


@settings(max_examples=5 * settings().max_examples)
@given(
    st.one_of(
        st.fixed_dictionaries({"class_path": named}, optional={"init_args": options()}),
        st.fixed_dictionaries({"class_path": named, "init_args": options()}),
        st.one_of(named, values),
    )
)
def test_yaml_is_parsed_or_refused_in_one_message(strategy: Any) -> None:
    given_options = strategy.get("init_args", {}) if isinstance(strategy, dict) else {}
    text = yaml.safe_dump({"trainer": {"strategy": strategy, "accelerator": "cpu", "logger": False}})
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            parsed = parser().parse_string(text)
    except SystemExit as ended:
        assert ended.code == 2
        assert "Traceback" not in errors.getvalue() and "error: " in errors.getvalue()
        return
    chosen = parsed.trainer.strategy
    if not hasattr(chosen, "class_path") or not chosen.class_path.startswith("lightning_thunder_strategy."):
        return  # a name, which the Trainer looks up
    try:
        with redirect_stderr(errors):
            made = parser().instantiate_classes(parsed).trainer.strategy
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            error = error.__context__
            assert f": {error}" in told(errors.getvalue())
        assert_clear(error, [*(given_options if isinstance(given_options, dict) else {}), *CONFIG, "strategy"])
        return
    assert type(made) in STRATEGIES
    again = parser().parse_string(parser().dump(parsed, skip_none=False))
    assert again == parsed, "what is printed means the same"


def told(printed: str) -> str:
    """The error that a parser has printed below its usage."""
    return printed.rpartition("\nerror: ")[2]


@settings(max_examples=2 * settings().max_examples)
@given(plugin_options())
def test_precision_in_yaml_works_or_is_refused_in_one_line(given_options: dict[str, Any]) -> None:
    plugin = {"class_path": "lightning_thunder_strategy.ThunderPrecision", "init_args": given_options}
    text = yaml.safe_dump({"trainer": {"strategy": "thunder", "plugins": [plugin], "logger": False}})
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            parsed = parser().parse_string(text)
            made = parser().instantiate_classes(parsed).trainer.plugins[0]
    except SystemExit:
        line = told(errors.getvalue()).rstrip("\n")
        assert "\n" not in line and "Traceback" not in errors.getvalue(), line
        recipe = given_options.get("precision")
        assert any(name in line for name in [*given_options, *(recipe if isinstance(recipe, dict) else ())]), line
        return
    assert type(made) is lts.ThunderPrecision
    assert parser().parse_string(parser().dump(parsed, skip_none=False)) == parsed


def test_a_timeout_is_a_duration_in_yaml() -> None:
    strategy = {"class_path": "lightning_thunder_strategy.ThunderDDPStrategy", "init_args": {"timeout": "0:01:00"}}
    parsed = parser().parse_object({"trainer": {"strategy": strategy}})
    assert parsed.trainer.strategy.init_args.timeout == timedelta(minutes=1)
