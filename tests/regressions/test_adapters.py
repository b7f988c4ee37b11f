"""The trained policy is the one that decodes and is saved; every folder loads with peft and transformers alone.

transformers #45127, peft #2018, #838, #1457, LlamaFactory PR #10832, #10137, #7665, trl #5150, #6700, tinker-cookbook
PR #593. Tied embeddings, adapters on embeddings and head, whole modules beside an adapter, added tokens.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from torch import Tensor

from grupo import GRPOConfig, GRPOTrainer
from grupo.models.peft_setup import add_adapter
from grupo.rollout.local.inference_copy import make_inference_copy
from harness import gradient_of, logs_of, relative_error, token_logprobs, varied
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

IDS = torch.arange(4, 40)[None]
BIASED = {"attention_bias": True, "mlp_bias": True}


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **more})


@dataclass(frozen=True)
class Kind:
    adapter: Any
    model: dict[str, Any] | None = None
    new_tokens: int = 0
    merges_when_tied: bool = True
    """Whether peft merges it; peft would merge an adapter on one of two tied layers into both."""


KINDS = {
    "everything": Kind(None),
    "LoRA": Kind(lora()),
    "LoRA on all layers but the head": Kind(lora(target_modules="all-linear")),
    "rsLoRA": Kind(lora(use_rslora=True)),
    "DoRA": Kind(lora(use_dora=True)),
    "biases of the adapter": Kind(lora(lora_bias=True), BIASED),
    "biases of the base model": Kind(lora(bias="all"), BIASED),
    "one layer of two": Kind(lora(layers_to_transform=[1])),
    "ranks by module": Kind(lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3})),
    "a whole head beside it": Kind(lora(modules_to_save=["lm_head"])),
    "embeddings and head beside it": Kind(lora(modules_to_save=["embed_tokens", "lm_head"])),
    "LoRA on the head": Kind(lora(target_modules=["q_proj", "lm_head"]), merges_when_tied=False),
    "LoRA on the embeddings": Kind(lora(target_modules=["q_proj", "embed_tokens"]), merges_when_tied=False),
    "some tokens": Kind(lora(trainable_token_indices=[5, 6, 7])),
    "added tokens": Kind(lora(), new_tokens=2),
    "added tokens, trained": Kind(lora(trainable_token_indices=[128, 129]), new_tokens=2),
    "parts of the base model as a start": Kind(lora(init_lora_weights="pissa")),
    "IA3": Kind(
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
}

# Someone without grupo, in a process of their own and without a network.
ELSEWHERE = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
ids, found = torch.arange(4, 40)[None], {}
def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits
for name, (folder, is_adapter, merges) in json.load(sys.stdin).items():
    AutoTokenizer.from_pretrained(folder)
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(folder)
    found[name] = [logits(model)]
    if is_adapter and merges:
        merged = model.merge_and_unload()
        found[name].append(logits(merged))
        merged.save_pretrained(folder + "/merged")
        again = AutoModelForCausalLM.from_pretrained(folder + "/merged")
        found[name].append(logits(again))
        head, embeddings = again.get_output_embeddings().weight, again.get_input_embeddings().weight
        assert (head is embeddings) == again.config.tie_word_embeddings
torch.save(found, sys.argv[1])
"""


@dataclass
class Life:
    """Results of one run."""

    gradient_errors: list[float]
    """Relative error of each step against the plain gradient."""
    logs: list[dict[str, Any]]
    copy_gap: float
    """Largest difference between the logits of the trained model and of the copy that decodes."""
    changed: set[str]
    """Names of the parameters that training changed."""
    trained: set[str]
    logits: Tensor
    folder: Path
    is_adapter: bool


