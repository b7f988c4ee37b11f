"""Models in 4 and 8 bits: the sampler is the policy that is scored, with the gradients of the dequantised model."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)

import grupo
from grupo.cli import main
from grupo.data.demonstrations import Demonstration
from grupo.errors import ConfigError, UnsupportedError
from grupo.export import merge
from grupo.models.activation_offload import offload_activations
from grupo.models.activation_recompute import recompute_cheap_activations
from grupo.models.inplace_lora import inplace_lora
from grupo.models.inspect import check_trainable
from grupo.models.load import load_policy
from grupo.models.peft_setup import add_adapter
from grupo.models.quantization import (
    arithmetic_dtype,
    dense_bytes,
    dequantize,
    quantization_config,
)
from grupo.policy.batching import collate
from grupo.policy.logprob_model import LogprobModel, disable_dropout
from grupo.rewards import reward_model
from grupo.rollout.engine import GenerationRequest, completion_seed
from grupo.rollout.local.engine import LocalEngine
from grupo.rollout.local.inference_copy import make_inference_copy
from grupo.sampling import SamplingSpec
from grupo.trainer.sft_trainer import pad_batch, sft_trainer
from grupo.types import Prompt, TrainingSample
from grupo.utils.quantized_layers import evaluation_mode, is_4bit, quantized_layers, set_evaluation_mode
from tiny import tiny_model, tiny_tokenizer
from tiny_trainer import PROMPTS, make_trainer

pytest.importorskip("bitsandbytes")
from bitsandbytes.nn import Linear4bit

CPU = torch.device("cpu")
IDS = torch.arange(10, 40)[None]
# Nats, between log-probs of the sampler and scored ones.
BOUND = {"nf4": 1e-4, "int8": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    # Large numbers in it, so that a missing layer shows.
    tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.15).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def loaded(folder, kind="nf4", compute=torch.float32, **more):
    config = quantization_config(kind, compute, asked="the test")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config, **more)


def adapted(model, **settings):
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    model = add_adapter(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def dequantised(model):
    """A model of plain linear layers with the same weights, adapters included."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in list(quantized_layers(parent)):
                plain = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = torch.nn.Parameter(dequantize(child).float(), requires_grad=False)
                setattr(parent, name, plain)
    return model


def engine(model):
    return LocalEngine(model, decode=lambda ids: "", stop_token_ids=(1,))


def requests(seeds=3):
    prompts = [Prompt(id=i, row=i, token_ids=tuple(range(6, 6 + size)), content="") for i, size in enumerate((3, 20))]
    return [
        GenerationRequest(p, tuple(completion_seed(0, "t", p.id, place) for place in range(seeds))) for p in prompts
    ]


def gap(model, groups, asked):
    """Largest difference of the sampler's log-probs and scored ones, packed as in training."""
    samples = [
        TrainingSample(request.prompt.token_ids, c.token_ids, 1.0, True, True, c.behavior_logprobs)
        for request, group in zip(asked, groups, strict=True)
        for c in group
    ]
    logprob_model = LogprobModel(model)
    model.train()
    with torch.no_grad(), disable_dropout(model):
        logprob_model.prepare(model, CPU)
        batch = collate(samples, pad_token_id=2, device=CPU, packed=bool(logprob_model.use_prompt_sharing))
        with logprob_model.attention():
            scored = logprob_model.logprobs(model, batch).logprobs
    assert logprob_model.use_prompt_sharing and logprob_model.reads_hidden_states
    return float((scored - batch.behavior_logprobs).abs().max())


