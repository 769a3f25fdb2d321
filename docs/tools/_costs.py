"""Tables of the pages about predictions: the cost of each way to save memory, the traffic of one
spec calculated step by step, and the errors of predicted step times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from _machine import ROOT
from _script import table

from ptrain.algebra.legality import require
from ptrain.cost import Collective, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.parameters import facts
from ptrain.report.table import size
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.units import format_count, format_seconds

# Specs for 8 GPUs, and the name of each change.
STATES = {
    "8b-ddp": "nothing sharded (DDP)",
    "8b-zero1": "optimizer state sharded (ZeRO-1)",
    "8b-zero2": "and gradients (ZeRO-2)",
    "8b-zero3": "and parameters (ZeRO-3, FSDP)",
    "8b-zero3 placement.dp_shard=zero-offload": "parameters and optimizer state on the host",
}
LONG = "8b-zero3 batch.sequence=16384 batch.global=16"
ACTIVATIONS = {
    "": "all activations saved",
    "activations=M recompute=selective": "recompute all but products and attention",
    "activations=M": "recompute whole blocks",
    "activations=M loss=chunked": "and compute the loss in chunks",
    "activations=O": "copy activations to the host",
    "mesh.dp_shard=4 mesh.tp=2 placement.tp=tp-sp": "split blocks and tokens over 2 ranks (tp)",
}
WORKED = "8b-zero3"
RESULTS = ROOT / "benchmarks" / "results"
# Each kind of step time: its pages of results, and the sentence there that sums them up.
STEP_TIMES = {
    "CPU trainings with calibrated rates": (
        "step_seconds_*.md",
        r"(?P<rows>\d+) trainings: median of \|off\| (?P<median>[\d.]+%), "
        r"largest (?P<largest>[\d.]+%)",
    ),
    "published steps of eager code on H100 and A100": (
        "published_seconds_*.md",
        r"Eager rows: (?P<rows>\d+), median of \|seconds off\| (?P<median>[\d.]+%)",
    ),
}


def state_costs() -> str:
    """Return memory, time and traffic of an 8B model on one node, placed in several ways."""
    return _costs("SPEC", ((words, words.split(), about) for words, about in STATES.items()))


def activation_costs() -> str:
    """Return memory, time and traffic of long samples, with several ways to save activations."""
    rows = ((key, (*LONG.split(), *key.split()), about) for key, about in ACTIVATIONS.items())
    return _costs("added to the spec", rows)


def _costs(title: str, cases: Iterator[tuple[str, Sequence[str], str]]) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for written, (name, *overrides), about in cases:
            exact = derive(require(load(name, overrides))).exact
            peak = "unknown" if "peak" in exact.unclaimed else size(exact.peak_bytes())
            step = format_seconds(exact.step.seconds) if exact.step else "unknown"
            yield (about, f"`{written}`" if written else "–", peak, step, size(exact.sent_bytes()))

    return table(["change", title, "peak", "step", "sent per rank and step"], rows())


def worked_traffic() -> str:
    """Return the traffic of one spec, calculated by formulas and compared with its prediction."""
    spec = load(WORKED).spec
    rows = [*_traffic(spec)]
    return table(["figure", "formula", "value"], iter(rows))


def _traffic(spec: Spec) -> Iterator[Sequence[str]]:
    """Yield the rows of the calculation; assertions fail if the prediction differs."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    known, exact = facts(spec.model, spec.batch.sequence), derive(spec).exact
    ranks, times, units = spec.world_size, spec.batch.accumulate, len(known.units)
    itemsize = spec.precision.effective.parameters.itemsize
    payload = itemsize * known.numel
    once = (ranks - 1) * payload // ranks
    yield "parameters P", "–", format_count(known.numel)
    yield "payload of all units", f"{itemsize} P (bf16)", size(payload)
    yield "one all-gather of them", f"(N − 1)/N · {itemsize} P, N = {ranks}", size(once)
    yield "calls", f"{units} units · K, K = {times}", str(units * times)
    moves = (
        ("gathers in forward", Collective.ALL_GATHER, State.PARAMETERS, Phase.FORWARD),
        ("gathers in backward", Collective.ALL_GATHER, State.PARAMETERS, Phase.BACKWARD),
        ("reduce-scatters", Collective.REDUCE_SCATTER, State.GRADIENTS, Phase.BACKWARD),
    )
    for name, *what in moves:
        (row,) = (
            row
            for row in exact.traffic
            if [row.key.collective, row.key.state, row.key.phase] == what
        )
        assert (row.calls, row.sent_bytes) == (units * times, once * times), row
        yield name, f"K · (N − 1)/N · {itemsize} P", size(row.sent_bytes)
    norm = exact.sent_bytes() - len(moves) * once * times
    assert norm == -(-2 * (ranks - 1) * 4 // ranks), norm
    yield "gradient norm, one float", "⌈2 (N − 1)/N · 4⌉", size(norm)
    yield "sent per step", "sum", size(exact.sent_bytes())


def step_errors() -> str:
    """Return the errors of predicted step times, from the newest results of each benchmark."""

    def rows() -> Iterator[Sequence[str]]:
        for name, (pattern, sentence) in STEP_TIMES.items():
            page = max(RESULTS.glob(pattern))
            found = re.search(sentence, page.read_text(encoding="utf-8"))
            assert found, f"{page.name} has no summary"
            figures = found.groupdict()
            link = f"[{name}](../benchmarks/results/{page.name})"
            yield link, figures["rows"], figures["median"], figures.get("largest", "")

    return table(["step times", "rows", "median error", "largest"], rows())


TABLES = {
    "cost of sharding": state_costs,
    "cost of activations": activation_costs,
    "worked traffic": worked_traffic,
    "errors of step times": step_errors,
}
