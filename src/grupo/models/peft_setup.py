"""A fresh adapter on a model, and tokens that it trains: checked before, and undone where peft cannot add it."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import numbers
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from grupo.errors import ConfigError, UnsupportedError, summarize_error
from grupo.models.inspect import base_model, check_adapter_supported, vocabulary_size
from grupo.models.load import prepare_for_kbit_training

logger = logging.getLogger("grupo")

BIASES = ("none", "all", "lora_only")
INIT_METHODS = ("gaussian", "pissa", "olora", "orthogonal", "mica", "loftq", "corda")
"""Names for init_lora_weights, beside True, False and pissa_niter_N."""
DATA_DEPENDENT_INITS = ("eva", "lora_ga")
"""Without their data peft goes on with another start."""


def lora_config(**settings: Any) -> LoraConfig:
    """peft's LoraConfig for a causal language model.

    Raises:
        ConfigError: settings that exclude each other, or that no adapter can have.
    """
    try:
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"The adapter cannot be had with these settings: {summarize_error(error)}") from error
    check_adapter_config(config)
    return config


def add_adapter(model: Any, peft_config: Any, *, revision: str | None = None) -> Any:
    """The model with a fresh adapter; `revision` is that of the model, where it came from the Hub.

    After an error the model is as it was.

    Raises:
        ConfigError: the model has an adapter already, its settings are wrong, or what they name is not there.
        UnsupportedError: the adapter is of a kind that is not supported.
    """
    check_adapter_config(peft_config)
    # Both a PeftModel and a plain model into which transformers has loaded an adapter folder.
    if getattr(model, "peft_config", None):
        raise ConfigError(
            "The model has an adapter already, and peft_config (`lora` in a recipe) asks for another. To train on with "
            "the adapter, leave peft_config out (`lora: null`), and load it with is_trainable=True where you load it "
            "yourself; to put a fresh one on top, pass the merged model: merge_and_unload() keeps what was learned."
        )
    _check_targets(model, peft_config)
    # A copy: peft writes into it, and one configuration may serve several runs.
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = peft_config.task_type or "CAUSAL_LM"
    peft_config.revision = peft_config.revision or revision
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    try:
        with rollback_on_error(model):
            adapted = get_peft_model(prepare_for_kbit_training(model), peft_config)
    except (ValueError, TypeError, NotImplementedError, AttributeError, LookupError, re.error) as error:
        raise ConfigError(
            f"The adapter cannot be added: {summarize_error(error)} The linear layers of this model are called "
            f"{', '.join(sorted(linear))}; 'all-linear' takes all but the head."
        ) from error
    _warn_of_tied_layers(adapted)
    return adapted


@contextlib.contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """peft puts its layers into the model itself, one after the other, and leaves them there when it fails."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    weights = [(parameter, parameter.data, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, parts in children:
            module._modules.clear()
            module._modules.update(parts)
        for parameter, data, requires_grad in weights:
            parameter.data = data
            parameter.requires_grad_(requires_grad)
        vars(model).pop("peft_config", None)
        raise


def add_tokens(model: Any, tokenizer: Any, texts: Sequence[str], peft_config: Any) -> Any:
    """Makes each text a token, with embeddings in the model where the tokenizer lacks it.

    The tokens are no special ones, so that reward functions see them. `model` and `tokenizer` are changed.

    Returns:
        The configuration of the fresh adapter, which also trains the new rows of embeddings and head; None for none.

    Raises:
        ConfigError: a saved adapter lacks them, or the fresh one cannot train single rows.
    """
    present = tokenizer.get_vocab()
    new = [text for text in dict.fromkeys(texts) if text not in present]
    _require("" not in new, "added_tokens has an empty text, which can be no token")
    has_adapter = bool(getattr(model, "peft_config", None))
    there = [text for text in texts if text in present]
    if there and not has_adapter:
        logger.warning("added_tokens: the tokenizer has %s already; not added.", ", ".join(map(repr, there)))
    if not new:
        return peft_config
    if has_adapter:
        raise ConfigError(
            f"added_tokens has {', '.join(map(repr, new))}, and the adapter that training goes on with was made "
            "without. Merge it first (`grupo export`), and start with a fresh adapter from the merged model."
        )
    if peft_config is not None and getattr(peft_config, "trainable_token_indices", ()) is not None:
        raise ConfigError(
            "added_tokens needs an adapter that can train single rows: a LoraConfig, whose trainable_token_indices "
            "is set here and must not be set already."
        )
    tokenizer.add_tokens(new)
    ids = tokenizer.convert_tokens_to_ids(new)
    if max(ids) >= model.get_input_embeddings().weight.shape[0]:
        _add_rows(model, len(tokenizer))
    if peft_config is None:
        return None
    ends = _embedding_layers(model)
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)]
    whole = peft_config.modules_to_save or ()
    peft_config = copy.deepcopy(peft_config)
    peft_config.trainable_token_indices = {name: ids for name in names if name not in whole} or None
    return peft_config


@torch.no_grad()
def _add_rows(model: Any, rows: int) -> None:
    """Embeddings and head of `rows` tokens, where the new ones are the mean of the others.

    transformers adds a noise to it whose last digits depend on the number of threads: the run would not be known again.
    """
    means = [_mean(end.weight) for end in _embedding_layers(model)]
    before = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows, mean_resizing=False)
    for end, mean in zip(_embedding_layers(model), means, strict=True):
        end.weight[before:] = mean.to(end.weight.dtype)


def _embedding_layers(model: Any) -> list[Any]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [end for end in ends if end is not None]


