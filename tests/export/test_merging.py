"""Merged folders: compared in a fresh process that has plain transformers and PEFT and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from families import family_model
from grupo.errors import ConfigError, ExportError, UnsupportedError
from grupo.export import merge
from grupo.export import merging as merging_module
from grupo.export.logit_check import check_ids, difference, logits_of
from processors import bitsandbytes_sees
from saved_adapters import ADAPTERS, INT8, NF4, STAYS_TIED, TOKENIZER, adapted, base_folder
from tiny import tiny_model

PROCESSORS = {", AVX512-BF16": True, ", no AVX512-BF16": False}
QUANTISED = [f"NF4{in_use}{kind}" for in_use in ("", " in use") for kind in PROCESSORS]

FRESH = """
import json, socket, sys
def refuse(*args): raise OSError("no network here")
socket.socket.connect = refuse
import torch
from peft import PeftModel
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
ids = torch.tensor([json.loads(sys.argv[1])])
found = {}
for name, case in json.loads(sys.argv[2]).items():
    config = case["quantization"] and BitsAndBytesConfig(**case["quantization"])
    base = AutoModelForCausalLM.from_pretrained(case["base"], dtype=torch.float32, quantization_config=config)
    if case["tokens"]:
        base.resize_token_embeddings(case["tokens"])
    merged = AutoModelForCausalLM.from_pretrained(case["merged"])
    tokenizer = AutoTokenizer.from_pretrained(case["merged"])
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, case["adapter"]).eval()
        for layer in adapted.modules():
            if isinstance(layer, Linear4bit):
                layer.train()  # in evaluation mode, processors with AVX512-BF16 round products to bfloat16
        left, right = (model(ids).logits.float().log_softmax(-1) for model in (adapted, merged.eval()))
    head, embedding = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
    found[name] = {
        "difference": float((left - right).abs().max()),
        "dtype": str(merged.dtype),
        "tied": [merged.config.tie_word_embeddings, head is embedding, torch.equal(head, embedding)],
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False),
        "ends": merged.generation_config.eos_token_id,
    }
assert "grupo" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, Any]:
    """What a fresh process says of each merged folder."""
    folder = tmp_path_factory.mktemp("merged")
    cases: dict[str, dict[str, Any]] = {}

    def add(name: str, model: Any, *, live: bool, **more: Any) -> None:
        case: dict[str, Any] = {"base": str(base), "quantization": None, "tokens": None, **more}
        case |= {"adapter": str(folder / name / "adapter"), "merged": str(folder / name / "merged")}
        model.save_pretrained(case["adapter"])
        TOKENIZER.save_pretrained(case["adapter"])
        dtype = case.pop("dtype", None)
        config = model.get_base_model().config.quantization_config if case["quantization"] and not live else None
        merge(model if live else case["adapter"], case["merged"], dtype=dtype, quantization_config=config)
        cases[name] = case

    for name, settings in ADAPTERS.items():
        add(name, adapted(base, **settings), live=name in ("PiSSA", "both, tied", "single tokens"))
    add("more tokens", adapted(base, tokens=464, **ADAPTERS["plain"]), live=False, tokens=464)
    add("bfloat16", adapted(base, **ADAPTERS["plain"]), live=True, dtype="bfloat16")
    for kind, has_it in PROCESSORS.items():
        with bitsandbytes_sees(avx512_bf16=has_it):
            add(f"NF4{kind}", adapted(base, NF4, **ADAPTERS["plain"]), live=False, quantization=NF4)
            add(f"NF4 in use{kind}", adapted(base, NF4, **ADAPTERS["whole norm"]), live=True, quantization=NF4)
    add("8 bit in use", adapted(base, INT8, **ADAPTERS["plain"]), live=True, quantization=INT8)
    ids = check_ids(TOKENIZER, 448)[0].tolist()
    result = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(ids), json.dumps(cases)],
        capture_output=True, text=True, timeout=300, cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", [*ADAPTERS, "more tokens", *QUANTISED])
