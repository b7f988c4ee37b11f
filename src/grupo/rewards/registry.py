"""Reward functions by their names in recipes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, ModuleType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from grupo.errors import ConfigError, GrupoError
from grupo.rewards.code.reward import code_reward
from grupo.rewards.code.static_checks import no_cheating
from grupo.rewards.judge.reward import llm_judge
from grupo.rewards.library.format import tag_count, tag_format
from grupo.rewards.library.gsm8k import (
    gsm8k_correctness,
    gsm8k_integer,
    gsm8k_soft_format,
    gsm8k_strict_format,
    gsm8k_tag_count,
)
from grupo.rewards.library.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_length,
)
from grupo.rewards.library.numeric import banded_answer, number_present, number_score, proximity
from grupo.rewards.library.reward_model import reward_model
from grupo.rewards.library.rubric import rubric
from grupo.rewards.verifiers.math import boxed_accuracy, math_accuracy, number_match
from grupo.rewards.verifiers.puzzles import countdown, number_list, reasoning_gym
from grupo.utils.messages import did_you_mean

REWARDS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType(
    {
        "number_match": number_match,
        "math_accuracy": math_accuracy,
        "boxed_accuracy": boxed_accuracy,
        "number_present": number_present,
        "number_score": number_score,
        "proximity": proximity,
        "banded_answer": banded_answer,
        "gsm8k_correctness": gsm8k_correctness,
        "gsm8k_integer": gsm8k_integer,
        "gsm8k_strict_format": gsm8k_strict_format,
        "gsm8k_soft_format": gsm8k_soft_format,
        "gsm8k_tag_count": gsm8k_tag_count,
        "tag_format": tag_format,
        "tag_count": tag_count,
        "token_length": token_length,
        "soft_overlong_punishment": get_soft_overlong_punishment,
        "cosine_scaled": get_cosine_scaled_reward,
        "repetition_penalty": get_repetition_penalty_reward,
        "llm_judge": llm_judge,
        "reward_model": reward_model,
        "code": code_reward,
        "no_cheating": no_cheating,
        "countdown": countdown,
        "number_list": number_list,
        "reasoning_gym": reasoning_gym,
        "rubric": rubric,
    }
)
"""Name -> factory."""

_EXAMPLES = {
    "language_consistency": "examples/rewards/prose.py:language_consistency",
    "readability": "examples/rewards/prose.py:readability",
    "email_rubric": "examples/rewards/email_reply.py:email_reply",
}
"""Earlier name of a reward -> the example file that it has become."""


def make_reward(name: str, /, **arguments: Any) -> Callable[..., Any]:
    """The reward function of this name, made with `arguments`.

    Args:
        name: a built-in reward, or `file.py:function` or `package.module:function` for your own. Your own function
            gets the `arguments` with every call.

    Raises:
        ConfigError: an unknown name or argument, a missing argument, or a value that the factory refuses.
    """
    if ":" in name:
        function = _load_function(name)
        _check_arguments(name, function, arguments, check_missing=False)
        return functools.partial(function, **arguments) if arguments else function
    if name in _EXAMPLES:
        raise ConfigError(f"Reward '{name}' is an example file now: copy it and name `{_EXAMPLES[name]}`.")
    if name not in REWARDS:
        raise ConfigError(
            f"There is no reward named '{name}'.{did_you_mean(name, REWARDS)} Known rewards: {', '.join(REWARDS)}. "
            "Name your own function as `file.py:function`."
        )
    factory = REWARDS[name]
    _check_arguments(name, factory, arguments, check_missing=True)
    _check_types(name, factory, arguments)
    try:
        return factory(**arguments)
    except GrupoError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # A value that no check covers. It is not printed: it may be an API key in the wrong place.
        raise ConfigError(
            f"Reward '{name}' cannot be made with these values of {', '.join(arguments)}: {error}."
        ) from error


def _check_arguments(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any], check_missing: bool
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        (signature.bind if check_missing else signature.bind_partial)(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"Reward '{name}' cannot be made with ({', '.join(arguments) or 'no arguments'}): {error}. "
            f"It takes ({', '.join(str(parameter).split(':')[0] for parameter in signature.parameters.values())})."
        ) from None


_PLAIN_TYPES: Mapping[Any, tuple[type, str]] = MappingProxyType(
    {
        bool: (bool, "True or False"),
        int: (Integral, "a whole number"),
        float: (Real, "a number"),
        str: (str, "a string"),
        type(None): (type(None), "null"),
    }
)
"""Type in a signature -> accepted type, and its name in messages."""


def _check_types(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check arguments that the signature annotates as plain values; without this, a quoted 'no' would be true."""
    hints = get_type_hints(factory)
    for argument, value in arguments.items():
        hint = hints.get(argument, Any)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not all(kind in _PLAIN_TYPES for kind in kinds):
            continue
        accepted = tuple(_PLAIN_TYPES[kind][0] for kind in kinds)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(
                f"Reward '{name}' cannot be made with {argument}={value!r:.80}: it takes "
                f"{' or '.join(_PLAIN_TYPES[kind][1] for kind in kinds)}."
            )


def value_range(factory: Callable[..., Any]) -> str:
    """The declared range of a factory's rewards, as text."""
    declared = getattr(factory, "value_range", None)
    if declared is None and all(p.default is not p.empty for p in inspect.signature(factory).parameters.values()):
        declared = getattr(factory(), "value_range", None)
    return "not declared" if declared is None else f"{declared[0]:g} to {declared[1]:g}"


def _load_function(name: str) -> Callable[..., Any]:
    """The function in a file, relative to the working directory, or in an importable module."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"Reward '{name}': there is no file {path.resolve()}.")
        module = _load_file(name, path)
    else:
        try:
            module = importlib.import_module(source)
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(
                f"Reward '{name}': the module '{source}' cannot be imported ({_describe(error)})."
            ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"Reward '{name}': '{source}' has no function '{attribute}'.{did_you_mean(attribute, public)} Its "
            f"functions are {', '.join(public) or 'none'}."
        )
    return cast("Callable[..., Any]", function)


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code
        raise ConfigError(f"Reward '{name}': {path} cannot be loaded ({_describe(error)}).") from error
    return module


def _describe(error: BaseException) -> str:
    return "; ".join(line.strip() for line in traceback.format_exception_only(error))
