"""The results as a table for people."""

from collections.abc import Sequence

from tests.gpu.report import Finding

# section: (title, columns as (key, heading))
_SECTIONS = {
    "machine": ("Machine", ()),
    "correctness": (
        "Correctness: relative error against float64, and what must be equal to the bit",
        (("name", "case"), ("error", "error"), ("gate", "gate"), ("note", "")),
    ),
    "kernels": (
        "Kernels: median time of CUDA-graph replays",
        (
            ("name", "case"),
            ("us", "us"),
            ("spread_us", "20..80%"),
            ("floor_us", "floor us"),
            ("of_floor", "floor/time"),
            ("goal", "goal"),
            ("met", "met"),
            ("beside", "beside it"),
        ),
    ),
    "step": (
        "Steps at the shape of Llama-3.1-8B, TP 1",
        (
            ("name", "case"),
            ("ms", "ms"),
            ("wall_ms", "wall ms"),
            ("floor_ms", "floor ms"),
            ("over", "over base"),
            ("floor_over", "floor of that"),
            ("goal", "goal"),
            ("met", "met"),
            ("note", ""),
        ),
    ),
    "start": (
        "First steps at the shape of Llama-3.1-8B, TP 1, nothing compiled before",
        (
            ("name", "case"),
            ("ms", "hundredth ms"),
            ("wall_ms", "first ms"),
            ("over", "first over it"),
            ("goal", "goal"),
            ("met", "met"),
            ("note", ""),
        ),
    ),
    "rank": (
        "A rank at the shape of Llama-3.1-8B, TP 1, by plans",
        (
            ("name", "case"),
            ("ms", "ms"),
            ("p99_ms", "p99 ms"),
            ("alone_ms", "alone ms"),
            ("alone_p99_ms", "alone p99 ms"),
            ("floor_ms", "floor ms"),
            ("goal", "goal"),
            ("met", "met"),
            ("note", ""),
        ),
    ),
}


def table(lines: Sequence[Finding]) -> str:
    """Return all results as text."""
    parts = []
    if any(line.get("is_dry") for line in lines):
        parts.append("A dry run: its times say nothing.\n")
        lines = [{key: line[key] for key in line if key != "met"} for line in lines]
    for section, (title, columns) in _SECTIONS.items():
        rows = [line for line in lines if line["section"] == section]
        if not rows:
            continue
        parts.append(title)
        if not columns:
            skipped = ("section", "name", "status")
            parts += [f"  {k}: {v}" for row in rows for k, v in row.items() if k not in skipped]
        else:
            parts += _aligned([[_cell(row, key) for key, _ in columns] for row in rows], columns)
        parts += [f"  FAILED {row['name']}: {row['why']}" for row in rows if row.get("why")]
        parts.append("")
    parts.append(summary(lines))
    return "\n".join(parts)


def summary(lines: Sequence[Finding]) -> str:
    """Return how much of each section went well, in a line each."""
    parts = []
    for section in list(_SECTIONS)[1:]:
        rows = [line for line in lines if line["section"] == section]
        if rows:
            good = sum(row["status"] == "ok" for row in rows)
            with_goal = [row for row in rows if row.get("met") is not None]
            goals = f", {sum(row['met'] for row in with_goal)} of {len(with_goal)} goals met"
            parts.append(f"{section}: {good} of {len(rows)} ran{goals if with_goal else ''}")
    return "\n".join(parts)


def _cell(row: Finding, key: str) -> str:
    value = row.get(key)
    if key == "name" and row["status"] != "ok":
        return f"{value} [{row['status']}]"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(rows: list[list[str]], columns: Sequence[tuple[str, str]]) -> list[str]:
    rows = [[heading for _, heading in columns], *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
