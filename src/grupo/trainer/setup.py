"""What a `GRPOTrainer` is built from, in the order in which its `__init__` calls it.

resolve_arguments -> check_without_model -> load_model -> tokenize -> the base class -> components.build
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grupo.chat_templates import set_chat_template
from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.data.curriculum import check_curriculum_column
from grupo.data.prompts import (
    PromptTokenizer,
    TokenizedRow,
    apply_length_policy,
    as_row_dataset,
    check_for_images,
    check_token_ids,
    column_names,
    tokenize_rows,
)
from grupo.errors import ConfigError, DataError, UnsupportedError
from grupo.models.inspect import (
    check_causal,
    check_stop_token_ids,
    check_trainable,
    context_length,
    encode_stop_strings,
    model_name_or_path,
    stop_token_ids,
    vocabulary_size,
)
from grupo.models.load import load_tokenizer
from grupo.models.load_options import LoadOptions, load_options
from grupo.models.peft_io import check_vocab_consistency, find_adapter, load_named
from grupo.models.peft_setup import add_adapter, add_tokens, check_adapter_config
from grupo.rewards.execution.runner import RewardRunner
from grupo.rewards.library.reward_model import RewardFunctions, wrap_reward_models
from grupo.runs.folder import check_writable
from grupo.runs.latest import resolve_latest
from grupo.trainer.checks import check_best_metric, check_output_folder
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")


# ---- arguments and checks that need no model -------------------------------------------------------------------------


def resolve_arguments(model: Any, args: Any, processing_class: Any, tokenizer: Any) -> tuple[Any, GRPOConfig, Any]:
    """Model, configuration and tokenizer as they were given, with defaults and old names resolved.

    Raises:
        ConfigError: `args` is not a GRPOConfig, or the tokenizer was given under both of its names.
    """
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if args is None:
        name = model if isinstance(model, str) else model_name_or_path(model)
        args = GRPOConfig(f"{Path(name).name or 'model'}-GRPO")
    model = resolve_latest(model) if isinstance(model, str) else model
    if not isinstance(args, GRPOConfig):
        raise ConfigError(f"args is {type(args).__name__}; it must be a grupo.GRPOConfig.")
    if tokenizer is None:
        return model, args, processing_class
    if processing_class is not None:
        raise ConfigError("tokenizer= is the old name of processing_class=, and both were given. Pass one.")
    logger.warning("tokenizer= is the old name of processing_class=; it is used as that.")
    return model, args, tokenizer


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rewards and datasets that have passed every check that needs no model."""

    rewards: RewardRunner
    train_dataset: Any
    eval_dataset: Any


def check_without_model(
    config: GRPOConfig,
    reward_funcs: RewardFunctions | None,
    reward_processing_classes: Any,
    train_dataset: Any,
    eval_dataset: Any,
) -> Inputs:
    """Refuses what can be refused before a model is loaded.

    Raises:
        ConfigError, DataError, RewardError: with what to set instead.
    """
    check_writable(Path(str(config.output_dir)))
    rewards = reward_runner(reward_funcs, config, reward_processing_classes)
    train_dataset, eval_dataset = as_row_dataset(train_dataset), as_row_datasets(eval_dataset)
    StepPlan.from_config(config, num_prompts=None if train_dataset is None else dataset_length(train_dataset))
    for dataset in [train_dataset, *named_datasets(eval_dataset).values()]:
        check_columns(rewards, dataset)
    check_curriculum_column(config.curriculum_column, train_dataset)
    check_best_metric(config, eval_dataset)
    return Inputs(rewards=rewards, train_dataset=train_dataset, eval_dataset=eval_dataset)


