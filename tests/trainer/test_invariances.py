"""Changes without an effect on the gradient or the run: micro-batches, order, padding, chunks, skipped samples.

Everything runs through GRPOTrainer on a tiny random model; gradients are compared before clipping.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grupo import GRPOTrainer
from grupo.algo.losses import GRPOLoss, LossInputs, StepTotals
from grupo.data.prompt_stream import PromptStream
from grupo.errors import TrainingError
from grupo.policy import logprob_model as logprob_model_module
from grupo.policy.chunked_logprobs import chunked_logprobs
from grupo.policy.forward_backward import ForwardBackward
from grupo.policy.logprob_model import LogprobModel
from grupo.types import TrainingSample
from tiny import tiny_model
from tiny_trainer import EOS, PROMPTS, TOKENIZER, Spy, Step, distance, gradients, make_trainer, run, weights

# One loss per aggregation, and one at sequence level; algo/test_losses.py covers every loss.
LOSS_TYPES = ("grpo", "luspo", "dapo", "dr_grpo", "gspo")

# Stock models compute norms, rotary angles and softmax in float32 even in float64, which leaves some rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-7}


def assert_same_steps(steps: list[Step], expected: list[Step], tolerance: float) -> None:
    assert len(steps) == len(expected) > 0
    for step, wanted in zip(steps, expected, strict=True):
        assert distance(step.gradients, wanted.gradients) < tolerance
        assert step.loss == pytest.approx(wanted.loss, rel=10 * tolerance, abs=10 * tolerance)


# ---- how a step is cut -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise more short completions would fit into a micro-batch with room for long ones."""
    monkeypatch.setattr("grupo.trainer.components.longest_sequence", lambda *_: None)


SPLITS = ((16, 1), (2, 8))

# Two passes over one rollout: in the second step the ratio is no longer 1.
OFF_POLICY = {"num_iterations": 2, "max_steps": 2}
EVERY_OPTION = {
    "beta": 0.1,
    "entropy_coef": 0.05,
    "top_entropy_quantile": 0.6,
    "off_policy_mask_threshold": 0.05,
    "mask_truncated_completions": True,
}


