"""The fields of GRPOConfig with their defaults and meanings.

Fields of transformers.TrainingArguments and of TRL's GRPOConfig keep their names, meanings and defaults; the exceptions
are in docs/differences.md, and docs/config.md lists every field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments


@dataclass
class GRPOFields(TrainingArguments):
    """Declarations only: `GRPOConfig` derives from it and checks the values."""

    # Without an annotation, as in the base class: an annotated one would be a field.
    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    # Defaults that differ from transformers'.

    learning_rate: float = 1e-6
    """Peak learning rate."""
    logging_steps: float = 10
    """Optimizer steps between two log lines; a value below 1 is a share of all steps."""
    bf16: bool | None = None  # type: ignore[assignment]
    """Mixed precision in bfloat16. None: on accelerators that support it, not on the CPU."""
    remove_unused_columns: bool = False
    """Must be False: reward functions read the columns."""
    logging_nan_inf_filter: bool = False
    """Replaces NaN and infinite losses in the log with the mean of recent losses."""

    # The model.

    model_init_kwargs: dict[str, Any] | str | None = None
    """Arguments of from_pretrained, used when the model is given by name; a dict, or JSON text."""
    trust_remote_code: bool = False
    """Allows model and tokenizer code from the Hub to run."""
    router_aux_loss_coef: float | None = None
    """Not supported: weight of the auxiliary loss of mixture-of-experts models."""
    disable_dropout: bool = False
    """Forbids `logprob_dropout`; dropout is off by default, in rollouts and when log-probs are computed."""
    cast_lm_head_to_fp32: bool = False
    """Computes the language model head in float32 (arXiv 2510.13786)."""

    # The data.

    num_generations: int = 8
    """Completions per prompt (group size); at least 2."""
    num_generations_eval: int | None = None
    """Completions per prompt in evaluation; None: num_generations."""
    max_completion_length: int = 512
    """Maximum length of a completion in tokens, including the stop token."""
    max_prompt_length: int | None = None
    """Maximum length of a prompt in tokens. None: only the context length limits prompt plus completion."""
    overlong_prompts: str = "filter"
    """Treatment of prompts longer than max_prompt_length: "filter" (removed before the run), "refuse" (an error) or
    "truncate_left" (their first tokens are removed)."""
    ds3_gather_for_generation: bool = True
    """No effect: an option of DeepSpeed ZeRO-3."""
    shuffle_dataset: bool = True
    """Draws prompts in a new random order in each epoch."""
    pad_to_multiple_of: int | str | None = "auto"
    """Pads batches to a multiple of this number of tokens; None: no multiple; "auto": 128 on Neuron, otherwise None."""

    # Rollouts.

    generation_batch_size: int | None = None
    """Completions per rollout over all processes; set either this or steps_per_generation."""
    steps_per_generation: int | None = None
    """Micro-batches per device and rollout; None: gradient_accumulation_steps."""
    temperature: float = 1.0
    """Divisor of the logits in sampling and when log-probs are computed; above 0."""
    top_p: float = 1.0
    """Nucleus sampling: cumulative probability of the most likely tokens to keep, in (0, 1]."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all."""
    min_p: float | None = None
    """Minimum probability of a token relative to the most likely one, in [0, 1]; None: no minimum."""
    generation_kwargs: dict[str, Any] | str | None = None
    """Additional sampling settings: the sampling fields above and below, `stop_token_ids`, and `stop`, strings of one
    token each that end a completion. A dict, or JSON text."""
    chat_template: str | None = None
    """Name of a built-in chat template ("chatml", "llama-3", "gemma", "mistral", "plain"), or a Jinja template; None:
    the tokenizer's own."""
    added_tokens: list[str] | None = None
    """Strings to add to the vocabulary as one token each, not hidden as special tokens. An adapter also trains their
    input and output embeddings."""
    chat_template_kwargs: dict[str, Any] | str | None = None
    """Variables of the chat template; a dict, or JSON text."""
    repetition_penalty: float = 1.0
    """Penalty on the logits of tokens that are already in the sequence; 1: none."""
    cache_implementation: str | None = None
    """Not supported: the in-process engine has one kind of cache."""

    # vLLM and continuous batching.

    use_vllm: bool = False
    """Not supported in this version: sampling with vLLM."""
    vllm_mode: str = "colocate"
    """With use_vllm: "colocate" or "server"."""
    vllm_model_impl: str = "vllm"
    """With use_vllm: "vllm" or "transformers"."""
    vllm_enable_sleep_mode: bool = False
    """With use_vllm: releases memory between rollouts."""
    vllm_structured_outputs_regex: str | None = None
    """With use_vllm: regular expression that completions must match."""
    vllm_server_base_url: str | None = None
    """With use_vllm: URL of the server."""
    vllm_server_host: str = "0.0.0.0"
    """With use_vllm: host name of the server."""
    vllm_server_port: int = 8000
    """With use_vllm: port of the server."""
    vllm_server_timeout: float = 240.0
    """With use_vllm: seconds to wait for the server."""
    vllm_group_port: int = 51216
    """With use_vllm: port of the weight transfer."""
    vllm_gpu_memory_utilization: float = 0.3
    """With use_vllm: share of GPU memory for the engine."""
    vllm_max_model_length: int | None = None
    """With use_vllm: context length in tokens."""
    vllm_tensor_parallel_size: int = 1
    """With use_vllm: GPUs per engine."""
    vllm_importance_sampling_correction: bool = True
    """With use_vllm: corrects for differences between the log-probs of engine and trainer."""
    vllm_importance_sampling_mode: str = "sequence_mask"
    """With use_vllm: method that bounds the correction."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """With use_vllm: upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = None
    """With use_vllm: lower bound of the correction."""
    vllm_importance_sampling_cap: float | None = None
    """With use_vllm: former name of vllm_importance_sampling_clip_max."""
    use_transformers_continuous_batching: bool = False
    """Not supported in this version: continuous batching by transformers."""
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    """Not supported in this version: its settings."""
    use_transformers_paged: bool = False
    """Not supported in this version: former name of use_transformers_continuous_batching."""
    max_tool_calling_iterations: int | None = None
    """Not supported in this version: maximum number of tool calls in a row."""

    # The loss.

    loss_type: str = "dapo"
    """Name of the loss: "grpo", "dapo", "dr_grpo", "gspo" or another name in the table of losses in docs/config.md."""
    beta: float = 0.0
    """Coefficient of the KL divergence from the reference policy; 0: no reference policy."""
    num_iterations: int = 1
    """Passes over each rollout (mu in the GRPO paper)."""
    epsilon: float = 0.2
    """Lower clip range: the ratio is clipped at 1 - epsilon."""
    epsilon_high: float | None = None
    """Upper clip range: the ratio is clipped at 1 + epsilon_high; None: epsilon. For cispo the bound; None: 5."""
    delta: float | None = None
    """Upper bound of the ratio where the advantage is negative (arXiv 2505.07291); None: no bound."""
    importance_sampling_level: str = "token"
    """Level of the importance ratio: "token" or "sequence" (arXiv 2507.18071)."""
    sapo_temperature_neg: float = 1.05
    """Temperature of sapo's gate where the advantage is not positive (arXiv 2511.20347)."""
    sapo_temperature_pos: float = 1.0
    """Temperature of sapo's gate where the advantage is positive."""
    vespo_k_pos: float = 2.0
    """Exponent of vespo's weight where the advantage is not negative (arXiv 2602.10693)."""
    vespo_lambda_pos: float = 3.0
    """Decay of vespo's weight where the advantage is not negative."""
    vespo_k_neg: float = 3.0
    """Exponent of vespo's weight where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """Decay of vespo's weight where the advantage is negative."""
    mask_truncated_completions: bool = False
    """Excludes completions without a stop token from the loss."""
    top_entropy_quantile: float = 1.0
    """Share of tokens with the highest entropy that have a policy term (arXiv 2506.01939)."""
    off_policy_mask_threshold: float | None = None
    """Threshold in nats per token: completions with a negative advantage whose log-probs have fallen further below the
    sampler's are masked (arXiv 2512.02556); None: no mask."""
    use_bias_correction_kl: bool = True
    """Multiplies the KL term by the importance ratio (arXiv 2512.02556)."""
    kl_on_dead_groups: bool = True
    """Keeps the KL term of zero-variance groups (all advantages 0)."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens per forward and backward pass, including padding, within per_device_train_batch_size;
    None: as many as fit into 40 % of the free memory, and on the CPU into 1,280 MiB."""
    offload_activations: bool = False
    """Keeps activations in host memory until the backward pass: slower, with less device memory; not for the CPU."""
    logprob_dropout: bool = False
    """Applies the model's dropout when log-probs are computed with gradient. Rollouts never have dropout."""

    # Rewards and advantages.

    reward_weights: list[float] | None = None
    """One weight per reward function; None: 1 each."""
    scale_rewards: str = "group"
    """Standard deviation that divides advantages: "group" (or True), "batch", or "none" (or False)."""
    multi_objective_aggregation: str = "sum_then_normalize"
    """Combination of several rewards: "sum_then_normalize" or "normalize_then_sum"."""
    max_failed_reward_share: float = 0.2
    """Share of a rollout, in [0, 1], for which reward functions may fail; above it the run stops."""
    reward_timeout: float | None = 60.0
    """Time limit of a reward function in seconds, after which it counts as failed. None: no limit; synchronous
    functions then run in the calling thread."""

    # Signal per second.

    dynamic_sampling: bool = False
    """Replaces zero-variance groups of a rollout with groups of new prompts (DAPO, arXiv 2503.14476)."""
    dynamic_sampling_max_rounds: int = 3
    """Maximum number of additional sampling rounds per rollout; zero-variance groups that remain are kept."""
    num_generations_trained: int | None = None
    """Completions per prompt to train on, those with the largest variance (PODS, arXiv 2504.13818); None: all."""
    curriculum_column: str | None = None
    """Dataset column with the difficulty of each prompt, a number; easier prompts come first. None: no curriculum."""
    curriculum_threshold: float = 0.7
    """Success rate of the newest level, in (0, 1], that unlocks the next level."""
    curriculum_window: int = 32
    """Number of most recent prompts of the newest level for the success rate."""
    curriculum_success_reward: float = 1.0
    """Minimum total reward of a successful completion."""

    # Reference policy and entropy.

    reference_policy: str = "start"
    """Reference of the KL term: "start", the policy at the start of training, including its adapter; or "base", the
    base model without adapter."""
    sync_ref_model: bool = False
    """Moves the reference towards the policy during the run (TR-DPO, arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = 0.6
    """Weight of the policy in the reference at each update."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between two updates of the reference."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus (mean entropy per token in nats); a negative value is a penalty."""
    use_adaptive_entropy: bool = False
    """Raises the coefficient while entropy is at or below entropy_target, otherwise lowers it (arXiv 2505.22312)."""
    entropy_coef_min: float = 0.0
    """Lower bound of the adaptive coefficient."""
    entropy_coef_max: float = 1.0
    """Upper bound of the adaptive coefficient."""
    entropy_coef_delta: float = 0.005
    """Change of the adaptive coefficient per optimizer step."""
    entropy_target: float = 0.2
    """Mean entropy per token in nats at or below which the adaptive bonus applies."""

    # Health.

    max_nonfinite_steps: int = 3
    """Consecutive optimizer steps with NaN or infinite gradients, each of them skipped, after which the run stops."""
    logprob_gap_warn: float = 0.05
    """Mean difference of sampler and trainer log-probs, in nats per token, above which a warning is logged."""
    logprob_gap_stop: float = 0.5
    """Mean difference, in nats per token, that stops the run after three consecutive rollouts above it."""

    # Logging.

    log_completions: bool = False
    """Prints completions with their rewards at each log step."""
    log_multimodal: bool = True
    """No effect: images are not supported in this version."""
    num_completions_to_print: int | None = None
    """Number of completions to print; None: all."""
    log_unique_prompts: bool = False
    """Prints each prompt only once."""
    log_completions_hub_repo: str | None = None
    """Not supported in this version: dataset repository for completions."""
