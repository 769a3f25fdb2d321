"""`ptrain select`: what is searched, in which order it ranks, what it refuses; the closed forms
beside what is derived."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ptrain.algebra.legality import check, executed
from ptrain.axes.candidates import chosen
from ptrain.cli.main import main
from ptrain.derivation.machine import Machine
from ptrain.errors import SpecError
from ptrain.report.selection import as_csv, as_record, as_spec, selection_text
from ptrain.selection.choose import Chooser, answer
from ptrain.selection.demand import Demand, demand_of, numbers
from ptrain.selection.job import searched_job
from ptrain.selection.known import reason
from ptrain.selection.ranking import PlacementRanking
from ptrain.selection.search import Search
from ptrain.selection.space import (
    data_choices,
    degrees_over,
    inner_products,
    micro_batches,
    pipelines,
)
from ptrain.selection.task import Scored, SearchGoal
from ptrain.selection.where import Where, parse
from ptrain.selection.words import words_of
from ptrain.spec.axis import Axis
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.pure.paces import HandPace, model

PACE = HandPace(byte=2e-9, sent=5e-9, copied=1e-8, element=1e-8)
FORWARD, BACKWARD = 16, 32


def machine(spec: Spec, *_: object, pace: HandPace = PACE) -> Machine:
    """Of a hand-made pace: a layer's passes are 32 and 64 seconds for each sample, divided among
    the ranks of tp; what is recomputed is another 32."""
    samples, cut = spec.batch.micro, spec.degree(Axis.TP)
    again = FORWARD * (spec.activations.default.policy is not None)
    work = model(
        2 * FORWARD * samples // cut,
        2 * (BACKWARD + again) * samples // cut,
        layers=spec.model.layers or 1,
        behind=(8 * samples, 16 * samples),
    )
    return Machine(pace=pace, work=lambda index: work)


def chooser(*words: str, devices: int = 8, cluster: str = "h100-8", **options: object) -> Chooser:
    """One for llama3-8b in samples of 4096 tokens; words with an operator are constraints."""
    where = [word for word in words if "<" in word or ">" in word or "==" in word]
    others = [word for word in words if word not in where]
    job = searched_job(
        "llama3-8b", ["batch.global=64", *others], cluster=cluster, devices=devices, where=where
    )
    return Chooser(job, machine=machine, **options)  # type: ignore[arg-type]


def scored(search: Search, seed: int, number: int) -> list[Scored]:
    """Some candidates that fit, drawn from all blocks alike."""
    draw = random.Random(seed)
    pool = [
        block.scored(draw.randrange(len(block.rows)))
        for block in search.blocks()
        if len(block.rows)
    ]
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
            spec = chosen(base, (choice,))
            assert spec.pipeline.stages_over(8 // left) <= layers


def test_every_mesh_of_eight_devices_has_candidates(on_eight):
    """Ordered factorizations of 2³ over four axes: 6 over 3, 20."""
    meshes = set()
    for block in on_eight.search.blocks():
        for row in range(0, len(block.table), 7):
            spec = block.candidate(row, 0).spec(on_eight.job.base)
            meshes.add(tuple(spec.degree(axis) for axis in Axis))
    assert len(meshes) == 20


def test_micro_batches_are_powers_of_two_that_divide_a_ranks_samples():
    base = chooser().job.base
    assert list(micro_batches(base, 4)) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert list(micro_batches(base, 3)) == []


def test_what_is_scored_is_legal_and_what_is_not_is_illegal(on_eight):
    """`Legality` asks the rules for combinations; the rules say the same of whole candidates."""
    search, base = on_eight.search, on_eight.job.base
    for candidate in scored(search, 1, 60):
        spec = candidate.candidate.spec(base)
        assert not (check(spec) or executed(spec)), candidate
    legal = {
        (axes, way.choice.changes, tuple(f.placement for f in way.choice.factors))
        for (axes, is_cut, through, many), ways in search.ways.items()
        if not is_cut and through.name == "ALONE" and many
        for way in ways.ways
    }
    unlike = 0
    for axes, choices in data_choices(base).items():
        for choice in random.Random(2).sample(choices, min(40, len(choices))):
            spec = replace(chosen(base, (choice,)), cluster=None)
            ranks = spec.data_degree
            batch = replace(spec.batch, micro=1, accumulate=4, global_samples=4 * ranks)
            spec = replace(spec, batch=batch)
            key = (axes, choice.changes, tuple(f.placement for f in choice.factors))
            if check(spec) or executed(spec):
                assert key not in legal
                unlike += 1
    assert unlike, "some are illegal"


# -- constraints


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("tp<=8", "mesh.tp", 8),
        ("micro>=2", "batch.micro", 2),
        ("recompute=full", "recompute", "full"),
        ("placement.dp_shard=[S*, O, O, R]", "placement.dp_shard", "S*,S@host,S@host,R"),
        ("memory<=70 GB", "memory", 70e9),
        ("time<2.5", "time", 2.5),
    ],
)
def test_a_constraint_is_a_name_a_comparison_and_a_bound(text, name, bound):
    constraint = parse(text)
    assert (constraint.name, constraint.bound) == (name, bound)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("tp", "is no constraint"),
        ("dp_shar<=8", "did you mean dp_shard?"),
        ("recompute<=full", "is no number"),
        ("memory<=much", "is no figure"),
    ],
)
def test_what_is_no_constraint_is_refused_by_name(text, finding):
    with pytest.raises(SpecError, match=finding.replace("?", r"\?")):
        parse(text)


def test_a_search_keeps_to_its_constraints():
    limited = chooser("tp<=2", "pp==1", "micro>1", "dp_shard>=4")
    result = limited.search.run(limited.job.where)
    assert result.best
    for candidate in result.best[:200]:
        spec = candidate.candidate.spec(limited.job.base)
        assert spec.degree(Axis.TP) <= 2 and spec.degree(Axis.PP) == 1
        assert spec.batch.micro > 1 and spec.degree(Axis.DP_SHARD) >= 4


# -- the closed forms


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


def test_closed_forms_order_as_what_is_derived(on_eight):
    rows = [row for row in map(on_eight.exactly, scored(on_eight.search, 3, 40)) if row]
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


# -- the ranking


def test_the_best_comes_first_and_all_fit(best_of_eight):
    rows = best_of_eight.ranking
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    room = best_of_eight.job.base.cluster.device_memory
    assert all(row.memory.fits and row.peak_bytes <= room for row in rows)
    assert best_of_eight.spec == rows[0].spec


def test_no_point_of_the_front_is_beaten(best_of_eight):
    front = best_of_eight.front
    assert front[0].seconds <= best_of_eight.ranking[0].seconds
    for faster, slower in pairwise(front):
        assert faster.seconds <= slower.seconds and faster.peak_bytes > slower.peak_bytes


def test_least_memory_is_another_order():
    by_memory = chooser("pp==1", "tp==1", "micro==1", count=3, objective=SearchGoal.MEMORY).choose()
    peaks = [row.peak_bytes for row in by_memory.ranking]
    assert peaks == sorted(peaks)


def test_why_a_known_choice_lost_is_what_its_figures_say(best_of_eight):
    lost = {known.name: known for known in best_of_eight.lost}
    whole = lost["data parallelism alone"]
    assert whole.best is not None and not whole.best.memory.fits
    assert whole.why.startswith("does not fit by ")
    best = best_of_eight.ranking[0]
    assert reason(best, best, SearchGoal.TIME) == "is the best"


def test_a_winner_is_what_its_words_and_its_file_load_to(best_of_eight, tmp_path: Path):
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
        assert not (check(loaded) or executed(loaded))


def test_a_ranking_prints_and_is_plain_data(best_of_eight):
    text = selection_text(best_of_eight, top=2)
    assert "llama3-8b on 8 devices of h100-8" in text and "best: ptrain train" in text
    record = json.loads(json.dumps(as_record(best_of_eight, top=2)))
    assert len(record["ranking"]) == 2 and record["time_unknown"] is None
    header, *rows = as_csv(best_of_eight).splitlines()
    assert header.startswith("placement,") and len(rows) == len(best_of_eight.ranking)


def test_where_nothing_fits_nothing_is_ranked_and_something_would():
    tight = chooser("recompute==none", "tp==1", "pp==1", "micro>=4", count=2)
    ranking = tight.choose()
    assert not ranking.ranking and ranking.least is not None
    assert ranking.least.memory.short_bytes > 0
    assert {remedy.change for remedy in ranking.remedies} >= {"without recompute==none"}
    assert all(remedy.fitting.memory.fits for remedy in ranking.remedies)
    assert "nothing fits" in selection_text(ranking)
    with pytest.raises(SpecError, match="nothing fits"):
        _ = ranking.spec


# -- jobs


def test_a_spec_keeps_the_degrees_that_it_writes():
    job = searched_job("tp-zero3", ["mesh.tp=auto"], devices=8)
    assert [rule.text for rule in job.where.constraints][:3] == [
        "mesh.pp=1",
        "mesh.dp_replicate=1",
        "mesh.dp_shard=2",
    ]


def test_an_open_micro_batch_leaves_the_mesh_as_it_is():
    job = searched_job("zero3", ["batch.micro=auto"], devices=2)
    assert {rule.text for rule in job.where.constraints} >= {"mesh.dp_shard=2", "mesh.tp=1"}


def test_a_model_alone_has_a_batch_of_about_four_million_tokens():
    base = searched_job("qwen3-32b", ["batch.sequence=32768"], cluster="h100-64").base
    assert (base.batch.global_samples, base.precision.layout.name) == (128, "zero16")


@pytest.fixture
def broken_cluster(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "broken.yaml"
    file.write_text("devices: [8\n", encoding="utf-8")
    yield str(file)


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["llama3-8b"], "no cluster says"),
        (["llama3-8b", "--cluster", "h100-8", "--devices", "9"], "has 8"),
        (["llama3-8b", "--cluster", "h100-9"], "no cluster named"),
        (["llama9-8b", "--cluster", "h100-8"], "no spec named"),
        (["zero3"], "nothing of this spec is left to be chosen"),
        (["llama3-8b", "--cluster", "h100-128", "--devices", "67"], "divide"),
        (["llama3-8b", "--cluster", "h100-8", "--where", "tp=3"], "obeys tp=3"),
        ([], "name one MODEL or SPEC"),
    ],
)
def test_what_cannot_be_searched_is_one_message(words, finding, capsys):
    assert main(["select", *words, "--json"]) == 2
    assert re.search(finding, json.loads(capsys.readouterr().out)["error"])


def test_a_malformed_cluster_is_named(broken_cluster):
    with pytest.raises(SpecError, match="the preset cannot be used"):
        searched_job("llama3-8b", cluster=broken_cluster)


def test_without_rates_time_is_unknown_and_said_to_be(capsys):
    words = ["select", "llama-tiny", "batch.global=8", "batch.sequence=64", "--cluster", "laptop"]
    assert main([*words, "--devices", "2", "--where", "tp=1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["time_unknown"] and record["ranking"]
    assert all(row["step_seconds"] is None for row in record["ranking"])


def test_constraints_of_a_where_are_asked_of_what_says_them():
    where = Where.of(["tp<=2", "memory<=1 GB"])
    assert [rule.name for rule in where.bounds("memory")] == ["memory"]


# -- how many devices


def test_numbers_of_devices_are_powers_of_two_and_the_last():
    assert list(numbers(24)) == [1, 2, 4, 8, 16, 24]
    assert list(numbers(8)) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        ((None, "30d", None), "nobody says"),
        (("many", "30d", None), "is no number"),
        (("1T", "soon", None), "is no duration"),
    ],
)
def test_a_demand_that_says_too_little_is_refused(words, finding):
    with pytest.raises(SpecError, match=finding):
        demand_of(*words)


def test_the_fewest_devices_meet_a_deadline_and_half_of_them_do_not():
    few = chooser("recompute==full", "pp==1", "tp==1", "micro==1", count=1)
    few.objective = SearchGoal.DEVICES
    on_four = few.on(4).first()
    assert on_four is not None and on_four.seconds is not None
    tokens = on_four.spec.batch.tokens
    ranking = answer(few, Demand(tokens=tokens, deadline=1.01 * on_four.seconds))
    assert ranking.job.devices == 4 and ranking.best is not None
    with pytest.raises(SpecError, match="no number of devices up to 8 meets it"):
        answer(few, Demand(tokens=tokens, deadline=1.0))


def test_a_price_is_of_devices_and_hours():
    job = chooser("recompute==full", "pp==1", "tp==1", "micro==1", "cluster.price=2.0", count=1)
    row = job.first()
    assert row is not None and row.seconds is not None and row.price is not None
    hours = 1e9 / row.spec.batch.tokens * row.seconds / 3600
    assert row.price == pytest.approx(2.0 * 8 * hours)
