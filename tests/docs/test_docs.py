"""What the documentation shows is run: Python and recipe examples, links, and the commands of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from grupo.cli.main import _parser
from grupo.cli.sft import sft_phase
from grupo.config import GRPOConfig
from grupo.errors import ExportError
from grupo.models.peft_io import save_adapter
from grupo.models.peft_setup import add_adapter
from grupo.recipes.build import lora_config_of
from grupo.recipes.data import recipe_rewards
from grupo.recipes.schema import DatasetSpec, EvalSpec, LoraSpec, Recipe, SftSpec
from grupo.recipes.yaml_io import load_recipe
from grupo.rewards import FAULTS, RewardRunner, make_reward
from grupo.tasks.registry import TASKS, make_task
from stub_judge import grade, judge_server
from tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_example_runs(tmp_path, monkeypatch):
    code, after = blocks(ROOT / "README.md", "python")
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_id in code and "max_steps=20" in code
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code.replace(model_id, str(tmp_path / "model")).replace("max_steps=20", "max_steps=2"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    assert (tmp_path / "sums" / "metrics.jsonl").is_file()
    exec(after, names)
    assert type(names["merged"]).__name__ == "LlamaForCausalLM"


def test_the_recipe_example_is_a_recipe(tmp_path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    recipe = Recipe.model_validate(yaml.safe_load(text))
    rewards, weights = recipe_rewards(recipe)
    assert [reward.__name__ for reward in rewards] == ["number_match", "tag_format"] and weights == [1.0, 0.3]
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    training = load_recipe(str(path)).training
    config = GRPOConfig(output_dir=str(tmp_path), **training)
    assert config.learning_rate == 1e-4


def test_recipe_page_names_every_key_and_its_example_loads(tmp_path, monkeypatch):
    page = ROOT / "docs" / "recipe.md"
    (text,), (code,) = blocks(page, "yaml"), blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    rewards, _ = recipe_rewards(load_recipe("recipe.yaml"))
    apology, answer = [{"role": "assistant", "content": "Sorry, no."}], [{"role": "assistant", "content": "4"}]
    assert rewards[-1]([apology, answer]) == [-1.0, 0.0]
    parts = {"dataset": DatasetSpec, "lora": LoraSpec, "sft": SftSpec, "eval": EvalSpec}
    keys = [*(key for key in Recipe.model_fields if key not in parts)]
    keys += [f"{part}.{field}" for part, spec in parts.items() for field in spec.model_fields]
    table = page.read_text(encoding="utf-8")
    assert [key for key in keys if f"`{key}`" not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_commands(page):
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["grupo"]:
                assert _parser().parse_args(words[1:]).command
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for entry in (ROOT / "src" / "grupo").iterdir():
        if entry.suffix == ".py" and entry.name != "__init__.py":
            assert f"`{entry.name}`" in text, entry.name
        if entry.is_dir() and entry.name not in {"__pycache__", "recipes"}:
            assert f"`{entry.name}/`" in text, entry.name


@pytest.mark.parametrize("name", ["tasks.md", "reward_check.md", "memory.md"])
def test_pages_whose_examples_stand_alone(name, tmp_path, monkeypatch):
    page = ROOT / "docs" / name
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in blocks(page, "python"):
        exec(example, names)
    for text in blocks(page, "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        recipe_rewards(load_recipe("recipe.yaml"))


def test_every_task_and_every_fault_is_documented():
    tasks = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert [name for name in TASKS if f"`{name}`" not in tasks] == []
    page = (ROOT / "docs" / "reward_check.md").read_text(encoding="utf-8")
    assert [name for name in FAULTS if f"| `{name}` |" not in page] == []


def test_the_examples_about_signal_run(tmp_path, monkeypatch):
    setup, *examples = blocks(ROOT / "docs" / "signal.md", "python")
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_id in setup and '"max_steps": 20' in setup and len(examples) == 4
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(setup.replace(model_id, str(tmp_path / "model")).replace('"max_steps": 20', '"max_steps": 2'), names)
    for example in examples:
        exec(example, names)
    for folder, metric in (("refilled", "dynamic_sampling/rounds"), ("chosen", "loss"), ("course", "curriculum/level")):
        assert f'"{metric}"' in (tmp_path / folder / "metrics.jsonl").read_text()
    assert set(names["rates"]) <= {0.0, 0.25, 0.5, 0.75, 1.0} and len(names["rates"]) == len(names["sums"])


def test_the_examples_about_judges_and_reward_models_run(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "judge.md"
    asked, tried, trained, alone, beside = blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    names: dict[str, object] = {}
    exec(beside, {})
    with judge_server(lambda body, number: grade(9 if "Friday" in str(body["messages"]) else 1)) as server:
        assert "http://localhost:8000/v1" in asked
        exec(asked.replace("http://localhost:8000/v1", server.base_url), names)
        exec(tried, names)
    assert capsys.readouterr().out.strip() == "[0.9, 0.1]"

    classifier = LlamaForSequenceClassification(LlamaConfig(**{**tiny_model().config.to_dict(), "num_labels": 1}))
    classifier.save_pretrained(tmp_path / "judging")
    tiny_model().save_pretrained(tmp_path / "model")
    for folder in ("judging", "model"):
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    for model_id, folder in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "model"),
        ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "judging"),
        ("max_steps=20", "max_steps=1, max_completion_length=8, report_to=[]"),
    ):
        assert model_id in trained
        trained = trained.replace(model_id, folder)
    exec(trained, names)
    names["trainer"].train()
    assert '"rewards/judging/mean"' in (tmp_path / "helpful" / "metrics.jsonl").read_text()

    exec(alone, names)
    assert RewardRunner([names["counted"], names["counted"]]).score(
        prompts=["p"], completions=["c"], completion_ids=[[1]], columns={}
    ).scores == [(0.0, 0.0)]
    assert (tmp_path / "seen.txt").read_text() == "'c'\n'c'\n"
    rewards = [recipe_rewards(Recipe.model_validate(yaml.safe_load(text))) for text in blocks(page, "yaml")]
    assert [reward.__name__ for functions, _ in rewards for reward in functions] == [
        *("llm_judge", "number_match", "Skywork-Reward-V2-Qwen3-0.6B"),
    ]
    assert [weights for _, weights in rewards] == [[1.0], [2.0, 0.1]]


def test_the_examples_about_code_rewards_run():
    page = ROOT / "docs" / "code_rewards.md"
    (code,), (recipe,) = blocks(page, "python"), blocks(page, "yaml")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["scores"] == [1.0, 0.5] and names["penalties"] == [0.0, -1.0]
    for spec in yaml.safe_load(recipe)["rewards"]:
        assert make_reward(spec["name"], **spec["arguments"]).value_range


def test_the_examples_about_export_run(tmp_path, monkeypatch):
    from saved_adapters import base_folder

    (tmp_path / "runs").mkdir()
    base_folder(tmp_path / "runs" / "times-tables")
    monkeypatch.chdir(tmp_path)
    exported, uploaded = blocks(ROOT / "docs" / "export.md", "python")
    names: dict[str, object] = {}
    exec(exported, names)
    assert (tmp_path / "tables.gguf").is_file() and names["report"].dtype == "bfloat16"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError, match="grupo export tables --to hub --repo me/tables"):
        exec(uploaded.replace("private=True", "private=True, wait=0.01"), names)


def test_the_examples_about_adapters_run(tmp_path, monkeypatch):
    page = ROOT / "docs" / "adapters.md"
    (recipe, with_tokens), examples = blocks(page, "yaml"), blocks(page, "python")
    spec = Recipe.model_validate(yaml.safe_load(recipe))
    assert Recipe.model_validate(yaml.safe_load(with_tokens)).training["added_tokens"] == ["<plan>", "</plan>"]
    monkeypatch.chdir(tmp_path)
    model = add_adapter(tiny_model(), lora_config_of(spec))
    assert model.peft_config["default"].use_rslora
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    tiny_model().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    save_adapter(
        get_peft_model(AutoModelForCausalLM.from_pretrained("model"), LoraConfig(target_modules=["q_proj"])), "first"
    )
    names: dict[str, object] = {}
    for example in examples:
        exec(example.replace(model_id, "model"), names)
    for folder in ("second", "planned"):
        assert AutoPeftModelForCausalLM.from_pretrained(folder).peft_config["default"].base_model_name_or_path


def test_the_examples_about_the_supervised_phase_run(tmp_path, monkeypatch):
    page = ROOT / "docs" / "sft.md"
    (text,), (code,) = blocks(page, "yaml"), blocks(page, "python")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    phase = sft_phase(recipe, GRPOConfig(str(tmp_path), **recipe.training), make_task(recipe.task).train)
    assert len(phase.dialogues) == 83 and phase.describe().split(", ")[1].startswith("22 optimizer steps")
    assert "I know this one.</think><answer>" in phase.dialogues[0].answer[0]["content"]
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    names: dict[str, object] = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "model"), names)
    assert (tmp_path / "shown" / "adapter_model.safetensors").is_file()


def test_the_example_for_scripts_of_unsloth_runs(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    (code,) = blocks(ROOT / "docs" / "unsloth.md", "python")
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_id in code and "max_steps=20" in code
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code.replace(model_id, str(tmp_path / "model")).replace("max_steps=20", "max_steps=2"), names)
    assert names["trainer"].state.global_step == 2 and names["output"].outputs[0].token_ids
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "model.safetensors").is_file()
