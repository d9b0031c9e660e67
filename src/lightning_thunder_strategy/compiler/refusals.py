"""Values that a constructor refuses are errors of the command line when they come from one."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Optional


def told_by_the_parser(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__``: what it refuses while jsonargparse makes the object is that parser's error.

    jsonargparse checks types when it parses, and would show what a constructor says about a value as the last line of
    a long traceback. Its ``error`` prints one line and ends the program, unless that has chosen that errors raise.
    ``JSONARGPARSE_DEBUG=true`` shows the traceback.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            parser = _parser_at_work()
            if parser is None or not parser.exit_on_error:
                raise
            parser.error(f"{type(self).__name__}: {error}", error)

    return wrapped


def _parser_at_work() -> Optional[Any]:
    """The parser that is making objects now. It has no public name (jsonargparse 4.41 to 4.53)."""
    common = sys.modules.get("jsonargparse._common")
    variable = getattr(common, "parent_parser", None)
    return None if variable is None else variable.get()
