"""What the trainer is made of: parts and small checks that need no trainer."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from grupo.algo.entropy import EntropyController
from grupo.chat_templates import set_chat_template
from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.config.optimizer import check_optimizer_arguments
from grupo.data.curriculum import AdaptiveStream, Curriculum
from grupo.data.prompts import PromptStream, TokenizedRow, plain_rows
from grupo.errors import ConfigError, DataError, RewardError, UnsupportedError
from grupo.models.inspect import check_causal
from grupo.models.load import load_tokenizer
from grupo.models.load_options import LoadOptions
from grupo.models.peft_io import SavedAdapter, find_adapter, load_named, parameter_checksums
from grupo.models.peft_setup import add_adapter, add_tokens, check_adapter_config
from grupo.rewards.execution.runner import RewardRunner
from grupo.rewards.library.reward_model import RewardFunctions, wrap_reward_models
from grupo.rollout.groups import DynamicSampling
from grupo.runs.resume_check import IGNORED, METRIC_DRIVEN
from grupo.sampling import SAMPLING_FIELDS
from grupo.utils.files import read_json
from grupo.utils.messages import did_you_mean, pluralize

logger = logging.getLogger("grupo")

WATCHING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Learning rates that follow what evaluations find."""
STEADY_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", *WATCHING_SCHEDULES)
"""Learning rates that do not depend on how many steps the run will have."""


class LastStepIsLogged(TrainerCallback):
    """What came after the last multiple of `logging_steps` would be in no log."""

    place = 1
    """See `EndOfStep`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True


class _StepArguments(GRPOConfig):
    """The arguments that the base class sees: accumulation 1. Files and reporters get the user's number."""

    # Without a default, and the class is no dataclass of its own: this is no field.
    users_gradient_accumulation_steps: int

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "gradient_accumulation_steps": self.users_gradient_accumulation_steps}


def one_item_per_step(config: GRPOConfig, asked: LoadOptions) -> GRPOConfig:
    """A copy with accumulation 1, and checkpointing as the model was asked for where `config` leaves it open.

    `dataclasses.replace` would run `__post_init__` again and reset accelerate.
    """
    args = copy.copy(config)
    args.__class__ = _StepArguments
    assert isinstance(args, _StepArguments)
    args.users_gradient_accumulation_steps = config.gradient_accumulation_steps
    args.gradient_accumulation_steps = 1
    args.enable_jit_checkpoint = False  # every SIGTERM saves a checkpoint
    if asked.checkpointing is not None:
        _set_checkpointing(args, asked)
    return args


def _set_checkpointing(args: GRPOConfig, asked: LoadOptions) -> None:
    names = {f"{kind}_checkpointing{end}" for kind in ("gradient", "activation") for end in ("", "_kwargs")}
    if names & args.explicit_fields:
        if bool(args.gradient_checkpointing) != asked.checkpointing:
            logger.warning(
                "gradient_checkpointing=%r in GRPOConfig, and use_gradient_checkpointing of the model said otherwise: "
                "GRPOConfig counts.",
                args.gradient_checkpointing,
            )
        return
    args.gradient_checkpointing = args.activation_checkpointing = bool(asked.checkpointing)
    # On the CPU they are in host memory already.
    if asked.offload and args.device.type != "cpu":
        args.offload_activations = True


