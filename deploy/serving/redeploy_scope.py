"""What a change of the configuration restarts: nothing, or the deployments whose keys it touches.

Serve gives all deployments of an application one version, made of all arguments, and replaces every
replica when any of them changes. Here each deployment has a version made of the keys that its
replicas are built from; what they can take in while they run comes as `user_config`.
"""

import json
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from pydantic import PrivateAttr
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

from deploy.config import ServeConfig

# A change of these replaces no replica: they are taken in while running, or say how many replicas
# there are and where Serve listens.
LIVE_KEYS = frozenset(
    {
        *("adapter", "adapter_dir", "log_level", "drain_timeout"),
        *("replicas", "max_replicas", "scale_up_delay", "scale_down_delay", "routers", "surge"),
        *("host", "port", "ray_address"),
        *("tls_cert", "tls_key", "max_connections_per_address", "trusted_proxy"),
    }
)
# Which model the ranks hold, what its bits depend on, and how it is split: routers, pool and
# schedulers must agree on it, for a stream that goes on elsewhere has the same tokens.
MODEL_KEYS = frozenset(
    {
        *("model", "revision", "dtype", "tp", "device"),
        *("quantization", "deterministic", "kv_cache_dtype", "lora_dtype"),
    }
)
ROUTER_KEYS = MODEL_KEYS | {
    *("served_model_name", "max_model_len", "page_size", "api_key_file"),
    *("oidc_issuer", "oidc_audience", "oidc_jwks", "oidc_rules"),
    *("anonymous", "vllm_metrics", "otlp_traces_endpoint", "request_log", "request_log_content"),
    "body_memory",
    *("recovery_timeout", "stream_keep", "response_keep"),
    *("generation_config", "override_generation_config", "lenient_parameters"),
    *("trust_request_chat_template", "enable_prompt_tokens_details"),
    *("tool_call_parser", "reasoning_parser"),
    *("body_timeout", "allowed_host", "allowed_origin"),
}
POOL_KEYS = MODEL_KEYS | {
    *("served_model_name", "max_loras", "max_lora_rank", "adapter_memory"),
    *("host_adapter_memory", "adapter_root", "adapter_state"),
    *("adapter_staging", "adapter_sources", "max_upload", "usage_file"),
}
# A key that is named nowhere here is the schedulers': they have most of them.
SCHEDULER_KEYS = (
    frozenset(ServeConfig.model_fields)
    - LIVE_KEYS
    - (
        {
            *("served_model_name", "api_key_file", "anonymous"),
            *("oidc_issuer", "oidc_audience", "oidc_jwks", "oidc_rules"),
            *("vllm_metrics", "otlp_traces_endpoint", "request_log", "request_log_content"),
            "body_memory",
            *("stream_keep", "response_keep", "tool_call_parser", "reasoning_parser"),
            *("generation_config", "override_generation_config", "lenient_parameters"),
            *("trust_request_chat_template", "enable_prompt_tokens_details"),
            *("body_timeout", "allowed_host", "allowed_origin"),
            *("host_adapter_memory", "adapter_root", "adapter_state"),
            *("adapter_staging", "adapter_sources", "max_upload", "usage_file"),
        }
    )
)


def fingerprint(config: ServeConfig, keys: frozenset[str]) -> str:
    """Return what tells whether any of these keys has changed, or Topwork itself."""
    values = config.model_dump(mode="json", include=set(keys))
    text = json.dumps([version("topwork"), values], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def model_fingerprint(config: ServeConfig) -> str:
    """Return what routers, pool and schedulers must have in common to work together."""
    return fingerprint(config, MODEL_KEYS)


class _OwnVersion(DeploymentConfig):
    """Keeps the version that it was given when Serve sets that of the whole application."""

    _own_version: str = PrivateAttr()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._own_version if name == "version" else value)


def with_own_version(
    deployment: Deployment, config: ServeConfig, keys: frozenset[str]
) -> Deployment:
    """Return a deployment whose replicas are replaced only if one of these keys changes.

    Serve has no word for it: where this has no effect any more, a change replaces all replicas in
    turn, and nothing worse.
    """
    own = _OwnVersion.model_construct(**dict(deployment._deployment_config))
    # A replica reports the load that it measures itself only if it was made to be autoscaled.
    scaled = "" if own.autoscaling_config is None else "-autoscaled"
    own._own_version = fingerprint(config, keys) + scaled
    own.version = own._own_version
    return Deployment(
        deployment.name,
        own,
        deployment._replica_config,
        version=own._own_version,
        _internal=True,
    )
