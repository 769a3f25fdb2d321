"""The reference runs of a verification, which the ranks share by duration.

Each rank runs some references and exchanges its progress every few seconds. The full result of a
run stays on its rank; all ranks get the losses.

References with permuted sums measure how far correct runs differ. A placement changes no term of
any sum, but the order, the groups and the roundings between them: data ranks and micro-batches are
added sequentially or by rings, several ranks compute the columns of a matrix product, and other
shapes select other kernels. A permuted reference does the same. Its seed permutes

- the micro-batches of a step, whose gradients are added in that order;
- the contraction of every matrix product, forward, backward and in the update (Muon): its terms
  are permuted and split into 2, 4 or 8 groups, whose partial sums are rounded to the product's
  dtype and then added, as ranks of tp do;
- sums and means over a dimension (norms, weights' gradients), and the rows of an embedding's
  gradient.

No placement splits the softmax or the core of attention of one head, so these are not permuted.
`tolerances` derives the tolerances of a run from these differences.

Runs are compared without dropout, because ranks may draw other masks than one device. For a
built-in model, the shape is changed (`without_dropout`). For any other model, torch's dropout
functions are switched off while it runs; a model whose loss still depends on random numbers is
rejected.
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

from ptrain.errors import input_error
from ptrain.models.external import named_in_spec
from ptrain.models.facts import AttendingCall, attention_by
from ptrain.models.ledger import OperatorMode
from ptrain.models.modes import DisabledDropout, fork_generators, reseed, switched_off
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.jobs.draws import DrawRecorder
from ptrain.verification.reference import (
    MicroBatch,
    Pass,
    ReferenceTraining,
    Trajectory,
    run_reference,
)

_FIXED = (DType.FP32, DType.FP64)


def without_dropout(spec: Spec) -> Spec:
    """Return the spec with a model shape without dropout; unchanged if there is none to remove."""
    if isinstance(spec.model, ModelShape) and spec.model.has_dropout:
        return replace(spec, model=spec.model.without_dropout())
    return spec


def with_fp64(spec: Spec) -> Spec:
    """Return the spec without dropout, in fp64.

    In fp64 a sum in another order differs by 1e-15, and a fault by 1e-5.
    """
    return replace(without_dropout(spec), precision=replace(spec.precision, compute_fp64=True))


def single_device_spec(spec: Spec) -> Spec:
    """Return the spec for one rank that runs all micro-batches of the global batch."""
    batch = replace(spec.batch, accumulate=spec.batch.accumulate * spec.data_degree)
    return replace(spec, factors=(), batch=batch)


def is_order_sensitive(spec: Spec) -> bool:
    """Return True if the order of summation can change results by more than the fixed tolerances.

    This is the case if a state is stored in 16 bits, or if the update rule enlarges rounding errors
    (except in fp64).
    """
    layout = spec.precision.effective_layout
    dtypes = (
        layout.parameters,
        layout.reduced,
        layout.gradients,
        layout.update_dtype,
        layout.moments,
    )
    # A rounding may move a factor by a step of fp8 or bf16.
    is_cast = spec.precision.matmul is not Matmul.NONE and layout.parameters is not DType.FP64
    coarse = is_cast or any(dtype not in _FIXED for dtype in dtypes)
    return coarse or (
        spec.optimizer.properties.enlarges_rounding and layout.update_dtype is not DType.FP64
    )


NOTE = (
    "dropout is 0 in the comparison with the reference: ranks may draw other masks than "
    "the reference"
)


@contextmanager
def disable_dropout(spec: Spec) -> Iterator[DisabledDropout]:
    """Temporarily switch off torch's dropout functions, unless the model is built in."""
    if isinstance(spec.model, ModelShape):
        yield DisabledDropout()
        return
    torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
    with switched_off() as off:

        def attend(call: AttendingCall) -> Tensor:
            off.drops |= call.dropout > 0.0
            return replace(call, dropout=0.0).by_torch(torchs)

        with attention_by(attend):
            yield off


def has_dropout(spec: Spec, exchange: Exchange) -> bool:
    """Return True if a model that is not built in uses dropout. All ranks must call it.

    The first rank runs two or three forward passes.

    Raises:
        SpecError: On every rank, if the loss depends on other random numbers than dropout masks.
    """
    if isinstance(spec.model, ModelShape):
        return False
    seen = _probe_dropout(spec) if exchange.world.is_first else None
    drops, place, finding = next(answer for answer in exchange.gather(seen) if answer is not None)
    if finding:
        raise input_error(
            place,
            finding,
            "Draw with torch.nn.functional.dropout, called by this name, as nn.Dropout does; it is "
            "switched off here. Or draw nothing for the verdict.",
        )
    return bool(drops)


