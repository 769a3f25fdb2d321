"""Generate tables of the pages of axes: calls and options of the data axes, and combinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from _script import table
from _tables import on_ranks

from ptrain.algebra.legality import check, find_unsupported, require_runnable
from ptrain.cost import Collective, Estimate, Phase, State, busiest
from ptrain.derivation.estimate import derive
from ptrain.report.table import memory_text, traffic_text
from ptrain.spec.load import load

DATA_STRATEGIES = (
    *("ddp", "ddp-zero-redundancy", "zero1", "zero2", "zero3-keep", "zero3", "hsdp"),
    *("optimizer-in-backward", "zero-offload-ds", "fsdp-offload"),
)
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
LETTERS = {State.PARAMETERS: "Θ", State.OPTIMIZER: "Ω", State.GRADIENTS: "G"}
NORM_BYTES = 8  # at most: the gradient norm, one number
IN_A_PHASE = (  # the order in which a unit is brought, used and reduced
    *(Collective.FILE_READ, Collective.HOST_TO_DEVICE, Collective.ALL_GATHER),
    *(Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.BROADCAST),
    *(Collective.DEVICE_TO_HOST, Collective.FILE_WRITE),
)


def data_calls() -> str:
    """Return the table of the collectives and copies of each data strategy, by phase of a step."""

    def rows() -> Iterator[Sequence[str]]:
        for name in DATA_STRATEGIES:
            spec = on_ranks(name)
            exact, has_axes = derive(spec).exact, len(spec.factors) > 1
            calls = (_calls_in(exact, phase, has_axes=has_axes) for phase in PHASES)
            yield f"`{name}`", *calls

    return table(["spec", *PHASES], rows())


def _calls_in(exact: Estimate, phase: Phase, *, has_axes: bool) -> str:
    """Return the calls of one phase in words, except those of the gradient norm."""
    found: dict[str, None] = {}
    for row in sorted(busiest(exact.traffic), key=lambda row: IN_A_PHASE.index(row.key.collective)):
        key = row.key
        if key.phase is phase and key.state in LETTERS and row.payload_bytes > NORM_BYTES:
            axes = f" over `{'+'.join(key.axes)}`" if has_axes and key.axes else ""
            words = str(key.collective).replace("_", "-" if key.axes else " ")
            found[f"{words} {LETTERS[key.state]}{axes}"] = None
    return ", ".join(found)


# One change each; sharded parameters with 8 micro-batches a step, then replicated ones.
SHARDED, REPLICATED = "8b-zero3", "8b-zero2"
CHANGES = {
    SHARDED: (
        "",
        "sync.gradients=last",
        "reshard=2",
        "reshard=false",
        "sync={gradients: last, reshard_after_forward: false, reshard_after_backward: false}",
        "unit=sub-block",
        "overlap=none",
    ),
    REPLICATED: ("", "sync.gradients=last", "overlap=none"),
}


def data_options() -> str:
    """Return the table of options of the data axes: calls, traffic, peak and seconds of a step."""

    def rows() -> Iterator[Sequence[str]]:
        for name, changes in CHANGES.items():
            for change in changes:
                exact = derive(require_runnable(load(name, [change] if change else []))).exact
                assert exact.step is not None, "the cluster has rates"
                calls = sum(row.calls for row in busiest(exact.traffic))
                numbers = (
                    f"{calls}",
                    traffic_text(exact.sent_bytes()),
                    memory_text(exact.peak_bytes()),
                )
                yield f"`{f'{name} {change}'.strip()}`", *numbers, f"{exact.step.seconds:.2f} s"

    return table(["spec and option", "calls", "sent per step", "peak", "step"], rows())


# A base that every column can cut: heads, layers and experts in plenty.
_SHAPE = {"preset": "llama-tiny", "vocab": 260, "layers": 8, "heads": 8, "kv_heads": 8}
_EXPERTS = {"preset": "moe-tiny", "vocab": 260, "layers": 8, "heads": 8, "kv_heads": 8}
_BASE: dict[str, Any] = {
    "name": "composed",
    "mesh": {},
    "placement": {},
    "batch": {"global": 16, "micro": 1, "sequence": 128},
}
COLUMNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "`ddp`": ("dp_replicate", "R,R,R,R", {}),
    "`zero3`": ("dp_shard", "S*,S,S,R", {}),
    "`cp`, zigzag": ("cp", "S*,S,S,S", {}),
    "`ep`": ("ep", "S*,S,S,R", {"model": _EXPERTS}),
    "`tp`": ("tp", "S,S,S,R", {}),
    "`pp`, 1f1b": ("pp", "S,S,S,R", {}),
    "`pp`, zero-bubble": ("pp", "S,S,S,R", {"pipeline": {"schedule": "zero-bubble"}}),
}
_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
# An option: its name, the axis it needs besides the column's with the tuple on it, and its keys.
Option = tuple[str, str | None, str, dict[str, Any]]
OPTIONS: tuple[Option, ...] = (
    ("`cp`", "cp", "S*,S,S,S", {}),
    ("`ep`", "ep", "S*,S,S,R", {"model": _EXPERTS}),
    ("`tp`", "tp", "S,S,S,R", {}),
    ("`pp`", "pp", "S,S,S,R", {}),
    ("ZeRO-1 (`R,S,R,R`)", "dp_shard", "R,S,R,R", {"sync": {"gradients": "last"}}),
    ("ZeRO-2 (`R,S,S,R`)", "dp_shard", "R,S,S,R", {}),
    ("offload (`S*@host,O,O,R`)", "dp_shard", "S*@host,O,O,R", {}),
    ("`reshard: 2` of 4 shards", "dp_shard", "S*,S,S,R", {"reshard": 2, "mesh": {"dp_shard": 4}}),
    ("`tp` with `A = S`", "tp", "S,S,S,S", {}),
    ("`tp` with `A = S*`", "tp", "S,S,S,S*", {}),
    ("`tensor.plan: naive`", "tp", "S,S,S,R", {"tensor": {"plan": "naive"}}),
    ("`activations: M`", None, "", {"activations": "M"}),
    ("`activations: O`", None, "", {"activations": "O"}),
    ("`attention: eager`", None, "", {"attention": "eager"}),
    ("attention dropout", None, "", {"model": {"attention_dropout": 0.1}}),
    ("`loss: chunked`", None, "", {"loss": "chunked"}),
    ("`loss: fused`", None, "", {"loss": "fused"}),
    ("your `loss` function", None, "", {"loss": {"target": "mine:loss"}}),
    ("optimizer `muon`", "dp_shard", "S*,S*,S*,R", {"optimizer": {"name": "muon"}}),
)


def compositions() -> str:
    """Return options by axes, whether a spec with both is legal and executed; then the options that
    always are."""

    verdicts = {option[0]: [_verdict(option, *c) for c in COLUMNS.values()] for option in OPTIONS}
    always = [name for name, cells in verdicts.items() if {*cells} <= {"yes", ""}]
    rows = ((name, *cells) for name, cells in verdicts.items() if name not in always)
    works = ", ".join(always)
    return f"{table(['with', *COLUMNS], rows)}\nThese work with every axis: {works}.\n"


def _verdict(option: Option, axis: str, placement: str, keys: dict[str, Any]) -> str:
    """Return yes, no (illegal) or not yet (legal, not executed); empty for one axis twice."""
    _, other, other_placement, other_keys = option
    if axis == other:
        return ""
    placements = {axis: placement} | ({other: other_placement} if other else {})
    if other_keys.get("optimizer") and axis not in ("tp", "pp", "dp_replicate"):
        placements[axis] = placement.replace("S,S", "S*,S*", 1)
    given = other_keys.get("mesh", {})
    spec = _merged(_BASE, {"model": _SHAPE}, keys, other_keys)
    spec["mesh"] = {name: given.get(name, 2) for name in _ORDER if name in placements}
    spec["placement"] = {name: placements[name] for name in spec["mesh"]}
    loaded = load(spec).spec
    if check(loaded):
        return "no"
    return "not yet" if find_unsupported(loaded) else "yes"


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return sections merged key by key, the later over the earlier."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = whole.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            whole[key] = {**old, **value} if both else value
    return whole


TABLES = {
    "data calls": data_calls,
    "data options": data_options,
    "compositions": compositions,
}
