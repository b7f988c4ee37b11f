"""Scenarios of `test_two_ranks.py` through GRPOTrainer, in one process or in each of two.

    python -m torch.distributed.run --standalone --nproc_per_node 2 two_ranks_worker.py FOLDER

runs all of them one after the other and writes `FOLDER/{scenario}.{rank}.pt`. Batch sizes are totals over processes, so
that a scenario has the same optimizer steps in one process (`run_scenario`) and in two.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from grupo.errors import GrupoError
from grupo.evals.pass_rates import estimate_pass_rates
from grupo.policy.logprob_model import LogprobModel
from tiny import tiny_model
from tiny_trainer import EOS, PROMPTS, Spy, gradients, make_trainer, reward, scripted_ids, weights

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

OFF_POLICY = {"num_iterations": 2, "max_steps": 2}
# Rank 0 holds the completions of the first two prompts, rank 1 those of the last two.
LIVE_AND_DEAD = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3]]
DEAD_ON_RANK_1 = [PROMPTS[0], PROMPTS[3], PROMPTS[2], {"prompt": "also dead", "dead": True}]
DEAD = [{"prompt": letter, "dead": True} for letter in "stuv"]


class BeforeTheOptimizer(TrainerCallback):
    """Records the gradients that the optimizer gets, averaged over ranks and not clipped."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor | None]] = []
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.gradients.append(gradients(getattr(model, "module", model)))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


def train(
    folder: Path, *, batch: int = 16, accumulation: int = 1, resume: bool = False, **settings: Any
) -> dict[str, Any]:
    """Trains and returns the records of this rank. `batch`: completions per forward pass over all processes."""
    observer = BeforeTheOptimizer()
    trainer = make_trainer(
        folder, per_device_train_batch_size=batch // WORLD_SIZE, gradient_accumulation_steps=accumulation,
        callbacks=[observer, *settings.pop("callbacks", [])], ddp_timeout=60, **settings,
    )  # fmt: skip
    spy, passes = Spy(trainer), PassCounter()
    with passes:
        trainer.train(resume_from_checkpoint=resume)
    return {
        "gradients": observer.gradients,
        "logs": observer.logs,
        "weights": weights(trainer.model),
        "samples": [[dataclasses.asdict(sample) for sample in step.samples] for step in spy.steps],
        "passes": passes.with_gradient,
        "threshold_passes": passes.without_gradient,
    }


class PassCounter:
    """Completions of each forward pass, with and without gradient, without the checks at the start."""

    def __enter__(self) -> None:
        self.with_gradient: list[int] = []
        self.without_gradient: list[int] = []
        self.logprobs = logprobs = LogprobModel.logprobs

        def counting(logprob_model: Any, module: Any, batch: Any, **keywords: Any) -> Any:
            if logprob_model.use_prompt_sharing is not None:
                (self.with_gradient if torch.is_grad_enabled() else self.without_gradient).append(
                    int(batch.loss_mask.any(1).sum())
                )
            return logprobs(logprob_model, module, batch, **keywords)

        LogprobModel.logprobs = counting  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        LogprobModel.logprobs = self.logprobs  # type: ignore[method-assign]


def adapted_model() -> Any:
    """With a trained adapter, and with dropout, which must have no effect."""
    model = tiny_model()
    torch.manual_seed(1)
    settings = {
        "r": 2,
        "lora_alpha": 1,
        "lora_dropout": 0.3,
        "target_modules": "all-linear",
        "init_lora_weights": False,
    }
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))


# ---- scenarios -------------------------------------------------------------------------------------------------------

EVERY_OPTION = {
    "beta": 0.1,
    "entropy_coef": 0.05,
    "top_entropy_quantile": 0.6,
    "off_policy_mask_threshold": 0.05,
}


def even(folder: Path) -> dict[str, Any]:
    return train(folder, dataset=[{**row, "dead": False} for row in PROMPTS], **OFF_POLICY)


def uneven(folder: Path) -> dict[str, Any]:
    """Rank 1 skips a zero-variance group, so it has fewer micro-batches."""
    return train(folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, **OFF_POLICY)


def uneven_with_checkpointing(folder: Path) -> dict[str, Any]:
    return train(folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, gradient_checkpointing=True, **OFF_POLICY)


def one_rank_without_gradient(folder: Path) -> dict[str, Any]:
    return train(folder, dataset=DEAD_ON_RANK_1, batch=4, accumulation=4, **OFF_POLICY)


def no_rank_with_gradient(folder: Path) -> dict[str, Any]:
    return train(
        folder, dataset=DEAD, batch=4, accumulation=4, optim="adamw_torch", weight_decay=0.1, learning_rate=1e-2
    )


