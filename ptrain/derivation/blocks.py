"""What one block of a built-in model allocates, by how its activations are kept: the committed
tables of blocks, evaluated (`traces.block_tables` makes them), and put into a model's timeline.

A block's events stand between its boundaries, whatever is around it: of a whole model, of one
rank's part of it, or of a stage. There a plain block's are taken out and another's put in; what
the place adds of its own (a stage's input belongs to the schedule) stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from ptrain.axes.context.attention import ContextPart
from ptrain.cost import Collective
from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import EvaluatedWork, Setting, content, table
from ptrain.facts.model import InnerCollective
from ptrain.spec.activations import ATTENTION_ONLY, FULL, PLAIN, SELECTIVE, Kept
from ptrain.spec.model import Attention, Family, ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Mark, Run

# The variants that have tables; a tier stands for every one that is not the device.
VARIANTS = (
    ("plain", PLAIN),
    ("full", Kept(policy=FULL)),
    ("selective", Kept(policy=SELECTIVE)),
    ("attention", Kept(policy=ATTENTION_ONLY)),
    ("offload", Kept(tier=Tier.HOST)),
    ("full-offload", Kept(policy=FULL, tier=Tier.HOST)),
)

# Those that have tables over cp.
OVER_CONTEXT = VARIANTS[:2]

_NAMES = {kept: name for name, kept in VARIANTS}
_BLOCK = "blocks.*"
_BOUNDARIES = {
    True: (Mark.ENTER, Mark.LEAVE),  # of a forward pass
    False: (Mark.PRE_BACKWARD, Mark.POST_BACKWARD),
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockPasses:
    """The passes of one block of a setting: `forward` and `backward` are what `tables.merged`
    gives, from boundary to boundary and what follows; `moved` the bytes of each storage that
    forward takes off the device; `sent` the collectives of its recomputation, with the bytes of the
    whole tensor; `frees_input`: its input is gone behind its forward pass, and not only behind
    backward."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    frees_input: bool
    moved: tuple[int, ...]
    sent: tuple[tuple[Collective, int], ...]

    @cached_property
    def _parts(self) -> dict[bool, BlockPart]:
        return {}

    def part(self, *, is_forward: bool) -> BlockPart:
        """Return its forward or its backward pass, taken apart once."""
        if is_forward not in self._parts:
            items = self.forward if is_forward else self.backward
            _, within, after = _parted(items, *_BOUNDARIES[is_forward])
            self._parts[is_forward] = BlockPart(within, _gaps(within), _net(after))
        return self._parts[is_forward]


class BlockPart(NamedTuple):
    """A block's pass from boundary to boundary, what is allocated and freed behind each of its
    items, and the bytes that are left of what follows."""

    within: Sequence[Any]
    gaps: dict[Any, Run]
    after: int


def is_known(shape: ModelShape, kept: Kept) -> bool:
    """Return whether a table tells what such a block allocates; else it is traced."""
    has_table = shape.tabulated is not None and shape.attention is not Attention.FLEX
    return has_table and _on_host(kept) in _NAMES


def are_known(spec: Spec) -> bool:
    """Return whether tables tell what the blocks move and send again, whatever is around them. Of
    other models they do only where no block is kept otherwise than autograd does."""
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return all(kept.is_plain for kept in spec.activations.modes)
    kept = spec.activations.distinct_of(shape.layers)
    return all(mode.is_plain or _is_moved_known(spec, shape, mode) for mode in kept)


def _is_moved_known(spec: Spec, shape: ModelShape, kept: Kept) -> bool:
    """Return True if a table has the copies and collectives that a block's mode adds. Over cp a
    block keeps other tensors; if it moves them to another tier, only its input is certain."""
    is_certain = kept.tier is Tier.DEVICE or kept.policy == FULL or not spec.has_token_slices
    return is_certain and is_known(shape, kept)


def is_known_over_context(shape: ModelShape, kept: Kept) -> bool:
    """Return whether a table tells what such a block allocates that attends to the tokens of other
    ranks: of llama's, with fused attention."""
    is_llama = shape.tabulated is Family.LLAMA and shape.attention is Attention.SDPA
    return is_llama and any(kept == known for _, known in OVER_CONTEXT)


