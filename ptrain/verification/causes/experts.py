"""Explain why a layer of experts gives another result than on one device. Each explanation is
tested with what one device's router and experts give.

On one rank: the weights of a token's rows, the rows an expert receives, the rows that find no
place. On several: rows that arrive or return in another order than assumed, by other counts or from
other ranks.

Legend of shape suffixes: N tokens of all samples or of a rank, K experts of a token, M = N·K rows,
C hidden, E experts of all ranks, e of one, R ranks, S places of an expert or of all, T of all
ranks'.

Why what ranks keep of experts, of which each has some, is not what one device has: their
gradients count as if all ranks had them, or different experts are taken for copies of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.axes.expert.form import factor_of
from ptrain.facts.parameters import expert_modules
from ptrain.facts.stages import is_within
from ptrain.models.moe import MoE
from ptrain.report.finding import Moment, RootCause
from ptrain.spec.placement import REDUCED_AXES, Axis
from ptrain.spec.spec import Spec, ranks_over
from ptrain.verification.causes.context import Explanation, Own, agreed
from ptrain.verification.causes.rerun import (
    EXACT,
    Hypothesis,
    Investigation,
    call_of,
    instead,
    own_part_of,
    proven,
)
from ptrain.verification.jobs.root_causes import families
from ptrain.verification.parts import (
    DegreeProduct,
    TensorBox,
    is_even,
    multiple,
    products,
    relative,
)
from ptrain.verification.places import data_place


def expert_axis(spec: Spec) -> Axis | None:
    """Return the axis whose ranks have different experts."""
    factor = factor_of(spec)
    return None if factor is None else factor.axis


def is_of_experts(spec: Spec, name: str) -> bool:
    """Return whether a parameter, or what is kept beside one, is of the experts of a layer."""
    return is_within(name, expert_modules(spec))


def of_experts(scene: Investigation, names: list[str]) -> RootCause | None:
    """Gradients of experts alone differ: they count otherwise than all others, or are reduced over
    ranks that have other experts, or other features of them. Collective."""
    axis = expert_axis(scene.spec)
    if axis is None or not all(is_of_experts(scene.spec, name) for name in names):
        return None
    return _counted(scene, axis, names) or _of_different_ones(scene, axis, names)


def _counted(scene: Investigation, axis: Axis, names: list[str]) -> RootCause | None:
    pairs = [pair for name in names if (pair := own_part_of(scene, name)) is not None]
    own = 0.0
    if pairs:
        rows = torch.cat([tensor.flatten() for tensor, _, _ in pairs])
        fit = multiple(rows, torch.cat([right.flatten() for _, right, _ in pairs]))
        own = fit.factor if fit.holds(EXACT) else 0.0
    ratios = [its for its in scene.ranks.gather(own) if abs(its - 1.0) > EXACT]
    ratio = ratios[0] if ratios and is_even(ratios) else 0.0
    fits = [
        its
        for its in products(ratio or 1.0, scene.degrees)
        if str(Axis.PP) not in its.axes  # whose ranks have no part of a sum
    ]
    of_experts = [str(axis) for axis in scene.spec.expert_axes]
    if all({*its.axes}.isdisjoint(of_experts) for its in fits):
        return None
    text, axes = several(fits, axis)
    sentence = (
        f"The gradients of the experts only, {families(names)}, are {text} ({axes}). After "
        "backward, an expert's gradient includes the tokens of all ranks of "
        f"{' × '.join(of_experts)}. Reduce it over {_others(scene, axis)}, and divide it by "
        "the global number of tokens, like all other gradients."
    )
    cause, all_names = scene.root_cause(axes, text, sentence), set(names)
    truths = scene.evidence.expected.gradients.items()
    factors = {n: g * ratio for n, g in truths if n in all_names}
    return proven(scene, cause, f"the experts' gradients {text}", instead(factors))


def several(fits: Sequence[DegreeProduct], first: Axis) -> tuple[str, str]:
    """Return a factor and the axes that it may come from, `first` before others."""
    own = [its for its in fits if its.axes == (str(first),)]
    fits = [*own, *fits]
    single = dict.fromkeys(its.axes[0] for its in fits if len(its.axes) == 1)
    return str(fits[0]), " or ".join(single) or "·".join(fits[0].axes)


def _others(scene: Investigation, axis: Axis) -> str:
    degrees = {its.axis: its.degree for its in scene.spec.factors if its.axis in REDUCED_AXES}
    axes = [its for its, degree in degrees.items() if degree > 1 and its is not axis]
    return f"{' and '.join(map(str, axes))} only" if axes else "no axis"


def _of_different_ones(scene: Investigation, axis: Axis, names: list[str]) -> RootCause | None:
    """Return whose parts were added to each other. Collective."""
    of_experts = scene.spec.expert_axes
    for along in (axis, Axis.TP):
        degree = scene.spec.degree(along)
        which, dims = ("experts", (0,)) if along in of_experts else ("features of experts", (1, 2))
        outer = ranks_over(scene.spec, ahead(of_experts, along))
        for what, factor in (("summed", 1.0), ("averaged", 1.0 / degree)) if degree > 1 else ():
            sentence = (
                f"The gradients of {families(names)} are {what} over {along}, but its ranks "
                f"hold different {which}. Reduce them over {_others(scene, axis)}."
            )
            hypothesis = _summed(scene, names, (outer, degree), factor, dims)
            cause = scene.root_cause(along, f"{what} over {along}", sentence)
            if (
                one := proven(scene, cause, f"its shards {what} over {along}", hypothesis)
            ) is not None:
                return one
    return None


def _summed(
    scene: Investigation,
    names: Collection[str],
    ranks: tuple[int, int],
    factor: float,
    dims: Sequence[int],
) -> Hypothesis:
    """Return what sums the parts of an axis' ranks, along the dimension that a gradient tells:
    matrices of experts are cut along either."""

    def hypothesis(name: str, whole: Tensor, part: TensorBox) -> Tensor:
        pair = own_part_of(scene, name)
        count = math.prod(ranks)
        cut = [dim for dim in dims if whole.dim() > dim and whole.shape[dim] % count == 0]
        if name not in names or pair is None or not cut:
            return part.of(whole)
        sums = []
        for dim in cut:
            parts = whole.unflatten(dim, (*ranks, -1))
            summed = parts.sum(dim + 1, keepdim=True).expand_as(parts).flatten(dim, dim + 2)
            sums.append(part.of(summed) * factor)
        return min(sums, key=lambda its: relative(its, pair[0]))

    return hypothesis


def ahead(axes: Sequence[Axis], axis: Axis) -> Sequence[Axis]:
    """Return those of these axes that stand outside an axis that is one of them; none of others."""
    return axes[: axes.index(axis)] if axis in axes else ()


def copies(scene: Investigation, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield for each place along the axes of experts what all ranks together have if each has that
    rank's."""
    degree = ranks_over(scene.spec, scene.spec.expert_axes)
    if whole.dim() and degree > 1 and whole.shape[0] % degree == 0:
        for place, part in enumerate(whole.chunk(degree)):
            yield place, part.repeat(degree, *[1] * (whole.dim() - 1))


