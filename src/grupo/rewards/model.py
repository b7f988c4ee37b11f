"""A reward from a sequence-classification model of transformers, as TRL takes it.

n = completions of the call, b = rows of one forward, T = tokens of its longest row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.hub import is_out_of_reach

logger = logging.getLogger("grupo")


class RewardModel:
    """See `reward_model`."""

    runs_in_calling_thread = True  # a forward cannot be left behind: it would go on holding the device

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
                f"reward_model(batch_size={batch_size}, max_length={max_length}) can score nothing: both are at least "
                "1, or leave max_length at None for what the model was made for."
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
        self._told_about_length = False

    def prepare(self, device: Any = None) -> None:
        """Load what was given by id, and move the model to `device`; a call does the first by itself.

        Raises:
            ConfigError: the model or its tokenizer cannot be loaded, or there is nothing to pad with.
        """
        from grupo.quantized_layers import set_evaluation_mode

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
                    "end-of-sequence token, so rows of different length cannot be scored. Set tokenizer.pad_token and "
                    "pass it in reward_processing_classes."
                )
            # These models read their score at the last token that is not this one.
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
        """The logit of each completion behind its prompt, (n,); None where the two are longer than `max_length`."""
        self.prepare()
        rows = [
            None if completion is None else self._token_ids(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        too_long = [len(ids) for ids in rows if ids is not None and not self._fits(ids)]
        self._tell_too_long(too_long, len(rows))
        if log_metric is not None and self._told_about_length:
            log_metric(f"{self.__name__}/too_long_share", len(too_long) / len(rows))
        scores: list[float | None] = [None] * len(rows)
        # Rows of like length together: little padding, and an out-of-memory comes first or not at all.
        order = [(ids, place) for place, ids in enumerate(rows) if ids and self._fits(ids)]
        order.sort(key=lambda item: -len(item[0]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for (_, place), score in zip(batch, self._forward([ids for ids, _ in batch]), strict=True):
                scores[place] = score
        return scores

    def _fits(self, ids: Sequence[int]) -> bool:
        return self.max_length is None or len(ids) <= self.max_length

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + completion
        elif not getattr(self.processing_class, "chat_template", None):
            raise ConfigError(
                f"The prompts are lists of messages, but the tokenizer of the reward model '{self.__name__}' has no "
                "chat template. Set it on the tokenizer that the model was trained with, and pass that in "
                "reward_processing_classes."
            )
        else:
            text = self.processing_class.apply_chat_template(
                [*prompt, *completion], tokenize=False, **self.chat_template_kwargs
            )
        return list(self.processing_class(text, add_special_tokens=False)["input_ids"])

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """(b,) logits of rows padded on the right to (b, T)."""
        import torch

        assert self._pad_token_id is not None
        longest = max(map(len, rows))
        device = next(self.model.parameters()).device
        input_ids = torch.tensor([[*ids, *[self._pad_token_id] * (longest - len(ids))] for ids in rows], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows], device=device)
        with torch.inference_mode():
            logits = self.model(input_ids=input_ids, attention_mask=mask).logits
        if logits.shape != (len(rows), 1):
            raise ConfigError(
                f"The reward model '{self.__name__}' returned logits of shape {tuple(logits.shape)} for {len(rows)} "
                f"rows; a reward model returns one number per row, ({len(rows)}, 1). {_WAY_OUT}"
            )
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _tell_too_long(self, lengths: Sequence[int], count: int) -> None:
        if lengths and not self._told_about_length:
            self._told_about_length = True
            logger.warning(
                "The reward model '%s' takes %d tokens, and %d of %d completions have more with their prompt (up to "
                "%d): it abstains on them, here and in later batches. %s/too_long_share counts them.",
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
    plain texts are joined. No special tokens are added. The number is any real one; advantages do not depend on its
    scale, but beside other rewards give it a weight that fits. The model is put into eval mode, and is never part of
    the training graph. A model, or the id of one, in `reward_funcs` means the same as in TRL.

    Args:
        model: the model, or a folder or Hub id, which is loaded in the dtype that it was saved in.
        processing_class: its tokenizer; None: the one saved beside the model.
        batch_size: most rows of one forward.
        max_length: in tokens, prompt included; longer rows abstain. None: the `max_position_embeddings` of the model.
        chat_template_kwargs: for the chat template.
        trust_remote_code: as in transformers.

    Raises:
        ConfigError: the model has no head with one label.
    """
    return RewardModel(model, processing_class, batch_size, max_length, chat_template_kwargs, trust_remote_code)


def with_reward_models(
    reward_funcs: Any, reward_processing_classes: Any = None, **settings: Any
) -> list[Callable[..., Any]]:
    """The reward functions as a list, with models and ids of models as `RewardModel`; the argument is left as it is.

    Args:
        reward_processing_classes: one tokenizer per reward function, in their order, None for what needs none; or the
            one tokenizer of the one function.
        settings: of `reward_model`.

    Raises:
        ConfigError: not as many tokenizers as functions, or a torch module that is no reward model.
    """
    functions = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
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
        reward_model(function, tokenizer, **settings) if _is_model(function) else function
        for function, tokenizer in zip(functions, tokenizers, strict=True)
    ]


_WAY_OUT = (
    "Load one by AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or wrap the model in a "
    "function that takes prompts, completions and **kwargs and returns one number per completion."
)


def _is_model(function: Any) -> bool:
    """A string, or a torch module, told by its classes so that torch need not be there."""
    classes = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(function).__mro__}
    return isinstance(function, str) or "torch.Module" in classes


def _check_is_classifier(model: Any) -> None:
    config = getattr(model, "config", None)
    labels = getattr(config, "num_labels", None)
    if labels is None or not hasattr(config, "get_text_config"):
        raise ConfigError(f"reward_funcs holds a {type(model).__name__}, which is no model of transformers. {_WAY_OUT}")
    if labels != 1:
        raise ConfigError(
            f"reward_funcs holds a {type(model).__name__} with {labels} labels; a reward model has one, whose logit is "
            f"the reward. {_WAY_OUT}"
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
            local_files_only=is_out_of_reach(name),
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a head with another number of labels
        raise ConfigError(
            f"The reward model {name!r} cannot be loaded: {str(error).strip().partition(chr(10))[0]} A name in "
            "reward_funcs is a sequence-classification model with one label: a folder, or a name on the Hub."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"The weights of the reward model {name!r} lack {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}, which would be random numbers. Take a model that was trained as a "
            "reward model."
        )
    return model


def _load_tokenizer(model: Any, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=is_out_of_reach(name)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of the reward model {name or type(model).__name__!r} cannot be loaded. Pass it: "
            "reward_processing_classes=tokenizer, or a list with one entry per reward function."
        ) from error
