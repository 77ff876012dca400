"""How much the processes of a cluster tell of themselves; may change while they run."""

import logging


def set_log_level(level: str) -> None:
    """Let Topwork's own loggers tell this much on standard error, which Ray collects."""
    logger = logging.getLogger("topwork")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
