"""`topwork status`: health, load, memory and adapters of a server, as far as a key may know."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.cli.connection import DEFAULT_URL, AsJson, Key, Url, connected
from deploy.cli.output import print_json, wants_json
from deploy.config_errors import one_line

if TYPE_CHECKING:
    from deploy.cli.client import Client

# What is shown of each scheduler: gauges of /metrics, all of them whole numbers.
GAUGES = {
    "up": "topwork_scheduler_up",
    "ready": "topwork_engine_ready",
    "healthy": "topwork_engine_healthy",
    "step": "topwork_engine_step",
    "running": "topwork_requests_running",
    "waiting": "topwork_requests_waiting",
    "slots": "topwork_adapter_slots",
    "slots_used": "topwork_adapter_slots_used",
    "kv_pages": "topwork_kv_blocks",
    "kv_pages_held": "topwork_kv_blocks_held",
    "kv_pages_cached": "topwork_kv_blocks_cached",
    "ranks_alive": "topwork_tp_ranks_alive",
}
IS_SWITCH = ("up", "ready", "healthy")
ADAPTERS, POOL_UP = "topwork_adapters_registered", "topwork_adapter_pool_up"


def status(url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """Show a server's health, version, schedulers, slots, use of the KV cache, and adapters.

    Exits with 0 if it is healthy and ready, with 1 if not, with 2 if nothing answers.
    """
    with connected(url, api_key) as client:
        found = status_of(client)
    if wants_json(as_json):
        print_json(found)
    else:
        _show(found)
    raise typer.Exit(0 if found["healthy"] and found["ready"] else 1)


def status_of(client: "Client") -> dict[str, Any]:
    """Return what the routes of a server say of it.

    Raises:
        CallError: if nothing answers, or what answers is no Topwork server.
    """
    version = client.get("/version")
    metrics = client.reply("/metrics")
    healthy, why_unhealthy = _judged(client, "/health")
    ready, why_unready = _judged(client, "/ready")
    return {
        "url": client.url,
        "version": version.get("version") if isinstance(version, dict) else None,
        "model": _model(client),
        "healthy": healthy,
        "ready": ready,
        "reasons": list(dict.fromkeys([*why_unhealthy, *why_unready])),
        "details": metrics.is_success,
        **measured(metrics.text if metrics.is_success else ""),
    }


def _judged(client: "Client", path: str) -> tuple[bool, list[str]]:
    """Return whether a route says yes, and what it says if not."""
    reply = client.reply(path)
    if reply.is_success:
        return True, []
    try:
        body = reply.json()
        reasons = [str(one) for one in body.get("reasons", ())]
        return False, reasons or [str(body["status"])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False, [f"{path} answers {reply.status_code}"]


def _model(client: "Client") -> str | None:
    """Return the base model's name, None if the key may not see it."""
    from deploy.cli.client import CallError

    try:
        listed = client.get("/v1/models?limit=1")
        return str(listed["data"][0]["id"])
    except CallError as error:
        if error.status is None:
            raise
    except (KeyError, TypeError, IndexError):
        pass
    return None


def measured(text: str) -> dict[str, Any]:
    """Return what /metrics says of schedulers, adapters and their pool; what is no metric, nothing.

    What a scheduler does not report, because it does not answer, is left out.
    """
    from prometheus_client.parser import text_string_to_metric_families

    schedulers: dict[str, dict[str, Any]] = {}
    adapters: dict[str, int] = {}
    is_pool_up = None
    names = {metric: name for name, metric in GAUGES.items()}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in names:
                    name, replica = names[sample.name], sample.labels["replica"]
                    value: Any = bool(sample.value) if name in IS_SWITCH else int(sample.value)
                    schedulers.setdefault(replica, {"replica": replica})[name] = value
                elif sample.name == ADAPTERS:
                    adapters[sample.labels["level"]] = int(sample.value)
                elif sample.name == POOL_UP:
                    is_pool_up = bool(sample.value)
    except (ValueError, KeyError):
        return {"schedulers": [], "adapters": {}, "adapter_pool_up": None}
    return {
        "schedulers": [schedulers[replica] for replica in sorted(schedulers)],
        "adapters": adapters,
        "adapter_pool_up": is_pool_up,
    }


def _show(found: Mapping[str, Any]) -> None:
    console = Console()

    def line(label: str, text: object) -> None:
        console.print(f"[bold]{label:<12}[/]{escape(one_line(text))}", highlight=False)

    line("server", f"{found['url']}, Topwork {found['version']}")
    line("model", found["model"] or "not told without a key")
    line("health", "ok" if found["healthy"] else "; ".join(found["reasons"]))
    line("ready", "yes" if found["ready"] else "no")
    if not found["details"]:
        line("details", "not told without a key that has the scope metrics")
        return
    counts = ", ".join(f"{count} {level}" for level, count in found["adapters"].items() if count)
    pool = "" if found["adapter_pool_up"] else "; their pool does not answer"
    line("adapters", f"{counts or 'none'}{pool}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("SCHEDULER", "STATE", "RUNNING", "WAITING", "SLOTS", "KV PAGES", "RANKS"):
        table.add_column(column)
    for one in found["schedulers"]:
        table.add_row(*(escape(one_line(cell)) for cell in _cells(one)))
    console.print(table)


def _cells(one: Mapping[str, Any]) -> list[str]:
    state = "healthy" if one.get("healthy") else "unhealthy" if one.get("up") else "silent"
    held, total = one.get("kv_pages_held"), one.get("kv_pages")
    share = f" ({held / total:.0%})" if held is not None and total else ""
    return [
        str(one["replica"]),
        state,
        _known(one.get("running")),
        _known(one.get("waiting")),
        f"{_known(one.get('slots_used'))}/{_known(one.get('slots'))}",
        f"{_known(held)}/{_known(total)}{share}",
        _known(one.get("ranks_alive")),
    ]


def _known(value: object) -> str:
    return "-" if value is None else str(value)
