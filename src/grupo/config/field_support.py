"""What becomes of every field of GRPOConfig: the one table that validation, docs/config.md and the tests read.

python -m grupo.config.field_support docs/config.md     writes the table of fields into the page
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grupo.algo.registry import LOSSES

TABLE_START = "<!-- fields: written by python -m grupo.config.field_support -->"
TABLE_END = "<!-- end of fields -->"


class Treatment(Enum):
    """What a field does here."""

    HONOURED = "honoured"
    """Does what TRL or transformers say it does, or what the phrase says."""
    REFUSED = "refused"
    """UnsupportedError when set away from its default: what it asks for is not part of this version."""
    NO_EFFECT = "no effect"
    """ConfigError when set away from its default: nothing here would read it."""


@dataclass(frozen=True)
class FieldRow:
    treatment: Treatment
    phrase: str
    """For a field that is not honoured, the reason and the way out, as it stands in the error."""


def _honoured(phrase: str) -> FieldRow:
    return FieldRow(Treatment.HONOURED, phrase)


def _refused(phrase: str) -> FieldRow:
    return FieldRow(Treatment.REFUSED, phrase)


def _no_effect(phrase: str) -> FieldRow:
    return FieldRow(Treatment.NO_EFFECT, phrase)


_AS_IN_TRANSFORMERS = _honoured("as in transformers")
_VLLM = _no_effect("read only with use_vllm, and vLLM is not part of this version")
_TICKETS = _no_effect("the training loader yields step numbers; prompts come from the prompt stream")
_LABELS = _no_effect("there are no labels and no compute_metrics; evaluation scores with the reward functions")
_COMPILE = _refused("compiled models are not part of this version: hidden states are read by a hook during the forward")
_LIGER = _refused("Liger kernels are not part of this version; log-probs never need the full logits here anyway")
_SHARDED = _refused("FSDP is not part of this version; several processes run with DDP (accelerate launch)")
_CONTINUOUS = _refused("transformers' continuous batching is not part of this version; the in-process engine samples")
_FULL_EVAL = _no_effect("evaluation samples with the weights and the precision of training")
_CHECKPOINTING = "one setting under two names; on unless it is set"

GRUPO_ROWS: dict[str, FieldRow] = {
    "chat_template": _honoured("ready-made template by name, or the text of one; set on the tokenizer, saved with it"),
    "added_tokens": _honoured("texts that become one token each, with embeddings that are trained; see adapters.md"),
    "max_prompt_length": _honoured("longest prompt in tokens; None: every prompt must fit beside a completion"),
    "overlong_prompts": _honoured("filter, refuse or truncate_left prompts above max_prompt_length"),
    "max_failed_reward_share": _honoured("share of failed rewards in a rollout above which the run stops"),
    "reward_timeout": _honoured("seconds until a reward function that has not returned counts as failed"),
    "max_nonfinite_steps": _honoured("steps with non-finite gradients after which the run stops"),
    "micro_batch_tokens": _honoured("tokens of one forward and backward pass at most; None: from the free memory"),
    "offload_activations": _honoured("activations wait for backward in host memory"),
    "scoring_dropout": _honoured("dropout while log-probs are computed with gradient; off by default"),
    "kl_on_dead_groups": _honoured("KL term on groups whose advantages are all zero; on as in TRL"),
    "reference_policy": _honoured("start: the policy as training begins; base: the model below the adapter"),
    "logprob_gap_warn": _honoured("mean gap between sampling and scored log-probs, nats, that warns"),
    "logprob_gap_stop": _honoured("the same gap, nats, that stops the run when three rollouts in a row exceed it"),
    "dynamic_sampling": _honoured("groups without a signal are replaced by groups of new prompts; see signal.md"),
    "dynamic_sampling_max_rounds": _honoured("additional rounds per rollout at most; needs dynamic_sampling"),
    "num_generations_trained": _honoured("completions per prompt that are trained on, those whose rewards vary most"),
    "curriculum_column": _honoured("dataset column with a number per prompt, easy first; see signal.md"),
    "curriculum_threshold": _honoured("success rate that unlocks the next level; needs curriculum_column"),
    "curriculum_window": _honoured("prompts over which it is measured; needs curriculum_column"),
    "curriculum_success_reward": _honoured("total reward of a success; needs curriculum_column"),
}
"""Fields that neither TRL nor transformers has."""

TRL_ROWS: dict[str, FieldRow] = {
    "model_init_kwargs": _honoured("for from_pretrained, where the model is given by its id"),
    "trust_remote_code": _honoured("for the policy and its tokenizer"),
    "router_aux_loss_coef": _refused("the auxiliary loss of mixture-of-experts models is not part of this version"),
    "disable_dropout": _honoured("dropout is off in any case; True rules scoring_dropout out"),
    "cast_lm_head_to_fp32": _honoured("the head's projection in float32"),
    "num_generations": _honoured("completions per prompt, G; at least 2"),
    "num_generations_eval": _honoured("G in evaluation; None: num_generations; 1 is allowed"),
    "max_completion_length": _honoured("most tokens of a completion; the constant of dr_grpo"),
    "ds3_gather_for_generation": _no_effect("read only with DeepSpeed ZeRO-3, which is not part of this version"),
    "shuffle_dataset": _honoured("new prompt order in every epoch"),
    "pad_to_multiple_of": _honoured("'auto': none, on Neuron 128"),
    "generation_batch_size": _honoured("completions per rollout over all processes; excludes steps_per_generation"),
    "steps_per_generation": _honoured("micro-batches per rollout; None: gradient_accumulation_steps"),
    "temperature": _honoured("of sampling, and divides the logits in scoring; above 0"),
    "top_p": _honoured("sampling only"),
    "top_k": _honoured("sampling only; 0 keeps every token"),
    "min_p": _honoured("sampling only"),
    "generation_kwargs": _honoured("merged into the sampling settings; keys: see Sampling"),
    "chat_template_kwargs": _honoured("for the chat template"),
    "repetition_penalty": _honoured("sampling only"),
    "cache_implementation": _refused("the in-process engine has one cache; remove the setting"),
    "use_vllm": _refused("vLLM is not part of this version; remove the setting and the in-process engine samples"),
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
    "epsilon": _honoured("lower clip of the ratio; losses that clip"),
    "delta": _honoured("upper bound on the ratio (two-sided clip); losses that clip"),
    "epsilon_high": _honoured("upper clip; None: epsilon. cispo: the cap itself; None: 5.0 (TRL: epsilon)"),
    "sapo_temperature_neg": _honoured("loss_type sapo"),
    "sapo_temperature_pos": _honoured("loss_type sapo"),
    "vespo_k_pos": _honoured("loss_type vespo"),
    "vespo_lambda_pos": _honoured("loss_type vespo"),
    "vespo_k_neg": _honoured("loss_type vespo"),
    "vespo_lambda_neg": _honoured("loss_type vespo"),
    "importance_sampling_level": _honoured("token or sequence ratio; sequence: the mean of the log ratios"),
    "reward_weights": _honoured("one per reward function; None: 1 each"),
    "multi_objective_aggregation": _honoured("sum_then_normalize or normalize_then_sum"),
    "scale_rewards": _honoured("group, batch or none; True is group, False is none"),
    "loss_type": _honoured("a name in the table of losses: TRL's eight, and gspo"),
    "mask_truncated_completions": _honoured("truncated completions leave numerator and denominators"),
    "sync_ref_model": _honoured("reference follows the policy; needs beta above 0"),
    "ref_model_mixup_alpha": _honoured("share of the policy at each sync; needs sync_ref_model"),
    "ref_model_sync_steps": _honoured("optimizer steps between syncs; needs sync_ref_model"),
    "top_entropy_quantile": _honoured("share of tokens with the highest entropy that keep their policy term"),
    "entropy_coef": _honoured("entropy bonus, token mean over the optimizer step"),
    "use_adaptive_entropy": _honoured("moves the coefficient towards entropy_target"),
    "entropy_coef_min": _honoured("needs use_adaptive_entropy"),
    "entropy_coef_max": _honoured("needs use_adaptive_entropy"),
    "entropy_coef_delta": _honoured("needs use_adaptive_entropy"),
    "entropy_target": _honoured("nats; needs use_adaptive_entropy"),
    "max_tool_calling_iterations": _refused("tools are not part of this version"),
    "vllm_importance_sampling_correction": _VLLM,
    "vllm_importance_sampling_mode": _VLLM,
    "vllm_importance_sampling_clip_max": _VLLM,
    "vllm_importance_sampling_clip_min": _VLLM,
    "off_policy_mask_threshold": _honoured("nats; masks negative completions that drifted further from the sampler"),
    "use_bias_correction_kl": _honoured("KL times the ratio; needs beta above 0"),
    "log_completions": _honoured("prints completions at each log"),
    "log_multimodal": _no_effect("images are not part of this version"),
    "num_completions_to_print": _honoured("needs log_completions"),
    "log_unique_prompts": _honoured("needs log_completions"),
    "log_completions_hub_repo": _refused("completions are kept in the run folder and not pushed by this version"),
    "use_transformers_continuous_batching": _CONTINUOUS,
    "transformers_continuous_batching_config": _CONTINUOUS,
    "use_transformers_paged": _CONTINUOUS,
    "vllm_importance_sampling_cap": _VLLM,
}
"""Fields of TRL 1.16.0's GRPOConfig that transformers does not have."""

