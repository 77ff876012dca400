"""What holds for all tests."""

import signal
from typing import Any

from hypothesis import HealthCheck, settings

# How long an example takes says what else the machine does, not whether the code is right.
settings.register_profile("topwork", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("topwork")


def _go_on(*_: Any) -> None:
    """Do nothing."""


# Tests that are started in the background, or by nohup, have these ignored, and so would all that
# they start: tests send them. What is handled here is not ignored there.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _go_on)
