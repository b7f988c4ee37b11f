"""A reward from a transformers sequence-classification model, as in TRL.

n = completions of the call, b = sequences of one forward pass, T = tokens of the longest of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grupo.errors import ConfigError, summarize_error
from grupo.rewards.execution.runner import is_model
from grupo.utils.hub import is_unreachable

logger = logging.getLogger("grupo")

RewardFunctions = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]
"""Reward functions, reward models and ids of reward models: one, or a sequence."""


class RewardModel:
    """See `reward_model`."""

    runs_in_calling_thread = True  # a forward pass cannot be abandoned: it would keep the device busy

    value_range = (-math.inf, math.inf)

    def __init__(
        self,
        model: Any,
        processing_class: Any,
        batch_size: int,
        max_length: int | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        trust_remote_code: bool,
    ) -> None:
        if batch_size < 1 or (max_length is not None and max_length < 1):
            raise ConfigError(
                f"reward_model(batch_size={batch_size}, max_length={max_length}) cannot score anything: both must be "
                "at least 1; max_length=None takes the model's own limit."
            )
        if not isinstance(model, str):
            _check_is_classifier(model)
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.__name__ = name.rstrip("/").rpartition("/")[2]
        self.model = model
        self.processing_class = processing_class
        self.batch_size = batch_size
        self.max_length = max_length
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.trust_remote_code = trust_remote_code
        self._pad_token_id: int | None = None
        self._warned_about_length = False

    def prepare_on_device(self, device: Any = None) -> None:
        """Load the model if it was given by id, and move it to `device`. A call loads it too, but does not move it.

        Raises:
            ConfigError: the model or its tokenizer cannot be loaded, or there is no padding token.
        """
        from grupo.utils.quantized_layers import set_evaluation_mode

        if isinstance(self.model, str):
            self.model = _load(self.model, trust_remote_code=self.trust_remote_code)
        config = self.model.config.get_text_config()
        if self.processing_class is None:
            self.processing_class = _load_tokenizer(self.model, trust_remote_code=self.trust_remote_code)
        if self._pad_token_id is None:
            tokenizer = self.processing_class
            pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            if pad is None:
                raise ConfigError(
                    f"The tokenizer of the reward model '{self.__name__}' has neither a padding nor an "
                    "end-of-sequence token, so texts of different length cannot be scored in one batch. Set "
                    "tokenizer.pad_token and pass the tokenizer in reward_processing_classes."
                )
            # These models read their logit at the last token that is not padding.
            self._pad_token_id = config.pad_token_id = pad
        if self.max_length is None:
            self.max_length = getattr(config, "max_position_embeddings", None)
        set_evaluation_mode(self.model)
        is_placed = (getattr(self.model, name, None) for name in ("hf_device_map", "is_quantized"))
        if device is not None and not any(is_placed):
            self.model.to(device)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The logit of each prompt with its completion, (n,); None where the two are longer than `max_length`."""
        self.prepare_on_device()
        sequences = [
            None if completion is None else self._token_ids(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        too_long = [len(ids) for ids in sequences if ids is not None and not self._fits(ids)]
        self._warn_too_long(too_long, len(sequences))
        if log_metric is not None and self._warned_about_length:
            log_metric(f"{self.__name__}/too_long_share", len(too_long) / len(sequences))
        scores: list[float | None] = [None] * len(sequences)
        # Similar lengths together, the longest first: little padding, and an out-of-memory comes first or not at all.
        order = [(ids, index) for index, ids in enumerate(sequences) if ids and self._fits(ids)]
        order.sort(key=lambda item: -len(item[0]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for (_, index), score in zip(batch, self._forward([ids for ids, _ in batch]), strict=True):
                scores[index] = score
        return scores

    def _fits(self, ids: Sequence[int]) -> bool:
        return self.max_length is None or len(ids) <= self.max_length

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + completion
        elif not getattr(self.processing_class, "chat_template", None):
            raise ConfigError(
                f"The prompts are lists of messages, but the tokenizer of the reward model '{self.__name__}' has no "
                "chat template. Set the template that the model was trained with, and pass the tokenizer in "
                "reward_processing_classes."
            )
        else:
            text = self.processing_class.apply_chat_template(
                [*prompt, *completion], tokenize=False, **self.chat_template_kwargs
            )
        return list(self.processing_class(text, add_special_tokens=False)["input_ids"])

    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """(b,) logits of sequences padded on the right to (b, T)."""
        import torch

        assert self._pad_token_id is not None
        longest = max(map(len, sequences))
        device = next(self.model.parameters()).device
        padded = [[*ids, *[self._pad_token_id] * (longest - len(ids))] for ids in sequences]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor(padded, device=device), attention_mask=torch.tensor(mask, device=device)
            ).logits
        if logits.shape != (len(sequences), 1):
            raise ConfigError(
                f"The reward model '{self.__name__}' returned logits of shape {tuple(logits.shape)} for "
                f"{len(sequences)} completions; a reward model returns one number each, ({len(sequences)}, 1). {_HINT}"
            )
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _warn_too_long(self, lengths: Sequence[int], count: int) -> None:
        if lengths and not self._warned_about_length:
            self._warned_about_length = True
            logger.warning(
                "The reward model '%s' takes %d tokens, and %d of %d completions are longer with their prompt (up to "
                "%d): it abstains on them, here and in later batches. The metric %s/too_long_share counts them.",
                self.__name__, self.max_length, len(lengths), count, max(lengths), self.__name__,
            )  # fmt: skip


def reward_model(
    model: Any,
    processing_class: Any = None,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RewardModel:
    """The logit of a sequence-classification model with one label, for the prompt with its completion.

    Conversations go through the chat template of the reward model's own tokenizer, prompt and completion together;
    plain texts are concatenated. No special tokens are added. The logit has no fixed range: alone that does not
    matter, but with other rewards choose a weight that fits. The model is set to eval mode and is never trained. A
    model, or the id of one, in `reward_funcs` means the same as in TRL.

    Args:
        model: the model, or a folder or Hub id, which is loaded in the dtype that it was saved in.
        processing_class: its tokenizer; None for the one saved with the model.
        batch_size: largest number of completions per forward pass.
        max_length: largest number of tokens, prompt included; the reward abstains on longer ones. None for the model's
            `max_position_embeddings`.
        chat_template_kwargs: passed to the chat template.
        trust_remote_code: as in transformers.

    Raises:
        ConfigError: the model has no head with one label.
    """
    return RewardModel(model, processing_class, batch_size, max_length, chat_template_kwargs, trust_remote_code)


def wrap_reward_models(
    reward_funcs: RewardFunctions, reward_processing_classes: Any = None, **settings: Any
) -> list[Callable[..., Any]]:
    """A new list of the reward functions, in which models and ids of models are wrapped as `RewardModel`.

    Args:
        reward_funcs: one or several.
        reward_processing_classes: one tokenizer per reward function, in their order, None for those that need none; or
            the tokenizer of the only function.
        settings: arguments of `reward_model`.

    Raises:
        ConfigError: not as many tokenizers as functions, or a torch module that is not a reward model.
    """
    is_one = callable(reward_funcs) or isinstance(reward_funcs, str)
    functions: list[Any] = [reward_funcs] if is_one else list(reward_funcs)  # type: ignore[arg-type]
    if reward_processing_classes is None:
        tokenizers = [None] * len(functions)
    elif isinstance(reward_processing_classes, (list, tuple)):
        tokenizers = list(reward_processing_classes)
    else:
        tokenizers = [reward_processing_classes]
    if len(tokenizers) != len(functions):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(functions)} reward functions. Give one "
            "per function, in the same order: the tokenizer of a reward model, None for a function."
        )
    return [
        reward_model(function, tokenizer, **settings) if is_model(function) else function
        for function, tokenizer in zip(functions, tokenizers, strict=True)
    ]


_HINT = (
    "Load one by AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or wrap the model in a "
    "function that takes prompts, completions and **kwargs and returns one number per completion."
)


def _check_is_classifier(model: Any) -> None:
    config = getattr(model, "config", None)
    labels = getattr(config, "num_labels", None)
    if labels is None or not hasattr(config, "get_text_config"):
        raise ConfigError(f"reward_funcs holds a {type(model).__name__}, which is not a transformers model. {_HINT}")
    if labels != 1:
        raise ConfigError(
            f"reward_funcs holds a {type(model).__name__} with {labels} labels; a reward model has one, whose logit is "
            f"the reward. {_HINT}"
        )


def _load(name: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForSequenceClassification

    loader: Any = AutoModelForSequenceClassification
    try:
        model, report = loader.from_pretrained(
            name,
            num_labels=1,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            local_files_only=is_unreachable(name),
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a head with another number of labels
        raise ConfigError(
            f"The reward model {name!r} cannot be loaded: {summarize_error(error)} A string in reward_funcs names a "
            "sequence-classification model with one label: a folder, or a name on the Hub."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"The weights of the reward model {name!r} lack {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}, so they would be random numbers. Use a model that was trained "
            "as a reward model."
        )
    return model


def _load_tokenizer(model: Any, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=is_unreachable(name)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of the reward model {name or type(model).__name__!r} cannot be loaded. Pass it: "
            "reward_processing_classes=tokenizer, or a list with one entry per reward function."
        ) from error
