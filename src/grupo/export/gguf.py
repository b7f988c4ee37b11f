"""GGUF files of Llama, Qwen2 and Qwen3 models, for llama.cpp and programs that are built on it.

The layout follows llama.cpp's own converter (docs/export.md). H heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grupo.errors import ConfigError, ExportError, UnsupportedError
from grupo.export.gguf_tokenizer import GgufVocabulary, check_tokenizer, vocabulary
from grupo.export.logit_check import BOUNDS, Difference, check_close, logits_of
from grupo.export.merging import load_merged, warn_about_loss
from grupo.export.source import require_absent, scratch_next_to

if TYPE_CHECKING:
    import gguf

logger = logging.getLogger("grupo")

ARCHITECTURES = ("llama", "qwen2", "qwen3")
QUANTIZATIONS = ("q8_0", "f16")
BLOCK = 32
"""Weights that share a scale in Q8_0."""


@dataclass(frozen=True)
class GgufReport:
    """Result of an export; differences are those of `grupo.export.logit_check`, in nats."""

    file: Path
    quantization: str
    bytes: int
    rounding: Difference
    """Between the trained policy in float32 and the model loaded back from the file."""
    training_delta: Difference
    """Between the base model and the trained policy: the change by training."""
    pre_tokenizer: str
    """Name of the pre-tokenizer in llama.cpp."""

    @property
    def effect(self) -> Difference:
        """Former name of `training_delta`."""
        logger.warning("GgufReport.effect is now called training_delta.")
        return self.training_delta


def to_gguf(
    model: Any,
    output_file: str | Path,
    *,
    tokenizer: Any = None,
    quantization: str = "q8_0",
    base: str | None = None,
    quantization_config: Any = None,
    base_weights: str = "dequantised",
    trust_remote_code: bool = False,
) -> GgufReport:
    """Writes a GGUF file of a model, or of an adapter merged into its base in float32, and checks it.

    Args:
        model: a model, a PEFT model, or a folder: of a run, a checkpoint, an adapter or a model.
        output_file: file to write; nothing is overwritten.
        tokenizer: by default that of the folder, or of the model by its name.
        quantization: "q8_0" (8 bit in blocks of 32) or "f16"; one-dimensional tensors stay in float32.
        base, quantization_config, base_weights: as in `merge`.

    Raises:
        ConfigError: there is no such model, base or tokenizer, or the file exists.
        UnsupportedError: the file could not describe this model or tokenizer.
        ExportError: the model loaded back from the file is not the trained one; nothing is written.
    """
    output = Path(output_file)
    require_absent(output)
    quantization = quantization.lower()
    if quantization not in QUANTIZATIONS:
        raise UnsupportedError(
            f"quantization={quantization!r}: GGUF files are written as {' and '.join(QUANTIZATIONS)}. For another "
            "quantisation, write f16 and convert it with llama.cpp's llama-quantize."
        )
    policy = load_merged(
        model,
        tokenizer=tokenizer,
        base=base,
        quantization_config=quantization_config,
        base_weights=base_weights,
        trust_remote_code=trust_remote_code,
    )
    check_describable(policy.model)
    if policy.tokenizer is None:
        raise ConfigError("A GGUF file contains a tokenizer, and none was found for the model. Pass tokenizer=.")
    vocab = vocabulary(policy.tokenizer, policy.model)
    with scratch_next_to(output) as scratch:
        file = scratch / (output.name if output.suffix == ".gguf" else f"{output.name}.gguf")
        _write(file, policy.model, vocab, quantization, name=output.stem)
        _check_file(file, policy.model, policy.tokenizer)
        again = logits_of(_loaded(file, policy.model), policy.ids)
        rounding = check_close(policy.logits, again, f"The model loaded back from {file.name}", BOUNDS[quantization])
        warn_about_loss(rounding, policy.training_delta, f"Writing the weights as {quantization}", _wider(quantization))
        size = file.stat().st_size
        require_absent(output)
        file.rename(output)
    return GgufReport(output, quantization, size, rounding, policy.training_delta, vocab.pre_tokenizer)


def check_describable(model: Any) -> None:
    """Raises an UnsupportedError for a model that a GGUF file cannot describe or llama.cpp does not support."""
    config = model.config
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise UnsupportedError(
            f"GGUF files are written for {', '.join(ARCHITECTURES)}; this is a model of the type {kind!r}. Export it "
            "with --to merged and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    rope = config.rope_parameters
    scalings = {"default", "linear", *(("llama3",) if kind == "llama" else ())}
    for is_present, what in (
        (config.hidden_act != "silu", f"the activation {config.hidden_act!r}"),
        (rope.get("rope_type", "default") not in scalings, f"rotary scaling of the type {rope.get('rope_type')!r}"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "rotary embeddings on only a part of each head"),
        (
            "sliding_attention" in (getattr(config, "layer_types", None) or ()),
            "layers with a sliding window",
        ),
        (kind == "qwen3" and config.attention_bias, "biases in the attention of Qwen3"),
        (_head_dim(config) % 2 == 1, "heads of an odd size"),
    ):
        if is_present:
            raise UnsupportedError(f"The model has {what}, which a GGUF file of the type {kind} cannot describe.")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _write(file: Path, model: Any, vocab: GgufVocabulary, quantization: str, *, name: str) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(file), config.model_type)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(sum(p.numel() for p in model.parameters()), 0, 0, 0))
    f16 = quantization == "f16"
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if f16 else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    vocab.add_to(writer)
    for tensor_name, tensor in _tensors(model):
        data, kind = _encoded(tensor, quantization)
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and float32 tensors in the form of llama.cpp."""
    import gguf

    config = model.config
    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    # A tied head is not a separate parameter; llama.cpp uses the embedding if there is no head.
    for name, tensor in model.named_parameters():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise UnsupportedError(f"GGUF files of the type {config.model_type} cannot hold the tensor {name}.")
        if config.model_type == "llama" and ".attn_q." in mapped:
            tensor = _interleaved(tensor, config.num_attention_heads)
        elif config.model_type == "llama" and ".attn_k." in mapped:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        yield mapped, tensor.detach()
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _plain_frequencies(config) / model.model.rotary_emb.inv_freq.float()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows (H D, ...) in the order of llama.cpp, which rotates neighbours; transformers rotates halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _plain_frequencies(config: Any) -> Tensor:
    """(D / 2,) frequencies of rotary embeddings without scaling."""
    dim = _head_dim(config)
    frequencies: Tensor = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    return frequencies


