"""Figures of a layer's router, the lines and the picture that are made of them."""

from __future__ import annotations

import json

from ptrain.charts.figures import logged_rows
from ptrain.charts.tokens import logged_tokens, routing_sheet
from ptrain.report.routing import (
    LayerRouting,
    is_routing_recorded,
    routing_figures,
    routing_rows,
    routing_text,
)
from tests.gloo.expert_cases import expert_spec
from tests.pure.build import make_spec

EVEN = LayerRouting(layer="blocks.0.mlp", tokens=(6, 6, 6, 6), dropped=0, entropy=1.0)
UNEVEN = LayerRouting(layer="blocks.1.mlp", tokens=(12, 0, 6, 6), dropped=6, entropy=0.5)


def test_the_load_is_the_busiest_over_the_mean_of_experts_or_of_ranks() -> None:
    assert EVEN.load == EVEN.rank_load(2) == 1.0
    assert (UNEVEN.load, UNEVEN.rank_load(2), UNEVEN.rank_load(1)) == (2.0, 1.0, 1.0)


def test_the_figures_of_a_step_are_those_of_all_layers() -> None:
    of_step = routing_figures([EVEN, UNEVEN])
    assert of_step == {"expert_load": 2.0, "dropped_share": 0.125, "router_entropy": 0.75}
    assert routing_text(of_step) == "λ 2.00  12.5% dropped"
    assert routing_text(routing_figures([EVEN])) == "λ 1.00"


def test_a_record_has_each_layer_with_the_load_of_its_experts_and_of_the_ranks() -> None:
    (row,) = routing_rows([UNEVEN], 2)
    assert row == {
        "layer": "blocks.1.mlp",
        "tokens": [12, 0, 6, 6],
        "load": 2.0,
        "load_of_ranks": 1.0,
        "dropped": 6,
        "entropy": 0.5,
    }


def test_of_models_with_experts_alone_something_is_logged() -> None:
    assert is_routing_recorded(expert_spec("top-1")) and not is_routing_recorded(make_spec({}))


def test_of_a_step_that_was_trained_twice_the_last_is_drawn(tmp_path) -> None:
    lines = [
        {"step": 1, "tokens_per_expert": {"a": [1, 3]}},
        {"step": 2},
        {"step": 1, "tokens_per_expert": {"a": [4, 0]}},
    ]
    metrics = tmp_path / "metrics.jsonl"
    cut_off = '{"step": 2, "tokens_per'
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + cut_off)
    steps = logged_tokens(logged_rows(metrics))
    assert steps == {1: {"a": [4, 0]}}
    *_, first, second, _ = routing_sheet("run", steps).rectangles  # behind them a line
    assert (first.colour, second.colour) == ("#004280", "#fefefe")


def test_every_layer_has_a_field_on_the_sheet_and_nothing_lies_beyond_it() -> None:
    steps = {step: {f"blocks.{n}.mlp": [step, 1, 2] for n in range(6)} for step in range(1, 5)}
    sheet = routing_sheet("run", steps)
    assert {f"blocks.{n}.mlp" for n in range(6)} <= {label.text for label in sheet.texts}
    assert all(r.x + r.width <= sheet.width for r in sheet.rectangles)
    assert all(r.y + r.height <= sheet.height for r in sheet.rectangles)
    assert routing_sheet("run", {}).rectangles == []
