"""Log-probs of completions under a model, computed through the module that the training step received.

B completions, R sequences of S tokens, T completion tokens, N completion tokens in total, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grupo.models.inspect import base_model, vocabulary_size
from grupo.models.quantization import arithmetic_dtype
from grupo.models.shared_prompt_attention import (
    LAYOUT_KEYWORD,
    missing_window_reason,
    packed_attention,
    packing_unsupported_reason,
)
from grupo.policy.batching import collate
from grupo.policy.chunked_logprobs import chunked_logprobs, logprobs_from_logits
from grupo.types import MicroBatch, TrainingSample

logger = logging.getLogger("grupo")

HEAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Rounding difference allowed between the logits of both paths in the check at the start, relative to the largest."""
SHARING_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Difference allowed between log-probs of packed and separate sequences in the check at the start, in nats."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probs and, if requested, entropies, (B, T) in nats; exactly 0 outside the completion mask."""

    logprobs: Tensor
    entropy: Tensor | None


class LogprobModel:
    """Computes log-probs of completion tokens only, from hidden states if the model's head is a plain projection.

    A hook reads the hidden states inside the forward pass of the given module: calling the decoder without its
    distributed wrapper would leave ranks un-synchronised without an error.

    Args:
        model: the unwrapped model, with or without an adapter.
        temperature: sampling temperature; divides the logits here as well.
        head_in_float32: compute the head's projection in float32.
        use_prompt_sharing: let the completions of a prompt share it in one packed sequence, if the model supports it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        head_in_float32: bool = False,
        use_prompt_sharing: bool = True,
    ) -> None:
        self.temperature = temperature
        self.head_in_float32 = head_in_float32
        self.base = base_model(model)
        self.decoder = _decoder(self.base)
        self.head = self.base.get_output_embeddings() if hasattr(self.base, "get_output_embeddings") else None
        self.reads_hidden_states: bool | None = None
        self.use_prompt_sharing: bool | None = None if use_prompt_sharing else False

    def prepare(self, module: nn.Module, device: torch.device) -> None:
        """Checks once, by comparing numbers, whether the fast paths are correct for this model.

        Sets `reads_hidden_states` and `use_prompt_sharing`, and logs once why a fast path is not used.
        """
        if self.reads_hidden_states is None:
            self.reads_hidden_states = self._check_head(module, device)
        if self.use_prompt_sharing is None:
            self.use_prompt_sharing = self._check_sharing(module, device)

    def attention(self) -> AbstractContextManager[None]:
        """Context of all forward and backward passes of packed sequences."""
        return packed_attention(self.base) if self.use_prompt_sharing else contextlib.nullcontext()

    def logprobs(self, module: nn.Module, batch: MicroBatch, *, with_entropy: bool = False) -> TokenLogprobs:
        """Log-probs of `batch` under `module`, which is the model or its distributed wrapper.

        A packed batch must be computed within `attention()`.
        """
        if self.reads_hidden_states is None:
            self.reads_hidden_states = self._check_head(module, batch.input_ids.device)
        rows, columns = batch.completion_mask.nonzero(as_tuple=True)
        targets = batch.completion_ids[rows, columns]
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.layout is not None:
            inputs |= {"position_ids": batch.position_ids, LAYOUT_KEYWORD: batch.layout}
        if self.reads_hidden_states:
            hidden, _ = self._hidden_states(module, inputs)
            logprobs, entropy = chunked_logprobs(
                # A prompt's last token predicts the first one of all its completions. `embedding` adds up their
                # gradients in a fixed order; other ways of indexing do not.
                nn.functional.embedding(batch.logit_indices, hidden.flatten(0, 1)),
                self._linear_head().weight,
                targets,
                bias=self._linear_head().bias,
                temperature=self.temperature,
                with_entropy=with_entropy,
                head_in_float32=self.head_in_float32,
            )
        else:
            logits = module(**inputs, use_cache=False).logits
            logprobs, entropy = logprobs_from_logits(
                logits.flatten(0, 1)[batch.logit_indices],
                targets,
                temperature=self.temperature,
                with_entropy=with_entropy,
            )
        return TokenLogprobs(
            logprobs=_scatter(logprobs, rows, columns, batch.completion_mask.shape),
            entropy=None if entropy is None else _scatter(entropy, rows, columns, batch.completion_mask.shape),
        )

    def _linear_head(self) -> nn.Linear:
        assert isinstance(self.head, nn.Linear)
        return self.head

    def _hidden_states(self, module: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """(R, S, H) last hidden states, and the output of the whole module.

        There is no attention mask: sequences are padded on the right, which a causal model cannot see.
        """
        captured: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        assert self.decoder is not None
        handle = self.decoder.register_forward_hook(keep)
        try:
            output = module(**inputs, use_cache=False, logits_to_keep=1)
        finally:
            handle.remove()
        return captured[-1], output

    def _check_sharing(self, module: nn.Module, device: torch.device) -> bool:
        """Whether packed sequences give the log-probs of separate ones; logs the reason if they do not.

        Numbers are compared because a model may accept the layout and ignore it (linear attention does).
        """
        reason = packing_unsupported_reason(self.base) or self._sharing_differs(module, device)
        if reason is None:
            return True
        logger.info("Each prompt is computed once per completion instead of once per group: %s.", reason)
        return False

    @torch.no_grad()
    def _sharing_differs(self, module: nn.Module, device: torch.device) -> str | None:
        size = vocabulary_size(self.base)
        if size is None:
            return "the size of its vocabulary is unknown"
        ids = [(7 * place + 3) % size for place in range(19)]
        samples = [_check_sample(ids[:7], ids[7:12]), _check_sample(ids[:7], ids[12:15])]
        packed = collate(samples, pad_token_id=0, device=device, packed=True)
        with disable_dropout(self.base):
            expected = self.logprobs(module, collate(samples, pad_token_id=0, device=device)).logprobs
            try:
                with packed_attention(self.base):
                    found = self.logprobs(module, packed).logprobs
            # A model's own code may raise any of these for an unknown keyword or unusual positions.
            except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
                cause = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return f"this model does not accept packed sequences ({cause})"
        difference = float((found - expected).abs().max())
        tolerance = SHARING_TOLERANCE.get(arithmetic_dtype(self.base, device), 5e-2)
        if not difference <= tolerance:
            return f"with packed sequences its log-probs differ by {difference:.1e} nats"
        assert packed.layout is not None
        return missing_window_reason(self.base, packed.layout)

    def _check_head(self, module: nn.Module, device: torch.device) -> bool:
        """Whether hidden states times the head's weight are the model's logits; logs the reason if they are not."""
        if self.decoder is None or type(self.head) is not nn.Linear:
            reason = f"its output head is a {type(self.head).__name__}, not a plain linear layer"
        elif not self._head_matches(module, device):
            reason = (
                "its logits are not the plain projection of its hidden states (softcap, scale, or a wrapped forward)"
            )
        else:
            return True
        logger.info("Log-probs are computed from full logits, which needs more memory: %s.", reason)
        return False

    @torch.no_grad()
    def _head_matches(self, module: nn.Module, device: torch.device) -> bool:
        head = self._linear_head()
        ids = torch.arange(1, 9, device=device).remainder(head.weight.shape[0]).unsqueeze(0)
        # With dropout the check would consume random numbers, and a resumed run makes the check at a later step.
        with disable_dropout(self.base):
            hidden, output = self._hidden_states(module, {"input_ids": ids})
        expected = output.logits[:, -1].float()
        projected = nn.functional.linear(hidden[:, -1], head.weight.to(hidden.dtype), head.bias).float()
        tolerance = HEAD_TOLERANCE.get(hidden.dtype, 1e-2) * float(expected.abs().max().clamp_min(1.0))
        return bool(torch.isfinite(projected).all()) and float((projected - expected).abs().max()) <= tolerance


@contextlib.contextmanager
def disable_dropout(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Turns dropout off while `model.training` stays True, because `eval()` would also disable gradient checkpointing.

    Covers `nn.Dropout` modules, rates stored as numbers in modules (Llama's `attention_dropout`) and rates that every
    forward pass reads from the config (Persimmon). Keep the context open until after the backward pass, in which
    checkpointing repeats the forward pass.
    """
    changed: list[tuple[Any, str, float]] = []
    if enabled:
        for owner in [*model.modules(), *_configs(model)]:
            for name, value in list(vars(owner).items()):
                is_rate = name == "p" if isinstance(owner, nn.modules.dropout._DropoutNd) else _names_dropout(name)
                if is_rate and isinstance(value, float) and value > 0:
                    changed.append((owner, name, value))
                    setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _configs(model: nn.Module) -> list[Any]:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in configs.values() if hasattr(config, "__dict__")]


def _names_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("layerdrop", "pdrop", "_drop"))


def _check_sample(prompt_ids: list[int], completion_ids: list[int]) -> TrainingSample:
    return TrainingSample(tuple(prompt_ids), tuple(completion_ids), 0.0, True, True, None)


def _decoder(base: Any) -> nn.Module | None:
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else getattr(base, base.base_model_prefix, None)
    return None if decoder is base else decoder


def _scatter(values: Tensor, rows: Tensor, columns: Tensor, shape: torch.Size) -> Tensor:
    return values.new_zeros(shape).index_put((rows, columns), values)
