"""A complete script written for TRL runs with five lines changed, and what its readers do next works too."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import grupo
from grupo import GRPOConfig, GRPOTrainer, ScriptedEngine
from stub_hub import stub_hub
from tiny import BOS_CHAT_TEMPLATE, tiny_model, tiny_tokenizer


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


DROP_IN = Path(__file__).parent / "drop_in"
POSTS = read_lines(DROP_IN / "short_posts.jsonl")
NAME = "SmolGRPO-135M"
COMPLETIONS_PER_STEP = 16
PROMPTS_PER_STEP = 2
NO_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="states what happens without accelerator")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(chat_template=BOS_CHAT_TEMPLATE).save_pretrained(folder)
    return folder


# ---- the script ------------------------------------------------------------------------------------------------------


def script_with_five_changes(model: Path, data: Path) -> str:
    changes = {
        "from trl import GRPOConfig, GRPOTrainer": "from grupo import GRPOConfig, GRPOTrainer",
        'dataset = load_dataset("mlabonne/smoltldr")': f"dataset = load_dataset('json', data_files={str(data)!r})",
        'model_id = "HuggingFaceTB/SmolLM-135M-Instruct"': f"model_id = {str(model)!r}",
        '    attn_implementation="flash_attention_2",': '    attn_implementation="sdpa",',
        '    report_to=["wandb"],': "    report_to=[],",
    }
    script = (DROP_IN / "tutorial_script.py").read_text(encoding="utf-8").splitlines()
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script[script.index(old)] = new
    return "\n".join(script)


def run_script(folder: Path, model: Path, rows: list[dict[str, str]]) -> subprocess.CompletedProcess[str]:
    """Runs the script in `folder`; what it uploads is in `folder/NAME`."""
    data, script, modules = folder / "posts.jsonl", folder / "script.py", folder / "modules"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    script.write_text(script_with_five_changes(model, data), encoding="utf-8")
    modules.mkdir()
    if importlib.util.find_spec("wandb") is None:
        (modules / "wandb.py").write_text("def init(project): print(f'wandb.init: {project}')\n", encoding="utf-8")
    with stub_hub(folder) as address:
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_TOKEN": "hf_of_the_stub",
            "HF_HOME": str(folder / "hub-cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # the stub speaks HTTP only
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(modules), str(Path(grupo.__file__).parents[1])]),
        }
        return subprocess.run(
            [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )


def check_the_run(folder: Path, model: Path, result: subprocess.CompletedProcess[str], steps: int) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    logged = [entry for entry in read_lines(folder / "GRPO" / "metrics.jsonl") if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, steps + 1))
    assert all({"loss", "reward", "epoch", "rewards/reward_len/mean"} <= entry.keys() for entry in logged)
    printed = [line for line in result.stdout.splitlines() if line.startswith("{'loss'")]
    assert len(printed) == steps, "one dictionary per step on the screen, as logging_steps=1 says"

    groups = read_lines(folder / "GRPO" / "completions.jsonl")
    completions = [completion for group in groups for completion in group["completions"]]
    assert len(completions) == steps * COMPLETIONS_PER_STEP
    # The function counts characters, whatever the text around it says about tokens.
    assert all(completion["reward"] == -abs(50 - len(completion["text"])) for completion in completions)

    start, merged = load_file(model / "model.safetensors"), load_file(folder / NAME / "model.safetensors")
    assert start.keys() == merged.keys(), "merged: no weights of the adapter are left beside the model's own"
    assert any(not torch.equal(start[name], merged[name]) for name in start), "the upload is what was trained"
    assert re.search(r"^tags:\n(- .*\n)*- GRPO\n", (folder / NAME / "README.md").read_text(encoding="utf-8"), re.M)


def check_the_pipeline(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's test of the uploaded model, by its name."""
    # The tutorial uploads the model alone; whoever tries it needs the tokenizer beside it.
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder / NAME)
    monkeypatch.chdir(folder)
    generator = transformers.pipeline("text-generation", model=NAME)
    output = generator(
        [{"role": "user", "content": "Fasse folgenden Text in einem Satz zusammen: ..."}],
        max_new_tokens=96,
        do_sample=True,
        temperature=0.5,
    )
    assert output[0]["generated_text"][-1]["role"] == "assistant"


