"""`GRPOTrainer`: one GRPO step per optimizer step, on top of `transformers.Trainer`.

The base class keeps what is not GRPO: optimizer, schedule, callbacks, reporters; `hf_trainer.py` is the seam to it. A
step takes samples from the rollout window and leaves their gradients. There is no loss, mask or reward arithmetic here.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from grupo.config import GRPOConfig
from grupo.data.prompts import TokenizedRow, as_row_dataset, rows_hash
from grupo.errors import ConfigError
from grupo.metrics import merge_metrics
from grupo.models.inspect import describe_adapter, model_name_or_path, quantization
from grupo.models.load import enable_input_grads
from grupo.policy.forward_backward import StepResult
from grupo.policy.logprob_model import disable_dropout
from grupo.policy.reference import Reference, ReferencePolicy
from grupo.rewards.library.reward_model import RewardFunctions
from grupo.rollout.collector import RolloutResult
from grupo.rollout.engine import Engine
from grupo.rollout.local.engine import LocalEngine
from grupo.rollout.schedule import rank_slice
from grupo.trainer.callbacks import LogLastStep, WarnIfWeightsUnchanged
from grupo.trainer.checks import (
    check_optimizer,
    check_processes,
    check_watched_metric,
    refuse_unsupported,
    warn_if_updates_underflow,
)
from grupo.trainer.components import build, kl_reference, make_dynamic_sampling, prompt_stream
from grupo.trainer.health import HealthMonitors
from grupo.trainer.hf_trainer import HFTrainer
from grupo.trainer.resume_fingerprint import resume_fingerprint
from grupo.trainer.setup import (
    check_columns,
    check_without_model,
    load_model,
    resolve_arguments,
    tokenize,
    tokenized_rows,
)
from grupo.trainer.step_arguments import step_arguments
from grupo.trainer.training_log import TrainingLog

logger = logging.getLogger("grupo")


class GRPOTrainer(HFTrainer):
    """Trains a causal language model with Group Relative Policy Optimization (arXiv:2402.03300).

    Takes the keyword arguments of TRL's GRPOTrainer. `trainer.config` is the configuration as it was given;
    `trainer.args` is a copy in which accumulation is 1, because the base class sees one item per optimizer step.

    Args:
        model: a model, a PEFT model, or the name or path of one (loaded with `args.model_init_kwargs`).
        reward_funcs: one or more functions of the completions (see `grupo.rewards`), or reward models: transformers
            models for sequence classification with one label, or the ids of such.
        args: the configuration; by default `GRPOConfig()` with an output folder named after the model.
        train_dataset: rows with a column `prompt` (text or messages); other columns go to the reward functions.
        eval_dataset: the same, or a dict of such; used by `evaluate()`.
        processing_class: the tokenizer; by default the model's own.
        reward_processing_classes: the tokenizers of reward models, one entry per function; by default their own.
        peft_config: wraps the model in a fresh adapter.
        quantization_config: for a model that is loaded here.
        engine: samples completions; by default the model itself, in this process.

    Raises:
        ConfigError, DataError, RewardError: before the first step, with what to set instead.
        TrainingError: during training, when continuing would be worse than stopping.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunctions | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        tokenizer: Any = None,
        engine: Engine | None = None,
    ) -> None:
        refuse_unsupported(tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        model, config, processing_class = resolve_arguments(model, args, processing_class, tokenizer)
        self.model_argument = model if isinstance(model, str) else None
        """Name or path of the model or adapter that training starts from; None for a model object."""
        inputs = check_without_model(config, reward_funcs, reward_processing_classes, train_dataset, eval_dataset)
        set_seed(config.seed)
        self.policy = load_model(
            model,
            config,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self.data = tokenize(inputs, self.policy, config)
        self.tokenizer = self.policy.tokenizer
        self.plan, self.train_rows, self.rewards = self.data.plan, self.data.train_rows, inputs.rewards
        super().__init__(
            config=config,
            args=step_arguments(config, self.policy.load_options, self.plan.completions_per_step),
            model=self.policy.model,
            train_dataset=inputs.train_dataset,
            eval_dataset=inputs.eval_dataset,
            processing_class=self.policy.tokenizer,
            callbacks=[*(callbacks or []), LogLastStep(), WarnIfWeightsUnchanged()],
            optimizers=optimizers,
        )
        check_optimizer(optimizers[0], self.model, config)
        check_processes(self.args.n_gpu)
        warn_if_updates_underflow(self.model, config.learning_rate)
        self.rewards.prepare(self.accelerator.device)
        if self.args.gradient_checkpointing:
            enable_input_grads(self.model)
        self.training_log = TrainingLog()
        self.components = build(
            config,
            args=self.args,
            policy=self.policy,
            data=self.data,
            rewards=self.rewards,
            engine=engine,
            accelerator=self.accelerator,
            all_gather=self._all_gather,
            run_folder=self.run_folder,
            log=self.training_log,
            on_rollout=self._record_rollout,
        )
        self.engine, self.collector = self.components.engine, self.components.collector
        self.forward_backward, self.window = self.components.forward_backward, self.components.window
        self.entropy_controller = self.components.entropy_controller
        self.health = HealthMonitors(config)
        # One-time messages already printed; the command line sets these when it prints them itself.
        self.printed_plan = self.printed_loss_hint = False

    # ---- one GRPO step ---------------------------------------------------------------------------------------------

    def optimizer_step(self, model: nn.Module) -> tuple[Tensor, int]:
        """One GRPO step: roll out when the window is used up, then leave the step's gradients in `model`."""
        started = time.perf_counter()
        model.train()
        if hasattr(self.optimizer, "train"):  # schedule-free optimizers
            self.optimizer.train()
        self._sync_reference()
        with disable_dropout(self.model, enabled=not self.config.logprob_dropout):
            samples = self.window.samples(model, self.state)
            result = self.forward_backward(model, samples, entropy_coef=self._entropy_coef())
        self._drop_nonfinite_gradients()
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        self._record_update(result, tokens, seconds=time.perf_counter() - started)
        return result.loss, tokens

    def take_reference(self) -> None:
        """Makes the policy as it is now the reference of the KL term, unless that is the base model."""
        self.window.reference = kl_reference(self.config, self.model)

    @property
    def reference(self) -> Reference | None:
        """The policy that the KL term is measured against; None without a KL term."""
        return self.window.reference

    def _sync_reference(self) -> None:
        """TR-DPO: every `ref_model_sync_steps` optimizer steps the reference moves towards the policy."""
        if not isinstance(self.reference, ReferencePolicy) or not self.config.sync_ref_model:
            return
        if self.state.global_step and self.state.global_step % self.config.ref_model_sync_steps == 0:
            self.reference.soft_update(self.config.ref_model_mixup_alpha)

    def _entropy_coef(self) -> float:
        return self.config.entropy_coef if self.entropy_controller is None else self.entropy_controller.applied_coef

    def _drop_nonfinite_gradients(self) -> None:
        """With fp16 the loss scaler does this instead: it meets infinite gradients on purpose."""
        if self.accelerator.scaler is None:
            finite = self.health.gradients.check(self.model, self.state.global_step + 1)
            self.training_log.metrics.add("nonfinite_step_share", 0.0 if finite else 1.0)

    # ---- data ------------------------------------------------------------------------------------------------------

    def steps_per_epoch(self) -> int:
        if not self.train_rows:
            raise ConfigError("Training needs a train_dataset.")
        assert self.plan.steps_per_epoch is not None
        return self.plan.steps_per_epoch

    def completions_per_step(self) -> int:
        return self.plan.completions_per_step

    def tokenized_rows(self, dataset: Any, purpose: str) -> list[TokenizedRow]:
        """The rows of a dataset as prompts that fit; `purpose` is named in the message about those that do not."""
        return tokenized_rows(dataset, purpose, self.policy, self.config)

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate_dataset(self, dataset: Any, metric_key_prefix: str) -> dict[str, float]:
        if dataset is None:
            raise ConfigError("Evaluation needs an eval_dataset: pass it to GRPOTrainer or to evaluate().")
        started = time.perf_counter()
        prompts = [row.to_prompt(row.row) for row in self._rows_to_evaluate(dataset)]
        group_size = self.config.resolved_num_generations_eval
        result = self.collector.collect(
            prompts,
            rank_slice(len(prompts) * group_size, self.args.world_size, self.args.process_index),
            group_size=group_size,
            sampling=self.config.sampling_spec(),
            settings=self.config.advantage_settings(),
            trainer_state=copy.copy(self.state),
            seed_scope="eval",
            completions_at_once=self.eval_completions_at_once(),
        )
        self.run_folder.append_completions(
            result.groups, step=self.state.global_step, reward_names=self.rewards.names, split=metric_key_prefix
        )
        seconds = time.perf_counter() - started
        values = {
            **result.metrics.means(),
            "runtime": seconds,
            "prompts": float(len(prompts)),
            "samples_per_second": len(prompts) * group_size / seconds,
        }
        output = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(output)
        return output

    def check_evaluation(self, metrics: Mapping[str, float]) -> None:
        check_watched_metric(self.config.metric_for_best_model, metrics, self.rewards.names)

    def _rows_to_evaluate(self, dataset: Any) -> Sequence[TokenizedRow]:
        """The rows of a dataset that was given at the start, or of a new one."""
        for known, rows in self.data.eval_rows:
            if known is dataset:
                return rows
        dataset = as_row_dataset(dataset)
        check_columns(self.rewards, dataset)
        return self.tokenized_rows(dataset, "evaluation")

    def eval_completions_at_once(self) -> int | None:
        """`per_device_eval_batch_size` where the user set it; otherwise all completions are sampled together."""
        explicit = "per_device_eval_batch_size" in self.config.explicit_fields
        return self.config.per_device_eval_batch_size if explicit else None

    # ---- logging ---------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        if not self.printed_plan:
            self.printed_plan = True
            # Without any logging set-up only warnings are seen, and what was raised or is dropped must be.
            adjusted = self.plan.original_accumulation or self.plan.dropped_prompts_per_epoch
            level = logging.WARNING if adjusted else logging.INFO
            for line in self.plan.describe():
                logger.log(level, "%s", line)
            if self.reference is not None:
                logger.info("reference policy: %s", self.reference.description)
        # A second call is a run of its own.
        stream = prompt_stream(self.config, self.train_rows, self.plan) if self.train_rows else self.window.stream
        self.window.close(stream, make_dynamic_sampling(self.config, stream))
        self.health = HealthMonitors(self.config)
        self.training_log.metrics.clear()

    def training_metrics(self) -> dict[str, float]:
        if self.config.log_completions:
            self.components.completion_table.show(self.state.global_step)
        if not self.printed_loss_hint and self.is_world_process_zero():
            self.printed_loss_hint = True
            print("A loss near 0 is normal: advantages sum to zero in each group. Watch `reward`.")
        return self.training_log.take()

    def _record_rollout(self, result: RolloutResult) -> None:
        self.state.num_input_tokens_seen += result.tokens
        if self.is_world_process_zero():
            self.health.signal.check(result.metrics)
        about: dict[str, Any] = {"step": self.state.global_step + 1, "reward_names": self.rewards.names}
        self.run_folder.append_completions(result.groups, **about)
        self.run_folder.append_completions(result.replaced, **about, replaced=True)
        if self.config.log_completions:
            self.components.completion_table.add(result.groups, self.state.global_step + 1, result.extras)

    def _record_update(self, result: StepResult, tokens: int, seconds: float) -> None:
        gathered = self._all_gather((result.metrics, result.entropy_sum, tokens))
        step_metrics = merge_metrics(metrics for metrics, _, _ in gathered)
        if self.state.global_step % self.plan.steps_per_rollout == 0:
            self.health.mismatch.check(step_metrics)
        metrics = self.training_log.metrics
        metrics.merge(step_metrics)
        metrics.add("step_time", seconds)
        self.training_log.add_time("updating", result.seconds)
        metrics.add_sum("tokens_per_second", sum(count for _, _, count in gathered), seconds)
        if self.entropy_controller is not None:
            metrics.add("entropy_coef", self.entropy_controller.coef)
            self.entropy_controller.update(sum(entropy for _, entropy, _ in gathered), result.totals.entropy_tokens)
        elif self.config.entropy_coef:
            metrics.add("entropy_coef", self.config.entropy_coef)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def resume_fingerprint(self) -> dict[str, Any]:
        return {
            **resume_fingerprint(self.config, self.plan),
            **describe_adapter(self.model),
            "parameters": self.policy.total_parameters,
            "trainable_parameters": self.policy.trainable_parameters,
            "model": self.checkpointer.start_hash(self.model),
            "prompts": len(self.train_rows),
            "dataset": self._hash_of_rows,
            "rewards": self.rewards.fingerprints,
        }

    def manifest_fields(self) -> dict[str, Any]:
        return {
            "seed": self.config.seed,
            "model_name": model_name_or_path(self.model),
            "plan": self.plan.describe(),
            "trainable_parameters": self.policy.trainable_parameters,
            "parameters": self.policy.total_parameters,
            "adapter": self.model.active_adapter if isinstance(self.model, PeftModel) else None,
            "quantization": quantization(self.model),
            "micro_batch_tokens": self.forward_backward.token_budget,
            "start": self.model_argument,
            "reference_policy": None if self.reference is None else self.reference.description,
        }

    @functools.cached_property
    def _hash_of_rows(self) -> str:
        return rows_hash(self.train_rows)

    def state_dict(self) -> dict[str, Any]:
        # A fresh adapter's reference may have started at random; that of a whole model is the model of the start.
        keeps_reference = self.reference is not None and (
            self.config.sync_ref_model or hasattr(self.model, "peft_config")
        )
        return {
            **self.window.state_dict(),
            **self.training_log.state_dict(),
            "entropy_controller": None if self.entropy_controller is None else self.entropy_controller.state_dict(),
            "reference": self.reference.state_dict() if self.reference is not None and keeps_reference else None,
            "health": self.health.state_dict(),
            "micro_batch_tokens": self.forward_backward.token_budget,
            "engine_copies": self.engine.copies if isinstance(self.engine, LocalEngine) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.load_state_dict(state)
        self.training_log.load_state_dict(state)
        if self.entropy_controller is not None:
            self.entropy_controller.load_state_dict(state["entropy_controller"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.load_state_dict(state["reference"])
        self.health.load_state_dict(state["health"])
        if self.config.micro_batch_tokens is None:
            # The free memory may differ now; the run continues as it was.
            self.forward_backward.token_budget = state["micro_batch_tokens"]
        if isinstance(self.engine, LocalEngine):
            self.engine.copies = state["engine_copies"]

    def save_files(self, folder: Path) -> None:
        self.components.completion_table.save(folder)

    def load_files(self, folder: Path) -> None:
        self.components.completion_table.load(folder)
