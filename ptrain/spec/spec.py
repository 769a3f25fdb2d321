"""The resolved spec, which every other part of ptrain reads (`spec.load` makes it), and its ranks:
row-major over the mesh, the outermost axis first, as DeviceMesh.

Also the checks of a spec's needs at run time: optional packages, writable folders, and permission
to import the user's code.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Self

from ptrain.cost import PLACED, State
from ptrain.errors import SpecError, input_error
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.batch import Batch
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import UnitSize
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.keys import Keys
from ptrain.spec.leaf import Leaf, iter_keys
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec, UserFunction
from ptrain.spec.placement import (
    EXPERT_AXES,
    REDUCED_AXES,
    SAMPLE_AXES,
    TOKEN_AXES,
    Axis,
    Distribution,
    Factor,
    R,
    Tier,
)
from ptrain.spec.precision import Precision
from ptrain.units import group_by_key
from ptrain.wording import Worded


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """The activation modes of a rank's blocks.

    Attributes:
        default: The mode of the blocks that `by_block` does not list.
        by_block: Ranges (first, last, mode); `last` is None for an open range.
        every: Only every n-th block with mode M is recomputed, starting with the first; the others
            are R.
        budget: Peak memory in bytes, from which the policy is selected.
        is_open: The policy is not selected yet. Until then, full recomputation is assumed.
    """

    default: ActivationMode = PLAIN
    by_block: tuple[tuple[int, int | None, ActivationMode], ...] = ()
    every: int = 1
    budget: int | None = None
    is_open: bool = False

    @property
    def modes(self) -> tuple[ActivationMode, ...]:
        """All modes that a block may have."""
        return (self.default, *(kept for _, _, kept in self.by_block))

    @property
    def tiers(self) -> frozenset[Tier]:
        """The tiers that store activations of a block."""
        return frozenset(kept.tier for kept in self.modes)

    def block_modes(self, blocks: int) -> tuple[ActivationMode, ...]:
        """Return the mode of each of `blocks` blocks.

        Args:
            blocks: Number of blocks of the model.

        Returns:
            One mode per block, first to last.
        """
        if not self.by_block and self.every == 1:
            return (self.default,) * blocks
        modes = [self.default] * blocks
        for first, last, kept in self.by_block:
            for index in range(first, blocks if last is None else last + 1):
                modes[index] = kept
        recomputed = [index for index, kept in enumerate(modes) if kept.policy is not None]
        for place, index in enumerate(recomputed):
            if place % self.every:
                modes[index] = PLAIN
        return tuple(modes)

    def distinct_of(self, blocks: int) -> tuple[ActivationMode, ...]:
        """Return the distinct modes of `blocks` blocks. Equal modes are one object, so that they
        are compared by identity: models have many blocks, and a comparison of modes is slow."""
        return tuple({id(kept): kept for kept in self.block_modes(blocks)}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The loss of a training step.

    Attributes:
        chunk: Tokens of a micro-batch whose logits exist at once. None for all tokens.
        fused: True for torch's linear_cross_entropy.
        function: The user's function of the model's output that returns the loss.
        step: The user's function that runs the model and returns the loss. At most one of the two
            functions is set.
    """

    chunk: int | None = None
    fused: bool = False
    function: UserFunction | None = None
    step: UserFunction | None = None

    @property
    def user_function(self) -> UserFunction | None:
        """The user's function, or None for the built-in loss."""
        return self.function or self.step


