"""Finds the latest model of a run: the one in its folder, or that of a later checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from grupo.errors import ConfigError
from grupo.runs.checkpoint import checkpoint_problems, checkpoint_steps
from grupo.runs.manifest import MODEL_STEP
from grupo.utils.files import read_json
from grupo.utils.messages import BASE_QUANTIZATION

logger = logging.getLogger("grupo")

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
MODEL_FILES = ("adapter_*", "model*", "pytorch_model*", "*config.json", "*token*", BASE_QUANTIZATION)
"""Patterns of the files in a checkpoint that make up a model, without optimizer state."""


def resolve_latest(name: str) -> str:
    """The model or folder to load for `name`: for a run, the latest checkpoint that is newer than its saved model.

    A run has such checkpoints if it was killed, before it saved a model or after it was resumed. If there is a choice,
    one log line names what is used.

    Raises:
        ConfigError: the run has neither a model nor an intact checkpoint.
    """
    run = Path(name)
    steps = checkpoint_steps(run)
    if not steps:
        return name
    manifest = read_json(run / "manifest.json")
    saved_step = manifest.get(MODEL_STEP)
    adapter = manifest.get("adapter")
    folder = run if adapter in (None, "default") else run / adapter  # where peft saves an adapter with another name
    has_model = any((folder / weights).is_file() for weights in (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS))
    damaged = []
    for step in steps:
        if has_model and saved_step is not None and step <= saved_step:
            break
        checkpoint = run / f"checkpoint-{step}"
        if problems := checkpoint_problems(checkpoint, MODEL_FILES):
            damaged.append(f"{checkpoint.name}: {', '.join(problems)}")
        elif has_model and saved_step is None:
            logger.warning(
                "%s has a model of an unknown step, and %s. Using the model; to use the checkpoint, name %s.",
                run, checkpoint.name, checkpoint,
            )  # fmt: skip
            return name
        else:
            reason = f"its saved model is older (step {saved_step})" if has_model else "it has no saved model"
            skipped = f"; skipped as damaged: {'; '.join(damaged)}" if damaged else ""
            logger.warning("%s: %s; using its latest checkpoint, %s%s.", run, reason, checkpoint.name, skipped)
            return str(checkpoint)
    if not has_model:
        raise ConfigError(f"{run} has no saved model and no intact checkpoint ({'; '.join(damaged)}).")
    if damaged and saved_step is not None:
        logger.warning(
            "%s: the checkpoints after its saved model (step %d) are damaged (%s). Using the model.",
            run, saved_step, "; ".join(damaged),
        )  # fmt: skip
    return name
