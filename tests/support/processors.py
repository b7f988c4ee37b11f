"""What bitsandbytes believes of the processor, so that one machine shows what happens on the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def bitsandbytes_sees(*, avx512_bf16: bool) -> Iterator[None]:
    """4-bit layers that are made within the context take the processor for one with or without AVX512-BF16.

    Where one of them would be packed for it, the test fails at once, so that no processor needs to have the product
    that comes next.
    """
    with (
        mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: avx512_bf16),
        mock.patch("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", _packs),
    ):
        yield


def _packs(*args: Any) -> Any:
    raise AssertionError("bitsandbytes was about to pack the weight of a 4-bit layer for this processor")