class Spy:
    """Compares the gradient of each step with that of one plain forward per completion."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.update, self.model, self.errors = trainer.forward_backward, trainer.model, []
        trainer.forward_backward = self  # type: ignore[assignment]

    def __call__(self, model: Any, samples: Any, **keywords: Any) -> Any:
        result = self.update(model, samples, **keywords)
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}
        tokens = sum(len(sample.completion_ids) for sample in samples)
        terms = [s.advantage * token_logprobs(self.model, s.prompt_ids, s.completion_ids).sum() for s in samples]
        self.errors.append(relative_error(found, gradient_of(-sum(terms) / tokens, self.model)))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.update, name)


def base_folder(folder: Path, *, tied: bool, **config: Any) -> Path:
    if not folder.exists():
        model = tiny_model(tied=tied, **config)
        for name, parameter in model.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def live(root: Path, kind: Kind, *, tied: bool) -> Life:
    base = base_folder(root.parent / f"base {tied} {sorted(kind.model or {})}", tied=tied, **(kind.model or {}))
    model: Any = str(base)
    tokenizer = None
    if kind.new_tokens:
        from transformers import AutoModelForCausalLM

        model, tokenizer = AutoModelForCausalLM.from_pretrained(base), tiny_tokenizer()
        tokenizer.add_tokens([f"<new{index}>" for index in range(len(tokenizer), 128 + kind.new_tokens)])
        model.resize_token_embeddings(len(tokenizer))
    trainer = GRPOTrainer(
        model,
        varied,
        GRPOConfig(
            str(root),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            learning_rate=0.02,
            max_steps=2,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"prompt": "ab"}, {"prompt": "cde"}],
        processing_class=tokenizer,
        peft_config=copy.deepcopy(kind.adapter),
    )
    spy = Spy(trainer)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    trainer.save_model(str(root / "saved"))
    with torch.no_grad():
        trainer.model.eval()
        logits, copied = trainer.model(input_ids=IDS).logits, make_inference_copy(trainer.model)
        assert copied is not None
        gap = float((copied(input_ids=IDS).logits - logits).abs().max())
    return Life(
        gradient_errors=spy.errors,
        logs=logs_of(trainer),
        copy_gap=gap,
        changed={name for name in before if not torch.equal(before[name], after[name])},
        trained={name for name, p in after.items() if p.requires_grad},
        logits=logits,
        folder=root / "saved",
        is_adapter=kind.adapter is not None,
    )


TIED = ("everything", "LoRA", *(name for name in KINDS if "head" in name or "embeddings" in name or "tokens" in name))
"""Kinds for which it matters that embeddings and head share their weights."""
CASES = {name: (kind, False) for name, kind in KINDS.items()} | {f"{name}, tied": (KINDS[name], True) for name in TIED}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    root = tmp_path_factory.mktemp("lives")
    return {name: live(root / name, kind, tied=tied) for name, (kind, tied) in CASES.items()}


@pytest.fixture(scope="module")
def elsewhere(lives: dict[str, Life], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """Logits after loading; after merging; after saving and loading the merged model."""
    out = tmp_path_factory.mktemp("elsewhere") / "logits.pt"
    asked = {
        name: (str(life.folder), life.is_adapter, kind.merges_when_tied or not tied)
        for (name, life), (kind, tied) in zip(lives.items(), CASES.values(), strict=True)
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(out)],
        input=json.dumps(asked), capture_output=True, text=True, timeout=300, cwd=out.parent,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return torch.load(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_it_trains_with_the_plain_gradient_and_decodes_the_policy(name: str, lives: dict[str, Life]) -> None:
    life = lives[name]
    assert len(life.gradient_errors) == 2 and max(life.gradient_errors) < 1e-4
    assert max(line["sampling/logprob_gap"] for line in life.logs) < 1e-5 and life.copy_gap < 1e-4
    assert life.changed == life.trained, "every trainable weight changes, and no other one"


@pytest.mark.parametrize("name", CASES)
def test_it_loads_elsewhere(name: str, lives: dict[str, Life], elsewhere: dict[str, list[Tensor]]) -> None:
    loaded, *merged = elsewhere[name]
    torch.testing.assert_close(loaded, lives[name].logits, rtol=0, atol=1e-5)
    for logits in merged:
        torch.testing.assert_close(logits, lives[name].logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layer, named", [("lm_head", "head"), ("embed_tokens", "embeddings")])
def test_an_adapter_on_one_of_two_tied_layers_is_logged(
    layer: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains and loads as above, but merging by peft gives a different model."""
    for tied in (True, False):
        caplog.clear()
        add_adapter(tiny_model(tied=tied), lora(target_modules=["q_proj", layer]))
        assert (f"acts on the {named} of a model whose" in caplog.text) == tied