@dataclass(frozen=True)
class RoutedLayer:
    """A layer of one device in the differing micro-batch: what it was given, the router's weights
    and choices, and what the experts made of their rows."""

    layer: MoE
    x_BTC: Tensor
    weights_NK: Tensor
    chosen_NK: Tensor
    y: Tensor  # [M, C] sorted by expert, or [experts, places of one, C]

    @classmethod
    def of(cls, scene: Investigation, path: str, layer: MoE) -> RoutedLayer:
        (x_BTC, *_), _ = call_of(scene, path)
        _, (weights_NK, chosen_NK) = call_of(scene, f"{path}.router")
        _, y = call_of(scene, f"{path}.experts")
        return cls(layer, x_BTC, weights_NK, chosen_NK, y)

    def combined(self, weights_NK: Tensor, rows_NKC: Tensor) -> Tensor:
        """Return what the layer gives of such weights and rows."""
        y_BTC = (rows_NKC * weights_NK[..., None]).sum(1).view_as(self.x_BTC)
        if self.layer.shared is None:
            return y_BTC
        with torch.no_grad():
            shared: Tensor = self.layer.shared(self.x_BTC)
        return y_BTC + shared

    @cached_property
    def order_M(self) -> Tensor:
        """Which choice stands in each row, sorted by expert."""
        return self.chosen_NK.flatten().argsort(stable=True)

    @cached_property
    def places_NK(self) -> Tensor:
        """The place of each choice; the number of places where it finds none."""
        assert self.layer.places is not None, "experts take all that is sent to them"
        places_NK: Tensor = self.layer.places(self.chosen_NK.unflatten(0, self.x_BTC.shape[:2]))
        return places_NK

    @cached_property
    def is_dropped_NK(self) -> Tensor:
        return self.places_NK == self.y.shape[:2].numel()

    @cached_property
    def rows_NKC(self) -> Tensor:
        """What each token's experts give."""
        if self.layer.shape.capacity_factor is not None:
            return F.pad(self.y.flatten(0, 1), (0, 0, 0, 1))[self.places_NK]
        return self.in_rows(self.order_M.argsort())

    def in_rows(self, numbers_M: Tensor) -> Tensor:
        """Return the rows with these numbers as those of the tokens [N, K, C]."""
        return self.y[numbers_M].unflatten(0, self.chosen_NK.shape)


