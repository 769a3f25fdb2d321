"""The playground answers as the command line does, the reference is complete, and notebooks run."""

from __future__ import annotations

import ast
import json
import re
import shutil
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ptrain
from ptrain.cli.main import VERBS, main
from ptrain.spec.names import find_spec

ROOT = Path(__file__).parents[2]
PLAYGROUND, NOTEBOOKS = ROOT / "docs" / "playground", ROOT / "docs" / "notebooks"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """The module of the playground's answers, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    file = spec_from_file_location("answer", PLAYGROUND / "answer.py")
    module = module_from_spec(file)
    file.loader.exec_module(module)
    return module


@pytest.fixture
def ask(answers):
    """A question to the playground, as its worker asks it."""

    def ask(text, question="predict", width=600):
        return json.loads(answers.answer(question, text, 100, width, lambda done, count: None))

    return ask


def text_of(name):
    return find_spec(name).read_text(encoding="utf-8")


def printed(capsys, *words):
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["8b-zero3", "pp-1f1b"])
def test_the_playground_answers_with_the_figures_and_the_plan_of_the_commands(ask, name, capsys):
    answer = ask(text_of(name))
    assert answer["record"] == json.loads(printed(capsys, "predict", "spec.yaml", "--json"))
    assert printed(capsys, "predict", "spec.yaml").startswith(answer["predict"])
    assert printed(capsys, "plan", "spec.yaml").startswith(answer["plan"])


def texts_of(picture):
    return [element.text for element in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(("width", "drawn"), [(600, "600pt"), (100, "264pt"), (2000, "720pt")])
def test_the_playground_draws_memory_and_placement_as_wide_as_the_page(ask, width, drawn):
    pictures = ask(text_of("8b-zero3"), width=width)["pictures"]
    assert pictures["sheets"] == ""
    memory, placement = (ElementTree.fromstring(pictures[key]) for key in ("memory", "placement"))
    assert memory.get("width") == placement.get("width") == drawn
    assert {"usable memory 74.12 GiB", "28.1 GiB", "temporary", "peak"} <= {*texts_of(memory)}
    assert texts_of(placement).count("8/8") == 4  # three states, and the samples


def test_the_playground_draws_the_schedule_of_a_pipeline(ask):
    schedule = ElementTree.fromstring(ask(text_of("pp-1f1b"))["pictures"]["sheets"])
    assert texts_of(schedule)[:2] == [
        "pp-1f1b",
        "1f1b · ranks: 2 · stages: 2, 1 per rank · micro-batches: 8",
    ]


def test_the_pictures_of_the_playground_escape_names(answers, ask, monkeypatch):
    name, predict = "<img src=x onerror=alert(1)>", answers.predict_spec
    text = text_of("pp-1f1b")
    (fault,) = ask(text.replace("name: pp-1f1b", f'name: "{name}"'))["faults"]
    assert (fault["place"], fault["line"]) == ("name", 3)
    # A name that a spec cannot have.
    monkeypatch.setattr(
        answers, "predict_spec", lambda *words, **more: replace(predict(*words, **more), label=name)
    )
    memory = ask(text)["pictures"]["memory"]
    assert "<img" not in memory and name in texts_of(ElementTree.fromstring(memory))


def test_the_playground_imports_only_public_names():
    tree = ast.parse((PLAYGROUND / "answer.py").read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert any(node.module.startswith("ptrain.charts.") for node in imported)
    assert not [name.name for node in imported for name in node.names if name.name[0] == "_"]


@pytest.mark.nightly
def test_the_playground_ranks_placements_as_select_does(ask, capsys):
    text = "model: {preset: llama-tiny}\nmesh: {dp_shard: 2}\nplacement: zero3\n"
    text += "batch: {global: 8, micro: 1, sequence: 128}\ncluster: {preset: laptop}\n"
    ranking = ask(text, "select")["select"]
    words = ("mesh=auto", "placement=auto", "batch.micro=auto")
    assert printed(capsys, "select", "spec.yaml", *words).startswith(ranking)


def test_faults_are_answered_with_their_lines_and_fixes(ask):
    faults = ask(text_of("8b-zero3").replace("dp_shard: 8", "dp_shard: 3"))["faults"]
    assert [(fault["place"], fault["line"]) for fault in faults] == [("batch.global", 9)]
    assert "batch.global=66" in faults[0]["remedy"]
    assert ask("[")["faults"][0]["finding"]


def test_a_missing_cluster_has_a_fix_that_can_be_pasted(ask):
    text = text_of("8b-zero3").replace("cluster: {preset: h100-8}", "")
    (fault,) = ask(text, "select")["faults"]
    key, _, value = re.findall("`(.+)`", fault["remedy"])[0].partition(": ")
    assert fault["place"] == key == "cluster"
    assert ask(f"{text}{key}: {value}\n")["record"]["fit"]["fits"]


def test_the_examples_of_the_playground_need_no_torch(benchmark_module, ask):
    contents = benchmark_module("_playground")._contents()
    assert contents["first"] in contents["specs"] and "cp-ring" not in contents["specs"]
    assert len(contents["specs"]) > 40
    assert {"overlap": ["none", "backward"]}.items() <= {
        key: row["values"] for key, row in contents["keys"].items()
    }.items()


def test_the_reference_has_every_command_and_every_name_of_the_package(benchmark_module):
    reference = benchmark_module("_reference")
    headings = re.findall(r"^### ptrain ([a-z-]+)$", reference.commands(), re.MULTILINE)
    assert headings == list(VERBS)
    names = re.findall(r"^## ptrain\.(\w+)$", reference.python_api(), re.MULTILINE)
    assert {*names} == {*ptrain.__all__} - {"__version__"}
    assert "130 if interrupted" in reference.exit_codes()
    record = reference.record()
    assert all(f"`{key}`" in record for key in ("memory", "fit", "device_bytes", "sent_bytes"))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_playground_works_on_a_phone_in_a_browser_without_other_hosts(
    benchmark_module, tmp_path
):
    playground = benchmark_module("_playground")
    if not playground.find_browser():
        pytest.skip("Chromium is not installed")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        playground.write(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    seen = playground.use(tmp_path, tmp_path / "phone.png")
    assert (tmp_path / "phone.png").stat().st_size > 10_000
    assert len(seen["hosts"]) == 1 and not seen["errors"]
    assert seen["state"].startswith("Fits: 38.52 GiB of 74.12 GiB")
    assert {"usable memory 74.12 GiB", "parameters", "temporary"} <= {*seen["memory"]}
    assert seen["words"][0] == "overlap" and seen["completed"] == "overlap: backward"
    assert seen["fault"].startswith("line 8: batch.global") and seen["wrong"].startswith("batch:")
    assert seen["longest_frame_ms"] < 1000 * seen["select_seconds"] / 4  # typing does not wait
    assert seen["placement"].count("4/4") == 4 and seen["overflow"] == 0
    wide, narrow = seen["sheet_widths"]
    assert narrow <= 390 < 700 < wide
    assert seen["inks"] == ["rgb(0, 0, 0)", "rgb(242, 244, 246)"]
    assert seen["plan"].startswith("plan of 8b-zero3: 4 ranks") and "Best:" in seen["select"]
    assert seen["predict"].startswith("8b-zero3") and seen["is_same"]


NOTEBOOK_CLAIMS = {
    "predict": ("Fits: 38.52 GiB of 74.12 GiB", "micro 2    65.64 GiB", "Best: "),
    "train": ("verdict: holds (30 of 30)", "holds: True", "verdict: holds (27 of 27)"),
    "verify": (
        "verdict: holds (18 of 18",
        "verdict: fails",
        "root cause: batch · missing · samples",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOK_CLAIMS)
def test_a_notebook_runs_and_shows_its_claims(benchmark_module, name):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = benchmark_module("notebooks").execute(NOTEBOOKS / f"{name}.ipynb")
    text = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", ()))
    places = [text.find(claim) for claim in NOTEBOOK_CLAIMS[name]]
    assert -1 not in places and places == sorted(places), text


@pytest.mark.parametrize("name", NOTEBOOK_CLAIMS)
def test_the_saved_output_of_a_notebook_is_small_and_shows_its_claims(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 20_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    text = "".join("".join(output["text"]) for output in outputs)
    assert all(claim in text for claim in NOTEBOOK_CLAIMS[name])
