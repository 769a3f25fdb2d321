"""Benchmark pages: the verdict of each row, and the size of each failure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest

ROUNDS = 6  # the fewest of which an interval of the median is made


@pytest.fixture(scope="module")
def benchmark(benchmark_module: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    names = ("_machine", "_steps", "mutation", "peers")
    return {name: benchmark_module(name) for name in names}


def test_a_failed_claim_ends_with_failures_and_uncovered_cases(benchmark, capsys):
    conclude = benchmark["_machine"].conclude
    failed = ["zero1: median ratio 1.0610, at most 1.02"]
    assert conclude("x", ["# x"], failed=failed, not_covered="GPUs.", is_saved=False) == 1
    text = capsys.readouterr().out
    assert text.endswith("Verdict: fails.\n\n- " + failed[0] + "\n\nNot covered: GPUs.\n")
    assert conclude("x", ["# x"], failed=[], not_covered="GPUs.", is_saved=False) == 0
    assert "Verdict: holds.\n" in capsys.readouterr().out


def test_a_second_result_of_a_day_gets_a_separate_file(monkeypatch, tmp_path):
    machine = import_module("benchmarks._machine")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    first, second = machine.save("x", "one"), machine.save("x", "two")
    assert [path.read_text() for path in (first, second)] == ["one\n", "two\n"]
    assert second.stem.startswith(first.stem) and second.stem != first.stem


def test_a_command_can_be_copied_from_a_page(benchmark):
    text = benchmark["_machine"].header("x", ["python", "x.py", "--groups", "a group (of two)"])
    assert "| command | `python x.py --groups 'a group (of two)'` |" in text


def test_a_row_of_peers_names_slower_and_faster_libraries(benchmark):
    peers, turns = benchmark["peers"], benchmark["peers"].Turns
    case = peers.Case(strategy="ddp", model="10m", length="long")

    def verdicts(own: float, loss: float = 2.0) -> tuple[list[str], list[str]]:
        total = {
            "ptrain": turns([own] * ROUNDS, [own] * ROUNDS, [loss]),
            "by hand": turns([1.0] * ROUNDS, [1.0] * ROUNDS, [2.0]),
            "a library": turns([1.05] * ROUNDS, [1.0] * ROUNDS, [2.0]),
        }
        rows, failed = peers.report(case, total)
        return [row.split(" | ")[-1] for row in rows], failed

    assert verdicts(1.01) == (["holds |", " |", "holds |"], [])
    assert verdicts(1.06) == (
        ["fails |", " |", "fails |"],
        [
            "ddp, 10m, long steps: median ratio 1.0600, at most 1.02",
            "ddp, 10m, long steps: a library is faster, by 1.010 at least",
        ],
    )
    assert verdicts(1.0, 3.0)[1] == [
        "ddp, 10m, long steps: losses 5.0e-01 apart, not less than 0.0001"
    ]


def test_nothing_is_claimed_of_a_sharded_optimizer_at_the_smallest_size(benchmark):
    case = benchmark["peers"].Case
    assert case(strategy="zero1", model="1m", length="short").limit is None
    assert case(strategy="zero1", model="10m", length="short").limit == 1.05
    assert case(strategy="zero2", model="10m", length="long").limit == 1.02


def test_of_rings_and_experts_only_long_steps_are_judged(benchmark):
    case = benchmark["peers"].Case
    assert case(strategy="ep", model="10m", length="long").limit == 1.03
    assert case(strategy="cp-zigzag", model="10m", length="long").limit == 1.02
    assert case(strategy="cp-ring", model="10m", length="short").limit is None


def test_a_loss_that_is_no_number_is_not_the_same_loss(benchmark):
    assert benchmark["_steps"].different("x", float("nan"))


def test_the_mutation_page_counts_survivors_including_equivalent_ones(benchmark):
    page = benchmark["mutation"]

    class Mutant:
        file, function, line, before, after = "ptrain/spec/x.py", "f", 1, "a", "b"

        def __init__(self, name):
            self.name = name

    def found(every, words):
        sampled = [Mutant(f"{every} {number}") for number in range(20)]
        verdicts = {m.name: {"verdict": word} for m, word in zip(sampled, words, strict=False)}
        return page.Found(every=every, sampled=sampled, verdicts=verdicts)

    inside = found(900, ["killed"] * 16 + ["timeout", "survived", "broken"])  # one is not reached
    outside = found(100, ["killed"] * 18 + ["survived"] * 2)
    row = list(page.table({"spec": [inside, outside]}))[2]
    counts = "900 | 20 | 17 | 100 | 20 | 18 | 1 | 1"
    assert row == f"| spec | {counts} | 85.5% | 66.5% – 94.6% | holds |"
    inside.verdicts["900 0"] = {"verdict": "survived"}
    assert list(page.table({"spec": [inside, outside]}))[2].endswith("| fails |")
    assert "81.0%" in page.overall({"spec": [inside, outside]})


def test_the_interval_of_a_share_is_wilsons(benchmark):
    """Published: 0 of 10 is up to 27.75 %, 81 of 263 is 25.5 to 36.6 % (Newcombe 1998)."""
    wilson = benchmark["mutation"].wilson
    assert [round(bound, 4) for bound in wilson(0, 10)] == [0.0, 0.2775]
    assert [round(bound, 4) for bound in wilson(81 / 263, 263)] == [0.2553, 0.3662]
