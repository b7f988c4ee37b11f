"""`fast_generate`: texts or conversations in, completions out, with the same arguments whatever engine there is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from grupo.data.prompts import PromptTokenizer
from grupo.errors import ConfigError, DataError
from grupo.models.inspect import context_length, encode_stop_strings, stop_token_ids
from grupo.models.load import load_tokenizer
from grupo.models.load_options import load_options
from grupo.models.peft_setup import rollback_on_error
from grupo.rollout.engine import GenerationRequest, completion_seed
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingOverrides, SamplingParams, SamplingSpec, sampling_overrides
from grupo.types import Completion, Prompt
from grupo.utils.quantized_layers import evaluation_mode, modes_restored


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, under vLLM's names."""

    index: int
    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    """The stop token included."""
    cumulative_logprob: float
    """Nats, under the temperature, before top_p, top_k and min_p."""
    finish_reason: str
    """"stop" or "length"."""


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions, under vLLM's names."""

    request_id: str
    prompt: str
    """What the model has read, special tokens included."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True)
class LoRARequest:
    """An adapter on disk that a generation is to use."""

    lora_name: str
    lora_int_id: int
    lora_path: str


def fast_generate(
    model: Any,
    prompts: Any = None,
    sampling_params: Any = None,
    use_tqdm: Any = None,
    lora_request: Any = None,
    **tensors: Any,
) -> Any:
    """Completions of prompts by the model with its adapter, as it is now. Weights and training are left alone.

    Args:
        prompts: a text, a conversation (messages with role and content), or a list of either.
        sampling_params: SamplingParams of grupo or of vLLM, or a dict; by default `SamplingParams()`, 16 tokens.
        use_tqdm: without effect.
        lora_request: what `load_lora` returned, or the folder of an adapter: it is used instead of the model's own.
        tensors: `input_ids` and what belongs to it: then all of it goes to `model.generate`.

    Returns:
        A RequestOutput for each prompt, in order.

    Raises:
        ConfigError: parameters that the engine does not have, or a prompt that leaves no room for a completion.
    """
    if "input_ids" in tensors or isinstance(prompts, torch.Tensor):
        return _generate(model, prompts, sampling_params, lora_request, tensors)
    if tensors:
        raise ConfigError(
            f"fast_generate has no argument {', '.join(map(repr, tensors))}. Sampling is set by sampling_params, as in "
            "sampling_params=SamplingParams(temperature=0.8, max_tokens=64)."
        )
    requested = sampling_overrides(SamplingParams() if sampling_params is None else sampling_params)
    tokenizer = load_options(model).tokenizer or load_tokenizer(model)
    tokenize = PromptTokenizer(tokenizer)
    contents = _contents(prompts)
    with _with_adapter(model, lora_request) as policy:
        requests = [
            Prompt(id=index, row=index, token_ids=tokenize(content), content=content)
            for index, content in enumerate(contents)
        ]
        completions = _sampled(policy, tokenizer, requests, requested, _max_length(model))
    return [
        RequestOutput(
            request_id=str(prompt.id),
            prompt=tokenize.text(prompt),
            prompt_token_ids=list(prompt.token_ids),
            outputs=[_output(index, completion) for index, completion in enumerate(group)],
        )
        for prompt, group in zip(requests, completions, strict=True)
    ]


def load_lora(
    model: Any, path: str | Path, load_tensors: bool = True, lora_request_id: int | None = None
) -> LoRARequest:
    """For `fast_generate(..., lora_request=...)`; the model keeps its own adapter.

    Args:
        path: an adapter's folder; it is read anew for each generation.
        load_tensors: without effect.
        lora_request_id: a number for the request.

    Raises:
        ConfigError: there is no adapter in the folder.
    """
    _check_adapter_folder(path)
    return LoRARequest(Path(path).name, lora_request_id or 1, os.fspath(path))


def _check_adapter_folder(path: str | os.PathLike[str]) -> None:
    if not (Path(path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"There is no adapter in {os.fspath(path)!r}: adapter_config.json is missing. model.save_lora(folder) and "
            "trainer.save_model(folder) write one."
        )


def _generate(model: Any, prompts: Any, sampling_params: Any, lora_request: Any, tensors: dict[str, Any]) -> Any:
    """transformers' own generation, for scripts that pass tensors."""
    if sampling_params is not None:
        raise ConfigError(
            "sampling_params goes with texts; with input_ids, generation is that of transformers: pass max_new_tokens, "
            "temperature and so on instead."
        )
    if isinstance(prompts, torch.Tensor):
        tensors["input_ids"] = prompts
    with _with_adapter(model, lora_request) as policy, evaluation_mode(policy):
        return policy.generate(**tensors)


