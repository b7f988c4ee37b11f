"""Small real parts for tests: a random Llama, a character tokenizer, and a byte-level BPE tokenizer."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<u>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
BOS_CHAT_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
SPECIALS = ["<s>", "</s>", "<pad>", "<u>", "<a>", "<end>"]
VOCABULARY_SIZE = 128


def tiny_tokenizer(
    *, pad: str | None = "<pad>", bos: bool = True, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, plus special tokens."""
    characters = [c for c in string.printable if c not in "\t\r\x0b\x0c"]
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|[\s\S]"), "isolated")
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token=pad,
        additional_special_tokens=["<u>", "<a>", "<end>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA_3_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA_3_SPLIT.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
BPE_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BPE_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_bpe_tokenizer(text: str, *, pre: str = "smollm", size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE as of SmolLM, Llama 3 or Qwen, trained on a text; `<think>` is an added token and not special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = (
        PRE_TOKENIZERS[pre][0] if len(PRE_TOKENIZERS[pre]) == 1 else pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=size - 1, special_tokens=BPE_SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    core.add_tokens(["<think>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = BPE_CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    *, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> LlamaForCausalLM:
    """Two layers, about 27 thousand random parameters.

    In float64 its norms compute in float64 as well: those of transformers compute in float32, whatever the model's
    dtype, so that two ways to the same number differ by 1e-7.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": tied,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(dtype)
    return with_exact_norms(model) if dtype is torch.float64 else model


def with_exact_norms(model: Any) -> Any:
    """The model with RMS norms that compute in their own dtype."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                exact.weight = child.weight
                setattr(module, name, exact)
    return model
