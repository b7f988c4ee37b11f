"""The frozen reference policy of the KL term."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class ReferencePolicy:
    """The policy as it was when training began, kept as a copy of the trainable parameters alone.

    With a fresh LoRA adapter this is the base model, with a trained one the adapter that was passed in (TRL issue
    #3194), and with full fine-tuning the whole start model; frozen weights are shared in every case.

    Args:
        model: unwrapped; its trainable parameters are copied, which costs their size in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._snapshot = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The model computes as the reference. Never open it between a forward and its backward."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def mix_in_policy(self, alpha: float) -> None:
        """reference <- alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv:2404.09656)."""
        for name, parameter in self._parameters.items():
            self._snapshot[name].lerp_(parameter.detach(), alpha)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._snapshot)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._snapshot.items():
            tensor.copy_(state[name])

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            self._snapshot[name], parameter.data = parameter.data, self._snapshot[name]
