"""Time and memory of scoring one group against group size, prompt length, completion length and vocabulary."""

from __future__ import annotations

from typing import Any

from peft import get_peft_model

from suite.measure import MIB, MemoryAbove, interleaved, medians
from suite.models import lora, random_llama
from suite.parts import SCORING, group_of

# Random weights in the default model's shape with few of its layers: what is compared are the ways of scoring.
SHALLOW = {"hidden_size": 576, "layers": 4, "heads": 8}
# With the largest vocabularies the head is most of the work, whatever is below it.
NARROW = {"hidden_size": 64, "layers": 2, "heads": 4}


def measure_sweep(*, axis: str, values: list[int], base: dict[str, int], narrow: bool, repeats: int) -> dict[str, Any]:
    """One point for each value of `axis`: seconds and peak MiB of forward and backward, by way of scoring.

    Args:
        base: group size, tokens of prompt and completion, and size of the vocabulary, where they do not vary.
    """
    shape = NARROW if narrow else SHALLOW
    return {"axis": axis, "values": values, "points": [_point({**base, axis: v}, shape, repeats) for v in values]}


def _point(sizes: dict[str, int], shape: dict[str, int], repeats: int) -> dict[str, dict[str, float]]:
    model = get_peft_model(random_llama(sizes["vocabulary_size"], **shape), lora())
    model.train()
    samples = group_of(**sizes)
    works = {side: SCORING[side](model, samples) for side in SCORING}
    peaks = {}
    for side, work in works.items():
        memory = MemoryAbove(model)
        work()
        peaks[side] = memory.bytes() / MIB
    seconds = medians(interleaved(works, repeats, warm_up=0))
    return {side: {"seconds": seconds[side], "peak_mib": peaks[side]} for side in works}
