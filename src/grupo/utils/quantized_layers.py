"""Linear layers of bitsandbytes: which they are, and the mode, training or evaluation, that they are run in.

bitsandbytes is an extra and is not imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_4bit(module: nn.Module) -> bool:
    return _is_of_bitsandbytes(module, "Linear4bit")


def is_8bit(module: nn.Module) -> bool:
    return _is_of_bitsandbytes(module, "Linear8bitLt")


def _is_of_bitsandbytes(module: nn.Module, name: str) -> bool:
    """By name, so that the package need not be imported to say no."""
    return any(cls.__name__ == name and cls.__module__.startswith("bitsandbytes.") for cls in type(module).__mro__)


def quantized_layers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if is_4bit(module) or is_8bit(module):
            yield module


def set_evaluation_mode(model: nn.Module) -> None:
    """Calls `model.eval()`, and puts quantised layers back into training mode.

    No other code of grupo calls `eval()`, because in evaluation mode on CPUs bitsandbytes computes something else than
    what is trained. It quantises the inputs of 8-bit layers as well. On processors with AVX512-BF16 it packs the
    weights of 4-bit layers for good: their scales and all products are rounded to bfloat16, and no gradient passes
    through them. Training mode has no other effect on quantised layers.
    """
    model.eval()
    for layer in quantized_layers(model):
        layer.training = True


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`set_evaluation_mode` within the context; afterwards every module is in the mode that it was in before."""
    with modes_restored(model):
        set_evaluation_mode(model)
        yield


@contextlib.contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """After the context every module is in the mode, training or evaluation, that it was in before."""
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def keep_unpacked(model: nn.Module) -> None:
    """Keeps bitsandbytes from packing the weights of 4-bit layers, in whatever mode they are run.

    It is called for every model that grupo loads or trains, since code that does not know about packing calls `eval()`
    on these, too: callbacks of a script do, and peft does when the trainer loads the best checkpoint.
    """
    for layer in quantized_layers(model):
        if is_4bit(layer):
            layer.support_avx512bf16_for_cpu = False
