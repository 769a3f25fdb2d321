"""Find operations that a tensor-parallel rank cannot do on its shard of the features: splitting or
joining features, and views with a fixed number of heads.

The module also finds which dimension of a tensor is sharded, which operators work along it, and
which linear layers fuse several projections. Linear layers are torch's nn.Linear and transformers'
Conv1D, whose weight is stored as [inputs, outputs].

It also provides a hook for the time when the gradients of a module's inputs are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ptrain.models.ledger import OfStorages, storage_of
from ptrain.spec.placement import Role, in_any_block


class _LeaveBackward(torch.autograd.Function):
    """The identity function, whose backward runs when the gradients of all its inputs are complete.

    FSDP2 places its post-backward hook in the same way.
    """

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.notify()
        return (None, *gradients)


def when_left(inputs: Any, notify: Callable[[], None]) -> Any:
    """Return a module's inputs, marked so that `notify` runs when their gradients are complete.

    If no input requires gradients, `notify` is never called.

    Args:
        inputs: A tree of tensors and other values.
        notify: Runs in the backward pass, before the gradients are passed on.

    Returns:
        The tree, with views of the tensors that require gradients.
    """
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if has_gradient(x) else None, inputs)
    if not tensors:
        return inputs
    marked = iter(_LeaveBackward.apply(notify, *tensors))
    return tree_map(lambda x: next(marked) if has_gradient(x) else x, inputs)


def has_gradient(x: Any) -> bool:
    """Return True for a tensor that requires gradients."""
    return isinstance(x, Tensor) and x.requires_grad


class Projections:
    """The record of views into the outputs of linear layers, from which fused projections are
    found.

    A view of part of every head (the rotated features, or the queries of a layer that interleaves
    query, key and value by head) is no projection, because its features are not contiguous.
    """

    def __init__(self) -> None:
        # name, features and elements
        self._outputs: OfStorages[tuple[str, int, int]] = WeakKeyDictionary()
        self._features: dict[str, int] = {}
        self._pieces: dict[str, set[tuple[int, int]]] = {}  # first feature and number of features

    def register_output(self, name: str, output: torch.Tensor) -> None:
        """Register the output of a layer.

        Args:
            name: The dotted name of the layer.
            output: Its full output [..., features].
        """
        self._features[name] = features = output.shape[-1]
        self._outputs[storage_of(output)] = name, features, output.numel()

    def record_views(self, read: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Record the results of an operator that are views of part of a layer's output.

        Args:
            read: The tensors that the operator read; only full outputs of layers matter.
            results: Its results. Other tensors than views of `read` are ignored.
        """
        whole = {storage_of(tensor) for tensor in read if self.is_whole(tensor)}
        for tensor in results:
            key = storage_of(tensor)
            if key in whole and not self.is_whole(tensor):
                name, features, elements = self._outputs[key]
                # The number of features in the view, if it has all samples and tokens.
                number, rest = divmod(tensor.numel() * features, elements)
                if not rest:
                    piece = tensor.storage_offset() % features, number
                    self._pieces.setdefault(name, set()).add(piece)

    def projection_widths(self, name: str) -> tuple[int, ...]:
        """Return the widths of a layer's projections, or () if it is a single one.

        Views count as projections if they tile the output's features without gaps.

        Args:
            name: The dotted name of the layer.

        Returns:
            The widths in features, in the order of the output's features.
        """
        pieces = sorted(self._pieces.get(name, ()))
        ends = [first + number for first, number in pieces]
        is_tiled = [0, *ends] == [*(first for first, _ in pieces), self._features.get(name)]
        return tuple(number for _, number in pieces) if is_tiled and len(pieces) > 1 else ()

    def owner_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the layer whose output the tensor is or views, or ""."""
        return self._outputs.get(storage_of(tensor), ("", 0, -1))[0]

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor views all elements of a layer's output."""
        _, _, elements = self._outputs.get(storage_of(tensor), ("", 0, -1))
        return tensor.numel() == elements


VIEWS = frozenset(
    f"aten::{name}"
    for name in ("split", "split_with_sizes", "chunk", "slice", "narrow", "select", "unbind")
)
_APART = VIEWS | {"aten::glu", "aten::index_select", "aten::unsafe_split", "aten::cat"}


