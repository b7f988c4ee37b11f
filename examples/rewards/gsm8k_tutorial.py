r"""The five GSM8K rewards as the widely copied tutorial code computes them, to compare a run with published ones.

    rewards:
      - examples/rewards/gsm8k_tutorial.py:xmlcount_reward_func
      - examples/rewards/gsm8k_tutorial.py:soft_format_reward_func
      - examples/rewards/gsm8k_tutorial.py:strict_format_reward_func
      - examples/rewards/gsm8k_tutorial.py:int_reward_func
      - examples/rewards/gsm8k_tutorial.py:correctness_reward_func

For training use `gsm8k_correctness` and the other four of the library, which do what these functions promise. Here the
dot of the formats does not match a line end, `72.0` and `1,000` are wrong, a bare `72` and a block that was cut off are
right, and a completion without a line end after its last tag loses 0.001 for each of its characters (see the table in
docs/rewards.md).
"""

import re

from grupo.rewards import completion_text


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness_reward_func(completions, answer, **kwargs):
    answers = [extract_xml_answer(text) for text in _texts(completions)]
    return [2.0 if found == gold else 0.0 for found, gold in zip(answers, answer, strict=True)]


def int_reward_func(completions, **kwargs):
    return [0.5 if extract_xml_answer(text).isdigit() else 0.0 for text in _texts(completions)]


def strict_format_reward_func(completions, **kwargs):
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return [0.5 if re.match(pattern, text) else 0.0 for text in _texts(completions)]


def soft_format_reward_func(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.match(pattern, text) else 0.0 for text in _texts(completions)]


def count_xml(text):
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count


def xmlcount_reward_func(completions, **kwargs):
    return [count_xml(text) for text in _texts(completions)]


def _texts(completions):
    return [completion_text(completion) or "" for completion in completions]