def is_as_usual(shape: ModelShape, kept: Sequence[Kept]) -> bool:
    """Return whether the tables of whole models and stages tell it all."""
    is_usual = shape.tabulated is not None and shape.attention is Attention.SDPA
    return is_usual and all(mode.is_plain for mode in kept)


def variant(kept: Kept) -> str:
    """Return the name under which tables have it. Raises KeyError for what has none."""
    return _NAMES[_on_host(kept)]


def _on_host(kept: Kept) -> Kept:
    """What is off the device is so whatever its tier."""
    return kept if kept.tier is Tier.DEVICE else Kept(policy=kept.policy, tier=Tier.HOST)


@cache
def block(setting: Setting, kept: Kept, attention: Attention) -> BlockPasses:
    """Return what one block does in its passes. Raises KeyError for what has no table."""
    if setting.context is not None:
        return _over_context(setting, setting.context, kept)
    evaluated = table(TablePart.BLOCK, setting)
    parts, entry = evaluated.content["parts"], _entry(setting, kept, attention)
    return BlockPasses(
        forward=tuple(evaluated.events(entry["forward"])),
        backward=tuple(evaluated.events(entry["backward"])),
        frees_input=entry["frees_input"],
        moved=tuple(evaluated.sizes[index] for index in parts[entry["moved"]]),
        sent=tuple(_sent_again(setting, kept, attention)),
    )


def _sent_again(
    setting: Setting, kept: Kept, attention: Attention
) -> Iterator[tuple[Collective, int]]:
    """Yield what backward sends that a plain one does not."""
    own, plain = (
        Counter(
            item
            for item in work(setting).operators(of["backward"])
            if isinstance(item, InnerCollective)
        )
        for of in _passes(setting, kept, attention)
    )
    for sent, times in (own - plain).items():
        yield from [(sent.collective, sent.payload)] * times


def _over_context(setting: Setting, part: ContextPart, kept: Kept) -> BlockPasses:
    """The same where the rank attends to the tokens of others. What it sends is no part of it
    (`axes.context.cost`)."""
    evaluated = table(TablePart.CONTEXT, setting)
    entry = evaluated.content[variant(kept)]
    own = entry["places"][part.name]
    forward, backward = (
        tuple(
            evaluated.events(
                *(own[name].get(str(at), number) for at, number in enumerate(entry[name]))
            )
        )
        for name in ("forward", "backward")
    )
    return BlockPasses(
        forward=forward, backward=backward, frees_input=entry["frees_input"], moved=(), sent=()
    )


def _entry(setting: Setting, kept: Kept, attention: Attention) -> dict[str, Any]:
    entry: dict[str, Any] = content(TablePart.BLOCK, setting)[attention.value][variant(kept)]
    return entry


@cache
def work(setting: Setting) -> EvaluatedWork:
    """Return what blocks of a setting compute and send."""
    return EvaluatedWork(TablePart.BLOCK, setting, setting.values)


def _passes(setting: Setting, kept: Kept, attention: Attention) -> tuple[dict[str, int], ...]:
    """Return the numbers of the passes of a block that is kept so, and of a plain one. Copies
    between tiers are no operators."""
    ways = work(setting).table.content[attention.value]
    return ways[variant(Kept(policy=kept.policy))], ways[variant(PLAIN)]


def operations(setting: Setting, kept: Kept, scores: int) -> dict[str, int]:
    """Return the floating-point operations of one block's matrix products: `forward`, `backward`,
    and those of forward that backward repeats (`again`). `scores` are those of a sample and head,
    in the place of all tokens times all tokens."""
    setting = setting.without_context
    own, plain = _passes(setting, kept, setting.shape.attention)
    forward, backward, all_of_it = (
        work(setting).flops(number, scores)
        for number in (own["forward"], plain["backward"], own["backward"])
    )
    return {"forward": forward, "backward": backward, "again": all_of_it - backward}


