# The complete script of a published TRL tutorial, kept as data: test_drop_in_script.py changes five lines and runs it.
# ruff: noqa
# fmt: off
import torch
import wandb
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

# 1) Data
dataset = load_dataset("mlabonne/smoltldr")

# 2) Base model
model_id = "HuggingFaceTB/SmolLM-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(
    model_id, torch_dtype="auto", device_map="auto",
    attn_implementation="flash_attention_2",
)
tokenizer = AutoTokenizer.from_pretrained(model_id)

# 3) LoRA
lora_config = LoraConfig(
    task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear",
)
model = get_peft_model(model, lora_config)

# 4) Reward
ideal_length = 50
def reward_len(completions, **kwargs):
    return [-abs(ideal_length - len(c)) for c in completions]

# 5) Configuration
training_args = GRPOConfig(
    output_dir="GRPO",
    learning_rate=2e-5,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_prompt_length=512,
    max_completion_length=96,
    num_generations=8,
    optim="adamw_8bit",
    num_train_epochs=1,
    bf16=True,
    report_to=["wandb"],
    remove_unused_columns=False,
    logging_steps=1,
)

# 6) Training
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[reward_len],
    args=training_args,
    train_dataset=dataset["train"],
)

wandb.init(project="GRPO")
trainer.train()

# 7) Merging and uploading
merged_model = trainer.model.merge_and_unload()
merged_model.push_to_hub("SmolGRPO-135M", private=False, tags=["GRPO"])
