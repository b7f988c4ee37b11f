"""Saved adapters that training goes on with, their reference policy, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grupo import GRPOTrainer
from grupo.errors import ConfigError, UnsupportedError
from grupo.export import merge
from grupo.models.peft_io import find_adapter, is_zero_init, load_with_adapter, save_adapter
from grupo.models.peft_setup import add_adapter, add_tokens
from grupo.policy.reference import AdapterDisabledReference, ReferencePolicy
from grupo.recipes.build import lora_config_of, resolve_model
from grupo.recipes.schema import Recipe
from grupo.runs.latest import resolve_latest
from grupo.types import TrainingSample
from harness import logs_of, make_trainer, snapshot, token_logprobs, train, unchanged
from tiny import tiny_model, tiny_tokenizer

IDS = torch.arange(4, 40)[None]


def varied(completions: list[str], **columns: Any) -> list[float]:
    return [float((7 * index) % 5) for index in range(len(completions))]


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"], **more})


def logits(model: Any) -> torch.Tensor:
    was_training = model.training
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    model.train(was_training)
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer(chat_template="of the base").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A trained one, with a tokenizer of its own."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(init_lora_weights=False))
    save_adapter(model, tmp_path / "adapter")
    tiny_tokenizer(chat_template="of the adapter").save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def make(folder: Path, model: Any, **settings: Any) -> GRPOTrainer:
    return make_trainer(folder, varied, model=model if not isinstance(model, Path) else str(model), **settings)


# ---- going on with an adapter ----------------------------------------------------------------------------------------


def test_a_folder_of_an_adapter_is_trained_on(base: Path, adapter: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", adapter, tokenizer=None, max_steps=2)
    assert trainer.tokenizer.chat_template == "of the adapter"
    wanted = logits(AutoPeftModelForCausalLM.from_pretrained(adapter))
    torch.testing.assert_close(logits(trainer.model), wanted)
    before = snapshot(trainer.model)
    train(trainer)
    after = snapshot(trainer.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        n for n in before if "lora_" in n
    }
    trainer.save_model(str(tmp_path / "run"))
    again = make(tmp_path / "next", tmp_path / "run", tokenizer=None)
    torch.testing.assert_close(logits(again.model), logits(trainer.model))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["start"] == str(adapter) and manifest["model"] == str(base)


def test_without_a_tokenizer_of_its_own_it_takes_that_of_the_base_model(adapter: Path, tmp_path: Path) -> None:
    for path in adapter.glob("*token*"):
        path.unlink()
    (adapter / "chat_template.jinja").unlink(missing_ok=True)
    assert make(tmp_path / "run", adapter, tokenizer=None).tokenizer.chat_template == "of the base"


def test_the_base_model_is_found_from_anywhere(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given by a path relative to a folder that is another one later."""
    monkeypatch.chdir(tmp_path)
    trainer = make(tmp_path / "run", "base", peft_config=lora(), save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        assert PeftConfig.from_pretrained(folder).base_model_name_or_path == str(base)
        torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), logits(trainer.model))
        assert AutoTokenizer.from_pretrained(folder).chat_template == trainer.tokenizer.chat_template


def test_a_base_model_beside_the_adapter_is_found(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # from the folder of the checkout, ../base may be a folder of somebody else
    edit(adapter / "adapter_config.json", base_model_name_or_path="../base")
    assert find_adapter(str(adapter)).base == str(adapter / "../base")  # type: ignore[union-attr]
    make(tmp_path / "run", adapter)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def incomplete(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: weights[name] for name in list(weights)[1:]}, adapter / "adapter_model.safetensors")


SPOILT = {
    "no base": (lambda a: edit(a / "adapter_config.json", base_model_name_or_path=None), "does not name its base"),
    "gone base": (lambda a: edit(a / "adapter_config.json", base_model_name_or_path="/gone/x"), "no such folder"),
    "base that is no model": (
        lambda a: edit(a / "adapter_config.json", base_model_name_or_path=str(a.parent)),
        "its base model cannot be loaded",
    ),
    "another rank": (lambda a: edit(a / "adapter_config.json", r=8), "cannot be loaded onto its base model"),
    "unknown type": (lambda a: edit(a / "adapter_config.json", peft_type="NEW"), "is not an adapter configuration"),
    "cut": (cut, "cannot be loaded onto its base model"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "cannot be loaded onto its base model"),
    "weights missing": (incomplete, "lacks 1 of the 8 weights"),
}