TRANSFORMERS_ROWS: dict[str, FieldRow] = {
    "output_dir": _honoured("folder of the run"),
    "per_device_train_batch_size": _honoured(
        "completions per device; a forward pass has room for so many of the longest ones"
    ),
    "num_train_epochs": _AS_IN_TRANSFORMERS,
    "max_steps": _honoured("optimizer steps; -1: by epochs"),
    "learning_rate": _AS_IN_TRANSFORMERS,
    "lr_scheduler_type": _honoured("reduce_lr_on_plateau and greedy need metric_for_best_model"),
    "lr_scheduler_kwargs": _AS_IN_TRANSFORMERS,
    "warmup_steps": _honoured("below 1: share of all steps"),
    "optim": _honoured("8-bit AdamW without bitsandbytes: 32-bit, with a warning; layerwise ones: refused"),
    "optim_args": _AS_IN_TRANSFORMERS,
    "weight_decay": _AS_IN_TRANSFORMERS,
    "adam_beta1": _AS_IN_TRANSFORMERS,
    "adam_beta2": _AS_IN_TRANSFORMERS,
    "adam_epsilon": _AS_IN_TRANSFORMERS,
    "optim_target_modules": _AS_IN_TRANSFORMERS,
    "gradient_accumulation_steps": _honoured("forward passes per optimizer step; raised to fill one group"),
    "average_tokens_across_devices": _no_effect("every loss is normalised over all processes"),
    "max_grad_norm": _AS_IN_TRANSFORMERS,
    "label_smoothing_factor": _no_effect("there are no labels to smooth"),
    "bf16": _honoured("None: where the accelerator can; see Precision"),
    "fp16": _honoured("refused on the CPU"),
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "tf32": _AS_IN_TRANSFORMERS,
    "activation_checkpointing": _honoured(_CHECKPOINTING),
    "activation_checkpointing_kwargs": _honoured("one setting with its twin"),
    "gradient_checkpointing": _honoured(_CHECKPOINTING),
    "gradient_checkpointing_kwargs": _honoured("one setting with its twin"),
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": _no_effect("the engine uses its cache in rollouts and scoring uses none"),
    "neftune_noise_alpha": _refused("noise on embeddings would make the scored policy another one than the sampler"),
    "torch_empty_cache_steps": _no_effect("the training step does not read it"),
    "auto_find_batch_size": _refused("halving the batch breaks groups; lower per_device_train_batch_size instead"),
    "logging_strategy": _AS_IN_TRANSFORMERS,
    "logging_steps": _AS_IN_TRANSFORMERS,
    "logging_first_step": _AS_IN_TRANSFORMERS,
    "log_on_each_node": _AS_IN_TRANSFORMERS,
    "logging_nan_inf_filter": _honoured("False by default: a NaN loss is shown (TRL: True)"),
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
    "per_device_eval_batch_size": _honoured("completions sampled at once in evaluation; need not hold whole groups"),
    "prediction_loss_only": _LABELS,
    "eval_on_start": _AS_IN_TRANSFORMERS,
    "eval_do_concat_batches": _LABELS,
    "eval_use_gather_object": _LABELS,
    "eval_accumulation_steps": _LABELS,
    "include_for_metrics": _LABELS,
    "batch_eval_metrics": _LABELS,
    "save_only_model": _honoured("such a checkpoint cannot be resumed"),
    "save_strategy": _AS_IN_TRANSFORMERS,
    "save_steps": _AS_IN_TRANSFORMERS,
    "save_on_each_node": _AS_IN_TRANSFORMERS,
    "save_total_limit": _AS_IN_TRANSFORMERS,
    "enable_jit_checkpoint": _honoured("always so: SIGTERM and Ctrl-C save a checkpoint"),
    "push_to_hub": _AS_IN_TRANSFORMERS,
    "hub_token": _AS_IN_TRANSFORMERS,
    "hub_private_repo": _AS_IN_TRANSFORMERS,
    "hub_model_id": _AS_IN_TRANSFORMERS,
    "hub_strategy": _AS_IN_TRANSFORMERS,
    "hub_always_push": _AS_IN_TRANSFORMERS,
    "hub_revision": _AS_IN_TRANSFORMERS,
    "load_best_model_at_end": _honoured("the best by metric_for_best_model"),
    "metric_for_best_model": _honoured("with load_best_model_at_end, unset is reward (transformers: loss)"),
    "greater_is_better": _AS_IN_TRANSFORMERS,
    "ignore_data_skip": _no_effect("a resumed run continues with the prompt at which it was saved"),
    "restore_callback_states_from_checkpoint": _AS_IN_TRANSFORMERS,
    "full_determinism": _AS_IN_TRANSFORMERS,
    "seed": _honoured("of sampling, prompt order and initialisation"),
    "data_seed": _honoured("of the prompt order; None: seed"),
    "use_cpu": _AS_IN_TRANSFORMERS,
    "accelerator_config": _honoured("only use_configured_state; its other keys are about loaders and accumulation"),
    "parallelism_config": _refused("context, sequence and tensor parallelism are not part of this version"),
    "dataloader_drop_last": _TICKETS,
    "dataloader_num_workers": _TICKETS,
    "dataloader_pin_memory": _TICKETS,
    "dataloader_persistent_workers": _TICKETS,
    "dataloader_prefetch_factor": _TICKETS,
    "dataloader_multiprocessing_context": _TICKETS,
    "dataloader_in_order": _TICKETS,
    "remove_unused_columns": _refused(
        "it would take the columns away that reward functions read; to drop columns, use dataset.select_columns"
    ),
    "label_names": _LABELS,
    "train_sampling_strategy": _TICKETS,
    "length_column_name": _TICKETS,
    "ddp_find_unused_parameters": _AS_IN_TRANSFORMERS,
    "ddp_bucket_cap_mb": _AS_IN_TRANSFORMERS,
    "ddp_broadcast_buffers": _AS_IN_TRANSFORMERS,
    "ddp_static_graph": _AS_IN_TRANSFORMERS,
    "ddp_backend": _AS_IN_TRANSFORMERS,
    "ddp_timeout": _honoured("seconds"),
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "deepspeed": _refused("DeepSpeed is not part of this version; several processes run with DDP (accelerate launch)"),
    "debug": _AS_IN_TRANSFORMERS,
    "skip_memory_metrics": _AS_IN_TRANSFORMERS,
    "do_train": _honoured("for your own script; no trainer reads it"),
    "do_eval": _honoured("for your own script; no trainer reads it"),
    "do_predict": _honoured("for your own script; no trainer reads it"),
    "resume_from_checkpoint": _honoured("for your own script; pass it to trainer.train()"),
    "local_rank": _honoured("set by old launchers; no trainer reads it"),
}
"""Fields of transformers' TrainingArguments."""

