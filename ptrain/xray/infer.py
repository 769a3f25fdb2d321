"""Inference of the placement from the observations of all ranks.

The mesh axes are found from the process groups: a family is a set of disjoint groups of one form
that covers all ranks, and the axes are the smallest families that a mesh names or that move
training state. A tensor is replicated over an axis if all ranks of a group hold equal bytes, and
sharded if its layout declares it, its shapes differ, or it exists on some of the ranks only. The
kind of an axis follows from the collectives over it. Where evidence is missing or contradicts
itself, the answer is `unknown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import combinations

from ptrain.cost import Collective, Phase, State
from ptrain.spec.placement import in_any_block
from ptrain.units import group_by_key, sum_by_key
from ptrain.xray.observation import CallFact, Observation, TensorFact

UNKNOWN, NONE = "unknown", "none"
Ranks = tuple[int, ...]
REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_PASSES = (Phase.FORWARD, Phase.BACKWARD)
_PAIRS = (Collective.SEND, Collective.RECV)
_CONTEXT_NAMES = ("cp", "sp", "context", "sequence", "ring", "ulysses")


@dataclass(slots=True, kw_only=True)
class MeshAxis:
    """A mesh axis and the placement on it.

    Attributes:
        name: The name of the mesh dimension, "" if no mesh names it.
        ranks: The groups of ranks along the axis.
        size: Number of ranks of a group.
        kind: `data`, `tensor`, `context`, `pipeline`, `expert` or `unknown`.
        parameters: The mode: `R`, `S`, `S*`, `M`, `O` or `unknown`. So are the other states.
        replicated_bytes: Bytes per rank of equal tensors on all ranks of a group, by state.
        collectives: Number of calls per rank and step over exactly these groups.
    """

    name: str = ""
    ranks: tuple[Ranks, ...] = ()
    size: int = 1
    kind: str = UNKNOWN
    parameters: str = UNKNOWN
    optimizer: str = UNKNOWN
    gradients: str = UNKNOWN
    activations: str = UNKNOWN
    replicated_bytes: dict[str, int] = field(default_factory=dict)
    collectives: int = 0

    @property
    def label(self) -> str:
        """The name, `world` for a single group, or the ranks of the first group."""
        single = "world" if len(self.ranks) == 1 else ""
        return self.name or single or "ranks " + ",".join(map(str, self.ranks[0]))

    @property
    def modes(self) -> tuple[str, str, str, str]:
        """The modes of parameters, optimizer state, gradients and activations."""
        return self.parameters, self.optimizer, self.gradients, self.activations

    def __getitem__(self, state: State) -> str:
        mode: str = getattr(self, state.value)
        return mode


@dataclass(slots=True, kw_only=True)
class StateComparison:
    """The bytes of a state over one axis, by the result of comparing ranks.

    Attributes:
        sharded_bytes: Bytes of tensors that a layout shards, or whose shapes differ.
        absent: Bytes of tensors that only some ranks of a group hold.
        differing: Bytes of tensors of equal name and shape whose values differ.
        flat: Bytes of the differing tensors that only an optimizer has (flat partitions, masters).
        equal: Bytes of tensors that are equal on all ranks.
        pending: Bytes of tensors with a pending reduction.
    """

    sharded_bytes: int = 0
    absent: int = 0
    differing: int = 0
    flat: int = 0
    equal: int = 0
    pending: int = 0

    @property
    def is_empty(self) -> bool:
        """True if no tensor could be compared."""
        return not any(astuple(self))


def find_axes(observations: Sequence[Observation]) -> list[MeshAxis]:
    """Return the mesh axes, outermost first; empty for a single rank or an irregular mesh.

    Args:
        observations: The observations of all ranks.
    """
    world = tuple(range(observations[0].world_size))
    if len(world) == 1:
        return []
    moving = {
        call.ranks
        for seen in observations
        for call in seen.calls
        if call.state in (State.PARAMETERS, State.GRADIENTS, State.ACTIVATIONS)
    }
    names: dict[Ranks, str] = {world: ""}
    for group in (group for seen in observations for group in seen.groups):
        names[group.ranks] = names.get(group.ranks) or group.axis
    # The form of a group is the distances of its ranks, which are equal along an axis of a mesh.
    by_form = group_by_key(
        ((names[ranks], tuple(rank - ranks[0] for rank in ranks)), ranks) for ranks in names
    )
    families = {
        tuple(sorted(groups)): name
        for (name, _), groups in by_form.items()
        if sorted(rank for ranks in groups for rank in ranks) == list(world)
        and (name or groups == [world] or moving.intersection(groups))
    }
    smallest = [
        groups
        for groups in families
        if not any(_is_within(other, groups) for other in families if other != groups)
    ]
    crossing = all(
        len({*one} & {*other}) <= 1
        for left, right in combinations(smallest, 2)
        for one in left
        for other in right
    )
    if not crossing:
        return []
    axes = [
        MeshAxis(name=families[groups], ranks=groups, size=len(groups[0])) for groups in smallest
    ]
    if rest := _remaining_axis(axes, world):
        axes.append(rest)
    return sorted(axes, key=lambda axis: axis.ranks[0][0] - axis.ranks[0][1])


def _is_within(inner: Sequence[Ranks], outer: Sequence[Ranks]) -> bool:
    """Return True if every group of a family is inside a larger group of another family."""
    return all(any({*small} < {*large} for large in outer) for small in inner)


def _remaining_axis(axes: Sequence[MeshAxis], world: Ranks) -> MeshAxis | None:
    """Return the axis that no group of its own connects: ranks of equal place on all others."""
    places = {
        rank: tuple(ranks.index(rank) for axis in axes for ranks in axis.ranks if rank in ranks)
        for rank in world
    }
    groups = group_by_key((place, rank) for rank, place in places.items())
    ranks = tuple(sorted(tuple(group) for group in groups.values()))
    if len(ranks[0]) == 1 or len({*map(len, ranks)}) != 1:
        return None
    return MeshAxis(ranks=ranks, size=len(ranks[0]))


class Inference:
    """The inference of one job from the observations of its ranks.

    Args:
        observations: The observations, in any order.
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = sorted(observations, key=lambda seen: seen.rank)
        self.by_rank = {seen.rank: seen for seen in self.observations}
        self.recomputed = find_recomputed(self.observations)
        self.axes = find_axes(self.observations)
        for axis in self.axes:
            self._infer_axis(axis)

    def calls_over(self, axis: MeshAxis, *, exact: bool = False) -> list[CallFact]:
        """Return the calls of all ranks over an axis.

        Args:
            axis: The axis.
            exact: Leave out calls over larger groups, such as the world.
        """
        return [
            call
            for seen in self.observations
            for call in seen.calls
            if (group := self._group_of(axis, seen.rank))
            and ({*group} == {*call.ranks} if exact else {*group} <= {*call.ranks})
        ]

    def _group_of(self, axis: MeshAxis, rank: int) -> Ranks:
        return next((ranks for ranks in axis.ranks if rank in ranks), ())

    def compare_ranks(self, axis: MeshAxis, state: State) -> StateComparison | None:
        """Return the comparison of a state over an axis, None if a rank was not observed."""
        result = StateComparison()
        for group in axis.ranks:
            if not {*group} <= self.by_rank.keys():
                return None
            tables = [
                {(t.name, t.key): t for t in self.by_rank[rank].tensors if t.state is state}
                for rank in group
            ]
            for identity in dict.fromkeys(key for table in tables for key in table):
                _compare_tensor(result, [table.get(identity) for table in tables], group)
        return result

    def has_equal_inputs(self, axis: MeshAxis) -> bool | None:
        """Return True if the ranks of each group receive equal inputs; None if unknown.

        Ranks that share inputs only partly, such as a mask, have different inputs.
        """
        answers = set()
        for group in axis.ranks:
            seen = [self.by_rank[rank].inputs for rank in group if rank in self.by_rank]
            if len(seen) < len(group) or not all(seen):
                return None
            answers.add(len(set(seen)) == 1)
        return answers.pop() if len(answers) == 1 else None

    def _infer_axis(self, axis: MeshAxis) -> None:
        """Set kind and modes of an axis."""
        axis.collectives = sum(call.calls for call in self.calls_over(axis, exact=True))
        axis.collectives //= max(len(self.observations), 1)
        states = {
            state: self.compare_ranks(axis, state)
            for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
        }
        parameters = states[State.PARAMETERS]
        if parameters is None or parameters.is_empty:
            return
        axis.replicated_bytes = {
            str(state): held.equal // sum(map(len, axis.ranks))
            for state, held in states.items()
            if held and held.equal
        }
        axis.kind = self._find_kind(axis, parameters)
        axis.parameters = self._parameter_mode(axis, parameters)
        axis.optimizer = self._optimizer_mode(axis, states[State.OPTIMIZER])
        axis.gradients = self._gradient_mode(axis, states[State.GRADIENTS])
        axis.activations = self._activation_mode(axis)
        if self._is_offloaded():
            axis.parameters += "@host" if axis.parameters in ("S*", "M", "R") else ""
            axis.optimizer, axis.gradients = (
                "O" if mode == "S" else mode for mode in (axis.optimizer, axis.gradients)
            )

    def _is_offloaded(self) -> bool:
        return any(unit.is_offloaded for seen in self.observations for unit in seen.wrappers)

    def _find_kind(self, axis: MeshAxis, parameters: StateComparison) -> str:
        """Return the kind of an axis from the collectives over it."""
        calls = self.calls_over(axis)
        exact = self.calls_over(axis, exact=True)
        # Sends run over any group that contains both ranks.
        pairs = any(c.collective in _PAIRS and c.state is State.ACTIVATIONS for c in calls)
        exchanged = {
            call.collective
            for call in exact
            if call.state is State.ACTIVATIONS and call.phase in _PASSES
        }
        is_reduced = any(c.state is State.GRADIENTS and c.collective in REDUCTIONS for c in calls)
        is_gathered = any(c.state is State.PARAMETERS and c.phase in _PASSES for c in exact)
        is_split = parameters.sharded_bytes or parameters.differing or parameters.absent
        if pairs and is_split and not parameters.equal and not is_gathered:
            # Replicas that diverge in a ring of sends are no stages: all their names are equal.
            senders = {
                seen.rank
                for seen in self.observations
                if any(c.phase is Phase.FORWARD and c.collective is _PAIRS[0] for c in seen.calls)
            }
            is_ring = len(senders) == len(self.observations)
            has_stages = parameters.absent or parameters.sharded_bytes or not is_ring
            return "pipeline" if has_stages else UNKNOWN
        if Collective.ALL_TO_ALL in exchanged and is_split and parameters.equal and not is_gathered:
            return "expert"
        if exchanged and is_split and not is_gathered:
            return "tensor"
        if is_reduced or is_gathered:
            passes_tokens = exchanged & {Collective.ALL_TO_ALL, *_PAIRS}
            if passes_tokens or (exchanged and axis.name.lower() in _CONTEXT_NAMES):
                return "context"
            # A gather of activations may be synchronized norms, a loss over all samples, or keys
            # and values: only the last one makes a context axis.
            return UNKNOWN if exchanged else "data"
        return UNKNOWN

    def _parameter_mode(self, axis: MeshAxis, held: StateComparison) -> str:
        """Return the mode of the parameters on an axis."""
        if not (held.sharded_bytes or held.absent or held.differing):
            return "R"
        if axis.kind in ("pipeline", "tensor", "expert"):
            return "S"
        gathers = [
            call
            for call in self.calls_over(axis, exact=True)
            if call.state is State.PARAMETERS and call.phase in _PASSES
        ]
        if not gathers:
            return "S" if held.sharded_bytes and not held.differing else UNKNOWN
        stored = self.dtype_of(State.PARAMETERS)
        return "S*" if {call.dtype for call in gathers} == {stored} else "M"

    def _optimizer_mode(self, axis: MeshAxis, held: StateComparison | None) -> str:
        """Return the mode of the optimizer state on an axis."""
        is_sharded = axis.parameters not in ("R", UNKNOWN)
        if held is None or axis.parameters == UNKNOWN:
            return UNKNOWN
        if held.is_empty:  # an optimizer without state updates what the rank stores
            return "S" if is_sharded else "R"
        if held.sharded_bytes or held.absent or held.flat or (held.differing and is_sharded):
            return "S"
        return UNKNOWN if held.differing else "R"

    def _gradient_mode(self, axis: MeshAxis, held: StateComparison | None) -> str:
        """Return the mode of the gradients that the optimizer receives."""
        if held is None or held.pending or axis.parameters == UNKNOWN:
            return UNKNOWN
        is_sharded = axis.parameters != "R"
        if not (is_sharded or held.sharded_bytes or held.absent) and held.flat:
            # The optimizer receives partitions, but the rank may hold full gradients as well.
            return UNKNOWN if self._holds_full_gradients() else "S"
        if held.sharded_bytes or held.absent or held.flat or (held.differing and is_sharded):
            return "S"
        if held.is_empty:  # zeros, for example: only the reduction is evidence
            calls = [c for c in self.calls_over(axis) if c.state is State.GRADIENTS]
            is_full = {call.collective for call in calls} == {Collective.ALL_REDUCE}
            return "R" if is_full and not is_sharded else UNKNOWN
        return UNKNOWN if held.differing else "R"

    def _holds_full_gradients(self) -> bool:
        """Return True if a rank has room for full gradients in its memory of gradients."""
        for seen in self.observations:
            trained = sum(
                tensor.nbytes
                for tensor in seen.tensors
                if tensor.state is State.PARAMETERS and tensor.is_trained and not tensor.key
            )
            held = sum(row.device_bytes for row in seen.memory if row.state is State.GRADIENTS)
            if held >= trained:
                return True
        return False

    def _activation_mode(self, axis: MeshAxis) -> str:
        """Return the mode of the activations on an axis."""
        exact = {
            call.collective
            for call in self.calls_over(axis, exact=True)
            if call.state is State.ACTIVATIONS and call.phase is Phase.FORWARD
        }
        match axis.kind:
            case "context" | "expert":
                return "S"
            case "tensor" if Collective.REDUCE_SCATTER in exact:
                return "S"
            case "data" | "tensor" | "pipeline" if self.recomputed is not None:
                return "M" if self.recomputed else "R"
            case _:
                return UNKNOWN

    def dtype_of(self, state: State) -> str:
        """Return the dtype with the most bytes of a state, `none` if no rank holds any."""
        held = (tensor for seen in self.observations for tensor in seen.tensors)
        return _largest_dtype((t.dtype, t.nbytes) for t in held if t.state is state)

    def moved_dtype(self, state: State) -> str:
        """Return the dtype in which a state is communicated, `none` without such calls."""
        calls = (call for seen in self.observations for call in seen.calls)
        return _largest_dtype((c.dtype, c.payload_bytes) for c in calls if c.state is state)

    @property
    def accumulation(self) -> int | None:
        """The number of micro-batches per step; None if forward and backward passes differ."""
        counts = {(seen.forwards, seen.backwards) for seen in self.observations}
        forwards, backwards = counts.pop() if len(counts) == 1 else (None, None)
        return backwards if forwards == backwards else None


