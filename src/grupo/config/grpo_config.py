"""GRPOConfig: every setting of a run, checked when it is made, before any model is loaded.

The fields of transformers.TrainingArguments and of TRL's GRPOConfig keep their names, meanings and defaults; what is
different has a row in docs/differences.md, and docs/config.md says of every field what becomes of it. The fields keep
what the user set. What follows from several of them together is a method or a `resolved_` property here (the loss, the
sampling), or a StepPlan (the batches).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_bitsandbytes_available, is_torch_bf16_gpu_available

from grupo.algo.advantages import AdvantageSettings
from grupo.algo.terms import LossSettings
from grupo.chat_templates import check_template_name
from grupo.config import constraints as config_values
from grupo.config import validation as rules
from grupo.config.batch_plan import StepPlan
from grupo.config.optimizer import check_optimizer_arguments, check_schedule
from grupo.config.validation import logger
from grupo.errors import ConfigError
from grupo.sampling import SamplingSpec

_BITSANDBYTES_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")

Settings = TypeVar("Settings", LossSettings, AdvantageSettings)
ConfigClass = TypeVar("ConfigClass", bound="type[TrainingArguments]")


def _takes_old_names(config_class: ConfigClass) -> ConfigClass:
    """Puts a layer over the generated __init__ that translates old names and remembers what was passed."""
    generated = config_class.__init__

    @functools.wraps(generated)
    def __init__(self: GRPOConfig, output_dir: str | None = None, **keywords: Any) -> None:
        defaults = rules.defaults_of(GRPOConfig)
        passed = {"output_dir": output_dir, **keywords} if output_dir is not None else keywords
        translated = rules.translate_old_names(passed, defaults)
        # dataclasses.replace, HfArgumentParser and to_dict() pass every field: then only a changed value was meant.
        passes_all = defaults.keys() - {"output_dir"} <= translated.keys()
        self._explicit_fields = frozenset(
            name for name, value in translated.items() if not passes_all or value != defaults[name]
        )
        generated(self, **translated)

    config_class.__init__ = __init__  # type: ignore[method-assign, assignment]
    return config_class


@_takes_old_names
@dataclass
class GRPOConfig(TrainingArguments):
    """Settings of a GRPO run.

    Raises ConfigError for a setting, or a combination, that cannot work or would have no effect, and UnsupportedError
    (a ConfigError) for one whose engine is not part of this version. Names of older versions are translated with one
    line each.
    """

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
    """Optimizer steps between two log lines; below 1, a share of all steps."""
    bf16: bool | None = None  # type: ignore[assignment]
    """Mixed precision in bfloat16. None: where the accelerator can, never on the CPU."""
    remove_unused_columns: bool = False
    """Must stay False: reward functions read the columns."""
    logging_nan_inf_filter: bool = False
    """True replaces NaN and infinite losses in the log by the mean of recent ones."""

    # The model.

    model_init_kwargs: dict[str, Any] | str | None = None
    """Keywords of from_pretrained where the trainer loads the model by its id; a dict, or JSON text."""
    trust_remote_code: bool = False
    """Allows model and tokenizer code from the Hub."""
    router_aux_loss_coef: float | None = None
    """Refused: weight of the auxiliary loss of mixture-of-experts models."""
    disable_dropout: bool = False
    """Dropout is off in rollouts and scoring in any case; True rules `scoring_dropout` out as well."""
    cast_lm_head_to_fp32: bool = False
    """Computes the projection of the language model head in float32 (arXiv 2510.13786)."""

    # The data.

    num_generations: int = 8
    """Completions per prompt, G; at least 2."""
    num_generations_eval: int | None = None
    """Completions per prompt in evaluation; None: num_generations."""
    max_completion_length: int = 512
    """Tokens of a completion at most, the stop token included."""
    max_prompt_length: int | None = None
    """Tokens of a prompt at most. None: a prompt that does not fit the context beside a completion is refused."""
    overlong_prompts: str = "filter"
    """What happens to prompts above max_prompt_length: "filter" (dropped and counted before the run), "refuse", or
    "truncate_left" (the first tokens are cut)."""
    ds3_gather_for_generation: bool = True
    """Without effect: belongs to DeepSpeed ZeRO-3."""
    shuffle_dataset: bool = True
    """Draws the prompts in a new order in every epoch."""
    pad_to_multiple_of: int | str | None = "auto"
    """Tokens to whose multiple batches are padded; None: no multiple; "auto": 128 on Neuron, else None."""

    # Rollouts.

    generation_batch_size: int | None = None
    """Completions that are sampled together, over all processes. Excludes steps_per_generation."""
    steps_per_generation: int | None = None
    """Micro-batches per device that are sampled together; None: gradient_accumulation_steps."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in scoring."""
    top_p: float = 1.0
    """Share of probability that sampling keeps, in (0, 1]."""
    top_k: int = 0
    """Number of most likely tokens that sampling keeps; 0: all."""
    min_p: float | None = None
    """Smallest probability that sampling keeps, as a share of the largest one; None: all."""
    generation_kwargs: dict[str, Any] | str | None = None
    """Further sampling settings: the keys of the sampling fields here, stop_token_ids, and stop: texts of one token
    each that end a completion. A dict, or JSON text."""
    chat_template: str | None = None
    """Ready-made chat template by its name ("chatml", "llama-3", "gemma", "mistral", "plain"), or the text of one in
    Jinja; None: the tokenizer's own."""
    added_tokens: list[str] | None = None
    """Texts that become one token each, visible in completions, where the tokenizer does not have them yet. An adapter
    trains their embeddings, in the head too."""
    chat_template_kwargs: dict[str, Any] | str | None = None
    """Keywords of the chat template; a dict, or JSON text."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already seen; 1: no penalty."""
    cache_implementation: str | None = None
    """Refused: the in-process engine has one cache."""

    # vLLM and continuous batching.

    use_vllm: bool = False
    """Refused in this version: samples with vLLM."""
    vllm_mode: str = "colocate"
    """With use_vllm: "colocate" or "server"."""
    vllm_model_impl: str = "vllm"
    """With use_vllm: "vllm" or "transformers"."""
    vllm_enable_sleep_mode: bool = False
    """With use_vllm: frees memory between rollouts."""
    vllm_structured_outputs_regex: str | None = None
    """With use_vllm: pattern that completions must match."""
    vllm_server_base_url: str | None = None
    """With use_vllm: address of the server."""
    vllm_server_host: str = "0.0.0.0"
    """With use_vllm: host of the server."""
    vllm_server_port: int = 8000
    """With use_vllm: port of the server."""
    vllm_server_timeout: float = 240.0
    """With use_vllm: seconds to wait for the server."""
    vllm_group_port: int = 51216
    """With use_vllm: port of the weight transfer."""
    vllm_gpu_memory_utilization: float = 0.3
    """With use_vllm: share of GPU memory."""
    vllm_max_model_length: int | None = None
    """With use_vllm: context length, tokens."""
    vllm_tensor_parallel_size: int = 1
    """With use_vllm: GPUs per engine."""
    vllm_importance_sampling_correction: bool = True
    """With use_vllm: corrects for the difference between the engine's and the scored log-probs."""
    vllm_importance_sampling_mode: str = "sequence_mask"
    """With use_vllm: how the correction bounds the ratio."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """With use_vllm: upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = None
    """With use_vllm: lower bound of the correction."""
    vllm_importance_sampling_cap: float | None = None
    """With use_vllm: older name of vllm_importance_sampling_clip_max."""
    use_transformers_continuous_batching: bool = False
    """Refused in this version."""
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    """Refused in this version."""
    use_transformers_paged: bool = False
    """Refused in this version: older name of use_transformers_continuous_batching."""
    max_tool_calling_iterations: int | None = None
    """Refused in this version: turns of tool calls at most."""

    # The loss.

    loss_type: str = "dapo"
    """Name of the loss: "grpo", "dapo", "dr_grpo", "gspo" or another one of the table of losses in docs/config.md."""
    beta: float = 0.0
    """Coefficient of the KL term towards the reference policy; 0: no reference policy."""
    num_iterations: int = 1
    """Passes over each rollout, the mu of the GRPO paper."""
    epsilon: float = 0.2
    """The ratio is clipped from below at 1 - epsilon."""
    epsilon_high: float | None = None
    """The ratio is clipped from above at 1 + epsilon_high; None: epsilon. For cispo the cap itself; None: 5."""
    delta: float | None = None
    """Bound on the ratio where the advantage is negative (arXiv 2505.07291); None: no bound."""
    importance_sampling_level: str = "token"
    """One ratio per "token", or per "sequence" (arXiv 2507.18071)."""
    sapo_temperature_neg: float = 1.05
    """Steepness of sapo's gate where the advantage is not positive (arXiv 2511.20347)."""
    sapo_temperature_pos: float = 1.0
    """Steepness of sapo's gate where the advantage is positive."""
    vespo_k_pos: float = 2.0
    """Exponent of vespo's weight where the advantage is not negative (arXiv 2602.10693)."""
    vespo_lambda_pos: float = 3.0
    """Decay of vespo's weight where the advantage is not negative."""
    vespo_k_neg: float = 3.0
    """Exponent of vespo's weight where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """Decay of vespo's weight where the advantage is negative."""
    mask_truncated_completions: bool = False
    """Leaves completions without a stop token out of the loss."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, those of highest entropy, that keep their policy term (arXiv 2506.01939)."""
    off_policy_mask_threshold: float | None = None
    """Nats per token: completions of negative advantage whose log-probs fell further below the sampler's are masked
    (arXiv 2512.02556); None: no mask."""
    use_bias_correction_kl: bool = True
    """Multiplies the KL term by the ratio (arXiv 2512.02556)."""
    kl_on_dead_groups: bool = True
    """Keeps the KL term of groups whose advantages are all zero."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward and backward pass at most, padding included, within per_device_train_batch_size; None: what
    40 % of the free memory holds, on the CPU 1,280 MiB at most."""
    offload_activations: bool = False
    """Keeps what the backward pass needs in host memory until then: less device memory for some time. Of no use on the
    CPU, where it only copies."""
    scoring_dropout: bool = False
    """Keeps the model's dropout on where log-probs are computed with gradient. Rollouts never have dropout."""

    # Rewards and advantages.

    reward_weights: list[float] | None = None
    """One weight per reward function; None: 1 each."""
    scale_rewards: str = "group"
    """Advantages are divided by the standard deviation of the "group" (or True), of the "batch", or not: "none" (or
    False)."""
    multi_objective_aggregation: str = "sum_then_normalize"
    """Rewards of several functions: "sum_then_normalize", or "normalize_then_sum"."""
    max_failed_reward_share: float = 0.2
    """Share of a rollout, in [0, 1], that may lack a reward because a function failed; above it the run stops."""
    reward_timeout: float | None = 60.0
    """Seconds until a reward function that has not returned counts as failed; None: no limit, and synchronous ones run
    in the calling thread."""

    # Signal per second.

    dynamic_sampling: bool = False
    """Replaces the groups of a rollout that have no signal by groups of new prompts (DAPO, arXiv 2503.14476)."""
    dynamic_sampling_max_rounds: int = 3
    """Times at most that replacements are sampled for one rollout; what has no signal then stays in."""
    num_generations_trained: int | None = None
    """Completions per prompt that are trained on, those whose rewards vary most (PODS, arXiv 2504.13818); None: all."""
    curriculum_column: str | None = None
    """Dataset column with the difficulty of each prompt, a number; lower ones come first. None: no curriculum."""
    curriculum_threshold: float = 0.7
    """Success rate of the newest level, in (0, 1], at which the next one is unlocked."""
    curriculum_window: int = 32
    """Prompts over which the success rate is measured: the last so many of the newest level."""
    curriculum_success_reward: float = 1.0
    """Total reward from which on a completion is a success."""

    # Reference policy and entropy.

    reference_policy: str = "start"
    """What the KL term holds on to: "start", the policy as it is when training begins, with the adapter that it has
    then; or "base", the model below the adapter."""
    sync_ref_model: bool = False
    """Moves the reference towards the policy during the run (TR-DPO, arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the reference at each sync."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between two syncs."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus: mean entropy per token in nats. Negative: a penalty."""
    use_adaptive_entropy: bool = False
    """Raises the coefficient while entropy is at or below entropy_target, else lowers it (arXiv 2505.22312)."""
    entropy_coef_min: float = 0.0
    """Lower bound of the adaptive coefficient."""
    entropy_coef_max: float = 1.0
    """Upper bound of the adaptive coefficient."""
    entropy_coef_delta: float = 0.005
    """Change of the adaptive coefficient per optimizer step."""
    entropy_target: float = 0.2
    """Mean entropy per token, nats, at or below which the adaptive bonus acts."""

    # Health.

    max_nonfinite_steps: int = 3
    """Optimizer steps with NaN or infinite gradients, all dropped, after which the run stops."""
    logprob_gap_warn: float = 0.05
    """Mean gap, nats per token, between the sampler's and the scored log-probs that warns."""
    logprob_gap_stop: float = 0.5
    """The same gap, nats per token, that stops the run when three rollouts in a row exceed it."""

    # Logging.

    log_completions: bool = False
    """Prints completions with their rewards at each log."""
    log_multimodal: bool = True
    """Without effect: images are not part of this version."""
    num_completions_to_print: int | None = None
    """Completions per print; None: all."""
    log_unique_prompts: bool = False
    """Prints each prompt once."""
    log_completions_hub_repo: str | None = None
    """Refused in this version: dataset repository for completions."""

    def __post_init__(self) -> None:
        self._normalise()
        config_values.check_choices(self)
        rules.check_unsupported_fields(self)
        rules.check_launcher()
        plain_types = config_values.plain_types(type(self))
        config_values.check_types(self, plain_types)
        check_template_name(self.chat_template)
        config_values.check_ranges(self, plain_types)
        rules.check_reward_weights(self.reward_weights)
        rules.check_unused_fields(self)
        rules.check_conflicts(self)
        self._resolve_checkpointing()
        self._resolve_precision()
        self._resolve_optimizer()
        self._resolve_best_metric()
        pin_memory = self.dataloader_pin_memory
        try:
            super().__post_init__()  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:  # the base class's own rules, in its own words
            raise ConfigError(" ".join(str(error).split())) from error
        # The base class changes it on the CPU; as a value away from its default it would be refused in a copy.
        self.dataloader_pin_memory = pin_memory
        rules.check_accelerator_config(vars(self.accelerator_config), vars(AcceleratorConfig()))
        rules.check_trackers(self.report_to or [])
        check_schedule(self)
        check_optimizer_arguments(self)
        if self.sampling_spec().is_greedy:
            raise ConfigError("generation_kwargs: temperature 0 is greedy, and all completions would be the same.")
        rules.check_trained_subset(self, StepPlan.from_config(self, num_prompts=None))
        rules.warn_unusual(self)

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Names of the fields that the user set, rather than left at their default."""
        return self._explicit_fields

    # ---- what several fields mean together ----

    def sampling_spec(self) -> SamplingSpec:
        """The sampling settings of training: the fields with generation_kwargs on top."""
        return SamplingSpec(max_new_tokens=self.max_completion_length, **rules.merged_sampling(self))

    def loss_settings(self) -> LossSettings:
        return self._slice(LossSettings)

    def advantage_settings(self) -> AdvantageSettings:
        return self._slice(AdvantageSettings)

    def _slice(self, settings_class: type[Settings]) -> Settings:
        """The fields of this configuration that have the names of the fields of `settings_class`."""
        return settings_class(**{field.name: getattr(self, field.name) for field in dataclasses.fields(settings_class)})

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """What ends a completion besides ids and the model's own end tokens; a tokenizer makes ids of it."""
        return rules.stop_texts(self)

    @property
    def training_temperature(self) -> float:
        """Divides the logits in scoring: the temperature of sampling."""
        return self.sampling_spec().temperature

    @property
    def resolved_num_generations_eval(self) -> int:
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def resolved_pad_to_multiple_of(self) -> int | None:
        """None: batches are padded to their longest row only."""
        if self.pad_to_multiple_of == "auto":
            # Neuron compiles once per shape.
            return 128 if self.device.type == "neuron" else None
        return None if self.pad_to_multiple_of is None else int(self.pad_to_multiple_of)

    @property
    def resolved_data_seed(self) -> int:
        """Seed of the prompt order."""
        return self.seed if self.data_seed is None else self.data_seed

    # ---- steps of __post_init__ ----

    def _normalise(self) -> None:
        if "_explicit_fields" not in self.__dict__:  # a dataclass derived from this one has its own __init__
            defaults = rules.defaults_of(type(self))
            self._explicit_fields = frozenset(name for name in defaults if getattr(self, name) != defaults[name])
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        weights: Any = self.reward_weights
        if hasattr(weights, "tolist"):  # an array or a tensor
            self.reward_weights = weights.tolist()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of != "auto":
            self.pad_to_multiple_of = _parse_multiple(self.pad_to_multiple_of)
        if isinstance(self.pad_to_multiple_of, int) and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of={self.pad_to_multiple_of}: must be at least 1, None, or 'auto'.")

    def _resolve_checkpointing(self) -> None:
        """Both names hold one value before the base class looks: it lets the newer name win without a word."""
        for old, new in (
            ("gradient_checkpointing", "activation_checkpointing"),
            ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ):
            values = [value for value in (getattr(self, old), getattr(self, new)) if value is not None]
            if len(values) == 2 and values[0] != values[1]:
                raise ConfigError(
                    f"{old}={values[0]!r} and {new}={values[1]!r} are two names of one setting: give both the same "
                    "value, or only one of them."
                )
            value = values[0] if values else (None if old.endswith("kwargs") else True)
            setattr(self, old, value)
            setattr(self, new, value)

    def _resolve_precision(self) -> None:
        on_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.fp16 and on_cpu:
            raise ConfigError(
                "fp16=True needs an accelerator, and this run is on the CPU. Leave fp16 and bf16 unset for float32, or "
                "set bf16=True with use_cpu=True."
            )
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not on_cpu and is_torch_bf16_gpu_available()
            if not self.bf16 and not self.fp16 and not on_cpu:
                logger.warning("This accelerator has no bfloat16: training in float32. fp16=True is the other way.")
        elif self.bf16 and on_cpu and not self.use_cpu:
            logger.warning(
                "bf16=True: no accelerator was found, so this run is in float32. With use_cpu=True as well it would be "
                "in bfloat16 on the CPU."
            )
            self.bf16 = False

    def _resolve_optimizer(self) -> None:
        """8-bit AdamW needs bitsandbytes, whose lack the base class would notice only in train()."""
        name = str(getattr(self.optim, "value", self.optim))
        if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
            raise ConfigError(
                f"optim={name!r} updates weights during the backward pass, so gradients can be neither accumulated nor "
                "dropped when they are not finite. Choose one that updates after it."
            )
        if name in _BITSANDBYTES_ADAMW and not is_bitsandbytes_available():
            logger.warning(
                "optim=%r needs bitsandbytes, which is not installed: AdamW in 32 bits (%s) is used instead. "
                "pip install bitsandbytes for the other.",
                name,
                TrainingArguments.default_optim,
            )
            self.optim = TrainingArguments.default_optim

    def _resolve_best_metric(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            logger.warning(
                "load_best_model_at_end: metric_for_best_model is unset, so the best checkpoint is the one with the "
                "highest eval reward."
            )
            self.metric_for_best_model = "reward"


def _parse_multiple(text: str) -> int | None:
    if text.lower() in ("none", "null"):
        return None
    if not text.isdigit():
        raise ConfigError(f"pad_to_multiple_of={text!r}: expected a number of tokens, None, or 'auto'.")
    return int(text)
