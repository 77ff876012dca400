"""The configuration of each part of the cluster, made from one ServeConfig on the part's own node.

The model is looked for on that node: each has it at the same path, or fetches it from the hub.
"""

from dataclasses import dataclass
from importlib.metadata import version
from math import inf

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.pool_actor import AdapterPoolConfig
from cluster.engine.core import SupervisorConfig
from cluster.engine.engine import EngineConfig
from cluster.engine.kv_event_publisher import KvEventPublisherConfig
from cluster.engine.recording import RecordingConfig
from cluster.router.config import OidcConfig, RouterConfig
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import (
    Checked,
    adapter_limits,
    check_model,
    rank_memory,
    scheduler_config,
)
from deploy.machine import num_cores
from worker.actor import node_ip
from worker.protocol import RankConfig

_FEW_ROWS = 4  # a step of so few is short even where they take all cores
START_TIMEOUT = 600.0  # seconds until the ranks must serve: large models load for minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What every scheduler replica is made from."""

    engine: EngineConfig  # `replica` is filled in by the replica itself
    rank: RankConfig
    group_timeout: float  # seconds a collective may take


def check_on_this_node(config: ServeConfig) -> Checked:
    """Find and read the model on this node, for a configuration whose device is decided.

    Raises:
        ConfigError: naming the key at fault, and the node.
    """
    assert config.device != "auto", "deploy.serving.app has resolved it"
    try:
        # The device is the ranks': this node may have none, and need none.
        return check_model(config, config.device)
    except ConfigError as error:
        raise ConfigError(f"{error} (on node {node_ip()})") from error


def pool_config(checked: Checked, adapter_dirs: tuple[str, ...]) -> AdapterPoolConfig:
    """Return where the adapter pool may read, and what it makes of an adapter."""
    config = checked.config
    return AdapterPoolConfig(
        model=checked.model,
        limits=adapter_limits(config),
        memory=rank_memory(checked),
        adapter_dirs=adapter_dirs,
        adapter_roots=config.adapter_root,
        max_upload=config.max_upload,
        sources=config.adapter_sources,
        usage_file=None if config.usage_file is None else str(config.usage_file),
    )


def adapter_catalog(config: ServeConfig) -> AdapterCatalog:
    """Return a catalog in which nothing is registered."""
    return AdapterCatalog(
        config.base_name,
        Limits(
            host_bytes=config.host_adapter_memory,
            num_slots=config.max_loras,
            device_bytes=config.adapter_memory,
        ),
    )


def scheduler_settings(checked: Checked) -> SchedulerSettings:
    """Return how schedulers and ranks are made."""
    config = checked.config
    rank = RankConfig(
        model_dir=config.model,  # each rank finds it on its own node
        revision=config.revision,
        rank=0,
        tp=config.tp,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        lora_dtype=config.lora_dtype,
        device=checked.device,
        deterministic=config.deterministic,
        page_size=config.page_size,
        kv_memory_bytes=config.kv_memory_bytes(checked.device),
        gpu_memory_utilization=config.gpu_memory_utilization,
        adapter_memory_bytes=config.adapter_memory,
        kv_host_memory_bytes=config.kv_host_memory,
        num_slots=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_model_len=checked.max_model_len,
        max_num_batched_tokens=config.token_budget(checked.device),
        max_num_seqs=config.num_sequences(checked.device),
        num_threads=checked.threads,
    )
    engine = EngineConfig(
        replica="",
        ranks=SupervisorConfig(
            scheduler=scheduler_config(checked),
            start_timeout=START_TIMEOUT,
            step_timeout=config.step_timeout,
            recovery_timeout=config.recovery_timeout,
            ahead_rows=ahead_rows(checked),
        ),
        recording=_recording(config),
        request_timeout=config.request_timeout,
        kv_publisher=None
        if config.kv_events_endpoint is None
        else KvEventPublisherConfig(
            endpoint=config.kv_events_endpoint,
            replay_endpoint=config.kv_events_replay_endpoint,
            topic=config.kv_events_topic,
        ),
    )
    return SchedulerSettings(engine=engine, rank=rank, group_timeout=60.0)


def ahead_rows(checked: Checked) -> float:
    """Return the rows of a step beyond which it leaves no core to plan the next one meanwhile.

    A step of few rows is so short that waiting for its plan is much of it: with both of two cores
    computing, 1 client got 11% more tokens and 4 clients 8% where steps were planned ahead.
    """
    overlap, tp, threads = checked.config.overlap, checked.config.tp, checked.threads
    if overlap != "auto":
        return inf if overlap == "on" else 0
    if checked.device == "cuda" or tp * threads < num_cores():
        return inf
    return _FEW_ROWS if tp == 1 else 0


def _recording(config: ServeConfig) -> RecordingConfig | None:
    if config.record is None:
        return None
    return RecordingConfig(
        path=str(config.record),
        max_bytes=config.record_max_bytes,
        version=version("topwork"),
    )


def _oidc_config(config: ServeConfig) -> OidcConfig | None:
    if config.oidc_issuer is None:
        return None
    return OidcConfig(
        issuer=config.oidc_issuer,
        audiences=config.oidc_audience,
        rules_file=str(config.oidc_rules),
        jwks=config.oidc_jwks,
    )


def router_config(checked: Checked) -> RouterConfig:
    """Return the configuration of every router."""
    config = checked.config
    return RouterConfig(
        model_name=config.base_name,
        model_dir=str(checked.model_dir),
        api_key_file=None if config.api_key_file is None else str(config.api_key_file),
        oidc=_oidc_config(config),
        anonymous=config.anonymous,
        page_size=config.page_size,
        body_memory=config.body_memory,
        context_length=checked.max_model_len,
        vocab_size=checked.model.vocab_size,
        eos_token_ids=checked.model.eos_token_ids,
        pad_token_id=checked.model.pad_token_id,
        classifier=checked.model.classifier,
        version=version("topwork"),
        vllm_metrics=config.vllm_metrics,
        otlp_traces_endpoint=config.otlp_traces_endpoint,
        request_log=config.request_log,
        request_log_content=config.request_log_content,
        trust_request_chat_template=config.trust_request_chat_template,
        enable_prompt_tokens_details=config.enable_prompt_tokens_details,
        lenient_parameters=config.lenient_parameters,
        sampling_defaults=checked.sampling_defaults,
        recovery_timeout=config.recovery_timeout,
        body_timeout=config.body_timeout,
        allowed_hosts=_allowed_hosts(config),
        allowed_origins=None if config.has_keys else config.allowed_origin,
        stream_keep=config.stream_keep,
        response_keep=config.response_keep,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _allowed_hosts(config: ServeConfig) -> tuple[str, ...] | None:
    """Return the names, beside localhost, of a server without keys; None: it may have any.

    One that is open to a network is known there by names that only its operator can tell.
    """
    if config.has_keys or (config.anonymous and not config.allowed_host):
        return None
    return config.allowed_host
