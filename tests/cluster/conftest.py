"""A tiny tokenizer, and a router served to real clients on this host."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from cluster.api.app import create_app
from cluster.router.config import RouterConfig
from cluster.router.router import Router
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.tokenizer import Tokenizer
from tests.patience import PATIENCE
from tests.quick_server import QuickServer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, hello world"] * 2, trainer
    )
    directory = tmp_path_factory.mktemp("model")
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


class Serving:
    """A router, its fakes and an HTTP server in a loop of their own, in a thread."""

    def __init__(self, config: RouterConfig, schedulers: list[FakeScheduler]) -> None:
        self.schedulers = schedulers
        self._clients: list[openai.OpenAI] = []
        self.backend = FakeBackend()
        self.router = Router(config, self.backend)
        self.loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = QuickServer(
            uvicorn.Config(create_app(self.router), log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def stop(self) -> None:
        for client in self._clients:  # the collector would find their sockets open
            client.close()
        self.loop.call_soon_threadsafe(self._server.end)
        self._serving.result(PATIENCE)
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()
        self._socket.close()

    def client(self, api_key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE
        )
        self._clients.append(client)
        return client

    async def _start(self) -> None:
        self.backend.addresses = tuple([await fake.start() for fake in self.schedulers])
        await self.router.replicas.refresh()
        await self.router.start()
        self._serving = asyncio.run_coroutine_threadsafe(
            self._server.serve([self._socket]), self.loop
        )

    async def _close(self) -> None:
        await self.router.close()
        for fake in self.schedulers:
            await fake.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def servings(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*schedulers: FakeScheduler, **changes: Any) -> Serving:
        settings: dict[str, Any] = {
            "model_name": "tiny",
            "model_dir": str(model_dir),
            "context_length": 256,
            "vocab_size": tokenizer.num_tokens,
            "eos_token_ids": (EOS,),
            "version": "1.2.3",
            "refresh_interval": 0.05,
        }
        serving = Serving(RouterConfig(**(settings | changes)), list(schedulers))
        started.append(serving)
        serving.start()
        return serving

    yield start
    for serving in started:
        serving.stop()


@pytest.fixture
def serve(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Serving]]:
    """Return a function that serves given fake schedulers; keywords change the router's config."""
    yield from servings(model_dir, tokenizer)


@pytest.fixture(scope="module")
def serve_once(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Serving]]:
    """Return the same for servers that all tests of a module share."""
    yield from servings(model_dir, tokenizer)


@pytest.fixture
def saying(tokenizer: Tokenizer) -> Callable[..., tuple[int, ...]]:
    """Return a function from a text to the tokens of an answer that says it and ends."""

    def tokens(text: str, *, ends: bool = True) -> tuple[int, ...]:
        return tokenizer.encode(text, False) + ((EOS,) if ends else ())

    return tokens
