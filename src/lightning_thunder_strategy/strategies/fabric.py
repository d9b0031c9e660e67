"""The strategies for Lightning's Fabric."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Optional

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from typing_extensions import override

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed import sharding as parameters
from lightning_thunder_strategy.distributed.restarts import meet_after_restart
from lightning_thunder_strategy.distributed.tensor_styles import Plan
from lightning_thunder_strategy.strategies.engine import Engine
from lightning_thunder_strategy.strategies.fabric_base import CompiledModulesStrategy
from lightning_thunder_strategy.strategies.options import (
    BucketSize,
    Communication,
    Compile,
    CompileOptimizer,
    Executors,
    NonfiniteGradients,
    ReduceDtype,
    Sharding,
    StartMethod,
    StateDictType,
    StrategyOptions,
    TensorSize,
    check_processes,
    check_sharding,
    check_single_device,
    check_tensor_parallel,
    compile_config,
)


class ThunderStrategy(CompiledModulesStrategy, SingleDeviceStrategy):
    """Runs on one device with compiled modules.

    Args:
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            of ``torch.distributed.checkpoint``.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    strategy_name = "thunder"

    @told_by_the_parser
    def __init__(
        self,
        executors: Executors = "auto",
        transforms: Sequence[Transform] = (),
        compile: Compile = "forward",
        compile_optimizer: CompileOptimizer = False,
        state_dict_type: StateDictType = "full",
    ) -> None:
        super().__init__()
        config = compile_config(compile, highest="forward")
        options = StrategyOptions(
            executors, transforms, config, "auto", state_dict_type, False, compile_optimizer=compile_optimizer
        )
        self._use(Engine(options, "none"))

    @property
    def parallel_devices(self) -> Optional[list[torch.device]]:
        """Set by Fabric; one device."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Optional[list[torch.device]]) -> None:
        self._root_device = check_single_device(type(self).__name__, devices, self._root_device)


class DistributedStrategy(CompiledModulesStrategy, DDPStrategy):
    """What our strategies of several processes share; Lightning's DDP strategy knows launchers and ranks."""

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        meet_after_restart(self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout)
        super()._setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._engine.connect_ranks(self.root_device, self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._engine.tensor.sampler(super().distributed_sampler_kwargs)


class SyncControl(_BackwardSyncControl):
    """Inside ``no_backward_sync`` gradients stay on their ranks, where the strategy can keep them whole; the next
    backward outside reduces them. ZeRO-2 and ZeRO-3 reduce in each backward: the sum over micro-batches is the same."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        accumulation, scheme = parameters.accumulation_of(module), parameters.scheme_of(module)
        if not enabled or accumulation is None or scheme is None or not scheme.accumulates:
            return nullcontext()
        return accumulation.hold()


class ThunderDDPStrategy(DistributedStrategy):
    """Runs on several processes with whole parameters on each; gradients are averaged inside the compiled backward.

    Args:
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            of ``torch.distributed.checkpoint``.
        broadcast_buffers: Give every rank the buffers (such as BatchNorm statistics) of rank zero after each step.
        bucket_size_mb: Mebibytes of gradients that a program reduces at once; 0: each parameter's by itself;
            ``"block"``: those of one block of the model (an entry of a ``ModuleList`` or ``Sequential``) together.
        reduce_dtype: The type in which programs reduce gradients: ``"float32"``, ``"bfloat16"`` or ``"float16"``; by
            default the type of the parameter.
        in_flight_mb: Mebibytes of gradients that may be under way at once; ``None``: any.
        nonfinite_gradients: ``"raise"``: an error on all ranks, before the optimizer step, if a gradient has infinite
            values or NaN; it reads a number from the device at each step. ``"ignore"``: go on.
        process_group_backend: Such as ``"nccl"`` or ``"gloo"``; by default the one that fits the device.
        timeout: How long ranks wait for each other.
        start_method: How processes are started, if not by the cluster: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    strategy_name = "thunder_ddp"

    @told_by_the_parser
    def __init__(
        self,
        executors: Executors = "auto",
        transforms: Sequence[Transform] = (),
        compile: Compile = "forward",
        compile_optimizer: CompileOptimizer = False,
        state_dict_type: StateDictType = "full",
        broadcast_buffers: bool = True,
        bucket_size_mb: BucketSize = 25.0,
        reduce_dtype: Optional[ReduceDtype] = None,
        in_flight_mb: Optional[float] = None,
        nonfinite_gradients: NonfiniteGradients = "ignore",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        communication = Communication(bucket_size_mb, reduce_dtype, in_flight_mb=in_flight_mb)
        check_processes(process_group_backend, timeout, start_method, broadcast_buffers)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self._backward_sync_control = SyncControl()
        self._broadcast_buffers = broadcast_buffers
        config = compile_config(compile, highest="forward")
        communication.check_compiled(config)
        options = StrategyOptions(
            executors, transforms, config, "auto", state_dict_type, False, nonfinite_gradients,
            compile_optimizer=compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, "ddp", timeout, communication))


class ThunderFSDPStrategy(DistributedStrategy):
    """Runs on several processes with each parameter, its gradient and its optimizer state spread over them.

    Inside a compiled module a parameter is gathered where it is used, and its gradient reduce-scattered, as part of the
    program (ZeRO, https://arxiv.org/abs/1910.02054). Everywhere else parameters are ``DTensor``.

    Args:
        sharding: ``"zero3"`` gathers a parameter again in the backward, ``"zero2"`` keeps the gathered one. ``"zero1"``
            also keeps gradients whole inside ``no_backward_sync``, and reduces them once.
        replicas: How many groups of processes hold all shards each (hybrid sharding): with 2 on 16 processes parameters
            are spread over 8, and gathers stay among those. A divisor of the number of processes.
        tensor_parallel_size: How many consecutive ranks compute each layer together: a divisor of the number of
            processes, or ``"auto"``, all processes of a node. The groups of ranks are data-parallel, and shard further.
        plan: Which layers, and how: ``"auto"`` for Hugging Face models with a ``tp_plan`` and LitGPT's GPT, or entries
            by glob of module names, such as ``{"*.attn.qkv": "colwise", "*.attn.proj": "rowwise"}``.
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            to which each rank writes its part.
        broadcast_buffers: Give every rank the buffers (such as BatchNorm statistics) of rank zero after each step.
        bucket_size_mb: Mebibytes of whole parameters that a program gathers or reduces at once; 0: each by itself;
            ``"block"``: those of one block of the model (an entry of a ``ModuleList`` or ``Sequential``) together.
        reduce_dtype: The type in which programs reduce gradients: ``"float32"``, ``"bfloat16"`` or ``"float16"``; by
            default the type of the parameter.
        prefetch: How many gathers a program starts before the one whose result it needs next has arrived.
        in_flight_mb: Mebibytes of whole parameters, and of gradients, that may be under way at once; ``None``: any.
        nonfinite_gradients: ``"raise"``: an error on all ranks, before the optimizer step, if a gradient has infinite
            values or NaN; it reads a number from the device at each step. ``"ignore"``: go on.
        process_group_backend: Such as ``"nccl"`` or ``"gloo"``; by default the one that fits the device.
        timeout: How long ranks wait for each other.
        start_method: How processes are started, if not by the cluster: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    strategy_name = "thunder_fsdp"

    @told_by_the_parser
    def __init__(
        self,
        sharding: Sharding = "zero3",
        replicas: int = 1,
        tensor_parallel_size: TensorSize = 1,
        plan: Plan = "auto",
        executors: Executors = "auto",
        transforms: Sequence[Transform] = (),
        compile: Compile = "forward",
        compile_optimizer: CompileOptimizer = False,
        state_dict_type: StateDictType = "full",
        broadcast_buffers: bool = True,
        bucket_size_mb: BucketSize = "block",
        reduce_dtype: Optional[ReduceDtype] = None,
        prefetch: int = 1,
        in_flight_mb: Optional[float] = None,
        nonfinite_gradients: NonfiniteGradients = "ignore",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        check_sharding(sharding, replicas)
        tensor = check_tensor_parallel(tensor_parallel_size, plan, sharding, replicas)
        communication = Communication(bucket_size_mb, reduce_dtype, prefetch, in_flight_mb)
        check_processes(process_group_backend, timeout, start_method, broadcast_buffers)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self._backward_sync_control = SyncControl()
        self._broadcast_buffers = broadcast_buffers
        config = compile_config(compile, highest="forward")
        communication.check_compiled(config)
        options = StrategyOptions(
            executors, transforms, config, False, state_dict_type, False, nonfinite_gradients,
            compile_optimizer=compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, sharding, timeout, communication, replicas, tensor))

    @override
    def module_init_context(self, empty_init: Optional[bool] = None) -> AbstractContextManager:
        return self._init_context(empty_init)