def _encoded(tensor: Tensor, quantization: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    import gguf

    data = tensor.float().contiguous().numpy()
    if data.ndim == 1:
        return data, gguf.GGMLQuantizationType.F32
    if quantization == "q8_0" and data.shape[-1] % BLOCK == 0:
        return gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    if np.abs(data).max() > np.finfo(np.float16).max:
        raise UnsupportedError("The model has weights above 65,504, the largest float16 number.")
    return data.astype(np.float16), gguf.GGMLQuantizationType.F16


def _loaded(file: Path, model: Any) -> Any:
    """The model of the file in float32. transformers does not read rotary scaling; `_check_file` checks it."""
    from transformers import AutoModelForCausalLM, GgufConfig

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        config=model.config,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )


def _check_file(file: Path, model: Any, tokenizer: Any) -> None:
    """Checks the raw file: each tensor within its rounding, the rotary frequencies, the tokenizer."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(file))
    except (ValueError, IndexError) as error:  # the library does not report a full disk
        raise ExportError(f"{file.name} was not written completely: is the disk full? It was removed.") from error
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = dict(_tensors(model))
    if found.keys() != expected.keys():
        raise ExportError(f"{file.name} has the wrong tensors: {sorted(found.keys() ^ expected.keys())[:5]}.")
    for name, tensor in expected.items():
        values = torch.from_numpy(np.array(gguf.quants.dequantize(found[name].data, found[name].tensor_type)))
        if values.shape != tensor.shape or not _within_rounding(values, tensor, found[name].tensor_type):
            raise ExportError(f"{name} in {file.name} differs from the tensor of the model by more than its rounding.")
    kind = model.config.model_type
    field = {name: reader.fields[f"{kind}.rope.{name}"].contents() for name in ("freq_base", "dimension_count")}
    exponents = torch.arange(0, field["dimension_count"], 2).float() / field["dimension_count"]
    frequencies = 1.0 / field["freq_base"] ** exponents
    if f"{kind}.rope.scaling.factor" in reader.fields:
        frequencies = frequencies / reader.fields[f"{kind}.rope.scaling.factor"].contents()
    if "rope_freqs.weight" in found:
        frequencies = frequencies / torch.from_numpy(np.array(found["rope_freqs.weight"].data))
    if not torch.allclose(frequencies, model.model.rotary_emb.inv_freq.float(), rtol=1e-5, atol=0):
        raise ExportError(f"{file.name} has other rotary frequencies than the model.")
    check_tokenizer(file, tokenizer)


def _within_rounding(values: Tensor, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> bool:
    if kind.name == "F32":
        return torch.equal(values, tensor)
    if kind.name == "F16":
        return torch.allclose(values, tensor, rtol=2**-11, atol=2**-24)
    # Half a step of the block's scale, and the scale itself is in float16.
    largest = tensor.reshape(-1, BLOCK).abs().amax(-1, keepdim=True)
    error = (values - tensor).reshape(-1, BLOCK).abs()
    return bool((error <= largest * (0.5 / 127 + 2**-11) + 2**-24 * 127).all())


def _wider(quantization: str) -> str:
    return "quantization='f16'" if quantization == "q8_0" else "A merged folder in float32"
