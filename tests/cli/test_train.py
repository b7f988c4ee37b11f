"""The command line, whole: what it prints, what it leaves on disk, and with which exit code it ends."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grupo
import grupo.cli.held_out_eval
from grupo.cli import main
from grupo.errors import RewardError
from grupo.recipes.yaml_io import built_in_recipes, load_recipe
from tiny import BOS_CHAT_TEMPLATE, tiny_model, tiny_tokenizer

SOURCE = Path(grupo.__file__).parents[1]
# A random model gets a signal from it: some completions stop before the cap.
LENGTH = ("rewards=[{name: token_length, arguments: {target: 5}}]", "training.max_completion_length=40")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("grupo")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(chat_template=BOS_CHAT_TEMPLATE).save_pretrained(folder)
    return folder


def arguments(model: Path, folder: Path, *settings: str) -> list[str]:
    """A small run: 2 steps of 8 completions, and 8 samples per evaluation."""
    small = [
        f"model={model}",
        f"training.output_dir={folder}",
        "training.max_steps=2",
        "training.eval_strategy=no",
        "training.per_device_train_batch_size=8",
        "training.gradient_accumulation_steps=1",
        "training.num_generations=4",
        "training.max_completion_length=8",
        "eval.max_prompts=4",
        "eval.samples_per_prompt=2",
    ]
    return [part for setting in (*small, *settings) for part in ("--set", setting)]


def train(model: Path, folder: Path, *settings: str, flags: tuple[str, ...] = ()) -> int:
    return main(["train", *flags, *arguments(model, folder, *settings)])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load_adapter(model: Path, folder: Path) -> PeftModel:
    """As someone without grupo would."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)


# ---- short commands --------------------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported_before_a_run_needs_it() -> None:
    """`import grupo`, help, lists, and a recipe that is refused: a fraction of a second, without torch."""
    program = """
import sys
import grupo
from grupo.cli import main
from grupo.errors import RewardError
codes = []
check = ["rewards", "check", "quickstart"]
for arguments in (["--help"], ["train", "--help"], ["tasks"], ["rewards"], check, ["recipes"], ["train", "no-such"]):
    try:
        codes.append(main(arguments))
    except SystemExit as stop:
        codes.append(stop.code)
heavy = {"torch", "transformers", "accelerate", "peft", "datasets", "pandas", "numpy"} & sys.modules.keys()
print(codes, sorted(heavy), file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert result.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 2] []"
    assert "usage: grupo" in result.stdout


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks and rewards: test_check_rewards.py."""
    assert main(["recipes"]) == 0
    recipes = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(recipes) == built_in_recipes()
    assert recipes["quickstart"] == "SmolLM2-135M-Instruct learns the times tables, in minutes on a CPU."


@pytest.mark.parametrize("name", built_in_recipes())
def test_a_recipe_that_is_shown_is_that_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", name]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(name)


def test_an_unknown_recipe_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "quickstrat"]) == 2
    assert "Did you mean 'quickstart'?" in refused(capsys)