def reward_runner(
    reward_funcs: RewardFunctions | None, config: GRPOConfig, reward_processing_classes: Any = None
) -> RewardRunner:
    if reward_funcs is None:
        raise ConfigError("GRPOTrainer needs reward_funcs: one function, or a list of functions, of the completions.")
    functions = wrap_reward_models(
        reward_funcs,
        reward_processing_classes,
        chat_template_kwargs=as_mapping(config.chat_template_kwargs),
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
        raise ConfigError(f"reward_weights={config.reward_weights}: with no weight other than 0 nothing is rewarded.")
    return rewards


def check_columns(rewards: RewardRunner, dataset: Any) -> None:
    """Checks that the reward functions find their columns in a dataset, which may be None."""
    if dataset is not None and dataset_length(dataset):
        check_for_images(column_names(dataset))
        rewards.check_columns(column_names(dataset))


def named_datasets(dataset: Any) -> Mapping[str, Any]:
    return dataset if isinstance(dataset, Mapping) else {"": dataset}


def as_row_datasets(dataset: Any) -> Any:
    """One dataset or several by name, pandas tables as rows."""
    if isinstance(dataset, Mapping):
        return {name: as_row_dataset(part) for name, part in dataset.items()}
    return as_row_dataset(dataset)


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


# ---- the model and what depends on its tokenizer ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """The model that is trained, its tokenizer, and the numbers that follow from them."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    prompt_tokenizer: PromptTokenizer
    stop_token_ids: tuple[int, ...]
    vocabulary_size: int | None
    """Rows of the embedding; None where the model does not tell."""
    context_length: int | None
    """Tokens of prompt and completion together, at most; None: no limit is known."""
    trainable_parameters: int
    total_parameters: int
    load_options: LoadOptions

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def pad_token_id(self) -> int:
        """An id for padding. Padding is never read, but an id without an embedding would be looked up all the same."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None or pad >= (self.vocabulary_size or pad + 1) else int(pad)


def load_model(
    model: Any, config: GRPOConfig, *, processing_class: Any = None, quantization_config: Any, peft_config: Any
) -> LoadedPolicy:
    """The policy: loaded where it is given by name, with a fresh adapter where one is asked for.

    Raises:
        ConfigError, UnsupportedError: it cannot be trained, or its arguments do not fit each other.
    """
    model, tokenizer = load_policy_and_tokenizer(
        model,
        config,
        processing_class=processing_class,
        quantization_config=quantization_config,
        peft_config=peft_config,
    )
    trainable, total = check_trainable(model)
    options = load_options(model)
    vocabulary = vocabulary_size(model)
    check_stop_token_ids(config.sampling_spec().stop_token_ids, vocabulary)
    check_vocab_consistency(model, tokenizer)
    return LoadedPolicy(
        model=model,
        tokenizer=tokenizer,
        prompt_tokenizer=PromptTokenizer(tokenizer, as_mapping(config.chat_template_kwargs)),
        stop_token_ids=(*stop_token_ids(tokenizer, model), *encode_stop_strings(tokenizer, config.stop_strings)),
        vocabulary_size=vocabulary,
        context_length=min(filter(None, (context_length(model), options.max_seq_length)), default=None),
        trainable_parameters=trainable,
        total_parameters=total,
        load_options=options,
    )


def load_policy_and_tokenizer(
    model: Any, config: GRPOConfig, *, processing_class: Any = None, quantization_config: Any, peft_config: Any
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model to train, and its tokenizer: the given one, that of the adapter that training continues, or the model's
    own."""
    adapter_tokenizer = None
    if peft_config is not None:
        check_adapter_config(peft_config)  # before anything is loaded
    if isinstance(model, str):
        kwargs = as_mapping(config.model_init_kwargs) or {}
        adapter = find_adapter(model, kwargs)
        check_output_folder(config, model, adapter, adds_adapter=peft_config is not None)
        model, adapter_tokenizer = load_named(
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
    tokenizer = _tokenizer(model, config, adapter_tokenizer if processing_class is None else processing_class)
    if config.added_tokens:
        peft_config = add_tokens(model, tokenizer, config.added_tokens, peft_config)
    if peft_config is not None:
        model = add_adapter(model, peft_config, revision=(as_mapping(config.model_init_kwargs) or {}).get("revision"))
    return model, tokenizer


def _tokenizer(model: Any, config: GRPOConfig, processing_class: Any) -> PreTrainedTokenizerBase:
    """The given tokenizer, or the model's own, with the chat template that the configuration names."""
    if processing_class is None:
        processing_class = load_tokenizer(
            model, as_mapping(config.model_init_kwargs), trust_remote_code=config.trust_remote_code
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise UnsupportedError(
            f"processing_class is {type(processing_class).__name__}; only tokenizers are supported so far, not the "
            "processors of vision models."
        )
    return set_chat_template(processing_class, config.chat_template) if config.chat_template else processing_class


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Datasets as prompts that fit, and the batch plan that follows from their number."""

    train_rows: Sequence[TokenizedRow]
    eval_rows: Sequence[tuple[Any, Sequence[TokenizedRow]]]
    """Each evaluation dataset with its rows."""
    plan: StepPlan


def tokenize(inputs: Inputs, policy: LoadedPolicy, config: GRPOConfig) -> TrainingData:
    """Tokenizes all datasets: what cannot be evaluated is found now, not at the first evaluation."""
    train = inputs.train_dataset
    rows = [] if train is None else tokenized_rows(train, "training", policy, config)
    plan = StepPlan.from_config(config, num_prompts=None if train is None else len(rows))
    eval_rows = [
        (dataset, tokenized_rows(dataset, "evaluation", policy, config))
        for dataset in named_datasets(inputs.eval_dataset).values()
        if dataset is not None
    ]
    return TrainingData(train_rows=rows, eval_rows=eval_rows, plan=plan)


def tokenized_rows(dataset: Any, purpose: str, policy: LoadedPolicy, config: GRPOConfig) -> list[TokenizedRow]:
    """The rows of a dataset as prompts that fit; `purpose` is named in the message about those that do not."""
    rows = tokenize_rows(dataset, policy.prompt_tokenizer)
    check_token_ids(rows, policy.vocabulary_size)
    return apply_length_policy(
        rows,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts=config.overlong_prompts,
        max_completion_length=config.sampling_spec().max_new_tokens,
        context_length=policy.context_length,
        what=purpose,
    )


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """A field of the configuration that holds a mapping; what a command line gave as text has been parsed."""
    assert value is None or isinstance(value, Mapping)
    return value
