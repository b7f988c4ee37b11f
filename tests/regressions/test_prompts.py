"""Token ids of a prompt are the same everywhere, with exactly one BOS; prompts that open a tag.

TRL #3520 (BOS missing), open-r1 PR #462 and Soup #781 (BOS doubled), #6966 (think tag opened by the template).
"""

from __future__ import annotations

import logging

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from grupo.errors import DataError
from grupo.models.shared_prompt_attention import LAYOUT_KEYWORD
from grupo.rewards import tag_format
from grupo.types import PackedLayout
from harness import BOS, EOS, after_its_checks, ids_of, logs_of, make_trainer, train, varied
from tiny import BOS_CHAT_TEMPLATE, CHAT_TEMPLATE, tiny_model, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


def ids_at_every_forward(model):
    """(S,) ids of each sequence of each forward pass in order, without left padding; a cached step has one id.

    A packed sequence is split at its prompts.
    """
    seen = []

    def keep(module, args, kwargs):
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        layout = kwargs.get(LAYOUT_KEYWORD)
        if isinstance(layout, PackedLayout):
            seen.extend(ids[0, group.start : group.stop].tolist() for group in layout.groups)
            return
        for row, row_ids in enumerate(ids.tolist()):
            is_prefill = mask is not None and mask.shape == ids.shape
            seen.append(
                [token for token, on in zip(row_ids, mask[row].tolist(), strict=True) if on] if is_prefill else row_ids
            )

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return seen


PROMPTS = {
    "text, BOS added": ("abc", {"adds_bos": True}, [BOS, *ids_of("abc")]),
    "text, BOS not added": ("abc", {}, ids_of("abc")),
    "text with BOS in it, BOS added": ("<s>abc", {"adds_bos": True}, [BOS, *ids_of("abc")]),
    "text with BOS in it, BOS not added": ("<s>abc", {}, [BOS, *ids_of("abc")]),
    "text without any BOS": ("abc", {"bos": False}, ids_of("abc")),
    "messages, template with BOS": (
        MESSAGES,
        {"adds_bos": True, "chat_template": BOS_CHAT_TEMPLATE},
        [BOS, *ids_of("<u>hello<end><a>")],
    ),
    "messages, template with BOS, BOS not added": (
        MESSAGES,
        {"chat_template": BOS_CHAT_TEMPLATE},
        [BOS, *ids_of("<u>hello<end><a>")],
    ),
    "messages, template without BOS": (MESSAGES, {"adds_bos": True}, ids_of("<u>hello<end><a>")),
    "messages, no BOS at all": (MESSAGES, {"bos": False}, ids_of("<u>hello<end><a>")),
}


@pytest.mark.parametrize("prompt, variant, wanted", PROMPTS.values(), ids=PROMPTS)
def test_the_same_ids_in_every_forward_with_one_bos(tmp_path, prompt, variant, wanted):
    tokenizer, model = tiny_tokenizer(**variant), tiny_model()
    texts = {"rows": [{"prompt": prompt}], "eval_rows": [{"prompt": prompt}]}
    trainer = make_trainer(
        tmp_path,
        varied,
        **texts,
        model=model,
        tokenizer=tokenizer,
        per_device_train_batch_size=4,
        beta=0.1,
        num_iterations=2,
        max_steps=2,
    )
    if not isinstance(prompt, str):
        # The rendered template defines the ids.
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert list(rendered["input_ids"]) == wanted
    after_its_checks(trainer)
    seen = ids_at_every_forward(model)
    train(trainer)
    training = len(seen)
    trainer.evaluate()
    for part in (seen[:training], seen[training:]):
        whole = [ids for ids in part if len(ids) > 1]
        assert len(whole) >= 1
        assert all(ids[: len(wanted)] == wanted for ids in whole)


