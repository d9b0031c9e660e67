"""Turns the functions of a module of checks into tests that share one group of processes."""

import importlib
from typing import Any, Optional

import pytest

from tests.distributed.ranks import run_ranks


def names(module: str) -> list[str]:
    """The checks of ``tests.distributed.<module>``: its functions called ``check_...``, in order."""
    imported = importlib.import_module(f"tests.distributed.{module}")
    return [name for name in vars(imported) if name.startswith("check_")]


class Group:
    """Runs all checks of some modules that this session selected, at the first one that is asked for.

    Args:
        modules: Modules in ``tests.distributed``.
        options: For :func:`run_ranks`.
    """

    def __init__(self, *modules: str, **options: Any) -> None:
        self._modules = modules
        self._options = options
        self._results: Optional[dict[str, list]] = None

    def parametrize(self) -> Any:
        """A decorator for ``def test(check)``."""
        checks = [f"{module}:{name}" for module in self._modules for name in names(module)]
        return pytest.mark.parametrize("check", checks, ids=[name.split("check_")[1] for name in checks])

    def assert_passed(self, check: str, request: pytest.FixtureRequest) -> None:
        """Assert that ``check`` passed on every rank."""
        if self._results is None:
            selected = [
                item.callspec.params["check"] for item in request.session.items if _same_test(item, request.node)
            ]
            self._results = run_ranks(*selected, check=False, **self._options)
        failures = [f"rank {rank}:\n{text}" for rank, text in enumerate(self._results[check]) if text is not None]
        assert not failures, "\n".join(failures)


def _same_test(item: Any, node: Any) -> bool:
    return item.path == node.path and getattr(item, "originalname", None) == node.originalname
