"""What a run takes of memory at its peak, told before it begins: arithmetic on sizes, which needs no weights.

P tokens of a prompt, T of a completion; N scored positions of a micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.models.inspect import base_model, vocabulary_size
from grupo.models.memory import TRIM_EVERY_LAYERS, LayerWidths, activation_bytes_per_token, token_budget
from grupo.models.quantization import dense_bytes, number_of_weights
from grupo.models.shared_prompt_attention import KEPT_MASKS, QUERY_BLOCK, packing_unsupported_reason
from grupo.policy.batching import micro_batches
from grupo.policy.chunked_logprobs import TOKEN_CHUNK, VOCABULARY_CHUNK
from grupo.rollout.local.decoders import PREFILL_TOKENS
from grupo.rollout.local.engine import COPY_HEADROOM, max_rows_for
from grupo.rollout.local.inference_copy import inference_copy_bytes
from grupo.rollout.local.kv_cache import SPARE_COLUMNS, columns_for
from grupo.types import TrainingSample

BYTES_PER_WEIGHT = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""NF4 with its scales: a byte for 64 weights, four for 256 of those (arXiv:2305.14314)."""
BYTES_DECODED = {"nf4": {"cpu": 4, "cuda": 2}, "int8": {"cpu": 4, "cuda": 0}}
"""Of a quantised weight in the copy that decodes, by kind of device; 8-bit layers are not copied on CUDA."""
SAMPLING_TENSORS = 5
"""As large as the logits, in float32, while tokens are drawn; twice as many where the choice is narrowed."""
PROBED_NUMBERS = 1 << 16
"""Of a weight that stands for a larger one when an optimizer is asked what it keeps."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one process, beside what Python and its libraries take. Rollouts and updates take turns."""

    weights: Mapping[str, int]
    """By the name of the dtype or quantisation that they are kept in; trainable ones are among them."""
    trainable: int
    optimizer: int
    reference: int
    """The copy of the trainable weights for the KL term."""
    inference_copy: int
    cache: int
    sampling: int
    """Prompts on their way into the cache, or logits."""
    gradients: int
    activations: int
    """What backward needs of the largest micro-batch, and on the CPU what was freed and is not yet given back."""
    head: int
    """Log-probs and their gradients."""
    rows: int
    """Completions that are decoded together."""
    columns: int
    """Tokens of each that the cache has room for."""
    tokens: int
    """Of the largest micro-batch."""

    @property
    def held(self) -> int:
        """All along, from the first optimizer step on."""
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
        """What `grupo train --dry-run` prints."""
        phase = "an update" if self._updating else "a rollout"
        kept = ", ".join(f"{name} {shown(size)}" for name, size in sorted(self.weights.items()))
        reference = f", reference policy {shown(self.reference)}" if self.reference else ""
        return [
            f"memory: about {shown(self.peak)} at the peak, in {phase}, beside Python and its libraries",
            f"  all along: weights {kept}, of which {shown(self.trainable)} trainable; optimizer "
            f"{shown(self.optimizer)}{reference}",
            f"  in a rollout {shown(self.rollout)}: copy of linear layers {shown(self.inference_copy)}, cache of "
            f"{self.rows} x {self.columns:,} tokens {shown(self.cache)}, prompts or logits {shown(self.sampling)}",
            f"  in an update {shown(self.update)}: gradients {shown(self.gradients)}, activations of {self.tokens:,} "
            f"tokens {shown(self.activations)}, log-probs {shown(self.head)}",
        ]

    def warning(self, free: int) -> str | None:
        """That the run will not fit, and what to set instead; None: it fits.

        Args:
            free: bytes that are free beside the loaded model and its reference policy.
        """
        needed = self.peak - sum(self.weights.values()) - self.reference
        if needed <= free:
            return None
        parts = ("gradients", "activations", "head") if self._updating else ("inference_copy", "cache", "sampling")
        largest = max(("optimizer", *parts), key=lambda part: int(getattr(self, part)))
        return (
            f"This run will not fit: it takes about {shown(needed)} beside the loaded model, and {shown(free)} are "
            f"free. {REMEDIES[largest]}"
        )

    @property
    def _updating(self) -> bool:
        return self.update > self.rollout


_FEWER_WEIGHTS = "Most of it is for the trained weights: train an adapter (lora), or set optim=adamw_8bit."
REMEDIES = {
    "optimizer": _FEWER_WEIGHTS,
    "gradients": _FEWER_WEIGHTS,
    "activations": "Most of it are activations: set gradient_checkpointing=True, or lower micro_batch_tokens or "
    "max_completion_length.",
    "head": "Most of it is for log-probs: leave the head untrained, or lower max_completion_length.",
    "inference_copy": "Most of it is the copy that decodes: load the model in bfloat16 (dtype), or take a smaller one.",
    "cache": "Most of it is the cache: lower max_completion_length, or the completions that are sampled together "
    "(per_device_train_batch_size, steps_per_generation, per_device_eval_batch_size).",
    "sampling": "Most of it are prompts or logits: lower per_device_train_batch_size or steps_per_generation.",
}
"""By the largest part of a run that does not fit."""


