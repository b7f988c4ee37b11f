"""The held-out evaluations of `grupo train`, before and after training, with the same random numbers."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass
from typing import Any

from grupo.data.prompts import Rows, rows_hash
from grupo.evals.held_out import HeldOutResult, evaluate_held_out
from grupo.recipes.schema import Recipe
from grupo.sampling import SamplingSpec
from grupo.trainer import GRPOTrainer

logger = logging.getLogger("grupo")


@dataclass
class HeldOutResults:
    """The results before and after training; None if there was no evaluation."""

    before: HeldOutResult | None = None
    after: HeldOutResult | None = None

    @property
    def is_accuracy(self) -> bool:
        """True if every result is one: a weighted reward that is 0 for all answers looks like one at the start."""
        return all(result.is_accuracy for result in (self.before, self.after) if result is not None)

    @property
    def quantity(self) -> str:
        return "accuracy" if self.is_accuracy else "mean reward"


def make_evaluation(recipe: Recipe, trainer: GRPOTrainer, rows: Rows) -> Evaluation | None:
    """None if the recipe switches the evaluation off or nothing is held out."""
    if not recipe.eval.enabled:
        return None
    if not len(rows):
        logger.warning("No rows are held out, so there is no evaluation. Set dataset.held_out to a number of rows.")
        return None
    return Evaluation(recipe, trainer, rows)


class Evaluation:
    """Samples answers to the held-out prompts of a recipe and writes them to the run folder."""

    def __init__(self, recipe: Recipe, trainer: GRPOTrainer, rows: Rows) -> None:
        self.trainer, self.config = trainer, trainer.config
        self.samples_per_prompt = recipe.eval.samples_per_prompt
        self.prompts = trainer.tokenized_rows(rows, "held-out")
        if recipe.eval.max_prompts is not None and recipe.eval.max_prompts < len(self.prompts):
            # Not the first ones: rows are often sorted by difficulty.
            chooser = random.Random(f"held-out prompts, seed {self.config.seed}")
            self.prompts = chooser.sample(self.prompts, recipe.eval.max_prompts)
        self.sampling = SamplingSpec(
            temperature=recipe.eval.temperature, max_new_tokens=self.config.sampling_spec().max_new_tokens
        )

    def run(self, when: str) -> HeldOutResult:
        """Samples and scores answers, and writes `eval_{when}.json`."""
        result = evaluate_held_out(
            self.trainer.collector,
            self.prompts,
            samples_per_prompt=self.samples_per_prompt,
            sampling=self.sampling,
            weights=self.config.reward_weights,
            completions_at_once=self.trainer.eval_completions_at_once(),
            world_size=self.config.world_size,
            rank=self.config.process_index,
        )
        self.trainer.run_folder.write_json(
            f"eval_{when}.json",
            {**result.as_dict(result.is_accuracy), "settings": self.settings(), "groups": result.groups},
        )
        return result

    def load_baseline(self) -> HeldOutResult | None:
        """The evaluation before training of the resumed run; None if it is missing or had other settings.

        Seed and model are those of the checkpoint, and need no comparison.
        """
        found = self.trainer.run_folder.read_json("eval_before.json")
        (found, *_) = self.trainer.collector.all_gather(found)  # rank 0 has written it
        if not found:
            return None
        saved, now = found.get("settings", {}), json.loads(json.dumps(self.settings()))
        changed = [name for name in now if saved.get(name) != now[name]]
        if changed:
            logger.warning(
                "The evaluation before training was made with other settings (%s), so it is repeated with the model "
                "that the run started from.",
                ", ".join(changed),
            )
            return None
        return HeldOutResult(tuple(found["groups"]))

    def settings(self) -> dict[str, Any]:
        """Everything that affects the result, except the model and the seed."""
        return {
            "prompts": rows_hash(self.prompts),
            "samples_per_prompt": self.samples_per_prompt,
            "temperature": self.sampling.temperature,
            "max_completion_length": self.sampling.max_new_tokens,
            "rewards": self.trainer.rewards.fingerprints,
            "reward_weights": self.config.reward_weights,
        }
