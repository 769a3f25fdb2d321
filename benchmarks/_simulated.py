"""What `simulate` holds and sends beside what is derived, strategy by strategy, on the torch of the
interpreter that runs this. Prints JSON: by strategy the figures that differ, or why there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.selection.recompute import settled
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.names import listing
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of

SMALL = (
    "model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=4", "model.ffn=48",
    "model.vocab=264", "batch={global: 4, micro: 1, sequence: 16}",
)  # fmt: skip
# Beside the strategies: what FSDP2 does otherwise in 2.15, where gradients wait in a wider dtype.
MORE = {
    "fsdp-mixed, reduced at last": ("fsdp-mixed", "sync.gradients=last", "batch.global=8"),
    "fsdp-mixed, reduced each time": ("fsdp-mixed", "sync.gradients=every", "batch.global=8"),
    "zero-bubble x zero3": ("pp-zero3", "pipeline.schedule=zero-bubble", "batch.global=8"),
    "zero-bubble x zero3, reduced each time": (
        "pp-zero3", "pipeline.schedule=zero-bubble", "batch.global=8", "sync.gradients=every",
    ),
    "pp x fsdp-mixed": ("pp-zero3", "precision.layout=fsdp-mixed", "batch.global=8"),
    "zero-bubble x fsdp-mixed": (
        "pp-zero3", "precision.layout=fsdp-mixed", "pipeline.schedule=zero-bubble",
        "batch.global=8",
    ),
    "tp-sp x fsdp-mixed, reduced at last": (
        "tp-zero3", "placement.tp=tp-sp", "precision.layout=fsdp-mixed", "batch.global=8",
        "sync.gradients=last",
    ),
}  # fmt: skip


def specs() -> Iterator[tuple[str, Callable[[], Spec]]]:
    """Yield the name of every strategy, and what loads it at a small size."""
    for name in listing("strategies"):
        yield name, lambda name=name: _load(name)
    for name, (strategy, *changes) in MORE.items():
        yield name, lambda strategy=strategy, changes=changes: _load(strategy, *changes)


def _load(strategy: str, *changes: str) -> Spec:
    """With as many samples as the strategy takes: there may be no accumulation within tp."""
    for batch in ((), ("batch.global=2",), ("batch.global=1",)):
        with suppress(PtrainError):
            return settled(load(strategy, (*SMALL, *changes, *batch)))
    return settled(load(strategy, (*SMALL, *changes)))


def differing(spec: Spec) -> list[str]:
    """Return the rows of the last rank that the two have otherwise."""
    found = simulate(spec, spec.world_size - 1)
    exact, simulated = derive(spec, facts_of(spec)).exact.of_rank(found.rank), found.estimate
    pairs: tuple[tuple[Iterable[Any], Iterable[Any]], ...] = (
        (_held(simulated.memory), _held(exact.memory)),
        (simulated.traffic, exact.traffic),
        (simulated.peak, exact.peak),
        ((simulated.operations,), (exact.operations,)),
    )
    return [str(row) for ours, theirs in pairs for row in set(ours) ^ set(theirs)]


def _held(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row.device_bytes]


def main() -> None:
    """Print what every strategy gives."""
    answers: dict[str, list[str] | str] = {}
    for name, spec in specs():
        try:
            answers[name] = differing(spec())
        except PtrainError as error:
            answers[name] = str(error).splitlines()[0]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
