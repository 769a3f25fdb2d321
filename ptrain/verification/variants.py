"""The specs that verification runs beside the user's own: in fp64 without dropout, on one device,
and in other micro-batches. Each is made of the resolved spec, so that what was chosen stays.

What is compared with one device drops nothing: ranks may draw other masks than one does.

A built-in model is one of another shape for that (`variants.without_dropout`). Of any other torch's
functions are switched off, which its layers call; a model whose loss depends on random numbers all
the same is none that can be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.algebra.legality import check, executed
from ptrain.errors import refused
from ptrain.models.external import named_in_spec
from ptrain.models.facts import AttendingCall, attention_by
from ptrain.models.modes import SwitchedOff, drawn_state, forked, reseed, switched_off
from ptrain.models.watch import watching
from ptrain.selection.alternatives import with_micro
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Precision
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.reference import MicroBatch, ReferenceTraining

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


def in_fp32(spec: Spec) -> Spec:
    """Return the spec with every state in fp32 and without dropout: what rounding grows to is
    measured there."""
    return replace(without_dropout(spec), precision=Precision())


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
    return coarse or (spec.optimizer.row.enlarges_rounding and layout.updated is not DType.FP64)


def in_other_batches(spec: Spec) -> tuple[Spec | None, str]:
    """The same global batch in one micro-batch a rank, or in the fewest (but not as many as now)
    that are legal. None and why, where there are no others."""
    why, samples = (
        "one sample per rank is one micro-batch",
        spec.batch.micro * spec.batch.accumulate,
    )
    for accumulate in range(1, samples + 1):
        if samples % accumulate or accumulate == spec.batch.accumulate:
            continue
        other = with_micro(spec, samples // accumulate)
        faults = (*check(other), *executed(other))
        if not faults:
            return other, ""
        why = f"{accumulate} micro-batches: {faults[0].place}: {faults[0].finding}"
    return None, why


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
        module = f"{first_drawing(device.module, run) or 'the loss'} of {name}"
    finding = f"{module} draws random numbers by itself, and the loss depends on them: no two "
    return off.drops, place, f"{finding}runs with other draws can be compared"


@torch.no_grad()
def first_drawing(model: nn.Module, run: Callable[[], object]) -> str:
    """Return the first module, innermost, while which anything is drawn as `run` runs the model;
    "" where it is none's forward."""
    names: list[str] = []
    entered: list[object] = []

    def enter(*_: object) -> None:
        entered.append(drawn_state())

    def leave(path: str, module: nn.Module, *_: object) -> None:
        if entered.pop() != drawn_state():
            names.append(path or type(module).__name__)

    with watching(model.named_modules(), before=enter, after=leave):
        run()
    return names[0] if names else ""
