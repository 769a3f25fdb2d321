"""The optional extra `report`: a sheet as the bytes of a picture, by matplotlib.

The same sheet gives the same bytes: no date, no random ids, nothing of the user's own settings.

Where a picture goes: refused before anything is computed, and written whole or not at all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from enum import StrEnum
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from ptrain.charts.sheet import Rectangle, Sheet
from ptrain.errors import Fault, PtrainError, SpecError, refused

MISSING = Fault(
    place="--chart",
    finding="needs matplotlib, which is not installed",
    remedy="Run `pip install 'ptrain[report]'`.",
)
_POINTS, _DOTS = 72, 150  # an inch


class Format(StrEnum):
    PNG = "png"
    SVG = "svg"


def require_canvas(option: str = MISSING.place) -> None:
    """Before anything is computed for a picture, which an `option` asks for."""
    if find_spec("matplotlib") is None:
        raise SpecError(MISSING._replace(place=option))


def painted(sheet: Sheet, form: Format) -> bytes:
    """PNG at 150 dots an inch; SVG with its text as outlines, so that it fits wherever it is
    shown."""
    try:
        import matplotlib
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError(MISSING) from error
    settings = {**matplotlib.rcParamsDefault, "svg.hashsalt": "ptrain", "svg.fonttype": "path"}
    settings.pop("backend", None)  # no window is opened, and to set it would choose one
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(sheet.width / _POINTS, sheet.height / _POINTS), dpi=_DOTS)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, sheet.width), ylim=(sheet.height, 0))
        axes.set_axis_off()
        for (colour, edge, width), corners in _alike(sheet).items():
            axes.add_collection(
                PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=width),
                autolim=False,
            )
        for text in sheet.texts:
            axes.text(
                text.x,
                text.y,
                text.text,
                size=text.size,
                color=text.colour,
                weight="bold" if text.is_bold else "normal",
                horizontalalignment=text.align,
                verticalalignment="center_baseline",
                parse_math=False,
            )
        image = BytesIO()
        figure.savefig(image, format=form.value, dpi=_DOTS, metadata=_metadata(sheet, form))
    return image.getvalue()


_Corners = list[tuple[float, float]]


def _alike(sheet: Sheet) -> dict[tuple[str, str, float], list[_Corners]]:
    """Rectangles by colour, edge and width of the edge: one collection each, or thousands of boxes
    take minutes."""
    alike: defaultdict[tuple[str, str, float], list[_Corners]] = defaultdict(list)
    for rectangle in sheet.rectangles:
        alike[rectangle.colour, rectangle.edge, rectangle.edge_width].append(_corners(rectangle))
    return alike


def _corners(rectangle: Rectangle) -> _Corners:
    right, lower = rectangle.x + rectangle.width, rectangle.y + rectangle.height
    return [(rectangle.x, rectangle.y), (right, rectangle.y), (right, lower), (rectangle.x, lower)]


def _metadata(sheet: Sheet, form: Format) -> dict[str, str | None]:
    match form:
        case Format.PNG:
            return {"Title": sheet.title, "Software": None}
        case Format.SVG:
            return {"Title": sheet.title, "Creator": None, "Date": None}


def require_writable(path: Path, option: str = "--chart") -> Format:
    """Return the format that the name's ending asks for; `option` named the file. Raises SpecError
    for another ending, a folder in place of a file, a folder that is not there or may not be
    written, and where the extra is not installed."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in list(Format):
        ends = f"ends in .{ending}" if ending else "has no ending"
        raise refused(option, f"{path} {ends}", "Use a file name that ends in .png or .svg.")
    try:
        if not path.parent.is_dir():
            raise refused(
                option,
                f"the folder {path.parent} does not exist",
                "Create the folder, or use another path.",
            )
        if path.is_dir():
            raise refused(option, f"{path} is a folder", "Add a file name to the path.")
    except OSError as error:
        raise _cannot(path, error, option) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise refused(option, f"the folder {path.parent} is not writable", "Use another folder.")
    require_canvas(option)
    return Format(ending)


def write_whole(path: Path, content: bytes, option: str = "--chart") -> None:
    """Into a temporary neighbour, then renamed. Raises SpecError at the `option` that names it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise _cannot(path, error, option) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _cannot(path: Path, error: OSError, option: str = "--chart") -> PtrainError:
    return refused(option, f"{path}: cannot write: {error.strerror}", "Use another file.")
