"""One rank's part of a model on the tensor axis: local shapes of tensors, local values of the
dimensions in tables of allocations, and the axis's part of a search."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Protocol

from ptrain.axes.candidates import AxisOption, FixedChoices, divisors, single_axis_space
from ptrain.errors import input_error
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Placement, R, Role, Roles, S, matches_pattern
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div, with_noun

Shape = tuple[int, ...]

_NUMBERS = re.compile(r"\d+")
# The dimension along which a role shards a weight, and the one along which it shards a bias.
_CUT_DIM = {
    Role.COLUMN: (0, 0),
    Role.TRANSPOSED_COLUMN: (1, 0),
    Role.GROUP_COLUMN: (0, 0),
    Role.HEAD: (0, 0),
    Role.VOCABULARY: (0, None),
    Role.ROW: (1, None),
    Role.TRANSPOSED_ROW: (0, None),
    Role.INNER_COLUMN: (-2, None),
    Role.INNER_ROW: (-1, None),
}
_MATRICES = (2, 3)  # dimensions of a weight, and of the stacked weights of all experts


def shard_sizes(size: int, degree: int) -> list[int]:
    """Return the elements of each rank's shard of a dimension, as DTensor shards it.

    Args:
        size: The elements of the full dimension.
        degree: The number of ranks.

    Returns:
        The sizes by rank: equal, rounded up; the last ones are smaller or 0.
    """
    chunk = ceil_div(size, degree)
    return [max(0, min(size, (index + 1) * chunk) - index * chunk) for index in range(degree)]


def shards_differ(size: int, degree: int, shards: int) -> bool:
    """Return True if tp shards of a tensor's rows cannot be sharded further over `shards` ranks.

    That is so if tp shards give further shards of different heights: torch then computes wrong
    offsets for a DTensor that is sharded twice (2.11 to 2.13). It is also so if only some tp shards
    have fewer rows than `shards`, because these are sharded along another dimension.

    Args:
        size: Rows of the full tensor.
        degree: Ranks of tp.
        shards: Data ranks that shard the rows of a tp shard.
    """
    heights = {(ceil_div(rows, shards), rows < shards) for rows in shard_sizes(size, degree)}
    return shards > 1 and len(heights) > 1


def cut_sizes(shape: ModelShape, *, has_whole_experts: bool = False) -> dict[str, int]:
    """Return the sizes, by field, that a degree of tp must divide for equal shards of all
    operators.

    If experts are replicated (`has_whole_experts`), shared experts are still sharded.
    """
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    if shape.experts is None or shape.dense_layers:
        sizes["ffn"] = shape.ffn
    if shape.experts is not None and (shape.shared_experts or not has_whole_experts):
        sizes["expert_ffn" if shape.expert_ffn else "ffn"] = shape.width_of_expert
    return sizes


def ranks_per_kv_head(shape: ModelShape, degree: int) -> int | None:
    """Return the number of tp ranks that share a key-value head.

    Each of them has equally many rows of the head's weights, and all-gathers its keys and values.

    Args:
        shape: The model.
        degree: The number of ranks.

    Returns:
        1 if each rank has full heads. None if neither the heads nor the rows of a head can be
        divided equally.
    """
    if shape.kv_heads % degree == 0:
        return 1
    ranks, rest = divmod(degree, shape.kv_heads)
    return None if rest or shape.head_dim % ranks else ranks


class OperatorSharding(Protocol):
    """The interface of a plan's operator sharding (`steps.step.Parallelize`)."""

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
    """The roles of a model's modules. They are cached, because the modules of all blocks usually
    have equal roles."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        # patterns without digits match blocks of any number, so one block represents all
        self._by_number = any(map(str.isdigit, "".join(pattern for pattern, _ in roles)))
        self._known: dict[str, tuple[Role, ...]] = {}  # by module name

    def roles(self, module: str) -> tuple[Role, ...]:
        """Return all roles of a module, in order."""
        if module not in self._known:
            key = module if self._by_number else _NUMBERS.sub("0", module)
            if key not in self._known:
                self._known[key] = tuple(
                    [r for pattern, r in self._roles if matches_pattern(pattern, key)]
                )
            self._known[module] = self._known[key]
        return self._known[module]

    def of_tensor(self, name: str) -> Role | None:
        """Return the first role of the module to which a tensor belongs, or None."""
        return next(iter(self.roles(name.rpartition(".")[0])), None)


@lru_cache(maxsize=16)
def module_roles(roles: Roles) -> ModuleRoles:
    """Return the cached `ModuleRoles` of these roles."""
    return ModuleRoles(roles)


def cut_dims(step: OperatorSharding, tensors: Iterable[tuple[str, Shape]]) -> dict[str, int]:
    """Return the dimension along which each sharded tensor is sharded, by name.

    Replicated tensors are left out. `shard_sizes` returns the sizes of the shards.
    """
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
class TensorRank:
    """Rank `index` of `degree` ranks, over which `step` shards a model's operators."""

    step: OperatorSharding
    degree: int
    index: int

    @property
    def table_name(self) -> str:
        """The name of the tables (`derivation.tables`) with the allocations of such a rank."""
        step = self.step
        if step.is_naive:
            name = "naive"
        elif step.is_saved_cut:
            name = "saved"
        else:
            name = "cut" if step.is_sequence else "whole"
        return name if step.loss_parallel else f"{name}-gathered"

    def slice_of(self, size: int) -> int:
        """Return the elements of this rank's shard of a dimension."""
        return shard_sizes(size, self.degree)[self.index]

    def dimensions(self, shape: ModelShape, *, batch: int, sequence: int) -> dict[str, int]:
        """Return the value of every symbol of a table on this rank.

        Args:
            shape: The shape of the full model.
            batch: The samples of a micro-batch.
            sequence: The tokens of a sample before tp shards them.

        Returns:
            The local sizes by symbol, such as heads and features per rank; `vocab_all` is the full
            size.
        """
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


# Candidates of a search: degrees that divide a model's operators. Activations between blocks are
# replicated (R), sharded by tokens (S), or also saved as token shards (S*).

_TUPLES = tuple(
    Placement(parameters=S, optimizer=S, gradients=S, activations=activations)
    for activations in (R, S, S_STAR)
)


def _degrees_to_search(spec: Spec, devices: int, written: FixedChoices) -> Iterable[int]:
    """Return the degrees to search, which are at most the devices of a node.

    Every operator of a block waits for the collectives of tp. Set larger degrees in the spec.

    Raises:
        SpecError: The spec sets a degree larger than the number of key-value heads.
    """
    cluster, shape, written_degree = spec.cluster, spec.model, written.degree(Axis.TP)
    if isinstance(shape, ModelShape) and written_degree and written_degree > shape.kv_heads:
        raise input_error(
            "mesh.tp",
            f"not supported yet: searching with tp={written_degree} for a model with "
            f"{with_noun(shape.kv_heads, 'key-value head')}, because no memory table covers ranks "
            "that share a head",
            f"Use `mesh.tp={shape.kv_heads}` or less, or predict single placements with "
            "`ptrain predict`.",
        )
    most = min(devices, cluster.devices_per_node) if cluster else devices
    common = gcd(*cut_sizes(shape).values()) if isinstance(shape, ModelShape) else most
    within = (size for size in divisors(common) if size <= most and devices % size == 0)
    return written.degrees_to_try(Axis.TP, devices, within)


def _options(spec: Spec, ranks: int) -> tuple[AxisOption, ...]:
    return tuple(((offered,), ()) for offered in _TUPLES)


SPACE = single_axis_space(Axis.TP, _degrees_to_search, _options, _TUPLES)
