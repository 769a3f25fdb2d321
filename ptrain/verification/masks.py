"""Whether the ranks drop out what they should: modules that draw random numbers draw alike where
they are given the same, and apart where they are not.

Nobody has to say which ranks share a mask. Copies of an activation must stay copies, so their masks
are one; and what is another sample, slice of the tokens or head must be dropped by a mask of its
own. So of each such module the ranks tell each other digests of what it is given and of where the
generator stands as it begins. Ranks of cp alone draw the masks of all tokens, of which each takes
its part: their generators stand alike, whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ptrain.costs import Phase
from ptrain.interpreter.program import Program
from ptrain.meters.digest import digests, of_bytes
from ptrain.meters.randomness import drops
from ptrain.meters.replicas import coordinates
from ptrain.report.copies import SHARED, axes_between, listed
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.spec.axis import TOKEN_AXES
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import paths

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
            if drops(module):
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
            state = of_bytes(_state(self.program.world.device).numpy().tobytes())
            self._seen.setdefault(f"{path} {self._now}", (what, state, module.training))

        return note

    def check(self, exchange: Exchange, step: int) -> tuple[Departure, ...]:
        """Return what departs, in the order in which the modules run."""
        everyone: list[dict[str, Seen]] = exchange.gather(self._seen)
        keys = dict.fromkeys(key for its in everyone for key in its)
        are_slices = _Relation(self.program).of
        return tuple(
            departure for key in keys for departure in _differing(key, everyone, step, are_slices)
        )

    def culprit(self, departures: tuple[Departure, ...]) -> Culprit | None:
        """Return whose masks they are that are wrong; None where nothing departs."""
        if not departures:
            return None
        first = departures[0]
        same = [
            departure
            for departure in departures
            if (departure.name, departure.told) == (first.name, first.told)
        ]
        between = tuple(sorted({rank for departure in same for rank in departure.between}))
        ranks = tuple(sorted({departure.rank for departure in same}))
        return Culprit(
            state=Subject.RANDOM,
            axis=axes_between(ranks, between, coordinates(self.program)),
            factor=first.told,
            place=first.place,
            step=first.step,
            ranks=ranks if first.told == EVALUATES else between,
            sentence=_sentence(first, between),
        )


class _Relation:
    """What two ranks are to each other: whether they have slices of the same tokens' masks."""

    def __init__(self, program: Program) -> None:
        self._places = coordinates(program)
        self._axes = {str(axis) for axis in TOKEN_AXES}

    def of(self, one: int, other: int) -> bool | None:
        """Return None for ranks that others stand between: these are judged beside them."""
        places = self._places[one], self._places[other]
        apart = {axis for axis in places[0] if places[0][axis] != places[1][axis]}
        if not apart & self._axes:
            return False
        return True if apart <= self._axes else None


def _differing(
    key: str,
    everyone: list[dict[str, Seen]],
    step: int,
    are_slices: Callable[[int, int], bool | None],
) -> Iterator[Departure]:
    """Yield the departures of pairs of ranks that run the module. `are_slices`: `_Relation.of`."""
    path, _, micro_batch = key.rpartition(" ")
    ranks = [rank for rank, its in enumerate(everyone) if key in its]
    modes = [everyone[rank][key][2] for rank in ranks]
    usual = modes.count(True) * 2 >= len(modes)
    for one, other in combinations(ranks, 2):
        relation = are_slices(one, other)
        if relation is None:
            continue
        fault = _fault(everyone[one][key], everyone[other][key], are_slices=relation)
        if fault:
            yield Departure(
                step=step,
                moment=Moment.FORWARD,
                subject=Subject.RANDOM,
                name=path,
                rank=one if fault == EVALUATES and everyone[one][key][2] is not usual else other,
                index=int(micro_batch),
                between=(one, other),
                told=fault,
            )


def _fault(one: Seen, other: Seen, *, are_slices: bool) -> str:
    (given, state, trains), (its_given, its_state, its_trains) = one, other
    if trains != its_trains:
        return EVALUATES
    if are_slices:
        return UNLIKE if state != its_state else ""
    if given == its_given:
        return DIFFERENT if state != its_state else ""
    return SHARED if state == its_state and trains else ""


def _sentence(first: Departure, between: tuple[int, ...]) -> str:
    who = f"dropout in {first.name} on {listed(between)}"
    if first.told == EVALUATES:
        return f"{first.name} is in evaluation mode on rank {first.rank}: call model.train() there"
    if first.told == SHARED:
        return (
            f"{who} draws the same mask for different activations: seed by the place of what "
            "each rank computes"
        )
    copies = "slices of one mask" if first.told == UNLIKE else "copies of one activation"
    return f"{who} draws different masks for {copies}: seed these ranks alike"


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
