"""The optional extra `report`: a sheet as the bytes of a picture, by matplotlib.

The same sheet gives the same bytes: no date, no random ids, nothing of the user's own settings.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from io import BytesIO

from ptrain.charts.sheet import Rectangle, Sheet
from ptrain.errors import Fault, SpecError

MISSING = Fault(
    place="--chart",
    finding="needs matplotlib, which is not installed",
    remedy="pip install 'ptrain[report]'",
)
_POINTS, _DOTS = 72, 150  # an inch


class Format(StrEnum):
    PNG = "png"
    SVG = "svg"


def require_canvas(option: str = MISSING.place) -> None:
    """Before anything is computed for a picture, which an `option` asks for."""
    if find_spec("matplotlib") is None:
        raise SpecError(replace(MISSING, place=option))


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
