"""For all tests."""

from tests.faster import compile_faster


def pytest_collection_finish() -> None:
    compile_faster()
