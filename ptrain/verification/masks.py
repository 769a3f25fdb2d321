"""Whether the ranks drop out what they should: modules that draw random numbers draw alike where
they are given the same, and apart where they are not.

Nobody has to say which ranks share a mask. Copies of an activation must stay copies, so their masks
are one; and what is another sample, slice of the tokens or head must be dropped by a mask of its
own. So of each such module the ranks tell each other digests of what it is given and of where the
generator stands as it begins. Ranks of cp alone draw the masks of all tokens, of which each takes
its part: together they are given one thing, and their generators stand alike.

Note: masks themselves are not looked at. Fused attention shows none, small ones are alike by
chance, and where the generators stand costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ptrain.costs import Phase
from ptrain.interpreter.program import Program
from ptrain.meters.digest import digests
from ptrain.meters.randomness import generator_digest
from ptrain.meters.replicas import coordinates
from ptrain.models.dropout import own_dropouts
from ptrain.report.copies import SHARED, alike_apart, culprit, listed
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.spec.axis import TOKEN_AXES
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import paths
from ptrain.verification.places import line

DIFFERENT = "differs where it must be shared"
UNLIKE = "differs where slices of one must be taken"
EVALUATES = "evaluates while others train"
Seen = tuple[str, str, bool]  # what a module is given, where the generator stands, does it train


class Masks:
    """`with Masks(program) as masks:` around a step, then `check`, by all ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._seen: dict[str, Seen] = {}
        self._now: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Masks:
        self._seen.clear()
        self.program.observers.append(self)
        self._stack.callback(self.program.observers.remove, self)
        for path, module in paths(self.program):
            if any(own_dropouts(module)):
                hook = module.register_forward_pre_hook(self._before(path), with_kwargs=True)
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """What runs again in backward draws again what it drew."""
        self._now = micro_batch if phase is Phase.FORWARD else None

    def _before(self, path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._now is None:
                return
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            what = " ".join(digests([*given]))
            state = generator_digest(self.program.world.device)
            self._seen.setdefault(f"{path} {self._now}", (what, state, module.training))

        return note

    def check(self, exchange: Exchange, step: int) -> tuple[Departure, ...]:
        """Return what departs, in the order in which the modules run."""
        everyone: list[dict[str, Seen]] = exchange.gather(self._seen)
        spec = self.program.spec
        lines = [line(spec, rank, *TOKEN_AXES) for rank in range(len(everyone))]
        departures: list[Departure] = []
        for key in dict.fromkeys(key for its in everyone for key in its):
            path, _, micro_batch = key.rpartition(" ")
            seen = {rank: its[key] for rank, its in enumerate(everyone) if key in its}
            departures += (
                replace(departure, step=step, name=path, index=int(micro_batch))
                for departure in departing(seen, lines)
            )
        return tuple(departures)

    def culprit(self, departures: Sequence[Departure]) -> Culprit | None:
        """Return whose masks they are that are wrong; None where nothing departs."""
        same = [its for its in departures if its.told == departures[0].told]
        cause = culprit(same, coordinates(self.program))
        if cause is None:
            return None
        first, ranks = same[0], cause.ranks
        if first.told != EVALUATES:  # all of them are involved
            alike = (departure for departure in same if departure.name == first.name)
            ranks = tuple(sorted({rank for departure in alike for rank in departure.between}))
        sentence = f"dropout in {first.place} on {listed(ranks)} {_REMEDIES[first.told]}"
        return replace(cause, factor=first.told, place=first.place, ranks=ranks, sentence=sentence)


_REMEDIES = {
    DIFFERENT: "draws different masks for copies of one activation: seed these ranks alike",
    UNLIKE: "draws different masks for slices of one mask: seed these ranks alike",
    SHARED: "draws the same mask for different activations: seed by the place of what each rank "
    "computes",
    EVALUATES: "is in evaluation mode: call model.train() there",
}


def departing(seen: Mapping[int, Seen], lines: Sequence[Sequence[int]]) -> Iterator[Departure]:
    """Yield what departs of one module's pass, by the ranks that run it. `lines`: of each rank
    those with slices of the same tokens, itself among them."""
    still = [rank for rank, (_, _, trains) in seen.items() if not trains]
    if 0 < len(still) < len(seen):
        yield from (_departure(rank, seen, EVALUATES) for rank in still)
        return
    groups: dict[str, list[int]] = {}
    for rank in seen:
        whole = " ".join(seen[other][0] for other in lines[rank] if other in seen)
        groups.setdefault(whole, []).append(rank)
    for group in groups.values():
        usual, _ = Counter(seen[rank][1] for rank in group).most_common(1)[0]
        for rank in group:
            given, state, _ = seen[rank]
            copies = (its for its in group if seen[its][0] == given and its not in lines[rank])
            if state != usual:
                is_copy = any(seen[its][1] != state for its in copies)
                yield _departure(rank, group, DIFFERENT if is_copy else UNLIKE)
    places = {rank: (whole, seen[rank][1]) for whole, group in groups.items() for rank in group}
    if not still:  # who evaluates draws nothing
        yield from alike_apart([places.get(rank) for rank in range(len(lines))], Moment.FORWARD, 0)


def _departure(rank: int, between: Iterable[int], fault: str) -> Departure:
    return Departure(
        step=0, moment=Moment.FORWARD, subject=Subject.RANDOM, name="", rank=rank,
        between=tuple(between), told=fault,
    )  # fmt: skip
