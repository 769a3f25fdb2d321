"""Derive the facts of any model that a spec names. The facts of a built-in model follow from its
shape. Any other model is read from its module and traced: as a whole and, if it is split into
stages or sharded over tp, for each rank.

A trace runs one micro-batch at the spec's shape and dtypes. The backward pass stops at modules
whose inputs need no gradient.

A model whose operators select elements by data is traced at two numbers of selected elements. A
model that reads values and then allocates differently has no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ptrain.activations.run.apply import apply_modes_for_trace
from ptrain.codec import encode
from ptrain.derivation.estimate import facts_from_shape, not_traceable
from ptrain.derivation.layers import is_tabulated
from ptrain.facts.model import ModelFacts
from ptrain.internals.compiled import lacks_compiler
from ptrain.internals.fakes import READ
from ptrain.interpreter.construction import stages_of_module
from ptrain.interpreter.look import full_build_reason
from ptrain.models.attention import is_trainable
from ptrain.models.boundary import UserCodeError
from ptrain.models.compiled import compile_blocks, silent_blocks
from ptrain.models.contract import (
    forward_of,
    forward_once,
    logits_of,
    loss_of,
    other_samples,
    require_takes_tokens,
)
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.facts import head_of, untraced_facts
from ptrain.models.initialize import (
    accept_module,
    build_model,
    cast_module,
    keeps_its_weights,
    require_fresh,
    with_model,
)
from ptrain.models.kernels import UnknownKernels
from ptrain.models.ledger import watch_modules
from ptrain.models.moe import route_rows
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import LossInHead, SampleBatch, objective_of, sample_batch
from ptrain.models.products import change_products
from ptrain.models.quantized import quantize_frozen
from ptrain.models.trace import BOUNDS, DataDependence, Extent
from ptrain.plan.lower import built_in_facts, lower
from ptrain.runtime.world import fake_tensors
from ptrain.spec.dials import Compiled
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.placement import CUTTING_AXES, Axis
from ptrain.spec.spec import Spec, require_leave
from ptrain.steps.step import CompiledLoss, loss_in_head
from ptrain.timeline import gradient_order
from ptrain.traces.attention_kernels import kernels_for
from ptrain.traces.rank_part import EqualLayers, TracedLayers, run_only, running_units
from ptrain.traces.record import record, run_unrecorded
from ptrain.traces.stage_parts import (
    joined_works,
    stage_formulas,
    stage_traces,
)
from ptrain.traces.tensor_parts import (
    FakeModel,
    Traced,
    by_place,
    fake_model,
    trace_parts,
    unless_it_takes_values,
    why_untraced,
)

_READS_VALUES = "its code reads values"


class TraceSamples(Protocol):
    """The function that traces a micro-batch of given samples."""

    def __call__(self, samples: SampleBatch, extent: Extent = Extent.GIVEN) -> TracedLayers: ...


def facts_by_data(
    known: ModelFacts,
    layers: TracedLayers,
    traced: TraceSamples,
    samples: SampleBatch,
    further: Callable[[], Sequence[SampleBatch]],
) -> ModelFacts:
    """Return the facts of a full model with its allocations.

    Args:
        known: The facts without a trace.
        layers: The trace of `samples`.
        traced: Traces a micro-batch of other samples.
        samples: The samples of the first trace.
        further: Returns other samples. Empty if it is unknown which tokens the model accepts.

    Returns:
        The facts. If operators select elements by data, with one trace per number of selected
        elements; if allocations depend on data in another way, without a timeline and with the
        reason.
    """
    selected = layers.recording.selected
    if selected.unbounded:
        return _with_unknown(
            known, layers, f"{_describe_selection(selected)}, without a known bound"
        )
    if selected.operators:
        facts, *others = (_with_trace(known, traced(samples, extent)) for extent in BOUNDS)
        unvisited = _unvisited_parameters(facts, _with_trace(known, layers), traced, samples)
        return replace(
            facts, by_data=_describe_selection(selected), others=tuple(others), unvisited=unvisited
        )
    if selected.has_reads and (why := _find_doubt(layers, traced, further)):
        return _with_unknown(known, layers, why)
    return _with_trace(known, layers)


def without_bounds(facts: ModelFacts) -> ModelFacts:
    """Return the facts without a timeline if the model selects elements by data and ranks have
    different experts. These also select from the tokens of other ranks, whose number has no
    known bound."""
    if not facts.by_data:
        return facts
    return replace(
        facts,
        timeline=None,
        work=None,
        others=(),
        by_data="",
        untraced=f"{facts.by_data}, and the rows of other ranks have no known bound",
    )


def extents_of(facts: ModelFacts) -> Sequence[tuple[ModelFacts, Extent]]:
    """Return the facts at each number of selected elements at which the model is traced."""
    if not facts.others:
        return [(facts, Extent.GIVEN)]
    return list(zip((facts, *facts.others), BOUNDS, strict=True))


def _with_trace(known: ModelFacts, layers: TracedLayers) -> ModelFacts:
    timeline = layers.timeline(layers.layers, known.unit_modules)
    order = gradient_order(timeline)
    return replace(known, timeline=timeline, gradient_order=order, work=layers.work(layers.layers))


def _with_unknown(known: ModelFacts, layers: TracedLayers, why: str) -> ModelFacts:
    return replace(_with_trace(known, layers), timeline=None, work=None, untraced=why)


def _unvisited_parameters(
    facts: ModelFacts, given: ModelFacts, traced: TraceSamples, samples: SampleBatch
) -> tuple[str, ...]:
    """Return the parameters that have a gradient if all elements are selected, but not with the
    given samples or if only each module's first selection has an element."""
    seen = [set(given.gradient_order)]
    with suppress(UserCodeError, RuntimeError):  # code that does not run on nothing never has to
        seen.append(set(_with_trace(facts, traced(samples, Extent.FIRST)).gradient_order))
    return tuple(name for name in facts.gradient_order if not all(name in names for names in seen))


