"""What a release serves: the keys of `topwork serve`, as Ray and our own schema read them."""

from pathlib import Path

import pytest
import yaml

from deploy.config import ServeConfig
from deploy.serving.haproxy.environment import server_environment
from deploy.serving.haproxy.front_door import FrontDoor
from tests.helm.charts import (
    KEYS,
    VALUES,
    Object,
    pod_templates,
    render,
    rendered,
    serve_config,
    served,
    the,
    values_of,
)
from tests.helm.ray_facts import ray_facts

EVERY_SET = pytest.mark.parametrize("name", VALUES)


@EVERY_SET
def test_our_schema_takes_what_is_served(name: str) -> None:
    config = ServeConfig.model_validate(served(rendered(name)))
    assert config.host == "0.0.0.0"
    assert config.model
    config.adapters()


def test_ray_takes_every_serve_config() -> None:
    configs = ray_facts()["configs"]
    assert len(configs) >= 8
    for name, config in configs.items():
        (application,) = config["applications"]
        assert (application["name"], application["route_prefix"]) == ("topwork", "/")
        assert application["import_path"] == "deploy.serving.app:build"
        assert application["args"] == served(rendered(name))
        assert config["http_options"]["host"] == "0.0.0.0"
        assert config["http_options"]["port"] == application["args"]["port"]


def test_adapters_become_arguments_in_the_order_of_their_names() -> None:
    told = served(rendered("everything"))
    assert told["adapter"] == [
        "oracle=/models/adapters/oracle",
        "letter=/models/adapters/letter",
        "pirate=/adapters/pirate",
    ]
    assert told["adapter_dir"] == ["/adapters"]


def test_a_new_adapter_changes_nothing_but_the_serve_config() -> None:
    before, after = values_of("gpu-one-host"), values_of("gpu-one-host")
    after["adapters"]["served"]["letter"] = "/models/adapters/letter"
    one, two = render(before), render(after)
    assert serve_config(one) != serve_config(two)
    for objects in (one, two):
        the(objects, "RayService")["spec"]["serveConfigV2"] = ""
    assert one == two


def test_more_routers_change_the_number_of_pods_and_no_pod() -> None:
    one = render(KEYS | {"topwork": {"device": "cpu", "routers": 1}})
    two = render(KEYS | {"topwork": {"device": "cpu", "routers": 3}})
    assert group(one, "router")["replicas"] == 1 and group(two, "router")["replicas"] == 3
    assert group(one, "router")["template"] == group(two, "router")["template"]


def test_a_tensor_parallel_group_stays_in_one_pod_unless_it_is_told_to_spread() -> None:
    one = group(rendered("gpu-one-host"), "scheduler")
    assert one["numOfHosts"] == 1
    many = group(rendered("gpu-many-hosts"), "scheduler")
    assert many["numOfHosts"] == 2
    (container,) = many["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_rays_autoscaler_may_make_as_many_schedulers_as_serve_may_ask_for() -> None:
    objects = rendered("autoscaling")
    assert served(objects)["anonymous"] is True
    scheduler = group(objects, "scheduler")
    counts = [scheduler[word] for word in ("minReplicas", "replicas", "maxReplicas")]
    assert counts == [1, 1, 3]
    router = group(objects, "router")
    assert [router[word] for word in ("minReplicas", "replicas", "maxReplicas")] == [2, 2, 2]
    assert the(objects, "RayService")["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True


def test_ray_counts_a_cpu_for_the_scheduler_and_every_rank_that_has_no_gpu() -> None:
    cpu = render(KEYS | {"topwork": {"device": "cpu", "tp": 3}})
    assert group(cpu, "scheduler")["rayStartParams"]["num-cpus"] == "5"
    assert group(rendered("gpu-one-host"), "scheduler")["rayStartParams"]["num-cpus"] == "2"
    head = the(cpu, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


def test_routers_run_in_pods_of_their_own() -> None:
    objects = rendered("gpu-one-host")
    (application,) = serve_config(objects)["applications"]
    (router,) = application["deployments"]
    wanted = router["ray_actor_options"]["resources"]["topwork_router"]
    # The shell that KubeRay runs takes the outer quotes and the backslashes away.
    given = group(objects, "router")["rayStartParams"]["resources"]
    assert yaml.safe_load(yaml.safe_load(given)) == {"topwork_router": 1}
    assert 0.5 <= wanted <= 1
    assert "resources" not in group(objects, "scheduler")["rayStartParams"]


def test_every_container_of_a_cluster_has_the_environment_that_ray_needs(tmp_path: Path) -> None:
    pods = pod_templates(rendered("minimal-cpu"))
    given = []
    for component in ("head", "router", "scheduler"):
        (container,) = pods[component]["spec"]["containers"]
        given.append({one["name"]: one.get("value") for one in container["env"]})
    assert given[0] == given[1] == given[2]
    ports = range(20_000, 20_200)
    for name, value in server_environment(tmp_path, "haproxy", ports, FrontDoor()).items():
        if "_DIRECT_INGRESS_M" in name and name.endswith("_HTTP_PORT"):
            continue  # a pod has all ports to itself
        if str(tmp_path) in value:
            assert name not in given[0]  # its files lie where Serve puts them
        elif name.endswith("_PORT"):
            assert name in given[0]
        else:
            assert given[0][name] == value, name
    assert given[0]["RAY_AUTH_MODE"] == "token"


def test_haproxy_is_told_of_the_front_door_what_the_configuration_says() -> None:
    keys = {
        "max_connections_per_address": 0,
        "trusted_proxy": ["10.0.0.0/8"],
        "body_timeout": 60,
    }
    values = values_of("minimal-cpu")
    values["topwork"] = values.get("topwork", {}) | keys
    pods = pod_templates(render(values))
    for component in ("head", "router"):
        (container,) = pods[component]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        door = FrontDoor.of(given)
        assert door == FrontDoor(
            max_connections_per_address=0, trusted_proxy=("10.0.0.0/8",), body_timeout=60.0
        )


def test_a_large_number_of_bytes_arrives_as_it_was_written() -> None:
    told = ServeConfig.model_validate(served(rendered("gpu-one-host")))
    assert told.adapter_memory == 4 * 2**30
    assert told.kv_cache_memory == 40 * 2**30


def test_a_changed_configuration_of_one_node_servers_rolls_new_pods_out() -> None:
    before, after = values_of("deployment"), values_of("deployment")
    after["adapters"]["served"]["oracle"] = "oracle"
    one, two = the(render(before), "Deployment"), the(render(after), "Deployment")
    assert one["spec"]["template"] != two["spec"]["template"]
    assert one["spec"]["selector"] == two["spec"]["selector"]


def group(objects: list[Object], name: str) -> Object:
    cluster = the(objects, "RayService")["spec"]["rayClusterConfig"]
    (found,) = [one for one in cluster["workerGroupSpecs"] if one["groupName"] == name]
    return dict(found)
