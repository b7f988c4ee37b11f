"""Peak memory of a run, estimated before it starts: arithmetic on sizes, which needs no weights.

Each component gives the memory of what it allocates (`*_bytes`); this module adds it up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.models.inspect import base_model, vocabulary_size, weight_bytes
from grupo.models.memory import LayerWidths, activation_bytes, token_budget
from grupo.models.shared_prompt_attention import attention_bytes, packing_unsupported_reason
from grupo.policy.batching import largest_micro_batch
from grupo.policy.chunked_logprobs import logprob_bytes
from grupo.rollout.local.decoders import prefill_bytes
from grupo.rollout.local.engine import copy_fits, max_rows_for
from grupo.rollout.local.inference_copy import inference_copy_bytes
from grupo.rollout.local.kv_cache import cache_bytes, cache_columns
from grupo.rollout.local.token_sampling import sampling_bytes

PROBE_SIZE = 1 << 16
"""Numbers of the small weight with which an optimizer is asked for the size of its state."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one process, in addition to Python and its libraries. Rollouts and updates take turns."""

    weights: Mapping[str, int]
    """Weights by the name of the dtype or quantisation that they are stored in, trainable ones included."""
    trainable: int
    optimizer: int
    reference: int
    """Copy of the trainable weights for the KL term."""
    inference_copy: int
    cache: int
    sampling: int
    """Prompts on their way into the cache, or logits."""
    gradients: int
    activations: int
    """Activations of the largest micro-batch; on the CPU also freed memory that is not yet returned to the system."""
    head: int
    """Log-probs and their gradients."""
    rows: int
    """Completions that are decoded together."""
    columns: int
    """Tokens of each completion that the cache has room for, prompt included."""
    tokens: int
    """Tokens of the largest micro-batch."""

    @property
    def held(self) -> int:
        """Memory that is held throughout the run, from the first optimizer step on."""
        return sum(self.weights.values()) + self.optimizer + self.reference

    @property
    def rollout(self) -> int:
        return self.inference_copy + self.cache + self.sampling

    @property
    def update(self) -> int:
        return self.gradients + self.activations + self.head

    @property
    def peak(self) -> int:
        return self.held + max(self.rollout, self.update)

    def describe(self) -> list[str]:
        """Lines that `grupo train --dry-run` prints."""
        phase = "an update" if self._peaks_in_update else "a rollout"
        weights = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(self.weights.items()))
        reference = f", reference policy {format_bytes(self.reference)}" if self.reference else ""
        return [
            f"memory: about {format_bytes(self.peak)} at the peak, during {phase}, plus Python and its libraries",
            f"  throughout: weights {weights}, of which {format_bytes(self.trainable)} trainable; optimizer "
            f"{format_bytes(self.optimizer)}{reference}",
            f"  in a rollout {format_bytes(self.rollout)}: inference copy {format_bytes(self.inference_copy)}, cache "
            f"of {self.rows} x {self.columns:,} tokens {format_bytes(self.cache)}, prompts or logits "
            f"{format_bytes(self.sampling)}",
            f"  in an update {format_bytes(self.update)}: gradients {format_bytes(self.gradients)}, activations of "
            f"{self.tokens:,} tokens {format_bytes(self.activations)}, log-probs {format_bytes(self.head)}",
        ]

    def warning(self, free: int) -> str | None:
        """Warning that the run will not fit, with what to set instead; None if it fits.

        Args:
            free: bytes that are free next to the loaded model and its reference policy.
        """
        needed = self.peak - sum(self.weights.values()) - self.reference
        if needed <= free:
            return None
        parts = (
            ("gradients", "activations", "head") if self._peaks_in_update else ("inference_copy", "cache", "sampling")
        )
        largest = max(("optimizer", *parts), key=lambda part: int(getattr(self, part)))
        return (
            f"This run will not fit: in addition to the loaded model it needs about {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free. {REMEDIES[largest]}"
        )

    @property
    def _peaks_in_update(self) -> bool:
        return self.update > self.rollout


