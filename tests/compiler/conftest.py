import warnings

import pytest

from lightning_thunder_strategy.compiler.report import CompileWarning


@pytest.fixture(autouse=True)
def compile_warnings_are_errors():
    """What runs in another way than asked for fails a test, unless the test expects the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompileWarning)
        yield
