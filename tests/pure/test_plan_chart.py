"""`ptrain plan SPEC --chart FILE`: the file, the record, and rejections before it is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import yaml

from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.charts.canvas import Format, draw_sheet
from ptrain.charts.schedule import Heading, schedule_sheet
from ptrain.charts.sheet import Sheet
from ptrain.cli.main import main
from ptrain.spec.pipeline import ScheduleName
from tests.pure.pipeline_specs import SHAPE
from tests.pure.pipelines import pipeline

PICTURE = b"a picture"


@pytest.fixture
def spec(tmp_path):
    """A file of one, with two stages."""
    path = tmp_path / "piped.yaml"
    mapping = {
        "name": "piped",
        "model": SHAPE,
        "mesh": {"pp": 2},
        "placement": {"pp": "S,S,S,R"},
        "batch": {"sequence": 32, "accumulate": 8},
        "pipeline": {"schedule": "1f1b"},
    }
    path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
    return str(path)


@pytest.fixture
def drawn_sheets(monkeypatch) -> list[Sheet]:
    """The sheets that would be drawn, with or without matplotlib."""
    sheets: list[Sheet] = []

    def paint(sheet: Sheet, form: Format) -> bytes:
        sheets.append(sheet)
        return PICTURE

    monkeypatch.setattr("ptrain.charts.canvas.draw_sheet", paint)
    monkeypatch.setattr("ptrain.charts.canvas.find_spec", lambda name: name)
    return sheets


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "charts"
    made.mkdir()
    return made


# -------- written files


@pytest.mark.parametrize("ending", ["png", "svg", "SVG"])
def test_the_schedule_of_the_spec_is_drawn_into_the_file(
    spec, drawn_sheets, folder, ending, capsys
):
    chart = folder / f"chart.{ending}"
    assert main(["plan", spec, "--chart", str(chart), "pipeline.schedule=gpipe"]) == 0
    (sheet,) = drawn_sheets
    words = [text.text for text in sheet.texts]
    assert words[0] == "piped"
    assert words[1] == "gpipe · ranks: 2 · stages: 2, 1 per rank · micro-batches: 8"
    assert chart.read_bytes() == PICTURE
    assert [path.name for path in folder.iterdir()] == [chart.name]
    out = capsys.readouterr().out
    assert "plan of piped" in out
    assert f"\nchart    {chart}\n\nNext: ptrain predict " in out


def test_picture_and_text_give_the_same_bubble(spec, drawn_sheets, folder, capsys):
    main(["plan", spec, "--chart", str(folder / "a.svg")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bubble")]
    assert drawn_sheets[0].texts[2].text.split() == line.split()


def test_the_record_names_the_file(spec, drawn_sheets, folder, capsys):
    chart = folder / "a.png"
    assert main(["plan", spec, "--json", "--chart", str(chart)]) == 0
    assert json.loads(capsys.readouterr().out)["chart"] == str(chart)
    assert main(["plan", spec, "--json"]) == 0
    assert "chart" not in json.loads(capsys.readouterr().out)


def test_an_older_picture_is_replaced(spec, drawn_sheets, folder):
    chart = folder / "a.png"
    chart.write_bytes(b"older")
    assert main(["plan", spec, "--chart", str(chart)]) == 0
    assert chart.read_bytes() == PICTURE


# -------- rejections


def refusal(arguments: list[str], capsys) -> str:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    return err


@pytest.mark.parametrize(
    ("name", "finding", "remedy"),
    [
        ("a.pdf", "a.pdf ends in .pdf", "ends in .png or .svg"),
        ("a", "a has no ending", "ends in .png or .svg"),
        (".png", ".png has no ending", "ends in .png or .svg"),
        ("nowhere/a.png", "nowhere does not exist", "Create the folder"),
        ("piped.yaml/a.png", "piped.yaml does not exist", "Create the folder"),
        ("folder.png", "folder.png is a folder", "Add a file name to the path"),
        ("n" * 300 + ".png", "cannot write: File name too long", "Use another file"),
    ],
)
def test_an_impossible_file_is_rejected(
    name, finding, remedy, spec, drawn_sheets, tmp_path, capsys
):
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    message = refusal([spec, "--chart", str(tmp_path / name)], capsys)
    assert "error: --chart: " in message
    assert finding in message
    assert f"remedy: {remedy}" in message.replace("Use a file name that ", "")
    assert sorted(tmp_path.rglob("*")) == before
    assert not drawn_sheets


def test_one_file_for_several_specs_is_rejected(spec, drawn_sheets, folder, capsys):
    message = refusal([spec, spec, "--chart", str(folder / "a.png")], capsys)
    assert "draws one spec; got 2" in message
    assert "remedy: Run `ptrain plan` once for each spec." in message


def test_a_spec_without_a_pipeline_has_the_shards_of_each_rank(drawn_sheets, folder, capsys):
    assert main(["plan", "hsdp", "--chart", str(folder / "a.png")]) == 0
    words = [text.text for text in drawn_sheets[0].texts]
    assert words[0] == "hsdp: placement on 4 ranks"
    start = next(at for at, word in enumerate(words) if word.startswith("parameters: "))
    assert words[start + 1 : start + 5] == ["1/2", "2/2", "1/2", "2/2"]


def test_without_matplotlib_the_extra_is_named_and_nothing_is_written(spec, folder, capsys):
    with patch("ptrain.charts.canvas.find_spec", lambda name: None):
        message = refusal([spec, "--chart", str(folder / "a.png")], capsys)
    assert "needs matplotlib for PNG, which is not installed" in message
    assert "ends in .svg, or run `pip install 'ptrain[report]'`." in message
    assert not list(folder.iterdir())


def test_a_broken_matplotlib_counts_as_missing(spec, folder, capsys):
    with (
        patch("ptrain.charts.canvas.find_spec", lambda name: name),
        patch.dict(sys.modules, {"matplotlib": None}),
    ):
        message = refusal([spec, "--chart", str(folder / "a.png")], capsys)
    assert "ends in .svg, or run `pip install 'ptrain[report]'`." in message
    assert not list(folder.iterdir())


def test_a_disk_failure_keeps_the_older_picture(spec, drawn_sheets, folder, capsys):
    chart = folder / "a.png"
    chart.write_bytes(b"older")
    full = OSError(28, "No space left on device")
    for step in ("write_bytes", "replace"):
        with patch.object(Path, step, side_effect=full):
            message = refusal([spec, "--chart", str(chart)], capsys)
        assert "cannot write: No space left on device" in message
        assert [path.name for path in folder.iterdir()] == ["a.png"]
        assert chart.read_bytes() == b"older"


# -------- the picture itself


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="pictures need the extra `report`")


SIZES = [(name, pipeline(2, 2 if name in ("zbv", "dualpipev") else 1, 4)) for name in ScheduleName]


def sheet_of(name: ScheduleName, size) -> Sheet:
    return schedule_sheet(Heading(spec="some-spec", schedule=name), make_schedule(name, size))


def test_a_sheet_becomes_the_same_picture_each_time_whatever_the_user_has_set(matplotlib):
    sheet = sheet_of(ScheduleName.DUALPIPEV, pipeline(2, 2, 4))
    png, svg = draw_sheet(sheet, Format.PNG), draw_sheet(sheet, Format.SVG)
    assert png.startswith(b"\x89PNG")
    assert svg.startswith(b"<svg")
    assert svg.endswith(b"</svg>")
    with matplotlib.rc_context({"font.size": 30, "savefig.facecolor": "red", "savefig.dpi": 10}):
        before = dict(matplotlib.rcParams)
        assert draw_sheet(sheet, Format.PNG) == png
        assert draw_sheet(sheet, Format.SVG) == svg
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ScheduleName)
def test_every_schedule_can_be_drawn_as_svg_with_its_texts(name):
    sheet = sheet_of(name, dict(SIZES)[name])
    root = ElementTree.fromstring(draw_sheet(sheet, Format.SVG))
    texts = [each.text for each in root if each.tag.endswith("}text")]
    assert texts == [text.text for text in sheet.texts]
    boxes = [each.get("d") for each in root if each.tag.endswith("}path")]
    assert sum(path.count("M") for path in boxes) == len(sheet.rectangles) + 1, "and the paper"


def test_a_picture_is_as_large_as_its_sheet_at_150_dots_an_inch(matplotlib):
    sheet = sheet_of(ScheduleName.ONE_F_ONE_B, pipeline(4, 1, 8))
    png = draw_sheet(sheet, Format.PNG)
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert abs(width - sheet.width * 150 / 72) <= 1
    assert abs(height - sheet.height * 150 / 72) <= 1


@pytest.mark.parametrize(("name", "size"), SIZES, ids=str)
def test_no_text_is_wider_than_the_sheet_takes_it_to_be(name, size, matplotlib):
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for text in sheet_of(name, size).texts:
        font = FontProperties(size=text.size, weight="bold" if text.is_bold else "normal")
        drawn = TextPath((0, 0), text.text, prop=font).get_extents().width
        assert drawn <= text.width * 1.001, text
