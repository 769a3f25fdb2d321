"""Track slices of features through one forward pass of a whole model, in which every tensor carries
what it would be on a rank of tp.

A column layer returns a slice, and so does everything computed from it until a row layer sums it.
The gradient that flows from a slice into a replicated parameter is each rank's part only, so a
slice may meet a parameter only where a role sums it. Dropout needs one mask for replicated tensors
and a mask per rank for slices, which is checked too.

Note: only elements are tracked. A norm without parameters over sliced features uses one rank's
statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ptrain.models.arguments import is_real
from ptrain.models.ledger import Ledger, storage_of
from ptrain.models.linear import is_linear
from ptrain.models.one_pass import OnePass
from ptrain.models.own_tokens import TokenSlices
from ptrain.models.parting import Parting, Problem, ViewCalls
from ptrain.spec.role import COLUMNS, ROWS, Role, in_any_block

_LIKE = "empty_like"
_WITH_MASKS = ("aten::bernoulli", "aten::bernoulli_", "aten::native_dropout", "aten::uniform_")


class Draws:
    """Follows where ranks draw for themselves: within a row's module, from what the first column
    gives to what the row takes; or within `blocks`, if a rank has its own tokens there."""

    def __init__(self, named: Mapping[str, Role], blocks: Sequence[str]) -> None:
        self._owners = {name.rpartition(".")[0] for name, role in named.items() if role in ROWS}
        self._blocks = frozenset(blocks)
        self._named = named
        self._inside: set[str] = set()
        self._like_own: dict[int, bool] = {}

    def enter(self, name: str) -> None:
        """A module is about to run."""
        if name in self._blocks:
            self._inside.add(name)
        if self._named.get(name) in ROWS:
            self._inside.discard(name.rpartition(".")[0])

    def leave(self, name: str) -> None:
        """A module has run."""
        self._inside.discard(name)
        if self._named.get(name) in COLUMNS and not self._blocks:
            self._inside.update(o for o in self._owners if o and name.startswith(f"{o}."))

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._like_own.pop(key, None)

    def see(self, function: Any, results: Iterable[torch.Tensor], *, is_own: bool) -> bool:
        """Return whether an operator that read what only its rank has, or did not, drew a mask as
        no rank may."""
        name = function._schema.name
        keys = [storage_of(tensor)._cdata for tensor in results]
        if name.endswith(_LIKE):
            self._like_own.update(dict.fromkeys(keys, is_own))
        if name not in _WITH_MASKS:
            return False
        is_own = is_own or any(self._like_own.get(key, False) for key in keys)
        return is_own is not bool(self._inside)


Named = Mapping[str, Role]  # modules with their roles

_OPERATORS = (*COLUMNS, *ROWS, Role.HEAD, Role.VOCABULARY)  # cut together with what they read
_SHAPES_ALONE = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


def follow(
    module: nn.Module,
    named: Named,
    counting: frozenset[str],
    tokens: TokenSlices,
    *,
    once: OnePass,
    is_naive: bool,
) -> Follower:
    """Return what was seen of a forward pass; its `problem` is the first thing that roles do not
    account for. `counting` are the modules that count features by attributes, `tokens` says where a
    rank has its slice of them alone. Buffers and torch's generators are left as they were."""
    device = next(module.parameters()).device
    follower = Follower(module, named, counting, tokens, is_naive=is_naive)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        once.prepared() as run,
        follower.hooked(),
        follower,
        ViewCalls(follower.judge_view),
    ):
        follower.give(once.samples.tensors)
        follower.end(run())
    return follower