def shown(size: int) -> str:
    """Bytes for people, in binary units."""
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
    """What training takes in each process, with prompts and completions as long as they may be.

    None where the model's configuration does not tell its sizes. What a GPU's allocator cannot use, buffers of several
    processes, and judges or reward models on the same device come on top.

    Args:
        model: with its adapter, if it is to have one. On the meta device it has sizes and no weights.
        prompt_tokens: of the longest prompt.
        eval_rows: completions that an evaluation samples together; where they are more than those of a rollout, what is
            told of a rollout is that of the evaluation.
        device_type: of what it is trained on; by default the model's own, and "cuda" for the meta device.
        free: bytes beside the loaded model, on which micro-batches depend unless `config` has `micro_batch_tokens`,
            and whether a copy decodes. None: enough.
        checkpointing: by default as `config` says.
        quantization: "nf4" or "int8", for a model on the meta device that will be loaded so.
    """
    base = base_model(model)
    sizes, own = LayerWidths.of(base), next(base.parameters())
    if sizes is None:
        return None
    run = _Run(
        model=model,
        config=config,
        plan=StepPlan.from_config(config, num_prompts=None),
        sizes=sizes,
        device_type=device_type or ("cuda" if own.is_meta else own.device.type),
        free=free,
        checkpointing=bool(config.gradient_checkpointing if checkpointing is None else checkpointing),
        quantization=quantization,
        prompt=prompt_tokens,
        completion=config.sampling_spec().max_new_tokens,
        eval_rows=eval_rows,
        # Hidden states are what embeddings are, which a quantised model has in float32.
        element=4 if quantization else own.element_size(),
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable = sum(parameter.nbytes for parameter in trained)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return MemoryEstimate(
        weights=_weights(model, quantization),
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
    sizes: LayerWidths
    device_type: str
    free: int | None
    checkpointing: bool
    quantization: str | None
    prompt: int
    completion: int
    eval_rows: int
    element: int
    """Bytes of a number of the hidden states."""

    @property
    def layer(self) -> int:
        """Bytes of one token in everything that a layer computes."""
        return self.sizes.in_layer(4) * self.element

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(self.model) or 0

    @property
    def autocast(self) -> bool:
        return bool(self.config.bf16 or self.config.fp16)

    def in_rollout(self) -> dict[str, int]:
        own = max(self.plan.completions_per_rollout // self.plan.world_size, self.eval_rows)
        rows = min(own, max_rows_for(self.device_type))
        # A row that takes over the place of another one begins further right.
        needed = self.prompt + self.completion - 1 + (SPARE_COLUMNS if rows < own else 0)
        columns = columns_for(needed, prompt=self.prompt)
        per_token = self.sizes.layers * 2 * self.sizes.keys * (2 if self.autocast else self.element)
        entering = math.ceil(rows / self.plan.num_generations) * self.prompt
        computing = min(entering, max(PREFILL_TOKENS, self.prompt)) * self.layer
        spec = self.config.sampling_spec()
        narrowed = bool(spec.top_k or spec.top_p < 1.0 or spec.min_p)
        logits = rows * self.vocabulary * 4 * SAMPLING_TENSORS * (1 + narrowed)
        return {
            "inference_copy": self._inference_copy(),
            "cache": rows * columns * per_token,
            "sampling": max(entering * per_token + computing, logits),
            "rows": rows,
            "columns": columns,
        }

    def _inference_copy(self) -> int:
        if self.free is not None and self.free <= COPY_HEADROOM * dense_bytes(self.model):
            return 0
        if self.quantization is None:
            return inference_copy_bytes(self.model, self.device_type, autocast=self.autocast)
        weights = sum(layer.weight.numel() for layer in _quantizable(self.model))
        return weights * BYTES_DECODED[self.quantization][self.device_type]

    def in_update(self) -> dict[str, int]:
        tokens, completions = self._micro_batch()
        base = base_model(self.model)
        per_token = activation_bytes_per_token(base, checkpointing=self.checkpointing) or 0
        kept = tokens * per_token // next(base.parameters()).element_size() * self.element
        layers = 1 if self.checkpointing else self.sizes.layers
        if self.config.offload_activations and self.device_type != "cpu":
            kept, layers = tokens * self.layer, 1
        if self.device_type == "cpu":
            # What so many layers have computed and freed stays with the process until then.
            kept += TRIM_EVERY_LAYERS["forward"] * tokens * self.layer
        return {
            "activations": kept + self._attention(completions, layers) + self._cast_weights(layers),
            "head": self._head(completions * self.completion),
            "tokens": tokens,
        }

    def _attention(self, completions: int, layers: int) -> int:
        """Bytes of what attention keeps beside queries, keys and values.

        Each block of queries of a completion has a mask, and, where the kernel does not share key-value heads, as on
        CUDA, copies of all keys and values before its end for every head.
        """
        block = min(QUERY_BLOCK, self.completion)
        ends = [min(start + block, self.completion) for start in range(0, self.completion, block)]
        keys = sum(self.prompt + end for end in ends)
        masks = keys * block * (layers if len(ends) > KEPT_MASKS else 1)
        copies = layers * completions * keys * 2 * self.sizes.queries
        if self.device_type != "cuda" or self.sizes.queries == self.sizes.keys:
            copies = 0
        return (masks + copies) * (2 if self.autocast else self.element)

    def _cast_weights(self, layers: int) -> int:
        """Bytes of the weights in the dtype of autocast, which backward keeps."""
        if not self.autocast or self.quantization is not None or self.element == 2:
            return 0
        linear = [module for module in base_model(self.model).modules() if type(module) is nn.Linear]
        return 2 * sum(module.weight.numel() for module in linear) * layers // self.sizes.layers

    def _micro_batch(self) -> tuple[int, int]:
        """(tokens, completions) of the largest micro-batch of a step."""
        base = base_model(self.model)
        packed = packing_unsupported_reason(base) is None
        budget = self.config.micro_batch_tokens
        if budget is None:
            budget = token_budget(base, self.device_type, self.free, checkpointing=self.checkpointing)
        own = self.plan.completions_per_step // self.plan.world_size
        prompts = [(number, *[0] * (self.prompt - 1)) for number in range(own)]
        ids = (0,) * self.completion
        samples = [
            TrainingSample(prompts[place // self.plan.num_generations], ids, 1.0, True, True, None)
            for place in range(own)
        ]

        def size(batch: Sequence[TrainingSample]) -> int:
            times = len({id(sample.prompt_ids) for sample in batch}) if packed else len(batch)
            return times * self.prompt + len(batch) * self.completion

        batches = micro_batches(
            samples,
            self.plan.micro_batch_size,
            max_sequence_tokens=self.config.micro_batch_tokens or self.prompt + self.completion,
            token_budget=budget,
            packed=packed,
        )
        largest = max(batches, key=size)
        return size(largest), len(largest)

    def _head(self, scored: int) -> int:
        head = base_model(self.model).get_output_embeddings()
        if type(head) is not nn.Linear:
            return 4 * scored * self.vocabulary * 4  # full logits: their own, float32, probabilities, gradient
        tile = 2 * min(scored, TOKEN_CHUNK) * min(self.vocabulary, VOCABULARY_CHUNK) * 4
        of_weight = head.weight.numel() * 4 if head.weight.requires_grad else 0
        return scored * head.in_features * 2 * (self.element + 4) + tile + of_weight


def _quantizable(model: Any) -> Iterator[nn.Linear]:
    """What bitsandbytes replaces: the linear layers without the head, and without those of an adapter."""
    base = base_model(model)
    head = base.get_output_embeddings()
    for module in base.modules():
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad:
            yield module


def _weights(model: Any, quantization: str | None) -> dict[str, int]:
    planned = {id(layer.weight) for layer in _quantizable(model)} if quantization else set()
    kept: Counter[str] = Counter()
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        name = str(parameter.dtype).removeprefix("torch.") if state is None else str(state.quant_type)
        if quantization is not None:
            name = quantization if id(parameter) in planned else "float32"
        scales = 4 * parameter.shape[0] if name == "int8" else 0
        per_weight = BYTES_PER_WEIGHT.get(name) or getattr(torch, name).itemsize
        kept[name] += int(number_of_weights(parameter) * per_weight) + scales
    return dict(kept)


def _state_bytes(parameter: Tensor, config: GRPOConfig, *, embeds: bool) -> int:
    """What the optimizer keeps of a trained weight: it is asked, with a step of a smaller one."""
    first, *rest = parameter.shape or (1,)
    count = min(first, math.ceil(PROBED_NUMBERS / max(math.prod(rest), 1)))
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
        return 2 * parameter.nbytes  # as AdamW: this one wants the whole model, or its own loop
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")  # the tables that all 8-bit states share
    ]
    return sum(value.nbytes for value in states) * parameter.numel() // probe.numel()
