"""Division of a model into pipeline stages of contiguous layers.

The first stage has the embedding, the last one the norm and the head. The slowest and fullest stage
decides, so a division is balanced by the weight of its largest stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

from ptrain.errors import Fault, SpecError

Units = tuple[tuple[str, ...], ...]  # the modules of each, as a plan has them


class Ends(NamedTuple):
    """The modules and separate parameters before a model's layers, and after them."""

    front: tuple[str, ...]
    behind: tuple[str, ...]


class Chain(NamedTuple):
    """The sequence of a model's layers that the pipeline axis divides.

    Attributes:
        layers: The names of the layers, first to last.
        ends: The modules before and after the layers.
        hidden: The number of features of the hidden states between layers.
        tied: Tensors before the layers that are used after them too, each with its name there.
        returns: The number of values in the tuple that a layer returns, hidden states first; 0 if
            it returns hidden states alone.
        is_written: True if the model writes in place into outputs of the modules before the layers,
            or of layers.
        positions: The dimensions between samples and features; None if these are the tokens.
    """

    layers: tuple[str, ...]
    ends: Ends
    hidden: int
    tied: tuple[tuple[str, str], ...] = ()
    returns: int = 0
    is_written: bool = False
    positions: tuple[int, ...] | None = None

    def sample_shape(self, sequence: int, slices: int = 1) -> tuple[int, ...]:
        """Return the shape of the hidden states of one sample, without the dimension of samples.

        Args:
            sequence: The number of tokens of a sample.
            slices: The number of tp ranks over which the positions are sharded.
        """
        positions = (sequence,) if self.positions is None else self.positions
        return (*(size // slices for size in positions[:1]), *positions[1:], self.hidden)

    def absent_names(self, stage: Stage) -> tuple[str, ...]:
        """Return the modules and parameters that a stage does not have: other layers, and ends."""
        foreign = tuple(name for name in self.layers if name not in stage.layers)
        front, behind = self.absent_ends(stage)
        return (*foreign, *front, *behind)

    def absent_ends(self, stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the modules before the layers and after them that a stage does not have."""
        is_last = stage.layers[-1] == self.layers[-1]
        return self.ends.front if stage.index else (), () if is_last else self.ends.behind


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Return True if a tensor or module is one of `modules`, or inside of one."""
    return f"{name}.".startswith(tuple([f"{module}." for module in modules]))


# The modules of the built-in families.
ENDS = Ends(front=("embed", "scale", "positions", "dropout"), behind=("norm", "head"))
FRONT = ENDS.front


class Tensor(Protocol):
    """The interface of a tensor that stages hold, like `facts.model.TensorFacts`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numel(self) -> int: ...


class Unit(Protocol):
    """The interface of one block's unit, like `facts.model.UnitFacts`."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...
    @property
    def numel(self) -> int: ...


class Layers(NamedTuple):
    """The parts of a model that stages are made of.

    Attributes:
        layers: The layers, first to last.
        front: The tensors before the layers.
        behind: The tensors after the layers.
        tied: The tensors of `front` that the last stage uses too, each with the name of its copy.
    """

    layers: tuple[Unit, ...]
    front: tuple[Tensor, ...]
    behind: tuple[Tensor, ...]
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def weights(self) -> tuple[int, ...]:
        """The number of parameters of each layer."""
        return tuple(layer.numel for layer in self.layers)

    @property
    def ends(self) -> tuple[int, int]:
        """The parameters of the first and of the last stage outside of their layers.

        Tied tensors count in both.
        """
        tied = dict(self.tied)
        copies = sum(tensor.numel for tensor in self.front if tensor.name in tied)
        behind = sum(tensor.numel for tensor in self.behind)
        return sum(tensor.numel for tensor in self.front), behind + copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The part of a model that one pipeline stage has.

    Attributes:
        index: The number of the stage.
        layers: The names of its layers.
        tensors: The names of its tensors.
        shared: The tensors that another stage has too, perhaps by another name. Their gradients are
            summed over both stages. Each is a separate unit, so that both stages shard it in the
            same way.
        numel: The number of its parameters.
        copied: The tied tensors of the last stage: the original's name, and the copy's.
    """

    index: int
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    shared: tuple[str, ...]
    numel: int
    copied: tuple[tuple[str, str], ...] = ()

    def stage_units(self, units: Units) -> Units:
        """Return the units of a model that this stage has, inner before outer.

        The names of their modules are the model's.
        """
        inner = tuple(modules for modules in units if is_within(modules[0], self.layers))
        shared = tuple((name.rpartition(".")[0],) for name in self.shared)
        return (*inner, *shared, ("",))


def layers_of(
    units: Sequence[Unit],
    *,
    front: Sequence[str] = FRONT,
    tied: Sequence[tuple[str, str]] = (),
) -> Layers:
    """Return the layers of a model from its units.

    Args:
        units: The blocks first to last, then the root.
        front: The root's modules before the blocks.
        tied: The tensors before the blocks that a tied head uses, each with its name in the head.
    """
    *layers, root = units
    assert root.name == "", "the last unit is the root"
    names = {layer.name for layer in layers}
    assert not any(name.rpartition(".")[0] in names for name in names), "units of less than a block"
    before = tuple(tensor for tensor in root.tensors if is_within(tensor.name, front))
    after = tuple(t for t in root.tensors if t not in before)
    assert {*dict(tied)} <= {tensor.name for tensor in before}, (
        f"{tied} are not all before the blocks"
    )
    return Layers(layers=tuple(layers), front=before, behind=after, tied=tuple(tied))


def divide_into_stages(model: Layers, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Divide the layers of a model into stages.

    Args:
        model: The layers, and the tensors before and after them.
        counts: The number of layers of each stage.

    Raises:
        SpecError: If the numbers do not sum to the model's layers, or one is 0.
    """
    problems = tuple(layer_count_faults(counts, len(model.layers)))
    if problems:
        raise SpecError(*problems)
    starts = accumulate(counts, initial=0)
    return tuple(
        _make_stage(model, (index, len(counts)), model.layers[start : start + count])
        for index, (start, count) in enumerate(zip(starts, counts, strict=False))
    )


def layer_count_faults(counts: Sequence[int], layers: int) -> Iterator[Fault]:
    """Yield a fault if numbers of layers per stage do not divide a model of `layers` layers."""
    listed = ", ".join(map(str, counts))
    finding = ""
    if min(counts, default=0) < 1:
        finding = f"[{listed}] has a stage without layers"
    elif sum(counts) != layers:
        finding = f"[{listed}] has {sum(counts)} layers, but the model has {layers}"
    if finding:
        remedy = f"Use numbers of 1 or more with the sum {layers}"
        if 0 < len(counts) <= layers:
            remedy += f": `pipeline.split=[{','.join(map(str, even_counts(layers, len(counts))))}]`"
        yield Fault(place="pipeline.split", finding=finding, remedy=f"{remedy}.")


def even_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Return an even number of layers for each stage.

    Remaining layers go to the middle stages, because the first has the embedding and the last the
    head.

    Args:
        layers: The number of layers.
        stages: The number of stages.

    Raises:
        SpecError: If there are more stages than layers.
    """
    _require_enough(layers, stages)
    share, more = divmod(layers, stages)
    before = (stages - more) // 2  # stages with the smaller share before the middle ones
    return tuple(share + (before <= index < before + more) for index in range(stages))


def balanced_counts(
    weights: Sequence[float], stages: int, ends: tuple[float, float] = (0, 0)
) -> tuple[int, ...]:
    """Return the number of layers of each stage, with the lightest possible heaviest stage.

    Among such divisions the one with the least sum of squares is taken. The time is O(stages ·
    layers · layers of a stage).

    Args:
        weights: The weight of each layer, in any unit, for example parameters or seconds.
        stages: The number of stages.
        ends: The weights before the first layer and after the last, in the same unit.

    Raises:
        SpecError: If there are more stages than layers.
    """
    _require_enough(len(weights), stages)
    # The ends belong to the first and the last layer, so that the search needs no special stages.
    heavy = [*weights]
    heavy[0] += ends[0]
    heavy[-1] += ends[1]
    return _balance_layers(tuple(heavy), stages)


@lru_cache(maxsize=2**6)
def _balance_layers(heavy: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Return the balanced division of layers whose first and last weights include the ends.

    The result is cached, since specs offered as alternatives have equal stages.
    """
    sums = [0.0, *accumulate(heavy)]  # of the first 0, 1, 2 … layers
    return _most_even(sums, stages, _lightest_maximum(sums, stages))


def _lightest_maximum(sums: Sequence[float], stages: int) -> float:
    """Return the weight of the heaviest stage in the best division.

    Dynamic programming over stages. With more layers before a stage, the heaviest stage before it
    gets no lighter, and the stage itself no heavier: the best division is where the two weights
    cross.

    Args:
        sums: The weights of the first 0, 1, 2 … layers.
        stages: The number of stages.
    """
    layers = len(sums) - 1
    costs = [0.0] + [float("inf")] * layers  # heaviest stage of the first n layers, so far
    for stage in range(1, stages + 1):
        following = [float("inf")] * (layers + 1)
        at = stage - 1  # the crossing, which only moves to later layers as `end` grows
        for end in range(stage, layers + 1):
            # costs[at] grows with `at` and total - sums[at] shrinks: the smaller of the two maxima
            # around the crossing is the best.
            total = sums[end]
            while at < end and costs[at] < total - sums[at]:
                at += 1
            before = total - sums[at - 1] if at > stage - 1 else float("inf")
            following[end] = min(before, costs[at] if at < end else float("inf"))
        costs = following
    return costs[layers]


def _most_even(sums: Sequence[float], stages: int, heaviest: float) -> tuple[int, ...]:
    """Return the division with the least sum of squares whose stages weigh at most `heaviest`.

    Dynamic programming over stages.

    Args:
        sums: The weights of the first 0, 1, 2 … layers.
        stages: The number of stages.
        heaviest: The weight of the heaviest stage, from `_lightest_maximum`.
    """
    layers = len(sums) - 1
    costs = [0.0] + [float("inf")] * layers
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        following, starts = [float("inf")] * (layers + 1), [0] * (layers + 1)
        first = stage - 1
        for end in range(stage, layers + 1):
            # The earliest start that fits only moves to later layers as `end` grows.
            while first < end and sums[end] - sums[first] > heaviest:
                first += 1
            for at in range(first, end):
                weight = sums[end] - sums[at]
                if (cost := costs[at] + weight * weight) < following[end]:
                    following[end], starts[end] = cost, at
        costs = following
        cuts.append(starts)
    counts: list[int] = []
    end = layers
    for starts in reversed(cuts):
        counts.append(end - starts[end])
        end = starts[end]
    return tuple(reversed(counts))


def _require_enough(layers: int, stages: int) -> None:
    """Check that each stage can have a layer.

    Raises:
        SpecError: If there are more stages than layers.
    """
    if stages > layers:
        raise SpecError(
            Fault(
                place="pipeline.stages",
                finding=f"{stages} stages need at least one layer each; the model has {layers}",
                remedy=f"Use at most {layers} stages, or a model with more layers.",
            )
        )


def _make_stage(model: Layers, position: tuple[int, int], layers: Sequence[Unit]) -> Stage:
    """Return one stage.

    Args:
        model: The layers, and the tensors before and after them.
        position: The stage's index, and the number of stages.
        layers: The layers of the stage.
    """
    index, stages = position
    is_first, is_last = index == 0, index == stages - 1
    tied = dict(model.tied) if stages > 1 else {}
    names, numel = [t.name for own in layers for t in own.tensors], sum(o.numel for o in layers)
    if is_last:
        after = [*(tensor for tensor in model.front if tensor.name in tied), *model.behind]
        names += [tied.get(tensor.name, tensor.name) for tensor in after]
        numel += sum(tensor.numel for tensor in after)
    if is_first:
        names = [*(tensor.name for tensor in model.front), *names]
        numel += sum(tensor.numel for tensor in model.front)
    shared = tied if is_first else tied.values() if is_last else ()
    return Stage(
        index=index,
        layers=tuple(layer.name for layer in layers),
        tensors=tuple(names),
        shared=tuple(shared),
        numel=numel,
        copied=tuple(tied.items()) if is_last else (),
    )