class Follower(Ledger):
    """Says of every storage that lives what it is: a slice, and of which layers; the input that a
    sub-block makes whole; learnt, of which parameters alone or of the tokens too; given."""

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
        self._parting = Parting()
        self.projections = self._parting.projections
        self.tokens = tokens
        self._draws = Draws(named, tokens.blocks)
        self._counting = counting
        self._counted: dict[int, str] = {}  # what modules that count are given
        self._module, self._named, self._is_naive = module, named, is_naive
        self._running: list[str] = []
        self._slices: dict[int, frozenset[str]] = {}
        self._opened: dict[int, str] = {}
        self._learnt: dict[int, frozenset[str]] = {}  # empty: of the tokens too
        self._given: set[int] = set()

    def died(self, key: int, size: int) -> None:
        for marks in (self._slices, self._opened, self._learnt):
            marks.pop(key, None)
        self._given.discard(key)
        self._parting.died(key)
        self._draws.died(key)
        self.tokens.died(key)
        self._counted.pop(key, None)

    def give(self, inputs: Iterable[torch.Tensor]) -> None:
        """Declares what the model is given, and its parameters."""
        for tensor in inputs:
            self.watch(tensor)
            self._given.add(_key(tensor))
        for name, parameter in self._module.named_parameters():
            self.watch(parameter)
            self._learnt[_key(parameter)] = frozenset((name,))

    def end(self, output: object) -> None:
        """Complain where the model returns a slice of the features."""
        self._say_first(self._parting.end())
        origins = self._origins(map(_key, _tensors(output)))
        if columns := [name for name in origins if self._named.get(name) is not Role.HEAD]:
            column = min(columns)
            self._say(
                f"the model returns the output of {column}, a shard of the features",
                f"Give {column} the role `head`, or the next layer the role `row`.",
            )

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While entered, hooks say which module runs."""
        handles: list[Any] = []
        for name, child in self._module.named_modules():
            enter, leave = self._hooks(name, child)
            handles += [
                child.register_forward_pre_hook(enter, with_kwargs=True),
                child.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, name: str, child: nn.Module) -> tuple[Any, Any]:
        role = self._named.get(name)
        may_be_a_row = role is None and is_linear(child)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(name)
            self._draws.enter(name)
            if role in _OPERATORS and not args:  # torch's styles look at what has a place alone
                self._say(
                    f"{name} has the role {role}, but receives its input as a keyword argument",
                    "Pass the input as the first positional argument: `layer(x)`.",
                )
            first = next(filter(is_real, (*args, *kwargs.values())), None)
            if isinstance(first, torch.Tensor):
                self.tokens.enter(name, _key(first))
                self._enter(name, role, _key(first))
                if name in self._counting:
                    self._counted[_key(first)] = name
                    if self._is_own(_key(first)):
                        self._say(
                            f"{name} has the role count, but receives a shard of the tokens",
                            f"Give {in_any_block(name)} the role `whole input`.",
                        )
                if name == self.tokens.first and first.shape[1:2] != (self.tokens.count,):
                    shape = tuple(first.shape)
                    finding = (
                        f"{name}, the first block, receives {shape} for {self.tokens.count} tokens"
                    )
                    self._say(
                        f"{finding}; dimension 1 must be the tokens",
                        "Use `placement.tp.activations=R`.",
                    )
                if may_be_a_row and _key(first) in self._slices:
                    self._say_unpaired(name, min(self._slices[_key(first)]))

        def leave(_: nn.Module, __: object, output: object) -> None:
            self._running.pop()
            self._draws.leave(name)
            self._counted = {key: of for key, of in self._counted.items() if of != name}
            outputs = [_key(tensor) for tensor in _tensors(output)]
            self.tokens.leave(name, outputs)
            self._leave(name, role, outputs)
            if role in COLUMNS and isinstance(output, torch.Tensor):
                self._parting.gives(name, output)

        return enter, leave

    def _enter(self, name: str, role: Role | None, first: int) -> None:
        match role:
            case Role.ROW | Role.TRANSPOSED_ROW if first not in self._slices:
                finding = f"{name} has the role row, but its input is replicated: "
                finding += "there is no column before it"
                self._say(
                    finding,
                    "Give the layer before it the role `column`, or remove the role of "
                    f"{in_any_block(name)}.",
                )
            case _ if role in (*COLUMNS, Role.HEAD) and first in self._slices:
                column = min(self._slices[first])
                finding = f"{name} has the role {role}, but its input is already sharded, by "
                self._say(
                    f"{finding}{column}",
                    f"Give {in_any_block(name)} the role `row`, or remove the role of "
                    f"{in_any_block(column)}.",
                )
            case Role.WHOLE_INPUT if first not in self._slices and not self._is_naive:
                self._opened[first] = name

    def _say_unpaired(self, name: str, column: str) -> None:
        finding = (
            f"{column} has the role column, but {name}, which receives its shard of the features, "
        )
        finding += "has no role: there is no row after the column"
        remedy = (
            f"Give {in_any_block(name)} the role `row` (`shared` if it computes each head "
            "separately), "
        )
        self._say(finding, f"{remedy}or remove the role of {in_any_block(column)}.")

    def _leave(self, name: str, role: Role | None, outputs: list[int]) -> None:
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

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        read = [_key(tensor) for tensor in tensors]
        result = super().operator(function, args, kwargs)
        self.projections.see(tensors, _tensors(result))
        is_own = bool(self._origins(read)) or any(map(self._is_own, read))
        if self._draws.see(function, _tensors(result), is_own=is_own):
            self._say_drawn(function)
        self._judge_count(read)
        if not function._schema.name.endswith(_SHAPES_ALONE):
            if not any(self._named.get(name) in _OPERATORS for name in self._running[-1:]):
                self._see_tokens(read, [_key(tensor) for tensor in _tensors(result)])
                slices = [
                    (t, min(self._slices[_key(t)])) for t in tensors if _key(t) in self._slices
                ]
                parted = self._parting.operator(function, args, kwargs, slices, self._where())
                self._say_first(parted)
            self._judge(read)
            for tensor in _tensors(result):
                self._mark(tensor, read)
            narrow = (tensor for tensor in tensors if _key(tensor) in self._slices)
            self._parting.passes_on(narrow, _tensors(result))
        return result

    def judge_view(self, tensor: torch.Tensor, sizes: tuple[int, ...], view: torch.Tensor) -> None:
        """Complain where heads are counted of a slice, and nobody counts for a rank."""
        column = min(self._slices.get(_key(tensor), ()), default="")
        if column and not any(name in self._counting for name in self._running[-1:]):
            self._say_first(self._parting.view(tensor, sizes, view, column, self._where()))

    def _judge(self, read: list[int]) -> None:
        slices, learnt = self._origins(read), self._whole(read)
        if any(self._named.get(name) in _OPERATORS for name in self._running[-1:]):
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
            self._say(finding, f"Remove the role of {in_any_block(owner)}.")
        elif opened and learnt:
            met = " ".join(sorted(chain(*(self._learnt[key] for key in learnt)))[:1])
            finding = (
                f"the input of {opened[0]} (role whole input) is combined with "
                f"{met or 'another tensor'} "
            )
            finding += "there; only its column layers may use it"
            self._say(finding, f"Remove the role of {in_any_block(opened[0])}.")

    def _is_own(self, key: int) -> bool:
        """Whether a rank has its slice of the tokens alone."""
        return key in self.tokens and key not in self._opened

    def _see_tokens(self, read: list[int], results: list[int]) -> None:
        on_slice = [key for key in read if self._is_own(key)]
        learnt = [key for key in self._whole(read) if key not in self.tokens]
        names = {name for key in learnt for name in self._learnt[key]}
        owners = {name.rpartition(".")[0] for name in names}
        is_met = any(not self._learnt[key] for key in learnt)
        if on_slice and (is_met or not owners <= {"", *self._running}):
            met = min(names) if names else "a tensor of all tokens"
            where = self._running[-1] if self._running else "the model"
            self._say(
                f"in the forward pass of {where}, a shard of the tokens is combined with {met}",
                "Use `placement.tp.activations=R`.",
            )
        if on_slice or is_met or any(key in self._opened for key in read):
            self.tokens.see(owners, results, is_slice=bool(on_slice))

    def _judge_meeting(self, slices: list[str], learnt: list[int]) -> None:
        for key in learnt:
            names = self._learnt[key]
            alone = sorted(name for name in names if not self._is_summed(name))
            if alone:
                self._say_parameter(alone[0], slices)
            elif not names:
                where = self._running[-1] if self._running else ""
                finding = f"the sharded output of {slices[0]} is combined with a replicated "
                finding += f"tensor in the forward pass of {where or 'the model'}: "
                finding += "there is no row between them"
                column = in_any_block(slices[0])
                self._say(
                    finding,
                    f"Give the layer after {column} the role `row`, or remove the role of "
                    f"{column}.",
                )

    def _judge_count(self, read: list[int]) -> None:
        """What a module is given that counts features is narrower than that on a rank."""
        is_within = any(self._named.get(name) in COLUMNS for name in self._running[-1:])
        counted = [self._counted[key] for key in read if key in self._counted]
        if counted and not is_within:
            finding = (
                f"{counted[0]} has attributes with the role count, but its input is also used "
            )
            finding += "outside of its column layers"
            self._say(finding, "Give attributes of another module the role `count`.")

    def _say_drawn(self, function: Any) -> None:
        where = self._running[-1] if self._running else ""
        finding = (
            f"in the forward pass of {where or 'the model'}, {function._schema.name} "
            "draws one mask "
        )
        finding += "for replicated values between a column and its row, or for a shard elsewhere: "
        finding += "ranks would need identical or different masks there"
        self._say(finding, "Build the model with dropout 0 there, or use another `tensor.plan`.")

    def _say_parameter(self, parameter: str, slices: list[str]) -> None:
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
        self._say(finding, remedy)

    def _is_summed(self, parameter: str) -> bool:
        """Whether ranks add up a parameter's gradient: while its module runs, they do."""
        owner = parameter.rpartition(".")[0]
        return self._named.get(owner) is Role.SHARED and owner in self._running

    def _mark(self, tensor: torch.Tensor, read: list[int]) -> None:
        key, learnt = _key(tensor), self._whole(read)
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

    def _origins(self, keys: Iterable[int]) -> frozenset[str]:
        """The layers whose slices are among storages."""
        return frozenset(chain(*(self._slices.get(key, ()) for key in keys)))

    def _whole(self, keys: Iterable[int]) -> list[int]:
        """Those storages that every rank has whole and that gradients flow into."""
        return [
            key
            for key in keys
            if key in self._learnt and key not in self._slices and key not in self._opened
        ]

    def _where(self) -> str:
        return (self._running[-1] if self._running else "") or "the model"

    def _say_first(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._say(*problem)

    def _say(self, finding: str, remedy: str) -> None:
        self.problem = self.problem or (finding, remedy)


def _key(tensor: torch.Tensor) -> int:
    return storage_of(tensor)._cdata


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (
        leaf
        for leaf in tree_iter(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    )
