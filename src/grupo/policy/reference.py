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
    """What scores as the reference."""

    description: str
    """What it is, for people."""

    def active(self) -> AbstractContextManager[None]:
        """The model computes as the reference. Never open it between a forward and its backward."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ReferencePolicy:
    """The policy as it was when training began, kept as a copy of the trainable parameters alone.

    With a fresh LoRA adapter this is the base model, with a trained one the adapter that was passed in (TRL issue
    #3194), and with full fine-tuning the whole start model; frozen weights are shared in every case.

    Args:
        model: unwrapped; its trainable parameters are copied, which costs their size in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        has_adapter = bool(getattr(model, "peft_config", None))
        self.description = (
            "the model with its adapter as it is at the start" if has_adapter else "the model at the start"
        )
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
    """The base model below the adapter, which is switched off for as long: no copy of anything.

    Args:
        model: unwrapped, with an adapter.

    Raises:
        ConfigError: without its adapter the model is not the base model.
    """

    description = "the base model, without the adapter"

    def __init__(self, model: Any) -> None:
        problem = base_unavailable_reason(model)
        if problem:
            raise ConfigError(
                f"reference_policy='base' is the model with its adapter switched off, but {problem}. Set it to 'start'."
            )
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert not state

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # peft makes every weight of the adapter trainable when it is switched on again.
        trainable = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            with self._model.disable_adapter():
                yield
        finally:
            for parameter, wanted in trainable:
                parameter.requires_grad_(wanted)


def reference_policy(model: Any, which: str) -> ReferencePolicy | AdapterDisabledReference:
    """The reference by its name: "start" or "base"."""
    return AdapterDisabledReference(model) if which == "base" else ReferencePolicy(model)
