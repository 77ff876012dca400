"""`python -m tests.compat`: vLLM's own tests, against our server."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.compat.report import GOAL, RESULTS, read, shown
from tests.compat.source import CACHE, RUN, SOURCE, fetch, prepare, server_files
from tests.end_to_end.server import MODEL_DIR, adapter_dirs


def run(selected: list[str], report: Path) -> None:
    """Run tests in the tree that is made for them; the report has a line for each case."""
    environment = {
        **os.environ,
        "COMPAT_SOURCE": str(SOURCE),
        "COMPAT_RUN": str(RUN),
        "COMPAT_REPORT": str(report),
        "COMPAT_MODEL": str(MODEL_DIR),
        # The last first: its answers are the longest.
        "COMPAT_ADAPTERS": os.pathsep.join(str(path) for path in [*adapter_dirs().values()][::-1]),
        "COMPAT_TOPWORK": str(Path(sys.executable).parent / "topwork"),
        "PYTHONPATH": str(RUN),
    }
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", "--tb=short"]
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider", *selected]
    subprocess.run(command, cwd=RUN, env=environment, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="files or cases; all that count unless given")
    parser.add_argument("--write", action="store_true", help="keep the results for the page")
    arguments = parser.parse_args()
    fetch()
    prepare(MODEL_DIR)
    run(arguments.cases or server_files(), CACHE / "report.jsonl")
    report = read(CACHE / "report.jsonl")
    print(shown(report))
    if arguments.write:
        RESULTS.write_text(json.dumps(report.results(), indent=2) + "\n")
    is_well = not report.unexplained() and not report.stale()
    if not (is_well and (arguments.cases or report.share >= GOAL)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
