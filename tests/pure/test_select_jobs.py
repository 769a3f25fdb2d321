"""Which job `ptrain select` searches, under which constraints, on how many devices, and what it
refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ptrain.cli.main import main
from ptrain.errors import SpecError
from ptrain.rates.pace import UnknownRate
from ptrain.report.selection import as_record, selection_text
from ptrain.selection.choose import Chooser, answer, why_none
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import Demand, SearchGoal, demand_of, numbers
from ptrain.selection.search import Search
from ptrain.selection.where import QUANTITIES, Where, parse
from ptrain.spec.cluster import Hook
from ptrain.spec.spec import Spec
from tests.pure.hand_made_paces import HandPace
from tests.pure.searches import chooser, machine

# -- constraints


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("tp<=8", "mesh.tp", 8),
        ("micro>=2", "batch.micro", 2),
        ("recompute=full", "recompute", "full"),
        ("placement.dp_shard=[S*, O, O, R]", "placement.dp_shard", "S*,S@host,S@host,R"),
        ("placement.dp_shard=zero3", "placement.dp_shard", "S*,S,S,R"),
        ("schedule!=1f1b", "pipeline.schedule", "1f1b"),
        ("memory<=70 GB", "memory", 70e9),
        ("time<2.5", "time", 2.5),
    ],
)
def test_a_constraint_is_a_name_a_comparison_and_a_bound(text, name, bound):
    constraint = parse(text)
    assert (constraint.name, constraint.bound) == (name, bound)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("tp", "is not a constraint"),
        ("dp_shar<=8", "Did you mean `dp_shard`?"),
        ("recompute<=full", "has no order"),
        ("memory<=much", "is not a valid value"),
        ("schedule=1f1bb", "Did you mean `1f1b`? Use one of naive, gpipe, 1f1b"),
        ("unit=bloc", "Use one of bucket, block, 2 blocks, sub-block, model"),
        ("recompute=some", "Use one of none, selective, full, offload"),
        ("gradients=sometimes", "Use one of every, last"),
        ("placement.dp_shard=zero4", "zero4 is not a placement of dp_shard"),
        ("placement.dp_shard=[S*, S, S]", "The search tries \\[R,S,R,R\\], \\[R,S,S,R\\]"),
        ("placement.dp_shrd=zero3", "Did you mean `placement.dp_shard`?"),
        ("epp=2", "epp is not a property of a candidate"),
        ("attention=flash", "Use one of ring, zigzag, all-gather, ulysses, hybrid"),
        ("tp=two", "mesh.tp must be an integer, not two"),
        ("accumulate=1.5", "batch.accumulate must be an integer"),
        ("tp<=8,pp=1", "mesh.tp must be an integer, not 8,pp=1"),
    ],
)
def test_an_invalid_constraint_is_rejected_by_name(text, finding):
    with pytest.raises(SpecError, match=finding.replace("?", r"\?")):
        parse(text)


# -- jobs


def test_a_spec_keeps_the_degrees_that_it_writes():
    job = searched_job("tp-zero3", ["mesh.tp=auto"], devices=8)
    degrees = {rule.text for rule in job.where.constraints if rule.name.startswith("mesh")}
    own = {"mesh.pp=1", "mesh.dp_replicate=1", "mesh.dp_shard=2"}
    assert degrees == own | {"mesh.cp=1", "mesh.ep=1"}


def test_axes_missing_in_a_mesh_are_searched_with_auto():
    """There is nothing to be left out; of a constraint on the command line there is."""
    job = searched_job("tp-zero3", ["mesh.tp=auto"], devices=8, where=["micro=1"])
    changes = {rule.change for rule in job.where.constraints}
    assert changes >= {"with mesh.pp=auto", "with mesh.dp_shard=auto", "without micro=1"}


def test_an_open_micro_batch_leaves_the_mesh_as_it_is():
    job = searched_job("zero3", ["batch.micro=auto"], devices=2)
    assert {rule.text for rule in job.where.constraints} >= {"mesh.dp_shard=2", "mesh.tp=1"}


def test_a_model_alone_has_a_batch_of_about_four_million_tokens():
    base = searched_job("llama3-8b", ["batch.sequence=32768"], cluster="h100-64").base
    assert (base.batch.global_samples, base.precision.layout.name) == (128, "zero16")


@pytest.fixture
def broken_cluster(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "broken.yaml"
    file.write_text("devices: [8\n", encoding="utf-8")
    yield str(file)


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["llama3-8b"], "the cluster is missing"),
        (["llama3-8b", "--cluster", "h100-8", "--devices", "9"], "has 8"),
        (["llama3-8b", "--cluster", "h100-9"], "no cluster named"),
        (["llama9-8b", "--cluster", "h100-8"], "no spec named"),
        (["lama3-8b", "--cluster", "h100-8"], "Did you mean `llama3-8b`"),
        (["llama3-8b", "attention=flex", "--cluster", "h100-64"], "or a similar llama or gpt"),
        (["zero3"], "this spec leaves nothing to search"),
        (
            ["llama3-8b", "--cluster", "h100-128", "--devices", "67"],
            "1024 samples are not divisible by 67 data-parallel ranks",
        ),
        (
            ["llama3-8b", "--cluster", "h100-8", "--where", "tp=3"],
            "satisfies tp=3: mesh.tp can be 1, 2, 4, 8",
        ),
        (
            ["llama3-8b", "--cluster", "h100-8", "--where", "micro=7"],
            "satisfies micro=7: batch.micro can be 1, 2, 4",
        ),
        (
            ["llama3-8b", "--cluster", "h100-8", "--devices", "2", "--where", "prefetch=3"],
            "satisfies prefetch=3: prefetch can be 0, 1",
        ),
        (
            ["llama3-8b", "--cluster", "h100-8", "--where", "tp=3", "--where", "memory<=1 GB"],
            "mesh.tp can be 1, 2, 4, 8",
        ),
        (
            ["llama3-8b", "model.vocab=3", "--cluster", "h100-8", "--where", "micro=7"],
            "3 is smaller than the vocabulary of the byte tokenizer",
        ),
        (["tp-sp", "mesh.tp=auto", "--devices", "4"], "remedy: Use `mesh.pp=auto`. Or: "),
        ([], "takes one MODEL or SPEC; got 0"),
    ],
)
def test_an_impossible_search_gives_one_message(words, finding, capsys):
    assert main(["select", *words, "--json"]) == 2
    assert re.search(finding, json.loads(capsys.readouterr().out)["error"], re.DOTALL)


@pytest.fixture(scope="module")
def candidates_of_four() -> tuple[Search, list[Spec]]:
    """A search without constraints on four devices, and the specs of all its candidates."""
    job = searched_job("llama3-8b", ["batch.global=12"], cluster="h100-8", devices=4)
    search = Chooser(job, machine=machine).search
    scored = (block.scored(row) for block in search.blocks() for row in block.rows)
    return search, [one.candidate.spec(job.base) for one in scored]


@pytest.mark.parametrize(
    "text",
    [
        *("dp=5", "dp_shard=5", "tp=5", "pp=5", "micro=5", "accumulate=5", "stages=5"),
        *("recompute=offload", "placement.dp_shard=[R,R,R,R]"),
    ],
)
def test_values_that_are_offered_are_those_of_candidates(text, candidates_of_four):
    search, specs = candidates_of_four
    rule = parse(text)
    values = {QUANTITIES[rule.name].of(spec) for spec in specs} - {""}
    assert values and rule.bound not in values
    own = replace(search.job, where=Where((rule,)))
    finding, remedy = why_none(Search(own, search.work, search.pace))
    offered = finding.partition(f"{rule.name} can be ")[2]
    as_written = {f"[{value}]" if "placement" in rule.name else str(value) for value in values}
    assert {*re.split(r", ", offered)} == as_written and remedy == f"Remove `{text}`."
    assert not search.has(Where((rule,)))
    assert all(search.has(Where((parse(f"{rule.name}={value}"),))) for value in values)


def test_a_malformed_cluster_is_named(broken_cluster):
    with pytest.raises(SpecError, match="the preset is invalid"):
        searched_job("llama3-8b", cluster=broken_cluster)


def test_without_rates_the_time_is_reported_as_unknown(capsys):
    words = ["select", "llama-tiny", "batch.global=8", "batch.sequence=64", "--cluster", "laptop"]
    assert main([*words, "--devices", "2", "--where", "tp=1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["time_unknown"] and record["ranking"]
    assert all(row["step_seconds"] is None for row in record["ranking"])


def test_without_rates_the_least_memory_is_not_called_the_fastest(capsys):
    words = ["select", "llama-tiny", "batch.global=8", "batch.sequence=64", "--cluster", "laptop"]
    words += ["--devices", "2", "--where", "tp=1", "--objective", "memory", "--exact", "2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "least memory first" in text and "rows are ordered by memory" in text
    assert "nominal" not in text


SMALL = ("select", "llama-tiny", "batch.global=8", "batch.sequence=64")


def test_a_cluster_that_declares_no_operations_orders_by_bytes(tmp_path, capsys):
    file = tmp_path / "links.yaml"
    file.write_text(
        "kind: cpu\ndevices: 4\ndevices_per_node: 4\ndevice_memory: 6 GiB\n"
        "intra_node_bandwidth: 1 GB/s\ninter_node_bandwidth: 1 GB/s\n"
    )
    assert main([*SMALL, "--cluster", str(file), "--devices", "4", "--exact", "9"]) == 0
    text = capsys.readouterr().out
    assert "rows are ordered by nominal seconds: bytes alone" in text
    ranked = [line for line in text.splitlines() if line.lstrip().startswith("1 ")]
    assert ranked and " pp=4(" in ranked[0]  # which sends least


def test_an_unmeasured_optimizer_update_leaves_the_time_unknown(capsys):
    words = [*SMALL, "optimizer.name=muon", "--cluster", "a100-8", "--devices", "8", "--exact", "9"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "no rate for the muon update" in record["time_unknown"] and record["ranking"]


def test_a_model_with_dropout_is_searched_on_gpus(capsys):
    words = ["select", "gpt3-125m", "model.dropout=0.1", "batch.global=8", "batch.sequence=512"]
    words += ["--cluster", "h200-8", "--devices", "4", "--exact", "9", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["ranking"]


class SingleRankPace(HandPace):
    """The cost model of a single rank, without measured hooks."""

    def hook_seconds(self, hook: Hook) -> float:
        raise UnknownRate(str(hook))


def test_on_one_device_no_communication_rate_is_required():
    job = searched_job("llama-tiny", ["batch.global=8"], cluster="laptop", devices=1)
    alone = Chooser(job, machine=partial(machine, pace=SingleRankPace(overlaps=False)))
    assert alone.choose().best is not None


def test_constraints_of_where_apply_to_keys_that_set_them():
    where = Where.of(["tp<=2", "memory<=1 GB"])
    assert [rule.name for rule in where.bounds("memory")] == ["memory"]


# -- how many devices


def test_numbers_of_devices_are_powers_of_two_and_the_last():
    assert list(numbers(24)) == [1, 2, 4, 8, 16, 24]
    assert list(numbers(8)) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        ((None, "30d", None), "needs a number of tokens"),
        (("many", "30d", None), "is not a number"),
        (("1T", "soon", None), "is not a duration"),
    ],
)
def test_an_incomplete_request_is_rejected(words, finding):
    with pytest.raises(SpecError, match=finding):
        demand_of(*words)


def test_the_fewest_devices_meet_a_deadline_and_half_of_them_do_not():
    few = chooser("recompute==full", "pp==1", "tp==1", "micro==1", count=1)
    few.objective = SearchGoal.DEVICES
    on_four = few.on(4).first()
    assert on_four is not None and on_four.seconds is not None
    tokens = on_four.spec.batch.tokens
    ranking = answer(few, Demand(tokens=tokens, deadline=1.01 * on_four.seconds))
    assert ranking.job.devices == 4 and ranking.best is not None
    assert ranking.objective is SearchGoal.DEVICES
    assert [number for number, _ in ranking.by_number][-1] == 4
    assert ranking.by_number[-1][1] == ranking.best
    text = selection_text(ranking)
    assert "* marks the fewest devices that meet the demand" in text
    assert f"{ranking.best.seconds / 86400:.3g} days" in text
    record = as_record(ranking)
    assert (record["objective"], record["ranking"][0]["training_seconds"]) == (
        ("devices", pytest.approx(ranking.best.seconds))
    )
    with pytest.raises(SpecError, match="no number of devices up to 8 meets the target"):
        answer(few, Demand(tokens=tokens, deadline=1.0))


def test_a_budget_reports_the_cost():
    words = ["recompute==full", "pp==1", "tp==1", "micro==1", "cluster.price=2.0"]
    few = chooser(*words, count=1)
    few.objective = SearchGoal.DEVICES
    ranking = answer(few, Demand(tokens=10**9, budget=1e9))
    best = ranking.best
    assert best is not None and best.price is not None
    assert f"{best.price:,.0f}" in selection_text(ranking)
    assert as_record(ranking)["demand"] == {
        "tokens": 10**9,
        "deadline_seconds": None,
        "budget": 1e9,
    }


def test_a_price_is_of_devices_and_hours():
    job = chooser("recompute==full", "pp==1", "tp==1", "micro==1", "cluster.price=2.0", count=1)
    row = job.first()
    assert row is not None and row.seconds is not None and row.price is not None
    hours = 1e9 / row.spec.batch.tokens * row.seconds / 3600
    assert row.price == pytest.approx(2.0 * 8 * hours)


def test_if_no_candidate_can_run_compiled_their_commonest_fault_is_the_answer():
    search = chooser("compile=block", "unit==sub-block")
    with pytest.raises(SpecError, match=r"no candidate runs: .* units within a block") as raised:
        search.choose()
    (fault,) = raised.value.faults
    assert fault.place == "unit"
    assert "`unit=block`" in fault.remedy
