"""What `topwork check --quality` prints: a table for people, or JSON."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.checks.check_command import known_adapters
from deploy.cli.output import console, print_json
from deploy.engine_config import Checked
from deploy.quality.measure import Found, measure


def report(checked: Checked, text: str, as_json: bool) -> None:
    """Measure, and print what is found.

    Raises:
        ConfigError: as `measure`.
    """
    with console.status("reading the text") as status:
        found = measure(checked, text, known_adapters(checked.config), status.update)
    if as_json:
        names = ("dtype", "quantization", "kv_cache_dtype", "lora_dtype")
        formats = {name: getattr(checked.config, name) for name in names}
        print_json(formats | {"quality": [one.as_json() for one in found]})
    else:
        Console().print(_table(found))


def _table(found: list[Found]) -> Table:
    table = Table("against float32", title="next tokens of a text")
    for name in ("positions", "mean KL, nats", "largest KL", "same first choice"):
        table.add_column(name, justify="right")
    for one in found:
        distance = one.distance
        table.add_row(
            escape(one.model),
            f"{distance.num_positions}",
            f"{distance.mean:.6f}",
            f"{distance.largest:.4f}",
            f"{distance.agreement:.2%}",
        )
    return table