def _find_doubt(
    layers: TracedLayers, traced: TraceSamples, further: Callable[[], Sequence[SampleBatch]]
) -> str:
    """Return the reason why a trace does not determine the allocations of other samples. Empty if
    all further samples allocate the same."""
    if not (samples := further()):
        return f"{_READS_VALUES}, and without an nn.Embedding there are no other tokens to try"
    expected = layers.own_timeline
    try:
        is_same = all(traced(other).own_timeline == expected for other in samples)
    except UserCodeError as error:
        return f"{_READS_VALUES}, and it fails on other samples: {error.faults[0].finding}"
    except RuntimeError as error:  # in backward
        return (
            f"{_READS_VALUES}, and it fails on other samples: {' '.join(str(error).split())[:120]}"
        )
    return "" if is_same else f"{_READS_VALUES} and allocates differently for each sample"


def _describe_selection(selected: DataDependence) -> str:
    """Return a text such as `h.0.mlp and 3 modules more select by data (nonzero)`."""
    first, *more = selected.modules
    number = len(more)
    others = f" and {number} more module{'s' * (number > 1)}" if more else ""
    names = ", ".join(name.removeprefix("aten::") for name in selected.operators)
    return f"{first or 'the model'}{others} select{'' if more else 's'} by data ({names})"


@contextmanager
def stops_of(model: nn.Module) -> Iterator[set[str]]:
    """Temporarily record the names of modules whose floating-point inputs never need a gradient;
    none if all parameters are trained."""
    stops: set[str] = set()
    goes_on: set[str] = set()
    is_trained = all(parameter.requires_grad for parameter in model.parameters())
    modules = () if is_trained else model.named_modules()
    with watch_modules(modules, before=partial(_sort_module, stops, goes_on)):
        yield stops


def _sort_module(
    stops: set[str], goes_on: set[str], name: str, _: nn.Module, args: Any, kwargs: Any
) -> None:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    if any(tensor.requires_grad for tensor in numbers):
        goes_on.add(name)
    elif tensors:
        stops.add(name)
    stops -= goes_on


Share = Callable[[Callable[[], Traced]], Traced]
Around = Callable[[], AbstractContextManager[None]]
Progress = Callable[[str], None]

_TOO_LARGE = "it is too large to be traced on real tensors, and its code fails on fake tensors:"
_PROGRAMS_OF_GPUS = (
    "the device may be the GPU of this machine, whose compiled programs are not predicted; for an "
    "estimate, name a cluster or use `device=cuda`"
)
_NO_COMPILER = "a program of torch.compile needs a C++ compiler, such as g++, and there is none"
_READS = (
    "it is too large to be traced on real tensors, and its code reads values, which "
    "fake tensors do not have"
)
_TRACED_BY_NAME = (
    "separate processes trace the shards of each rank and build the model by name. Use "
    "`model.target=package.module:function`."
)
_TO_TRAIN = (
    "it is too large to be traced on real tensors, and a training does not run its code on "
    "fake tensors. Run `ptrain predict`."
)