def every_option(folder: Path) -> dict[str, Any]:
    return train(folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, **EVERY_OPTION, **OFF_POLICY)


def every_option_with_adapter(folder: Path) -> dict[str, Any]:
    return train(
        folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, model=adapted_model(), kl_on_dead_groups=False,
        **{**EVERY_OPTION, "entropy_coef": 0.0}, **OFF_POLICY,
    )  # fmt: skip


def all_truncated_on_rank_1(folder: Path) -> dict[str, Any]:
    """Rank 1 has no completion in the loss: neither for the entropy threshold nor for the gradient."""

    def script(prompt: Any, place: int) -> list[int]:
        return [*scripted_ids(prompt, place)[:6], EOS] if prompt.row < 2 else [7 + place] * 9

    return train(
        folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, mask_truncated_completions=True,
        top_entropy_quantile=0.6, script=script, **OFF_POLICY,
    )  # fmt: skip


def group_over_two_ranks(folder: Path, loss_type: str, scale_rewards: str) -> dict[str, Any]:
    """One group of 4, two completions per rank: 2 tokens each on rank 0, 6 each on rank 1; rewards 0, 1 and 1, 0."""
    completions = [[10, 11], [12, 13], [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]]
    rewards = {tuple(ids): value for ids, value in zip(completions, (0.0, 1.0, 1.0, 0.0), strict=True)}
    return train(
        folder, dataset=[{"prompt": "q"}], batch=4, loss_type=loss_type, scale_rewards=scale_rewards,
        script=lambda prompt, place: completions[place],
        reward_funcs=lambda completion_ids, **_: [rewards[tuple(ids)] for ids in completion_ids],
    )  # fmt: skip


def real_engine(folder: Path, **settings: Any) -> dict[str, Any]:
    """The model itself samples; a rollout lasts four steps of one group, half of it on each rank."""
    defaults = {"steps_per_generation": 4, "max_steps": 6, "learning_rate": 0.05, "temperature": 0.8, "top_k": 60}
    dataset = [{**row, "dead": False} for row in (*PROMPTS, *DEAD)]
    return train(folder, script=None, batch=4, dataset=dataset, **{**defaults, **settings})


def resumed(folder: Path) -> dict[str, Any]:
    """Stopped inside a window and resumed, and the same run without a stop."""
    settings = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3, "beta": 0.1}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    real_engine(folder / "parts", callbacks=[Stop()], **settings)
    return _compared(folder, settings)


