"""Fixtures of all tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_modules_are_no_garbage():
    """Each run of the base trainer collects garbage, which would walk through all of torch a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
