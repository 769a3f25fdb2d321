"""Resolution of what blocks leave for backward, and of how attention and loss compute.

A belongs to the rank: M and O in a tuple of a data axis say the same as `activations` at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ptrain.cost import State
from ptrain.spec.activations import (
    ATTENTION_ONLY,
    FULL,
    SELECTIVE,
    Kept,
    LossRaw,
    Operators,
    Policy,
    RecomputeRaw,
    belongs_to_rank,
)
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import blocks_of
from ptrain.spec.model import Attention
from ptrain.spec.placement import DATA_AXES, Axis, Distribution, Mode, R, Tier
from ptrain.spec.resolve_sections import Report
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import ActivationSpec, LossSpec
from ptrain.spec.text import Tree

CHUNK = 1024  # tokens: 128 MiB of fp32 logits over a vocabulary of 32000
_POLICIES = {"none": None, "full": FULL, "selective": SELECTIVE, "attention": ATTENTION_ONLY}
_ALL = (0, None)
_Ranges = dict[tuple[int, int | None], Mode]


def on_tier(mode: Mode, text: object, raw: SpecRaw) -> Mode:
    """`O` is where `offload.tier` says; a mode that names its tier stays there."""
    if text == "O" and raw.offload.tier:
        return replace(mode, tier=raw.offload.tier)
    return mode


def says_offloaded(tree: Tree) -> bool:
    """Return whether `activations` has an O at the top of the spec."""
    text = tree.at(("activations",))
    return "O" in (text.values() if isinstance(text, dict) else (text,))


def resolve_activations(raw: SpecRaw, tree: Tree, report: Report) -> ActivationSpec:
    """Return what blocks keep; every contradiction between the tuples, `activations` and
    `recompute` is reported as a fault."""
    modes = _modes(raw, tree, report)
    recompute = raw.recompute or RecomputeRaw()
    policy = _policy(recompute, report)
    is_open = recompute.budget is not None and recompute.policy is None and recompute.keep is None
    if modes is None and is_open:
        modes = {_ALL: Mode(Distribution.MATERIALIZED)}
    ranges: _Ranges = {_ALL: R} if modes is None else modes
    recomputes = any(mode.distribution is Distribution.MATERIALIZED for mode in ranges.values())
    if policy is None and recomputes:
        place = next((place for place, _ in _of_tuples(raw, tree)), "activations")
        report.add(
            "recompute",
            "policy none contradicts activations M: activations would be neither saved nor "
            "recomputed",
            f"Use `recompute=full`, `recompute=selective` or `{place}=R`.",
        )
    elif policy is not None and raw.recompute is not None and not recomputes:
        report.add(
            "recompute",
            f"recompute has no effect: no block has activations M, but {_words(ranges)}",
            'Use `activations=M`, or `activations={"0-1": M}` for some blocks. Or remove '
            "`recompute`.",
        )
    kept = tuple((first, last, _kept(mode, policy)) for (first, last), mode in ranges.items())
    is_one = list(ranges) == [_ALL]
    return ActivationSpec(
        default=kept[0][2] if is_one else Kept(),
        by_block=() if is_one else tuple(sorted(kept, key=_first)),
        every=recompute.every if recomputes else 1,
        budget=recompute.budget,
        is_open=is_open and recomputes,
    )


def _first(entry: tuple[int, int | None, Kept]) -> int:
    return entry[0]


def _kept(mode: Mode, policy: Policy | None) -> Kept:
    if mode.distribution is Distribution.MATERIALIZED:
        return Kept(policy=policy or FULL, tier=mode.tier)
    return Kept(tier=mode.tier)


def _modes(raw: SpecRaw, tree: Tree, report: Report) -> _Ranges | None:
    """By blocks, as the top of the spec says or a tuple; None where neither says anything."""
    said = _said(raw, tree, report)
    for place, mode in _of_tuples(raw, tree):
        if said is not None and said != {_ALL: mode}:
            report.add(
                "activations",
                f"{_words(said)}, but {place} is {mode}",
                f"Remove `activations`, or use `{place}=R`.",
            )
        return {_ALL: mode}  # that two tuples say the same is the algebra's rule
    return said


def _said(raw: SpecRaw, tree: Tree, report: Report) -> _Ranges | None:
    """At the top of the spec."""
    if raw.activations is None:
        return None
    text = tree.at(("activations",))
    written = raw.activations if isinstance(raw.activations, Mapping) else {"0-": raw.activations}
    ranges: _Ranges = {}
    for blocks, mode in written.items():
        if mode != R and not belongs_to_rank(mode):
            where = f" of blocks {blocks}" if isinstance(text, dict) else ""
            report.add(
                "activations",
                f"{mode}{where}: activations can only be sharded on a named axis, because "
                "its ranks must hold the same tokens",
                "Use `R`, `M` or `O`"
                + f", or `placement.tp=S,S,S,{mode.distribution}`" * bool(tree.at(("mesh", "tp")))
                + ".",
            )
            continue
        word = text.get(blocks) if isinstance(text, dict) else text
        ranges[blocks_of(blocks)] = on_tier(_plain(mode), word, raw)
    return ranges or {_ALL: R}


def _of_tuples(raw: SpecRaw, tree: Tree) -> list[tuple[str, Mode]]:
    """(place, mode) of each data axis whose tuple says how the rank keeps activations. An axis of
    one rank vanishes from the mesh; what its tuple says of A does not."""
    modes = []
    for axis in DATA_AXES:
        given = getattr(raw.placement, axis.value, None)
        mode = getattr(given, State.ACTIVATIONS.value, R)
        if mode != R and belongs_to_rank(mode):
            route = ("placement", axis.value, State.ACTIVATIONS.value)
            modes.append((".".join(route), on_tier(_plain(mode), tree.at(route), raw)))
    return modes


def _plain(mode: Mode) -> Mode:
    """Of what lies off the device each rank has its own: R@host is O."""
    is_whole = mode.distribution is Distribution.REPLICATED and mode.tier is not Tier.DEVICE
    return replace(mode, distribution=Distribution.SHARDED) if is_whole else mode


def _words(ranges: _Ranges) -> str:
    if list(ranges) == [_ALL]:
        return str(ranges[_ALL])
    return " and ".join(dict.fromkeys(str(mode) for mode in ranges.values()))


def _policy(raw: RecomputeRaw, report: Report) -> Policy | None:
    """Full where nothing is said."""
    if raw.keep is None:
        return _POLICIES[raw.policy or "full"]
    if raw.policy is not None:
        report.add(
            "recompute.keep",
            f"`keep` and policy {raw.policy} both select what is saved",
            "Remove one of the two.",
        )
    return Policy(keep=tuple(operators for operators in Operators if operators in raw.keep))


def resolve_attention(text: str | None) -> Attention | None:
    """Return what the spec says; None where it says nothing. `flash`, which is refused, gets a
    stand-in."""
    return Attention({"math": "eager", "flash": "sdpa"}.get(text, text)) if text else None


def resolve_loss(raw: SpecRaw, degrees: Mapping[Axis, int], report: Report) -> LossSpec:
    loss = raw.loss or LossRaw()
    if loss.kind == "vocab-parallel":
        _obeys_tensor(raw, degrees, report)
    is_cut = loss.kind in ("chunked", "fused") or loss.chunk is not None or bool(loss.fused)
    if loss.kind == "cross-entropy" and is_cut:
        key = "chunk" if loss.chunk is not None else "fused"
        report.add(
            f"loss.{key}",
            "cross-entropy computes all logits at once",
            f"Remove `{key}`, or use `loss.kind=chunked`.",
        )
    if loss.kind == "fused" and loss.fused is False:
        report.add("loss.fused", "false contradicts kind fused", "Remove one of the two.")
    if not is_cut:
        return LossSpec()
    return LossSpec(chunk=loss.chunk or CHUNK, fused=loss.kind == "fused" or bool(loss.fused))


def _obeys_tensor(raw: SpecRaw, degrees: Mapping[Axis, int], report: Report) -> None:
    if degrees.get(Axis.TP, 1) == 1:
        report.add(
            "loss",
            "vocab-parallel needs at least two tp ranks",
            f"Use `loss=cross-entropy`, or {two_ranks(Axis.TP)}",
        )
    elif not raw.tensor.loss_parallel:
        report.add(
            "loss",
            "vocab-parallel contradicts tensor.loss_parallel: false",
            "Remove one of the two.",
        )
