"""What the strategies of Trainer and Fabric share: one module, spread over the ranks and compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Optional

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop

from lightning_thunder_strategy.compiler.collectives import sizes_vary_in
from lightning_thunder_strategy.compiler.compile import make_pipeline
from lightning_thunder_strategy.compiler.config import Mode
from lightning_thunder_strategy.compiler.pipeline import Pipeline
from lightning_thunder_strategy.compiler.report import Record, Report, warn
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.distributed import last_words, sharding
from lightning_thunder_strategy.distributed.agreement import Agreement
from lightning_thunder_strategy.distributed.buffers import broadcast_buffers
from lightning_thunder_strategy.distributed.checkpoint import exchange_parameters, parameter_names
from lightning_thunder_strategy.distributed.initialization import materialize
from lightning_thunder_strategy.distributed.loss_parallel import LossParallel
from lightning_thunder_strategy.distributed.mesh import data_mesh, tensor_mesh
from lightning_thunder_strategy.distributed.nonfinite import check_gradients
from lightning_thunder_strategy.distributed.schemes import HybridSharded, Replicated, Scheme, Sharded, local_bytes
from lightning_thunder_strategy.distributed.tensor_parallel import ModulePlan, apply_plan
from lightning_thunder_strategy.distributed.tensor_scheme import TensorParallel
from lightning_thunder_strategy.distributed.together import check_same_gradients, check_same_inputs, share_random_state
from lightning_thunder_strategy.optimizers.steps import OptimizerSteps
from lightning_thunder_strategy.precision.linears import LowPrecisionLinears
from lightning_thunder_strategy.strategies.options import Communication, StrategyOptions, TensorOptions
from lightning_thunder_strategy.transforms.add_once import AddOnce
from lightning_thunder_strategy.transforms.bucketing import Bucket
from lightning_thunder_strategy.transforms.deduplicate_unshard import DeduplicateUnshard
from lightning_thunder_strategy.transforms.overlap import Overlap
from lightning_thunder_strategy.transforms.refuse_lost_edits import RefuseLostEdits
from lightning_thunder_strategy.transforms.unshard_policy import GatherAgain
from lightning_thunder_strategy.transforms.wire_dtype import CastBeforeGather, ReduceIn

Parallelism = Literal["none", "ddp", "tp", "zero1", "zero2", "zero3"]

_GRADIENT_CHECKS = 8  # optimizer steps after setup in which tensor-parallel ranks compare gradients not yet compared
_AUTO_UNSHARD_LIMIT = 2**30  # bytes of the full model

_NEED_WHOLE_PARAMETERS: dict[type[Optimizer], str] = {
    Adafactor: "it takes statistics of whole rows and columns",
    LBFGS: "it flattens all parameters into one vector",
    Rprop: "torch cannot assign to elements of a distributed tensor, as it does",
}


class Engine:
    """Spreads modules over ranks, compiles them, and gives them back.

    Args:
        options: What the strategy was configured with.
        parallelism: How parameters are spread.
        timeout: How long to wait for other ranks.
        communication: How parameters and gradients are communicated.
        replicas: How many times the shards are repeated.
        tensor: How many ranks compute each layer together, and by which plan.
    """

    def __init__(
        self,
        options: StrategyOptions,
        parallelism: Parallelism,
        timeout: Optional[timedelta] = None,
        communication: Communication = Communication(),
        replicas: int = 1,
        tensor: TensorOptions = TensorOptions(),
    ) -> None:
        self.tensor = tensor
        self.options = options
        self.parallelism = parallelism
        self.communication = communication
        self.replicas = replicas
        self.timeout = timeout
        self.scheme: Optional[Scheme] = None
        self.agreement: Optional[Agreement] = None
        self.failed = False
        self._forget_checks()
        self.optimizer_steps = OptimizerSteps(options.compile_optimizer, options.compile_config.on_error)
        self.precision_passes: tuple[LowPrecisionLinears, ...] = ()

    @property
    def sharded(self) -> bool:
        return self.parallelism in ("tp", "zero1", "zero2", "zero3")

    @property
    def data_group(self) -> Optional[ProcessGroup]:
        """This rank's data-parallel group; ``None`` for all ranks."""
        return self.scheme.mesh.get_group("data") if isinstance(self.scheme, TensorParallel) else None

    def connect_ranks(self, device: torch.device, on_node: int) -> None:
        """After the process group exists: make the mesh.

        Args:
            device: Of this rank.
            on_node: How many processes a node has.
        """
        if self.parallelism == "none":
            return
        last_words.introduce()
        if self.tensor.parallel:
            self.tensor = dataclasses.replace(self.tensor, size=self.tensor.on(on_node))
            mesh = tensor_mesh(device.type, self.tensor.on(on_node))
            sizes_vary_in(mesh.get_group("tensor"))
            self.scheme = TensorParallel(mesh, spread=self.parallelism != "tp")
        else:
            mesh = data_mesh(device.type, self.replicas)
            sharded = Sharded if self.replicas == 1 else HybridSharded
            self.scheme = sharded(mesh, self.parallelism == "zero1") if self.sharded else Replicated(mesh)
        self.agreement = Agreement(self.timeout) if mesh.size() > 1 else None

    # ------------------------------------------------------------------------------------------------------- modules

    def setup_module(self, module: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Spread the parameters of ``module`` over the ranks, on ``device``. May be called again.

        Args:
            module: The module; parameters on the meta device are initialised by their modules.
            device: Where the parameters go.
            optimizers: Optimizers that already hold the module's parameters.
        """
        before = set(module.parameters())
        replaced = self.spread(module, device)
        gone = before.difference(replaced, module.parameters())
        for optimizer in optimizers:
            if any(parameter in gone for group in optimizer.param_groups for parameter in group["params"]):
                raise ValueError(
                    "An optimizer holds parameters that a transform takes out of the module, such as weights that "
                    "QuantizeWeights stores in few bits, and would never train them: give it only the parameters that "
                    "are to be trained."
                )
            self.check_optimizer(optimizer)
            if any(optimizer.state.get(parameter) for parameter in replaced):
                raise ValueError(
                    "An optimizer that has already taken steps was set up together with a module whose parameters are "
                    "sharded: its state would be lost. Set the optimizer up before its first step."
                )
            exchange_parameters(optimizer, replaced)
        return module

    def spread(self, module: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
        """Spread the parameters of ``module`` over the ranks, on ``device``. May be called again.

        Returns:
            Old parameter to new, for those that were replaced.
        """
        for transform in self.options.transforms:
            transform.module(module)
        plans = self._plans(module)
        replaced = self._materialize(module, device)
        if self.scheme is not None and sharding.is_spread_otherwise(module, self.scheme):  # by an earlier fit
            replaced.update(sharding.restore_parameters(module))
            plans = self._plans(module)  # which marks the parameters that there are now
        if self.scheme is not None:
            replaced.update(sharding.parallelize(module, self.scheme, plans))
            broadcast_buffers(module, self.scheme.mesh)
        if isinstance(self.scheme, TensorParallel):
            share_random_state(self.scheme.mesh)
            self._forget_checks()
        return replaced

    def _materialize(self, module: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
        """Give parameters on the meta device their values. Returns old parameter to new."""
        place = self.scheme.place if self.sharded and self.scheme is not None else None
        return materialize(module, device, place)

    def _forget_checks(self) -> None:
        self._checked: set[str] = set()  # steps whose inputs the ranks have compared since the last setup
        self._agreed: set[nn.Parameter] = set()  # and parameters in whose gradients they agreed
        self._gradient_checks = 0

    def check_inputs(self, name: str, inputs: Any) -> None:
        """At the first call of the step ``name``: the ranks of a tensor-parallel group must have equal ``inputs``."""
        if isinstance(self.scheme, TensorParallel) and name not in self._checked:
            self._checked.add(name)
            check_same_inputs(inputs, self.scheme.mesh, name)

    def _plans(self, module: nn.Module) -> Mapping[nn.Module, ModulePlan]:
        """What each module of a tensor-parallel model is in a step."""
        if not isinstance(self.scheme, TensorParallel):
            return {}
        return apply_plan(module, self.tensor.plan, self.scheme.group)

    def spread_copies(self, modules: Sequence[nn.Module]) -> None:
        """Spread the parameters of copies of the module as its own are, so that the two can be averaged."""
        if self.sharded and self.scheme is not None:
            for module in modules:
                sharding.parallelize(module, self.scheme, self._plans(module))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that cannot work on parameters whose rows are spread unevenly.

        Raises:
            TypeError: With the reason and what to use instead.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        reason = next((why for cls, why in _NEED_WHOLE_PARAMETERS.items() if isinstance(optimizer, cls)), None)
        if not self.sharded or reason is None:
            return
        raise TypeError(
            f"The optimizer {type(optimizer).__name__} cannot work on sharded parameters: {reason}. Use AdamW, Adam or "
            "SGD, or a strategy that keeps parameters whole, such as ThunderDDPStrategy."
        )

    def check_precision(self, precision: object) -> None:
        """Refuse to look at gradients that a gradient scaler lets overflow on purpose."""
        if self.options.nonfinite_gradients == "raise" and getattr(precision, "scaler", None) is not None:
            raise ValueError(
                "nonfinite_gradients='raise' is not allowed with a gradient scaler (precision='16-mixed'), which skips "
                "steps whose gradients are not finite: choose 'ignore', or 'bf16-mixed'."
            )

    def check_gradients(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Before an optimizer step: stop all ranks if gradients are wrong (collectives).

        That is, if they are not finite and that was asked for, and, at the first step of a tensor-parallel model, if
        ranks do not agree on them.
        """
        if isinstance(self.scheme, TensorParallel) and self._gradient_checks < _GRADIENT_CHECKS:
            self._gradient_checks += 1
            held = [p for group in optimizer.param_groups for p in group["params"] if p not in self._agreed]
            self._agreed |= check_same_gradients(held, parameter_names(*modules), self.scheme.mesh)
        if self.options.nonfinite_gradients == "raise":
            optimizer = getattr(optimizer, "_optimizer", optimizer)
            check_gradients(optimizer, parameter_names(*modules), self.scheme.mesh if self.scheme is not None else None)

    def release_module(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """Make the module the user's own again. After a failure nothing is communicated.

        Returns:
            Old parameter to new, for those that were gathered.
        """
        if self.scheme is None:
            return {}
        sharding.restore_classes(module)
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return {}
        total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        unshard = self.options.unshard_on_teardown
        if self.failed or unshard is False or (unshard == "auto" and total >= _AUTO_UNSHARD_LIMIT):
            why = "after an error nothing is gathered" if self.failed else (
                f"unshard_on_teardown={unshard!r} and the full model has {total / 2**30:.1f} GiB"
            )  # fmt: skip
            warn(f"The parameters stay sharded (DTensor), because {why}. Save a checkpoint to use the model elsewhere.")
            return {}
        return sharding.restore_parameters(module)

    # ------------------------------------------------------------------------------------------------------- compile

    def use_precision(self, passes: tuple[LowPrecisionLinears, ...]) -> None:
        """Run the passes of a precision plugin.

        Raises:
            ValueError: If nothing is compiled.
        """
        self.precision_passes = passes
        if self.options.compile_config.mode == "off":
            raise ValueError(
                "compile='off' is not allowed with ThunderPrecision, which works on compiled programs: choose "
                "compile='submodules' or leave ThunderPrecision out."
            )

    def forget_precision(self, everything: bool) -> None:
        """Delayed scaling forgets what it has observed since the last optimizer step, or everything."""
        for delayed in filter(None, (item.delayed for item in self.precision_passes)):
            delayed.start_over() if everything else delayed.forget_observed()

    def pipeline(
        self, modules: Mapping[str, nn.Module], fullgraph: bool, mode: Optional[Mode] = None, number: int = 0
    ) -> Pipeline:
        """A pipeline for programs of ``modules`` (by prefix): our sharding passes first, the user's transforms,
        and last those of the precision, which keep apart what they know of module ``number``."""
        config = self.options.compile_config
        config = dataclasses.replace(config, fullgraph=fullgraph, mode=mode or config.mode)
        precision = [item.owned_by(f"{number}." if number else "") for item in self.precision_passes]
        transforms = (*self._sharding_passes(), *self.options.transforms, *precision)
        return make_pipeline(self.options.executors, transforms, config, modules, self.agreement)

    def _sharding_passes(self) -> tuple[Transform, ...]:
        if self.scheme is None:
            return ()
        passes: list[Transform] = [RefuseLostEdits(self.scheme.copies)]
        passes += [LossParallel()] if self.tensor.parallel else []
        passes += [DeduplicateUnshard(), AddOnce()] if self.scheme.accumulates else [DeduplicateUnshard()]
        passes += [CastBeforeGather()] if self.sharded else []
        passes += [GatherAgain()] if self.parallelism == "zero3" else []
        return (*passes, *self._communication_passes())

    def _communication_passes(self) -> list[Transform]:
        wanted = self.communication
        passes: list[Transform] = []
        if wanted.reduce_dtype is not None:
            passes.append(ReduceIn(wanted.reduce_dtype))
        if wanted.bucket_size_mb:
            passes.append(Bucket(wanted.bucket_size_mb))
        return [*passes, Overlap(wanted.prefetch, wanted.in_flight_mb)]

    # -------------------------------------------------------------------------------------------------------- report

    def report(self, records: Sequence[Record], module: Optional[nn.Module]) -> Report:
        """What was compiled, how large the parameters are, and who updates them."""
        return Report(list(records), parameter_bytes(module), self.optimizer_steps.records)


def parameter_bytes(module: Optional[nn.Module]) -> dict[str, int]:
    """Bytes of all parameters, and of the part that this rank stores."""
    parameters = list(module.parameters()) if module is not None else []
    return {
        "total_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "local_bytes": sum(local_bytes(parameter) for parameter in parameters),
    }
