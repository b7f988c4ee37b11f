"""The tokenizer part of a GGUF file: byte-level BPE, as Llama 3, Qwen and SmolLM have it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError, ExportError, UnsupportedError
from grupo.export.logit_check import TEXT

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of llama.cpp."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
"""Patterns that text is cut by before BPE -> what llama.cpp calls them."""


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says about a tokenizer."""

    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    special_ids: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None

    def add_to(self, writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(self.merges)
        for name, number in self.special_ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        # Said in every file: what llama.cpp takes otherwise depends on the pre-tokenizer.
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def vocabulary(tokenizer: Any, model: Any) -> GgufVocabulary:
    """The vocabulary of a tokenizer, with one entry for each row of the model's embedding.

    Raises:
        UnsupportedError: no byte-level BPE, or text is cut in a way that llama.cpp has no name for here.
        ConfigError: the tokenizer has more tokens than the model.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(f"{type(tokenizer).__name__} has no tokenizer.json, which a GGUF file is made from.")
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = parts["model"]
    if bpe["type"] != "BPE" or bpe.get("byte_fallback"):
        kind = "SentencePiece" if bpe.get("byte_fallback") or bpe["type"] == "Unigram" else bpe["type"]
        raise UnsupportedError(
            f"The tokenizer is of the kind {kind}; GGUF files are written for byte-level BPE (Llama 3, Qwen, SmolLM). "
            "Export with --to merged and convert by llama.cpp's convert_hf_to_gguf.py."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise ConfigError(
            f"The tokenizer has ids up to {max(by_id)}, and the model embeds {rows} tokens: they do not belong "
            "together."
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
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    ids = tokenizer("a")["input_ids"]
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return GgufVocabulary(
        pre_tokenizer=_pre_tokenizer(parts),
        tokens=tokens,
        token_types=types,
        merges=merges,
        special_ids=_special_ids(tokenizer, model),
        adds_bos=tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        adds_eos=tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
        chat_template=template,
    )


def check_tokenizer(file: Path, tokenizer: Any) -> None:
    """Raises an ExportError where the tokenizer in the file reads a text in another way than `tokenizer`."""
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    now, before = (part(TEXT, add_special_tokens=False)["input_ids"] for part in (again, tokenizer))
    if now != before:
        raise ExportError(
            f"The tokenizer loaded back from {file.name} cuts a text into {len(now)} tokens that are not the "
            f"{len(before)} of the model's tokenizer. Nothing was written."
        )


def _special_ids(tokenizer: Any, model: Any) -> dict[str, int]:
    """The tokenizer's special ids; `eot` ends a turn where the generation config names another end than `eos`."""
    names = {"bos": "bos", "eos": "eos", "unk": "unk", "pad": "pad"}
    found = {name: getattr(tokenizer, f"{known}_token_id") for name, known in names.items()}
    ends = getattr(model.generation_config, "eos_token_id", None)
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, found["eos"])]
    if others:
        found["eot"] = others[0]
    return {name: int(number) for name, number in found.items() if number is not None}


def _pre_tokenizer(parts: dict[str, Any]) -> str:
    """What llama.cpp calls the way in which the tokenizer cuts text before BPE."""
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
        f"The tokenizer cuts text by {', '.join(map(str, kinds))}"
        + (f" after the normalisation {normalizer}" if normalizer else "")
        + ", in a way that has no known name in llama.cpp: it would read prompts differently. Export with --to merged."
    )
