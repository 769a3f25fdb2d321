"""What one rank of the tensor axis has of a model: the local shape of every tensor, and the local
value of every dimension that a table of allocations is written in; and the axis's part of a search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Protocol

from ptrain.axes.candidates import Way, Written, divisors, of_one_axis
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Placement, R, S
from ptrain.spec.role import Role, Roles, fits
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

Shape = tuple[int, ...]

_NUMBERS = re.compile(r"\d+")
# The dimension along which a role cuts a weight, and that along which it cuts a bias.
_CUT_DIM = {
    Role.COLUMN: (0, 0),
    Role.TRANSPOSED_COLUMN: (1, 0),
    Role.HEAD: (0, 0),
    Role.VOCABULARY: (0, None),
    Role.ROW: (1, None),
    Role.TRANSPOSED_ROW: (0, None),
    Role.INNER_COLUMN: (-2, None),
    Role.INNER_ROW: (-1, None),
}
_MATRICES = (2, 3)  # dimensions of one, and of those of all experts


def slices(size: int, degree: int) -> list[int]:
    """Elements of each rank's slice of a dimension, as DTensor cuts: equal ones, rounded up, the
    last shorter or empty."""
    chunk = ceil_div(size, degree)
    return [max(0, min(size, (index + 1) * chunk) - index * chunk) for index in range(degree)]


def shards_differ(size: int, degree: int, shards: int) -> bool:
    """Return whether the slices of a tensor's rows are cut into shards of different heights: the
    offsets that torch then computes for a DTensor that is cut twice are wrong (2.11 to 2.13). Or
    whether only some slices have fewer rows than shards: these are cut along another dimension."""
    heights = {(ceil_div(rows, shards), rows < shards) for rows in slices(size, degree)}
    return shards > 1 and len(heights) > 1


def cut_sizes(shape: ModelShape, *, has_whole_experts: bool = False) -> dict[str, int]:
    """Return by field what a degree must divide, so that every rank has as much of an operator; of
    experts that are whole on a rank, those that are shared are cut all the same."""
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    if shape.experts is None or shape.dense_layers:
        sizes["ffn"] = shape.ffn
    if shape.experts is not None and (shape.shared_experts or not has_whole_experts):
        sizes["expert_ffn" if shape.expert_ffn else "ffn"] = shape.width_of_expert
    return sizes


class HowCut(Protocol):
    """What a plan says of a model's operators (`steps.step.Parallelize`)."""

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


class ModuleRoles:
    """The modules that roles are of: of a name in a model of many blocks it is known after the
    first one."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        # a pattern without a digit means modules of any number
        self._by_number = any(map(str.isdigit, "".join(pattern for pattern, _ in roles)))
        self._known: dict[str, tuple[Role, ...]] = {}  # by a module's name, of any block and of one

    def roles(self, module: str) -> tuple[Role, ...]:
        """All that a module has, in their order."""
        if module not in self._known:
            key = module if self._by_number else _NUMBERS.sub("0", module)
            if key not in self._known:
                self._known[key] = tuple([r for pattern, r in self._roles if fits(pattern, key)])
            self._known[module] = self._known[key]
        return self._known[module]

    def of_tensor(self, name: str) -> Role | None:
        """The first role of the module that a tensor belongs to."""
        return next(iter(self.roles(name.rpartition(".")[0])), None)


@lru_cache(maxsize=16)
def module_roles(roles: Roles) -> ModuleRoles:
    """Return what is known of the modules of models with these roles."""
    return ModuleRoles(roles)


def cut_dims(step: HowCut, tensors: Iterable[tuple[str, Shape]]) -> dict[str, int]:
    """The dimension along which ranks have different slices of a tensor, by its name; those that
    every rank has whole are left out. Equal slices, rounded up, the last one shorter, as DTensor
    cuts."""
    modules = module_roles(step.roles)
    dims: dict[str, int] = {}
    for name, shape in tensors:
        role = modules.of_tensor(name)
        of_weight, of_bias = _CUT_DIM.get(role, (None, None)) if role else (None, None)
        dim = of_weight if len(shape) in _MATRICES else of_bias
        if dim is not None:
            dims[name] = dim % len(shape)
    return dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rank `index` of `degree` ranks that share the operators of a model as `step` says."""

    step: HowCut
    degree: int
    index: int

    @property
    def kind(self) -> str:
        """The name of the tables (`derivation.tables`) that hold what such a rank allocates."""
        step = self.step
        if step.is_naive:
            name = "naive"
        elif step.is_saved_cut:
            name = "saved"
        else:
            name = "cut" if step.is_sequence else "whole"
        return name if step.loss_parallel else f"{name}-gathered"

    def slice_of(self, size: int) -> int:
        """Elements of this rank's slice of a dimension."""
        return slices(size, self.degree)[self.index]

    def dimensions(self, shape: ModelShape, *, batch: int, sequence: int) -> dict[str, int]:
        """Return the value of every symbol of a table, on this rank."""
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
            "vocab": self.slice_of(shape.vocab_rows),
            "vocab_all": shape.vocab_rows,
        }


# What the tensor axis offers to a search: degrees that divide a model's operators, with
# activations whole between the blocks, in slices of the tokens, or saved so too.

_TUPLES = tuple(
    Placement(parameters=S, optimizer=S, gradients=S, activations=activations)
    for activations in (R, S, S_STAR)
)


def _sizes(spec: Spec, devices: int, written: Written) -> Iterable[int]:
    """Return the sizes within a node: every operator of a block waits for what they send. Larger
    ones must be written."""
    cluster, shape = spec.cluster, spec.model
    most = min(devices, cluster.devices_per_node) if cluster else devices
    common = gcd(*cut_sizes(shape).values()) if isinstance(shape, ModelShape) else most
    within = (size for size in divisors(common) if size <= most and devices % size == 0)
    return written.sizes(Axis.TP, devices, within)


def _ways(spec: Spec, ranks: int) -> tuple[Way, ...]:
    return tuple(((offered,), ()) for offered in _TUPLES)


SPACE = of_one_axis(Axis.TP, _sizes, _ways, _TUPLES)
