"""The playground answers as the command line does, the reference is complete, and notebooks run."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ptrain
from ptrain.cli.main import VERBS, main
from ptrain.spec.names import find_spec

ROOT = Path(__file__).parents[2]
PLAYGROUND, NOTEBOOKS = ROOT / "docs" / "playground", ROOT / "docs" / "notebooks"


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """A question to the playground: the functions that its worker calls, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    file = spec_from_file_location("answer", PLAYGROUND / "answer.py")
    module = module_from_spec(file)
    file.loader.exec_module(module)

    def ask(text, question="predict"):
        return json.loads(module.answer(question, text, 100, lambda done, count: None))

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
    assert len(answer["sheets"]) == (name == "pp-1f1b")
    memory, fit = answer["memory"], answer["record"]["fit"]
    assert memory["peak"] == fit["peak_bytes"]
    assert sum(part["bytes"] for part in memory["parts"]) >= memory["peak"]


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


@pytest.mark.parametrize(
    ("name", "ranks", "part"), [("8b-ddp", 8, 1.0), ("8b-tp-zero3", 8, 1 / 8), ("8b-hsdp", 8, 0.25)]
)
def test_the_parts_that_ranks_keep_cover_each_state(ask, name, ranks, part):
    parameters = ask(text_of(name))["placement"]["states"][0]
    assert [size for _, size in parameters["parts"]] == [part] * ranks
    starts = sorted({start for start, _ in parameters["parts"]})
    assert starts == [part * place for place in range(round(1 / part))]


def test_the_reference_has_every_command_and_every_name_of_the_package(benchmark_module):
    reference = benchmark_module("_reference")
    headings = re.findall(r"^### ptrain (\w+)$", reference.commands(), re.MULTILINE)
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
    assert seen["parts"] == 5 and "74.12 GiB" in seen["capacity"]
    assert seen["words"][0] == "overlap" and seen["completed"] == "overlap: backward"
    assert seen["fault"].startswith("line 8: batch.global") and seen["wrong"].startswith("batch:")
    assert seen["longest_frame_ms"] < 1000 * seen["select_seconds"] / 4  # typing does not wait
    assert seen["frames"] == 12 and seen["width"] == 390
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
