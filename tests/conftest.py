"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says what else the machine does, not whether the code is right.
settings.register_profile("topwork", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("topwork")
