"""Checks that need no trainer: what is refused before the first step, and what is only warned of."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grupo.config import GRPOConfig
from grupo.config.optimizer import check_optimizer_arguments
from grupo.errors import ConfigError, RewardError, UnsupportedError
from grupo.models.peft_io import SavedAdapter
from grupo.utils.files import read_json
from grupo.utils.messages import did_you_mean, pluralize

logger = logging.getLogger("grupo")


def check_output_folder(config: GRPOConfig, model: str, adapter: SavedAdapter | None, *, adds_adapter: bool) -> None:
    """What training starts from is needed again: to repeat or resume the run, for its reference policy and its adapter.

    Args:
        adapter: what `model` names, if it is one.
        adds_adapter: a fresh one is put on the model, whose own files may then lie beside those of the run.

    Raises:
        ConfigError: the run would write in its place, or move it aside as an earlier run.
    """
    output, start = Path(str(config.output_dir)).resolve(), Path(model if adapter is None else adapter.folder).resolve()
    manifest = output / "manifest.json"
    is_whole_run = manifest.is_file() and read_json(manifest).get("adapter") is None
    stays = adds_adapter and adapter is None and not is_whole_run
    is_checkpoint = output == start.parent and start.name.startswith("checkpoint-")
    if (output == start and not stays) or is_checkpoint:
        raise ConfigError(
            f"output_dir={config.output_dir!r} is the folder of the {'model' if adapter is None else 'adapter'} that "
            "training starts from, which would be overwritten, or moved. Choose another folder."
        )


def check_optimizer(optimizer: Any, model: Any, config: GRPOConfig) -> None:
    """An optimizer that was made for other parameters would move none of those that have gradients.

    Raises:
        ConfigError: it lacks trainable parameters of the model; None was given, and `optim` does not fit the model.
    """
    if optimizer is None:
        check_optimizer_arguments(config, model)
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    missing = sum(id(parameter) not in held for parameter in trainable)
    if missing:
        raise ConfigError(
            f"The optimizer in `optimizers` lacks {missing} of the model's "
            f"{pluralize(len(trainable), 'trainable parameter')}, which would never move. Make it from the model that "
            "is trained, after its adapter was added; freeze what is not to be trained with requires_grad_(False)."
        )


def warn_if_updates_underflow(model: Any, learning_rate: float) -> None:
    """A step of AdamW is about `learning_rate` in size, and less than half of a weight's last place is rounded away."""
    low = [p.detach() for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    total = sum(parameter.numel() for parameter in low)
    lost = sum(int((p.abs() * (torch.finfo(p.dtype).eps / 4) > learning_rate).sum()) for p in low)
    if 2 * lost > total:
        logger.warning(
            "%.0f%% of the trained weights are kept in %s, in which a step of learning_rate=%g is rounded away: they "
            "will not move. Load the model in float32 (bf16=True computes in bfloat16 all the same), or train an "
            "adapter.",
            100 * lost / total,
            str(low[0].dtype).removeprefix("torch."),
            learning_rate,
        )


def refuse_unsupported(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not supported by this version of grupo. Leave it out.")


def check_best_metric(config: GRPOConfig, eval_dataset: Any) -> None:
    """The base class would look for the metric only after the first evaluation."""
    if config.metric_for_best_model is None or config.eval_strategy == "no":
        return
    chosen = f"metric_for_best_model={config.metric_for_best_model!r}"
    name = config.metric_for_best_model.removeprefix("eval_")
    if name == "loss":
        raise ConfigError(f"{chosen}: there is no eval_loss, as it says nothing about progress. Set it to 'reward'.")
    if isinstance(eval_dataset, Mapping) and not any(name.startswith(f"{dataset}_") for dataset in eval_dataset):
        options = ", ".join(repr(f"{dataset}_reward") for dataset in eval_dataset)
        raise ConfigError(f"{chosen}: eval_dataset has several datasets, so it must name one. Set it to {options}.")


def check_watched_metric(watched: str | None, metrics: Mapping[str, float], rewards: Sequence[str]) -> None:
    """An evaluation has the metric by which models are chosen, or learning rates follow.

    Raises:
        RewardError: it is one of rewards, and nothing was scored.
        ConfigError: there is no metric of this name.
    """
    if watched is None or (name := f"eval_{watched.removeprefix('eval_')}") in metrics:
        return
    of_rewards = ("reward", "reward_std", *(f"rewards/{one}/{kind}" for one in rewards for kind in ("mean", "std")))
    if name.endswith(of_rewards):
        raise RewardError(
            f"metric_for_best_model={watched!r}, and the evaluation has none, because no completion of it was scored: "
            "the reward functions abstained on all of them. Evaluation needs prompts that a reward applies to."
        )
    raise ConfigError(
        f"metric_for_best_model={watched!r} is no metric of an evaluation.{did_you_mean(name, metrics)} It has "
        f"{', '.join(sorted(metrics))}."
    )


def check_processes(gpus: int) -> None:
    """Refuses one process with several GPUs, which torch would use through DataParallel.

    Args:
        gpus: how many this process sees.
    """
    if gpus > 1:
        raise UnsupportedError(
            f"One process sees {gpus} GPUs, which torch would use through DataParallel. Start one process per GPU with "
            f"`accelerate launch --num_processes {gpus}`, or show it one GPU by CUDA_VISIBLE_DEVICES=0."
        )
