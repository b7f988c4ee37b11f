"""Adapters on disk: loading one to train it further, and saving one so that peft loads it without grupo."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils.hub import has_file
from transformers.utils.peft_utils import find_adapter_config_file

from grupo.errors import ConfigError, GrupoError, UnsupportedError
from grupo.models.inspect import PROMPT_LEARNING, base_model, quantization
from grupo.models.load import HUB_KWARGS, load_policy, prepare_for_kbit_training
from grupo.utils.hub import is_unreachable
from grupo.utils.messages import BASE_QUANTIZATION

logger = logging.getLogger("grupo")


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter folder, local or on the Hub."""

    name: str
    """Path or Hub id, as given."""
    folder: Path
    """Local folder of its files; for an adapter on the Hub only adapter_config.json is certain to be there."""
    config: PeftConfig
    where: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of from_pretrained that locate it: revision, cache, or that the Hub must not be contacted."""

    @property
    def base(self) -> str:
        """Path or name of the base model.

        Raises:
            ConfigError: the adapter does not name it, or names a folder that does not exist.
        """
        base = self.config.base_model_name_or_path
        if not base:
            raise ConfigError(
                f"The adapter {self.name!r} does not name its base model: base_model_name_or_path in its "
                "adapter_config.json is empty. Write the name or path of the base model there."
            )
        relative = self.folder / base
        if not Path(base).exists() and relative.is_dir():
            return str(relative)
        if not Path(base).exists() and (Path(base).is_absolute() or base.startswith(".")):
            raise ConfigError(
                f"The base model of the adapter {self.name!r} is {base!r}, and there is no such folder. Set "
                f"base_model_name_or_path in {self.folder / 'adapter_config.json'} to its current location."
            )
        return str(base)

    @property
    def source(self) -> tuple[str, Mapping[str, Any]]:
        """Name and keywords for from_pretrained. Offline it is a local folder, because peft contacts the Hub anyway."""
        return (str(self.folder), {}) if "local_files_only" in self.where else (self.name, self.where)

    def tokenizer(self, *, trust_remote_code: bool = False) -> Any:
        """The tokenizer saved with the adapter; None if there is none and the base model's is to be used."""
        source, where = self.source
        if not has_file(source, TOKENIZER_CONFIG_FILE, **where):
            return None
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **where)


def find_adapter(name: str, model_init_kwargs: Mapping[str, Any] | None = None) -> SavedAdapter | None:
    """The adapter of this name; None if there is none: the name may be that of a whole model, or of nothing."""
    where = {key: value for key, value in (model_init_kwargs or {}).items() if key in HUB_KWARGS}
    if is_unreachable(name):
        where["local_files_only"] = True
    try:
        path = find_adapter_config_file(name, **where)
    except (OSError, ValueError):  # loading the model will report what is wrong with the name
        return None
    if path is None:
        return None
    folder = Path(path).parent
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not an adapter configuration that peft knows: {error}.") from error
    return SavedAdapter(name, folder, config, where)


def load_named(
    name: str, adapter: SavedAdapter | None, model_init_kwargs: Mapping[str, Any], **how: Any
) -> tuple[Any, Any]:
    """The model of this name, or the adapter that `find_adapter` found, on its base model; and the tokenizer saved
    with the adapter, if any. `how` is `trust_remote_code` and `quantization_config`.
    """
    if adapter is None:
        return load_policy(name, model_init_kwargs, **how), None
    tokenizer = adapter.tokenizer(trust_remote_code=how["trust_remote_code"])
    return load_with_adapter(adapter, model_init_kwargs, **how), tokenizer


