"""Apply a placement on the tensor axis to a module: torch's parallel styles by role, before any
data axis wraps the module.

Between sub-blocks a rank has all tokens (A = R) or its shard of them (A = S, S*: sequence
parallelism). A sub-block's input is all-gathered once for all its column operators, so that their
gradients are summed once: Megatron's two sums forward and two backward per block.

This module adds three things to torch's styles:

- Sub-blocks whose code counts features or heads get the rank's numbers.
- Dropout uses a separate mask per rank inside a sub-block, and a common mask outside.
- Layers whose weight is stored inputs by outputs (transformers' Conv1D) are sharded.

Several projections can be fused in one tensor, one after the other, and a rank has a shard of each.
A DTensor has only contiguous shards. Such a tensor is therefore stored with its rows in rank order:
the first rank's shards of all projections, then the second rank's. Checkpoints have the model's
order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ptrain.axes.data.run.target import Named, rows_of
from ptrain.axes.tensor.cost import cut_dims, shard_sizes, shards_differ
from ptrain.axes.tensor.run.styles import (
    SEQUENCE,
    FullInput,
    FullOutput,
    GatheredFeatures,
    GatherTokens,
    GradientsLikeParameters,
    HeadParallel,
    InnerShards,
    LocalFullInput,
    LocalInput,
    PartialSums,
    ReplicateParallel,
    ShardTokens,
    SummedGradients,
    TransposedColumn,
    TransposedRow,
)
from ptrain.errors import input_error
from ptrain.facts.stages import is_within
from ptrain.internals.dtensor import RANDOM
from ptrain.internals.part import replace_attributes
from ptrain.models.chain import names_of_parameters
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.ledger import with_first
from ptrain.models.modes import drops_out
from ptrain.models.objective import LossInHead
from ptrain.models.parting import standing_alone
from ptrain.models.window import Window
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.placement import COLUMNS, ROWS, Role, matches_pattern
from ptrain.steps.step import LossStep, Parallelize
from ptrain.units import group_by_key


def held_order(lengths: Sequence[int], degree: int) -> list[int]:
    """Return the features of projections of these lengths in the order of the ranks."""
    return list(_fused_order(lengths, degree))


def _fused_order(lengths: Sequence[int], degree: int) -> Iterator[int]:
    for rank in range(degree):
        start = 0
        for length in lengths:
            part = length // degree
            yield from range(start + rank * part, start + (rank + 1) * part)
            start += length


def _consecutive_runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of numbers that follow one another: the first and how many."""
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[start], index - start
            start = index


