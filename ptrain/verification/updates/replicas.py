"""Ranks that hold the same part of a parameter, right to rounding, and not the same bits of it."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.report.finding import Certainty, Culprit, Departure
from ptrain.verification.jobs.compare import digest
from ptrain.verification.jobs.culprits import culprit
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.updates.case import UpdateCase


def explain_replicas(departures: Sequence[Departure], case: UpdateCase, ranks: Ranks) -> Culprit:
    """Ranks have the same part, right to rounding, and not the same bits of it."""
    first = departures[0]
    names = [departure.name for departure in departures]
    after = case.seen.after
    left = ranks.gather({name: digest(after[name].value) for name in names if name in after})
    written = ranks.gather(sorted(set(case.written_after()) & set(names)))
    alike = {left[rank].get(first.name) for rank in first.between}
    writers = [rank for rank in first.between if first.name in written[rank]]
    is_proven = len(alike) == 1 and None not in alike and bool(writers)
    who = ", ".join(map(str, first.between))
    cure = (
        f"the optimizers left the same bits on all of them, and rank "
        f"{', '.join(map(str, writers))} has others when its step is over"
    )
    return culprit(
        departures, ranks, state=first.subject, axis=ranks.axis_of(first.between),
        factor="replicas differ", who=writers if is_proven else None,
        sentence=f"Ranks {who} hold the same part and have different bits of it: broadcast it "
        "once, and look at what is computed on each rank.",
        certainty=Certainty.PROVEN if is_proven else Certainty.UNEXPLAINED,
        tried=cure if is_proven else "the difference is rounding beside one device's",
    )  # fmt: skip