def test_a_list_may_be_cut_off_by_its_reader() -> None:
    """As by `python -m grupo tasks | head -1`: no traceback, also none when Python ends."""
    listing = subprocess.Popen(
        [sys.executable, "-m", "grupo", "tasks"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert listing.stdout is not None
    listing.stdout.close()
    _, complaint = listing.communicate(timeout=120)
    assert (listing.returncode, complaint) == (0, "")


def test_a_command_is_asked_for_with_the_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "train with a recipe" in capsys.readouterr().err


def test_env_shows_versions_and_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    assert f"grupo {grupo.__version__}" in output and f"torch {torch.__version__}" in output
    assert ("accelerator: none found" in output) is not torch.accelerator.is_available()


@pytest.mark.parametrize("wrong", [[], ["frobnicate"], ["train", "a", "b"], ["train", "--set"], ["tasks", "--resume"]])
def test_wrong_usage_ends_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(wrong)
    assert stop.value.code == 2


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a-run") / "run"
    assert train(model, folder, "training.logging_steps=2") == 0
    return folder


def test_a_run_leaves_its_files(run: Path) -> None:
    left = {path.name for path in run.iterdir()}
    assert left >= {"metrics.jsonl", "completions.jsonl", "recipe.yaml", "manifest.json", "summary.json"}
    assert left >= {"eval_before.json", "eval_after.json", "adapter_model.safetensors", "adapter_config.json"}
    assert left >= {"tokenizer.json", "tokenizer_config.json"}


def test_the_summary_has_exactly_its_keys(run: Path) -> None:
    summary = read_json(run / "summary.json")
    assert list(summary) == [
        "eval_before", "eval_after", "steps", "completions", "tokens", "peak_rss_bytes", "seconds", "interrupted",
    ]  # fmt: skip
    for evaluation in (summary["eval_before"], summary["eval_after"]):
        assert list(evaluation) == ["accuracy", "low", "high", "n"]
        assert 0 <= evaluation["low"] <= evaluation["accuracy"] <= evaluation["high"] <= 1
        assert evaluation["n"] == 4 * 2
    assert summary["steps"] == 2 and summary["completions"] == 16 and summary["interrupted"] is False
    assert 50 * 2**20 < summary["peak_rss_bytes"] < 64 * 2**30


def test_the_summary_counts_tokens_of_prompts_and_completions(run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run)
    tokens = 0
    for group in read_lines(run / "completions.jsonl"):
        prompt = tokenizer.apply_chat_template(group["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt.count(tokenizer.bos_token_id) == 1
        tokens += sum(len(prompt) + completion["tokens"] for completion in group["completions"])
    assert read_json(run / "summary.json")["tokens"] == tokens


def test_the_summary_has_seconds_of_every_step(run: Path) -> None:
    """The log has means over the steps of a line; the summary has sums over the run."""
    seconds = read_json(run / "summary.json")["seconds"]
    outer = ("loading", "eval_before", "training", "eval_after", "saving")
    inner = ("generating", "rewarding", "logprobs", "updating")
    assert set(seconds) == {*outer, *inner, "total"}
    assert sum(seconds[phase] for phase in outer) <= seconds["total"]
    assert sum(seconds[phase] for phase in inner) <= seconds["training"]
    (logged,) = [entry for entry in read_lines(run / "metrics.jsonl") if "loss" in entry]
    for phase in inner:
        assert seconds[phase] == pytest.approx(2 * logged[f"time/{phase}"])


def test_completions_are_kept_group_by_group(run: Path) -> None:
    groups = read_lines(run / "completions.jsonl")
    assert [group["step"] for group in groups] == [1, 1, 2, 2]
    for group in groups:
        assert len(group["completions"]) == 4
        for completion in group["completions"]:
            assert completion.keys() >= {"text", "tokens", "finish_reason", "rewards", "reward", "advantage"}


def test_the_manifest_says_how_the_run_came_about(run: Path, model: Path) -> None:
    manifest = read_json(run / "manifest.json")
    assert manifest["grupo"] == grupo.__version__ or manifest["grupo"] is None  # None: used without being installed
    assert manifest["packages"]["torch"] == torch.__version__
    assert manifest["seed"] == 0 and manifest["model"] == str(model)
    assert re.fullmatch(r"[0-9a-f]{32}", manifest["model_hash"])
    assert {"git", "plan", "command", "started", "platform", "trainable_parameters"} <= manifest.keys()


def test_the_resolved_recipe_is_the_run(run: Path, model: Path) -> None:
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert recipe.model == str(model) and recipe.task == "times-tables"
    assert recipe.training["output_dir"] == str(run) and recipe.training["max_steps"] == 2


def test_the_adapter_and_the_tokenizer_load_without_grupo(run: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.chat_template == BOS_CHAT_TEMPLATE
    question = [{"role": "user", "content": "What is 2 * 3?"}]
    ids = tokenizer.apply_chat_template(question, return_tensors="pt", return_dict=True)
    output = load_adapter(model, run).generate(**ids, max_new_tokens=3)
    assert output.shape[1] > ids["input_ids"].shape[1]


def code_of(card: str) -> str:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)[0]


def test_the_card_says_what_came_out_and_its_code_loads_the_model_without_grupo(run: Path, model: Path) -> None:
    card = (run / "README.md").read_text(encoding="utf-8")
    head = {"base_model": str(model), "library_name": "peft", "pipeline_tag": "text-generation"}
    assert yaml.safe_load(card.split("---")[1]) == {**head, "tags": ["grpo", "grupo", "lora"]}
    for when in ("before", "after"):
        found = read_json(run / "summary.json")[f"eval_{when}"]
        assert f"| held-out accuracy {when} | {found['accuracy']:.1%} (95 % interval {found['low']:.1%} to " in card
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)[0])
    assert recipe["training"]["max_steps"] == 2 and recipe["task"] == "times-tables"
    exec(code_of(card), {})
    assert "grupo" not in code_of(card).replace(str(run), "")


def test_the_adapter_is_the_trained_one(model: Path, tmp_path: Path) -> None:
    assert train(model, tmp_path, *LENGTH, "training.learning_rate=0.01", "eval.enabled=false") == 0
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert all(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


def test_without_evaluation(model: Path, tmp_path: Path) -> None:
    assert train(model, tmp_path, "eval.enabled=false") == 0
    summary = read_json(tmp_path / "summary.json")
    assert summary["eval_before"] is None and summary["eval_after"] is None
    assert not list(tmp_path.glob("eval_*")) and not {"eval_before", "eval_after"} & summary["seconds"].keys()


def test_the_evaluation_weighs_rewards_as_the_training_does(model: Path, tmp_path: Path) -> None:
    rewards = "rewards=[number_match, {name: token_length, weight: 0.25, arguments: {target: 5}}]"
    assert train(model, tmp_path, rewards) == 0
    for when in ("before", "after"):
        evaluation = read_json(tmp_path / f"eval_{when}.json")
        completions = [completion for group in evaluation["groups"] for completion in group["completions"]]
        totals = [sum(w * s for w, s in zip((1, 0.25), c["rewards"].values(), strict=True)) for c in completions]
        assert evaluation["mean_reward"] == pytest.approx(sum(totals) / len(totals))
        assert list(read_json(tmp_path / "summary.json")[f"eval_{when}"]) == ["mean_reward", "low", "high", "n"]


def test_a_total_of_several_rewards_is_no_accuracy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One reward pays 1 for anything: every total is 0 or 1, and no answer is right."""
    (tmp_path / "mine.py").write_text("def pays(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert train(model, tmp_path / "run", "rewards=[number_match, 'mine.py:pays']") == 0
    out = capsys.readouterr().out
    assert "accuracy" not in out and "held-out mean reward  before 1.00" in out
    assert "  number_match  0.00 before, 0.00 after" in out and "  pays  1.00 before, 1.00 after" in out


def test_the_whole_model_is_saved_without_lora(model: Path, tmp_path: Path) -> None:
    assert train(model, tmp_path, "lora=null", *LENGTH, "training.learning_rate=0.01", "eval.enabled=false") == 0
    start, trained = load_file(model / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert start.keys() == trained.keys() and any(not torch.equal(start[name], trained[name]) for name in start)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "llama"
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "No held-out evaluation was made" in card
    names: dict[str, Any] = {}
    exec(code_of(card), names)
    assert torch.equal(names["model"].lm_head.weight, trained["lm_head.weight"])


def test_lines_stay_whole_in_a_narrow_window(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = tmp_path / "a folder [with] a name that is much longer than the window is wide"
    assert train(model, folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"run folder  {folder}" in lines
    assert any(re.fullmatch(r"step +1/2  reward .*s/step", line) for line in lines)
    assert any(line.startswith("change ") and line.endswith("by prompt") for line in lines)


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_keeps_the_first(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = ("training.save_strategy=steps", "training.save_steps=2")
    assert train(model, tmp_path, *checkpoints) == 0
    first = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert train(model, tmp_path, *checkpoints, *LENGTH, "training.max_steps=1", "training.seed=1") == 0
    assert f"{tmp_path} has an earlier run, which is now in {tmp_path / 'earlier'}." in caplog.messages
    for path, content in first.items():
        kept = tmp_path / "earlier" / path
        kept = kept if kept.exists() else tmp_path / path
        assert kept.read_bytes() == content or path.name == "training_args.bin", "that one is of the second run"
    load_adapter(model, tmp_path / "earlier")
    assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl") if "loss" in entry] == [1]
    # A checkpoint of the first run must not be what the second one is resumed from.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert train(model, tmp_path) == 0
    assert (tmp_path / "earlier-2" / "summary.json").is_file()


def test_without_a_folder_each_run_gets_its_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", *arguments(model, Path("nowhere"), "eval.enabled=false", "training.max_steps=1")]
    place = command.index("training.output_dir=nowhere")
    del command[place - 1 : place + 1]
    assert main(command) == 0 and main(command) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["times-tables", "times-tables-2"]


def test_a_dry_run_leaves_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(model, tmp_path / "run", flags=("--dry-run",)) == 0
    output = capsys.readouterr().out
    assert "2 optimizer steps, 16 completions" in output and "83 training prompts, 38 held out" in output
    assert "memory: about " in output and "free next to the loaded model: " in output
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_is_the_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    settings = (*LENGTH, "training.learning_rate=0.01", "training.save_strategy=steps", "training.save_steps=1")
    assert train(model, tmp_path / "straight", *settings, "training.max_steps=4") == 0
    assert train(model, tmp_path / "resumed", *settings) == 0
    recipe = str(tmp_path / "resumed" / "recipe.yaml")
    assert main(["train", recipe, "--resume", "--set", "training.max_steps=4"]) == 0
    straight, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    steps = [entry["step"] for entry in read_lines(tmp_path / "resumed" / "metrics.jsonl") if "loss" in entry]
    assert steps == [1, 2, 3, 4] and not (tmp_path / "resumed" / "earlier").exists()
    assert read_json(tmp_path / "resumed" / "summary.json")["completions"] == 32


def test_a_run_folder_that_was_moved_is_not_taken_for_a_new_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*LENGTH, "training.save_strategy=steps", "training.save_steps=1", "eval.enabled=false")
    assert train(model, tmp_path / "before", *settings) == 0
    (tmp_path / "before").rename(tmp_path / "after")
    recipe = str(tmp_path / "after" / "recipe.yaml")
    assert main(["train", recipe, "--resume"]) == 2
    assert f"add --set training.output_dir={str(tmp_path / 'after')!r}" in refused(capsys)
    assert not (tmp_path / "before").exists()
    assert main(["train", recipe, "--resume", "--set", f"training.output_dir={tmp_path / 'after'}"]) == 0


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(model, tmp_path / "file" / "run") == 2
    assert "is a file. Choose another folder" in refused(capsys)


def test_a_refused_resume_keeps_the_trained_adapter(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*LENGTH, "training.learning_rate=0.01", "training.save_strategy=steps", "training.save_steps=1")
    assert train(model, tmp_path, *settings, "eval.enabled=false") == 0
    kept = {
        name: (tmp_path / name).read_bytes() for name in ("adapter_model.safetensors", "recipe.yaml", "summary.json")
    }
    assert train(model, tmp_path, *settings, "training.temperature=0.5", flags=("--resume",)) == 2
    assert "temperature was 1.0 and is 0.5" in refused(capsys)
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}


@pytest.mark.parametrize("reason", [KeyboardInterrupt, RewardError("no score")])
def test_a_resume_that_ends_before_the_checkpoint_is_loaded_keeps_the_trained_adapter(
    reason: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*LENGTH, "training.learning_rate=0.01", "training.save_strategy=steps", "training.save_steps=1")
    assert train(model, tmp_path, *settings) == 0
    kept = {
        name: (tmp_path / name).read_bytes() for name in ("adapter_model.safetensors", "recipe.yaml", "summary.json")
    }

    def ends(*args: Any, **kwargs: Any) -> None:
        raise reason

    monkeypatch.setattr("grupo.cli.held_out_eval.evaluate_held_out", ends)
    changed = ("training.max_steps=4", "eval.samples_per_prompt=3")
    assert train(model, tmp_path, *settings, *changed, flags=("--resume",)) in (1, 130)
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}


def test_a_resumed_run_keeps_its_evaluation_before_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*LENGTH, "training.learning_rate=0.01", "training.save_strategy=steps", "training.save_steps=1")
    assert train(model, tmp_path, *settings) == 0
    before = (tmp_path / "eval_before.json").read_bytes()
    summary = read_json(tmp_path / "summary.json")
    evaluated = []
    real = grupo.cli.held_out_eval.evaluate_held_out
    monkeypatch.setattr(
        "grupo.cli.held_out_eval.evaluate_held_out",
        lambda *given, **more: evaluated.append(more) or real(*given, **more),
    )
    assert train(model, tmp_path, *settings, "training.max_steps=3", flags=("--resume",)) == 0
    assert len(evaluated) == 1, "the one after training"
    assert (tmp_path / "eval_before.json").read_bytes() == before
    assert read_json(tmp_path / "summary.json")["eval_before"] == summary["eval_before"]
    assert "held-out mean reward before" in (tmp_path / "README.md").read_text()
    assert train(model, tmp_path, *settings, "training.max_steps=4", "eval.enabled=false", flags=("--resume",)) == 0
    assert read_json(tmp_path / "summary.json")["eval_before"] == summary["eval_before"]
    more = (*settings, "training.max_steps=5", "eval.samples_per_prompt=3")
    assert train(model, tmp_path, *more, flags=("--resume",)) == 0
    assert len(evaluated) == 3 and "with other settings (samples_per_prompt), so it is repeated" in caplog.text


# ---- a dataset of one's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_recipe_with_a_local_dataset(suffix: str, model: Path, tmp_path: Path) -> None:
    rows = [(f"{n} plus 1?", n + 1) for n in range(12)]
    data = tmp_path / f"questions{suffix}"
    if suffix == ".csv":
        data.write_text("question,gold\n" + "".join(f"{q},{g}\n" for q, g in rows), encoding="utf-8")
    else:
        data.write_text("".join(json.dumps({"question": q, "gold": g}) + "\n" for q, g in rows), encoding="utf-8")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"""
model: {model}
dataset: {{path: {data}, prompt: question, rename: {{gold: answer}}, system: Be brief., held_out: 4}}
rewards: [number_match, {{name: tag_format, weight: 0.3}}]
training:
  {{output_dir: {tmp_path / "run"}, max_steps: 2, learning_rate: 1e-4, per_device_train_batch_size: 8,
    num_generations: 4, max_completion_length: 8, report_to: [], save_strategy: "no"}}
eval: {{samples_per_prompt: 2}}
""",
        encoding="utf-8",
    )
    assert main(["train", str(recipe)]) == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["steps"] == 2 and summary["eval_before"]["n"] == 4 * 2
    asked = [group["prompt"] for group in read_lines(tmp_path / "run" / "completions.jsonl")]
    held_out = [group["prompt"] for group in read_json(tmp_path / "run" / "eval_before.json")["groups"]]
    assert all(prompt[0] == {"role": "system", "content": "Be brief."} for prompt in asked + held_out)
    assert not [prompt for prompt in asked if prompt in held_out]


# ---- exit codes ------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """What is said about a run that ended with 2: one line."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.jsonl", None, "is not a file"),
        ("missing-folder", None, "cannot be read: Couldn't find any data file"),
        ("empty.jsonl", "", "cannot be read: it is empty"),
        ("broken.jsonl", '{"prompt": 1\n nope', "cannot be read: JSON parse error"),
        ("broken.csv", 'a,b\n1,2,3\n"', "cannot be read: Error tokenizing data"),
        ("broken.parquet", "no parquet", "cannot be read: Parquet magic bytes not found"),
        ("other.jsonl", '{"question": "1 + 1?"}\n', "is not a column"),
    ],
)
def test_data_that_cannot_be_used_ends_with_2(
    name: str, content: str | None, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    settings = ("task=null", f"dataset.path={path}", "rewards=[number_match]")
    assert train(model, tmp_path / "run", *settings) == 2
    message = refused(capsys)
    assert said in message and str(path) in message


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model=/no/such/folder", "The model '/no/such/folder' cannot be loaded"),
        ("task=time-tables", "There is no task 'time-tables'. Did you mean 'times-tables'?"),
        ("rewards=[number_mtach]", "There is no reward named 'number_mtach'. Did you mean 'number_match'?"),
        ("training.max_step=3", "Did you mean 'max_steps'?"),
        ("training.num_generations=3", "num_generations"),
        ("training.loss_type=dappo", "Did you mean 'dapo'?"),
        ("training.max_steps=many", "max_steps"),
    ],
)
def test_settings_that_cannot_work_end_with_2(
    setting: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, tmp_path / "run", setting) == 2
    assert said in refused(capsys)
    assert not (tmp_path / "run").exists()