FIELD_ROWS: dict[str, FieldRow] = {**GRUPO_ROWS, **TRL_ROWS, **TRANSFORMERS_ROWS}

RENAMED_FIELDS: dict[str, str] = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
}
"""Old name -> name today. The value is kept."""

IGNORED_FIELDS: dict[str, str] = {
    "overwrite_output_dir": "nothing in output_dir is deleted; train(resume_from_checkpoint=True) resumes a run",
    "logging_dir": "TensorBoard files go to the folder runs in output_dir, or to $TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "weights are always saved as safetensors",
    "unsloth_num_chunks": "log-probs are always computed in chunks; the result is the same",
    "unsloth_grpo_mini_batch": "gradients do not depend on micro-batches; micro_batch_tokens bounds their memory",
    "unsloth_logit_chunk_multiplier": "log-probs are always computed in chunks; the result is the same",
}
"""Old name -> what happens now. Accepted with one line, whatever the value."""

DROPPED_FIELDS: dict[str, str] = {
    "group_by_length": "prompts are drawn by the prompt stream, not by length",
    "vllm_device": "vLLM is not part of this version",
    "vllm_dtype": "vLLM is not part of this version",
    "vllm_enable_prefix_caching": "vLLM is not part of this version",
}
"""Old name -> why it is an error to switch it on; None, False and 0 are accepted with one line."""

