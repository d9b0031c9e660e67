"""Names of TorchInductor which torch does not document. Checked on torch 2.11 and 2.13."""

import contextlib
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from lightning_thunder_strategy.compiler._torch_aot import backward_without_autocast


class _Partitioner(CustomPartitionerFn):
    """Our partitioner, as Inductor's caches want to see it: a key."""

    def __init__(self, partition: Callable, key: Optional[str]) -> None:
        self._partition = partition
        self._key = key

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return self._partition(joint, inputs, **kwargs)

    def uuid(self) -> Optional[str]:
        return self._key

    def __reduce__(self) -> Any:
        return (str, (self._key or "",))


def inductor_backend(
    partitioner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    cache_key: Optional[str],
    dispatch: Callable[..., Callable],
    config_patches: dict[str, Any],
    cacheable: dict[str, str],
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable]:
    """Inductor's whole pipeline (its decompositions, joint passes and caches) with our partitioner and dispatch."""
    from torch._inductor.compile_fx import compile_fx

    patches = {**config_patches, **_deterministic(), "custom_partitioner_fn": _Partitioner(partitioner, cache_key)}
    if cacheable:
        known = torch._inductor.config.unsafe_marked_cacheable_functions
        patches["unsafe_marked_cacheable_functions"] = {**known, **cacheable}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        with backward_without_autocast():
            return compile_fx(gm, example_inputs, inner_compile=dispatch, config_patches=patches)

    return backend


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
    """Inductor on one ATen program that AOTAutograd has made."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, example_inputs, **kwargs)


def inductor_compile_region(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any]
) -> Callable:
    """Inductor on a part of an ATen program, as a function of one list. Without CUDA graphs."""
    from torch._guards import TracingContext, detect_fake_mode, tracing

    patches = {**config_patches, "triton.cudagraphs": False, **_deterministic()}
    with tracing(TracingContext(detect_fake_mode(example_inputs))), torch._inductor.config.patch(patches):
        return inductor_compile(gm, example_inputs)


def _deterministic() -> dict[str, bool]:
    """Inductor's option for kernels that are the same in every run, where deterministic algorithms are asked for: it
    does not choose them by timing. Torch 2.13 sets it with ``use_deterministic_algorithms``; earlier ones may not."""
    wanted = torch.are_deterministic_algorithms_enabled() and hasattr(torch._inductor.config, "deterministic")
    return {"deterministic": True} if wanted else {}


def inductor_option_problem(name: object, value: object) -> Optional[str]:
    """Why Inductor has no such option or does not take the value, or ``None``."""
    known = torch._inductor.config.get_config_copy()
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        meant = f", but {close[0]!r}" if close else ""
        return f"Inductor has no such option{meant}. torch._inductor.list_options() has all"
    default = known[str(name)]
    if isinstance(value, float) and math.isnan(value):
        return "it is no number"
    whole_number_for_float = type(default) is float and type(value) is int
    if default is None or type(default) is type(value) or whole_number_for_float:
        return None
    return f"{value!r} is of another type than Inductor's default {default!r}"


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """What a mode of ``torch.compile`` sets."""
    return {} if mode == "default" else dict(torch._inductor.list_mode_options(mode))


def aot_cache(enabled: bool) -> contextlib.AbstractContextManager:
    import torch._functorch.config

    return torch._functorch.config.patch(enable_autograd_cache=enabled)


def aot_cache_enabled() -> bool:
    import torch._functorch.config

    return bool(torch._functorch.config.enable_autograd_cache) and not torch._inductor.config.force_disable_caches


def compile_cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def default_compile_cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def cpp_compiler_problem() -> Optional[str]:
    """Why Inductor finds no C++ compiler on this machine, or ``None`` if it finds one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return f"TorchInductor finds no C++ compiler: {str(error).splitlines()[0].rstrip('.')}."
    return None


def runs_alone(target: Any) -> bool:
    """Whether Inductor calls a kernel of its own for an ATen operator, instead of generating code that it can fuse."""
    from torch._inductor import lowering  # a table of the operators for which it generates code

    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return True
    packet = target._overloadpacket
    known = target in lowering.lowerings or packet in lowering.lowerings
    return not known or target in lowering.fallbacks or packet in lowering.fallbacks or _name(target) in _TEMPLATES


def is_reduction(target: Any) -> bool:
    """Whether an operator's results have other elements than its inputs: Inductor never computes one twice."""
    return isinstance(target, torch._ops.OpOverload) and _name(target) in _REDUCTIONS


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]


_TEMPLATES = {
    "mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution",
    "convolution_backward", "index_put", "index_put_", "_unsafe_index_put", "scatter_add", "scatter_reduce", "scatter",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin", "var", "var_mean", "std",
    "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "_softmax", "_log_softmax", "xor_sum",
}  # fmt: skip
