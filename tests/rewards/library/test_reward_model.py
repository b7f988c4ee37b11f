"""Reward models: the numbers of TRL and of plain forwards, one row at a time, whatever the batch."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from grupo import GRPOConfig, GRPOTrainer
from grupo.errors import ConfigError
from grupo.rewards import RewardRunner, RewardTable, make_reward, reward_model
from grupo.rewards.library.reward_model import wrap_reward_models
from grupo.types import RewardStatus
from tiny import tiny_model, tiny_tokenizer
from tiny_trainer import make_trainer

TOKENIZER = tiny_tokenizer()
PROMPTS = ["2 + 2 = ", "a", "what is the capital of Peru? ", "x"]
COMPLETIONS = ["4", "", "Lima, of course, and it has been for long", "yz"]
CHATS = [[{"role": "system", "content": "Brief."}, {"role": "user", "content": prompt}] for prompt in PROMPTS]
ANSWERS = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]


def classifier(labels: int = 1, **config: Any) -> Any:
    torch.manual_seed(3)
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"vocab_size": 128, "max_position_embeddings": 128, "num_labels": labels, "pad_token_id": None}
    model = LlamaForSequenceClassification(LlamaConfig(**{**settings, **config}))
    return model.train()


def plain_scores(model: Any, texts: list[str]) -> list[float]:
    """One row per forward, without padding and without a mask."""
    pad, model.config.pad_token_id = model.config.pad_token_id, None
    was_training = model.training
    model.eval()
    rows = [torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]]) for text in texts]
    with torch.no_grad():
        scores = [model(input_ids=row).logits[0, 0].item() for row in rows]
    model.config.pad_token_id = pad
    model.train(was_training)
    return scores


def run(reward: Any, prompts: list[Any], completions: list[Any], **arguments: Any) -> RewardTable:
    return RewardRunner(wrap_reward_models(reward), **arguments).score(
        prompts=prompts, completions=completions, completion_ids=[[1]] * len(completions), columns={}
    )


def scores(table: RewardTable) -> list[float | None]:
    return [row[0] for row in table.scores]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_scores_are_those_of_single_rows_whatever_the_batch(batch_size: int) -> None:
    model = classifier()
    expected = plain_scores(model, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    table = run(reward_model(model, TOKENIZER, batch_size=batch_size), PROMPTS, COMPLETIONS)
    assert scores(table) == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 4) for score in expected}) == 4, "nothing to tell apart"


def test_an_encoder_does_not_see_the_padding() -> None:
    """A causal model never would: its padding stands on the right."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=128, num_labels=1, initializer_range=0.3, **sizes))
    together = scores(run(reward_model(model, TOKENIZER), PROMPTS, COMPLETIONS))
    alone = scores(run(reward_model(model, TOKENIZER, batch_size=1), PROMPTS, COMPLETIONS))
    assert together == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 4) for score in alone if score is not None}) == 4


def test_conversations_go_through_the_template_of_the_reward_model() -> None:
    model = classifier()
    texts = [
        TOKENIZER.apply_chat_template([*chat, *answer], tokenize=False)
        for chat, answer in zip(CHATS, ANSWERS, strict=True)
    ]
    assert scores(run(reward_model(model, TOKENIZER), CHATS, ANSWERS)) == pytest.approx(
        plain_scores(model, texts), abs=1e-6
    )
    shout = tiny_tokenizer(chat_template="{% if loud %}!{% endif %}" + str(TOKENIZER.chat_template))
    quiet = scores(run(reward_model(model, shout), CHATS, ANSWERS))
    loud = scores(run(reward_model(model, shout, chat_template_kwargs={"loud": True}), CHATS, ANSWERS))
    assert quiet != loud and loud == pytest.approx(plain_scores(model, ["!" + text for text in texts]), abs=1e-6)


