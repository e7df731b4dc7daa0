"""One door for timelines on disk: the ending of the path says which form."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._render._figure import draw
from jaxpar.pp._schedule._render._trace import chrome_trace
from jaxpar.pp._schedule._timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".svg", ".png", ".pdf")


def render(timeline: Timeline, path: "str | os.PathLike[str]") -> None:
    """Write the timeline to a file: a picture, or a trace that Chrome and Perfetto open.

    The same timeline gives the same SVG, byte for byte.

    Args:
        timeline: What `simulate` returned.
        path: Where; `.svg`, `.png` and `.pdf` are drawn by `draw`, `.json` is `chrome_trace`.

    Raises:
        ScheduleError: Another ending, or matplotlib is not installed.

    Example:
        >>> import tempfile
        >>> from jaxpar.pp import Schedule, simulate
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     render(simulate(Schedule([["0F0", "0B0"]])), f"{folder}/trace.json")
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    elif suffix in _PICTURES:
        save(draw(timeline), Path(path))
    else:
        raise ScheduleError(
            f"render: {str(path)!r} ends in {suffix!r}. Pictures end in {', '.join(_PICTURES)}, a trace in .json."
        )


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the same one gives the same file."""
    import matplotlib

    # Without these an SVG carries today's date and random identifiers.
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "jaxpar", "svg.fonttype": "none"}):
        figure.savefig(path, metadata=undated, dpi=150)
