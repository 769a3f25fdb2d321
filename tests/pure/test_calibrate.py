"""`ptrain calibrate` without its ranks: options, rejections, and the written file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ptrain.calibration import write
from ptrain.calibration.bench import GPUS, PROCESSORS, count_flops
from ptrain.calibration.write import (
    CalibrationOptions,
    MeasuredPart,
    parse_options,
    report_rates,
    to_argv,
)
from ptrain.cli.main import main
from ptrain.cost import Collective
from ptrain.errors import SpecError
from ptrain.facts.model import Operator
from ptrain.rates.measured import CALIBRATED, pace_of
from ptrain.spec.cluster import Cluster, OperatorKind
from ptrain.spec.load import load
from ptrain.spec.precision import DType


def part(ranks: int, *, spread: float = 0.02, **tables: list[list[object]]) -> MeasuredPart:
    known: dict[str, list[list[object]]] = {
        "operators": [["copy", "fp32", 64, 1e-6 * ranks], ["copy", "fp32", 6400, 1.23456e-5]],
        "hooks": [["pipeline_pass", 2e-5]],
    }
    return MeasuredPart(ranks=ranks, nodes=1, kind="cpu", spread=spread, tables=known | tables)


GATHERS: list[list[object]] = [["all_gather", 2, 1, 8_000_000, 4e-3]]


def cluster_of(out: Path) -> Cluster:
    mapping: dict[str, object] = {
        "model": {"preset": "llama-tiny"},
        "mesh": {"dp_replicate": 2},
        "placement": "ddp",
        "batch": {"micro": 1, "sequence": 8},
        "cluster": {"preset": str(out)},
    }
    cluster = load(mapping).spec.cluster
    assert cluster is not None
    return cluster


def test_measurements_become_a_cluster_for_specs(tmp_path, capsys):
    out = tmp_path / "here.yaml"
    assert report_rates([part(1), part(2, collectives=GATHERS)], CalibrationOptions(out=out)) == 0
    assert "copy fp32 6400" in capsys.readouterr().out
    cluster = cluster_of(out)
    assert cluster.rates is not None
    assert (cluster.name, cluster.kind, cluster.devices_per_node) == ("here", "cpu", 2)
    assert cluster.intra_node_bandwidth == 1e9, "half of 8 MB in 4 ms"
    assert (cluster.rates.at_once, cluster.rates.spread) == ((1, 2), (0.02, 0.02))
    assert [row.figures for row in cluster.rates.collectives] == [(None, 4e-3)]
    assert [row.figures for row in cluster.rates.operators] == [(1e-6, 2e-6), (1.235e-5, 1.235e-5)]
    pace = pace_of(cluster, 2)
    assert pace is not None
    gather = pace.collective_seconds(Collective.ALL_GATHER, ranks=2, nodes=1, payload=8_000_000)
    assert gather == 4e-3


def test_a_size_left_out_takes_as_much_longer_than_with_fewer_ranks_as_the_largest(
    tmp_path,
):
    sizes: list[list[object]] = [["copy", "fp32", size, 1e-9 * size] for size in (64, 6400, 640000)]
    slower: list[list[object]] = [["copy", "fp32", size, 3e-9 * size] for size in (64, 6400)]
    parts = [part(1, operators=sizes), part(2, operators=slower)]
    report_rates(parts, CalibrationOptions(out=tmp_path / "here.yaml"))
    pace = pace_of(cluster_of(tmp_path / "here.yaml"), 2)
    assert pace is not None
    operator = Operator(OperatorKind.COPY, DType.FP32, (640000,))
    assert pace.operator_seconds(operator) == pytest.approx(3e-9 * 640000, rel=1e-3)


def test_the_fields_of_a_cluster_stay(tmp_path, capsys):
    options = CalibrationOptions(cluster="laptop", out=tmp_path / "out.yaml", json=True)
    assert report_rates([part(1)], options) == 0
    assert json.loads(capsys.readouterr().out)["at_once"] == [1]
    text = options.out.read_text(encoding="utf-8")
    assert "devices: 16\n" in text and "name: laptop\n" in text


def refusal(options: CalibrationOptions, parts: list[MeasuredPart] | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        report_rates(parts, options) if parts else write.calibrate(options)
    return str(caught.value)


def test_inconsistent_measurements_are_not_written(tmp_path, capsys):
    options = CalibrationOptions(out=tmp_path / "out.yaml")
    assert refusal(options, [part(1, spread=0.3)]) == (
        "error: calibrate: repeated measurements differ by 30% in the median, more than 25%: "
        "other processes use this machine; no file was written\n"
        "  remedy: Stop the other processes, or add `--force`."
    )
    assert not options.out.exists()
    forced = CalibrationOptions(out=options.out, force=True)
    assert report_rates([part(1, spread=0.3)], forced) == 0 and options.out.exists()


def test_a_busy_machine_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "busy_cores", lambda: 1.2)
    monkeypatch.setattr(write, "cores", lambda: 2)
    assert refusal(CalibrationOptions(out=tmp_path / "out.yaml")) == (
        "error: calibrate: other processes use 1.2 of 2 cores; nothing was measured\n"
        "  remedy: Stop the other processes, or add `--force`."
    )


def test_busy_cores_are_detected_by_their_use(tmp_path, monkeypatch):
    looks = iter([(100, 900), (130, 970)])
    monkeypatch.setattr(write, "_read_cpu_ticks", lambda: next(looks))
    monkeypatch.setattr(write, "_LOOK", 0.0)
    monkeypatch.setattr(write, "_STAT", tmp_path)
    monkeypatch.setattr(write, "cores", lambda: 2)
    assert write.busy_cores() == 2 * 30 / 100


def test_a_file_that_no_calibration_wrote_is_not_overwritten(tmp_path):
    file = tmp_path / "mine.yaml"
    for content in (b"devices: 2\n", b"\0\xff", b""):
        file.write_bytes(content)
        assert refusal(CalibrationOptions(out=file)) == (
            f"error: --out: {file} exists and was not written by a calibration\n"
            "  remedy: Use another file, or add `--force`."
        )
    folder = refusal(CalibrationOptions(out=tmp_path / "none" / "out.yaml"))
    assert folder.endswith(
        f"the folder {tmp_path / 'none'} does not exist\n"
        f"  remedy: Run `mkdir -p {tmp_path / 'none'}` first."
    )
    assert "is a folder" in refusal(CalibrationOptions(out=tmp_path))


def test_an_unusable_cluster_gives_one_message(tmp_path, capsys):
    file = tmp_path / "broken.yaml"
    file.write_text("devices: many\nrates: {hooks: [[ddp_bucket]]}\n", encoding="utf-8")
    assert main(["calibrate", str(file), "--out", str(tmp_path / "out.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cluster.preset: the preset is invalid: ")
    assert f"{file}:1:10: error: devices: must be an integer" in error
    assert "rates.hooks: row 1 must be [hook, seconds by ranks at once]" in error
    file.write_text("devices: 2\nrates: {hooks: [[tensor_sum, 1e-5]]}\n", encoding="utf-8")
    assert main(["calibrate", str(file), "--out", str(tmp_path / "out.yaml")]) == 2
    error = capsys.readouterr().err
    assert "row 1, hook: must be one of" in error and "remedy: If another version" in error
    assert main(["calibrate", "h101", "--out", str(tmp_path / "out.yaml")]) == 2
    assert "there is no cluster named 'h101'" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "two", "1,,2", "9999"])
def test_numbers_of_ranks_are_numbers(ranks, capsys):
    assert main(["calibrate", "--ranks", ranks]) == 2
    assert "error: --ranks: " in capsys.readouterr().err


def test_options_are_words_again():
    said = ["--part", "part.json", "--until", "17.5", "--device", "cpu", "--force"]
    options = parse_options(["laptop", "--ranks", "4,1", "--out", "a.yaml", "--brief", *said])
    assert options == CalibrationOptions(
        cluster="laptop",
        ranks=(1, 4),
        out=Path("a.yaml"),
        brief=True,
        device="cpu",
        force=True,
        part=Path("part.json"),
        until=17.5,
    )
    assert parse_options(to_argv(options)) == options


def test_ranks_that_share_cores_have_more_of_the_time_and_all_of_them_end_in_it(monkeypatch):
    monkeypatch.setattr(write, "cores", lambda: 2)
    clock = [1000.0]
    monkeypatch.setattr(write.time, "time", lambda: clock[0])
    end, endings = 1090.0, []
    for place in range(3):
        endings.append(write._next_end((1, 2, 4)[place:], end) + write._ENDING)
        clock[0] = endings[-1]
    assert endings == [1020.0, 1050.0, 1090.0]  # who shares needs more, and who sends at all
    clock[0] = 1070.0  # the first two took longer than they were to
    assert write._next_end((4,), end) == end - write._ENDING


def test_the_tables_with_the_largest_spread_are_named(tmp_path, capsys):
    spreads = {"products": 0.01, "updates": 0.2, "collectives": 0.4}
    measured = replace(part(1), spreads=spreads, left_out=3)
    assert report_rates([measured], CalibrationOptions(out=tmp_path / "out.yaml")) == 0
    text = capsys.readouterr().out
    assert (
        "ranks at the same time: 1 (spread 2.0%, largest collectives 40.0%, updates 20.0%)" in text
    )
    assert "the largest points of some tables were not measured" in text


def test_replacing_a_calibration_is_reported(tmp_path, capsys):
    out = tmp_path / "out.yaml"
    for word in ("wrote", "replaced the rates of 2"):
        assert report_rates([part(1)], CalibrationOptions(out=out)) == 0
        assert f"\n{word}" in capsys.readouterr().out
    out.write_bytes(b"mine")
    assert report_rates([part(1)], CalibrationOptions(out=out, force=True)) == 0
    assert f"replaced the content of {out}" in capsys.readouterr().out


@pytest.mark.parametrize("points", [PROCESSORS, GPUS])
def test_products_are_of_all_sides_and_the_largest_come_last(points):
    products = points.list_products()
    sizes = [count_flops(shape) for _, shape in products]
    assert sizes == sorted(sizes) and len(set(products)) == len(products)
    assert {dtype for dtype, _ in products} == set(CALIBRATED) == set(points.side_lengths)
    for dtype, sides in points.side_lengths.items():
        shapes = {shape for known, shape in products if known is dtype}
        small = sides[0]
        assert {(1, rows, small, small) for rows in sides} <= shapes
        assert max(map(count_flops, shapes)) <= 4 * points.flops[dtype]
        measured = [size for size, known in points.operator_sizes() if known is dtype]
        assert measured[:5] == list(points.sizes[:5])


@pytest.mark.parametrize("seconds", ["-5", "0", "nan", "inf"])
def test_a_time_in_which_nothing_can_end_is_one_message(seconds, capsys):
    assert main(["calibrate", "--seconds", seconds]) == 2
    assert f"--seconds: must be greater than 0; got {seconds}" in capsys.readouterr().err
