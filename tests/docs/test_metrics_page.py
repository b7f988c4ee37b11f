"""docs/metrics.md: every metric that is logged is explained, and every one that is explained is logged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grupo.metrics import STEP_METRICS
from harness import ROWS, make_trainer, train

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
FROM_ROLLOUTS = ("Rewards", "Completions")
FROM_STEPS = ("Policy and loss", "Signal", "Work and time")


def sections():
    """Heading -> the cells of each row of its table."""
    found, heading = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def names_in(*headings):
    return {re.fullmatch(r"`([^`]+)`", row[0]).group(1) for heading in headings for row in sections()[heading]}


def varied(completions, **columns):
    """Not finite for one completion, nothing for another."""
    return [float((7 * index) % 5) for index in range(len(completions))]


RUNS = {
    "defaults": {},
    "kl": {"beta": 0.1, "num_iterations": 2, "max_steps": 2},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 9.0, "max_steps": 2},
    "top entropy": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 1.0},
    "sequence ratios": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "dynamic sampling": {"dynamic_sampling": True},
    "curriculum": {"curriculum_column": "level", "shuffle_dataset": True, "per_device_train_batch_size": 4},
    "truncated masked": {"mask_truncated_completions": True, "max_completion_length": 2},
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "gspo")},
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Names of all training, evaluation and final lines of runs with one option each."""
    training, evaluation, final = set(), set(), set()
    for settings in RUNS.values():
        sets = {"eval_rows": ROWS} if "beta" in settings else {}
        rows = [{**row, "level": index} for index, row in enumerate(ROWS)]
        trainer = make_trainer(tmp_path_factory.mktemp("run"), varied, rows, **sets, **settings)
        # Some completions end by themselves, or there would be no terminated length.
        trainer.engine.stop_token_ids = tuple(range(60))
        train(trainer)
        if sets:
            trainer.evaluate()
        for line in trainer.state.log_history:
            names = {name.replace("rewards/varied/", "rewards/{name}/") for name in line}
            kind = training if "loss" in line else final if "train_loss" in line else evaluation
            kind.update(names)
    return training, evaluation, final


def test_training_lines(logged):
    training, _, _ = logged
    assert training == names_in(*FROM_ROLLOUTS, *FROM_STEPS)


def test_names_that_reward_functions_cannot_take(logged):
    assert names_in(*FROM_STEPS) == STEP_METRICS


def test_evaluation_lines(logged):
    _, evaluation, _ = logged
    counters = {"epoch", "step", "num_tokens"}
    assert evaluation == {f"eval_{name}" for name in names_in(*FROM_ROLLOUTS)} | names_in("Evaluation") | counters


def test_the_final_line(logged):
    _, _, final = logged
    assert final == names_in("End of a run") | {"epoch", "step", "num_tokens"}


@pytest.mark.parametrize("heading", [*FROM_ROLLOUTS, *FROM_STEPS, "Evaluation", "End of a run"])
def test_two_sentences_each(heading):
    """What it means, and when to worry."""
    for name, meaning, worry in sections()[heading]:
        for sentence in (meaning, worry):
            assert sentence.endswith(".") and len(sentence) > 10, f"{name}: {sentence!r}"
            assert not re.search(r"\. [A-Z]", sentence), f"{name}: more than one sentence: {sentence!r}"


def test_every_setting_on_the_page_exists():
    import dataclasses

    from grupo import GRPOConfig

    words = set(re.findall(r"`([a-z_]+)(?:=[^`]*)?`", PAGE.read_text(encoding="utf-8")))
    settings = {field.name for field in dataclasses.fields(GRPOConfig)}
    metrics = {name for heading in sections() for name in names_in(heading)}
    unknown = words - settings - metrics - {"eval_", "log_metric", "eval_reward", "eval_loss", "eval_dataset"}
    assert not unknown
