"""One device: nothing is wrapped. What torch allocates here is autograd's and the optimizer's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ptrain.costs import Traffic
from ptrain.derivation.ghosts import autograd
from ptrain.derivation.ghosts.in_place import InPlace, InPlaceUpdate
from ptrain.derivation.ghosts.wrapping import Times
from ptrain.derivation.tape import Scene
from ptrain.timeline import Complete, Kind


class OneDevice(InPlace):
    """A model as it is."""

    reach: int | None = 0

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        """Nobody is there to be sent anything."""
        yield from ()

    def player(self, scene: Scene) -> Local:
        return Local(scene, self)


class Local(InPlaceUpdate):
    """autograd's gradients stay where they are; later ones are added to them."""

    updates_alike = False

    def __init__(self, scene: Scene, wrapping: InPlace) -> None:
        self.scene, self.tape, self.wrapping = scene, scene.tape, wrapping
        self.is_first = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first = is_first

    def begin_half(self, kind: Kind) -> None:
        """A gradient is where it is kept, whoever computed it."""

    def end_half(self, kind: Kind) -> None:
        """Nothing is reduced."""

    def enter(self, unit: int) -> None:
        """Nothing is gathered."""

    def leave(self, unit: int) -> None:
        """Nothing is given back."""

    def before_backward(self, unit: int) -> None:
        """Nothing is gathered."""

    def after_backward(self, unit: int) -> None:
        """Nothing is reduced."""

    def complete(self, gradient: Complete) -> None:
        dtype = self.scene.plan.update.layout.gradients
        if self.is_first:
            self.tape.spike(autograd.rise(gradient))
            self.tape.add(autograd.kept(gradient))
            autograd.keeps(self.tape, dtype, gradient)
        else:
            self.tape.add(autograd.added(gradient))
            autograd.adds(self.tape, dtype, gradient)

    def gathered(self) -> int:
        return 0

    def lingering(self) -> int:
        return 0

    def signature(self) -> Hashable:
        return self.is_first
