"""README says what is true: its specs load, its commands exist, its output is what is printed."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import ptrain
from ptrain.algebra.legality import check, executed, require
from ptrain.cli.main import VERBS
from ptrain.spec.axis import Axis
from ptrain.spec.load import load
from ptrain.spec.placement import MODES, Placement
from ptrain.spec.precision import ZERO16
from ptrain.version import TESTED_TORCH
from tests.pure.build import ODD_SHAPE, make_spec

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.splitlines()[0][:40])
def test_every_yaml_block_is_a_whole_spec_that_runs(block, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(block, encoding="utf-8")
    assert require(load(file)).world_size > 1


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[2][:40])
def test_python_blocks_name_what_exists(block):
    compile(block, "README.md", "exec")
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ptrain":
            assert node.attr in ptrain.__all__


def test_the_pure_python_block_runs(capsys, tmp_path):
    file = tmp_path / "block.py"
    (block,) = (block for block in blocks("python") if "bytes sent per rank and step" in block)
    file.write_text(block, encoding="utf-8")
    runpy.run_path(str(file))
    assert "bytes sent per rank and step" in capsys.readouterr().out


def test_commands_are_commands():
    found = set(re.findall(r"(?:`|\$ |/bin/|^)ptrain ([a-z]+)", TEXT, re.MULTILINE))
    assert {"train", "predict", "plan", "validate", "specs", "schema"} <= found
    assert found <= set(VERBS), found - set(VERBS)


def test_ci_runs_readmes_test_command():
    command = next(line for line in TEXT.splitlines() if line.endswith("-m pytest"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert command.startswith("python3 -m venv .venv && ")


def test_what_predict_prints_is_what_readme_shows():
    ended = subprocess.run(
        [sys.executable, "benchmarks/readme.py", "--check"],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


STATES = {"Θ": "parameters", "Ω": "optimizer", "G": "gradients", "A": "activations"}
AXES = (Axis.DP_SHARD, Axis.TP, Axis.PP)  # the columns of the first table
SETTINGS = (
    {},
    {"layout": ZERO16, "clip": None},
    {"optimizer": "sgd", "clip": None},
    {"accumulate": 4},
)


def cells_of_modes() -> dict[tuple[str, Axis], str]:
    """What the first table has for each mode and axis."""
    table = TEXT.split("| mode |")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]
    return {
        (mode.replace("\\", ""), axis): cell
        for mode, _, *cells in rows
        for axis, cell in zip(AXES, cells, strict=True)
    }


def runs(axis: Axis, placement: Placement, setting: dict[str, object]) -> bool:
    model = replace(ODD_SHAPE, hidden=40, heads=4, kv_heads=2, ffn=100)
    spec = make_spec({axis: (2, placement)}, model=model, **setting)
    batch = spec.batch
    samples = batch.micro * batch.accumulate * spec.data_degree
    spec = replace(spec, batch=replace(batch, global_samples=samples))
    return not check(spec) and not executed(spec)


@pytest.mark.parametrize("axis", AXES)
def test_the_first_table_has_what_runs_on_each_axis_and_nothing_else(axis):
    tuples = (
        Placement(**dict(zip(STATES.values(), modes, strict=True)))
        for modes in product(MODES, repeat=len(STATES))
    )
    legal = [each for each in tuples if any(runs(axis, each, setting) for setting in SETTINGS)]
    for mode in MODES:
        kept = {
            letter
            for letter, state in STATES.items()
            if any(getattr(placement, state) == mode for placement in legal)
        }
        cell = cells_of_modes()[str(mode), axis]
        assert set(re.findall(r"Θ|Ω|\bG\b|\bA\b", cell)) == kept, f"{mode} on {axis}: {cell}"
        assert kept or cell == "–"


def test_every_output_block_is_filled():
    for command, content in re.findall(
        r"<!-- output: (.+?) -->\n(.*?)<!-- end -->", TEXT, re.DOTALL
    ):
        assert content.startswith(f"```\n$ {command}\n"), command


def test_the_layout_names_what_exists_and_all_of_it():
    tree = TEXT.split("## Layout")[1].split("```")[1]
    named = set(re.findall(r"^(?:  )?([a-z]+/)", tree, re.MULTILINE))
    packages = {f"{path.parent.name}/" for path in (ROOT / "ptrain").glob("*/__init__.py")}
    folders = {"ptrain/", "specs/", "launch/", "benchmarks/", "tests/"}
    assert named == packages | folders
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_exactness_is_claimed_for_the_versions_that_are_tested():
    assert f"({', '.join(TESTED_TORCH)})" in TEXT


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
