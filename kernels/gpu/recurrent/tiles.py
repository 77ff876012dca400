"""How the states of a recurrence are cut among the programs of a GPU."""

_ELEMENTS = 1024  # of a state in one warp's registers, 32 of each thread
_SECTOR = 8  # float32 that memory hands out at once


def block_columns(num_rows: int, num_columns: int) -> int:
    """Return how many columns of a head's state [rows, columns] float32 a program takes.

    A row of a program's part is a whole sector, unless the state's own are shorter.
    """
    fitting = max(_SECTOR, _ELEMENTS // _power_of_2(num_rows))
    return min(fitting, _power_of_2(num_columns))


def _power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