class UnchangedIsTold(TrainerCallback):
    """Says so where training has left every weight as it was: the saved model would be the one that was loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._start, self._first_step = parameter_checksums(model), state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        steps = state.global_step - self._first_step
        if steps and parameter_checksums(model) == self._start:
            no_gradient = "no step had a gradient (see frac_reward_zero_std)"
            reason = no_gradient if args.learning_rate else "learning_rate is 0"
            logger.warning(
                "%s changed none of the %s: %s. The saved model is the one that training began with.",
                pluralize(steps, "optimizer step"),
                pluralize(len(self._start), "trainable parameter"),
                reason,
            )


def policy(
    model: Any, config: GRPOConfig, *, processing_class: Any = None, quantization_config: Any, peft_config: Any
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model to train, loaded where it is given by name, with a fresh adapter where one is asked for; and the
    tokenizer: the one that was given, that of the adapter with which training goes on, or the model's own.
    """
    of_adapter = None
    if peft_config is not None:
        check_adapter_config(peft_config)  # before anything is loaded
    if isinstance(model, str):
        kwargs = mapping(config.model_init_kwargs) or {}
        adapter = find_adapter(model, kwargs)
        check_output_folder(config, model, adapter, adds_adapter=peft_config is not None)
        model, of_adapter = load_named(
            model,
            adapter,
            kwargs,
            trust_remote_code=config.trust_remote_code,
            quantization_config=quantization_config,
        )
    elif config.model_init_kwargs or quantization_config is not None:
        raise ConfigError(
            "model_init_kwargs and quantization_config apply when the model is loaded here, but a model object was "
            "given. Pass the model's name, or load it with these arguments yourself."
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; give a causal language model, or the name or path of one.")
    check_causal(model)
    tokenizer = _tokenizer(model, config, of_adapter if processing_class is None else processing_class)
    if config.added_tokens:
        peft_config = add_tokens(model, tokenizer, config.added_tokens, peft_config)
    if peft_config is not None:
        model = add_adapter(model, peft_config, revision=(mapping(config.model_init_kwargs) or {}).get("revision"))
    return model, tokenizer


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


def _tokenizer(model: Any, config: GRPOConfig, processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, or the model's own, with the chat template that the configuration names."""
    if processing_class is None:
        processing_class = load_tokenizer(
            model, mapping(config.model_init_kwargs), trust_remote_code=config.trust_remote_code
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise UnsupportedError(
            f"processing_class is {type(processing_class).__name__}; only tokenizers are supported so far, not the "
            "processors of vision models."
        )
    return set_chat_template(processing_class, config.chat_template) if config.chat_template else processing_class


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


def warn_of_rounding(model: Any, learning_rate: float) -> None:
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


def mapping(value: Any) -> Mapping[str, Any] | None:
    """The configuration has parsed what a command line gave as text."""
    assert value is None or isinstance(value, Mapping)
    return value


def refuse_unsupported(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not supported by this version of grupo. Leave it out.")


def reward_runner(
    reward_funcs: RewardFunctions | None, config: GRPOConfig, reward_processing_classes: Any = None
) -> RewardRunner:
    if reward_funcs is None:
        raise ConfigError("GRPOTrainer needs reward_funcs: one function, or a list of functions, of the completions.")
    functions = wrap_reward_models(
        reward_funcs,
        reward_processing_classes,
        chat_template_kwargs=mapping(config.chat_template_kwargs),
        trust_remote_code=config.trust_remote_code,
    )
    rewards = RewardRunner(functions, timeout=config.reward_timeout)
    if config.reward_weights is not None and len(config.reward_weights) != len(rewards.names):
        raise ConfigError(
            f"reward_weights has {pluralize(len(config.reward_weights), 'number')} for "
            f"{pluralize(len(rewards.names), 'reward function')} "
            f"({', '.join(rewards.names)}). Give one weight per function, in the same order."
        )
    if config.reward_weights is not None and not any(config.reward_weights):
        raise ConfigError(f"reward_weights={config.reward_weights}: with weights of 0 alone nothing is rewarded.")
    return rewards


def prompt_stream(config: GRPOConfig, rows: Sequence[TokenizedRow], plan: StepPlan) -> PromptStream:
    """The order of the training prompts; one with a state only where what came of them has a say in it."""
    per_window = plan.prompts_per_rollout * plan.rollouts_per_step
    seed, shuffle = config.resolved_data_seed, config.shuffle_dataset
    if not config.dynamic_sampling and config.curriculum_column is None:
        return PromptStream(rows, prompts_per_window=per_window, seed=seed, shuffle=shuffle)
    curriculum = None
    if config.curriculum_column is not None:
        curriculum = Curriculum(
            rows,
            column=config.curriculum_column,
            threshold=config.curriculum_threshold,
            window=config.curriculum_window,
            success_reward=config.curriculum_success_reward,
            prompts_per_window=per_window,
        )
    return AdaptiveStream(rows, prompts_per_window=per_window, seed=seed, shuffle=shuffle, curriculum=curriculum)


def make_dynamic_sampling(config: GRPOConfig, stream: PromptStream) -> DynamicSampling | None:
    """Where groups without a signal are replaced from; None: they are not."""
    if not config.dynamic_sampling:
        return None
    assert isinstance(stream, AdaptiveStream)
    return DynamicSampling(stream.draw, config.dynamic_sampling_max_rounds)


def entropy_controller(config: GRPOConfig) -> EntropyController | None:
    if not config.use_adaptive_entropy:
        return None
    return EntropyController(
        config.entropy_coef,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        minimum=config.entropy_coef_min,
        maximum=config.entropy_coef_max,
    )


def compared_settings(config: GRPOConfig, plan: StepPlan) -> dict[str, Any]:
    """Name -> plain value of the settings that a resumed run shares with the one that was interrupted."""
    fields = (field.name for field in dataclasses.fields(config) if field.name not in IGNORED)
    sampling = config.sampling_spec()
    settings = {
        **{name: _plain(getattr(config, name)) for name in fields},
        **{name: getattr(sampling, name) for name in SAMPLING_FIELDS},
        "stop": [*config.stop_strings, *sampling.stop_token_ids],
        "data_seed": config.resolved_data_seed,
        "reward_weights": config.reward_weights,
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "steps_per_generation": plan.steps_per_generation,
    }
    if settings["lr_scheduler_type"] in WATCHING_SCHEDULES:
        settings |= {name: _plain(getattr(config, name)) for name in METRIC_DRIVEN}
    is_steady = settings["lr_scheduler_type"] in STEADY_SCHEDULES and not 0 < config.warmup_steps < 1
    return settings if is_steady else {**settings, "steps": plan.total_steps(config.num_train_epochs, config.max_steps)}


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


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


def named_datasets(dataset: Any) -> Mapping[str, Any]:
    return dataset if isinstance(dataset, Mapping) else {"": dataset}


def plain_datasets(dataset: Any) -> Any:
    """One dataset or several by name, pandas tables as rows."""
    if isinstance(dataset, Mapping):
        return {name: plain_rows(part) for name, part in dataset.items()}
    return plain_rows(dataset)


def dataset_length(dataset: Any) -> int:
    if isinstance(dataset, Mapping):
        raise DataError(
            f"The dataset consists of several datasets: {', '.join(map(repr, dataset))}. Pass one of them, as in "
            f"train_dataset=data[{next(iter(dataset), 'train')!r}]."
        )
    if not hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"The dataset is {type(dataset).__name__}, which has no length. Take a finite part of it first, for "
            "example datasets.Dataset.from_list(list(dataset.take(10_000)))."
        )
    return len(dataset)


def only_item(items: list[int]) -> int:
    (item,) = items
    return item
