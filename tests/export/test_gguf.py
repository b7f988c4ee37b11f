"""GGUF files: read raw and by transformers, against llama.cpp's rules written down independently of ours."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from families import family_model
from grupo.errors import ConfigError, ExportError, UnsupportedError
from grupo.export import gguf as gguf_file
from grupo.export import to_gguf
from grupo.export.gguf_tokenizer import vocabulary
from grupo.export.logit_check import TEXT, check_ids, difference, logits_of
from saved_adapters import ADAPTERS, SIZES, TOKENIZER, adapted, base_folder
from tiny import BPE_CHAT_TEMPLATE, PRE_TOKENIZERS, tiny_bpe_tokenizer, tiny_model, tiny_tokenizer

LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, linear rope": ("Llama", LINEAR),
    "Llama, llama3 rope": ("R1 distill (Llama)", {"tie_word_embeddings": True}),
    "Qwen2, tied": ("Qwen2", {}),
    "Qwen2": ("R1 distill (Qwen)", {}),
    "Qwen3, tied": ("Qwen3", {}),
}


def shaped(name: str) -> Any:
    family, settings = SHAPES[name]
    model = family_model(family, **{**SIZES, **settings})
    model.generation_config.eos_token_id = [2, 0]
    return model.eval()


def loaded(file: Path, config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config,
        quantization_config=GgufConfig(dequantize=True), dtype=torch.float32,
    )  # fmt: skip


def field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


@pytest.mark.parametrize(("quantization", "bound"), [("f16", 1e-5), ("q8_0", 5e-3)])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_loaded_back_is_the_model(name: str, quantization: str, bound: float, tmp_path: Path) -> None:
    model = shaped(name)
    report = to_gguf(model, tmp_path / "model.gguf", tokenizer=TOKENIZER, quantization=quantization)
    again = loaded(report.file, model.config)
    ids = check_ids(TOKENIZER, 448)
    found = difference(logits_of(model, ids), logits_of(again, ids))
    assert 0 < found.divergence < bound and found == report.rounding
    assert report.bytes == report.file.stat().st_size
    assert list(tmp_path.iterdir()) == [report.file]
    tensors = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.file).tensors}
    assert ("output.weight" in tensors) is not model.config.tie_word_embeddings
    expected = {"F32", {"f16": "F16", "q8_0": "Q8_0"}[quantization]}
    assert set(tensors.values()) == expected and tensors["blk.1.attn_norm.weight"] == "F32"


def test_llama_rotates_neighbours(tmp_path: Path) -> None:
    """Head 1, component 3 of the second half is row 2 * 3 + 1 of that head in the file."""
    model = shaped("Llama")
    to_gguf(model, tmp_path / "model.gguf", tokenizer=TOKENIZER, quantization="f16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    width = 16
    for name, part in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        weight = getattr(model.model.layers[0].self_attn, part).weight.detach().numpy()
        row = np.array(tensors[f"blk.0.{name}.weight"].data)[width + 2 * 3 + 1]
        np.testing.assert_array_equal(row, weight[width + width // 2 + 3].astype(np.float16))
    other = shaped("Qwen2")
    to_gguf(other, tmp_path / "other.gguf", tokenizer=TOKENIZER, quantization="f16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "other.gguf").tensors}
    np.testing.assert_array_equal(
        np.array(tensors["blk.0.attn_q.weight"].data),
        other.model.layers[0].self_attn.q_proj.weight.detach().numpy().astype(np.float16),
    )


def test_llama3_frequencies_are_those_of_the_paper(tmp_path: Path) -> None:
    """Factors by which llama.cpp divides each frequency: Llama 3.1's published rule, written by wavelength."""
    model = shaped("Llama, llama3 rope")
    to_gguf(model, tmp_path / "model.gguf", tokenizer=TOKENIZER)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    (factors,) = [np.array(tensor.data) for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    width, context, factor, low, high = 16, 64, 8.0, 1.0, 4.0
    for i, found in enumerate(factors):
        wavelength = 2 * math.pi * 10000 ** (2 * i / width)
        smooth = (context / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = 1.0 if wavelength < context / high else factor if wavelength > context / low else between
        assert found == pytest.approx(expected, rel=1e-5)
    assert len(factors) == width // 2 and len(set(factors.round(3))) > 2


def test_metadata(tmp_path: Path) -> None:
    model = shaped("Qwen3, tied")
    to_gguf(model, tmp_path / "sums.gguf", tokenizer=TOKENIZER)
    reader = gguf.GGUFReader(tmp_path / "sums.gguf")
    assert {name: field(reader, f"qwen3.{name}") for name in (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
        "rope.dimension_count", "rope.freq_base",
    )} == {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "vocab_size": 448, "rope.dimension_count": 16, "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert field(reader, "qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(model.config.rms_norm_eps)
    assert field(reader, "general.name") == "sums" and field(reader, "general.file_type") == 7
    config = AutoConfig.from_pretrained(str(tmp_path), gguf_file="sums.gguf")
    assert config.model_type == "qwen3" and config.tie_word_embeddings and config.num_key_value_heads == 2


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_tokenizer(pre: str, tmp_path: Path) -> None:
    tokenizer = tiny_bpe_tokenizer(TEXT, pre=pre)
    report = to_gguf(shaped("Llama"), tmp_path / "model.gguf", tokenizer=tokenizer)
    assert report.pre_tokenizer == pre
    reader = gguf.GGUFReader(report.file)
    ggml = {name.removeprefix("tokenizer."): field(reader, name) for name in reader.fields if "tokenizer." in name}
    tokens, types = ggml["ggml.tokens"], ggml["ggml.token_type"]
    assert ggml["ggml.model"] == "gpt2" and ggml["ggml.pre"] == pre
    assert len(tokens) == len(types) == 448, "one for each row of the embedding"
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert [types[0], types[2], types[5], types[think], types[447]] == [3, 3, 1, 4, 5]
    assert tokens[2] == "<|im_end|>" and tokens[think] == "<think>" and tokens[447] == "[PAD447]"
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert ggml["ggml.merges"] == [" ".join(merge) for merge in merges]
    special = ("bos", "eos", "padding", "eot")
    assert [ggml[f"ggml.{name}_token_id"] for name in special] == [0, 2, 0, 0]
    assert [ggml[f"ggml.add_{name}_token"] for name in ("bos", "eos")] == [False, False]
    assert ggml["chat_template"] == BPE_CHAT_TEMPLATE
    again = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="model.gguf")
    text = "<|im_start|>user\n12 rolls, 3456 <think>don't</think>\n\n  ok<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_an_adapter_is_merged_on_the_way(tmp_path: Path) -> None:
    model = adapted(base_folder(tmp_path / "base"), **ADAPTERS["head"])
    model.save_pretrained(tmp_path / "adapter")
    report = to_gguf(tmp_path / "adapter", tmp_path / "model.gguf", quantization="F16")
    assert report.rounding.divergence < 1e-5 < 1e-3 < report.training_delta.divergence
    names = {tensor.name for tensor in gguf.GGUFReader(report.file).tensors}
    assert "output.weight" in names, "the head was trained, and is no longer the embedding"
    ids = check_ids(TOKENIZER, 448)
    config = AutoConfig.from_pretrained(tmp_path / "base", tie_word_embeddings=False)
    assert difference(logits_of(model, ids), logits_of(loaded(report.file, config), ids)).divergence < 1e-5


# ---- broken on purpose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "broken", "said"),
    [
        ("_interleaved", lambda weight, heads: weight, "is not the trained one"),
        ("_plain_frequencies", lambda config: torch.ones(8), "other rotary frequencies"),
        ("_encoded", lambda tensor, _: ((tensor.numpy() * 1.01).astype(np.float32), gguf.GGMLQuantizationType.F32),
         "differs from the tensor of the model"),
        ("vocabulary", lambda tokenizer, model: vocabulary(tiny_bpe_tokenizer(TEXT[:200]), model), "splits a text"),
    ],
    ids=["rotation", "frequencies", "numbers", "tokenizer"],
)  # fmt: skip
def test_a_wrong_file_is_noticed_and_leaves_nothing(
    part: str, broken: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, part, broken)
    with pytest.raises(ExportError, match=said):
        to_gguf(shaped("Llama, llama3 rope"), tmp_path / "model.gguf", tokenizer=TOKENIZER)
    assert list(tmp_path.iterdir()) == []


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("Gemma 3", {}, "this is a model of the type 'gemma3_text'"),
        ("Phi-3", {}, "this is a model of the type 'phi3'"),
        ("Mistral", {}, "this is a model of the type 'mistral'"),
        ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                       "original_max_position_embeddings": 128}}, "scaling of the type 'yarn'"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}, "a sliding window"),
        ("Qwen3", {"attention_bias": True}, "biases in the attention of Qwen3"),
        ("Llama", {"hidden_act": "gelu"}, "the activation 'gelu'"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused_by_name(family: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=said):
        to_gguf(family_model(family, **settings), tmp_path / "model.gguf", tokenizer=TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def test_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    file, model = tmp_path / "model.gguf", shaped("Llama")
    with pytest.raises(UnsupportedError, match="The tokenizer is of the kind WordLevel"):
        to_gguf(model, file, tokenizer=tiny_tokenizer())
    other = tiny_bpe_tokenizer(TEXT)
    from tokenizers import pre_tokenizers

    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(UnsupportedError, match="splits text by Punctuation, ByteLevel"):
        to_gguf(model, file, tokenizer=other)
    with pytest.raises(ConfigError, match="ids up to 399, and the model has embeddings for 128"):
        to_gguf(tiny_model(), file, tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match="contains a tokenizer, and none was found"):
        to_gguf(model, file)
    with pytest.raises(UnsupportedError, match="quantization='q4_k_m'"):
        to_gguf(model, file, tokenizer=TOKENIZER, quantization="q4_k_m")
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        to_gguf(model, file, tokenizer=TOKENIZER)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_goes_round(tmp_path: Path) -> None:
    from grupo.models.default_model import default_model_path

    report = to_gguf(default_model_path(), tmp_path / "smollm.gguf")
    assert report.rounding.divergence < 5e-3 and report.bytes < 150e6
