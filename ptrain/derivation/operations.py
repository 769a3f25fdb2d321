"""Floating-point operations of a step of a built-in model: the matrix products of its blocks, read
off the tables of blocks, and of its head. What a recomputation runs again is counted by itself:
the matrix product whose result nothing in backward needs is not among it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ptrain.algebra.layout import positions
from ptrain.axes.tensor.costs import Cut
from ptrain.costs import Operations, by_rank
from ptrain.derivation import blocks
from ptrain.facts.stages import Stage
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

_PASSES = ("forward", "backward", "again")


def operations(spec: Spec, plan: Plan, stages: Sequence[Stage]) -> Sequence[Operations]:
    """Rank by rank; none for a model that is not built in, or whose blocks have no table."""
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return ()
    kept = spec.activations.of(shape.layers)
    if not all(blocks.is_known(shape, each) for each in kept):
        return ()
    return by_rank(
        zip(positions(spec, (Axis.PP,)), positions(spec, (Axis.TP,)), strict=True),
        lambda places: [Operations(rank=0, **_of_rank(spec, plan, stages, *places))],
    )


def _of_rank(
    spec: Spec, plan: Plan, stages: Sequence[Stage], place: int, index: int
) -> dict[str, int]:
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    own = plan.pipeline.stages_of(place) if plan.pipeline else ()
    numbers = [
        int(layer.rpartition(".")[2]) for stage in own for layer in stages[stage].layers
    ] or list(range(shape.layers))
    setting, kept = setting_of(spec, plan, index), spec.activations.of(shape.layers)
    found = Counter[str]()
    for each, times in Counter(kept[number] for number in numbers).items():
        for name, count in blocks.operations(setting, each).items():
            found[name] += times * count
    if plan.pipeline is None or plan.pipeline.stages - 1 in own:
        found.update(dict(_of_head(spec, plan, setting)))
    return {name: plan.accumulate.micro_batches * found[name] for name in _PASSES}


def _of_head(spec: Spec, plan: Plan, setting: blocks.Setting) -> Iterator[tuple[str, int]]:
    """Logits of every token, and the gradients of both factors. A loss by chunks computes its
    logits twice, and so does torch's fused one where it gives the loss of each token."""
    shape, tokens = setting.shape, setting.batch * spec.batch.sequence
    vocab = setting.cut.slice_of(shape.vocab) if setting.cut else shape.vocab
    product = 2 * tokens * shape.hidden * vocab
    yield "forward", product
    yield "backward", 2 * product
    if plan.loss is not None:
        yield "again", product


def setting_of(spec: Spec, plan: Plan, index: int) -> blocks.Setting:
    """Of a built-in model's blocks, on the ranks at this place along tp."""
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    cut = None
    if plan.tensor is not None:
        cut = Cut(step=plan.tensor, degree=spec.degree(plan.tensor.axis), index=index)
    return blocks.Setting(
        shape=shape,
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        compute=spec.precision.effective.parameters,
        cut=cut,
    )