def _mean(weight: Tensor) -> Tensor:
    """(H,) of (V, H), summed in float64."""
    return torch.stack([part.double().sum(0) for part in weight.split(4096)]).sum(0) / len(weight)


# ---- settings --------------------------------------------------------------------------------------------------------


def check_adapter_config(config: Any) -> None:
    """What can be said of an adapter without its model; peft takes any value, and notices some of them late or never.

    Raises:
        ConfigError: this is no configuration of peft, or a setting is outside of its range.
        UnsupportedError: the adapter is of a kind that is not supported.
    """
    if not isinstance(config, PeftConfig):
        raise ConfigError(
            f"peft_config is {type(config).__name__}; it must be a configuration of peft, as in "
            "peft.LoraConfig(task_type='CAUSAL_LM', r=16, target_modules='all-linear')."
        )
    check_adapter_supported(config)
    if not isinstance(config, LoraConfig):
        return
    for name, rank in _with_pattern("r", config.r, "rank_pattern", config.rank_pattern):
        _require(
            isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1,
            f"{name}={rank!r}: the rank of the adapter must be a whole number of at least 1",
        )
    for name, alpha in _with_pattern("lora_alpha", config.lora_alpha, "alpha_pattern", config.alpha_pattern):
        _require(
            _is_number(alpha) and alpha > 0, f"{name}={alpha!r}: the adapter is multiplied by it; it must be above 0"
        )
    _require(
        _is_number(config.lora_dropout) and 0 <= config.lora_dropout < 1,
        f"lora_dropout={config.lora_dropout!r}: it is a share, of at least 0 and below 1",
    )
    _require(config.bias in BIASES, f"bias={config.bias!r}: use one of {', '.join(map(repr, BIASES))}")
    for name in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"):
        value = getattr(config, name)
        _require(isinstance(value, bool), f"{name}={value!r}: use True or False")
    for name in ("modules_to_save", "target_parameters"):
        value = getattr(config, name)
        _require(value is None or isinstance(value, list | tuple | set), f"{name}={value!r}: it is a list of names")
    targets = config.target_modules
    _require(
        targets is None or isinstance(targets, str | list | tuple | set),
        f"target_modules={targets!r}: name modules in a list, or use a pattern or 'all-linear'",
    )
    _check_init(config.init_lora_weights)


def _check_init(start: Any) -> None:
    if isinstance(start, str) and start in DATA_DEPENDENT_INITS:
        raise UnsupportedError(
            f"init_lora_weights={start!r} is computed from data, by calls of peft's own around peft.get_peft_model. "
            "Make them, and pass the model that they give, without peft_config."
        )
    is_known = isinstance(start, str) and (start.lower() in INIT_METHODS or re.fullmatch(r"pissa_niter_\d+", start))
    _require(
        isinstance(start, bool) or bool(is_known),
        f"init_lora_weights={start!r}: use True, False, 'pissa_niter_N' or one of {', '.join(map(repr, INIT_METHODS))}",
    )


def _with_pattern(name: str, value: Any, pattern_name: str, pattern: Any) -> list[tuple[str, Any]]:
    return [(name, value), *((f"{pattern_name}[{key!r}]", item) for key, item in (pattern or {}).items())]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(f"{sentence}.")


# ---- places ----------------------------------------------------------------------------------------------------------


def _check_targets(model: Any, peft_config: Any) -> None:
    """peft passes over what it does not find.

    Raises:
        ConfigError: modules, layers or tokens that the model does not have.
    """
    names = [name for name, _ in model.named_modules()]
    for wanted in getattr(peft_config, "modules_to_save", None) or ():
        if not _is_in(wanted, names):
            raise ConfigError(
                f"modules_to_save names {wanted!r}, and the model has no such module: nothing would be trained or "
                "saved for it. Usual ones are 'lm_head' and 'embed_tokens'."
            )
    layers = getattr(peft_config, "layers_to_transform", None)
    count = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    outside = [layer for layer in ([layers] if isinstance(layers, int) else layers or ()) if layer not in range(count)]
    if outside and count:
        raise ConfigError(
            f"layers_to_transform (`lora.layers` in a recipe) names {outside}, and the model has the layers 0 to "
            f"{count - 1}."
        )
    tokens = getattr(peft_config, "trainable_token_indices", None) or ()
    size = vocabulary_size(model) or 0
    listed = tokens.values() if isinstance(tokens, dict) else [tokens]
    outside = [token for ids in listed for token in ids if token not in range(size)]
    if outside and size:
        raise ConfigError(
            f"trainable_token_indices names {outside}, and the model has embeddings for the tokens 0 to {size - 1}. "
            "Take the ids from tokenizer.convert_tokens_to_ids(...), after model.resize_token_embeddings."
        )
    targets = getattr(peft_config, "target_modules", None)
    missing = [] if targets is None or isinstance(targets, str) else [w for w in targets if not _is_in(w, names)]
    if missing:
        logger.warning(
            "target_modules names %s, which this model does not have: nothing is added there.",
            ", ".join(map(repr, sorted(missing))),
        )


def _is_in(wanted: str, names: list[str]) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)


def _warn_of_tied_layers(model: Any) -> None:
    """An adapter on one of two layers that share their weights: it trains, saves and loads; merging is the trap."""
    base = base_model(model)
    ends = {"embeddings": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    names = [name for name, layer in ends.items() if isinstance(layer, BaseTunerLayer)]
    if names and base.config.get_text_config().tie_word_embeddings:
        logger.warning(
            "The adapter acts on the %s of a model whose embeddings and head share their weights. peft's "
            "merge_and_unload() would change both, which is another model; `grupo export` takes them apart first.",
            " and the ".join(names),
        )
