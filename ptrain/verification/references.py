"""Spread the one-device runs of a verification over the ranks by duration: each rank has its share
and tells the others every few seconds that it is alive.

The result of a run stays on the rank that made it; losses go to all.

How far apart correct runs of one layout end is found by references in other orders of summation.
A placement changes no term of any sum. It changes the order, the groups, and the roundings between
them: data ranks and micro-batches add one after the other or by rings, several ranks compute the
columns of a matrix product, and tokens may have shapes that take another kernel. A permuted
reference does the same. Its seed permutes

- the micro-batches of a step, whose gradients are added in that order;
- the contraction of every matrix product, forward, backward and in the update (Muon): its terms
  are permuted and split into 2, 4 or 8 groups, whose partial sums are rounded to the product's
  dtype and then added, as ranks of tp do;
- sums and means over a dimension (norms, weights' gradients), and the rows of an embedding's
  gradient.

No placement splits the softmax or the core of attention of one head, so these stay.
`tolerances` derives from these distances how close a run under test must be.

The specs that run beside the user's own are made of the resolved spec, so that what was chosen
stays: in fp64 without dropout, and on one device. What is compared with one
device drops nothing: ranks may draw other masks than one does. A built-in model is one of another
shape for that (`without_dropout`). Of any other torch's functions are switched off, which its
layers call; a model whose loss depends on random numbers all the same is none that can be judged.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TextIO, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.errors import refused
from ptrain.models.external import named_in_spec
from ptrain.models.facts import AttendingCall, attention_by
from ptrain.models.ledger import OperatorMode
from ptrain.models.modes import SwitchedOff, forked, reseed, switched_off
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.jobs.draws import DrawMode
from ptrain.verification.reference import (
    MicroBatch,
    Pass,
    ReferenceTraining,
    Trajectory,
    one_device_run,
)

_FIXED = (DType.FP32, DType.FP64)


def without_dropout(spec: Spec) -> Spec:
    """The same where the model's shape gives no dropout: a mask drawn by one device is no mask that
    several draw."""
    if isinstance(spec.model, ModelShape) and spec.model.drops:
        return replace(spec, model=spec.model.without_dropout())
    return spec


def exactly(spec: Spec) -> Spec:
    """Return the spec without dropout, in fp64, in which a sum in another order differs by 1e-15
    and a fault by 1e-5."""
    return replace(without_dropout(spec), precision=replace(spec.precision, compute_fp64=True))


def on_one_device(spec: Spec) -> Spec:
    """All micro-batches of the global batch on one rank: the reference of every mesh that has
    them."""
    batch = replace(spec.batch, accumulate=spec.batch.accumulate * spec.data_degree)
    return replace(spec, factors=(), batch=batch)


def is_banded(spec: Spec) -> bool:
    """Return whether two orders of summation part by more than fixed tolerances say: some state is
    in 16 bits, or the update enlarges rounding (unless in fp64)."""
    layout = spec.precision.effective
    dtypes = (layout.parameters, layout.reduced, layout.gradients, layout.updated, layout.moments)
    coarse = any(dtype not in _FIXED for dtype in dtypes)
    if spec.precision.matmul is not Matmul.NONE:  # a rounding may move a factor by an fp8 step
        return layout.parameters is not DType.FP64
    return coarse or (spec.optimizer.row.enlarges_rounding and layout.updated is not DType.FP64)


NOTE = (
    "dropout is 0 in the comparison with the reference: ranks may draw other masks than "
    "the reference"
)


@contextmanager
def undropped(spec: Spec) -> Iterator[SwitchedOff]:
    """Within it a model that is not built in drops nothing by torch's functions."""
    if isinstance(spec.model, ModelShape):
        yield SwitchedOff()
        return
    torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
    with switched_off() as off:

        def attend(call: AttendingCall) -> Tensor:
            off.drops |= call.dropout > 0.0
            return replace(call, dropout=0.0).by_torch(torchs)

        with attention_by(attend):
            yield off


def dropping(spec: Spec, exchange: Exchange) -> bool:
    """Return whether a model that is not built in drops out something. Raises SpecError on every
    rank for one whose loss depends on what else it draws. One rank runs it forward, twice or
    thrice. All ranks call it."""
    if isinstance(spec.model, ModelShape):
        return False
    seen = _seen(spec) if exchange.world.is_first else None
    drops, place, finding = next(answer for answer in exchange.gather(seen) if answer is not None)
    if finding:
        remedy = "Draw with torch.nn.functional.dropout, called by this name, as nn.Dropout "
        remedy += "does; it is switched off here. Or draw nothing for the verdict."
        raise refused(place, finding, remedy)
    return bool(drops)


