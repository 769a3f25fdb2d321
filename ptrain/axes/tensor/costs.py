"""What one rank of the tensor axis has of a model: the local shape of every tensor, and the local
value of every dimension that a table of allocations is written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ptrain.spec.model import ModelShape
from ptrain.spec.role import Role, Roles, fits
from ptrain.units import ceil_div

Shape = tuple[int, ...]

# The dimension along which a role cuts a weight; its bias is cut where that is the outputs.
_CUT_DIM = {Role.COLUMN: 0, Role.HEAD: 0, Role.VOCABULARY: 0, Role.ROW: 1}


def slices(size: int, degree: int) -> list[int]:
    """Elements of each rank's slice of a dimension, as DTensor cuts: equal ones, rounded up, the
    last shorter or empty."""
    chunk = ceil_div(size, degree)
    return [max(0, min(size, (index + 1) * chunk) - index * chunk) for index in range(degree)]


def shards_differ(size: int, degree: int, shards: int) -> bool:
    """Whether the slices of a tensor's rows are cut into shards of different heights: the offsets
    that torch then computes for a DTensor that is cut twice are wrong (2.11 to 2.13)."""
    heights = {ceil_div(each, shards) for each in slices(size, degree)}
    return shards > 1 and len(heights) > 1


class HowCut(Protocol):
    """What a plan says of a model's operators (`plan.step.Parallelize`)."""

    @property
    def roles(self) -> Roles: ...
    @property
    def is_sequence(self) -> bool: ...
    @property
    def is_saved_cut(self) -> bool: ...
    @property
    def loss_parallel(self) -> bool: ...
    @property
    def is_naive(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rank `index` of `degree` ranks that share the operators of a model as `step` says."""

    step: HowCut
    degree: int
    index: int

    @property
    def kind(self) -> str:
        """The name of the tables (`traces.tensor_tables`) that hold what such a rank allocates."""
        step = self.step
        if step.is_naive:
            name = "naive"
        elif step.is_saved_cut:
            name = "saved"
        else:
            name = "cut" if step.is_sequence else "whole"
        return name if step.loss_parallel else f"{name}-gathered"

    def role(self, tensor: str) -> Role | None:
        """Of the module that a tensor belongs to."""
        module = tensor.rpartition(".")[0]
        return next((role for pattern, role in self.step.roles if fits(pattern, module)), None)

    def shape(self, tensor: str, shape: Shape) -> Shape:
        """What this rank stores of a tensor: equal slices, rounded up, the last one shorter, as
        DTensor cuts."""
        dim = self._dim(tensor, shape)
        if dim is None:
            return shape
        return (*shape[:dim], self.slice_of(shape[dim]), *shape[dim + 1 :])

    def is_cut(self, tensor: str, shape: Shape) -> bool:
        """Whether the ranks have different slices of it."""
        return self._dim(tensor, shape) is not None

    def _dim(self, tensor: str, shape: Shape) -> int | None:
        """Along which it is cut; None where every rank has it whole."""
        role = self.role(tensor)
        dim = None if role is None else _CUT_DIM.get(role)
        return None if dim is None or dim >= len(shape) else dim

    def slice_of(self, size: int) -> int:
        """Elements of this rank's slice of a dimension."""
        return slices(size, self.degree)[self.index]

    def dimensions(self, shape: ModelShape, *, batch: int, sequence: int) -> dict[str, int]:
        """The value of every symbol of a table."""
        degree = self.degree
        return {
            "tp": degree,
            "batch": batch,
            "sequence": sequence // degree if self.step.is_sequence else sequence,
            "heads": shape.heads // degree,
            "repeats": shape.heads // shape.kv_heads,
            "kv_heads": shape.kv_heads // degree,
            "head_dim": shape.head_dim,
            "pairs": shape.head_dim // 2,
            "ffn": shape.ffn // degree,
            "vocab": self.slice_of(shape.vocab),
            "vocab_all": shape.vocab,
        }
