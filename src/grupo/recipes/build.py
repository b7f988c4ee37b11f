"""What a recipe starts from: a model, with a fresh adapter or without, or a saved adapter to go on with."""

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


def start_model(recipe: Recipe) -> str:
    """Path or name of the model or adapter."""
    return default_model_path() if recipe.model == "default" else recipe.model


def with_start(recipe: Recipe) -> Recipe:
    """The recipe with the newest model of a run where that is what it names, and with `lora: null` where its model is a
    saved adapter and it asks for no fresh one."""
    recipe = recipe.model_copy(update={"model": resolve_latest(recipe.model)})
    if "lora" in recipe.model_fields_set or not _names_adapter(recipe):
        return recipe
    return recipe.model_copy(update={"lora": None})


def default_folder(recipe: Recipe, ending: str = "") -> str:
    """Of a run that names none: after its data, with the next free number."""
    name = recipe.task or Path(recipe.dataset.path).stem  # type: ignore[union-attr]
    return str(unused_folder(Path("runs"), name + ending))


def as_one_run(recipe: Recipe, config: GRPOConfig, console: Console) -> tuple[Recipe, Console]:
    """Of several processes the first one talks, and its run folder is that of all: each of them has looked for a fresh
    name at its own time. The folder is set in `config`, too."""
    if config.world_size == 1:
        return recipe, console
    if config.process_index != 0:
        logging.getLogger("grupo").setLevel(logging.ERROR)
        set_verbosity_error()
        console = Console(quiet=True)
    (config.output_dir,) = broadcast_object_list([config.output_dir])
    return recipe.model_copy(update={"training": {**recipe.training, "output_dir": config.output_dir}}), console


def has_adapter(recipe: Recipe) -> bool:
    """Whether an adapter is trained, a fresh or a saved one, and not the whole model."""
    return recipe.lora is not None or _names_adapter(recipe)


def _names_adapter(recipe: Recipe) -> bool:
    if recipe.model == "default":
        return False
    kwargs = recipe.training.get("model_init_kwargs")
    return find_adapter(recipe.model, kwargs if isinstance(kwargs, dict) else None) is not None


def quantization(recipe: Recipe) -> Any:
    """What `from_pretrained` needs to quantise the model; None for nothing.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if recipe.quantization is None:
        return None
    dtype = device_dtype() if recipe.dtype is None else parse_dtype(recipe.dtype)
    return quantization_config(recipe.quantization, dtype, asked=f"quantization: {recipe.quantization}")


def training_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of GRPOConfig, with the dtype that the model is loaded in.

    Raises:
        ConfigError: the dtype is given twice.
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
            f"The recipe gives a dtype twice: dtype={recipe.dtype}, and training.model_init_kwargs={given!r}. Take one "
            "out; model_init_kwargs must be a mapping beside dtype."
        )
    return {**training, "model_init_kwargs": {**given, "dtype": dtype}}


def fresh_adapter(recipe: Recipe) -> Any:
    """The configuration of the adapter that the recipe asks for; None for none."""
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
