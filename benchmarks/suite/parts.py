"""The parts of a step on their own: sampling, scoring, log-probs, each beside its peer and its floor.

R rows, P prompt tokens, C completion tokens, G completions of a prompt.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from grupo.policy.batching import collate
from grupo.policy.chunked_logprobs import chunked_logprobs, logprobs_from_logits
from grupo.policy.logprob_model import LogprobModel
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.local import engine as local
from grupo.rollout.local.engine import LocalEngine
from grupo.rollout.local.inference_copy import make_inference_copy
from grupo.sampling import SamplingSpec
from grupo.types import Prompt, TrainingSample
from suite import floors
from suite.measure import MIB, MemoryAbove, interleaved, medians
from suite.models import load, lora
from suite.recipes import GROUP_SIZE, RECIPES

CPU = torch.device("cpu")


def model_with_adapter(folder: str) -> tuple[Any, Any]:
    """The model with a LoRA adapter that changes what it computes, and the tokenizer."""
    from peft import get_peft_model

    model, tokenizer = load(folder)
    adapted = get_peft_model(model, lora())
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    return adapted, tokenizer


def merged_copy(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload().eval()


# ---- sampling --------------------------------------------------------------------------------------------------------


def prompts_of(tokenizer: Any, count: int) -> list[Prompt]:
    rows = RECIPES["arithmetic"].rows(count)
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]
    return [Prompt(id=i, row=i, token_ids=tuple(tokens), content="") for i, tokens in enumerate(ids)]


def requests_of(prompts: Sequence[Prompt]) -> list[GenerationRequest]:
    return [GenerationRequest(p, tuple(1000 * p.id + place + 1 for place in range(GROUP_SIZE))) for p in prompts]


def geometric_lengths(count: int, mean: float, cap: int) -> list[int]:
    """Lengths of answers that end at every token with the same probability."""
    chance = random.Random(0)
    lengths = []
    for _ in range(count):
        length = 1
        while length < cap and chance.random() > 1 / mean:
            length += 1
        lengths.append(length)
    return lengths


@contextmanager
def ending_at(lengths: Sequence[int], seeds: Sequence[int], cap: int, stop_id: int) -> Iterator[None]:
    """Within the context the engine's completion of `seeds[i]` ends with `stop_id` as its token number `lengths[i]`.

    A row is known by its uniform random number, which depends on its seed and the step alone, in whatever batch the
    engine computes it.
    """
    last = set()
    for seed, length in zip(seeds, lengths, strict=True):
        uniforms = torch.rand(cap, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if length < cap:
            last.add(uniforms[length - 1].item())
    sample_tokens = local.sample_tokens

    def forced(logits: Tensor, spec: SamplingSpec, uniforms: Tensor, *args: Any) -> Any:
        draw = sample_tokens(logits, spec, uniforms, *args)
        ends = torch.tensor([value in last for value in uniforms.tolist()])
        going = draw.token_ids.where(draw.token_ids != stop_id, stop_id + 1)
        return draw._replace(token_ids=going.where(~ends, stop_id))

    with mock.patch.object(local, "sample_tokens", forced):
        yield


def transformers_generate(model: Any, prompts: Sequence[Prompt], lengths: Sequence[int]) -> Callable[[], Tensor]:
    """`generate` of transformers on the same rows: G copies of each prompt, one static batch."""
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    rows = [prompt.token_ids for prompt in prompts for _ in range(GROUP_SIZE)]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    wanted = torch.tensor(lengths)

    class AtRecordedLength(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids.shape[1] - longest >= wanted

    # The model's own stop tokens would end rows early.
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )

    @torch.no_grad()
    def run() -> Tensor:
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([AtRecordedLength()]),
        )

    return run


def measure_generation(*, folder: str, lengths: str, tokens: int, repeats: int, warm_up: int = 1) -> dict[str, Any]:
    """Our engine on the model with adapter, against `generate` on merged weights.

    Args:
        lengths: "equal": 16 completions of `tokens`; "geometric": 64, of 60 on average and `tokens` at most.
    """
    model, tokenizer = model_with_adapter(folder)
    equal = lengths == "equal"
    prompts = prompts_of(tokenizer, 2 if equal else 8)
    requests = requests_of(prompts)
    count = len(prompts) * GROUP_SIZE
    wanted = [tokens] * count if equal else geometric_lengths(count, mean=60 * tokens / 256, cap=tokens)
    merged = merged_copy(model)
    peer = transformers_generate(merged, prompts, wanted)
    stop_id = 0
    engine = LocalEngine(model, decode=tokenizer.decode, stop_token_ids=(stop_id,))
    spec = SamplingSpec(max_new_tokens=tokens)
    seeds = [seed for request in requests for seed in request.seeds]

    def ours() -> None:
        groups = engine.generate(requests, spec)
        found = [len(completion.token_ids) for group in groups for completion in group]
        if found != wanted:
            raise AssertionError(f"completions of {found} tokens, where {wanted} were asked for")

    works = {"ours": ours, "peer": peer}
    if equal:
        # Bare products for every decode step; the prefill is left out, which makes our fraction smaller.
        works["floor"] = floors.decode_steps(merged, rows=count, steps=tokens - 1)
        works["packed_floor"] = floors.decode_steps(make_inference_copy(model), rows=count, steps=tokens - 1)
    with ending_at(wanted, seeds, tokens, stop_id):
        seconds = interleaved(works, repeats, warm_up)
    return {
        "completions": count,
        "tokens": sum(wanted),
        "longest": max(wanted),
        "seconds": seconds,
        **medians(seconds),
    }


# ---- scoring ---------------------------------------------------------------------------------------------------------


def group_of(prompt_tokens: int, completion_tokens: int, group_size: int, vocabulary_size: int) -> list[TrainingSample]:
    """One group of random tokens with advantages that sum to zero."""
    chance = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(3, vocabulary_size) for _ in range(count))

    prompt = ids(prompt_tokens)
    return [
        TrainingSample(prompt, ids(completion_tokens), 1.0 if place % 2 else -1.0, True, True, None)
        for place in range(group_size)
    ]


def _backward(logprobs: Tensor, samples: Sequence[TrainingSample]) -> None:
    advantages = torch.tensor([sample.advantage for sample in samples])
    (-(logprobs * advantages[:, None]).sum() / logprobs.numel()).backward()


def score_plain(model: nn.Module, samples: Sequence[TrainingSample]) -> Callable[[], None]:
    """Our own plain path: every row with its own copy of the prompt, log-probs from hidden states in chunks."""
    logprob_model = LogprobModel(model, use_prompt_sharing=False)
    batch = collate(samples, pad_token_id=0, device=CPU)

    def run() -> None:
        model.zero_grad()
        _backward(logprob_model.logprobs(model, batch, with_entropy=True).logprobs, samples)

    return run


def score_shared(model: nn.Module, samples: Sequence[TrainingSample]) -> Callable[[], None]:
    """Our path with the prompt computed once."""
    logprob_model = LogprobModel(model)
    logprob_model.prepare(model, CPU)
    if not logprob_model.use_prompt_sharing:
        raise AssertionError("this model is scored with a copy of the prompt in every row: there is nothing to compare")
    batch = collate(samples, pad_token_id=0, device=CPU, packed=True)

    def run() -> None:
        model.zero_grad()
        with logprob_model.attention():
            _backward(logprob_model.logprobs(model, batch, with_entropy=True).logprobs, samples)

    return run


def score_full_logits(model: nn.Module, samples: Sequence[TrainingSample]) -> Callable[[], None]:
    """The textbook way: logits of all completion positions at once."""
    batch = collate(samples, pad_token_id=0, device=CPU)
    keep = batch.completion_ids.shape[1] + 1

    def run() -> None:
        model.zero_grad()
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        logprobs, _ = logprobs_from_logits(logits.flatten(0, 1), batch.completion_ids.flatten(), with_entropy=True)
        _backward(logprobs.view_as(batch.completion_ids), samples)

    return run


SCORING = {"shared": score_shared, "plain": score_plain, "full_logits": score_full_logits}


def measure_scoring(
    *, folder: str, prompt_tokens: int, completion_tokens: int, repeats: int, matrix_size: int = 2048
) -> dict[str, Any]:
    """Forward and backward of one group, with the prompt computed once and with a copy of it in every row."""
    model, _ = model_with_adapter(folder)
    model.train()
    samples = group_of(prompt_tokens, completion_tokens, GROUP_SIZE, model.config.vocab_size)
    seconds = interleaved({side: SCORING[side](model, samples) for side in ("shared", "plain")}, repeats)
    flops = floors.matrix_flops(matrix_size)
    tokens = prompt_tokens + GROUP_SIZE * completion_tokens
    return {
        "completion_tokens": completion_tokens,
        "seconds": seconds,
        **medians(seconds),
        "gflops": flops / 1e9,
        "floor": floors.scoring_flop(model, tokens, GROUP_SIZE * completion_tokens) / flops,
    }


# ---- log-probs -------------------------------------------------------------------------------------------------------


def measure_logprob_memory(*, tokens: int, vocabulary_size: int, hidden_size: int) -> dict[str, Any]:
    """Peak memory of log-probs and their backward beyond inputs, results and gradients of their own size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary_size, hidden_size, generator=generator)
    targets = torch.randint(vocabulary_size, (tokens,), generator=generator)

    def run(count: int) -> None:
        logprobs, _ = chunked_logprobs(hidden[:count], weight, targets[:count])
        logprobs.sum().backward()

    run(min(tokens, 64))
    memory = MemoryAbove()
    run(tokens)
    return {
        "tokens": tokens,
        "vocabulary_size": vocabulary_size,
        "peak_mib": memory.bytes() / MIB,
        "full_logits_mib": tokens * vocabulary_size * 4 / MIB,
    }
