"""Makes the files of the chart that follow from others: `python -m helm.tools.generate [--check]`.

Owns which they are: values.yaml, values.schema.json and README.md come from helm/tools, dashboards
and rules are copies of deploy/observability's, as Helm reads nothing outside a chart.
"""

import json
import sys
from pathlib import Path

from helm.tools.pages import readme, values_yaml
from helm.tools.schema import values_schema

CHART = Path(__file__).parents[1]
OBSERVABILITY = CHART.parent / "deploy" / "observability"
COPIED = {"dashboards": "*.json", "rules": "*.yaml"}


def made_files() -> dict[Path, str]:
    """Return the text of each file that is made, by its path."""
    files = {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        CHART / "README.md": readme(CHART / "tools" / "README.in.md"),
    }
    for folder, pattern in COPIED.items():
        for source in sorted((OBSERVABILITY / folder).glob(pattern)):
            files[CHART / "files" / folder / source.name] = source.read_text()
    return files


def stale_files() -> list[str]:
    """Return what is not as it would be made, and copies whose source is gone."""
    made = made_files()
    stale = {path for path, text in made.items() if not path.exists() or path.read_text() != text}
    for folder, pattern in COPIED.items():
        stale |= set((CHART / "files" / folder).glob(pattern)) - set(made)
    return sorted(str(path.relative_to(CHART)) for path in stale)


def main(arguments: list[str]) -> int:
    """Write all files, or say which ones are stale."""
    if arguments == ["--check"]:
        stale = stale_files()
        for name in stale:
            print(f"helm/{name} is stale: run python -m helm.tools.generate")
        return 1 if stale else 0
    if arguments:
        print("usage: python -m helm.tools.generate [--check]")
        return 2
    made = made_files()
    for name in stale_files():
        path = CHART / name
        if path not in made:
            path.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