def _seen(spec: Spec) -> tuple[bool, str, str]:
    """Run a micro-batch forward on one device. Return whether it drops; and where its loss depends
    on what else it draws, place and finding."""
    device = ReferenceTraining(exactly(spec))
    micro_batch: MicroBatch = next(iter(device.micro_batches(0)))

    def run() -> Tensor:
        return micro_batch.loss(device.objective, device.module)

    with undropped(spec) as off, forked(), torch.no_grad():
        losses = []
        for seed in (0, 1):
            reseed(seed)
            losses.append(run().item())
        if losses[0] == losses[1] or math.isnan(losses[0]):
            return off.drops, "", ""
        place, name = named_in_spec(device.module, spec)
        with DrawMode(device.module) as drawn:
            run()
        paths = [draw.path or type(device.module).__name__ for draw in drawn.draws]
        module = f"{paths[0] if paths else 'the loss'} of {name}"
    finding = f"{module} draws random numbers by itself, and the loss depends on them: no two "
    return off.drops, place, f"{finding}runs with other draws can be compared"


SECONDS = 10.0  # between two lines


@dataclass(slots=True)
class Progress:
    """The progress of a verification, one line every SECONDS to `stream`; none without a stream."""

    stream: TextIO | None = None
    stage: str = ""
    _last: float = field(default_factory=time.monotonic)

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self.stage, self._last = stage, time.monotonic()

    def step(self, what: str, done: int, count: int) -> None:
        """`done` of `count` steps of something are over."""
        now = time.monotonic()
        if self.stream is not None and now - self._last >= SECONDS:
            self._last = now
            text = f"{self.stage}: {what}, step {done} of {count}"
            print(text, file=self.stream, flush=True)


PARTS = (2, 4, 8)  # groups of a contraction: what degrees of tp make of it

aten = torch.ops.aten
Rule: TypeAlias = "Callable[..., Tensor]"
Dims: TypeAlias = "Sequence[int] | None"


