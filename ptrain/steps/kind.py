"""What a plan asks of its steps: what it asks of all of them, and of those that wrap."""

from __future__ import annotations

from typing import NamedTuple

from ptrain.spec.dials import SyncPolicy
from ptrain.spec.placement import Axis


class PlanStep:
    """What a plan asks of each of its steps. A step that cuts nothing answers as here."""

    __slots__ = ()

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes beside the data axes along which ranks draw random numbers of their own, since
        they have layers of their own, or slices of the tokens whose masks nobody draws whole."""
        return ()

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks run another part of each layer, or run it on other tokens of
        the same samples."""
        return ()

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """Of these the axes along which they have other tokens in all of the model."""
        return ()

    @property
    def boundary_axes(self) -> tuple[Axis, ...]:
        """Of these the axes along which they have other tokens between the blocks."""
        return self.token_axes

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes along which gradients are summed, of which every rank has addends."""
        return ()

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes along which all ranks have the same loss of the same samples."""
        return ()


class WrapStep(PlanStep):
    """What a plan asks of the step that wraps units for the data axes."""

    __slots__ = ()

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """The axes along which reduced gradients are shards when they are clipped and checked."""
        return ()

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The axes that cut each tensor by itself, by rows; flat units cut whole units."""
        return ()

    @property
    def policy(self) -> SyncPolicy | None:
        """When gradients are reduced and gathered parameters freed; None where nothing is."""
        return None

    @property
    def is_updated_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are complete (G is M)."""
        return False

    @property
    def is_filled_as_shards(self) -> bool:
        """Whether a module on meta is wrapped before it gets values, so that no rank ever holds it
        whole."""
        return False

    @property
    def is_filled_by_unit(self) -> bool:
        """Whether such a module gets them unit by unit while it is wrapped."""
        return False

    @property
    def has_masters_for_parameters(self) -> bool:
        """Whether what the wrapped module stores as its parameters are the optimizer's master
        copies (Theta is M)."""
        return False

    @property
    def keeps_gradients_on_device(self) -> bool:
        """Whether reduced gradients are there, on the device, until the update."""
        return True

    @property
    def gathers_parameters(self) -> bool:
        """Whether a unit's parameters are whole on the device for their use only."""
        return False

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's parameters are gathered for use."""
        return ()

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's gradients are reduced to shards in backward."""
        return ()

    @property
    def treats_equal_blocks_alike(self) -> bool:
        """Whether what becomes of a block is what became of an equal one before it, wherever among
        the blocks it stands. Owners that are chosen by what they own so far are not alike."""
        return True

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        """The axes along which ranks store different numbers of bytes, or (`within_tp`) other
        pieces of tensors."""
        return ()


class Ran(NamedTuple):
    """A step that was executed: of the whole rank, or (`piece`) of the stage with this number; a
    model that is not cut is piece 0."""

    step: PlanStep
    piece: int | None = None