_FEWER_WEIGHTS = "Most of it is for the trained weights: train an adapter (lora), or set optim=adamw_8bit."
REMEDIES = {
    "optimizer": _FEWER_WEIGHTS,
    "gradients": _FEWER_WEIGHTS,
    "activations": "Most of it is activations: set gradient_checkpointing=True, or lower micro_batch_tokens or "
    "max_completion_length.",
    "head": "Most of it is for log-probs: keep the head frozen, or lower max_completion_length.",
    "inference_copy": "Most of it is the copy of the model that decodes: load the model in bfloat16 (dtype), or use a "
    "smaller one.",
    "cache": "Most of it is the key-value cache: lower max_completion_length, or the number of completions that are "
    "sampled together (per_device_train_batch_size, steps_per_generation, per_device_eval_batch_size).",
    "sampling": "Most of it is prompts or logits: lower per_device_train_batch_size or steps_per_generation.",
}
"""What to set instead, by the largest part of a run that does not fit."""


def format_bytes(size: int) -> str:
    """A size in binary units, such as "1.7 GiB"."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def memory_estimate(
    model: Any,
    config: GRPOConfig,
    *,
    prompt_tokens: int,
    eval_rows: int = 0,
    device_type: str | None = None,
    free: int | None = None,
    checkpointing: bool | None = None,
    quantization: str | None = None,
) -> MemoryEstimate | None:
    """Memory of each training process, with prompts and completions of full length.

    None where the model's configuration does not give its sizes. Not included: what a GPU's allocator cannot use,
    communication buffers of several processes, and judges or reward models on the same device.

    Args:
        model: with its adapter, if it is to have one. On the meta device it has sizes and no weights.
        prompt_tokens: tokens of the longest prompt.
        eval_rows: completions that an evaluation samples together; where they are more than those of a rollout, the
            numbers of a rollout are those of the evaluation.
        device_type: kind of device to train on; by default the model's own, and "cuda" for the meta device.
        free: bytes that are free next to the loaded model. Micro-batches depend on it unless `config` has
            `micro_batch_tokens`, and so does whether a copy decodes. None: enough.
        checkpointing: by default as in `config`.
        quantization: "nf4" or "int8", for a model on the meta device that will be loaded in this form.
    """
    base = base_model(model)
    widths, own = LayerWidths.of(base), next(base.parameters())
    if widths is None:
        return None
    run = _Run(
        model=model,
        config=config,
        plan=StepPlan.from_config(config, num_prompts=None),
        widths=widths,
        device_type=device_type or ("cuda" if own.is_meta else own.device.type),
        free=free,
        checkpointing=bool(config.gradient_checkpointing if checkpointing is None else checkpointing),
        quantization=quantization,
        prompt=prompt_tokens,
        completion=config.sampling_spec().max_new_tokens,
        eval_rows=eval_rows,
        # Hidden states have the dtype of the embeddings, which a quantised model has in float32.
        itemsize=4 if quantization else own.element_size(),
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable = sum(parameter.nbytes for parameter in trained)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return MemoryEstimate(
        weights=weight_bytes(model, quantization),
        trainable=trainable,
        optimizer=sum(_state_bytes(parameter, config, embeds=id(parameter) in embeddings) for parameter in trained),
        reference=trainable if config.beta != 0.0 and config.reference_policy == "start" else 0,
        gradients=trainable,
        **run.in_rollout(),
        **run.in_update(),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    model: Any
    config: GRPOConfig
    plan: StepPlan
    widths: LayerWidths
    device_type: str
    free: int | None
    checkpointing: bool
    quantization: str | None
    prompt: int
    completion: int
    eval_rows: int
    itemsize: int
    """Bytes of one number of the hidden states."""

    @property
    def autocast(self) -> bool:
        return bool(self.config.bf16 or self.config.fp16)

    @property
    def attention_itemsize(self) -> int:
        """Bytes of one number of queries, keys and values."""
        return 2 if self.autocast else self.itemsize

    def in_rollout(self) -> dict[str, int]:
        completions = max(self.plan.completions_per_rollout // self.plan.world_size, self.eval_rows)
        rows = min(completions, max_rows_for(self.device_type))
        columns = cache_columns(self.prompt, self.completion, refills=rows < completions)
        prefill = prefill_bytes(
            math.ceil(rows / self.plan.num_generations),
            self.prompt,
            self.widths,
            itemsize=self.itemsize,
            cache_itemsize=self.attention_itemsize,
        )
        return {
            "inference_copy": self._inference_copy(),
            "cache": cache_bytes(rows * columns, self.widths, itemsize=self.attention_itemsize),
            "sampling": max(
                prefill, sampling_bytes(rows, vocabulary_size(self.model) or 0, self.config.sampling_spec())
            ),
            "rows": rows,
            "columns": columns,
        }

    def _inference_copy(self) -> int:
        if not copy_fits(self.model, self.free):
            return 0
        return inference_copy_bytes(
            self.model, self.device_type, autocast=self.autocast, quantization=self.quantization
        )

    def in_update(self) -> dict[str, int]:
        base = base_model(self.model)
        tokens, completions = self._largest_micro_batch(base)
        offload = self.config.offload_activations and self.device_type != "cpu"
        layers = 1 if self.checkpointing or offload else self.widths.layers
        activations = activation_bytes(
            base,
            self.widths,
            tokens,
            itemsize=self.itemsize,
            device_type=self.device_type,
            checkpointing=self.checkpointing,
            offload=self.config.offload_activations,
        )
        attention = attention_bytes(
            self.prompt,
            self.completion,
            completions,
            widths=self.widths,
            layers=layers,
            itemsize=self.attention_itemsize,
            device_type=self.device_type,
        )
        return {
            "activations": activations + attention + self._cast_weights(base, layers),
            "head": logprob_bytes(
                base.get_output_embeddings(),
                completions * self.completion,
                vocabulary=vocabulary_size(base) or 0,
                itemsize=self.itemsize,
            ),
            "tokens": tokens,
        }

    def _largest_micro_batch(self, base: Any) -> tuple[int, int]:
        """(tokens, completions)"""
        budget = self.config.micro_batch_tokens
        if budget is None:
            budget = token_budget(base, self.device_type, self.free, checkpointing=self.checkpointing)
        return largest_micro_batch(
            self.plan.completions_per_step // self.plan.world_size,
            self.plan.micro_batch_size,
            group_size=self.plan.num_generations,
            prompt=self.prompt,
            completion=self.completion,
            max_sequence_tokens=self.config.micro_batch_tokens or self.prompt + self.completion,
            token_budget=budget,
            packed=packing_unsupported_reason(base) is None,
        )

    def _cast_weights(self, base: Any, layers: int) -> int:
        """Memory of the weights in the dtype of autocast, which backward keeps."""
        if not self.autocast or self.quantization is not None or self.itemsize == 2:
            return 0
        linear = [module for module in base.modules() if type(module) is nn.Linear]
        return 2 * sum(module.weight.numel() for module in linear) * layers // self.widths.layers


def _state_bytes(parameter: Tensor, config: GRPOConfig, *, embeds: bool) -> int:
    """Optimizer state of a trained weight, measured by one step on a smaller one."""
    first, *rest = parameter.shape or (1,)
    count = min(first, math.ceil(PROBE_SIZE / max(math.prod(rest), 1)))
    probe = nn.Parameter(torch.zeros(count, *rest, dtype=parameter.dtype, device=config.device))
    probe.grad = torch.zeros_like(probe)
    optimizer_class: Any
    try:
        optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(config)
        if embeds and arguments.get("optim_bits") == 8:
            arguments["optim_bits"] = 32  # as transformers has it for embeddings
        optimizer = optimizer_class([probe], **arguments)
        optimizer.step()
    except (TypeError, ValueError, AttributeError, RuntimeError, ImportError):
        return 2 * parameter.nbytes  # as AdamW: this one needs the whole model, or a loop of its own
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")  # the tables that all 8-bit states share
    ]
    return sum(value.nbytes for value in states) * parameter.numel() // probe.numel()
