"""The Unsloth face: every argument is honoured or answered, and models behave as scripts expect."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import grupo
from grupo import FastLanguageModel, GRPOConfig, GRPOTrainer, PatchFastRL, SamplingParams
from grupo.errors import ConfigError, DataError, UnsupportedError
from grupo.models.load_options import load_options
from grupo.models.quantization import quantization_config
from grupo.sampling import sampling_overrides
from grupo.unsloth import arguments
from grupo.unsloth.model import METHODS
from grupo.utils.quantized_layers import is_4bit, is_8bit, quantized_layers
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("bitsandbytes")
PAGE = (Path(__file__).parents[2] / "docs" / "unsloth.md").read_text(encoding="utf-8")
EIGHT = SamplingParams(temperature=1.0, max_tokens=8, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(hidden_size=64, intermediate_size=128, initializer_range=0.15).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def load(folder, **settings):
    return FastLanguageModel.from_pretrained(folder, max_seq_length=256, **settings)


def adapted(folder, *, trained=True, **settings):
    model, tokenizer = load(folder)
    model = FastLanguageModel.get_peft_model(model, **{"r": 4, **settings})
    if trained:
        spoil(model)
    return model, tokenizer


def spoil(model, seed=1):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def texts(outputs):
    return [[one.text for one in output.outputs] for output in outputs]


# ---- loading ---------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "the default": ({}, is_4bit, torch.float32),
    "4 bits": ({"load_in_4bit": True}, is_4bit, torch.float32),
    "4 bits, bfloat16": ({"dtype": "bfloat16"}, is_4bit, torch.bfloat16),
    "8 bits": ({"load_in_8bit": True}, is_8bit, torch.float32),
    "16 bits": ({"load_in_16bit": True, "dtype": torch.bfloat16}, None, torch.bfloat16),
    "16 bits, the CPU's choice": ({"load_in_4bit": False}, None, torch.float32),
    "all weights": ({"full_finetuning": True}, None, torch.float32),
}


@pytest.mark.parametrize(("settings", "kind", "dtype"), PRECISIONS.values(), ids=PRECISIONS)
def test_precisions(folder, settings, kind, dtype):
    model, tokenizer = load(folder, **settings)
    assert type(model) is LlamaForCausalLM and tokenizer.padding_side == "left"
    layers = list(quantized_layers(model))
    assert len(layers) == (14 if kind else 0) and all(map(kind or bool, layers))
    assert model.model.norm.weight.dtype == dtype
    if kind is is_4bit:
        assert layers[0].compute_dtype == dtype and layers[0].weight.quant_state.quant_type == "nf4"
        assert layers[0].weight.quant_state.nested


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
        ({"load_in_8bit": True, "full_finetuning": True}, "exclude each other"),
        ({"dtype": torch.int8}, "'bfloat16'"),
        ({"max_seq_length": 4096}, "512"),
        ({"max_seq_length": "long"}, "expected a number"),
        ({"device_map": "balanced"}, "one device"),
        ({"load_in_fp8": True}, "load_in_8bit"),
        ({"rope_scaling": {"factor": 2.0}}, "not stretched"),
        ({"max_seq_lenght": 10}, "docs/unsloth.md"),
        ({"use_gradient_checkpointing": "maybe"}, "'unsloth', True or False"),
    ],
)
def test_what_cannot_be_is_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.from_pretrained(folder, **{"max_seq_length": 256, **settings})


def test_without_bitsandbytes_the_default_is_a_sentence(folder, monkeypatch):
    monkeypatch.setattr("grupo.models.quantization.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ConfigError, match=r"load_in_4bit=True, the default, needs the package bitsandbytes"):
        load(folder)
    load(folder, load_in_4bit=False)


def test_arguments_without_effect_get_one_line(folder, caplog):
    load(folder, fast_inference=True, gpu_memory_utilization=0.6, max_lora_rank=32)
    others, fast = caplog.messages
    assert fast == "fast_inference=True: completions are sampled in this process; vLLM is not part of this version."
    assert others.startswith("from_pretrained: without effect here: gpu_memory_utilization (")
    assert "max_lora_rank" in others


def test_every_argument_is_on_the_page():
    for function in (FastLanguageModel.from_pretrained, FastLanguageModel.get_peft_model):
        names = set(inspect.signature(function).parameters) - {"model", "more"}
        assert [name for name in names if f"`{name}`" not in PAGE] == []
    tables = [table for name, table in vars(arguments).items() if name.startswith(("LOADING_", "ADAPTER_"))]
    assert len(tables) == 6
    assert [name for table in tables for name in table if f"`{name}`" not in PAGE] == []
    for name, function in METHODS.items():
        assert f"`model.{name}`" in PAGE
        for argument in list(inspect.signature(function).parameters)[1:]:
            assert f"`{argument}`" in PAGE, (name, argument)


def test_scripts_find_what_they_import():
    names = ["FastLanguageModel", "FastModel", "PatchFastRL", "is_bfloat16_supported", "SamplingParams"]
    others = ("GRPOConfig", "GRPOTrainer", "vLLMSamplingParams", "get_chat_template")
    assert all(hasattr(grupo, name) for name in (*names, *others))
    assert grupo.FastModel is FastLanguageModel and set(names) <= set(dir(grupo))
    program = "import sys, grupo; grupo.SamplingParams(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(grupo.__file__).parents[1])


def test_patching_patches_nothing(caplog):
    import trl

    before = trl.GRPOTrainer, GRPOTrainer.__init__
    PatchFastRL("GRPO", FastLanguageModel)
    assert (trl.GRPOTrainer, GRPOTrainer.__init__) == before and "nothing is patched" in caplog.text


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_the_adapter_is_the_one_that_was_asked_for(folder):
    model, _ = load(folder)
    state = torch.get_rng_state()
    model = FastLanguageModel.get_peft_model(
        model, r=4, target_modules=["q_proj", "up_proj"], lora_alpha=12, use_rslora=True, finetune_last_n_layers=1,
        modules_to_save=["lm_head"], use_dora=True,
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state), "the random numbers of the script go on as they were"
    config = model.peft_config["default"]
    assert isinstance(model, PeftModel)
    assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (4, 12, True, True)
    assert config.target_modules == {"q_proj", "up_proj"} and config.layers_to_transform == [1]
    trained = {name.split(".lora")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3, "two layers and the head"


def test_random_state_decides_where_an_adapter_begins(folder):
    def first(seed):
        model, _ = adapted(folder, trained=False, random_state=seed)
        return model.base_model.model.model.layers[0].self_attn.q_proj.lora_A.default.weight

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_the_same_again_is_no_change_and_another_is_refused(folder):
    model, _ = adapted(folder)
    before = {name: p.clone() for name, p in model.named_parameters()}
    again = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    assert again is model and load_options(model).checkpointing is False
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with pytest.raises(ConfigError, match="r=4, not 8; lora_alpha=16, not 32"):
        FastLanguageModel.get_peft_model(model, r=8, lora_alpha=32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "rank"),
        ({"r": True}, "rank"),
        ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
        ({"finetune_language_layers": False}, "nothing to train"),
        ({"finetune_attention_modules": False, "finetune_mlp_modules": False}, "leave nothing"),
        ({"finetune_last_n_layers": 5}, "2 layers"),
        ({"finetune_last_n_layers": 1, "layers_to_transform": [0]}, "one of them"),
        ({"target_modules": ["nope"]}, "q_proj"),
        ({"lora_alhpa": 3}, "docs/unsloth.md"),
        ({"modules_to_save": ["nope"]}, "no such module"),
        ({"layers_to_transform": [0, 7]}, r"\[7\]"),
        ({"bias": "yes"}, "bias='yes'.*lora_only"),
        ({"lora_dropout": -0.1}, "probability"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"random_state": None}, "whole number"),
    ],
)
def test_adapters_that_cannot_be(folder, settings, message):
    model, _ = load(folder)
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.get_peft_model(model, **settings)
    assert [name for name, _ in model.named_modules()] == before and not hasattr(model, "peft_config")


def test_parts_of_the_model_by_kind(folder):
    model, _ = load(folder)
    model = FastLanguageModel.get_peft_model(model, finetune_vision_layers=False, finetune_mlp_modules=False)
    assert model.peft_config["default"].target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_full_fine_tuning_gets_no_adapter(folder, caplog):
    model, _ = load(folder, full_finetuning=True)
    assert FastLanguageModel.get_peft_model(model) is model and "gets no adapter" in caplog.text
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_of_transformers_gets_an_adapter_too():
    model = FastLanguageModel.get_peft_model(tiny_model(), r=4)
    assert isinstance(model, PeftModel) and callable(model.fast_generate)


def test_training_goes_on_with_a_saved_adapter(folder, tmp_path):
    model, tokenizer = adapted(folder)
    model.save_lora(tmp_path / "adapter", tokenizer)
    again, _ = load(str(tmp_path / "adapter"))
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert FastLanguageModel.get_peft_model(again, r=4) is again
    assert any(parameter.requires_grad for parameter in again.parameters())


def test_models_stay_copyable(folder):
    model, _ = adapted(folder)
    other = copy.deepcopy(model)
    other.base_model.model.lm_head.weight.data.zero_()
    wanted = model.fast_generate("abc", EIGHT)
    assert other.fast_generate("abc", EIGHT) != wanted == model.fast_generate("abc", EIGHT)
    plain, _ = load(folder, load_in_4bit=False)
    assert pickle.loads(pickle.dumps(plain)).fast_generate("abc", EIGHT) == plain.fast_generate("abc", EIGHT)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_modes(folder):
    model, tokenizer = adapted(folder)
    assert FastLanguageModel.for_inference(model) is model and not model.training
    assert all(layer.training for layer in quantized_layers(model)), "bitsandbytes would pack their weights"
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    assert model.training and load_options(model).checkpointing is False
    with pytest.raises(ConfigError, match="not the tokenizer"):
        FastLanguageModel.for_inference(tokenizer)


def loaded_elsewhere(folder):
    """By transformers alone, so that nothing but the mode of its layers keeps bitsandbytes from packing them."""
    config = quantization_config("nf4", torch.float32, asked="the test")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.usefixtures("processor")
def test_generation_leaves_modes_and_weights_alone(folder, tmp_path):
    """With texts and tensors, and with an adapter of the request, which peft loads in evaluation mode."""
    model = FastLanguageModel.get_peft_model(loaded_elsewhere(folder), r=4, lora_dropout=0.5)
    spoil(model)
    model.save_lora(tmp_path / "adapter")
    base, tokenizer = loaded_elsewhere(folder), tiny_tokenizer()
    for name in ("fast_generate", "load_lora"):
        setattr(base, name, functools.partial(METHODS[name], base))
    inputs = tokenizer("abc", return_tensors="pt")
    for one, training in ((model, True), (model, False), (base, True), (base, False)):
        one.train(training)
        before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        modes = [module.training for module in one.modules()]
        for request in (None, one.load_lora(tmp_path / "adapter")):
            one.fast_generate("abc", EIGHT, lora_request=request)
            (first, second) = (
                one.fast_generate(**inputs, lora_request=request, max_new_tokens=4, do_sample=False) for _ in range(2)
            )
            assert torch.equal(first, second), "without dropout"
            assert [module.training for module in one.modules()] == modes
        after = one.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("processor")
def test_for_inference_takes_models_that_were_loaded_elsewhere(folder):
    model = FastLanguageModel.for_inference(loaded_elsewhere(folder))
    model.generate(input_ids=torch.arange(10, 20)[None], max_new_tokens=2)


# ---- fast_generate ---------------------------------------------------------------------------------------------------


def test_texts_and_conversations(folder):
    model, tokenizer = adapted(folder)
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    (as_text,) = model.fast_generate(text, sampling_params=EIGHT)
    (as_chat,) = model.fast_generate(chat, sampling_params=EIGHT)
    assert as_text == as_chat
    assert as_text.prompt == text and len(as_text.outputs[0].token_ids) <= 8
    many = model.fast_generate([text, chat, "another"], EIGHT)
    assert many[0].outputs == as_text.outputs and [output.request_id for output in many] == ["0", "1", "2"]


def test_sampling_parameters_are_used(folder):
    model, tokenizer = adapted(folder)
    (output,) = model.fast_generate("abc", SamplingParams(n=4, max_tokens=5, temperature=0.9, seed=1))
    assert len({one.token_ids for one in output.outputs}) > 1 and all(len(o.token_ids) <= 5 for o in output.outputs)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    (first,), (second,) = (texts(model.fast_generate("abc", greedy)) for _ in range(2))
    assert first == second == texts(model.fast_generate("abc", SamplingParams(top_k=1, max_tokens=12)))[0]
    token = model.fast_generate("abc", greedy)[0].outputs[0].token_ids[2]
    for stop in ({"stop_token_ids": [token]}, {"stop": [tokenizer.convert_ids_to_tokens(token)]}):
        (stopped,) = model.fast_generate("abc", SamplingParams(temperature=0, max_tokens=12, **stop))
        assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].token_ids[-1] == token
    assert len(model.fast_generate("abc")[0].outputs[0].token_ids) <= 16, "vLLM's default"


def test_without_a_seed_torch_decides(folder):
    model, _ = adapted(folder)
    params = SamplingParams(max_tokens=8)
    torch.manual_seed(5)
    first, other = (texts(model.fast_generate("abc", params)) for _ in range(2))
    torch.manual_seed(5)
    assert texts(model.fast_generate("abc", params)) == first != other


def test_max_seq_length_bounds_prompt_and_completion(folder):
    model, _ = adapted(folder)
    no_stop = SamplingParams(temperature=0, max_tokens=None)
    long, short = model.fast_generate(["a" * 250, "a" * 100], no_stop)
    assert len(long.outputs[0].token_ids) <= 6 and len(short.outputs[0].token_ids) <= 156
    with pytest.raises(DataError, match="256"):
        model.fast_generate("a" * 256, no_stop)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.fast_generate("a", SamplingParams(stop="two tokens")), "10 tokens"),
        (lambda model: model.fast_generate("a", {"presence_penalty": 1.0}), "presence_penalty"),
        (lambda model: model.fast_generate("a", max_new_tokens=5), "sampling_params"),
        (lambda model: model.fast_generate("a", 0.7), "SamplingParams"),
        (lambda model: model.fast_generate([]), "list"),
        (lambda model: model.fast_generate(""), "must be a text"),
        (lambda model: model.fast_generate("a", SamplingParams(n=0)), "at least 1"),
        (lambda model: FastLanguageModel.get_peft_model(load_options(model).tokenizer), "pass the model"),
        (lambda model: FastLanguageModel.from_pretrained(3), "folder"),
        (lambda model: model.fast_generate([3]), "must be a text"),
        (lambda model: model.fast_generate("a", lora_request=3), "load_lora"),
        (lambda model: model.load_lora("nowhere"), "adapter_config.json"),
    ],
)
def test_wrong_calls(folder, call, message):
    model, _ = adapted(folder)
    with pytest.raises((ConfigError, DataError), match=message):
        call(model)


def test_tensors_go_to_transformers(folder):
    model, tokenizer = adapted(folder)
    inputs = tokenizer("abc", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    found = model.fast_generate(**inputs, max_new_tokens=4, do_sample=False)
    assert found.shape[0] == 1 and found[0, :3].tolist() == inputs["input_ids"][0].tolist()
    with pytest.raises(ConfigError, match="max_new_tokens"):
        model.fast_generate(**inputs, sampling_params=EIGHT)


def test_the_models_own_adapter_is_used_unless_another_is_asked_for(folder, tmp_path):
    """Elsewhere, sampling without lora_request is the base model's, without a word (unsloth issue 3802)."""
    model, _ = adapted(folder)
    own = model.fast_generate("abc", EIGHT)
    base, _ = load(folder)
    base_says = base.fast_generate("abc", EIGHT)
    assert own != base_says
    model.save_lora(tmp_path / "first")
    spoil(model, seed=2)
    second = model.fast_generate("abc", EIGHT)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    for one in (model, base):
        for request in (one.load_lora(tmp_path / "first"), str(tmp_path / "first"),
                        SimpleNamespace(lora_path=str(tmp_path / "first"), lora_int_id=1)):  # fmt: skip
            assert one.fast_generate("abc", EIGHT, lora_request=request) == own
    assert model.fast_generate("abc", EIGHT) == second, "and afterwards its own again"
    assert base.fast_generate("abc", EIGHT) == base_says and not hasattr(base, "peft_config")
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "small")
    for one in (model, base):
        with pytest.raises(ConfigError, match=r"small' cannot be put on the model: .*size mismatch"):
            one.fast_generate("abc", EIGHT, lora_request=str(tmp_path / "small"))
    assert not any(hasattr(part, "lora_A") for part in base.modules()) and not hasattr(base, "peft_config")
    assert list(model.peft_config) == ["default"]
    with model.disable_adapter():
        assert model.fast_generate("abc", EIGHT) == base_says


