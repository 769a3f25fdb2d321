"""What verification finds: where a run differs from one device, or its ranks from each other, and
the root cause that this points to. Plain data, so that ranks can tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from ptrain.codec import RARE
from ptrain.errors import VerdictFailed


class Moment(IntEnum):
    """When in a step, in the order of time: a mismatch at an earlier moment explains a later."""

    START = 0  # parameters, optimizer state, counters, buffers before anything runs
    BATCH = 1  # the tokens that the model is given
    FORWARD = 2
    BACKWARD = 3
    GRADIENTS = 4  # as the optimizer is given them, without clipping and the loss's scale
    CLIP = 5  # their norm, and what clipping made of them
    UPDATE = 6  # parameters and optimizer state when the step is over


class Subject(StrEnum):
    """What differs: one of the four states, or something that belongs to none."""

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


class Way(StrEnum):
    """How it differs."""

    VALUE = "value"
    DTYPE = "dtype"
    SHAPE = "shape"
    MISSING = "missing"  # only one side has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One thing on one rank that is not what one device has, or not what the other ranks have.

    `name`: a parameter's canonical name or a module's path. `difference` is relative, by the 2-norm
    (0 where `way` is not VALUE); `index` is the micro-batch, or the place among collectives.
    `between`: ranks that should have the same, where that is what is compared.
    """

    step: int
    moment: Moment
    subject: Subject
    name: str
    rank: int
    way: Way = Way.VALUE
    difference: float = 0.0
    tolerance: float = 0.0
    index: int = 0
    between: tuple[int, ...] = ()
    told: str = ""  # both sides in words, where they are not tensors

    @property
    def when(self) -> tuple[int, int]:
        return self.step, self.moment

    @property
    def place(self) -> str:
        """Return the name in words: the path of the whole model is empty."""
        return self.name or "the model"


class Certainty(StrEnum):
    """How sure a root cause is."""

    PROVEN = "proven by trying"  # its fix was tried, and makes what differs the reference's
    LOCATED = "located by trying"  # with the reference's values there all is right; why is unknown
    FITS = "fits"  # it explains what was seen, and its fix was not tried
    UNEXPLAINED = "not explained"  # what differs first, and what was ruled out


RULED_OUT = "ruled out: "
POSSIBLE = "Possible causes: "  # how a sentence of a root cause begins that lists some


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Whose fault it is: the state, the mesh axis ("" where none is involved), the factor (`x 2`,
    `missing all-reduce`, `stale by 1 step`, `bfloat16 for float64`), the first module or tensor
    that differs, since which step, on which ranks, a sentence to act on, and how sure that is:
    `tried` says what was tried and what came of it. `called_at` is the file and line that calls
    the module, if that is known.

    `sentence` is what differs; then, if there are several that fit, `POSSIBLE` and these. `fix` is
    what to do, if that is known: a record of an earlier version has it in `sentence`."""

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

    def proven(self, tried: str) -> RootCause:
        """Return it after its fix was tried; of one that lists several causes it proves none."""
        certainty = Certainty.FITS if POSSIBLE in self.sentence else Certainty.PROVEN
        return replace(self, certainty=certainty, tried=tried)

    def fits(self, tried: str) -> RootCause:
        """Return it as an explanation of which not all was tried, or not all came right."""
        return replace(self, certainty=Certainty.FITS, tried=tried)

    def located(self, tried: str) -> RootCause:
        """Return it as the place where a run begins to differ, for a reason that is not known."""
        return replace(self, certainty=Certainty.LOCATED, tried=tried)

    def unexplained(self, out: str) -> RootCause:
        """Return it as what differs first, of which only so much was ruled out."""
        return replace(self, certainty=Certainty.UNEXPLAINED, tried=f"{RULED_OUT}{out}")


class MismatchFound(VerdictFailed):
    """A check in a running program found a root cause."""

    def __init__(self, root_cause: RootCause) -> None:
        super().__init__(str(root_cause))
        self.root_cause = root_cause
