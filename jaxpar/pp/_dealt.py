"""How a device's rows are dealt to microbatches: as evenly as can be, the first ones have one more.

10 rows, 4 microbatches      0 1 2 | 3 4 5 | 6 7 | 8 9
the larger ones              begin at row 3 i
the smaller ones             begin at row 2 i + 2
"""


def num_larger(num_rows: int, num_parts: int) -> int:
    """How many microbatches have one row more than the others."""
    return num_rows % num_parts


def dealt(num_rows: int, num_parts: int, *, is_smaller: bool) -> tuple[int, int]:
    """Rows of each microbatch of a size, and where microbatch 0 would begin if all were of that size."""
    rows, over = divmod(num_rows, num_parts)
    return (rows, over) if is_smaller or not over else (rows + 1, 0)
