"""The strategies for Lightning's Trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed import sharding as parameters
from lightning_thunder_strategy.distributed.accumulation import Accumulation
from lightning_thunder_strategy.distributed.buffers import broadcast_buffers
from lightning_thunder_strategy.distributed.initialization import sharded_construction
from lightning_thunder_strategy.distributed.restarts import meet_after_restart
from lightning_thunder_strategy.distributed.tensor_styles import Plan
from lightning_thunder_strategy.steps.step import CompiledStep, Unit
from lightning_thunder_strategy.strategies.engine import Engine
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
    Unshard,
    check_processes,
    check_sharding,
    check_single_device,
    check_tensor_parallel,
    check_unshard,
    compile_config,
)
from lightning_thunder_strategy.strategies.trainer_base import CompiledStepsStrategy


class ThunderStrategy(CompiledStepsStrategy, SingleDeviceStrategy):
    """Trains on one device with compiled steps.

    Args:
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"step"``, ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            of ``torch.distributed.checkpoint``.
        async_save: During ``fit``, copy what a checkpoint holds and write it in the background while training goes on.
        report: Print what was compiled, by whom, and what was not, at the end of ``fit``.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    strategy_name = "thunder"

    @told_by_the_parser
    def __init__(
        self,
        executors: Executors = "auto",
        transforms: Sequence[Transform] = (),
        compile: Compile = "step",
        compile_optimizer: CompileOptimizer = False,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        report: bool = False,
    ) -> None:
        super().__init__()
        config = compile_config(compile, highest="step")
        options = StrategyOptions(
            executors, transforms, config, "auto", state_dict_type, report, async_save=async_save,
            compile_optimizer=compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, "none"))

    @property
    def parallel_devices(self) -> Optional[list[torch.device]]:
        """Set by the Trainer; one device."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Optional[list[torch.device]]) -> None:
        self._root_device = check_single_device(type(self).__name__, devices, self._root_device)


class DistributedStrategy(CompiledStepsStrategy, DDPStrategy):
    """What our strategies of several processes share; Lightning's DDP strategy knows launchers and ranks."""

    is_distributed = True  # type: ignore[assignment]
    _broadcast_buffers: bool
    _blocked = False  # whether Lightning has asked for a backward without communication
    _shares_buffers = True  # before the next step, as DDP does: if the last one communicated gradients

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._engine.tensor.sampler(super().distributed_sampler_kwargs)

    @override
    def reduce(self, tensor: Tensor, group: Optional[Any] = None, reduce_op: Any = "mean") -> Tensor:
        """Over the data-parallel ranks, unless a group is given: the ranks of one layer have the same values."""
        return super().reduce(tensor, self._engine.data_group if group is None else group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        total = int(super().reduce(votes, torch.distributed.group.WORLD, "sum"))
        return total == self.world_size if all else bool(total)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        meet_after_restart(self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._engine.connect_ranks(self.root_device, self.num_processes)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self._engine.check_precision(self.precision_plugin)
        self._shares_buffers = True
        super().setup(trainer)

    @override
    def _before_step(self, step: CompiledStep, args: Sequence[Any]) -> None:
        module = self.lightning_module
        assert module is not None
        accumulation = self._accumulation()
        if accumulation is None or self._engine.scheme is None:
            return
        if self._broadcast_buffers and self._stage == "training" and self._shares_buffers:
            broadcast_buffers(module, self._engine.scheme.mesh, again=True)
        self._shares_buffers = step.record.name == "training_step" and not self._blocked
        if step.record.name != "training_step":
            accumulation.local = False
            return
        keeps = len(args) > 1 and args[1] % module.trainer.accumulate_grad_batches != 0  # gradients that it has

        def choose(unit: Unit) -> str:
            whole = module.automatic_optimization and unit == "whole"
            adding = accumulation.begin(module, add=whole and keeps)
            return " accumulating" if accumulation.local else " adding" if adding else ""

        step.choose = choose

    def _accumulation(self) -> Optional[Accumulation]:
        return parameters.accumulation_of(self.lightning_module) if self.lightning_module is not None else None

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        accumulation, scheme = self._accumulation(), self._engine.scheme
        waits = accumulation is not None and scheme is not None and scheme.accumulates
        before, self._blocked = self._blocked, True
        try:
            with accumulation.hold() if accumulation is not None and waits else nullcontext():
                yield
        finally:
            self._blocked = before

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        accumulation, scheme = self._accumulation(), self._engine.scheme
        if accumulation is not None and scheme is not None:
            assert self.lightning_module is not None
            accumulation.after_backward(self.lightning_module, scheme.mesh)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Optional[nn.Module] = None, **kwargs: Any
    ) -> Any:
        module, accumulation, scheme = self.lightning_module, self._accumulation(), self._engine.scheme
        if module is None or accumulation is None or scheme is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def settled() -> Any:
            result = closure()
            accumulation.settle(module, scheme.mesh)
            self._engine.check_gradients(optimizer, [module])
            return result

        output = super().optimizer_step(optimizer, settled, model, **kwargs)
        if module.automatic_optimization:
            accumulation.done(module)
        return output


class ShardedStrategy(DistributedStrategy):
    """What strategies share under which a rank has only a part of the parameters."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Iterator[None]:
        device: AbstractContextManager = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        if self._engine.scheme is None or self._engine.tensor.parallel:  # a plan needs the names in the whole model
            yield
            return
        with sharded_construction(self._engine.scheme):
            yield


class ThunderDDPStrategy(DistributedStrategy):
    """Trains on several processes with whole parameters on each; gradients are averaged inside the compiled backward.

    Args:
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"step"``, ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            of ``torch.distributed.checkpoint``.
        async_save: During ``fit``, copy what a checkpoint holds and write it in the background while training goes on.
        report: Print what was compiled, by whom, and what was not, at the end of ``fit``.
        broadcast_buffers: Give every rank the buffers (such as BatchNorm statistics) of rank zero when DDP
            does: before a step, if the one before it communicated gradients.
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
        compile: Compile = "step",
        compile_optimizer: CompileOptimizer = False,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        report: bool = False,
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
        config = compile_config(compile, highest="step")
        communication.check_compiled(config)
        options = StrategyOptions(
            executors, transforms, config, "auto", state_dict_type, report, nonfinite_gradients, async_save,
            compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, "ddp", timeout, communication))
        self._broadcast_buffers = broadcast_buffers