Other = tuple[Explanation, Tensor, Tensor]  # with its weights and rows


def otherwise_routed(scene: Investigation, path: str, routed: RoutedLayer) -> Iterator[Other]:
    """Yield what a rank gets where something goes wrong on the way to experts of other ranks, with
    what is to be done; nothing where it has all experts."""
    axis = expert_axis(scene.spec)
    if axis is None:
        return
    line = scene.line(scene.rank, axis)
    places = [data_place(scene.spec, rank) for rank in line]
    is_placed = routed.layer.shape.capacity_factor is not None
    group = (_Places if is_placed else _Rows)(scene, path, routed, places, line.index(scene.rank))
    for explanation, y in chain(group.unsorted(str(axis)), group.elsewhere(str(axis))):
        yield explanation, routed.weights_NK, replace(routed, y=y).rows_NKC
    yield from _weights_of_others(scene, path, routed, places)


Output = tuple[Explanation, Tensor]  # with what experts give, as `RoutedLayer.y`


@dataclass
class _Group(ABC):
    """The ranks that have a layer's experts: which share of the batch each has, and this one."""

    scene: Investigation
    path: str
    routed: RoutedLayer
    places: Sequence[int]
    own: int

    @property
    def per_rank(self) -> int:
        return self.routed.layer.experts.num_experts // len(self.places)

    def unsorted(self, axis: str) -> Iterator[Output]:
        """Yield what comes of rows that lie otherwise than they are taken to lie."""
        if self.per_rank == 1:
            return
        ways = (
            (
                "rows of other tokens",
                (
                    "returns rows in expert order, but they are read in rank order. Sort them "
                    "into rank order first."
                ),
                self.returned(is_sorted_there=True, is_sorted_home=False),
            ),
            (
                "rows of other experts",
                (
                    "treats arriving rows as sorted by expert, but they are sorted by rank. Sort "
                    "them into expert order first."
                ),
                self.returned(is_sorted_there=False, is_sorted_home=False),
            ),
            (
                "rows of other experts",
                (
                    "treats arriving rows as sorted by expert, but they are sorted by rank, and "
                    "reorders them on return. Sort them into expert order first."
                ),
                self.returned(is_sorted_there=False, is_sorted_home=True),
            ),
        )
        for factor, sentence, y in ways:
            yield Explanation(factor, sentence, axis=axis), y

    def elsewhere(self, axis: str) -> Iterator[Output]:
        """Yield what comes of rows that go to other ranks than those of their experts."""
        ranks, own = len(self.places), self.per_rank
        moved = {shift: self.moved(shift) for shift in range(1, ranks)}
        for shift, y in moved.items():
            sentence = (
                f"sends rows to the rank of {axis} that is {shift} after the rank of their "
                "experts. Send them to the rank that holds the experts."
            )
            yield Explanation("experts of another rank", sentence, axis=axis), y
        blocks = [self.blocks(y) for y in (self.routed.y, *moved.values())]
        kept = [blocks[(self.own - expert // own) % ranks][expert] for expert in range(ranks * own)]
        sentence = (
            f"sends no rows to other ranks of {axis}: each rank gives all rows to its local "
            "experts. Exchange rows before and after the experts."
        )
        yield Explanation("all-to-all left out", sentence, axis=axis), self.joined(kept)

    @abstractmethod
    def returned(self, *, is_sorted_there: bool, is_sorted_home: bool) -> Tensor:
        """Return what comes home where rows are sorted, or not, at their experts and at home."""

    @abstractmethod
    def moved(self, shift: int) -> Tensor:
        """Return what the experts of the rank `shift` behind make of each expert's rows."""

    @abstractmethod
    def blocks(self, y: Tensor) -> Sequence[Tensor]:
        """Return what each expert gives."""

    @abstractmethod
    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return as one what each expert gives."""


class _Rows(_Group):
    """Every row goes to its expert."""

    @cached_property
    def rows(self) -> list[list[Tensor]]:
        """The rows of each rank for each expert."""
        return [self._rows_at(place) for place in self.places]

    def _rows_at(self, place: int, back: int = 0) -> list[Tensor]:
        x_NC, chosen_NK = self.scene_call(place, back)
        chosen_M = chosen_NK.flatten()
        order_M = chosen_M.argsort(stable=True)
        counts_E = chosen_M.bincount(minlength=self.routed.layer.experts.num_experts)
        return list(x_NC[order_M // chosen_NK.shape[1]].split(counts_E.tolist()))

    def scene_call(self, place: int, back: int = 0) -> tuple[Tensor, Tensor]:
        k = self.scene.first.index - back
        (x_BTC, *_), (_, chosen_NK) = call_of(self.scene, f"{self.path}.router", (place, k))
        return x_BTC.flatten(0, 1), chosen_NK

    def elsewhere(self, axis: str) -> Iterator[Output]:
        yield from super().elsewhere(axis)
        if not self.scene.first.index:
            return
        before = [len(rows) for rows in self._rows_at(self.places[self.own], back=1)]
        rows = torch.cat(self.rows[self.own]).split(before)
        sentence = (
            "splits rows by the counts of the previous micro-batch. Exchange the counts of "
            "each micro-batch."
        )
        yield Explanation("stale by 1 micro-batch", sentence, axis=axis), self._through(rows)

    def _through(self, rows: Sequence[Tensor]) -> Tensor:
        """Return what experts make of these rows, those of the first expert first."""
        counts = torch.tensor([len(its) for its in rows])
        with torch.no_grad():
            y_MC: Tensor = self.routed.layer.experts(
                torch.cat(list(rows)), counts.cumsum(0, dtype=torch.int32)
            )
        return y_MC

    def returned(self, *, is_sorted_there: bool, is_sorted_home: bool) -> Tensor:
        own, home = self.per_rank, []
        for target in range(len(self.places)):
            experts = range(target * own, (target + 1) * own)
            arrived = [[rows[expert] for expert in experts] for rows in self.rows]
            y_MC = self._at_rank(target, arrived, is_sorted=is_sorted_there)
            sizes = [[len(its) for its in of_rank] for of_rank in arrived]
            if is_sorted_home:
                by_expert = [sizes[rank][e] for e in range(own) for rank in range(len(sizes))]
                pieces = y_MC.split(by_expert)
                y_MC = torch.cat(
                    [piece for rank in range(len(sizes)) for piece in pieces[rank :: len(sizes)]]
                )
            home.append(y_MC.split([sum(of_rank) for of_rank in sizes])[self.own])
        return torch.cat(home)

    def _at_rank(self, target: int, arrived: list[list[Tensor]], *, is_sorted: bool) -> Tensor:
        """Return what a rank's experts make of rows that arrive, where they lie then."""
        own = self.per_rank
        by_expert = [torch.cat([of_rank[e] for of_rank in arrived]) for e in range(own)]
        x_MC = torch.cat(by_expert if is_sorted else [torch.cat(of_rank) for of_rank in arrived])
        rows = [x_MC[:0]] * self.routed.layer.experts.num_experts
        rows[target * own : (target + 1) * own] = x_MC.split([len(its) for its in by_expert])
        return self._through(rows)

    def moved(self, shift: int) -> Tensor:
        by = shift * self.per_rank
        rows = self.rows[self.own]
        shifted = [*rows[-by:], *rows[:-by]]
        blocks = self._through(shifted).split([len(its) for its in shifted])
        return torch.cat([*blocks[by:], *blocks[:by]])

    def blocks(self, y: Tensor) -> Sequence[Tensor]:
        return y.split([len(its) for its in self.rows[self.own]])

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(blocks))


class _Places(_Group):
    """Every expert has as many places."""

    @cached_property
    def given(self) -> list[Tensor]:
        """The places of each rank, [E, S, C]."""
        k = self.scene.first.index
        return [
            call_of(self.scene, f"{self.path}.experts", (place, k))[0][0] for place in self.places
        ]

    def _through(self, x_ETC: Tensor) -> Tensor:
        with torch.no_grad():
            y_ETC: Tensor = self.routed.layer.experts(x_ETC)
        return y_ETC

    def returned(self, *, is_sorted_there: bool, is_sorted_home: bool) -> Tensor:
        ranks, count, home = len(self.places), self.per_rank, []
        for target in range(ranks):
            own = slice(target * count, (target + 1) * count)
            x_ReSC = torch.stack([x_ESC[own] for x_ESC in self.given])
            x_eTC = (x_ReSC.movedim(0, 1) if is_sorted_there else x_ReSC).reshape(
                count, -1, x_ReSC.shape[-1]
            )
            x_ETC = x_eTC.new_zeros(ranks * count, *x_eTC.shape[1:])
            x_ETC[own] = x_eTC
            y_eTC = self._through(x_ETC)[own]
            if is_sorted_home:
                y_ReSC = y_eTC.unflatten(1, (ranks, -1)).movedim(1, 0)
            else:
                y_ReSC = y_eTC.reshape(x_ReSC.shape)
            home.append(y_ReSC[self.own])
        return torch.cat(home)

    def moved(self, shift: int) -> Tensor:
        by = shift * self.per_rank
        return self._through(self.given[self.own].roll(by, 0)).roll(-by, 0)

    def blocks(self, y: Tensor) -> Sequence[Tensor]:
        return list(y)

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(blocks))


def _weights_of_others(
    scene: Investigation, path: str, routed: RoutedLayer, places: Sequence[int]
) -> Iterator[Other]:
    axis, own = expert_axis(scene.spec), data_place(scene.spec, scene.rank)
    for number, place in enumerate(places):
        if place == own:
            continue
        k = scene.first.index
        _, (weights_NK, _) = call_of(scene, f"{path}.router", (place, k))
        sentence = (
            "weights a token's expert outputs by the router weights of a token of another "
            f"rank of {axis}. Keep the weights with their tokens."
        )
        explanation = Explanation(f"weights of {axis} rank {number}", sentence, axis=str(axis))
        yield explanation, weights_NK, routed.rows_NKC


def experts_cause(scene: Investigation) -> RootCause | None:
    """Explain what a layer of experts gives, by what most ranks say that differ. Collective."""
    if scene.first.moment is not Moment.FORWARD:
        return None
    return agreed(scene, lambda own: islice(_explanations(scene, own), 1))


def _explanations(scene: Investigation, own: Own) -> Iterator[Explanation]:
    path = scene.first.name
    layer = scene.reference.module.get_submodule(path)
    if not isinstance(layer, MoE):
        return
    routed = RoutedLayer.of(scene, path, layer)
    is_placed = layer.places is not None
    of_one_rank = _dropped_otherwise if is_placed else _rows_elsewhere
    for explanation, weights_NK, rows_NKC in chain(
        _other_weights(routed), of_one_rank(routed), otherwise_routed(scene, path, routed)
    ):
        if own.fits(routed.combined(weights_NK, rows_NKC)):
            yield explanation._replace(sentence=f"{path} {explanation.sentence}")


def _other_weights(routed: RoutedLayer) -> Iterator[Other]:
    """The right rows, otherwise weighed."""
    weights, rows = routed.weights_NK, routed.rows_NKC
    for distance, which in ((1, "before"), (-1, "after")):
        sentence = (
            f"weights a token's expert outputs by the router weights of the token {which} "
            "it. Bring weights and rows into the same order."
        )
        yield Explanation("weights of another token", sentence), weights.roll(distance, 0), rows
    for shift in range(1, weights.shape[1]):
        sentence = (
            "weights one expert output of a token by the router weight of another choice. "
            "Bring choices and weights into the same order."
        )
        yield Explanation("weights of another choice", sentence), weights.roll(shift, 1), rows
    sentence = "sums a token's expert outputs without the router weights. Multiply by them."
    yield Explanation("not weighted", sentence), torch.ones_like(weights), rows


def _rows_elsewhere(routed: RoutedLayer) -> Iterator[Other]:
    """The right weights of rows that were not put back, or elsewhere."""
    weights, order = routed.weights_NK, routed.order_M
    ways: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        (
            "restores rows by the sort order. Use its inverse.",
            lambda: routed.in_rows(order),
        ),
        (
            "sums rows in expert order. Restore the token order first.",
            lambda: routed.in_rows(torch.arange(len(order), device=order.device)),
        ),
        (
            (
                "reads rows by choice and then by token, but they are ordered by token and then "
                "by choice."
            ),
            lambda: routed.rows_NKC.reshape(*reversed(weights.shape), -1).transpose(0, 1),
        ),
    )
    for sentence, rows in ways:
        yield Explanation("rows of other tokens", sentence), weights, rows()


