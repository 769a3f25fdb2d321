"""The lane of launches: what a device waits for its host.

The host issues one thing after the other, and what it has issued begins when the device is done
with all before it. Nothing that the device does is read between two steps (`train.loop`), so that
the host of a steady step is as far ahead as the device is behind, up to a whole step. A step then
takes as long as the longer of both chains, for they meet in nothing but this (the greatest mean of
a cycle, Baccelli et al. 1992). The driver's queue, of a thousand launches or so, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ptrain.costs import Spent, TimeRow


def with_launches(rows: Sequence[TimeRow], seconds: float) -> tuple[TimeRow, ...]:
    """Return the rows of a step whose host issues for so many seconds: those by which it takes
    longer than the rest are spent in the phases in which the host does, where these are longer."""
    late = seconds - sum(row.seconds for row in rows)
    issuing = {row.key.phase: row.moving for row in rows if row.key.spent is Spent.LAUNCHES}
    if late <= 0 or not any(issuing.values()):  # a stage that issues nothing waits in the bubble
        return tuple(rows)
    own = {phase: sum(row.seconds for row in rows if row.key.phase is phase) for phase in issuing}
    longer = {phase: max(0.0, taken - own[phase]) for phase, taken in issuing.items()}
    weights = longer if any(longer.values()) else issuing  # it is another rank's host that is late
    share = late / sum(weights.values())
    return tuple(
        replace(row, seconds=share * weights[row.key.phase])
        if row.key.spent is Spent.LAUNCHES
        else row
        for row in rows
    )
