"""Options that all strategies share, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Optional, Union, get_args

import torch

from lightning_thunder_strategy.compiler.compile import make_pipeline
from lightning_thunder_strategy.compiler.config import CompileConfig, Mode, check_choice
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed.tensor_styles import Plan, check_entries
from lightning_thunder_strategy.executors.base import Executor
from lightning_thunder_strategy.optimizers.steps import CompileOptimizer

Executors = Union[Literal["auto"], list[Union[str, Executor]]]
Compile = Union[CompileConfig, Mode]
StateDictType = Literal["full", "sharded"]
Sharding = Literal["zero1", "zero2", "zero3"]
Unshard = Union[bool, Literal["auto"]]
BucketSize = Union[float, Literal["block"]]
NonfiniteGradients = Literal["ignore", "raise"]
ReduceDtype = Literal["float32", "bfloat16", "float16"]
TensorSize = Union[int, Literal["auto"]]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class StrategyOptions:
    """What a strategy was configured with.

    Raises:
        ValueError: If a value is not allowed; the message names the option, the value and what is allowed.
    """

    executors: Union[str, Sequence[Union[str, Executor]]]
    transforms: Sequence[Transform]
    compile_config: CompileConfig
    unshard_on_teardown: Unshard
    state_dict_type: StateDictType
    report: bool
    nonfinite_gradients: NonfiniteGradients = "ignore"
    async_save: bool = False
    compile_optimizer: CompileOptimizer = False

    def __post_init__(self) -> None:
        check_choice("state_dict_type", self.state_dict_type, get_args(StateDictType))
        check_choice("unshard_on_teardown", self.unshard_on_teardown, ("auto", True, False))
        check_choice("report", self.report, (True, False))
        check_choice("compile_optimizer", self.compile_optimizer, ("auto", False))
        check_choice("async_save", self.async_save, (True, False))
        check_choice("nonfinite_gradients", self.nonfinite_gradients, get_args(NonfiniteGradients))
        if not isinstance(self.transforms, Sequence) or isinstance(self.transforms, str):
            raise ValueError(f"transforms={self.transforms!r} is not allowed: give a list of Transform objects.")
        object.__setattr__(self, "transforms", tuple(self.transforms))
        make_pipeline(self.executors, self.transforms, self.compile_config, {})  # checks them, alone and together


@dataclass(frozen=True)
class Communication:
    """How parameters and gradients are communicated: what the options of the same names say.

    Raises:
        ValueError: If a value is not allowed; the message names the option, the value and what is allowed.
    """

    bucket_size_mb: BucketSize = 0.0
    reduce_dtype: Optional[ReduceDtype] = None
    prefetch: int = 0
    in_flight_mb: Optional[float] = None

    def __post_init__(self) -> None:
        check_choice("reduce_dtype", self.reduce_dtype, (None, *get_args(ReduceDtype)))
        if self.bucket_size_mb != "block" and not _is_number(self.bucket_size_mb):
            raise ValueError(
                f"bucket_size_mb={self.bucket_size_mb!r} is not allowed: give mebibytes, 0 for a collective for each "
                "parameter, or 'block'."
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(
                f"prefetch={self.prefetch!r} is not allowed: give how many gathers start early, 0 or more."
            )
        if self.in_flight_mb is not None and not _is_number(self.in_flight_mb):
            raise ValueError(
                f"in_flight_mb={self.in_flight_mb!r} is not allowed: give mebibytes, or None for no bound."
            )

    def check_compiled(self, config: CompileConfig) -> None:
        """Refuse a type of reduction that would not be used, because nothing is compiled."""
        if self.reduce_dtype is not None and config.mode == "off":
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} is a property of compiled programs, and compile='off' makes none: "
                "leave reduce_dtype out, or compile."
            )


@dataclass(frozen=True)
class TensorOptions:
    """Tensor parallelism: what the options of the same names say.

    Attributes:
        size: How many ranks compute each layer together (``tensor_parallel_size``).
        plan: Which layers, and how.
        parallel: Whether there is any.

    Raises:
        ValueError: If a value is not allowed; the message names the option, the value and what is allowed.
    """

    size: TensorSize = 1
    plan: Plan = "auto"
    parallel: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size > 0
        if not number and self.size != "auto":
            raise ValueError(
                f"tensor_parallel_size={self.size!r} is not allowed: give a divisor of the number of processes."
            )
        if self.plan != "auto" and not isinstance(self.plan, dict):
            raise ValueError(
                f"plan={self.plan!r} is not allowed: give 'auto', or entries such as {{'*.attn.qkv': 'colwise'}}."
            )
        check_entries(self.plan if self.plan != "auto" else {})

    def sampler(self, everywhere: Mapping[str, Any]) -> dict[str, Any]:
        """What makes a sampler for this rank's group, from what would make one for each rank."""
        size = self.on(everywhere["num_replicas"])
        return {**everywhere, "num_replicas": everywhere["num_replicas"] // size, "rank": everywhere["rank"] // size}

    def on(self, processes: int) -> int:
        """How many ranks compute each layer together, with so many processes on a node."""
        return processes if self.size == "auto" else self.size


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def compile_config(value: Compile, highest: Mode) -> CompileConfig:
    """The options that ``compile=`` stands for; Fabric's highest mode is ``"forward"``."""
    allowed = get_args(Mode)[get_args(Mode).index(highest) :]
    if isinstance(value, CompileConfig):
        if value.mode not in allowed:
            check_choice("compile.mode", value.mode, allowed)
        return value
    check_choice("compile", value, allowed)
    return CompileConfig(mode=value)


def check_processes(
    process_group_backend: Optional[str], timeout: Optional[timedelta], start_method: str, broadcast_buffers: bool
) -> None:
    """Raise ``ValueError`` unless these are ways to start and connect processes."""
    check_choice("start_method", start_method, get_args(StartMethod))
    check_choice("broadcast_buffers", broadcast_buffers, (True, False))
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(
            f"timeout={timeout!r} is not allowed: give a datetime.timedelta, or None to wait half an hour."
        )
    if process_group_backend is None:
        return
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    parts = str(process_group_backend).lower().split(",")  # such as "cpu:gloo,cuda:nccl"
    if any(part.rpartition(":")[2] not in known for part in parts):
        check_choice("process_group_backend", process_group_backend, (None, *known))


def check_sharding(value: object, replicas: object) -> None:
    """Raise ``ValueError`` unless these are a way to shard and a number of replicas."""
    check_choice("sharding", value, get_args(Sharding))
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={replicas!r} is not allowed: give a divisor of the number of processes.")


def check_tensor_parallel(size: TensorSize, plan: Plan, sharding: str, replicas: int) -> TensorOptions:
    """What ``ThunderFSDPStrategy`` was given for tensor parallelism, together with its other options."""
    options = TensorOptions(size, plan, parallel=size != 1)
    if size == 1 and plan != "auto":
        raise ValueError("plan is given with tensor_parallel_size=1, which uses none: set tensor_parallel_size.")
    if size != 1 and sharding == "zero1":
        raise ValueError(
            f"sharding='zero1' is not allowed with tensor_parallel_size={size}, whose gradients are reduced in each "
            "backward: choose 'zero2' or 'zero3'."
        )
    if size != 1 and replicas != 1:
        raise ValueError(
            f"replicas={replicas} is not allowed with tensor_parallel_size={size}: choose replicas=1, or "
            "ThunderTPStrategy, which repeats the parameters in each group of tensor-parallel ranks."
        )
    return options


def check_unshard(value: Unshard, start_method: str) -> Unshard:
    """Whether the module has whole parameters after ``fit``, as asked for and as ``start_method`` needs it."""
    if start_method == "popen":
        return value
    if value is False:  # such processes hand the weights back to the main process
        raise ValueError(
            f"unshard_on_teardown=False is not allowed with start_method={start_method!r}, which brings whole "
            "weights back to the main process: choose 'auto' or True, or start_method='popen'."
        )
    return True


def check_single_device(strategy: str, devices: Optional[list[torch.device]], current: torch.device) -> torch.device:
    """The one device that a strategy for one device was given."""
    if devices and len(devices) > 1:
        raise ValueError(
            f"devices={len(devices)} is not allowed with {strategy}, which trains on one device: choose devices=1, or "
            "ThunderDDPStrategy ('thunder_ddp') or ThunderFSDPStrategy ('thunder_fsdp')."
        )
    return devices[0] if devices else current
