"""``lts.compile``: a function or module whose calls go through the pipeline."""

import functools
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional, TypeVar, Union

import torch
from torch import fx, nn

from lightning_thunder_strategy.compiler import _torch_dynamo, cache, events
from lightning_thunder_strategy.compiler.config import CompileConfig
from lightning_thunder_strategy.compiler.pipeline import Agreement, Pipeline, Refusal
from lightning_thunder_strategy.compiler.report import Record, recording
from lightning_thunder_strategy.compiler.transform import Transform
from lightning_thunder_strategy.executors.base import Executor, FusionExecutor
from lightning_thunder_strategy.executors.registry import auto, resolve

T = TypeVar("T", bound=Union[nn.Module, Callable])


class CompileError(RuntimeError):
    """A function could not be compiled as one program.

    Attributes:
        reason: Why, in one or two lines.
        file: File of the user's code at which it failed, if known.
        line: Its line.
        recompile_limit: Whether it failed because a new program was needed again and again.
    """

    def __init__(self, name: str, reason: str, file: Optional[str], line: Optional[int], recompile_limit: bool) -> None:
        where = f"{file}:{line}: " if file else ""
        super().__init__(f"{name} cannot be compiled as one program: {where}{reason}")
        self.name, self.reason, self.file, self.line, self.recompile_limit = name, reason, file, line, recompile_limit


class CompiledFunction:
    """A function whose calls run compiled. Made by :func:`compile`.

    Args:
        function: The function.
        pipeline: Compiles its graphs.
        record: Receives what was compiled; a step that is being recorded takes precedence.
        host_sources: Regular expressions of integer inputs that change from call to call.
    """

    def __init__(
        self, function: Callable, pipeline: Pipeline, record: Record, host_sources: Sequence[str] = ()
    ) -> None:
        events.install()
        self.pipeline = pipeline
        self.record = record
        self.around: Optional[Callable[[Callable[[], Any]], Any]] = None  # called around each call
        self.warn_of_limit = True
        self._host_sources = tuple(host_sources)
        self.module = next(iter(pipeline.modules.values()), None)
        self.fullgraph = pipeline.config.fullgraph
        self._compiled = torch.compile(
            _own_code(function), backend=_Backend(pipeline), fullgraph=self.fullgraph, dynamic=pipeline.config.dynamic
        )
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with recording(self.record) as record, record.new_programs_of(self):
            call = lambda: self._call(record, args, kwargs)  # noqa: E731
            wrapped = call if self.around is None else lambda: self.around(call)
            try:
                result = events.call_within(record, self._host_sources, wrapped)
            except BaseException:
                record.notices.clear()
                raise
        events.report_failures(record)
        if self.warn_of_limit:
            events.report_limit(record)
        return result

    def __get__(self, instance: Any, owner: Optional[type] = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)  # a decorated method

    def __deepcopy__(self, memo: dict) -> "CompiledFunction":
        return self  # as a function

    def __reduce__(self) -> Any:
        """Pickled by its name where the name means this object, else as the plain function."""
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        return self.__qualname__ if found is self else (_unchanged, (self.__wrapped__,))

    def _call(self, record: Record, args: tuple, kwargs: dict) -> Any:
        try:
            if self.fullgraph:
                return self._compiled(*args, **kwargs)
            # A frame that Dynamo cannot compile runs eagerly; the listeners record it.
            with _torch_dynamo.suppress_dynamo_errors():
                return self._compiled(*args, **kwargs)
        except Refusal as refusal:
            raise refusal.error from refusal.error.__cause__
        except Exception as error:
            if not self.fullgraph or not _torch_dynamo.is_dynamo_error(error):
                raise
            raise compile_error(record, error) from error


def _unchanged(value: T) -> T:
    return value


class _Backend:
    """Finds the pipeline without holding it: Dynamo keeps every backend for good, and a pipeline holds modules."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = weakref.ref(pipeline)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        pipeline = self._pipeline()
        assert pipeline is not None, "the compiled function that is being called holds it"
        return pipeline(gm, example_inputs)


def compile_error(record: Record, error: BaseException) -> CompileError:
    """Dynamo's error as one that names the place, the reason and what to do."""
    limit = _torch_dynamo.is_recompile_limit(error)
    if limit:
        reason, record.limit_reason = record.limit_reason or "the recompile limit was reached", None
        return CompileError(record.name, events.limit_text(reason), None, None, True)
    stack = _torch_dynamo.unsupported_stack(error)
    file, line = events.user_place(stack) or (stack[-1] if stack else (None, None))
    return CompileError(record.name, events.dynamo_reason(str(error)) or events.first_line(error), file, line, False)


_copies: Counter = Counter()


