"""A real Prometheus beside a server: scrapes it, holds our rules, answers queries."""

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.end_to_end.asking import wait_for
from tests.end_to_end.server import ROOT
from tests.patience import PATIENCE
from tests.ports import free_port

OBSERVABILITY = ROOT / "deploy" / "observability"


def missing() -> str:
    """Return why there can be no Prometheus here; "" if there can."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: apt-get install prometheus" if absent else ""


class Prometheus:
    """Debian's prometheus with our rules and one target, in a directory of its own."""

    def __init__(self, folder: Path, target: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(OBSERVABILITY / "rules" / "*.yaml")]
        (job,) = (one for one in config["scrape_configs"] if one["job_name"] == "topwork")
        job["static_configs"] = [{"targets": [target]}]
        config["scrape_configs"] = [job]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_it_scrapes(self) -> None:
        def scrapes() -> bool:
            assert self.process.poll() is None, Path(self._log.name).read_text()
            try:
                return bool(self.query("topwork_build_info"))
            except httpx.HTTPError:
                return False

        wait_for(scrapes)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and values as of now; without those that are no number."""
        reply = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=PATIENCE)
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        data = reply.json()["data"]
        assert data["resultType"] == "vector", expression
        found = [(one["metric"], float(one["value"][1])) for one in data["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def names(self) -> list[str]:
        """Return the names of all metrics that were ever scraped."""
        reply = httpx.get(f"{self.url}/api/v1/label/__name__/values", timeout=PATIENCE)
        names: list[str] = reply.json()["data"]
        return names

    def value(self, expression: str) -> float:
        """Return the one value of an expression; nothing counts as 0."""
        found = self.query(expression)
        assert len(found) <= 1, (expression, found)
        return found[0][1] if found else 0.0

    def firing(self) -> set[str]:
        """Return the alerts that fire."""
        return {labels["alertname"] for labels, _ in self.query('ALERTS{alertstate="firing"}')}

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with what became of them."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=PATIENCE).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._log.close()


def panels() -> list[dict[str, Any]]:
    """Return all panels of all dashboards that show something."""
    files = sorted((OBSERVABILITY / "dashboards").glob("*.json"))
    dashboards = [json.loads(file.read_text()) for file in files]
    return [panel for one in dashboards for panel in one["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    """Return a panel's expression as Grafana sends it."""
    filled = expression.replace("$__rate_interval", "1m").replace("$job", ".*")
    assert "$" not in filled, expression
    return filled
