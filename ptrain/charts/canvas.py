"""Files of sheets: SVG, and PNG drawn by matplotlib (the optional extra `report`).

Equal sheets give equal bytes: a picture has no date and no random ids, and ignores the user's
matplotlib settings. A picture's path is checked before anything is computed, and the file is
written completely or not at all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from ptrain.charts.sheet import Sheet
from ptrain.charts.svg import svg_text
from ptrain.errors import Fault, PtrainError, SpecError, input_error

MISSING = Fault(
    place="--chart",
    finding="needs matplotlib for PNG, which is not installed",
    remedy="Use a file name that ends in .svg, or run `pip install 'ptrain[report]'`.",
)
_POINTS, _DOTS = 72, 150  # per inch: units of a sheet, and pixels of a PNG


class Format(StrEnum):
    """A file format of pictures."""

    PNG = "png"
    SVG = "svg"


def draw_sheet(sheet: Sheet, form: Format) -> bytes:
    """Return a sheet as the bytes of a picture.

    Args:
        sheet: The rectangles and texts.
        form: SVG, or PNG with 150 dots per inch.

    Raises:
        SpecError: If the form is PNG and matplotlib is not installed.
    """
    if form is Format.SVG:
        return svg_text(sheet).encode()
    try:
        import matplotlib
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError(MISSING) from error
    settings = dict(matplotlib.rcParamsDefault)
    settings.pop("backend", None)  # setting it would select a backend, and no window is opened
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(sheet.width / _POINTS, sheet.height / _POINTS), dpi=_DOTS)
        # One axes over the full figure, in points, with y downwards as on a sheet.
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, sheet.width), ylim=(sheet.height, 0))
        axes.set_axis_off()
        for (colour, edge, width), corners in _corners_by_style(sheet).items():
            axes.add_collection(
                PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=width),
                autolim=False,
            )
        for line in sheet.lines:
            style = (0, (line.dash, line.dash)) if line.dash else "-"
            columns = zip(*line.points, strict=True)
            axes.plot(*columns, color=line.colour, linewidth=line.width, linestyle=style)
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
                parse_math=False,  # a `$` in a name is text
            )
        image = BytesIO()
        # None removes the name and version of matplotlib.
        metadata = {"Title": sheet.title, "Software": None}
        figure.savefig(image, format=form.value, dpi=_DOTS, metadata=metadata)
    return image.getvalue()


def _corners_by_style(
    sheet: Sheet,
) -> dict[tuple[str, str, float], list[list[tuple[float, float]]]]:
    """Return the corners of rectangles, grouped by colour, edge colour and edge width.

    Each group becomes one collection. Thousands of separate patches would take minutes.
    """
    corners_of: defaultdict[tuple[str, str, float], list[list[tuple[float, float]]]] = defaultdict(
        list
    )
    for box in sheet.rectangles:
        right, lower = box.x + box.width, box.y + box.height
        corners = [(box.x, box.y), (right, box.y), (right, lower), (box.x, lower)]
        corners_of[box.colour, box.edge, box.edge_width].append(corners)
    return corners_of


@dataclass(frozen=True, slots=True)
class ChartFile:
    """A file for a picture, named by an `option` and checked to be writable."""

    path: Path
    form: Format
    option: str

    def draw(self, sheet: Sheet) -> str:
        """Write the picture of a sheet; return a line that names the file."""
        write_atomically(self.path, draw_sheet(sheet, self.form), self.option)
        return f"chart    {self.path}"


def chart_file(path: Path | None, option: str = "--chart") -> ChartFile | None:
    """Return the file of a picture, with the format of its ending; None without a path.

    Args:
        path: The path that the user gave.
        option: The option that gave it, for error messages.

    Raises:
        SpecError: If the ending is not .png or .svg, the path is a folder, its folder is missing or
            not writable, or the file is a PNG and matplotlib is not installed.
    """
    if path is None:
        return None
    ending = path.suffix.lower().removeprefix(".")
    if ending not in list(Format):
        ends = f"ends in .{ending}" if ending else "has no ending"
        raise input_error(option, f"{path} {ends}", "Use a file name that ends in .png or .svg.")
    try:
        if not path.parent.is_dir():
            raise input_error(
                option,
                f"the folder {path.parent} does not exist",
                "Create the folder, or use another path.",
            )
        if path.is_dir():
            raise input_error(option, f"{path} is a folder", "Add a file name to the path.")
    except OSError as error:
        raise _write_error(path, error, option) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise input_error(
            option, f"the folder {path.parent} is not writable", "Use another folder."
        )
    if ending == Format.PNG and find_spec("matplotlib") is None:
        raise SpecError(MISSING._replace(place=option))
    return ChartFile(path, Format(ending), option)


def write_atomically(path: Path, content: bytes, option: str = "--chart") -> None:
    """Write a file completely or not at all: to a temporary file next to it, which is then renamed.

    Args:
        path: The file, which is replaced if it exists.
        content: Its bytes.
        option: The option that named the file, for the error message.

    Raises:
        SpecError: If the file cannot be written.
    """
    # In the same folder, since a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise _write_error(path, error, option) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_error(path: Path, error: OSError, option: str) -> PtrainError:
    """Return the error for a file that cannot be written."""
    return input_error(option, f"{path}: cannot write: {error.strerror}", "Use another file.")
