"""POST /v1/embeddings over a scripted scheduler: inputs, forms of vectors, refusals."""

import base64
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import ErrorInfo
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

Serve = Callable[..., Serving]


@pytest.fixture
def make(serve: Serve, model_dir: Path, tmp_path: Path) -> Serve:
    """Serves a model whose directory says how it pools."""

    def start(
        *schedulers: FakeScheduler,
        config: dict[str, Any] | None = None,
        modules: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Serving:
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        (directory / "config.json").write_text(json.dumps({"hidden_size": 3, **(config or {})}))
        for name, content in (modules or {}).items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(json.dumps(content))
        fakes = schedulers or (FakeScheduler(),)
        return serve(*fakes, model_dir=str(directory), **changes)

    return start


def sentence_transformer(mode: str, *more: str) -> dict[str, Any]:
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", "1_Pooling", *(f"{i}_{kind}" for i, kind in enumerate(more, 2))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    pooling = {"word_embedding_dimension": 3, "pooling_mode_cls_token": False}
    return {"modules.json": modules, "1_Pooling/config.json": pooling | {mode: True}}


def post(serving: Serving, **body: Any) -> httpx.Response:
    body = {"model": "tiny", **body}
    return httpx.post(f"{serving.url}/v1/embeddings", json=body, timeout=PATIENCE)


def vectors(reply: httpx.Response) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def normalised(*numbers: float) -> list[float]:
    norm = sum(number**2 for number in numbers) ** 0.5
    return [pytest.approx(number / norm, rel=1e-6) for number in numbers]


def test_texts_and_token_ids_are_prompts_of_one_call_in_order(
    make: Serve, tokenizer: Tokenizer
) -> None:
    serving = make()
    hello = tokenizer.encode("hello", True)
    assert vectors(post(serving, input="hello")) == [
        normalised(len(hello), hello[0], hello[-1]),
    ]
    assert vectors(post(serving, input=[5, 6, 7])) == [normalised(3, 5, 7)]
    assert vectors(post(serving, input=[[5, 6, 7], [8]])) == [
        normalised(3, 5, 7),
        normalised(1, 8, 8),
    ]
    reply = post(serving, input=["hello", "hello"]).json()
    assert reply["object"] == "list" and reply["model"] == "tiny"
    count = 2 * len(hello)
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (count, count)


def test_the_openai_client_reads_vectors_as_numbers_and_as_base64(make: Serve) -> None:
    client = make().client()
    by_default = client.embeddings.create(model="tiny", input=[5, 6, 7])
    numbers = client.embeddings.create(model="tiny", input=[5, 6, 7], encoding_format="float")
    assert by_default.data[0].embedding == pytest.approx(numbers.data[0].embedding)
    raw = client.embeddings.with_raw_response.create(
        model="tiny", input=[5, 6, 7], encoding_format="base64"
    )
    packed = json.loads(raw.text)["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == by_default.data[0].embedding


def test_two_thousand_inputs_are_one_call_and_come_in_waves(make: Serve) -> None:
    fake = FakeScheduler()
    serving = make(fake, max_in_flight=64)
    inputs = [[number % 300, 7] for number in range(2048)]
    assert vectors(post(serving, input=inputs, normalize=False)) == [
        [2.0, float(number % 300), 7.0] for number in range(2048)
    ]
    assert post(serving, input=[*inputs, [1]]).status_code == 400


def test_pooling_is_what_the_models_own_files_say(make: Serve) -> None:
    fake = FakeScheduler()
    serving = make(fake, modules=sentence_transformer("pooling_mode_mean_tokens"))
    assert vectors(post(serving, input=[5, 6])) == [[2.0, 5.0, 6.0]]
    assert [request.sampling.pooling for request in fake.submitted] == ["mean"]


def test_a_model_without_files_for_it_gives_its_last_token_normalised(make: Serve) -> None:
    fake = FakeScheduler()
    serving = make(fake)
    assert vectors(post(serving, input=[5, 6])) == [normalised(2, 5, 6)]
    assert [request.sampling.pooling for request in fake.submitted] == ["last"]


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (sentence_transformer("pooling_mode_cls_token"), "pools by pooling_mode_cls_token"),
        (sentence_transformer("pooling_mode_lasttoken", "Dense"), "'Dense', which is not served"),
        ({"modules.json": {"a": 1}}, "no list of modules"),
        ({"modules.json": [{"type": "Pooling", "path": "../.."}]}, "out of its directory"),
    ],
)
def test_pooling_that_is_not_served_is_refused_with_its_name(
    make: Serve, modules: dict[str, Any], reason: str
) -> None:
    reply = post(make(modules=modules), input="hello")
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


