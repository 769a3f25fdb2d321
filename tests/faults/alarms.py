"""False alarms of the protocol: every unmodified strategy of the repository, over seeds and
layouts, with small tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.errors import SpecError
from ptrain.report.record import Check
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import Document, load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.options import VerifyOptions
from ptrain.verification.protocol import Verification, verify_on_ranks
from tests.ranks import Ranks

SEEDS = range(5)
STEPS = 8
OWN = "its own"
LAYOUTS = (OWN, "bf16", "zero16")
ALL_SEEDS = (OWN, "bf16")  # the others take the first alone: all would be some 500 runs
SMALL = (
    "model.hidden=32", "model.heads=4", "model.ffn=48", "batch.sequence=16", "batch.micro=1",
)  # fmt: skip
ACCUMULATED = (4, 1)  # micro-batches of a rank; one where gradients do not outlive backward
MOST_RANKS = 4  # of a spec that is run
DROPLESS = "dropless"  # suffix of a spec that gives experts a capacity
_LESS = ("model.layers=2",)  # of which one device in fp64 runs each expert by itself
SPECS = Path(__file__).parents[2] / "specs"
STRATEGIES = sorted(path.stem for path in (SPECS / "strategies").glob("*.yaml"))
EXPERTS = [
    name
    for path in sorted((SPECS / "experts").glob("*.yaml"))
    if load(path).spec.world_size <= MOST_RANKS
    for name in (path.stem, f"{path.stem} {DROPLESS}")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRun:
    """A legal spec and the protocol's report on it, which should be empty."""

    strategy: str
    layout: str
    seed: int
    failing: tuple[Check, ...]
    seconds: float

    @property
    def line(self) -> str:
        return "; ".join(f"{check.name}: {check.why}" for check in self.failing)


def as_written(strategy: str, overrides: Sequence[str] = ()) -> Document:
    """Return the strategy's file with these overrides, without placements that the name implies."""
    name, _, how = strategy.partition(" ")
    of_experts = _LESS if strategy in EXPERTS else ()
    return load(name, (*of_experts, *(("model.capacity_factor=null",) if how else ()), *overrides))


def legal(strategy: str, layout: str, seed: int) -> Spec | None:
    """Return the spec, or None if the layout is not legal with the strategy's placement."""
    own = () if layout == OWN else (f"precision.layout={layout}",)
    data = as_written(strategy).spec.data_degree
    for accumulated in ACCUMULATED:
        batch = f"batch.global={accumulated * data}"
        try:
            return resolve_auto(as_written(strategy, (*SMALL, batch, *own, f"train.seed={seed}")))
        except SpecError:
            continue
    return None


def layouts(strategy: str) -> list[str]:
    """Return the legal layouts, each once."""
    found: dict[str, str] = {}
    for layout in LAYOUTS:
        spec = legal(strategy, layout, seed=0)
        if spec is not None:
            found.setdefault(spec.precision.layout.name, layout)
    return list(found.values())


def cases() -> Iterator[tuple[str, str]]:
    """Yield the strategies with their layouts."""
    for strategy in (*STRATEGIES, *EXPERTS):
        for layout in layouts(strategy):
            yield strategy, layout


def verify_on_rank(spec: Spec) -> Verification:
    """Verify the spec on this rank of a pool."""
    world = World.join(spec.timeout)
    return verify_on_ranks(spec, world, Exchange(world), VerifyOptions(steps=STEPS))


def seeds(layout: str) -> range:
    """Return the seeds of the page."""
    return SEEDS if layout in ALL_SEEDS else SEEDS[:1]


def verify_clean(ranks: Ranks, strategy: str, layout: str, seed: int) -> CleanRun:
    """Verify a strategy in a layout on a pool with the ranks of its spec."""
    spec = legal(strategy, layout, seed)
    assert spec is not None, "a legal layout"
    began = time.perf_counter()
    told: Verification = ranks.run(spec.world_size, verify_on_rank, spec, timeout=300.0)[0]
    return CleanRun(
        strategy=strategy,
        layout=spec.precision.layout.name,
        seed=seed,
        failing=tuple(check for check in told.checks if not check.holds),
        seconds=time.perf_counter() - began,
    )
