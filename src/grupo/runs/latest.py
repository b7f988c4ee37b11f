"""Where the newest model of a run is: in its folder, or in a checkpoint of a later step."""

from __future__ import annotations

import logging
from pathlib import Path

from grupo.errors import ConfigError
from grupo.runs.checkpoint import damage, numbers_of_checkpoints
from grupo.runs.folder import MODEL_STEP, read_json
from grupo.utils.messages import BASE_QUANTIZATION

logger = logging.getLogger("grupo")

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
MODEL_FILES = ("adapter_*", "model*", "pytorch_model*", "*config.json", "*token*", BASE_QUANTIZATION)
"""Patterns of a checkpoint's files that make a model; its optimizer may be missing."""


def newest_model(name: str) -> str:
    """What to load by the name of a model or a folder: of a run, the checkpoint that is newer than the model in it.

    A run that was resumed after it had saved its model, and killed, has such checkpoints; so has one that was killed
    before it saved any. Where there is a choice, one line says what is taken.

    Raises:
        ConfigError: the run has neither a model nor a checkpoint that is whole.
    """
    run = Path(name)
    numbers = numbers_of_checkpoints(run)
    if not numbers:
        return name
    manifest = read_json(run / "manifest.json") if (run / "manifest.json").is_file() else {}
    step = manifest.get(MODEL_STEP)
    trained = manifest.get("adapter")
    home = run if trained in (None, "default") else run / trained  # where peft puts an adapter with a name of its own
    has_model = any((home / weights).is_file() for weights in (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS))
    damaged = []
    for number in numbers:
        if has_model and step is not None and number <= step:
            break
        checkpoint = run / f"checkpoint-{number}"
        if wrong := damage(checkpoint, MODEL_FILES):
            damaged.append(f"{checkpoint.name}: {', '.join(wrong)}")
        elif has_model and step is None:
            logger.warning(
                "%s has a model, nobody knows of which step, and %s. The model is taken; name %s to have that.",
                run, checkpoint.name, checkpoint,
            )  # fmt: skip
            return name
        else:
            older = f"the model in it is older (step {step})" if has_model else "no model is saved in it"
            skipped = f"; damaged is {'; '.join(damaged)}" if damaged else ""
            logger.warning("%s: %s; its newest checkpoint, %s, is taken%s.", run, older, checkpoint.name, skipped)
            return str(checkpoint)
    if not has_model:
        raise ConfigError(f"{run} has no saved model and no checkpoint that is whole ({'; '.join(damaged)}).")
    if damaged and step is not None:
        logger.warning(
            "%s: what is newer than its model (step %d) is damaged (%s). The model is taken.",
            run, step, "; ".join(damaged),
        )  # fmt: skip
    return name
