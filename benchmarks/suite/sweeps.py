"""Time and memory of scoring one group against group size, prompt length, completion length and vocabulary."""

from __future__ import annotations

from peft import get_peft_model

from suite.measure import MIB, MemoryAbove, seconds_of
from suite.models import lora, random_llama
from suite.parts import SCORING, group_of

# Random weights in the default model's shape with few of its layers: what is compared are the ways of scoring.
SHALLOW = {"hidden_size": 576, "layers": 4, "heads": 8}
# With the largest vocabularies the head is most of the work, whatever is below it.
NARROW = {"hidden_size": 64, "layers": 2, "heads": 4}


def measure_point(*, sizes: dict[str, int], narrow: bool) -> dict[str, dict[str, float]]:
    """Seconds and peak MiB of forward and backward, by way of scoring.

    Args:
        sizes: group size, tokens of prompt and completion, and size of the vocabulary.
    """
    shape = NARROW if narrow else SHALLOW
    model = get_peft_model(random_llama(sizes["vocabulary_size"], **shape), lora())
    model.train()
    samples = group_of(**sizes)
    works = {side: SCORING[side](model, samples) for side in SCORING}
    peaks = {}
    for side, work in works.items():
        memory = MemoryAbove(model)
        work()
        peaks[side] = memory.bytes() / MIB
    return {side: {"seconds": seconds_of(work), "peak_mib": peaks[side]} for side, work in works.items()}
