"""The README and the pages are true: their specs load, their commands exist, their blocks match the
printed output, and their links resolve."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import ptrain
from ptrain.algebra.legality import check, find_unsupported, require_runnable
from ptrain.axes.pipeline.catalogue import takes_any_stages
from ptrain.cli.help import PAGES, heading_anchor, page_sections
from ptrain.cli.main import VERBS, main
from ptrain.spec.load import expand_sweeps, load
from ptrain.spec.names import SPEC_FOLDERS, list_files, specs_folder
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import GIVEN, MODES, Axis, Placement, matches_pattern
from ptrain.spec.precision import ZERO16
from ptrain.spec.text import read
from ptrain.version import TESTED_TORCH
from tests.pure.build import ODD_SHAPE, make_spec

ROOT = Path(__file__).parents[2]
NO_TOPICS = ("CONTRIBUTING.md", "launch/README.md", "benchmarks/README.md")  # of `ptrain help`
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", *PAGES)}
SPECS_PAGE = TEXTS["docs/writing-a-spec.md"]
TENSOR_PAGE, PIPELINE_PAGE = TEXTS["docs/axes/tensor.md"], TEXTS["docs/axes/pipeline.md"]
FLAGS = read(specs_folder() / "flags.yaml").root
assert isinstance(FLAGS, dict)
WRITTEN = [tuple(row["spec"]) for row in FLAGS["placements"]]


def blocks(language: str) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [block for text in TEXTS.values() for block in fence.findall(text)]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.splitlines()[0][:40])
def test_every_yaml_block_is_a_whole_spec_that_runs(block, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(block, encoding="utf-8")
    assert require_runnable(load(file)).world_size > 1


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[2][:40])
def test_python_blocks_use_existing_names(block):
    compile(block, "a page", "exec")
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
    pattern = re.compile(r"(?:`|\$ |/bin/|^)ptrain ([a-z]+(?:-[a-z]+)?)", re.MULTILINE)
    commands = {verb for text in TEXTS.values() for verb in pattern.findall(text)}
    assert commands == set(VERBS)


COMMAND = re.compile(
    r"(?:`|\$ |/bin/|^)ptrain (?:train|predict|plan|verify|simulate) ([^`#]+?)(?:`|$)", re.M
)


@pytest.mark.parametrize("page", TEXTS)
def test_a_command_with_a_named_spec_takes_its_overrides(page):
    known = list_files(*SPEC_FOLDERS)
    for words in (match[1].split() for match in COMMAND.finditer(TEXTS[page])):
        overrides = [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]
        if any(word.startswith("model.pretrained=") for word in overrides):
            continue  # of a folder that the command before it writes
        if (
            words[0] in known and len(list(expand_sweeps(overrides))) > 1
        ):  # of which one point is enough
            assert main(["predict", words[0], *overrides, "--csv"]) == 0, words
        elif words[0] in known:
            assert require_runnable(load(words[0], overrides)), words


def test_the_blocks_equal_the_output_of_their_commands():
    ended = subprocess.run(
        [sys.executable, "docs/tools/pages.py", "--check"],
        cwd=ROOT,
        # The PATH leads to a C++ compiler, which predictions of compiled blocks need.
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}: run docs/tools/pages.py PAGE"


def test_every_output_block_is_filled():
    block = re.compile(r"<!-- output: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
    for text in TEXTS.values():
        for command, content in block.findall(text):
            assert content.startswith(f"```\n$ {command}\n"), command


@pytest.mark.parametrize("page", [*TEXTS, *NO_TOPICS])
def test_links_lead_somewhere(page):
    markdown = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", markdown):
        path, _, fragment = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if fragment:
            code = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
            text = code.sub("", file.read_text(encoding="utf-8"))
            titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert fragment in map(heading_anchor, titles), target


def test_a_drawing_of_tp_has_a_shard_of_every_matrix_for_each_rank(benchmark_module):
    drawings = benchmark_module("_drawings")
    matrices = [name for weights in drawings.spec_weights().values() for name, *_ in weights]
    assert matrices == ["query", "key", "value", "output", "gate", "up", "down"]
    assert len(drawings.tensor_sheet().rectangles) == 2 * len(matrices)


@pytest.mark.parametrize("page", TEXTS)
def test_every_page_of_a_folder_is_a_topic_of_help(page):
    folder = (ROOT / page).parent
    pages = {path.relative_to(ROOT).as_posix() for path in folder.glob("*.md")}
    assert folder == ROOT or pages <= set(PAGES), "a page is missing in ptrain/cli/help.py"


STATES = {"Θ": "parameters", "Ω": "optimizer", "G": "gradients", "A": "activations"}
AXES = (Axis.DP_SHARD, Axis.TP, Axis.PP)  # the columns of the table of modes
SETTINGS = (
    {},
    {"layout": ZERO16, "clip": None},
    {"optimizer": "sgd", "clip": None},
    {"accumulate": 4},
)


def cells_of_modes() -> dict[tuple[str, Axis], str]:
    """Return the cells of the mode table by mode and axis."""
    table = SPECS_PAGE.split("| mode |")[1].split("\n\n")[0]
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
    return not check(spec) and not find_unsupported(spec)


@pytest.mark.parametrize("axis", AXES)
def test_the_table_of_modes_lists_exactly_the_modes_of_each_axis(axis):
    tuples = (
        Placement(**dict(zip(STATES.values(), modes, strict=True)))
        for modes in product(MODES, repeat=len(STATES))
    )
    legal = [
        placement
        for placement in tuples
        if any(runs(axis, placement, setting) for setting in SETTINGS)
    ]
    for mode in MODES:
        kept = {
            letter
            for letter, state in STATES.items()
            if any(getattr(placement, state) == mode for placement in legal)
        }
        cell = cells_of_modes()[str(mode), axis]
        assert set(re.findall(r"Θ|Ω|\bG\b|\bA\b", cell)) == kept, f"{mode} on {axis}: {cell}"
        assert kept or cell == "–"


def test_every_package_and_folder_is_listed():
    text = TEXTS["docs/internals.md"]
    named = set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "ptrain").glob("*/__init__.py")}
    inner = set(re.findall(r"^\| `axes/(\w+)/` \|", text, re.MULTILINE))
    assert inner == {path.parent.name for path in (ROOT / "ptrain" / "axes").glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert all(f"`{folder}/`" in text.rpartition("`tests/`")[2] for folder in folders)


def test_exactness_is_claimed_for_the_versions_that_are_tested():
    assert f"({', '.join(TESTED_TORCH)})" in TEXTS["docs/predictions.md"]


@pytest.mark.parametrize("written", WRITTEN, ids=" ".join)
def test_settings_of_other_tools_map_to_legal_specs(written):
    name, *overrides = written
    assert require_runnable(load(name, overrides))


def test_every_strategy_is_in_the_table_of_flags():
    assert {name for name, *_ in WRITTEN} == set(list_files("strategies"))
    assert len(set(WRITTEN)) == len(WRITTEN)


@pytest.mark.parametrize("tool", FLAGS["tools"])
def test_every_tool_has_a_section_with_its_settings_and_a_spec(tool):
    (section,) = (
        section
        for section in page_sections("docs/coming-from.md")
        if section.title.startswith(tool)
    )
    assert section.text.startswith("```") and "```yaml\n" in section.text
    assert f"<!-- table: coming from {tool} -->" in section.text


def test_no_tool_is_misspelled():
    for row in (*FLAGS["placements"], *FLAGS["dials"]):
        assert set(row) <= {"spec", "dial", *FLAGS["tools"]}


def test_the_page_describes_every_role_as_an_editor_does():
    for role, about in GIVEN.items():
        assert f"| `{role}` | {about} |\n" in TENSOR_PAGE


def test_the_page_gives_the_stages_of_every_schedule():
    for name in ScheduleName:
        stages = PipelineSpec(schedule=name).stages_over(4) // 4
        words = f"any, {stages}" if takes_any_stages(name) else str(stages)
        (row,) = (line for line in PIPELINE_PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.split(" | ")[2] == words
        assert f"| `pp-{name}` | {stages} | " in PIPELINE_PAGE
        (key,) = (line for line in PIPELINE_PAGE.splitlines() if line.startswith("| `schedule` |"))
        assert f"`{name}`" in key


def test_a_star_in_a_plan_matches_only_a_block_number():
    assert matches_pattern("layers.*", "layers.12")
    assert not matches_pattern("layers.*", "layers.12.mlp") and not matches_pattern(
        "layers.*", "layers.x"
    )


def test_the_example_of_gathered_logits_is_legal():
    command = "ptrain predict tp model.vocab=260 tensor.loss_parallel=false"
    assert f"`{command}`" in TENSOR_PAGE
    assert not require_runnable(load("tp", command.split()[3:])).tensor.loss_parallel
