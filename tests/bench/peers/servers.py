"""How each one that is measured is started, and how it is asked.

Owns command lines and environments of servers.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.bench.child import inherited_environment
from deploy.bench.engine_target import EngineProcess
from deploy.bench.http_target import OPENAI, BenchError, Count, Dialect, HttpTarget
from deploy.bench.peft_target import PeftTarget
from deploy.bench.workload import Ask
from kernels.quantized import QuantizationMethod
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.peers.environments import PEERS_DIR, log_tail
from tests.bench.peers.gguf import UNQUANTIZED, gguf_adapter, gguf_model
from tests.bench.peers.install import PEFT_PYTHON, VLLM_BINARIES
from tests.bench.peers.llama_source import BINARIES, SERVER
from tests.bench.peers.target import Target, child, http, wait_until_healthy
from tests.bench.process_tree import ProcessTree
from tests.ports import free_port
from worker.lora.adapter_bank import LoraDtype

MAX_MODEL_LEN = 8192
MAX_SEQUENCES = 16
MAX_LORA_RANK = 64
START_TIMEOUT = 600.0  # seconds: vLLM compiles for a minute, and longer the first time
STOP_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all of them serve, and how Topwork does."""

    model_dir: Path
    adapters: dict[str, Path]
    tp: int  # ours
    rank_threads: int  # ours
    quantization: QuantizationMethod | None = None  # ours
    lora_dtype: LoraDtype = "auto"  # ours


def open_topwork(
    name: str, setup: Setup, adapters: Mapping[str, Path]
) -> AbstractContextManager[Target]:
    """Start our server; without adapters no flag speaks of them."""
    flags = ["--tp", str(setup.tp), "--threads-per-rank", str(setup.rank_threads)]
    if setup.quantization is not None:
        flags += ["--quantization", setup.quantization]
    if setup.lora_dtype != "auto":
        flags += ["--lora-dtype", setup.lora_dtype]
    for adapter, directory in adapters.items():
        flags += ["--adapter", f"{adapter}={directory}"]

    @contextmanager
    def opened() -> Iterator[Target]:
        with BenchServer(name, setup.model_dir, *flags) as server:
            yield http(name, HttpTarget(server.url), server.pid, server.url)

    return opened()


def open_engine(name: str, setup: Setup) -> AbstractContextManager[Target]:
    """Start our engine in one plain process, with all adapters."""
    return child(
        name,
        EngineProcess(
            setup.model_dir,
            BASE,
            {adapter: str(directory) for adapter, directory in setup.adapters.items()},
            setup.tp,
            "bfloat16",
            setup.rank_threads,
            setup.quantization,
            setup.lora_dtype,
            log=_log(name),
        ),
    )


def open_peft(
    name: str, setup: Setup, adapters: Mapping[str, Path], threads: int
) -> AbstractContextManager[Target]:
    """Start transformers + peft, which answers static batches."""
    directories = {adapter: str(directory) for adapter, directory in adapters.items()}
    return child(
        name,
        PeftTarget(setup.model_dir, BASE, directories, threads, str(PEFT_PYTHON), log=_log(name)),
    )


def open_vllm(
    name: str, setup: Setup, adapters: Mapping[str, Path], threads: int
) -> AbstractContextManager[Target]:
    """Start vLLM; without adapters it compiles its model, with them it does not."""
    port = free_port()
    command = [str(VLLM_BINARIES / "vllm"), "serve", str(setup.model_dir)]
    command += ["--served-model-name", BASE, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--max-num-seqs", str(MAX_SEQUENCES)]
    if adapters:
        command += ["--enable-lora", "--max-loras", str(len(adapters))]
        command += ["--max-lora-rank", str(MAX_LORA_RANK), "--lora-modules"]
        command += [f"{adapter}={directory}" for adapter, directory in adapters.items()]
    environment = {
        "PATH": f"{VLLM_BINARIES}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return _opened(name, command, environment, port, OPENAI)


def open_llama(
    name: str,
    setup: Setup,
    adapters: Mapping[str, Path],
    threads: int,
    *,
    weights: str = UNQUANTIZED,  # their format
    num_slots: int = MAX_SEQUENCES,
    context: int = 32768,  # tokens, shared out evenly among slots
) -> AbstractContextManager[Target]:
    """Start llama.cpp's server.

    Raises:
        InstallError: if model or adapters cannot be converted.
    """
    port = free_port()
    command = [str(SERVER), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-m", str(gguf_model(setup.model_dir, weights)), "-np", str(num_slots)]
    command += ["-t", str(threads), "-tb", str(threads), "-c", str(context)]
    if adapters:
        converted = [str(gguf_adapter(path, setup.model_dir)) for path in adapters.values()]
        command += ["--lora-init-without-apply", "--lora", ",".join(converted)]
    # The server was linked where it was compiled, which may have been elsewhere.
    environment = {"LD_LIBRARY_PATH": str(BINARIES)}
    return _opened(name, command, environment, port, LlamaDialect(tuple(adapters)))


class _LlamaChunk(msgspec.Struct):
    tokens_predicted: int | None = None


_llama_chunk_of = msgspec.json.Decoder(_LlamaChunk).decode


class LlamaDialect:
    """How llama.cpp is asked: adapters by their number, tokens as a running count."""

    path = "/completion"

    def __init__(self, adapters: tuple[str, ...]) -> None:
        self._adapters = adapters

    def body(self, ask: Ask) -> dict[str, object]:
        """Return a request for exactly so many tokens."""
        body: dict[str, object] = {
            "prompt": list(ask.token_ids),
            "n_predict": ask.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if ask.model in self._adapters:
            body["lora"] = [{"id": self._adapters.index(ask.model), "scale": 1.0}]
        return body

    def counter(self) -> Count:
        """Return what tells by how much the running count has grown."""
        seen = 0

        def count(data: bytes) -> int:
            nonlocal seen
            chunk = _llama_chunk_of(data)
            if chunk.tokens_predicted is None:
                raise BenchError(data.decode())
            before, seen = seen, chunk.tokens_predicted
            return max(0, seen - before)

        return count


@contextmanager
def _opened(
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    port: int,
    dialect: Dialect,
) -> Iterator[Target]:
    """Start a server of somebody else, wait until it is healthy, and end it after the block.

    Raises:
        BenchError: if it ends or takes too long, with the end of what it said.
    """
    log, url = _log(name), f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**inherited_environment(), **environment},
        )
    try:
        try:
            wait_until_healthy(name, f"{url}/health", START_TIMEOUT, lambda: process.poll() is None)
        except BenchError as error:
            raise BenchError(f"{error}; {log} ends:\n{log_tail(log)}") from error
        server = HttpTarget(url, label=name, dialect=dialect)
        yield http(name, server, process.pid, url)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree(process.pid)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT)
    tree.kill()  # all that is left
    process.wait()


def _log(name: str) -> Path:
    PEERS_DIR.mkdir(parents=True, exist_ok=True)
    return PEERS_DIR / f"{name.replace(' ', '-')}-server.log"
