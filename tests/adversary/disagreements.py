"""The comparison of `exact` and `simulated` for a spec: states, peaks, traffic and operations of a
few ranks, at 0 bytes and 0 operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.report.record import Check, compare_estimates
from ptrain.simulation.execute import simulate
from ptrain.traces.facts import facts_of
from tests.adversary.random_specs import load_accepted

CRASH = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A figure of one rank that differs, or the error in place of a figure's name."""

    rank: int
    name: str
    exact: int | float | None
    simulated: int | float | None

    @property
    def kind(self) -> str:
        """Return the kind of figure, independent of the rank: `peak forward`, `operations again`
        …"""
        return self.name.partition(" rank ")[0]

    def __str__(self) -> str:
        if self.name.startswith(CRASH):
            return f"rank {self.rank}: {self.name}"
        off = ""
        if self.exact is not None and self.simulated is not None:
            off = f" ({self.simulated - self.exact:+d})"
        figure = f"{self.kind}: exact {self.exact}, simulated {self.simulated}{off}"
        return f"rank {self.rank}: {figure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The compared figures of a spec and their differences. `refused` is the reason why it was not
    simulated."""

    figures: int = 0
    differing: tuple[Disagreement, ...] = ()
    undefined: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.kind for row in self.differing))


def compare_columns(written: dict[str, Any], ranks: Sequence[int]) -> Comparison:
    """Compare the two columns of a legal spec on these ranks."""
    rank = -1
    try:
        spec = load_accepted(written)
        exact = derive(spec, facts_of(spec)).exact
        checks: list[tuple[int, Check]] = []
        for rank in ranks:
            rows = compare_estimates(exact.of_rank(rank), simulate(spec, rank).estimate)
            checks += [(rank, check) for check in rows]
    except PtrainError as error:
        return Comparison(refused=str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - whatever is raised is looked for
        name = f"{CRASH} {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        row = Disagreement(rank=rank, name=name, exact=None, simulated=None)
        return Comparison(differing=(row,))
    # a simulation has no clock
    undefined = {kind: why for kind, why in exact.undefined.items() if kind != "step_seconds"}
    if not exact.operations:
        undefined["operations"] = "no table tells them"
    return Comparison(
        figures=len(checks),
        differing=tuple(
            Disagreement(
                rank=rank, name=check.name, exact=check.predicted, simulated=check.measured
            )
            for rank, check in checks
            if check.predicted != check.measured
        ),
        undefined=undefined,
    )
