"""What holds for every pod and every container, whatever the values: security, disks, secrets."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from deploy.serving.haproxy.environment import cluster_environment
from deploy.serving.haproxy.front_door import FrontDoor
from tests.helm.charts import (
    KEYS,
    VALUES,
    Object,
    containers,
    of_kind,
    pod_templates,
    render,
    rendered,
    the,
    values_of,
)

EVERY_SET = pytest.mark.parametrize("name", VALUES)
KERNELS = "/var/cache/topwork/kernels"
# Pod Security "restricted" takes these volumes; images are volumes of their own since 1.31.
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip


@EVERY_SET
def test_every_pod_is_restricted(name: str) -> None:
    for template in pod_templates(rendered(name)).values():
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security.get("runAsUser", 1) != 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
        allowed = RESTRICTED_VOLUMES | ({"hostPath"} if name == "air-gapped" else set())
        assert kinds <= allowed, kinds


@EVERY_SET
def test_every_container_is_restricted_and_cannot_write_its_root(name: str) -> None:
    for container in every_container(name):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security.get("privileged")
        assert not any("hostPort" in port for port in container.get("ports", []))


@EVERY_SET
def test_a_server_may_write_where_ray_and_its_home_are(name: str) -> None:
    for component, template in pod_templates(rendered(name)).items():
        if component == "test":
            continue
        (server,) = template["spec"]["containers"]
        empty = {one["name"] for one in template["spec"]["volumes"] if "emptyDir" in one}
        where = {one["mountPath"]: one["name"] for one in server["volumeMounts"]}
        environment = {one["name"]: one.get("value") for one in server["env"]}
        for path in ("/tmp", "/dev/shm", environment["HOME"]):
            assert path is not None and where[path] in empty
        read_only = {one["mountPath"] for one in server["volumeMounts"] if one.get("readOnly")}
        assert {path for path in where if path not in read_only} - {"/scratch", KERNELS} == {
            "/tmp", "/dev/shm", environment["HOME"],
        }  # fmt: skip


@pytest.mark.parametrize("mode", ["rayservice", "deployment"])
@pytest.mark.parametrize("source", ["none", "pvc", "hostPath"])
def test_pods_with_gpus_and_no_others_share_what_kernels_were_compiled_to(
    source: str, mode: str
) -> None:
    values = values_of("gpu-one-host") | {"mode": mode}
    values["kernelCache"] = {"source": source, "hostPath": "/srv/kernels"}
    objects = render(values)
    claims = {one["metadata"]["name"] for one in of_kind(objects, "PersistentVolumeClaim")}
    assert ("demo-topwork-kernel-cache" in claims) == (source == "pvc")
    for component, template in pod_templates(objects).items():
        if component == "test":
            continue
        (server,) = template["spec"]["containers"]
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        where = {one["mountPath"]: one for one in server["volumeMounts"]}
        environment = {one["name"]: one.get("value") for one in server["env"]}
        if source == "none" or component not in ("scheduler", "server"):
            assert KERNELS not in where and "TRITON_CACHE_DIR" not in environment
            continue
        assert environment["TRITON_CACHE_DIR"] == KERNELS
        assert where[KERNELS] == {"name": "kernel-cache", "mountPath": KERNELS}
        assert set(volumes["kernel-cache"]) == {
            "name",
            "persistentVolumeClaim" if source == "pvc" else "hostPath",
        }


def test_the_autoscaler_beside_the_head_is_restricted_as_well() -> None:
    options = the(rendered("everything"), "RayService")["spec"]["rayClusterConfig"][
        "autoscalerOptions"
    ]
    assert options["securityContext"]["readOnlyRootFilesystem"] is True
    head = pod_templates(rendered("everything"))["head"]["spec"]
    assert {one["name"] for one in options["volumeMounts"]} <= {
        one["name"] for one in head["volumes"]
    }
    assert head["automountServiceAccountToken"] is True  # it asks the API server for pods
    others = [t for c, t in pod_templates(rendered("everything")).items() if c != "head"]
    assert all(one["spec"]["automountServiceAccountToken"] is False for one in others)


@EVERY_SET
def test_every_container_says_what_it_needs(name: str) -> None:
    for container in every_container(name):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]), container["name"]
        assert "memory" in resources["limits"]


@EVERY_SET
def test_secrets_are_named_and_never_held(name: str) -> None:
    objects = rendered(name)
    assert not of_kind(objects, "Secret")
    for container in every_container(name):
        for variable in container.get("env", []):
            names_file = variable.get("value", "").startswith("/etc/topwork/")
            holds = {"TOKEN", "KEY", "PASSWORD", "SECRET"} & set(variable["name"].split("_"))
            if holds and not names_file:
                assert "secretKeyRef" in variable["valueFrom"], variable
    if of_kind(objects, "RayService"):
        options = the(objects, "RayService")["spec"]["rayClusterConfig"].get(
            "gcsFaultToleranceOptions", {}
        )
        assert "value" not in options.get("redisPassword", {})


@EVERY_SET
def test_every_mount_has_its_volume_and_every_volume_is_mounted(name: str) -> None:
    for template in pod_templates(rendered(name)).values():
        volumes = [one["name"] for one in template["spec"].get("volumes", [])]
        assert len(set(volumes)) == len(volumes)
        mounted = set()
        for container in containers(template):
            mounts = container.get("volumeMounts", [])
            assert len({one["mountPath"] for one in mounts}) == len(mounts)
            mounted |= {one["name"] for one in mounts}
        assert mounted == set(volumes)


def test_a_private_registry_stands_before_every_image() -> None:
    values = values_of("object-store") | {"image": {"registry": "registry.example.com/mirror"}}
    for objects in (rendered("air-gapped"), render(values)):
        images = [one["image"] for t in pod_templates(objects).values() for one in containers(t)]
        assert images
        assert all(one.startswith("registry.example.com/mirror/") for one in images), images


def test_a_digest_decides_rather_than_a_tag() -> None:
    images = {
        component: containers(template)[0]["image"]
        for component, template in pod_templates(rendered("air-gapped")).items()
    }
    assert images["head"] == f"registry.example.com/mirror/topwork@sha256:{'1' * 64}"
    assert images["scheduler"] == f"registry.example.com/mirror/topwork@sha256:{'2' * 64}"


def test_head_and_routers_have_no_gpu_and_an_image_without_cuda() -> None:
    pods = pod_templates(rendered("gpu-one-host"))
    for component in ("head", "router"):
        (container,) = pods[component]["spec"]["containers"]
        assert container["image"].endswith("-router")
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    (container,) = pods["scheduler"]["spec"]["containers"]
    assert container["image"].endswith("-cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["resources"]["requests"]["nvidia.com/gpu"] == 4


def test_nobody_gets_more_right_by_the_service_account() -> None:
    account = the(render(KEYS), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert not {"Role", "RoleBinding", "ClusterRole"} & {one["kind"] for one in render(KEYS)}


def every_container(name: str) -> Iterator[Object]:
    for template in pod_templates(rendered(name)).values():
        yield from containers(template)


def test_a_namespace_that_gives_users_is_not_told_which() -> None:
    for template in pod_templates(rendered("openshift")).values():
        security: dict[str, Any] = template["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(security)


def test_rays_environment_is_what_the_command_prints_but_for_paths() -> None:
    with TemporaryDirectory(prefix="tw-") as folder:
        printed = cluster_environment(Path(folder), "haproxy", FrontDoor())
    templates = pod_templates(rendered("gpu-one-host"))
    for component in ("head", "router", "scheduler"):
        (server,) = templates[component]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in server["env"]}
        for name, value in printed.items():
            if folder not in value:
                assert given.get(name) == value, name
