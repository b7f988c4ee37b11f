"""Group Relative Policy Optimization in one file, with nothing but torch and transformers.

    python grpo_one_file.py                  a tiny random model learns to answer in digits, in seconds on a CPU
    python grpo_one_file.py PATH_OR_NAME     the same with a model of yours

One round (DeepSeekMath, arXiv 2402.03300, algorithm 1, with the token mean of DAPO, arXiv 2503.14476):

    1. sample    G answers o_1 .. o_G to each of P questions q      o_i ~ pi_old(. | q)
    2. score     every answer                                       r_i = reward(q, o_i)
    3. compare   every answer with the others of its group          A_i = (r_i - mean(r)) / (std(r) + 1e-4)
    4. update    mu times, by AdamW, with the importance ratio      rho = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)

       loss = - sum over all tokens of min(rho A_i, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A_i)  /  their number

Shapes: P questions, G answers to each, B = P * G, S tokens of question and answer, T tokens of the longest answer,
V vocabulary.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tokens = list[int]


@dataclass(frozen=True)
class Settings:
    rounds: int = 30
    questions_per_round: int = 4  # P
    group_size: int = 8  # G
    updates_per_round: int = 1  # mu
    max_answer_tokens: int = 16
    temperature: float = 1.0
    learning_rate: float = 1e-2
    max_grad_norm: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """What happened in one round."""

    answers: list[list[Tokens]]  # P lists of G answers
    rewards: Tensor  # (P, G)
    losses: list[float]  # one per update


@torch.no_grad()
def sample(policy: Any, questions: list[Tokens], eos: int, settings: Settings) -> list[list[Tokens]]:
    """G answers to each of the P questions, drawn from the policy. An answer ends with EOS unless it is cut off."""
    longest = max(map(len, questions))
    # Padding goes to the left, so that every answer starts in the same column.
    padded = [[eos] * (longest - len(question)) + question for question in questions]
    attended = [[0] * (longest - len(question)) + [1] * len(question) for question in questions]
    rows = policy.generate(
        input_ids=torch.tensor(padded, device=policy.device),  # (P, longest)
        attention_mask=torch.tensor(attended, device=policy.device),  # (P, longest)
        num_return_sequences=settings.group_size,
        max_new_tokens=settings.max_answer_tokens,
        eos_token_id=eos,
        pad_token_id=eos,
        # The distribution that is trained, and no other: the model's own generation config often says otherwise.
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
    )  # (B, longest + T), group after group
    answers = [cut_after(eos, row) for row in rows[:, longest:].tolist()]
    return [answers[start : start + settings.group_size] for start in range(0, len(answers), settings.group_size)]


def cut_after(eos: int, tokens: Tokens) -> Tokens:
    """EOS is part of the answer: the model learns from it when to stop. What was drawn after it is not."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def group_advantages(rewards: Tensor) -> Tensor:
    """(P, G) rewards to (P, G) advantages. A group of equal rewards has nothing to tell: its advantages are 0."""
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    return (rewards - mean) / (std + 1e-4)