@dataclass
class _Foreign:
    """As vLLM's SamplingParams looks from outside."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    n: int = 1
    stop: list | None = None
    presence_penalty: float = 0.0
    include_stop_str_in_output: bool = False
    _all_stop_token_ids: object = None


def test_sampling_parameters_of_vllm(folder):
    model, _ = adapted(folder)
    theirs = _Foreign(min_p=0.1, seed=3, max_tokens=8, include_stop_str_in_output=True, _all_stop_token_ids={3})
    ours = SamplingParams(min_p=0.1, seed=3, max_tokens=8)
    assert model.fast_generate("abc", theirs) == model.fast_generate("abc", ours)
    with pytest.raises(UnsupportedError, match=r"presence_penalty=0\.5"):
        model.fast_generate("abc", _Foreign(presence_penalty=0.5))


UNSUPPORTED = {
    "logprobs": 1, "prompt_logprobs": 0, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 3,
    "ignore_eos": True, "bad_words": ["x"], "logit_bias": {3: 1.0}, "allowed_token_ids": [3], "watermarking": True,
    "thinking_token_budget": 3, "logprob_token_ids": [3], "extra_args": {"a": 1},
}  # fmt: skip
ASKS_NOTHING = {**dict.fromkeys(UNSUPPORTED), "presence_penalty": 0.0, "min_tokens": 0, "ignore_eos": False,
                "bad_words": [], "output_kind": 2, "flat_logprobs": True}  # fmt: skip


def test_parameters_that_only_vllm_has():
    for make in (lambda **given: SamplingParams(**given), lambda **given: sampling_overrides(given)):
        for name, value in UNSUPPORTED.items():
            with pytest.raises(UnsupportedError, match=f"{name}=.*It supports temperature.*Leave it out"):
                make(**{name: value})
        with pytest.raises(ConfigError, match=r"no sampling parameter 'temprature'\. Did you mean 'temperature'"):
            make(temprature=0.5)
    assert SamplingParams(seed=3, **ASKS_NOTHING) == SamplingParams(seed=3)
    assert sampling_overrides({"seed": 3, **ASKS_NOTHING}) == sampling_overrides(SamplingParams(seed=3))


def test_real_parameters_of_vllm(folder):
    vllm = pytest.importorskip("vllm")
    usual = vllm.SamplingParams()
    public = {name: getattr(usual, name) for name in usual.__struct_fields__ if not name.startswith("_")}
    assert sampling_overrides(usual) == sampling_overrides({}) and SamplingParams(**public).stop == []
    for name, value in UNSUPPORTED.items():
        with pytest.raises(UnsupportedError, match=f"{name}="):
            sampling_overrides(vllm.SamplingParams(**{name: value}))
    set_here = {"min_p": 0.1, "seed": 3, "max_tokens": 8, "stop": ["x"], "top_k": -1, "temperature": 0.7, "n": 2}
    theirs, ours = vllm.SamplingParams(**set_here), SamplingParams(**set_here)
    model, _ = adapted(folder)
    assert model.fast_generate("abc", theirs) == model.fast_generate("abc", ours)
    configs = [
        GRPOConfig("unused", use_cpu=True, vllm_sampling_params=params, num_generations=2, max_completion_length=8)
        for params in (theirs, ours)
    ]
    assert {config.sampling_spec() for config in configs} == {configs[0].sampling_spec()}
    assert (configs[0].temperature, configs[0].min_p, configs[0].stop_strings) == (0.7, 0.1, ("x",))


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_merged_in_16_bits(folder, tmp_path):
    model, tokenizer = adapted(folder)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16 and type(merged) is LlamaForCausalLM
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        found, wanted = merged.float()(input_ids=ids).logits, model(input_ids=ids).logits
        base = load(folder)[0](input_ids=ids).logits
    assert (found - wanted).abs().mean() < 0.02 * (base - wanted).abs().mean()


def test_the_adapter_alone(folder, tmp_path):
    model, _ = adapted(folder)
    model.save_pretrained_merged(tmp_path / "adapter", save_method="lora")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    with pytest.raises(ConfigError, match="no adapter"):
        load(folder)[0].save_lora(tmp_path / "none")


@pytest.mark.parametrize("method", ["merged_4bit", "fp8"])
def test_other_ways_of_saving(folder, tmp_path, method):
    model, _ = adapted(folder)
    with pytest.raises(UnsupportedError, match="merged_16bit"):
        model.save_pretrained_merged(tmp_path / "merged", save_method=method)
    with pytest.raises(UnsupportedError, match="q8_0"):
        model.save_pretrained_gguf(tmp_path / "gguf", quantization_method=["f16", "q4_k_m"])
    assert not list(tmp_path.iterdir())


# ---- training --------------------------------------------------------------------------------------------------------


def trainer(folder, path, model, tokenizer, **settings):
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(
            str(path),
            **{
                "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "learning_rate": 1e-3,
                "max_completion_length": 12, "report_to": [], "save_strategy": "no", "disable_tqdm": True, **settings,
            },
        ),
        train_dataset=[{"prompt": f"question {number}"} for number in range(4)],
    )  # fmt: skip


CHECKPOINTING = {
    "asked of the model": ("unsloth", {}, True),
    "not asked of it": (False, {}, False),
    "the configuration says otherwise": (False, {"gradient_checkpointing": True}, True),
    "or the other way round": (True, {"activation_checkpointing": False}, False),
}


@pytest.mark.parametrize(("wanted", "settings", "is_on"), CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_checkpointing_is_what_the_model_was_asked_for(folder, tmp_path, caplog, wanted, settings, is_on):
    model, tokenizer = adapted(folder, use_gradient_checkpointing=wanted)
    one = trainer(folder, tmp_path, model, tokenizer, **settings)
    one.train()
    assert model.is_gradient_checkpointing is is_on is one.forward_backward.checkpointing
    assert not one.forward_backward.offload_activations, "on the CPU they are in host memory already"
    assert ("overrides the model's use_gradient_checkpointing" in caplog.text) is (bool(settings))


def test_offload_is_connected_on_an_accelerator(folder, monkeypatch):
    from grupo.models.load_options import LoadOptions
    from grupo.trainer.step_arguments import step_arguments

    config = GRPOConfig("anywhere")
    monkeypatch.setattr(type(config), "device", torch.device("cuda"))
    asked = LoadOptions(checkpointing=True, offload=True)
    assert step_arguments(config, asked, 8).offload_activations and not config.offload_activations
    assert not step_arguments(config, LoadOptions(checkpointing=True), 8).offload_activations


def test_max_seq_length_holds_in_training(folder, tmp_path):
    model, tokenizer = adapted(folder)
    with pytest.raises(DataError, match="256"):
        trainer(folder, tmp_path, model, tokenizer, max_completion_length=250)


def test_generation_before_and_after_training(folder, tmp_path):
    model, tokenizer = adapted(folder, trained=False)
    before = model.fast_generate("question 1", EIGHT)
    trainer(folder, tmp_path, model, tokenizer, learning_rate=0.1, max_steps=2).train()
    after = model.fast_generate("question 1", EIGHT)
    assert before != after
    model.save_lora(tmp_path / "adapter")
    fresh, _ = load(folder)
    assert fresh.fast_generate("question 1", EIGHT, lora_request=fresh.load_lora(tmp_path / "adapter")) == after
    assert fresh.fast_generate("question 1", EIGHT) == before


def test_peft_config_beside_get_peft_model_is_refused(folder, tmp_path):
    model, tokenizer = adapted(folder)
    with pytest.raises(ConfigError, match="adapter already"):
        GRPOTrainer(
            model, lambda completions, **_: [0.0] * len(completions), GRPOConfig(str(tmp_path)),
            [{"prompt": "a"}], processing_class=tokenizer, peft_config=LoraConfig(r=2),
        )  # fmt: skip
