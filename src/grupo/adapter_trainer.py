"""A `Trainer` whose saved adapters load elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import align_special_tokens

from grupo.models.adapters import save_adapter
from grupo.models.load import keep_savable
from grupo.quantized_layers import evaluation_mode, keep_unpacked


class AdapterTrainer(Trainer):
    """Of a PEFT model it saves the adapter, tokenizer and arguments; of any other what the base class does."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        align_special_tokens(self.model, self.processing_class)  # as the base class does when training begins
        keep_savable(self.model)
        assert self.model is not None
        keep_unpacked(self.model)

    def prediction_step(self, model: nn.Module, *args: Any, **keywords: Any) -> Any:
        """As in the base class, which has called `model.eval()` before."""
        with evaluation_mode(model):
            return super().prediction_step(model, *args, **keywords)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Private in the base class, but both `save_model` and checkpoints come here."""
        # The arguments are pickled beside the model, and models go to the Hub.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            self._save_parts(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def _save_parts(self, output_dir: str | None, state_dict: Any) -> None:
        if not isinstance(self.model, PeftModel):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)  # where it cannot be made, peft would not say so as an OSError
            save_adapter(self.model, folder)
            assert self.processing_class is not None
            self.processing_class.save_pretrained(str(folder))  # type: ignore[union-attr]
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
