"""The copy that decodes, and rows that come and go: the same completions, and weights that nobody touched."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from families import family_model
from grupo.policy.batching import collate
from grupo.policy.logprob_model import LogprobModel
from grupo.rollout.engine import GenerationRequest, completion_seed
from grupo.rollout.local.engine import LocalEngine, _compact_order
from grupo.rollout.local.fused_layer import DecodingLayer
from grupo.rollout.local.inference_copy import make_inference_copy
from grupo.sampling import SamplingSpec
from grupo.types import Prompt, TrainingSample
from tiny import tiny_model

IDS = torch.arange(10, 30)[None]
PROMPTS = [
    Prompt(id=i, row=i, token_ids=tuple(range(6, 6 + length)), content="") for i, length in enumerate((3, 40, 9))
]


def requests(count=4):
    return [
        GenerationRequest(p, tuple(completion_seed(0, "test", p.id, place) for place in range(count))) for p in PROMPTS
    ]


def engine(model, **settings):
    return LocalEngine(model, decode=lambda ids: "", stop_token_ids=(1, 20, 21, 22, 23, 24, 25), **settings)


def adapted(model=None, **settings):
    torch.manual_seed(1)
    settings = {"target_modules": "all-linear", "lora_dropout": 0.3, **settings}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings)
    model = get_peft_model(model or tiny_model(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


ADAPTERS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "with bias": {"lora_bias": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "modules to save": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_the_copy_is_the_policy(settings):
    base = tiny_model(attention_bias=True, mlp_bias=True) if "lora_bias" in settings else tiny_model()
    if "lora_bias" in settings:
        settings = {**settings, "target_modules": ["q_proj", "up_proj"]}
    model = adapted(base, **settings).eval()
    with torch.no_grad():
        found, wanted = make_inference_copy(model)(input_ids=IDS).logits, model(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(make_inference_copy(model)(input_ids=IDS).logits, model(input_ids=IDS).logits)


FUSED = {
    "Llama": (lambda: tiny_model(), 2),
    "Llama with biases": (lambda: tiny_model(attention_bias=True, mlp_bias=True), 2),
    "Qwen2": (lambda: family_model("Qwen2"), 2),
    "Qwen3": (lambda: family_model("Qwen3"), 2),
    "Mistral": (lambda: family_model("Mistral"), 2),
    "Gemma 3, whose norms come behind the parts, too": (lambda: family_model("Gemma 3"), 0),
}


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("make, layers", FUSED.values(), ids=FUSED)
def test_layers_in_few_operators(make, layers, with_adapter):
    model = adapted(make()).eval() if with_adapter else make().eval()
    copied = make_inference_copy(model)
    assert sum(isinstance(module, DecodingLayer) for module in copied.modules()) == layers
    with torch.no_grad():
        found, wanted = copied(input_ids=IDS).logits, model(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "self_attn", "mlp.act_fn", "self_attn.q_proj"])
def test_a_hook_anywhere_in_a_layer_counts(part):
    model = adapted().eval()
    layer = model.base_model.model.model.layers[0]

    def halved(module, inputs, output):
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    layer.get_submodule(part).register_forward_hook(halved)
    with torch.no_grad():
        torch.testing.assert_close(
            make_inference_copy(model)(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "settings, unfolded", [({}, 0), ({"use_dora": True}, 14), ({"modules_to_save": ["lm_head"]}, 0)]
)
def test_layers_that_are_not_folded_are_told(settings, unfolded, caplog):
    caplog.set_level("INFO", logger="grupo")
    engine(adapted(**settings))
    assert (f"The adapters of {unfolded} layers decode unfolded" in caplog.text) == bool(unfolded)


def test_no_copy_of_what_a_copy_could_miss():
    model = tiny_model()
    model.forward = lambda *args, **kwargs: None
    assert make_inference_copy(model) is None
    prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert make_inference_copy(get_peft_model(tiny_model(), prompt_tuning)) is None


def test_hooks_of_the_user_are_in_the_copy():
    model = tiny_model().eval()
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
    with torch.no_grad():
        torch.testing.assert_close(make_inference_copy(model)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_training_weights_are_bit_identical_after_many_rollouts():
    model = adapted()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, spec = engine(model), SamplingSpec(max_new_tokens=2)
    for _ in range(50):
        last = one.generate(requests(1), spec)
    assert last == engine(model).generate(requests(1), spec)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("max_rows", [1, 3, 5, 7])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_completions_do_not_depend_on_how_many_are_decoded_together(max_rows, penalty):
    model, spec = tiny_model(), SamplingSpec(max_new_tokens=90, repetition_penalty=penalty)
    wanted = engine(model).generate(requests(6), spec)
    assert len({len(completion.token_ids) for group in wanted for completion in group}) > 4
    found = engine(model, max_rows=max_rows).generate(requests(6), spec)
    for group, wanted_group in zip(found, wanted, strict=True):
        for completion, other in zip(group, wanted_group, strict=True):
            assert completion.token_ids == other.token_ids and completion.finish_reason == other.finish_reason
            assert completion.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)


@pytest.mark.parametrize("max_rows", [None, 5])
def test_the_plain_way_samples_the_same(max_rows):
    """Through the model's own cache, padded on the left."""
    model, spec = tiny_model(), SamplingSpec(max_new_tokens=40)
    plain = engine(model, max_rows=max_rows)
    plain._supports_row_cache = False
    fast = engine(model, max_rows=max_rows)
    wanted, found = plain.generate(requests(), spec), fast.generate(requests(), spec)
    assert fast._supports_row_cache
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in wanted]


def test_without_room_for_a_copy_the_model_itself_decodes(monkeypatch):
    model, spec = adapted(), SamplingSpec(max_new_tokens=20)
    wanted = engine(model).generate(requests(), spec)
    monkeypatch.setattr("grupo.rollout.local.engine.free_bytes", lambda device: 1000)
    monkeypatch.setattr("grupo.rollout.local.engine.make_inference_copy", None)
    found = engine(model).generate(requests(), spec)
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in wanted]


def test_long_completions_move_through_the_cache():
    """More tokens than the cache has columns at first, rows that enter late, and columns that are given up."""
    model = adapted(tiny_model(max_position_embeddings=1024))
    one = LocalEngine(model, decode=lambda ids: "", stop_token_ids=(1,), max_rows=2)
    groups = one.generate(requests(2), SamplingSpec(max_new_tokens=300))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        samples = [TrainingSample(prompt.token_ids, c.token_ids, 1.0, True, True, c.behavior_logprobs) for c in group]
        batch = collate(samples, pad_token_id=2, device=torch.device("cpu"))
        model.eval()
        with torch.no_grad():
            scored = LogprobModel(model).logprobs(model, batch).logprobs
        torch.testing.assert_close(scored, batch.behavior_logprobs, rtol=0, atol=1e-4)


def test_holes_are_filled_from_the_end():
    assert _compact_order([0, 2, 3, 5]) == [0, 5, 2, 3]
    assert _compact_order([]) == []
    assert _compact_order([0, 1]) == [0, 1]
    assert sorted(_compact_order([3, 4, 5])) == [3, 4, 5]