def _dropped_otherwise(routed: RoutedLayer) -> Iterator[Other]:
    """Choices that find no place count, or others than these are dropped."""
    weights, rows, is_dropped_NK1 = (
        routed.weights_NK,
        routed.rows_NKC,
        routed.is_dropped_NK[..., None],
    )
    x_N1C = routed.x_BTC.flatten(0, 1)[:, None]
    last_C = routed.y.flatten(0, 1)[-1]
    counted: tuple[tuple[str, Tensor], ...] = (
        ("a dropped choice receives the values in the last place. Use zeros.", last_C),
        (
            "a dropped choice returns the token itself, which the residual stream already adds.",
            x_N1C,
        ),
    )
    for sentence, given in counted:
        of_others = torch.where(is_dropped_NK1, given, rows)
        yield (
            Explanation("dropped tokens counted", f"drops incorrectly: {sentence}"),
            weights,
            of_others,
        )
    kept = weights.masked_fill(routed.is_dropped_NK, 0.0)
    share_N1 = kept.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    sentence = (
        "normalizes by the weights of the choices that have a place. Normalize by the "
        "weights of all choices."
    )
    yield Explanation("weights of kept choices", sentence), kept / share_N1.clamp(min=1e-30), rows
    sentence = "drops nothing. Rows over the capacity of an expert must bypass it."
    yield Explanation("dropped tokens counted", sentence), weights, _of_all(routed)


def _of_all(routed: RoutedLayer) -> Tensor:
    """Return what all choices give, as if every one had a place."""
    x_NC = routed.x_BTC.flatten(0, 1)
    experts = routed.layer.experts
    with torch.no_grad():
        y_ENC = experts(x_NC.expand(experts.num_experts, -1, -1))
    return y_ENC[routed.chosen_NK, torch.arange(len(x_NC), device=x_NC.device)[:, None]]
