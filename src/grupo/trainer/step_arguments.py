"""The arguments of the base class, made from the configuration of a run."""

from __future__ import annotations

import logging
from typing import Any

from grupo.config import GRPOConfig
from grupo.models.load_options import LoadOptions

logger = logging.getLogger("grupo")


class StepArguments(GRPOConfig):
    """A run's configuration as the base class has to see it; reporters, files and pickles get the user's values."""

    # Without a default, and the class is not a dataclass of its own: this is not a field.
    values_of_the_user: dict[str, Any]
    completions_per_process: int

    @classmethod
    def of(cls, config: GRPOConfig, completions_per_step: int) -> StepArguments:
        """A copy for which accumulation is 1 and checkpoints are kept: grupo accumulates, and rotates them itself.

        `dataclasses.replace` would run `__post_init__` again and reset accelerate.
        """
        args = cls.__new__(cls)
        changes = {"gradient_accumulation_steps": 1, "save_total_limit": None}
        args.values_of_the_user = {name: getattr(config, name) for name in changes}
        args.__dict__.update({**vars(config), **changes})
        args.completions_per_process = completions_per_step // config.world_size
        args.enable_jit_checkpoint = False  # every SIGTERM saves a checkpoint
        return args

    @property
    def train_batch_size(self) -> int:
        """Completions of this process per optimizer step; the base class counts samples per second from it."""
        return self.completions_per_process

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **self.values_of_the_user}

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles as the user's GRPOConfig: that is what `training_args.bin` holds."""
        config = GRPOConfig.__new__(GRPOConfig)
        state = {name: value for name, value in vars(self).items() if name not in StepArguments.__annotations__}
        config.__dict__.update({**state, **self.values_of_the_user})
        return config.__reduce_ex__(1)  # the form that names the class apart from the object


def step_arguments(config: GRPOConfig, options: LoadOptions, completions_per_step: int) -> StepArguments:
    """The arguments of the base class, with checkpointing as the model was loaded for it where `config` leaves it
    open."""
    args = StepArguments.of(config, completions_per_step)
    if options.checkpointing is None:
        return args
    names = {f"{kind}_checkpointing{end}" for kind in ("gradient", "activation") for end in ("", "_kwargs")}
    if names & args.explicit_fields:
        if bool(args.gradient_checkpointing) != options.checkpointing:
            logger.warning(
                "gradient_checkpointing=%r in GRPOConfig overrides the model's use_gradient_checkpointing.",
                args.gradient_checkpointing,
            )
        return args
    args.gradient_checkpointing = args.activation_checkpointing = bool(options.checkpointing)
    # On the CPU they are in host memory already.
    if options.offload and args.device.type != "cpu":
        args.offload_activations = True
    return args
