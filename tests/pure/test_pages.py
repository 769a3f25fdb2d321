"""The tables of specs/README.md are those that its command makes, of specs that are legal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.algebra.legality import require
from ptrain.axes.pipeline.known import takes_any_stages
from ptrain.spec.load import load
from ptrain.spec.names import listing, root
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.role import GIVEN, fits
from ptrain.spec.text import read

ROOT = Path(__file__).parents[2]
FLAGS = read(root() / "flags.yaml").root
assert isinstance(FLAGS, dict)
WRITTEN = [tuple(row["spec"]) for row in FLAGS["placements"]]


def test_the_tables_are_what_their_command_makes():
    ended = subprocess.run(
        [sys.executable, "benchmarks/specs_readme.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}: run it without --check"


@pytest.mark.parametrize("written", WRITTEN, ids=" ".join)
def test_what_other_tools_are_said_to_mean_is_a_legal_spec(written):
    name, *overrides = written
    assert require(load(name, overrides))


def test_every_strategy_is_in_the_table_of_flags():
    assert {name for name, *_ in WRITTEN} == set(listing("strategies"))
    assert len(set(WRITTEN)) == len(WRITTEN)


def test_every_role_that_a_plan_may_give_is_said_to_mean_what_an_editor_shows():
    text = (ROOT / "specs" / "README.md").read_text(encoding="utf-8")
    for role, about in GIVEN.items():
        assert f"| `{role}` | {about} |\n" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{role}` (" in readme for role in GIVEN)


def test_every_schedule_is_said_to_have_the_stages_that_it_has():
    text = (ROOT / "specs" / "README.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ScheduleName:
        stages = PipelineSpec(schedule=name).stages_over(4) // 4
        told = f"any, {stages}" if takes_any_stages(name) else str(stages)
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.split(" | ")[2] == told
        assert f"| `pp-{name}` | {stages} | " in readme
        assert f"`{name}`" in next(line for line in readme.splitlines() if "| `schedule` |" in line)


def test_a_star_in_a_plan_is_a_blocks_number_and_nothing_else():
    assert fits("layers.*", "layers.12")
    assert not fits("layers.*", "layers.12.mlp") and not fits("layers.*", "layers.x")


def test_what_readme_gathers_is_a_vocabulary_that_tp_divides():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = "ptrain predict tp model.vocab=260 tensor.loss_parallel=false"
    assert f"`{command}`" in readme
    assert not require(load("tp", command.split()[3:])).tensor.loss_parallel


def test_no_tool_is_misspelled():
    for row in (*FLAGS["placements"], *FLAGS["dials"]):
        assert set(row) <= {"spec", "dial", *FLAGS["tools"]}
