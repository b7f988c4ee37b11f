"""`GRPOTrainer`: one GRPO step per optimizer step, on top of `transformers.Trainer`.

The base class keeps what is not GRPO: optimizer, schedule, callbacks, reporters, checkpoints, Hub. Its data loader
yields tickets, the numbers of the optimizer steps of an epoch, and `training_step` does a whole step: roll out when the
window is used up, then leave the step's gradients. There is no loss, mask or reward arithmetic in this file.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import PredictionOutput

from grupo.algo.losses import GRPOLoss
from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.data.curriculum import check_curriculum_column
from grupo.data.prompts import (
    PromptTokenizer,
    TokenizedRow,
    apply_length_policy,
    check_for_images,
    check_token_ids,
    column_names,
    plain_rows,
    rows_hash,
    tokenize_rows,
)
from grupo.errors import ConfigError, UnsupportedError
from grupo.metrics import MetricAccumulator, merge_metrics
from grupo.models.inspect import (
    base_model,
    check_stop_token_ids,
    check_trainable,
    context_length,
    describe_adapter,
    encode_stop_strings,
    model_name_or_path,
    quantization,
    stop_token_ids,
    vocabulary_size,
)
from grupo.models.load import enable_input_grads
from grupo.models.load_options import load_options
from grupo.models.memory import default_token_budget
from grupo.models.peft_io import check_vocab_consistency
from grupo.policy.forward_backward import ForwardBackward, StepResult
from grupo.policy.logprob_model import LogprobModel, disable_dropout
from grupo.policy.reference import ReferencePolicy, reference_policy
from grupo.rewards.library.reward_model import RewardFunctions
from grupo.rollout.collector import RolloutCollector, RolloutResult
from grupo.rollout.engine import Engine
from grupo.rollout.local.engine import LocalEngine
from grupo.rollout.schedule import rank_slice, schedule_completions
from grupo.runs.completions_table import CompletionTable
from grupo.runs.folder import RunFolder, check_writable
from grupo.runs.latest import resolve_latest
from grupo.trainer.checkpointing import ResumableTrainer
from grupo.trainer.health import GradientGuard, SamplerCheck, SignalCheck
from grupo.trainer.rollout_window import Window
from grupo.trainer.setup import (
    LastStepIsLogged,
    UnchangedIsTold,
    check_best_metric,
    check_optimizer,
    check_watched_metric,
    compared_settings,
    dataset_length,
    entropy_controller,
    make_dynamic_sampling,
    mapping,
    named_datasets,
    one_item_per_step,
    only_item,
    plain_datasets,
    policy,
    prompt_stream,
    refuse_unsupported,
    reward_runner,
    warn_of_rounding,
)
from grupo.types import TrainingSample

logger = logging.getLogger("grupo")


class GRPOTrainer(ResumableTrainer):
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
        engine: what samples completions; by default the model itself, in this process.

    Raises:
        ConfigError, DataError, RewardError: before the first step, with what to set instead.
        TrainingError: during training, when going on would be worse than stopping.
    """

    # The base class types these as optional; here they are always there.
    args: Any
    optimizer: Any
    eval_dataset: Any

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
        refuse_unsupported(
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if args is None:
            name = model if isinstance(model, str) else model_name_or_path(model)
            args = GRPOConfig(f"{Path(name).name or 'model'}-GRPO")
        model = resolve_latest(model) if isinstance(model, str) else model
        if not isinstance(args, GRPOConfig):
            raise ConfigError(f"args is {type(args).__name__}; it must be a grupo.GRPOConfig.")
        self.config = args
        self.model_argument = model if isinstance(model, str) else None
        """What training starts from, as it was given by name: a model, or an adapter."""
        if tokenizer is not None:
            if processing_class is not None:
                raise ConfigError("tokenizer= is the old name of processing_class=, and both were given. Pass one.")
            logger.warning("tokenizer= is the old name of processing_class=; it is used as that.")
            processing_class = tokenizer
        check_writable(Path(str(args.output_dir)))
        self.rewards = reward_runner(reward_funcs, args, reward_processing_classes)
        train_dataset, eval_dataset = plain_rows(train_dataset), plain_datasets(eval_dataset)
        # What can be refused without the model is refused before it is loaded.
        num_prompts = None if train_dataset is None else dataset_length(train_dataset)
        self.plan = StepPlan.from_config(args, num_prompts=num_prompts)
        self._check_columns(train_dataset, eval_dataset)
        check_curriculum_column(args.curriculum_column, train_dataset)
        check_best_metric(args, eval_dataset)

        set_seed(args.seed)
        model, self.tokenizer = policy(
            model,
            args,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self.trainable_parameters, self.total_parameters = check_trainable(model)
        asked = load_options(model)
        self.context_length = min(filter(None, (context_length(model), asked.max_seq_length)), default=None)
        self.vocabulary_size = vocabulary_size(model)
        check_stop_token_ids(args.sampling_spec().stop_token_ids, self.vocabulary_size)
        check_vocab_consistency(model, self.tokenizer)
        self.prompt_tokenizer = PromptTokenizer(self.tokenizer, mapping(args.chat_template_kwargs))
        self.stop_token_ids = (
            *stop_token_ids(self.tokenizer, model),
            *encode_stop_strings(self.tokenizer, args.stop_strings),
        )
        self.train_rows = self.tokenized_rows(train_dataset, "training") if train_dataset is not None else []
        if train_dataset is not None:
            self.plan = StepPlan.from_config(args, num_prompts=len(self.train_rows))
            self.prompt_stream = prompt_stream(args, self.train_rows, self.plan)
        # What cannot be evaluated is found now, not at the first evaluation.
        self._eval_rows = [
            (dataset, self.tokenized_rows(dataset, "evaluation"))
            for dataset in named_datasets(eval_dataset).values()
            if dataset is not None
        ]

        super().__init__(
            model=model,
            args=one_item_per_step(args, asked),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.tokenizer,
            callbacks=[*(callbacks or []), LastStepIsLogged(), UnchangedIsTold()],
            optimizers=optimizers,
        )
        check_optimizer(optimizers[0], self.model, args)
        warn_of_rounding(self.model, args.learning_rate)
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                f"One process sees {self.args.n_gpu} GPUs, which torch would use through DataParallel. Start one "
                f"process per GPU with `accelerate launch --num_processes {self.args.n_gpu}`, or show it one GPU by "
                "CUDA_VISIBLE_DEVICES=0."
            )
        self.rewards.prepare(self.accelerator.device)
        # The loss is divided by the denominators of the whole step; nothing is left to divide.
        self.model_accepts_loss_kwargs = False
        if self.args.gradient_checkpointing:
            enable_input_grads(self.model)
        self.take_reference()
        self.engine: Engine = engine or LocalEngine(
            self.model, decode=self._decode, stop_token_ids=self.stop_token_ids, autocast=self.accelerator.autocast
        )
        self.collector = RolloutCollector(
            engine=self.engine,
            rewards=self.rewards,
            prompt_text=self.prompt_tokenizer.text,
            all_gather=self._all_gather,
            run_seed=args.seed,
            is_main_rank=self.args.process_index == 0,
        )
        self.entropy_controller = entropy_controller(args)
        self.forward_backward = self._forward_backward()
        self.run_folder = RunFolder(str(args.output_dir), rank=self.args.process_index)
        self.completion_table = CompletionTable(
            self.run_folder.path,
            self.rewards.names,
            rows_to_print=args.num_completions_to_print,
            unique_prompts=args.log_unique_prompts,
            rank=self.args.process_index,
        )
        self.seconds = dict.fromkeys(("generating", "rewarding", "logprobs", "updating"), 0.0)
        """Of training, on this process, by phase."""
        self._metrics = MetricAccumulator()
        self._window: Window | None = None
        self._start_guards()
        self._step_tokens = 0
        # What a person has been told already; set by who tells it elsewhere.
        self.told_about_loss = False
        self.told_plan = False

    # ---- one GRPO step ---------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One GRPO step: roll out when the window is used up, then leave the step's gradients in `model`."""
        started = time.perf_counter()
        model.train()
        if hasattr(self.optimizer, "train"):  # schedule-free optimizers
            self.optimizer.train()
        self._sync_reference()
        with disable_dropout(self.model, enabled=not self.config.logprob_dropout):
            samples = self._samples_of_step(model)
            result = self.forward_backward(model, samples, entropy_coef=self._entropy_coef())
        self._drop_nonfinite_gradients()
        self._record_update(samples, result, seconds=time.perf_counter() - started)
        return result.loss

    def _samples_of_step(self, model: nn.Module) -> list[TrainingSample]:
        """This rank's samples of the coming optimizer step, from the open window or a new one."""
        window, step = divmod(self.state.global_step, self.plan.steps_per_rollout)
        if self._window is None or self._window[0] != window:
            assert step == 0, "a checkpoint in the middle of a window has the window"
            self._window = (window, self._roll_out(model, window))
        return self._window[1][step]

    def _roll_out(self, model: nn.Module, window: int) -> list[list[TrainingSample]]:
        """Collects the rollouts of a window and deals their samples to its optimizer steps."""
        prompts = self.prompt_stream.window(window)
        dealt = schedule_completions(
            window_size=self.plan.completions_per_rollout * self.plan.rollouts_per_step,
            rollout_size=self.plan.completions_per_rollout,
            passes=self.plan.num_iterations,
            step_size=self.plan.completions_per_step,
            world_size=self.args.world_size,
            rank=self.args.process_index,
        )
        own_numbers = sorted({number for numbers in dealt for number in numbers})
        samples: dict[int, TrainingSample] = {}
        scored: dict[int, TrainingSample] = {}
        beside_rewards = self._scores_beside_rewards()

        def score(unpaid: Mapping[int, TrainingSample], first: int = 0) -> None:
            """Fills `scored` with the window, of whose last rollout, from number `first` on, rewards may be unknown."""
            window_samples = {**samples, **{number + first: sample for number, sample in unpaid.items()}}
            ordered = [window_samples[number] for number in own_numbers]
            scored.update(zip(own_numbers, self._scored(model, ordered), strict=True))

        for index in range(self.plan.rollouts_per_step):
            first = index * self.plan.completions_per_rollout
            numbers = [n - first for n in own_numbers if first <= n < first + self.plan.completions_per_rollout]
            chosen = prompts[index * self.plan.prompts_per_rollout : (index + 1) * self.plan.prompts_per_rollout]
            is_last = index + 1 == self.plan.rollouts_per_step
            result = self.collector.collect(
                chosen,
                numbers,
                group_size=self.plan.num_generations,
                sampling=self.config.sampling_spec(),
                settings=self.config.advantage_settings(),
                # A copy: a reward function must not be able to move the run.
                trainer_state=copy.copy(self.state),
                dynamic_sampling=make_dynamic_sampling(self.config, self.prompt_stream),
                while_waiting=functools.partial(score, first=first) if is_last and beside_rewards else None,
            )
            self._record_rollout(result)
            samples.update({number + first: sample for number, sample in result.samples.items()})
        if not beside_rewards:
            score({})
        by_number = {
            number: dataclasses.replace(
                samples[number],
                old_logprobs=scored[number].old_logprobs,
                reference_logprobs=scored[number].reference_logprobs,
            )
            for number in own_numbers
        }
        return [[by_number[number] for number in numbers] for numbers in dealt]

    def _scored(self, model: nn.Module, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        started = time.perf_counter()
        scored = self.forward_backward.add_fixed_logprobs(
            model, samples, with_old=self.plan.steps_per_rollout > 1, reference=self.reference
        )
        self._spend("logprobs", time.perf_counter() - started)
        return scored

    def _scores_beside_rewards(self) -> bool:
        """Not where rewards decide what is scored at all."""
        is_scored = self.plan.steps_per_rollout > 1 or self.reference is not None
        is_chosen = self.config.dynamic_sampling or self.config.num_generations_trained is not None
        return is_scored and not is_chosen and self.rewards.overlaps_logprobs

    def take_reference(self) -> None:
        """Makes the policy as it is now the one that the KL term holds on to, unless that is the base model."""
        with_kl = self.config.beta != 0.0
        self.reference = reference_policy(self.model, self.config.reference_policy) if with_kl else None

    def _sync_reference(self) -> None:
        """TR-DPO: every `ref_model_sync_steps` optimizer steps the reference moves towards the policy."""
        if not isinstance(self.reference, ReferencePolicy) or not self.config.sync_ref_model:
            return
        if self.state.global_step and self.state.global_step % self.config.ref_model_sync_steps == 0:
            self.reference.soft_update(self.config.ref_model_mixup_alpha)

    def _entropy_coef(self) -> float:
        return self.config.entropy_coef if self.entropy_controller is None else self.entropy_controller.applied_coef

    def _drop_nonfinite_gradients(self) -> None:
        """With fp16 the loss scaler sees to it instead: it meets infinite gradients on purpose."""
        if self.accelerator.scaler is None:
            finite = self.gradient_guard.check(self.model, self.state.global_step + 1)
            self._metrics.add("nonfinite_step_share", 0.0 if finite else 1.0)

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The tickets of one epoch: the numbers of its optimizer steps, the same on every rank."""
        if not self.train_rows:
            raise ConfigError("Training needs a train_dataset.")
        assert self.plan.steps_per_epoch is not None
        return DataLoader(range(self.plan.steps_per_epoch), batch_size=1, collate_fn=only_item)  # type: ignore[arg-type]

    def tokenized_rows(self, dataset: Any, what: str) -> list[TokenizedRow]:
        """The rows of a dataset as prompts that fit; `what` they are for, in what is said of those that do not."""
        rows = tokenize_rows(dataset, self.prompt_tokenizer)
        check_token_ids(rows, self.vocabulary_size)
        return apply_length_policy(
            rows,
            max_prompt_length=self.config.max_prompt_length,
            overlong_prompts=self.config.overlong_prompts,
            max_completion_length=self.config.sampling_spec().max_new_tokens,
            context_length=self.context_length,
            what=what,
        )

    def _check_columns(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Reward functions find their columns, in every dataset, before anything is loaded."""
        for dataset in [train_dataset, *named_datasets(eval_dataset).values()]:
            if dataset is not None and dataset_length(dataset):
                check_for_images(column_names(dataset))
                self.rewards.check_columns(column_names(dataset))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    # ---- what the base class would count wrongly, as it sees tickets ------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """One ticket; nothing in it can be counted."""
        return [ticket for _, ticket in zip(range(num_batches), epoch_iterator, strict=False)], None

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Completions per epoch."""
        return len(dataloader) * self.plan.completions_per_step

    def get_total_train_batch_size(self, args: Any) -> int:
        """Completions per optimizer step."""
        return self.plan.completions_per_step

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's share of the last step's forward and backward, by the usual 6 x parameters x tokens."""
        return 6 * self._step_tokens * self.total_parameters // int(self.args.world_size)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Samples and scores completions for every evaluation prompt, each exactly once.

        The random numbers are the same in every evaluation, so that two of them differ by the policy alone. Group size
        and temperature are `num_generations_eval` and `temperature`.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigError("Evaluation needs an eval_dataset: pass it to GRPOTrainer or to evaluate().")
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}"))
        else:
            metrics = self._sample_and_score(dataset, metric_key_prefix)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if eval_dataset is None and self.is_in_train:
            check_watched_metric(self.config.metric_for_best_model, metrics, self.rewards.names)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The metrics of `evaluate` for another dataset. There are no logits to return: the completions are in the run
        folder, in `completions.jsonl`."""
        metrics = self._sample_and_score(test_dataset, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)  # type: ignore[arg-type]

    def _sample_and_score(self, dataset: Any, metric_key_prefix: str) -> dict[str, float]:
        """Metrics of an evaluation, which are logged."""
        started = time.perf_counter()
        prompts = [row.draw(row.row) for row in self._rows_to_evaluate(dataset)]
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

    def _rows_to_evaluate(self, dataset: Any) -> list[TokenizedRow]:
        """The rows of a dataset that was given at the start, or of a new one."""
        for known, rows in self._eval_rows:
            if known is dataset:
                return rows
        dataset = plain_rows(dataset)
        self._check_columns(None, dataset)
        return self.tokenized_rows(dataset, "evaluation")

    def eval_completions_at_once(self) -> int | None:
        """`per_device_eval_batch_size` where the user set it; otherwise all rows are sampled together."""
        explicit = "per_device_eval_batch_size" in self.config.explicit_fields
        return self.config.per_device_eval_batch_size if explicit else None

    # ---- logging -----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        accept_changes: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """As `transformers.Trainer.train`; opens the run folder first. Ctrl-C and SIGTERM end it behind a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest one in `output_dir` that is whole.
            accept_changes: names of settings that a resumed run may have otherwise than the one that was interrupted.

        Raises:
            ConfigError: there is no such checkpoint, or it belongs to another run.
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM, after the running step and its checkpoint.
        """
        checkpoint = self.checkpoint_to_resume(resume_from_checkpoint, accept_changes=accept_changes)
        self.open_run_folder(checkpoint)
        if not self.told_plan:
            self.told_plan = True
            # Without any logging set-up only warnings are seen, and what was raised or is dropped must be.
            level = (
                logging.WARNING
                if self.plan.original_accumulation or self.plan.dropped_prompts_per_epoch
                else logging.INFO
            )
            for line in self.plan.describe():
                logger.log(level, "%s", line)
            if self.reference is not None:
                logger.info("reference policy: %s", self.reference.description)
        # A second call is a run of its own.
        self._window = None
        if self.train_rows:
            self.prompt_stream = prompt_stream(self.config, self.train_rows, self.plan)
        self._start_guards()
        self._metrics.clear()
        try:
            return self._train_to_the_end(checkpoint, *args, **kwargs)
        finally:
            self.run_folder.is_open = False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log to a training log, and writes every log to `metrics.jsonl`."""
        if "loss" in logs:
            if self.config.log_completions:
                self.completion_table.show(self.state.global_step)
            logs.update(self._metrics.means())
            self._metrics.clear()
            if not self.told_about_loss and self.is_world_process_zero():
                self.told_about_loss = True
                print("A loss near 0 is normal: advantages sum to zero in each group. Watch `reward`.")
        logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log(logs, start_time)
        if self.run_folder.path.is_dir():
            self.run_folder.append_metrics({"step": self.state.global_step, **logs})

    def _record_rollout(self, result: RolloutResult) -> None:
        self.state.num_input_tokens_seen += result.tokens
        self._metrics.merge(result.metrics)
        if self.is_world_process_zero():
            self.signal_check.check(result.metrics)
        for name, value in self.prompt_stream.report(result.outcomes).items():
            self._metrics.add(name, value)
        self._spend("generating", result.seconds_generating)
        self._spend("rewarding", result.seconds_rewarding)
        about: dict[str, Any] = {"step": self.state.global_step + 1, "reward_names": self.rewards.names}
        self.run_folder.append_completions(result.groups, **about)
        self.run_folder.append_completions(result.replaced, **about, replaced=True)
        if self.config.log_completions:
            self.completion_table.add(result.groups, self.state.global_step + 1, result.extras)

    def _record_update(self, samples: Sequence[TrainingSample], result: StepResult, seconds: float) -> None:
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        gathered = self._all_gather((result.metrics, result.entropy_sum, tokens))
        step_metrics = merge_metrics(metrics for metrics, _, _ in gathered)
        self._step_tokens = sum(tokens for _, _, tokens in gathered)
        if self.state.global_step % self.plan.steps_per_rollout == 0:
            self.sampler_check.check(step_metrics)
        self._metrics.merge(step_metrics)
        self._metrics.add("step_time", seconds)
        self._spend("updating", result.seconds)
        self._metrics.add_sum("tokens_per_second", self._step_tokens, seconds)
        if self.entropy_controller is not None:
            self._metrics.add("entropy_coef", self.entropy_controller.coef)
            self.entropy_controller.update(sum(entropy for _, entropy, _ in gathered), result.totals.entropy_tokens)
        elif self.config.entropy_coef:
            self._metrics.add("entropy_coef", self.config.entropy_coef)

    def _spend(self, phase: str, seconds: float) -> None:
        """Counts the seconds of a phase, for the next log and for the whole run."""
        self._metrics.add(f"time/{phase}", seconds)
        self.seconds[phase] += seconds

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def run_settings(self) -> dict[str, Any]:
        return {
            **compared_settings(self.config, self.plan),
            **describe_adapter(self.model),
            "parameters": self.total_parameters,
            "trainable_parameters": self.trainable_parameters,
            "model": self.hash_of_start(),
            "prompts": len(self.train_rows),
            "dataset": self._hash_of_rows,
            "rewards": self.rewards.fingerprints,
        }

    def about_run(self) -> dict[str, Any]:
        return {
            "seed": self.config.seed,
            "model_name": model_name_or_path(self.model),
            "plan": self.plan.describe(),
            "trainable_parameters": self.trainable_parameters,
            "parameters": self.total_parameters,
            "adapter": self.model.active_adapter if isinstance(self.model, PeftModel) else None,
            "quantization": quantization(self.model),
            "micro_batch_tokens": self.forward_backward.token_budget,
            "start": self.model_argument,
            "reference_policy": None if self.reference is None else self.reference.description,
        }

    @functools.cached_property
    def _hash_of_rows(self) -> str:
        return rows_hash(self.train_rows)

    def steps_per_epoch(self) -> int:
        assert self.plan.steps_per_epoch is not None
        return self.plan.steps_per_epoch

    def run_state(self) -> dict[str, Any]:
        # That of a fresh adapter may begin anew at random, that of a whole model is the model that the run began with.
        keeps_reference = self.reference is not None and (
            self.config.sync_ref_model or hasattr(self.model, "peft_config")
        )
        return {
            "window": self._window,
            "prompt_stream": self.prompt_stream.state_dict(),
            "entropy_controller": None if self.entropy_controller is None else self.entropy_controller.state_dict(),
            "reference": self.reference.state_dict() if self.reference is not None and keeps_reference else None,
            "metrics": dataclasses.asdict(self._metrics),
            "seconds": dict(self.seconds),
            "guards": [guard.in_a_row for guard in self._guards()],
            "micro_batch_tokens": self.forward_backward.token_budget,
            "engine_copies": self.engine.copies if isinstance(self.engine, LocalEngine) else None,
        }

    def load_run_state(self, state: dict[str, Any]) -> None:
        self._window = state["window"]
        self.prompt_stream.load_state_dict(state["prompt_stream"])
        if self.entropy_controller is not None:
            self.entropy_controller.load_state_dict(state["entropy_controller"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.load_state_dict(state["reference"])
        self._metrics = MetricAccumulator(**state["metrics"])
        self.seconds = dict(state["seconds"])
        for guard, in_a_row in zip(self._guards(), state["guards"], strict=True):
            guard.in_a_row = in_a_row
        if self.config.micro_batch_tokens is None:
            # Free memory may be another now; the run goes on as it was.
            self.forward_backward.token_budget = state["micro_batch_tokens"]
        if isinstance(self.engine, LocalEngine):
            self.engine.copies = state["engine_copies"]

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _forward_backward(self) -> ForwardBackward:
        logprob_model = LogprobModel(
            self.model,
            temperature=self.config.training_temperature,
            head_in_float32=self.config.cast_lm_head_to_fp32,
        )
        pad = self.tokenizer.pad_token_id
        floats = {parameter.dtype for parameter in self.model.parameters()}
        return ForwardBackward(
            logprob_model=logprob_model,
            loss_function=GRPOLoss(self.config.loss_settings()),
            distributed=self.accelerator,
            micro_batch_size=self.plan.micro_batch_size,
            # Padding is never read; an id without an embedding would be looked up all the same.
            pad_token_id=0 if pad is None or pad >= (self.vocabulary_size or pad + 1) else pad,
            pad_to_multiple_of=self.config.resolved_pad_to_multiple_of,
            max_sequence_tokens=self.config.micro_batch_tokens or self._longest_row(),
            token_budget=self._token_budget(),
            on_token_budget=self._write_token_budget,
            checkpointing=bool(self.args.gradient_checkpointing),
            offload_activations=self.args.offload_activations,
            all_gather=self._all_gather,
            autocast=self.accelerator.autocast,
            dtype=torch.float64 if torch.float64 in floats else torch.float32,
            top_entropy_quantile=self.config.top_entropy_quantile,
            kl_on_dead_groups=self.config.kl_on_dead_groups,
            has_entropy_bonus=self.entropy_controller is not None or self.config.entropy_coef != 0.0,
        )

    def _token_budget(self) -> int | None:
        """Tokens of a micro-batch: as set, or by what their activations take."""
        if self.config.micro_batch_tokens is not None:
            return self.config.micro_batch_tokens
        return default_token_budget(
            base_model(self.model), self.accelerator.device, checkpointing=bool(self.args.gradient_checkpointing)
        )

    def _longest_row(self) -> int:
        """Tokens of the longest prompt with the longest completion that training can have."""
        longest_prompt = max((len(row.token_ids) for row in self.train_rows), default=0)
        return longest_prompt + self.config.sampling_spec().max_new_tokens

    def _write_token_budget(self, budget: int | None) -> None:
        self.run_folder.update_json("manifest.json", {"micro_batch_tokens": budget})

    def _start_guards(self) -> None:
        self.gradient_guard = GradientGuard(
            max_steps=self.config.max_nonfinite_steps, learning_rate=self.config.learning_rate
        )
        self.sampler_check = SamplerCheck(
            warn_above=self.config.logprob_gap_warn, stop_above=self.config.logprob_gap_stop
        )
        self.signal_check = SignalCheck(max_completion_length=self.config.sampling_spec().max_new_tokens)

    def _guards(self) -> tuple[Any, ...]:
        return self.gradient_guard, self.sampler_check, self.signal_check
