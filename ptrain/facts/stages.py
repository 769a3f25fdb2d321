"""Where a model is cut into stages: contiguous layers, the embedding in front of the first ones and
norm and head behind the last ones.

A rank is as slow as its stages and as full, so a cut is balanced by what its largest stage weighs.
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
    """A model's modules in front of its layers and behind them, and parameters that belong to none
    of them."""

    front: tuple[str, ...]
    behind: tuple[str, ...]


class Chain(NamedTuple):
    """A model as stages are cut from it: its layers' names, first to last, what surrounds them, and
    `hidden`, the features of what goes from layer to layer. `tied`: tensors in front that are used
    behind too, each with its name there. A layer gives hidden states alone, or `returns` things in
    a tuple, hidden states first. `is_written`: the model writes into what its modules in front
    give, or its layers. `positions`: the dimensions between samples and features, where these
    are not the tokens."""

    layers: tuple[str, ...]
    ends: Ends
    hidden: int
    tied: tuple[tuple[str, str], ...] = ()
    returns: int = 0
    is_written: bool = False
    positions: tuple[int, ...] | None = None

    def sample_shape(self, sequence: int, slices: int = 1) -> tuple[int, ...]:
        """Return the shape of the hidden states of a sample of so many tokens, of whose positions a
        rank of tp has one of `slices`."""
        positions = (sequence,) if self.positions is None else self.positions
        return (*(size // slices for size in positions[:1]), *positions[1:], self.hidden)

    def lacking(self, stage: Stage) -> tuple[str, ...]:
        """Modules and parameters that a stage does not have: other stages' layers, and ends."""
        foreign = tuple(name for name in self.layers if name not in stage.layers)
        front, behind = self.absent_ends(stage)
        return (*foreign, *front, *behind)

    def absent_ends(self, stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a stage does not have of what is in front of the layers, and of what is behind."""
        is_last = stage.layers[-1] == self.layers[-1]
        return self.ends.front if stage.index else (), () if is_last else self.ends.behind


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Return whether a tensor or module is one of `modules`, or in one."""
    return f"{name}.".startswith(tuple([f"{module}." for module in modules]))


# Of the built-in families.
ENDS = Ends(front=("embed", "scale", "positions", "dropout"), behind=("norm", "head"))
FRONT = ENDS.front


class Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numel(self) -> int: ...


class Unit(Protocol):
    """`facts.model.UnitFacts`, in units of one block."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...
    @property
    def numel(self) -> int: ...


class Layers(NamedTuple):
    """What is cut: layers first to last, and the tensors in front of them and behind them.
    `tied`: those in front that the last stage uses too, each with the name of the copy that it has
    of them."""

    layers: tuple[Unit, ...]
    front: tuple[Tensor, ...]
    behind: tuple[Tensor, ...]
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def weights(self) -> tuple[int, ...]:
        """Parameters of each layer."""
        return tuple(layer.numel for layer in self.layers)

    @property
    def ends(self) -> tuple[int, int]:
        """Parameters that the first stage has beside its layers, and the last; tied ones both."""
        tied = dict(self.tied)
        copies = sum(tensor.numel for tensor in self.front if tensor.name in tied)
        behind = sum(tensor.numel for tensor in self.behind)
        return sum(tensor.numel for tensor in self.front), behind + copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage's part of the model. `shared` are its tensors that another stage has too, there
    perhaps by another name: their gradients are summed over both. Each is a unit of its own, so
    that both stages cut it alike whatever else they have."""

    index: int
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    shared: tuple[str, ...]
    numel: int
    copied: tuple[tuple[str, str], ...] = ()

    def units(self, units: Units) -> Units:
        """Those of a model that this stage has, inner before outer; its modules' names are the
        model's."""
        inner = tuple(modules for modules in units if is_within(modules[0], self.layers))
        shared = tuple((name.rpartition(".")[0],) for name in self.shared)
        return (*inner, *shared, ("",))


def layers_of(
    units: Sequence[Unit],
    *,
    front: Sequence[str] = FRONT,
    tied: Sequence[tuple[str, str]] = (),
) -> Layers:
    """Return the layers of a model's units, blocks first to last and then the root; `front` names
    the root's modules in front of the blocks, `tied` the tensors that a tied head takes from there,
    with its own name of them."""
    *layers, root = units
    assert root.name == "", "the last unit is the root"
    names = {layer.name for layer in layers}
    assert not any(name.rpartition(".")[0] in names for name in names), "units of less than a block"
    ahead = tuple(tensor for tensor in root.tensors if is_within(tensor.name, front))
    behind = tuple(t for t in root.tensors if t not in ahead)
    assert {*dict(tied)} <= {tensor.name for tensor in ahead}, (
        f"{tied} are not all before the blocks"
    )
    return Layers(layers=tuple(layers), front=ahead, behind=behind, tied=tuple(tied))


def cut(model: Layers, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with `counts` layers each. Raises SpecError where these are not the
    model's."""
    problems = tuple(unlike(counts, len(model.layers)))
    if problems:
        raise SpecError(*problems)
    starts = accumulate(counts, initial=0)
    return tuple(
        _stage(model, (index, len(counts)), model.layers[start : start + count])
        for index, (start, count) in enumerate(zip(starts, counts, strict=False))
    )


def unlike(counts: Sequence[int], layers: int) -> Iterator[Fault]:
    """Why stages with `counts` layers each are not those of a model of `layers`."""
    listed = ", ".join(map(str, counts))
    finding = ""
    if min(counts, default=0) < 1:
        finding = f"[{listed}] has a stage without layers"
    elif sum(counts) != layers:
        finding = f"[{listed}] has {sum(counts)} layers, but the model has {layers}"
    if finding:
        remedy = f"Use numbers of 1 or more with the sum {layers}"
        if 0 < len(counts) <= layers:
            remedy += f": `pipeline.split=[{','.join(map(str, evenly(layers, len(counts))))}]`"
        yield Fault(place="pipeline.split", finding=finding, remedy=f"{remedy}.")


def evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Give each stage as many layers; where they do not divide, the middle stages have one more:
    the ends have the embedding and the head. Raises SpecError for more stages than layers."""
    _require_enough(layers, stages)
    share, more = divmod(layers, stages)
    before = (stages - more) // 2
    return tuple(share + (before <= index < before + more) for index in range(stages))


def balanced(
    weights: Sequence[float], stages: int, ends: tuple[float, float] = (0, 0)
) -> tuple[int, ...]:
    """Layers of each stage, so that the heaviest weighs least, and of such cuts the most even one
    (least sum of squares). `weights` of the layers in any one unit, parameters or seconds; `ends`:
    what is in front of the first layer and behind the last. O(stages * layers * layers of a
    stage). Raises SpecError for more stages than layers."""
    _require_enough(len(weights), stages)
    heavy = [*weights]
    heavy[0] += ends[0]
    heavy[-1] += ends[1]
    return _balanced(tuple(heavy), stages)


@lru_cache(maxsize=2**6)
def _balanced(heavy: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """The same of weights with the ends: specs that are offered in place of another have its
    stages."""
    sums = [0.0, *accumulate(heavy)]  # of the first 0, 1, 2 … layers
    return _most_even(sums, stages, _lightest(sums, stages))


def _lightest(sums: Sequence[float], stages: int) -> float:
    """The weight of the heaviest stage of the best cut. With more layers in front of a stage the
    heaviest before it weighs no less, and the stage itself no more: the best is where they
    cross."""
    layers = len(sums) - 1
    costs = [0.0] + [float("inf")] * layers  # of the first n layers in the stages so far
    for stage in range(1, stages + 1):
        following = [float("inf")] * (layers + 1)
        at = stage - 1  # where they cross: no earlier with more layers
        for end in range(stage, layers + 1):
            total = sums[end]
            while at < end and costs[at] < total - sums[at]:
                at += 1
            before = total - sums[at - 1] if at > stage - 1 else float("inf")
            following[end] = min(before, costs[at] if at < end else float("inf"))
        costs = following
    return costs[layers]


def _most_even(sums: Sequence[float], stages: int, heaviest: float) -> tuple[int, ...]:
    """The cut with the least sum of squares, none of whose stages weighs more than `heaviest`: a
    stage begins with no layer before those that it can bear."""
    layers = len(sums) - 1
    costs = [0.0] + [float("inf")] * layers
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        following, starts = [float("inf")] * (layers + 1), [0] * (layers + 1)
        first = stage - 1
        for end in range(stage, layers + 1):
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
    if stages > layers:
        raise SpecError(
            Fault(
                place="pipeline.stages",
                finding=f"{stages} stages need at least one layer each; the model has {layers}",
                remedy=f"Use at most {layers} stages, or a model with more layers.",
            )
        )


def _stage(model: Layers, position: tuple[int, int], layers: Sequence[Unit]) -> Stage:
    """`position`: the stage's index, and how many stages there are."""
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