def test_vectors_are_cut_where_the_model_was_made_for_it_and_normalised_behind_that(
    make: Serve,
) -> None:
    serving = make(config={"matryoshka_dimensions": [2]})
    assert vectors(post(serving, input=[5, 6], dimensions=2)) == [normalised(2, 5)]
    assert vectors(post(serving, input=[5, 6], dimensions=2, use_activation=False)) == [[2.0, 5.0]]
    assert vectors(post(serving, input=[5, 6], dimensions=3)) == [normalised(2, 5, 6)]
    reply = post(serving, input=[5, 6], dimensions=1)
    assert "1 is none of this model's: 2" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "1 to 2048"),
        ({"input": {}}, "input", "must be a string"),
        ({"input": [[1], "a", 2]}, "input", "must be a string"),
        ({"input": [400]}, "input", "out of vocabulary"),
        ({"input": [1] * 257}, "prompt", "context length is 256"),
        ({"input": "a", "dimensions": 2}, "dimensions", "is_matryoshka"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float', 'base64'"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "numbers in JSON"),
        ({"input": ["a"] * 33, "encoding_format": "bytes"}, "encoding_format", "at most 32"),
        ({"input": "a", "padding": "max_length"}, "padding", "not supported"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "input", "leaves nothing"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "over 256"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "either it or"),
        ({}, "input", "either it or"),
        ({"input": "a", "colour": 1}, "colour", "not a known parameter"),
    ],
)
def test_mistakes_are_refused_with_the_parameter(
    make: Serve, body: dict[str, Any], param: str, reason: str
) -> None:
    reply = post(make(), **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], reason in error["message"]) == (param, True), error


def test_inputs_that_are_too_long_can_be_cut_from_the_front(make: Serve) -> None:
    serving = make()
    long = [*range(300)]
    cut = vectors(post(serving, input=long, truncate_prompt_tokens=-1, normalize=False))
    assert cut == [[256.0, 44.0, 299.0]]
    cut = vectors(post(serving, input=[long], truncate_prompt_tokens=2, normalize=False))
    assert cut == [[2.0, 298.0, 299.0]]
    right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert vectors(post(serving, input=[long], normalize=False, **right)) == [[2.0, 0.0, 1.0]]


def test_a_conversation_is_embedded_as_its_template_renders_it(
    make: Serve, tokenizer: Tokenizer
) -> None:
    serving = make()
    talk = [{"role": "user", "content": "hello"}]
    for opens in (False, True):
        body = {"messages": talk, "add_generation_prompt": opens, "normalize": False}
        text = "<|im_start|>user\nhello<|im_end|>\n" + "<|im_start|>assistant\n" * opens
        tokens = tokenizer.encode(text, False)
        assert vectors(post(serving, **body)) == [[float(len(tokens)), tokens[0], tokens[-1]]]
        assert post(serving, **body).json()["usage"] == {
            "prompt_tokens": len(tokens),
            "total_tokens": len(tokens),
            "completion_tokens": 0,
        }


def test_plain_bytes_hold_the_same_numbers_and_a_header_says_what_is_where(make: Serve) -> None:
    serving = make()
    body = {"input": [[5, 6], [7, 8, 9]], "embed_dtype": "float16", "endianness": "big"}
    reply = post(serving, encoding_format="bytes", **body)
    assert reply.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(reply.headers["metadata"])
    assert (metadata["model"], metadata["usage"]["prompt_tokens"]) == ("tiny", 5)
    for number, item in enumerate(metadata["data"]):
        assert (item["index"], item["shape"], item["embed_dtype"]) == (number, [3], "float16")
        found = struct.unpack(">3e", reply.content[item["start"] : item["end"]])
        expected = vectors(post(serving, input=body["input"]))[number]
        assert found == pytest.approx(expected, rel=1e-3)
    bare = post(serving, encoding_format="bytes_only", **body)
    assert (bare.content, "metadata" in bare.headers) == (reply.content, False)
    (coded, _) = vectors(post(serving, encoding_format="base64", **body))
    assert base64.b64decode(coded) == reply.content[:6]


def test_an_error_of_the_scheduler_is_the_answer_and_leaves_nothing_running(make: Serve) -> None:
    error = ErrorInfo("InvalidRequest", "no", param="prompt")
    fake = FakeScheduler(lambda request: Script(tokens=(), error=error))
    serving = make(fake)
    reply = post(serving, input=["a", "b"])
    assert reply.status_code == 400
    assert serving.router.num_in_flight == 0
