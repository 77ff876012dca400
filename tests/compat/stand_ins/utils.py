"""What vLLM's tests find as `tests.utils`: its server is ours, with the demo model.

One server runs at a time. The next test that asks for one like it gets the same; what it asks for
are flags by vLLM's names, of which some are left out (`servers` says which, and why).
"""

import hashlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import requests
from servers import DROPPED, DROPPED_SWITCHES, HARNESS, LONGEST, SHORT

VLLM_PATH = Path(os.environ["COMPAT_SOURCE"])
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
MODELS = Path(os.environ["COMPAT_RUN"])  # relative names of models are found here
STARTING = 600  # seconds


class _Running:
    """The one server that runs."""

    signature: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    port = 0

    def require(self, signature: tuple[str, ...]) -> int:
        """Return the port of a server with these flags."""
        if self.process is None or signature != self.signature or self.process.poll() is not None:
            self.stop()
            self._start(signature)
        return self.port

    def _start(self, signature: tuple[str, ...]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        log = MODELS / "servers" / f"{self.port}.log"
        log.parent.mkdir(exist_ok=True)
        command = [os.environ["COMPAT_TOPWORK"], "serve", *signature, "--port", str(self.port)]
        with log.open("wb") as output:
            output.write((" ".join(command) + "\n").encode())
            output.flush()
            self.process = subprocess.Popen(
                command, cwd=MODELS, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.signature = signature
        end = time.monotonic() + STARTING
        while not self._answers():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"the server did not start: {log.read_text()[-1500:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).ok
        except requests.RequestException:
            return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(120)
            self.process = None


RUNNING = _Running()


def model_dir(model: str, template: str | None) -> str:
    """Return the demo model's directory, or one beside it with another chat template."""
    if template is None:
        return model
    text = Path(template).read_text() if template.endswith(".jinja") else template
    folder = MODELS / "models" / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for file in Path(os.environ["COMPAT_MODEL"]).iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").write_text(text)
    return str(folder)


def template_of(args: list[str]) -> str | None:
    """Return the chat template that a test asks for, or that its model must have."""
    if "--chat-template" in args:
        return args[args.index("--chat-template") + 1]
    if {"--tool-call-parser", "--reasoning-parser"} & set(args):
        return str(MODELS / "tools.jinja")
    return None


def context_length(wanted: int) -> int:
    """Return the length that a server has: short ones as they are, others one of two."""
    return wanted if wanted < 1024 else SHORT if wanted <= 5000 else LONGEST


def flags_of(args: list[str]) -> tuple[str, ...]:
    """Return the flags that are passed on, each as one word or as a word and a value."""
    kept: list[str] = []
    rest = list(args)
    while rest:
        flag, _, value = rest.pop(0).partition("=")
        flag = flag.replace("_", "-")
        if flag in DROPPED_SWITCHES:
            continue
        given = [value] if value else []
        while rest and not rest[0].startswith("-"):
            given.append(rest.pop(0))
        if flag == "--max-model-len":
            given = [str(context_length(int(given[0])))]
        if flag not in DROPPED:
            kept += [flag, *given]
    length = () if "--max-model-len" in kept else ("--max-model-len", str(SHORT))
    # vLLM has it only where it is asked for, and its tests know which.
    details = (
        () if "--enable-prompt-tokens-details" in kept else ("--no-enable-prompt-tokens-details",)
    )
    return (*length, *kept, *details)


class RemoteVLLMServer:
    """vLLM's helper of this name, as far as its tests of HTTP use it."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: Any = None, **_: Any
    ) -> None:
        named = () if "--served-model-name" in vllm_serve_args else ("--served-model-name", model)
        served = model_dir(model, template_of(vllm_serve_args))
        self.port = RUNNING.require((served, *named, *flags_of(vllm_serve_args), *HARNESS))
        self.host = "127.0.0.1"

    def __enter__(self) -> "RemoteVLLMServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass  # the next test may want it

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/" + "/".join(part.strip("/") for part in parts if part)

    def _client(self, kind: type, base: str, options: dict[str, Any]) -> Any:
        settings = {"timeout": 600, "max_retries": 0, "api_key": self.DUMMY_API_KEY, **options}
        return kind(base_url=base, **settings)

    def get_client(self, **options: Any) -> Any:
        return self._client(openai.OpenAI, self.url_for("v1"), options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client(anthropic.Anthropic, self.url_root, options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client(anthropic.AsyncAnthropic, self.url_root, options)


class RemoteOpenAIServer(RemoteVLLMServer):
    """Likewise."""
