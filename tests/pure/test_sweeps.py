"""Sweeps: fit, rejected points with reasons, keys that follow the mesh, order, CSV, JSON and a
chart."""

from __future__ import annotations

import csv
import io
import json
import re
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from ptrain.algebra.legality import check
from ptrain.charts.memory import sweep_sheet
from ptrain.cli.main import main
from ptrain.commands import add_arguments
from ptrain.cost import PLACED, Column, Estimate, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.estimate import derive
from ptrain.errors import Fault, SpecError
from ptrain.report.predict import prediction_of
from ptrain.report.sweep import (
    SORTS,
    SweepPoint,
    point_figures,
    sort_points,
    step_seconds,
    sweep_table,
)
from ptrain.spec.load import find_mesh_followers, load
from ptrain.spec.names import list_files
from ptrain.spec.placement import DATA_AXES

SWEEP = ("predict", "8b-zero3", "batch.sequence=4096,16384")


def rows_of(text: str) -> list[dict[str, str]]:
    """Return the rows of a table by the titles of its columns."""
    lines = text.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("spec ")) :]
    titles = re.split(r"  +", lines[0])
    rows = [re.split(r"  +", line) for line in lines[1:]]
    return [dict(zip(titles, row, strict=True)) for row in rows if len(row) == len(titles)]


def test_a_sweep_shows_the_fit_and_the_device_memory(ptrain):
    first, second = rows_of(ptrain(*SWEEP))
    assert "peak (of 74.12 GiB)" in first
    assert (first["fits"], second["fits"]) == ("yes", "no")


def test_different_devices_have_no_common_capacity(ptrain):
    text = ptrain("predict", "8b-zero3", "cluster.device_memory=40 GiB,80 GiB")
    assert "peak" in rows_of(text)[0]


def test_without_a_cluster_no_fit_is_claimed(ptrain):
    first, *_ = rows_of(ptrain("predict", "8b-zero3", "cluster=null", "batch.micro=1,2"))
    assert first["fits"] == "–"


def test_an_impossible_point_is_a_row_with_a_reason(ptrain):
    lines = ptrain("predict", "zero3", "mesh.dp_shard=2,5", "batch.global=16").splitlines()
    assert "rejected" in lines[2]
    assert lines[3].startswith(
        "rejected: mesh.dp_shard=5: batch.global: global=16 is not a multiple"
    )
    assert "Use `batch.global=10` or `batch.global=20`." in lines[3]


