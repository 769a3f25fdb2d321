"""What the steps of a plan are applied to: the model, or the stages of it that a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ptrain.axes.data.run.wrapped import WrappedModel
from ptrain.facts.stages import Chain, Stage
from ptrain.models.initialize import cast
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.rooms.world import World
from ptrain.steps.step import Plan


@dataclass(frozen=True, slots=True)
class Stages:
    """Those that a spec cuts a model into, first to last, and what they are cut from."""

    chain: Chain
    all: tuple[Stage, ...]


@dataclass(kw_only=True, eq=False)
class Workpiece:
    """The model, or one stage's part of it, under the names of the model. `plan` has its own units
    and roles; `copies` are tensors that begin as others of the model. `is_whole`: it is the model
    itself; `has_logits`: its output is logits, or a loss."""

    module: nn.Module
    plan: Plan
    index: int = 0
    is_whole: bool = True
    has_logits: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)
    wrapped: WrappedModel | None = None

    def place(self, world: World) -> None:
        """Bring what is not on meta to the rank's device, in the dtype that is stored."""
        device, layout = world.device, self.plan.update.layout
        tensors = list(self.module.parameters())
        if any(parameter.device != device for parameter in tensors) and not self.is_meta:
            self.module.to(device)
        if self.plan.wrap.has_masters_for_parameters and layout.master is not None:
            cast(self.module, TORCH_DTYPES[layout.master])  # while its tensors are plain

    @property
    def is_meta(self) -> bool:
        """Whether its parameters have no values yet."""
        return any(parameter.is_meta for parameter in self.module.parameters())
