"""The page of the GPU kit says what is proven, from measurements that are written here."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SLICE, CASE, RUN = "steps-124m", "124M, 32 × 1024, zero3", "compiled, padded"
MFU = f"{CASE}: MFU of `{RUN}` at least 41%"
SPEED = f"{CASE}: `{RUN}` at least 0.98 of the hand-written loop's speed"
OPERATIONS = 989e9  # of a step: one second at 0.1 % of an H100's peak


@pytest.fixture(scope="module")
def kit(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("gpu_slices")


def case_entry(
    mine: float, theirs: float, losses: tuple[float, float] = (5.0, 5.0)
) -> dict[str, Any]:
    """A case's entry: the same seconds in each turn."""
    sides = zip(("eager", RUN, "by hand"), (mine, mine, theirs), (5.0, *losses), strict=True)
    runs = {
        name: {"seconds": [taken] * 8, "processor": [taken] * 8, "losses": [loss]}
        for name, taken, loss in sides
    }
    return {"operations": OPERATIONS, "runs": runs}


def page(
    kit: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    real: dict[str, Any] | None = None,
    *,
    name: str = SLICE,
    device: str = "NVIDIA H200",
    is_dry: bool = False,
) -> tuple[int, str]:
    if real is not None:
        content = {"device": device, "torch": "2.11.0", "real": real}
        (folder / f"{name}.json").write_text(json.dumps(content))
    options = Namespace(out=folder, dry=is_dry, slices=[name], save=False)
    return kit.page(options), capsys.readouterr().out


def verdict(text: str, claim: str) -> list[str]:
    """Return the cells of a claim's row behind it."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {claim} |")]
    assert len(rows) == 1
    return [cell.strip() for cell in rows[0].split("|")[2:-1]]


def test_a_claim_holds_by_measurements_of_a_gpu(kit, tmp_path, capsys):
    _, text = page(kit, tmp_path, capsys, {CASE: case_entry(0.002, 0.00198)})
    assert verdict(text, MFU) == ["50.0%", "holds"]
    assert verdict(text, SPEED) == ["0.990", "holds"]
    assert "| 50.0% | 50.0% – 50.0% | 0.990 | 0.990 – 0.990 | 2.00 | 5.00000 |" in text


def test_a_claim_fails_by_measurements_of_a_gpu(kit, tmp_path, capsys):
    code, text = page(kit, tmp_path, capsys, {CASE: case_entry(0.0025, 0.0024, (5.0, 5.1))})
    assert code == 1 and "Verdict: fails." in text
    assert verdict(text, MFU) == ["40.0%", "fails"]
    assert verdict(text, SPEED) == ["0.960", "fails"]
    assert f"- {CASE}: the first losses are 5.0 and 5.1" in text


def test_a_claim_without_a_measurement_is_unproven(kit, tmp_path, capsys):
    code, text = page(kit, tmp_path, capsys)
    assert code == 1 and "Verdict: unproven." in text
    assert f"- unproven: {SLICE} has not run" in text
    assert verdict(text, MFU) == verdict(text, SPEED) == ["–", "unproven"]


def test_a_case_that_was_left_out_is_unproven_with_its_reason(kit, tmp_path, capsys):
    _, text = page(kit, tmp_path, capsys, {CASE: {"left out": "CUDA out of memory"}})
    assert f"- unproven: {CASE}: CUDA out of memory" in text
    assert verdict(text, MFU) == ["–", "unproven"]


def test_an_mfu_on_a_device_of_unknown_peak_is_unproven(kit, tmp_path, capsys):
    entry = {CASE: case_entry(0.002, 0.002)}
    _, text = page(kit, tmp_path, capsys, entry, device="NVIDIA L4")
    assert verdict(text, MFU) == ["the peak of the device is unknown", "unproven"]
    assert verdict(text, SPEED) == ["1.000", "holds"]


def test_a_dry_run_proves_nothing_whatever_it_measured(kit, tmp_path, capsys):
    code, text = page(
        kit, tmp_path, capsys, {CASE: case_entry(0.001, 0.002)}, device="cpu", is_dry=True
    )
    assert code == 1 and "nothing is proven" in text
    assert verdict(text, MFU) == verdict(text, SPEED) == ["–", "unproven"]


def test_a_page_of_measurements_rejects_those_of_a_dry_run(kit, tmp_path, capsys):
    code, text = page(kit, tmp_path, capsys, {CASE: case_entry(0.001, 0.002)}, device="cpu")
    assert code == 1 and f"- {SLICE} ran dry: its measurements are not a GPU's" in text
    assert verdict(text, SPEED) == ["–", "unproven"]


def test_bytes_of_a_spec_that_is_not_predicted_are_unproven(kit, tmp_path, capsys):
    lives = {"forward": 100, "update": 80}
    found = {"lives": lives, "allocated": {"forward": 120, "update": 90}, "reserved": 1000}
    real = {"eager": found | {"requested": 110}, "compiled": {"unknown": "not supported yet"}}
    fake = {"eager": found | {"reserved": 1009}, "compiled": {"unknown": "not supported yet"}}
    content = {"device": "NVIDIA H200", "torch": "2.11.0", "real": real, "fake": fake}
    (tmp_path / "bytes.json").write_text(json.dumps(content))
    _, text = page(kit, tmp_path, capsys, name="bytes")
    assert verdict(text, kit.BYTE_CLAIMS[0]) == ["0 peaks off", "holds"]
    assert verdict(text, kit.BYTE_CLAIMS[1]) == ["0.9% at most", "holds"]
    assert "| eager |  |  |  |  | +10 | 1,000 | +0.9% |" in text
    assert "- unproven: compiled: not supported yet" in text
    fake["eager"]["reserved"], fake["eager"]["lives"] = 1011, {"forward": 101, "update": 80}
    (tmp_path / "bytes.json").write_text(json.dumps(content))
    _, text = page(kit, tmp_path, capsys, name="bytes")
    assert verdict(text, kit.BYTE_CLAIMS[0]) == ["1 peaks off", "fails"]
    assert verdict(text, kit.BYTE_CLAIMS[1]) == ["1.1% at most", "fails"]


def test_a_part_that_the_machine_lacks_is_named(kit, tmp_path, capsys):
    parts = {"Python": "3.12.3", "torch": "2.11.0", "C compiler": "ok", "Triton": "missing"}
    code, text = page(kit, tmp_path, capsys, parts, name="parts")
    assert code == 1 and "Verdict: fails.\n\n- Triton: missing\n" in text


def test_the_second_part_of_the_kit_has_a_case_for_every_claim(kit):
    second = kit.chosen(["second"])
    assert {name for name, _ in kit.claims_made()} - {"steps-replicas"} < set(second)
    assert set(second) <= set(kit.names())
