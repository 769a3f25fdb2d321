"""The PtrainError family: what went wrong for the user, and the exit code that says so.

PtrainError        2  the user's input is wrong
    SpecError      2  a spec, with every fault in it
    DoesNotFit     2  the prediction exceeds the device, and --force was not given
    BrokenSchedule 2  a pipeline's schedule that cannot run: the rank, the action and why
    BrokenPlan     2  a plan's step that cannot run where it stands: the step and why
VerdictFailed      1  a verdict fails (state, axis and factor are named)
RankFailed         3  a rank died, hung or raised
TrainingStopped    4  a check stopped the training
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One fault in a spec: where it stands, what was found and what would be right.

    `place` is the dotted key (`mesh.dp_shard`). `line` and `column` count from 1; 0 means
    that the fault has no place in a file (a key that is missing, an override, Python).
    """

    place: str
    finding: str
    remedy: str = ""
    source: str = ""
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        head = ": ".join(part for part in (where, "error", self.place, self.finding) if part)
        lines = [head]
        if self.line and self.text:
            lines += [f"  {self.text}", "  " + " " * (self.column - 1) + "^"]
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


class PtrainError(Exception):
    """Base of everything ptrain raises for its user."""

    exit_code = 2


class SpecError(PtrainError):
    """A spec that cannot be used; `faults` holds all that is wrong with it, in file order."""

    def __init__(self, *faults: Fault) -> None:
        assert faults, "a SpecError needs at least one fault"
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


def refused(place: str, finding: str, remedy: str = "") -> SpecError:
    """The user's one mistake that stands in no file of a spec: an option, a folder, a data file."""
    return SpecError(Fault(place=place, finding=finding, remedy=remedy))


def library(name: str, place: str, use: str) -> Any:
    """Return what `import name` binds. Raises SpecError, with the `use` that needs the library,
    where that is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        finding = f"{use}, which is not installed"
        raise refused(place, finding, f"Run `pip install {name.partition('.')[0]}`.") from error


class DoesNotFit(PtrainError):
    """The predicted peak exceeds the device's memory."""


class BrokenSchedule(PtrainError):
    """A pipeline's schedule that cannot run, or does not do a step's work."""

    def __init__(self, rank: int, action: object, reason: str) -> None:
        self.rank = rank
        self.action = action
        self.reason = reason
        super().__init__(f"pipeline.schedule: rank {rank}, {action}: {reason}")


class BrokenPlan(PtrainError):
    """A step of a plan cannot run where it stands."""

    def __init__(self, step: object, reason: str) -> None:
        super().__init__(
            f"plan: {type(step).__name__} cannot run at this position: {reason}\n  remedy: "
            "Use the order of steps that `ptrain plan` prints."
        )


class VerdictFailed(PtrainError):
    """Predicted and measured (or one device and many) disagree."""

    exit_code = 1


class RankFailed(PtrainError):
    """A rank died, hung or raised; the message names it and gives its cause."""

    exit_code = 3


class TrainingStopped(PtrainError):
    """A check (non-finite loss, inconsistent replicas) stopped the training."""

    exit_code = 4
