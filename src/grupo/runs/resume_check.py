"""Which settings may differ between a checkpoint and the run that resumes from it.

Settings are compared by name. `IGNORED` ones do not affect the training. `OVERRIDABLE` ones make it a different run
from the checkpoint on, so they must be accepted by name. `LOCKED` ones determine the contents of a checkpoint (order
of the prompts, open rollout window, optimizer state) and cannot change; neither can fields in none of the three sets.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grupo.errors import ConfigError
from grupo.utils.messages import did_you_mean

logger = logging.getLogger("grupo")

IGNORED = frozenset(
    {
        # Logs, evaluations, checkpoints, uploads.
        *("output_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "log_level"),
        *("log_level_replica", "logging_nan_inf_filter", "disable_tqdm", "report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "log_completions"),
        *("num_completions_to_print", "log_unique_prompts", "skip_memory_metrics", "debug"),
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("num_generations_eval", "save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("save_on_each_node", "enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model"),
        *("greater_is_better", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
        *("hub_always_push", "hub_revision", "resume_from_checkpoint", "restore_callback_states_from_checkpoint"),
        *("do_train", "do_eval", "do_predict"),
        # When a run stops early.
        *("max_failed_reward_share", "reward_timeout", "max_nonfinite_steps", "logprob_gap_warn", "logprob_gap_stop"),
        # The machine. How a step is split to fit into memory changes the last digits at most.
        *("use_cpu", "local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "ddp_backend", "ddp_timeout", "accelerator_config", "full_determinism"),
        *("micro_batch_tokens", "offload_activations", "activation_checkpointing", "gradient_checkpointing"),
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "pad_to_multiple_of"),
        # Covered by other entries: "dataset", "model", "steps" and the resolved batch sizes.
        *("max_prompt_length", "overlong_prompts", "chat_template_kwargs", "model_init_kwargs", "trust_remote_code"),
        *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("generation_batch_size", "steps_per_generation", "data_seed", "reward_weights", "generation_kwargs"),
    }
)
"""Configuration fields that are not compared."""

METRIC_DRIVEN = frozenset(
    {
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "num_generations_eval"),
        *("metric_for_best_model", "greater_is_better"),
    }
)
"""Fields of `IGNORED` that are compared if the learning rate schedule depends on evaluation results."""

OVERRIDABLE = frozenset(
    {
        *METRIC_DRIVEN,
        *("steps", "rewards", "reward_weights"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
        *("max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
        *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "scale_rewards"),
        *("multi_objective_aggregation", "mask_truncated_completions", "kl_on_dead_groups"),
        *("use_bias_correction_kl", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef"),
        *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
        *("vespo_lambda_neg", "logprob_dropout", "disable_dropout", "cast_lm_head_to_fp32", "bf16", "fp16", "tf32"),
        *("ref_model_mixup_alpha", "ref_model_sync_steps", "num_generations_trained", "dynamic_sampling_max_rounds"),
        *("curriculum_threshold", "curriculum_window", "curriculum_success_reward"),
    }
)
"""Settings that may change if `accept_changes` names them."""

LOCKED = frozenset(
    {
        # Which prompts are sampled, and how many completions of each.
        *("seed", "shuffle_dataset", "num_generations", "num_iterations", "curriculum_column", "dynamic_sampling"),
        # The open rollout window was sampled with them, and its log-probs are computed with them.
        *("temperature", "chat_template", "beta", "reference_policy", "sync_ref_model", "use_adaptive_entropy"),
        # Their embeddings are among the weights.
        "added_tokens",
        # The values in the checkpoint would override them.
        *("learning_rate", "weight_decay", "optim", "optim_args", "optim_target_modules"),
        *("adam_beta1", "adam_beta2", "adam_epsilon"),
    }
)
"""Fields that cannot change during a run."""


def parse_accepted_changes(accepted: Any) -> list[str]:
    """Names of settings, from a list or from text with commas (as on the command line).

    Raises:
        ConfigError: `accepted` is neither.
    """
    if isinstance(accepted, str):
        return [name.strip() for name in accepted.split(",") if name.strip()]
    names: list[Any] = list(accepted) if isinstance(accepted, Iterable) else [None]
    if all(isinstance(name, str) for name in names):
        return names
    raise ConfigError(
        f"accept_changes={accepted!r} must be a list of setting names, such as accept_changes=['steps', 'rewards']."
    )


def check_resume_compatible(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], accepted: str | Sequence[str]
) -> None:
    """Compares the settings of a checkpoint with those of the run that resumes from it.

    Raises:
        ConfigError: a setting changed that `accepted` does not name, or `accepted` names one that cannot change.
    """
    accepted = parse_accepted_changes(accepted)
    if ignored := [name for name in accepted if name in IGNORED - OVERRIDABLE]:
        raise ConfigError(f"accept_changes names {_listed(ignored)}, which may always change: remove it from the list.")
    unknown = [name for name in accepted if name not in OVERRIDABLE]
    if unknown:
        raise ConfigError(
            f"accept_changes names {', '.join(map(repr, unknown))}, which cannot change during a run."
            f"{did_you_mean(unknown[0], OVERRIDABLE)} These can: {', '.join(sorted(OVERRIDABLE))}."
        )
    now = json.loads(json.dumps(now))
    changed = {name: f"{name} was {_shorten(saved[name])} and is {_shorten(now[name])}"
               for name in now if name in saved and saved[name] != now[name]}  # fmt: skip
    refused = [name for name in changed if name not in accepted]
    if not refused:
        if changed:
            logger.warning("Continuing with changed settings, as accepted: %s.", "; ".join(changed.values()))
        return
    locked = [name for name in refused if name not in OVERRIDABLE]
    if locked:
        remedy = (
            f"Set {_listed(locked)} back to resume it. To train with the new values, start a new run from the saved "
            "model."
        )
    else:
        remedy = (
            f"Set {_listed(refused)} back to reproduce the interrupted run. To continue with the new values, accept "
            f"them: --accept-changes {','.join(refused)}, or trainer.train(..., accept_changes={refused!r})."
        )
    raise ConfigError(
        f"The checkpoint {folder} belongs to a run with other settings: "
        f"{'; '.join(changed[name] for name in refused)}. {remedy}"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shorten(value: Any) -> str:
    return textwrap.shorten(str(value), 80, placeholder=" ...")
