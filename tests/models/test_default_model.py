"""The default model itself: its file is found, scoring does not see padding, and the sampler is the policy."""

from __future__ import annotations

import pytest
import torch

from grupo.data.prompts import PromptTokenizer, tokenize_rows
from grupo.models.default_model import default_model_path
from grupo.models.inspect import stop_token_ids
from grupo.models.load import load_policy, load_tokenizer
from grupo.policy.batching import collate
from grupo.policy.logprob_model import LogprobModel
from grupo.rollout.engine import GenerationRequest
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingSpec
from grupo.tasks.registry import make_task
from grupo.types import TrainingSample

pytestmark = pytest.mark.model


@torch.no_grad()
def test_sampled_logprobs_are_the_scored_ones_alone_and_beside_a_long_row():
    model = load_policy(default_model_path())
    tokenizer = load_tokenizer(model)
    (row,) = tokenize_rows(make_task("times-tables").train[:1], PromptTokenizer(tokenizer))
    engine = LocalEngine(model, decode=tokenizer.decode, stop_token_ids=stop_token_ids(tokenizer, model))
    ((completion,),) = engine.generate([GenerationRequest(row.to_prompt(0), (1,))], SamplingSpec(max_new_tokens=12))

    short = TrainingSample(row.token_ids, completion.token_ids, 1.0, True, True, completion.behavior_logprobs)
    long = TrainingSample(tuple(range(100, 300)), tuple(range(300, 340)), 1.0, True, True, None)
    logprob_model = LogprobModel(model)
    alone, beside = (
        logprob_model.logprobs(model, collate(rows, pad_token_id=2, device=torch.device("cpu"))).logprobs[0, :12]
        for rows in ([short], [short, long])
    )
    assert logprob_model.reads_hidden_states
    sampled = torch.tensor(completion.behavior_logprobs)
    torch.testing.assert_close(alone[: len(sampled)], sampled, rtol=0, atol=1e-3)
    torch.testing.assert_close(beside[: len(sampled)], sampled, rtol=0, atol=1e-3)
