"""The tables of all named strategies: what each stores, sends and runs as, and what it saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from _tables import on_ranks, table, tuples

from ptrain.cost import TIERS, Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.predict import model_state_bytes, sent_bytes
from ptrain.report.table import largest, size
from ptrain.spec.activations import belongs_to_rank
from ptrain.spec.names import listing
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate, Wrap

BASE = "ddp"
STATES = {State.PARAMETERS: "Θ", State.OPTIMIZER: "Ω", State.GRADIENTS: "G"}
LETTERS = STATES | {State.ACTIVATIONS: "A"}


def strategies() -> str:
    """Every named strategy on as many ranks, with its predictions and what it runs as."""

    def rows() -> Iterator[Sequence[str]]:
        for name in listing("strategies"):
            spec = on_ranks(name)
            derivation = derive(spec)
            exact = derivation.exact
            yield (
                f"`{name}`",
                tuples(spec),
                at_rest(exact),
                size(max((row.device_bytes for row in exact.peak), default=None)),
                f"{size(sent_bytes(exact))} ({size(sent_bytes(derivation.paper))})",
                runs_as(derivation.plan),
            )

    columns = ["strategy", "Θ,Ω,G,A by axis", "Θ+Ω+G per rank", "peak", "sent per step (paper)"]
    return table([*columns, "runs as"], rows())


def at_rest(exact: Estimate) -> str:
    """Returns the bytes on the device, and those on other tiers where there are any."""
    sizes = [model_state_bytes(exact, tier) or 0 for tier in TIERS]
    by_place = zip(sizes[1:], ("host", "files"), strict=True)
    others = (f" + {size(number)} {where}" for number, where in by_place if number)
    return size(sizes[0]) + "".join(others)


def runs_as(plan: Plan) -> str:
    """The real parts of torch behind a plan, in the order in which they take the model."""
    parts = ["`parallelize_module`"] if plan.tensor else []
    if not isinstance(plan.wrap, LocalGradients):
        parts.append(wrapped_by(plan.wrap))
    if plan.pipeline:
        parts.append("`stage_backward`")
    return ", ".join(parts) or wrapped_by(plan.wrap)


def wrapped_by(wrap: Wrap) -> str:
    match wrap:
        case LocalGradients():
            return "one device"
        case Replicate():
            spread = ", `ZeroRedundancyOptimizer`" if wrap.zero_redundancy else ""
            return "`DistributedDataParallel`" + spread
        case FullyShard():
            return "`fully_shard`, 2-D mesh" if wrap.replicate_axes else "`fully_shard`"
        case FlatUnits():
            return "flat units"


def methods() -> str:
    """Every strategy: what it saves, along which dimension, at what cost."""
    base = _exact(BASE)

    def rows() -> Iterator[Sequence[str]]:
        for name in sorted(listing("strategies"), key=_order):
            exact = _exact(name)
            copied = exact.copied_bytes()
            yield [
                f"`{name}`",
                _saves(on_ranks(name)),
                " × ".join(factor.axis for factor in on_ranks(name).factors),
                *(_by_tier(exact, state) for state in STATES),
                f"{exact.sent_bytes() / base.sent_bytes():.3g}×",
                size(copied) if copied else "",
            ]

    columns = ["method", "what it saves", "dimension", *STATES.values()]
    return table([*columns, "sent", "copied between tiers"], rows())


def _order(name: str) -> tuple[bool, str]:
    return name != BASE, name


@cache
def _exact(name: str) -> Estimate:
    return derive(on_ranks(name)).exact


def _by_tier(exact: Estimate, state: State) -> str:
    most = largest(exact.memory)
    sizes = {tier: most.get((state, tier)) for tier in TIERS}
    parts = [f"{size(number)}{_WHERE[tier]}" for tier, number in sizes.items() if number]
    return " + ".join(parts) or "0"


_WHERE = dict(zip(TIERS, ("", " host", " file"), strict=True))


def _saves(spec: Spec) -> str:
    """`Ω and G ÷ dp_shard`, `Θ off the device` …"""
    savings: dict[str, list[str]] = {}
    for factor in spec.factors:
        for state, letter in LETTERS.items():
            mode = factor.placement[state]
            is_own = state is State.ACTIVATIONS and belongs_to_rank(mode)
            for words in _kept(mode) if is_own else _saving(mode, factor.axis):
                savings.setdefault(words, []).append(letter)
    parts = (f"{', '.join(dict.fromkeys(letters))} {words}" for words, letters in savings.items())
    return "; ".join(parts) or "nothing: the measure of all others"


def _kept(mode: Mode) -> Iterator[str]:
    """Of A that is a rank's own: S@host, its O, is no slice."""
    if mode.distribution is Distribution.MATERIALIZED:
        yield "recomputed"
    else:
        yield from _saving(Mode(Distribution.REPLICATED, mode.tier), "")


def _saving(mode: Mode, axis: str) -> Iterator[str]:
    match mode.distribution:
        case Distribution.SHARDED | Distribution.GATHERED:
            yield f"÷ {axis}"
        case Distribution.MATERIALIZED:
            yield "not kept"
        case Distribution.REPLICATED:
            pass
    match mode.tier:
        case Tier.HOST:
            yield "on the host"
        case Tier.FILE:
            yield "in files"
        case Tier.DEVICE:
            pass


TABLES = {"strategies": strategies, "methods": methods}
