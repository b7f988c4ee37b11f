"""Models and datasets as people pass them: what works, and what is refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM, LlamaModel, T5Config, T5ForConditionalGeneration

from grupo import GRPOTrainer
from grupo.errors import ConfigError, DataError, UnsupportedError
from harness import make_trainer
from tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"say {index}", "answer": index} for index in range(8)]
SMALL_T5 = T5Config(vocab_size=128, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
SMALL_BERT = BertConfig(
    vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def make(folder: Path, model: Any = None, rows: Any = ROWS, reward: Any = by_length, **keywords: Any) -> GRPOTrainer:
    return make_trainer(folder, reward, rows, model=model, **keywords)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_path_is_a_model(saved: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", saved, tokenizer=None)
    trainer.train()
    assert type(trainer.model) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (
            lambda: T5ForConditionalGeneration(SMALL_T5),
            UnsupportedError,
            "T5ForConditionalGeneration, which has an encoder",
        ),
        (lambda: LlamaModel(tiny_model().config), ConfigError, "LlamaModel, which has no language model head"),
        (lambda: BertForMaskedLM(SMALL_BERT), ConfigError, "BertForMaskedLM, which has no language model head"),
        (
            lambda: get_peft_model(LlamaModel(tiny_model().config), LoraConfig(target_modules="all-linear")),
            ConfigError,
            "LlamaModel, which has no language model head",
        ),
    ],
)
def test_models_that_continue_no_text_are_refused(model: Any, error: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        make(tmp_path, model())


def test_folders_of_models_that_continue_no_text_are_refused(tmp_path: Path) -> None:
    T5ForConditionalGeneration(SMALL_T5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"T5Config.*Set `model` to a causal language model"):
        make(tmp_path / "run", str(tmp_path / "t5"))
    model = tiny_model()
    LlamaModel(model.config).save_pretrained(tmp_path / "decoder")
    with pytest.raises(ConfigError, match=r"no language model head \(lm_head.weight is missing\)"):
        make(tmp_path / "run", str(tmp_path / "decoder"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"The tokenizer of .* cannot be loaded"):
        make(tmp_path / "run", str(tmp_path / "model"), tokenizer=None)


def test_tied_heads_are_not_missed(tmp_path: Path) -> None:
    tiny_model(tied=True).save_pretrained(tmp_path / "tied")
    make(tmp_path / "run", str(tmp_path / "tied"))


@pytest.mark.parametrize("modules", [["query"], "query.*", []])
def test_target_modules_that_match_nothing_are_refused(modules: Any, tmp_path: Path) -> None:
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=modules)
    with pytest.raises(ConfigError, match="down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"):
        make(tmp_path, peft_config=adapter)


@pytest.mark.parametrize("ids", [128, [3, 999]])
def test_stop_tokens_outside_the_vocabulary_are_refused(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids has .* the model's tokens are 0 to 127"):
        make(tmp_path, generation_kwargs={"stop_token_ids": ids})
    make(tmp_path, generation_kwargs={"stop_token_ids": 127})


@pytest.mark.parametrize("ids", ["7", [-1], ["end"], 2.5])
def test_stop_tokens_that_are_no_ids_are_refused(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a tuple of token ids"):
        make(tmp_path, generation_kwargs={"stop_token_ids": ids})


# ---- datasets --------------------------------------------------------------------------------------------------------


def test_a_pandas_table_is_a_dataset(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
        seen.extend(answer)
        return by_length(completions)

    table = pd.DataFrame(ROWS)
    table["answer"] = table["answer"].where(table["answer"] != 3)
    trainer = make(tmp_path, rows=table, reward=reward, eval_rows={"same": table})
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_same_prompts"] == 8
    assert trainer.evaluate(table)["eval_prompts"] == 8
    assert set(seen) == {0, 1, 2, None, 4, 5, 6, 7}
    with pytest.raises(DataError, match="no column `prompt`"):
        make(tmp_path, rows=table.rename(columns={"prompt": "question"}))


@pytest.mark.parametrize("rows", [["a", "b"] * 4, [("a", 1)] * 8])
def test_rows_that_are_no_dicts_are_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape("they must be dicts with a `prompt`")):
        make(tmp_path, rows=rows)


def test_a_table_gives_the_rows_of_a_dataset(tmp_path: Path) -> None:
    rows = [make(tmp_path, rows=kind(ROWS)).train_rows for kind in (pd.DataFrame, Dataset.from_list, list)]
    assert rows[0] == rows[1] == rows[2]
    assert torch.tensor([row.row for row in rows[0]]).tolist() == list(range(8))
