"""Shared paths."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def root() -> Path:
    """The root of the repository."""
    return ROOT
