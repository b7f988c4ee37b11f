"""The supervised phase: what is learned of each row, TRL's numbers, and one life from SFT over GRPO to merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from grupo.cli import main
from grupo.data.demonstrations import demonstrations, dialogues
from grupo.data.prompts import PromptTokenizer
from grupo.errors import ConfigError
from grupo.recipes.yaml_io import load_recipe
from grupo.trainer.sft_trainer import NO_LOSS, pad_batch, sft_trainer
from harness import snapshot
from tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

TEXT = [{"prompt": "2+2=", "completion": " 4"}, {"prompt": "a longer prompt:", "completion": " yes</s>"}]
# As in chat models: a line break after the end of an answer.
ROLES = (
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }
    for question, answer in (("2+2?", "4"), ("What is the sum of 10 and 11?", "[21]"))
]


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    values = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "max_grad_norm": 0.0,
    }
    return TrainingArguments(output_dir=str(folder), **{**values, **settings})


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def adapted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rows", [TEXT, MESSAGES], ids=["text", "messages"])
def test_masks_losses_and_weights_are_those_of_trl(rows: Any, accumulation: int, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    settings = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2 // accumulation}
    tokenizer = tiny_tokenizer(chat_template=ROLES)
    ours = sft_trainer(
        adapted(),
        demonstrations(dialogues(rows), PromptTokenizer(tokenizer)),
        tokenizer,
        arguments(tmp_path, **settings),
    )
    values = {**arguments(tmp_path, **settings).to_dict(), "bf16": False, "gradient_checkpointing": False}
    fields = set(trl.SFTConfig.__dataclass_fields__)
    config = trl.SFTConfig(
        **{name: value for name, value in values.items() if name in fields}, completion_only_loss=True
    )
    theirs = trl.SFTTrainer(adapted(), config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    for one, other in zip(ours.train_dataset, theirs.train_dataset, strict=True):
        assert one["input_ids"] == other["input_ids"] and one["labels"] == other["labels"]
        assert NO_LOSS in one["labels"]
    ours.train()
    theirs.train()
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5) and len(losses(ours)) == 3
    assert losses(ours)[-1] < losses(ours)[0]
    found, wanted = snapshot(ours.model), snapshot(theirs.model)
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)


def test_padding_is_neither_read_nor_learned() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [NO_LOSS, 6, 7]}, {"input_ids": [8, 9], "labels": [NO_LOSS, 9]}]
    batch = pad_batch(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]] and batch["labels"][1, 2] == NO_LOSS
    model = tiny_model()
    with torch.no_grad():
        together = model(**batch).loss
        alone = [model(**pad_batch([row])).loss for row in rows]
    torch.testing.assert_close(together, (2 * alone[0] + alone[1]) / 3)


def test_a_frozen_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainable"):
        sft_trainer(
            tiny_model().requires_grad_(False),
            demonstrations(dialogues(TEXT), PromptTokenizer(tiny_tokenizer())),
            tiny_tokenizer(),
            arguments(tmp_path),
        )


# ---- one life --------------------------------------------------------------------------------------------------------

REWARDS = Path(__file__).parents[1] / "support" / "sft_rewards.py"
FORM = "=[{answer}]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(command: str, model: Path | str, folder: Path, *settings: str, flags: tuple[str, ...] = ()) -> int:
    small = (
        f"model={model}",
        f"training.output_dir={folder}",
        "training.max_steps=2",
        "training.per_device_train_batch_size=8",
        "training.num_generations=4",
        "training.max_completion_length=8",
        "training.learning_rate=0.01",
        "training.beta=0.1",
        "training.save_strategy=steps",
        "training.save_steps=1",
        "sft.training.save_strategy=no",
        f"sft.answer='{FORM}'",
        "sft.rows=16",
        "sft.training.learning_rate=0.05",
        "sft.training.num_train_epochs=4",
        f"rewards=['{REWARDS}:digits']",
        "eval.max_prompts=2",
        "eval.samples_per_prompt=2",
    )
    return main([command, *flags, *(part for setting in (*small, *settings) for part in ("--set", setting))])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(4, 40)[None]).logits  # type: ignore[no-any-return]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def life(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "life"
    assert run("train", model, folder) == 0
    return folder


def test_the_phase_learns_and_leaves_a_whole_adapter(life: Path, model: Path) -> None:
    lines = [json.loads(line) for line in (life / "sft" / "sft.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if "loss" in line]
    assert len(found) == 8 and found[-1] < found[0] - 0.2
    start = AutoPeftModelForCausalLM.from_pretrained(life / "sft")
    assert start.peft_config["default"].base_model_name_or_path == str(model)
    assert (logits(start) - logits(AutoModelForCausalLM.from_pretrained(model))).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(life / "sft").chat_template == CHAT_TEMPLATE
    assert not list(life.glob("*unfinished*"))


def test_grpo_goes_on_with_that_adapter_and_holds_on_to_it(life: Path) -> None:
    first, second = (line for line in metrics(life) if "loss" in line)
    assert abs(first["kl"]) < 1e-5 < abs(second["kl"]), "the reference is the adapter as SFT has left it"
    assert "start model with its adapter" in json.loads((life / "manifest.json").read_text())["reference_policy"]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (life / "sft", life))
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((life / "summary.json").read_text())["eval_after"] is not None
    assert "supervised phase" in (life / "README.md").read_text()


def test_a_resumed_run_does_not_repeat_it(life: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    """From the first checkpoint, in a folder of its own, to the weights of the unbroken run."""
    import shutil

    broken = tmp_path / "broken"
    assert run("train", model, broken, "training.max_steps=2") == 0
    phase = (broken / "sft" / "adapter_model.safetensors").read_bytes()
    for checkpoint in broken.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    capsys.readouterr()
    assert run("train", model, broken, flags=("--resume",)) == 0, "it was killed before its first checkpoint"
    assert "starts from the beginning" in capsys.readouterr().out and (broken / "earlier").is_dir()
    shutil.rmtree(broken / "checkpoint-2")
    assert run("train", model, broken, flags=("--resume",)) == 0
    assert "supervised fine-tuning" not in capsys.readouterr().out
    assert (broken / "sft" / "adapter_model.safetensors").read_bytes() == phase
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in (life, broken))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert run("train", model, broken, "sft.rows=8", flags=("--resume",)) == 2
    assert "was made with other settings" in capsys.readouterr().err
    for setting in ("sft=null", ""):
        assert run("train", model, broken, *filter(None, [setting]), flags=("--resume",)) == 2
        assert ("but the recipe has no `sft`" if setting else "no folder 'sft'") in capsys.readouterr().err
        assert (broken / "checkpoint-2").is_dir() and not (broken / "earlier-2").exists()
        shutil.rmtree(broken / "sft", ignore_errors=True)


def test_a_phase_that_cannot_be_written_ends_with_a_sentence(model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "sft.unfinished").write_text("in the way")
    assert run("sft", model, tmp_path) == 1
    assert "The supervised phase is not saved" in capsys.readouterr().err


def test_the_merged_model_is_the_trained_one(life: Path, tmp_path: Path) -> None:
    adapter = AutoPeftModelForCausalLM.from_pretrained(life)
    wanted = logits(adapter)
    adapter.merge_and_unload().save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted, rtol=0, atol=1e-4)


def test_the_phase_alone_and_grpo_from_its_folder_are_the_same_run(life: Path, model: Path, tmp_path: Path) -> None:
    assert run("sft", model, tmp_path / "shown") == 0
    for name, weight in load_file(tmp_path / "shown" / "adapter_model.safetensors").items():
        assert torch.equal(weight, load_file(life / "sft" / "adapter_model.safetensors")[name])
    folder = tmp_path / "run"
    assert run("train", tmp_path / "shown", folder, "sft=null", "lora=null") == 0
    wanted, found = (load_file(path / "adapter_model.safetensors") for path in (life, folder))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert load_recipe(str(folder / "recipe.yaml")).lora is None
    first = (tmp_path / "shown" / "adapter_model.safetensors").read_bytes()
    assert run("sft", model, tmp_path / "shown", "sft.rows=8") == 0
    assert (tmp_path / "shown" / "earlier" / "adapter_model.safetensors").read_bytes() == first
    assert (tmp_path / "shown" / "earlier" / "sft.yaml").is_file(), "a second phase does not overwrite the first"


def test_a_whole_model_can_be_shown_answers_too(model: Path, tmp_path: Path) -> None:
    saved = ("sft.training.save_strategy=epoch", "sft.training.save_only_model=true")
    assert run("train", model, tmp_path, "lora=null", "training.max_steps=1", "eval.enabled=false", *saved) == 0
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"], "of GRPO"
    assert len(list((tmp_path / "sft.checkpoints").iterdir())) == 4
    start, shown_to, trained = (
        load_file(folder / "model.safetensors")["lm_head.weight"] for folder in (model, tmp_path / "sft", tmp_path)
    )
    assert not torch.equal(start, shown_to) and not torch.equal(shown_to, trained)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_added_tokens_are_learned_saved_resumed_and_merged(tied: bool, tmp_path: Path) -> None:
    import shutil

    base, folder = tmp_path / "base", tmp_path / "run"
    size = len(tiny_tokenizer())
    tiny_model(tied=tied, vocab_size=size).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    settings = ("training.added_tokens=['<think>', '</think>']", "sft.answer='<think></think>[{answer}]'")
    assert run("train", base, folder, *settings) == 0

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<think></think>")["input_ids"]
    assert ids == [size, size + 1] and tokenizer.decode(ids, skip_special_tokens=True) == "<think></think>"
    before, after = (load_file(path / "adapter_model.safetensors") for path in (folder / "sft", folder))
    rows = [name for name in after if "trainable_tokens" in name]
    assert [after[name].shape for name in rows] == [(2, 32)] * 2, "of embeddings and head"
    assert torch.equal(*(after[name] for name in rows)) == tied
    assert all((before[name] != after[name]).any(-1).all() for name in rows), "GRPO went on with what SFT had begun"

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    shutil.rmtree(broken / "checkpoint-2")
    assert run("train", base, broken, *settings, flags=("--resume",)) == 0
    resumed = load_file(broken / "adapter_model.safetensors")
    assert after.keys() == resumed.keys() and all(torch.equal(after[name], resumed[name]) for name in after)

    assert main(["export", str(folder), "--to", "merged", "--output", str(tmp_path / "merged")]) == 0
    shown_ids = torch.tensor([[*range(4, 40), *ids]])
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        wanted = adapted.eval()(shown_ids).logits
        torch.testing.assert_close(merged(shown_ids).logits, wanted, rtol=0, atol=1e-4)
        by_peft = adapted.merge_and_unload()(shown_ids).logits
    torch.testing.assert_close(by_peft, wanted, rtol=0, atol=1e-4)
    assert merged.config.tie_word_embeddings == tied and AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()[
        "<think>"
    ] == size  # fmt: skip


def test_demonstrations_of_their_own_and_a_dry_run(model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text("".join(json.dumps({"q": f"{n}?", "steps": f"{n}."}) + "\n" for n in range(5)))
    own = ("sft.answer='[{steps}]'", "sft.rows=null", f"sft.dataset={{path: {path}, prompt: q}}")
    assert run("sft", model, tmp_path / "run", *own, flags=("--dry-run",)) == 0
    assert "5 demonstrations, 4 optimizer steps" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert run("train", model, tmp_path / "run", *own, flags=("--dry-run",)) == 0
    assert "5 demonstrations, 4 optimizer steps" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert run("sft", model, tmp_path / "run", *own) == 0
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "setting", "said"),
    [
        ("sft", "sft=null", "has no `sft`"),
        ("train", "sft.answer='{gold}'", "no such column"),
        ("train", "sft.training.learning_rat=1", "learning_rat"),
        ("train", "sft.row=1", "Did you mean 'rows'"),
        ("train", "sft.dataset={path: nowhere.jsonl}", "is not a file"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(
    command: str, setting: str, said: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(command, model, tmp_path / "run", setting) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
