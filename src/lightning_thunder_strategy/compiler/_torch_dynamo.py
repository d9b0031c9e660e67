"""Names of TorchDynamo which torch does not document. Checked on torch 2.11 and 2.13."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional
from unittest import mock

import torch
import torch.distributed
from torch import fx

from lightning_thunder_strategy.compiler._torch_compat import TORCH_VERSION


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """The errors with which Dynamo says that it could not compile a function (before any of it has run)."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def is_dynamo_error(error: BaseException) -> bool:
    """Whether Dynamo raised this while it read a function: one of its own errors, or one from a fault in it, to which
    it has added where in the function it was."""
    return isinstance(error, dynamo_errors()) or hasattr(error, "innermost_user_frame_summary")


def control_flow_errors() -> tuple[type[BaseException], ...]:
    """Exceptions by which a backend asks Dynamo to read the function again: never to be caught."""
    from torch._dynamo import exc

    return (exc.RestartAnalysis, exc.SkipFrame)


def is_recompile_limit(error: BaseException) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def unsupported_stack(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call, outermost first, at which Dynamo gave up."""
    return [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or ()]


class CompileListeners:
    """Calls ``start`` and ``end`` with the compile id around each frame that Dynamo compiles."""

    def __init__(self, start: Callable[[str], None], end: Callable[[str], None]) -> None:
        self._start, self._end = self._of_dynamo(start), self._of_dynamo(end)

    def attach(self) -> None:
        """Listen from now on. Called before each call of a program: ``torch.compiler.reset`` detaches all listeners."""
        from torch._dynamo.callback import callback_handler

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    @staticmethod
    def _of_dynamo(function: Callable[[str], None]) -> Callable[[Any], None]:
        from torch._dynamo.callback import CallbackTrigger

        def call(args: Any) -> None:
            if args.callback_trigger == CallbackTrigger.DYNAMO:
                function(args.compile_id)

        return call


def recompile_reasons() -> dict[str, str]:
    """Compile id to the reason of the recompilation, for the frames that Dynamo still remembers."""
    from torch._dynamo.utils import get_compilation_metrics

    return {
        str(metric.compile_id): metric.recompile_reason
        for metric in get_compilation_metrics()
        if metric.recompile_reason is not None
    }


def artifact_loggers() -> list[logging.Logger]:
    """The loggers on which Dynamo writes graph breaks."""
    names = ("symbolic_convert", "convert_frame", "exc")
    return [logging.getLogger(f"torch._dynamo.{name}.__graph_breaks") for name in names]


def convert_frame_logger() -> logging.Logger:
    """The logger on which Dynamo writes that it hit the recompile limit or skips a frame."""
    return logging.getLogger("torch._dynamo.convert_frame")


def compile_settings(sources: Sequence[str]) -> contextlib.AbstractContextManager:
    """How Dynamo reads programs while this is open.

    Integers reached through modules are symbolic, those named by ``sources`` (regular expressions) from the first value
    on. Hooks that are put on a module after it was compiled make a new program. Recurrent layers are never part of one:
    torch's decomposition leaves out the dropout between their layers. Optimizers that a program looks at stay as they
    are: Dynamo would set their ``capturable``. ``torch.autograd.grad`` is part of programs (torch 2.13), because it
    could not be differentiated again if it were applied to a compiled one; ``backward`` never is.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(OptimizerVariable, "_set_capturable", lambda self, tx: None))
    settings = {"allow_unspec_int_on_nn_module": True, "skip_nnmodule_hook_guards": False, "allow_rnn": False}
    if TORCH_VERSION < (2, 12):  # it would miss that a parameter was frozen or unfrozen
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        settings["trace_autograd_ops"] = True
        stack.enter_context(_backward_not_traced())
    stack.enter_context(torch._dynamo.config.patch(settings))
    if sources:
        known = [source for source in torch.compiler.config.dynamic_sources.split(",") if source]
        stack.enter_context(torch.compiler.config.patch(dynamic_sources=",".join([*known, *sources])))
    return stack


def _backward_not_traced() -> contextlib.AbstractContextManager:
    """While open, Dynamo cuts programs at ``Tensor.backward``, as it does by default."""
    from torch._dynamo.variables.tensor import TensorVariable

    original = TensorVariable.method_backward

    def method_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=False):
            return original(self, *args, **kwargs)

    return mock.patch.object(TensorVariable, "method_backward", method_backward)


class suppress_dynamo_errors(contextlib.AbstractContextManager):
    """While open, a frame that Dynamo cannot compile runs eagerly instead of raising.

    Opened for each call, so it does not use ``config.patch``, which costs 0.2 ms.
    """

    def __enter__(self) -> None:
        self._before = torch._dynamo.config.suppress_errors
        torch._dynamo.config.suppress_errors = True

    def __exit__(self, *_: object) -> None:
        torch._dynamo.config.suppress_errors = self._before


def breaks_at_new_data(gm: Optional[fx.GraphModule]) -> Optional[str]:
    """The line at which a program ends because ``tensor.data = ...`` follows, or ``None`` if it ends elsewhere."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or "mutate tensor data attribute" not in reason.reason:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    return "tensor.data = ..." if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"


def reads_gradients() -> bool:
    """Whether the program that Dynamo hands to a backend now looks at the ``grad`` of a tensor."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return True
    names = (guard.name for guard in context.guards_context.dynamo_guards)
    return any((name() if callable(name) else name).endswith(".grad") for name in names)


def placeholder_source(node: fx.Node) -> Optional[str]:
    """Where the program found this input, as a Python expression (``L['x']``), or ``None`` if it is not known."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def no_source(node: fx.Node) -> None:
    """Say that an input that was added to a program comes from nowhere in the user's code."""
    node._dynamo_source = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def compiled_calls(entries: Mapping[torch.nn.Module, Optional[Callable]]) -> Iterator[None]:
    """While open, each module's ``__call__`` goes to its entry, or is plain where that is ``None``. Uses the attribute
    that ``nn.Module.compile`` sets, which pickle and deepcopy leave out."""
    before = [(module, module.__dict__.get("_compiled_call_impl")) for module in entries]
    try:
        for module, entry in entries.items():
            _set_compiled_call(module, entry)
        yield
    finally:
        for module, entry in before:
            _set_compiled_call(module, entry)


def _set_compiled_call(module: torch.nn.Module, entry: Optional[Callable]) -> None:
    if entry is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = entry


def never_a_program(*functions: Callable) -> None:
    """Dynamo does not make programs of these functions themselves. It reads them as part of others, and makes programs
    of what they call."""
    from torch._dynamo.eval_frame import skip_code

    for function in functions:
        skip_code(function.__code__)


def plain_call(module: torch.nn.Module) -> Callable:
    """The module's own ``__call__`` with hooks, never a compiled one."""
    return module._call_impl
