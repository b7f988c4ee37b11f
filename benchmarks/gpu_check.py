"""Correctness and speed on the machine's accelerator, with random weights: nothing is downloaded.

Checks, in float32 and bfloat16: chunked log-probs and their gradients against full logits; packed rows, in which
completions share their prompt, against padded ones; the engine's log-probs against the scored ones. Then seconds and
peak memory of a GRPO step with and without gradient checkpointing, beside TRL's where TRL is installed; steps that
would begin after `--seconds` are left out and named.
Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from grupo import GRPOConfig, GRPOTrainer
from grupo.policy.batching import collate
from grupo.policy.chunked_logprobs import chunked_logprobs, logprobs_from_logits
from grupo.policy.logprob_model import LogprobModel
from grupo.rollout.engine import GenerationRequest, completion_seed
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingSpec
from grupo.types import Prompt, TrainingSample

# Largest relative error of gradients, and mean gap of engine and scored log-probs in nats.
TOLERANCES = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (5e-2, 5e-2)}


def model_of(small: bool, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """About half a billion random parameters, or 1 million with `small`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}
        if small
        else {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "num_key_value_heads": 8}
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=8192 if small else 65536, max_position_embeddings=8192, eos_token_id=1, pad_token_id=2, **sizes
    )
    return LlamaForCausalLM(config).to(device=device, dtype=dtype)


def tokenizer_of(vocabulary_size: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocabulary_size)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t1", pad_token="t2", unk_token="t0")


def check_logprobs(model: LlamaForCausalLM) -> float:
    """Largest relative error of the gradient of chunked log-probs and entropy against full logits."""
    weight = model.get_output_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, weight.shape[1], generator=generator).to(weight).requires_grad_()
    targets = torch.randint(weight.shape[0], (512,), generator=generator).to(weight.device)
    chunked = sum(part.sum() for part in chunked_logprobs(hidden, weight, targets, with_entropy=True))
    full = sum(part.sum() for part in logprobs_from_logits(hidden @ weight.T, targets, with_entropy=True))
    found, wanted = (torch.autograd.grad(value, hidden)[0].float() for value in (chunked, full))
    return float((found - wanted).norm() / wanted.norm())


def check_engine(model: LlamaForCausalLM, tokens: int) -> float:
    """Mean gap in nats between the engine's log-probs and the scored ones."""
    prompt = Prompt(id=0, row=0, token_ids=tuple(range(10, 74)), content="")
    engine = LocalEngine(model, decode=lambda ids: "", stop_token_ids=[1])
    seeds = tuple(completion_seed(0, "check", 0, place) for place in range(8))
    (group,) = engine.generate([GenerationRequest(prompt, seeds)], SamplingSpec(max_new_tokens=tokens))
    samples = [TrainingSample(prompt.token_ids, c.token_ids, 1.0, True, True, c.behavior_logprobs) for c in group]
    batch = collate(samples, pad_token_id=2, device=next(model.parameters()).device)
    with torch.no_grad():
        scored = LogprobModel(model).logprobs(model, batch).logprobs
    assert batch.behavior_logprobs is not None
    return float((scored - batch.behavior_logprobs).abs()[batch.completion_mask].mean())


def check_sharing(model: LlamaForCausalLM) -> float:
    """Largest relative error of the gradient of packed rows against padded ones, over uneven completions."""
    prompt = tuple(range(10, 74))
    samples = [TrainingSample(prompt, tuple(range(100, 120 + 9 * place)), 1.0, True, True, None) for place in range(4)]
    logprob_model, device = LogprobModel(model), next(model.parameters()).device
    logprob_model.prepare(model, device)
    assert logprob_model.use_prompt_sharing, "packed rows are not used with this model"
    gradients = []
    for packed in (True, False):
        model.zero_grad(set_to_none=True)
        with logprob_model.attention() if packed else contextlib.nullcontext():
            batch = collate(samples, pad_token_id=2, device=device, packed=packed)
            logprob_model.logprobs(model, batch).logprobs.mean().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    model.zero_grad(set_to_none=True)
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def step_seconds(model: LlamaForCausalLM, tokens: int, checkpointing: bool, peer: bool = False) -> dict[str, float]:
    """Seconds a step (the second of two), and peak bytes above the loaded model; of TRL's trainer with `peer`."""
    if peer:
        from datasets import Dataset
        from trl import GRPOConfig as ConfigClass
        from trl import GRPOTrainer as TrainerClass
    else:
        ConfigClass, TrainerClass, Dataset = GRPOConfig, GRPOTrainer, None
    tokenizer = tokenizer_of(model.config.vocab_size)
    rows = [{"prompt": " ".join(f"t{10 + (row * 7 + place) % 1000}" for place in range(64))} for row in range(8)]
    cuda = next(model.parameters()).is_cuda
    loaded = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        config = ConfigClass(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=tokens,
            gradient_checkpointing=checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            use_cpu=not cuda,
        )
        trainer = TrainerClass(
            model, lambda completions, **_: [float(index) for index in range(len(completions))], config,
            Dataset.from_list(rows) if Dataset else rows,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if peer:
        steps = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
        return {"s_per_step": steps[-1], "peak_bytes": float(torch.cuda.max_memory_allocated() - loaded if cuda else 0)}
    last = [entry for entry in trainer.state.log_history if "step_time" in entry][-1]
    peak = torch.cuda.max_memory_allocated() - loaded if cuda else 0
    return {
        "s_per_step": last["step_time"],
        "s_generating": last["time/generating"],
        "s_updating": last["time/updating"],
        "peak_bytes": float(peak),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0)
    options = parser.parse_args()
    small, begun = options.small, time.perf_counter()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(f"device {name}, torch {torch.__version__}")
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        started = time.perf_counter()
        model = model_of(small, dtype, device)
        gradient = max(check_logprobs(model), check_sharing(model))
        gap = check_engine(model, 16 if small else 128)
        good = gradient <= TOLERANCES[dtype][0] and gap <= TOLERANCES[dtype][1]
        failed |= not good
        print(f"{'ok' if good else 'FAILED'} {dtype}: gradient error {gradient:.1e}, engine gap {gap:.1e} nats "
              f"({time.perf_counter() - started:.1f} s)")  # fmt: skip
        for tokens in (16,) if small else (1024, 4096):
            for checkpointing, peer in ((False, False), (True, False), (True, True)):
                setting = {"dtype": str(dtype), "tokens": tokens, "checkpointing": checkpointing, "trl": peer}
                if peer and importlib.util.find_spec("trl") is None:
                    print(f"left out, TRL is not installed: {json.dumps(setting)}")
                elif time.perf_counter() - begun > options.seconds:
                    print(f"left out, no time: {json.dumps(setting)}")
                else:
                    row = step_seconds(model_of(small, dtype, device), tokens, checkpointing, peer)
                    print(json.dumps({**setting, **row}), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
