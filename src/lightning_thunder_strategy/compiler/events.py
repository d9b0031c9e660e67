"""Listens to Dynamo: graph breaks, recompilations and the recompile limit, for the record that is active."""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from time import perf_counter  # by name: tests of users replace `time.perf_counter`
from typing import Any, Optional

import torch

from lightning_thunder_strategy.compiler import _torch_dynamo
from lightning_thunder_strategy.compiler.report import Fallback, GraphBreak, Recompile, Record, active_record, warn

_BREAK = re.compile(r"in user code at (?P<file>.+):(?P<line>\d+)\n(?:Graph Break Reason: )?(?P<reason>.*)", re.DOTALL)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SKIPS = "Skipping the function and falling back to eager"
_OWN = str(Path(__file__).parent.parent)
_ENTRY = str(Path(__file__).with_name("compile.py"))
_LIBRARIES = [_OWN, str(Path(torch.__file__).parent)]
_RAISED = re.compile(r"Developer debug context: raised exception (?P<exception>.+)")
_COMPILE_ID = re.compile(r"^\d+/\d+: ")
_FAILED = re.compile(r"WON'T CONVERT (?P<function>\S+) ")
_LIMIT = re.compile(r"last reason: (?P<reason>.*)")

HOST_SOURCES: ContextVar[Sequence[str]] = ContextVar("lts_host_sources", default=())
"""Regular expressions of the sources that Dynamo should treat as changing integers from their first value on."""

compile_started: float = 0.0
_programs_before = 0  # of the active record, when the compilation began
_while_compiling: Optional[contextlib.ExitStack] = None
_installed = False


def install() -> None:
    """Read what Dynamo writes into its logs, once a process."""
    global _installed
    if _installed:
        return
    _installed = True
    handler = _BreakHandler()
    for logger in _torch_dynamo.artifact_loggers():
        if not logger.isEnabledFor(logging.DEBUG):
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
        logger.addHandler(handler)
    _torch_dynamo.convert_frame_logger().addFilter(_frame_filter)


def collect_recompiles(record: Record) -> None:
    """Move the reasons of new recompilations from Dynamo's metrics into ``record``."""
    if not record.compile_ids:
        return
    reasons = _torch_dynamo.recompile_reasons()
    for compile_id in sorted(record.compile_ids & reasons.keys()):
        record.recompiles.append(Recompile(_first_line(reasons[compile_id])))
    record.compile_ids.clear()


def _start(compile_id: str) -> None:
    global compile_started, _programs_before, _while_compiling
    record = active_record()
    if record is None:
        return
    compile_started = perf_counter()
    record.compile_ids.add(compile_id)
    _programs_before = len(record.programs)
    if _while_compiling is None:
        _while_compiling = contextlib.ExitStack()
        _while_compiling.enter_context(_torch_dynamo.compile_settings(HOST_SOURCES.get()))


def _end(compile_id: str) -> None:
    global _while_compiling
    if _while_compiling is not None:
        _while_compiling.close()
        _while_compiling = None


_LISTENERS = _torch_dynamo.CompileListeners(_start, _end)


class _BreakHandler(logging.Handler):
    def emit(self, log_record: logging.LogRecord) -> None:
        record = active_record()
        if record is None:
            return
        message = log_record.getMessage()
        match = _BREAK.search(message) or _FRAME.search(message)
        if match is None:
            return
        reason = match.groupdict().get("reason") or message
        place = (match["file"], int(match["line"]))
        stack = [(frame["file"], int(frame["line"])) for frame in _FRAME.finditer(message)]
        # Dynamo leaves the stack out when it meets the same break again.
        place = record.break_places.setdefault(place, user_place(stack) or place)
        found = GraphBreak(*place, dynamo_reason(reason))
        if _SKIPS in reason:
            if found in record.graph_breaks:
                record.graph_breaks.remove(found)
            found = replace(found, reason=f"{found.reason.rstrip('.')}. The whole function runs eagerly.")
        if found not in record.graph_breaks:
            record.graph_breaks.append(found)