def _largest_dtype(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the real dtype with the most bytes, `none` without one."""
    total = sum_by_key((dtype, size) for dtype, size in sizes if "float" in dtype)
    return max(total, key=total.__getitem__, default=NONE)


def _compare_tensor(
    result: StateComparison, facts: Sequence[TensorFact | None], group: Ranks
) -> None:
    """Add the comparison of one tensor between the ranks of a group."""
    held = [fact for fact in facts if fact is not None]
    size = sum(fact.nbytes for fact in held)
    letters = {_placement_letter(fact, group) for fact in held}
    if "P" in letters:
        result.pending += size
    elif "S" in letters or len({fact.shape for fact in held}) > 1:
        result.sharded_bytes += size
    elif not all(fact.digest for fact in held) and "R" not in letters:
        return  # without elements, or with equal ones: no evidence
    elif len(held) < len(facts):
        result.absent += size
    elif len({fact.digest for fact in held}) == 1:
        result.equal += size
    else:
        result.differing += size
        result.flat += size if held[0].name.startswith("optimizer.") else 0


def _placement_letter(fact: TensorFact, group: Ranks) -> str:
    """Return `S`, `R` or `P` if the tensor's layout covers the group, else ""."""
    if {*group} <= {*fact.flat}:
        return "S"
    for letter, ranks in zip(fact.placements, fact.mesh, strict=True):
        if {*group} <= {*ranks}:
            return letter
    return ""


def find_recomputed(observations: Sequence[Observation]) -> list[str] | None:
    """Return the patterns of the recomputed modules, None if no module was watched.

    If all watched children of a module are recomputed, the module is named instead.
    """
    paths = {fact.path for seen in observations for fact in seen.modules}
    if not paths:
        return None
    again = {fact.path for seen in observations for fact in seen.modules if fact.recomputations}
    # from the innermost to the outermost
    for path in sorted(paths, key=lambda path: path.count("."), reverse=True):
        children = _direct_children(path, paths)
        if path not in again and children and all(child in again for child in children):
            again.add(path)
    outermost = [path for path in again if not any(_is_inside(path, other) for other in again)]
    return sorted(set(map(in_any_block, outermost)))


def _direct_children(path: str, paths: Collection[str]) -> list[str]:
    inside = [other for other in paths if _is_inside(other, path)]
    return [one for one in inside if not any(_is_inside(one, other) for other in inside)]


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def units_of(observations: Sequence[Observation]) -> Iterator[tuple[str, str, int]]:
    """Yield kind, path pattern and number of the wrap units."""
    units = Counter(
        (unit.kind, in_any_block(unit.path) or "root")
        for seen in observations[:1]
        for unit in seen.wrappers
    )
    yield from ((kind, path, number) for (kind, path), number in units.items())