@dataclass(frozen=True, kw_only=True)
class Spec(Keys, Worded):
    """A complete, resolved spec.

    Attributes:
        factors: The axes with several ranks, outermost first. The product of their degrees is the
            world size.
        trivial_factors: The axes of degree 1 that have a tuple. The tuple is checked and has no
            other effect.
        resolved: A plain mapping that, written as YAML, loads to an equal spec.
    """

    name: str
    model: ModelSpec
    factors: tuple[Factor, ...]
    batch: Batch
    precision: Precision = field(default_factory=Precision)
    cluster: Cluster | None = None
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    resolved: dict[str, object] = field(default_factory=dict)
    trivial_factors: tuple[Factor, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return f"Spec({self.name})"

    @property
    def unit_size(self) -> UnitSize:
        """The modules that are wrapped together; a block by default."""
        return self.unit or UnitSize()

    @property
    def vocab_padding(self) -> int:
        """The number of logits per token that belong to no token. They are the last ones."""
        return self.model.vocab_padding if isinstance(self.model, ModelShape) else 0

    @property
    def log_every(self) -> int:
        """The number of steps between two log lines."""
        return self.log.every

    @property
    def user_functions(self) -> tuple[UserFunction, ...]:
        """The user's functions that the spec names."""
        of_model = self.model.function if isinstance(self.model, ExternalModel) else None
        functions = of_model, self.data.function, self.loss.user_function
        return tuple(function for function in functions if function is not None)

    @property
    def ignores_targets(self) -> bool:
        """True if some targets may be excluded from the loss."""
        return self.data.ignores_targets or self.batch.padding > 0

    @property
    def world_size(self) -> int:
        return math.prod(factor.degree for factor in self.factors)

    @property
    def data_degree(self) -> int:
        """The number of ranks with different samples."""
        return math.prod(self.degree(axis) for axis in SAMPLE_AXES)

    @property
    def has_token_slices(self) -> bool:
        """True if ranks have different tokens of the same samples."""
        return self.is_cut_over(TOKEN_AXES)

    @property
    def is_sequence_parallel(self) -> bool:
        """True if ranks of tp have different tokens between operators."""
        return any(f.axis is Axis.TP and f.placement.activations != R for f in self.factors)

    @property
    def own_tokens(self) -> int:
        """The number of tokens of a sample that a rank has throughout the model."""
        return self.batch.sequence // math.prod(self.degree(axis) for axis in TOKEN_AXES)

    @property
    def folded_axes(self) -> tuple[Axis, ...]:
        """The operator axes whose ranks have different experts and route a shard of the tokens
        each: tp if it is folded into ep."""
        is_so = self.tensor.is_folded and self.is_cut_over(EXPERT_AXES)
        return (Axis.TP,) if is_so and self.degree(Axis.TP) > 1 else ()

    @property
    def expert_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have different experts, outermost first."""
        axes = (*EXPERT_AXES, *self.folded_axes)
        return tuple(f.axis for f in self.factors if f.axis in axes and f.degree > 1)

    @property
    def routing_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks route different tokens."""
        return (*REDUCED_AXES, *self.folded_axes)

    @property
    def routed_tokens(self) -> int:
        """The number of tokens of a sample that a rank routes to experts."""
        return self.own_tokens // math.prod(self.degree(axis) for axis in self.folded_axes)

    @property
    def may_be_on_cuda(self) -> bool:
        """True if the spec may run on GPUs: by its device, else by its cluster's kind. True if
        neither is set."""
        if self.device != "auto":
            return self.device == "cuda"
        # A figure that differs between CPUs and GPUs is claimed only if it is certain which of them
        # runs it.
        return self.cluster is None or self.cluster.kind != "cpu"

    @property
    def is_for_cuda(self) -> bool:
        """True if the spec explicitly runs on GPUs."""
        by_cluster = self.cluster is not None and self.cluster.kind == "cuda"
        return self.device == "cuda" or (self.device == "auto" and by_cluster)

    @property
    def sm(self) -> int | None:
        """The compute capability of the cluster's GPUs (90 for H100), or None."""
        return self.cluster.sm if self.cluster else None

    def with_fields(self, **changes: Any) -> Self:
        """Return the spec with other values of some fields, like `dataclasses.replace`.

        This takes a tenth of the time: it copies `__dict__` and skips `__init__`. A search makes
        thousands of specs.
        """
        assert changes.keys() <= self.__dict__.keys(), "fields of a spec"
        spec = object.__new__(type(self))
        spec.__dict__.update(self.__dict__, **changes)
        return spec

    def degree(self, axis: Axis) -> int:
        for factor in self.factors:  # a generator takes twice as long, and all rules ask
            if factor.axis is axis:
                return factor.degree
        return 1

    def is_cut_over(self, axes: Sequence[Axis]) -> bool:
        """Return True if any of these axes has two or more ranks.

        Args:
            axes: Axes of the mesh.

        Returns:
            True for two or more ranks on any of them.
        """
        return any(self.degree(axis) > 1 for axis in axes)

    def axes_where(self, state: State, *distributions: Distribution) -> tuple[Axis, ...]:
        """Return the axes, outermost first, on which `state` has one of these distributions.

        Args:
            state: The state, such as `State.PARAMETERS`.
            distributions: The accepted distributions, such as sharded.

        Returns:
            Axes of the mesh, outermost first.
        """
        return tuple(
            factor.axis
            for factor in self.factors
            if factor.placement[state].distribution in distributions
        )


def coordinates(spec: Spec, rank: int) -> dict[Axis, int]:
    """Return the index of `rank` along every axis of the mesh.

    Args:
        spec: A resolved spec.
        rank: Rank in the mesh, from 0.

    Returns:
        The index along each axis, from 0.
    """
    assert 0 <= rank < spec.world_size, f"rank {rank} is not in a world of {spec.world_size}"
    place: dict[Axis, int] = {}
    for factor in reversed(spec.factors):
        rank, place[factor.axis] = divmod(rank, factor.degree)
    return {factor.axis: place[factor.axis] for factor in spec.factors}


def rank_groups(spec: Spec, axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
    """Return all groups over `axes` in mesh order, sorted by their lowest rank.

    Args:
        spec: A resolved spec.
        axes: Axes of the groups.

    Returns:
        Tuples of ranks, from 0.
    """
    others = [factor.axis for factor in spec.factors if factor.axis not in axes]
    members = group_by_key(
        (place, rank) for rank, place in enumerate(indices_in_groups(spec, others))
    )
    return tuple(map(tuple, members.values()))


def place_of(spec: Spec, axes: Sequence[Axis], index: int) -> dict[Axis, int]:
    """Return the index along each of `axes` of the ranks with this index in their group.

    Args:
        spec: A resolved spec.
        axes: Axes of the group.
        index: Index in the group, from 0.

    Returns:
        The index along each axis, from 0.
    """
    places: dict[Axis, int] = {}
    for factor in reversed(spec.factors):
        if factor.axis in axes:
            index, places[factor.axis] = divmod(index, factor.degree)
    return places


def indices_in_groups(spec: Spec, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the index of every rank in its group, which is the index of its shard.

    Args:
        spec: A resolved spec.
        axes: Axes of the group.

    Returns:
        One index per rank of the mesh.
    """
    return _compute_indices(
        tuple([(factor.degree, factor.axis in axes) for factor in spec.factors])
    )


@lru_cache(maxsize=2**6)
def _compute_indices(factors: tuple[tuple[int, bool], ...]) -> tuple[int, ...]:
    """Return `indices_in_groups`; each factor is a degree and whether its axis is one of the
    group's."""
    indices = [0]
    for degree, is_along in factors:
        if is_along:
            indices = [index * degree + here for index in indices for here in range(degree)]
        else:
            indices = [index for index in indices for _ in range(degree)]
    return tuple(indices)


def ranks_over(spec: Spec, axes: Sequence[Axis]) -> int:
    """Return the number of ranks in a group over `axes`.

    Args:
        spec: A resolved spec.
        axes: Axes of the group.

    Returns:
        The product of the axes' degrees.
    """
    return math.prod(spec.degree(axis) for axis in axes)


def require_leave(spec: Spec, *, allow_import: bool) -> None:
    """Before a function of the user's is imported."""
    for function in spec.user_functions:
        require_leave_of(function, allow_import=allow_import)


def require_leave_of(function: UserFunction, *, allow_import: bool) -> None:
    """Before this one is."""
    if not allow_import:
        raise input_error(
            function.target_key,
            f"the code of {function.target} is not imported",
            "Add `--allow-import`; in Python, pass `allow_import=True`.",
        )


def require_auto_micro(spec: Spec) -> None:
    """Check that `batch.micro=auto` supports the spec's values (`Leaf.allows_auto_micro`).

    Raises:
        SpecError: A key has a value other than its default, which is the only one supported.
    """
    for route, spot, holds in iter_keys(SpecRaw):
        place = ".".join(route)
        if not isinstance(holds, Leaf) or holds.allows_auto_micro:
            continue
        if (value := attrgetter(place)(spec)) != spot.default:
            finding = f"not supported yet: {place}={value} with batch.micro=auto"
            remedy = f"Set `batch.micro` to a number, or use `{place}={spot.default}`."
            raise input_error(place, finding, remedy)


def require_transformers(model: ModelSpec) -> None:
    """Before anything is built or started of a class of transformers."""
    if isinstance(model, HuggingFaceModel) and find_spec("transformers") is None:
        raise input_error(
            "model.hf",
            f"{model.hf} is a class of Transformers, which is not installed",
            "Run `pip install 'transformers>=4.56,<6'`.",
        )


def require_file_tier(spec: Spec) -> None:
    """Raises SpecError where a state goes to files and no file can be made in their folder."""
    tiers = {factor.placement[state].tier for factor in spec.factors for state in PLACED}
    if Tier.FILE not in tiers | spec.activations.tiers:
        return
    try:
        tempfile.TemporaryFile(prefix="ptrain-", dir=spec.offload.path).close()
    except OSError as error:
        raise unusable_folder_error(spec.offload.path, error) from error


def unusable_folder_error(path: str | None, error: OSError | RuntimeError) -> SpecError:
    """Return the SpecError for a folder that cannot be used.

    A folder that exists but accepts no files (such as /proc) reports ENOENT, so the path is checked
    first.

    Args:
        path: The folder; None for the system's temporary folder.
        error: The operating system's error.
    """
    folder = path or tempfile.gettempdir()
    reason = getattr(error, "strerror", None) or str(error)
    if not os.path.lexists(folder):
        finding = "no such folder"
    elif not os.path.isdir(folder):
        finding = "is not a folder"
    elif isinstance(error, FileNotFoundError):
        finding = "is not writable"
    else:
        finding = f"is not writable: {reason}"
    return input_error(
        "offload.path",
        f"{folder}: {finding}",
        "Use an existing, writable folder with enough space for the file tier.",
    )