def test_merged_is_adapter_on_base(fresh: dict[str, Any], name: str) -> None:
    assert fresh[name]["difference"] < 1e-4
    assert fresh[name]["dtype"] == "torch.float32"


@pytest.mark.parametrize(("name", "bound"), [("bfloat16", 0.2), ("8 bit in use", 0.3)])
def test_what_computes_in_fewer_digits_is_close(fresh: dict[str, Any], name: str, bound: float) -> None:
    """8 bit matrix products round their input as well, which no merged weight can."""
    assert 1e-4 < fresh[name]["difference"] < bound
    assert fresh["bfloat16"]["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("name", ADAPTERS)
def test_head_and_embedding_are_tied_where_the_configuration_says_so(fresh: dict[str, Any], name: str) -> None:
    assert fresh[name]["tied"] == [name in STAYS_TIED] * 3


def test_tokenizer_and_generation_settings_are_there(fresh: dict[str, Any]) -> None:
    assert {case["chat"] for case in fresh.values()} == {"<|im_start|>user\nHi<|im_end|>\n"}
    assert all(case["ends"] == [2, 0] for case in fresh.values())


IN_USE = {
    "float32": (None, "whole embedding and head"),
    "NF4": (NF4, "plain"),
    "NF4, DoRA": (NF4, "DoRA"),
    "8 bit": (INT8, "plain"),
}


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("quantization", "adapter"), IN_USE.values(), ids=IN_USE)
@pytest.mark.parametrize("in_training", [True, False], ids=["in training", "in evaluation"])
def test_a_model_in_use_is_left_as_it_is(
    base: Path, tmp_path: Path, quantization: dict[str, Any] | None, adapter: str, in_training: bool
) -> None:
    model = adapted(base, quantization, **ADAPTERS[adapter])
    model.train(in_training)
    model.get_base_model().model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    merge(model, tmp_path / "merged")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert before.keys() == model.state_dict().keys() and modes == [module.training for module in model.modules()]


def test_what_was_measured_is_reported(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = merge(adapted(base, **ADAPTERS["plain"]), tmp_path / "merged", dtype=torch.bfloat16)
    assert report.dtype == "bfloat16" and report.is_tied
    assert report.merging.largest < 1e-4 < report.rounding.largest < report.training_delta.largest
    assert "Rounding the weights to bfloat16" not in caplog.text
    weak = adapted(base, **ADAPTERS["plain"])
    with torch.no_grad():
        for name, parameter in weak.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.02)
    merge(weak, tmp_path / "weak", dtype="bfloat16")
    assert "part of what was learned may be lost. dtype='float32' keeps it." in caplog.text


