"""A published script for Unsloth and TRL, with its import lines, its model and the source of its data changed.

    python examples/unsloth_script.py [MODEL]     250 steps in 4 bits, into outputs/

Its word problems need reasoning-gym (pip install reasoning-gym).

By default MODEL is SmolLM2-135M as it is, which never writes the tags that are rewarded; `reasoning_format.yaml` makes
one that sometimes does. Each changed line has the original above it. Everything else is as it was published: what becomes of each argument
is in docs/unsloth.md.
"""
# ruff: noqa: E501, I001, B905

# was: from unsloth import FastLanguageModel
from grupo import FastLanguageModel
from datasets import Dataset
import re
import sys

from grupo.tasks.registry import make_task
from grupo.models.default_model import default_model_path

# 1. Load 4-bit model with vLLM backend for fast group generation
model, tokenizer = FastLanguageModel.from_pretrained(
    # was: model_name="unsloth/Llama-3.2-3B-Instruct",
    model_name=sys.argv[1] if len(sys.argv) > 1 else default_model_path(),
    max_seq_length=1024,
    load_in_4bit=True,
    fast_inference=True,
    max_lora_rank=32,
    gpu_memory_utilization=0.6,
)

# 2. Attach LoRA adapters
model = FastLanguageModel.get_peft_model(
    model,
    r=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=64,
    use_gradient_checkpointing="unsloth",
)

# 3. Enforcing reasoning format - GRPO needs structure to reward
SYSTEM_PROMPT = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"

# 4. Load GSM8K and wrap prompts
# was: dataset = load_dataset("openai/gsm8k", "main")["train"]
dataset = Dataset.from_list(
    [
        {"question": row["prompt"][-1]["content"], "answer": f"#### {row['answer']}"}
        for row in make_task("word-problems", train=500).train
    ]
)
dataset = dataset.map(
    lambda x: {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": x["question"]},
        ],
        "answer": x["answer"].split("####")[1].strip(),
    }
)


def extract_xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


# Primary signal: is the final answer correct?
def correctness_reward(prompts, completions, answer, **kwargs):
    responses = [c[0]["content"] for c in completions]
    extracted = [extract_xml_answer(r) for r in responses]
    return [2.0 if r == a else 0.0 for r, a in zip(extracted, answer)]


# Dense shaping rewards - keep learning signal alive even when answers are wrong
def int_reward(completions, **kwargs):
    return [0.5 if extract_xml_answer(c[0]["content"]).isdigit() else 0.0 for c in completions]


def strict_format_reward(completions, **kwargs):
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return [0.5 if re.match(pattern, c[0]["content"]) else 0.0 for c in completions]


def soft_format_reward(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.match(pattern, c[0]["content"]) else 0.0 for c in completions]


def xmlcount_reward(completions, **kwargs):
    def score(text):
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

    return [score(c[0]["content"]) for c in completions]


# was: from trl import GRPOConfig, GRPOTrainer
from grupo import GRPOConfig, GRPOTrainer  # noqa: E402

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[
        xmlcount_reward,  # tag quality
        soft_format_reward,  # structure (forgiving)
        strict_format_reward,  # structure (exact)
        int_reward,  # partial credit
        correctness_reward,  # ground-truth match
    ],
    args=GRPOConfig(
        learning_rate=5e-6,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=8,  # G = group size
        max_prompt_length=256,
        max_completion_length=200,
        max_steps=250,
        warmup_ratio=0.1,
        max_grad_norm=0.1,
        output_dir="outputs",
    ),
    train_dataset=dataset,
)
trainer.train()