def _candidate_dims(tensor: torch.Tensor, cut: int, result: torch.Tensor) -> Iterable[int]:
    """Yield the dimensions of a result that may be the sharded one: same size, same place from an
    end."""
    from_end = cut - tensor.dim() + result.dim()
    yield from (
        place
        for place in dict.fromkeys((from_end, cut))
        if 0 <= place < result.dim() and result.shape[place] == tensor.shape[cut]
    )


def _is_of_every_part(values: Mapping[str, Any], size: int) -> bool:
    """Return True if a slice selects every n-th feature, or all; each rank then has its share of
    them."""
    start, end, step = values["start"] or 0, values["end"], values["step"]
    return 0 <= start < step and (end is None or end >= size) and size % step == 0


Problem = tuple[str, str]  # finding and fix

_UNFLATTENED = (torch.Tensor.unflatten, torch.unflatten)
_RESHAPED = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


class ShardChecks:
    """The checks of operators and views on feature shards.

    Splitting the direct output of a column layer is valid if the pieces are its projections, which
    is known only when all pieces have been seen. For each storage of a shard the record holds the
    extent in elements (size times stride) of the sharded dimension. In any view of the storage, the
    sharded dimension is the outermost one within this extent.
    """

    def __init__(self) -> None:
        self.projections = Projections()
        self._extents: OfStorages[int] = WeakKeyDictionary()
        self._if_not_projections: list[tuple[str, int, Problem]] = []  # layer, their number

    def register_output(self, column: str, output: torch.Tensor) -> None:
        """Register the output of a column layer, whose last dimension is sharded.

        Args:
            column: The dotted name of the layer.
            output: Its output [..., features on this rank].
        """
        self.projections.register_output(column, output)
        self._set_sharded_dim(output, output.dim() - 1)

    def check_operator(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        slices: Iterable[tuple[torch.Tensor, str]],
        where: str,
    ) -> Iterator[Problem]:
        """Yield the problems of an operator on shards.

        Args:
            function: The operator.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            slices: The shards among the arguments, each with the name of its column layer.
            where: Name of the module that runs it.
        """
        for tensor, column in slices:
            if self._is_parted(function, args, kwargs, tensor):
                name = function._schema.name
                problem = _split_problem(name, column, where)
                is_all = self.projections.is_whole(tensor)
                if name in VIEWS and is_all and (owner := self.projections.owner_of(tensor)):
                    self._if_not_projections.append((owner, 0, problem))
                else:
                    yield problem

    def check_view(
        self,
        tensor: torch.Tensor,
        sizes: tuple[int, ...],
        view: torch.Tensor,
        column: str,
        where: str,
    ) -> Iterator[Problem]:
        """Yield a problem if a view of a shard has a fixed number of heads and an inferred width.

        Args:
            tensor: The shard.
            sizes: The sizes that the program requested; -1 is inferred.
            view: The result.
            column: Name of the column layer that returned the shard.
            where: Name of the module that runs the view.
        """
        before, after = self._sharded_dim(tensor), self._sharded_dim(view)
        if before is None or after is None or -1 not in sizes[after + 1 :]:
            return
        if view.shape[after] < tensor.shape[before]:
            problem = _fixed_heads_problem(sizes[sizes.index(-1, after) - 1], column, where)
            may_be_projections = sizes[after + 1] == -1 and self.projections.is_whole(tensor)
            if may_be_projections and (owner := self.projections.owner_of(tensor)):
                self._if_not_projections.append((owner, sizes[after], problem))
            else:
                yield problem

    def _sharded_dim(self, tensor: torch.Tensor) -> int | None:
        """Return the sharded dimension of a tensor, or None if it is unknown."""
        extent = self._extents.get(storage_of(tensor), 0)
        strides = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        cut = [(stride, d) for d, (stride, size) in strides if 0 < stride < extent and size > 1]
        return max(cut)[1] if cut else None

    def passes_on(self, read: Sequence[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Find the sharded dimension of an operator's new results.

        It is a dimension with the size of an input's sharded dimension, at the same place counted
        from either end.

        Args:
            read: The tensors that the operator read.
            results: Its results. Views of `read` are skipped, because they share its record.
        """
        sources = [
            (tensor, cut) for tensor in read if (cut := self._sharded_dim(tensor)) is not None
        ]
        views = {storage_of(tensor) for tensor in read}
        for result in results:
            if storage_of(result) not in views:
                places = (
                    place
                    for tensor, cut in sources
                    for place in _candidate_dims(tensor, cut, result)
                )
                if (dimension := next(places, None)) is not None:
                    self._set_sharded_dim(result, dimension)

    def _is_parted(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: torch.Tensor
    ) -> bool:
        """Return True if an operator splits a shard, or concatenates shards, along the sharded
        dimension."""
        if function._schema.name not in _APART:
            return False
        cut = self._sharded_dim(tensor)
        values = {
            declared.name: value if value is not None else declared.default_value
            for declared, value in zip_longest(function._schema.arguments, args)
        } | dict(kwargs)
        if cut is None or values["dim"] % tensor.dim() != cut:
            return False
        match function._schema.name:
            case "aten::cat":
                return len(values["tensors"]) > 1
            case "aten::slice":
                return not _is_of_every_part(values, tensor.shape[cut])
            case _:
                return True

    def _set_sharded_dim(self, tensor: torch.Tensor, dimension: int) -> None:
        extent = tensor.stride(dimension) * tensor.shape[dimension]
        self._extents[storage_of(tensor)] = extent

    def check_splits(self) -> Iterator[Problem]:
        """Yield the problems of splits that would be valid for projections but turned out to be
        none."""
        for owner, number, problem in self._if_not_projections:
            lengths = self.projections.projection_widths(owner)
            if not lengths or number not in (0, len(lengths)):
                yield problem


def _split_problem(operator: str, column: str, where: str) -> Problem:
    """Return the problem of an operator that splits or concatenates shards."""
    verb = "concatenates shards" if operator == "aten::cat" else "splits a shard"
    finding = f"in the forward pass of {where}, {operator} {verb} of the features of {column}: "
    finding += "each rank would do this with its local shard only"
    remedy = f"Split the direct output of {in_any_block(column)} into consecutive projections, "
    return finding, f"{remedy}or remove its role and the role of its row."


def _fixed_heads_problem(heads: int, column: str, where: str) -> Problem:
    """Return the problem of a view with a fixed number of heads."""
    finding = (
        f"the forward pass of {where} splits the output of {column} into {heads} heads "
        "of any width: "
    )
    finding += "each rank would split its shard into as many heads, but narrower ones"
    return finding, "Use -1 for the number of heads, or give its attribute the role `count`."


class ViewCalls(TorchFunctionMode):
    """The mode that reports the sizes of views as the code writes them.

    Operators receive sizes without -1, so dispatch modes cannot see them. `judge` is called with
    the tensor, the written sizes and the view.
    """

    def __init__(
        self, judge: Callable[[torch.Tensor, tuple[int, ...], torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._judge = judge

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _RESHAPED or func in _UNFLATTENED:
            tensor, *others = (*args, *(kwargs or {}).values())
            sizes = _view_sizes(others)
            if func in _UNFLATTENED and sizes is not None:
                shape, at = tuple(tensor.shape), sizes[0] % tensor.dim()
                sizes = (*shape[:at], *sizes[1:], *shape[at + 1 :])
            if sizes is not None and isinstance(tensor, torch.Tensor):
                self._judge(tensor, sizes, result)
        return result


def _view_sizes(written: list[Any]) -> tuple[int, ...] | None:
    """Return the sizes of a view call as one tuple, or None if it changes the dtype instead."""
    sizes = [
        s for value in written for s in (value if isinstance(value, list | tuple) else [value])
    ]
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else None


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D; checked by name, so that transformers need not be
    imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer of either kind."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def linear_features(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    first, second = module.get_parameter("weight").shape
    return (first, second) if is_transposed(module) else (second, first)


def standing_alone(named: Iterable[tuple[str, Role]]) -> frozenset[str]:
    """Return the names that are inside no module with the role whole input.

    Such a column layer all-gathers its input itself.
    """
    roles = dict(named)
    opened = tuple(f"{name}." for name, role in roles.items() if role is Role.WHOLE_INPUT)
    return frozenset(name for name in roles if not name.startswith(opened))
