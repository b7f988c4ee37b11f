"""The parts of a run that do the work of a step, built from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grupo.algo.entropy import EntropyController
from grupo.algo.losses import GRPOLoss
from grupo.config import GRPOConfig
from grupo.config.batch_plan import StepPlan
from grupo.data.curriculum import Curriculum
from grupo.data.prompt_stream import PromptStream, StatefulPromptStream
from grupo.data.prompts import (
    TokenizedRow,
)
from grupo.metrics import AllGather
from grupo.models.inspect import base_model
from grupo.models.memory import default_token_budget
from grupo.policy.forward_backward import ForwardBackward
from grupo.policy.logprob_model import LogprobModel
from grupo.policy.reference import Reference, reference_policy
from grupo.rewards.execution.runner import RewardRunner
from grupo.rollout.collector import RolloutCollector, RolloutResult
from grupo.rollout.engine import Engine
from grupo.rollout.groups import DynamicSampling
from grupo.rollout.local.engine import LocalEngine
from grupo.runs.completions_table import CompletionTable
from grupo.runs.folder import RunFolder
from grupo.trainer.rollout_window import RolloutWindow
from grupo.trainer.setup import LoadedPolicy, TrainingData
from grupo.trainer.training_log import TrainingLog


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts of a run that do the work of a step."""

    engine: Engine
    collector: RolloutCollector
    forward_backward: ForwardBackward
    window: RolloutWindow
    entropy_controller: EntropyController | None
    completion_table: CompletionTable


def build(
    config: GRPOConfig,
    *,
    args: Any,
    policy: LoadedPolicy,
    data: TrainingData,
    rewards: RewardRunner,
    engine: Engine | None,
    accelerator: Any,
    all_gather: AllGather,
    run_folder: RunFolder,
    log: TrainingLog,
    on_rollout: Callable[[RolloutResult], None],
) -> Components:
    """Builds the components of a run.

    Args:
        args: the base class's arguments: checkpointing and offload as they were resolved.
        on_rollout: called after each rollout, to record it.
    """
    engine = engine or LocalEngine(
        policy.model, decode=policy.decode, stop_token_ids=policy.stop_token_ids, autocast=accelerator.autocast
    )
    collector = RolloutCollector(
        engine=engine,
        rewards=rewards,
        prompt_text=policy.prompt_tokenizer.text,
        all_gather=all_gather,
        run_seed=config.seed,
        is_main_rank=run_folder.rank == 0,
    )
    controller = entropy_controller(config)
    forward_backward = _forward_backward(
        config,
        args=args,
        policy=policy,
        data=data,
        accelerator=accelerator,
        all_gather=all_gather,
        on_token_budget=lambda budget: run_folder.update_json("manifest.json", {"micro_batch_tokens": budget}),
    )
    stream = prompt_stream(config, data.train_rows, data.plan)
    window = RolloutWindow(
        plan=data.plan,
        stream=stream,
        collector=collector,
        forward_backward=forward_backward,
        sampling=config.sampling_spec(),
        advantages=config.advantage_settings(),
        dynamic_sampling=make_dynamic_sampling(config, stream),
        reference=kl_reference(config, policy.model),
        log=log,
        on_rollout=on_rollout,
        world_size=args.world_size,
        rank=run_folder.rank,
    )
    table = CompletionTable(
        run_folder.path,
        rewards.names,
        rows_to_print=config.num_completions_to_print,
        unique_prompts=config.log_unique_prompts,
        rank=run_folder.rank,
    )
    return Components(
        engine=engine,
        collector=collector,
        forward_backward=forward_backward,
        window=window,
        entropy_controller=controller,
        completion_table=table,
    )


def _forward_backward(
    config: GRPOConfig,
    *,
    args: Any,
    policy: LoadedPolicy,
    data: TrainingData,
    accelerator: Any,
    all_gather: AllGather,
    on_token_budget: Callable[[int], None],
) -> ForwardBackward:
    checkpointing = bool(args.gradient_checkpointing)
    budget = config.micro_batch_tokens
    if budget is None:
        budget = default_token_budget(base_model(policy.model), accelerator.device, checkpointing=checkpointing)
    dtypes = {parameter.dtype for parameter in policy.model.parameters()}
    return ForwardBackward(
        logprob_model=LogprobModel(
            policy.model,
            temperature=config.training_temperature,
            head_in_float32=config.cast_lm_head_to_fp32,
        ),
        loss_function=GRPOLoss(config.loss_settings()),
        distributed=accelerator,
        micro_batch_size=data.plan.micro_batch_size,
        pad_token_id=policy.pad_token_id(),
        pad_to_multiple_of=config.resolved_pad_to_multiple_of,
        max_sequence_tokens=config.micro_batch_tokens or longest_sequence(config, data.train_rows),
        token_budget=budget,
        on_token_budget=on_token_budget,
        checkpointing=checkpointing,
        offload_activations=args.offload_activations,
        all_gather=all_gather,
        autocast=accelerator.autocast,
        dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
        top_entropy_quantile=config.top_entropy_quantile,
        kl_on_dead_groups=config.kl_on_dead_groups,
        has_entropy_bonus=config.use_adaptive_entropy or config.entropy_coef != 0.0,
    )


def longest_sequence(config: GRPOConfig, rows: Sequence[TokenizedRow]) -> int | None:
    """Tokens of the longest prompt with the longest completion that training can have."""
    longest_prompt = max((len(row.token_ids) for row in rows), default=0)
    return longest_prompt + config.sampling_spec().max_new_tokens


def kl_reference(config: GRPOConfig, model: Any) -> Reference | None:
    """The policy that the KL term is measured against: the model as it is now, or its base; None without a KL term."""
    return reference_policy(model, config.reference_policy) if config.beta != 0.0 else None


def prompt_stream(config: GRPOConfig, rows: Sequence[TokenizedRow], plan: StepPlan) -> PromptStream:
    """The order of the training prompts; one with a state only where what came of them has a say in it."""
    per_window = plan.prompts_per_rollout * plan.rollouts_per_step
    seed, shuffle = config.resolved_data_seed, config.shuffle_dataset
    if not config.dynamic_sampling and config.curriculum_column is None:
        return PromptStream(rows, prompts_per_window=per_window, seed=seed, shuffle=shuffle)
    curriculum = None
    if config.curriculum_column is not None:
        curriculum = Curriculum(
            rows,
            column=config.curriculum_column,
            threshold=config.curriculum_threshold,
            window=config.curriculum_window,
            success_reward=config.curriculum_success_reward,
            prompts_per_window=per_window,
        )
    return StatefulPromptStream(rows, prompts_per_window=per_window, seed=seed, shuffle=shuffle, curriculum=curriculum)


def make_dynamic_sampling(config: GRPOConfig, stream: PromptStream) -> DynamicSampling | None:
    """Where groups without a signal are replaced from; None: they are not."""
    if not config.dynamic_sampling:
        return None
    assert isinstance(stream, StatefulPromptStream)
    return DynamicSampling(stream.draw, config.dynamic_sampling_max_rounds)


def entropy_controller(config: GRPOConfig) -> EntropyController | None:
    if not config.use_adaptive_entropy:
        return None
    return EntropyController(
        config.entropy_coef,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        minimum=config.entropy_coef_min,
        maximum=config.entropy_coef_max,
    )
