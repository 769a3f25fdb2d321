"""Bound the difference between two correct runs of one layout, from its rounding alone.

Both runs start from the same bits and see the same micro-batches. They differ in where and in
which order the m = K · D micro-batch gradients are added, in the coarsest of the dtypes in which
they are computed, travel and are kept. With u its unit round-off and rounding errors taken as
independent and of mean zero (Higham and Mary 2019, whose constant lambda = 4 is exceeded once in
10^4):

1. A sum of m gradients carries m - 1 roundings, each relative to a partial sum. Uncorrelated
   gradients (the worst case short of cancellation) make the addends' lengths sqrt(m) times that
   of the sum's share, so |dg| <= lambda · u · sqrt(2 (m - 1)) · sqrt(m) · |g| between two runs.
2. AdamW divides an element's gradient by its size: a change dg_i moves the parameter by at most
   lr · |dg_i| / |g_i|, hence the loss by at most lr · |dg_i| to first order. Over the elements,
   whose errors are independent, that is lr · |dg| (2-norm) per update, added up over the updates
   so far. (SGD moves it by lr · |g| · |dg|; clipped gradients have |g| <= max_norm there. Muon
   moves an A x B matrix along U V^T by lr · 0.2 · sqrt(max(A, B)) and works in bf16: its five
   iterations enlarge a relative change at most a^5 times, a = 3.4445 being their slope at 0, so
   the loss moves by at most that much · |g| · |dg| / |g|. A step that is skipped moves nothing.)
3. Once the weights differ in their last bit, so do the roundings of the forward pass: one per
   operator on the way, at most one operator per parameter tensor, relative to the logits z (root
   mean square over the step). The loss moves with the target's logit, and token losses average
   out over the step's T tokens: lambda · u · z · sqrt(2 · tensors / T).
4. The loss itself is a sum of m shares in at least fp32: relative lambda · u_fp32 · sqrt(2 m).

(`ptrain.verification.tolerances` measures what this estimates, on permuted references: narrower,
and a run each. The band is independent of it: it knows no second run and nothing of growth.)

The band is what these make together, relative to the reference's loss. All its figures come from
the spec and from the reference: nothing of the run under test, and no constant but lambda.
"""

from __future__ import annotations

import math

import torch

from ptrain.models.numerics import TORCH_DTYPES
from ptrain.optimizers.build import ADAMW_RMS, COEFFICIENTS, ITERATIONS
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.train.loop_inputs import learning_rate
from tests.trajectories import OneDeviceTrajectory

LAMBDA = 4.0


def loss_band(spec: Spec, reference: OneDeviceTrajectory) -> tuple[float, ...]:
    """The relative tolerance of each step's loss."""
    layout = spec.precision.effective_layout
    unit = _round_off(layout.parameters)
    gradient_unit = max(map(_round_off, (layout.parameters, layout.reduced, layout.gradients)))
    num_addends = spec.batch.accumulate * spec.data_degree
    spread = math.sqrt(2 * (num_addends - 1) * num_addends)
    per_logit = unit * math.sqrt(2 * len(reference.parameters) / spec.batch.tokens)
    summing = min(unit, _round_off(DType.FP32)) * math.sqrt(2 * num_addends)
    moved, band = 0.0, []
    for step, loss in enumerate(reference.losses):
        forward = per_logit * reference.logits[step]
        band.append(LAMBDA * ((forward + moved) / loss + summing))
        norm = reference.gradient_norms[step]
        if math.isfinite(norm):
            slope = _slope(spec, reference, norm)
            moved += learning_rate(spec.optimizer, step) * gradient_unit * spread * slope
    return tuple(band)


def _slope(spec: Spec, reference: OneDeviceTrajectory, norm: float) -> float:
    """How far the loss moves per lr and per relative change of a gradient of this norm."""
    match spec.optimizer.name:
        case "adamw":
            return norm
        case "sgd":
            return norm * norm
        case _:
            longest = max(max(tensor.shape) for tensor in reference.parameters.values())
            enlarged = COEFFICIENTS[0] ** ITERATIONS * ADAMW_RMS * math.sqrt(longest)
            coarser = _round_off(DType.BF16) / _round_off(spec.precision.effective_layout.gradients)
            return norm * enlarged * max(1.0, coarser)


def _round_off(dtype: DType) -> float:
    return torch.finfo(TORCH_DTYPES[dtype]).eps / 2
