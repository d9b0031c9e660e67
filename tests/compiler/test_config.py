"""Options: bad values are named with what is allowed."""

import dataclasses

import pytest
import torch

import lightning_thunder_strategy as lts
from tests.compiler.executors import Pointwise


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("mode", "steps", "'step', 'forward', 'submodules', 'off'"),
        ("on_error", "ignore", "'fallback', 'raise'"),
        ("fullgraph", 1, "True or False"),
        ("cudagraphs", "yes", "True or False"),
        ("eager_random", None, "True or False"),
        ("dynamic", "auto", "None, True or False"),
        ("dynamic", 1, "None, True or False"),
        ("fuel", -1, "a number of operations, or None"),
        ("fuel", True, "a number of operations, or None"),
        ("mode", ["step"], "'step', 'forward', 'submodules', 'off'"),
    ],
)
def test_a_bad_value_names_the_option_the_value_and_what_is_allowed(option, value, allowed):
    with pytest.raises(ValueError) as caught:
        lts.CompileConfig(**{option: value})
    text = str(caught.value)
    assert text.startswith(f"{option}={value!r} is not allowed") and allowed in text


def test_options_are_frozen_and_comparable():
    config = lts.CompileConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "off"
    assert config == lts.CompileConfig() and hash(config) == hash(lts.CompileConfig())
    assert dataclasses.asdict(config) == {
        "mode": "step", "fullgraph": False, "dynamic": None, "cudagraphs": False, "on_error": "fallback",
        "eager_random": False, "fuel": None,
    }  # fmt: skip


def test_config_must_be_a_compile_config():
    with pytest.raises(ValueError, match="config='step' is not allowed: give a CompileConfig"):
        lts.compile(lambda x: x, config="step")


def test_only_functions_and_modules_are_compiled():
    with pytest.raises(TypeError, match="takes a function or a module, not int"):
        lts.compile(3)


def test_cudagraphs_need_inductor_and_cuda_tensors():
    config = lts.CompileConfig(cudagraphs=True)
    for executors, names in ((["eager"], "'eager'"), ([Pointwise(), "inductor"], "'pointwise', 'inductor', 'eager'")):
        with pytest.raises(ValueError, match=rf"cudagraphs=True needs the 'inductor' .*, and executors=\[{names}\]"):
            lts.compile(lambda x: x, executors=executors, config=config)
    compiled = lts.compile(lambda x: x.sin(), executors=["inductor"], config=config)
    with pytest.raises(ValueError, match="cudagraphs=True needs CUDA tensors, and this program has none"):
        compiled(torch.ones(2))