def _frame_filter(log_record: logging.LogRecord) -> bool:
    """Turn Dynamo's lines about the recompile limit and about its own failures into our warnings."""
    record = active_record()
    message = log_record.getMessage()
    if record is None:
        return True
    failed = _FAILED.match(message)
    if failed is not None and log_record.exc_info and log_record.exc_info[1] is not None:
        _report_failure(record, failed["function"].partition("#")[0], log_record.exc_info[1])
        return False
    if "recompile_limit" not in message and "hit config." not in message:
        return True
    match = _LIMIT.search(message)
    reason = _first_line(match["reason"]) if match else _first_line(message)
    if record.limit_reason is None:
        record.limit_reason = " ".join(_COMPILE_ID.sub("", reason).split())
    return False


def _report_failure(record: Record, function: str, error: BaseException) -> None:
    del record.programs[_programs_before:]  # made, but never run
    found = Fallback(f"the function {function}", "TorchDynamo", first_line(error))
    if found not in record.fallbacks:
        record.fallbacks.append(found)
        record.notices.append(f"TorchDynamo failed on {found.region}, which runs eagerly: {found.error}")


def report_failures(record: Record) -> None:
    """After a call has returned: if it was an error of the user's own, eager PyTorch has raised it by now."""
    for notice in record.notices:
        warn(f"{record.name}: {notice}")
    record.notices.clear()


def limit_text(reason: str) -> str:
    """What happened when a function needed a new program for every value of something, and what to do."""
    return (
        f"it was compiled too often: the guard {reason!r} failed again and again, so it is no longer compiled for new "
        f"values. {advice(reason)}"
    )


def report_limit(record: Record) -> None:
    """Say once that the recompile limit was reached."""
    if record.limit_reason is not None and not record.limit_reported:
        record.limit_reported = True
        warn(f"{record.name}: {limit_text(record.limit_reason)}")


def advice(reason: str) -> str:
    """What a user can do about a value that changes from call to call."""
    if re.match(r"(not |len\()", reason):
        return "If this is a list or dictionary that grows every step, fill it in a hook such as on_train_batch_end."
    return (
        "If this is a Python number that changes every step, make it a tensor: a float on the module as a buffer, "
        "math.exp(step) as torch.exp(torch.tensor(step))."
    )


def hide_frames(folder: Path) -> None:
    """From now on places in this folder are not named as the user's."""
    _LIBRARIES.append(str(folder))


def user_place(stack: Sequence[tuple[str, int]]) -> Optional[tuple[str, int]]:
    """The innermost call of a stack, given from the outside in, that is not in a library."""
    entered = max((index for index, (file, _) in enumerate(stack) if file == _ENTRY), default=-1)
    inside = [place for place in stack[entered + 1 :] if not place[0].startswith(tuple(_LIBRARIES))]
    return inside[-1] if inside else None


def dynamo_reason(text: str) -> str:
    """What Dynamo says happened, in a sentence or two: without its hints, which are for developers of torch."""
    raised = _RAISED.search(text)
    if raised is not None:
        return f"it raises {raised['exception']}"
    kept: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("Encountered graph break when") or _SKIPS in line:
            continue
        if line.startswith(("Hint:", "User code", "Traceback", 'File "', "Developer debug", "from user code")):
            break
        if not line and "Explanation:" in " ".join(kept):
            break
        if line:
            kept.append(line)
    return " ".join(kept[:4]).replace(" Explanation:", ":")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].strip() if text.strip() else text


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def call_within(record: Record, sources: Sequence[str], function: Callable[[], Any]) -> Any:
    """Call ``function`` with host integers named by ``sources`` symbolic, and collect what was recompiled."""
    _LISTENERS.attach()
    token = HOST_SOURCES.set(sources)
    try:
        return function()
    finally:
        HOST_SOURCES.reset(token)
        collect_recompiles(record)
