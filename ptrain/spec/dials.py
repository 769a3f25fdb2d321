"""The dials of the wrapper: when gathered units and gradients move, in which pieces and how."""

from dataclasses import dataclass
from typing import Annotated

from ptrain.spec.leaf import Boolean, Choice, Dial, Either, Integer, section_dataclass
from ptrain.word import MeantWord, Word, words_of

MAX_SHARDS = 2**17
# kDefaultBucketBytesCap of torch/csrc/distributed/c10d/reducer.hpp, torch 2.13.
STOCK_BUCKET_BYTES = 25 * 2**20
WHOLE_BUCKET = 2**40  # bytes: more than any model's gradients


class GradientSync(MeantWord):
    """When accumulated gradients are reduced: after every micro-batch, or after the last."""

    EVERY = "every", "after every micro-batch"
    LAST = (
        "last",
        "after the last micro-batch (no_sync); until then each rank holds the unsharded sum of "
        "its local gradients",
    )


class Reshard(MeantWord):
    """The units that are resharded after forward, if neither all nor none.

    `non-root` keeps the root unsharded, because its backward begins at once. That is the default of
    torch's `fully_shard` (`reshard_after_forward=None`).
    """

    NON_ROOT = (
        "non-root",
        "all units except the root, whose backward starts immediately; the default of "
        "fully_shard (reshard_after_forward=None)",
    )


RESHARD = Either(
    "Whether gathered parameters are freed after forward: true, false (kept until backward), "
    "`non-root` (all units except the root, as None in torch), or n, which keeps them sharded "
    "over n neighbouring ranks. Default: true; false with pp.",
    "true, false, non-root or a number of shards >= 2",
    (
        Boolean(""),
        Integer("", 2, MAX_SHARDS),
        Choice(
            "",
            words_of(Reshard),
            slips={"nonroot": "non-root", "non_root": "non-root"},
            read=Reshard,
        ),
    ),
    has_derived_default=True,
    dial=Dial(free=True, other=False),
)


@section_dataclass
class SyncPolicy:
    """The accumulation's policy: from 3K units moved per step (every) down to K + 1.

    With U gathered units, K micro-batches and S* parameters: (every, True, True) moves 3K units,
    (last, True, True) 2K+1, (last, True, False) K+2, (last, False, True) K+1, (last, False,
    False) 2. Whatever the policy, the last micro-batch reduces and reshards.
    Gradients that are R on every data axis are always `last`: to reduce a sum that already holds
    a reduced part would count that part once per rank.
    An integer n for `reshard_after_forward` keeps each gathered unit in n shards until backward
    (FSDP2's smaller groups of n neighbours); `non-root` is true for every unit but the root.
    """

    gradients: Annotated[
        GradientSync,
        Choice(
            "When accumulated gradients are reduced: after every micro-batch or after the last."
            " Default: every; last if gradients are R on every data axis.",
            words_of(GradientSync),
            read=GradientSync,
            has_derived_default=True,
        ),
    ] = GradientSync.EVERY
    reshard_after_forward: Annotated[bool | int | Reshard, RESHARD] = True
    reshard_after_backward: Annotated[
        bool,
        Boolean(
            "Whether gathered parameters are freed after each backward pass. Default: true; "
            "false with pp.",
            has_derived_default=True,
            dial=Dial(free=True, other=False),
        ),
    ] = True

    def after_forward(self, *, is_root: bool) -> bool | int:
        """Return whether a unit is resharded after its forward pass, or the number of shards it is
        resharded to."""
        if isinstance(self.reshard_after_forward, Reshard):
            return not is_root
        return self.reshard_after_forward


class Compiled(MeantWord):
    """The part of the model that torch.compile compiles."""

    NONE = "none", "nothing: operators run one by one"
    BLOCK = (
        "block",
        "the forward pass of each block, recomputation included; hooks of the wrapper run outside",
    )
    LOSS = "loss", "the logits and the cross entropy of all tokens, as one program"
    ALL = "all", "block and loss"

    @property
    def has_blocks(self) -> bool:
        """True if blocks are compiled."""
        return self in (Compiled.BLOCK, Compiled.ALL)

    @property
    def has_loss(self) -> bool:
        """True if the logits and the loss are compiled."""
        return self in (Compiled.LOSS, Compiled.ALL)


class ReduceScatterVia(Word):
    """The implementation of reduce-scatter.

    `native` is the backend's: on gloo an all-reduce, or an exchange of halves between two ranks.
    `all_to_all` exchanges shards and sums them locally, which sends no more than a reduce-scatter
    on gloo, too.
    """

    NATIVE = "native"
    ALL_TO_ALL = "all_to_all"


class UnitKind(Word):
    """The modules that are gathered, reduced and freed together (the paper's s_unit)."""

    BLOCK = "block"
    SUB_BLOCK = "sub-block"  # a block's children that have children; the block keeps the rest
    BLOCKS = "blocks"  # n neighbouring blocks
    ENDS = "ends"  # one block; the embedding; and the last norm with the head
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """`count` neighbouring blocks make one unit; 1 for every other kind."""

    kind: UnitKind = UnitKind.BLOCK
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} blocks" if self.kind is UnitKind.BLOCKS else self.kind.value


class Overlap(MeantWord):
    """The overlap of gradient reductions with backward."""

    NONE = (
        "none",
        "wait for every reduction: DDP reduces after backward, fully_shard does not prefetch, "
        "and flat units are gathered one by one after their update unless gather_after_update is "
        "set",
    )
    BACKWARD = "backward", "reduce a unit or bucket while backward continues"


class GatherAfterUpdate(MeantWord):
    """The time at which updated parameters are all-gathered."""

    BLOCKING = "blocking", "after each unit's update, before the next unit's update"
    DURING_UPDATE = "during-update", "start after each unit's update, wait after the last update"
    NEXT_FORWARD = "next-forward", "when the unit is used next"
