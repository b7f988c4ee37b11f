"""The gradient of one optimizer step: micro-batches over denominators that are computed once for the whole step.

B completions, T completion tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grupo.algo.entropy import entropy_threshold
from grupo.algo.losses import GRPOLoss, LossInputs, LossOutput, StepTotals
from grupo.errors import TrainingError
from grupo.metrics import AllGather, MetricAccumulator
from grupo.models.activation_offload import offload_activations
from grupo.models.activation_recompute import recompute_cheap_activations
from grupo.models.inplace_lora import inplace_lora
from grupo.models.memory import is_out_of_memory, trim_between_layers
from grupo.policy.batching import collate, micro_batches
from grupo.policy.logprob_model import LogprobModel, TokenLogprobs, disable_dropout
from grupo.policy.reference import Reference
from grupo.types import MicroBatch, TrainingSample
from grupo.utils.malloc import trim_host_memory

logger = logging.getLogger("grupo")

ENTROPY_ROUNDING = 1e-4
"""Tokens this close below the entropy threshold still reach it, in nats. The threshold is often the entropy of a single
token, which the first tokens of a group share; recomputed in other micro-batches, rounding would decide which of them
reach it."""


class DistributedContext(Protocol):
    """The part of `accelerate.Accelerator` that `ForwardBackward` uses."""

    num_processes: int
    device: torch.device

    def backward(self, loss: Tensor) -> None: ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step's forward and backward passes, besides the gradients."""

    loss: Tensor
    """Scalar; its mean over ranks is the loss of the step."""
    metrics: MetricAccumulator
    """Metrics of this rank only."""
    totals: StepTotals
    entropy_sum: float
    """Sum of the entropies of this rank's tokens in the entropy bonus, in nats; 0 without a bonus."""
    computed_tokens: int
    """Tokens computed with gradient on this rank, padding included; a shared prompt counts once."""
    seconds: float = 0.0