def _probe_dropout(spec: Spec) -> tuple[bool, str, str]:
    """Run forward passes of one micro-batch with different seeds, and compare their losses.

    Returns:
        Whether dropout was switched off, and the place and finding of other random numbers that
        change the loss ("" if there are none).
    """
    device = ReferenceTraining(with_fp64(spec))
    micro_batch: MicroBatch = next(iter(device.micro_batches(0)))

    def run() -> Tensor:
        return micro_batch.loss(device.objective, device.module)

    with disable_dropout(spec) as off, fork_generators(), torch.no_grad():
        losses = []
        for seed in (0, 1):
            reseed(seed)
            losses.append(run().item())
        # NaN differs from itself, which is no effect of a random number.
        if losses[0] == losses[1] or math.isnan(losses[0]):
            return off.drops, "", ""
        place, name = named_in_spec(device.module, spec)
        with DrawRecorder(device.module) as drawn:
            run()
        paths = [draw.path or type(device.module).__name__ for draw in drawn.draws]
        module = f"{paths[0] if paths else 'the loss'} of {name}"
    return off.drops, place, (
        f"{module} draws random numbers by itself, and the loss depends on them: no two runs with "
        "other draws can be compared"
    )  # fmt: skip


SECONDS = 10.0  # between two lines


@dataclass(slots=True)
class Progress:
    """The progress of a verification, one line every SECONDS to `stream`; none without a stream."""

    stream: TextIO | None = None
    stage: str = ""
    _last: float = field(default_factory=time.monotonic)

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self.stage, self._last = stage, time.monotonic()

    def step(self, what: str, done: int, count: int) -> None:
        """Print that a step is done, unless a line was printed within SECONDS.

        Args:
            what: The name of the running part, printed after the stage.
            done: The number of finished steps.
            count: The number of all steps.
        """
        now = time.monotonic()
        if self.stream is not None and now - self._last >= SECONDS:
            self._last = now
            text = f"{self.stage}: {what}, step {done} of {count}"
            print(text, file=self.stream, flush=True)


PARTS = (2, 4, 8)  # the numbers of partial sums of a contraction: usual degrees of tp

aten = torch.ops.aten
Rule: TypeAlias = "Callable[..., Tensor]"
Dims: TypeAlias = "Sequence[int] | None"


