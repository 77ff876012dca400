"""TLS between pods: each has a certificate of its own, and only its maker sees the CA's key."""

from pathlib import Path

from deploy.serving.cluster_tls import tls_environment
from tests.certificates import host_certificate
from tests.helm.charts import KEYS, Object, pod_templates, render, rendered

COMPONENTS = ("head", "router", "scheduler")


def mounts(container: Object) -> dict[str, Object]:
    return {one["name"]: one for one in container["volumeMounts"]}


def test_every_pod_makes_itself_a_certificate_before_it_starts() -> None:
    pods = pod_templates(rendered("everything"))
    for component in COMPONENTS:
        spec = pods[component]["spec"]
        (making,) = [one for one in spec["initContainers"] if one["name"] == "certificate"]
        assert making["command"] == ["topwork", "certificates", mounts(making)["tls"]["mountPath"]]
        hosts, authority = making["args"]
        assert hosts.split(",")[0] == "$(POD_IP)"
        assert authority == f"--ca={mounts(making)['tls-ca']['mountPath']}"
        for container in spec["containers"]:
            assert "tls-ca" not in mounts(container)
            assert mounts(container)["tls"]["readOnly"] is True
        (volume,) = [one for one in spec["volumes"] if one["name"] == "tls-ca"]
        assert volume["secret"]["secretName"] == "cluster-ca"


def test_every_pod_has_the_environment_that_the_command_prints(tmp_path: Path) -> None:
    directory = host_certificate(tmp_path / "ca")
    expected = {
        name: value.replace(str(directory), "/etc/topwork/tls/$(TOPWORK_POD_IP)")
        for name, value in tls_environment(directory).items()
    }
    pods = pod_templates(rendered("everything"))
    for component in COMPONENTS:
        (container,) = pods[component]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        names = [one["name"] for one in container["env"]]
        assert {name: given[name] for name in expected} == expected
        assert names.index("TOPWORK_POD_IP") < names.index("TOPWORK_CLUSTER_TLS")


def test_without_a_secret_nothing_of_it_is_there() -> None:
    pods = pod_templates(render(KEYS))
    for component in COMPONENTS:
        text = str(pods[component])
        assert "TLS" not in text and "tls" not in text