def facts_of(
    spec: Spec,
    *,
    allow_import: bool = True,
    share: Share = lambda trace: trace(),
    runs_fakes: bool = True,
    progress: Progress = lambda line: None,
) -> ModelFacts:
    """Return the facts of a spec's model.

    Args:
        spec: The spec.
        allow_import: Allow the spec to import your code. A call from Python allows it by default;
            commands pass the user's choice.
        share: Runs a trace, which takes seconds, or returns the trace of another rank.
        runs_fakes: Allow a trace on fake tensors in this process.
        progress: Is called with a line of text before a trace that may take minutes.

    Returns:
        The facts from the shape of a built-in model, if tables cover it or it cannot be traced.
        Otherwise the facts of the module.
    """
    if (known := facts_from_shape(spec)) is not None:
        return known
    return read_facts(
        spec, allow_import=allow_import, share=share, runs_fakes=runs_fakes, progress=progress
    )


def read_facts(
    spec: Spec,
    model: nn.Module | None = None,
    *,
    allow_import: bool = False,
    share: Share = lambda trace: trace(),
    runs_fakes: bool = True,
    progress: Progress = lambda line: None,
) -> ModelFacts:
    """Read the facts of a model: names, shapes and, by a trace, the tensors of a micro-batch.

    Large models are traced on fake tensors. A model whose code cannot run on fake tensors is
    traced on real ones if its weights can be copied within seconds.

    Args:
        spec: The spec of the model.
        model: An unwrapped module to read instead of the spec's. It is not changed.
        allow_import: Allow the spec to import your code.
        share: Runs a trace, which takes seconds, or returns the trace of another rank.
        runs_fakes: Allow a trace on fake tensors in this process. Pass False if the model runs on
            real tensors afterwards and its code may cache tensors.
        progress: Is called with a line of text before a trace that may take minutes.

    Returns:
        The facts, which `ptrain.derive`, `ptrain.lower` and `ptrain.compare` take.

    Raises:
        SpecError: The model does not turn tokens into logits, or the spec names your code and
            `allow_import` is False.

    Example:
        >>> import ptrain
        >>> facts = ptrain.read_facts(ptrain.load("zero3").spec)
        >>> facts.numel
        804736
    """
    if model is not None:
        return _facts_of_given(model, spec)
    require_leave(spec, allow_import=allow_import)
    if why := why_not_compiled(spec):
        return replace(built_in_facts(spec), untraced=why)
    reader = _Reader(spec=spec, share=share, allow_import=allow_import)
    fake = fake_model(spec, allow_import=allow_import)
    facts = _read_own(reader, fake, runs_fakes=runs_fakes, progress=progress)
    # The look runs the model on real tensors: for a large one it takes minutes.
    looks = fake is not None and fake.is_quick
    return replace(
        facts, built_whole=full_build_reason(spec, allow_import=allow_import, looks=looks)
    )


def why_not_compiled(spec: Spec) -> str:
    """Return the reason why compiled programs are unknown here. Empty if they are known, or if
    nothing is compiled."""
    if spec.compile is Compiled.NONE:
        return ""
    if spec.may_be_on_cuda and not spec.is_for_cuda and torch.cuda.is_available():
        return _PROGRAMS_OF_GPUS
    if lacks_compiler():
        return _NO_COMPILER
    return not_traceable(spec, spec.model) if isinstance(spec.model, ModelShape) else ""


def _read_own(
    reader: _Reader, fake: FakeModel | None, *, runs_fakes: bool, progress: Progress
) -> ModelFacts:
    """Return the facts of the model that the spec names."""
    spec = reader.spec
    untraced = (
        unless_it_takes_values(fake.mode, partial(untraced_facts, fake.module, spec))
        if fake
        else None
    )
    if fake is None or untraced is None:
        return _read_real(reader, progress)
    if fake.is_better_real(runs_fakes=runs_fakes):
        return _read_real(reader, progress, fake)
    if isinstance(spec.model, ExternalModel) and spec.loss.user_function is None:
        require_takes_tokens(fake.module, spec)
    if not runs_fakes:
        return replace(untraced, untraced=_TO_TRAIN)
    facts = _read_fake(reader, fake, untraced)
    if facts.untraced and fake.may_be_real:
        return _read_real(reader, progress, fake)
    return facts


