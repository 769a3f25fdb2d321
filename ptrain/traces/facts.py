"""The facts of any model that a spec names: of a built-in one from its shape; of another one read
off the module and traced, whole and, where it is cut into stages or its operators are, as each rank
has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ptrain.activations.run.apply import keep_traced
from ptrain.derivation.activations import is_tabulated
from ptrain.derivation.estimate import TRACED_BYTES, facts_from_shape
from ptrain.facts.model import ModelFacts
from ptrain.interpreter.materialize import build_module
from ptrain.interpreter.stages import stages_of_module
from ptrain.models.boundary import CodeRaised
from ptrain.models.build import build
from ptrain.models.contract import logits_of, require_takes_tokens
from ptrain.models.dropout import kernels_of
from ptrain.models.facts import module_facts, untraced_facts
from ptrain.models.fake_values import READ
from ptrain.rooms.fake import fake_tensors
from ptrain.spec.axis import Axis
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec
from ptrain.traces.stage_parts import Prepare, stage_passes, stage_rows
from ptrain.traces.tensor_parts import Traced, by_place, kept_of, timelines_of, traced

Share = Callable[[Callable[[], Traced]], Traced]


def facts_of(
    spec: Spec,
    *,
    allow_import: bool = True,
    share: Share = lambda trace: trace(),
    runs_fakes: bool = True,
) -> ModelFacts:
    """A built-in model's facts from its shape, where tables tell what it allocates or it cannot be
    traced; else, and any other model's, from the module itself. A call from Python allows the
    import of a target; commands pass what their user allowed. `share` runs what it is given, which
    takes seconds, or gives what another rank found. `runs_fakes` as of `read_facts`."""
    if (known := facts_from_shape(spec)) is not None:
        return known
    return read_facts(spec, allow_import=allow_import, share=share, runs_fakes=runs_fakes)


def read_facts(
    spec: Spec,
    *,
    allow_import: bool = False,
    share: Share = lambda trace: trace(),
    runs_fakes: bool = True,
) -> ModelFacts:
    """Builds the spec's model and reads it; one whose weights take more than a laptop copies within
    seconds off a fake of it, which says nothing of what it allocates. Raises SpecError for one that
    does not make logits of tokens: the fake runs too, but where the model is to train afterwards
    (not `runs_fakes`), since its code may keep a tensor for the next time."""
    untraced = _of_large(spec, allow_import=allow_import, runs_fakes=runs_fakes)
    if untraced is not None:
        return untraced
    model = build(
        spec.model,
        sequence=spec.batch.sequence,
        allow_import=allow_import,
        seed=spec.train.seed,
    )
    is_cut = spec.degree(Axis.TP) > 1 or spec.degree(Axis.PP) > 1
    kernels = partial(kernels_of, is_for_cuda=spec.is_for_cuda)
    with kernels():
        facts = module_facts(model, spec, None if is_cut else partial(_keep, spec))
    if facts.timeline is None:  # it cannot be traced, and nor can its parts
        return facts
    has_stages = stages_of_module(spec, model, facts) is not None
    if is_tabulated(spec):
        return facts
    if spec.degree(Axis.TP) > 1:
        del model  # the processes that play the ranks build their own
        traces = share(lambda: traced(spec, facts, allow_import=allow_import))
    elif has_stages:
        with kernels():
            traces = share(
                lambda: {"timelines": [stage_rows(model, spec, facts, _keeping(spec, facts))]}
            )
    else:
        return facts
    if has_stages:
        return replace(facts, stage_passes=stage_passes(spec, facts, by_place(traces)))
    return replace(facts, part_timelines=timelines_of(traces))


def _of_large(spec: Spec, *, allow_import: bool, runs_fakes: bool) -> ModelFacts | None:
    """Return the facts of a large model, read off a fake of it. None where the weights are few, and
    where a constructor reads values, which a fake lacks."""
    is_theirs = isinstance(spec.model, ExternalModel)
    try:
        with fake_tensors():
            module = build_module(spec, allow_import=allow_import)
            facts = untraced_facts(module, spec)
    except READ:
        return None
    except CodeRaised as error:
        if error.is_certain or not is_theirs:
            raise
        return None
    if facts.numel * spec.precision.effective.parameters.itemsize <= TRACED_BYTES:
        return None
    if is_theirs:
        require_takes_tokens(module, spec)
    return _run_on_fakes(module, facts, spec) if is_theirs and runs_fakes else facts


def _run_on_fakes(module: nn.Module, facts: ModelFacts, spec: Spec) -> ModelFacts:
    """The facts with what a forward pass shows, where fake tensors do for its operators."""
    try:
        with fake_tensors():
            tokens = torch.zeros(spec.batch.micro, spec.batch.sequence, dtype=torch.int64)
            return replace(facts, vocabulary=logits_of(module, tokens, spec).shape[-1])
    except READ:
        return facts
    except CodeRaised as error:
        if error.is_certain:
            raise
        return facts


def _keep(spec: Spec, model: nn.Module, facts: ModelFacts) -> None:
    """What blocks leave for backward is part of what a model allocates."""
    keep_traced(model, kept_of(spec, facts))


def _keeping(spec: Spec, facts: ModelFacts) -> Prepare | None:
    """The same of a stage's part."""
    step = kept_of(spec, facts)
    return None if step is None else lambda part, *_: keep_traced(part, step)
