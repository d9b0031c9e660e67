"""The strategy of tensor parallelism for Lightning's Trainer."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Optional

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_thunder_strategy.compiler.refusals import told_by_the_parser
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed.tensor_styles import Plan
from lightning_thunder_strategy.strategies.engine import Engine
from lightning_thunder_strategy.strategies.options import (
    BucketSize,
    Communication,
    Compile,
    CompileOptimizer,
    Executors,
    NonfiniteGradients,
    ReduceDtype,
    StartMethod,
    StateDictType,
    StrategyOptions,
    TensorOptions,
    TensorSize,
    Unshard,
    check_processes,
    check_unshard,
    compile_config,
)
from lightning_thunder_strategy.strategies.trainer import ShardedStrategy


class ThunderTPStrategy(ShardedStrategy):
    """Trains with each layer computed by several ranks together (tensor parallelism), by a plan of the layers.

    A rank has a part of the rows or columns of the layers that the plan names, and computes with that part; activations
    are summed over the ranks as part of the compiled program (https://arxiv.org/abs/1909.08053). The ranks of one group
    see the same batches. Outside of steps parameters are ``DTensor``.

    Args:
        tensor_parallel_size: How many consecutive ranks compute each layer together: a divisor of the number of
            processes, or ``"auto"``, all processes of a node. The groups are data-parallel, each with the whole model.
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

    strategy_name = "thunder_tp"

    @told_by_the_parser
    def __init__(
        self,
        tensor_parallel_size: TensorSize = "auto",
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
        bucket_size_mb: BucketSize = 25.0,
        reduce_dtype: Optional[ReduceDtype] = None,
        in_flight_mb: Optional[float] = None,
        nonfinite_gradients: NonfiniteGradients = "ignore",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        tensor = TensorOptions(tensor_parallel_size, plan, parallel=True)
        communication = Communication(bucket_size_mb, reduce_dtype, in_flight_mb=in_flight_mb)
        check_processes(process_group_backend, timeout, start_method, broadcast_buffers)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        config = compile_config(compile, highest="step")
        communication.check_compiled(config)
        options = StrategyOptions(
            executors, transforms, config, check_unshard(unshard_on_teardown, start_method), state_dict_type, report,
            nonfinite_gradients, async_save, compile_optimizer,
        )  # fmt: skip
        self._use(Engine(options, "tp", timeout, communication, tensor=tensor))
        self._broadcast_buffers = broadcast_buffers
