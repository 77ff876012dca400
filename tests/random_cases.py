"""How many random cases a test tries: all of them in `make test-random`, a quarter elsewhere."""

from hypothesis import settings


def is_whole() -> bool:
    """Tell whether all cases are asked for; modules of tests are read after that is known."""
    return settings.get_current_profile_name() == "all"


def num_cases(number: int) -> int:
    """Return how many of so many cases this run tries."""
    return number if is_whole() else -(-number // 4)
