"""The page of all metrics, METRICS.md; `python -m deploy.observability.page` writes it.

Made from what a router shows of a sample, so that names, labels and buckets are those of the code.
"""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from cluster.router.metrics.exposition import Families
from deploy.observability.sample import sample_view

FILE = Path(__file__).parent / "METRICS.md"
INTRODUCTION = """# Metrics

Made by `python -m deploy.observability.page`: do not edit.

`GET /metrics` of any router shows the whole: the counts of all routers, and what all scheduler
replicas, the adapter pool and the catalogue report at that moment. One scrape of one address is
enough, also of a load balancer that chooses another router each time; where several targets are
scraped all the same, as one for each pod, their copies differ in the labels of the scrape only,
and `max without (instance, pod)` takes them out. The rules and dashboards beside this page do so.

**Restarts.** Sum over the `rate()` or `increase()` of series, never the other way round.

- A router has another name in each life (`router`). Its last counts are entered when it ends in
  order; when it dies those of its last 5 seconds are lost. Its series stay as they were for 10
  minutes, then vanish. A plain sum of counters falls then; the sum of their rates does not.
- All routers' counts go through one metrics hub, which lives in the adapter pool's process: no
  scrape shows less than an earlier one, whichever router answers. While the pool is away a router
  shows its own counts alone.
- A replica (`replica`) keeps its counters when its ranks are restarted. When its own process ends
  they begin at zero, which `rate()` takes into account.

**Adapter labels** are names in the catalogue, 1,000 of them at most for each router; what comes
later is counted under `_other`. The series of a name end when it is unregistered. A sum of adapters
has their names with `+` between them.

What never reaches a router, because the load balancer has none to send it to, is not counted here:
it shows as scrapes that fail.

The format is the plain text of version 0.0.4 only; units are seconds and bytes. Histograms have no
adapter label: the mean time to first token of an adapter is the rate of
`topwork_first_token_wait_seconds_total` over that of `topwork_first_tokens_total`.
"""
SECTIONS = (
    ("Routers", lambda family: _is_own(family) and "router" in _labels(family)),
    (
        "Scheduler replicas and ranks",
        lambda family: _is_own(family) and "replica" in _labels(family),
    ),
    ("Adapter pool and catalogue", lambda family: family.name.startswith("topwork_adapter")),
    ("vLLM's names, with `vllm_metrics`", lambda family: not _is_own(family)),
    ("The rest", lambda family: True),
)


def page() -> str:
    """Return the whole page."""
    left = list(Families(sample_view()).collect())
    parts = [INTRODUCTION]
    for title, belongs in SECTIONS:
        here = [family for family in left if belongs(family)]
        left = [family for family in left if family not in here]
        parts.append(f"## {title}\n\n" + "\n".join(_table(here)) + "\n")
    return "\n".join(parts)


def _table(families: Iterable[Metric]) -> Iterable[str]:
    yield "| name | type | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        meaning = family.documentation
        bounds = _bounds(family)
        if bounds:
            meaning += f" Buckets: {', '.join(bounds)}."
        labels = ", ".join(f"`{label}`" for label in _labels(family))
        yield f"| `{name}` | {family.type} | {labels} | {meaning} |"


def _is_own(family: Metric) -> bool:
    return family.name.startswith("topwork_")


def _labels(family: Metric) -> tuple[str, ...]:
    assert family.samples, f"the sample has no series of {family.name}"
    return tuple(label for label in family.samples[0].labels if label != "le")


def _bounds(family: Metric) -> list[str]:
    bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
    first = bounds[: bounds.index("+Inf")] if bounds else []
    return [f"{float(bound):g}" for bound in first]


if __name__ == "__main__":
    FILE.write_text(page())
