"""Merging an adapter into its base model, as a folder that plain transformers loads."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grupo.errors import ConfigError, UnsupportedError
from grupo.export.loading import on_original_base, open_folder, open_model
from grupo.export.logit_check import (
    BOUNDS,
    LIVE_TOLERANCE,
    Difference,
    check_close,
    check_ids,
    check_same,
    difference,
    logits_of,
)
from grupo.export.source import atomic_output, require_absent
from grupo.models.load import load_policy, parse_dtype

logger = logging.getLogger("grupo")

MAX_LOSS_SHARE = 0.1
"""Share of the change by training that rounding may undo without a warning."""


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge; differences are those of `grupo.export.logit_check`, in nats."""

    folder: Path
    dtype: str
    merging: Difference
    """Between adapter on base and merged weights, both in float32."""
    rounding: Difference
    """Between adapter on base in float32 and the weights as they are saved."""
    training_delta: Difference
    """Between the base model and adapter on base: the change by training."""
    is_tied: bool
    """Whether head and embedding are one tensor, in the weights and in config.json."""

    @property
    def effect(self) -> Difference:
        """Former name of `training_delta`."""
        logger.warning("MergeReport.effect is now called training_delta.")
        return self.training_delta


def merge(
    model: Any,
    output: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    base: str | None = None,
    quantization_config: Any = None,
    base_weights: str = "dequantised",
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> MergeReport:
    """Merges an adapter into its base model and writes a folder that plain transformers loads.

    A model without an adapter is written as it is. Merging is done in float32 on a copy: a model that is passed as an
    object is not changed. A quantised base (bitsandbytes, 4 or 8 bit) is dequantised first, so that the result is the
    policy that was trained.

    Args:
        model: a model, a PEFT model, or a folder: of a run, a checkpoint, an adapter or a model.
        output: folder to write; nothing is overwritten.
        tokenizer: saved with the weights; by default that of the folder, or of the model by its name.
        dtype: dtype of the saved weights: "float32", "bfloat16", "float16"; by default that of the base model.
        base: name or path of the base model, if it is not where the adapter says.
        quantization_config: how the base was quantised in training, for an adapter folder that does not record it.
        base_weights: "dequantised", or "original" to merge into the weights before quantisation. That gives another
            policy than the trained one; the difference is measured and logged.
        max_shard_size: largest size of a weights file.

    Raises:
        ConfigError: there is no such model or base, or the output exists.
        UnsupportedError: an adapter or a quantisation that cannot be merged.
        ExportError: the merged or the reloaded model is not the trained one; nothing is written.
    """
    output = Path(output)
    require_absent(output)
    saved_as = None if dtype is None else parse_dtype(dtype)
    policy = load_merged(
        model,
        tokenizer=tokenizer,
        base=base,
        quantization_config=quantization_config,
        base_weights=base_weights,
        trust_remote_code=trust_remote_code,
    )
    saved_as = saved_as or policy.dtype
    merged = policy.model
    _cast(merged, saved_as)
    _cast(merged, torch.float32)
    rounded = logits_of(merged, policy.ids)
    rounding = check_close(policy.logits, rounded, f"The model rounded to {_name(saved_as)}", BOUNDS[_name(saved_as)])
    if saved_as is not torch.float32:
        warn_about_loss(
            rounding, policy.training_delta, f"Rounding the weights to {_name(saved_as)}", "dtype='float32'"
        )
    _cast(merged, saved_as)
    with atomic_output(output) as folder:
        merged.save_pretrained(str(folder), max_shard_size=max_shard_size)
        if policy.tokenizer is not None:
            policy.tokenizer.save_pretrained(str(folder))
        is_tied = bool(merged.config.get_text_config().tie_word_embeddings)
        ids, merging, training_delta = policy.ids, policy.merging, policy.training_delta
        del merged, policy  # makes room for the reloaded model
        again = load_policy(str(folder), {"dtype": torch.float32}, trust_remote_code=trust_remote_code)
        check_same(rounded, logits_of(again, ids), "The model loaded back from its folder, against the one in memory")
    return MergeReport(output, _name(saved_as), merging, rounding, training_delta, is_tied)


@dataclass(frozen=True)
class MergedPolicy:
    """A trained policy as a plain float32 model, owned by the caller, and its logits on a text."""

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    """Dtype of the stored base model."""
    ids: Tensor
    """Token ids of the text, (1, T)."""
    logits: Tensor
    """(T, V) logits of the adapter on its base."""
    merging: Difference
    training_delta: Difference


def load_merged(model: Any, *, tokenizer: Any, base: str | None, quantization_config: Any, base_weights: str,
                trust_remote_code: bool) -> MergedPolicy:  # fmt: skip
    """Loads a policy and merges its adapter into its base, checked by logits. Arguments as in `merge`."""
    if base_weights not in ("dequantised", "original"):
        raise ConfigError(f"base_weights={base_weights!r} must be 'dequantised' or 'original'.")
    common: dict[str, Any] = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
    if isinstance(model, str | Path):
        loaded = open_folder(model, base=base, quantization_config=quantization_config, **common)
    else:
        loaded = open_model(model, **common)
    ids = check_ids(loaded.tokenizer, loaded.model.get_input_embeddings().weight.shape[0])
    logits = logits_of(loaded.model, ids)
    if not isinstance(model, str | Path):
        check_close(logits_of(model, ids), logits, "A copy of the model in float32", LIVE_TOLERANCE)
    training_delta = difference(_logits_of_base(loaded.model, ids), logits)
    adapted = loaded.model
    if base_weights == "original":
        adapted = on_original_base(loaded, base, trust_remote_code=trust_remote_code)
        trained, logits = logits, logits_of(adapted, ids)
        found = difference(trained, logits)
        logger.warning(
            "base_weights='original': the adapter was trained on quantised weights and is merged into those before "
            "quantisation. That changes the model by %.3g nats per token, and training changed it by %.3g.",
            found.divergence,
            training_delta.divergence,
        )
    merged = merge_adapter(adapted)
    merging = check_same(logits, logits_of(merged, ids), "The merged model, against the adapter on its base")
    return MergedPolicy(merged, loaded.tokenizer, loaded.dtype, ids, logits, merging, training_delta)


def merge_adapter(model: Any) -> Any:
    """The base model with the adapter merged into its weights; a model without an adapter is returned as it is.

    Head and embedding stay one tensor if they still have the same numbers; otherwise they become two, and the
    configuration is changed accordingly. `model` must not be used afterwards.
    """
    if not hasattr(model, "get_base_model"):
        return model
    # An adapter on one of two tied layers would be merged into both.
    was_tied = _untie(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT, about tied weights
            merged = model.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        kinds = ", ".join(config.peft_type.value for config in model.peft_config.values())
        raise UnsupportedError(f"An adapter of the kind {kinds} cannot be merged: {error}") from error
    if was_tied:
        head, embedding = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
        is_tied = head.shape == embedding.shape and torch.equal(head, embedding)
        for config in (merged.config, merged.config.get_text_config()):
            config.tie_word_embeddings = is_tied
        merged.tie_weights()
    return merged


def _untie(model: Any) -> bool:
    """Replaces shared parameters by separate copies; returns whether there were any."""
    seen: set[int] = set()
    found = False
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
                found = True
            seen.add(id(parameter))
    return found


def _logits_of_base(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "disable_adapter"):
        return logits_of(model, ids)
    with model.disable_adapter():
        return logits_of(model, ids)


def warn_about_loss(found: Difference, training_delta: Difference, what: str, instead: str) -> None:
    """Warns if rounding undoes a considerable part of what training changed."""
    if training_delta.divergence and found.divergence > MAX_LOSS_SHARE * training_delta.divergence:
        logger.warning(
            "%s changes the model by %.3g nats per token, and training changed it by %.3g: part of what was learned "
            "may be lost. %s keeps it.",
            what,
            found.divergence,
            training_delta.divergence,
            instead,
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters only: the frequencies of rotary embeddings are a buffer and stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
