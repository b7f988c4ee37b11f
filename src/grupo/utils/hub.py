"""Whether the Hub can be reached, asked once: its client tries every file six times, for 23 seconds."""

from __future__ import annotations

import functools
import re
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

KEPT = 60.0
"""Seconds for which an answer counts."""
TIMEOUT = 5.0
"""Seconds until the Hub counts as out of reach."""


def is_unreachable(name: str) -> bool:
    """Whether `name` would have to come from the Hub, and the Hub does not answer or is switched off.

    What the cache has can be used then, and nothing else.
    """
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists() and not answers()


def answers() -> bool:
    """Whether the Hub says anything at all within the time; False with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answered(int(time.monotonic() / KEPT))


@functools.lru_cache(maxsize=1)
def _answered(moment: int) -> bool:
    """For `KEPT` seconds at most, as one start asks for several files and names."""
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # whatever it says, it answers
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the Hub's client may have other certificates
    except OSError:
        return False
    return True