class FusedOrder:
    """The order in which the tensors of fused projections are stored, by their names in the model.

    Without a `step`, no projection is fused and all tensors stay in the model's order.
    """

    def __init__(self, step: Parallelize | None = None, degree: int = 1) -> None:
        self.step = step
        self.degree = degree

    def to_model_order(self, named: Named) -> Named:
        """Return tensors in the model's order, with their placements. Collective."""
        return {name: self._permute(name, tensor, back=True) for name, tensor in named.items()}

    def to_rank_order(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return tensors in the order of the ranks, the inverse of `to_model_order`. Collective."""
        return {name: self._permute(name, tensor, back=False) for name, tensor in named.items()}

    def held_features(self, path: str, whole: torch.Tensor) -> torch.Tensor:
        """Return a module's output with the features of a fused projection in the order of the
        ranks."""
        if not (lengths := self._lengths(f"{path}.weight")):
            return whole
        order = torch.tensor(held_order(lengths, self.degree), device=whole.device)
        return whole.index_select(-1, order)

    def model_windows(
        self, name: str, shape: Sequence[int], window: Window, part: torch.Tensor
    ) -> Iterator[tuple[Window, torch.Tensor]]:
        """Yield the windows in the model's order that make up a window of a stored tensor.

        Args:
            name: The tensor's name in the model.
            shape: The shape of the full tensor.
            window: The (start, size) of the window in each dimension, in the order of the ranks.
            part: The elements of `window`.

        Yields:
            A window in the model's order, and its view of `part`.
        """
        lengths, place = self._lengths(name), 0
        if not lengths or self.step is None or not shape:
            yield window, part
            return
        dim = cut_dims(self.step, [(name, tuple(shape))])[name]
        first, count = window[dim]
        for start, size in _consecutive_runs(
            held_order(lengths, self.degree)[first : first + count]
        ):
            yield (*window[:dim], (start, size), *window[dim + 1 :]), part.narrow(dim, place, size)
            place += size

    @torch.no_grad()
    def reorder(self, path: str, module: nn.Module) -> None:
        """Bring the full tensors of a fused projection into rank order, in place."""
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            # `.data` keeps the Parameter object, which may have several names and hooks.
            parameter.data = self._permute(name, parameter.data, back=False)

    def _permute(self, name: str, tensor: torch.Tensor, *, back: bool) -> torch.Tensor:
        lengths = self._lengths(name)
        if not lengths or tensor.dim() == 0 or self.step is None:
            return tensor
        dim = cut_dims(self.step, [(name, tuple(tensor.shape))])[name]
        order = torch.tensor(held_order(lengths, self.degree), device=tensor.device)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ordered = whole.index_select(dim, order.argsort() if back else order)
        if not isinstance(tensor, DTensor):
            return ordered
        return DTensor.from_local(
            rows_of(ordered, tensor).contiguous(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _lengths(self, name: str) -> tuple[int, ...]:
        module = name.rpartition(".")[0]
        fusions = self.step.fusions if self.step else ()
        return next(
            (lengths for pattern, lengths in fusions if matches_pattern(pattern, module)), ()
        )


# Dropout within a sub-block whose heads or features are sharded uses a different mask per rank.
# Activations that are replicated before and after the sub-block use one mask.


_SEED_BYTES = 7  # a seed is a positive 64-bit number


class RankRandomness:
    """The separate random numbers of a rank inside a module, or between its column layers and its
    row layer.

    The seed depends on the state of the device's default generator, on the module and on the rank,
    so nothing is stored between steps. Modules that draw nothing are left unchanged.
    """

    def __init__(self, index: int, device_type: str) -> None:
        self.index = index
        self.device_type = device_type
        self._common: torch.Tensor | None = None
        self._num_modules = 0

    def register(self, module: nn.Module) -> None:
        """Draw separately within `module` during training."""
        if drops_out(module):
            module.register_forward_pre_hook(self._make_enter_hook())
            module.register_forward_hook(self._leave, always_call=True)

    def register_between(
        self, module: nn.Module, columns: Iterable[nn.Module], row: nn.Module
    ) -> None:
        """Draw separately from the sharded output of the first of `columns` to the input of `row`.

        After `row`, all ranks have equal values again. The hook on `module` restores the state if
        backward stops a recomputation early.
        """
        if drops_out(module):
            enter = self._make_enter_hook()
            for column in columns:
                column.register_forward_hook(enter)
            row.register_forward_pre_hook(self._leave)
            module.register_forward_hook(self._leave, always_call=True)

    def _make_enter_hook(self) -> Callable[..., None]:
        """Return the hook of one more module, by whose number it draws."""
        self._num_modules += 1
        return partial(self._enter, self._num_modules - 1)

    def _enter(self, number: int, module: nn.Module, *_: object) -> None:
        # A module with separate numbers may contain another one. The outer one restores the state.
        if not module.training or self._common is not None:
            return
        default = self._default_generator()
        self._common = default.get_state()
        # A digest of the common state, and not a sum of state and rank: sums of neighbouring seeds
        # and ranks would coincide. The state is restored before a recomputation, which therefore
        # draws the same mask.
        place = f"{number} {self.index} ".encode() + self._common.numpy().tobytes()
        digest = hashlib.blake2b(place, digest_size=_SEED_BYTES).digest()
        default.manual_seed(int.from_bytes(digest, "big"))

    def _leave(self, *_: object) -> None:
        if self._common is not None:
            self._default_generator().set_state(self._common)
        self._common = None

    def _default_generator(self) -> torch.Generator:
        if self.device_type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator


class _NoTracker:
    """A no-op replacement for torch's tracker of DTensor random numbers. torch's tracker draws the
    same numbers on all ranks, starts with a broadcast and warns on CPUs."""

    # torch's dispatch reads this attribute before it enters `_distribute_region`
    # (torch/distributed/tensor/_dispatch.py, 2.13).
    distribute_region_enabled = False

    def _distribute_region(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()


def drawn_by_rank() -> AbstractContextManager[None]:
    """Temporarily draw a DTensor's random numbers from the rank's default generator, whose seed
    determines which ranks draw equally. Replaces torch's tracker."""
    module, tracker = RANDOM
    return replace_attributes(module, **{tracker: _NoTracker()})


# A sub-block whose code reads its number of features or heads from attributes, or from the width of
# its input, gets the rank's numbers, while its column layers get the full input.


class LocalCounts:
    """Narrows the first floating-point input of a module to the rank's width while it runs, for
    code that reads its shape. `columns`, which take the input, get all of it."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._narrow: torch.Tensor | None = None
        self._whole: torch.Tensor | None = None

    def register(
        self, module: nn.Module, attributes: Iterable[str], columns: list[nn.Module]
    ) -> None:
        """Register the hooks, and divide the counting `attributes` by the degree.

        Call it after the styles of the columns are applied.
        """
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // self.degree)
        if columns:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        for column in columns:
            # First among the hooks, because the hook of the column's style makes a DTensor of its
            # input, which must be the full one.
            column.register_forward_pre_hook(self._restore_input, prepend=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first(args, kwargs, self._narrow_input)

    def _narrow_input(self, whole: torch.Tensor) -> torch.Tensor:
        self._whole = whole
        self._narrow = whole.narrow(-1, 0, whole.shape[-1] // self.degree)
        return self._narrow

    def _restore_input(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        # Any other tensor would be replaced by the wrong one without a message.
        assert args and args[0] is self._narrow, "a column takes what its sub-block is given"
        return (self._whole, *args[1:])

    def _leave(self, *_: object) -> None:
        self._narrow = self._whole = None


def parallelize(
    model: nn.Module,
    step: Parallelize,
    device_mesh: DeviceMesh,
    registry: TagRegistry,
    kv_group: dist.ProcessGroup | None = None,
) -> None:
    """Shard the operators of a model by the roles of the plan, in place.

    Args:
        model: The model or stage. Its tensors may be on meta.
        step: The roles of its modules.
        device_mesh: The 1-d mesh of tp.
        registry: Receives the tags of gradients.
        kv_group: The ranks that share a key-value head, if several do.
    """
    # Read before the styles: each of them registers a new Parameter under one name only.
    tied = _tied_names(model)
    order = FusedOrder(step, device_mesh.size())
    alone = standing_alone(_modules_with_roles(model, step))
    routing = [
        name for name, role in _modules_with_roles(model, step) if role is Role.WHOLE_EXPERTS
    ]
    for name, role in _modules_with_roles(model, step):
        module = model.get_submodule(name)
        if role in COLUMNS:
            # Before the style, which takes consecutive rows for each rank.
            order.reorder(name, module)
        has_slices = step.is_sequence or is_within(name, routing)
        between = Shard(SEQUENCE) if has_slices else Replicate()
        for style in _parallel_styles(step, role, registry, between, is_alone=name in alone):
            # All ranks have equal tensors already. With a source rank, torch would scatter each
            # tensor from it.
            parallelize_module(module, device_mesh, style, src_data_rank=None)
        if role is Role.GROUP_COLUMN:
            assert kv_group is not None, "ranks that share a key-value head have a group"
            parallelize_module(module, device_mesh, GatheredFeatures(kv_group))
    _tie_again(model, tied)
    _count_for_itself(model, step, device_mesh.size())
    _draw_for_itself(model, step, device_mesh)
    if step.is_sequence and any(role is Role.POSITIONS for _, role in step.roles):
        first = next(_matching_names(model, step.block_pattern))
        parallelize_module(model.get_submodule(first), device_mesh, LocalInput())
    if not step.loss_parallel:
        heads = [
            name
            for p, role in step.roles
            if role is Role.HEAD
            for name in _matching_names(model, p)
        ]
        for name in heads or [""]:  # a tied model of ours has no head: it gives the logits itself
            model.get_submodule(name).register_forward_hook(
                lambda _, __, logits: _gather_logits(logits)
            )


def _modules_with_roles(model: nn.Module, step: Parallelize) -> Iterator[tuple[str, Role]]:
    """Yield the modules that have roles."""
    for pattern, role in step.roles:
        yield from ((name, role) for name in _matching_names(model, pattern))


def _column_layers(model: nn.Module, step: Parallelize, path: str) -> list[nn.Module]:
    """Return the column layers within a module."""
    roles = (*COLUMNS, Role.INNER_COLUMN)
    names = [name for name, role in _modules_with_roles(model, step) if role in roles]
    return [model.get_submodule(name) for name in names if name.startswith(f"{path}.")]


def _count_for_itself(model: nn.Module, step: Parallelize, degree: int) -> None:
    counts = (pattern.rpartition(".") for pattern, role in step.roles if role is Role.COUNT)
    for owner, attributes in group_by_key((owner, name) for owner, _, name in counts).items():
        for name in _matching_names(model, owner):
            module = model.get_submodule(name)
            LocalCounts(degree).register(module, attributes, _column_layers(model, step, name))


def _draw_for_itself(model: nn.Module, step: Parallelize, device_mesh: DeviceMesh) -> None:
    """Draw a separate dropout mask per rank for sharded tensors."""
    # One generator for all sub-blocks: two with one seed would draw equal masks in every layer.
    own = RankRandomness(device_mesh.get_local_rank(), device_mesh.device_type)
    for name, role in _modules_with_roles(model, step):
        path = name.rpartition(".")[0]
        if role is Role.BLOCK:
            own.register(model.get_submodule(name))
        elif role in ROWS and path and not step.is_sequence:
            columns = _column_layers(model, step, path)
            own.register_between(model.get_submodule(path), columns, model.get_submodule(name))


def require_rows(model: nn.Module, degree: int, shards: int) -> None:
    """Require that every rank has rows of each tensor, and equally many for each data shard.

    The algebra checks this for built-in models only, because it does not have the sizes of others.

    Args:
        model: The sharded model.
        degree: Number of tp ranks.
        shards: Number of data ranks that shard the rows again.

    Raises:
        SpecError: A rank has no rows, or the shards differ.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
            continue
        rows = parameter.shape[0]
        if not min(shard_sizes(rows, degree)):
            finding = f"tp={degree} leaves ranks without a row of {name}, which has {rows}"
            raise input_error("mesh.tp", finding, "Use a smaller `mesh.tp`.")
        if shards_differ(rows, degree, shards):
            finding = (
                f"not supported yet: the {rows} rows of {name} over {degree} tp ranks, "
                "each split into "
            )
            finding += f"{shards} uneven shards"
            raise input_error(
                "mesh.tp",
                finding,
                f"Use a multiple of {degree} rows, or parameters R on the data axes.",
            )


def local_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a replicated loss as a plain tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_inside(step: LossStep, tensor: Parallelize | None) -> LossInHead:
    """Return the change of the head by which it computes the loss.

    Over tp, the logits of a chunk of tokens are all-gathered, unless they stay sharded over the
    vocabulary.
    """
    if tensor is None or tensor.loss_parallel:
        return LossInHead(step)

    def whole_loss(logits: torch.Tensor, targets: torch.Tensor, padding: int) -> torch.Tensor:
        return token_loss_sum(_gather_logits(logits), targets, padding)

    return LossInHead(step, whole_loss)


def micro_batch(step: Parallelize | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of the context for a micro-batch's forward, loss and backward."""
    return nullcontext if step is None else drawn_by_rank


def _parallel_styles(
    step: Parallelize, role: Role, registry: TagRegistry, between: Placement, *, is_alone: bool
) -> Iterator[ParallelStyle]:
    """Yield a role's parallel styles in the order of application. `between` is the placement of
    tokens outside of sub-blocks; `is_alone`: no sub-block gathers the input."""
    has_positions = any(role is Role.POSITIONS for _, role in step.roles)
    match role:
        case Role.VOCABULARY if step.has_whole_ends:
            yield RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            yield GradientsLikeParameters(registry)
        case Role.VOCABULARY:
            is_local = not (step.is_sequence and has_positions)
            yield RowwiseParallel(
                input_layouts=Replicate(), output_layouts=between, use_local_output=is_local
            )
            yield GradientsLikeParameters(registry)
        case Role.POSITIONS:
            if step.is_sequence:
                yield ReplicateParallel()
        case Role.WHOLE_INPUT:
            if not step.is_naive:
                yield FullInput(between, regathers=step.is_saved_cut)
        case Role.COLUMN | Role.TRANSPOSED_COLUMN | Role.GROUP_COLUMN:
            # In the paired plan the sub-block has all-gathered its input already. A column
            # without a pair gathers it here.
            layout = between if step.is_naive or is_alone else Replicate()
            style = TransposedColumn if role is Role.TRANSPOSED_COLUMN else ColwiseParallel
            yield style(input_layouts=layout)
        case Role.ROW | Role.TRANSPOSED_ROW:
            style = RowwiseParallel if role is Role.ROW else TransposedRow
            yield style(output_layouts=between)
        case Role.SHARED | Role.LATENT:
            yield SummedGradients(registry)
        case Role.LATENT_INPUT:
            yield LocalFullInput(between, regathers=step.is_saved_cut)
        case Role.EXPERTS:
            yield PartialSums(between, regathers=step.is_saved_cut)
        case Role.WHOLE_EXPERTS:
            if not step.is_sequence:
                yield ShardTokens(between)
                yield GatherTokens(between)
        case Role.INNER_COLUMN:
            yield InnerShards(-2)
        case Role.INNER_ROW:
            yield InnerShards(-1)
        case Role.FIRST_BLOCK:
            yield ShardTokens(between)
        case Role.LAST_BLOCK:
            yield GatherTokens(between)
        case Role.NORM | Role.LAST_NORM:
            if step.is_sequence:
                yield SequenceParallel(use_local_output=True)
                yield GradientsLikeParameters(registry)
            if role is Role.LAST_NORM:
                yield FullOutput(between)
        case Role.HEAD:
            yield HeadParallel(
                input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
            )


def _matching_names(model: nn.Module, pattern: str) -> Iterator[str]:
    return (name for name, _ in model.named_modules() if matches_pattern(pattern, name))


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    return [names for names in names_of_parameters(model) if len(names) > 1]


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Register one parameter under all names of a tensor.

    Each style registered a separate parameter.
    """
    for first, *others in tied:
        kept = model.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            is_cut = isinstance(model.get_parameter(name), DTensor), isinstance(kept, DTensor)
            # One of the two names would otherwise compute with a tensor that is not trained.
            assert is_cut[0] is is_cut[1], (
                f"{first} and {name} are the same tensor, but only one is sharded"
            )
            model.get_submodule(path).register_parameter(attribute, kept)


def _gather_logits(logits: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, DTensor):
        return logits
    return logits.redistribute(placements=[Replicate()]).to_local()
