"""What a benchmark's page says of its figures: each row's verdict, and what failed by how much."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest

from ptrain.costs import (
    Collective,
    Column,
    Estimate,
    Peak,
    Phase,
    State,
    Traffic,
    TrafficKey,
)

ROUNDS = 6  # the fewest of which an interval of the median is made


@pytest.fixture(scope="module")
def benchmark(benchmark_module: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    names = (
        "_machine", "_one_device", "activations", "consistency_cost", "logits", "meter_overhead",
        "mutation", "overlap", "peers", "pipeline_schedules", "step_time", "tensor_plans",
        "unit_tradeoff", "verify",
    )  # fmt: skip
    return {name: benchmark_module(name) for name in names}


def test_a_claim_that_fails_ends_with_what_failed_and_with_what_is_not_covered(benchmark, capsys):
    conclude = benchmark["_machine"].conclude
    failed = ["zero1: median ratio 1.0610, at most 1.02"]
    assert conclude("x", ["# x"], failed=failed, not_covered="GPUs.", is_saved=False) == 1
    text = capsys.readouterr().out
    assert text.endswith("Verdict: fails.\n\n- " + failed[0] + "\n\nNot covered: GPUs.\n")
    assert conclude("x", ["# x"], failed=[], not_covered="GPUs.", is_saved=False) == 0
    assert "Verdict: holds.\n" in capsys.readouterr().out


def test_a_second_result_of_a_day_stands_beside_the_first(monkeypatch, tmp_path):
    machine = import_module("benchmarks._machine")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    first, second = machine.save("x", "one"), machine.save("x", "two")
    assert [path.read_text() for path in (first, second)] == ["one\n", "two\n"]
    assert second.stem.startswith(first.stem) and second.stem != first.stem


def test_a_command_can_be_copied_from_a_page(benchmark):
    text = benchmark["_machine"].header("x", ["python", "x.py", "--groups", "a group (of two)"])
    assert "| command | `python x.py --groups 'a group (of two)'` |" in text


def test_a_row_of_the_peers_says_who_is_too_slow_and_who_is_faster(benchmark):
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


def test_a_loss_that_is_no_number_is_not_the_same_loss(benchmark):
    assert benchmark["step_time"].different("x", float("nan"))


def test_only_the_counter_with_a_look_every_ten_steps_is_judged(benchmark):
    side = benchmark["meter_overhead"].Side
    sides = {
        "bare": side([1.0] * ROUNDS, [2.0], [(3, 100)]),
        "counter": side([1.1] * ROUNDS, [2.0], [(3, 100)]),
        "full meters": side([1.7] * ROUNDS, [2.0], [(3, 100)]),
    }
    rows, failed = benchmark["meter_overhead"].rows("ddp", sides, 10)
    assert not failed
    verdicts = [row.split(" | ")[-1] for row in rows]
    assert verdicts == [" |", "no claim |", "holds |", "no claim |"]
    assert "| counter, a look every 10 steps |  | 1.0100 |" in rows[2]
    assert {row.count("|") for row in rows} == {10}


def test_a_meter_that_changes_what_is_sent_fails(benchmark):
    side = benchmark["meter_overhead"].Side
    sides = {
        "bare": side([1.0] * ROUNDS, [2.0], [(3, 100)]),
        "wire": side([1.0] * ROUNDS, [2.0], [(4, 104)]),
    }
    _, failed = benchmark["meter_overhead"].rows("ddp", sides, 10)
    assert failed == ["ddp, wire: [(4, 104)] was sent, [(3, 100)] without"]


def checked(benchmark, cpu: float, wall: float, calls: int):
    side = benchmark["consistency_cost"].Side
    bare = side([1.0] * ROUNDS, [2.0] * ROUNDS, [3.0], (10, 100))
    return {"without": bare, "with": side([cpu] * ROUNDS, [wall] * ROUNDS, [3.0], (calls, 140))}


def test_the_cost_of_checks_is_judged_by_both_clocks(benchmark):
    rows = benchmark["consistency_cost"].rows
    lines, failed = rows("ddp", checked(benchmark, 1.02, 2.06, 12))
    assert [line.split(" | ")[-1] for line in lines] == ["holds |", "holds |"]
    assert not failed
    lines, failed = rows("ddp", checked(benchmark, 1.02, 2.08, 12))
    assert [line.split(" | ")[-1] for line in lines] == ["holds |", "fails |"]
    assert failed == ["ddp, wall: bound 1.0400, at most 1.03"]


@pytest.mark.parametrize("calls", [10, 13])
def test_a_check_that_does_not_happen_or_sends_more_than_an_exchange_fails(benchmark, calls):
    _, failed = benchmark["consistency_cost"].rows("ddp", checked(benchmark, 1.0, 2.0, calls))
    assert failed == [f"ddp: {calls} collectives with the check, 10 without, and an exchange has 2"]


def test_of_several_ranks_cpu_time_is_summed_and_the_slowest_clock_counts(benchmark):
    module = benchmark["consistency_cost"]
    one, other = module.Side([1.0], [2.0], [3.0], (1, 2)), module.Side([2.0], [5.0], [3.0], (1, 2))
    assert module.joined([one, other]) == module.Side([3.0], [5.0], [3.0], (1, 2))


def test_what_waits_longer_than_the_one_before_is_named(benchmark):
    side = benchmark["overlap"].Side
    sides = {
        name: [side(step=[1.0] * ROUNDS, blocked=[seconds] * ROUNDS)]
        for name, seconds in (("naive", 0.1), ("bucketed", 0.2), ("overlapped", 0.1))
    }
    _, failed = benchmark["overlap"].claim(sides)
    assert len(failed) == 1 and failed[0].startswith("bucketed / naive: 2.000")


def test_the_commands_of_the_unit_page_are_the_specs_that_ran(benchmark):
    page = benchmark["unit_tradeoff"]
    text = "\n".join(page._commands())
    for placement in page.PLACEMENTS:
        *overrides, unit = page.overrides_of(placement, "2 blocks")
        assert f'ptrain validate {page.SPEC} {" ".join(overrides)} unit="UNIT"' in text
        assert unit == "unit=2 blocks"


def tensor_plan(page, name, **changes):
    """A plan whose metered steps are as claimed, but for `changes`."""
    account = page.Account(
        of_block=page.CLAIMED[name], sent_of_block=8.0 * page.VOLUMES[name], calls=5, sent=9, peak=7
    )
    fields = {"seconds": [1.0] * ROUNDS, "losses": [2.0]} | changes
    return page.Plan(predicted=account, measured=fields.pop("measured", account), **fields)


def test_a_plan_of_tensor_parallelism_is_judged_by_what_was_metered(benchmark):
    page = benchmark["tensor_plans"]
    plans = {name: tensor_plan(page, name) for name in page.PLANS}
    assert page.failures(plans) == []
    assert [row.split(" | ")[-1] for row in page.counted(plans)[2:]] == ["holds |"] * 4
    assert [row.split(" | ")[-1] for row in page.timed(plans)[2:]] == ["no claim |"] * 4
    seven = page.Account(
        of_block=page.CLAIMED["naive"], sent_of_block=14.0, calls=5, sent=9, peak=7
    )
    plans["pairs"] = tensor_plan(page, "pairs", measured=seven, wrong=["pairs: peak: 1, not 2"])
    plans["slices"] = tensor_plan(page, "slices", losses=[2.1])
    failed = page.failures(plans)
    assert "pairs: peak: 1, not 2" in failed
    assert "pairs: a block takes 2 + 5 all_reduce, not 2 + 2 all_reduce" in failed
    assert "naive: 1.0000 × the bytes of pairs, not 1.75" in failed
    assert "slices: losses 5.0e-02 apart, not less than 0.0001" in failed
    assert [row.split(" | ")[-1] for row in page.counted(plans)[2:]] == ["fails |"] * 4


def test_what_a_block_takes_is_what_one_block_more_adds(benchmark):
    page = benchmark["tensor_plans"]

    def rows(*calls):
        keys = [("all_reduce", "forward"), ("all_reduce", "backward"), ("all_gather", "forward")]
        return tuple(
            Traffic(
                key=TrafficKey(
                    axes=("tp",),
                    collective=Collective(kind),
                    state=State.ACTIVATIONS,
                    phase=Phase(phase),
                ),
                calls=number,
                payload_bytes=0,
                sent_bytes=10 * number,
            )
            for (kind, phase), number in zip(keys, calls, strict=True)
        )

    peak = (Peak(phase=Phase.FORWARD, rank=0, device_bytes=3),)
    one, two = (
        Estimate(column=Column.MEASURED, world_size=2, traffic=rows(*calls), peak=peak)
        for calls in ((12, 9, 1), (16, 19, 1))
    )
    found = page.account(one, two, micro_batches=2)
    assert found.of_block == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 5}
    assert (found.sent_of_block, found.calls, found.sent, found.peak) == (70, 22, 220, 3)
    assert page.in_words(found.of_block) == "2 + 5 all_reduce"


def test_a_schedule_is_judged_by_what_was_metered_and_by_being_faster_than_one_at_a_time(benchmark):
    page = benchmark["pipeline_schedules"]
    account = page.Account(activations=(3, 2), peak=(9, 8), sent=4)

    def found(seconds, losses=(2.0,), wrong=()):
        return page.Found(
            predicted=account, measured=account, wrong=[*wrong], seconds=[seconds] * ROUNDS,
            losses=[*losses],
        )  # fmt: skip

    all_of_them = {name: found(2.0 if name is page.BASE else 1.5) for name in page.ScheduleName}
    assert page.failures(all_of_them) == []
    assert [row.split(" | ")[-1] for row in page.held(all_of_them)[2:]] == ["holds |"] * 8
    told = [row.split(" | ")[-1] for row in page.timed(all_of_them)[2:]]
    assert told == ["the measure |"] + ["holds |"] * 7
    first, second, third = list(page.ScheduleName)[1:4]
    all_of_them[first] = found(2.1)
    all_of_them[second] = found(1.5, losses=[2.1])
    all_of_them[third] = found(1.5, wrong=["peak: 1, not 2"])
    assert page.failures(all_of_them) == [
        f"{first}: 1.050 × the time of naive, up to 1.050",
        f"{second}: losses 5.0e-02 apart, not less than 0.0001",
        "peak: 1, not 2",
    ]


def test_the_bubble_beside_a_schedules_time_is_that_of_its_spec(benchmark):
    """8 micro-batches on 2 ranks: GPipe waits (p - 1)/m, with two stages a rank half of it."""
    page = benchmark["pipeline_schedules"]
    assert page.bubble(page.ScheduleName.GPIPE) == (1 / 8, (8, 8))
    assert page.bubble(page.ScheduleName.INTERLEAVED)[0] == 1 / 16


def test_the_modes_on_the_activations_page_are_judged_by_bytes_operations_and_equal_losses(
    benchmark,
):
    page, accounts = benchmark["activations"], benchmark["_one_device"]
    own = accounts.Figures(activations=9, off=2, peak=20, forward=6, backward=12)

    def row(mode, losses=(2.0,), wrong=(), measured=own):
        found = accounts.Account(
            predicted=own, again=4, measured=measured, wrong=[*wrong], seconds=[1.0],
            losses=[*losses],
        )  # fmt: skip
        return page.Row("sdpa", 256, mode, found)

    first, second, third, *others = page.MODES
    assert first == page.BASE
    rows = [row(mode) for mode in page.MODES]
    assert page.failures(rows) == []
    assert [line.split(" | ")[-1] for line in page.held(rows)[2:]] == ["holds |"] * len(rows)
    rows = [
        row(first), row(second, losses=[2.5]), row(third, wrong=["peak: 1, not 2"]),
        *(row(mode, losses=[float("nan")]) for mode in others[:1]),
        *(row(mode, losses=(), measured=None) for mode in others[1:]),
    ]  # fmt: skip
    assert page.failures(rows) == [
        "peak: 1, not 2",
        f"sdpa, 256 tokens, {second}: losses 5.0e-01 from those of R",
        f"sdpa, 256 tokens, {others[0]}: losses nan from those of R",
    ]
    told = [line.split(" | ")[-1] for line in page.held(rows)[2:]]
    assert told == ["holds |", "holds |", "fails |", "holds |"] + ["not run |"] * len(others[1:])


def test_the_command_of_the_activations_page_is_the_spec_that_ran(benchmark):
    page, text = benchmark["activations"], benchmark["activations"]._command()
    for mode, own in page.MODES.items():
        overrides = page.overrides_of("sdpa", "TOKENS", mode)
        assert all(f"{each}" in text for each in (*overrides[: -1 - len(own)], *own))
    assert text.startswith(f"ptrain validate {page.SPEC} {' '.join(page.OVERRIDES)} ")


def test_a_loss_in_chunks_that_takes_as_much_as_the_whole_fails(benchmark):
    page, accounts = benchmark["logits"], benchmark["_one_device"]

    def account(peak, loss=2.0):
        own = accounts.Figures(activations=9, off=0, peak=peak, forward=6, backward=12)
        return accounts.Account(predicted=own, again=0, measured=own, losses=[loss])

    found = {(mesh, loss): account(9 if loss == page.BASE else 5)
             for mesh in page.MESHES for loss in page.OF_RANKS}  # fmt: skip
    assert page.failures(found) == []
    found[page.ONE, "1/8"], found[page.CUT, "1/8"] = account(9), account(5, loss=2.1)
    assert page.failures(found) == [
        "tp, 2 ranks, 1/8: losses 5.0e-02 apart, not less than 0.0001",
        "one device: 1/8 takes 9 bytes, whole 9",
    ]


def test_the_mutation_page_counts_what_lives_and_takes_nothing_off_for_being_equivalent(benchmark):
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
    counts = "900 | 20 | 17 | 100 | 20 | 18 | 1 | 1 | 0"
    assert row == f"| spec | {counts} | 85.5% | 66.5% – 94.6% | 85.5% | holds |"
    inside.verdicts["900 0"] = {"verdict": "survived"}
    assert list(page.table({"spec": [inside, outside]}))[2].endswith("| 81.0% | fails |")
    assert "81.0%" in page.overall({"spec": [inside, outside]})


def test_the_interval_of_a_share_is_wilsons(benchmark):
    """Published: 0 of 10 is up to 27.75 %, 81 of 263 is 25.5 to 36.6 % (Newcombe 1998)."""
    wilson = benchmark["mutation"].wilson
    assert [round(bound, 4) for bound in wilson(0, 10)] == [0.0, 0.2775]
    assert [round(bound, 4) for bound in wilson(81 / 263, 263)] == [0.2553, 0.3662]


def test_a_verified_spec_tells_for_how_many_steps_the_fixed_figures_held(benchmark):
    page = benchmark["verify"]
    steps = {
        "losses": [5.0, 4.0, 3.0],
        "differences": [1e-6, 1e-5, 2e-4],
        "allowed": [1e-4, 1e-4, 1e-3],
        "references": [1e-6, 2e-4, 1e-5],
    }
    check = {"name": f"{page.OWN}: loss of every step", "measured": 2e-4, "tolerance": 1e-3}
    found = {
        "name": "a-spec",
        "ranks": 2,
        "steps": 3,
        "checks": [{**check, "holds": True}],
        "trajectories": {page.OWN: steps},
        "notes": ["rounding has grown"],
        "cpu": 61.2,
        "wall": 40.0,
        "references": 0,
        "commit": "abc1234",
        "verdict": "holds",
    }
    cells = dict(zip(page.COLUMNS, page.row(found).strip("| ").split(" | "), strict=True))
    assert cells["loss, own dtypes"] == "2.0e-04 ≤ 1.0e-03"
    assert cells["1e-4 kept (by references)"] == "2 (1)"
    assert cells["1e-12 kept (by references)"] == "–"
    alone = found | {"trajectories": {page.OWN: steps | {"references": []}}}
    of_alone = dict(zip(page.COLUMNS, page.row(alone).strip("| ").split(" | "), strict=True))
    assert of_alone["1e-4 kept (by references)"] == "2"
    text = "\n".join(page.page([found], ["another"], 3, ["optimizer.lr=3e-4"]))
    assert "verify SPEC optimizer.lr=3e-4 --steps 3" in text
    assert "Not run: another." in text
    assert "rounding has grown (a-spec)" in text


def test_what_other_overrides_or_steps_gave_is_verified_anew(benchmark, tmp_path):
    known = benchmark["verify"].known
    kept = {"name": "zero3", "steps": 100, "set": ["train.seed=1"]}
    (tmp_path / "zero3.json").write_text(json.dumps(kept))
    assert known("zero3", 100, tmp_path, ["train.seed=1"]) == kept
    assert known("zero3", 100, tmp_path, []) is None
    assert known("zero3", 3, tmp_path, ["train.seed=1"]) is None
    assert known("zero1", 100, tmp_path, ["train.seed=1"]) is None
