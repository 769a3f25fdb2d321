"""The optional extra `report`: a sheet as the bytes of a picture, by matplotlib.

The same sheet gives the same bytes: no date, no random ids, nothing of the user's own settings.

Where a picture goes: refused before anything is computed, and written whole or not at all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from ptrain.charts.sheet import Sheet
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
        figure.savefig(
            image, format=form.value, dpi=_DOTS, metadata={"Title": sheet.title, **_METADATA[form]}
        )
    return image.getvalue()


def _alike(sheet: Sheet) -> dict[tuple[str, str, float], list[list[tuple[float, float]]]]:
    """Rectangles by colour, edge and width of the edge: one collection each, or thousands of boxes
    take minutes."""
    alike: defaultdict[tuple[str, str, float], list[list[tuple[float, float]]]] = defaultdict(list)
    for box in sheet.rectangles:
        right, lower = box.x + box.width, box.y + box.height
        corners = [(box.x, box.y), (right, box.y), (right, lower), (box.x, lower)]
        alike[box.colour, box.edge, box.edge_width].append(corners)
    return alike


# A picture has no date and names no program, so that the same sheet gives the same bytes.
_METADATA: Mapping[Format, Mapping[str, None]] = {
    Format.PNG: {"Software": None},
    Format.SVG: {"Creator": None, "Date": None},
}


@dataclass(frozen=True, slots=True)
class ChartFile:
    """A file for a picture, which an `option` named, and which may be written."""

    path: Path
    form: Format
    option: str

    def draw(self, sheet: Sheet) -> str:
        """Write the picture of a sheet; return the line that says so."""
        write_whole(self.path, painted(sheet, self.form), self.option)
        return f"chart    {self.path}"


def chart_file(path: Path | None, option: str = "--chart") -> ChartFile | None:
    """Return the file of a picture, in the format that the name's ending asks for; None where none
    is wanted. Raises SpecError for another ending, a folder in place of a file, a folder that is
    not there or may not be written, and where the extra is not installed."""
    if path is None:
        return None
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
    if find_spec("matplotlib") is None:
        raise SpecError(MISSING._replace(place=option))
    return ChartFile(path, Format(ending), option)


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


def _cannot(path: Path, error: OSError, option: str) -> PtrainError:
    return refused(option, f"{path}: cannot write: {error.strerror}", "Use another file.")
