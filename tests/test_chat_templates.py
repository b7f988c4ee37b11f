"""Ready-made chat templates: what they render, by hand, and tokenizers that they do not fit."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from grupo import GRPOConfig, GRPOTrainer, get_chat_template, set_chat_template
from grupo.chat_templates import CHAT_TEMPLATES, fitting_templates
from grupo.data.prompts import PromptTokenizer
from grupo.errors import ConfigError, DataError
from tiny import tiny_model, tiny_tokenizer

TALK = [
    {"role": "system", "content": " Be short.\n"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": " And 3+3? "},
]
RENDERED = {
    "chatml": "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 3+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe short.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n"
    "<start_of_turn>user\nAnd 3+3?<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] Be short.\n\n2+2? [/INST] 4</s>[INST] And 3+3? [/INST]",
    "plain": "<s>System: Be short.\n\nUser: 2+2?\n\nAssistant: 4</s>\n\nUser: And 3+3?\n\nAssistant:",
}


def bare(name=None):
    """A tokenizer without a chat template, with the tokens of one."""
    tokenizer = tiny_tokenizer(chat_template=None)
    if name:
        tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TEMPLATES[name].needed_tokens)})
    return tokenizer


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_what_they_render(name, tmp_path):
    tokenizer = set_chat_template(bare(name), name)
    assert tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == RENDERED[name]
    begun = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert RENDERED[name].startswith(begun), "a sampled answer goes on where the prompt ends"
    assert tokenizer.eos_token == (CHAT_TEMPLATES[name].end_of_turn or "</s>")
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template and again.eos_token == tokenizer.eos_token
    assert again.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == RENDERED[name]


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma"])
def test_special_tokens_are_single_ids(name):
    tokenizer = set_chat_template(bare(name), name)
    ids = PromptTokenizer(tokenizer)(TALK)
    end = tokenizer.convert_tokens_to_ids(CHAT_TEMPLATES[name].end_of_turn)
    assert ids.count(end) == (4 if name != "gemma" else 3)


def test_templates_whose_tokens_are_missing_are_refused():
    assert fitting_templates(bare()) == ["mistral", "plain"]
    assert fitting_templates(bare("chatml")) == ["chatml", "mistral", "plain"]
    with pytest.raises(ConfigError, match=r"needs <\|im_start\|>, <\|im_end\|>.*'mistral', 'plain'"):
        set_chat_template(bare(), "chatml")


def test_without_bos():
    tokenizer = set_chat_template(tiny_tokenizer(chat_template=None, bos=False), "plain")
    assert tokenizer.apply_chat_template(TALK[:2], tokenize=False) == "System: Be short.\n\nUser: 2+2?\n\n"


def test_names_and_texts(caplog):
    with pytest.raises(ConfigError, match="Did you mean 'chatml'"):
        GRPOConfig("anywhere", chat_template="chat-ml")
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert set_chat_template(tiny_tokenizer(), text).chat_template == text
    assert "replaces the tokenizer's own chat template" in caplog.text
    as_in_unsloth = get_chat_template(tiny_tokenizer(), chat_template=text, mapping={"role": "role"})
    assert as_in_unsloth.chat_template == text
    for more in ({"mapping": {"role": "from"}}, {"map_eos_token": False}, {"system_message": "Think."}):
        with pytest.raises(ConfigError, match=next(iter(more))):
            get_chat_template(tiny_tokenizer(), text, **more)


def run(tmp_path, tokenizer, **settings):
    return GRPOTrainer(
        tiny_model(),
        lambda completions, **_: [float(len(messages[0]["content"])) for messages in completions],
        GRPOConfig(
            str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
            report_to=[], save_strategy="no", disable_tqdm=True, **settings,
        ),
        [{"prompt": TALK}],
        processing_class=tokenizer,
    )  # fmt: skip


def test_a_run_with_a_model_without_a_template(tmp_path):
    with pytest.raises(DataError, match=r"no chat template.*chat_template.*'mistral', 'plain'"):
        run(tmp_path, bare())
    trainer = run(tmp_path, bare(), chat_template="plain")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == CHAT_TEMPLATES["plain"].jinja
    assert trainer.train_rows[0].token_ids == tuple(bare()(RENDERED["plain"])["input_ids"])


def test_the_end_of_a_turn_ends_a_completion(tmp_path):
    tokenizer = bare("chatml")
    model = tiny_model(vocab_size=len(tokenizer))
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(str(tmp_path), chat_template="chatml", report_to=[], per_device_train_batch_size=8,
                   max_completion_length=8, generation_kwargs={"stop": ["x"]}),
        [{"prompt": TALK}], processing_class=tokenizer,
    )  # fmt: skip
    end, eos, x = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>", "x"])
    assert set(trainer.policy.stop_token_ids) == {end, eos, x}