COMPOUND_FIELDS: dict[str, str] = {
    "vllm_sampling_params": "temperature, top_p, top_k, min_p, repetition_penalty and generation_kwargs",
    "max_seq_length": "max_prompt_length, with max_completion_length",
}
"""Name of Unsloth's -> the fields that say the same. Translated with one line; a contradiction is an error."""


def field_default(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, made anew where it has a factory."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def field_tables(fields: tuple[dataclasses.Field[Any], ...]) -> str:
    """The Markdown tables of docs/config.md."""
    defaults = {field.name: field_default(field) for field in fields}
    sections = [
        ("grupo's own", GRUPO_ROWS),
        ("TRL's GRPOConfig", TRL_ROWS),
        ("transformers' TrainingArguments", TRANSFORMERS_ROWS),
    ]
    lines = _loss_table()
    for title, rows in sections:
        lines += [f"### Fields: {title}", "", "| field | default | here | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | `{defaults[name]!r}` | {row.treatment.value} | {row.phrase} |" for name, row in rows.items()
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
    """The page with everything between the two marks replaced."""
    before, _, rest = page.partition(TABLE_START)
    _, mark, after = rest.partition(TABLE_END)
    if not mark:
        raise ValueError(f"the page has no lines {TABLE_START!r} and {TABLE_END!r} to write between")
    return f"{before}{TABLE_START}\n\n{tables}\n{TABLE_END}{after}"


def _write_page(path: Path) -> None:
    from grupo.config.grpo_config import GRPOConfig

    path.write_text(page_with_tables(path.read_text(), field_tables(dataclasses.fields(GRPOConfig))))


if __name__ == "__main__":
    _write_page(Path(sys.argv[1]))