def test_dropout_is_off_no_graph_is_built_and_the_tokenizer_is_left_alone() -> None:
    model = classifier(attention_dropout=0.9)
    inferring = []
    model.register_forward_hook(
        lambda module, arguments, output: inferring.append(
            (torch.is_inference_mode_enabled(), output.logits.requires_grad)
        )
    )
    tokenizer = tiny_tokenizer(pad=None)
    reward = reward_model(model, tokenizer, batch_size=3)
    first = scores(run(reward, PROMPTS, COMPLETIONS))
    model.train()
    assert scores(run(reward, PROMPTS, COMPLETIONS)) == first
    assert inferring == [(True, False)] * 4
    assert tokenizer.pad_token is None and all(parameter.requires_grad for parameter in model.parameters())


def test_a_padding_token_that_also_ends_texts_does_not_let_rows_depend_on_each_other() -> None:
    """With pad = eos the score is read before the last eos, in TRL's training of reward models as well."""
    tokenizer = tiny_tokenizer(pad=None)
    texts = ["ab</s>", "a</s></s>", "much longer than the others", "b"]
    together = scores(run(reward_model(classifier(), tokenizer), [""] * 4, texts))
    alone = [scores(run(reward_model(classifier(), tokenizer), [""], [text]))[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("conversational", [False, True])
def test_scores_are_those_of_trl(conversational: bool) -> None:
    from accelerate import Accelerator
    from transformers import Trainer
    from trl import GRPOTrainer as TRLTrainer

    model = classifier(pad_token_id=TOKENIZER.pad_token_id)
    model.eval()
    prompts, completions = (CHATS, ANSWERS) if conversational else (PROMPTS, COMPLETIONS)
    # Its method, on as much of a trainer as it reads.
    trainer = TRLTrainer.__new__(TRLTrainer)
    trainer.accelerator = Accelerator(cpu=True)
    trainer.args = SimpleNamespace(device="cpu", past_index=-1, report_to=[])
    trainer.is_deepspeed_enabled = False
    trainer.state = SimpleNamespace(global_step=0)
    trainer.model = SimpleNamespace(training=True)
    trainer.reward_funcs, trainer.reward_processing_classes = [model], [TOKENIZER]
    trainer.reward_func_names, trainer.chat_template_kwargs = ["model"], {}
    trainer.environments = None
    assert issubclass(TRLTrainer, Trainer)
    theirs = trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, completions, [[1]] * 4)
    ours = scores(run(reward_model(model, TOKENIZER, batch_size=2), prompts, completions))
    assert ours == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)


def test_what_is_longer_than_the_model_abstains_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier(max_position_embeddings=12)
    reward = reward_model(model, TOKENIZER)
    table = run(reward, ["p", "p", "p"], ["short", "x" * 12, None])
    assert table.statuses == [(RewardStatus.SCORED,), (RewardStatus.ABSTAINED,), (RewardStatus.ABSTAINED,)]
    assert table.metrics == {f"{reward.__name__}/too_long_share": [pytest.approx(1 / 3)]}
    run(reward, ["p"], ["x" * 20])
    (record,) = caplog.records
    assert "takes 12 tokens, and 1 of 3 completions are longer with their prompt (up to 13)" in record.getMessage()
    assert scores(run(reward_model(model, TOKENIZER, max_length=20), ["p"], ["x" * 12])) != [None]


def test_it_runs_in_the_calling_thread_beside_the_others() -> None:
    model, came, threads = classifier(), threading.Event(), []

    def hook(module: Any, arguments: Any, output: Any) -> None:
        threads.append(threading.current_thread())
        assert came.wait(10)

    def beside(completions: list[str], **columns: Any) -> list[float]:
        came.set()
        return [1.0] * len(completions)

    model.register_forward_hook(hook)
    table = run([reward_model(model, TOKENIZER), beside], PROMPTS, COMPLETIONS, timeout=20)
    assert table.failures == () and [row[1] for row in table.scores] == [1.0] * 4
    assert threads == [threading.current_thread()]


