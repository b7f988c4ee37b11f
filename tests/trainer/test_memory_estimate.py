"""What the estimate says of memory is what is allocated, where that can be counted, and near a measured peak."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from families import family_model
from grupo import GRPOConfig
from grupo.models.peft_setup import add_adapter
from grupo.models.quantization import quantization_config
from grupo.rollout.local.decoders import ForwardSignature, RowDecoder
from grupo.rollout.local.inference_copy import inference_copy_bytes, make_inference_copy
from grupo.trainer.memory_estimate import REMEDIES, MemoryEstimate, memory_estimate
from grupo.utils.quantized_layers import quantized_layers
from suite.measure import MIB
from suite.models import load
from suite.recipes import RECIPES
from suite.steps import measure_recipe
from tiny import tiny_model, tiny_tokenizer
from tiny_trainer import make_trainer

GIB = 2**30
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def lora(model, **settings):
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"target_modules": "all-linear", **settings}))


def estimate(model, *, prompt_tokens=5, device_type=None, free=None, quantization=None, eval_rows=0, **settings):
    settings = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 40, **settings}
    config = GRPOConfig("unused", use_cpu=True, report_to=[], **settings)
    found = memory_estimate(
        model,
        config,
        prompt_tokens=prompt_tokens,
        device_type=device_type,
        free=free,
        quantization=quantization,
        eval_rows=eval_rows,
    )
    assert found is not None
    return found


def on_meta(config=LLAMA_8B, dtype=torch.bfloat16, adapter=True):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=dtype)
        return lora(model, r=16) if adapter else model


# ---- counted ---------------------------------------------------------------------------------------------------------


def storage_bytes(tensors):
    return sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())


def scales(layer):
    """The tensors beside a quantised weight that grow with it."""
    state = getattr(layer.weight, "quant_state", None)
    return [layer.weight.SCB] if state is None else [state.absmax, state.state2.absmax]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(hidden_size=256, intermediate_size=512).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def quantised(folder, kind):
    pytest.importorskip("bitsandbytes")
    config = quantization_config(kind, torch.float32, asked="the test")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    return add_adapter(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))


@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model(tied=True), lambda: lora(tiny_model().bfloat16())])
def test_weights_are_those_of_the_model(make):
    model = make()
    found = estimate(model)
    assert sum(found.weights.values()) == storage_bytes(model.parameters())
    assert found.trainable == found.gradients == storage_bytes(p for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_weights_are_told_with_their_scales_before_they_are_loaded(folder, kind):
    model = quantised(folder, kind)
    parts = [tensor for layer in quantized_layers(model) for tensor in (layer.weight, *scales(layer))]
    found, planned = estimate(model), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert found.weights[kind] == pytest.approx(storage_bytes(parts), rel=1e-3)
    assert set(found.weights) == {kind, "float32"}
    assert estimate(lora(planned, r=4), quantization=kind).weights == found.weights


def forget_optimizers():
    """bitsandbytes remembers, for the whole process, what earlier optimizers had in 32 bits, by place."""
    pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance().initialize()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_8bit", "lion_32bit"])
@pytest.mark.parametrize("whole", [False, True])
def test_optimizer_states_are_those_behind_a_step(tmp_path, optim, whole):
    if "bit" in optim:
        forget_optimizers()
    model = tiny_model() if whole else lora(tiny_model(), r=4)
    trainer = make_trainer(tmp_path, model=model, optim=optim, learning_rate=1e-4)
    told = memory_estimate(trainer.model, trainer.config, prompt_tokens=5).optimizer
    trainer.train()
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    kept = storage_bytes(value for value in states if isinstance(value, torch.Tensor))
    tables = 2 * 1024 if optim == "adamw_8bit" else 0  # one pair for all weights
    assert kept - tables <= told <= kept


def test_a_large_weight_is_asked_for_by_a_smaller_one():
    forget_optimizers()
    model = tiny_model(vocab_size=50_000)
    head = model.lm_head.weight.nbytes
    whole, small = estimate(model, optim="adamw_torch").optimizer, estimate(model, optim="adamw_8bit").optimizer
    assert whole == pytest.approx(2 * estimate(model).trainable, rel=1e-3)
    assert small == pytest.approx(whole - 2 * head + 2 * head / 4 * (1 + 4 / 256), rel=1e-3), "embeddings stay"


@pytest.mark.parametrize(("prompt", "completion", "rows"), [(5, 40, 8), (30, 200, 2)])
@torch.no_grad()
def test_the_cache_is_the_one_that_rows_of_full_length_fill(prompt, completion, rows):
    model = tiny_model()
    decoder = RowDecoder(model, signature=ForwardSignature(model), slots=rows)
    with decoder.attention():
        (entry,) = decoder.prefill([(3,) * prompt])
        decoder.enter(entry, rows)
        for _ in range(completion - 1):
            decoder.step(torch.full((rows,), 3))
    assert decoder.cache is not None
    held = storage_bytes(tensor for layer in decoder.cache.rows for tensor in (layer.keys, layer.values))
    found = estimate(
        model,
        prompt_tokens=prompt,
        max_completion_length=completion,
        per_device_train_batch_size=rows,
        num_generations=rows,
    )
    assert found.cache == held and found.columns == decoder.cache.rows[0].keys.shape[2] and found.rows == rows


COPIED = {
    "float32": lambda folder: tiny_model(),
    "tied, LoRA": lambda folder: lora(tiny_model(tied=True)),
    "LoRA on some": lambda folder: lora(tiny_model(), target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
    "DoRA": lambda folder: lora(tiny_model(), use_dora=True),
    "bfloat16": lambda folder: tiny_model(dtype=torch.bfloat16),
    "not of Llama's form": lambda folder: lora(family_model("Gemma 3")),
    "nf4": lambda folder: quantised(folder, "nf4"),
    "int8": lambda folder: quantised(folder, "int8"),
}


@pytest.mark.parametrize("name", COPIED)
def test_the_copy_that_decodes_has_as_many_new_bytes(folder, name):
    model = COPIED[name](folder)
    copy = make_inference_copy(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    new = 0
    for module in copy.modules():
        if type(module).__name__ == "_PackedLinear":
            new += module.packed.numel() * module.packed.element_size()
        elif type(module).__name__ == "_Linear" and module.weight.untyped_storage().data_ptr() not in own:
            new += module.weight.nbytes
    assert inference_copy_bytes(model, "cpu", autocast=False) == new
    assert new or name == "DoRA"


# ---- what follows from what ------------------------------------------------------------------------------------------


def test_each_saving_saves():
    full, adapter = tiny_model(num_hidden_layers=8), lora(tiny_model(num_hidden_layers=8))
    fixed = {"gradient_checkpointing": False}
    plain = estimate(adapter, **fixed)
    assert plain.peak == plain.held + max(plain.rollout, plain.update)
    assert plain.optimizer < estimate(full, **fixed).optimizer
    assert estimate(adapter, gradient_checkpointing=True).activations < plain.activations
    assert estimate(adapter, device_type="cuda", offload_activations=True, **fixed).activations < plain.activations / 4
    assert estimate(adapter, micro_batch_tokens=50, **fixed).tokens <= 50 < plain.tokens
    assert estimate(adapter, max_completion_length=80, **fixed).update > plain.update
    assert estimate(adapter, eval_rows=64, **fixed).cache > plain.cache
    assert estimate(adapter, beta=0.1, **fixed).reference == plain.trainable > plain.reference == 0
    assert estimate(adapter, quantization="nf4", **fixed).weights["nf4"] < plain.weights["float32"] / 6
    assert estimate(full, device_type="cuda", **fixed).head > estimate(adapter, device_type="cuda", **fixed).head
    assert estimate(adapter, free=1000, **fixed).inference_copy == 0 < plain.inference_copy


def test_the_meta_device_tells_the_same(tmp_path):
    config = tiny_model().config.to_dict()
    real = estimate(lora(tiny_model(), r=16), device_type="cpu")
    assert estimate(on_meta(config, torch.float32), device_type="cpu") == real


def test_a_model_without_sizes_is_not_guessed():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=128))
    config = GRPOConfig("unused", use_cpu=True, report_to=[])
    assert memory_estimate(model, config, prompt_tokens=5) is None


def test_known_numbers_of_an_8b_model():
    """8,030,261,248 parameters; 64 Ki numbers of keys and values per token, in 16 bits."""
    found = estimate(
        on_meta(),
        prompt_tokens=480,
        max_completion_length=20_000,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
    )
    assert found.weights["bfloat16"] == 2 * 8_030_261_248
    assert found.tokens == 20_480 and found.rows == 8
    assert found.cache == 8 * found.columns * 2 * 65_536 and 20_480 <= found.columns < 1.5 * 20_480
    nf4 = estimate(on_meta(), quantization="nf4").weights["nf4"]
    assert nf4 == pytest.approx(6_979_321_856 * 0.5159, rel=1e-3)


def test_what_does_not_fit_is_said_with_what_to_set():
    found = estimate(lora(tiny_model()), gradient_checkpointing=False)
    assert found.warning(GIB) is None
    warning = found.warning(1000)
    assert warning is not None and "will not fit" in warning and "0 MiB are free" in warning
    for part in ("optimizer", "gradients", "activations", "head", "inference_copy", "cache", "sampling"):
        small = dict.fromkeys(MemoryEstimate.__dataclass_fields__, 1)
        shown = MemoryEstimate(**{**small, "weights": {"float32": 1}, part: 3 * GIB}).warning(GIB)
        assert shown is not None and shown.endswith(REMEDIES[part]) and "needs about 3.0 GiB" in shown


# ---- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_step_of_the_default_model_takes_about_as_much(tmp_path, monkeypatch):
    """Resident memory at its peak above that of the loaded model, within a quarter."""
    from grupo.models.default_model import default_model_path

    monkeypatch.chdir(tmp_path)
    recipe, tokens, folder = RECIPES["arithmetic"], 32, default_model_path()
    one_step = {"recipe": "arithmetic", "side": "ours", "checkpointing": False, "steps": 1}
    measured = measure_recipe(folder=folder, tokens=tokens, **one_step)["peak_mib"]
    model, tokenizer = load(folder)
    found = estimate(
        lora(model, r=16),
        prompt_tokens=max(len(tokenizer.apply_chat_template(row["prompt"])["input_ids"]) for row in recipe.rows()),
        free=16 * GIB,
        max_completion_length=tokens,
        gradient_accumulation_steps=recipe.accumulation,
        gradient_checkpointing=False,
    )
    predicted = (found.peak - sum(found.weights.values())) / MIB
    assert 0.75 < predicted / measured < 1.25
