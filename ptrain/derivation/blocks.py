"""Allocations of one block of a built-in model, by how its activations are kept.

The committed tables of blocks (made by `traces.block_tables`) are evaluated and put into the
timeline of a model, of one rank's part of a model, or of a stage. In each of them the events of a
block lie between the block's boundaries. A plain block's events are removed and another block's
events inserted. Events that the position adds, such as a stage's input, which belongs to the
schedule, stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ptrain.axes.context.attention import ContextPart
from ptrain.cost import Collective
from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import EvaluatedTable, Setting, evaluate_table
from ptrain.facts.model import InnerCollective
from ptrain.spec.activations import ATTENTION_ONLY, FULL, PLAIN, SELECTIVE, ActivationMode
from ptrain.spec.model import Attention, Family, ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Mark, Run

# The activation modes that have tables. HOST represents every tier other than the device.
VARIANTS = (
    ("plain", PLAIN),
    ("full", ActivationMode(policy=FULL)),
    ("selective", ActivationMode(policy=SELECTIVE)),
    ("attention", ActivationMode(policy=ATTENTION_ONLY)),
    ("offload", ActivationMode(tier=Tier.HOST)),
    ("full-offload", ActivationMode(policy=FULL, tier=Tier.HOST)),
)

# The modes that have tables over cp.
OVER_CONTEXT = VARIANTS[:2]

_NAMES = {kept: name for name, kept in VARIANTS}
_BLOCK = "blocks.*"
_BOUNDARIES = {
    True: (Mark.ENTER, Mark.LEAVE),  # of a forward pass
    False: (Mark.PRE_BACKWARD, Mark.POST_BACKWARD),
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockPasses:
    """The passes of one block at a setting.

    Attributes:
        forward: Events from `tables.merged`, from the first boundary on.
        backward: Like `forward`, for the backward pass.
        frees_input: True if the block's input is freed after its forward pass, False if it is freed
            after the backward pass.
        moved: Bytes of each storage that forward moves off the device.
        sent: Collectives of the recomputation, with the bytes of the full tensor.
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    frees_input: bool
    moved: tuple[int, ...]
    sent: tuple[tuple[Collective, int], ...]


class BlockPart(NamedTuple):
    """A block's pass between its two boundaries.

    Attributes:
        within: The events between the boundaries, which are included.
        gaps: Memory allocated and freed after each boundary and each completed gradient.
        after: Net bytes of the events after the last boundary.
    """

    within: Sequence[Any]
    gaps: dict[Any, Run]
    after: int


@cache
def _block_part(block: BlockPasses, *, is_forward: bool) -> BlockPart:
    """Return the forward or the backward pass of a block, split into parts."""
    items = block.forward if is_forward else block.backward
    _, within, after = _split_at_block(items, *_BOUNDARIES[is_forward])
    # gradients that autograd keeps count where they complete
    nets = (item.net for item in after if isinstance(item, Run))
    return BlockPart(within, _memory_gaps(within), sum(nets))


def is_known(shape: ModelShape, kept: ActivationMode) -> bool:
    """Return True if a table has the allocations of such a block. Other blocks are traced."""
    has_table = shape.tabulated is not None and shape.attention is not Attention.FLEX
    return has_table and _on_host(kept) in _NAMES


