"""Exceptions that grupo raises on purpose.

    GrupoError
    ├── ConfigError (ValueError)      a setting cannot work; the message suggests one that does
    │   └── UnsupportedError          the setting is known, but this version has no implementation of it
    ├── DataError (ValueError)        a dataset row, prompt or tokenizer cannot be used
    ├── RewardError (ValueError)      a reward function raised, or returned something unusable
    ├── TrainingError (RuntimeError)  the run had to stop; the weights are those of the last good step
    └── ExportError (RuntimeError)    an export differs from the trained model, or an upload failed; nothing is lost

Every message states what was set, why it cannot work and what to set instead, with the numbers worked out.
"""


class GrupoError(Exception):
    """Base class of all grupo errors."""


class ConfigError(GrupoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class UnsupportedError(ConfigError):
    """A known setting without an implementation in this version."""


class DataError(GrupoError, ValueError):
    """A dataset, row, prompt or tokenizer that cannot be used."""


class RewardError(GrupoError, ValueError):
    """A reward function that returned the wrong number or type of values, or failed too often."""


class TrainingError(GrupoError, RuntimeError):
    """A run that had to stop: non-finite gradients, or a sampler that does not match the policy."""


class ExportError(GrupoError, RuntimeError):
    """An exported model that behaves differently from the trained one, or an upload that failed."""


def summarize_error(error: BaseException) -> str:
    """First line of the message of an exception, ending in a full stop; its type where there is no message."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
