"""Forks ranks from processes that have imported everything: a rank starts at once, not after seconds of imports.

One such process for even ranks and one for odd ones, so that two ranks differ in what Python draws for a process (the
order of sets of strings), as they do in a real job. They end when the process that started them does, and end the
ranks that still run then.
"""

import atexit
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from tests.faster import compile_faster

ROOT = Path(__file__).parent.parent.parent
READ_AT_IMPORT = ("PYTHON", "TORCH", "OMP_", "MKL_", "OPENBLAS_", "LD_", "CUDA_", "HF_", "LIGHTNING_", "THUNDER_")
READ_LATER = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR")
PRELOADED = (
    "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "torch._inductor.async_compile",
    "torch._inductor.lowering", "torch._inductor.scheduler", "torch._dynamo.testing", "torch._dynamo.debug_utils",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "lightning", "lightning_thunder_strategy.fabric",
    "litgpt", "transformers.models.llama.modeling_llama", "tests.distributed.training", "tests.distributed.parity",
)  # fmt: skip


def _fixed(variables: dict[str, str]) -> dict[str, str]:
    """The variables that count when modules are imported."""
    return {k: v for k, v in variables.items() if k.startswith(READ_AT_IMPORT) and not k.startswith(READ_LATER)}


class Server:
    """A process to fork from, started with ``variables``."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.fixed = _fixed(variables)
        self.owner = os.getpid()
        self.ended: dict[int, int] = {}
        neutral = {key: value for key, value in variables.items() if "RANK" not in key}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.forking"], env=neutral, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def usable(self, variables: dict[str, str]) -> bool:
        """Whether a rank with these variables may be forked from it by this process."""
        return self.owner == os.getpid() and self.fixed == _fixed(variables) and self._process.poll() is None

    def ask(self, **request: Any) -> Any:
        """Its answer to a request."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("The process that ranks are forked from has ended.")
        return json.loads(answer)

    def end(self) -> None:
        """End it and what it has forked, and wait."""
        if self.owner == os.getpid():
            self._process.stdin.close()
            self._process.wait()


class Rank:
    """A forked rank, which leads a process group: as much of ``Popen`` as is used here."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> Optional[int]:
        """The exit code, negative for a signal; ``None`` while it runs."""
        if self.pid not in self._server.ended:
            self._server.ended.update({int(pid): code for pid, code in self._server.ask().items()})
        return self._server.ended.get(self.pid)

    def wait(self) -> None:
        """Wait for its end."""
        if self.poll() is None:
            self._server.ended[self.pid] = self._server.ask(wait=self.pid)


_servers: dict[int, Server] = {}


def started(rank: int, arguments: Sequence[str], variables: dict[str, str], log: Path, folder: Path) -> Any:
    """A process that runs ``python -m tests.distributed.ranks``, forked if ``variables`` allow it."""
    for parity in range(2):  # both at once
        if parity not in _servers or _servers[parity].owner != os.getpid():
            _servers[parity] = Server(variables)
            atexit.register(_servers[parity].end)
    server = _servers[rank % 2]
    if not server.usable(variables):
        command = [sys.executable, "-m", "tests.distributed.ranks", *arguments]
        with open(log, "wb") as out:
            return subprocess.Popen(command, env=variables, stdout=out, stderr=out, cwd=folder, start_new_session=True)
    return Rank(server, server.ask(arguments=list(arguments), variables=variables, log=str(log), folder=str(folder)))


# ----------------------------------------------------------------------------------------------- in the forked from


def _serve() -> Optional[list[str]]:
    """Fork and tell of ends, until the input ends; the arguments, in a forked rank."""
    running: set[int] = set()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "arguments" in request:
                pid = os.fork()
                if not pid:
                    running.clear()
                    _become_a_rank(**request)
                    return request["arguments"]
                running.add(pid)
                answer: Any = pid
            elif "wait" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
                running.discard(request["wait"])
            else:
                answer = {pid: code for pid in sorted(running) if (code := _exit_code(pid)) is not None}
                running -= answer.keys()
            print(json.dumps(answer), flush=True)
        return None
    finally:
        for pid in running:
            _end_group(pid)


def _exit_code(pid: int) -> Optional[int]:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended already, or leads no group yet
        os.kill(pid, signal.SIGKILL)


def _become_a_rank(arguments: list[str], variables: dict[str, str], log: str, folder: str) -> None:
    """What a new process has of its own."""
    import numpy
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for file, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, (1, 2))):
        opened = os.open(file, flags, 0o600)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)
    random.seed()
    numpy.random.seed()
    torch.seed()
    rank_zero_only.rank = int(variables["RANK"])  # Lightning reads it at import


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def main(run: Callable[[str, Sequence[str]], None]) -> None:
    """Import, serve, and run in each forked rank; a rank ends as any process does."""
    import torch

    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    compile_faster()
    assert _threads() == 1, f"importing {PRELOADED} started threads, which forked ranks would miss"
    arguments = _serve()
    if arguments is not None:
        run(arguments[0], arguments[1:])


if __name__ == "__main__":
    from tests.distributed.ranks import _main

    main(_main)
