"""Track feature shards through one forward pass of a full model, in which every tensor represents
its counterpart on a tensor-parallel rank.

A column layer returns a shard, and so does everything computed from it until a row layer sums it.
The gradient that flows from a shard into a replicated parameter is only each rank's part, so a
shard may meet a parameter only where a role sums its gradient. Dropout needs one mask for
replicated tensors and a separate mask per rank for shards, which is checked too.

Note: only elements are tracked. A norm without parameters over sharded features would use the
statistics of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from ptrain.models.contract import OnePass
from ptrain.models.ledger import (
    OfStorages,
    OperatorMode,
    is_real,
    storage_of,
    tensors_of,
    watch_modules,
)
from ptrain.models.parting import Problem, ShardChecks, ViewCalls, is_linear
from ptrain.spec.placement import COLUMNS, ROWS, Role, in_any_block

Named = Mapping[str, Role]  # modules with their roles
Storage: TypeAlias = torch.UntypedStorage

_LIKE = "empty_like"
_WITH_MASKS = ("aten::bernoulli", "aten::bernoulli_", "aten::native_dropout", "aten::uniform_")


class SeparateDraws:
    """The tracker of regions in which ranks draw separate random numbers.

    They lie inside a row layer's parent module, from the output of its first column to the input of
    the row; or inside `blocks`, if ranks hold token shards there.
    """

    def __init__(self, named: Mapping[str, Role], blocks: Sequence[str]) -> None:
        self._owners = {name.rpartition(".")[0] for name, role in named.items() if role in ROWS}
        self._blocks = frozenset(blocks)
        self._named = named
        self._inside: set[str] = set()
        # Masks are drawn in two steps (`empty_like`, then `bernoulli_`), and only the first one
        # reads the tensor that decides.
        self._like_own: OfStorages[bool] = WeakKeyDictionary()

    def enter(self, name: str) -> None:
        """Note that a module starts."""
        if name in self._blocks:
            self._inside.add(name)
        if self._named.get(name) in ROWS:
            self._inside.discard(name.rpartition(".")[0])

    def leave(self, name: str) -> None:
        """Note that a module has ended."""
        self._inside.discard(name)
        if self._named.get(name) in COLUMNS and not self._blocks:
            self._inside.update(o for o in self._owners if o and name.startswith(f"{o}."))

    def is_wrong_mask(
        self, function: Any, results: Iterable[torch.Tensor], *, is_own: bool
    ) -> bool:
        """Return True if an operator draws a mask that would be wrong on ranks.

        Args:
            function: The operator. Only operators that draw masks can be wrong.
            results: Its results.
            is_own: True if the operator reads tensors that differ between ranks.
        """
        name = function._schema.name
        storages = [*map(storage_of, results)]
        if name.endswith(_LIKE):
            self._like_own.update(dict.fromkeys(storages, is_own))
        if name not in _WITH_MASKS:
            return False
        is_own = is_own or any(self._like_own.get(storage, False) for storage in storages)
        # A tensor that differs between ranks needs separate masks, and a replicated one needs equal
        # masks.
        return is_own is not bool(self._inside)


class TokenSlices:
    """The set of live storages that are token shards on a rank.

    Tensors inside sub-blocks are not in it, nor tensors outside of `blocks`. Without blocks it
    stays empty. `count` is the number of tokens of a sample.
    """

    def __init__(self, named: Named, blocks: Sequence[str], count: int) -> None:
        self.blocks, self.count = blocks, count
        self.modules: set[str] = set()  # modules with parameters used on token shards
        self._named = named
        self.first = blocks[0] if blocks else None
        self.last = blocks[-1] if blocks else None
        self._on_all: set[str] = set()  # modules with parameters used on all tokens
        self._slices: WeakSet[Storage] = WeakSet()

    @property
    def on_both(self) -> set[str]:
        """The modules with parameters used on token shards and on all tokens; no reduction fits
        both gradients."""
        return self.modules & self._on_all

    def __contains__(self, storage: Storage) -> bool:
        return storage in self._slices

    def enter(self, name: str, first: Storage) -> None:
        """Note that a module receives a tensor.

        Args:
            name: The dotted name of the module.
            first: The storage of its first floating-point input. It is a token shard if the module
                is the first block.
        """
        if name == self.first:
            self._slices.add(first)

    def leave(self, name: str, outputs: Iterable[Storage]) -> None:
        """Note that a module has returned tensors.

        Args:
            name: The dotted name of the module.
            outputs: The storages of its outputs. A row layer returns token shards; a column layer
                and the last block return all tokens.
        """
        role = self._named.get(name)
        if name == self.last or role in COLUMNS:
            self._slices.difference_update(outputs)
        elif role in ROWS and self._slices:
            self._slices.update(outputs)

    def record_operator(
        self, owners: Iterable[str], results: Iterable[Storage], *, is_slice: bool
    ) -> None:
        """Note an operator that reads parameters.

        Args:
            owners: The dotted names of the modules that have the parameters.
            results: The storages of its results, which become token shards if `is_slice`.
            is_slice: True if it reads a token shard, False if it reads all tokens.
        """
        (self.modules if is_slice else self._on_all).update(owners)
        if is_slice:
            self._slices.update(results)


_OPERATORS = (
    *COLUMNS,
    *ROWS,
    Role.HEAD,
    Role.VOCABULARY,
)  # sharded together with the parameters that they read
_SHAPES_ALONE = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


def follow_pass(
    module: nn.Module,
    named: Named,
    counting: frozenset[str],
    tokens: TokenSlices,
    *,
    once: OnePass,
    is_naive: bool,
) -> ShardFollower:
    """Run the model forward and return the follower of the pass.

    Its `problem` is the first violation of the roles. Buffers and torch's generators are left
    unchanged.

    Args:
        module: The model.
        named: Role of each module.
        counting: Modules with attributes that count features.
        tokens: Tracks which tensors are token shards.
        once: The pass to run.
        is_naive: Whether every column layer sums the gradient of its input itself, so that no
            sub-block shares one input.
    """
    device = next(module.parameters()).device
    follower = ShardFollower(module, named, counting, tokens, is_naive=is_naive)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        once.prepare() as run,
        watch_modules(
            module.named_modules(), before=follower.on_begin, after=follower.on_end
        ) as running,
        follower,
        ViewCalls(follower.judge_view),
    ):
        follower.running = running
        follower.register_inputs(once.samples.tensors)
        follower.check_output(run())
    return follower


class ShardFollower(OperatorMode):
    """The mode that classifies every live storage of a forward pass.

    - Feature shards, with the column layers that they come from.
    - The replicated input of a sub-block with the role whole input.
    - Tensors that carry gradients: computed from parameters only (with their names), or from tokens
      too.
    - Tensors computed from the model's inputs only.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Named,
        counting: frozenset[str],
        tokens: TokenSlices,
        *,
        is_naive: bool,
    ) -> None:
        super().__init__()
        self.problem: Problem | None = None
        self._parting = ShardChecks()
        self.projections = self._parting.projections
        self.tokens = tokens
        self._draws = SeparateDraws(named, tokens.blocks)
        self._counting = counting
        self._counted: OfStorages[str] = WeakKeyDictionary()  # inputs of counting modules, by name
        self._module, self._named, self._is_naive = module, named, is_naive
        self.running: list[str] = []
        self._slices: OfStorages[frozenset[str]] = WeakKeyDictionary()
        self._opened: OfStorages[str] = WeakKeyDictionary()
        self._learnt: OfStorages[frozenset[str]] = (
            WeakKeyDictionary()
        )  # parameter names; empty if tokens are used too
        self._given: WeakSet[Storage] = WeakSet()

    def register_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Register the model's inputs and parameters."""
        self._given.update(map(storage_of, inputs))
        for name, parameter in self._module.named_parameters():
            self._learnt[storage_of(parameter)] = frozenset((name,))

    def check_output(self, output: object) -> None:
        """Check that the model does not return a feature shard, except of the output head."""
        self._report_first(self._parting.check_splits())
        origins = self._origins(map(storage_of, tensors_of(output)))
        if columns := [name for name in origins if self._named.get(name) is not Role.HEAD]:
            column = min(columns)
            self._report_problem(
                f"the model returns the output of {column}, a shard of the features",
                f"Give {column} the role `head`, or the next layer the role `row`.",
            )

    def on_begin(self, name: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        """Check and track the input of a module that starts.

        Args:
            name: The dotted name of the module.
            child: The module.
            args: Its positional inputs. Layers with a role must receive their input here.
            kwargs: Its keyword inputs.
        """
        role = self._named.get(name)
        self._draws.enter(name)
        if role in _OPERATORS and not args:  # torch's parallel styles see positional inputs only
            self._report_problem(
                f"{name} has the role {role}, but receives its input as a keyword argument",
                "Pass the input as the first positional argument: `layer(x)`.",
            )
        first = next(filter(is_real, (*args, *kwargs.values())), None)
        if first is None:
            return
        given = storage_of(first)
        self.tokens.enter(name, given)
        self._check_role(name, role, given)
        if name in self._counting:
            self._counted[given] = name
            if self._is_own(given):
                self._report_problem(
                    f"{name} has the role count, but receives a shard of the tokens",
                    f"Give {in_any_block(name)} the role `whole input`.",
                )
        if name == self.tokens.first and first.shape[1:2] != (self.tokens.count,):
            shape = tuple(first.shape)
            finding = f"{name}, the first block, receives {shape} for {self.tokens.count} tokens"
            self._report_problem(
                f"{finding}; dimension 1 must be the tokens", "Use `placement.tp.activations=R`."
            )
        if role is None and is_linear(child) and given in self._slices:
            self._say_unpaired(name, min(self._slices[given]))

    def on_end(self, name: str, _: nn.Module, __: object, output: object) -> None:
        """Track the outputs of a module that has ended.

        Args:
            name: The dotted name of the module.
            _: The module, which is not used.
            __: Its inputs, which are not used.
            output: Its output: a tensor, or a tree of tensors and other values.
        """
        role = self._named.get(name)
        self._draws.leave(name)
        for storage in [storage for storage, of in self._counted.items() if of == name]:
            del self._counted[storage]
        outputs = [storage_of(tensor) for tensor in tensors_of(output)]
        self.tokens.leave(name, outputs)
        self._classify_outputs(name, role, outputs)
        if role in COLUMNS and isinstance(output, torch.Tensor):
            self._parting.register_output(name, output)

    def _check_role(self, name: str, role: Role | None, first: Storage) -> None:
        """Check that a module's role fits its input."""
        match role:
            case Role.ROW | Role.TRANSPOSED_ROW if first not in self._slices:
                finding = f"{name} has the role row, but its input is replicated: "
                finding += "there is no column before it"
                self._report_problem(
                    finding,
                    "Give the layer before it the role `column`, or remove the role of "
                    f"{in_any_block(name)}.",
                )
            case _ if role in (*COLUMNS, Role.HEAD) and first in self._slices:
                column = min(self._slices[first])
                finding = f"{name} has the role {role}, but its input is already sharded, by "
                self._report_problem(
                    f"{finding}{column}",
                    f"Give {in_any_block(name)} the role `row`, or remove the role of "
                    f"{in_any_block(column)}.",
                )
            case Role.WHOLE_INPUT if first not in self._slices and not self._is_naive:
                self._opened[first] = name

    def _say_unpaired(self, name: str, column: str) -> None:
        """Report a column layer without a row layer."""
        finding = (
            f"{column} has the role column, but {name}, which receives its shard of the features, "
        )
        finding += "has no role: there is no row after the column"
        remedy = (
            f"Give {in_any_block(name)} the role `row` (`shared` if it computes each head "
            "separately), "
        )
        self._report_problem(finding, f"{remedy}or remove the role of {in_any_block(column)}.")

    def _classify_outputs(self, name: str, role: Role | None, outputs: list[Storage]) -> None:
        """Classify the outputs of a module by its role."""
        match role:
            case _ if role in (*COLUMNS, Role.HEAD):
                self._slices.update(dict.fromkeys(outputs, frozenset((name,))))
            case Role.ROW | Role.TRANSPOSED_ROW:
                for key in outputs:
                    self._slices.pop(key, None)
                self._learnt.update(dict.fromkeys(outputs, frozenset()))
            case Role.WHOLE_INPUT:
                for key in [key for key, opener in self._opened.items() if opener == name]:
                    del self._opened[key]
                    self._learnt[key] = frozenset()

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, check its inputs and classify its results.

        Args:
            function: The operator, an `OpOverload` with a schema.
            args: Its positional arguments.
            kwargs: Its keyword arguments, {} if it has none.

        Returns:
            The operator's result, unchanged.
        """
        tensors = list(tensors_of((args, kwargs)))
        read = [storage_of(tensor) for tensor in tensors]
        result = function(*args, **kwargs)
        self.projections.record_views(tensors, tensors_of(result))
        is_own = bool(self._origins(read)) or any(map(self._is_own, read))
        if self._draws.is_wrong_mask(function, tensors_of(result), is_own=is_own):
            self._say_drawn(function)
        self._judge_count(read)
        if not function._schema.name.endswith(_SHAPES_ALONE):
            if not any(self._named.get(name) in _OPERATORS for name in self.running[-1:]):
                self._see_tokens(read, [storage_of(tensor) for tensor in tensors_of(result)])
                slices = [
                    (t, min(self._slices[storage_of(t)]))
                    for t in tensors
                    if storage_of(t) in self._slices
                ]
                parted = self._parting.check_operator(
                    function, args, kwargs, slices, self._running_place()
                )
                self._report_first(parted)
            self._check_inputs(read)
            for tensor in tensors_of(result):
                self._classify_result(tensor, read)
            narrow = [tensor for tensor in tensors if storage_of(tensor) in self._slices]
            self._parting.passes_on(narrow, tensors_of(result))
        return result

    def judge_view(self, tensor: torch.Tensor, sizes: tuple[int, ...], view: torch.Tensor) -> None:
        """Check a view of a feature shard that fixes the number of heads.

        Views in modules with the role count are not checked.

        Args:
            tensor: The tensor that is viewed.
            sizes: The sizes that the program requested; -1 is inferred.
            view: The result.
        """
        column = min(self._slices.get(storage_of(tensor), ()), default="")
        if column and not any(name in self._counting for name in self.running[-1:]):
            self._report_first(
                self._parting.check_view(tensor, sizes, view, column, self._running_place())
            )

    def _check_inputs(self, read: list[Storage]) -> None:
        """Check the tensors that an operator combines."""
        slices, learnt = self._origins(read), self._replicated_storages(read)
        if any(self._named.get(name) in _OPERATORS for name in self.running[-1:]):
            return
        if slices:
            self._judge_meeting(sorted(slices), learnt)
            return
        shared = [name for key in learnt for name in self._learnt[key] if self._is_summed(name)]
        opened = [self._opened[key] for key in read if key in self._opened]
        on_all = [key for key in learnt if not self._learnt[key] and key not in self.tokens]
        if shared and (opened or on_all):
            owner = shared[0].rpartition(".")[0]
            finding = f"{owner} has the role shared, but {shared[0]} is used on all features"
            self._report_problem(finding, f"Remove the role of {in_any_block(owner)}.")
        elif opened and learnt:
            met = " ".join(sorted(chain(*(self._learnt[key] for key in learnt)))[:1])
            finding = (
                f"the input of {opened[0]} (role whole input) is combined with "
                f"{met or 'another tensor'} "
            )
            finding += "there; only its column layers may use it"
            self._report_problem(finding, f"Remove the role of {in_any_block(opened[0])}.")

    def _is_own(self, storage: Storage) -> bool:
        """Return True for a token shard that no sub-block has all-gathered."""
        return storage in self.tokens and storage not in self._opened

    def _see_tokens(self, read: list[Storage], results: list[Storage]) -> None:
        """Check and track operators that combine token shards with parameters or full tensors."""
        on_slice = [key for key in read if self._is_own(key)]
        learnt = [key for key in self._replicated_storages(read) if key not in self.tokens]
        names = {name for key in learnt for name in self._learnt[key]}
        owners = {name.rpartition(".")[0] for name in names}
        is_met = any(not self._learnt[key] for key in learnt)
        if on_slice and (is_met or not owners <= {"", *self.running}):
            met = min(names) if names else "a tensor of all tokens"
            where = self.running[-1] if self.running else "the model"
            self._report_problem(
                f"in the forward pass of {where}, a shard of the tokens is combined with {met}",
                "Use `placement.tp.activations=R`.",
            )
        if on_slice or is_met or any(key in self._opened for key in read):
            self.tokens.record_operator(owners, results, is_slice=bool(on_slice))

    def _judge_meeting(self, slices: list[str], learnt: list[Storage]) -> None:
        """Report parameters and replicated tensors that are combined with feature shards."""
        for key in learnt:
            names = self._learnt[key]
            alone = sorted(name for name in names if not self._is_summed(name))
            if alone:
                self._say_parameter(alone[0], slices)
            elif not names:
                where = self.running[-1] if self.running else ""
                finding = f"the sharded output of {slices[0]} is combined with a replicated "
                finding += f"tensor in the forward pass of {where or 'the model'}: "
                finding += "there is no row between them"
                column = in_any_block(slices[0])
                self._report_problem(
                    finding,
                    f"Give the layer after {column} the role `row`, or remove the role of "
                    f"{column}.",
                )

    def _judge_count(self, read: list[Storage]) -> None:
        """Check that the input of a counting module is used by its column layers only.

        On a rank the features that it counts are narrower than this input.
        """
        is_within = any(self._named.get(name) in COLUMNS for name in self.running[-1:])
        counted = [self._counted[key] for key in read if key in self._counted]
        if counted and not is_within:
            finding = (
                f"{counted[0]} has attributes with the role count, but its input is also used "
            )
            finding += "outside of its column layers"
            self._report_problem(finding, "Give attributes of another module the role `count`.")

    def _say_drawn(self, function: Any) -> None:
        """Report a random mask in the wrong region."""
        where = self.running[-1] if self.running else ""
        finding = (
            f"in the forward pass of {where or 'the model'}, {function._schema.name} "
            "draws one mask "
        )
        finding += "for replicated values between a column and its row, or for a shard elsewhere: "
        finding += "ranks would need identical or different masks there"
        self._report_problem(
            finding, "Build the model with dropout 0 there, or use another `tensor.plan`."
        )

    def _say_parameter(self, parameter: str, slices: list[str]) -> None:
        """Report a parameter used on feature shards whose gradient is not summed."""
        owner = parameter.rpartition(".")[0]
        finding = f"{parameter} is used on a shard of "
        finding += f"the features (from {slices[0]}), but no role makes the ranks sum its "
        finding += "gradient"
        remedy = f"Give {in_any_block(owner)} the role `shared` in `tensor.plan`."
        if owner in self._named or not owner:
            remedy = (
                f"Move {in_any_block(parameter)} into a separate module, and give it "
                "the role `shared`."
            )
        self._report_problem(finding, remedy)

    def _is_summed(self, parameter: str) -> bool:
        """Return True if ranks sum a parameter's gradient: its module has the role shared and is
        running."""
        owner = parameter.rpartition(".")[0]
        return self._named.get(owner) is Role.SHARED and owner in self.running

    def _classify_result(self, tensor: torch.Tensor, read: list[Storage]) -> None:
        """Classify the result of an operator by the tensors that it read."""
        key, learnt = storage_of(tensor), self._replicated_storages(read)
        opened = [self._opened[source] for source in read if source in self._opened]
        if slices := self._origins(read):
            self._slices[key] = slices
        elif opened:
            self._opened[key] = opened[0]
        elif learnt and tensor.is_floating_point():
            names = [self._learnt[source] for source in learnt]
            of_tokens = not all(names) or any(source in self._given for source in read)
            self._learnt[key] = frozenset() if of_tokens else frozenset(chain(*names))
        elif learnt or any(source in self._given for source in read):
            self._given.add(key)

    def _origins(self, storages: Iterable[Storage]) -> frozenset[str]:
        """Return the column layers that the feature shards among these storages come from."""
        return frozenset(chain(*(self._slices.get(key, ()) for key in storages)))

    def _replicated_storages(self, storages: Iterable[Storage]) -> list[Storage]:
        """Return the storages that are replicated on all ranks and carry gradients."""
        return [
            key
            for key in storages
            if key in self._learnt and key not in self._slices and key not in self._opened
        ]

    def _running_place(self) -> str:
        return (self.running[-1] if self.running else "") or "the model"

    def _report_first(self, problems: Iterable[Problem]) -> None:
        """Report the first of several problems."""
        for problem in problems:
            self._report_problem(*problem)

    def _report_problem(self, finding: str, remedy: str) -> None:
        """Keep the problem if it is the first one."""
        self.problem = self.problem or (finding, remedy)
