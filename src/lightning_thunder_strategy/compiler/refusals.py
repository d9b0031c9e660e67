"""Values that a constructor refuses are errors of the command line when they come from one."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Optional, TypeVar, Union, get_args

T = TypeVar("T")


def told_by_the_parser(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__``: what it refuses while jsonargparse makes the object is that parser's error, in one line.

    Alone jsonargparse would show what a constructor says about a value as the last line of a long traceback. And a
    value that is not of an option's type it refuses itself, in a text that lists each type of each union around it, and
    not always what is allowed. So it is told that it may pass on any value, and the constructor has to judge them all.
    ``JSONARGPARSE_DEBUG=true`` shows tracebacks; with ``exit_on_error=False`` errors raise.
    """

    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            for name in kwargs.keys() - signature.parameters.keys():
                options = ", ".join(list(signature.parameters)[1:])
                raise TypeError(f"{name!r} is an unexpected keyword argument: choose from {options}.")
            init(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            parser = _parser_at_work()
            if parser is None or not parser.exit_on_error:
                raise
            parser.error(f"{type(self).__name__}: {error}", error)

    wrapped.__signature__ = _for_any_value(signature)  # type: ignore[attr-defined]
    return wrapped


def told_by_the_parser_too(cls: type[T]) -> type[T]:
    """Decorate a dataclass, whose ``__init__`` nobody has written: :func:`told_by_the_parser`."""
    cls.__init__ = told_by_the_parser(cls.__init__)  # type: ignore[misc]
    return cls


def _for_any_value(signature: inspect.Signature) -> inspect.Signature:
    """The signature that jsonargparse reads."""
    parameters = [
        parameter.replace(annotation=_any_value(parameter.annotation))
        if parameter.annotation not in (Any, parameter.empty)
        else parameter
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


def _any_value(annotation: Any) -> Any:
    """Any value; text or a number where objects belong, as only jsonargparse knows why it cannot make one."""
    return Union[annotation, int, float, str] if _has_objects(annotation) else Union[annotation, Any]


def _has_objects(annotation: Any) -> bool:
    """Whether values of this type are, or hold, objects of classes of this package that are not plain options."""
    ours = isinstance(annotation, type) and annotation.__module__.startswith(__name__.partition(".")[0])
    return (ours and not is_dataclass(annotation)) or any(_has_objects(part) for part in get_args(annotation))


def _parser_at_work() -> Optional[Any]:
    """The outermost parser that is making objects now: inner ones raise their errors into those of a union."""
    jsonargparse = sys.modules.get("jsonargparse")
    frame, found = sys._getframe(), None
    while jsonargparse is not None and frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(caller, jsonargparse.ArgumentParser):
            found = caller
    return found
