"""`ptrain plan SPEC --chart FILE` over cp: the tokens of each rank, and the blocks that attend to
each other."""

from __future__ import annotations

from itertools import combinations

import pytest

from ptrain.axes.context.attention import context_of
from ptrain.charts.sheet import WHITE, Rectangle, Sheet, place_colour
from ptrain.charts.tokens import tokens_sheet
from ptrain.cli.main import main
from ptrain.spec.load import load
from ptrain.steps.step import ContextParallel

SPECS = {
    "ring": ("cp-ring", "mesh.cp=4"),
    "zigzag": ("cp-zigzag", "mesh.cp=4"),
    "all-gather": ("cp-all-gather", "mesh.cp=4"),
    "ulysses": ("cp-ulysses",),
    "hybrid": ("cp-hybrid", "mesh.cp=8", "context.attention={ulysses: 2, ring: 4}"),
}
SQUARE = 420.0


def step_of(name: str) -> ContextParallel:
    source, *words = SPECS[name]
    step = context_of(load(source, words).spec)
    assert step is not None
    return step


def square(sheet: Sheet) -> tuple[Rectangle, list[Rectangle]]:
    """Return the frame of the scores and the shapes within it."""
    (frame,) = (r for r in sheet.rectangles if r.width == r.height == SQUARE)
    inside = [r for r in sheet.rectangles if r is not frame and _is_within(r, frame)]
    return frame, inside


def _is_within(inner: Rectangle, outer: Rectangle) -> bool:
    near = 1e-6
    return (
        inner.x >= outer.x - near
        and inner.y >= outer.y - near
        and inner.x + inner.width <= outer.x + outer.width + near
        and inner.y + inner.height <= outer.y + outer.height + near
    )


def overlap_area(one: Rectangle, other: Rectangle) -> float:
    wide = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    high = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return max(0.0, wide) * max(0.0, high)


@pytest.mark.parametrize("name", SPECS)
def test_the_scores_cover_the_unmasked_area_once(name: str):
    _, drawn = square(tokens_sheet("any", step_of(name)))
    assert all(overlap_area(*pair) < 1e-6 for pair in combinations(drawn, 2))
    area = sum(r.width * r.height for r in drawn) / SQUARE**2
    assert 0.5 < area < 0.6  # stairs approximate a diagonal


@pytest.mark.parametrize(("name", "shares"), [("ring", (1, 3, 5, 7)), ("zigzag", (4, 4, 4, 4))])
def test_a_ranks_colour_covers_its_part_of_the_scores(name: str, shares: tuple[int, ...]):
    _, drawn = square(tokens_sheet("any", step_of(name)))
    of_rank = [
        sum(r.width * r.height for r in drawn if r.colour == place_colour(rank))
        for rank in range(4)
    ]
    assert [area / sum(of_rank) for area in of_rank] == pytest.approx(
        [share / 16 for share in shares], rel=0.2
    )


@pytest.mark.parametrize("name", SPECS)
def test_the_strip_of_tokens_is_covered_and_names_every_rank(name: str):
    step = step_of(name)
    sheet = tokens_sheet("any", step)
    texts = [text.text for text in sheet.texts]
    assert {str(rank) for rank in range(step.ulysses * step.ring)} <= {*texts}
    strip = min(r.y for r in sheet.rectangles)
    widths = [r.width for r in sheet.rectangles if r.y == strip]
    assert sum(widths) == pytest.approx(560.0)


def test_keys_move_one_rank_per_hop_and_masked_ones_are_forwarded():
    sheet = tokens_sheet("any", step_of("ring"))
    names = [text.text for text in sheet.texts if text.text.startswith("from cp ")]
    assert [name.removeprefix("from cp ") for name in names] == [
        *"0321", *"1032", *"2103", *"3210",
    ]  # fmt: skip
    top = sheet.rectangles.index(square(sheet)[0])
    filled = [r for r in sheet.rectangles[top:] if r.colour != WHITE and r.width == 140.0]
    assert [round(r.height / 30.0, 1) for r in filled if r.height] == [
        *(0.5,), *(0.5, 1.0), *(0.5, 1.0, 1.0), *(0.5, 1.0, 1.0, 1.0),
    ]  # fmt: skip


def test_the_text_is_within_the_sheet():
    for name in SPECS:
        sheet = tokens_sheet("any", step_of(name))
        assert all(r.x + r.width <= sheet.width for r in sheet.rectangles)
        assert all(text.left >= 0 and text.y <= sheet.height for text in sheet.texts)


def test_stages_and_tokens_are_drawn_one_below_the_other(monkeypatch, tmp_path, capsys):
    sheets: list[Sheet] = []

    def paint(sheet: Sheet, form: object) -> bytes:
        sheets.append(sheet)
        return b"picture"

    monkeypatch.setattr("ptrain.charts.canvas.draw_sheet", paint)
    monkeypatch.setattr("ptrain.charts.canvas.find_spec", lambda name: name)
    words = ["mesh={pp: 2, cp: 2}", "placement={pp: 'S,S,S,R', cp: 'R,R,R,S'}"]
    chart = tmp_path / "a.svg"
    monkeypatch.setattr("ptrain.cli.plan.derive", _plan_spec)
    monkeypatch.setattr("ptrain.cli.plan.load_facts", lambda spec, **_: None)
    assert main(["plan", "cp-ring", *words, "--json", "--chart", str(chart)]) == 0
    capsys.readouterr()
    assert chart.read_bytes() == b"picture"
    (sheet,) = sheets
    texts = {text.text: text.y for text in sheet.texts}
    (bubble,) = (y for text, y in texts.items() if text.startswith("bubble"))
    (tokens,) = (y for text, y in texts.items() if text.startswith("tokens per rank outside"))
    assert bubble < tokens < sheet.height


def _plan_spec(spec, facts, **_):
    from ptrain.derivation.estimate import derive
    from ptrain.plan.lower import built_in_facts

    return derive(spec, built_in_facts(spec), is_timed=False)
