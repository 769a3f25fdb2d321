"""Tables of the pages about predictions: the cost of each way to save memory, the traffic of one
spec calculated step by step, and the errors of predicted step times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from _machine import ROOT
from _script import table

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Collective, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.parameters import facts
from ptrain.plan.lower import built_in_facts
from ptrain.report.table import memory_text, traffic_text
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
    "published steps of PyTorch's runtime on GPUs": (
        "published_seconds_*.md",
        r"Eager and compiled rows of torch, score: (?P<rows>\d+), "
        r"median of \|seconds off\| (?P<median>[\d.]+%)",
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
            exact = derive(require_runnable(load(name, overrides))).exact
            peak = "unknown" if "peak" in exact.unclaimed else memory_text(exact.peak_bytes())
            step = format_seconds(exact.step.seconds) if exact.step else "unknown"
            sent = traffic_text(exact.sent_bytes())
            yield about, f"`{written}`" if written else "–", peak, step, sent

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
    itemsize = spec.precision.effective_layout.parameters.itemsize
    payload = itemsize * known.numel
    once = (ranks - 1) * payload // ranks
    yield "parameters P", "–", format_count(known.numel)
    yield "payload of all units", f"{itemsize} P (bf16)", traffic_text(payload)
    yield "one all-gather of them", f"(N − 1)/N · {itemsize} P, N = {ranks}", traffic_text(once)
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
        yield name, f"K · (N − 1)/N · {itemsize} P", traffic_text(row.sent_bytes)
    norm = exact.sent_bytes() - len(moves) * once * times
    assert norm == -(-2 * (ranks - 1) * 4 // ranks), norm
    yield "gradient norm, one float", "⌈2 (N − 1)/N · 4⌉", traffic_text(norm)
    yield "sent per step", "sum", traffic_text(exact.sent_bytes())


def worked_memory() -> str:
    """Return the memory of one spec, calculated by formulas and compared with its prediction."""
    return table(["figure", "formula", "value"], _memory(load(WORKED).spec))


def _memory(spec: Spec) -> Iterator[Sequence[str]]:
    """Yield the rows of the calculation; assertions fail if the prediction differs."""
    model, tokens = spec.model, spec.batch.micro * spec.batch.sequence
    assert isinstance(model, ModelShape) and model.ffn is not None, "a built-in Llama"
    known, exact, ranks = facts(model, spec.batch.sequence), derive(spec).exact, spec.world_size
    tensors = sum(len(unit.tensors) for unit in known.units)
    shard = 2 * known.numel // ranks
    optimizer = 2 * shard + 4 * tensors
    for name, formula, value, state in (
        ("parameters, stored", "2 P / N", shard, State.PARAMETERS),
        ("gradients", "2 P / N", shard, State.GRADIENTS),
        (
            f"optimizer: two moments, and a step counter for each of {tensors} tensors",
            f"4 P / N + 4 · {tensors}",
            optimizer,
            State.OPTIMIZER,
        ),
    ):
        assert exact.bytes_of(state) == value, (name, exact.bytes_of(state), value)
        yield name, formula, memory_text(value)
    norm = 8 * tokens * model.hidden + 4 * tokens
    attention = 8 * tokens * model.hidden + 4 * tokens * model.heads
    mlp = 8 * tokens * model.ffn
    block = 2 * norm + attention + mlp
    logits = 4 * tokens * model.vocab
    yield "saved by a norm", "8 s d + 4 s", memory_text(norm)
    yield "saved by attention", f"8 s d + 4 s · {model.heads} heads", memory_text(attention)
    yield "saved by an MLP of width f", "8 s f", memory_text(mlp)
    yield "saved by a block", "two norms, attention, MLP", memory_text(block)
    sums = 4 * tokens
    row = "exponentials of the logits and their sums, saved by the loss (fp32)"
    yield row, "4 s · vocabulary + 4 s", memory_text(logits + sums)
    activations = exact.bytes_of(State.ACTIVATIONS)
    saved = model.layers * block + norm + logits + sums
    rest = activations - saved
    assert 0 <= rest < 1000, rest
    formula = f"{model.layers} blocks, the last norm, the loss, and {rest} B of small tensors"
    yield "activations", formula, memory_text(activations)
    peaks = {row.phase: row.device_bytes for row in exact.peak}
    # Both peaks are beside the head: in forward ahead of the loss, in backward behind it, where its
    # 0-d result (4 bytes) is not there yet, and has a gradient.
    others = (
        sum(exact.bytes_of(state) for state in State) - logits - sums + 2 * tokens * model.vocab
    )
    *_, last, root = (2 * sum(t.numel for t in unit.tensors) for unit in built_in_facts(spec).units)
    forward, backward = others + root + last - 4, others + 2 * root + 4
    assert (peaks[Phase.FORWARD], peaks[Phase.BACKWARD]) == (forward, backward), peaks
    row = (
        "the rows above but the loss's, other, logits (bf16): 2 s · vocabulary, the gathered root "
    )
    row += "unit, and the buffer of the last block's all-gather"
    yield "peak forward", row, memory_text(forward)
    row = "the rows above but the loss's, other, the logits' gradient: 2 s · vocabulary, the "
    row += "gathered root unit, and the buffer of its all-gather"
    yield "peak backward", row, memory_text(backward)


def step_errors() -> str:
    """Return the errors of predicted step times, from the newest results of each benchmark."""

    def rows() -> Iterator[Sequence[str]]:
        for name, (pattern, sentence) in STEP_TIMES.items():
            page = max(RESULTS.glob(pattern))
            found = re.search(sentence, page.read_text(encoding="utf-8"))
            assert found, f"{page.name} has no summary"
            figures = found.groupdict()
            link = f"[{name}](../benchmarks/results/{page.name})"
            largest = figures.get("largest") or _largest(page, int(figures["rows"]))
            yield link, figures["rows"], figures["median"], largest

    return table(["step times", "rows", "median error", "largest"], rows())


def _largest(page: Path, count: int) -> str:
    """Return the largest error of the rows of eager code on a page, with its sign."""
    families = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
    scored = "".join(text for text in families if "; score)\n" in text)
    errors = re.findall(
        r"^\|.*\| (?:eager|compiled) \|.*\| ([+-][\d.]+)% \|$", scored, re.MULTILINE
    )
    assert len(errors) == count, (len(errors), count)
    return f"{max(errors, key=lambda error: abs(float(error)))}%"


TABLES = {
    "cost of sharding": state_costs,
    "cost of activations": activation_costs,
    "worked traffic": worked_traffic,
    "worked memory": worked_memory,
    "errors of step times": step_errors,
}