def refusal(capsys, *words: str) -> str:
    assert main(["predict", *words]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_list_of_passes_that_cannot_run_is_a_row_too(ptrain, tmp_path):
    good = tmp_path / "good.csv"
    good.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    bad = tmp_path / "bad.csv"
    bad.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", encoding="utf-8")
    words = (f"pipeline.schedule={good},{bad}", "batch.global=2", "batch.micro=1")
    lines = ptrain("predict", "pp-1f1b", *words).splitlines()
    assert "rejected" not in lines[1] and "rejected" in lines[2]
    assert any(line.startswith(f"rejected: pipeline.schedule={bad}: ") for line in lines)


def test_a_sweep_of_which_nothing_is_left_is_rejected(capsys):
    text = refusal(capsys, "zero3", "mesh.dp_shard=3,5", "batch.global=16")
    assert "data degree=3 = 6" in text and "data degree=5 = 10" in text


def test_an_error_of_all_points_is_reported_once(capsys):
    text = refusal(capsys, "zero3", "mesh.dp_shard=2,4", "train.steps=0")
    assert text.count("train.steps: must be") == 1


def test_the_batch_stays_while_micro_batches_make_it_up_and_then_grows():
    def batch(ranks: int, *more: str) -> list[str]:
        words = (f"mesh.dp_shard={ranks}", "cluster=null", *more)
        return [follower.override for follower in find_mesh_followers("8b-zero3", words)]

    assert batch(16) == batch(64) == []  # of 64 samples, accumulated 4 and 1
    assert batch(512) == ["batch.global=512"]
    assert batch(3) == ["batch.global=66"]
    assert batch(3, "batch.micro=2") == ["batch.global=66"]
    assert batch(3, "batch.accumulate=2") == ["batch.global=6"]  # which is written, and stays
    assert batch(512, "batch.global=64") == batch(512, "batch={global: 8, sequence: 8}") == []
    assert batch(512, "batch.global=4M tokens") == []


def test_every_named_spec_follows_a_data_axis_of_24_ranks():
    for name in list_files("strategies", "paper", "node"):
        axis = next((f.axis for f in load(name).spec.factors if f.axis in DATA_AXES), None)
        if axis is None:
            continue
        words = (f"mesh.{axis}=24",)
        follows = [follower.override for follower in find_mesh_followers(name, words)]
        spec = load(name, [*words, *follows]).spec
        assert spec.degree(axis) == 24 and spec.batch.global_samples % spec.data_degree == 0
        assert not any(fault.place in ("mesh", "batch.global") for fault in check(spec)), name


def test_a_batch_in_tokens_follows_the_mesh():
    base = {"model": {"preset": "llama-tiny"}, "mesh": {"dp_shard": 2}, "placement": "zero3"}
    for batch in ({"sequence": 64, "accumulate": 2}, {"sequence": 64, "global": "4k tokens"}):
        assert find_mesh_followers(base | {"batch": batch}, ("mesh.dp_shard=64",)) == ()


def test_the_cluster_grows_with_the_mesh_unless_its_devices_are_written():
    def cluster(*words: str) -> list[str]:
        return [follower.override for follower in find_mesh_followers("8b-zero3", words)]

    assert cluster("mesh.dp_shard=8") == []
    assert cluster("mesh.dp_shard=64") == ["cluster.devices=64"]
    assert cluster("mesh.dp_shard=64", "cluster.preset=a100-8") == ["cluster.devices=64"]
    assert cluster("mesh.dp_shard=64", "cluster.devices=8") == []


def test_derived_keys_are_shown_with_their_points(ptrain):
    text = ptrain("predict", "70b-zero3", "mesh.dp_shard=8,512,1024")
    assert "batch follows the mesh: global 8 → 512 (mesh.dp_shard=512), 1024 (mesh.d" in text
    assert "cluster follows the mesh: devices 8 → 512 (mesh.dp_shard=512), 1024" in text
    assert "cluster.devices=N fixes it" in text


def test_many_points_that_followed_the_mesh_are_a_range(ptrain):
    ranks = ",".join(map(str, range(9, 17)))
    text = ptrain("predict", "70b-zero3", f"mesh.dp_shard={ranks}")
    assert "global 8 → 9 … 16 at 8 points (--csv lists them); batch.global=N fixes it" in text


def test_a_single_spec_is_taken_as_it_is_written(capsys):
    words = ("70b-zero3", "mesh.dp_shard=16", "batch.global=16")
    assert "h100-8 has 8 devices" in refusal(capsys, *words)


def test_the_figures_to_sort_by_are_those_that_a_row_has():
    parser = ArgumentParser()
    add_arguments(parser, "predict")
    (option,) = (action for action in parser._actions if action.dest == "sort")
    assert option.choices == tuple(SORTS)


@pytest.mark.parametrize("sort", [*SORTS])
def test_rows_are_sorted_by_a_figure_with_the_rejected_at_the_end(ptrain, sort):
    words = ("predict", "zero3", "mesh.dp_shard=2,5,4,1", "batch.global=16", "--sort", sort)
    records = json.loads(ptrain(*words, "--json"))
    assert records[-1]["refused"]
    labels = [line.split()[0] for line in ptrain(*words).splitlines()[1:5]]
    assert labels == [record["spec"] for record in records]
    if sort == "peak":
        assert labels[0] == "mesh.dp_shard=4"
    if sort == "sent":
        assert labels[0] == "mesh.dp_shard=1"


def test_json_of_a_sweep_is_a_list_with_differences_as_fields(ptrain):
    good, bad = json.loads(
        ptrain("predict", "zero3", "mesh.dp_shard=2,5", "batch.global=16", "--json")
    )
    assert good["overrides"] == {"mesh.dp_shard": "2"} and good["refused"] is None
    assert good["fit"]["fits"] is True
    assert bad["overrides"] == {"mesh.dp_shard": "5"}
    assert bad["faults"][0]["place"] == "batch.global"
    (followed,) = json.loads(ptrain("predict", "8b-zero3", "mesh.dp_shard=8,512", "--json"))[1:]
    assert followed["overrides"] == {
        "mesh.dp_shard": "512", "batch.global": "512", "cluster.devices": "512",
    }  # fmt: skip


def test_csv_has_a_line_per_point_and_a_column_per_key_that_differs(ptrain):
    text = ptrain("predict", "zero3", "mesh.dp_shard=2,5", "batch.global=16", "--csv")
    good, bad = csv.DictReader(io.StringIO(text))
    assert (good["mesh.dp_shard"], good["fits"], good["refused"]) == ("2", "true", "")
    exact = derive(load("zero3").spec).exact
    assert int(good["peak_bytes"]) == exact.peak_bytes()
    assert int(good["sent_bytes"]) == exact.sent_bytes()
    assert bad["peak_bytes"] == "" and "not a multiple" in bad["refused"]


def test_csv_of_one_spec_is_one_line(ptrain):
    assert len(ptrain("predict", "zero3", "--csv").splitlines()) == 2


def test_a_chosen_micro_batch_is_shown_per_point(ptrain):
    words = ("batch.micro=auto", "batch.sequence=2048,8192", "batch.global=64")
    lines = ptrain("predict", "8b-zero3", *words).splitlines()
    assert any(line.startswith("batch.sequence=2048: batch.micro: auto is 4") for line in lines)
    assert any(line.startswith("batch.sequence=8192: batch.micro: auto is 1") for line in lines)


def points() -> list[SweepPoint]:
    predictions = [
        prediction_of(derive(load("8b-zero3", words).spec), label=words[0], offer=False)
        for words in (["batch.sequence=4096"], ["batch.sequence=16384"])
    ]
    faults = (Fault(place="mesh", finding="too many"),)
    return [
        *(SweepPoint(label=prediction.label, prediction=prediction) for prediction in predictions),
        SweepPoint(label="mesh.tp=3", faults=faults),
    ]


def test_a_chart_has_a_bar_for_each_peak_a_line_for_the_capacity_and_words_for_the_rejected():
    sheet = sweep_sheet(points())
    words = [label.text for label in sheet.texts]
    assert "usable memory 74.12 GiB" in words and "rejected" in words
    assert any(text.startswith("Fits: ") for text in words)
    assert any(text.startswith("Does not fit by ") for text in words)
    ticks = [line.points[0][0] for line in sheet.lines if not line.dash]
    (usable,) = {line.points[0][0] for line in sheet.lines if line.dash}
    assert len(ticks) == 2 and ticks[0] < usable < ticks[1]
    assert all(label.left >= 0 and label.left + label.width <= sheet.width for label in sheet.texts)


def test_a_bar_stacks_the_states_and_the_temporary_tensors_up_to_the_peak():
    sheet = sweep_sheet(points())
    (end, top), _ = next(line.points for line in sheet.lines if not line.dash)
    bars = [box for box in sheet.rectangles if box.edge_width == 0.6 and box.height == 13.0]
    parts = [box for box in bars if box.y == top + 1]
    exact = points()[0].prediction.derivation.exact
    shares = [exact.bytes_of(state) / exact.peak_bytes() for state in PLACED]
    length = sum(part.width for part in parts)
    assert [part.width / length for part in parts[:4]] == pytest.approx(shares)
    assert len(parts) == 5 and parts[-1].x + parts[-1].width == pytest.approx(end)
    assert {"parameters", "temporary", "peak"} <= {label.text for label in sheet.texts}


def test_one_spec_has_a_bar_for_each_state_and_states_usable_memory_that_would_hide_them():
    prediction = prediction_of(derive(load("zero3").spec), offer=False)
    sheet = sweep_sheet([SweepPoint(label="zero3", prediction=prediction)])
    words = [label.text for label in sheet.texts]
    assert words[0] == "zero3: predicted peak per rank, by state"
    assert any(text.endswith("times the peak: outside the picture") for text in words)
    assert not any(line.dash for line in sheet.lines)
    longest = max(box.width for box in sheet.rectangles if box.edge_width == 0.6)
    assert longest > 0.4 * sheet.width


def test_a_chart_goes_to_a_picture_or_is_rejected_before_anything_is_derived(capsys):
    text = refusal(capsys, "no-such-spec", "batch.micro=1,2", "--chart", "x.txt")
    assert "Use a file name that ends in .png or .svg." in text


def test_a_chart_is_written(ptrain, tmp_path):
    path = tmp_path / "sweep.svg"
    text = ptrain("predict", "zero3", "batch.micro=1,2", "--chart", str(path))
    assert text.splitlines()[-3] == f"chart    {path}"
    assert "<svg" in path.read_text(encoding="utf-8")


def point_with_time(point: SweepPoint, seconds: float | None, why: str = "") -> SweepPoint:
    """The point with a step of so many seconds, or with none and why."""
    prediction = point.prediction
    assert prediction is not None
    key = TimeKey(Spent.COMPUTE, Phase.FORWARD)
    step = None if seconds is None else StepTime(rows=(TimeRow(key=key, seconds=seconds),))
    undefined = {"step_seconds": why} if why else {}
    exact = replace(prediction.derivation.exact, step=step, undefined=undefined)
    derivation = replace(prediction.derivation, exact=exact)
    return replace(point, prediction=replace(prediction, derivation=derivation))


def test_a_step_has_its_seconds_in_a_row_or_a_dash_with_the_reason_below():
    slow, fast, _ = points()
    rows = [
        point_with_time(slow, 2.5),
        point_with_time(fast, 0.25),
        point_with_time(fast, None, "no rates"),
    ]
    lines = sweep_table(rows).splitlines()
    assert [row["step time"] for row in rows_of(sweep_table(rows))] == ["2.50 s", "250 ms", "–"]
    usable = "usable memory per device: 74.12 GiB (79.1 GiB less a reserve of 4.977 GiB)"
    assert lines[4:] == [usable, f"{fast.label}: no step time: no rates"]  # only the slow one fits
    assert [point_figures(row)["step_seconds"] for row in rows] == [2.5, 0.25, None]
    assert sort_points(rows, "time") == [rows[1], rows[0], rows[2]]
    texts = [label.text for label in sweep_sheet(rows).texts]
    assert any(text.endswith("250 ms/step") for text in texts)


def test_the_fastest_point_that_fits_is_named_or_that_none_fits():
    fits, large, refused = points()
    slow = replace(point_with_time(fits, 2.5), label="slow")
    rows = [point_with_time(large, 0.25), slow, point_with_time(fits, 0.5), refused]
    best = f"Fastest that fits: {fits.label}, 65.5k tokens/s/GPU\n"
    assert sweep_table(rows).startswith(best)  # 64 samples of 4096 on 8 devices
    assert "None fits" not in sweep_table(rows)
    none = sweep_table([large, refused])
    assert none.startswith(f"None fits: {large.label} needs the least memory, ")
    assert "Fastest" not in none


def test_a_smaller_mesh_with_a_higher_pace_is_the_most_efficient_not_the_fastest():
    fits = points()[0]
    wide = derive(load("8b-zero3", ["mesh.dp_shard=16", "cluster.devices=16"]).spec)
    point = SweepPoint(label="wide", prediction=prediction_of(wide, label="wide", offer=False))
    rows = [point_with_time(fits, 0.5), point_with_time(point, 0.4)]
    assert sweep_table(rows).startswith(
        f"Most efficient that fits: {fits.label}, 65.5k tokens/s/GPU\n"
    )


def test_unknown_seconds_are_null_and_keep_the_order_of_the_sweep():
    assert step_seconds(Estimate(column=Column.EXACT, world_size=1)) is None
    swept = points()
    assert sort_points(swept, None) == swept
    rows = [point_figures(point) for point in swept]
    assert [row["fits"] for row in rows[:2]] == [True, False]
    assert rows[2] == {"spec": "mesh.tp=3", "refused": "mesh: too many"}


def test_ratios_refer_to_the_first_accepted_row():
    first, second, refused = points()
    _, of_second, _ = rows_of(sweep_table([refused, second, first]))
    assert of_second["states ratio"] == "1×"


def test_a_spec_error_carries_its_faults_into_the_row():
    with pytest.raises(SpecError) as caught:
        load("zero3", ["mesh.dp_shard=0"])
    assert "mesh.dp_shard" in SweepPoint(label="x", faults=caught.value.faults).refusal


def test_figures_of_a_device_have_another_label_than_those_of_the_job(ptrain):
    alone = ptrain("predict", "8b-zero3")
    assert re.search(r" · [\d.]+[kM]? tokens/s · [\d.]+[kM]? tokens/s/GPU · MFU", alone)
    first, *_ = rows_of(ptrain("predict", "8b-zero3", "mesh.dp_shard=4,8"))
    assert {"tokens/s", "tokens/s/GPU"} <= first.keys()
