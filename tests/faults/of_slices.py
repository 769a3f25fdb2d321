"""Wrong token slices over cp: tokens and positions of other ranks, losses divided by local tokens,
sums over cp that are missing or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from ptrain.axes.context.attention import Span, context_of, spans_at
from ptrain.axes.context.run.slices import SlicedTokens, slice_batch
from ptrain.axes.data.run.apply import FullyShardedWrap
from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.of_batches import batch_of
from tests.faults.of_operators import masks_differ_between
from tests.faults.planting import after_reduction, change_batches, modules


def _setting(attention: Any, degree: int = 2, **others: Any) -> Setting:
    return Setting(mesh={"cp": degree}, sections={"context": {"attention": attention}}, **others)


RING, ZIGZAG, ULYSSES = map(_setting, ("ring", "zigzag", "ulysses"))
GATHERED = _setting("all-gather", placement={"cp": "R,R,R,S*"})
HYBRID = _setting({"ulysses": 2, "ring": 2}, 4)
VARIANTS = {
    "ring": RING, "zigzag": ZIGZAG, "all-gather": GATHERED, "ulysses": ULYSSES, "hybrid": HYBRID,
}  # fmt: skip
RING_OF_4, ZIGZAG_OF_4 = _setting("ring", 4), _setting("zigzag", 4)
GPT = _setting("zigzag", model="gpt")
CP_DROPOUT = _setting("zigzag", model="gpt", shape={"dropout": 0.1, "attention_dropout": 0.0})
SHARDED = _setting("zigzag", placement={"cp": "S*,S,S,S"})
WITH_DATA = Setting(
    mesh={"dp_replicate": 2, "cp": 2}, sections={"context": {"attention": "zigzag"}}
)


def _group(program: Program) -> dist.ProcessGroup:
    return program.mesh.group((Axis.CP,))


def _spans(program: Program, *, is_contiguous: bool = False) -> tuple[Span, ...]:
    """Return a rank's tokens, or its tokens if slices were contiguous."""
    step = context_of(program.spec)
    assert step is not None, "cp has ranks"
    step = replace(step, is_balanced=False) if is_contiguous else step
    return spans_at(step, program.mesh.coordinate(Axis.CP))


# losses and gradients


def divided_locally(program: Program) -> None:
    """Divide by the local token count on each rank and sum gradients over cp."""
    change_batches(program, lambda _, own: replace(own, global_tokens=own.targets.numel()))


SPACE = ord(" ")


def divided_by_own_count(program: Program) -> None:
    """Divide by different local token counts and average gradients over cp, as with ignored
    targets."""

    def change(_: int, own: SlicedTokens) -> SlicedTokens:
        counted = int((own.targets != SPACE).sum())
        return replace(own, global_tokens=counted * _group(program).size())

    change_batches(program, change)


def summed_twice(program: Program) -> None:
    """Sum gradients over cp twice."""

    def again(_: int) -> None:
        for gradient in program.gradients():
            dist.all_reduce(gradient, group=_group(program))

    after_reduction(program, again)


def averaged(program: Program) -> None:
    """Divide losses by the tokens of all ranks, and average over cp in fully_shard."""
    assert isinstance(program.wrapped, FullyShardedWrap)
    for module in program.wrapped.sharded:
        module.set_gradient_divide_factor(float(_group(program).size()))


def never_summed(program: Program) -> None:
    """Keep the gradients of local tokens: cp is treated like tp."""
    micro_batch = program.wrapped.micro_batch
    program.wrapped.micro_batch = lambda is_last: micro_batch(False)


# tokens


def other_samples(program: Program) -> None:
    """Give the ranks of a cp group different samples: one is some steps ahead."""

    def change(step: int, own: SlicedTokens) -> SlicedTokens:
        if not program.mesh.coordinate(Axis.CP):
            return own
        return slice_batch(batch_of(program, step + 7), _spans(program))

    change_batches(program, change)


def samples_swapped(program: Program) -> None:
    """Give the ranks of a cp group their micro-batches in different orders."""

    def change(_: int, own: SlicedTokens) -> SlicedTokens:
        if not program.mesh.coordinate(Axis.CP):
            return own
        order = [1, 0, *range(2, len(own.inputs))]
        return replace(own, inputs=own.inputs[order], targets=own.targets[order])

    change_batches(program, change)


def contiguous_tokens(program: Program) -> None:
    """Load contiguous slices although attention expects early and late chunks."""
    change_batches(
        program,
        lambda step, _: slice_batch(batch_of(program, step), _spans(program, is_contiguous=True)),
    )


def contiguous_targets(program: Program) -> None:
    """Permute inputs to early and late chunks, but not targets."""

    spans = _spans(program, is_contiguous=True)

    def change(step: int, own: SlicedTokens) -> SlicedTokens:
        return replace(own, targets=slice_batch(batch_of(program, step), spans).targets)

    change_batches(program, change)


def targets_two_ahead(program: Program) -> None:
    """Shift a rank's targets once more after slicing."""
    change_batches(program, lambda _, own: replace(own, targets=own.targets.roll(-1, dims=1)))