def _own_code(function: Callable) -> Callable:
    """The function over a code object of its own: Dynamo keeps programs, and counts recompilations, by code object.

    What it learns of changing shapes it keeps by file, line and name, so copies of one function differ in their name.
    """
    if inspect.ismethod(function):
        return types.MethodType(_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return _own_code(lambda *args, **kwargs: function(*args, **kwargs))
    code = function.__code__
    place = (code.co_filename, code.co_firstlineno, code.co_name)
    _copies[place] += 1
    name = code.co_name if _copies[place] == 1 else f"{code.co_name}#{_copies[place]}"
    copy = types.FunctionType(
        code.replace(co_name=name), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def make_pipeline(
    executors: Union[str, Sequence[Union[str, Executor]]],
    transforms: Sequence[Transform],
    config: CompileConfig,
    modules: Mapping[str, nn.Module],
    agree: Optional[Agreement] = None,
) -> Pipeline:
    """A pipeline from user options, checked."""
    if not isinstance(config, CompileConfig):
        raise ValueError(f"config={config!r} is not allowed: give a CompileConfig.")
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise ValueError(f"transforms={list(transforms)!r} is not allowed: {transform!r} is not a Transform.")
    resolved = resolve(executors)
    fusers = [executor.name for executor in resolved if isinstance(executor, FusionExecutor)]
    if "inductor" in fusers:
        cache.check_folder()
    if config.cudagraphs and fusers != ["inductor"]:
        names = [executor.name for executor in resolved]
        raise ValueError(
            f"cudagraphs=True needs the 'inductor' executor and no other that takes regions, and executors={names!r}."
        )
    pipeline = Pipeline(resolved, transforms, config, modules, agree)
    pipeline.auto_reason = auto()[1] if executors == "auto" else None
    return pipeline


def compile(
    fn_or_module: T,
    executors: Union[str, Sequence[Union[str, Executor]]] = "auto",
    transforms: Sequence[Transform] = (),
    config: CompileConfig = CompileConfig(),
) -> T:
    """Compile a function or a module.

    Args:
        fn_or_module: A function, or a module. A module's result shares everything with the module that was given
            (parameters, buffers, attributes, training mode) and has the same class name and state-dict keys; only
            calls of the result run compiled.
        executors: ``"auto"``, or names and instances in priority order; ``eager`` takes what is left.
        transforms: Passes over the program, in order.
        config: Options; ``mode="submodules"`` compiles the module's outermost children, ``"off"`` nothing.

    Returns:
        The compiled function or module.

    Raises:
        ValueError: If an option is not allowed.
        CompileError: On a call, if ``config.fullgraph`` is set and the function is not one program.
    """
    if isinstance(fn_or_module, nn.Module):
        return _compile_module(fn_or_module, executors, transforms, config)  # type: ignore[return-value]
    if not callable(fn_or_module):
        raise TypeError(f"compile() takes a function or a module, not {type(fn_or_module).__name__}.")
    modules = {"": fn_or_module.__self__} if isinstance(getattr(fn_or_module, "__self__", None), nn.Module) else {}
    pipeline = make_pipeline(executors, transforms, config, {**modules, **_closed_over(fn_or_module)})
    if config.mode == "off":
        return fn_or_module
    name = getattr(fn_or_module, "__qualname__", type(fn_or_module).__qualname__)
    return CompiledFunction(fn_or_module, pipeline, Record(name))  # type: ignore[return-value]


def _closed_over(function: Callable) -> dict[str, nn.Module]:
    """Modules that a function closes over, by the name it uses: for readable parameter names."""
    if not isinstance(function, types.FunctionType):
        return {}
    variables = inspect.getclosurevars(function)
    return {k: v for k, v in {**variables.globals, **variables.nonlocals}.items() if isinstance(v, nn.Module)}


def _compile_module(
    module: nn.Module, executors: Any, transforms: Sequence[Transform], config: CompileConfig
) -> nn.Module:
    pipeline = make_pipeline(executors, transforms, config, {"": module})
    for transform in transforms:
        transform.module(module)
    if config.mode == "off":
        return module
    record = Record(type(module).__qualname__, mode=config.mode)
    if config.mode == "submodules":
        entries = {child: module_entry(child, pipeline, record) for child in module.children()}

        def entry(*args: Any, **kwargs: Any) -> Any:
            with recording(record), _torch_dynamo.compiled_calls(entries):
                return _torch_dynamo.plain_call(module)(*args, **kwargs)
    else:
        entry = module_entry(module, pipeline, record)
    return compiled_view(module, entry, lambda: [record])


def module_entry(module: nn.Module, pipeline: Pipeline, record: Record) -> Callable:
    """A compiled function that stands for calling ``module`` with its hooks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _torch_dynamo.plain_call(module)(*args, **kwargs)

    call.__qualname__ = f"{type(module).__qualname__}.__call__"
    return CompiledFunction(call, pipeline, record)


class _Switch:
    """Plain attribute, so that Dynamo can guard on it."""

    on: bool = False


_INLINE = _Switch()


@contextmanager
def inlined_views() -> Iterator[None]:
    """While open, calls of compiled views run their module's own code: for a larger function that is being compiled."""
    before = _INLINE.on
    _INLINE.on = True
    try:
        yield
    finally:
        _INLINE.on = before


def compiled_view(module: nn.Module, entry: Callable, records: Callable[[], list[Record]]) -> nn.Module:
    """A module that shares its whole state with ``module``, and whose calls go to ``entry``.

    Pickle and deepcopy of the view give the plain module. A ``torch.compile`` around it does not read into ``entry``.
    """
    original = type(module)
    plain_call = original.__call__  # Dynamo of torch 2.11 cannot look this up on a class
    run = torch.compiler.disable(entry)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain_call(self, *args, **kwargs) if _INLINE.on else run(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return module.__reduce_ex__(1)  # newer protocols refuse an object whose class is not the one they write

    namespace = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_lts_records": staticmethod(records),
    }
    view = object.__new__(types.new_class(original.__name__, (original,), exec_body=lambda ns: ns.update(namespace)))
    view.__dict__ = module.__dict__
    return view