@pytest.mark.parametrize("spoil, said", SPOILT.values(), ids=SPOILT)
def test_a_folder_that_cannot_be_used_is_named(spoil: Any, said: str, adapter: Path, tmp_path: Path) -> None:
    spoil(adapter)
    with pytest.raises(ConfigError, match=said):
        make(tmp_path / "run", adapter)


def test_what_is_asked_for_beside_an_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has an adapter already.*`lora: null`"):
        make(tmp_path / "run", adapter, peft_config=lora())
    with pytest.raises(ConfigError, match="would be overwritten"):
        make(adapter, adapter)
    with pytest.raises(ConfigError, match="peft_config is dict"):
        make(tmp_path / "run", None, peft_config={"r": 4})


NO_ADAPTERS_OF_LAYERS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "activated LoRA": lora(alora_invocation_tokens=[5, 6]),
}


@pytest.mark.parametrize("config", NO_ADAPTERS_OF_LAYERS.values(), ids=NO_ADAPTERS_OF_LAYERS)
def test_adapters_that_are_no_function_of_a_layers_input_are_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Use LoRA"):
        make(tmp_path, None, peft_config=config)
    with pytest.raises(UnsupportedError, match="Use LoRA"):
        make(tmp_path, get_peft_model(tiny_model(), config))


WRONG_SETTINGS = {
    "bias": ["yes", None, True],
    "r": [0, -1, 2.5, "4", True],
    "rank_pattern": [{"q_proj": 0}],
    "lora_alpha": [0, -4, "16", float("nan"), None],
    "alpha_pattern": [{"q_proj": -1}],
    "lora_dropout": [-0.1, 1.0, "0.1", None],
    "init_lora_weights": ["nope", "pissa_niter_x", "eva", "lora_ga", None, 1],
    "use_dora": ["no"],
    "modules_to_save": ["lm_head", ["nope"]],
    "layers_to_transform": [[0, -1], ["0"], 7],
    "target_modules": [["nope"], "((", 3],
    "trainable_token_indices": [[128], {"embed_tokens": [-1]}, {"nope": [3]}],
}


def test_wrong_settings_leave_the_model_as_it_was() -> None:
    """peft takes some of them without a word, and leaves its layers in the model at most others."""
    model = tiny_model()
    model.model.norm.weight.requires_grad_(False)

    def state() -> Any:
        modules = [(name, type(module), id(module)) for name, module in model.named_modules()]
        flags = [(name, p.requires_grad, id(p), p.data_ptr()) for name, p in model.named_parameters()]
        return modules, flags, sorted(vars(model))

    before = state()
    for setting, values in WRONG_SETTINGS.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"{setting}|'nope'|cannot be added"):
                add_adapter(model, lora(**{setting: value}))
            assert state() == before, (setting, value)
    torch.testing.assert_close(logits(model), logits(tiny_model()))
    with pytest.raises(ConfigError, match="bias='yes'"):
        GRPOTrainer("no such model", varied, peft_config=lora(bias="yes"), train_dataset=[{"prompt": "a"}])


def test_modules_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    add_adapter(tiny_model(), lora(target_modules=["q_proj", "qproj"]))
    assert "target_modules names 'qproj', which this model does not have" in caplog.text


# ---- added tokens ----------------------------------------------------------------------------------------------------


def with_tokens(base: Path, *, rows: int, tokens: int) -> tuple[Any, Any]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), tiny_tokenizer()
    tokenizer.add_tokens([f"<new{index}>" for index in range(len(tokenizer), tokens)])
    model.resize_token_embeddings(rows)
    return model, tokenizer


