"""Helpers of the regression tests: the real trainer on a tiny model, and plain forwards to compare it with.

Issue numbers name the reports that a test comes from; "TRL" is huggingface/trl. G group size, B completions, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import TrainerCallback

from grupo import GRPOConfig, GRPOTrainer, ScriptedEngine
from grupo.algo.losses import GRPOLoss, LossInputs
from grupo.policy import forward_backward as update
from grupo.rollout.engine import GenerationRequest
from grupo.sampling import SamplingSpec
from grupo.types import MicroBatch
from tiny import tiny_model, tiny_tokenizer

BOS, EOS, PAD, USER, ASSISTANT, END = range(6)
TOK = tiny_tokenizer()

# One epoch of these two prompts is one optimizer step of 8 completions: two groups of four.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
    "shuffle_dataset": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "max_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}
ROWS = [{"prompt": "ab"}, {"prompt": "cde"}]
# Completions of both prompts, and rewards for them.
SCRIPT = {"ab": ["a</s>", "bb</s>", "c</s>", "dd</s>"], "cde": ["e</s>", "ff</s>", "g</s>", "hh</s>"]}
SCORES = [1.0, 0.0, 0.5, 2.0, 0.0, 1.0, 1.0, 3.0]


def ids_of(text: str, tokenizer: Any = TOK) -> list[int]:
    """Token ids of a text in which special tokens are written out, as in "abc</s>"."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def make_trainer(
    folder: Path,
    rewards: Any,
    rows: Any = ROWS,
    *,
    script: Callable[[Any, int], Sequence[int]] | Mapping[str, Sequence[str]] | None = None,
    model: Any = None,
    tokenizer: Any = TOK,
    eval_rows: Any = None,
    peft_config: Any = None,
    stops: Sequence[int] = (EOS,),
    **settings: Any,
) -> GRPOTrainer:
    """A trainer of a tiny model. With a `script` (a function, or texts per prompt) the engine replays completions."""
    engine = None
    if script is not None:
        texts = script
        replay = script if callable(script) else lambda prompt, place: ids_of(texts[prompt.content][place], tokenizer)
        engine = ScriptedEngine(
            replay, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True), stop_token_ids=stops
        )
    return GRPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(folder), **{**SETTINGS, **settings}),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=peft_config,
        engine=engine,
    )


def after_its_checks(trainer: GRPOTrainer) -> GRPOTrainer:
    """The trainer, once its log-prob model and engine have checked their fast paths with token ids of their own."""
    trainer.forward_backward.logprob_model.prepare(trainer.model, trainer.accelerator.device)
    request = GenerationRequest(trainer.train_rows[0].to_prompt(0), (0,))
    trainer.engine.generate([request], SamplingSpec(max_new_tokens=1))
    return trainer


@dataclass
class Watch(TrainerCallback):
    """Records the gradients of each step before the update, and the parameters before each step."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.parameters.append(snapshot(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def train(trainer: GRPOTrainer) -> Watch:
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    return watch


def logs_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The training log lines."""
    return [line for line in trainer.state.log_history if "loss" in line]


def completions_of(trainer: GRPOTrainer, *, split: str | None = None) -> list[dict[str, Any]]:
    """Completions in the run folder with their prompts, in order, of training or of one evaluation split."""
    path = Path(trainer.args.output_dir) / "completions.jsonl"
    groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {"prompt": group["prompt"], "row": group["row"], **completion}
        for group in groups
        if group.get("split") == split
        for completion in group["completions"]
    ]


def advantages_of(trainer: GRPOTrainer) -> Tensor:
    """(B,) float64, in the order of the completions."""
    return torch.tensor([completion["advantage"] for completion in completions_of(trainer)], dtype=torch.float64)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    after = snapshot(model)
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def all_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def varied(completions: list[Any], **columns: Any) -> list[float]:
    """Rewards that differ within each group."""
    return [float((7 * index) % 5) for index in range(len(completions))]


