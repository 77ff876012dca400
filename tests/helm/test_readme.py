"""What the two pages tell a reader to type is what the chart takes."""

import re
from hashlib import sha256
from pathlib import Path

import helm_python
import pytest
import yaml

from cluster.router.tenancy.key_file import read_keys
from cluster.router.tenancy.principal import SCOPES
from deploy.config import ServeConfig
from tests.helm.charts import CHART, ROOT, VALUES, chart, render, served
from tests.helm.schemas import KUBERAY, KUBERNETES

PAGE = (CHART / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SECTION = OPERATIONS.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]


def document(name: str) -> str:
    """Return what a reader writes into a file of the page."""
    found = re.search(rf"<<'{name}'\n(.*?)\n{name}\n", PAGE, re.S)
    assert found is not None
    return found[1]


def test_the_keys_are_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(document("KEYS"))
    (key,) = read_keys(file)
    assert key.digest == sha256(b"a-long-secret").digest() and key.principal.scopes == SCOPES


def test_the_values_of_the_page_are_served() -> None:
    config = ServeConfig.model_validate(served(render(yaml.safe_load(document("VALUES")))))
    assert config.model == "/models/llama-70b" and config.tp == 4
    assert config.adapters() == {"pirate": "/models/adapters/pirate"}


def test_the_command_of_the_page_of_operations_serves_what_it_says() -> None:
    command = SECTION.replace("\\\n", " ")
    settings = ",".join(re.findall(r"--set (\S+)", command))
    config = ServeConfig.model_validate(served(render(helm_python.parse_set_string(settings))))
    assert (config.model, config.tp, config.device) == ("/models/llama-70b", 4, "cuda")


def test_the_images_that_are_built_are_those_that_the_chart_wants() -> None:
    built = set(re.findall(r"-t registry\.example\.com/(\S+) \.", SECTION))
    version = chart().metadata["appVersion"]
    assert built == {f"topwork:{version}-router", f"topwork:{version}-cuda"}
    assert built == set(re.findall(r"push registry\.example\.com/(\S+)", SECTION))


@pytest.mark.parametrize("version", [*KUBERNETES, *KUBERAY])
def test_the_page_names_the_versions_that_the_tests_check(version: str) -> None:
    assert version in PAGE


def test_there_are_at_least_eight_sets_of_values() -> None:
    assert len(VALUES) >= 8