class ThunderFSDPStrategy(ShardedStrategy):
    """Trains on several processes with each parameter, its gradient and its optimizer state spread over them.

    Inside a step a parameter is gathered where it is used, and its gradient reduce-scattered, as part of the compiled
    program (ZeRO, https://arxiv.org/abs/1910.02054). Everywhere else parameters are ``DTensor``.

    Args:
        sharding: ``"zero3"`` gathers a parameter again in the backward, ``"zero2"`` keeps the gathered one. ``"zero1"``
            also keeps gradients whole over the micro-batches of one optimizer step, and reduces them once.
        replicas: How many groups of processes hold all shards each (hybrid sharding): with 2 on 16 processes parameters
            are spread over 8, and gathers stay among those. A divisor of the number of processes.
        tensor_parallel_size: How many consecutive ranks compute each layer together: a divisor of the number of
            processes, or ``"auto"``, all processes of a node. The groups of ranks are data-parallel, and shard further.
        plan: Which layers, and how: ``"auto"`` for Hugging Face models with a ``tp_plan`` and LitGPT's GPT, or entries
            by glob of module names, such as ``{"*.attn.qkv": "colwise", "*.attn.proj": "rowwise"}``.
        executors: What runs the parts of the program: ``"auto"``, or names in priority order such as ``["inductor"]``;
            ``eager`` takes what is left.
        transforms: Your own passes over the program, in order.
        compile: ``"step"``, ``"forward"``, ``"submodules"`` or ``"off"``, or a ``CompileConfig`` with more options.
        compile_optimizer: ``"auto"``: steps of ``Adam``, ``AdamW`` and ``SGD`` run as one kernel over many parameters,
            on CUDA our own in Triton, on a CPU torch's fused one; what cannot is left to torch, and that is told once.
            ``False``: torch's own steps. Off until the kernel has been measured on a GPU.
        unshard_on_teardown: Whether the module has whole, plain parameters again after ``fit``: ``True``, ``False``, or
            ``"auto"`` for models under 1 GiB, and always if ``start_method`` is not ``"popen"``.
        state_dict_type: ``"full"`` saves one file with the keys and shapes of the plain model, ``"sharded"`` a folder
            to which each rank writes its part.
        async_save: During ``fit``, copy what a checkpoint holds and write it in the background while training goes on.
        report: Print what was compiled, by whom, and what was not, at the end of ``fit``.
        broadcast_buffers: Give every rank the buffers (such as BatchNorm statistics) of rank zero when DDP
            does: before a step, if the one before it communicated gradients.
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
        compile: Compile = "step",
        compile_optimizer: CompileOptimizer = False,
        unshard_on_teardown: Unshard = "auto",
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        report: bool = False,
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
        config = compile_config(compile, highest="step")
        unshard_on_teardown = check_unshard(unshard_on_teardown, start_method)
        communication.check_compiled(config)
        options = StrategyOptions(
            executors, transforms, config, unshard_on_teardown, state_dict_type, report, nonfinite_gradients,
            async_save, compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, sharding, timeout, communication, replicas, tensor))
        self._broadcast_buffers = broadcast_buffers