def are_known(spec: Spec) -> bool:
    """Return True if tables have the copies and repeated collectives of all blocks.

    For models that are not built in, this is True only if all activations are kept as autograd
    keeps them.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return all(kept.is_plain for kept in spec.activations.modes)
    kept = spec.activations.distinct_of(shape.layers)
    return all(mode.is_plain or _is_moved_known(spec, shape, mode) for mode in kept)


def _is_moved_known(spec: Spec, shape: ModelShape, kept: ActivationMode) -> bool:
    """Return True if a table has the copies and collectives that a block's mode adds. Over cp a
    block keeps other tensors; if it moves them to another tier, only its input is certain."""
    is_certain = kept.tier is Tier.DEVICE or kept.policy == FULL or not spec.has_token_slices
    return is_certain and is_known(shape, kept)


def is_known_over_context(shape: ModelShape, kept: ActivationMode) -> bool:
    """Return True if a table has the allocations of such a block with context parallelism.

    Only llama blocks with fused attention have such tables.
    """
    is_llama = shape.tabulated is Family.LLAMA and shape.attention is Attention.SDPA
    return is_llama and any(kept == known for _, known in OVER_CONTEXT)


def is_as_usual(shape: ModelShape, kept: Sequence[ActivationMode]) -> bool:
    """Return True if the tables of full models and stages describe all blocks."""
    is_usual = shape.tabulated is not None and shape.attention is Attention.SDPA
    return is_usual and all(mode.is_plain for mode in kept)


def mode_name(kept: ActivationMode) -> str:
    """Return the name of a mode in the tables. Raises KeyError for a mode without a table."""
    return _NAMES[_on_host(kept)]


def _on_host(kept: ActivationMode) -> ActivationMode:
    """Return the mode with the host in place of any tier that is not the device."""
    # Host and file receive the same storages in the same order, so that one table serves both.
    return kept if kept.tier is Tier.DEVICE else ActivationMode(policy=kept.policy, tier=Tier.HOST)


@cache
def block_passes(setting: Setting, kept: ActivationMode, attention: Attention) -> BlockPasses:
    """Return the passes of one block.

    Args:
        setting: The model and its dimensions on one rank. With `context`, attention runs over cp.
        kept: How the block keeps its activations.
        attention: The attention implementation. Not used with context parallelism.

    Returns:
        Forward and backward events, with sizes in bytes.

    Raises:
        KeyError: No table has the block.
    """
    if setting.context is not None:
        return _context_block(setting, setting.context, kept)
    evaluated = evaluate_table(TablePart.BLOCK, setting)
    parts = evaluated.content["parts"]
    entry = evaluated.content[attention.value][mode_name(kept)]
    return BlockPasses(
        forward=tuple(evaluated.events(entry["forward"])),
        backward=tuple(evaluated.events(entry["backward"])),
        frees_input=entry["frees_input"],
        moved=tuple(evaluated.sizes[index] for index in parts[entry["moved"]]),
        sent=tuple(_repeated_collectives(setting, kept, attention)),
    )


def _repeated_collectives(
    setting: Setting, kept: ActivationMode, attention: Attention
) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives that backward has in addition to a plain block's backward."""
    own, plain = (
        Counter(
            item
            for item in block_work(setting).operators(of["backward"])
            if isinstance(item, InnerCollective)
        )
        for of in _pass_numbers(setting, kept, attention)
    )
    # Counter subtraction keeps positive counts only: calls that a mode saves are never negative
    # traffic.
    for sent, times in (own - plain).items():
        yield from [(sent.collective, sent.payload)] * times


def _context_block(setting: Setting, part: ContextPart, kept: ActivationMode) -> BlockPasses:
    """Return the passes of a block that attends to the tokens of other ranks.

    The communication of cp is not included: `axes.context.cost` counts it.
    """
    evaluated = evaluate_table(TablePart.CONTEXT, setting)
    entry = evaluated.content[mode_name(kept)]
    own = entry["places"][part.name]
    forward, backward = (
        tuple(
            evaluated.events(
                # A place stores only the segments that differ from the common ones
                # (`traces.work_tables`).
                *(own[name].get(str(at), number) for at, number in enumerate(entry[name]))
            )
        )
        for name in ("forward", "backward")
    )
    return BlockPasses(
        forward=forward, backward=backward, frees_input=entry["frees_input"], moved=(), sent=()
    )


def block_work(setting: Setting) -> EvaluatedTable:
    """Return the compute and communication of the blocks of a setting."""
    return evaluate_table(TablePart.BLOCK, setting, is_work=True)


def _pass_numbers(
    setting: Setting, kept: ActivationMode, attention: Attention
) -> tuple[dict[str, int], ...]:
    """Return the pass numbers of a block with this policy and of a plain block.

    The tier has no effect, because copies between tiers are not operators.
    """
    ways = block_work(setting).content[attention.value]
    return ways[mode_name(ActivationMode(policy=kept.policy))], ways[mode_name(PLAIN)]


def block_operations(setting: Setting, kept: ActivationMode, scores: int) -> dict[str, int]:
    """Return the floating-point operations of one block's matrix products.

    Args:
        setting: The setting of the block. Its context part is ignored.
        kept: How the block keeps its activations.
        scores: Attention scores per sample and head, in place of the square of the tokens.

    Returns:
        The operations of `forward`, of `backward`, and of the products of forward that backward
        recomputes (`again`).
    """
    setting = setting.without_context
    own, plain = _pass_numbers(setting, kept, setting.shape.attention)
    forward, backward, all_of_it = (
        block_work(setting).flops(number, scores)
        for number in (own["forward"], plain["backward"], own["backward"])
    )
    return {"forward": forward, "backward": backward, "again": all_of_it - backward}