class PermutedSums(OperatorMode):
    """An operator mode that runs each sum in a random order.

    Args:
        generator: Draws the order of each call. With equal states, two runs have equal orders.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.rules: dict[Any, Rule] = {
            aten.mm.default: self._permuted_product,
            aten.bmm.default: self._permuted_product,
            aten.addmm.default: partial(self._permuted_product, add=torch.addmm),
            aten.baddbmm.default: partial(self._permuted_product, add=torch.baddbmm),
            torch.ops.ptrain.scaled_mm.default: self._permuted_scaled_product,
            aten.sum.dim_IntList: self._permuted_sum,
            aten.mean.dim: self._permuted_mean,
            aten.embedding_dense_backward.default: self._permuted_rows,
        }

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = self.rules.get(func)
        # Sums of integers are exact in any order.
        if rule is None or not args[0].is_floating_point():
            return func(*args, **kwargs)
        return rule(*args, **kwargs)

    def _draw_order(self, size: int) -> tuple[Tensor, int]:
        """Draw an order of `size` terms, and the number of groups to split them into."""
        choice = int(torch.randint(len(PARTS), (), generator=self.generator))
        return torch.randperm(size, generator=self.generator), PARTS[choice]

    def _permuted_product(
        self, *factors: Tensor, add: Callable[..., Tensor] | None = None, **scales: float
    ) -> Tensor:
        """Return a matrix product as a sum of partial products.

        The addend joins the first partial product in one operator, with a single rounding, as the
        epilogue of a GEMM kernel adds it.
        """
        *added, left, right = factors
        (first, its), *others = self._partial_factors(left, right)
        total = add(*added, first, its, **scales) if add else first @ its
        for columns, rows in others:
            total.add_(columns @ rows, alpha=scales.get("alpha", 1))
        return total

    def _permuted_scaled_product(self, left: Tensor, right: Tensor, *scales: Any) -> Tensor:
        """Add the groups' products, each rounded to the dtype of the result."""
        operator = torch.ops.ptrain.scaled_mm
        total, *others = (operator(*pair, *scales) for pair in self._partial_factors(left, right))
        for other in others:
            total.add_(other)
        return total

    def _partial_factors(self, left: Tensor, right: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the columns of the left and the rows of the right factor, per partial sum."""
        # The same order for both factors, so that the terms stay the same.
        order, parts = self._draw_order(left.shape[-1])
        columns, rows = left.index_select(-1, order), right.index_select(-2, order)
        return zip(columns.chunk(parts, -1), rows.chunk(parts, -2), strict=True)

    def _permuted_sum(
        self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        # The longest dimension: a permutation of few terms changes little.
        along = max(dims or range(terms.dim()), key=lambda dim: terms.shape[dim], default=None)
        if along is None or terms.shape[along] < 2:
            return aten.sum.dim_IntList(terms, dims, keepdim, **kwargs)
        order, parts = self._draw_order(terms.shape[along])
        first, *others = terms.index_select(along, order).chunk(parts, along)
        total = torch.sum(first, dims, keepdim, **kwargs)
        for group in others:
            total.add_(torch.sum(group, dims, keepdim, **kwargs))
        return total

    def _permuted_mean(
        self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        total = self._permuted_sum(terms, dims, keepdim, **kwargs)
        return total.div_(terms.numel() / total.numel())

    def _permuted_rows(self, gradient: Tensor, indices: Tensor, *others: Any) -> Tensor:
        """Return the gradient of an embedding, which adds the rows of repeated indices."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        order = torch.randperm(rows.shape[0], generator=self.generator)
        return aten.embedding_dense_backward(rows[order], indices.reshape(-1)[order], *others)


class PermutedReference(ReferenceTraining):
    """A reference whose sums run in random orders, drawn by a seed."""

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


# Seconds of work between two exchanges of progress. They keep the exchange alive: a connection is
# lost after `timeout` seconds of silence, and a reference may run for longer.
_WORKED = 2.0
_PERMUTED = 2.3  # the duration of a permuted run relative to a usual one, measured on CPU in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """A request for a reference run.

    Attributes:
        spec: The spec. Its mesh is ignored.
        steps: The number of steps.
        seed: The seed of permuted sums; None for sums in the usual order.
    """

    spec: Spec
    steps: int
    seed: int | None = None

    @property
    def cost(self) -> float:
        """The approximate relative duration: fp64 is half as fast, and permuted sums are split."""
        return self.steps * (2.0 if self.spec.precision.compute_fp64 else 1.0) * (
            1.0 if self.seed is None else _PERMUTED
        )  # fmt: skip

    @property
    def key(self) -> str:
        """The digest of everything that the run depends on, which excludes the mesh."""
        spec = single_device_spec(self.spec)
        parts = (
            spec.model,
            spec.batch,
            spec.optimizer,
            spec.data,
            spec.precision.effective_layout,
            *filter(None, [spec.loss.user_function]),
        )
        drawn = spec.train.seed, self.steps, self.seed
        plain = [*map(asdict, parts), spec.precision.matmul]
        fields = [type(spec.model).__name__, *plain, *drawn]
        return hashlib.sha256(json.dumps(fields, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """The result of a reference run.

    Attributes:
        losses: The loss of each step, on all ranks.
        norms: The gradient norm of each step, on all ranks.
        owner: The rank that ran it.
        trajectory: The full result, on the owner; None on other ranks.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    owner: int
    trajectory: Trajectory | None


def run_references(
    asks: Sequence[ReferenceRequest], exchange: Exchange, progress: Progress
) -> dict[str, ReferenceRun]:
    """Run references, shared by the ranks. All ranks must call it with equal requests.

    Args:
        asks: The requests. Those with one key run once.
        exchange: The group of all ranks.
        progress: Prints the progress.

    Returns:
        The runs by key.
    """
    every = {ask.key: ask for ask in asks}
    owners = _assign_owners(list(every.values()), exchange.world.size)
    to_do = [every[key] for key, owner in owners.items() if owner == exchange.world.rank]
    solos: dict[str, Trajectory] = {}
    count = sum(exchange.gather(sum(ask.steps for ask in to_do)))
    run: Iterator[Trajectory | None] | None = None
    done = 0
    while (everyones := sum(exchange.gather(done))) < count:
        progress.step("reference runs", everyones, count)
        until = time.monotonic() + _WORKED
        while to_do and time.monotonic() < until:
            ask = to_do[0]
            run = run or _start_reference(ask)
            done += 1
            if (solo := next(run)) is not None:
                solos[ask.key] = solo
                run = None  # frees the model before the next one is built
                del to_do[0]
    figures = {key: [its.losses, its.gradient_norms] for key, its in solos.items()}
    everyone = exchange.gather(figures)
    return {
        key: ReferenceRun(
            losses=tuple(everyone[owner][key][0]),
            norms=tuple(everyone[owner][key][1]),
            owner=owner,
            trajectory=solos.get(key),
        )
        for key, owner in owners.items()
    }


def _assign_owners(asks: Sequence[ReferenceRequest], size: int) -> dict[str, int]:
    """Return the rank of each run by key, equal on all ranks.

    Runs are assigned in descending order of duration, each to the rank with the least work so far
    (LPT scheduling).
    """
    loads, owners = [0.0] * size, {}
    # The longest rank takes at most 4/3 of the shortest possible time (Graham, 1969).
    for ask in sorted(asks, key=lambda ask: -ask.cost):
        owner = min(range(size), key=loads.__getitem__)
        owners[ask.key] = owner
        loads[owner] += ask.cost
    return owners


def _start_reference(ask: ReferenceRequest) -> Iterator[Trajectory | None]:
    spec = single_device_spec(ask.spec)
    device = ReferenceTraining(spec) if ask.seed is None else PermutedReference(spec, ask.seed)
    return run_reference(device, ask.steps)