def test_it_goes_to_the_device_of_the_run_unless_it_was_spread_by_its_owner() -> None:
    model, spread = classifier(), classifier()
    spread.hf_device_map = {"": "cpu"}
    RewardRunner([reward_model(model, TOKENIZER), reward_model(spread, TOKENIZER)]).prepare("meta")
    assert model.device.type == "meta" and spread.device.type == "cpu"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "kind-reward"
    classifier(pad_token_id=TOKENIZER.pad_token_id).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_by_id_by_name_and_by_object_are_the_same(saved: Path) -> None:
    functions = [str(saved), reward_model(classifier(), TOKENIZER)]
    runner = RewardRunner(wrap_reward_models(functions))
    assert functions[0] == str(saved), "the list of the caller is left as it is"
    assert runner.names == ("kind-reward", "LlamaForSequenceClassification")
    table = runner.score(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 4, columns={})
    assert [row[0] for row in table.scores] == pytest.approx([row[1] for row in table.scores], abs=1e-6)
    assert scores(run(make_reward("reward_model", model=str(saved)), PROMPTS, COMPLETIONS)) == scores(table)
    assert [reward.__name__ for reward in wrap_reward_models(str(saved))] == ["kind-reward"]


def test_what_is_not_a_reward_model_is_refused(saved: Path, tmp_path: Path) -> None:
    def prepare(model: Any) -> None:
        RewardRunner(wrap_reward_models(model)).prepare("cpu")

    with pytest.raises(ConfigError, match="a Linear, which is not a transformers model"):
        wrap_reward_models(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="with 2 labels; a reward model has one"):
        wrap_reward_models([classifier(labels=2)])
    for model in (str(saved), classifier()):
        with pytest.raises(ConfigError, match=r"is a model and not a function: wrap it as .*reward_model"):
            RewardRunner(model)
    with pytest.raises(ConfigError, match="batch_size=0"):
        reward_model(classifier(), batch_size=0)
    with pytest.raises(ConfigError, match=r"'./absent' cannot be loaded"):
        prepare("./absent")
    with pytest.raises(ConfigError, match=r"tokenizer of the reward model .* cannot be loaded"):
        prepare(classifier())
    with pytest.raises(ConfigError, match="no chat template"):
        run(reward_model(classifier(), tiny_tokenizer(chat_template=None)), CHATS, ANSWERS)
    tiny_model().save_pretrained(tmp_path / "causal")
    with pytest.raises(ConfigError, match=r"lack score\.weight, so they would be random numbers"):
        prepare(str(tmp_path / "causal"))
    classifier(labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"'.*three' cannot be loaded"):
        prepare(str(tmp_path / "three"))
    causal = LlamaForCausalLM(LlamaConfig(**{**classifier().config.to_dict(), "num_labels": 1}))
    with pytest.raises(ConfigError, match="returned logits of shape"):
        run(reward_model(causal, TOKENIZER), PROMPTS, COMPLETIONS)


def test_a_run_with_models_by_id_and_as_objects(saved: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def capture(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen[:] = [p + c for p, c in zip(prompts, completions, strict=True)]
        return [float(len(text)) for text in completions]

    model = classifier()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        gradient_checkpointing=False, learning_rate=0.1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny_model(),
        [str(saved), model, capture],
        config,
        train_dataset=[{"prompt": prompt} for prompt in PROMPTS],
        processing_class=TOKENIZER,
        reward_processing_classes=[None, TOKENIZER, None],
    )
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "reward" in line]
    expected = sum(plain_scores(model, seen)) / 8
    for name in ("kind-reward", "LlamaForSequenceClassification"):
        assert line[f"rewards/{name}/mean"] == pytest.approx(expected, abs=1e-5)
        assert line[f"rewards/{name}/failed_share"] == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters()) and not model.training
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert not held & {id(parameter) for parameter in model.parameters()}


def test_tokenizers_must_fit_the_functions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.rewards.names == ("reward",)
    with pytest.raises(ConfigError, match="reward_processing_classes has 2 entries for 1 reward functions"):
        GRPOTrainer(
            tiny_model(),
            classifier(),
            GRPOConfig(str(tmp_path), use_cpu=True, report_to=[]),
            train_dataset=[{"prompt": "a"}] * 8,
            processing_class=TOKENIZER,
            reward_processing_classes=[TOKENIZER, None],
        )


def test_naming_a_reward_model_imports_no_torch() -> None:
    script = "import sys; from grupo.rewards import make_reward; make_reward('reward_model', model='a/b')"
    script += "; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[]", done.stderr
