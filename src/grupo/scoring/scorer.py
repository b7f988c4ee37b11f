"""Log-probs of completions under a model, through the module that the training step was given.

B rows, S tokens of prompt and completion, T completion tokens, N scored positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grupo.models.load import base_model
from grupo.records import MicroBatch
from grupo.scoring.logprobs import chunked_logprobs, logprobs_from_logits

logger = logging.getLogger("grupo")

# Logits of both paths at the start-up check may differ by rounding: relative to their largest magnitude.
HEAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Scores:
    """(B, T) log-probs in nats and, when asked for, entropies in nats; exactly 0 outside the completion mask."""

    logprobs: Tensor
    entropy: Tensor | None


class Scorer:
    """Scores completion positions only, from hidden states where the model's head is a plain projection.

    Hidden states are read by a hook from inside the forward of the given module: calling the decoder around its
    distributed wrapper would leave ranks un-synchronised without an error.

    Args:
        model: the unwrapped model, with or without adapter.
        temperature: of sampling; divides the logits here as well.
        head_in_float32: compute the head's projection in float32.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, head_in_float32: bool = False) -> None:
        self.temperature = temperature
        self.head_in_float32 = head_in_float32
        base = base_model(model)
        self.decoder = _decoder(base)
        self.head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        self.reads_hidden_states: bool | None = None

    def score(self, module: nn.Module, batch: MicroBatch, *, with_entropy: bool = False) -> Scores:
        """Scores `batch` with `module`, which may be the model or its distributed wrapper."""
        if self.reads_hidden_states is None:
            self.reads_hidden_states = self._check_head(module, batch.input_ids.device)
        rows, columns = batch.completion_mask.nonzero(as_tuple=True)
        # The token at sequence position p + t is predicted at position p + t - 1.
        positions = batch.prompt_lengths[rows] + columns - 1
        targets = batch.completion_ids[rows, columns]
        if self.reads_hidden_states:
            hidden, _ = self._hidden_states(module, batch.input_ids)
            logprobs, entropy = chunked_logprobs(
                hidden[rows, positions],
                self._linear_head().weight,
                targets,
                bias=self._linear_head().bias,
                temperature=self.temperature,
                with_entropy=with_entropy,
                head_in_float32=self.head_in_float32,
            )
        else:
            logits = module(input_ids=batch.input_ids, use_cache=False).logits
            logprobs, entropy = logprobs_from_logits(
                logits[rows, positions], targets, temperature=self.temperature, with_entropy=with_entropy
            )
        return Scores(
            logprobs=_scatter(logprobs, rows, columns, batch.completion_mask.shape),
            entropy=None if entropy is None else _scatter(entropy, rows, columns, batch.completion_mask.shape),
        )

    def _linear_head(self) -> nn.Linear:
        assert isinstance(self.head, nn.Linear)
        return self.head

    def _hidden_states(self, module: nn.Module, input_ids: Tensor) -> tuple[Tensor, Any]:
        """(B, S, H) last hidden states, and the output of the whole module.

        There is no attention mask: rows are padded on the right, which a causal model cannot see.
        """
        captured: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        assert self.decoder is not None
        handle = self.decoder.register_forward_hook(keep)
        try:
            output = module(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        finally:
            handle.remove()
        return captured[-1], output

    def _check_head(self, module: nn.Module, device: torch.device) -> bool:
        """Whether hidden states times the head's weight are the model's logits; told once where they are not."""
        if self.decoder is None or type(self.head) is not nn.Linear:
            reason = f"its output head is a {type(self.head).__name__}, not a plain linear layer"
        elif not self._head_matches(module, device):
            reason = (
                "its logits are not the plain projection of its hidden states (softcap, scale, or a wrapped forward)"
            )
        else:
            return True
        logger.info("Scoring with full logits, which needs more memory: of this model, %s.", reason)
        return False

    @torch.no_grad()
    def _head_matches(self, module: nn.Module, device: torch.device) -> bool:
        head = self._linear_head()
        ids = torch.arange(1, 9, device=device).remainder(head.weight.shape[0]).unsqueeze(0)
        hidden, output = self._hidden_states(module, ids)
        expected = output.logits[:, -1].float()
        projected = nn.functional.linear(hidden[:, -1], head.weight.to(hidden.dtype), head.bias).float()
        tolerance = HEAD_TOLERANCE.get(hidden.dtype, 1e-2) * float(expected.abs().max().clamp_min(1.0))
        return bool(torch.isfinite(projected).all()) and float((projected - expected).abs().max()) <= tolerance


@contextlib.contextmanager
def dropout_off(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """No dropout, while `model.training` stays True: `eval()` would switch gradient checkpointing off as well.

    All three kinds are covered: `nn.Dropout` modules, rates kept as numbers in modules, such as Llama's
    `attention_dropout`, and rates read from the config in every forward, such as Persimmon's. Keep the context open
    until after the backward pass, as checkpointing runs the forward again in there.
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


def _decoder(base: Any) -> nn.Module | None:
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else getattr(base, base.base_model_prefix, None)
    return None if decoder is base else decoder


def _scatter(values: Tensor, rows: Tensor, columns: Tensor, shape: torch.Size) -> Tensor:
    return values.new_zeros(shape).index_put((rows, columns), values)
