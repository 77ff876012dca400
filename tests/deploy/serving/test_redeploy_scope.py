"""deploy.serving.redeploy_scope and the application: what a changed key restarts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ray.serve._private.build_app import build_app
from ray.serve.exceptions import RayServeException

from deploy.config import ServeConfig
from deploy.engine_config import Checked
from deploy.serving.app import application, build
from deploy.serving.settings import (
    adapter_catalog,
    pool_config,
    router_config,
    scheduler_settings,
)
from tests.cluster.adapters.tiny import MODEL

BASE = {"model": "some/model", "served_model_name": "m", "device": "cpu"}


_known: dict[str, dict[str, str]] = {}  # Serve takes 0.1 s to build an application


def versions(**changes: Any) -> dict[str, str]:
    """Return the version of each deployment as Serve's controller would get it."""
    asked = repr(changes)
    if asked not in _known:
        _known[asked] = _versions(changes)
    return _known[asked]


def _versions(changes: dict[str, Any]) -> dict[str, str]:
    built = build_app(application(ServeConfig(**(BASE | changes))), name="topwork")
    configs = {one.name: one._deployment_config for one in built.deployments}
    for config in configs.values():
        config.version = "of the whole application"  # what Serve does to each
    return {name: config.version for name, config in configs.items()}


# Every key, another value of it, and the deployments whose replicas the change replaces.
ALL = "AdapterPool Router Scheduler"
SCOPES: dict[str, tuple[Any, str]] = {
    "model": ("another/model", ALL),
    "revision": ("v1", ALL),
    "body_memory": (2**20, "Router"),
    "served_model_name": ("n", "AdapterPool Router"),
    "tp": (2, ALL),
    "adapter": (("a=/x",), ""),
    "adapter_dir": (("/x",), ""),
    "adapter_root": (("/x",), "AdapterPool"),
    "adapter_state": ("/state", "AdapterPool"),
    "adapter_staging": ("/staging", "AdapterPool"),
    "adapter_sources": (("hf://org",), "AdapterPool"),
    "usage_file": ("/usage", "AdapterPool"),
    "max_upload": (2**20, "AdapterPool"),
    "host": ("127.0.0.2", ""),
    "port": (8001, ""),
    "api_key_file": ("/keys", "Router"),
    "tls_cert": ("/cert.pem", ""),
    "tls_key": ("/key.pem", ""),
    "max_connections_per_address": (5, ""),
    "trusted_proxy": (("10.0.0.7",), ""),
    "body_timeout": (9.0, "Router"),
    "allowed_host": (("llm.example",), "Router"),
    "allowed_origin": (("https://ui.example",), "Router"),
    "oidc_issuer": ("https://id2.example", "Router"),
    "oidc_audience": (("b",), "Router"),
    "oidc_jwks": ("/jwks", "Router"),
    "oidc_rules": ("/other", "Router"),
    "dtype": ("float32", ALL),
    "quantization": ("int8", ALL),
    "kv_cache_dtype": ("int8", ALL),
    "lora_dtype": ("int8", ALL),
    "device": ("cuda", ALL),
    "deterministic": (True, ALL),
    "max_model_len": (512, "Router Scheduler"),
    "kv_cache_memory": (2**20, "Scheduler"),
    "gpu_memory_utilization": (0.5, "Scheduler"),
    "kv_host_memory": (2**20, "Scheduler"),
    "page_size": (32, "Router Scheduler"),
    "max_num_seqs": (8, "Scheduler"),
    "max_num_batched_tokens": (128, "Scheduler"),
    "max_waiting": (8, "Scheduler"),
    "prefix_cache": (False, "Scheduler"),
    "fairness": (False, "Scheduler"),
    "request_timeout": (9.0, "Scheduler"),
    "max_loras": (2, "AdapterPool Scheduler"),
    "adapter_memory": (2**20, "AdapterPool Scheduler"),
    "max_lora_rank": (8, "AdapterPool Scheduler"),
    "host_adapter_memory": (2**20, "AdapterPool"),
    "threads_per_rank": (1, "Scheduler"),
    "overlap": ("off", "Scheduler"),
    "step_timeout": (9.0, "Scheduler"),
    "recovery_timeout": (9.0, "Router Scheduler"),
    "stream_keep": (9.0, "Router"),
    "generation_config": ("vllm", "Router"),
    "override_generation_config": ({"temperature": 0.5}, "Router"),
    "lenient_parameters": (True, "Router"),
    "trust_request_chat_template": (True, "Router"),
    "enable_prompt_tokens_details": (False, "Router"),
    "response_keep": (9.0, "Router"),
    "tool_call_parser": ("hermes", "Router"),
    "reasoning_parser": ("none", "Router"),
    "kv_events_endpoint": ("tcp://127.0.0.1:5557", "Scheduler"),
    "kv_events_replay_endpoint": ("tcp://127.0.0.1:5558", "Scheduler"),
    "kv_events_topic": ("t", "Scheduler"),
    "kv_events_public": (True, "Scheduler"),
    "trust_rank_network": (True, "Scheduler"),
    "routers": (2, ""),
    "ray_address": ("10.0.0.1:6379", ""),
    "record": ("/log", "Scheduler"),
    "record_max_bytes": (2**20, "Scheduler"),
    "log_level": ("DEBUG", ""),
    "request_log": ("-", "Router"),
    "request_log_content": (True, "Router"),
    "vllm_metrics": (True, "Router"),
    "otlp_traces_endpoint": ("http://127.0.0.1:4317", "Router"),
    "anonymous": (True, "Router"),
    "replicas": (3, ""),
    "max_replicas": (4, "Scheduler"),  # from none; see below
    "scale_up_delay": (1.0, ""),
    "scale_down_delay": (1.0, ""),
    "drain_timeout": (1.0, ""),
    "surge": (True, ""),
}
OIDC = {"oidc_issuer": "https://id.example", "oidc_audience": ("a",), "oidc_rules": "/rules"}
NEEDS: dict[str, dict[str, Any]] = {
    "tls_key": {"tls_cert": "/cert.pem"},
    "kv_events_replay_endpoint": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
    **dict.fromkeys(("oidc_issuer", "oidc_audience", "oidc_jwks", "oidc_rules"), OIDC),
    "request_log_content": {"request_log": "-"},
}