def splits_of(folder: Path, dtype: torch.dtype, **settings: Any) -> list[list[Step]]:
    return [
        run(
            folder / f"{size}",
            model=tiny_model(dtype=dtype),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            **settings,
        )
        for size, accumulation in SPLITS
    ]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {}), (torch.float32, EVERY_OPTION)],
    ids=["float64", "float32 with every option"],
)
def test_the_number_of_micro_batches_changes_nothing(
    tmp_path: Path, loss_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """1 and 8 micro-batches (huggingface/trl #3021, #5619; modelscope/ms-swift #10117), on-policy and off-policy."""
    whole, cut = splits_of(tmp_path, dtype, loss_type=loss_type, **OFF_POLICY, **options)
    assert whole[1].metrics["ratio/mean"] != pytest.approx(1.0, abs=1e-4), "the second step is off-policy"
    assert_same_steps(cut, whole, TOLERANCE[dtype])


@pytest.mark.parametrize(("loss_type", "as_mean_of_means"), [("grpo", False), ("dapo", True)])
def test_denominators_of_the_micro_batch_would_be_noticed(
    tmp_path: Path, loss_type: str, as_mean_of_means: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above fails if each micro-batch is divided by its own tokens and rows (trl #3021, #5619)."""
    right = ForwardBackward._loss

    def own_totals(update, model, batch, totals, threshold, entropy_coef):
        passes = -(-totals.completions // update.micro_batch_size) if as_mean_of_means else 1
        tokens, rows = int(batch.loss_mask.sum()) * passes, int(batch.loss_mask.any(1).sum()) * passes
        return right(update, model, batch, StepTotals(tokens, rows, tokens), threshold, entropy_coef)

    monkeypatch.setattr(ForwardBackward, "_loss", own_totals)
    whole, cut = splits_of(tmp_path, torch.float32, loss_type=loss_type)
    assert distance(cut[0].gradients, whole[0].gradients) > 1e-2


def test_the_order_of_samples_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model=tiny_model(dtype=torch.float64), per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    spy = Spy(trainer)
    trainer.train()
    (step,) = spy.steps
    for seed in range(3):
        shuffled = random.Random(seed).sample(step.samples, len(step.samples))
        assert_same_steps([step_of(trainer, shuffled)], [step_of(trainer, step.samples)], 1e-7)


def test_the_order_of_groups_changes_nothing(tmp_path: Path) -> None:
    forwards = run(tmp_path / "a", scale_rewards="batch")
    backwards = run(tmp_path / "b", scale_rewards="batch", dataset=PROMPTS[::-1])
    assert forwards[0].samples[0].prompt_ids != backwards[0].samples[0].prompt_ids
    assert_same_steps(backwards, forwards, 1e-5)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """As with `pad_to_multiple_of` (huggingface/trl PR #2708, #6800)."""

    def padded(multiple: int | None) -> list[Step]:
        return run(
            tmp_path / str(multiple),
            model=tiny_model(dtype=torch.float64),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            pad_to_multiple_of=multiple,
            **OFF_POLICY,
            **EVERY_OPTION,
        )

    plain, more = padded(None), padded(64)
    assert more[0].metrics["padding_share"] > plain[0].metrics["padding_share"] + 0.1
    assert_same_steps(more, plain, 1e-7)


def test_chunks_of_tokens_and_vocabulary_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunked(tokens: int, vocabulary: int) -> list[Step]:
        chunks = functools.partial(chunked_logprobs, token_chunk=tokens, vocabulary_chunk=vocabulary)
        monkeypatch.setattr(logprob_model_module, "chunked_logprobs", chunks)
        return run(tmp_path, model=tiny_model(dtype=torch.float64), **OFF_POLICY, **EVERY_OPTION)

    assert_same_steps(chunked(7, 50), chunked(1024, 16384), 1e-7)


def test_tokens_at_the_entropy_threshold_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    """The threshold is the entropy of a single token, whose rounding depends on the padding of its micro-batch."""
    trainer = make_trainer(tmp_path)
    spy = Spy(trainer)
    trainer.train()
    spy.update.logprob_model.use_prompt_sharing = False
    samples = spy.steps[0].samples
    tokens = sum(len(sample.completion_ids) for sample in samples)
    for rank in range(1, tokens - 1, 4):
        spy.update.top_entropy_quantile = 1 - rank / (tokens - 1)
        whole, cut = (step_of(trainer, samples, micro_batch_size=rows) for rows in (16, 8))
        assert distance(cut.gradients, whole.gradients) < 1e-5, f"rank {rank} of {tokens}"


def step_of(trainer: GRPOTrainer, samples: list[TrainingSample], *, micro_batch_size: int | None = None) -> Step:
    """Gradient of the current model on given samples, without an update."""
    update = trainer.forward_backward.update
    update.micro_batch_size = micro_batch_size or update.micro_batch_size
    trainer.model.zero_grad()
    result = update(trainer.model, samples)
    return Step(samples, gradients(trainer.model), float(result.loss), result.metrics.means())


# ---- rows without gradient -------------------------------------------------------------------------------------------


COMPUTED = {
    **{loss_type: ({"loss_type": loss_type}, lambda s: s.advantage != 0) for loss_type in LOSS_TYPES},
    "masked": ({"mask_truncated_completions": True}, lambda s: s.advantage != 0 and EOS in s.completion_ids),
    "no KL in zero-variance groups": (
        {"beta": 0.1, "kl_on_dead_groups": False, "loss_type": "grpo"},
        lambda s: s.prompt_ids != DEAD_PROMPT,
    ),
    "KL in zero-variance groups": ({"beta": 0.1}, lambda s: True),
    "entropy bonus": ({"entropy_coef": 0.05}, lambda s: True),
}
DEAD_PROMPT = tuple(TOKENIZER("dead")["input_ids"])


@pytest.mark.parametrize("name", COMPUTED)
def test_samples_without_gradient_are_skipped_and_change_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, is_computed = COMPUTED[name]
    computed: list[int] = []
    logprobs = LogprobModel.logprobs

    def counting(self, module, batch, **keywords):
        computed.append(len(batch.lengths) if torch.is_grad_enabled() else 0)
        return logprobs(self, module, batch, **keywords)

    monkeypatch.setattr(LogprobModel, "logprobs", counting)
    skipping = run(tmp_path / "skipping", **OFF_POLICY, **options)
    assert sum(computed) == sum(is_computed(sample) for step in skipping for sample in step.samples)
    computed.clear()
    monkeypatch.setattr(ForwardBackward, "_has_gradient", lambda self, sample: True)
    computing = run(tmp_path / "computing", **OFF_POLICY, **options)
    assert sum(computed) == 2 * 16

    assert_same_steps(skipping, computing, 1e-5)
    for metric in ("clip_ratio/region_mean", "clip_ratio/low_mean", "effective_tokens"):
        if metric in computing[1].metrics:
            assert skipping[1].metrics[metric] == pytest.approx(computing[1].metrics[metric], rel=1e-5)


class OnlyDeadGroupsAt(TrainerCallback):
    """Every reward is 0.5 in the given steps, counted from 1."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.now = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now = state.global_step + 1 in self.steps

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.5 if self.now else sum(ids) % 7 / 3 for ids in completion_ids]


def test_a_step_without_any_signal_has_zero_gradients_and_adamw_acts_as_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are zero, not missing: momentum and weight decay act as if every sample had been computed."""
    start = weights(tiny_model())

    def train(name: str) -> tuple[list[Step], list[dict[str, torch.Tensor]]]:
        dead, history = OnlyDeadGroupsAt({2}), History()
        trainer = make_trainer(
            tmp_path / name, reward_funcs=dead.reward, callbacks=[dead, history], max_steps=3, optim="adamw_torch",
            learning_rate=1e-2, weight_decay=0.1,
        )  # fmt: skip
        spy = Spy(trainer)
        trainer.train()
        return spy.steps, history.weights

    steps, after = train("skipping")
    assert all(gradient is not None and not gradient.any() for gradient in steps[1].gradients.values())
    assert steps[1].loss == 0.0
    assert any(not torch.equal(after[1][name], after[0][name]) for name in after[0]), "momentum and decay still act"

    monkeypatch.setattr(ForwardBackward, "_has_gradient", lambda self, sample: True)
    _, naive = train("computing")
    moved, moved_naively = ({name: tensor - start[name] for name, tensor in of[2].items()} for of in (after, naive))
    # AdamW divides by the size of the gradient, which amplifies the rounding of the smallest ones.
    assert distance(moved, moved_naively) < 1e-5


# ---- before the first update -----------------------------------------------------------------------------------------


class OtherCut(Spy):
    """Computes the fixed log-probs in micro-batches of one size, and updates in micro-batches of another."""

    def __init__(self, trainer: GRPOTrainer, *, fixed: int, updating: int) -> None:
        super().__init__(trainer)
        self.fixed, self.updating = fixed, updating

    def add_fixed_logprobs(self, *arguments: Any, **keywords: Any) -> list[TrainingSample]:
        self.update.micro_batch_size = self.fixed
        return self.update.add_fixed_logprobs(*arguments, **keywords)

    def __call__(self, model: torch.nn.Module, samples: list[TrainingSample], *, entropy_coef: float = 0.0) -> Any:
        self.update.micro_batch_size = self.updating
        return super().__call__(model, samples, entropy_coef=entropy_coef)


@pytest.mark.parametrize(
    "window",
    [{"num_iterations": 2}, {"per_device_train_batch_size": 8, "steps_per_generation": 2}],
    ids=["num_iterations", "steps_per_generation"],
)
def test_the_ratio_is_1_on_a_stored_window(
    tmp_path: Path, window: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old log-probs are stored numbers here; exp(x - x.detach()) would be 1 whatever they were."""
    seen: list[LossInputs] = []
    loss_function = GRPOLoss.__call__

    def recording(self, inputs, totals, **keywords):
        seen.append(inputs)
        return loss_function(self, inputs, totals, **keywords)

    trainer = make_trainer(tmp_path, script=None, temperature=0.7, **window)
    OtherCut(trainer, fixed=16, updating=3)
    monkeypatch.setattr(GRPOLoss, "__call__", recording)
    trainer.train()
    compared = 0
    for inputs in seen:
        if inputs.policy_logprobs.requires_grad:
            assert inputs.old_logprobs is not None
            ratio = (inputs.policy_logprobs.detach() - inputs.old_logprobs).exp()
            assert (ratio - 1).abs().max() < 1e-6
            compared += int(inputs.mask.sum())
    assert compared > 20


def test_kl_is_0_again_when_the_reference_has_become_the_policy(tmp_path: Path) -> None:
    """With `ref_model_mixup_alpha=1`, each synchronisation, here every two steps, makes them equal."""
    steps = run(
        tmp_path, beta=0.5, sync_ref_model=True, ref_model_mixup_alpha=1.0, ref_model_sync_steps=2, max_steps=4,
        learning_rate=0.1,
    )  # fmt: skip
    kl = [step.metrics["kl"] for step in steps]
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and kl[2] == pytest.approx(0.0, abs=1e-9)
    assert kl[1] > 1e-7 and kl[3] > 1e-7


# ---- gradients that are not finite -----------------------------------------------------------------------------------


class History(TrainerCallback):
    """Weights and optimizer state after every step, and what was logged."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.optimizer: list[dict[str, Any]] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        self.weights.append(weights(model))
        self.optimizer.append(copy.deepcopy(optimizer.state_dict()["state"]))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))


class Poison(TrainerCallback):
    """Multiplies one parameter's gradient by NaN or infinity in the given steps, counted from 1."""

    def __init__(self, model: torch.nn.Module, steps: set[int], value: float = math.nan) -> None:
        self.steps = steps
        self.now = False
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * value if self.now else g)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now = state.global_step + 1 in self.steps


ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize(("max_grad_norm", "value"), [(0.0, math.nan), (1.0, math.inf)])
def test_non_finite_gradients_change_neither_weights_nor_optimizer(
    tmp_path: Path, max_grad_norm: float, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, history = tiny_model(), History()
    trainer = make_trainer(
        tmp_path,
        model=model,
        callbacks=[Poison(model, {3, 4}, value), history],
        max_steps=5,
        max_grad_norm=max_grad_norm,
        **ADAMW,
    )
    trainer.train()
    for step in (3, 4):
        assert_equal(history.weights[step - 1], history.weights[1])
        assert_equal(history.optimizer[step - 1], history.optimizer[1])
    for step in (2, 5):
        assert not torch.equal(history.weights[step - 1]["lm_head.weight"], history.weights[step - 2]["lm_head.weight"])
    assert [log["nonfinite_step_share"] for log in history.logs] == [0, 0, 1, 1, 0]
    assert caplog.text.count("they are dropped") == 2
    assert all(torch.isfinite(tensor).all() for tensor in history.weights[-1].values())


def test_the_run_stops_after_max_nonfinite_steps_in_a_row(tmp_path: Path) -> None:
    model, history = tiny_model(), History()
    trainer = make_trainer(
        tmp_path,
        model=model,
        callbacks=[Poison(model, {2, 4, 5}), history],
        max_steps=9,
        max_nonfinite_steps=2,
        **ADAMW,
    )
    with pytest.raises(TrainingError, match=r"2 optimizer steps in a row .* \(max_nonfinite_steps=2\)"):
        trainer.train()
    assert trainer.state.global_step == 4, "step 5 was not taken; steps 2 and 4 are not consecutive"
    assert_equal(weights(trainer.model), history.weights[2])


def test_an_advantage_beyond_float32_stops_the_run(tmp_path: Path) -> None:
    """1e200 is a finite reward, but with scale_rewards='none' its advantage is finite in float64 only."""
    trainer = make_trainer(
        tmp_path, reward_funcs=lambda completion_ids, **_: [1e200 * len(ids) for ids in completion_ids],
        scale_rewards="none", max_steps=9, **ADAMW,
    )  # fmt: skip
    start = weights(trainer.model)
    with pytest.raises(TrainingError, match="3 optimizer steps in a row"):
        trainer.train()
    assert_equal(weights(trainer.model), start)


def assert_equal(left: Any, right: Any) -> None:
    """Bit for bit, through dicts, with NaN equal to nothing."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


# ---- windows ---------------------------------------------------------------------------------------------------------

# batch, accumulation, steps_per_generation, num_iterations -> completions of each optimizer step, numbered over all
# prompts in order, two per prompt; an epoch has eight prompts.
WINDOWS = {
    "one rollout a step": ((2, 2, None, 1), ["0-3", "4-7", "8-11", "12-15", "0-3"]),
    "one rollout, four steps": ((2, 1, 4, 1), ["0-1", "2-3", "4-5", "6-7", "8-9"]),
    "one step, two rollouts": ((2, 4, 2, 1), ["0-7", "8-15", "0-7"]),
    "two passes": ((2, 2, 2, 2), ["0-3", "0-3", "4-7", "4-7", "8-11"]),
    "three passes over two steps": ((2, 1, 2, 3), ["0-1", "2-3", "0-1", "2-3", "0-1", "2-3", "4-5"]),
    "half a group a step": ((1, 1, 4, 1), ["0-0", "1-1", "2-2", "3-3", "4-4"]),
    "both passes in one step": ((2, 4, 2, 2), ["0-3 0-3", "4-7 4-7", "8-11 8-11"]),
    "a step across the end of a pass": ((2, 2, 3, 2), ["0-3", "4-5 0-1", "2-5", "6-9", "10-11 6-7"]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_which_completions_an_optimizer_step_uses(tmp_path: Path, name: str) -> None:
    (batch, accumulation, window, passes), expected = WINDOWS[name]
    rollouts: list[list[list[int]]] = []

    def recording(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rollouts.append(completion_ids)
        return [float(ids[1]) for ids in completion_ids]

    trainer = make_trainer(
        tmp_path, dataset=[{"prompt": letter} for letter in "abcdefgh"], reward_funcs=recording,
        script=lambda prompt, place: [10 + prompt.row, 50 + place], num_generations=2, max_steps=len(expected),
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, steps_per_generation=window,
        num_iterations=passes,
    )  # fmt: skip
    spy = Spy(trainer)
    trainer.train()
    used = [[(ids[0] - 10) * 2 + ids[1] - 50 for ids in (s.completion_ids for s in step.samples)] for step in spy.steps]
    assert used == [
        [number for part in text.split() for number in range(int(part.split("-")[0]), int(part.split("-")[1]) + 1)]
        for text in expected
    ]

    plan = trainer.plan
    assert all(len(step.samples) == plan.completions_per_step for step in spy.steps)
    assert all(len(rollout) == plan.completions_per_rollout for rollout in rollouts)
    assert len(rollouts) == -(-len(expected) // plan.steps_per_rollout) * plan.rollouts_per_step
    has_old = {sample.old_logprobs is not None for step in spy.steps for sample in step.samples}
    assert has_old == {plan.steps_per_rollout > 1}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("rollout", "rollouts", "passes", "step"), [(24, 1, 1, 24), (24, 1, 2, 16), (8, 3, 1, 24), (8, 1, 4, 16)]
)
def test_ranks_share_out_every_step_and_keep_their_rows(
    world_size: int, rollout: int, rollouts: int, passes: int, step: int
) -> None:
    from grupo.rollout.schedule import schedule_completions

    window = rollout * rollouts
    dealt = [
        schedule_completions(
            window_size=window, rollout_size=rollout, passes=passes, step_size=step, world_size=world_size, rank=rank
        )
        for rank in range(world_size)
    ]
    sequence = list(range(window)) * passes
    for index in range(len(sequence) // step):
        shares = [of_rank[index] for of_rank in dealt]
        assert {len(share) for share in shares} == {step // world_size}
        assert sorted(n for share in shares for n in share) == sorted(sequence[index * step : (index + 1) * step])
    owned = [{n for share in of_rank for n in share} for of_rank in dealt]
    assert sum(map(len, owned)) == window, "each completion is sampled and scored by one rank only"


@pytest.mark.parametrize("scripted", [True, False])
def test_evaluation_does_not_depend_on_how_many_completions_are_sampled_at_once(tmp_path: Path, scripted: bool) -> None:
    """Chunks of 3 split groups of 4."""

    def completions(**settings: Any) -> tuple[list[list[int]], float]:
        seen: list[list[int]] = []

        def recording(completion_ids: list[list[int]], **_: Any) -> list[float]:
            seen.extend(completion_ids)
            return [float(sum(ids) % 5) for ids in completion_ids]

        trainer = make_trainer(
            tmp_path,
            reward_funcs=recording,
            **({} if scripted else {"script": None}),
            num_generations_eval=4,
            **settings,
        )
        return seen, trainer.evaluate(PROMPTS)["eval_reward"]

    together, in_chunks = completions(), completions(per_device_eval_batch_size=3)
    assert in_chunks == together
    assert len({tuple(ids) for ids in together[0]}) > 8


def test_epochs_are_permutations_and_the_rest_is_dropped(tmp_path: Path) -> None:
    """7 prompts, 2 per step: 3 steps per epoch, one prompt left out, another order in the next epoch."""
    drawn: list[str] = []

    def recording(prompts: list[str], **_: Any) -> list[float]:
        drawn.extend(prompts[::2])
        return [0.0, 1.0] * (len(prompts) // 2)

    trainer = make_trainer(
        tmp_path, dataset=[{"prompt": letter} for letter in "abcdefg"], reward_funcs=recording, num_generations=2,
        per_device_train_batch_size=4, max_steps=-1, num_train_epochs=2, shuffle_dataset=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.plan.dropped_prompts_per_epoch == 1
    first, second = drawn[:6], drawn[6:]
    assert len(set(first)) == len(set(second)) == 6 and first != second
    stream = trainer.window.stream
    assert isinstance(stream, PromptStream)
    assert [prompt.content for window in range(6) for prompt in stream.window(window)] == drawn


# ---- two runs -------------------------------------------------------------------------------------------------------


def real_run(folder: Path, *, seed: int = 42, **settings: Any) -> GRPOTrainer:
    """The model itself samples; 8 prompts, 2 per step with G = 4."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "shuffle_dataset": True,
        "lr_scheduler_type": "linear", "learning_rate": 2e-2, "weight_decay": 0.1, "optim": "adamw_torch",
    }  # fmt: skip
    trainer = make_trainer(
        folder, script=None, dataset=[{"prompt": text, "dead": text == "c"} for text in "abcdefgh"], seed=seed,
        **{**defaults, **settings},
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("time/", "step_time", "tokens_per_second", "train_runtime", "train_samples_per", "train_steps_per")
    return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in lines]


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_two_runs_with_one_seed_are_identical(tmp_path: Path, peft: bool) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2) if peft else None
    runs = [real_run(tmp_path / name, seed=seed, peft_config=config) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    same, again, other = (weights(trainer.model) for trainer in runs)
    assert_equal(same, again)
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    completions = [(tmp_path / name / "completions.jsonl").read_text() for name in "abc"]
    assert completions[0] == completions[1]
    assert any(not torch.equal(same[name], other[name]) for name in same)
    assert completions[0] != completions[2] and logged(tmp_path / "a") != logged(tmp_path / "c")
