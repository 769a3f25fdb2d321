"""`ptrain select`: the search space, the ranking, rejections, and the estimates compared with exact
predictions."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, pairwise
from pathlib import Path

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.candidates import apply_choices
from ptrain.charts.front import front_sheet
from ptrain.cost import Collective, Phase, Spent, TimeKey, TimeRow
from ptrain.derivation.estimate import derive, predict_throughput
from ptrain.errors import SpecError
from ptrain.report.reasons import losing_reason, placement_idea
from ptrain.report.selection import (
    as_csv,
    as_record,
    as_spec,
    best_of_ideas,
    distinct_front,
    selection_text,
    why_lost,
    winner_reasons,
)
from ptrain.selection.choose import Chooser, select
from ptrain.selection.job import searched_job, words_of
from ptrain.selection.ranking import (
    PlacementRanking,
    Scored,
    SearchGoal,
    crossing,
    folded,
    order_of,
    ranked,
)
from ptrain.selection.search import Search
from ptrain.selection.space import (
    apart,
    data_choices,
    degrees_over,
    inner_products,
    micro_batches,
    pipelines,
)
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.units import format_seconds
from tests.pure.hand_made_paces import HandPace
from tests.pure.searches import BACKWARD, FORWARD, chooser, machine, without_known


def scored_sample(search: Search, seed: int, number: int) -> list[Scored]:
    """Return random candidates that fit, equally from all parts."""
    draw = random.Random(seed)
    room, pool = search.job.room, []
    for block in search.blocks():
        fitting = [row for row in block.rows if block.peak(row) <= room]
        pool += [block.scored(draw.choice(fitting))] if fitting else []
    return draw.sample(pool, min(number, len(pool)))


@pytest.fixture(scope="module")
def on_eight() -> Chooser:
    """Whose search on eight devices several tests draw from."""
    return chooser()


@pytest.fixture(scope="module")
def best_of_eight() -> PlacementRanking:
    return chooser("pp<=2", "micro==1", count=5).choose()


# -- the space


def test_ranks_are_divided_over_axes_in_every_way():
    assert list(degrees_over(0, 1)) == [()]
    assert list(degrees_over(0, 2)) == []
    assert list(degrees_over(1, 8)) == [(8,)]
    assert list(degrees_over(2, 8)) == [(2, 4), (4, 2)]
    assert list(degrees_over(2, 12)) == [(2, 6), (3, 4), (4, 3), (6, 2)]


def test_a_cut_divides_heads_and_stays_within_a_node():
    base = chooser(devices=64, cluster="h100-64").job.base
    degrees = [ranks for ranks, _ in inner_products(base, 64)]
    # whole once; 2, 4 and 8 of 8 kv heads, each with activations whole, in slices and saved so
    assert degrees == [1, 2, 2, 2, 4, 4, 4, 8, 8, 8]


def test_a_pipeline_has_at_most_a_layer_a_stage():
    base = searched_job("llama-tiny", cluster="laptop", devices=8).base
    layers = base.model.layers
    for left, choices in pipelines(base, 8):
        for choice in choices:
            spec = apply_choices(base, (choice,))
            assert spec.pipeline.stages_over(8 // left) <= layers


def test_every_mesh_of_eight_devices_has_candidates(on_eight):
    """Ordered factorizations of 2³ over four axes: 6 over 3, 20."""
    meshes = set()
    for block in on_eight.search.blocks():
        for row in block.rows:
            inner = [f for choice in (*block.cut.within, block.flow.choice) for f in choice.factors]
            data = zip(row.way.choice.factors, row.degrees, strict=True)
            degrees = {f.axis: f.degree for f in inner} | {f.axis: d for f, d in data}
            meshes.add(tuple(degrees.get(axis, 1) for axis in Axis))
    assert len(meshes) == 20


def test_micro_batches_are_the_divisors_of_a_ranks_samples():
    base = chooser().job.base
    assert list(micro_batches(base, 4)) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert list(micro_batches(base, 3)) == []
    base = chooser("batch.global=48").job.base
    assert list(micro_batches(base, 4)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]


def test_distinct_large_micro_batches_are_tried():
    base = chooser("batch.global=5040").job.base
    tried = [micro for micro, _ in apart(micro_batches(base, 1))]
    assert [m for m in tried if m <= 16] == [m for m in range(1, 17) if 5040 % m == 0]
    assert len(tried) <= 32 and all(5040 % micro == 0 for micro in tried)
    large = [m for m in tried if m >= 16 and m & (m - 1)]
    assert all(later >= 1.25 * earlier for earlier, later in pairwise(large))


def test_a_micro_batch_that_is_no_power_of_two_is_ranked():
    """Of 15 samples a rank 3 at once."""
    odd = chooser("batch.global=120", "micro>2", "micro<5", "tp==1", "pp==1", count=10)
    best = without_known(odd.choose).best
    assert best is not None
    assert (best.spec.batch.micro, best.spec.batch.accumulate) == (3, 5)


def test_scored_candidates_are_legal_and_others_illegal(on_eight):
    """`Legality` asks the rules for combinations; the rules say the same of whole candidates."""
    search, base = on_eight.search, on_eight.job.base
    for candidate in scored_sample(search, 1, 60):
        spec = candidate.candidate.spec(base)
        assert not (check(spec) or find_unsupported(spec)), candidate
    legal = {
        (axes, way.choice.changes, tuple(f.placement for f in way.choice.factors))
        for (axes, is_cut, through, many), ways in search.ways.items()
        if not is_cut and through.name == "ALONE" and many
        for way in ways
    }
    unlike = 0
    for axes, choices in data_choices(base).items():
        for choice in random.Random(2).sample(choices, min(40, len(choices))):
            spec = replace(apply_choices(base, (choice,)), cluster=None)
            ranks = spec.data_degree
            batch = replace(spec.batch, micro=1, accumulate=4, global_samples=4 * ranks)
            spec = replace(spec, batch=batch)
            key = (axes, choice.changes, tuple(f.placement for f in choice.factors))
            if check(spec) or find_unsupported(spec):
                assert key not in legal
                unlike += 1
    assert unlike, "some are illegal"


def test_odd_rows_of_a_vocabulary_leave_choices_that_cut_none():
    """261 rows are cut by tp, and their parts by no dp_shard; copies need no part of them."""
    tiny = ["model.vocab=261", "batch.sequence=16", "batch.global=8", "tp==2", "pp==1"]
    where = [word for word in tiny if "==" in word]
    job = searched_job("llama-tiny", tiny[:3], cluster="h100-8", devices=4, where=where)
    hand = Chooser(job, machine=machine)
    tried = hand._tried(hand.search.run(job.where).best, 100, lambda: True)
    specs = [known.candidate.spec(job.base) for known in tried]
    assert {"R,R,R,R"} <= {str(f.placement) for s in specs for f in s.factors}
    assert "S*,S,S,R" not in {str(f.placement) for s in specs for f in s.factors}


@pytest.mark.parametrize("name", ["muon", "tp-naive"])
def test_a_strategy_that_the_rules_let_be_has_candidates(name):
    """Muon's tuples are those of no other optimizer, and naive sums keep blocks as they are."""
    job = searched_job(name, ["mesh=auto"], devices=2)
    assert Chooser(job).search.has(job.where)


