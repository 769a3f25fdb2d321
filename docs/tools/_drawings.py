"""Draw pictures for the pages of the axes: the split of a block over tp, the exchange over ep.

They are drawn from the shapes, roles and counts in the plan of a spec. All other pictures of the
pages are written by commands of ptrain (`--chart`, `--timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ptrain.algebra.legality import require_runnable
from ptrain.axes.tensor.cost import shard_sizes
from ptrain.charts.sheet import GREY, LIGHT, Label, Rectangle, Sheet, ink_on, place_colour
from ptrain.derivation.estimate import derive
from ptrain.plan.lower import built_in_facts
from ptrain.spec.load import load
from ptrain.spec.placement import COLUMNS, ROWS, Axis, Role, matches_pattern
from ptrain.spec.spec import ranks_over
from ptrain.steps.experts import even_rows

EDGE, TITLE, TEXT, SMALL, GAP = 14.0, 12.0, 9.0, 8.0, 22.0
SCALE = 0.55  # points a feature
HIGH, BAND, NAME = 30.0, 150.0, 60.0  # a rank's row, a group of experts in it, the rank's name


def tensor_sheet() -> Sheet:
    """Return a block's weights, in shares of the ranks of tp: inputs downwards, outputs right."""
    spec = require_runnable(load("tp"))
    plan = derive(spec).plan
    assert plan.tensor is not None
    degree = spec.degree(Axis.TP)
    sheet = Sheet(title="tensor parallelism", width=2 * EDGE, height=EDGE)
    sheet.width = EDGE + _width_of_block(spec_weights()) + EDGE
    sheet.write([_title(f"The weights of one block over {degree} ranks of tp")])
    axes = "Each weight is drawn inputs × outputs: inputs downwards, outputs to the right."
    sheet.write([_note(f"{axes} Number and colour: the rank that has this shard.")])
    for sub_block, weights in spec_weights().items():
        sheet.height += GAP
        by_role = {role: [n for n, r, _ in weights if r is role] for _, role, _ in weights}
        roles = "; ".join(f"{role}: {', '.join(names)}" for role, names in by_role.items())
        text = f"{sub_block} ({roles})"
        sheet.write([Label(text=text, x=EDGE, y=0, size=TEXT, is_bold=True)])
        sheet.height += SMALL * 2
        _add_sub_block(sheet, weights, degree)
    sheet.height += EDGE
    return sheet


Weights = list[tuple[str, Role, tuple[int, int]]]


def spec_weights() -> dict[str, Weights]:
    """Return name, role and shape of a block's matrices that tp shards, by sub-block."""
    spec = require_runnable(load("tp"))
    tensor = derive(spec).plan.tensor
    assert tensor is not None
    found: dict[str, Weights] = {}
    for tensor_facts in built_in_facts(spec).units[0].tensors:
        module, _, _ = tensor_facts.name.rpartition(".")
        role = next(
            (role for pattern, role in tensor.roles if matches_pattern(pattern, module)), None
        )
        if role in (*COLUMNS, *ROWS) and role is not None:
            _, _, sub_block, name = module.split(".")
            outputs, inputs = tensor_facts.shape
            found.setdefault(sub_block, []).append((name, role, (outputs, inputs)))
    return found


def _width_of_block(found: dict[str, Weights]) -> float:
    widths = (sum(SCALE * shape[0] + GAP for *_, shape in weights) for weights in found.values())
    return max(widths) + 70


