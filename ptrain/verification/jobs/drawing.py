"""What the loop's model draws, step by step, and one device draws after it: dropout with the loop's
masks in the place of its own is compared as tightly as a model that drops nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.verification.jobs.culprits import families
from ptrain.verification.jobs.draws import DrawMode, RandomDraw
from ptrain.verification.jobs.everyones_draws import EveryonesDraws, Key
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.record import cuda_devices


@dataclass(frozen=True, slots=True)
class Unattributed(Exception):
    """All ranks raise it: what these modules draw cannot be told by samples, and is to be stilled
    when both loops are run anew."""

    paths: tuple[str, ...]


class DrawsLater(Exception):
    """All ranks raise it: a loop that drew nothing in its first step, and so is not recorded any
    more, draws in a later one; both loops are to be run anew."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Torch's generators: the CPU's, and those of the GPUs that a model is on."""

    cpu: Tensor
    gpus: dict[int, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> RandomState:
        gpus = {device: torch.cuda.get_rng_state(device) for device in cuda_devices(model)}
        return cls(torch.get_rng_state(), gpus)

    def is_now(self, model: nn.Module) -> bool:
        """Return whether nothing was drawn since."""
        now = RandomState.of(model)
        its = (self.cpu, *self.gpus.values()), (now.cpu, *now.gpus.values())
        return all(torch.equal(left, right) for left, right in zip(*its, strict=True))

    def restore(self) -> None:
        """Let them go on from here."""
        torch.set_rng_state(self.cpu)
        for device, state in self.gpus.items():
            torch.cuda.set_rng_state(state, device)


class Drawing:
    """All ranks call `exchange` after the loop's step, before one device's. `still`: modules whose
    draws are stilled on both sides. `lasts`: steps are recorded though the first drew nothing."""

    def __init__(self, ranks: Ranks, still: Collection[str] = (), *, lasts: bool = True) -> None:
        self.ranks, self.still = ranks, frozenset(still)
        self.everyones = EveryonesDraws()
        self.loop = DrawMode()
        self.hidden: set[str] = set()
        self.count = 0
        self.doubled: set[int] = set()
        self.lasts = lasts
        self.ends = False  # nothing was drawn in the first step
        self._before: tuple[RandomState, nn.Module] | None = None  # the loop's step

    @property
    def any(self) -> bool:
        return bool(self.everyones or self.everyones.alone)

    def recorded(self, model: nn.Module) -> Any:
        """Return what the loop's step is to run in."""
        self._before = RandomState.of(model), model
        self.loop = DrawMode(model, replace=self._stilled)
        return nullcontext() if self.ends else self.loop

    def exchange(self) -> None:
        """All ranks tell each other what they drew. Raises DrawsLater."""
        if self.ends:
            assert self._before is not None, "a step was recorded"
            state, model = self._before
            if not all(self.ranks.gather(state.is_now(model))):
                raise DrawsLater
            return
        self.everyones = EveryonesDraws.gathered(self.loop, self.ranks)
        hidden = self.ranks.gather(sorted(self.loop.hidden))
        self.hidden |= {path for paths in hidden for path in paths}
        self.count = len(self.everyones.by_key)
        self.doubled |= set(self.everyones.doubled())

    def replayed(self, *models: nn.Module, still: Collection[Key] = ()) -> Any:
        """Return what passes of the plain model are to run in: each sample is dropped out as on the
        rank that had it."""
        if self.ends:
            return nullcontext()
        mode: DrawMode

        def instead(draw: RandomDraw) -> Tensor | None:
            if draw.path in self.still or (draw.path, draw.number) in still:
                return draw.stilled()
            place = draw.outer, draw.call
            return self.everyones.of(draw, mode.rows[place], mode.times[place])

        mode = DrawMode(*models, replace=instead)
        return mode

    def repeated(self, *models: nn.Module, alike: bool = False, still: Collection[Key] = ()) -> Any:
        """Return what passes of the loop's modules, or of plain ones on what these were given, are
        to run in: they draw what this rank's drew in its step. `alike`: ranks with the same samples
        draw what the first of them drew; and backward draws what forward drew."""
        if self.ends:
            return nullcontext()
        own = {(draw.path, draw.number, draw.call): draw.value for draw in self.loop.draws}
        mode: DrawMode

        def instead(draw: RandomDraw) -> Tensor | None:
            if draw.path in self.still or (draw.path, draw.number) in still:
                return draw.stilled()
            value = own.get((draw.path, draw.number, draw.call))
            if alike and (first := self.everyones.of_first(draw, mode.rows_now)) is not None:
                value = first
            return value if value is not None and value.shape == draw.value.shape else None

        def as_in_forward(draw: RandomDraw) -> Tensor | None:
            return mode.before(draw) if alike else None

        mode = DrawMode(*models, replace=instead, replace_again=as_in_forward)
        return mode

    def stilled(self, model: nn.Module) -> Any:
        """Return what passes are to run in that are to draw nothing."""
        return nullcontext() if self.ends else DrawMode(model, replace=RandomDraw.stilled)

    def require_attributed(self, departs: bool) -> None:
        """Raises Unattributed on every rank where what one device draws is not told, or something
        departs and it was assumed. All ranks call it, when one device has done its step too."""
        self.lasts |= self.any or bool(self.hidden)
        self.ends = not self.lasts
        if not self.any:
            return
        everyones = self.everyones
        mine = everyones.lost | (everyones.assumed if departs else set())
        paths = {path for paths in self.ranks.gather(sorted(mine)) for path in paths}
        if paths:
            raise Unattributed(tuple(sorted(paths | self.still)))

    def notes(self) -> Iterator[str]:
        """Say what was replayed, and what was not."""
        if self.everyones:
            yield (
                f"what the model draws in {self.count} place{'s' * (self.count != 1)} (dropout's "
                "masks) is replayed on one device, sample by sample"
            )
        if self.still:
            yield (
                f"compared without what {families(sorted(self.still))} draws: it is drawn for "
                "slices of samples or for several at once, and cannot be told by samples; set its "
                "rate to 0 on both sides, or draw for each sample a row of its own"
            )
        if self.hidden:
            yield (
                f"compared without dropout within attention ({families(sorted(self.hidden))}): a "
                "fused kernel shows no mask; torch.nn.attention.sdpa_kernel(SDPBackend.MATH) does"
            )
        if self.doubled:
            ranks = ", ".join(map(str, sorted(self.doubled)))
            yield (
                f"ranks {ranks} draw the same for different samples: legal, but seed what they "
                "draw by the rank (torch.manual_seed(seed + rank)), once the model is built"
            )

    def _stilled(self, draw: RandomDraw) -> Tensor | None:
        return draw.stilled() if draw.path in self.still else None


@contextmanager
def drawing_from(state: RandomState, model: nn.Module) -> Iterator[None]:
    """Draw from `state` on within, and go on afterwards from where the generators stand now."""
    with torch.random.fork_rng(devices=cuda_devices(model)):
        state.restore()
        yield
