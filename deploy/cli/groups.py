"""The groups in which `topwork serve --help` shows the flags, and their order."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model", "served_model_name", "tp", "dtype", "quantization", "kv_cache_dtype", "device"),
        *("threads_per_rank", "revision", "deterministic", "max_model_len"),
    ),
    "Adapters": (
        *("adapter", "adapter_dir", "adapter_root", "adapter_sources"),
        *("adapter_state", "adapter_staging", "max_upload"),
        *("max_loras", "max_lora_rank"),
    ),
    "Memory": (
        *("kv_cache_memory", "kv_host_memory", "page_size", "prefix_cache"),
        *("adapter_memory", "host_adapter_memory"),
    ),
    "Scheduling": (
        *("max_num_seqs", "max_num_batched_tokens", "max_waiting", "fairness"),
        *("overlap", "step_timeout"),
    ),
    "Requests": (
        *("generation_config", "override_generation_config", "lenient_parameters"),
        *("trust_request_chat_template", "enable_prompt_tokens_details"),
        *("tool_call_parser", "reasoning_parser"),
    ),
    "HTTP": (
        *("host", "port", "request_timeout", "stream_keep", "response_keep"),
        *("body_timeout", "body_memory", "max_connections_per_address", "trusted_proxy"),
    ),
    "Security": (
        *("api_key_file", "usage_file", "anonymous", "tls_cert", "tls_key"),
        *("oidc_issuer", "oidc_audience", "oidc_jwks", "oidc_rules"),
        *("allowed_host", "allowed_origin"),
    ),
    "Cluster": (
        *("ray_address", "replicas", "max_replicas", "scale_up_delay", "scale_down_delay"),
        *("routers", "drain_timeout", "recovery_timeout", "surge", "trust_rank_network"),
    ),
    "Logs, metrics, traces and recording": (
        *(
            "log_level",
            "request_log",
            "request_log_content",
            "vllm_metrics",
            "otlp_traces_endpoint",
        ),
        *("record", "record_max_bytes"),
    ),
    "KV events": (
        *("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"),
        *("kv_events_public",),
    ),
}
OTHER = "Other"  # of a key that is in no group yet

_GROUP_BY_KEY = {key: group for group, keys in GROUPS.items() for key in keys}


def group_of(key: str) -> str:
    """Return the group of a key of ServeConfig."""
    return _GROUP_BY_KEY.get(key, OTHER)


def in_order(keys: list[str]) -> list[str]:
    """Return keys of ServeConfig in the order in which a person looks for them."""
    order = list(_GROUP_BY_KEY)
    return sorted(keys, key=lambda key: order.index(key) if key in order else len(order))
