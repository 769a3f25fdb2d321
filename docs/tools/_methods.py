"""Generate the tables of all named strategies: placement, implementation, memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _script import table
from _tables import families, on_ranks, tuples

from ptrain.cost import TIERS, Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.predict import sent_bytes
from ptrain.report.table import largest_bytes, memory_text, traffic_text
from ptrain.spec.activations import belongs_to_rank
from ptrain.spec.names import list_files
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate, Wrap

BASE = "ddp"
STATES = {State.PARAMETERS: "Θ", State.OPTIMIZER: "Ω", State.GRADIENTS: "G"}
LETTERS = STATES | {State.ACTIVATIONS: "A"}


def strategies() -> str:
    """Return the description, placement, savings and implementation of each named strategy."""

    def rows() -> Iterator[Sequence[str]]:
        for name in families():
            spec = on_ranks(name)
            yield f"`{name}`", _about(name), tuples(spec), _saves(spec), runs_as(derive(spec).plan)

    return table(["strategy", "description", "Θ,Ω,G,A by axis", "saves", "implementation"], rows())


def _about(name: str) -> str:
    """Return the comment of a strategy's file, which describes it."""
    lines = list_files("strategies")[name].read_text(encoding="utf-8").splitlines()
    comments = (line[2:] for line in lines if line.startswith("# ") and "yaml-" not in line)
    return next(comments).replace("*", r"\*")


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
    """Return the predicted memory and traffic of each named strategy."""
    base = derive(on_ranks(BASE)).exact

    def rows() -> Iterator[Sequence[str]]:
        for name in families():
            derivation = derive(on_ranks(name))
            exact = derivation.exact
            copied = exact.copied_bytes()
            yield [
                f"`{name}`",
                *(_by_tier(exact, state) for state in STATES),
                memory_text(exact.peak_bytes()),
                f"{traffic_text(sent_bytes(exact))} ({traffic_text(sent_bytes(derivation.paper))})",
                f"{exact.sent_bytes() / base.sent_bytes():.3g}×",
                traffic_text(copied) if copied else "",
            ]

    columns = ["strategy", *STATES.values(), "peak", "sent per step (paper)", f"sent, `{BASE}` = 1"]
    return table([*columns, "copied between tiers"], rows())


def _by_tier(exact: Estimate, state: State) -> str:
    most = largest_bytes(exact.memory)
    sizes = {tier: most.get((state, tier)) for tier in TIERS}
    parts = [f"{memory_text(number)}{_WHERE[tier]}" for tier, number in sizes.items() if number]
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
    return "; ".join(parts) or "baseline"


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
