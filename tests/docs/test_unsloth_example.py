"""The published script for Unsloth, with few lines changed, runs on a 4-bit base and is told what its batch means."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import grupo
from grupo.recipes.yaml_io import load_recipe
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("bitsandbytes")
PATH = Path(__file__).parents[2] / "examples" / "unsloth_script.py"
STEPS = 3


def test_only_imports_model_and_data_are_changed():
    changed = re.findall(r"# was: (.*)", PATH.read_text(encoding="utf-8"))
    assert [line.split("import")[0].split("=")[0].strip() for line in changed] == [
        "from unsloth", "model_name", "dataset", "from trl",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_script_runs(tmp_path):
    tiny_model(hidden_size=64, intermediate_size=128, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    script = PATH.read_text(encoding="utf-8")
    # Its prompts are longer than 256 of the tiny tokenizer's letters.
    for old, new in (
        ("max_steps=250", f"max_steps={STEPS}, logging_steps=1, report_to=[]"),
        ("max_prompt_length=256", "max_prompt_length=600"),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py", "model"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(grupo.__file__).parents[1])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stderr
    assert said.count("gradient_accumulation_steps raised from 1 to 8, so that an optimizer step contains") == 1
    assert said.count("fast_inference=True: completions are sampled in this process") == 1
    assert said.count("without effect here: max_lora_rank") + said.count("without effect here: gpu_memory_util") == 1
    assert said.count("warmup_ratio is now called warmup_steps") == 1
    lines = [json.loads(line) for line in (tmp_path / "outputs" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert len(logged) == STEPS and all(line["sampling/logprob_gap"] < 1e-4 for line in logged if "ratio/mean" in line)
    rewards = [name.split("/")[1] for name in logged[0] if re.fullmatch(r"rewards/\w+/mean", name)]
    assert rewards == [
        "xmlcount_reward",
        "soft_format_reward",
        "strict_format_reward",
        "int_reward",
        "correctness_reward",
    ]
    groups = (tmp_path / "outputs" / "completions.jsonl").read_text().splitlines()
    assert [len(json.loads(group)["completions"]) for group in groups] == [8] * STEPS


def test_the_demonstrations_have_the_form_that_the_script_rewards():
    recipe = load_recipe(str(PATH.parent / "reasoning_format.yaml"))
    script = PATH.read_text(encoding="utf-8")
    parts: dict[str, Any] = {"re": re}
    exec(script[script.index("SYSTEM_PROMPT =") : script.index("# 4.")], parts)
    exec(script[script.index("def extract_xml") : script.index("# was: from trl")], parts)
    assert recipe.dataset.system == parts["SYSTEM_PROMPT"]
    lines = (PATH.parents[1] / recipe.dataset.path).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    shown = [[{"role": "assistant", "content": row["completion"]}] for row in rows]
    golds = [row["completion"].split("<answer>\n")[1].split("\n")[0] for row in rows]
    assert len(rows) == 120 and set(parts["strict_format_reward"](shown)) == {0.5}
    assert min(parts["xmlcount_reward"](shown)) > 0.49 and set(parts["int_reward"](shown)) == {0.5}
    assert set(parts["correctness_reward"](None, shown, golds)) == {2.0}
