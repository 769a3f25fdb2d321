"""What the text claims of compositions (Theorems 6 and 7, Remark 4, Proposition 1), and the lecture
of pipelines. Each claim is worked out from plans, predictions and schedules; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product

from _claims import PARTS, Claim, Said, claim
from _script import table_head, table_row

from ptrain.algebra.legality import require_runnable
from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.axes.pipeline.schedule import PipelineShape, Schedule
from ptrain.axes.pipeline.simulate import Simulation, simulate
from ptrain.axes.pipeline.stage_facts import count_in_flight
from ptrain.cost import State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.interconnect import axis_link
from ptrain.plan.composition import Condition, theorem_6, theorem_7
from ptrain.plan.lower import built_in_facts
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec

RANKS = 8
TUPLES = {"pp": "S,S,S,R", "dp_replicate": "R,R,R,R", "dp_shard": "S*,S,S,R", "tp": "S,S,S,R"}
SHAPE = {"layers": 8, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "vocab": 264}
HOLDS = "holds"

UNDEFINED = "undefined"


@cache
def products(with_tp: bool, with_pp: bool) -> tuple[tuple[Spec, Derivation], ...]:
    """Every product of 8 ranks over these axes and one or two data axes, pp and tp in every place
    of the mesh that there is."""
    return tuple((spec, derive(spec)) for spec in _products(with_tp, with_pp))


def _products(with_tp: bool, with_pp: bool) -> Iterator[Spec]:
    for degrees in product((1, 2, 4, 8), repeat=4):
        mesh = {axis: n for axis, n in zip(TUPLES, degrees, strict=True) if n > 1}
        size = 1
        for degree in mesh.values():
            size *= degree
        has_data = any(axis.startswith("dp") for axis in mesh)
        if size != RANKS or not has_data or ("tp" in mesh, "pp" in mesh) != (with_tp, with_pp):
            continue
        data = [axis for axis in mesh if axis.startswith("dp")]
        for order in permutations(mesh):
            if [axis for axis in order if axis in data] == data:
                yield _spec({axis: mesh[axis] for axis in order})


def _spec(mesh: dict[str, int]) -> Spec:
    mapping = {
        "model": SHAPE,
        "mesh": mesh,
        "placement": {axis: TUPLES[axis] for axis in mesh},
        "batch": {"accumulate": 8, "micro": 1, "sequence": 32},
        "optimizer": {"clip": 1.0},
    }
    return require_runnable(load(mapping))


Made = list[tuple[Spec, Derivation]]
Conditions = list[tuple[Condition, ...]]


def _of_theorem_6() -> tuple[Made, Conditions]:
    made = [*products(True, False), *products(True, True)]
    return made, [theorem_6(spec, derivation.plan) for spec, derivation in made]


def _of_theorem_7() -> tuple[Made, Conditions]:
    made = [*products(False, True), *products(True, True)]
    return made, [theorem_7(spec, derivation.plan) for spec, derivation in made]


def _others(found: Conditions) -> Said:
    """Of how many products a theorem's other conditions hold."""
    right = sum(all(condition.holds for condition in rest) for _, *rest in found)
    return right == len(found), f"{right} of {len(found)} products of {RANKS} ranks"


def _first(made: Made, found: Conditions) -> Said:
    """Whether products need a theorem's condition about the order of the mesh."""
    apart = [rest for first, *rest in found if first.name == "Remark 4" or not first.holds]
    obeys = sum(all(condition.holds for condition in rest) for rest in apart)
    same = sum(_is_the_same_in_any_order(spec, made) for spec, _ in made)
    text = (
        f"{len(apart)} of {len(made)} products are in another order, and {obeys} of them obey (2) "
        f"and (3); {same} of {len(made)} hold and send the same bytes in every order"
    )
    return not apart, text


def _is_the_same_in_any_order(spec: Spec, made: Made) -> bool:
    alike = [d for s, d in made if set(s.factors) == set(spec.factors)]
    costs = {(d.exact.sent_bytes(), *_held(d)) for d in alike}
    return len(costs) == 1


def _held(derivation: Derivation) -> tuple[int, ...]:
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)
    return tuple(derivation.exact.bytes_of(state) for state in states)


