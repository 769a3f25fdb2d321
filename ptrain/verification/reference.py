"""The one-device reference: what a spec would compute if its whole global batch ran on one device.

Theorem 5 is tested against it, so it shares no execution with the interpreter: a plain module,
torch's own optimizer one tensor at a time, and a loop. What it takes from the spec is the
arithmetic: the same samples, initial weights, dtypes of each state (master copies included),
clipping and schedule. What it must not know is the mesh, except that the data axes say which
micro-batches make up the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptrain.data.corpus import Corpus, Split, corpus
from ptrain.data.sampler import batch
from ptrain.models.build import build
from ptrain.models.initialize import cast, initialize
from ptrain.models.loss import token_loss_sum
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.train.schedule import learning_rate
from ptrain.verification.updater import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a run of some steps did. `losses` are the global batches' means, before each update;
    `gradient_norms` of the global gradient, before clipping (empty where nobody computed them);
    `parameters` full tensors by canonical name; `travelled` is the distance of the parameters
    from their initial values, relative to these, all by the 2-norm. `logits` are the root mean
    squares of each step's logits, which their roundings are relative to (the reference's only)."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    travelled: float
    logits: tuple[float, ...] = ()


def one_device(spec: Spec, steps: int) -> Trajectory:
    """`steps` updates on the CPU, in this process, without a wrapper or a collective."""
    module = _module(spec)
    initial = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    updater = Updater(module, spec)
    source = corpus(spec.data)
    passes: list[tuple[float, float]] = []
    norms: list[float] = []
    for step in range(steps):
        sums, *figures = _accumulate(module, spec, source, step, updater.scale)
        passes.append((figures[0], figures[1]))
        norms.append(updater.update(sums, learning_rate(spec.optimizer, step)))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return Trajectory(
        losses=tuple(loss for loss, _ in passes),
        gradient_norms=tuple(norms),
        parameters=parameters,
        travelled=distance(initial, parameters),
        logits=tuple(size for _, size in passes),
    )


def distance(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> float:
    """The 2-norm of end - start over that of start, all tensors taken as one vector."""
    moved = sum((end[name].double() - start[name].double()).square().sum() for name in start)
    length = sum(start[name].double().square().sum() for name in start)
    return float(torch.as_tensor(moved / length).sqrt())


def _module(spec: Spec) -> nn.Module:
    with torch.device("cpu"):
        module = build(
            spec.model, sequence=spec.batch.sequence, allow_import=True, seed=spec.train.seed
        )
    if isinstance(spec.model, ModelShape):  # a function's model keeps its weights, also one of ours
        initialize(module, spec.train.seed)
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    return module


def _micro_batches(spec: Spec, source: Corpus, step: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(inputs, targets, global number of tokens) of every micro-batch of every data rank."""
    for index in range(spec.data_degree):
        local = batch(
            source,
            spec=spec,
            step=step,
            data_index=index,
            data_degree=spec.data_degree,
            split=Split.TRAIN,
        )
        for inputs, targets in local.micro_batches(spec.batch.micro):
            yield inputs, targets, local.global_tokens


def _accumulate(
    module: nn.Module, spec: Spec, source: Corpus, step: int, scale: float
) -> tuple[dict[str, Tensor], float, float]:
    """Backward over the whole global batch (Theorem 3: the sum over all tokens divided by the
    global number of them). Each micro-batch's gradient is rounded to the dtype in which gradients
    travel, and the sum to the one in which they are kept. Returns the sums (of the loss times
    `scale`) by name, the global mean loss and the root mean square of the logits."""
    layout = spec.precision.effective
    travels, kept = TORCH_DTYPES[layout.reduced], TORCH_DTYPES[layout.gradients]
    sums: dict[str, Tensor] = {}
    total = squares = 0.0
    for inputs, targets, num_tokens in _micro_batches(spec, source, step):
        logits = module(inputs)
        loss = token_loss_sum(logits, targets) / num_tokens
        (loss * scale).backward()
        total += loss.item()
        squares += logits.detach().double().square().mean().item() * inputs.numel() / num_tokens
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to(travels)
                gradient = gradient.to(torch.promote_types(travels, kept))
                sums[name] = sums[name].add_(gradient) if name in sums else gradient
                parameter.grad = None
    return {name: sum_.to(kept) for name, sum_ in sums.items()}, total, math.sqrt(squares)