@pytest.mark.parametrize("rows, tokens", [(136, 130), (110, 110)], ids=["a multiple", "fewer rows"])
def test_embeddings_that_peft_would_not_find_are_told_and_load_here(
    rows: int, tokens: int, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = with_tokens(base, rows=rows, tokens=tokens)
    trainer = make(tmp_path / "run", model, tokenizer=tokenizer, peft_config=lora())
    said = f"embeddings for {rows} tokens, its base model on disk for 128, and the tokenizer has {tokens} tokens"
    assert said in caplog.text
    train(trainer)
    trainer.save_model(str(tmp_path / "run"))
    again = make(tmp_path / "next", tmp_path / "run", tokenizer=None)
    torch.testing.assert_close(logits(again.model), logits(trainer.model))


def test_a_prompt_with_a_token_that_the_base_model_lacks(base: Path, tmp_path: Path) -> None:
    """The adapter learns with the token, and a run that goes on with it knows the token again."""
    assert len(tiny_tokenizer()) < 128, "as in many models"
    model, tokenizer = with_tokens(base, rows=130, tokens=130)
    rows = [{"prompt": "<new129>a"}, {"prompt": "b<new128>"}]
    trainer = make_trainer(tmp_path / "run", varied, rows, model=model, tokenizer=tokenizer, peft_config=lora())
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    again = make_trainer(tmp_path / "next", varied, rows, model=str(tmp_path / "run"), tokenizer=None)
    assert [row.token_ids for row in again.train_rows] == [row.token_ids for row in trainer.train_rows]
    assert 129 in again.train_rows[0].token_ids


def test_new_embeddings_that_nothing_trains_are_told(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, (config, told) in enumerate(
        [(lora(), True), (lora(trainable_token_indices=[128, 129]), False),
         (lora(modules_to_save=["embed_tokens", "lm_head"]), False)]
    ):  # fmt: skip
        caplog.clear()
        model, tokenizer = with_tokens(base, rows=130, tokens=130)
        make(tmp_path / str(number), model, tokenizer=tokenizer, peft_config=config)
        assert ("embeddings of 2 tokens are new and not trained" in caplog.text) == told


def test_added_tokens_beside_what_is_there(base: Path, adapter: Path, tmp_path: Path, caplog: Any) -> None:
    """More tokens than the spare rows of the base model; one that it has; and those of an adapter that goes on."""
    added = [f"<t{letter}>" for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"]
    trainer = make(tmp_path / "run", base, tokenizer=None, added_tokens=["a", *added], peft_config=lora())
    assert "the tokenizer already has 'a'" in caplog.text
    assert trainer.policy.vocabulary_size == len(trainer.tokenizer) > 128
    assert len(trainer.model.peft_config["default"].trainable_token_indices["lm_head"]) == len(added)
    train(trainer)
    trainer.save_model(str(tmp_path / "run"))
    again = make(tmp_path / "next", tmp_path / "run", tokenizer=None, added_tokens=added)
    torch.testing.assert_close(logits(again.model), logits(trainer.model))
    with pytest.raises(ConfigError, match="trained without"):
        make(tmp_path / "other", adapter, tokenizer=None, added_tokens=added)
    with pytest.raises(ConfigError, match="can train single embedding rows"):
        make(
            tmp_path / "other", base, tokenizer=None, added_tokens=added, peft_config=lora(trainable_token_indices=[3])
        )
    whole = make(tmp_path / "whole", base, tokenizer=None, added_tokens=added)
    assert whole.policy.vocabulary_size == len(whole.tokenizer) and not hasattr(whole.model, "peft_config")


# ---- the reference policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["start", "base"])
def test_the_reference_of_a_trained_adapter(which: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", adapter, beta=0.1, reference_policy=which, max_steps=3)
    start = logits(trainer.model)
    sample = TrainingSample((5, 6, 7), (8, 9, 10), 1.0, True, True, None)
    expected = {
        "start": AutoPeftModelForCausalLM.from_pretrained(adapter),
        "base": AutoModelForCausalLM.from_pretrained(base),
    }
    with torch.no_grad():
        wanted = token_logprobs(expected[which].eval(), sample.prompt_ids, sample.completion_ids)
    for when in ("before", "after"):
        (scored,) = trainer.forward_backward.add_fixed_logprobs(
            trainer.model, [sample], with_old=False, reference=trainer.reference
        )
        torch.testing.assert_close(torch.tensor(scored.reference_logprobs), wanted, rtol=0, atol=1e-5)
        if when == "before":
            train(trainer)
    assert (logits(trainer.model) - start).abs().max() > 1e-3
    kl = logs_of(trainer)[0]["kl"]
    assert abs(kl) < 1e-7 if which == "start" else kl > 1e-5, kl
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())["reference_policy"]
    assert said == trainer.reference.description and which in said  # type: ignore[union-attr]


def test_switching_the_adapter_off_leaves_it_as_it_was(tmp_path: Path) -> None:
    """peft would make all of it trainable."""
    model = get_peft_model(tiny_model(), lora(init_lora_weights=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = logits(model)
    with AdapterDisabledReference(model).active():
        torch.testing.assert_close(logits(model), logits(tiny_model()))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    assert torch.equal(logits(model), before)


NO_BASE = {
    "no adapter": (None, "there is no adapter"),
    "biases": (lora(bias="all"), "biases of the base model"),
    "pissa": (lora(init_lora_weights="pissa"), "has moved a part of the base model"),
}


@pytest.mark.parametrize("config, said", NO_BASE.values(), ids=NO_BASE)
def test_a_base_model_that_cannot_be_had_back_is_no_reference(config: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"reference_policy='base' .*{said}.*Set it to 'start'"):
        make(tmp_path, None, peft_config=config, beta=0.1, reference_policy="base")


def test_a_reference_without_effect_or_with_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reference_policy"):
        make(tmp_path, None, reference_policy="base")
    with pytest.raises(ConfigError, match="sync_ref_model=True moves the reference"):
        make(tmp_path, None, reference_policy="base", beta=0.1, sync_ref_model=True)
    assert isinstance(make(tmp_path, None, beta=0.1).reference, ReferencePolicy)


# ---- training that changes nothing -----------------------------------------------------------------------------------


def test_training_that_changes_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, None, peft_config=lora(), learning_rate=0.0)
    before = snapshot(trainer.model)
    train(trainer)
    assert unchanged(trainer.model, before) and is_zero_init(trainer.model)
    assert "1 optimizer step changed none of the 8 trainable parameters: learning_rate is 0" in caplog.text
    caplog.clear()
    dead = make_trainer(tmp_path / "dead", lambda completions, **_: [1.0] * len(completions), peft_config=lora())
    train(dead)
    assert "no step had a gradient" in caplog.text
    caplog.clear()
    train(make(tmp_path / "live", None, peft_config=lora()))
    assert "changed none" not in caplog.text


@pytest.mark.parametrize(
    "config, blank",
    [
        (lora(), True),
        (lora(init_lora_weights=False), False),
        (lora(use_dora=True), False),
        (lora(modules_to_save=["lm_head"]), False),
    ],
)
def test_blank_adapters(config: Any, blank: bool) -> None:
    assert is_zero_init(get_peft_model(tiny_model(), config)) == blank


def test_a_blank_adapter_is_told_when_it_is_loaded(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    save_adapter(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()), tmp_path / "blank")
    found = find_adapter(str(tmp_path / "blank"))
    assert found is not None and isinstance(load_with_adapter(found), PeftModel)
    assert "has no effect: its B matrices are all zero" in caplog.text


def test_a_model_is_no_adapter(base: Path, tmp_path: Path) -> None:
    assert find_adapter(str(base)) is None
    assert find_adapter(str(tmp_path / "nothing")) is None


# ---- the newest model of a run ---------------------------------------------------------------------------------------


def went_on(base: Path, folder: Path, peft_config: Any) -> GRPOTrainer:
    """A run of one step that saved its model, was resumed, and was killed behind the second step."""
    settings = {"peft_config": peft_config, "save_strategy": "steps", "save_steps": 1}
    first = make(folder, str(base), max_steps=1, **settings)
    first.train()
    first.save_model()
    again = make(folder, str(base), max_steps=2, lr_scheduler_type="constant", **settings)
    again.train(resume_from_checkpoint=True, accept_changes=["steps", "lr_scheduler_type"])
    return again


@pytest.mark.parametrize("peft_config", [lora(), None])
def test_a_run_that_went_on_behind_its_saved_model_is_taken_up_at_its_newest_checkpoint(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, peft_config: Any
) -> None:
    run, newest = tmp_path / "run", tmp_path / "run" / "checkpoint-2"
    resumed = went_on(base, run, peft_config)
    next_one = make(tmp_path / "next", str(run), tokenizer=None)
    torch.testing.assert_close(logits(next_one.model), logits(resumed.model))
    assert next_one.model_argument == str(newest)
    assert f"{run}: its saved model is older (step 1); using its latest checkpoint, checkpoint-2." in caplog.text
    assert resolve_model(Recipe(task="times-tables", model=str(run))).model == str(newest)
    resumed.save_model()
    assert resolve_latest(str(run)) == str(run)


def test_what_is_newest_in_a_run(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, newest = tmp_path / "run", tmp_path / "run" / "checkpoint-2"
    went_on(base, run, lora())
    with pytest.raises(ConfigError, match="the folder of the adapter that training starts from"):
        make(run, str(run), tokenizer=None)
    edit(run / "manifest.json", model_step=None)
    assert resolve_latest(str(run)) == str(run)
    assert f"{run} has a model of an unknown step, and checkpoint-2. Using the model;" in caplog.text
    edit(run / "manifest.json", model_step=1)
    (newest / "optimizer.pt").unlink()
    assert resolve_latest(str(run)) == str(newest), "its model is whole"
    (newest / "adapter_model.safetensors").write_bytes(b"cut")
    assert resolve_latest(str(run)) == str(run)
    assert "(step 1) are damaged (checkpoint-2: adapter_model.safetensors has 3 of" in caplog.text
    (run / "adapter_model.safetensors").unlink()
    assert resolve_latest(str(run)) == str(run / "checkpoint-1")
    (run / "checkpoint-1" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no saved model and no intact checkpoint"):
        make(tmp_path / "next", str(run))
    assert resolve_latest("org/name") == "org/name" and resolve_latest(str(base)) == str(base)


def test_a_run_leaves_the_model_that_it_starts_from(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="folder of the model that training starts from"):
        make(base, str(base), tokenizer=None)
    make(base, str(base), peft_config=lora(), tokenizer=None)  # an adapter has files of other names
    make(run, str(base), save_strategy="steps", save_steps=1, max_steps=1).train()
    with pytest.raises(ConfigError, match="which would be overwritten, or moved"):
        make(run, str(run), peft_config=lora(), tokenizer=None)


def test_a_generation_config_that_contradicts_itself_can_be_saved(base: Path, tmp_path: Path) -> None:
    """As many models are published with; the tokenizer's padding is another, which training takes over."""
    edit(base / "generation_config.json", temperature=0.6, pad_token_id=5)
    whole = make(tmp_path / "whole", base, tokenizer=None)
    train(whole)
    whole.save_model()
    adapted = make(tmp_path / "adapted", base, tokenizer=None, peft_config=lora())
    train(adapted)
    merge(adapted.model, tmp_path / "merged", tokenizer=adapted.tokenizer)
    for folder in ("whole", "merged"):
        saved = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert saved["temperature"] == 0.6 and saved["pad_token_id"] == whole.tokenizer.pad_token_id != 5


def test_what_added_tokens_begin_with_depends_on_the_model_alone() -> None:
    """Not on random numbers or threads: a resumed run is known by it."""
    rows = []
    for seed in (1, 2):
        model, tokenizer = tiny_model(tied=False, vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        wanted = torch.stack([end.weight.double().mean(0).float() for end in ends])
        torch.manual_seed(seed)
        add_tokens(model, tokenizer, ["<think>"], None)
        rows.append(torch.stack([model.get_input_embeddings().weight[-1], model.get_output_embeddings().weight[-1]]))
        torch.testing.assert_close(rows[-1], wanted, rtol=1e-6, atol=1e-8)
    assert torch.equal(*rows)


def test_an_adapter_is_saved_also_where_its_base_model_is_gone(base: Path, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    base.rename(tmp_path / "elsewhere")
    save_adapter(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_a_model_of_what_was_cut_is_older_than_the_next_checkpoint(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    went_on(base, run, lora()).save_model()
    settings = {"peft_config": lora(), "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    other = make(run, str(base), max_steps=2, **settings)
    other.train(resume_from_checkpoint=str(run / "checkpoint-1"), accept_changes=["steps", "lr_scheduler_type"])
    assert resolve_latest(str(run)) == str(run / "checkpoint-2")


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, {"r": 16, "lora_alpha": 32, "use_rslora": False, "use_dora": False, "bias": "none"}),
        ({"rslora": True, "dora": True, "dropout": 0.1}, {"use_rslora": True, "use_dora": True, "lora_dropout": 0.1}),
        ({"bias": "lora_only", "modules_to_save": ["lm_head"]}, {"bias": "lora_only", "modules_to_save": ["lm_head"]}),
        (
            {"layers": [1], "target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
            {"layers_to_transform": [1], "exclude_modules": {"up_proj"}},
        ),
    ],
)
def test_a_recipe_reaches_every_kind(spec: dict[str, Any], wanted: dict[str, Any]) -> None:
    recipe = Recipe.model_validate({"task": "times-tables", "lora": spec})
    model = add_adapter(tiny_model(), lora_config_of(recipe))
    config = model.peft_config["default"].to_dict()
    assert {name: config[name] for name in wanted} == wanted
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert all(("layers.1." in name) and "up_proj" not in name for name in adapted) == ("layers" in spec)
    assert adapted and all("lm_head" not in name for name in adapted)


def test_a_recipe_goes_on_with_an_adapter_unless_it_asks_for_a_fresh_one(adapter: Path) -> None:
    bare = Recipe.model_validate({"task": "times-tables", "model": str(adapter)})
    assert bare.lora is not None and resolve_model(bare).lora is None
    asking = Recipe.model_validate({"task": "times-tables", "model": str(adapter), "lora": {"r": 4}})
    assert resolve_model(asking) == asking
    whole = Recipe.model_validate({"task": "times-tables", "model": str(adapter.parent / "base")})
    assert resolve_model(whole) == whole