class PermutedSums(OperatorMode):
    """Every operator that adds up, in an order that `generator` draws anew for each call."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.rules: dict[Any, Rule] = {
            aten.mm.default: self._product,
            aten.bmm.default: self._product,
            aten.addmm.default: partial(self._product, add=torch.addmm),
            aten.baddbmm.default: partial(self._product, add=torch.baddbmm),
            torch.ops.ptrain.scaled_mm.default: self._scaled_product,
            aten.sum.dim_IntList: self._sum,
            aten.mean.dim: self._mean,
            aten.embedding_dense_backward.default: self._rows,
        }

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = self.rules.get(func)
        if rule is None or not args[0].is_floating_point():
            return func(*args, **kwargs)
        return rule(*args, **kwargs)

    def _drawn(self, size: int) -> tuple[Tensor, int]:
        """An order of `size` terms, and in how many groups they are."""
        choice = int(torch.randint(len(PARTS), (), generator=self.generator))
        return torch.randperm(size, generator=self.generator), PARTS[choice]

    def _product(
        self, *factors: Tensor, add: Callable[..., Tensor] | None = None, **scales: float
    ) -> Tensor:
        """The first group takes the addend along, in one rounding, as a kernel's end does."""
        *added, left, right = factors
        (first, its), *others = self._factors(left, right)
        total = add(*added, first, its, **scales) if add else first @ its
        for columns, rows in others:
            total.add_(columns @ rows, alpha=scales.get("alpha", 1))
        return total

    def _scaled_product(self, left: Tensor, right: Tensor, *scales: Any) -> Tensor:
        """Add the groups' products, each rounded to the dtype of the result."""
        operator = torch.ops.ptrain.scaled_mm
        total, *others = (operator(*pair, *scales) for pair in self._factors(left, right))
        for other in others:
            total.add_(other)
        return total

    def _factors(self, left: Tensor, right: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Columns of the left and rows of the right that a partial sum is of."""
        order, parts = self._drawn(left.shape[-1])
        columns, rows = left.index_select(-1, order), right.index_select(-2, order)
        return zip(columns.chunk(parts, -1), rows.chunk(parts, -2), strict=True)

    def _sum(self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any) -> Tensor:
        along = max(dims or range(terms.dim()), key=lambda dim: terms.shape[dim], default=None)
        if along is None or terms.shape[along] < 2:
            return aten.sum.dim_IntList(terms, dims, keepdim, **kwargs)
        order, parts = self._drawn(terms.shape[along])
        first, *others = terms.index_select(along, order).chunk(parts, along)
        total = torch.sum(first, dims, keepdim, **kwargs)
        for group in others:
            total.add_(torch.sum(group, dims, keepdim, **kwargs))
        return total

    def _mean(self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any) -> Tensor:
        total = self._sum(terms, dims, keepdim, **kwargs)
        return total.div_(terms.numel() / total.numel())

    def _rows(self, gradient: Tensor, indices: Tensor, *others: Any) -> Tensor:
        """An embedding's gradient: rows that occur several times are added up."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        order = torch.randperm(rows.shape[0], generator=self.generator)
        return aten.embedding_dense_backward(rows[order], indices.reshape(-1)[order], *others)


class Permuted(ReferenceTraining):
    """The reference with all its sums in an order that `seed` draws."""

    def __init__(self, spec: Spec, seed: int) -> None:
        super().__init__(spec)
        self.generator = torch.Generator().manual_seed(seed)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        batches = list(super().micro_batches(step))
        order = torch.randperm(len(batches), generator=self.generator).tolist()
        return [batches[place] for place in order]

    def accumulate(self, step: int) -> Pass:
        with PermutedSums(self.generator):
            return super().accumulate(step)

    def update(self, step: int, sums: Mapping[str, Tensor]) -> float:
        with PermutedSums(self.generator):
            return super().update(step, sums)


_WORKED = 2.0  # seconds that a rank works before it tells the others
_PERMUTED = 2.3  # times what a run takes with its sums in the usual order, on a CPU in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`steps` of `spec` on one device, whatever its mesh; with a `seed`, sums in the order that it
    draws."""

    spec: Spec
    steps: int
    seed: int | None = None

    @property
    def cost(self) -> float:
        """Return about how long it takes beside others: fp64 is half as fast, permuted sums are
        made piece by piece."""
        return self.steps * (2.0 if self.spec.precision.compute_fp64 else 1.0) * (
            1.0 if self.seed is None else _PERMUTED
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Return a digest of what the run depends on. The mesh is not of it."""
        spec = on_one_device(self.spec)
        parts = (
            spec.model,
            spec.batch,
            spec.optimizer,
            spec.data,
            spec.precision.effective,
            *filter(None, [spec.loss.user_function]),
        )
        plain = [asdict(part) for part in parts]
        drawn = spec.train.seed, self.steps, self.seed
        fields = [type(spec.model).__name__, *plain, spec.precision.matmul, *drawn]
        return hashlib.sha256(json.dumps(fields, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """What every rank knows of a run; `solo` on the rank that had it alone."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    owner: int
    solo: Trajectory | None


def references(
    asks: Sequence[Ask], exchange: Exchange, progress: Progress
) -> dict[str, ReferenceRun]:
    """Return every run that is asked for, by its key. All ranks call it, with the same asks."""
    every = {ask.key: ask for ask in asks}
    owners = _owners(list(every.values()), exchange.world.size)
    to_do = [every[key] for key, owner in owners.items() if owner == exchange.world.rank]
    solos: dict[str, Trajectory] = {}
    count = sum(exchange.gather(sum(ask.steps for ask in to_do)))
    run: Iterator[Trajectory | None] | None = None
    done = 0
    while (everyones := sum(exchange.gather(done))) < count:  # a sign of life
        progress.step("reference runs", everyones, count)
        until = time.monotonic() + _WORKED
        while to_do and time.monotonic() < until:
            ask = to_do[0]
            run = run or _begun(ask)
            done += 1
            if (solo := next(run)) is not None:
                solos[ask.key] = solo
                run = None  # before the next begins: no two models stand at once
                del to_do[0]
    figures = {key: [its.losses, its.gradient_norms] for key, its in solos.items()}
    everyone = exchange.gather(figures)
    return {
        key: ReferenceRun(
            losses=tuple(everyone[owner][key][0]),
            norms=tuple(everyone[owner][key][1]),
            owner=owner,
            solo=solos.get(key),
        )
        for key, owner in owners.items()
    }


def _owners(asks: Sequence[Ask], size: int) -> dict[str, int]:
    """Return the rank that has each run, the longest first, each given to the rank that has least
    to do; on all ranks the same."""
    loads, owners = [0.0] * size, {}
    for ask in sorted(asks, key=lambda ask: -ask.cost):
        owner = min(range(size), key=loads.__getitem__)
        owners[ask.key] = owner
        loads[owner] += ask.cost
    return owners


def _begun(ask: Ask) -> Iterator[Trajectory | None]:
    spec = on_one_device(ask.spec)
    device = ReferenceTraining(spec) if ask.seed is None else Permuted(spec, ask.seed)
    return one_device_run(device, ask.steps)
