"""The PtrainError family: every error that is reported to the user, with its exit code.

PtrainError        2  the user's input is wrong
    SpecError      2  a spec, with every fault in it
    DoesNotFit     2  the prediction exceeds the device, and --force was not given
    BrokenSchedule 2  a pipeline schedule that cannot run: the rank, the action and why
    BrokenPlan     2  a plan step that cannot run at its position: the step and why
VerdictFailed      1  a verdict fails (state, axis and factor are named)
RankFailed         3  a rank died, hung or raised
TrainingStopped    4  a check stopped the training
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One fault in a spec: its place, the finding and the fix.

    Attributes:
        place: The dotted key (`mesh.dp_shard`).
        finding: The error.
        remedy: The fix, with text to paste.
        source: The file or mapping that contains the key.
        line: The line, from 1. 0: the fault has no place in a file (a missing key, an override,
            Python).
        column: The column, from 1. 0: as for `line`.
        text: The source line, printed with a caret below the column.
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
    """The base class of all errors that ptrain raises for its user."""

    exit_code = 2


class SpecError(PtrainError):
    """A spec or input that cannot be used; `faults` holds all faults, in file order."""

    def __init__(self, *faults: Fault) -> None:
        assert faults, "a SpecError needs at least one fault"
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


def input_error(place: str, finding: str, remedy: str = "") -> SpecError:
    """Return the error for one mistake outside a spec file: an option, a folder or a data file.

    Args:
        place: The option, file or key that is wrong.
        finding: The fault, as a clause.
        remedy: The fix, with text to paste in the syntax that was typed.

    Example:
        >>> print(input_error("--to", "out already exists", "Use the name of a new folder."))
        error: --to: out already exists
          remedy: Use the name of a new folder.
    """
    return SpecError(Fault(place=place, finding=finding, remedy=remedy))


def library(name: str, place: str, use: str) -> Any:
    """Import an optional library and return the bound module.

    `import a.b` binds `a`, so `library("a.b", ...)` returns `a` with `a.b` loaded.

    Args:
        name: The module to import. `pip install` is suggested for its first part.
        place: The place that the error names.
        use: A clause that states what needs the library.

    Raises:
        SpecError: The library is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        finding = f"{use}, which is not installed"
        raise input_error(place, finding, f"Run `pip install {name.partition('.')[0]}`.") from error


class DoesNotFit(PtrainError):
    """The predicted peak exceeds the memory of the device."""


class BrokenSchedule(PtrainError):
    """A pipeline schedule that cannot run, or does not do the work of one step.

    Args:
        rank: The rank whose action cannot run.
        action: The action.
        reason: The reason, as a clause.
    """

    def __init__(self, rank: int, action: object, reason: str) -> None:
        self.rank = rank
        self.action = action
        self.reason = reason
        super().__init__(f"pipeline.schedule: rank {rank}, {action}: {reason}")


class BrokenPlan(PtrainError):
    """A plan step that cannot run at its position in the plan.

    Args:
        step: The step.
        reason: The reason, as a clause.
    """

    def __init__(self, step: object, reason: str) -> None:
        super().__init__(
            f"plan: {type(step).__name__} cannot run at this position: {reason}\n  remedy: "
            "Use the order of steps that `ptrain plan` prints."
        )


class VerdictFailed(PtrainError):
    """Predicted and measured figures differ, or a run differs from its single-device reference."""

    exit_code = 1


class RankFailed(PtrainError):
    """A rank died, hung or raised; the message names the rank and the cause."""

    exit_code = 3


class TrainingStopped(PtrainError):
    """A check (non-finite loss, inconsistent replicas) stopped the training."""

    exit_code = 4