def test_the_script_runs_on_a_tiny_model(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_script(tmp_path, tiny_folder, POSTS)
    check_the_run(tmp_path, tiny_folder, result, steps=len(POSTS) // PROMPTS_PER_STEP)
    if not torch.accelerator.is_available():
        assert result.stderr.count("bf16=True: no accelerator was found") == 1
    if importlib.util.find_spec("wandb") is None:
        assert "wandb.init: GRPO" in result.stdout
    check_the_pipeline(tmp_path, tiny_folder, monkeypatch)


@pytest.mark.model
@pytest.mark.slow
def test_the_script_runs_on_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grupo.models.default_model import default_model_path

    model = Path(default_model_path())
    result = run_script(tmp_path, model, POSTS[:PROMPTS_PER_STEP])  # a step takes a minute on one core
    check_the_run(tmp_path, model, result, steps=1)
    check_the_pipeline(tmp_path, model, monkeypatch)


# ---- the tutorial's other fragments ----------------------------------------------------------------------------------


def test_format_and_accuracy_rewards_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def format_reward(completions: list[str], **kwargs: Any) -> list[float]:
        pattern = r"^<think>.*?</think>.*?<answer>.*?</answer>$"
        return [1.0 if re.match(pattern, c, re.DOTALL) else 0.0 for c in completions]

    def accuracy_reward(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
        matches = [re.search(r"\\boxed\{(.*?)\}", c) for c in completions]
        contents = [m.group(1) if m else "" for m in matches]
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]

    answers = [
        "<think>3x = 15</think>\n<answer>\\boxed{5}</answer>",
        "<think>3x = 15</think>\n<answer>\\boxed{6}</answer>",
        "It is \\boxed{5}.",
        "no idea",
    ]
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(
        lambda prompt, place: [*tokenizer.convert_tokens_to_ids(list(answers[place])), tokenizer.eos_token_id],
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop_token_ids=[tokenizer.eos_token_id],
    )
    lora_config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(tiny_model(), lora_config)
    print(model.print_trainable_parameters())
    assert "trainable params" in capsys.readouterr().out
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[format_reward, accuracy_reward],
        args=config(tmp_path, num_generations=4, per_device_train_batch_size=4),
        train_dataset=[{"prompt": "Solve 3x + 7 = 22 for x. ", "ground_truth": "5"}],
        processing_class=tokenizer,
        engine=engine,
    )
    trainer.train()
    (group,) = read_lines(tmp_path / "completions.jsonl")
    scores = [tuple(completion["rewards"].values()) for completion in group["completions"]]
    assert scores == [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    assert [completion["reward"] for completion in group["completions"]] == [2.0, 1.0, 1.0, 0.0]
    signs = [(completion["advantage"] > 0) - (completion["advantage"] < 0) for completion in group["completions"]]
    assert signs == [1, 0, 0, -1]


def config(folder: Path, **settings: Any) -> GRPOConfig:
    defaults = {
        "output_dir": str(folder),
        "max_steps": 1,
        "max_completion_length": 60,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    return GRPOConfig(**{**defaults, **settings})


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


PROMPTS = [{"prompt": f"question {number}: "} for number in range(4)]


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attention_falls_back_where_grupo_loads_the_model(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = GRPOTrainer(
        model=str(tiny_folder),
        reward_funcs=length,
        args=config(tmp_path, model_init_kwargs={"attn_implementation": "flash_attention_2"}),
        train_dataset=PROMPTS,
    )
    assert trainer.model.config._attn_implementation == "sdpa"
    assert [line for line in caplog.messages if "flash" in line] == [
        "attn_implementation='flash_attention_2' needs the package flash-attn; 'sdpa' is used instead."
    ]


@NO_ACCELERATOR
def test_plain_defaults_train_without_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `args` at all; the prompts fill one step of the default batch of 8 = 1 prompt x 8 completions."""
    folder = tmp_path / "some-model"
    tiny_model(max_position_embeddings=1024).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer(model=str(folder), reward_funcs=length, train_dataset=PROMPTS[:1])
    assert not trainer.args.bf16 and not trainer.args.fp16
    assert trainer.train().global_step == 3, "3 epochs of 1 step"
    assert (tmp_path / "some-model-GRPO" / "metrics.jsonl").is_file()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_old_names_work_in_a_whole_run(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = config(
        tmp_path,
        max_steps=2,
        warmup_ratio=0.5,
        evaluation_strategy="steps",
        eval_steps=1,
        overwrite_output_dir=True,
        logging_dir=str(tmp_path / "logs"),
        no_cuda=not torch.accelerator.is_available(),
        save_safetensors=True,
        max_prompt_length=20,
        scale_rewards=True,
        loss_type="gspo",
    )
    trainer = GRPOTrainer(
        model=str(tiny_folder),
        reward_funcs=length,
        args=args,
        train_dataset=[*PROMPTS, {"prompt": "longer than twenty characters"}],
        eval_dataset=PROMPTS[:1],
        tokenizer=tiny_tokenizer(),
    )
    trainer.train()
    logs = trainer.state.log_history
    assert [entry["learning_rate"] for entry in logs if "loss" in entry] == [0.0, args.learning_rate]
    assert sum("eval_reward" in entry for entry in logs) == 2
    assert len(trainer.train_rows) == len(PROMPTS)
    old_names = "warmup_ratio evaluation_strategy overwrite_output_dir logging_dir save_safetensors tokenizer"
    for name in old_names.split():
        assert sum(line.startswith(name) for line in caplog.messages) == 1, name
    assert "1 of 5 training prompts are longer than max_prompt_length=20 tokens and are left out." in caplog.messages