# positions


def positions_from_0(program: Program) -> None:
    """Use rotation tables of the first positions on each rank."""
    count = program.spec.batch.sequence // _group(program).size()
    program.model.place_tokens(((0, count),))


def learned_from_0(program: Program) -> None:
    """Add the embeddings of the first positions on each rank."""
    for module in modules(program, "positions"):
        module.spans = ()


def contiguous_positions(program: Program) -> None:
    """Rotate by contiguous positions although the tokens are not contiguous."""
    program.model.place_tokens(_spans(program, is_contiguous=True))


def turned_from_0(program: Program) -> None:
    """Rotate queries and keys by the token's local index."""
    whole = type(program.model)(program.spec.model, sequence=program.spec.batch.sequence)
    tables = dict(whole.named_buffers())

    def turned(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, cos, _, *more = args
        count = x.shape[1]
        return (x, *(tables[name][:count].to(cos) for name in ("cos_TK", "sin_TK")), *more)

    for attention in modules(program, r"blocks\.\d\.attention"):
        attention.register_forward_pre_hook(turned)


def _of_each_variant(
    name: str,
    plant: Callable[[Program], None],
    factor: str,
    *,
    subjects: tuple[Subject, ...] = (Subject.LOSS, Subject.GRADIENTS),
    place: str = "",
) -> Iterator[Fault]:
    """Yield the fault in every variant; `factor` may name the degree."""
    for variant, setting in VARIANTS.items():
        yield Fault(
            name=f"{name}: {variant}",
            setting=setting,
            plant=plant,
            subjects=subjects,
            axis="cp",
            factor=factor.format(degree=setting.world),
            place=place,
        )


FAULTS = (
    *_of_each_variant("loss divided by a rank's own tokens", divided_locally, "× {degree}"),
    *_of_each_variant("gradient times cp, summed twice", summed_twice, "× {degree}"),
    *_of_each_variant(
        "ranks of cp read different samples",
        other_samples,
        "tokens of no sample",
        subjects=(Subject.BATCH,),
    ),
    *_of_each_variant(
        "angles of positions from 0 on each rank",
        positions_from_0,
        r"positions 0-\d for",
        subjects=(Subject.BUFFERS,),
        place="_TK",
    ),
    Fault(
        name="dropout masks different where slices of one must be taken (cp)",
        setting=CP_DROPOUT,
        plant=masks_differ_between,
        subjects=(Subject.RANDOM,),
        axis="cp",
        factor="differs where shards of one mask are needed",
    ),
    Fault(
        name="targets shifted twice, over cp",
        setting=RING,
        plant=targets_two_ahead,
        subjects=(Subject.BATCH, Subject.LOSS),
        factor="targets",
    ),
    Fault(
        name="loss divided by a rank's own count, unequal over cp",
        setting=ZIGZAG,
        plant=divided_by_own_count,
        subjects=(Subject.LOSS, Subject.GRADIENTS),
        axis="cp",
        factor="normalised per rank of cp",
    ),
    Fault(
        name="gradient divided by cp: averaged sums",
        setting=SHARDED,
        plant=averaged,
        subjects=(Subject.GRADIENTS,),
        axis="cp",
        factor="÷ 2",
    ),
    Fault(
        name="gradients not summed over cp",
        setting=ULYSSES,
        plant=never_summed,
        subjects=(Subject.GRADIENTS,),
        axis="cp",
        factor="missing all-reduce over cp",
    ),
    Fault(
        name="gradients summed over neither cp nor data ranks",
        setting=WITH_DATA,
        plant=never_summed,
        subjects=(Subject.GRADIENTS,),
        axis="cp|dp_replicate",
        factor="missing all-reduce over (dp_replicate and cp|cp and dp_replicate)",
    ),
    Fault(
        name="ranks of cp have samples in different orders",
        setting=GATHERED,
        plant=samples_swapped,
        subjects=(Subject.BATCH,),
        axis="cp",
        factor="order",
    ),
    Fault(
        name="contiguous tokens for a zigzag ring",
        setting=ZIGZAG,
        plant=contiguous_tokens,
        subjects=(Subject.BATCH,),
        factor="tokens of no sample",
    ),
    Fault(
        name="contiguous targets for zigzag tokens",
        setting=ZIGZAG,
        plant=contiguous_targets,
        subjects=(Subject.BATCH, Subject.LOSS),
        axis="cp",
    ),
    Fault(
        name="angles of contiguous positions for zigzag tokens",
        setting=ZIGZAG,
        plant=contiguous_positions,
        subjects=(Subject.BUFFERS,),
        axis="cp",
        factor="positions 0-7 for 0-3, 12-15",
        place="_TK",
    ),
    Fault(
        name="learned positions from 0 on each rank",
        setting=GPT,
        plant=learned_from_0,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="positions 0-7",
        place="positions",
    ),
    Fault(
        name="queries and keys turned by local positions",
        setting=ZIGZAG,
        plant=turned_from_0,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="positions 0-7",
        place=r"blocks\.0\.attention\.core",
    ),
)