def lora(**more: Any) -> LoraConfig:
    """LoRA on all linear layers whose B is not zero, so that changes of A have an effect."""
    settings = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return LoraConfig(**{**settings, **more})


def given(scores: Any) -> Callable[..., Any]:
    """A reward function that always returns `scores`."""

    def reward(completions: list[Any], **columns: Any) -> Any:
        return scores

    return reward


def token_logprobs(
    model: nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """(T,) with gradient, from one plain forward pass of one sequence, without padding, mask or chunks."""
    ids = torch.tensor([[*prompt, *completion]])
    log_p = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
    return torch.stack([log_p[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


def gradient_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [parameter for _, parameter in named])
    return {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}


def relative_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of `wanted`, all parameters together."""
    assert found.keys() == wanted.keys()
    difference = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted])
    return float(difference.norm() / torch.cat([wanted[name].flatten() for name in wanted]).norm())


def recorded_batches(monkeypatch: Any) -> list[MicroBatch]:
    """List to which every micro-batch is added that is built from now on."""
    batches: list[MicroBatch] = []
    collate = update.collate

    def keeping(*args: Any, **kwargs: Any) -> MicroBatch:
        batches.append(collate(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr(update, "collate", keeping)
    return batches


def fed_in(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion ids of each completion, in the order of the batch, as the model received them.

    In a packed sequence, completions of one prompt share it: (prompt, A), (prompt, B) are stored as prompt, A, B, and
    the positions of A and of B both continue those of the prompt.
    """
    rows: list[tuple[list[int], list[int]]] = []
    if batch.layout is None:
        for ids, length, prompt in zip(batch.input_ids.tolist(), batch.lengths, batch.prompt_lengths, strict=True):
            rows.append((ids[:prompt], ids[prompt:length]))
    else:
        (ids,), (positions,), stop = batch.input_ids.tolist(), batch.position_ids.tolist(), 0
        for group in batch.layout.groups:
            assert group.start == stop, "no gap between two prompts"
            stop = group.start + group.prompt_length
            prompt = range(group.start, stop)
            for length in group.completion_lengths:
                places = [*prompt, *range(stop, stop + length)]
                assert [positions[place] for place in places] == list(range(len(places)))
                stop += length
                read = [ids[place] for place in places]
                rows.append((read[: len(prompt)], read[len(prompt) :]))
    assert [(len(prompt), len(completion)) for prompt, completion in rows] == [
        (prompt, length - prompt) for prompt, length in zip(batch.prompt_lengths, batch.lengths, strict=True)
    ]
    return rows


def recorded_losses(monkeypatch: Any) -> list[LossInputs]:
    """List to which the inputs of every loss are added from now on."""
    calls: list[LossInputs] = []
    inner = GRPOLoss.__call__

    def keeping(self: GRPOLoss, inputs: LossInputs, *args: Any, **kwargs: Any) -> Any:
        calls.append(inputs)
        return inner(self, inputs, *args, **kwargs)

    monkeypatch.setattr(GRPOLoss, "__call__", keeping)
    return calls


def scripted_sampling(model: nn.Module, completion: Sequence[int], prompt_length: int) -> nn.Module:
    """Makes the in-process engine sample `completion` after prompts of `prompt_length` tokens.

    Without a cache, as in the computation of log-probs, the model is unchanged.
    """
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        if kwargs.get("use_cache"):
            step = int(kwargs["position_ids"][0, -1]) + 1 - prompt_length
            output.logits[:, -1, completion[min(step, len(completion) - 1)]] += 1e4
        return output

    model.forward = forward  # type: ignore[method-assign]
    return model


def never_stopping(model: nn.Module, stops: Sequence[int] = (EOS,)) -> nn.Module:
    """Subtracts 1e4 from the logits of all stop tokens, in sampling and in the computation of log-probs."""
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        penalty = torch.zeros_like(output.logits)
        penalty[..., list(stops)] = -1e4
        output.logits = output.logits + penalty
        return output

    model.forward = forward  # type: ignore[method-assign]
    return model
