"""Rules for matrix products with fp8 factors or in autocast (`precision.matmul`).

A scale depends on all elements that it is computed from. Data ranks and pipeline stages compute
them from the full matrices of their micro-batches, as a single device does. Ranks with shards of a
matrix, over tp, or of the tokens, over cp, would scale each shard differently.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.rule import SpecRule
from ptrain.errors import Fault
from ptrain.facts.float8 import MULTIPLE, products_of
from ptrain.spec.dials import Compiled
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP8_CAPABILITY, DType, Matmul
from ptrain.spec.spec import LossSpec, Spec

_KEY = "precision.matmul"
_OFF = f"Use `{_KEY}=none`."


def _alignment_faults(spec: Spec) -> Iterator[Fault]:
    if not spec.precision.matmul.is_fp8 or not isinstance(spec.model, ModelShape):
        return
    # The products of the backward pass contract over the tokens, which torch._scaled_mm needs
    # aligned too.
    tokens = spec.batch.micro * spec.batch.sequence
    if tokens % MULTIPLE:
        yield Fault(
            place="batch.sequence",
            finding=(
                f"{spec.precision.matmul} products need micro-batches of a multiple of {MULTIPLE} "
                f"tokens, not {spec.batch.micro} x {spec.batch.sequence} = {tokens}"
            ),
            remedy=f"Use `batch.sequence={-(-spec.batch.sequence // MULTIPLE) * MULTIPLE}`.",
        )
    if not products_of(spec.model).scaled:
        yield Fault(
            place=_KEY,
            finding=f"no linear layer has dimensions that are multiples of {MULTIPLE}",
            remedy=_OFF,
        )


def _capability_faults(spec: Spec) -> Iterator[Fault]:
    if not spec.precision.matmul.is_fp8 or not spec.is_for_cuda:
        return
    if spec.cluster is not None and spec.sm is None:
        yield Fault(
            place=_KEY,
            finding="the cluster states no compute capability, as AMD's GPUs have none",
            remedy=f"State `cluster.sm`, or use `{_KEY}=none`.",
        )
    if spec.sm is not None and spec.sm < FP8_CAPABILITY:
        yield Fault(
            place=_KEY,
            finding=(
                f"fp8 products need a compute capability of {FP8_CAPABILITY} or more, the "
                f"cluster has {spec.sm}"
            ),
            remedy=_OFF,
        )
    dtype = spec.precision.effective_layout.parameters
    # torch._scaled_mm with scales by row returns only bf16 on CUDA. fp64 is the emulation of
    # equality tests.
    if spec.precision.matmul is Matmul.ROWWISE and dtype not in (DType.BF16, DType.FP64):
        yield Fault(
            place=_KEY,
            finding=f"CUDA's {Matmul.ROWWISE} products return bf16, the parameters are {dtype}",
            remedy=f"Use `precision.parameters=bf16`, or `{_KEY}={Matmul.TENSORWISE}`.",
        )


def _unsupported_fp8_faults(spec: Spec) -> Iterator[Fault]:
    own = spec.precision.matmul
    if not own.is_fp8:
        return
    conditions = {
        "a model that is not built in": not isinstance(spec.model, ModelShape),
        "tp, whose ranks would scale shards of a matrix differently": spec.degree(Axis.TP) > 1,
        "cp, whose ranks would scale slices of the tokens differently": spec.has_token_slices,
        f"{spec.pipeline.schedule}, which computes the halves of a backward pass separately": (
            spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves
        ),
    }
    for what, is_met in conditions.items():
        if is_met:
            yield Fault(place=_KEY, finding=f"not supported yet: {own} with {what}", remedy=_OFF)


def _unsupported_autocast_faults(spec: Spec) -> Iterator[Fault]:
    own, shape = spec.precision.matmul, spec.model
    # The context is entered around blocks and head, so that collectives between them send fp32.
    if own is not Matmul.AUTOCAST:
        return
    conditions = {
        "a model that is not built in": not isinstance(shape, ModelShape),
        "experts": isinstance(shape, ModelShape) and shape.experts is not None,
        "tp, which would send sums in bf16": spec.degree(Axis.TP) > 1,
        "cp": spec.has_token_slices,
        "compiled blocks or losses": spec.compile is not Compiled.NONE,
        "losses in chunks, fused losses or your losses": spec.loss != LossSpec(),
        f"{spec.pipeline.schedule}, which computes the halves of a backward pass separately": (
            spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves
        ),
    }
    for what, is_met in conditions.items():
        if is_met:
            yield Fault(place=_KEY, finding=f"not supported yet: {own} with {what}", remedy=_OFF)


def _autocast_layout_faults(spec: Spec) -> Iterator[Fault]:
    layout = spec.precision.layout
    if spec.precision.matmul is Matmul.AUTOCAST and layout.parameters is not DType.FP32:
        yield Fault(
            place=_KEY,
            finding=(
                f"torch.autocast casts fp32 parameters, but the layout {layout.name} has "
                f"{layout.parameters}"
            ),
            remedy=f"Use `precision.layout=fp32`, or `{_KEY}=none`.",
        )


RULES = (
    SpecRule(name="fp8 products are aligned", theorem="Definition 1", faults=_alignment_faults),
    SpecRule(name="GPUs multiply fp8", theorem="Definition 5", faults=_capability_faults),
    SpecRule(name="autocast casts fp32", theorem="Definition 1", faults=_autocast_layout_faults),
)
NOT_YET = (
    SpecRule(name="an fp8 scale is of a full matrix", theorem="", faults=_unsupported_fp8_faults),
    SpecRule(
        name="autocast is around full operators", theorem="", faults=_unsupported_autocast_faults
    ),
)