def test_a_whole_model_keeps_its_dtype(tmp_path: Path) -> None:
    family_model("Qwen3", dtype=torch.float16).save_pretrained(tmp_path / "model")
    report = merge(tmp_path / "model", tmp_path / "merged")
    assert report.dtype == "float16" and report.rounding.largest == report.training_delta.largest == 0.0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "merged"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_weights_before_quantisation_only_with_a_warning(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(base, NF4, **ADAPTERS["plain"])
    report = merge(model, tmp_path / "merged", base_weights="original")
    assert "base_weights='original': the adapter was trained on quantised weights" in caplog.text
    assert report.merging.largest < 1e-4
    ids = check_ids(TOKENIZER, 448)
    plain = AutoModelForCausalLM.from_pretrained(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    delta = merged.model.layers[0].mlp.up_proj.weight - plain.model.layers[0].mlp.up_proj.weight
    assert torch.linalg.matrix_rank(delta.detach(), atol=1e-4) == 4, "the base of the difference is the original one"
    assert difference(logits_of(model, ids), logits_of(merged, ids)).divergence > 1e-4
    with pytest.raises(ConfigError, match="applies only to an adapter that was trained on a quantised base"):
        merge(adapted(base, **ADAPTERS["plain"]), tmp_path / "other", base_weights="original")


# ---- broken on purpose -----------------------------------------------------------------------------------------------


def test_a_wrong_merge_is_noticed_and_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = merging_module.merge_adapter

    def wrong(model: Any) -> Any:
        merged = whole(model)
        with torch.no_grad():
            merged.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
        return merged

    monkeypatch.setattr(merging_module, "merge_adapter", wrong)
    with pytest.raises(ExportError, match=r"log-probs differ by up to \d.* nats, and 0.001 is the limit"):
        merge(adapted(base, **ADAPTERS["plain"]), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_loads_otherwise_is_noticed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tied head comes back as the embedding, although it was trained: what transformers issue #45127 is about."""
    load = merging_module.load_policy

    def tied(name: str, *args: Any, **kwargs: Any) -> Any:
        model = load(name, *args, **kwargs)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        return model

    monkeypatch.setattr(merging_module, "load_policy", tied)
    with pytest.raises(ExportError, match="The model loaded back from its folder"):
        merge(adapted(base, **ADAPTERS["head"]), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_trained_weights_that_peft_does_not_save_are_noticed(base: Path, tmp_path: Path) -> None:
    model = adapted(base, **ADAPTERS["plain"])
    again = adapted(base, **ADAPTERS["plain"])
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with torch.no_grad():
        model.get_base_model().model.norm.weight.add_(1.0)
    ids = check_ids(TOKENIZER, 448)
    merge(model, tmp_path / "merged")  # they are in the copy of the base
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert difference(logits_of(model, ids), logits_of(merged, ids)).largest < 1e-4
    assert difference(logits_of(again, ids), logits_of(merged, ids)).largest > 0.1


# ---- refused ---------------------------------------------------------------------------------------------------------


def listing(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(error: type[Exception], message: str, model: Any, output: Path, **settings: Any) -> None:
    before = listing(output.parent)
    with pytest.raises(error, match=message):
        merge(model, output, **settings)
    assert listing(output.parent) == before, "a failed merge writes nothing"


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    model = adapted(base, **ADAPTERS["plain"])
    refused(ConfigError, "is not a folder", tmp_path / "nowhere", output)
    (tmp_path / "empty").mkdir()
    refused(ConfigError, "has neither an adapter", tmp_path / "empty", output)
    refused(ConfigError, "dtype='int8' is not a supported dtype", model, output, dtype="int8")
    refused(ConfigError, "base_weights='fp8' must be", model, output, base_weights="fp8")
    refused(ConfigError, "is a whole model, and base=", base, output, base=str(base))
    refused(UnsupportedError, "cannot be merged: Impossible to merge LoRA with `lora_bias=True`",
            adapted(base, target_modules=["q_proj"], lora_bias=True), output)  # fmt: skip
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    refused(UnsupportedError, "has 2 active adapters", model, output)
    from peft import PromptTuningConfig

    plain = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(plain, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(
        tmp_path / "prompt"
    )
    refused(UnsupportedError, "virtual tokens", tmp_path / "prompt", output)


def test_nothing_is_overwritten(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    refused(ConfigError, "exists already, and nothing is overwritten", base, tmp_path / "out")


def test_adapters_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    model = adapted(base, **ADAPTERS["plain"])
    model.save_pretrained(tmp_path / "adapter")
    tiny_model().save_pretrained(tmp_path / "other")
    refused(ConfigError, "does not fit the base model", tmp_path / "adapter", tmp_path / "out",
            base=str(tmp_path / "other"))  # fmt: skip
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[2:]), tmp_path / "adapter" / "adapter_model.safetensors")
    refused(ConfigError, "lacks 2 of its weights", tmp_path / "adapter", tmp_path / "out")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    refused(ConfigError, "but no weights", tmp_path / "adapter", tmp_path / "out")


def test_a_base_that_has_moved_is_asked_for(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = adapted(base_folder(tmp_path / "moving"), **ADAPTERS["plain"])
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "moving").rename(tmp_path / "moved")
    refused(
        ConfigError,
        r"give its current location with base=NAME_OR_PATH \(--base\)",
        tmp_path / "adapter",
        tmp_path / "out",
    )
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "../moved"}))
    monkeypatch.chdir(tmp_path / "moved")
    merge(tmp_path / "adapter", tmp_path / "beside")
    merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "moved"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
