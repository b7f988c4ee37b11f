"""The gradient of one optimizer step: micro-batches over denominators that are computed once for the whole step.

B rows, T completion tokens.
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
from grupo.algo.losses import LossInputs, LossOutput, Objective, StepTotals
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
"""Nats. Tokens this close below the entropy threshold reach it. The threshold is often one token's own entropy, and the
first tokens of a group all have the same: computed again in another micro-batch, rounding would choose among them."""


class DistributedContext(Protocol):
    """What the update needs from `accelerate.Accelerator`."""

    num_processes: int
    device: torch.device

    def backward(self, loss: Tensor) -> None: ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class StepResult:
    """What one call left behind, besides the gradients."""

    loss: Tensor
    """Scalar; its mean over ranks is the loss of the step."""
    metrics: MetricAccumulator
    """Of this rank only."""
    totals: StepTotals
    entropy_sum: float
    """Nats, over the tokens that the entropy bonus acts on, this rank only; 0 without a bonus."""
    computed_tokens: int
    """Computed with gradient on this rank: a shared prompt once, padding included."""
    seconds: float = 0.0


@dataclass(eq=False, kw_only=True)
class ForwardBackward:
    """Computes the gradient of one optimizer step on the samples of this rank.

    The gradient is the same however the step is cut into micro-batches or dealt to ranks: every loss is a sum over the
    denominators of the whole step. Rows without any gradient are left out of forward and backward, but stay in the
    denominators.
    """

    logprob_model: LogprobModel
    objective: Objective
    distributed: DistributedContext
    micro_batch_size: int
    pad_token_id: int
    all_gather: AllGather
    """One object from each rank, in rank order."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of the policy's forward."""
    dtype: torch.dtype = torch.float32
    """Of the numbers beside the token ids; float64 for a float64 model."""
    pad_to_multiple_of: int | None = None
    max_sequence_tokens: int | None = None
    """Of a completion with its prompt at most; see `micro_batches`."""
    token_budget: int | None = None
    """Tokens of a micro-batch at most, padding included, where one completion alone has no more; None: no limit."""
    checkpointing: bool = False
    """Whether the model recomputes whole layers."""
    offload_activations: bool = False
    """What backward needs waits for it in host memory."""
    on_token_budget: Callable[[int], None] | None = None
    """Called with the new budget after an out-of-memory."""
    top_entropy_quantile: float = 1.0
    kl_on_dead_groups: bool = True
    has_entropy_bonus: bool = False

    def __call__(self, model: nn.Module, samples: Sequence[TrainingSample], *, entropy_coef: float = 0.0) -> StepResult:
        """Leaves the step's gradients in the parameters of `model`, the module that the training step was given."""
        started = time.perf_counter()
        self._prepare(model)
        while True:
            try:
                with self._scoring():
                    result = self._step(model, samples, entropy_coef)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve_token_budget(samples, error)
                # Of the micro-batches before it: the step begins again.
                model.zero_grad(set_to_none=True)
            else:
                return dataclasses.replace(result, seconds=time.perf_counter() - started)

    @contextlib.contextmanager
    def _scoring(self) -> Iterator[None]:
        """Around forwards, and around their backwards where there are any."""
        decoder, device = self.logprob_model.decoder, self.distributed.device
        # Checkpointing computes whole layers again, and what is offloaded waits elsewhere: those decide then.
        recomputing = None if self.checkpointing or self.offload_activations else decoder
        with (
            self.logprob_model.attention(),
            inplace_lora(self.logprob_model.base),
            trim_between_layers(decoder, device),
            recompute_cheap_activations(recomputing),
        ):
            yield

    def _halve_token_budget(self, samples: Sequence[TrainingSample], error: Exception) -> None:
        """Half of what the largest micro-batch had.

        Raises:
            TrainingError: a micro-batch is a single completion already, or other ranks are in the middle of theirs.
        """
        largest = max(self._collate(rows).input_ids.numel() for rows in self._micro_batches(samples))
        longest = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        if self.distributed.num_processes > 1 or largest <= longest:
            raise TrainingError(
                f"Out of memory with {largest} tokens in a micro-batch, of which the longest completion and its prompt "
                f"have {longest}. Set micro_batch_tokens={max(longest, largest // 2)}, gradient_checkpointing=True, or "
                "max_completion_length lower."
            ) from error
        self.token_budget = max(longest, largest // 2)
        logger.warning(
            "Out of memory with %d tokens in a micro-batch; from now on one has at most %d (micro_batch_tokens).",
            largest,
            self.token_budget,
        )
        if self.on_token_budget is not None:
            self.on_token_budget(self.token_budget)

    def _step(self, model: nn.Module, samples: Sequence[TrainingSample], entropy_coef: float) -> StepResult:
        metrics = MetricAccumulator()
        threshold, entropy_tokens = self._entropy_threshold(model, samples)
        totals = self._totals(samples, entropy_tokens)
        working = [sample for sample in samples if self._has_gradient(sample)]
        self._count_skipped(metrics, [sample for sample in samples if not self._has_gradient(sample)])
        effective = sum(len(sample.completion_ids) for sample in samples if sample.has_loss and sample.advantage != 0.0)
        metrics.add_sum("effective_tokens", float(effective), 1.0 / self.distributed.num_processes)
        passes = list(self._synced_micro_batches(working, _without_loss(samples[0])))
        loss = torch.zeros((), device=self.distributed.device)
        entropy_sum = policy_loss = 0.0
        computed_tokens = 0
        for index, (rows, _) in enumerate(passes):
            last = index + 1 == len(passes)
            with contextlib.nullcontext() if last else self.distributed.no_sync(model):
                batch = self._collate(rows)
                scores, output = self._loss(model, batch, totals, threshold, entropy_coef)
                # Gradients are averaged over ranks; the loss is a sum over them.
                share = output.loss * self.distributed.num_processes
                self.distributed.backward(share)
            trim_host_memory(self.distributed.device.type)
            loss += share.detach()
            _add_loss_metrics(metrics, output.sums, output.extremes)
            _add_gap(metrics, batch, scores.logprobs.detach())
            metrics.add_sum("padding_share", batch.input_ids.numel() - batch.num_tokens, batch.input_ids.numel())
            computed_tokens += batch.input_ids.numel()
            if self.has_entropy_bonus:
                entropy_sum += _entropy_above(scores, batch, threshold)
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

        Rows without loss are not scored. They get the engine's log-probs, or zeros: nothing reads them, but a
        micro-batch has them for all of its rows or for none.
        """
        if not with_old and reference is None:
            return list(samples)
        counted = [index for index, sample in enumerate(samples) if sample.has_loss]
        old: dict[int, tuple[float, ...]] = {}
        frozen: dict[int, tuple[float, ...]] = {}
        self._prepare(model)
        # Also where dropout is asked for: that is for log-probs with gradient.
        with disable_dropout(model), self._scoring():
            if with_old:
                old = self._logprob_rows(model, samples, counted)
            if reference is not None:
                with reference.active():
                    frozen = self._logprob_rows(model, samples, counted)
        return [
            dataclasses.replace(
                sample,
                old_logprobs=old.get(index, _placeholder_logprobs(sample)) if with_old else sample.old_logprobs,
                reference_logprobs=frozen.get(index, _placeholder_logprobs(sample))
                if reference
                else sample.reference_logprobs,
            )
            for index, sample in enumerate(samples)
        ]

    def _prepare(self, model: nn.Module) -> None:
        # In the arithmetic of scoring, or its checks would take rounding for a difference.
        with self.autocast():
            self.logprob_model.prepare(model, self.distributed.device)

    @torch.no_grad()
    def _logprob_rows(
        self, model: nn.Module, samples: Sequence[TrainingSample], counted: Sequence[int]
    ) -> dict[int, tuple[float, ...]]:
        """Log-probs of the samples at `counted`."""
        index_of = {id(samples[index]): index for index in counted}
        results: dict[int, tuple[float, ...]] = {}
        for rows, is_own in self._synced_micro_batches([samples[index] for index in counted], samples[0]):
            batch = self._collate(rows)
            with self.autocast():
                logprobs = self.logprob_model.logprobs(model, batch).logprobs.tolist()
            if is_own:
                for sample, values in zip(rows, logprobs, strict=True):
                    results[index_of[id(sample)]] = tuple(values[: len(sample.completion_ids)])
        return results

    def _synced_micro_batches(
        self, samples: Sequence[TrainingSample], filler: TrainingSample
    ) -> Iterator[tuple[list[TrainingSample], bool]]:
        """Micro-batches, and whether they are this rank's own: every rank makes the same number of passes, or those
        with more would hang, waiting for the others."""
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
            scores = self.logprob_model.logprobs(model, batch, with_entropy=True)
        output = self.objective(
            LossInputs(
                policy_logprobs=scores.logprobs,
                advantages=batch.advantages,
                mask=batch.loss_mask,
                old_logprobs=batch.old_logprobs,
                reference_logprobs=batch.reference_logprobs,
                behavior_logprobs=batch.behavior_logprobs,
                entropy=scores.entropy,
                entropy_threshold=threshold,
                kl_rows=None if self.kl_on_dead_groups else batch.has_signal,
            ),
            totals,
            entropy_coef=entropy_coef,
        )
        return scores, output

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
        return micro_batches(
            samples,
            self.micro_batch_size,
            max_sequence_tokens=self.max_sequence_tokens,
            token_budget=self.token_budget,
            packed=bool(self.logprob_model.use_prompt_sharing),
        )

    def _collate(self, rows: Sequence[TrainingSample]) -> MicroBatch:
        return collate(
            rows,
            packed=bool(self.logprob_model.use_prompt_sharing),
            pad_token_id=self.pad_token_id,
            device=self.distributed.device,
            dtype=self.dtype,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def _count_skipped(self, metrics: MetricAccumulator, skipped: Sequence[TrainingSample]) -> None:
        """Rows that were not computed still count: in the entropy by the engine's value, in the clip shares as not
        clipped, which a row without advantage never is."""
        counted = [sample for sample in skipped if sample.has_loss]
        for sample in counted:
            if sample.entropies is not None:
                metrics.add_sum("entropy", float(sum(sample.entropies)), float(len(sample.entropies)))
        if counted:
            mask = collate(counted, pad_token_id=self.pad_token_id, device=torch.device("cpu")).loss_mask
            _add_loss_metrics(metrics, *self.objective.clip_metrics_without_advantage(mask))

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """Whether any term of the loss has a coefficient other than zero on this row."""
        if not sample.has_loss:
            return False
        has_kl = self.objective.beta != 0.0 and (self.kl_on_dead_groups or sample.group_has_signal)
        return sample.advantage != 0.0 or has_kl or self.has_entropy_bonus

    def _totals(self, samples: Sequence[TrainingSample], entropy_tokens: int | None) -> StepTotals:
        """Denominators of the step over all ranks. Rows without loss are in none of them."""
        counted = [sample for sample in samples if sample.has_loss]
        own = (sum(len(sample.completion_ids) for sample in counted), len(counted))
        tokens, rows = (sum(column) for column in zip(*self.all_gather(own), strict=True))
        return StepTotals(tokens, rows, entropy_tokens=tokens if entropy_tokens is None else entropy_tokens)

    @torch.no_grad()
    def _entropy_threshold(
        self, model: nn.Module, samples: Sequence[TrainingSample]
    ) -> tuple[Tensor | None, int | None]:
        """The entropy that the top share of the step's tokens reaches, and how many reach it, over all ranks.

        Needs a pass of its own: no threshold of one micro-batch would be that of the step.
        """
        if self.top_entropy_quantile >= 1.0:
            return None, None
        values = [torch.zeros(0, dtype=self.dtype)]
        for rows, is_own in self._synced_micro_batches([sample for sample in samples if sample.has_loss], samples[0]):
            batch = self._collate(rows)
            with self.autocast():
                entropy = self.logprob_model.logprobs(model, batch, with_entropy=True).entropy
            assert entropy is not None
            if is_own:
                values.append(entropy[batch.loss_mask].cpu())
        everywhere = torch.cat(self.all_gather(torch.cat(values)))
        threshold = entropy_threshold(everywhere, self.top_entropy_quantile) - ENTROPY_ROUNDING
        return threshold.to(self.distributed.device), int((everywhere >= threshold).sum())


def _entropy_above(scores: TokenLogprobs, batch: MicroBatch, threshold: Tensor | None) -> float:
    """Sum of the entropies, in nats, of the tokens that the entropy bonus acts on."""
    assert scores.entropy is not None
    entropy = scores.entropy.detach()
    acting = batch.loss_mask if threshold is None else batch.loss_mask & (entropy >= threshold)
    return float(entropy[acting].sum())


def _add_loss_metrics(
    metrics: MetricAccumulator, sums: Mapping[str, tuple[Tensor, Tensor]], extremes: Mapping[str, Tensor]
) -> None:
    for name, (numerator, denominator) in sums.items():
        metrics.add_sum(name, float(numerator), float(denominator))
    for name, value in extremes.items():
        number = float(value)
        if abs(number) != float("inf"):
            (metrics.add_max if name.endswith("max") else metrics.add_min)(name, number)


def _add_gap(metrics: MetricAccumulator, batch: MicroBatch, logprobs: Tensor) -> None:
    """How far the engine's log-probs are from ours, on the policy that sampled; only there are both known."""
    if batch.behavior_logprobs is None:
        return
    scored = logprobs if batch.old_logprobs is None else batch.old_logprobs
    gap = (scored - batch.behavior_logprobs).abs()[batch.completion_mask]
    metrics.add_sum("sampling/logprob_gap", float(gap.sum()), float(gap.numel()))


def _placeholder_logprobs(sample: TrainingSample) -> tuple[float, ...]:
    return sample.behavior_logprobs or (0.0,) * len(sample.completion_ids)


def _without_loss(sample: TrainingSample) -> TrainingSample:
    return dataclasses.replace(sample, has_loss=False)


def _zero_gradients(model: nn.Module) -> None:
    """Zero gradients, not missing ones: the optimizer's momentum and weight decay act as they would have."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
