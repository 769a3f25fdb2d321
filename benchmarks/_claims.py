"""The parts of a claim of `paper.py`: its text, specs, figures and cases.

A case is a figure of one spec or two, at the text's scale and reduced to a model that four CPU
ranks train. The texts of all claims are in claims.yaml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum

import yaml
from _machine import ROOT

from ptrain.cost import Collective, Estimate, State
from ptrain.facts.model import ModelFacts
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_BETWEEN_TIERS = (
    Collective.HOST_TO_DEVICE,
    Collective.DEVICE_TO_HOST,
    Collective.FILE_READ,
    Collective.FILE_WRITE,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A named spec with overrides; `small` comes on top for the run on `ranks` CPU ranks, each
    with `samples` in a step."""

    name: str
    overrides: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    ranks: int = 4
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one column for one spec, in bytes of the rank with the most."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    transient: int
    peak: int
    host: int
    sent: int
    copied: int

    @classmethod
    def of(cls, estimate: Estimate) -> Figures:
        states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)
        held = {str(state): estimate.bytes_of(state) for state in (*states, State.TRANSIENT)}
        host: dict[int, int] = {}
        for row in estimate.memory:
            host[row.rank] = host.get(row.rank, 0) + row.host_bytes
        return cls(
            **held,
            peak=max((row.device_bytes for row in estimate.peak), default=0),
            host=max(host.values(), default=0),
            sent=estimate.sent_bytes(),
            copied=sum(
                row.payload_bytes
                for row in estimate.traffic
                if row.key.collective in _BETWEEN_TIERS
            ),
        )

    @property
    def states(self) -> int:
        """Theorem 1's sum without activations and without s_unit."""
        return self.parameters + self.optimizer + self.gradients


FIGURES = tuple(field.name for field in fields(Figures))


@dataclass(frozen=True, slots=True)
class View:
    """A spec as one column predicts it."""

    spec: Spec
    facts: ModelFacts
    found: Figures

    @property
    def ring(self) -> float:
        """r = (N - 1) / N."""
        return (self.spec.world_size - 1) / self.spec.world_size

    @property
    def theta(self) -> int:
        """|Θ| in bytes."""
        return self.facts.numel * self.spec.precision.effective_layout.parameters.itemsize

    @property
    def shape(self) -> ModelShape:
        assert isinstance(self.spec.model, ModelShape), "the claims are about built-in models"
        return self.spec.model


Figure = Callable[..., float]


class Form(StrEnum):
    """The format of a figure."""

    BYTES = "bytes"
    UNITS = "units"  # of r|Θ|
    TIMES = "times"
    PER_PARAMETER = "bytes per parameter"
    COUNT = "count"
    SHARE = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One figure of one spec, or of several. What is claimed is the figure of `claimed_by` (else of
    the same specs) in the column `paper`, unless `claimed` works it out from the views of the
    columns `paper` and `exact`. `at_most`: the claim is a bound; `loose`: it is of a peak, and
    holds within a peak's tolerance."""

    label: str
    sources: tuple[Source, ...]
    figure: Figure
    form: Form
    claimed_by: tuple[Source, ...] = ()
    claimed: Callable[[list[View], list[View]], float] | None = None
    at_most: bool = False
    loose: bool = False


Said = tuple[bool | None, str]  # whether a claim is right, None if nobody knows; and the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A printed claim. It has `cases`, of which the first is its own: where that fails, the claim
    does not hold, and `condition` says which of the others do. Or it is worked out by `find`, and
    `otherwise` is the verdict where it is not right as printed. `why` says in a sentence or two
    where the figure comes from, or what the text overlooks."""

    title: str
    where: str
    printed: str
    why: str
    cases: tuple[Case, ...] = ()
    condition: str = ""
    find: Callable[[], Said] | None = None
    otherwise: str = "does not hold"


_TEXTS = yaml.safe_load((ROOT / "benchmarks" / "claims.yaml").read_text(encoding="utf-8"))
PARTS: dict[str, dict[str, str]] = _TEXTS["parts"]
INTRODUCTION = str(_TEXTS["introduction"]).rstrip()


def claim(
    title: str, *, find: Callable[[], Said] | None = None, cases: tuple[Case, ...] = ()
) -> Claim:
    """Return the claim of this title in claims.yaml, and how it is worked out."""
    return Claim(title=title, find=find, cases=cases, **_TEXTS["claims"][title])
