"""Checks once whether the Hub answers: its client retries every file six times, for 23 seconds."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path

CACHE_SECONDS = 60.0
TIMEOUT = 5.0
"""Seconds until the Hub counts as unreachable."""


def is_unreachable(name: str) -> bool:
    """True if `name` must come from the Hub, and the Hub does not answer or is switched off.

    Only files in the local cache can then be used.
    """
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists() and not hub_is_reachable()


def hub_is_reachable() -> bool:
    """True if the Hub sends any answer within `TIMEOUT`; False with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(int(time.monotonic() / CACHE_SECONDS))


@functools.lru_cache(maxsize=1)
def _answers(moment: int) -> bool:
    """Cached, because loading a model asks for several files and names."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    # The first is the base error of the HTTP library, which is another one from version to version.
    unreachable: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError)  # type: ignore[assignment]
    try:
        # The session of the Hub's client, so that proxies and certificates are the same.
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT, follow_redirects=False)
    except unreachable:
        return False
    return True
