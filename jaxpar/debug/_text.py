"""Tables and byte counts as plain text and HTML, shared by everything that `jaxpar.debug` prints."""

import html
from collections.abc import Sequence

import rich.table


def format_bytes(num_bytes: int) -> str:
    """Exact below 1 KiB, else three digits and a binary unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(25 * 2**20)
    ('512 B', '1.5 KiB', '25 MiB')
    """
    size, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    unit = 0
    while abs(size) >= 1024 and unit < len(units) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{size:.4g} {units[unit]}"


def short_list(numbers: Sequence[int], *, most: int = 8) -> str:
    """Numbers apart by spaces; of many, the first ones and how many there are.

    >>> short_list(range(4)), short_list(range(64), most=3)
    ('0 1 2 3', '0 1 2 ... of 64')
    """
    shown = " ".join(str(number) for number in numbers[:most])
    return shown if len(numbers) <= most else f"{shown} ... of {len(numbers)}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns aligned with spaces, a rule under the header; columns in `right` are right-aligned."""
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if k in right else c.ljust(w)
            for k, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "") -> str:
    """The same as an HTML table for notebooks."""
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    head = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}<thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def rich_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> rich.table.Table:
    """The same as a table for rich consoles; the first column is never wrapped."""
    table = rich.table.Table()
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k in right else "left", no_wrap=k == 0)
    for row in rows:
        table.add_row(*row)
    return table
