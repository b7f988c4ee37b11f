"""How every field of GRPOConfig is supported: the table for validation, docs/config.md and the tests.

python -m grupo.config.field_support docs/config.md     writes the tables into the page
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grupo.algo.registry import LOSSES
from grupo.errors import ConfigError, UnsupportedError

TABLE_START = "<!-- fields: written by python -m grupo.config.field_support -->"
TABLE_END = "<!-- end of fields -->"


class FieldSupport(Enum):
    """Support of a field in this version."""

    HONOURED = "honoured"
    """The field has the effect that it has in TRL or transformers, or the one in the phrase."""
    REFUSED = "refused"
    """Values other than the default raise UnsupportedError: this version has no implementation."""
    NO_EFFECT = "no effect"
    """Values other than the default raise ConfigError: nothing would read them."""


@dataclass(frozen=True)
class FieldEntry:
    support: FieldSupport
    phrase: str
    """Short description; the reason and an alternative where the field is not honoured, as in the error message."""


def _honoured(phrase: str) -> FieldEntry:
    return FieldEntry(FieldSupport.HONOURED, phrase)


def _refused(phrase: str) -> FieldEntry:
    return FieldEntry(FieldSupport.REFUSED, phrase)


def _no_effect(phrase: str) -> FieldEntry:
    return FieldEntry(FieldSupport.NO_EFFECT, phrase)


_AS_IN_TRANSFORMERS = _honoured("as in transformers")
_VLLM = _no_effect("read only with use_vllm, and vLLM is not supported in this version")
_STEP_INDICES = _no_effect("the training loader yields step indices; prompts come from the prompt stream")
_LABELS = _no_effect("there are no labels and no compute_metrics; evaluation uses the reward functions")
_COMPILE = _refused("compiled models are not supported in this version: a hook reads hidden states in the forward pass")
_LIGER = _refused("Liger kernels are not supported in this version; log-probs never need the full logits here anyway")
_SHARDED = _refused("FSDP is not supported in this version; use DDP for several processes (accelerate launch)")
_CONTINUOUS = _refused("continuous batching is not supported in this version; the in-process engine samples")
_FULL_EVAL = _no_effect("evaluation uses the weights and the precision of training")
_CHECKPOINTING = "one setting with two names; on by default"

GRUPO_FIELDS: dict[str, FieldEntry] = {
    "chat_template": _honoured("name of a built-in template, or a Jinja template; saved with the tokenizer"),
    "added_tokens": _honoured("strings to add as one token each, with trained embeddings; see adapters.md"),
    "max_prompt_length": _honoured(
        "maximum prompt length in tokens; None: only the context length limits prompt plus completion"
    ),
    "overlong_prompts": _honoured("filter, refuse or truncate_left prompts longer than max_prompt_length"),
    "max_failed_reward_share": _honoured("share of a rollout with failed rewards above which the run stops"),
    "reward_timeout": _honoured("time limit of a reward function in seconds; None: no limit"),
    "max_nonfinite_steps": _honoured("consecutive steps with non-finite gradients after which the run stops"),
    "micro_batch_tokens": _honoured("maximum tokens per forward and backward pass; None: from the free memory"),
    "offload_activations": _honoured("keeps activations in host memory until the backward pass"),
    "logprob_dropout": _honoured("dropout when log-probs are computed with gradient; off by default"),
    "kl_on_dead_groups": _honoured("keeps the KL term of zero-variance groups; on as in TRL"),
    "reference_policy": _honoured("start: the policy at the start of training; base: the base model without adapter"),
    "logprob_gap_warn": _honoured("mean difference of sampler and trainer log-probs in nats that logs a warning"),
    "logprob_gap_stop": _honoured(
        "the same difference in nats, which stops the run after three consecutive rollouts above it"
    ),
    "dynamic_sampling": _honoured("replaces zero-variance groups with groups of new prompts; see signal.md"),
    "dynamic_sampling_max_rounds": _honoured("maximum additional rounds per rollout; needs dynamic_sampling"),
    "num_generations_trained": _honoured("completions per prompt to train on, those with the largest reward variance"),
    "curriculum_column": _honoured("dataset column with the difficulty of each prompt, easy first; see signal.md"),
    "curriculum_threshold": _honoured("success rate that unlocks the next level; needs curriculum_column"),
    "curriculum_window": _honoured("number of prompts for the success rate; needs curriculum_column"),
    "curriculum_success_reward": _honoured("minimum total reward of a success; needs curriculum_column"),
}
"""Fields of grupo that neither TRL nor transformers has."""

TRL_FIELDS: dict[str, FieldEntry] = {
    "model_init_kwargs": _honoured("arguments of from_pretrained where the model is given by name"),
    "trust_remote_code": _honoured("for the policy and its tokenizer"),
    "router_aux_loss_coef": _refused(
        "the auxiliary loss of mixture-of-experts models is not supported in this version"
    ),
    "disable_dropout": _honoured("dropout is off by default; True forbids logprob_dropout"),
    "cast_lm_head_to_fp32": _honoured("language model head in float32"),
    "num_generations": _honoured("completions per prompt; at least 2"),
    "num_generations_eval": _honoured("completions per prompt in evaluation, at least 1; None: num_generations"),
    "max_completion_length": _honoured("maximum completion length in tokens; also the denominator of dr_grpo"),
    "ds3_gather_for_generation": _no_effect("read only with DeepSpeed ZeRO-3, which is not supported in this version"),
    "shuffle_dataset": _honoured("new prompt order in every epoch"),
    "pad_to_multiple_of": _honoured("'auto': none, on Neuron 128"),
    "generation_batch_size": _honoured(
        "completions per rollout over all processes; set either this or steps_per_generation"
    ),
    "steps_per_generation": _honoured("micro-batches per rollout; None: gradient_accumulation_steps"),
    "temperature": _honoured("sampling, and log-probs in training; above 0"),
    "top_p": _honoured("sampling only"),
    "top_k": _honoured("sampling only; 0 keeps all tokens"),
    "min_p": _honoured("sampling only"),
    "generation_kwargs": _honoured("additional sampling settings; see Sampling"),
    "chat_template_kwargs": _honoured("variables of the chat template"),
    "repetition_penalty": _honoured("sampling only"),
    "cache_implementation": _refused("the in-process engine has one kind of cache; remove the setting"),
    "use_vllm": _refused("vLLM is not supported in this version; remove the setting to use the in-process engine"),
    "vllm_mode": _VLLM,
    "vllm_model_impl": _VLLM,
    "vllm_enable_sleep_mode": _VLLM,
    "vllm_structured_outputs_regex": _VLLM,
    "vllm_server_base_url": _VLLM,
    "vllm_server_host": _VLLM,
    "vllm_server_port": _VLLM,
    "vllm_server_timeout": _VLLM,
    "vllm_group_port": _VLLM,
    "vllm_gpu_memory_utilization": _VLLM,
    "vllm_max_model_length": _VLLM,
    "vllm_tensor_parallel_size": _VLLM,
    "beta": _honoured("KL coefficient; 0: no reference policy"),
    "num_iterations": _honoured("passes over each rollout"),
    "epsilon": _honoured("lower clip range of the ratio"),
    "delta": _honoured("upper bound of the ratio for negative advantages (two-sided clip)"),
    "epsilon_high": _honoured("upper clip range; None: epsilon. cispo: the bound itself; None: 5.0 (TRL: epsilon)"),
    "sapo_temperature_neg": _honoured("loss_type sapo"),
    "sapo_temperature_pos": _honoured("loss_type sapo"),
    "vespo_k_pos": _honoured("loss_type vespo"),
    "vespo_lambda_pos": _honoured("loss_type vespo"),
    "vespo_k_neg": _honoured("loss_type vespo"),
    "vespo_lambda_neg": _honoured("loss_type vespo"),
    "importance_sampling_level": _honoured(
        "token or sequence; the sequence ratio is the exponential of the mean log ratio"
    ),
    "reward_weights": _honoured("one per reward function; None: 1 each"),
    "multi_objective_aggregation": _honoured("sum_then_normalize or normalize_then_sum"),
    "scale_rewards": _honoured("group, batch or none; True is group, False is none"),
    "loss_type": _honoured("a name in the table of losses: TRL's eight, and gspo"),
    "mask_truncated_completions": _honoured("excludes truncated completions from numerator and denominators"),
    "sync_ref_model": _honoured("the reference follows the policy; needs beta above 0"),
    "ref_model_mixup_alpha": _honoured("weight of the policy at each update; needs sync_ref_model"),
    "ref_model_sync_steps": _honoured("optimizer steps between updates; needs sync_ref_model"),
    "top_entropy_quantile": _honoured("share of tokens with the highest entropy that have a policy term"),
    "entropy_coef": _honoured("coefficient of the entropy bonus, a token mean over the optimizer step"),
    "use_adaptive_entropy": _honoured("adapts entropy_coef to reach entropy_target"),
    "entropy_coef_min": _honoured("needs use_adaptive_entropy"),
    "entropy_coef_max": _honoured("needs use_adaptive_entropy"),
    "entropy_coef_delta": _honoured("needs use_adaptive_entropy"),
    "entropy_target": _honoured("nats; needs use_adaptive_entropy"),
    "max_tool_calling_iterations": _refused("tools are not supported in this version"),
    "vllm_importance_sampling_correction": _VLLM,
    "vllm_importance_sampling_mode": _VLLM,
    "vllm_importance_sampling_clip_max": _VLLM,
    "vllm_importance_sampling_clip_min": _VLLM,
    "off_policy_mask_threshold": _honoured(
        "nats; masks completions with negative advantage that drifted further from the sampler"
    ),
    "use_bias_correction_kl": _honoured("multiplies the KL term by the ratio; needs beta above 0"),
    "log_completions": _honoured("prints completions at each log step"),
    "log_multimodal": _no_effect("images are not supported in this version"),
    "num_completions_to_print": _honoured("needs log_completions"),
    "log_unique_prompts": _honoured("needs log_completions"),
    "log_completions_hub_repo": _refused("this version keeps completions in the run folder and does not upload them"),
    "use_transformers_continuous_batching": _CONTINUOUS,
    "transformers_continuous_batching_config": _CONTINUOUS,
    "use_transformers_paged": _CONTINUOUS,
    "vllm_importance_sampling_cap": _VLLM,
}
"""Fields of TRL 1.16.0's GRPOConfig that transformers does not have."""

