"""The facts of a whole model that is not built in: read off the module itself, and its timeline by
tracing one micro-batch at the spec's shape and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ptrain.activations.run.apply import keep_traced
from ptrain.facts.model import ModelFacts
from ptrain.models.attention import is_trainable
from ptrain.models.batch import SampleBatch, sample_batch
from ptrain.models.chunked import LossInside
from ptrain.models.contract import forward_of, logits_of, loss_of
from ptrain.models.facts import untraced_facts
from ptrain.models.heads import head_of
from ptrain.models.initialize import cast
from ptrain.models.loss import token_loss_sum
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import objective_of
from ptrain.models.other_samples import other_samples
from ptrain.models.routed_rows import route
from ptrain.models.selection import Extent
from ptrain.models.stops import stops_of
from ptrain.plan.lower import lower
from ptrain.spec.axis import CUTTING_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import chunked_loss
from ptrain.traces.by_data import facts_by_data, without_bounds
from ptrain.traces.layer_rows import TracedLayers, only, running, running_units
from ptrain.traces.record import record


def module_facts(model: nn.Module, spec: Spec) -> ModelFacts:
    """The facts of `model`, whose parameters are cast to the spec's dtype. The generator's state
    is left as it was. Where nothing is cut its blocks leave, in place, what the plan says. What
    cannot run backward on a processor is not traced."""
    cast(model, TORCH_DTYPES[spec.precision.effective.parameters])
    known = untraced_facts(model, spec)
    if not is_trainable(spec.model, torch.device("cpu")):
        return known
    if known.experts is not None:  # as ranks run it that have some of them each
        route(model, known.experts.modules, known.experts.number)
    names = running(spec, known.blocks)
    units = running_units(known.unit_modules, known.blocks, names)
    samples = sample_batch(spec)
    if not _is_cut(spec):
        keep_traced(model, lower(spec, known).keep)
    with (
        torch.random.fork_rng(devices=[]),
        only(model, known.blocks, names),
        _loss_of(model, spec) as loss,
    ):

        def traced(samples: SampleBatch, extent: Extent = Extent.GIVEN) -> TracedLayers:
            run = partial(record, model, units, lambda: loss(samples) / samples.rows)
            return TracedLayers(run(*samples.tensors, extent=extent), names, units)

        before = torch.get_rng_state()
        with stops_of(model) as stops:
            layers = traced(samples)
        has_drawn = not torch.equal(before, torch.get_rng_state())  # operators without a tag too
        known = replace(
            known,
            vocabulary=loss.vocabulary,
            stops=tuple(sorted(stops)),
            draws=known.draws or layers.recording.draws or has_drawn,
        )
        others = partial(other_samples, model, spec, loss.vocabulary)
        facts = facts_by_data(known, layers, traced, samples, others)
        return facts if facts.experts is None else without_bounds(facts)


class _Loss:
    """A micro-batch's loss, as the spec has it. `vocabulary` is the size of the logits, once it has
    run; None where nobody says that the output is logits."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self.model, self.spec = model, spec
        self.vocabulary: int | None = None

    def __call__(self, samples: SampleBatch) -> Tensor:
        logits_BTV = logits_of(self.model, samples.inputs, self.spec)
        self.vocabulary = logits_BTV.shape[-1]
        return token_loss_sum(logits_BTV, samples.targets)


class _UserLoss(_Loss):
    """A micro-batch's loss by a function of the user's."""

    def __call__(self, samples: SampleBatch) -> Tensor:
        return loss_of(self.model, samples, objective_of(self.spec.loss), self.spec)


class _ChunkedLoss(_Loss):
    """A micro-batch's loss where the head gives it."""

    def __init__(self, model: nn.Module, spec: Spec, inside: LossInside) -> None:
        super().__init__(model, spec)
        self.inside = inside

    def __call__(self, samples: SampleBatch) -> Tensor:
        inputs = samples.inputs
        with self.inside.given(samples.targets), forward_of(self.model, inputs, self.spec):
            loss: Tensor = self.model(inputs)
        return loss


def _is_cut(spec: Spec) -> bool:
    return spec.is_cut_over((*CUTTING_AXES, Axis.PP))


@contextmanager
def _loss_of(model: nn.Module, spec: Spec) -> Iterator[_Loss]:
    step = chunked_loss(spec)
    if step is None:
        yield (_UserLoss if spec.loss.user_function else _Loss)(model, spec)
        return
    inside, head = LossInside(step), head_of(model, spec)
    loss = _ChunkedLoss(model, spec, inside)
    if isinstance(module := model.get_submodule(head), nn.Linear):
        loss.vocabulary = module.out_features
    inside.attach(model, head)
    try:
        yield loss
    finally:
        inside.detach(model, head)