def test_a_resume_that_does_not_say_of_what_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume"]) == 2
    assert "--set training.output_dir=FOLDER" in refused(capsys)
    assert main(["train", "--accept-changes", "steps"]) == 2
    assert "it needs --resume" in refused(capsys)


def test_a_resume_without_a_checkpoint_starts_from_the_beginning(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a job script calls every time. A run that was killed before its first checkpoint moves aside."""
    (tmp_path / "unfinished" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("")
    assert train(model, tmp_path, "eval.enabled=false", flags=("--resume",)) == 0
    assert "has no checkpoint, so the run starts from the beginning" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "earlier" / "metrics.jsonl").is_file() and not (tmp_path / "unfinished").exists()
    assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl") if "loss" in entry] == [1, 2]


def test_a_changed_setting_is_accepted_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*LENGTH, "eval.enabled=false", "training.save_strategy=steps", "training.save_steps=1")
    assert train(model, tmp_path, *settings) == 0
    other = (*settings, "rewards=[{name: token_length, arguments: {target: 9}}]", "training.max_steps=3")
    assert train(model, tmp_path, *other, flags=("--resume",)) == 2
    assert "--accept-changes rewards" in refused(capsys)
    assert train(model, tmp_path, *other, flags=("--resume", "--accept-changes", "rewards")) == 0
    assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl") if "loss" in entry] == [1, 2, 3]


def test_sigterm_ends_with_143_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    """As a cluster ends a job: no checkpoint was asked for, and there is one all the same."""
    rewards = tmp_path / "mine.py"
    rewards.write_text(
        "import os, signal\n"
        "def length(completion_ids, trainer_state, **_):\n"
        "    if trainer_state and trainer_state.global_step == 2 and os.path.exists('term'):\n"
        "        os.remove('term')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [-float(len(ids)) for ids in completion_ids]\n"
    )
    settings = (f"rewards=['{rewards}:length']", "training.max_completion_length=40", "training.max_steps=5",
                "training.learning_rate=0.01")  # fmt: skip
    assert train(model, tmp_path / "whole", *settings) == 0
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        Path("term").touch()
        assert train(model, tmp_path / "run", *settings) == 143
    finally:
        os.chdir(before)
    load_adapter(model, tmp_path / "run")
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["interrupted"] is True and summary["steps"] == 3 and summary["eval_after"] is None
    assert train(model, tmp_path / "run", *settings, flags=("--resume",)) == 0
    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert read_json(tmp_path / "run" / "summary.json")["interrupted"] is False
    assert read_json(tmp_path / "run" / "eval_after.json") == read_json(tmp_path / "whole" / "eval_after.json")


def gold_rows(folder: Path, *golds: Any) -> tuple[str, ...]:
    """Settings for a dataset with these gold answers, two rows of which are held out."""
    rows = [{"prompt": f"{index} + 0?", "answer": gold} for index, gold in enumerate(golds)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ("task=null", f"dataset.path={data}", "dataset.held_out=2", "rewards=[number_match]")


HELD_OUT_OF_8 = (4, 6)
"""The rows that the seed of these runs, 0, holds out."""


def test_gold_answers_that_cannot_be_read_are_named_before_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    golds = ["1"] * 8
    golds[2] = "see the figure"
    golds[HELD_OUT_OF_8[1]] = "unknown"
    settings = gold_rows(tmp_path, *golds)
    assert train(model, tmp_path / "run", *settings, flags=("--dry-run",)) == 0
    assert (
        "('answer') of 1 of 6 training rows, counted from 0: 2; the first is 'see the figure'. It abstains"
        in caplog.text
    )
    assert (
        f"of 1 of 2 held-out rows, counted from 0: {HELD_OUT_OF_8[1]}; the first is 'unknown'. They are left out"
        in caplog.text
    )
    assert "5 training" not in capsys.readouterr().out
    assert train(model, tmp_path / "run", *settings) == 0
    evaluation = read_json(tmp_path / "run" / "eval_before.json")
    assert [group["row"] for group in evaluation["groups"]] == [HELD_OUT_OF_8[0]]
    assert "2 samples of only 1 prompt, too few for a reliable interval" in capsys.readouterr().out
    for row in HELD_OUT_OF_8:
        golds[row] = "unknown"
    assert train(model, tmp_path / "run", *gold_rows(tmp_path, *golds)) == 2
    assert f"of 2 of 2 held-out rows, counted from 0: {HELD_OUT_OF_8[0]}, {HELD_OUT_OF_8[1]}; the first" in refused(
        capsys
    )
    assert train(model, tmp_path / "run", *gold_rows(tmp_path, *["?"] * 8)) == 2
    assert "of 6 of 6 training rows, counted from 0: 0, 1, 2, 3, 5, ...; the first is '?'. A gold answer is" in refused(
        capsys
    )


def test_a_run_that_must_stop_ends_with_1_and_keeps_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "abstains.py"
    reward.write_text("def abstains(completions, **kwargs):\n    return [None] * len(completions)\n", encoding="utf-8")
    settings = (*gold_rows(tmp_path, *range(8)), f"rewards=['{reward}:abstains']")
    assert train(model, tmp_path / "run", *settings) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("the run stopped: A held-out answer could not be scored")
    assert f"row {HELD_OUT_OF_8[0]} of the dataset" in last and f"{HELD_OUT_OF_8[0]} + 0?" in last
    assert read_json(tmp_path / "run" / "summary.json")["interrupted"] is False
    load_adapter(model, tmp_path / "run")


def test_an_interrupt_before_the_run_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    import grupo.cli.train

    def interrupted(*args: Any, **kwargs: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(grupo.cli.train, "train", interrupted)
    assert main(["train"]) == 130


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt(command: list[str], when: Callable[[], bool]) -> subprocess.CompletedProcess[str]:
    """Runs grupo in a process of its own and sends it what Ctrl-C sends, once `when()` is true."""
    # A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from grupo.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not when():
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < deadline, "nothing to interrupt came about"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_ctrl_c_during_training_leaves_a_usable_adapter(model: Path, tmp_path: Path) -> None:
    """In a process of its own; one reward warns, and warnings are shown without the code that gives them."""
    metrics = tmp_path / "metrics.jsonl"
    rewards = "rewards=[tag_format, {name: token_length, arguments: {target: 5}}]"
    long = ("training.max_completion_length=40", "training.learning_rate=0.01", "training.max_steps=100000")
    command = ["train", *arguments(model, tmp_path, rewards, *long)]
    result = interrupt(command, lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2)
    assert result.returncode == 130, result.stderr[-2000:]
    assert "Traceback" not in result.stderr and "saving the model" in result.stdout
    assert any(line.startswith("tag_format gave 0 to all") for line in result.stderr.splitlines())
    assert "Warning:" not in result.stderr and "outcome =" not in result.stderr
    summary = read_json(tmp_path / "summary.json")
    assert summary["interrupted"] is True and summary["eval_after"] is None
    assert list(summary["eval_before"]) == ["mean_reward", "low", "high", "n"]
    assert 2 <= summary["steps"] < 100000
    assert read_lines(metrics) and read_lines(tmp_path / "completions.jsonl"), "every line is whole"
    load_adapter(model, tmp_path)
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert all(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)


def test_ctrl_c_during_the_first_evaluation_leaves_a_usable_adapter(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: that its end is the end of a process is seen above."""
    long = ("eval.max_prompts=20", "eval.samples_per_prompt=50", "training.max_completion_length=400")

    def interrupts_the_evaluation() -> None:
        while not (tmp_path / "recipe.yaml").is_file():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupts_the_evaluation, daemon=True).start()
        assert train(model, tmp_path, *long) == 130
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "Traceback" not in capsys.readouterr().err
    summary = read_json(tmp_path / "summary.json")
    assert summary["interrupted"] is True and summary["steps"] == 0
    assert summary["eval_before"] is None and summary["eval_after"] is None
    assert (tmp_path / "manifest.json").is_file()
    load_adapter(model, tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