def moved(setting: Setting, kept: Sequence[Kept]) -> tuple[tuple[str, int], ...]:
    """Return the (tier, bytes) of every storage that the blocks' forward passes take off the
    device."""
    setting = setting.without_context  # over cp this is the input alone (`_is_moved_known`)
    return tuple(
        (mode.tier.value, size)
        for mode in kept
        if mode.tier is not Tier.DEVICE
        for size in block(setting, mode, setting.shape.attention).moved
    )


def repeated(setting: Setting, kept: Sequence[Kept]) -> tuple[tuple[str, int], ...]:
    """Return the (collective, bytes of the whole tensor) of everything that the blocks' backward
    passes send again over tp."""
    setting = setting.without_context  # `axes.context.cost` counts what they send over cp
    return tuple(
        (collective.value, size)
        for mode in kept
        for collective, size in block(setting, mode, setting.shape.attention).sent
    )


def part_with(
    base: Sequence[Any], setting: Setting, kept: Kept, *, is_forward: bool, held: int
) -> list[Any]:
    """Return `base`, which holds a plain block's pass, with the pass of a block that is kept so.
    `held`: bytes of its input, if another tensor holds it all along."""
    plain = block(setting.without_context, PLAIN, Attention.SDPA)
    other = block(setting, kept, setting.shape.attention)
    before, of_base, after = _parted(base, *_BOUNDARIES[is_forward])
    of_plain, of_other = (version.part(is_forward=is_forward) for version in (plain, other))
    then = of_other.after - of_plain.after
    freed = held * (int(other.frees_input) - int(plain.frees_input))  # what is held is not
    more = then + (freed if is_forward else -freed)
    mark, *within = _shifted(of_other, of_base, of_plain)
    return [
        # of a stage that ends with the block the gradient of its output is that of the block's
        *(*before, mark, *filter(_is_mark_of_others, of_base), *within),
        *([Run(max(more, 0), more)] if more else []),
        *after,
    ]


def _is_mark_of_others(item: Any) -> bool:
    return type(item) is tuple and len(item) == 2 and not item[1].startswith(_BLOCK)


def _shifted(block: BlockPart, base: Sequence[Any], plain: BlockPart) -> Iterator[Any]:
    """Yield a block's events with what its place adds: `base` is a plain block there and `plain`
    one within a model. A stage's schedule holds the gradient of its output, which a block within a
    model frees half way, and so the levels behind that point are higher."""
    there, alone, own = _gaps(base), plain.gaps, block.gaps
    assert own.keys() == alone.keys() == there.keys(), "a block has its gradients wherever it is"
    for item in block.within:
        if isinstance(item, Run):
            continue  # behind the item before it
        yield item
        key = _key(item)
        gap, more = own[key], there[key].net - alone[key].net
        is_early = there[key].rise - alone[key].rise == more
        rise = gap.rise + more if is_early else gap.rise
        if gap.rise or gap.net or more:
            yield Run(max(rise, gap.net + more, 0), gap.net + more)


_NOTHING = Run(0, 0)


def _gaps(items: Sequence[Any]) -> dict[Any, Run]:
    """Return what is allocated and freed behind each boundary of a block's and each gradient that
    is complete, up to the next of them."""
    gaps: dict[Any, Run] = {}
    key = None
    for item in items:
        if not isinstance(item, Run):
            key = key if _is_mark_of_others(item) else _key(item)
            gaps.setdefault(key, _NOTHING)
        else:
            gaps[key] = item if gaps[key] is _NOTHING else gaps[key].then(item)
    return gaps


def _key(item: Any) -> Any:
    """A boundary, or the name of a gradient."""
    return item if len(item) == 2 else item[0]


def _parted(
    items: Sequence[Any], first: Mark, last: Mark
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Before a block, the block with its two boundaries, behind it."""
    start, end = items.index((first, _BLOCK)), items.index((last, _BLOCK)) + 1
    return items[:start], items[start:end], items[end:]


def _net(items: Sequence[Any]) -> int:
    """Bytes that are left; of completed gradients those that stand alive are counted already."""
    return sum(item.net for item in items if isinstance(item, Run))
