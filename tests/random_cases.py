"""How many random cases a test tries: all of them in `make test-random`, a quarter elsewhere."""

from hypothesis import settings


def num_cases(number: int) -> int:
    """Return how many of so many cases this run tries, which is known when tests are read."""
    return number if is_whole() else -(-number // 4)


def is_whole() -> bool:
    """Tell whether this run tries all of them."""
    return settings.get_current_profile_name() == "all"
