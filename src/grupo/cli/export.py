"""`grupo export`: converts a run's model for other programs, and compares the result with the trained model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError
from grupo.export import merge, push, to_gguf
from grupo.export.source import ADAPTER_CONFIG, Source, adapter_weights, atomic_output, find_source, require_absent
from grupo.runs.model_card import card_from_files
from grupo.runs.plots import REWARD_CURVE
from grupo.utils.messages import BASE_QUANTIZATION

ADAPTER_FILES = (
    "adapter_*",
    "*token*",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "README.md",
    REWARD_CURVE,
)


@dataclass(frozen=True)
class ExportOptions:
    """Options of the command line other than source and target; None if not given."""

    output: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    base: str | None = None
    base_weights: str | None = None
    repo: str | None = None
    private: bool | None = None
    revision: str | None = None


TARGETS_OF_OPTION = {
    "output": ("adapter", "merged", "gguf"),
    "dtype": ("merged",),
    "quantization": ("gguf",),
    "base": ("merged", "gguf"),
    "base_weights": ("merged", "gguf"),
    "repo": ("hub",),
    "private": ("hub",),
    "revision": ("hub",),
}


def export(run: str, to: str, options: ExportOptions) -> int:
    """Exports, prints how far the result differs from the trained model, and returns exit code 0.

    Raises:
        ConfigError: an option belongs to another target, or there is nothing to export.
        ExportError: the exported model differs from the trained one, or the Hub is unreachable.
    """
    for name, targets in TARGETS_OF_OPTION.items():
        if getattr(options, name) is not None and to not in targets:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect with --to {to}: use it with --to {' or --to '.join(targets)}.")
    if to == "hub":
        if options.repo is None:
            raise ConfigError("--to hub needs a repository: --repo NAME or --repo OWNER/NAME.")
        more: dict[str, Any] = {"private": options.private, "revision": options.revision}
        print(push(_folder_to_push(run), options.repo, **more))
        return 0
    source = find_source(run)
    if to == "adapter":
        _copy_adapter(source, _output(run, options.output, "adapter"))
        return 0
    about: dict[str, Any] = {"base": options.base, "base_weights": options.base_weights or "dequantised"}
    if to == "merged":
        merged = merge(str(source.folder), _output(run, options.output, "merged"), dtype=options.dtype, **about)
        _write_card(source, merged.folder)
        print(f"{merged.folder}  {merged.dtype}, head and embedding {'tied' if merged.is_tied else 'separate'}")
        print(f"merged model against adapter on base: log-probs differ by at most {merged.merging.largest:.1e} nats")
        print(f"rounding to {merged.dtype}: difference {merged.rounding.divergence:.1e} nats/token "
              f"(training changed the model by {merged.training_delta.divergence:.1e})")  # fmt: skip
        return 0
    quantization = options.quantization or "q8_0"
    made = to_gguf(
        str(source.folder), _output(run, options.output, f"{quantization}.gguf"), quantization=quantization, **about
    )
    print(f"{made.file}  {made.quantization}, {made.bytes / 1e6:.1f} MB, pre-tokenizer {made.pre_tokenizer}")
    print(f"difference from the trained model: {made.rounding.divergence:.1e} nats/token "
          f"(training changed the model by {made.training_delta.divergence:.1e})")  # fmt: skip
    return 0


def _output(run: str, given: str | None, ending: str) -> Path:
    """By default next to the run: `runs/sums-merged`."""
    folder = Path(run).resolve()
    path = Path(given) if given is not None else folder.with_name(f"{folder.name}-{ending}")
    require_absent(path)
    return path


def _copy_adapter(source: Source, output: Path) -> None:
    if not source.is_adapter:
        raise ConfigError(f"{source.folder} has a whole model, not an adapter. Export it with --to merged.")
    with atomic_output(output) as folder:
        for pattern in ADAPTER_FILES:
            for file in source.folder.glob(pattern):
                if file.is_file():
                    shutil.copy2(file, folder / file.name)
        if source.quantization:  # a PEFT model saved without the trainer has it only in the manifest
            (folder / BASE_QUANTIZATION).write_text(json.dumps(source.quantization, indent=2) + "\n", encoding="utf-8")
        _check_loads(folder)
    base = source.adapter_config.get("base_model_name_or_path")
    print(f"{output}  for the base model {base}")


def _check_loads(folder: Path) -> None:
    from peft import PeftConfig

    PeftConfig.from_pretrained(str(folder))
    weights = adapter_weights(folder)
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if not weights or broken:
        raise ConfigError(f"The adapter has {f'NaN or infinity in {broken[0]}' if broken else 'no weights'}: {folder}.")


def _folder_to_push(run: str) -> Path:
    """The folder itself if it has files to upload, such as a GGUF file; the latest checkpoint of a killed run."""
    folder = Path(run)
    if folder.is_dir() and (any(folder.glob("*.gguf")) or not (folder / "manifest.json").is_file()):
        return folder
    return find_source(run).folder


def _write_card(source: Source, folder: Path) -> None:
    base = source.adapter_config.get("base_model_name_or_path")
    card = card_from_files(folder, source.run, base_model=base, is_adapter=(folder / ADAPTER_CONFIG).is_file())
    (folder / "README.md").write_text(card, encoding="utf-8")
    plot = source.run / REWARD_CURVE
    if plot.is_file():
        shutil.copy2(plot, folder / REWARD_CURVE)
