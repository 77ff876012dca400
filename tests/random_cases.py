"""How many random cases a test tries: all of them in `make test-random`, a quarter elsewhere."""

from hypothesis import settings


def num_cases(number: int, part: int = 4) -> int:
    """Return how many of so many cases this run tries, which is known when tests are read.

    Args:
        number: of all cases.
        part: the quick run tries one in so many; more than four where a case takes long.
    """
    return number if is_whole() else -(-number // part)


def is_whole() -> bool:
    """Tell whether this run tries all of them."""
    return settings.get_current_profile_name() == "all"