ENDINGS = {
    "BOS and EOS": ("abc", "<s> $A </s>", "<s>abc"),
    "EOS alone": ("abc", "$A </s>", "abc"),
    "BOS in the text": ("<s>abc", "<s> $A </s>", "<s>abc"),
    "EOS in the text": ("abc</s>", "<s> $A </s>", "<s>abc</s>"),
    "EOS that nobody adds": ("abc</s>", "<s> $A", "<s>abc</s>"),
    "messages": (MESSAGES, "<s> $A </s>", "<u>hello<end><a>"),
}


@pytest.mark.parametrize("prompt, post_processor, wanted", ENDINGS.values(), ids=ENDINGS)
def test_a_prompt_has_no_added_eos(tmp_path, prompt, post_processor, wanted):
    """Some tokenizers append EOS to every text; the model would have to continue after it."""
    tokenizer = tiny_tokenizer()
    specials = [("<s>", BOS), ("</s>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=post_processor, special_tokens=specials)
    trainer = make_trainer(tmp_path, varied, [{"prompt": prompt}] * 2, tokenizer=tokenizer)
    assert list(trainer.train_rows[0].token_ids) == ids_of(wanted)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system') }}", "{{ messages[0].tool_calls.name }}"])
def test_an_error_of_the_template_names_the_row(tmp_path, template):
    template = "{% if messages[0].role == 'system' %}" + template + "{% endif %}" + CHAT_TEMPLATE
    rows = [{"prompt": MESSAGES}, {"prompt": [{"role": "system", "content": "be brief"}, *MESSAGES]}]
    with pytest.raises(DataError, match=r"cannot render the prompt of row 1: (no system|.*no attribute 'tool_calls')"):
        make_trainer(tmp_path, varied, rows, tokenizer=tiny_tokenizer(chat_template=template))


def test_keys_that_other_messages_have_are_not_in_a_message(tmp_path):
    """A datasets.Dataset adds every key to every message, and templates test for keys such as `tool_calls`."""
    template = CHAT_TEMPLATE.replace("<u>", "<u>{{ 'T' if 'tool_calls' in m else 'F' }}")
    called = {"role": "user", "content": "b", "tool_calls": "f"}
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": [called]}])
    trainer = make_trainer(tmp_path, varied, rows, tokenizer=tiny_tokenizer(chat_template=template))
    wanted = [ids_of("<u>Fa<end><a>"), ids_of("<u>Tb<end><a>")]
    assert [list(row.token_ids) for row in trainer.train_rows] == wanted


def test_two_bos_in_the_text_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "grupo")
    make_trainer(tmp_path, varied, [{"prompt": "<s>abc"}] * 2, tokenizer=tiny_tokenizer(adds_bos=True))
    assert caplog.text.count("one BOS is kept") == 1


def test_chat_template_arguments_reach_the_template(tmp_path):
    template = CHAT_TEMPLATE.replace("<a>", "{{ 'T' if thinking else 'F' }}<a>")
    seen = {}
    for thinking in (True, False):
        trainer = make_trainer(
            tmp_path / str(thinking),
            varied,
            [{"prompt": MESSAGES}] * 2,
            tokenizer=tiny_tokenizer(chat_template=template),
            chat_template_kwargs={"thinking": thinking},
        )
        seen[thinking] = list(trainer.train_rows[0].token_ids)
    assert seen == {True: ids_of("<u>hello<end>T<a>"), False: ids_of("<u>hello<end>F<a>")}


@pytest.mark.parametrize("policy", ["filter", "refuse", "truncate_left"])
def test_overlong_prompts_in_training_and_evaluation(tmp_path, policy, caplog):
    rows = [{"prompt": "abcdefghij"}, {"prompt": "ab"}, {"prompt": "cd"}, {"prompt": "klmnopqrst"}]
    settings = {"max_prompt_length": 4, "overlong_prompts": policy, "num_generations_eval": 1}
    if policy == "refuse":
        for data in ({"rows": rows}, {"rows": rows[1:3], "eval_rows": rows}):
            with pytest.raises(DataError, match=r"2 of 4 .* longest has 10.*max_prompt_length=10"):
                make_trainer(tmp_path, varied, **data, **settings)
        return
    trainer = make_trainer(tmp_path, varied, rows, eval_rows=rows, **settings)
    assert "2 of 4 training prompts are longer than max_prompt_length=4" in caplog.text
    assert "2 of 4 evaluation prompts" in caplog.text
    lengths = [len(row.token_ids) for row in trainer.train_rows]
    assert lengths == ([2, 2] if policy == "filter" else [4, 2, 2, 4])
    assert trainer.evaluate()["eval_prompts"] == len(lengths)


def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(tmp_path):
    for data in ({"rows": [{"prompt": "a" * 510}] * 2}, {"eval_rows": [{"prompt": "a" * 510}]}):
        with pytest.raises(
            DataError, match=r"longest has 510 tokens.*max_completion_length=8 .*context of 512.*max_prompt_length=504"
        ):
            make_trainer(tmp_path, varied, **data)


# ---- the template opens the think tag --------------------------------------------------------------------------------

THINKING = CHAT_TEMPLATE.replace("<a>", "<a><think>\n")
GOOD = "add them up\n</think>\n<answer>7</answer></s>"


def with_tags(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    return tokenizer


def format_mean(folder, prompt, template, completion, reward):
    tokenizer = with_tags(template)
    ids = ids_of(completion, tokenizer)
    trainer = make_trainer(
        folder,
        reward,
        [{"prompt": prompt}] * 2,
        tokenizer=tokenizer,
        script=lambda prompt, place: ids,
        max_completion_length=64,
    )
    train(trainer)
    return logs_of(trainer)[0]["rewards/tag_format/mean"]


@pytest.mark.parametrize(
    "prompt", [[{"role": "user", "content": "2 + 5?"}], "2 + 5?<think>\n"], ids=["messages", "text"]
)
def test_a_tag_that_the_prompt_opens_is_seen(tmp_path, prompt):
    assert format_mean(tmp_path / "good", prompt, THINKING, GOOD, tag_format()) == 1.0
    assert (
        format_mean(tmp_path / "unclosed", prompt, THINKING, "add them up\n<answer>7</answer></s>", tag_format()) == 0.0
    )
    assert format_mean(tmp_path / "twice", prompt, THINKING, "<think>" + GOOD, tag_format()) == 0.0


def test_a_tag_that_nobody_opens_scores_nothing_and_warns(tmp_path):
    with pytest.warns(UserWarning, match="gave 0 to all 8 completions"):
        assert format_mean(tmp_path, MESSAGES, CHAT_TEMPLATE, GOOD, tag_format()) == 0.0


def test_the_option_overrides_what_the_prompt_shows(tmp_path):
    opened, closed = tag_format(prompt_opens_first=True), tag_format(prompt_opens_first=False)
    assert format_mean(tmp_path / "q", MESSAGES, CHAT_TEMPLATE, GOOD, opened) == 1.0
    with pytest.warns(UserWarning, match="gave 0 to all"):
        assert format_mean(tmp_path / "p", MESSAGES, THINKING, GOOD, closed) == 0.0


def test_reward_functions_that_ask_get_the_rendered_prompt(tmp_path):
    seen = {}

    def reward(prompts, completions, prompt_texts):
        seen["prompts"], seen["texts"] = prompts, prompt_texts
        return varied(completions)

    train(
        make_trainer(
            tmp_path, reward, [{"prompt": MESSAGES}, {"prompt": "abc"}], tokenizer=tiny_tokenizer(adds_bos=True)
        )
    )
    assert seen["prompts"] == [MESSAGES] * 4 + ["abc"] * 4
    assert seen["texts"] == ["<u>hello<end><a>"] * 4 + ["<s>abc"] * 4
