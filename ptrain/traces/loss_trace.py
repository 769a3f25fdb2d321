"""Traces a micro-batch with its loss in chunks, behind the blocks of a built-in model: of a whole
one, of a rank's part of it, or of a last stage, for the tables (`traces.loss_tables`).

Dimensions are such that no product of some is one of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import stage_roles
from ptrain.axes.tensor.run.apply import loss_inside, parallelize
from ptrain.derivation.loss_chunks import (
    FUSED,
    STAGE,
)
from ptrain.facts.stages import ENDS
from ptrain.models.build import build
from ptrain.models.chunked import LossInside
from ptrain.models.initialize import cast
from ptrain.models.trace import Event, record
from ptrain.models.units import ROOT, Units, unit_modules
from ptrain.rooms.registry import Registry
from ptrain.spec.model import Family, ModelShape
from ptrain.steps.step import ChunkedLoss
from ptrain.timeline import Boundary, Mark
from ptrain.traces.model_tables import SMALLEST
from ptrain.traces.stage_tables import smallest_units, stages_of
from ptrain.traces.stage_trace import TracedStage, record_passes
from ptrain.traces.tensor_tables import TP, UNEVEN, VOCAB, CutKind

HEAD_DIM, FFN, LAYERS = 34, 5, 1
_PRIMES = (97, 89, 83, 79, 73, 71, 61, 59, 53, 47, 43, 41, 37, 31, 29, 19, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraceSetting:
    """What the operators behind the blocks depend on. `kind` None: they are not cut."""

    family: Family
    tied: bool
    precision: str
    samples: int
    kind: CutKind | None = None
    is_fused: bool = False

    @property
    def name(self) -> str:
        """Of this way in its file."""
        return self.kind.name if self.kind else FUSED if self.is_fused else "plain"

    @property
    def degree(self) -> int:
        return TP if self.kind else 1

    @property
    def shape(self) -> ModelShape:
        is_uneven = self.kind is None or self.kind.loss_parallel  # and larger than hidden
        vocab = UNEVEN if is_uneven else TP * VOCAB
        return ModelShape(
            family=self.family,
            layers=LAYERS,
            hidden=self.degree * HEAD_DIM,
            heads=self.degree,
            kv_heads=self.degree,
            ffn=self.degree * FFN,
            vocab=vocab,
            tied=self.tied,
        )

    @property
    def slices(self) -> int:
        """Into how many the tokens are cut between the blocks."""
        return TP if self.kind is not None and self.kind.is_sequence else 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """So many chunks, and what is left."""

    samples: int
    chunks: int
    chunk: int
    rest: int

    @property
    def number(self) -> int:
        return self.chunks * self.chunk + self.rest

    @property
    def sequence(self) -> int:
        return self.number // self.samples


def tokens_of(samples: int, chunks: int, *, has_rest: bool) -> Tokens:
    """Divisible among samples and ranks."""
    unit = samples * TP
    if not has_rest:
        return Tokens(samples, chunks, unit * _PRIMES[-1], 0)
    return next(
        Tokens(samples, chunks, chunk, rest)
        for chunk, prime in itertools.combinations(_PRIMES, 2)
        for rest in (prime, 2 * prime, 3 * prime)  # of 2 and 3 chunks, divisible by 2 and by 3
        if rest < chunk and (chunks * chunk + rest) % unit == 0
    )


@dataclass(frozen=True, slots=True)
class LossTrace:
    """Of a trace: behind the last block in forward, in front of it in backward. `output` is the
    storage that a stage hands on."""

    forward: Sequence[Event]
    backward: Sequence[Event]
    sizes: Mapping[int, int]
    units: Units
    output: int | None = None


def trace(
    setting: LossTraceSetting,
    tokens: Tokens,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    place: str,
    layers: int = LAYERS,
) -> LossTrace:
    """One micro-batch, of rank 0's part where operators are cut, when torch has learnt the cuts."""
    step = setting.kind.step(setting.shape) if setting.kind else None
    others = 1 if place == STAGE else 0  # layers of the stage before
    shape = replace(setting.shape, layers=layers + others)
    model = build(shape, sequence=tokens.sequence)
    cast(model, dtype)
    module, units, stage = model, unit_modules(model, SMALLEST), None
    if place == STAGE:
        stages = stages_of(shape, (others, layers), tokens.sequence)
        stage = stages[-1]
        module = part_of(model, stages, stage.index, ENDS)
        units = smallest_units(module, stage)
    if step is not None and mesh is not None:
        roles = stage_roles(step.roles, stage, 2) if stage else step.roles
        parallelize(module, replace(step, roles=roles), mesh, Registry())
    inside = loss_inside(ChunkedLoss(tokens=tokens.chunk, fused=setting.is_fused), step)
    inside.attach(module, ROOT)
    given = torch.zeros(tokens.samples, tokens.sequence + 1, dtype=torch.int64)
    is_parallel = step is not None and step.loss_parallel
    with loss_parallel() if is_parallel else nullcontext():
        if stage is None:
            run = partial(_of_model, module, units, inside, given)
        else:
            hidden = (tokens.samples, tokens.sequence // setting.slices, shape.hidden)
            run = partial(_of_stage, module, units, inside, given, torch.zeros(hidden, dtype=dtype))
        if step is not None:
            run()
        return run()


def _of_model(module: nn.Module, units: Units, inside: LossInside, given: Tensor) -> LossTrace:
    def forward() -> Tensor:
        with inside.given(given[:, 1:]):
            loss: Tensor = module(given[:, :-1])
        return loss / (given.numel() - len(given))

    recording = record(module, units, forward, given)
    return _parts(recording.forward, recording.backward, recording.sizes, units)


def _of_stage(
    module: nn.Module, units: Units, inside: LossInside, given: Tensor, hidden: Tensor
) -> LossTrace:
    traced = TracedStage(
        module=module,
        units=units,
        hidden=hidden,
        loss=lambda output: output / (given.numel() - len(given)),
        around=partial(inside.given, given[:, 1:]),
    )
    passes = record_passes(traced)
    parts = _parts(passes.events["forward"], passes.events["backward"], passes.sizes, units)
    return replace(parts, output=passes.output)


def _parts(
    forward: Sequence[Event],
    backward: Sequence[Event],
    sizes: Mapping[int, int],
    units: Units,
) -> LossTrace:
    layers = [index for index, (name,) in enumerate(units) if name.count(".") == 1]
    last = layers[-1]
    return LossTrace(
        forward=forward[forward.index(Boundary(Mark.LEAVE, last)) + 1 :],
        backward=backward[: backward.index(Boundary(Mark.PRE_BACKWARD, last))],
        sizes=sizes,
        units=units,
    )
