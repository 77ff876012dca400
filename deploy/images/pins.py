"""Writes constraints.txt: the version of every package that goes into the images.

    pip install --dry-run --ignore-installed --report report.json '.[cpu]' triton
    python -m deploy.images.pins report.json > deploy/images/constraints.txt

The first with an index that has torch for CUDA, as PyPI does: that build says which Triton and
which of NVIDIA's libraries go with it, and the one for CPUs needs none of them.

Owns the form, one package to a line in the order of names.
"""

import json
import sys
from pathlib import Path
from typing import Any

HEADER = "# Made by deploy/images/pins.py; what an image is built from is named by version."


def pins(report: dict[str, Any], own: str = "topwork") -> str:
    """Return one line for each package of a report by pip, but not for our own."""
    lines = set()
    for package in report["install"]:
        metadata = package["metadata"]
        name = metadata["name"].lower().replace("_", "-")
        version = metadata["version"].partition("+")[0]  # which build it is says the index
        if name != own:
            lines.add(f"{name}=={version}")
    return "\n".join((HEADER, *sorted(lines))) + "\n"


if __name__ == "__main__":
    sys.stdout.write(pins(json.loads(Path(sys.argv[1]).read_text())))
