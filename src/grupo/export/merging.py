"""One folder with adapter and base model in the same weights, which plain transformers loads."""

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
    IN_USE,
    Difference,
    check_close,
    check_ids,
    check_same,
    difference,
    logits_of,
)
from grupo.export.source import check_free, staged
from grupo.models.load import load_policy, parse_dtype

logger = logging.getLogger("grupo")

LOST = 0.1
"""Share of what training changed that rounding may change, before it is said."""


@dataclass(frozen=True)
class MergeReport:
    """What became of a merge; differences are those of `grupo.export.logit_check`, in nats."""

    folder: Path
    dtype: str
    merging: Difference
    """Between adapter on base and merged weights, both in float32."""
    rounding: Difference
    """Between adapter on base in float32 and the weights as they are saved."""
    effect: Difference
    """Between the base model and adapter on base: what training has changed."""
    is_tied: bool
    """Whether the head is the embedding, in the weights and in config.json."""


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
    """Writes the merged model of an adapter, or a whole model as it is, into a folder that plain transformers loads.

    Merging is done in float32 on a copy: a model that is given as an object is left as it was. A quantised base
    (bitsandbytes, 4 or 8 bit) is dequantised first, so that the result is the policy that was trained.

    Args:
        model: a model, a PEFT model, or a folder: of a run, a checkpoint, an adapter or a model.
        output: the folder to write; nothing that exists is overwritten.
        tokenizer: saved beside the weights; by default that of the folder, or of the model by its name.
        dtype: of the saved weights: "float32", "bfloat16", "float16"; by default that of the base model.
        base: name or path of the base model, where it is no longer where the adapter says.
        quantization_config: as the base was quantised in training, for an adapter folder that does not say.
        base_weights: "dequantised", or "original" to merge into the weights before quantisation: another policy than
            the one that was trained, by a difference that is measured and said.
        max_shard_size: of a weights file.

    Raises:
        ConfigError: there is no such model or base, or the output exists.
        UnsupportedError: an adapter or a quantisation that cannot be merged.
        ExportError: the merged or the reloaded model is not the trained one; nothing is written.
    """
    output = Path(output)
    check_free(output)
    saved_as = None if dtype is None else parse_dtype(dtype)
    folded = fold(
        model,
        tokenizer=tokenizer,
        base=base,
        quantization_config=quantization_config,
        base_weights=base_weights,
        trust_remote_code=trust_remote_code,
    )
    saved_as = saved_as or folded.dtype
    merged = folded.model
    _cast(merged, saved_as)
    _cast(merged, torch.float32)
    rounded = logits_of(merged, folded.ids)
    rounding = check_close(folded.logits, rounded, f"The model rounded to {_name(saved_as)}", BOUNDS[_name(saved_as)])
    if saved_as is not torch.float32:
        warn_about_loss(rounding, folded.effect, f"Rounding the weights to {_name(saved_as)}", "dtype='float32'")
    _cast(merged, saved_as)
    with staged(output) as folder:
        merged.save_pretrained(str(folder), max_shard_size=max_shard_size)
        if folded.tokenizer is not None:
            folded.tokenizer.save_pretrained(str(folder))
        is_tied = bool(merged.config.get_text_config().tie_word_embeddings)
        ids, merging, effect = folded.ids, folded.merging, folded.effect
        del merged, folded  # the room is for the model that comes back
        again = load_policy(str(folder), {"dtype": torch.float32}, trust_remote_code=trust_remote_code)
        check_same(rounded, logits_of(again, ids), "The model loaded back from its folder, against the one in memory")
    return MergeReport(output, _name(saved_as), merging, rounding, effect, is_tied)


@dataclass(frozen=True)
class Folded:
    """A trained policy as a plain model in float32, which nobody else holds, and what it says about a text."""

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    """Of the base model as it is stored."""
    ids: Tensor
    """The text, (1, T)."""
    logits: Tensor
    """(T, V), of the adapter on its base."""
    merging: Difference
    effect: Difference


def fold(model: Any, *, tokenizer: Any, base: str | None, quantization_config: Any, base_weights: str,
         trust_remote_code: bool) -> Folded:  # fmt: skip
    """Opens a policy and folds its adapter into its base, checked by logits. Arguments as in `merge`."""
    if base_weights not in ("dequantised", "original"):
        raise ConfigError(f"base_weights={base_weights!r} must be 'dequantised' or 'original'.")
    about: dict[str, Any] = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
    if isinstance(model, str | Path):
        policy = open_folder(model, base=base, quantization_config=quantization_config, **about)
    else:
        policy = open_model(model, **about)
    ids = check_ids(policy.tokenizer, policy.model.get_input_embeddings().weight.shape[0])
    logits = logits_of(policy.model, ids)
    if not isinstance(model, str | Path):
        check_close(logits_of(model, ids), logits, "A copy of the model in float32", IN_USE)
    effect = difference(_logits_of_base(policy.model, ids), logits)
    adapted = policy.model
    if base_weights == "original":
        adapted = on_original_base(policy, base, trust_remote_code=trust_remote_code)
        trained, logits = logits, logits_of(adapted, ids)
        found = difference(trained, logits)
        logger.warning(
            "base_weights='original': the adapter was trained on quantised weights and is merged into those before "
            "quantisation. That moves the model by %.3g nats a token, and training moved it by %.3g.",
            found.divergence,
            effect.divergence,
        )
    merged = fold_adapter(adapted)
    merging = check_same(logits, logits_of(merged, ids), "The merged model, against the adapter on its base")
    return Folded(merged, policy.tokenizer, policy.dtype, ids, logits, merging, effect)


def fold_adapter(model: Any) -> Any:
    """The base model with the adapter in its weights; a model without an adapter as it is.

    Head and embedding stay one tensor where they still have the same numbers, and become two where they have not; the
    configuration says which. `model` is used up.
    """
    if not hasattr(model, "get_base_model"):
        return model
    # An adapter on one of two tied layers would be folded into both.
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
    """Gives every module that shares a parameter with an earlier one a copy of its own; whether there was one."""
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


def warn_about_loss(found: Difference, effect: Difference, what: str, instead: str) -> None:
    """Says it where rounding moves the model by a good part of what training did."""
    if effect.divergence and found.divergence > LOST * effect.divergence:
        logger.warning(
            "%s moves the model by %.3g nats a token, and training moved it by %.3g: a part of what was learned may be "
            "lost. %s keeps it.",
            what,
            found.divergence,
            effect.divergence,
            instead,
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: the frequencies of rotary embeddings are a buffer, and stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
