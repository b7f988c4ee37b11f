"""The tokenizer of a GGUF file: byte-level BPE, as in Llama 3, Qwen and SmolLM."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grupo.errors import ConfigError, ExportError, UnsupportedError
from grupo.export.logit_check import TEXT

if TYPE_CHECKING:
    import gguf

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of llama.cpp."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
"""Patterns that split text before BPE -> their names in llama.cpp."""


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer as a GGUF file describes it."""

    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    special: gguf.SpecialVocab
    """Merges, special tokens and chat template."""

    def add_to(self, writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        self.special.add_to_gguf(writer, quiet=True)


def vocabulary(tokenizer: Any, model: Any) -> GgufVocabulary:
    """The vocabulary of a tokenizer, with one entry for each row of the model's embedding.

    Raises:
        UnsupportedError: not byte-level BPE, or a way to split text that has no known name in llama.cpp.
        ConfigError: the tokenizer has more tokens than the model.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(f"{type(tokenizer).__name__} has no tokenizer.json, which a GGUF file needs.")
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = parts["model"]
    if bpe["type"] != "BPE" or bpe.get("byte_fallback"):
        kind = "SentencePiece" if bpe.get("byte_fallback") or bpe["type"] == "Unigram" else bpe["type"]
        raise UnsupportedError(
            f"The tokenizer is of the kind {kind}; GGUF files are written for byte-level BPE (Llama 3, Qwen, SmolLM). "
            "Export with --to merged and convert with llama.cpp's convert_hf_to_gguf.py."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise ConfigError(
            f"The tokenizer has ids up to {max(by_id)}, and the model has embeddings for {rows} tokens: they do not "
            "belong together."
        )
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(rows):
        if number in added:
            tokens.append(added[number].content)
            types.append(CONTROL if added[number].special else USER_DEFINED)
        else:
            tokens.append(by_id.get(number, f"[PAD{number}]"))
            types.append(NORMAL if number in by_id else UNUSED)
    return GgufVocabulary(_pre_tokenizer(parts), tokens, types, _special_vocabulary(tokenizer, model))


def check_tokenizer(file: Path, tokenizer: Any) -> None:
    """Raises an ExportError if the tokenizer in the file splits a text in another way than `tokenizer`."""
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    now, before = (part(TEXT, add_special_tokens=False)["input_ids"] for part in (again, tokenizer))
    if now != before:
        raise ExportError(
            f"The tokenizer loaded back from {file.name} splits a text into {len(now)} tokens that are not the "
            f"{len(before)} of the model's tokenizer. Nothing was written."
        )


def _special_vocabulary(tokenizer: Any, model: Any) -> gguf.SpecialVocab:
    import gguf

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        special = gguf.SpecialVocab(scratch, load_merges=True, special_token_types=("bos", "eos", "unk", "pad"))
    # Written in every file, because llama.cpp's default depends on the pre-tokenizer.
    ids = tokenizer("a")["input_ids"]
    for name, end in (("bos", ids[0]), ("eos", ids[-1])):
        special.add_special_token[name] = end == getattr(tokenizer, f"{name}_token_id")
    # The end of a turn, where the generation config names another end than `eos`.
    ends = getattr(model.generation_config, "eos_token_id", None)
    for end in ends if isinstance(ends, list) else [ends]:
        if end not in (None, tokenizer.eos_token_id):
            special.special_token_ids.setdefault("eot", int(end))
    return special


def _pre_tokenizer(parts: dict[str, Any]) -> str:
    """The name in llama.cpp of the way in which the tokenizer splits text before BPE."""
    normalizer = (parts.get("normalizer") or {}).get("type")
    outer = parts.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if normalizer in (None, "NFC") and kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last["use_regex"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and last["use_regex"]:
            return "smollm"
        pattern = steps[0].get("pattern", {}).get("Regex")
        if kinds == ["Split", "ByteLevel"] and pattern in SPLITS and not last["use_regex"]:
            return SPLITS[pattern]
    raise UnsupportedError(
        f"The tokenizer splits text by {', '.join(map(str, kinds))}"
        + (f" after the normalisation {normalizer}" if normalizer else "")
        + ", which has no known name in llama.cpp: it would tokenize prompts differently. Export with --to merged."
    )
