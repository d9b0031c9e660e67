"""Fixtures of these tests."""

from tests.distributed.fake_group import mesh  # noqa: F401 - a fixture