def _contents(prompts: Any) -> list[Any]:
    """Texts and conversations."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise DataError(f"fast_generate got {prompts!r}; pass a text, a list of messages, or a list of these.")
    is_one_conversation = all(isinstance(part, Mapping) and "role" in part for part in prompts)
    contents = [list(prompts)] if is_one_conversation else list(prompts)
    for content in contents:
        is_conversation = isinstance(content, Sequence) and all(
            isinstance(message, Mapping) and isinstance(message.get("content"), str) and "role" in message
            for message in content
        )
        if not content or not (isinstance(content, str) or is_conversation):
            raise DataError(
                f"fast_generate got the prompt {content!r}; it must be a text, or messages like "
                '[{"role": "user", "content": "..."}].'
            )
    return contents


def _max_length(model: Any) -> int | None:
    """Tokens of prompt and completion together, at most."""
    lengths = [length for length in (load_options(model).max_seq_length, context_length(model)) if length is not None]
    return min(lengths, default=None)


def _sampled(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], requested: SamplingOverrides, limit: int | None
) -> list[list[Completion]]:
    seed = int(torch.randint(2**62, ())) if requested.seed is None else requested.seed
    engine = LocalEngine(
        model,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        stop_token_ids=(*stop_token_ids(tokenizer, model), *encode_stop_strings(tokenizer, requested.stop)),
    )
    by_room: dict[int, list[GenerationRequest]] = {}
    for prompt in prompts:
        seeds = tuple(completion_seed(seed, "fast_generate", prompt.id, place) for place in range(requested.n or 1))
        by_room.setdefault(_max_new_tokens(prompt, requested, limit), []).append(GenerationRequest(prompt, seeds))
    found: dict[int, list[Completion]] = {}
    for room, requests in by_room.items():
        spec = SamplingSpec(max_new_tokens=room, stop_token_ids=requested.stop_token_ids, **requested.settings)
        for request, group in zip(requests, engine.generate(requests, spec), strict=True):
            found[request.prompt.id] = group
    return [found[prompt.id] for prompt in prompts]


def _max_new_tokens(prompt: Prompt, requested: SamplingOverrides, limit: int | None) -> int:
    """Tokens of a completion, at most."""
    wanted = requested.max_tokens if requested.max_tokens_given else SamplingParams.max_tokens
    room = None if limit is None else limit - len(prompt.token_ids)
    if room is not None and room < 1:
        raise DataError(
            f"A prompt has {len(prompt.token_ids)} tokens, and max_seq_length or the model's context is {limit}: there "
            "is no room for a completion. Shorten it, or load the model with a larger max_seq_length."
        )
    if wanted is None and room is None:
        raise ConfigError("max_tokens=None needs a model whose context is known. Set max_tokens.")
    return min(number for number in (wanted, room) if number is not None)


def _output(index: int, completion: Completion) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=float(sum(completion.behavior_logprobs or ())),
        finish_reason=completion.finish_reason.value,
    )


@contextlib.contextmanager
def _with_adapter(model: Any, request: Any) -> Iterator[Any]:
    """The model with the adapter of the request, for as long; None: with its own."""
    from peft import PeftModel

    if request is None:
        yield model
        return
    path = request if isinstance(request, str | os.PathLike) else getattr(request, "lora_path", None)
    if path is None:
        raise ConfigError(f"lora_request is {type(request).__name__}; pass what model.load_lora(folder) returns.")
    _check_adapter_folder(path)
    # peft freezes what is not active, and thaws what is; and it calls model.eval().
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with modes_restored(model):
            if isinstance(model, PeftModel):
                yield from _temporary_adapter(model, os.fspath(path))
            else:
                yield from _on_base(model, os.fspath(path))
    finally:
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def _on_base(model: Any, path: str) -> Iterator[Any]:
    from peft import PeftModel

    with rollback_on_error(model), _adapter_errors(path):
        wrapped = PeftModel.from_pretrained(model, path)
    try:
        yield wrapped
    finally:
        wrapped.unload()


def _temporary_adapter(model: Any, path: str) -> Iterator[Any]:
    own, name = model.active_adapter, "of the request"
    try:
        with _adapter_errors(path):
            model.load_adapter(path, adapter_name=name)
        model.set_adapter(name)
        yield model
    finally:
        model.set_adapter(own)
        if name in model.peft_config:  # where weights do not fit peft leaves it there, for the next request to find
            model.delete_adapter(name)


@contextlib.contextmanager
def _adapter_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"The adapter in {os.fspath(path)!r} cannot be put on the model: {' '.join(str(error).split())[:400]}"
        ) from error
