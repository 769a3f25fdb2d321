"""Digests of the lives of flat units, in many settings: level and peak after every call, all that
is sent or copied, and what resides. `python -m tests.pure.replay_digests` compares them with
tests/pure/replay_digests.json; `--write` keeps them; `--group NAME` prints what a group's digest
is of, so that two commits can be compared setting by setting.

A setting is the tuples of one or two axes, a layout, how a reduce-scatter is done, whether it
overlaps, and the number of micro-batches. A unit's gradients are played in each of them, and so is
a step of two units and a root, with each dial of gathering. Theta = M is made of the layout's
master copy, and so is illegal in a layout without one: no step is played there (what a unit's
gradients do does not depend on it)."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from ptrain.cost import Phase
from ptrain.errors import PtrainError
from ptrain.plan.lower import lower
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia
from ptrain.spec.placement import Axis, Placement, Tier
from ptrain.spec.precision import LAYOUTS, Layout
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Boundary, Complete, Mark, Timeline
from tests.pure.build import BY_HAND, make_facts, make_spec, tuple_of
from tests.pure.unit_replays import GradientsOfUnit, Life, StepOfUnits, residents

PAGE = Path(__file__).with_name("replay_digests.json")
BLOCK = ((5, 3), (2,))  # 17 elements: padded on every mesh
UNIT = make_facts(BLOCK)
UNITS = make_facts(BLOCK, BLOCK, ((1, 4), (7, 2)))  # two blocks, embedding and head
ROOT = len(UNITS.units) - 1
EMBEDDING, HEAD = UNITS.units[ROOT].tensors

Mesh = Mapping[Axis, tuple[int, Placement]]
ONE_AXIS = (
    ("R", "S*", "S*@host", "M"),
    ("R", "S", "S*", "S@host", "S@file"),
    ("R", "S", "S*", "S@host", "S@file", "R@host", "M"),
)
OUTER = (("R", "S*"), ("R", "S", "S*"), ("R", "S", "S*"))
INNER = (("R", "S*"), ("R", "S"), ("R", "S"))
MICRO_BATCHES = (1, 3)
PREFETCHES = (0, 1)


def meshes() -> Iterator[Mesh]:
    """Yield two ranks of one axis, and two times two of two, with every tuple."""
    for modes in product(*ONE_AXIS):
        yield {Axis.DP_SHARD: (2, tuple_of(",".join(modes)))}
    for outer, inner in product(product(*OUTER), product(*INNER)):
        yield {
            Axis.DP_REPLICATE: (2, tuple_of(",".join(outer))),
            Axis.DP_SHARD: (2, tuple_of(",".join(inner))),
        }


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that differ in their mesh alone. Without `gather` a unit's gradients are played,
    with it a step of units."""

    layout: Layout
    via: ReduceScatterVia
    overlaps: bool
    micro_batches: int
    gather: GatherAfterUpdate | None = None
    prefetch: int = 0

    @property
    def name(self) -> str:
        words = [
            "gradients" if self.gather is None else "step",
            self.layout.name,
            str(self.via),
            "overlaps" if self.overlaps else "waits",
            f"{self.micro_batches} micro-batches",
        ]
        if self.gather is not None:
            words += [f"gathered {self.gather}", f"prefetch {self.prefetch}"]
        return ", ".join(words)


def groups() -> list[Group]:
    """Return the groups of gradients, and then those of steps."""
    bases = [
        Group(layout=layout, via=via, overlaps=overlaps, micro_batches=number)
        for layout, via, overlaps, number in product(
            LAYOUTS.values(), ReduceScatterVia, (False, True), MICRO_BATCHES
        )
    ]
    steps = product(bases, GatherAfterUpdate, PREFETCHES)
    return bases + [replace(base, gather=gather, prefetch=ahead) for base, gather, ahead in steps]


@cache
def settings(
    layout: Layout, via: ReduceScatterVia, micro_batches: int
) -> tuple[tuple[str, Spec, Plan], ...]:
    """Return the specs of flat units that there are with these, each with its plan. Kept, since
    many groups are of them."""
    there = []
    for mesh in meshes():
        spec = make_spec(
            mesh, clip=None, model=BY_HAND, layout=layout, reduce_scatter=via,
            accumulate=micro_batches,
        )  # fmt: skip
        try:
            plan = lower(spec, UNITS)
        except PtrainError:
            continue
        if isinstance(plan.wrap, FlatUnits) and not (plan.wrap.consumed and micro_batches > 1):
            tuples = " ⊗ ".join(f"{axis} {placement}" for axis, (_, placement) in mesh.items())
            there.append((tuples, spec, plan))
    return tuple(there)


def accounts(group: Group) -> Iterator[str]:
    """Yield what happens in each setting of a group: a line of its mesh, the figures after every
    call, the kinds of traffic and the residents."""
    for tuples, spec, plan in settings(group.layout, group.via, group.micro_batches):
        assert isinstance(plan.wrap, FlatUnits)
        wrap = replace(plan.wrap, overlaps=group.overlaps)
        if group.gather is None:
            notes = gradients(spec, plan.replace_steps(wrap))
        elif not _is_legal(group, wrap):
            continue
        else:
            dials = replace(wrap, gather_after_update=group.gather, prefetch=group.prefetch)
            notes = step(spec, plan.replace_steps(dials))
        yield f"{tuples}: {' '.join(notes)}"


