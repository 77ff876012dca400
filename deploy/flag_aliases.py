"""What vLLM and SGLang call the flags of `topwork serve`, and why some of theirs are refused.

One table: the command line takes its names from here, unknown keys of a file are explained from
here, and docs/flags.md is made from it. It knows neither of the three.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

VLLM, SGLANG, BOTH = "vLLM", "SGLang", "vLLM, SGLang"
# How a value is written where ours is written otherwise.
Form = Literal["as ours", "GiB", "vLLM bytes", "vLLM adapters", "SGLang adapters"]


@dataclass(frozen=True, slots=True)
class Alias:
    """One name of a flag: it sets a key of ours, or nothing is needed for it, or it is refused."""

    name: str  # as it is typed: --tp-size
    servers: str  # whose it is
    key: str | None = None  # of ServeConfig: what it sets; if it is refused, what to use instead
    why: str = ""  # nothing is needed, or it is refused; else what differs
    is_refused: bool = False
    takes_value: bool = True
    form: Form = "as ours"
    sets: bool | None = None  # what a switch makes of `key`
    negation: str | None = None  # the name that makes the opposite of it
    neutral: tuple[str, ...] = ()  # values of a refused flag that ask for nothing

    @property
    def takes_many(self) -> bool:
        """Whether several values may follow the name, as argparse reads them."""
        return self.form in ("vLLM adapters", "SGLang adapters")


def _key(name: str, key: str, servers: str, form: Form = "as ours", why: str = "") -> Alias:
    return Alias(name, servers, key, why, form=form)


def _switch(name: str, key: str, value: bool, servers: str, negation: str | None = None) -> Alias:
    return Alias(name, servers, key, takes_value=False, sets=value, negation=negation)


def _needless(name: str, servers: str, why: str, takes_value: bool = False) -> Alias:
    return Alias(name, servers, why=why, takes_value=takes_value)


def _refused(
    name: str, servers: str, why: str, use: str | None = None, neutral: tuple[str, ...] = ()
) -> Alias:
    return Alias(name, servers, use, why, is_refused=True, neutral=neutral)


def _no_switch(name: str, servers: str, why: str, use: str | None = None) -> Alias:
    return Alias(name, servers, use, why, is_refused=True, takes_value=False)


_SHARE = "give the share of all that is in use, with what steps and graphs take"
_COUNT = "adapters differ in size: give bytes"
_TASK = "config.json says what a model does, and embeddings are served of any"
_NO_SEED = "each request without a `seed` draws one: give `seed` in requests"
_NO_FORMAT = "forms are followed by llguidance, which has nothing to choose"
_NO_SPECULATION = "there is no speculative decoding"
_TEMPLATE = "the template is the model's own: change its chat_template.jinja"
_KEY = (
    "everyone on a machine sees its command lines: write `- {key: ..., tenant: me, "
    'adapters: "*", admin: true}` into a file that only you may read'
)
_CORS = (
    "no CORS headers are sent: let a proxy add them; --allowed-origin lets pages ask a server "
    "without keys"
)
_LOGS = "calls are logged only where request_log says so"
_LOG_TARGET = "say where to, - for standard error; prompts are left out"
_STEPS = "how steps are run is not chosen by hand"
_RAY = "Ray places every process: start a Ray cluster on the nodes"

ALIASES = (
    # What another name means the same for.
    _key("--model-path", "model", SGLANG),
    _key("--tensor-parallel-size", "tp", BOTH),
    _key("-tp", "tp", VLLM),
    _key("--tp-size", "tp", SGLANG),
    _key("--data-parallel-size", "replicas", BOTH),
    _key("-dp", "replicas", VLLM),
    _key("--dp-size", "replicas", SGLANG),
    _key("--dp", "replicas", SGLANG),
    _key("--context-length", "max_model_len", SGLANG),
    _key("--max-running-requests", "max_num_seqs", SGLANG),
    _key("--max-queued-requests", "max_waiting", SGLANG),
    _key("-q", "quantization", VLLM),
    _key("--block-size", "page_size", VLLM),
    _key("--kv-cache-memory-bytes", "kv_cache_memory", VLLM, "vLLM bytes"),
    _key("--swap-space", "kv_host_memory", VLLM, "GiB"),
    _key("--api-server-count", "routers", VLLM),
    _key("--lora-modules", "adapter", VLLM, "vLLM adapters"),
    _key("--lora-paths", "adapter", SGLANG, "SGLang adapters"),
    _key("--ssl-certfile", "tls_cert", BOTH),
    _key("--ssl-keyfile", "tls_key", BOTH),
    _key("--max-loras-per-batch", "max_loras", SGLANG, why="there the base model takes one"),
    _switch("--enable-prefix-caching", "prefix_cache", True, VLLM, "--no-enable-prefix-caching"),
    _switch("--disable-radix-cache", "prefix_cache", False, SGLANG),
    _switch("--enable-deterministic-inference", "deterministic", True, SGLANG),
    # What is so without being asked for.
    _needless("--enable-lora", BOTH, "adapters are always served"),
    _needless("--lora-target-modules", SGLANG, "each adapter says which it has", takes_value=True),
    _needless("--enable-lora-overlap-loading", SGLANG, "loads always run beside steps"),
    _needless("--enable-chunked-prefill", VLLM, "prefills are always chunked"),
    _needless("--enable-cache-report", SGLANG, "usage always tells cached tokens"),
    _needless("--enable-request-id-headers", VLLM, "answers always have X-Request-Id"),
    _needless("--enable-metrics", SGLANG, "/metrics is always there"),
    _needless("--enable-trace", SGLANG, "calls are traced if there is an otlp_traces_endpoint"),
    _needless(
        "--collect-detailed-traces", VLLM, "all that is measured is in the traces", takes_value=True
    ),
    _needless("--enable-priority-scheduling", SGLANG, "`priority` always counts, smaller first"),
    _needless("--enable-auto-tool-choice", VLLM, "tools are served wherever a model knows them"),
    _needless("--disable-log-requests", VLLM, _LOGS),
    _needless("--no-enable-log-requests", VLLM, _LOGS),
    _needless("--disable-log-stats", VLLM, "nothing is logged that /metrics tells"),
    _needless("--trust-remote-code", BOTH, "no code of a model is ever run, whatever is trusted"),
    # What cannot be had so.
    _refused("--mem-fraction-static", SGLANG, _SHARE, "gpu_memory_utilization"),
    _refused("--max-total-tokens", SGLANG, "give bytes", "kv_cache_memory"),
    _refused("--num-gpu-blocks-override", VLLM, "give bytes", "kv_cache_memory"),
    _refused("--kv-offloading-size", VLLM, "give bytes of each rank", "kv_host_memory"),
    _no_switch("--enable-hierarchical-cache", SGLANG, "give bytes", "kv_host_memory"),
    _refused("--hicache-size", SGLANG, "give bytes of each rank", "kv_host_memory"),
    _refused("--cpu-offload-gb", VLLM, "weights stay on the device", neutral=("0",)),
    _refused("--max-cpu-loras", VLLM, _COUNT, "host_adapter_memory"),
    _refused("--max-loaded-loras", SGLANG, _COUNT, "host_adapter_memory"),
    _refused("--chunked-prefill-size", SGLANG, "decodes count too", "max_num_batched_tokens"),
    _refused("--max-prefill-tokens", SGLANG, "decodes count too", "max_num_batched_tokens"),
    _no_switch("--no-enable-chunked-prefill", VLLM, "prefills are always chunked"),
    _refused(
        "--scheduling-policy", VLLM, "say --no-fairness for first come", neutral=("priority",)
    ),
    _refused("--schedule-policy", SGLANG, "say --no-fairness for first come"),
    _refused("--lora-backend", SGLANG, "kernels are chosen by device"),
    _refused("--lora-eviction-policy", SGLANG, "the least recently used goes", neutral=("lru",)),
    _no_switch("--fully-sharded-loras", VLLM, "A and B are cut in one way only"),
    _refused("--api-key", BOTH, _KEY, "api_key_file"),
    _refused("--admin-api-key", SGLANG, _KEY, "api_key_file"),
    _refused("--root-path", VLLM, "routes have no prefix: let the proxy take it off"),
    _refused("--uds", VLLM, "HTTP is served on an address only", "host"),
    _refused("--allowed-origins", VLLM, _CORS),
    _refused("--pipeline-parallel-size", BOTH, "there is no pipeline", "tp", ("1",)),
    _refused("-pp", VLLM, "there is no pipeline", "tp", ("1",)),
    _refused("--pp-size", SGLANG, "there is no pipeline", "tp", ("1",)),
    _no_switch("--enable-expert-parallel", VLLM, "ranks share each expert"),
    _refused("--distributed-executor-backend", VLLM, "Ray places every process", neutral=("ray",)),
    _refused("--nnodes", BOTH, _RAY, "ray_address", ("1",)),
    _refused("--node-rank", BOTH, _RAY, "ray_address", ("0",)),
    _refused("--dist-init-addr", SGLANG, _RAY, "ray_address"),
    _refused("--seed", VLLM, _NO_SEED),
    _refused("--random-seed", SGLANG, _NO_SEED),
    _refused("--load-format", BOTH, "weights are safetensors", neutral=("auto", "safetensors")),
    _refused("--tokenizer", VLLM, "the tokenizer is the model's: put it into its directory"),
    _refused("--tokenizer-path", SGLANG, "the tokenizer is the model's: put it into its directory"),
    _refused("--tokenizer-mode", BOTH, "there is one way only", neutral=("auto",)),
    _refused("--download-dir", BOTH, "the hub's cache is where HF_HOME says"),
    _refused("--hf-overrides", VLLM, "change the model's config.json"),
    _refused("--json-model-override-args", SGLANG, "change the model's config.json"),
    _refused("--chat-template", BOTH, _TEMPLATE),
    _refused("--sampling-defaults", SGLANG, "say vllm for openai", "generation_config", ("model",)),
    _refused("--max-logprobs", VLLM, "20 at most", neutral=("20",)),
    _refused("--structured-outputs-config", VLLM, _NO_FORMAT),
    _refused("--guided-decoding-backend", VLLM, _NO_FORMAT),
    _refused("--grammar-backend", SGLANG, _NO_FORMAT),
    _refused("--speculative-config", VLLM, _NO_SPECULATION),
    _refused("--speculative-algorithm", SGLANG, _NO_SPECULATION),
    _refused("--limit-mm-per-prompt", VLLM, "models of text only"),
    _refused("--runner", VLLM, _TASK, neutral=("auto", "generate", "pooling")),
    _refused("--task", VLLM, _TASK, neutral=("auto", "generate", "embed", "classify", "score")),
    _no_switch("--is-embedding", SGLANG, _TASK),
    _refused("--kv-transfer-config", VLLM, "prefill and decode are not separated"),
    _refused("--disaggregation-mode", SGLANG, "they are not separated", neutral=("null",)),
    _refused("--kv-events-config", BOTH, "give the endpoint", "kv_events_endpoint"),
    _no_switch("--enforce-eager", VLLM, _STEPS),
    _no_switch("--disable-cuda-graph", SGLANG, _STEPS),
    _refused("--compilation-config", VLLM, _STEPS),
    _refused("--attention-backend", BOTH, "kernels are chosen by device"),
    _no_switch("--enable-log-requests", VLLM, _LOG_TARGET, "request_log"),
    _no_switch("--log-requests", SGLANG, _LOG_TARGET, "request_log"),
)

# Ours under the same name and with the same meaning; `host` and `port` have other defaults there.
SAME: Mapping[str, str] = MappingProxyType(
    {
        "model": BOTH,
        "served_model_name": BOTH,
        "tp": SGLANG,
        "dtype": BOTH,
        "quantization": BOTH,
        "device": SGLANG,
        "host": BOTH,
        "port": BOTH,
        "max_model_len": VLLM,
        "max_num_seqs": VLLM,
        "gpu_memory_utilization": VLLM,
        "max_num_batched_tokens": VLLM,
        "page_size": SGLANG,
        "max_loras": VLLM,
        "max_lora_rank": BOTH,
        "lora_dtype": VLLM,
        "generation_config": VLLM,
        "override_generation_config": VLLM,
        "trust_request_chat_template": VLLM,
        "log_level": SGLANG,
        "otlp_traces_endpoint": BOTH,
    }
)

# Words of theirs for values of ours.
WORDS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("dtype", "float"): "float32",
        **{("log_level", word.lower()): word for word in ("DEBUG", "INFO", "WARNING", "ERROR")},
    }
)

BY_NAME: Mapping[str, Alias] = MappingProxyType({one.name: one for one in ALIASES})
_BY_KEY_NAME = MappingProxyType({name.lstrip("-").replace("-", "_"): name for name in BY_NAME})


def alias_like(key: str) -> Alias | None:
    """Return the alias that a key of a file is called like: `tensor_parallel_size`."""
    name = _BY_KEY_NAME.get(key.strip().lstrip("-").lower().replace("-", "_"))
    return BY_NAME[name] if name is not None else None


def key_names() -> dict[str, str]:
    """Return what a file's keys may be called elsewhere, with the key of ours to use."""
    return {word: key for word, name in _BY_KEY_NAME.items() if (key := BY_NAME[name].key)}


def flag_of(key: str) -> str:
    """Return the flag of a key of ServeConfig."""
    return f"--{key.replace('_', '-')}"


def others_of(key: str) -> list[str]:
    """Return the names of a flag at others that set it, for its help."""
    return [
        one.name for one in ALIASES if one.key == key and not one.is_refused and one.takes_value
    ]
