"""What the trainer is made of: parts and small checks that need no trainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from grupo.algo.entropy import EntropyController
from grupo.algo.losses import Objective
from grupo.config import GRPOConfig
from grupo.data.curriculum import AdaptiveStream, Curriculum
from grupo.data.prompts import PromptStream, TokenizedRow, plain_rows
from grupo.errors import ConfigError, DataError, UnsupportedError
from grupo.models.load import add_adapter, check_causal, load_policy, load_tokenizer
from grupo.optimizer_rules import check_optimizer_arguments
from grupo.rewards.model import with_reward_models
from grupo.rewards.runner import RewardFunctions, RewardRunner
from grupo.rollout.slots import AdvantageSettings, Refill
from grupo.step_plan import StepPlan

logger = logging.getLogger("grupo")

SIGNAL_FIELDS = (
    *("dynamic_sampling", "dynamic_sampling_max_rounds", "num_generations_trained", "curriculum_column"),
    *("curriculum_threshold", "curriculum_window", "curriculum_success_reward"),
)
"""Settings that decide which prompts are drawn and which of their completions are trained on."""


class LastStepIsLogged(TrainerCallback):
    """What came after the last multiple of `logging_steps` would be in no log."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True


class _StepArguments(GRPOConfig):
    """The arguments that the base class sees: accumulation 1. Files and reporters get the user's number."""

    # Without a default, and the class is no dataclass of its own: this is no field.
    users_gradient_accumulation_steps: int

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "gradient_accumulation_steps": self.users_gradient_accumulation_steps}


def one_item_per_step(config: GRPOConfig) -> GRPOConfig:
    """A copy with accumulation 1. `dataclasses.replace` would run `__post_init__` again and reset accelerate."""
    args = copy.copy(config)
    args.__class__ = _StepArguments
    assert isinstance(args, _StepArguments)
    args.users_gradient_accumulation_steps = config.gradient_accumulation_steps
    args.gradient_accumulation_steps = 1
    return args


def policy(model: Any, config: GRPOConfig, *, quantization_config: Any, peft_config: Any) -> Any:
    """The model to train: loaded where it is given by name, with a fresh adapter where one is asked for."""
    if isinstance(model, str):
        model = load_policy(
            model,
            mapping(config.model_init_kwargs),
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
    return model if peft_config is None else add_adapter(model, peft_config)


def tokenizer_of(model: Any, config: GRPOConfig, processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, or the model's own."""
    if processing_class is None:
        processing_class = load_tokenizer(
            model, mapping(config.model_init_kwargs), trust_remote_code=config.trust_remote_code
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise UnsupportedError(
            f"processing_class is {type(processing_class).__name__}; only tokenizers are supported so far, not the "
            "processors of vision models."
        )
    return processing_class


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
            f"The optimizer in `optimizers` lacks {missing} of the model's {len(trainable)} trainable parameters, "
            "which would never move. Make it from the model that is trained, after its adapter was added; freeze what "
            "is not to be trained with requires_grad_(False)."
        )


def warn_of_rounding(model: Any, learning_rate: float) -> None:
    """A step of AdamW is about `learning_rate` in size, and less than half of a weight's last place is rounded away."""
    low = [p.detach() for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    total = sum(parameter.numel() for parameter in low)
    lost = sum(int((p.abs() * (torch.finfo(p.dtype).eps / 4) > learning_rate).sum()) for p in low)
    if 2 * lost > total:
        logger.warning(
            "%.0f%% of the trained weights are kept in %s, in which a step of learning_rate=%g is rounded away: they "
            "will not move. Load the model in float32 (bf16=True still computes in bfloat16), or train an adapter.",
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
    functions = with_reward_models(
        reward_funcs,
        reward_processing_classes,
        chat_template_kwargs=mapping(config.chat_template_kwargs),
        trust_remote_code=config.trust_remote_code,
    )
    rewards = RewardRunner(functions, timeout=config.reward_timeout)
    if config.reward_weights is not None and len(config.reward_weights) != len(rewards.names):
        raise ConfigError(
            f"reward_weights has {len(config.reward_weights)} numbers for {len(rewards.names)} reward functions "
            f"({', '.join(rewards.names)}). Give one weight per function, in the same order."
        )
    if config.reward_weights is not None and not any(config.reward_weights):
        raise ConfigError(f"reward_weights={config.reward_weights}: with weights of 0 alone nothing is rewarded.")
    return rewards


def advantage_settings(config: GRPOConfig) -> AdvantageSettings:
    return AdvantageSettings(
        weights=None if config.reward_weights is None else tuple(config.reward_weights),
        scale=config.scale_rewards,
        aggregation=config.multi_objective_aggregation,
        mask_truncated=config.mask_truncated_completions,
        max_failed_share=config.max_failed_reward_share,
        trained_per_group=config.num_generations_trained,
    )


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


def refill(config: GRPOConfig, stream: PromptStream) -> Refill | None:
    """Where groups without a signal are replaced from; None: they are not."""
    if not config.dynamic_sampling:
        return None
    assert isinstance(stream, AdaptiveStream)
    return Refill(stream.draw, config.dynamic_sampling_max_rounds)


def objective(config: GRPOConfig) -> Objective:
    return Objective(
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        beta=config.beta,
        use_bias_correction_kl=config.use_bias_correction_kl,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        sapo_temperature_neg=config.sapo_temperature_neg,
        sapo_temperature_pos=config.sapo_temperature_pos,
        vespo_k_pos=config.vespo_k_pos,
        vespo_lambda_pos=config.vespo_lambda_pos,
        vespo_k_neg=config.vespo_k_neg,
        vespo_lambda_neg=config.vespo_lambda_neg,
        max_completion_length=config.sampling_spec().max_new_tokens,
    )


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
