"""PromQL from metric names: what all queries of the dashboards are made with.

Owns that a whole which is scraped several times counts once: every router shows the series of all
routers and replicas, so that copies differ in the labels of the scrape alone.
"""

# Labels that a scrape adds to tell its targets apart.
COPIES = "instance, pod, container, endpoint, node"
INFERENCE = 'route=~"/v1/(chat/)?completions"'


def now(name: str, labels: str = "") -> str:
    """Return the series of a gauge, each once."""
    return _once(_series(name, labels))


def rate(name: str, labels: str = "") -> str:
    """Return the growth per second of the series of a counter, each once."""
    return _once(f"rate({_series(name, labels)}[$__rate_interval])")


def total(values: str, *by: str) -> str:
    """Return a sum over everything but the labels given."""
    return f"sum by ({', '.join(by)}) ({values})" if by else f"sum({values})"


def largest(values: str, *by: str) -> str:
    """Return the largest value by the labels given."""
    return f"max by ({', '.join(by)}) ({values})" if by else f"max({values})"


def quantile(share: float, name: str, *by: str, labels: str = "") -> str:
    """Return a quantile of a histogram over the last while."""
    return f"histogram_quantile({share:g}, {total(rate(f'{name}_bucket', labels), 'le', *by)})"


def mean(name: str, *by: str) -> str:
    """Return the mean of a histogram's values over the last while."""
    return ratio(total(rate(f"{name}_sum"), *by), total(rate(f"{name}_count"), *by))


def ratio(part: str, whole: str) -> str:
    """Return one value over another, series by series."""
    return f"{part} / {whole}"


def or_zero(values: str, like: str) -> str:
    """Return values, and 0 where there are none beside a series of `like`."""
    return f"({values} or 0 * {like})"


def top(count: int, values: str) -> str:
    """Return the largest few."""
    return f"topk({count}, {values})"


def _series(name: str, labels: str) -> str:
    more = f", {labels}" if labels else ""
    return f'topwork_{name}{{job=~"$job"{more}}}'


def _once(values: str) -> str:
    return f"max without ({COPIES}) ({values})"
