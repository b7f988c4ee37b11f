"""Errors that grupo raises for its users.

    GrupoError
    ├── ConfigError (ValueError)      a setting cannot work; the message says what to set instead
    │   └── UnsupportedError          a setting whose engine is not part of this version
    ├── DataError (ValueError)        a dataset row, prompt or tokenizer cannot be used
    ├── RewardError (ValueError)      a reward function returned or did something unusable
    ├── TrainingError (RuntimeError)  the run had to stop; weights are as they were after the last good step
    └── ExportError (RuntimeError)    an exported model is not the trained one, or could not be sent; nothing is lost

Every message names what was set, why it cannot work, and what to set instead, with the numbers worked out.
"""


class GrupoError(Exception):
    """Root of every error that grupo raises on purpose."""


class ConfigError(GrupoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class UnsupportedError(ConfigError):
    """A setting that is known, and whose engine is not part of this version."""


class DataError(GrupoError, ValueError):
    """A dataset, a row, a prompt or a tokenizer that cannot be used."""


class RewardError(GrupoError, ValueError):
    """A reward function that returned the wrong number or type of values, or failed too often."""


class TrainingError(GrupoError, RuntimeError):
    """A run that had to stop: non-finite gradients, or a sampler that is not the policy."""


class ExportError(GrupoError, RuntimeError):
    """An exported model that does not do what the trained one does, or an upload that failed."""


def first_line(error: BaseException) -> str:
    """What another library says of an error, as one sentence."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
