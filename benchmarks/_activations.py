"""The table about activations: each mode by what it keeps and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _tables import table

from ptrain.costs import Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.table import size
from ptrain.selection.recompute import settled
from ptrain.spec.load import load

BASE = ("zero3", "batch.sequence=2048", "batch.micro=1")
MODES = (
    (),
    ("activations=M", "recompute={every: 2}"),
    ("activations=M", "recompute=attention"),
    ("activations=M", "recompute=selective"),
    ("activations=M",),
    ("activations=M@host",),
    ("activations=O",),
)
ATTENTIONS = ("sdpa", "eager")


def modes() -> str:
    """What every mode of the blocks' activations saves, with both kinds of attention."""
    columns = [
        "written",
        *(f"saved, `{name}`" for name in ATTENTIONS),
        *(f"peak, `{name}`" for name in ATTENTIONS),
        "off the device",
        "computed again",
    ]

    def rows() -> Iterator[Sequence[str]]:
        for written in MODES:
            sdpa, eager = (_exact(written, name) for name in ATTENTIONS)
            yield (
                ", ".join(f"`{each}`" for each in written).replace("=", ": ") or "nothing (R)",
                *(size(each.bytes_of(State.ACTIVATIONS)) for each in (sdpa, eager)),
                *(size(max(row.device_bytes for row in each.peak)) for each in (sdpa, eager)),
                " · ".join(map(size, (_off(sdpa), _off(eager)))) if _off(sdpa) else "–",
                " · ".join(map(_again, (sdpa, eager))),
            )

    return table(columns, rows())


def _exact(written: Sequence[str], attention: str) -> Estimate:
    name, *overrides = BASE
    return derive(settled(load(name, [*overrides, f"attention={attention}", *written]))).exact


def _off(exact: Estimate) -> int:
    rows = [row for row in exact.memory if row.state is State.ACTIVATIONS]
    return max(row.host_bytes + row.file_bytes for row in rows)


def _again(exact: Estimate) -> str:
    most = max(exact.operations, key=lambda row: row.again)
    return f"{most.again / most.forward:.0%}"


TABLES = {"modes of activations": modes}
