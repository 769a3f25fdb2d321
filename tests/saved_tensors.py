"""What the committed tables say that forward leaves for backward, tensor by tensor. Predictions
read the timelines, in which these are summed."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.derivation.archive import TablePart
from ptrain.derivation.blocks import mode_name
from ptrain.derivation.tables import Monomial, Place, Setting, stored_table, table_sizes
from ptrain.spec.activations import ActivationMode
from ptrain.timeline import Item, Repeated, Run, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One tensor that forward leaves for backward: by which operator, and how large."""

    part: str  # before (the blocks), block, after
    operator: str
    size: Monomial


def saved(setting: Setting) -> tuple[Saved, ...]:
    """Return the polynomials behind a timeline's saved bytes, operator by operator; those of a
    block count once per layer. One sample alone saves less, so that the batch matters beyond its
    factor."""
    written = table_sizes(TablePart.PASSES, setting)
    return tuple(
        Saved(part=part, operator=operator, size=written[index])
        for part, tensors in stored_table(TablePart.PASSES, setting)[Place.ALONE]["saved"].items()
        for operator, index in tensors
    )


def saved_of_block(setting: Setting, kept: ActivationMode) -> tuple[tuple[str, Monomial], ...]:
    """Return what forward leaves on the device for backward, as pairs of operator and monomial."""
    written = table_sizes(TablePart.BLOCK, setting)
    attention = setting.shape.attention.value
    listed = stored_table(TablePart.BLOCK, setting)[attention][mode_name(kept)]["saved"]
    parts = stored_table(TablePart.BLOCK, setting)["parts"]
    return tuple((operator, written[index]) for operator, index in parts[listed])


def saved_bytes(timeline: Timeline) -> int:
    """Return what forward leaves alive: |A| of one micro-batch."""
    return sum(map(_net, timeline.forward))


def _net(item: Item) -> int:
    match item:
        case Run(_, net):
            return net
        case Repeated(times, items):
            return times * sum(map(_net, items))
        case _:
            return 0


def torch_version(setting: Setting) -> str:
    """Return the version of torch that was traced."""
    version: str = stored_table(TablePart.PASSES, setting)["torch"]
    return version