@dataclass(eq=False, kw_only=True)
class ForwardBackward:
    """Computes the gradient of one optimizer step from the samples of this rank.

    The gradient does not depend on how the step is split into micro-batches or distributed over ranks: every loss is a
    sum divided by the denominators of the whole step. Samples without any gradient are left out of forward and
    backward, but count in the denominators.
    """

    logprob_model: LogprobModel
    loss_function: GRPOLoss
    distributed: DistributedContext
    micro_batch_size: int
    pad_token_id: int
    all_gather: AllGather
    """Returns one object from each rank, in rank order."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of forward passes."""
    dtype: torch.dtype = torch.float32
    """Dtype of advantages and log-probs in micro-batches; float64 for a float64 model."""
    pad_to_multiple_of: int | None = None
    max_sequence_tokens: int | None = None
    """Maximum number of tokens of a prompt with one completion; see `micro_batches`."""
    token_budget: int | None = None
    """Maximum number of tokens per micro-batch, padding included; a single completion may exceed it. None: no limit."""
    checkpointing: bool = False
    """Whether gradient checkpointing recomputes whole layers."""
    offload_activations: bool = False
    """Whether activations are kept in host memory until the backward pass."""
    on_token_budget: Callable[[int], None] | None = None
    """Called with the new budget after running out of memory."""
    top_entropy_quantile: float = 1.0
    kl_on_dead_groups: bool = True
    has_entropy_bonus: bool = False

    def __call__(self, model: nn.Module, samples: Sequence[TrainingSample], *, entropy_coef: float = 0.0) -> StepResult:
        """Leaves the step's gradients in the parameters of `model`, the module that the training step received."""
        started = time.perf_counter()
        self._prepare(model)
        while True:
            try:
                with self._forward_context():
                    result = self._step(model, samples, entropy_coef)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve_token_budget(samples, error)
                # Gradients of earlier micro-batches are discarded, because the step starts over.
                model.zero_grad(set_to_none=True)
            else:
                return dataclasses.replace(result, seconds=time.perf_counter() - started)

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Context of all forward passes and their backward passes."""
        decoder, device = self.logprob_model.decoder, self.distributed.device
        # Checkpointing and offloading manage activations themselves.
        recomputing = None if self.checkpointing or self.offload_activations else decoder
        with (
            self.logprob_model.attention(),
            inplace_lora(self.logprob_model.base),
            trim_between_layers(decoder, device),
            recompute_cheap_activations(recomputing),
        ):
            yield

    def _halve_token_budget(self, samples: Sequence[TrainingSample], error: Exception) -> None:
        """Sets the token budget to half of the largest micro-batch.

        Raises:
            TrainingError: the largest micro-batch is a single completion, or there are other ranks, which cannot start
                over.
        """
        largest = max(self._collate(members).input_ids.numel() for members in self._micro_batches(samples))
        longest = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        if self.distributed.num_processes > 1 or largest <= longest:
            raise TrainingError(
                f"Out of memory with {largest} tokens in a micro-batch; the longest completion and its prompt have "
                f"{longest}. Set micro_batch_tokens={max(longest, largest // 2)}, gradient_checkpointing=True, or a "
                "lower max_completion_length."
            ) from error
        self.token_budget = max(longest, largest // 2)
        logger.warning(
            "Out of memory with %d tokens in a micro-batch. Micro-batches now have at most %d (micro_batch_tokens).",
            largest,
            self.token_budget,
        )
        if self.on_token_budget is not None:
            self.on_token_budget(self.token_budget)

    def _step(self, model: nn.Module, samples: Sequence[TrainingSample], entropy_coef: float) -> StepResult:
        metrics = MetricAccumulator()
        threshold, entropy_tokens = self._entropy_threshold(model, samples)
        totals = self._totals(samples, entropy_tokens)
        active = [sample for sample in samples if self._has_gradient(sample)]
        self._count_skipped(metrics, [sample for sample in samples if not self._has_gradient(sample)])
        effective = sum(len(sample.completion_ids) for sample in samples if sample.has_loss and sample.advantage != 0.0)
        metrics.add_sum("effective_tokens", float(effective), 1.0 / self.distributed.num_processes)
        passes = list(self._synced_micro_batches(active, filler=dataclasses.replace(samples[0], has_loss=False)))
        loss = torch.zeros((), device=self.distributed.device)
        entropy_sum = policy_loss = 0.0
        computed_tokens = 0
        for index, (members, _) in enumerate(passes):
            last = index + 1 == len(passes)
            with contextlib.nullcontext() if last else self.distributed.no_sync(model):
                batch = self._collate(members)
                token_logprobs, output = self._loss(model, batch, totals, threshold, entropy_coef)
                # Gradients are averaged over ranks; the loss is a sum over them.
                share = output.loss * self.distributed.num_processes
                self.distributed.backward(share)
            trim_host_memory(self.distributed.device.type)
            loss += share.detach()
            _add_loss_metrics(metrics, output.sums, output.extremes)
            _add_logprob_gap(metrics, batch, token_logprobs.logprobs.detach())
            metrics.add_sum("padding_share", batch.input_ids.numel() - batch.num_tokens, batch.input_ids.numel())
            computed_tokens += batch.input_ids.numel()
            if self.has_entropy_bonus:
                entropy_sum += _bonus_entropy(token_logprobs, batch, threshold)
                policy_loss += float(output.policy_loss)
        if self.has_entropy_bonus:
            metrics.add_sum("policy_loss", policy_loss, 1.0 / self.distributed.num_processes)
        if not passes:
            _zero_gradients(model)
        metrics.add_sum("computed_tokens", float(computed_tokens), 1.0 / self.distributed.num_processes)
        return StepResult(loss, metrics, totals, entropy_sum, computed_tokens)

    def add_fixed_logprobs(
        self, model: nn.Module, samples: Sequence[TrainingSample], *, with_old: bool, reference: Reference | None
    ) -> list[TrainingSample]:
        """The samples with the log-probs that stay fixed while their window is trained on.

        Samples without loss get the engine's log-probs or zeros as placeholders: nothing reads them, but a micro-batch
        has log-probs for all of its samples or for none.
        """
        if not with_old and reference is None:
            return list(samples)
        of_policy: Sequence[tuple[float, ...] | None] = [sample.old_logprobs for sample in samples]
        of_reference: Sequence[tuple[float, ...] | None] = [sample.reference_logprobs for sample in samples]
        self._prepare(model)
        # Even with `logprob_dropout`, which applies to log-probs with gradient only.
        with disable_dropout(model), self._forward_context():
            if with_old:
                of_policy = self._logprobs(model, samples)
            if reference is not None:
                with reference.active():
                    of_reference = self._logprobs(model, samples)
        return [
            dataclasses.replace(sample, old_logprobs=old, reference_logprobs=reference_logprobs)
            for sample, old, reference_logprobs in zip(samples, of_policy, of_reference, strict=True)
        ]

    def _prepare(self, model: nn.Module) -> None:
        # In the dtype of the real passes, or the checks would mistake rounding for a difference.
        with self.autocast():
            self.logprob_model.prepare(model, self.distributed.device)

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        """(T,) log-probs of every sample; placeholders for samples without loss."""
        found: dict[int, tuple[float, ...]] = {}
        with_loss = [sample for sample in samples if sample.has_loss]
        for members, is_own in self._synced_micro_batches(with_loss, filler=samples[0]):
            batch = self._collate(members)
            with self.autocast():
                logprobs = self.logprob_model.logprobs(model, batch).logprobs.tolist()
            if is_own:
                for sample, values in zip(members, logprobs, strict=True):
                    found[id(sample)] = tuple(values[: len(sample.completion_ids)])
        return [found.get(id(sample)) or _placeholder_logprobs(sample) for sample in samples]

    def _synced_micro_batches(
        self, samples: Sequence[TrainingSample], filler: TrainingSample
    ) -> Iterator[tuple[list[TrainingSample], bool]]:
        """Micro-batches with whether they count, padded to the same number on every rank: ranks with more forward
        passes than others would wait for them forever."""
        batches = list(self._micro_batches(samples))
        passes: int = max(self.all_gather(len(batches)))
        yield from ((batch, True) for batch in batches)
        yield from (([filler], False) for _ in range(passes - len(batches)))

    def _loss(
        self,
        model: nn.Module,
        batch: MicroBatch,
        totals: StepTotals,
        threshold: Tensor | None,
        entropy_coef: float,
    ) -> tuple[TokenLogprobs, LossOutput]:
        offload = offload_activations(model) if self.offload_activations else contextlib.nullcontext()
        with self.autocast(), offload:
            token_logprobs = self.logprob_model.logprobs(model, batch, with_entropy=True)
        output = self.loss_function(
            LossInputs(
                policy_logprobs=token_logprobs.logprobs,
                advantages=batch.advantages,
                mask=batch.loss_mask,
                old_logprobs=batch.old_logprobs,
                reference_logprobs=batch.reference_logprobs,
                behavior_logprobs=batch.behavior_logprobs,
                entropy=token_logprobs.entropy,
                entropy_threshold=threshold,
                kl_completions=None if self.kl_on_dead_groups else batch.has_signal,
            ),
            totals,
            entropy_coef=entropy_coef,
        )
        return token_logprobs, output

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
        return micro_batches(
            samples,
            self.micro_batch_size,
            max_sequence_tokens=self.max_sequence_tokens,
            token_budget=self.token_budget,
            packed=bool(self.logprob_model.use_prompt_sharing),
        )

    def _collate(self, members: Sequence[TrainingSample]) -> MicroBatch:
        return collate(
            members,
            packed=bool(self.logprob_model.use_prompt_sharing),
            pad_token_id=self.pad_token_id,
            device=self.distributed.device,
            dtype=self.dtype,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def _count_skipped(self, metrics: MetricAccumulator, skipped: Sequence[TrainingSample]) -> None:
        """Counts samples left out of the update: the engine's values in the entropy, and as not clipped in the clip
        shares, since without an advantage nothing is clipped."""
        with_loss = [sample for sample in skipped if sample.has_loss]
        for sample in with_loss:
            if sample.entropies is not None:
                metrics.add_sum("entropy", float(sum(sample.entropies)), float(len(sample.entropies)))
        if with_loss:
            mask = collate(with_loss, pad_token_id=self.pad_token_id, device=torch.device("cpu")).loss_mask
            _add_loss_metrics(metrics, *self.loss_function.clip_metrics_without_advantage(mask))

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """Whether any term of the loss has a non-zero coefficient on this sample."""
        if not sample.has_loss:
            return False
        has_kl = self.loss_function.settings.beta != 0.0 and (self.kl_on_dead_groups or sample.group_has_signal)
        return sample.advantage != 0.0 or has_kl or self.has_entropy_bonus

    def _totals(self, samples: Sequence[TrainingSample], entropy_tokens: int | None) -> StepTotals:
        """Denominators of the step over all ranks, without the samples that have no loss."""
        with_loss = [sample for sample in samples if sample.has_loss]
        own = (sum(len(sample.completion_ids) for sample in with_loss), len(with_loss))
        tokens, rows = (sum(column) for column in zip(*self.all_gather(own), strict=True))
        return StepTotals(tokens, rows, entropy_tokens=tokens if entropy_tokens is None else entropy_tokens)

    @torch.no_grad()
    def _entropy_threshold(
        self, model: nn.Module, samples: Sequence[TrainingSample]
    ) -> tuple[Tensor | None, int | None]:
        """Entropy that the top share of the step's tokens reaches, and how many reach it, over all ranks.

        Needs a forward pass of its own, because the threshold of one micro-batch is not that of the step.
        """
        if self.top_entropy_quantile >= 1.0:
            return None, None
        values = [torch.zeros(0, dtype=self.dtype)]
        with_loss = [sample for sample in samples if sample.has_loss]
        for members, is_own in self._synced_micro_batches(with_loss, filler=samples[0]):
            batch = self._collate(members)
            with self.autocast():
                entropy = self.logprob_model.logprobs(model, batch, with_entropy=True).entropy
            assert entropy is not None
            if is_own:
                values.append(entropy[batch.loss_mask].cpu())
        everywhere = torch.cat(self.all_gather(torch.cat(values)))
        threshold = entropy_threshold(everywhere, self.top_entropy_quantile) - ENTROPY_ROUNDING
        return threshold.to(self.distributed.device), int((everywhere >= threshold).sum())


def _bonus_entropy(token_logprobs: TokenLogprobs, batch: MicroBatch, threshold: Tensor | None) -> float:
    """Sum of the entropies of the tokens in the entropy bonus, in nats."""
    assert token_logprobs.entropy is not None
    entropy = token_logprobs.entropy.detach()
    in_bonus = batch.loss_mask if threshold is None else batch.loss_mask & (entropy >= threshold)
    return float(entropy[in_bonus].sum())


def _add_loss_metrics(
    metrics: MetricAccumulator, sums: Mapping[str, tuple[Tensor, Tensor]], extremes: Mapping[str, Tensor]
) -> None:
    for name, (numerator, denominator) in sums.items():
        metrics.add_sum(name, float(numerator), float(denominator))
    for name, value in extremes.items():
        number = float(value)
        if abs(number) != float("inf"):
            (metrics.add_max if name.endswith("max") else metrics.add_min)(name, number)


def _add_logprob_gap(metrics: MetricAccumulator, batch: MicroBatch, logprobs: Tensor) -> None:
    """Adds the distance between the engine's and our log-probs under the policy that sampled the completions."""
    if batch.behavior_logprobs is None:
        return
    own = logprobs if batch.old_logprobs is None else batch.old_logprobs
    gap = (own - batch.behavior_logprobs).abs()[batch.completion_mask]
    metrics.add_sum("sampling/logprob_gap", float(gap.sum()), float(gap.numel()))


def _placeholder_logprobs(sample: TrainingSample) -> tuple[float, ...]:
    return sample.behavior_logprobs or (0.0,) * len(sample.completion_ids)


def _zero_gradients(model: nn.Module) -> None:
    """Sets zero gradients instead of none, so that the optimizer's momentum and weight decay still apply."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