TRANSFORMERS_FIELDS: dict[str, FieldEntry] = {
    "output_dir": _honoured("folder of the run"),
    "per_device_train_batch_size": _honoured(
        "completions per device; a forward pass holds at least this many of the longest ones"
    ),
    "num_train_epochs": _AS_IN_TRANSFORMERS,
    "max_steps": _honoured("optimizer steps; -1: by epochs"),
    "learning_rate": _AS_IN_TRANSFORMERS,
    "lr_scheduler_type": _honoured("reduce_lr_on_plateau and greedy need metric_for_best_model"),
    "lr_scheduler_kwargs": _AS_IN_TRANSFORMERS,
    "warmup_steps": _honoured("below 1: share of all steps"),
    "optim": _honoured("8-bit AdamW without bitsandbytes: 32-bit, with a warning; layerwise optimizers: refused"),
    "optim_args": _AS_IN_TRANSFORMERS,
    "weight_decay": _AS_IN_TRANSFORMERS,
    "adam_beta1": _AS_IN_TRANSFORMERS,
    "adam_beta2": _AS_IN_TRANSFORMERS,
    "adam_epsilon": _AS_IN_TRANSFORMERS,
    "optim_target_modules": _AS_IN_TRANSFORMERS,
    "gradient_accumulation_steps": _honoured("forward passes per optimizer step; raised to fill one group"),
    "average_tokens_across_devices": _no_effect("every loss is always normalised over all processes"),
    "max_grad_norm": _AS_IN_TRANSFORMERS,
    "label_smoothing_factor": _no_effect("there are no labels to smooth"),
    "bf16": _honoured("None: on accelerators that support it; see Precision"),
    "fp16": _honoured("refused on the CPU"),
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "tf32": _AS_IN_TRANSFORMERS,
    "activation_checkpointing": _honoured(_CHECKPOINTING),
    "activation_checkpointing_kwargs": _honoured("one setting with two names"),
    "gradient_checkpointing": _honoured(_CHECKPOINTING),
    "gradient_checkpointing_kwargs": _honoured("one setting with two names"),
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": _no_effect("the engine always uses its cache, and log-probs are computed without one"),
    "neftune_noise_alpha": _refused("noise on embeddings would make the policy differ from the sampler"),
    "torch_empty_cache_steps": _no_effect("the training step does not read it"),
    "auto_find_batch_size": _refused("a smaller batch would split groups; lower per_device_train_batch_size instead"),
    "logging_strategy": _AS_IN_TRANSFORMERS,
    "logging_steps": _AS_IN_TRANSFORMERS,
    "logging_first_step": _AS_IN_TRANSFORMERS,
    "log_on_each_node": _AS_IN_TRANSFORMERS,
    "logging_nan_inf_filter": _honoured("False by default, so that NaN losses are visible (TRL: True)"),
    "include_num_input_tokens_seen": _no_effect("the metric num_tokens is always logged"),
    "log_level": _AS_IN_TRANSFORMERS,
    "log_level_replica": _AS_IN_TRANSFORMERS,
    "disable_tqdm": _AS_IN_TRANSFORMERS,
    "report_to": _AS_IN_TRANSFORMERS,
    "run_name": _AS_IN_TRANSFORMERS,
    "project": _AS_IN_TRANSFORMERS,
    "trackio_space_id": _AS_IN_TRANSFORMERS,
    "trackio_bucket_id": _AS_IN_TRANSFORMERS,
    "trackio_static_space_id": _AS_IN_TRANSFORMERS,
    "eval_strategy": _AS_IN_TRANSFORMERS,
    "eval_steps": _AS_IN_TRANSFORMERS,
    "eval_delay": _AS_IN_TRANSFORMERS,
    "per_device_eval_batch_size": _honoured("completions sampled at once in evaluation; not necessarily whole groups"),
    "prediction_loss_only": _LABELS,
    "eval_on_start": _AS_IN_TRANSFORMERS,
    "eval_do_concat_batches": _LABELS,
    "eval_use_gather_object": _LABELS,
    "eval_accumulation_steps": _LABELS,
    "include_for_metrics": _LABELS,
    "batch_eval_metrics": _LABELS,
    "save_only_model": _honoured("a run cannot be resumed from such a checkpoint"),
    "save_strategy": _AS_IN_TRANSFORMERS,
    "save_steps": _AS_IN_TRANSFORMERS,
    "save_on_each_node": _AS_IN_TRANSFORMERS,
    "save_total_limit": _AS_IN_TRANSFORMERS,
    "enable_jit_checkpoint": _honoured("always on: SIGTERM and Ctrl-C save a checkpoint"),
    "push_to_hub": _AS_IN_TRANSFORMERS,
    "hub_token": _AS_IN_TRANSFORMERS,
    "hub_private_repo": _AS_IN_TRANSFORMERS,
    "hub_model_id": _AS_IN_TRANSFORMERS,
    "hub_strategy": _AS_IN_TRANSFORMERS,
    "hub_always_push": _AS_IN_TRANSFORMERS,
    "hub_revision": _AS_IN_TRANSFORMERS,
    "load_best_model_at_end": _honoured("the checkpoint with the best metric_for_best_model"),
    "metric_for_best_model": _honoured("with load_best_model_at_end, the default is reward (transformers: loss)"),
    "greater_is_better": _AS_IN_TRANSFORMERS,
    "ignore_data_skip": _no_effect("a resumed run always continues at the prompt where it was saved"),
    "restore_callback_states_from_checkpoint": _AS_IN_TRANSFORMERS,
    "full_determinism": _AS_IN_TRANSFORMERS,
    "seed": _honoured("seed of sampling, prompt order and initialisation"),
    "data_seed": _honoured("seed of the prompt order; None: seed"),
    "use_cpu": _AS_IN_TRANSFORMERS,
    "accelerator_config": _honoured("only use_configured_state; the other keys concern data loaders and accumulation"),
    "parallelism_config": _refused("context, sequence and tensor parallelism are not supported in this version"),
    "dataloader_drop_last": _STEP_INDICES,
    "dataloader_num_workers": _STEP_INDICES,
    "dataloader_pin_memory": _STEP_INDICES,
    "dataloader_persistent_workers": _STEP_INDICES,
    "dataloader_prefetch_factor": _STEP_INDICES,
    "dataloader_multiprocessing_context": _STEP_INDICES,
    "dataloader_in_order": _STEP_INDICES,
    "remove_unused_columns": _refused(
        "it would remove the columns that reward functions read; to drop columns, use dataset.select_columns"
    ),
    "label_names": _LABELS,
    "train_sampling_strategy": _STEP_INDICES,
    "length_column_name": _STEP_INDICES,
    "ddp_find_unused_parameters": _AS_IN_TRANSFORMERS,
    "ddp_bucket_cap_mb": _AS_IN_TRANSFORMERS,
    "ddp_broadcast_buffers": _AS_IN_TRANSFORMERS,
    "ddp_static_graph": _AS_IN_TRANSFORMERS,
    "ddp_backend": _AS_IN_TRANSFORMERS,
    "ddp_timeout": _honoured("seconds"),
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "deepspeed": _refused(
        "DeepSpeed is not supported in this version; use DDP for several processes (accelerate launch)"
    ),
    "debug": _AS_IN_TRANSFORMERS,
    "skip_memory_metrics": _AS_IN_TRANSFORMERS,
    "do_train": _honoured("for your own script; the trainer does not read it"),
    "do_eval": _honoured("for your own script; the trainer does not read it"),
    "do_predict": _honoured("for your own script; the trainer does not read it"),
    "resume_from_checkpoint": _honoured("for your own script; pass it to trainer.train()"),
    "local_rank": _honoured("set by older launchers; the trainer does not read it"),
}
"""Fields of transformers' TrainingArguments."""

