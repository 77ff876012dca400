"""The one schema of what an operator may set: every key is a flag of `topwork serve` as well.

The same schema as JSON, for editors and for charts, is in config.schema.json.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.adapters.sources.allow_list import AllowList
from cluster.router.tenancy.oidc.addresses import check_oidc
from deploy.config_errors import ConfigError, explain, read_mapping
from deploy.config_values import (
    ByteCount,
    ByteCountOrZero,
    is_loopback,
    parse_hosts,
    parse_networks,
    parse_object,
    parse_origins,
)
from worker.pools import KVCacheDtype
from worker.weights.gguf.files import is_gguf, stem

__all__ = ["DEFAULT_TOKENS", "ConfigError", "ServeConfig", "json_schema", "load_config"]

# What `--quantization` of vLLM and SGLang may say.
FORMATS_OF_CHECKPOINTS = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "bitsandbytes", "compressed-tensors"),
    *("w8a8_int8", "w8a8_fp8", "mxfp4", "nvfp4", "modelopt", "gguf", "marlin", "torchao"),
)
DEFAULT_TOKENS = {"cpu": 256, "cuda": 512}  # in one step, by device


class ServeConfig(BaseModel):
    """Every option of `topwork serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(description="Directory, GGUF file or hub id of the base model.")]
    revision: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$",
            description="Branch, tag or commit of a hub id; default: its main branch as it is at "
            "the start.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Field(description="Name of the base model in the API; default: its last part.")
    ] = None
    tp: Annotated[int, Field(ge=1, description="Tensor-parallel size: ranks per scheduler.")] = 1
    adapter: Annotated[
        tuple[str, ...], Field(description="Adapter to load at start, as NAME=DIR; repeatable.")
    ] = ()
    adapter_dir: Annotated[
        tuple[str, ...],
        Field(description="Directory whose sub-directories are adapters by name; repeatable."),
    ] = ()
    adapter_root: Annotated[
        tuple[str, ...],
        Field(description="Only where load_lora_adapter may read; repeatable; default: anywhere."),
    ] = ()
    adapter_state: Annotated[
        Path | None,
        Field(
            description="File that keeps what calls do to adapters, and a drain, beyond the end of "
            "the server; default: kept while it runs."
        ),
    ] = None
    adapter_staging: Annotated[
        Path | None,
        Field(
            description="Folder of the pool for adapters that are uploaded or fetched; default: "
            "beside its state."
        ),
    ] = None
    usage_file: Annotated[
        Path | None,
        Field(
            description="File of the pool with a line of JSON for each tenant and day: requests "
            "and tokens; default: nobody writes it down."
        ),
    ] = None
    adapter_sources: Annotated[
        tuple[str, ...],
        Field(
            description="Prefix of what load_lora_adapter may fetch (hf://org, s3://bucket/dir, "
            "https://host/dir); repeatable; default: nothing."
        ),
    ] = ()
    max_upload: Annotated[
        ByteCount, Field(description="Largest adapter that is uploaded or fetched, in bytes.")
    ] = 2**32
    host: Annotated[str, Field(description="Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="Port of the HTTP server.")] = 8000
    api_key_file: Annotated[
        Path | None, Field(description="YAML file of API keys; without it only loopback is bound.")
    ] = None
    tls_cert: Annotated[
        Path | None,
        Field(description="PEM file of the certificate, and those behind it; default: plain HTTP."),
    ] = None
    tls_key: Annotated[
        Path | None,
        Field(description="PEM file of its private key; default: that of the certificate."),
    ] = None
    max_connections_per_address: Annotated[
        int | None,
        Field(
            ge=0,
            description="Connections that one client's address may have; 0: any number; default: a "
            "quarter of all that HAProxy takes.",
        ),
    ] = None
    trusted_proxy: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_networks),
        Field(description="Address or network that may have more of them; repeatable."),
    ] = ()
    body_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds in which a request's body must come; as many again, while 4 KiB/s "
            "of it come.",
        ),
    ] = 30.0
    allowed_host: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_hosts),
        Field(
            description="Name under which clients may ask a server without keys; repeatable; "
            "always: addresses and localhost."
        ),
    ] = ()
    allowed_origin: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_origins),
        Field(
            description="Site whose web pages may ask a server without keys, or *; repeatable: "
            "https://ui.example."
        ),
    ] = ()
    oidc_issuer: Annotated[
        str | None,
        Field(
            description="URL of an OpenID Connect issuer whose tokens are taken as keys are; needs "
            "oidc_audience and oidc_rules."
        ),
    ] = None
    oidc_audience: Annotated[
        tuple[str, ...],
        Field(description="Audience, one of which a token must be for; repeatable."),
    ] = ()
    oidc_jwks: Annotated[
        str | None,
        Field(
            description="URL or file of the issuer's JSON Web Key Set; default: where its "
            "discovery document says."
        ),
    ] = None
    oidc_rules: Annotated[
        Path | None,
        Field(description="YAML file of rules: what the holder of a token may do, by its claims."),
    ] = None
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Field(description="Type of weights and activations, and of KV unless kv_cache_dtype says."),
    ] = "bfloat16"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Field(
            description="Quantize the linears of layers and the lm_head as they are loaded, and "
            "multiply them so, on CPUs: int8; int4, with the lm_head in int8; default: computed in "
            "dtype."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Field(
            description="Type of K and V in their pages: that of dtype, or, on CPUs, int8, with "
            "which nearly twice as many tokens have room."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="Where the ranks compute.")
    ] = "auto"
    deterministic: Annotated[
        bool,
        Field(
            description="On GPUs too, bits do not depend on the batch; in int8 those of the base "
            "model do not on tp either; both at a cost in speed."
        ),
    ] = False
    max_model_len: Annotated[
        int | None, Field(ge=2, description="Longest prompt plus answer; default: the model's.")
    ] = None
    generation_config: Annotated[
        str,
        Field(
            description="Where defaults of sampling come from: auto, the model's "
            "generation_config.json; vllm, none; or a directory or file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        BeforeValidator(parse_object),
        Field(description='Defaults of sampling before those, as JSON: {"temperature": 0.6}.'),
    ] = {}
    trust_request_chat_template: Annotated[
        bool, Field(description="Render conversations by the chat_template of a request, if any.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Field(description="Tell in usage how many tokens of a prompt were cached.")
    ] = True
    lenient_parameters: Annotated[
        bool,
        Field(
            description="Ignore and log parameters of requests that are unknown or not supported, "
            "for clients that cannot be changed."
        ),
    ] = False
    kv_cache_memory: Annotated[
        ByteCount, Field(description="KV cache of each rank, in bytes (512MiB, 2GiB).")
    ] = 2**29
    kv_host_memory: Annotated[
        ByteCountOrZero,
        Field(description="Host memory of each rank for KV that its device evicts, in bytes."),
    ] = 0
    page_size: Annotated[int, Field(ge=1, le=1024, description="Tokens in one KV page.")] = 64
    max_num_seqs: Annotated[
        int, Field(ge=1, description="Sequences that run at the same time.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        Field(ge=1, description="Tokens in one step; default: 512 on a GPU, 256 on a CPU."),
    ] = None
    max_waiting: Annotated[
        int, Field(ge=1, description="Requests that may wait; one more is answered 429.")
    ] = 1024
    prefix_cache: Annotated[
        bool, Field(description="Keep and share the KV of earlier prompts of the same adapter.")
    ] = True
    fairness: Annotated[
        bool, Field(description="Share the work among tenants and adapters; else first come.")
    ] = True
    request_timeout: Annotated[
        float | None, Field(gt=0, description="Seconds after which a request ends with 504.")
    ] = None
    max_loras: Annotated[int, Field(ge=1, description="Adapter slots on each rank.")] = 8
    adapter_memory: Annotated[
        ByteCount, Field(description="Memory of each rank for all adapters in slots, in bytes.")
    ] = 2**30
    max_lora_rank: Annotated[
        int, Field(ge=1, le=1024, description="Largest lora_rank that is accepted.")
    ] = 64
    host_adapter_memory: Annotated[
        ByteCount, Field(description="Host memory of the adapter pool, in bytes.")
    ] = 2**30
    body_memory: Annotated[
        ByteCount,
        Field(
            description="Bytes of bodies over 64 KiB that each router holds before they are "
            "requests; one more is answered 429."
        ),
    ] = 2**26
    threads_per_rank: Annotated[
        int | None, Field(ge=1, description="CPU threads of a rank; default: cores / ranks.")
    ] = None
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Field(description="Plan a step while one runs; auto: where ranks leave a core for it."),
    ] = "auto"
    step_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds a step may take before its ranks are restarted, while none like "
            "it was measured; then ten times what those took.",
        ),
    ] = 8.0
    recovery_timeout: Annotated[
        float, Field(gt=0, description="Seconds that streams wait for lost processes to come back.")
    ] = 120.0
    stream_keep: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds that a resumable stream waits for its reader to come back.",
        ),
    ] = 60.0
    response_keep: Annotated[
        float,
        Field(gt=0, description="Seconds that what a stored response said is kept."),
    ] = 3600.0
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "hermes",
            "llama3_json",
            "llama4_json",
            "mistral",
            "qwen3_coder",
            "qwen3_xml",
        ],
        Field(description="How the model writes tool calls; auto: as its chat template says."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3"],
        Field(description="How the model writes thoughts; auto: as its chat template says."),
    ] = "auto"
    kv_events_endpoint: Annotated[
        str | None,
        Field(description="Where replica 0 publishes KV events over ZeroMQ: tcp://127.0.0.1:5557."),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None, Field(description="Where readers ask replica 0 for KV events that they missed.")
    ] = None
    kv_events_topic: Annotated[str, Field(description="ZeroMQ topic of KV events.")] = ""
    kv_events_public: Annotated[
        bool,
        Field(description="Publish beyond this machine: whoever connects reads the prompts."),
    ] = False
    trust_rank_network: Annotated[
        bool,
        Field(
            description="With TLS between hosts, let one scheduler's ranks be GPUs of several: "
            "NCCL sends in clear, so what is below must encrypt (WireGuard, IPsec)."
        ),
    ] = False
    routers: Annotated[
        int | None,
        Field(ge=1, description="Router replicas; default: two where cores allow, else one."),
    ] = None
    ray_address: Annotated[
        str | None, Field(description="Ray cluster to join; default: start one on this machine.")
    ] = None
    record: Annotated[
        Path | None,
        Field(description="File for the scheduler's events, to be replayed; it holds prompts."),
    ] = None
    record_max_bytes: Annotated[
        ByteCount, Field(description="Bytes of that file and its predecessor FILE.1 together.")
    ] = 2**30
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Log level.")
    ] = "WARNING"
    request_log: Annotated[
        str | None,
        Field(
            description="File of each router's node with a line of JSON for each call, without "
            "prompts and answers; - is standard error; default: calls are not logged."
        ),
    ] = None
    request_log_content: Annotated[
        bool, Field(description="Write prompts and answers into the request log, too.")
    ] = False
    vllm_metrics: Annotated[
        bool,
        Field(
            description="Show vLLM's metrics in /metrics, too, for its dashboards and what scales "
            "or scores by them."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Field(
            description="Where OpenTelemetry traces of calls are sent: http://HOST:4317; needs the "
            "extra otel."
        ),
    ] = None
    anonymous: Annotated[
        bool,
        Field(
            description="Serve without keys beyond this machine, for networks where something "
            "else decides who may ask; nobody may load adapters or drain."
        ),
    ] = False
    replicas: Annotated[
        int, Field(ge=1, description="Schedulers, each with its own ranks; at least so many.")
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(ge=1, description="Schedulers at most, as load asks; default: always `replicas`."),
    ] = None
    scale_up_delay: Annotated[
        float, Field(ge=0, description="Seconds of too much load before a scheduler is added.")
    ] = 10.0
    scale_down_delay: Annotated[
        float, Field(ge=0, description="Seconds of little load before a scheduler is taken away.")
    ] = 120.0
    drain_timeout: Annotated[
        float,
        Field(gt=0, description="Seconds that what runs may take when a replica has to go."),
    ] = 30.0
    surge: Annotated[
        bool,
        Field(
            description="New ranks start before the old ones end when an update needs new ones: "
            "nothing is refused meanwhile, but the cluster must have room for both."
        ),
    ] = False

    @field_validator("*", mode="before")
    @classmethod
    def _take_no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what YAML made of yes, no, on and off where a number or a word is wanted."""
        assert info.field_name is not None, "of a field"
        is_switch = cls.model_fields[info.field_name].annotation is bool
        if isinstance(value, bool) and not is_switch:
            raise ValueError(
                f"{str(value).lower()} is for keys that are on or off; if it is a word, quote it"
            )
        return value

    @field_validator("quantization", mode="before")
    @classmethod
    def _take_no_format_of_a_checkpoint(cls, value: object) -> object:
        """Refuse what others want to be told of a checkpoint that is quantized already."""
        if value in FORMATS_OF_CHECKPOINTS:
            raise ValueError(
                f"{value} is a way in which a checkpoint is quantized, which it says itself: leave "
                "it out, and the weights are widened as they are loaded; to compute in fewer bits "
                "give int8 or int4"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> "ServeConfig":
        if not (self.anonymous or self.has_keys or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached from other machines: give api_key_file, "
                "bind 127.0.0.1, or set anonymous if something else decides who may ask"
            )
        self.adapters()
        AllowList(self.adapter_sources)
        self._check_kv_events()
        self._check_cluster()
        self._check_front_door()
        self._check_oidc()
        return self

    def _check_front_door(self) -> None:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        for name in ("tls_cert", "max_connections_per_address", "trusted_proxy"):
            if self.ray_address is not None and getattr(self, name) not in (None, ()):
                raise ValueError(
                    f"{name}: HAProxy on the nodes of a cluster is told of it before `ray start`: "
                    f"`topwork environment --{name.replace('_', '-')}`"
                )

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key, or a token."""
        return self.api_key_file is not None or self.oidc_issuer is not None

    def _check_oidc(self) -> None:
        others = {
            "oidc_audience": bool(self.oidc_audience),
            "oidc_rules": self.oidc_rules is not None,
        }
        if self.oidc_issuer is None:
            given = [name for name, is_given in others.items() if is_given]
            given += ["oidc_jwks"] if self.oidc_jwks is not None else []
            if given:
                raise ValueError(f"{given[0]} needs oidc_issuer")
            return
        for name, is_given in others.items():
            if not is_given:
                raise ValueError(f"oidc_issuer needs {name}")
        check_oidc(self.oidc_issuer, self.oidc_jwks)

    def _check_cluster(self) -> None:
        for name in ("api_key_file", "oidc_issuer"):
            if self.anonymous and getattr(self, name) is not None:
                raise ValueError(f"anonymous and {name} exclude each other: give one of them")
        if self.request_log_content and self.request_log is None:
            raise ValueError("request_log_content needs request_log")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than replicas {self.replicas}"
            )

    def _check_kv_events(self) -> None:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint: str | None = getattr(self, name)
            if endpoint is None:
                continue
            match = re.fullmatch(r"tcp://(.+):(\d{1,5})", endpoint)
            if match is None:
                raise ValueError(f"{name} {endpoint!r} is not of the form tcp://HOST:PORT")
            if not (self.kv_events_public or is_loopback(match[1].strip("[]"))):
                raise ValueError(
                    f"{name} {endpoint} can be reached from other machines, and there is no key "
                    "on it: set kv_events_public, or use 127.0.0.1"
                )
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")

    def adapters(self) -> dict[str, str]:
        """Return the adapters to load at start: directory by name.

        Raises:
            ValueError: if an entry is not NAME=DIR or a name comes twice.
        """
        directories: dict[str, str] = {}
        for entry in self.adapter:
            name, separator, directory = entry.partition("=")
            if not (name and separator and directory):
                raise ValueError(f"adapter {entry!r} is not of the form NAME=DIR")
            if name in directories:
                raise ValueError(f"adapter {name!r} is given twice")
            directories[name] = directory
        return directories

    def token_budget(self, device: str) -> int:
        """Return the tokens in one step of a device.

        On a CPU a step of 512 is long enough to be noticed; half of it brings first tokens sooner,
        and nearly as many in all.
        """
        return self.max_num_batched_tokens or DEFAULT_TOKENS[device]

    @property
    def local_url(self) -> str:
        """Where this machine reaches the server."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{self.port}"

    @property
    def base_name(self) -> str:
        """The base model's name in the API."""
        name = Path(self.model).name
        return self.served_model_name or (stem(name) if is_gguf(Path(name)) else name)


def load_config(file: Path | None, flags: dict[str, Any]) -> ServeConfig:
    """Return the configuration of a YAML file with the given flags on top.

    Raises:
        ConfigError: naming every key that is unknown or has a wrong value.
    """
    values = {**({} if file is None else read_mapping(file)), **flags}
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, ServeConfig.model_fields)) from error


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON Schema, of what may be written and not of what it becomes."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ServeConfig.model_json_schema(),
    }