def _compared(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The resumed run and the whole one: weights, and whether their records are the same."""
    whole = real_engine(folder / "whole", **settings)
    parts = real_engine(folder / "parts", resume=True, **settings)
    name = f"completions{f'.rank{RANK}' if RANK else ''}.jsonl"
    records = [(folder / part / name).read_text() for part in ("parts", "whole")]
    return {"whole": whole["weights"], "parts": parts["weights"], "same_records": records[0] == records[1]}


def stopped_on_one_rank(folder: Path) -> dict[str, Any]:
    """Only rank 1 receives SIGTERM, inside a window; both ranks save and stop, and are resumed."""
    settings = {"optim": "adamw_torch", "learning_rate": 1e-2}

    class Sends(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and WORLD_SIZE - 1 == RANK:
                os.kill(os.getpid(), signal.SIGTERM)

    code = None
    try:
        real_engine(folder / "parts", callbacks=[Sends()], **settings)
    except SystemExit as stop:
        code = stop.code
    return {"code": code, **_compared(folder, settings)}


def full_disk_on_one_rank(folder: Path) -> dict[str, Any]:
    """Rank 1 cannot write its part of the second checkpoint."""
    trainer = make_trainer(
        folder, per_device_train_batch_size=16 // WORLD_SIZE, ddp_timeout=60, max_steps=3,
        save_strategy="steps", save_steps=1, save_total_limit=1,
    )  # fmt: skip
    write = trainer._write_checkpoint

    def fails(target: Path) -> None:
        if trainer.state.global_step == 2 and WORLD_SIZE - 1 == RANK:
            raise OSError("no space on this machine")
        write(target)
        here.append(sorted(path.name for path in folder.glob("checkpoint-*")))

    here: list[list[str]] = []
    trainer._write_checkpoint = fails  # type: ignore[method-assign]
    trainer.train()
    return {"while writing": here, "at the end": sorted(path.name for path in folder.glob("checkpoint-*"))}


def logs_on_one_rank(folder: Path) -> dict[str, Any]:
    """`log_metric` and `log_extra` on rank 0 only, and not in every rollout (huggingface/trl #7310)."""
    calls: list[int] = []

    def reward(
        prompts: list[str], completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float]:
        calls.append(len(prompts))
        if PROMPTS[0]["prompt"] in prompts and len(calls) != 2:
            log_metric("seen", 3.0)
            log_extra("length", [len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    return train(
        folder, dataset=PROMPTS, reward_funcs=reward, max_steps=3, logging_steps=3, log_completions=True,
    )  # fmt: skip


def reward_error_on_one_rank(folder: Path) -> dict[str, Any]:
    def returns_too_few(prompts: list[str], **_: Any) -> list[float]:
        return [0.0] if PROMPTS[3]["prompt"] in prompts else [0.0] * len(prompts)

    return train(folder, dataset=PROMPTS, reward_funcs=returns_too_few)


def failed_rewards_on_one_rank(folder: Path) -> dict[str, Any]:
    def raises(prompts: list[str], **_: Any) -> list[float]:
        if PROMPTS[3]["prompt"] in prompts:
            raise ZeroDivisionError("of rank 1")
        return [0.0] * len(prompts)

    return train(folder, dataset=PROMPTS, reward_funcs=raises, max_failed_reward_share=0.2)


async def waits(**columns: Any) -> list[float]:
    return reward(**columns)


def overlapped_log_probs(folder: Path) -> dict[str, Any]:
    """Work that overlaps with pending rewards has collectives; rank 1 has no completion for it."""

    def script(prompt: Any, place: int) -> list[int]:
        return [*scripted_ids(prompt, place)[:6], EOS] if prompt.row < 2 else [7 + place] * 9

    return train(
        folder, dataset=LIVE_AND_DEAD, batch=4, accumulation=4, mask_truncated_completions=True, script=script,
        reward_funcs=waits, beta=0.1, **OFF_POLICY,
    )  # fmt: skip


def engine_error_on_one_rank(folder: Path) -> dict[str, Any]:
    """Not a grupo error: the rank that raised it keeps it, and the other rank reports it."""
    return engine_error(folder, row=3, dataset=PROMPTS)


def engine_error_in_a_late_round(folder: Path) -> dict[str, Any]:
    """In the third round, in which rank 1 samples nothing: g replaces E on rank 0."""
    return engine_error(folder, row=6, dataset=WITH_DEAD, dynamic_sampling=True, max_steps=1)


def engine_error_before_log_probs(folder: Path) -> dict[str, Any]:
    return engine_error(folder, row=3, dataset=PROMPTS, reward_funcs=waits, beta=0.1)


def engine_error(folder: Path, *, row: int, **settings: Any) -> dict[str, Any]:
    started = time.monotonic()

    def script(prompt: Any, place: int) -> list[int]:
        if prompt.row == row:
            raise MemoryError("too many tokens")
        return scripted_ids(prompt, place)

    try:
        return train(folder, script=script, **settings)
    except MemoryError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}


def nan_on_one_rank(folder: Path) -> dict[str, Any]:
    """Only rank 1 has NaN gradients: both ranks drop the step, and both stop the second time."""
    model = tiny_model()
    if RANK == 1:
        model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    return train(folder, dataset=PROMPTS, model=model, max_steps=5, max_nonfinite_steps=2)


def evaluated(folder: Path) -> dict[str, Any]:
    """3 prompts with 1 and with 2 completions each, and one prompt alone: rank 0 has nothing to do there."""
    seen: list[str] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(sum(ids) % 5) for ids in completion_ids]

    outcome: dict[str, Any] = {}
    for name, prompts, group_size in (("3x1", "abc", 1), ("3x2", "abc", 2), ("1x1", "a", 1)):
        seen.clear()
        trainer = make_trainer(
            folder, dataset=[{"prompt": letter} for letter in "wxyz"], reward_funcs=reward, script=None,
            per_device_train_batch_size=16 // WORLD_SIZE, num_generations_eval=group_size, ddp_timeout=60,
        )  # fmt: skip
        metrics = trainer.evaluate([{"prompt": letter} for letter in prompts])
        outcome[name] = {"seen": list(seen), "metrics": metrics}
    return outcome


# In the first window, B on rank 0 and D on rank 1 have zero variance; E, which replaces B, is replaced again.
WITH_DEAD = [
    {"prompt": letter, "dead": letter.isupper(), "level": index // 6} for index, letter in enumerate("aBcDEfghIjkl")
]
CURRICULUM = {
    "curriculum_column": "level", "curriculum_window": 2, "curriculum_threshold": 0.1, "curriculum_success_reward": 0.5,
    "shuffle_dataset": True,
}  # fmt: skip


def replaced_groups(folder: Path, **settings: Any) -> dict[str, Any]:
    return train(folder, dataset=WITH_DEAD, dynamic_sampling=True, **{**OFF_POLICY, "max_steps": 4, **settings})


def chosen_completions(folder: Path, **settings: Any) -> dict[str, Any]:
    """The selected two of four may all be on one rank, also for the log-probs that are computed before the update."""
    dataset = [row for row in WITH_DEAD if not row["dead"]]
    return train(
        folder, dataset=dataset, num_generations_trained=2, beta=0.1, **{**OFF_POLICY, "max_steps": 6, **settings}
    )  # fmt: skip


def all_signal_resumed(folder: Path) -> dict[str, Any]:
    """Stopped inside a window and resumed, and the same run without a stop."""
    settings: dict[str, Any] = {
        "script": None, "batch": 8, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2, "beta": 0.1,
        "save_strategy": "steps", "save_steps": 3, "num_generations_trained": 2, **CURRICULUM,
    }  # fmt: skip

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    replaced_groups(folder / "parts", callbacks=[Stop()], **settings)
    whole = replaced_groups(folder / "whole", **settings)
    parts = replaced_groups(folder / "parts", resume=True, **settings)
    return {"whole": whole["weights"], "parts": parts["weights"], "logs": whole["logs"]}


def pass_rates(folder: Path) -> dict[str, Any]:
    trainer = make_trainer(folder, script=None, per_device_train_batch_size=16 // WORLD_SIZE, ddp_timeout=60)
    return {"rates": estimate_pass_rates(trainer, PROMPTS[:3], samples=3)}


GROUPS_OVER_TWO_RANKS = (("grpo", "batch"), ("dapo", "group"))
Scenario = Callable[[Path], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {
    "even": even,
    "uneven": uneven,
    "uneven with checkpointing": uneven_with_checkpointing,
    "one rank without gradient": one_rank_without_gradient,
    "no rank with gradient": no_rank_with_gradient,
    "every option": every_option,
    "every option with adapter": every_option_with_adapter,
    "all truncated on rank 1": all_truncated_on_rank_1,
    **{
        f"group over two ranks, {loss_type}, {scale}": lambda folder, loss=loss_type, scale=scale: group_over_two_ranks(
            folder, loss, scale
        )
        for loss_type, scale in GROUPS_OVER_TWO_RANKS
    },
    "real engine": real_engine,
    "real engine with adapter": lambda folder: real_engine(
        folder, model=adapted_model(), beta=0.1, learning_rate=0.005
    ),
    "overlapped log-probs": overlapped_log_probs,
    "resumed": resumed,
    "stopped on one rank": stopped_on_one_rank,
    "full disk on one rank": full_disk_on_one_rank,
    "logs on one rank": logs_on_one_rank,
    "replaced groups": replaced_groups,
    "replaced groups, each over two ranks": lambda folder: replaced_groups(
        folder, batch=4, accumulation=2, scale_rewards="batch"
    ),
    "replaced groups, real engine, curriculum": lambda folder: replaced_groups(
        folder, script=None, learning_rate=0.05, max_steps=6, **CURRICULUM
    ),
    "chosen completions": chosen_completions,
    "chosen completions, groups over two ranks": lambda folder: chosen_completions(folder, batch=4),
    "chosen completions, entropy threshold": lambda folder: chosen_completions(
        folder, batch=4, accumulation=2, top_entropy_quantile=0.6
    ),
    "all signal, resumed": all_signal_resumed,
    "pass rates": pass_rates,
    "evaluated": evaluated,
    "reward error on one rank": reward_error_on_one_rank,
    "failed rewards on one rank": failed_rewards_on_one_rank,
    "engine error on one rank": engine_error_on_one_rank,
    "engine error in a late round": engine_error_in_a_late_round,
    "engine error before log-probs": engine_error_before_log_probs,
    "nan on one rank": nan_on_one_rank,
}


def run_scenario(name: str, folder: Path) -> dict[str, Any]:
    """Records of this rank; `error` is the message of an error that ended the run, after `seconds`."""
    started = time.monotonic()
    try:
        return SCENARIOS[name](folder / name)
    except GrupoError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}


def main(folder: Path, names: list[str]) -> None:
    for name in names or SCENARIOS:
        started = time.monotonic()
        torch.save(run_scenario(name, folder), folder / f"{name}.{RANK}.pt")
        print(f"[rank {RANK}] {name}: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