FIELD_ENTRIES: dict[str, FieldEntry] = {**GRUPO_FIELDS, **TRL_FIELDS, **TRANSFORMERS_FIELDS}


def field_default(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, newly created where it has a factory."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def defaults_of(config_class: type[Any]) -> dict[str, Any]:
    """Field name -> default, for the fields that __init__ takes."""
    return {field.name: field_default(field) for field in dataclasses.fields(config_class) if field.init}


def refuse_unsupported(name: str, value: Any, default: Any, *, label: str | None = None) -> None:
    """Raises an error for a field that is not honoured; `label` is its name in the message."""
    # A newer transformers may have fields without an entry: they are left to the base class.
    entry = FIELD_ENTRIES.get(name)
    if entry is None or entry.support is FieldSupport.HONOURED:
        return
    setting, remedy = f"{label or name}={value!r}", f"Leave it at its default, {default!r}."
    if entry.support is FieldSupport.REFUSED:
        raise UnsupportedError(f"{setting} is not supported: {entry.phrase}. {remedy}")
    raise ConfigError(f"{setting} has no effect: {entry.phrase}. {remedy}")


def field_tables(fields: tuple[dataclasses.Field[Any], ...]) -> str:
    """The Markdown tables of docs/config.md."""
    defaults = {field.name: field_default(field) for field in fields}
    sections = [
        ("grupo's own", GRUPO_FIELDS),
        ("TRL's GRPOConfig", TRL_FIELDS),
        ("transformers' TrainingArguments", TRANSFORMERS_FIELDS),
    ]
    lines = _loss_table()
    for title, entries in sections:
        lines += [f"### Fields: {title}", "", "| field | default | here | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | `{defaults[name]!r}` | {entry.support.value} | {entry.phrase} |"
            for name, entry in entries.items()
        ]
        lines.append("")
    return "\n".join(lines)


def _loss_table() -> list[str]:
    lines = [
        "### Losses",
        "",
        "| loss_type | per-token term | aggregation | reads | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, spec in LOSSES.items():
        reads = ", ".join(f"`{setting}`" for setting in sorted(spec.reads))
        lines.append(f"| `{name}` | {spec.term} | {spec.aggregation} | {reads} | {spec.note} |")
    return [*lines, ""]


def page_with_tables(page: str, tables: str) -> str:
    """The page with the text between the two marks replaced."""
    before, _, rest = page.partition(TABLE_START)
    _, mark, after = rest.partition(TABLE_END)
    if not mark:
        raise ValueError(f"The page has no lines {TABLE_START!r} and {TABLE_END!r} to write between.")
    return f"{before}{TABLE_START}\n\n{tables}\n{TABLE_END}{after}"


def _write_page(path: Path) -> None:
    from grupo.config.fields import GRPOFields

    path.write_text(page_with_tables(path.read_text(), field_tables(dataclasses.fields(GRPOFields))))


if __name__ == "__main__":
    _write_page(Path(sys.argv[1]))
