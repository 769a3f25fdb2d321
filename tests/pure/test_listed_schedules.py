"""A schedule listed by the user: read from a file next to the spec, checked before it runs,
recorded in full, and rejected with the place of an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.axes.pipeline.catalogue import make_schedule, schedule_of
from ptrain.axes.pipeline.schedule import Action, Pair
from ptrain.cli.main import main
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from tests.pure.pipelines import BY_NAME

OWN = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"
ROWS = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def spec_text(schedule: str, ranks: int = 2, microbatches: int = 2, more: str = "") -> str:
    return f"""\
model: {{layers: 4, hidden: 32, heads: 2, ffn: 64, vocab: 260}}
mesh: {{pp: {ranks}}}
placement: {{pp: [S, S, S, R]}}
pipeline: {{schedule: {schedule}{more}}}
batch: {{accumulate: {microbatches}, micro: 1, sequence: 16}}
"""


def listed_spec(folder: Path, rows: str, **said: object) -> Spec:
    """Return the spec with a schedule file of these rows."""
    (folder / "own.csv").write_text(rows)
    (folder / "spec.yaml").write_text(spec_text("own.csv", **said))  # type: ignore[arg-type]
    return require_runnable(load(folder / "spec.yaml"))


def refusal(folder: Path, rows: str, **said: object) -> str:
    with pytest.raises(SpecError) as caught:
        listed_spec(folder, rows, **said)
    (fault,) = caught.value.faults
    assert fault.place in ("pipeline.schedule", "pipeline.stages")
    assert fault.remedy
    return fault.finding


def text_of(name: ScheduleName, size) -> str:
    """As torch's `_dump_csv` writes it."""

    def cell(step: Action | Pair) -> str:
        parts = ";".join(map(str, step.parts))
        return f"({parts})OVERLAP_F_B" if isinstance(step, Pair) else parts

    return "".join(",".join(map(cell, order)) + "\n" for order in make_schedule(name, size).orders)


def test_a_list_is_the_schedule_and_has_its_stages_and_ranks(tmp_path):
    spec = listed_spec(tmp_path, OWN)
    made = schedule_of(spec)
    assert [",".join(map(str, order)) for order in made.orders] == ROWS
    assert (made.rank_of, made.microbatches) == ((0, 1), 2)
    assert not spec.pipeline.is_in_halves


@pytest.mark.parametrize("name", ScheduleName)
def test_every_schedule_of_ours_written_as_a_list_is_itself(tmp_path, name):
    size = next(s for s in BY_NAME[name] if s.ranks == 2 and s.microbatches > 3 and s.stages < 5)
    made = make_schedule(name, size)
    spec = listed_spec(tmp_path, text_of(name, size), ranks=2, microbatches=size.microbatches)
    assert schedule_of(spec) == made
    assert spec.pipeline.is_in_halves is any(
        part.kind in "IW" for order in made.orders for step in order for part in step.parts
    )


def test_a_list_costs_as_much_as_the_listed_schedule(tmp_path):
    own = derive(listed_spec(tmp_path, OWN)).exact
    (tmp_path / "named.yaml").write_text(spec_text("1f1b"))
    named = derive(require_runnable(load(tmp_path / "named.yaml"))).exact
    assert (own.memory, own.peak, own.traffic) == (named.memory, named.peak, named.traffic)


def test_a_record_has_the_rows_and_needs_no_file(tmp_path):
    spec = listed_spec(tmp_path, OWN)
    assert spec.resolved["pipeline"]["schedule"] == ROWS
    (tmp_path / "own.csv").unlink()
    assert load(spec.resolved).spec.pipeline == spec.pipeline


