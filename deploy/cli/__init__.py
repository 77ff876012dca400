"""The `topwork` command: one module for each kind of command; heavy imports wait for their use.

`main` is its entry point.
"""

from deploy.serving.lifecycle import early_signals  # noqa: F401 - before the rest takes its time


def main() -> None:
    """Run the command line."""
    import sys

    from deploy.cli.commands import app

    sys.exit(app(prog_name="topwork"))
