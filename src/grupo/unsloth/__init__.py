"""`FastLanguageModel` and what scripts written for Unsloth import beside it."""

from grupo.unsloth.model import FastLanguageModel, PatchFastRL, is_bfloat16_supported

FastModel = FastLanguageModel
"""Scripts use either name."""

__all__ = ["FastLanguageModel", "FastModel", "PatchFastRL", "is_bfloat16_supported"]