def test_the_scope_of_every_key_is_stated() -> None:
    assert set(SCOPES) == set(ServeConfig.model_fields)


@pytest.mark.parametrize("key", SCOPES)
def test_a_changed_key_replaces_the_replicas_of_its_scope_and_no_others(key: str) -> None:
    value, scope = SCOPES[key]
    before = versions(**NEEDS.get(key, {}))
    after = versions(**(NEEDS.get(key, {}) | {key: value}))
    assert {name for name in before if before[name] != after[name]} == set(scope.split())


def test_schedulers_are_replaced_when_autoscaling_begins_or_ends_but_not_by_other_bounds() -> None:
    fixed, two, four = (versions(max_replicas=most)["Scheduler"] for most in (None, 2, 4))
    assert two == four
    assert fixed != two


class KeysRead(ServeConfig):
    """Notes which of its keys are read."""

    _read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ServeConfig.model_fields:
            KeysRead._read.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("deployment", "build_settings"),
    [
        ("AdapterPool", lambda checked: pool_config(checked, ())),
        ("AdapterPool", lambda checked: adapter_catalog(checked.config)),
        ("Router", router_config),
        ("Scheduler", scheduler_settings),
    ],
)
def test_whatever_a_replica_is_built_from_is_of_its_scope(
    deployment: str, build_settings: Callable[[Checked], object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = KeysRead(**{**BASE, "model": str(tmp_path)})
    checked = Checked(config, tmp_path, MODEL, 64, "cpu", 1)
    KeysRead._read.clear()
    build_settings(checked)
    assert KeysRead._read, "nothing was read"
    assert {key for key in KeysRead._read if deployment not in SCOPES[key][1].split()} == set()


def test_the_version_survives_the_way_to_the_controller() -> None:
    built = build_app(application(ServeConfig(**BASE)), name="topwork")
    sent = {one.name: one._deployment_config.to_proto().version for one in built.deployments}
    assert sent == versions()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"modle": "x"}, "modle"),
        ({"model": "x", "tp": 0}, "tp"),
        ({"model": "x", "host": "0.0.0.0"}, "api_key_file"),
        ({"model": "x", "host": "0.0.0.0", "anonymous": True, "api_key_file": "k"}, "exclude"),
        ({"model": "x", "replicas": 3, "max_replicas": 2}, "max_replicas"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_as_one_sentence(
    args: dict[str, Any], named: str
) -> None:
    with pytest.raises(RayServeException, match=named):
        build(args)
