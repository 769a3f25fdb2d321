"""Routing stated in a spec: the rows that ranks send and receive, and counts that do not fit."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptrain.algebra.legality import require_runnable
from ptrain.axes.expert.cost import expert_traffic
from ptrain.cost import Phase
from ptrain.errors import SpecError
from ptrain.facts.model import RowsSize, RowsTimeline, StorageEvent, StorageEvents
from ptrain.plan.show import format_plan
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.routing import read_routing
from ptrain.spec.spec import Spec, coordinates
from ptrain.steps.experts import Loads, RankRows, even_rows, token_places
from ptrain.timeline import Boundary, Mark, Run
from tests.pure.test_closed_forms_of_experts import plan_spec

Counts = dict[str, list[list[list[int]]]]

LAYERS, EXPERTS, OFTEN, TOKENS, TIMES = 2, 6, 2, 10, 3
DROPLESS: dict[str, Any] = {
    "layers": LAYERS,
    "hidden": 8,
    "heads": 2,
    "ffn": 12,
    "vocab": 259,
    "experts": EXPERTS,
    "experts_per_token": OFTEN,
}
MESHES = ({"ep": 3}, {"dp_shard": 2, "ep": 2}, {"cp": 2, "ep": 2})


def spec_of(mesh: dict[str, int], *words: str, **sections: Any) -> Spec:
    samples = TIMES
    for axis, degree in mesh.items():
        samples *= 1 if axis in ("cp", "tp", "pp") else degree
    placement = {"dp_shard": "zero3", "ep": "zero3", "cp": "S*,S,S,S", "tp": "S,S,S,R"}
    mapping: dict[str, Any] = {
        "model": DROPLESS,
        "mesh": mesh,
        "placement": {axis: placement[axis] for axis in mesh},
        "batch": {"global": samples, "micro": 1, "sequence": TOKENS},
        "precision": {"layout": "fp32"},
        **sections,
    }
    return require_runnable(load(mapping, words))


def draw_choices(spec: Spec) -> list[list[list[list[tuple[int, ...]]]]]:
    """Draw the experts of every token by layer, rank and micro-batch."""
    draw = random.Random(len(spec.factors))
    ranks = len({*token_places(spec)})
    tokens = range(spec.batch.micro * spec.own_tokens)
    return [
        [
            [[tuple(draw.sample(range(EXPERTS), OFTEN)) for _ in tokens] for _ in range(TIMES)]
            for _ in range(ranks)
        ]
        for _ in range(LAYERS)
    ]


def counts_of(tokens: Sequence[Sequence[Sequence[Sequence[Sequence[int]]]]]) -> Counts:
    """Count what `chosen` drew, as a file has it."""

    def of_micro_batch(choices: Sequence[Sequence[int]]) -> list[int]:
        numbers = Counter(expert for of_token in choices for expert in of_token)
        return [numbers[expert] for expert in range(EXPERTS)]

    return {
        f"blocks.{number}.mlp": [[of_micro_batch(x) for x in of_rank] for of_rank in of_layer]
        for number, of_layer in enumerate(tokens)
    }


def loads(spec: Spec) -> Loads:
    stated = plan_spec(spec)[0].loads
    assert stated is not None
    return stated


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_sends_and_receives_the_rows_of_a_token_by_token_count(mesh):
    tokens = draw_choices(spec_of(mesh))
    spec = spec_of(mesh, routing=counts_of(tokens))
    own, places = EXPERTS // mesh["ep"], token_places(spec)
    stated = loads(spec)
    for rank, place in enumerate(places):
        at = coordinates(spec, rank)
        others = {axis: index for axis, index in at.items() if axis is not Axis.EP}
        for number, of_layer in enumerate(tokens):
            for time in range(TIMES):
                kept = received = 0
                for source in range(spec.world_size):
                    there = coordinates(spec, source)
                    if any(there[axis] != index for axis, index in others.items()):
                        continue
                    here = [
                        expert // own == at[Axis.EP]
                        for choices in of_layer[places[source]][time]
                        for expert in choices
                    ]
                    received += sum(here)
                    kept += sum(here) if source == rank else 0
                rows = stated.rows_by_layer(place)[f"blocks.{number}.mlp"][time]
                assert rows == RankRows(OFTEN * spec.own_tokens, kept, received)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rows_return_to_their_ranks_and_are_counted_once(mesh):
    spec = spec_of(mesh, routing=counts_of(draw_choices(spec_of(mesh))))
    plan, _ = plan_spec(spec)
    stated, row = loads(spec), DROPLESS["hidden"] * 4
    accounts = [
        [*expert_traffic(spec, plan, loads=stated.rows_by_layer(place))]
        for place in token_places(spec)
    ]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        trips = [x for rows in accounts for x in rows if x.key.phase is phase and x.calls == 12]
        away = sum(
            rows.num_sent - rows.num_kept
            for place in token_places(spec)
            for of_layer in stated.rows_by_layer(place).values()
            for rows in of_layer
        )
        assert sum(x.sent_bytes for x in trips) == 2 * away * row
        all_rows = spec.world_size * LAYERS * TIMES * OFTEN * spec.own_tokens
        assert sum(x.payload_bytes for x in trips) == 2 * all_rows * row


def test_at_best_nothing_leaves_and_at_worst_one_rank_gets_all():
    step = plan_spec(spec_of({"ep": 3}))[0].experts
    assert step is not None
    number = even_rows(spec_of({"ep": 3}), step).num_sent
    for word, received in (("best", [number] * 3), ("worst", [3 * number, 0, 0])):
        stated = loads(spec_of({"ep": 3}, f"routing={word}"))
        rows = [stated.rows_by_layer(place)["blocks.1.mlp"][2] for place in range(3)]
        assert [x.num_received for x in rows] == received
        assert [x.num_kept for x in rows] == ([number] * 3 if word == "best" else [number, 0, 0])


def test_a_token_that_chooses_more_experts_than_a_rank_has_goes_to_others_too():
    model = {**DROPLESS, "experts_per_token": 5}
    stated = loads(spec_of({"ep": 3}, "routing=worst", model=model))
    assert stated.choices("blocks.0.mlp", 1)[0] == (10, 10, 8, 8, 7, 7)
    assert [stated.rows_by_layer(place)["blocks.0.mlp"][0].num_received for place in range(3)] == [
        60,
        48,
        42,
    ]


def test_a_plan_shows_the_rows_of_ranks():
    spec = spec_of({"ep": 3}, "routing=worst")
    assert "worst: the experts of a rank get 0 to 60 rows per layer" in format_plan(
        spec, plan_spec(spec)[0]
    )


def good() -> Counts:
    return counts_of(draw_choices(spec_of({"ep": 3})))


def _without_layer(counts: Counts) -> None:
    del counts["blocks.1.mlp"]


def _another_layer(counts: Counts) -> None:
    counts["blocks.7.mlp"] = counts["blocks.0.mlp"]


def _without_rank(counts: Counts) -> None:
    counts["blocks.1.mlp"].pop()


def _without_micro_batch(counts: Counts) -> None:
    counts["blocks.1.mlp"][2].pop()


def _without_expert(counts: Counts) -> None:
    counts["blocks.1.mlp"][2][0].pop()


def _one_less(counts: Counts) -> None:
    row = counts["blocks.1.mlp"][2][0]
    row[row.index(max(row))] -= 1


def _negative(counts: Counts) -> None:
    counts["blocks.1.mlp"][2][0][:2] = [-1, 21]


def _too_often(counts: Counts) -> None:
    counts["blocks.1.mlp"][2][0] = [20, 0, 0, 0, 0, 0]


BROKEN: tuple[tuple[Callable[[Counts], None], str], ...] = (
    (_without_layer, "no counts for blocks.1.mlp"),
    (_another_layer, "blocks.7.mlp: the model has no MoE layer with this name"),
    (_without_rank, "blocks.1.mlp: 2 ranks; 3 ranks have different tokens"),
    (_without_micro_batch, "blocks.1.mlp, rank 2: 2 micro-batches; a step has 3"),
    (_without_expert, "blocks.1.mlp, rank 2, micro-batch 0: 5 experts; the layer has 6"),
    (
        _one_less,
        ("blocks.1.mlp, rank 2, micro-batch 0: 19 choices; 10 tokens with 2 experts each need 20"),
    ),
    (_negative, "blocks.1.mlp, rank 2, micro-batch 0: -1 for expert 0 is not a count"),
    (
        _too_often,
        "blocks.1.mlp, rank 2, micro-batch 0: expert 0 has 20 choices; there are 10 tokens",
    ),
)


@pytest.mark.parametrize(("breaks", "finding"), BROKEN)
def test_counts_that_do_not_fit_are_one_message_with_place_and_fix(tmp_path, breaks, finding):
    counts = good()
    breaks(counts)
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts))
    with pytest.raises(SpecError) as caught:
        spec_of({"ep": 3}, f"routing={file}")
    (fault,) = caught.value.faults
    assert fault.place == "routing" and finding in fault.finding and "[expert]" in fault.remedy


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[1]", "not contain a mapping of layers"),
        ("{}", "no counts"),
    ],
)
def test_a_file_that_holds_no_counts_is_one_message(tmp_path: Path, content, finding):
    file = tmp_path / "counts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SpecError) as caught:
        spec_of({"ep": 3}, f"routing={file}")
    (fault,) = caught.value.faults
    assert fault.place == "routing" and finding in fault.finding


@pytest.mark.parametrize(
    ("mesh", "model"), [({"dp_shard": 2}, {}), ({"ep": 2}, {"capacity_factor": 1.0})]
)
def test_where_no_size_depends_on_it_routing_is_rejected(mesh, model):
    with pytest.raises(SpecError, match="no ep axis with two or more ranks"):
        spec_of(mesh, "routing=worst", model={**DROPLESS, **model})


def test_routing_of_a_file_is_in_the_resolved_spec(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(good()))
    spec = spec_of({"ep": 3}, f"routing={file}")
    file.unlink()
    assert load(spec.resolved).spec.routing == spec.routing == read_routing(good())
    assert "routing" not in spec_of({"ep": 3}, "routing=balanced").resolved


@pytest.mark.parametrize("word", ["best", "worst"])
def test_a_word_is_written_as_it_is_read(word):
    written = yaml.safe_dump(spec_of({"ep": 2}, f"routing={word}").resolved)
    assert yaml.safe_load(written)["routing"] == word


def test_of_a_formula_any_rows_make_a_timeline():
    def grows(number: int, layer: int, *, is_freed: bool = False) -> StorageEvent:
        return StorageEvent(RowsSize(number, layer), is_freed)

    fixed = StorageEvent(RowsSize(100), is_freed=False)
    enter = Boundary(Mark.ENTER, 0)
    formula = RowsTimeline(
        forward=(enter, StorageEvents((fixed, grows(4, 0), grows(4, 0, is_freed=True)))),
        backward=(StorageEvents((grows(2, 1),)),),
        moved=(("host", RowsSize(8, 1)),),
    )
    # what rises highest depends on the rows: no sum of formulas is one
    timeline = formula.at_rows((50, 3))
    assert timeline.forward == (enter, Run(300, 100)) and timeline.backward == (Run(6, 6),)
    assert timeline.moved == (("host", 24),)
    assert formula.at_rows((0, 0)).forward == (enter, Run(100, 100))
