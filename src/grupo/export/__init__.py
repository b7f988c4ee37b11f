"""Trained models for other programs: merged folders, GGUF files, the Hub. Each artefact is loaded back and compared."""

from grupo.export.gguf_file import to_gguf
from grupo.export.merging import merge
from grupo.export.upload import push

__all__ = ["merge", "push", "to_gguf"]
