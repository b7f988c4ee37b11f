"""Trained models for other programs: merged folders, GGUF files, the Hub. Each result is loaded back and compared.

Names are imported on first use, because an upload needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grupo.export.gguf import GgufReport as GgufReport
    from grupo.export.gguf import to_gguf as to_gguf
    from grupo.export.merging import MergeReport as MergeReport
    from grupo.export.merging import merge as merge
    from grupo.export.upload import push as push

_HOMES = {
    "GgufReport": "grupo.export.gguf",
    "MergeReport": "grupo.export.merging",
    "merge": "grupo.export.merging",
    "push": "grupo.export.upload",
    "to_gguf": "grupo.export.gguf",
}

__all__ = ["GgufReport", "MergeReport", "merge", "push", "to_gguf"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grupo.export' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
