"""POST /v1/score and /v1/rerank over a scripted scheduler: pairs, heads, cosines, orders.

What the scheduler makes of a prompt is its length, its first token and its last.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.tokenizer import Tokenizer
from tests.cluster.api.routes.pooling.test_classify import load, message, post
from tests.cluster.conftest import Serving
from worker.classifier_config import ClassifierConfig

Serve = Callable[..., Serving]
ONE = ClassifierConfig(("LABEL_0",), "sigmoid")


@pytest.fixture
def make(serve: Serve, model_dir: Path, tmp_path: Path) -> Serve:
    """Serves a model that can be embedded, whose directory has more files if any are given."""

    def start(fake: FakeScheduler, files: dict[str, str] | None = None, **config: Any) -> Serving:
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        for name, content in {"config.json": '{"hidden_size": 3}', **(files or {})}.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(content)
        return serve(fake, model_dir=str(directory), **config)

    return start


def scores(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [(one["index"], one["object"]) for one in data] == [
        (index, "score") for index in range(len(data))
    ]
    return [one["score"] for one in data]


def score(serving: Serving, **body: Any) -> httpx.Response:
    return post(serving, "/v1/score", **body)


def rerank(serving: Serving, **body: Any) -> httpx.Response:
    return post(serving, "/v1/rerank", **body)


def test_a_head_reads_a_pair_as_one_prompt_and_scores_it(make: Serve, tokenizer: Tokenizer) -> None:
    fake = FakeScheduler()
    serving = make(fake, classifier=ONE)
    bare = scores(score(serving, text_1="hello", text_2=["a", "hello a"], use_activation=False))
    pairs = [tokenizer.encode("hello", True, text) for text in ("a", "hello a")]
    assert [request.token_ids for request in fake.submitted] == pairs
    assert [request.sampling.pooling for request in fake.submitted] == ["classify"] * 2
    assert bare == [float(len(pair)) for pair in pairs]
    wanted = [1 / (1 + math.exp(-number)) for number in bare]
    reply = score(serving, text_1="hello", text_2=["a", "hello a"])
    assert scores(reply) == pytest.approx(wanted)
    assert reply.json()["usage"]["total_tokens"] == sum(map(len, pairs))


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_texts_are_scored_in_pairs_by_any_of_their_names(
    make: Serve, tokenizer: Tokenizer, names: tuple[str, str]
) -> None:
    fake = FakeScheduler()
    serving = make(fake, classifier=ONE)
    scores(post(serving, "/score", **dict(zip(names, (["a", "bb"], ["ccc", "d"]), strict=True))))
    assert [request.token_ids for request in fake.submitted] == [
        tokenizer.encode("a", True, "ccc"),
        tokenizer.encode("bb", True, "d"),
    ]


def test_a_model_without_a_head_scores_by_the_cosine_of_its_embeddings(
    make: Serve, tokenizer: Tokenizer
) -> None:
    fake = FakeScheduler()
    serving = make(fake)
    found = scores(score(serving, text_1="hello", text_2=["a", "hello", "a"]))

    def vector(text: str) -> tuple[float, ...]:
        tokens = tokenizer.encode(text, True)
        return len(tokens), tokens[0], tokens[-1]

    one, other = vector("hello"), vector("a")
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    cosine = dot / math.hypot(*one) / math.hypot(*other)
    assert found == pytest.approx([cosine, 1.0, cosine])
    assert [request.sampling.pooling for request in fake.submitted] == ["last"] * 2  # each once


def test_an_adapters_head_scores_or_is_refused_if_it_has_more_labels(make: Serve) -> None:
    serving = make(FakeScheduler())
    load(serving, "reranker")
    load(serving, "classifier")
    body = {"text_1": "a", "text_2": "b", "use_activation": False}
    assert scores(score(serving, model="reranker", **body))[0] > 1  # a length, and no cosine
    reply = score(serving, model="classifier", **body)
    assert "has a head of 3 labels, and a score is that of a single one" in message(reply)


def test_the_scores_activation_is_what_sentence_transformers_says(make: Serve) -> None:
    head = ClassifierConfig(("LABEL_0",), "sigmoid", "identity")
    assert scores(score(make(FakeScheduler(), classifier=head), text_1="a", text_2="b"))[0] > 1


def test_a_template_named_score_puts_pairs_together(make: Serve, tokenizer: Tokenizer) -> None:
    fake = FakeScheduler()
    turn = "{{ m['role'] }}={{ m['content'] }};"
    files = {
        "chat_template.jinja": "a",
        "additional_chat_templates/score.jinja": "{% for m in messages %}" + turn + "{% endfor %}",
    }
    scores(score(make(fake, files, classifier=ONE), text_1="x", text_2="y"))
    assert fake.submitted[0].token_ids == tokenizer.encode("query=x;document=y;", True)


def test_documents_come_back_best_first_and_as_many_as_are_wanted(make: Serve) -> None:
    serving = make(FakeScheduler(), classifier=ONE)
    documents = ["a", "a much longer one", "a bit"]
    body = {"query": "q", "documents": documents, "use_activation": False}
    reply = rerank(serving, **body)
    assert reply.status_code == 200, reply.text
    results = reply.json()["results"]
    assert [one["index"] for one in results] == [1, 2, 0]
    assert [one["document"] for one in results] == [{"text": documents[i]} for i in (1, 2, 0)]
    found = [one["relevance_score"] for one in results]
    assert found == sorted(found, reverse=True)
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(found)
    for path in ("/rerank", "/v2/rerank"):
        some = post(serving, path, **body, top_n=2, return_documents=False).json()["results"]
        assert some == [
            {"index": i, "relevance_score": one} for i, one in zip((1, 2), found, strict=False)
        ]
    objects = [{"text": text} for text in documents]
    assert rerank(serving, **{**body, "documents": objects}).json()["results"] == results


def test_equal_documents_keep_their_order(make: Serve) -> None:
    reply = rerank(make(FakeScheduler(), classifier=ONE), query="q", documents=["b", "a", "b"])
    assert [one["index"] for one in reply.json()["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "text_1", "it and text_2 must be given"),
        ({"text_1": "a"}, "text_1", "it and text_2 must be given"),
        ({"text_1": "a", "documents": "b"}, "text_1", "it and text_2 must be given"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1", "it and text_2 must be given"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", "as many as text_2 has, 1, not 2"),
        ({"text_1": "a", "text_2": []}, "text_2", "1 to 2048 texts"),
        ({"text_1": "a", "text_2": [""]}, "text_2", "must not be empty"),
        ({"text_1": "a", "text_2": [5]}, "text_2", "a string or a list of strings"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2", "a string or a list of strings"),
        ({"text_1": "a", "text_2": "b " * 300}, "prompt", "context length is 256"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}, "max_tokens_per_doc", "is not"),
    ],
)
def test_mistakes_are_refused_with_the_parameter(
    make: Serve, body: dict[str, Any], param: str, reason: str
) -> None:
    reply = score(make(FakeScheduler(), classifier=ONE), **body)
    assert reason in message(reply) and reply.json()["error"]["param"] == param


def test_a_long_text_before_many_is_refused_before_it_is_cut_into_tokens(make: Serve) -> None:
    serving = make(FakeScheduler(), classifier=ONE)
    body = {"text_1": "a" * 20_000, "text_2": ["b"] * 1000, "truncate_prompt_tokens": 5}
    assert "the pairs have 20001000 characters" in message(score(serving, **body))


def test_a_model_with_neither_head_nor_embeddings_is_refused(make: Serve) -> None:
    modules = json.dumps({"a": 1})
    reply = score(make(FakeScheduler(), {"modules.json": modules}), text_1="a", text_2="b")
    assert "no classification head to score by, and no embeddings" in message(reply)
