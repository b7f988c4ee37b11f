from __future__ import annotations

from pathlib import Path
from typing import Any


def push(
    folder: str | Path, repo_id: str, *, token: str | None = None, private: bool | None = None, **options: Any
) -> str:
    """Uploads a folder to the Hub; returns the address of the repository."""
    raise NotImplementedError
