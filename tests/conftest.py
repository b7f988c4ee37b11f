"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from processors import bitsandbytes_sees

# Tiny models gain nothing from more threads, and the threads of two test processes on two cores wait for each other.
# The processes that tests start inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session", autouse=True)
def imported_modules_are_no_garbage():
    """Each run of the base trainer collects garbage, which would walk through all of torch a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=[True, False], ids=["AVX512-BF16", "no AVX512-BF16"])
def processor(request):
    """Both kinds of processor, whatever this one is; 4-bit layers that are made within the test must not be packed."""
    pytest.importorskip("bitsandbytes")
    with bitsandbytes_sees(avx512_bf16=request.param):
        yield
