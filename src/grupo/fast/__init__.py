"""`FastLanguageModel` and what scripts written for Unsloth import beside it."""

from grupo.fast.model import FastLanguageModel, PatchFastRL, is_bfloat16_supported

__all__ = ["FastLanguageModel", "PatchFastRL", "is_bfloat16_supported"]