def answer_logprobs(
    policy: Any, questions: list[Tokens], answers: list[Tokens], eos: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs of the tokens of B answers, and the (B, T) mask that says which of them exist."""
    rows = [question + answer for question, answer in zip(questions, answers, strict=True)]
    longest = max(map(len, rows))
    # Padding goes to the right here, where a causal model cannot see it; the mask is made from lengths, never from ids.
    tokens = torch.tensor([row + [eos] * (longest - len(row)) for row in rows], device=policy.device)  # (B, S)
    logits = policy(input_ids=tokens, use_cache=False).logits / temperature  # (B, S, V), float32 or float64
    logprobs = torch.log_softmax(logits, dim=-1)[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]  # (B, S - 1)
    # The answer's token t stands at position len(question) + t, and is predicted one position earlier.
    width = max(map(len, answers))
    place = torch.arange(width, device=policy.device)  # (T,)
    start = torch.tensor([len(question) - 1 for question in questions], device=policy.device)  # (B,)
    mask = place < torch.tensor([len(answer) for answer in answers], device=policy.device)[:, None]  # (B, T)
    columns = (start[:, None] + place).clamp(max=longest - 2)  # (B, T)
    return logprobs.gather(1, columns), mask


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: Settings
) -> Tensor:
    """() the clipped surrogate of (B, T) tokens with (B,) advantages, as a mean over all tokens."""
    ratio = torch.exp(torch.where(mask, logprobs - old_logprobs, 0.0))  # (B, T), 1 in the first update
    clipped = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])  # (B, T)
    return -torch.where(mask, gain, 0.0).sum() / mask.sum()


def train(
    policy: Any,
    questions: list[Tokens],
    reward: Callable[[Tokens, Tokens], float],
    eos: int,
    settings: Settings,
) -> Iterator[Round]:
    """Updates `policy` in place, round by round. `reward` gets the token ids of a question and of an answer to it."""
    torch.manual_seed(settings.seed)
    policy.eval()  # no dropout: the policy that is updated is the one that sampled
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    for number in range(settings.rounds):
        first = number * settings.questions_per_round
        asked = [questions[(first + i) % len(questions)] for i in range(settings.questions_per_round)]  # P
        answers = sample(policy, asked, eos, settings)
        rewards = torch.tensor(
            [[reward(question, answer) for answer in group] for question, group in zip(asked, answers, strict=True)],
            dtype=torch.float64,
        )  # (P, G)
        advantages = group_advantages(rewards).flatten().to(policy.device, policy.dtype)  # (B,)

        flat_questions = [question for question in asked for _ in range(settings.group_size)]  # B
        flat_answers = [answer for group in answers for answer in group]  # B
        old_logprobs, losses = None, []
        for _ in range(settings.updates_per_round):
            logprobs, mask = answer_logprobs(policy, flat_questions, flat_answers, eos, settings.temperature)
            if old_logprobs is None:
                old_logprobs = logprobs.detach()
            loss = clipped_loss(logprobs, old_logprobs, advantages, mask, settings)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
        yield Round(answers, rewards, losses)


# ---- a task, and the two kinds of model that the command line offers -------------------------------------------------

QUESTIONS = ["How many?", "Say a number.", "Which year?", "Count.", "How far?", "How old?", "What time?", "How much?"]


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def tiny_model() -> tuple[Any, Callable[[str], Tokens], Callable[[Tokens], str], int]:
    """A random Llama of about 60 thousand parameters whose tokens are characters; token 0 is EOS."""
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = string.ascii_letters + string.digits + string.punctuation + " "
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids = {character: index + 1 for index, character in enumerate(alphabet)}
    return (
        LlamaForCausalLM(config),
        lambda text: [ids[character] for character in text],
        lambda tokens: "".join(alphabet[token - 1] for token in tokens if token > 0),
        0,
    )


def loaded_model(name: str) -> tuple[Any, Callable[[str], Tokens], Callable[[Tokens], str], int]:
    """A model with its tokenizer; questions go through the chat template where there is one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)

    def encode(text: str) -> Tokens:
        if tokenizer.chat_template is None:
            return tokenizer(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    return (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        encode,
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        tokenizer.eos_token_id,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file: a model learns to answer in digits.")
    parser.add_argument("model", nargs="?", help="path or name of a model; without it, a tiny random one")
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--learning-rate", type=float, help="default: 1e-2 for the tiny model, 1e-5 for others")
    arguments = parser.parse_args()

    policy, encode, decode, eos = loaded_model(arguments.model) if arguments.model else tiny_model()
    settings = Settings(
        rounds=arguments.rounds, learning_rate=arguments.learning_rate or (1e-5 if arguments.model else 1e-2)
    )
    questions = [encode(question) for question in QUESTIONS]
    rounds = train(policy, questions, lambda question, answer: share_of_digits(decode(answer)), eos, settings)
    for number, result in enumerate(rounds, start=1):
        example = decode(result.answers[0][0])
        print(f"round {number:3d}  reward {result.rewards.mean():.3f}  loss {result.losses[0]:+.4f}  {example!r}")


if __name__ == "__main__":
    main()