ADAPTERS = {
    "none": None,
    "LoRA": {},
    "dropout": {"lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_sampler_is_the_policy(folder, kind, settings):
    model = loaded(folder, kind)
    if settings is not None:
        model = adapted(model, **settings)
    if kind == "int8" and settings == {"use_dora": True}:
        with pytest.raises(UnsupportedError, match="DoRA"):
            check_trainable(model)
        return
    asked, one = requests(), engine(model)
    groups = one.generate(asked, SamplingSpec(max_new_tokens=20))
    assert one.copies and one._supports_row_cache
    assert gap(model, groups, asked) < BOUND[kind]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_greedy_tokens_are_those_of_the_dequantised_model(folder, kind):
    model = adapted(loaded(folder, kind))
    spec = SamplingSpec(temperature=0.0, max_new_tokens=40)
    found, wanted = (engine(one).generate(requests(1), spec) for one in (model, dequantised(model)))
    assert [group[0].token_ids for group in found] == [group[0].token_ids for group in wanted]
    assert len({token for group in found for token in group[0].token_ids}) > 3


@pytest.mark.usefixtures("processor")
def test_without_room_for_a_copy_the_layers_are_used_as_they_are(folder, monkeypatch):
    model = adapted(loaded(folder))
    asked = requests()
    monkeypatch.setattr("grupo.rollout.local.engine.make_inference_copy", None)
    # Room for the quantised weights, and not for dense ones.
    packed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    monkeypatch.setattr("grupo.rollout.local.engine.free_bytes", lambda device: 2 * packed)
    assert dense_bytes(model) > 1.5 * packed
    groups = engine(model).generate(asked, SamplingSpec(max_new_tokens=20))
    assert gap(model, groups, asked) < BOUND["nf4"]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("room", [True, False], ids=["copy", "no copy"])
def test_a_rollout_leaves_the_layers_as_they_are(folder, monkeypatch, settings, room):
    """On CPUs with AVX512-BF16 bitsandbytes packs 4-bit weights in evaluation mode, and gradients are lost."""
    model = adapted(loaded(folder), **settings)
    if not room:
        monkeypatch.setattr("grupo.rollout.local.engine.free_bytes", lambda device: 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    engine(model).generate(requests(1), SamplingSpec(max_new_tokens=3))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(hasattr(layer.weight.quant_state, "packing_format_for_cpu") for layer in quantized_layers(model))
    assert [module.training for module in model.modules()] == training


def packed(model):
    """The model after a forward of one of its 4-bit layers in evaluation mode on a CPU with AVX512-BF16."""
    layer = next(quantized_layers(model))
    layer.support_avx512bf16_for_cpu = True
    model.eval()
    with torch.no_grad(), pytest.raises(Exception):  # noqa: B017 this CPU may not have the product that comes next
        layer(torch.ones(1, layer.in_features))
        raise RuntimeError
    return model


def test_layers_that_were_packed_are_refused(folder, tmp_path):
    model = packed(adapted(loaded(folder)))
    with pytest.raises(ConfigError, match="evaluation mode"):
        check_trainable(model)
    with pytest.raises(ConfigError, match=r"evaluation mode.*save_pretrained\(folder\) and pass the folder"):
        merge(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# ---- evaluation mode -------------------------------------------------------------------------------------------------


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_that_was_just_loaded_computes_what_is_trained(folder, kind):
    """from_pretrained returns models in evaluation mode."""
    model = load_policy(str(folder), quantization_config=quantization_config(kind, torch.float32, asked="the test"))
    wanted = logits(dequantised(model))
    assert not model.training
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    if kind == "nf4":
        torch.testing.assert_close(logits(model.eval()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_evaluation_mode_computes_what_is_trained_and_is_left_again(folder, kind):
    model = adapted(loaded(folder, kind), lora_dropout=0.5)
    model.train()
    model.get_base_model().model.norm.eval()
    modes = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not model.training
        torch.testing.assert_close(logits(model), logits(dequantised(model).eval()), rtol=1e-4, atol=1e-4)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert [module.training for module in model.modules()] == modes


class CallsEval(TrainerCallback):
    """As callbacks do that print a sample between two steps."""

    def on_step_end(self, args, state, control, model=None, **more):
        logits(model.eval())


@pytest.mark.usefixtures("processor")
def test_a_run_is_the_same_with_code_that_calls_eval(folder, tmp_path):
    """A callback does, and peft when the best checkpoint is loaded at the end."""
    runs = []
    for callbacks in ([], [CallsEval()]):
        trainer = make_trainer(
            tmp_path / str(len(runs)), model=adapted(loaded(folder)), learning_rate=1e-2, max_steps=3,
            callbacks=callbacks, eval_dataset=PROMPTS, eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, load_best_model_at_end=True,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.best_model_checkpoint is not None
        assert not any(layer.training for layer in quantized_layers(trainer.model)), "peft has called eval()"
        runs.append((logits(trainer.model), trainer.state.log_history))
    (one, history), (other, with_callback) = runs
    assert torch.equal(one, other)
    for before, after in zip(history, with_callback, strict=True):
        assert [before.get(name) for name in ("loss", "grad_norm")] == [after.get(n) for n in ("loss", "grad_norm")]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_supervised_trainer_evaluates_what_is_trained(folder, tmp_path, kind):
    """Its base class calls eval(); afterwards gradients are what they were."""
    model = adapted(loaded(folder, kind))
    _, before = gradients(model)
    shown = [Demonstration(0, (10, 11, 12), (13, 14)), Demonstration(1, (20, 21), (22, 23, 24))]
    args = TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    trainer = sft_trainer(model, shown, tiny_tokenizer(), args)
    found = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    with torch.no_grad():
        wanted = dequantised(model)(**pad_batch(trainer.train_dataset)).loss
    assert found == pytest.approx(float(wanted), rel=1e-5)
    _, after = gradients(model)
    assert all(torch.equal(gradient, after[name]) for name, gradient in before.items())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_reward_model_is_left_as_it_is(folder, kind):
    config = quantization_config(kind, torch.float32, asked="the test")
    torch.manual_seed(5)  # of the head, which the folder lacks
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, quantization_config=config
    )
    assert len(list(quantized_layers(model))) == 14
    texts = {"prompts": ["what is ", "abc"], "completions": ["this", "defgh"]}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, wanted = (reward_model(one, tiny_tokenizer())(**texts) for one in (model, dequantised(model)))
    assert found == pytest.approx(wanted, rel=1e-4) and abs(found[0] - found[1]) > 1e-3
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_no_other_code_calls_eval():
    """What is not in the list of calls here would run quantised layers in evaluation mode on some processor."""
    calls = [
        (path.name, node.lineno)
        for path in Path(grupo.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
        if node.func.attr == "eval"
    ]
    assert [name for name, _ in calls] == ["quantized_layers.py"], calls
    assert Linear4bit(64, 64).support_avx512bf16_for_cpu in (True, False), "keep_unpacked sets it"


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_quantised_model_without_an_adapter_is_refused(folder):
    with pytest.raises(ConfigError, match="peft_config"):
        check_trainable(loaded(folder))


def gradients(model, *contexts):
    model.train()
    model.zero_grad()
    for context in contexts:
        context.__enter__()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.log_softmax(-1)[..., 5].sum().backward()
    for context in reversed(contexts):
        context.__exit__(None, None, None)
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_are_those_of_the_dequantised_model(folder, kind):
    """Also with LoRA added in place and cheap activations computed again."""
    model = adapted(loaded(folder, kind))
    wanted_logits, wanted = gradients(dequantised(model))
    decoder = model.get_base_model().model
    for contexts in ((), (inplace_lora(model), recompute_cheap_activations(decoder))):
        logits, found = gradients(model, *contexts)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-4)
        assert found.keys() == wanted.keys() and len(found) == 28
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max()))


def test_weights_are_counted_whole(folder):
    model = adapted(loaded(folder))
    trainable, total = check_trainable(model)
    plain = get_peft_model(tiny_model(hidden_size=64, intermediate_size=128), model.peft_config["default"])
    assert (trainable, total) == check_trainable(plain)


@pytest.mark.usefixtures("processor")
def test_bfloat16_products(folder):
    """4-bit layers compute in bfloat16, norms and the residual stream in float32, as on a GPU."""
    model = adapted(loaded(folder, compute=torch.bfloat16))
    assert arithmetic_dtype(model, CPU) == torch.bfloat16
    asked, one = requests(), engine(model)
    groups = one.generate(asked, SamplingSpec(max_new_tokens=20))
    assert one._supports_row_cache
    with torch.no_grad():
        found = make_inference_copy(model)(input_ids=IDS).logits
        with evaluation_mode(model):
            torch.testing.assert_close(found, model(input_ids=IDS).logits, rtol=0, atol=0.1)
    assert gap(model, groups, asked) < 0.1


def test_in_half_precision_the_first_changes_of_an_adapter_reach_the_sampler():
    """Folded into bfloat16 weights, changes below half a unit in the last place would be gone."""
    model = adapted(tiny_model(hidden_size=64, intermediate_size=128).to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-4)
    with torch.no_grad():
        layer = model.get_base_model().model.layers[0].self_attn.o_proj
        copied = make_inference_copy(model).model.layers[0].output
        hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
        assert copied.weight is layer.base_layer.weight or torch.equal(copied.weight, layer.base_layer.weight)
        a, b = copied.low_rank
        change = hidden.float() @ a.T @ b.T
        wanted = layer.lora_B.default(layer.lora_A.default(hidden.float())) * layer.scaling["default"]
        torch.testing.assert_close(change, wanted)
        torch.testing.assert_close(
            make_inference_copy(model)(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=0.1
        )


def test_dense_weights_have_the_dtype_of_the_products(folder):
    for compute in (torch.float32, torch.bfloat16):
        layer = next(layer for layer in quantized_layers(loaded(folder, compute=compute)) if is_4bit(layer))
        assert dequantize(layer).dtype == compute and layer.weight.quant_state.dtype == torch.float32


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("settings", [{}, {"beta": 0.1, "num_iterations": 2}], ids=["plain", "KL and two passes"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_whole_run(folder, tmp_path, kind, settings):
    model = adapted(loaded(folder, kind))
    frozen = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}
    trainer = make_trainer(
        tmp_path, model=model, script=None, optim="adamw_8bit", learning_rate=1e-2, max_steps=2, **settings
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2 and all(entry["sampling/logprob_gap"] < BOUND[kind] for entry in logged)
    assert all(torch.equal(frozen[name], tensor) for name, tensor in model.state_dict().items() if name in frozen)
    assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes")


@pytest.mark.usefixtures("processor")
def test_loaded_by_the_trainer_and_saved_for_peft(folder, tmp_path):
    """In a fresh process-like way: the adapter on a base that is quantised the same."""
    from peft import PeftModel

    from grupo import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            str(tmp_path), max_steps=1, learning_rate=1e-2, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=6, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=PROMPTS,
        quantization_config=quantization_config("nf4", torch.float32, asked="the test"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        base, again = loaded(folder), PeftModel.from_pretrained(loaded(folder), tmp_path / "saved")
        for model in (base, again):
            set_evaluation_mode(model)  # on some processors eval() alone would round products to bfloat16
        torch.testing.assert_close(again(input_ids=IDS).logits, trainer.model(input_ids=IDS).logits)
        assert not torch.allclose(again(input_ids=IDS).logits, base(input_ids=IDS).logits)


def test_bitsandbytes_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr("grupo.models.quantization.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ConfigError, match=r"load_in_4bit=True needs .*pip install"):
        quantization_config("nf4", torch.float32, asked="load_in_4bit=True")


def test_a_recipe_in_4_bits(folder, tmp_path, capsys):
    """And the adapter that it leaves is one of a quantised base."""
    (tmp_path / "recipe.yaml").write_text(
        f"model: {folder}\ntask: times-tables\nquantization: nf4\ndtype: float32\neval: {{enabled: false}}\n"
        f"training: {{output_dir: {tmp_path / 'run'}, max_steps: 1, per_device_train_batch_size: 8, report_to: [],\n"
        "  max_completion_length: 6, optim: adamw_8bit, learning_rate: 0.01}\n"
    )
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert "nf4" in str(manifest["quantization"]) and (tmp_path / "run" / "adapter_model.safetensors").is_file()
    twice = [
        "--set",
        "training.model_init_kwargs={dtype: bfloat16}",
        "--set",
        f"training.output_dir={tmp_path / 'two'}",
    ]
    assert main(["train", str(tmp_path / "recipe.yaml"), *twice]) == 2
    assert "dtype twice" in " ".join(capsys.readouterr().err.split())


def test_layer_inputs_wait_in_host_memory(monkeypatch):
    """What backward keeps with checkpointing are the inputs of layers; offloaded, none of them stays."""
    monkeypatch.setattr("grupo.models.activation_offload.SMALLEST_OFFLOADED", 1)
    model = tiny_model()
    model.gradient_checkpointing_enable()
    model.train()
    inputs, moved = [], set()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].data_ptr()))
    empty_like = torch.empty_like

    def leaving(tensor, **more):
        moved.add(tensor.data_ptr())
        return empty_like(tensor, **more)

    monkeypatch.setattr(torch, "empty_like", leaving)
    with offload_activations(model):
        model(input_ids=IDS, use_cache=False)
    assert len(inputs) == 2 and set(inputs) <= moved