def _is_legal(group: Group, wrap: FlatUnits) -> bool:
    """Only parameters on the device are left to the next forward pass, and only a layout's master
    copy can be what they are made of."""
    is_late = group.gather is GatherAfterUpdate.NEXT_FORWARD
    if is_late and wrap.parameters_tier is not Tier.DEVICE:
        return False
    return group.layout.master is not None or not wrap.materialized


def gradients(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield level and peak after every call of a unit's G over a step, and then its traffic."""
    assert isinstance(plan.wrap, FlatUnits)
    life = GradientsOfUnit(spec, plan, UNIT)
    num = plan.accumulate.micro_batches
    for index in range(num):
        is_last = index == num - 1
        is_due = is_last or plan.wrap.sync.gradients is GradientSync.EVERY
        life.begin(Phase.BACKWARD)
        life.open()
        yield _level(life)
        if is_due:
            life.complete()
        life.finish(is_last=is_last, is_due=is_due)
        yield _level(life)
        life.complete()
        yield _level(life)
    life.begin(Phase.UPDATE)
    for call in (life.for_update, life.take_working, life.forget_working, life.clear):
        call()
        yield _level(life)
    yield from _traffic(life)


def step(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield level and peak after every event of a step of units, what is gathered and what has a
    norm, and then traffic and residents."""
    life = StepOfUnits(spec, plan, UNITS, TIMELINE)
    wrap, num = life.wrap, plan.accumulate.micro_batches
    for index in range(num):
        wrap.begin(is_first=index == 0, is_last=index == num - 1)
        life.begin(Phase.FORWARD)
        for item in TIMELINE.forward:
            yield from _replay_gradients(life, item, plan)
        yield f"gathered {wrap.gathered_bytes()}"
        life.begin(Phase.BACKWARD)
        for item in TIMELINE.backward:
            yield from _replay_gradients(life, item, plan)
    life.begin(Phase.UPDATE)
    wrap.reduce()
    yield _level(life)
    yield f"norms {wrap.norm_groups(0)}"
    wrap.update(0)
    yield _level(life)
    wrap.finish_update()
    yield _level(life)
    yield from _traffic(life)
    for row in residents(spec, plan, UNITS):
        yield f"{row.state} {row.device_bytes} {row.host_bytes} {row.file_bytes}"


def _replay_gradients(life: StepOfUnits, item: Boundary | Complete, plan: Plan) -> Iterator[str]:
    wrap = life.wrap
    match item:
        case Boundary(mark, unit):
            {
                Mark.ENTER: wrap.enter,
                Mark.LEAVE: wrap.leave,
                Mark.PRE_BACKWARD: wrap.before_backward,
                Mark.POST_BACKWARD: wrap.after_backward,
            }[mark](unit)
        case Complete(parameter, numel, cloned):
            size = numel * plan.update.layout.parameters.itemsize
            life.allocate(size)
            yield _level(life)
            wrap.complete(Complete(parameter, size, cloned))
            if cloned:
                life.allocate(-size)
    yield _level(life)


def _timeline() -> Timeline:
    """The root around two blocks; of each gradient the number of elements stands for its bytes. The
    head's comes first and the embedding's last; the first block's second one is cloned."""
    blocks = range(ROOT)
    forward = [Boundary(Mark.ENTER, ROOT)]
    for unit in blocks:
        forward += [Boundary(Mark.ENTER, unit), Boundary(Mark.LEAVE, unit)]
    backward: list[Boundary | Complete] = [Boundary(Mark.PRE_BACKWARD, ROOT)]
    backward.append(Complete(HEAD.name, HEAD.numel))
    for unit in reversed(blocks):
        backward.append(Boundary(Mark.PRE_BACKWARD, unit))
        for index, tensor in reversed([*enumerate(UNITS.units[unit].tensors)]):
            backward.append(Complete(tensor.name, tensor.numel, cloned=(unit, index) == (0, 1)))
        backward.append(Boundary(Mark.POST_BACKWARD, unit))
    backward += [Complete(EMBEDDING.name, EMBEDDING.numel), Boundary(Mark.POST_BACKWARD, ROOT)]
    return Timeline(forward=(*forward, Boundary(Mark.LEAVE, ROOT)), backward=tuple(backward))


def _level(life: Life) -> str:
    level, peak = life.level_and_peak
    return f"{level}/{peak}"


def _traffic(life: Life) -> Iterator[str]:
    for row in life.traffic():
        key = row.key
        words = (key.phase, key.state, key.collective, "+".join(key.axes), key.via or "")
        yield f"{' '.join(words)} {row.calls} {row.payload_bytes} {row.sent_bytes}"


TIMELINE = _timeline()


def digest(group: Group) -> str:
    """Return the SHA-256 of a group's accounts."""
    total = hashlib.sha256()
    for account in accounts(group):
        total.update(f"{account}\n".encode())
    return total.hexdigest()


def committed_digests() -> dict[str, str]:
    """Return the committed digests, by the names of groups."""
    digests: dict[str, str] = json.loads(PAGE.read_text(encoding="utf-8"))
    return digests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the digests of now")
    parser.add_argument("--group", metavar="NAME", help="print what a group's digest is of")
    args = parser.parse_args()
    by_name = {group.name: group for group in groups()}
    if args.group:
        print("\n".join(accounts(by_name[args.group])))
        return 0
    digests = {name: digest(group) for name, group in by_name.items()}
    before = committed_digests() if PAGE.exists() else {}
    changed = [name for name in {**before, **digests} if before.get(name) != digests.get(name)]
    print("\n".join(changed or [f"{len(digests)} groups of settings are what they were"]))
    if args.write:
        PAGE.write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
