"""In int8 under --deterministic an answer has the same tokens on any number of ranks."""

import pytest

from cluster.request import BASE, Request
from deploy.local_engine import Answer
from tests.end_to_end.engines import make_engine, random_prompt
from tests.end_to_end.reference import QUESTIONS, chat_prompt
from tests.end_to_end.server import adapter_dirs
from worker.protocol import SamplingParams

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
]  # tiny models of families see it in the quick run

NUM_REQUESTS, NUM_TOKENS = 40, 125


def answers(tp: int, dtype: str) -> list[Answer]:
    """Return greedy and drawn answers of a base model and of adapters, side by side.

    Prompts are short, and of several chunks.
    """
    running = make_engine(tp, dtype, quantization="int8", deterministic=True)
    models = [BASE, *(running.add_adapter(path) for path in adapter_dirs().values())]
    prompts = [chat_prompt(text) for text in QUESTIONS]
    requests = []
    for i in range(NUM_REQUESTS):
        temperature = 0.0 if i % 3 == 0 else 1.0
        sampling = SamplingParams(temperature, top_p=0.95, seed=i, num_logprobs=0)
        prompt = (*prompts[i % len(prompts)], *random_prompt(i * 12))
        requests.append(Request(str(i), models[i % len(models)], prompt, sampling, NUM_TOKENS))
    found = running.generate(requests)
    running.close()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_5000_tokens_of_40_requests_are_the_same_on_1_to_4_ranks(dtype: str) -> None:
    right = answers(1, dtype)
    assert sum(len(answer.token_ids) for answer in right) == NUM_REQUESTS * NUM_TOKENS
    for tp in (2, 3, 4):
        for found, expected in zip(answers(tp, dtype), right, strict=True):
            assert found.token_ids == expected.token_ids, f"on {tp} ranks"
            assert found.logprobs == expected.logprobs, f"on {tp} ranks"