def load_with_adapter(
    adapter: SavedAdapter,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
) -> PeftModel:
    """The base model with the saved adapter, to continue its training.

    `revision` in `model_init_kwargs` is that of the adapter; the revision of the base model is in its configuration.

    Raises:
        ConfigError: the base model or the adapter's weights cannot be loaded, or do not match.
        UnsupportedError: the adapter puts virtual tokens before the prompt.
    """
    if adapter.config.is_prompt_learning:
        raise UnsupportedError(PROMPT_LEARNING)
    kwargs = {name: value for name, value in (model_init_kwargs or {}).items() if name != "revision"}
    if adapter.config.revision and not Path(adapter.base).exists():
        kwargs["revision"] = adapter.config.revision
    try:
        base = load_policy(
            adapter.base, kwargs, trust_remote_code=trust_remote_code, quantization_config=quantization_config
        )
    except GrupoError as error:
        raise type(error)(f"{adapter.name!r} is an adapter, and its base model cannot be loaded. {error}") from error
    if (adapter.folder / BASE_QUANTIZATION).is_file() and quantization(base) is None:
        logger.warning(
            "The adapter %s was trained on a quantised base model (%s in its folder), and the base model is not "
            "quantised now: training starts from a slightly different policy than the saved one.",
            adapter.name,
            BASE_QUANTIZATION,
        )
    source, where = adapter.source
    try:
        saved = load_peft_weights(source, device="cpu", **where)
        resize_to_saved_vocab(base, saved)
        model = PeftModel.from_pretrained(prepare_for_kbit_training(base), source, is_trainable=True, **where)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"The adapter {adapter.name!r} cannot be loaded onto its base model {adapter.base!r}: "
            f"{' '.join(str(error).split())[:400]}"
        ) from error
    _check_complete(model, adapter.name, saved)
    if is_zero_init(model):
        logger.warning(
            "The adapter %s has no effect: its B matrices are all zero, as before any training. The run starts from "
            "the base model.",
            adapter.name,
        )
    return model


def missing_weights(model: PeftModel, saved: Collection[str]) -> tuple[list[str], int]:
    """Weights of the adapter that were not saved, and the number of all its weights.

    peft would continue with random numbers in their place.
    """
    # Old files have DoRA magnitudes without the suffix.
    found = {key.removesuffix(".weight") for key in saved}
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    return [key for key in wanted if key.removesuffix(".weight") not in found], len(wanted)


def _check_complete(model: PeftModel, name: str, saved: Collection[str]) -> None:
    missing, wanted = missing_weights(model, saved)
    if missing:
        raise ConfigError(
            f"The adapter {name!r} lacks {len(missing)} of the {wanted} weights that its configuration requires, "
            f"{missing[0]} among them. It was not saved completely, or its adapter_config.json belongs to another one."
        )