def _disjoint() -> Said:
    """Parameters of a pipeline's ranks together, against the model's."""
    found = []
    for tied in (False, True):
        spec = require_runnable(
            load("pp-1f1b", ["model.preset=gpt-tiny", f"model.tied={str(tied).lower()}"])
        )
        exact, whole = derive(spec).exact, built_in_facts(spec).numel
        itemsize = spec.precision.effective_layout.parameters.itemsize
        held = sum(exact.bytes_of(State.PARAMETERS, rank) for rank in range(spec.world_size))
        found.append((held // itemsize - whole, whole))
    (untied, _), (more, whole) = found
    text = f"untied {untied} parameters twice; tied {more:,} of {whole:,} ({more / whole:.1%})"
    return not more, text


def _hops() -> Said:
    """Of an 8B model on tp over two nodes: calls and hops against the layers' number."""
    spec = require_runnable(load("8b-tp", ["cluster.devices_per_node=4", "cluster.devices=8"]))
    found = axis_link(spec, derive(spec).exact.traffic, Axis.TP)
    layers, times = spec.model.layers, spec.batch.accumulate  # type: ignore[union-attr]
    assert found is not None
    text = (
        f"{layers} layers, {times} micro-batches on tp {spec.degree(Axis.TP)}: "
        f"{found.calls} collectives, {found.calls / layers / times:.2f} a layer and micro-batch, "
        f"of {found.hops / found.calls:.0f} hops each: {found.hops / layers:.0f} L·α"
    )
    return found.calls >= layers, text


def _idle_of_gpipe() -> Said:
    """The lecture's (P - 1)/m as the fraction of idle time, of 8 ranks."""
    said, right = [], True
    for microbatches in (32, 4):
        made, claimed = _waits(ScheduleName.GPIPE, microbatches)
        right = right and _are_equal(made.bubble_fraction, claimed)
        said.append(
            f"m = {microbatches}: {claimed:.1%} claimed, {made.bubble_fraction:.1%} of the step, "
            f"{made.bubble_ratio:.1%} of the ideal time"
        )
    return right, "; ".join(said)


def _size_of_1f1b() -> Said:
    """(P - 1)/m as the ratio to the ideal time."""
    said, right = [], True
    for microbatches in (32, 8):
        made, claimed = _waits(ScheduleName.ONE_F_ONE_B, microbatches)
        right = right and _are_equal(made.bubble_ratio, claimed)
        said.append(f"m = {microbatches}: {made.bubble_ratio:.1%} of the ideal time")
    return right, "; ".join(said)


def _waits(name: ScheduleName, microbatches: int) -> tuple[Simulation, float]:
    """Simulated on 8 ranks; and (P - 1)/m."""
    size = PipelineShape(ranks=8, microbatches=microbatches)
    return simulate(make_schedule(name, size)), (size.ranks - 1) / microbatches


def _are_equal(found: float, claimed: float) -> bool:
    return abs(found / claimed - 1) < 0.001


def most_held(made: Schedule) -> int:
    """Return the most micro-batches that the first rank holds at once."""
    return max(sum(counts.values()) for counts in count_in_flight(made, 0))


def _in_flight() -> Said:
    """1F1B holds as many micro-batches as stages, AFAB all of them."""
    most = {}
    for name, microbatches in product((ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B), (8, 32)):
        made = make_schedule(name, PipelineShape(ranks=8, microbatches=microbatches))
        most[name, microbatches] = most_held(made)
    text = ", ".join(f"{name} of {times}: {number}" for (name, times), number in most.items())
    return list(most.values()) == [8, 32, 8, 8], text


COMPOSITION = (
    claim("A tp group is consecutive devices", find=lambda: _first(*_of_theorem_6())),
    claim(
        "Sums of operators first, gradients across groups", find=lambda: _others(_of_theorem_6()[1])
    ),
    claim("A stage's replicas are consecutive devices", find=lambda: _first(*_of_theorem_7())),
    claim(
        "Gradients per stage, activations within a pipeline",
        find=lambda: _others(_of_theorem_7()[1]),
    ),
    claim("Stages hold disjoint parameters", find=_disjoint),
    claim("tp across slow links costs O(L·α)", find=_hops),
    claim("All forward, all backward: idle (P − 1)/m", find=_idle_of_gpipe),
    claim("1F1B idles as long", find=_size_of_1f1b),
    claim("1F1B holds as many micro-batches as stages", find=_in_flight),
)


def section() -> str:
    """Return the page's part about compositions."""
    return part("composition", COMPOSITION, ranks=RANKS)


def table(claims: Sequence[Claim]) -> Iterator[str]:
    """Yield a row for each claim with what is found and its verdict, then why."""
    yield from table_head("claim", "printed", "found", "verdict")
    for row in claims:
        assert row.find is not None
        right, found = row.find()
        verdict = UNDEFINED if right is None else HOLDS if right else row.otherwise
        yield table_row(f"**{row.title}** ({row.where})", row.printed, found, verdict)
    yield ""
    yield from (f"- *{row.title}*: {row.why}" for row in claims)


def part(name: str, claims: Sequence[Claim], **figures: float) -> str:
    """Return a part of the page: its heading and what it is about, as claims.yaml has them with
    these figures, a table, and why."""
    text = PARTS[name]
    lines = [f"## {text['heading']}", "", text["intro"].format(**figures), "", *table(claims)]
    return "\n".join([*lines, "", text["after"]] if "after" in text else lines)
