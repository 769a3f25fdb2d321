"""The parameters of one flat unit in closed form: the memory to gather them for use.

Where it is cut, on another tier, or M, a unit is whole on the device only while it is used: an
all-gather fills the whole from the rank's part, which must be on the device in the dtype of use
(a copy, where what is stored is neither), through a buffer of the whole's size where the parts do
not lie in the order of the group. A whole copy on another tier is copied without a part in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.placement import Tier, exclude_axes
from ptrain.spec.precision import DType, Layout
from ptrain.steps.wraps import FlatUnits
from tests.oracles.data.buffer import Axes, Buffer


@dataclass(frozen=True, slots=True)
class ParametersForm:
    """The parameters of a unit with this buffer."""

    step: FlatUnits
    layout: Layout
    buffer: Buffer
    is_root: bool

    @property
    def dtype(self) -> DType:
        """Return the dtype of the stored parameters, or of the master copy they are cast from."""
        return self.layout.update_dtype if self.step.materialized else self.layout.parameters

    @property
    def is_transient(self) -> bool:
        """Return True if the full parameters exist only during use."""
        step = self.step
        return bool(step.parameters) or step.parameters_tier is not Tier.DEVICE or step.materialized

    @property
    def stored(self) -> int:
        """Return the stored bytes of a rank."""
        return self.buffer.shard(self.step.parameters) * self.dtype.itemsize

    @property
    def part(self) -> int:
        """Return the bytes of a rank's shard in the dtype of use."""
        return self.buffer.shard(self.step.parameters) * self.layout.parameters.itemsize

    @property
    def whole(self) -> int:
        """Return the device bytes of its use above the stored ones."""
        return self.buffer.padded * self.layout.parameters.itemsize * self.is_transient

    @property
    def gathering(self) -> int:
        """Return the bytes from the start of its gather until the wait: the full parameters, the
        sent shard if it is a copy, the receive buffer if it is separate."""
        step, layout = self.step, self.layout
        if not step.parameters:
            return self.whole
        is_copy = step.parameters_tier is not Tier.DEVICE or self.dtype is not layout.parameters
        received = self.buffer.permuted((), step.parameters) * layout.parameters.itemsize
        return self.whole + is_copy * self.part + received

    @property
    def left_open(self) -> Axes:
        """Return the axes whose gather the update leaves to the next use."""
        if self.step.gather_after_update is not GatherAfterUpdate.NEXT_FORWARD:
            return ()
        return exclude_axes(self.step.updated, self.step.parameters)

    @property
    def completing(self) -> int:
        """Return the bytes of that late gather into the stored parameters: this rank's updated
        shard if it is no contiguous piece, and a buffer if the parts are in another order."""
        if not self.left_open:
            return 0
        had = self.step.parameters
        copies = self.buffer.copied(had, self.left_open) + self.buffer.permuted(had, self.left_open)
        return copies * self.dtype.itemsize

    @property
    def stays(self) -> bool:
        """Return True if a unit stays gathered from its forward to its backward pass."""
        return not self.step.sync.after_forward(is_root=self.is_root)
