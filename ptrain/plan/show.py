"""A plan as text: mesh and groups, then the steps in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from ptrain.algebra.layout import groups
from ptrain.plan.step import (
    Accumulate,
    Clip,
    CreateMesh,
    FlatUnits,
    FullyShard,
    LocalGradients,
    Plan,
    Replicate,
    Step,
    Units,
    Update,
)
from ptrain.spec.axis import Axis
from ptrain.spec.batch import GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.precision import Layout
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes

_FEW_GROUPS = 8
_FEW_RANKS = 8


def show(spec: Spec, plan: Plan) -> str:
    """The whole plan, ready to print."""
    lines = [f"plan of {plan.name}: {_count(spec.world_size, 'rank')}", ""]
    lines += [f"  {number}. {_step(step)}" for number, step in enumerate(plan.steps, start=1)]
    lines += ["", *_groups(spec, plan), *_policy(plan)]
    lines.append(f"units    {_units(plan.units)}")
    return "\n".join(lines)


def _step(step: Step) -> str:
    match step:
        case CreateMesh():
            return _mesh(step)
        case LocalGradients():
            return "leave the model as it is: one device, nothing to reduce"
        case Replicate():
            return (
                f"replicate over {_names(step.axes)}: DistributedDataParallel, buckets of "
                f"{format_bytes(step.bucket_bytes)} summed after the last micro-batch"
            )
        case FullyShard():
            return _fully_shard(step)
        case FlatUnits():
            return _flat(step)
        case Accumulate():
            return f"accumulate {_count(step.micro_batches, 'micro-batch', 'micro-batches')}"
        case Clip():
            return _clip(step)
        case Update():
            return f"update with {step.optimizer}, {_layout(step.layout)}"
        case _:
            assert_never(step)


def _mesh(step: CreateMesh) -> str:
    if not step.axes:
        return "no mesh"
    pairs = zip(step.axes, step.degrees, strict=True)
    return "create a mesh " + " × ".join(f"{axis} {degree}" for axis, degree in pairs)


def _fully_shard(step: FullyShard) -> str:
    text = f"fully_shard each unit over {_names(step.shard_axes)}: Θ S*, Ω S, G S"
    if step.replicate_axes:
        text += f"; replicate over {_names(step.replicate_axes)}"
    return text + _via(step.reduce_scatter)


def _flat(step: FlatUnits) -> str:
    states = (
        ("Θ", step.parameters, "gathered for use"),
        ("Ω", step.optimizer, ""),
        ("G", step.gradients, ""),
    )
    parts = [
        f"{letter} {'whole' if not axes else 'cut over ' + _names(axes)}"
        + (f" and {note}" if axes and note else "")
        for letter, axes, note in states
    ]
    return f"keep each unit in a flat buffer over {_names(step.axes)}: {', '.join(parts)}" + _via(
        step.reduce_scatter
    )


def _via(via: ReduceScatterVia) -> str:
    return "" if via is ReduceScatterVia.NATIVE else "; reduce-scatter as all-to-all and a sum"


def _clip(step: Clip) -> str:
    over = f", a scalar all-reduce over {' and '.join(step.axes)}" if step.axes else ""
    return f"clip the gradient norm to {step.max_norm:g}{over}"


def _layout(layout: Layout) -> str:
    master = f", master {layout.master}" if layout.master else ""
    return (
        f"layout {layout.name} (Θ {layout.parameters}, G {layout.gradients}{master}, "
        f"moments {layout.moments})"
    )


def _groups(spec: Spec, plan: Plan) -> Iterator[str]:
    for axes in _axes_of_groups(plan):
        members = list(groups(spec, axes))
        shown = " ".join(_ranks(group) for group in members[:_FEW_GROUPS])
        rest = f" … {len(members)} groups" if len(members) > _FEW_GROUPS else ""
        yield f"groups   {_names(axes)}: {shown}{rest}"


def _axes_of_groups(plan: Plan) -> Iterator[tuple[Axis, ...]]:
    """Each axis, and all of them together where there are several."""
    for axis in plan.mesh.axes:
        yield (axis,)
    if len(plan.mesh.axes) > 1:
        yield plan.mesh.axes


def _ranks(group: Sequence[int]) -> str:
    if len(group) <= _FEW_RANKS:
        return "[" + " ".join(map(str, group)) + "]"
    return f"[{group[0]} {group[1]} … {group[-1]}]"


def _policy(plan: Plan) -> Iterator[str]:
    match plan.wrap:
        case LocalGradients():
            return
        case Replicate():
            yield "sync     gradients once, after the last micro-batch"
        case FullyShard() | FlatUnits():
            yield f"sync     {_sync(plan.wrap.sync, gathers=_gathers(plan))}"
        case _:
            assert_never(plan.wrap)


def _gathers(plan: Plan) -> bool:
    return isinstance(plan.wrap, FullyShard) or bool(
        isinstance(plan.wrap, FlatUnits) and plan.wrap.parameters
    )


def _sync(sync: SyncPolicy, *, gathers: bool) -> str:
    when = "after every micro-batch"
    if sync.gradients is GradientSync.LAST:
        when = "once, after the last micro-batch"
    if not gathers:
        return f"gradients {when}"
    forward = "freed after forward" if sync.reshard_after_forward else "kept after forward"
    backward = "freed after backward" if sync.reshard_after_backward else "kept until the last"
    return f"gradients {when}; gathered parameters {forward}, {backward}"


def _units(units: Units) -> str:
    """`blocks.0 … blocks.79, the root`."""
    names = ["+".join(modules) for modules in units]
    blocks = [name for name in names if name]
    shown = blocks if len(blocks) <= 3 else [blocks[0], "…", blocks[-1]]
    text = ", ".join([*shown, "the root"] if "" in names else shown).replace(", …, ", " … ")
    return f"{len(names)}: {text}"


def _names(axes: Sequence[Axis]) -> str:
    return " × ".join(axes)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
