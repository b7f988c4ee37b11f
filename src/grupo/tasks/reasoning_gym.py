"""Any task of reasoning-gym by its name, as prompts with the entry that its scorer needs."""

from __future__ import annotations

from typing import Any

from grupo.data.decontamination import normalised
from grupo.errors import ConfigError
from grupo.rewards.verifiers.puzzles import import_reasoning_gym
from grupo.utils.messages import did_you_mean

PREFIX = "reasoning-gym:"
DRAWS_PER_ITEM = 20
"""After so many draws for each item that is wanted, a task is taken to have no more different ones."""


def gym_rows(name: str, seed: int, count: int, level: int | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` rows of a task, no question twice, with `answer` and `entry`.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such task, refuses a setting, or has too few items.
    """
    import_reasoning_gym()
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}.{did_you_mean(name, DATASETS)} It has {len(DATASETS)} tasks."
        )
    size = {"seed": seed, "size": DRAWS_PER_ITEM * count}
    dataset_class, config_class = DATASETS[name]
    try:
        if level is None:
            config = config_class(**settings, **size)
        elif name in CURRICULA:
            curriculum = CURRICULA[name]()
            curriculum.set_global_level(level - 1)
            config = curriculum.generate_configuration({**settings, **size})
        else:
            raise ConfigError(f"level={level}: the task {name!r} of reasoning-gym has no levels. Leave level out.")
        config.validate()
        dataset = dataset_class(config=config)
    except (TypeError, ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"reasoning-gym refuses the settings of {name!r}: {error}") from error
    rows: dict[str, dict[str, Any]] = {}
    for index in range(size["size"]):
        entry = dataset[index]
        entry["metadata"].setdefault("source_dataset", name)
        rows.setdefault(
            normalised(entry["question"]),
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "answer": entry["answer"],
                "entry": entry,
                **({} if level is None else {"level": level}),
            },
        )
        if len(rows) == count:
            return list(rows.values())
    raise ConfigError(
        f"The task {name!r} of reasoning-gym gave {len(rows)} different questions in {size['size']} draws; train and "
        f"held_out ask for {count}. Set them lower, or choose settings with more different items."
    )
