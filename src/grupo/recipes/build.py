"""Arguments for the trainer from a recipe: model, adapter, quantization, run folder and fields of GRPOConfig."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers.utils.logging import set_verbosity_error

from grupo.config import GRPOConfig
from grupo.errors import ConfigError
from grupo.models.default_model import default_model_path
from grupo.models.load import device_dtype, parse_dtype
from grupo.models.peft_io import find_adapter
from grupo.models.peft_setup import lora_config
from grupo.models.quantization import quantization_config
from grupo.recipes.schema import Recipe
from grupo.runs.latest import resolve_latest
from grupo.utils.files import unused_folder


def model_path(recipe: Recipe) -> str:
    """Path or name of the model or adapter."""
    return default_model_path() if recipe.model == "default" else recipe.model


def resolve_model(recipe: Recipe) -> Recipe:
    """The recipe with the newest model if it names a run folder, and with `lora: null` if its model is a saved adapter
    and it does not ask for a new one."""
    recipe = recipe.model_copy(update={"model": resolve_latest(recipe.model)})
    if "lora" in recipe.model_fields_set or not _names_adapter(recipe):
        return recipe
    return recipe.model_copy(update={"lora": None})


def with_run_folder(recipe: Recipe, ending: str = "") -> Recipe:
    """The recipe with a new run folder named after its data, unless it names one; it logs every step by default."""
    folder = recipe.training.get("output_dir")
    if folder is None:
        name = recipe.task or Path(recipe.dataset.path).stem  # type: ignore[union-attr]
        folder = str(unused_folder(Path("runs"), name + ending))
    return recipe.model_copy(update={"training": {"logging_steps": 1, **recipe.training, "output_dir": folder}})


def silence_other_ranks(recipe: Recipe, config: GRPOConfig, console: Console) -> tuple[Recipe, Console]:
    """Of several processes only rank 0 prints, and all use its run folder, because each looked for an unused name at a
    different time. The folder is set in `config` as well."""
    if config.world_size == 1:
        return recipe, console
    if config.process_index != 0:
        logging.getLogger("grupo").setLevel(logging.ERROR)
        set_verbosity_error()
        console = Console(quiet=True)
    (config.output_dir,) = broadcast_object_list([config.output_dir])
    return recipe.model_copy(update={"training": {**recipe.training, "output_dir": config.output_dir}}), console


def has_adapter(recipe: Recipe) -> bool:
    """Whether an adapter is trained, new or saved, instead of the whole model."""
    return recipe.lora is not None or _names_adapter(recipe)


def _names_adapter(recipe: Recipe) -> bool:
    if recipe.model == "default":
        return False
    kwargs = recipe.training.get("model_init_kwargs")
    return find_adapter(recipe.model, kwargs if isinstance(kwargs, dict) else None) is not None


def quantization(recipe: Recipe) -> Any:
    """The quantization configuration for `from_pretrained`; None for a model without quantization.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if recipe.quantization is None:
        return None
    dtype = device_dtype() if recipe.dtype is None else parse_dtype(recipe.dtype)
    return quantization_config(recipe.quantization, dtype, asked=f"quantization: {recipe.quantization}")


def training_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of GRPOConfig, with the dtype of the loaded weights.

    Raises:
        ConfigError: the dtype is set twice.
    """
    training = dict(recipe.training)
    dtype: str | None = recipe.dtype
    if dtype is None and recipe.quantization is not None:
        dtype = str(device_dtype()).removeprefix("torch.")
    if dtype is None:
        return training
    given = training.get("model_init_kwargs") or {}
    if not isinstance(given, dict) or {"dtype", "torch_dtype"} & given.keys():
        if recipe.dtype is None:
            return training
        raise ConfigError(
            f"The recipe sets the dtype twice: dtype={recipe.dtype}, and training.model_init_kwargs={given!r}. Remove "
            "one; together with dtype, model_init_kwargs must be a mapping without it."
        )
    return {**training, "model_init_kwargs": {**given, "dtype": dtype}}


def lora_config_of(recipe: Recipe) -> Any:
    """PEFT's configuration of the new adapter; None for a recipe without one."""
    spec = recipe.lora
    if spec is None:
        return None
    return lora_config(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules,
        exclude_modules=spec.exclude_modules,
        modules_to_save=spec.modules_to_save,
        layers_to_transform=spec.layers,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        bias=spec.bias,
    )