def test_a_file_on_the_command_line_is_relative_to_the_current_folder(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "here").mkdir()
    (tmp_path / "spec.yaml").write_text(spec_text("gpipe"))
    (tmp_path / "here" / "own.csv").write_text(OWN)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["plan", "../spec.yaml", "pipeline.schedule=own.csv"]) == 0
    assert "the listed order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            (
                "rank 0, action 2 of 4, 0B0: deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, "
                "rank 1 waits at 1F1 for 0F1 of rank 0"
            ),
        ),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0, at no position, 0B1: missing"),
        ("0F0,0F1,0B0,0B1,0F0\n1F0,1B0,1F1,1B1\n", "rank 0, action 5 of 5, 0F0: twice"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,0B0\n",
            "rank 1, action 5 of 5, 0B0: stage 0 belongs to rank 0",
        ),
        ("0F0,0F1,0B0,0I1\n1F0,1B0,1F1,1B1\n", "rank 0, at no position, 0W1: missing"),
        ("0F0,0F1,0B0,0B1\n", "the list has 1 row, but pp has 2 ranks"),
        (
            "0F0,0F1,0B0,0B1,3F0,3F1,3B0,3B1\n2F0,2B0,2F1,2B1\n",
            "stage 1 is in no row, but stage 3 is",
        ),
        (
            "0F0,0F1,0B0,0B1,2F0,2F1,2B0,2B1\n1F0,1B0,1F1,1B1\n",
            "all ranks need the same number of stages; got 2, 1",
        ),
        ("0F0,0B0\n1F0,1B0\n", "the list has micro-batches 0 to 0, but a step has 2"),
        (
            "0F0,0SEND_F0\n1RECV_F0,1F0\n",
            (
                "own.csv: row 1, cell 2: 0SEND_F0 is communication (SEND_F), which ptrain "
                "derives from the order of the passes"
            ),
        ),
        (
            "0UNSHARD,0F0\n1F0\n",
            (
                "own.csv: row 1, cell 1: 0UNSHARD (UNSHARD) moves parameters or gradients, which "
                "`sync` controls"
            ),
        ),
        ("0F0,0B0\n1F0,what\n", "own.csv: row 2, cell 2: 'what' is not a pass"),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B\n1F0\n",
            (
                "own.csv: row 1, cell 2: (0B0;0F1)OVERLAP_F_B does not pair a forward with a "
                "full backward"
            ),
        ),
        ("", "own.csv: a list of 1 to 1,000,000 passes; got 0 rows"),
        (",,\n1F0\n", "own.csv: row 1 is empty; every rank needs at least one pass"),
        (
            '0F0,"' + 140_000 * "0" + "\n1F0\n",
            "own.csv: it is not a CSV file: field larger than field limit (131072)",
        ),
    ],
    ids=lambda value: value[:40].strip(),
)
def test_an_invalid_step_is_rejected_with_its_place(tmp_path, rows, finding):
    assert refusal(tmp_path, rows) == finding


def test_a_list_of_other_stages_than_written_is_rejected(tmp_path):
    found = refusal(tmp_path, OWN, more=", stages: 4")
    assert found == "the list has 2 stages, but the pipeline has 4"


def test_a_file_that_is_not_there_is_rejected_by_its_name(tmp_path):
    (tmp_path / "spec.yaml").write_text(spec_text("none.csv"))
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "spec.yaml")
    (fault,) = caught.value.faults
    assert fault.finding == "cannot read none.csv: no such file or directory"


def test_a_deadlock_ends_a_command_with_2_and_its_place(tmp_path, capsys):
    (tmp_path / "own.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    (tmp_path / "spec.yaml").write_text(spec_text("own.csv"))
    assert main(["plan", str(tmp_path / "spec.yaml")]) == 2
    said = capsys.readouterr().err
    assert "rank 0, action 2 of 4, 0B0: deadlock:" in said
    assert f"{tmp_path}/spec.yaml:4" in said


def test_dualpipe_as_published_is_rejected_with_its_two_copies_and_their_bytes(tmp_path):
    (tmp_path / "spec.yaml").write_text(spec_text("dualpipe"))
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "spec.yaml")
    (fault,) = caught.value.faults
    assert "two copies of parameters" in fault.remedy
    two, one = (f"{copies * 671e9 * 2 / 16 / 1e9:.1f} GB" for copies in (2, 1))
    assert f"{two} of parameters per rank instead of {one}" in fault.remedy
