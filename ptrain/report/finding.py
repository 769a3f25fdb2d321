"""Findings of a verification: mismatches between a run and its reference, and their root cause.

A mismatch is between a run and the single-device reference, or between ranks. All classes are plain
data that ranks can send to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from ptrain.codec import RARE
from ptrain.errors import VerdictFailed


class Moment(IntEnum):
    """The moment of a step, in order of time: an earlier mismatch explains a later one."""

    START = 0  # parameters, optimizer state, counters, buffers before anything runs
    BATCH = 1  # the tokens that the model is given
    FORWARD = 2
    BACKWARD = 3
    GRADIENTS = 4  # as the optimizer is given them, without clipping and the loss's scale
    CLIP = 5  # the norm of gradients, and gradients after clipping
    UPDATE = 6  # parameters and optimizer state when the step is over


class Subject(StrEnum):
    """The kind of value that differs: one of the four states, or a value outside of them."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    BUFFERS = "buffers"
    RANDOM = "random state"
    COUNTER = "step counter"
    AVERAGE = "moving average"
    LEARNING_RATE = "learning rate"
    NORM = "gradient norm"
    LOSS = "loss"
    COLLECTIVE = "collective"


class DifferenceKind(StrEnum):
    """The kind of a difference between two values."""

    VALUE = "value"
    DTYPE = "dtype"
    SHAPE = "shape"
    MISSING = "missing"  # only one side has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A difference of a value on one rank from the reference, or from the value on other ranks.

    Attributes:
        name: A parameter's canonical name or a module's path.
        difference: The relative difference by the 2-norm; 0 unless `way` is VALUE.
        tolerance: The allowed relative difference.
        index: The number of the micro-batch, or the position in the sequence of collectives.
        between: The ranks that should have the same value, if ranks are compared with each other.
        told: Both sides in words, if they are not tensors.
    """

    step: int
    moment: Moment
    subject: Subject
    name: str
    rank: int
    way: DifferenceKind = DifferenceKind.VALUE
    difference: float = 0.0
    tolerance: float = 0.0
    index: int = 0
    between: tuple[int, ...] = ()
    told: str = ""  # both sides in words, if they are not tensors

    @property
    def order_key(self) -> tuple[int, int]:
        """The step and the moment, which order mismatches."""
        return self.step, self.moment

    @property
    def place(self) -> str:
        """The name for a sentence; the path of the full model is empty."""
        return self.name or "the model"


class Certainty(StrEnum):
    """The certainty of a root cause."""

    PROVEN = "proven by trying"  # with its fix the run equals the reference
    LOCATED = "located by trying"  # reference values here fix the run; reason unknown
    FITS = "fits"  # it explains the mismatches, but its fix was not tried
    UNEXPLAINED = "not explained"  # the first mismatch, and the causes that were ruled out


RULED_OUT = "ruled out: "
POSSIBLE = "Possible causes: "  # begins the list of causes in a root cause's sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The explanation of a mismatch, with a fix if one is known.

    Attributes:
        state: The kind of value that differs.
        axis: The mesh axes involved, `dp_shard+tp`; empty if there are none.
        factor: The kind of difference: `x 2`, `missing all-reduce`, `stale by 1 step`, `bfloat16
            for float64`.
        place: The first module or tensor that differs.
        step: The first step with a difference.
        ranks: The ranks with the difference.
        sentence: The facts; if several causes are possible, `POSSIBLE` and a list of them follow.
        certainty: How the root cause was established.
        tried: The experiments and their results, in words.
        called_at: The file and line of the module's call; empty if unknown.
        fix: The change that removes the cause; empty if unknown. Records of earlier versions have
            it in `sentence`.
    """

    state: Subject
    axis: str
    factor: str
    place: str
    step: int
    ranks: tuple[int, ...]
    sentence: str
    certainty: Certainty = Certainty.FITS
    tried: str = ""
    called_at: str = field(default="", metadata=RARE)
    fix: str = field(default="", metadata=RARE)

    def __str__(self) -> str:
        on = f" · axis {self.axis}" if self.axis else ""
        where = f" · {self.place}" if self.place else ""
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        call = f"{self.place}, called at {self.called_at}" if self.called_at else self.place
        head = f"{self.state}{on} · {self.factor}{where} · step {self.step} · {ranks}"
        facts, _, causes = self.sentence.partition(POSSIBLE)
        lines = {
            "root cause": head,
            "what differs": facts.strip() or f"{self.state}: {self.factor}",
            "where": "; ".join(filter(None, [call, f"first in step {self.step}, on {ranks}"])),
            "possible causes": causes,
            "fix": self.fix,
            str(self.certainty): self.tried or "the fix was not tried",
        }
        return "\n  ".join(f"{label}: {text}" for label, text in lines.items() if text)

    def as_proven(self, tried: str) -> RootCause:
        """Return the root cause after a successful trial of its fix.

        A root cause that lists several possible causes remains FITS: the trial proves none of them.
        """
        certainty = Certainty.FITS if POSSIBLE in self.sentence else Certainty.PROVEN
        return replace(self, certainty=certainty, tried=tried)

    def as_fitting(self, tried: str) -> RootCause:
        """Return the root cause as an explanation that trials did not fully confirm."""
        return replace(self, certainty=Certainty.FITS, tried=tried)

    def as_located(self, tried: str) -> RootCause:
        """Return the root cause as the place of the first difference, for an unknown reason."""
        return replace(self, certainty=Certainty.LOCATED, tried=tried)

    def as_unexplained(self, out: str) -> RootCause:
        """Return the root cause as the first difference only, with the ruled-out causes."""
        return replace(self, certainty=Certainty.UNEXPLAINED, tried=f"{RULED_OUT}{out}")


class MismatchFound(VerdictFailed):
    """The error raised when a check in a running program finds a root cause."""

    def __init__(self, root_cause: RootCause) -> None:
        super().__init__(str(root_cause))
        self.root_cause = root_cause
