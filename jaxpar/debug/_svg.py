"""Draw layouts as SVG: a grid of slices coloured by device, axis captions outside.

          dim 1 @ tp
          0:8     8:16
dim 0  .-------.-------.
 0:4   | 0     | 1     |      one colour per cell: that of its first device; copies share it
 4:8   | 2     | 3     |
       '-------'-------'
"""

import colorsys
import html
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.debug._layout import Layout
from jaxpar.debug._text import short_list

_FONT = 'font-family="ui-monospace, monospace" font-size="12"'
_LINE, _GAP, _CHAR = 18, 16, 8
_CELL_WIDTH, _CELL_HEIGHT, _GRID_WIDTH, _READABLE = 72, 32, 640, 24


@dataclass(frozen=True)
class Drawing:
    """SVG elements and the room they take."""

    elements: tuple[str, ...]
    width: int
    height: int


def layout_svg(layouts: Sequence[tuple[str, Layout]]) -> str:
    """One picture of several named layouts, below each other."""
    elements: list[str] = []
    width = top = 0
    for name, layout in layouts:
        drawing = _draw(f"{name}  {layout.title}".strip(), layout)
        elements.append(f'<g transform="translate(0 {top})">{"".join(drawing.elements)}</g>')
        top += drawing.height + _GAP
        width = max(width, drawing.width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'{_FONT}><rect width="100%" height="100%" fill="white"/>{"".join(elements)}</svg>'
    )


def device_colour(device: int, num_devices: int) -> str:
    """A light colour for each device, hues spread evenly over the mesh.

    >>> device_colour(0, 8), device_colour(4, 8)
    ('#f0a8a8', '#a8f0f0')
    """
    rgb = colorsys.hls_to_rgb(device / max(num_devices, 1), 0.8, 0.7)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb)


def _draw(title: str, layout: Layout) -> Drawing:
    heading = _text(4, 14, title)
    drawing = _grid(layout) if len(layout.shape) <= 2 else _lines(layout)
    width = max(drawing.width, 8 + _CHAR * len(title))
    body = f'<g transform="translate(0 {_LINE + 6})">{"".join(drawing.elements)}</g>'
    return Drawing((heading, body), width, drawing.height + _LINE + 6)


def _grid(layout: Layout) -> Drawing:
    """Rows are dim 0 and columns dim 1; a vector is one row, a scalar one cell."""
    rank = len(layout.shape)
    columns = layout.dims[-1].pieces if rank else ((0, 1),)
    rows = layout.dims[0].pieces if rank == 2 else ((0, 1),)
    width = max(4, min(_CELL_WIDTH, _GRID_WIDTH // len(columns)))
    height = _CELL_HEIGHT if width >= _READABLE else width
    top = 2 * _LINE if rank else 0
    left = _left(layout)
    elements = []
    for i in range(len(rows)):
        for j in range(len(columns)):
            devices = layout.cells[(i, j)[2 - rank :]]
            x, y = left + j * width, top + i * height
            elements.append(_cell(x, y, width, height, devices, layout.num_devices))
    if rank:
        elements.append(_text(left, 12, layout.dims[-1].caption(rank - 1)))
    if rank and width >= _READABLE:
        elements += [_text(left + j * width + 4, 12 + _LINE, _range(p)) for j, p in enumerate(columns)]
    if rank == 2:
        elements.append(_text(4, 12 + _LINE, layout.dims[0].caption(0)))
    if rank == 2 and width >= _READABLE:
        elements += [_text(left - 60, top + i * height + 20, _range(p)) for i, p in enumerate(rows)]
    return Drawing(tuple(elements), left + len(columns) * width + 4, top + len(rows) * height)


def _lines(layout: Layout) -> Drawing:
    """Three dims and more: a bar for each dim, cut as the dim is."""
    elements, left = [], _left(layout)
    for dim, cut in enumerate(layout.dims):
        width = max(4, min(_CELL_WIDTH, _GRID_WIDTH // len(cut.pieces)))
        elements.append(_text(4, dim * _CELL_HEIGHT + 20, cut.caption(dim)))
        for k, piece in enumerate(cut.pieces):
            x, y = left + k * width, dim * _CELL_HEIGHT + 4
            elements.append(_box(x, y, width, _CELL_HEIGHT - 8, "hsl(0 0% 92%)", _range(piece)))
            elements += [_text(x + 4, y + 16, _range(piece))] if width >= _READABLE else []
    width = left + max(len(d.pieces) for d in layout.dims) * _CELL_WIDTH
    return Drawing(tuple(elements), min(width, left + _GRID_WIDTH) + 4, len(layout.dims) * _CELL_HEIGHT)


def _left(layout: Layout) -> int:
    """Room for the longest dim caption."""
    return 16 + _CHAR * max((len(dim.caption(k)) for k, dim in enumerate(layout.dims)), default=0)


def _cell(x: int, y: int, width: int, height: int, devices: Sequence[int], num_devices: int) -> str:
    box = _box(x, y, width, height, device_colour(devices[0], num_devices), f"devices {short_list(devices)}")
    everyone = short_list(devices, most=len(devices))
    fits = len(everyone) * _CHAR <= width
    label = everyone if fits else f"{devices[0]} +{len(devices) - 1}"
    return box + (_text(x + 4, y + 20, label) if width >= _READABLE else "")


def _box(x: int, y: int, width: int, height: int, fill: str, tooltip: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="black">'
        f"<title>{html.escape(tooltip)}</title></rect>"
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{html.escape(text)}</text>'


def _range(piece: tuple[int, int]) -> str:
    return f"{piece[0]}:{piece[1]}"