def resize_to_saved_vocab(base: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Resizes the embeddings of the base model to those saved with the adapter, where tokens had been added."""
    embedding = base.get_input_embeddings()
    (name,) = [name for name, module in base.named_modules() if module is embedding]
    whole = {f"{name}.{part}weight" for part in ("", "base_layer.", "token_adapter.base_layer.")}
    for key, tensor in saved.items():
        place = key.removeprefix("base_model.model.")
        on_embedding = place.startswith(f"{name}.lora_embedding_A")
        if place in whole or on_embedding:
            rows = tensor.shape[1 if on_embedding else 0]
            if rows != embedding.weight.shape[0]:
                base.resize_token_embeddings(rows, mean_resizing=False)  # their values are in the adapter
            return


def is_zero_init(model: Any) -> bool:
    """Whether all B matrices of a LoRA adapter are zero, so that it computes exactly what its base model does."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    b_matrices = [p for name, p in trained if "lora_B" in name or "lora_embedding_B" in name]
    others = [name for name, _ in trained if "lora_" not in name or "magnitude" in name]
    return bool(b_matrices) and not others and not any(bool(p.detach().any()) for p in b_matrices)


def base_unavailable_reason(model: Any) -> str | None:
    """Why disabling the adapter does not give the base model; None if it does."""
    configs: Iterable[Any] = (getattr(model, "peft_config", None) or {}).values()
    if not configs or not hasattr(model, "disable_adapter"):
        return "there is no adapter to disable"
    for config in configs:
        if getattr(config, "bias", "none") != "none":
            return f"the adapter trains the biases of the base model itself (bias={config.bias!r})"
        if init_modifies_base(config):
            return f"init_lora_weights={config.init_lora_weights!r} has moved a part of the base model into the adapter"
    return None


BASE_MODIFYING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def init_modifies_base(config: Any) -> bool:
    """Whether the initialisation of the adapter moves a part of the base model's weights into it."""
    init = getattr(config, "init_lora_weights", True)
    return isinstance(init, str) and init.lower().startswith(BASE_MODIFYING_INITS)


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Saves configuration and weights of the adapter, so that peft finds the base model from anywhere on this machine.

    A local base model is named by its absolute path, one on the Hub with the commit that was loaded. Embeddings are
    saved if tokens were added to those of the base model. The quantisation of the base model, which PEFT does not
    record, is written to a file in the same folder.
    """
    for config in model.peft_config.values():
        _name_base(config, base_model(model))
    model.save_pretrained(str(folder), save_embedding_layers=True if has_new_tokens(model) else "auto")
    quantised = quantization(model)
    for name in model.peft_config:
        described = Path(folder) / ("" if name == "default" else name) / BASE_QUANTIZATION  # where peft puts them
        if quantised is not None:
            described.write_text(json.dumps(quantised, indent=2) + "\n", encoding="utf-8")
        else:
            described.unlink(missing_ok=True)  # left by an earlier adapter in this folder


def _name_base(config: PeftConfig, base: Any) -> None:
    name = config.base_model_name_or_path or getattr(base.config, "_name_or_path", "")
    if name and Path(name).is_dir():
        config.base_model_name_or_path = os.path.abspath(name)
    elif name:
        config.base_model_name_or_path = name
        config.revision = config.revision or _cached_commit(name)


def _cached_commit(name: str) -> str | None:
    """Commit of a Hub model in the local cache, which is the one that was loaded."""
    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a Hub name: a folder that was moved after the model was loaded
        return None
    return Path(path).parent.name if isinstance(path, str) else None


def has_new_tokens(model: Any) -> bool:
    """Whether the number of embeddings differs from that of the base model on disk."""
    rows, saved = _embedding_rows(model), _base_vocabulary(model)
    return saved is not None and rows != saved


def check_vocab_consistency(model: Any, tokenizer: Any) -> None:
    """Warns about new embeddings that are not trained, and about a number of embeddings with which the saved adapter
    will not load: peft resizes a base model only up to the tokens of the tokenizer saved with the adapter.
    """
    if not isinstance(model, PeftModel):
        return
    rows, saved = _embedding_rows(model), _base_vocabulary(model)
    embeddings = base_model(model).get_input_embeddings()
    if saved is not None and rows > saved and not any(p.requires_grad for p in embeddings.parameters()):
        logger.warning(
            "The embeddings of %d tokens are new and not trained: they are saved as they are now. To train them, list "
            "their ids in trainable_token_indices of the LoraConfig, or use added_tokens of GRPOConfig.",
            rows - saved,
        )
    if saved is not None and rows not in (saved, max(saved, len(tokenizer))):
        logger.warning(
            "The model has embeddings for %d tokens, its base model on disk for %d, and the tokenizer has %d tokens: "
            "the saved adapter will load only onto a base model with resize_token_embeddings(%d). Resize embeddings "
            "only if the tokenizer has more tokens, and then to exactly len(tokenizer), not to a multiple.",
            rows,
            saved,
            len(tokenizer),
            rows,
        )


def _embedding_rows(model: Any) -> int:
    return int(base_model(model).get_input_embeddings().weight.shape[0])


def _base_vocabulary(model: Any) -> int | None:
    """Number of tokens that the base model on disk has embeddings for; None if unknown."""
    name = getattr(base_model(model).config, "_name_or_path", "")
    if not name:
        return None
    try:
        revision = next((config.revision for config in (getattr(model, "peft_config", None) or {}).values()), None)
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


# ---- detecting training without effect -------------------------------------------------------------------------------


@torch.no_grad()
def parameter_checksums(model: Any) -> dict[str, tuple[float, float]]:
    """Sum and sum of squares of each trainable parameter; any real update changes them."""
    return {
        name: (float(parameter.double().sum()), float(parameter.double().square().sum()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
