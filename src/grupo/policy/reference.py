"""The frozen reference policy of the KL term."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from grupo.errors import ConfigError
from grupo.models.peft_io import base_unavailable_reason


class Reference(Protocol):
    """A reference policy that shares the weights of the trained model."""

    description: str
    """Plain description for logs and the manifest."""

    def active(self) -> AbstractContextManager[None]:
        """Context in which the model computes as the reference. Must not be open between a forward and its backward."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ReferencePolicy:
    """The policy at the start of training, kept as a copy of the trainable parameters only.

    With a new LoRA adapter this is the base model, with a trained adapter the model with that adapter (huggingface/trl
    #3194), and with full fine-tuning the start model. Frozen weights are always shared.

    Args:
        model: unwrapped; the copy takes as much memory as its trainable parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        has_adapter = bool(getattr(model, "peft_config", None))
        self.description = "the start model with its adapter" if has_adapter else "the start model"
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._snapshot = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def soft_update(self, alpha: float) -> None:
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


class AdapterDisabledReference:
    """The base model, computed by disabling the adapter; nothing is copied.

    Args:
        model: unwrapped, with an adapter.

    Raises:
        ConfigError: with its adapter disabled the model is not the base model.
    """

    description = "the base model, without the adapter"

    def __init__(self, model: Any) -> None:
        problem = base_unavailable_reason(model)
        if problem:
            raise ConfigError(
                f"reference_policy='base' disables the adapter to get the base model, but {problem}. Set it to 'start'."
            )
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert not state

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # peft makes every weight of the adapter trainable when it is enabled again.
        trainable = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            with self._model.disable_adapter():
                yield
        finally:
            for parameter, requires_grad in trainable:
                parameter.requires_grad_(requires_grad)


def reference_policy(model: Any, which: str) -> ReferencePolicy | AdapterDisabledReference:
    """Creates the reference that `which` selects: "start" or "base"."""
    return AdapterDisabledReference(model) if which == "base" else ReferencePolicy(model)