def _add_sub_block(sheet: Sheet, weights: Weights, degree: int) -> None:
    """Add weights side by side, and the sum that follows the row-wise ones."""
    x, top = EDGE, sheet.height
    tallest = max(SCALE * inputs for *_, (_, inputs) in weights)
    for name, role, (outputs, inputs) in weights:
        wide, high = SCALE * outputs, SCALE * inputs
        is_row = role in ROWS
        sheet.texts.append(Label(text=name, x=x, y=top - SMALL, size=SMALL))
        sizes = shard_sizes(inputs if is_row else outputs, degree)
        for rank, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            first, length = SCALE * (end - size), SCALE * size
            box = (x, top + first, wide, length) if is_row else (x + first, top, length, high)
            sheet.rectangles.append(_box(*box, place_colour(rank)))
            sheet.texts.append(_inside(str(rank), place_colour(rank), *box))
        shape = f"{inputs}×{outputs}"
        sheet.texts.append(Label(text=shape, x=x, y=top + high + SMALL, size=SMALL, colour=GREY))
        x += wide + GAP
        if is_row:
            words = Label(text="→ sum over tp", x=x - GAP + 6, y=top + high / 2, size=TEXT)
            sheet.texts.append(words)
    sheet.height = top + tallest + 2 * SMALL


def expert_sheet() -> Sheet:
    """Return where the rows of a micro-batch are: at their rank, at their experts, and back."""
    spec = require_runnable(load("ep", ["model.capacity_factor=null"]))
    step = derive(spec).plan.experts
    assert step is not None
    ranks = ranks_over(spec, step.axes)
    rows = even_rows(spec, step).num_sent // step.number  # to each expert
    sheet = Sheet(title="expert parallelism", width=EDGE + NAME + BAND * step.number + EDGE)
    sheet.height = EDGE
    sheet.write([_title(f"{step.number} experts over {ranks} ranks of ep")])
    words = f"Each token chooses {step.chosen}. Colour: the rank that has the token."
    sheet.write([_note(f"{words} Number: rows, if all experts are chosen equally often.")])
    own = step.number // ranks
    experts = range(step.number)
    local = [[(f"expert {e}: {rows}", rank) for e in experts] for rank in range(ranks)]
    sent = [
        [
            (f"expert {e}: {rows} of rank {source}", source)
            for e in range(rank * own, (rank + 1) * own)
            for source in range(ranks)
        ]
        for rank in range(ranks)
    ]
    _add_rows(sheet, "1  The router chooses; rows are sorted by expert", local)
    _add_rows(sheet, "2  Dispatch: after an all-to-all, rows are at their experts", sent)
    _add_rows(sheet, "3  Combine: after another all-to-all, rows are back and weighted", local)
    sheet.height += EDGE
    return sheet


def _add_rows(sheet: Sheet, title: str, by_rank: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Add a row for each rank, of bands with a text and the rank that their colour stands for."""
    sheet.height += GAP / 2
    sheet.write([Label(text=title, x=EDGE, y=0, size=TEXT, is_bold=True)])
    sheet.height += 3
    for rank, bands in enumerate(by_rank):
        middle = sheet.height + HIGH / 2
        sheet.texts.append(Label(text=f"rank {rank}", x=EDGE, y=middle, size=TEXT))
        for place, (text, source) in enumerate(bands):
            box = (EDGE + NAME + place * BAND, sheet.height, BAND, HIGH)
            sheet.rectangles.append(_box(*box, place_colour(source)))
            sheet.texts.append(_inside(text, place_colour(source), *box))
        sheet.height += HIGH + 3


def _box(x: float, y: float, width: float, height: float, colour: str) -> Rectangle:
    return Rectangle(
        x=x, y=y, width=width, height=height, colour=colour, edge=LIGHT, edge_width=0.6
    )


def _inside(text: str, colour: str, x: float, y: float, width: float, height: float) -> Label:
    return Label(
        text=text,
        x=x + width / 2,
        y=y + height / 2,
        size=SMALL,
        colour=ink_on(colour),
        align="center",
    )


def _title(text: str) -> Label:
    return Label(text=text, x=EDGE, y=0, size=TITLE, is_bold=True)


def _note(text: str) -> Label:
    return Label(text=text, x=EDGE, y=0, size=SMALL, colour=GREY)


DRAWINGS = {"tensor": tensor_sheet, "expert": expert_sheet}