def moved_storages(setting: Setting, kept: Sequence[ActivationMode]) -> tuple[tuple[str, int], ...]:
    """Return the (tier, bytes) of every storage that the blocks' forward passes move off the
    device.

    Args:
        setting: The model and its dimensions on one rank.
        kept: The activation mode of each block, first to last.
    """
    setting = setting.without_context  # over cp only the input moves (`_is_moved_known`)
    return tuple(
        (mode.tier.value, size)
        for mode in kept
        if mode.tier is not Tier.DEVICE
        for size in block_passes(setting, mode, setting.shape.attention).moved
    )


def repeated_collectives(
    setting: Setting, kept: Sequence[ActivationMode]
) -> tuple[tuple[str, int, int], ...]:
    """Return the (collective, bytes of the full tensor, 0 for all ranks) that the blocks' backward
    passes repeat over tp.

    Args:
        setting: The model and its dimensions on one rank.
        kept: The activation mode of each block, first to last.
    """
    setting = setting.without_context  # `axes.context.cost` counts the traffic of cp
    return tuple(
        (collective.value, size, 0)
        for mode in kept
        for collective, size in block_passes(setting, mode, setting.shape.attention).sent
    )


def part_with(
    base: Sequence[Any], setting: Setting, kept: ActivationMode, *, is_forward: bool, held: int
) -> list[Any]:
    """Return the events of a pass with a plain block replaced by a block that is kept as `kept`.

    Args:
        base: Events that contain a plain block's pass.
        setting: The setting of the block.
        kept: How the new block keeps its activations.
        is_forward: True for a forward pass, False for a backward pass.
        held: Bytes of the block's input, if another tensor keeps its storage alive all along. Else
            0.
    """
    plain = block_passes(setting.without_context, PLAIN, Attention.SDPA)
    other = block_passes(setting, kept, setting.shape.attention)
    before, of_base, after = _split_at_block(base, *_BOUNDARIES[is_forward])
    of_plain, of_other = (_block_part(version, is_forward=is_forward) for version in (plain, other))
    then = of_other.after - of_plain.after
    freed = held * (int(other.frees_input) - int(plain.frees_input))  # else it is held
    more = then + (freed if is_forward else -freed)
    mark, *within = _shift_levels(of_other, of_base, of_plain)
    return [
        # if a stage ends with this block, the gradient of the stage's output is the block's
        *(*before, mark, *filter(_is_mark_of_others, of_base), *within),
        *([Run(max(more, 0), more)] if more else []),
        *after,
    ]


def _is_mark_of_others(item: Any) -> bool:
    """Return True if the item is a boundary of another unit."""
    return type(item) is tuple and len(item) == 2 and not item[1].startswith(_BLOCK)


def _shift_levels(block: BlockPart, base: Sequence[Any], plain: BlockPart) -> Iterator[Any]:
    """Yield a block's events, with the memory that its position adds.

    Args:
        block: The block to insert.
        base: The events of a plain block at this position.
        plain: A plain block within a full model.

    A stage's schedule holds the gradient of its output, but a block within a model frees this
    gradient half way. The memory levels after that point are therefore higher in a stage.
    """
    there, alone, own = _memory_gaps(base), plain.gaps, block.gaps
    assert own.keys() == alone.keys() == there.keys(), "a block has its gradients wherever it is"
    for item in block.within:
        if isinstance(item, Run):
            continue  # already yielded after the previous item
        yield item
        key = _item_key(item)
        gap, more = own[key], there[key].net - alone[key].net
        is_early = there[key].rise - alone[key].rise == more
        rise = gap.rise + more if is_early else gap.rise
        if gap.rise or gap.net or more:
            yield Run(max(rise, gap.net + more, 0), gap.net + more)


_NOTHING = Run(0, 0)


def _memory_gaps(items: Sequence[Any]) -> dict[Any, Run]:
    """Return the memory allocated and freed after each boundary and gradient, up to the next."""
    gaps: dict[Any, Run] = {}
    key = None
    for item in items:
        if not isinstance(item, Run):
            # Boundaries of sub-blocks split the events only if the wrap has such units. The gaps
            # ignore them, so that plain and inserted blocks have equal keys.
            key = key if _is_mark_of_others(item) else _item_key(item)
            gaps.setdefault(key, _NOTHING)
        else:
            gaps[key] = item if gaps[key] is _NOTHING else gaps[key].followed_by(item)
    return gaps


def _item_key(item: Any) -> Any:
    """Return the key of an item: the boundary itself, or the name of the gradient."""
    return item if len(item) == 2 else item[0]


def _split_at_block(
    items: Sequence[Any], first: Mark, last: Mark
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Split items into those before a block, the block with its boundaries, and the rest."""
    start, end = items.index((first, _BLOCK)), items.index((last, _BLOCK)) + 1
    return items[:start], items[start:end], items[end:]