# -- constraints


def test_a_search_keeps_to_its_constraints():
    limited = chooser("tp<=2", "pp==1", "micro>1", "dp_shard>=4")
    result = limited.search.run(limited.job.where)
    assert result.entries
    for candidate in islice(result.best, 200):
        spec = candidate.candidate.spec(limited.job.base)
        assert spec.degree(Axis.TP) <= 2 and spec.degree(Axis.PP) == 1
        assert spec.batch.micro > 1 and spec.degree(Axis.DP_SHARD) >= 4


# -- the estimates


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0] * len(values)
    for place, index in enumerate(order):
        places[index] = place
    return places


def correlation(left: list[float], right: list[float]) -> float:
    """Spearman's."""
    pairs = zip(ranks_of(left), ranks_of(right), strict=True)
    number = len(left)
    return 1 - 6 * sum((a - b) ** 2 for a, b in pairs) / (number * (number**2 - 1))


def test_estimates_have_the_order_of_exact_predictions(on_eight):
    rows = [row for row in map(on_eight.exactly, scored_sample(on_eight.search, 3, 40)) if row]
    assert len(rows) > 30
    peaks = [abs(row.closed.peak / row.peak_bytes - 1) for row in rows]
    assert sorted(peaks)[len(peaks) // 2] < 0.03
    timed = [row for row in rows if row.seconds is not None]
    assert correlation([r.closed.peak for r in rows], [float(r.peak_bytes) for r in rows]) > 0.98
    assert correlation([r.closed.seconds for r in timed], [r.seconds or 0.0 for r in timed]) > 0.98


def test_the_time_of_plain_data_parallelism_is_that_of_its_passes():
    """Eight samples a rank, one by one, each through 32 layers and the ends; links that take no
    time."""
    job = searched_job(
        "llama3-8b",
        ["batch.global=64", "precision.layout=bf16"],
        cluster="h100-8",
        where=["dp_replicate=8", "recompute=full", "micro=1"],
    )
    free = HandPace()
    hand = Chooser(job, machine=lambda spec, *_: machine(spec, pace=free))
    result = hand.search.run(job.where)
    passes = 32 * (2 * FORWARD + 2 * (BACKWARD + FORWARD)) + 8 + 16
    plain = [c for c in result.best if c.candidate.data.degree(Axis.DP_REPLICATE) == 8]
    assert plain and {c.seconds for c in plain} == {8 * passes}


@pytest.mark.parametrize(
    ("collective", "ranks", "nodes", "share"),
    [
        (Collective.ALL_REDUCE, 8, 1, 0),
        (Collective.ALL_GATHER, 16, 2, 1 / 8),
        (Collective.REDUCE_SCATTER, 4, 4, 1),
        (Collective.ALL_TO_ALL, 16, 2, 8 / 15),
    ],
)
def test_a_ring_crosses_nodes_once_for_each_and_an_exchange_for_the_ranks_of_others(
    collective, ranks, nodes, share
):
    assert crossing(collective, ranks, nodes) == share


# -- the ranking


def test_the_best_comes_first_and_all_rows_fit(best_of_eight):
    rows = best_of_eight.ranking
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    room = best_of_eight.job.base.cluster.usable_memory
    assert all(row.memory.fits and row.peak_bytes <= room for row in rows)
    assert best_of_eight.spec == rows[0].spec


def test_no_point_of_the_front_is_beaten(best_of_eight):
    front = best_of_eight.front
    assert front[0].seconds <= best_of_eight.ranking[0].seconds
    for faster, slower in pairwise(front):
        assert faster.seconds <= slower.seconds and faster.peak_bytes > slower.peak_bytes


def test_least_memory_is_another_order():
    least = chooser("pp==1", "tp==1", "micro==1", count=3, objective=SearchGoal.MEMORY)
    peaks = [row.peak_bytes for row in without_known(least.choose).ranking]
    assert peaks == sorted(peaks)


def test_the_reason_why_a_known_strategy_lost_matches_its_figures(best_of_eight):
    lost = {known.name: known for known in best_of_eight.lost}
    whole = lost["DDP"]
    assert whole.best is not None and not whole.best.memory.fits
    assert why_lost(best_of_eight, whole).startswith("does not fit by ")
    best = best_of_eight.ranking[0]
    assert losing_reason(best, best, SearchGoal.TIME) == "is the best"


def test_a_ranking_prints_in_python_like_on_the_command_line(best_of_eight):
    text, sentences = selection_text(best_of_eight), winner_reasons(best_of_eight)
    assert sentences[0].startswith("fit: fits") and all(line in text for line in sentences)
    for lost in best_of_eight.lost:
        assert why_lost(best_of_eight, lost) and bool(lost.why) == (lost.best is None), lost.name


def test_a_strategy_excluded_by_constraints_names_them(best_of_eight):
    lost = {known.name: known.why for known in best_of_eight.lost}
    few = chooser("tp==2", "pp==1", "micro==1", count=1).choose()
    excluded = {known.name: known.why for known in few.lost}
    assert excluded["DDP"] == "excluded by tp==2"
    assert excluded["pp × data"] == "excluded by tp==2, pp==1"
    assert not any(why.startswith("excluded") for why in lost.values())


def test_a_strategy_excluded_by_the_spec_names_the_key():
    chosen = Chooser(searched_job("zero3", ["mesh.dp_shard=auto"], devices=2), count=1).choose()
    lost = {known.name: known.why for known in chosen.lost}
    assert lost["ZeRO-1"] == "excluded by values in the spec"
    assert lost["DDP"] == "excluded by mesh.dp_replicate=1"


# -- unknown times


def test_candidates_without_a_time_come_last(best_of_eight):
    slow = best_of_eight.ranking[-1]
    other = next(
        row for row in best_of_eight.front if placement_idea(row.spec) != placement_idea(slow.spec)
    )
    untimed = replace(other, step=None, why_untimed="nobody knows it")
    rows = sorted([untimed, slow], key=lambda row: order_of(SearchGoal.TIME, row))
    assert rows == [slow, untimed]
    text = selection_text(replace(best_of_eight, ranking=(slow, untimed), front=(), lost=()))
    assert "no step time of 2: nobody knows it" in text


def test_a_winner_equals_the_spec_of_its_overrides_and_its_file(best_of_eight, tmp_path: Path):
    spec = best_of_eight.spec
    source, *overrides = words_of(best_of_eight.job, spec)
    file = tmp_path / "best.yaml"
    file.write_text(as_spec(best_of_eight, best_of_eight.ranking[0]), encoding="utf-8")
    for loaded in (load(source, overrides).spec, load(file).spec):
        assert (loaded.factors, loaded.batch, loaded.sync) == (spec.factors, spec.batch, spec.sync)
        assert (loaded.unit, loaded.overlap, loaded.prefetch, loaded.pipeline) == (
            (spec.unit, spec.overlap, spec.prefetch, spec.pipeline)
        )
        assert (loaded.activations, loaded.precision) == (spec.activations, spec.precision)
        assert not (check(loaded) or find_unsupported(loaded))


def test_a_ranking_prints_and_is_plain_data(best_of_eight):
    text = selection_text(best_of_eight, top=2)
    assert "llama3-8b on 8 devices of h100-8" in text and "\nBest: dp_" in text
    assert "\nFits" in text and "ptrain train" not in text
    record = json.loads(json.dumps(as_record(best_of_eight, top=2)))
    assert len(record["ranking"]) == 2 and record["time_unknown"] is None
    whole = as_record(best_of_eight)
    assert len(whole["ranking"]) == len(best_of_eight.ranking) > 2
    assert [row["rank"] for row in whole["ranking"]] == list(range(1, len(whole["ranking"]) + 1))
    assert whole["ranking"][0]["why"] == "is the best"
    assert {row["front"] for row in whole["front"]} == {True}


def test_rows_of_csv_have_the_columns_of_json_and_the_well_known_choices(best_of_eight):
    rows = list(csv.DictReader(io.StringIO(as_csv(best_of_eight))))
    ranked = [row for row in rows if not row["choice"]]
    assert [row["rank"] for row in ranked] == [str(n + 1) for n in range(len(ranked))]
    assert len(ranked) == len(best_of_eight.ranking)
    front = [row for row in rows if row["front"] == "True" and row["choice"] in ("", "front")]
    assert len(front) == len(best_of_eight.front)
    assert {lost.name: why_lost(best_of_eight, lost) for lost in best_of_eight.lost}.items() <= {
        (row["choice"], row["why"]) for row in rows
    }
    columns = {*as_record(best_of_eight)["ranking"][0]} - {"closed_form", "mesh"}
    assert columns <= rows[0].keys()
    assert len([r for r in csv.DictReader(io.StringIO(as_csv(best_of_eight, 2))) if r["rank"]]) == 2


def test_a_chart_has_a_dot_for_each_of_the_derived(best_of_eight):
    sheet = front_sheet(best_of_eight)
    dots = [box for box in sheet.rectangles if box.width == box.height and box.edge_width == 0.6]
    places = {(row.peak_bytes, row.nominal_seconds) for row in best_of_eight.ranking}
    front = {(row.peak_bytes, row.nominal_seconds) for row in best_of_eight.front}
    assert len(dots) == len(places | front)
    numbers = [text.text for text in sheet.texts if text.text.isdecimal() and text.size < 8]
    assert sorted(map(int, numbers)) == [*range(1, len(front) + 1)]
    listed = [text.text for text in sheet.texts if " GiB: " in text.text]
    assert {line.split()[0] for line in listed} == {*numbers}
    assert all(0 <= box.x <= sheet.width and 0 <= box.y <= sheet.height for box in dots)


def test_each_idea_has_one_row_and_the_front_none_that_is_like_another(best_of_eight):
    rows = best_of_ideas(best_of_eight)
    ideas = [placement_idea(row.spec) for row in rows]
    assert rows[0] is best_of_eight.ranking[0] and len({*ideas}) == len(ideas) >= 4
    for row in rows:
        alike = [
            r for r in best_of_eight.ranking if placement_idea(r.spec) == placement_idea(row.spec)
        ]
        assert all(row.seconds <= other.seconds for other in alike)
    front = distinct_front(best_of_eight, rows)
    assert {id(row) for row in front} <= {id(row) for row in best_of_eight.front}
    for one, other in combinations((*front, *rows), 2):
        is_near = abs(one.seconds / other.seconds - 1) < 0.01
        is_as_large = abs(one.peak_bytes / other.peak_bytes - 1) < 0.05
        is_idea = placement_idea(one.spec) == placement_idea(other.spec)
        assert not (is_near and is_as_large and is_idea)


@pytest.mark.parametrize(
    ("strategy", "overrides", "idea"),
    [
        ("ddp", ["mesh.dp_replicate=2"], "DDP"),
        ("zero1", ["mesh.dp_shard=2"], "ZeRO-1"),
        ("zero2", ["mesh.dp_shard=2"], "ZeRO-2"),
        ("zero3", ["mesh.dp_shard=2", "activations=M"], "FSDP, recompute full"),
        ("hsdp", ["mesh={dp_replicate: 2, dp_shard: 2}"], "HSDP"),
        ("tp", ["mesh={tp: 2}"], "tp"),
        ("fsdp-offload", ["mesh.dp_shard=2"], "FSDP, states offloaded"),
        ("3d", [], "pp × FSDP × tp"),
    ],
)
def test_an_idea_is_named_as_the_field_names_it(strategy, overrides, idea):
    assert placement_idea(load(strategy, overrides).spec) == idea


def test_a_margin_of_memory_stays_free_unless_nothing_leaves_one(best_of_eight):
    margin = best_of_eight.job.margin_bytes
    assert margin == 0 and min(row.memory.spare_bytes for row in best_of_eight.ranking) >= 0
    search = partial(chooser, "tp==1", "pp==1", "micro==1", count=2)
    roomy = search()
    roomy.job = replace(roomy.job, margin=0.45)
    rows = without_known(roomy.choose).ranking
    assert rows and all(row.memory.spare_bytes >= roomy.job.margin_bytes > 30e9 for row in rows)
    words = ["batch.global=8", "batch.sequence=512"]
    arguments = {"cluster": "laptop", "devices": 2, "where": ["mesh.dp_shard=2"], "count": 1}
    wide = select("llama-tiny", words, margin=0.05, **arguments)
    assert wide.job.margin == 0.05
    assert wide.asked_margin == 0.0 and "stay free" in selection_text(wide)
    none = select("llama-tiny", words, margin=0.9999, **arguments)
    assert none.best is not None and (none.job.margin, none.asked_margin) == (0.0, 0.9999)
    assert "margin: none, because no placement leaves 100% free" in selection_text(none)


def test_a_reason_names_the_larger_cost_and_its_ratio():
    spec = load("8b-zero3", ["cluster.preset=h100-8"]).spec
    derivation = derive(spec)
    closed = Scored(candidate=None, peak=0.0, seconds=0.0)
    best = ranked(spec, closed, derivation.exact, derivation.facts)
    whole = best.step.seconds
    more = (
        TimeRow(key=TimeKey(Spent.COMPUTE, Phase.BACKWARD), seconds=whole / 10),
        TimeRow(key=TimeKey(Spent.BUBBLE, Phase.BACKWARD, ("pp",)), seconds=whole / 20),
        TimeRow(key=TimeKey(Spent.UPDATE, Phase.UPDATE), seconds=whole / 50),
    )
    slower = replace(
        best,
        spec=load("8b-zero3", ["cluster.preset=h100-8", "activations=M"]).spec,
        step=best.step._replace(rows=(*best.step.rows, *more)),
        memory=best.memory._replace(peak_bytes=best.memory.peak_bytes - 2**30),
    )
    assert losing_reason(slower, best, SearchGoal.TIME) == (
        f"17.0% slower, {format_seconds(whole / 10)} more compute with recomputation and "
        f"{format_seconds(whole / 20)} more pipeline bubble; 1 GiB smaller"
    )
    assert losing_reason(best, best, SearchGoal.TIME) == "is the best"


def test_where_nothing_fits_nothing_is_ranked_and_something_would():
    tight = chooser("recompute==none", "tp==1", "pp==1", "micro>=4", count=2)
    ranking = tight.choose()
    assert not ranking.ranking and ranking.least is not None
    assert ranking.least.memory.short_bytes > 0
    assert {remedy.change for remedy in ranking.remedies} >= {"without recompute==none"}
    assert all(remedy.fitting.memory.fits for remedy in ranking.remedies)
    assert "Nothing fits" in selection_text(ranking)
    rows = {row["choice"]: row for row in csv.DictReader(io.StringIO(as_csv(ranking)))}
    assert rows["least memory"]["fits"] == "False"
    assert rows["without recompute==none"]["fits"] == "True"
    with pytest.raises(SpecError, match="nothing fits"):
        _ = ranking.spec


def test_candidates_with_identical_figures_are_one_row(on_eight):
    candidates = scored_sample(on_eight.search, 5, 6)
    rows = [row for row in map(on_eight.exactly, candidates) if row]
    other = next(row for row in rows if row.figures != rows[0].figures)
    row = replace(rows[0], spec=replace(rows[0].spec, overlap=None, prefetch=None))
    more = replace(row, spec=replace(row.spec, prefetch=3))
    assert folded([more, other, row, more]) == [replace(row, alike=2), other]


def test_one_definition_of_mfu_is_printed_by_select_and_by_predict(best_of_eight):
    row = best_of_eight.ranking[0]
    derivation = derive(row.spec)
    said = predict_throughput(row.spec, derivation.facts, row.step)
    assert row.mfu is not None and row.mfu == said.mfu_full


def test_rows_without_a_time_are_merged_by_nominal_time(on_eight):
    """One that is slower by the order they are ranked in is a row of its own."""
    timed = (known for known in scored_sample(on_eight.search, 5, 20) if known.seconds < math.inf)
    row = on_eight.exactly(next(timed))
    assert row is not None
    untimed = replace(row, step=None)
    slower = replace(untimed, closed=replace(row.closed, seconds=2 * row.closed.seconds))
    assert folded([untimed, slower, untimed]) == [replace(untimed, alike=1), slower]