def _read_real(reader: _Reader, progress: Progress, fake: FakeModel | None = None) -> ModelFacts:
    """Trace the spec's model on real tensors, and report a trace that takes more than seconds."""
    spec = reader.spec
    if fake is not None and not fake.is_quick:
        name = type(fake.module).__name__
        count = f"{fake.parameters / 1e9:.2g} B parameters"
        progress(f"tracing {name} ({count}) with real tensors; this can take minutes")
    return reader.read(
        build_model(
            spec.model,
            sequence=spec.batch.sequence,
            allow_import=reader.allow_import,
            seed=spec.train.seed,
        )
    )


def _read_fake(reader: _Reader, fake: FakeModel, untraced: ModelFacts) -> ModelFacts:
    """Trace the spec's model on fake tensors. If these do not suffice, return `untraced` with the
    reason."""
    why = why_untraced()
    try:
        if why:
            return replace(untraced, untraced=why, vocabulary=_vocabulary(fake))
        return replace(reader, around=fake.running).read(fake.module)
    except READ:
        return replace(untraced, untraced=why or _READS)
    except UserCodeError as error:
        if error.is_certain:
            raise
        return replace(untraced, untraced=why or f"{_TOO_LARGE} {error.faults[0].finding}")
    except RuntimeError as error:  # an operator without a fake, in backward
        return replace(untraced, untraced=f"{_TOO_LARGE} {' '.join(str(error).split())[:120]}")


def _facts_of_given(module: nn.Module, spec: Spec) -> ModelFacts:
    """Return the facts of a module that the user built, from a trace of a copy."""
    if isinstance(module, nn.Module) and not keeps_its_weights(module):
        spec = with_model(spec, module)
        return replace(facts_of(spec), model=spec.model)
    require_fresh(module)
    copied = deepcopy(module)
    spec = accept_module(copied, spec)
    if spec.is_cut_over(CUTTING_AXES):
        facts = replace(untraced_facts(copied, spec), untraced=_TRACED_BY_NAME)
    else:
        facts = _Reader(spec=spec, share=lambda trace: trace(), allow_import=True).read(copied)
    return replace(facts, model=spec.model, built_whole="the program passes the full model")


