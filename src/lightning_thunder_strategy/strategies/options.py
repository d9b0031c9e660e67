"""Options that all strategies share, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional, Union, get_args

import torch

from lightning_thunder_strategy.compiler.config import CompileConfig, Mode, check_choice
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.executors.registry import resolve

Executors = Union[Literal["auto"], list[Union[str, Executor]]]
Compile = Union[CompileConfig, Mode]
StateDictType = Literal["full", "sharded"]
Sharding = Literal["zero2", "zero3"]
Unshard = Union[bool, Literal["auto"]]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class StrategyOptions:
    """What a strategy was configured with.

    Raises:
        ValueError: If a value is not allowed; the message names the option, the value and what is allowed.
    """

    executors: Union[str, Sequence[Union[str, Executor]]]
    transforms: tuple[Transform, ...]
    compile_config: CompileConfig
    unshard_on_teardown: Unshard
    state_dict_type: StateDictType
    report: bool

    def __post_init__(self) -> None:
        check_choice("state_dict_type", self.state_dict_type, get_args(StateDictType))
        check_choice("unshard_on_teardown", self.unshard_on_teardown, ("auto", True, False))
        check_choice("report", self.report, (True, False))
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                raise ValueError(f"transforms: {transform!r} is not allowed: give Transform objects.")
        resolve(self.executors)


def compile_config(value: Compile, highest: Mode) -> CompileConfig:
    """The options that ``compile=`` stands for; Fabric's highest mode is ``"forward"``."""
    allowed = get_args(Mode)[get_args(Mode).index(highest) :]
    if isinstance(value, CompileConfig):
        if value.mode not in allowed:
            check_choice("compile.mode", value.mode, allowed)
        return value
    check_choice("compile", value, allowed)
    return CompileConfig(mode=value)


def check_sharding(value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a way to shard."""
    check_choice("sharding", value, get_args(Sharding))


def check_single_device(strategy: str, devices: Optional[list[torch.device]], current: torch.device) -> torch.device:
    """The one device that a strategy for one device was given."""
    if devices and len(devices) > 1:
        raise ValueError(
            f"devices={len(devices)} is not allowed with {strategy}, which trains on one device: choose devices=1, or "
            "ThunderDDPStrategy ('thunder_ddp') or ThunderFSDPStrategy ('thunder_fsdp')."
        )
    return devices[0] if devices else current
