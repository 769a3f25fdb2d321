"""One rank's program while the steps of its plan run: what each step leaves for those behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from ptrain.axes.context.run.apply import ContextGroups
from ptrain.axes.data.run.wrapped import OwnUpdate, WrappedModel
from ptrain.axes.tensor.run.fused import FusedOrder
from ptrain.facts.model import Attending
from ptrain.interpreter.balancing import Balancing
from ptrain.interpreter.clip import Clipping
from ptrain.interpreter.loss import Loss, StepLoss
from ptrain.interpreter.passes import Enter, PassRunner
from ptrain.interpreter.scaling import LossScale
from ptrain.interpreter.workpiece import Stages, Workpiece
from ptrain.models.batch import StepBatch
from ptrain.models.chunked import LossInside
from ptrain.models.drawn import DrawnWeights
from ptrain.models.initialize import InitialValues
from ptrain.models.module_weights import ModuleWeights
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.optimizers.update import TargetsUpdate
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.steps.kind import Ran
from ptrain.steps.step import ChunkedLoss, Plan


@dataclass(kw_only=True, eq=False)
class Construction:
    """One rank's program before it is whole. `head` names the module that makes the logits of a
    model that is not built in, and `attending` those that attend over cp; `weights` are those of
    one that has none yet, and `whole_because` is why it was built with all, if it was; `ran` are
    the steps so far, in the order in which they ran. What a step leaves to be called is given the
    construction and does not keep it: the model would live until somebody collects garbage."""

    spec: Spec
    plan: Plan
    world: World
    module: nn.Module
    head: str = ROOT
    attending: Attending | None = None
    stages: Stages | None = None
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""
    ran: list[Ran] = field(default_factory=list)
    pieces: list[Workpiece] = field(default_factory=list)  # those that a step has reached
    cut: Callable[[Construction], Iterator[Workpiece]] | None = None  # None: of the model one
    join: Callable[[Construction], tuple[WrappedModel, nn.Module]] | None = None
    operators: Callable[[], AbstractContextManager[None]] = nullcontext
    order: FusedOrder = field(default_factory=FusedOrder)
    context: ContextGroups | None = None
    own_tokens: Callable[[StepBatch], StepBatch] = lambda batch: batch  # those that a rank is given
    inside_of: Callable[[ChunkedLoss], LossInside] = LossInside  # of whole logits
    loss: Loss = field(default_factory=Loss)  # how the model gives it
    passes_of: Callable[[Construction, StepLoss, Enter], PassRunner] | None = None
    clipping: Clipping | None = None
    update: TargetsUpdate | OwnUpdate | None = None
    scaling: LossScale | None = None
    balancing: Balancing | None = None
    _mesh: Mesh | None = None
    _joined: tuple[WrappedModel, nn.Module] | None = None

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None, "a mesh is created first"
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def has_mesh(self) -> bool:
        return self._mesh is not None

    def initial_values(self, module: nn.Module) -> InitialValues:
        """Return those of a module that has none: the model, or a part of it."""
        return InitialValues(
            module=module,
            seed=self.spec.train.seed,
            dtype=TORCH_DTYPES[self.spec.precision.effective.parameters],
            weights=self.weights,
        )

    def placed_pieces(self) -> Iterator[Workpiece]:
        """One after the other, each placed when its turn comes first: a stage is wrapped before
        the next one is cut."""
        if self.pieces:
            yield from self.pieces
            return
        whole = (Workpiece(module=self.module, plan=self.plan),)
        for piece in self.cut(self) if self.cut else whole:
            piece.place(self.world)
            self.pieces.append(piece)
            yield piece

    @property
    def is_wrapped(self) -> bool:
        """Whether every piece is."""
        return bool(self.pieces) and all(piece.wrapped is not None for piece in self.pieces)

    @property
    def wrapped(self) -> WrappedModel:
        """All pieces as one wrapped model."""
        return self._whole()[0]

    @property
    def model(self) -> nn.Module:
        """What it wraps: the model, or the rank's stages of it."""
        return self._whole()[1]

    def _whole(self) -> tuple[WrappedModel, nn.Module]:
        if self._joined is None:
            assert self.is_wrapped, "units are wrapped first"
            self._joined = self.join(self) if self.join else self._only_piece()
        return self._joined

    def _only_piece(self) -> tuple[WrappedModel, nn.Module]:
        (piece,) = self.pieces
        assert piece.wrapped is not None
        return piece.wrapped, piece.module