def _vocabulary(large: FakeModel) -> int | None:
    """Return the number of logits per token, from a forward pass. None if the loss is a user's
    function."""
    with fake_tensors(large.mode):
        return forward_once(large.module, large.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads the facts of a module of the spec.

    Attributes:
        spec: The spec.
        share: Runs a trace, or returns the trace of another rank.
        allow_import: Allow the spec to import the user's code.
        around: The context in which the module runs.
    """

    spec: Spec
    share: Share
    allow_import: bool
    around: Around = nullcontext

    def read(self, model: nn.Module) -> ModelFacts:
        """Return the facts of the full model and, if layers are split or operators sharded, of each
        rank's part."""
        spec = self.spec
        with self._running() as unknown:
            facts = module_facts(model, spec)
        facts = replace(facts, unknown_attention=" and of ".join(unknown.attention))
        if facts.timeline is None:  # its parts cannot be traced either
            return facts
        with self._running():
            has_stages = stages_of_module(spec, model, facts) is not None
        if is_tabulated(spec):
            return facts
        is_within = not spec.is_cut_over(CUTTING_AXES)  # ranks run whole layers
        if not has_stages and is_within:
            return facts
        of_parts: Callable[..., Traced] = partial(trace_parts, spec, allow_import=self.allow_import)
        if is_within:
            of_parts = partial(self._of_stages, model)
        del model  # each process that traces a rank builds another: two would double the memory
        first, *others = (
            _with_parts(facts, self.share(partial(of_parts, facts, extent=extent)))
            for facts, extent in extents_of(facts)
        )
        return replace(first, others=tuple(others))

    def _of_stages(self, model: nn.Module, facts: ModelFacts, extent: Extent) -> Traced:
        with self._running():
            return {"timelines": [encode(stage_traces(model, self.spec, facts, extent=extent))]}

    @contextmanager
    def _running(self) -> Iterator[UnknownKernels]:
        silent = silent_blocks(self.spec.compile)
        with self.around(), kernels_for(self.spec) as unknown, silent:
            yield unknown


def _with_parts(facts: ModelFacts, traced: Traced) -> ModelFacts:
    """Return the facts with the traces of the parts that ranks have of the model."""
    traces = by_place(traced)
    stages = [*zip(*traces, strict=True)]
    return replace(
        facts,
        stage_passes=tuple(tuple(trace.passes for trace in places) for places in stages),
        stage_rows=stage_formulas(stages),
        part_works=joined_works(traces),
    )


def module_facts(model: nn.Module, spec: Spec) -> ModelFacts:
    """Return the facts of a module.

    The module is changed in place: its parameters are cast or quantized and, if no axis shards it,
    its blocks get the plan's modes. A model that cannot run backward on a CPU is not traced.
    """
    cast_module(model, TORCH_DTYPES[spec.precision.effective_layout.parameters])
    quantize_frozen(model, spec)
    known = untraced_facts(model, spec)
    if not is_trainable(spec.model, torch.device("cpu")):
        return known
    if known.experts is not None:  # as on ranks that have a part of the experts
        route_rows(model, known.experts.modules, known.experts.number)
    ran = EqualLayers.from_spec(spec, known.blocks)
    units = running_units(known.unit_modules, known.blocks, ran.run_layers)
    samples = sample_batch(spec)
    plan = lower(spec, known)
    is_whole = not spec.is_cut_over((*CUTTING_AXES, Axis.PP))
    if is_whole and plan.quantize is not None:
        change_products(model, plan.quantize)
    if is_whole:
        apply_modes_for_trace(model, plan.keep, is_compiled=plan.compiled is not None)
    if is_whole and plan.compiled is not None:
        compile_blocks(model, plan.compiled.blocks)
    with (
        torch.random.fork_rng(devices=[]),
        run_only(model, known.blocks, ran.run_layers),
        _loss_of(model, spec, compiles=is_whole) as loss,
    ):

        def traced(samples: SampleBatch, extent: Extent = Extent.GIVEN) -> TracedLayers:
            run = partial(record, model, units, lambda: loss(samples) / samples.rows)
            return TracedLayers(run(*samples.tensors, extent=extent), ran, units)

        if is_whole and plan.has_programs:  # compiled in the first run, which allocates more
            run_unrecorded(model, units, lambda: loss(samples) / samples.rows)
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
    """The loss of a micro-batch, as the spec defines it.

    Attributes:
        vocabulary: The number of logits per token after the first run. None if the output may not
            be logits.
    """

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self.model, self.spec = model, spec
        self.vocabulary: int | None = None

    def __call__(self, samples: SampleBatch) -> Tensor:
        logits_BTV = logits_of(self.model, samples.inputs, self.spec)
        self.vocabulary = logits_BTV.shape[-1]
        return token_loss_sum(logits_BTV, samples.targets, self.spec.vocab_padding)


class _UserLoss(_Loss):
    """The loss of a micro-batch by a user's function."""

    def __call__(self, samples: SampleBatch) -> Tensor:
        return loss_of(self.model, samples, objective_of(self.spec), self.spec)


class _LossInHead(_Loss):
    """The loss of a micro-batch that the head computes."""

    def __init__(self, model: nn.Module, spec: Spec, inside: LossInHead) -> None:
        super().__init__(model, spec)
        self.inside = inside

    def __call__(self, samples: SampleBatch) -> Tensor:
        inputs = samples.inputs
        with (
            self.inside.provide_targets(samples.targets),
            forward_of(self.model, inputs, self.spec),
        ):
            loss: Tensor = self.model(inputs)
        return loss


@contextmanager
def _loss_of(model: nn.Module, spec: Spec, *, compiles: bool) -> Iterator[_Loss]:
    step = loss_in_head(spec)
    if step is None or (isinstance(step, CompiledLoss) and not compiles):
        yield (_UserLoss if spec.loss.user_function else _Loss)(model, spec)
        return
    inside, head = LossInHead(step), head_of(model, spec)
    loss = _LossInHead(model, spec, inside)
    if isinstance(module := model.get_submodule(head), nn.Linear):
        loss.vocabulary = module.out_features
    inside.attach(model, head)
    try:
        yield loss
    finally:
        inside.detach(model, head)
