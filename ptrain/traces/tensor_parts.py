"""Trace what each rank of tp, cp and ep allocates of a model that no table covers, on fake tensors
where the weights are too large for real ones.

A process plays the rank on fake ranks, cuts the model as the plan says, and traces one micro-batch
of its part, with pp of every stage. This process plays the first ranks, for every other one has to
import torch; it plays none where it belongs to a group of real ranks, or where operators are cut.
Ranks with slices of the same shapes are traced once; a process plays those at the same place along
tp one after the other, since torch remembers for a mesh what it cut for one rank. A trace reads
sizes, births and deaths, which are the same on fake tensors (tests/unit/test_on_fakes.py).
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ptrain.axes.context.attention import alike_by
from ptrain.derivation.tensor import units_by_place
from ptrain.errors import PtrainError, refused
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.internals.dtensor import forget_shapes
from ptrain.internals.fakes import READ, FakeTensorMode
from ptrain.interpreter.look import build_module
from ptrain.models.boundary import PYTHONS, CodeRaised
from ptrain.models.facts import untraced_facts
from ptrain.models.initialize import build, cast
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.trace import Extent
from ptrain.plan.lower import lower
from ptrain.processor import cores
from ptrain.rooms.comm import Mesh
from ptrain.rooms.patches import patched
from ptrain.rooms.world import fake_tensors, fake_world, new_fakes
from ptrain.spec.load import load
from ptrain.spec.placement import CUTTING_AXES, EXPERT_AXES, TOKEN_AXES, Axis
from ptrain.spec.spec import Spec, place_of, ranks_over
from ptrain.spec.write import to_mapping
from ptrain.steps.step import CreateMesh, Plan
from ptrain.traces.attention_kernels import kernels_for
from ptrain.traces.rank_part import EqualLayers, TracedLayers, only, running_units
from ptrain.traces.stage_parts import PartTraces, rank_part, stage_rows, uneven_loads
from ptrain.units import grouped
from ptrain.version import TESTED_TORCH, is_tested

X = TypeVar("X")
REAL_BYTES = 2 * 2**30  # of weights: more than a laptop copies within seconds
# A trace on fake tensors takes one to five seconds, whatever the sizes. Real tensors take as long
# with 8 million parameters in fp32, or 1e11 operations at some 50 GFLOP/s of two cores.
QUICK_BYTES, QUICK_OPERATIONS = 32 * 2**20, 10**11
_READING = 5.0  # seconds
_FEWEST = 5  # ranks of a process: it takes as long to import torch as to play some four of them


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A spec's model on the fake tensors of a mode."""

    spec: Spec
    module: nn.Module
    mode: FakeTensorMode

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(weight.numel() for weight in self.module.parameters())

    @property
    def may_be_real(self) -> bool:
        """Whether its weights are few enough for a trace on real tensors."""
        return self.parameters * self._itemsize <= REAL_BYTES

    @property
    def is_quick(self) -> bool:
        """Whether a trace on real tensors takes no longer than one on fakes: by the weights, and
        by two operations forward and four backward of each weight and position of a micro-batch."""
        batch, count = self.spec.batch, self.parameters
        operations = 6 * count * batch.micro * batch.sequence
        return count * self._itemsize <= QUICK_BYTES and operations <= QUICK_OPERATIONS

    def is_better_real(self, *, runs_fakes: bool = True) -> bool:
        """Return True if a trace on real tensors is quick, or the only one that there can be.
        `runs_fakes`: whether the model may run on fake tensors in this process."""
        return self.may_be_real and (self.is_quick or not runs_fakes or bool(why_untraced()))

    @property
    def _itemsize(self) -> int:
        return self.spec.precision.effective.parameters.itemsize

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it the module runs as it would on real tensors. Raises PtrainError for a torch of
        which `why_untraced` says something."""
        with patched(self.spec.model), fake_tensors(self.mode):
            yield


def fake_model(spec: Spec, *, allow_import: bool = False) -> FakeModel | None:
    """Return the spec's model on fake tensors; None where its constructor reads values, which a
    fake lacks."""
    mode = new_fakes()
    module = unless_it_takes_values(mode, partial(build_module, spec, allow_import=allow_import))
    return None if module is None else FakeModel(spec, module, mode)


def unless_it_takes_values(mode: FakeTensorMode, read: Callable[[], X]) -> X | None:
    """Return what `read` gives on the fake tensors of a mode; None where it takes what fakes lack.
    Raises CodeRaised for what code would raise on real tensors too."""
    try:
        with fake_tensors(mode):
            return read()
    except READ:
        return None
    except CodeRaised as error:
        if error.is_certain:
            raise
        return None


def why_untraced() -> str:
    """Return why this torch traces nothing on fake tensors; nothing where it does."""
    if is_tested(torch.__version__):
        return ""
    return (
        "it is too large to be traced on real tensors, and fake tensors work with torch "
        f"{' and '.join(TESTED_TORCH)}, not {torch.__version__}"
    )


# A process that answers: its import path is this one's, before it imports anything.
_ANSWER = f"""
import sys
sys.path[:] = sys.argv[1:]
from {__name__} import main
sys.exit(main(sys.stdin.readlines()))
"""

# Of a model that does not run on what a rank along an axis has.
_REMEDIES = {
    **{
        axis: f"Take the number of tokens from tensor shapes in its code, or use `mesh.{axis}=1`."
        for axis in TOKEN_AXES
    },
    Axis.TP: (
        "Take the number of heads from tensor shapes in its code (`view(…, -1, "
        "head_dim)`), or use another `tensor.plan`."
    ),
    **dict.fromkeys(EXPERT_AXES, "Use `dp_shard` instead of `ep`."),
}

Traced = dict[
    str, Any
]  # JSON: `timelines` and works by place along the cutting axes, or the `problem` that there is


@dataclass(frozen=True, slots=True)
class _PartRequest:
    """What another process is to trace: ranks of a spec's cutting axes."""

    spec: str
    axes: tuple[Axis, ...]
    indices: tuple[int, ...]
    allow_import: bool
    extent: Extent


def traced(
    spec: Spec, facts: ModelFacts, *, allow_import: bool, extent: Extent = Extent.GIVEN
) -> Traced:
    """Return a timeline and the work for each place along the cutting axes, all of them within
    `timeout.init`; with pp the rows of each stage in their place. `extent`: how much operators
    select by data."""
    alone = traced_part(spec)
    plan = lower(alone, facts)
    players = _players(alone, plan, facts)
    try:
        request = partial(_PartRequest, _as_text(spec), plan.cutting_axes)
        requests = tuple(
            request(indices, allow_import, extent)
            for indices in _together(alone, plan, tuple(dict.fromkeys(players)))
        )
        answers = _answers(requests, spec.timeout.init)
        answer_of = {
            index: answer
            for request, of_request in zip(requests, answers, strict=True)
            for index, answer in zip(request.indices, of_request, strict=True)
        }
    except PtrainError as error:
        return {"problem": str(error)}
    return {"timelines": [answer_of[index] for index in players]}


def _as_text(spec: Spec) -> str:
    try:
        return json.dumps(to_mapping(traced_part(spec), sync_is_written=False))
    except TypeError as error:  # YAML knows dates and sets, JSON does not
        raise refused(
            "model.arguments",
            f"the model is built in another process, which needs JSON arguments: {error}",
            "Use only numbers, strings, lists and mappings.",
        ) from error


def by_place(traces: Traced) -> list[Any]:
    """Return the answers by place along the cutting axes. Raises PtrainError for a problem."""
    if "problem" in traces:
        raise PtrainError(traces["problem"])
    rows: list[Any] = traces["timelines"]
    return rows


def _players(spec: Spec, plan: Plan, facts: ModelFacts) -> list[int]:
    """Return for each place along the cutting axes the first one that has slices of the same
    shapes, and does the same in attention with its tokens."""
    axes, context = plan.cutting_axes, plan.context
    assert axes, "no axis shards the model"
    alike = {
        place: indices[0] for _, indices in units_by_place(spec, plan, facts) for place in indices
    }
    first: dict[tuple[object, ...], int] = {}
    players = []
    for place in range(ranks_over(spec, axes)):
        own = place_of(spec, axes, place)
        tokens = alike_by(context, own[context.axis]) if context else ()
        players.append(first.setdefault((alike[place], *tokens), place))
    return players


def _together(spec: Spec, plan: Plan, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return which of these places one process plays after the other: no more processes than there
    are cores, nor for fewer places than are worth one, but for places along tp."""
    places = ((place_of(spec, plan.cutting_axes, index), index) for index in indices)
    own = grouped((at[plan.tensor.axis] if plan.tensor else 0, index) for at, index in places)
    most = max(map(len, own.values()))
    number = max(1, min(cores() // len(own), most // _FEWEST))
    parts = (tuple(of_place[first::number]) for of_place in own.values() for first in range(number))
    return [part for part in parts if part]


@cache
def _answers(requests: tuple[_PartRequest, ...], seconds: float) -> list[list[Traced]]:
    """Return the answers of this process and of others, of which as many run side by side as there
    are cores, and all of them at most `seconds`. Each imports torch: more at once would take
    memory, and no less time. This process, which nothing ends, runs no code of the user's."""
    ends, at_once, axes = time.monotonic() + seconds, cores(), requests[0].axes
    is_trusted = not requests[0].allow_import
    plays_first = is_trusted and Axis.TP not in axes and not dist.is_initialized()
    processes: list[Popen[str]] = []
    answers = []
    try:
        for number, request in enumerate(requests[plays_first:]):
            if number >= at_once:
                answers.append(_answer(processes[number - at_once], axes, ends))
            processes.append(_started(request))
        rest = processes[-at_once:]
        if plays_first and (own := _played_here(requests[0])):
            answers.insert(0, own)
        elif plays_first:  # another process tells why
            processes.append(_started(requests[0]))
            rest.insert(0, processes[-1])
        return answers + [_answer(process, axes, ends) for process in rest]
    except TimeoutExpired as error:
        raise refused(
            "timeout.init",
            f"tracing the shards of each rank took longer than {seconds:g} s",
            "Use a larger `timeout.init`, or a smaller `batch.micro` or `batch.sequence`.",
        ) from error
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes


def _played_here(request: _PartRequest) -> list[Traced]:
    """Return the answer of this process; nothing where it fails."""
    # Each trace begins with a collection, which would visit all that was imported. A program that
    # froze its objects (to fork workers) keeps them so.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            answers: list[Traced] = json.loads(json.dumps(_played(request)))
            return answers
    except (PtrainError, RuntimeError, ValueError, OSError, ImportError, *PYTHONS):
        return []
    finally:
        _forget_ranks()
        if freezes:
            gc.unfreeze()


def _started(request: _PartRequest) -> Popen[str]:
    """Return a process that has its question."""
    process = Popen(
        [sys.executable, "-P", "-c", _ANSWER, *sys.path],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )
    assert process.stdin is not None
    question = [request.spec, request.indices, request.allow_import, request.extent]
    with suppress(BrokenPipeError):  # one that is gone has said why, on its errors
        process.stdin.write(json.dumps(question))
        process.stdin.close()
    process.stdin = None  # so that `communicate` does not write
    return process


def _answer(process: Popen[str], axes: tuple[Axis, ...], ends: float) -> list[Traced]:
    # One that has finished may have filled its pipe, and waits until it is read.
    output, errors = process.communicate(timeout=max(_READING, ends - time.monotonic()))
    said = errors.strip()
    if process.returncode == PtrainError.exit_code:
        raise PtrainError(said)
    if process.returncode:
        last = said.splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise refused(
            f"mesh.{axes[-1]}",
            f"the full model runs, but the sharded model does not: {last[0]}",
            " ".join(_REMEDIES[axis] for axis in axes),
        )
    answers: list[Traced] = json.loads(output.splitlines()[-1])
    return answers


def _play(
    spec: Spec, index: int, large: FakeModel | None, *, allow_import: bool, extent: Extent
) -> list[Any]:
    """Play rank `index` of the spec's cutting axes alone; `large` is the model where it is on
    fakes, and stays as it is. A mesh reads its ranks, so it is there before tensors
    are fakes."""
    _forget_ranks()
    mesh = _mesh(spec, index)
    if large is not None:
        with large.running(), kernels_for(spec):
            return _part_of(large.module, spec, mesh, extent, is_kept=True)
    module = build(
        spec.model,
        sequence=spec.batch.sequence,
        allow_import=allow_import,
        seed=spec.train.seed,
    )
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    with kernels_for(spec):
        return _part_of(module, spec, mesh, extent)


def _forget_ranks() -> None:
    """Leave the world of the rank that was played last."""
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_shapes()  # which DTensor keeps with the groups that are gone


def _mesh(spec: Spec, index: int) -> Mesh:
    axes = tuple(factor.axis for factor in spec.factors if factor.axis in CUTTING_AXES)
    degrees = tuple(spec.degree(axis) for axis in axes)
    # Two of them: an axis that is all of the world has its group, which says of no axis.
    step = CreateMesh(axes=(Axis.DP_REPLICATE, *axes), degrees=(2, *degrees))
    return Mesh(step, fake_world(index, 2 * math.prod(degrees)))


def _part_of(
    module: nn.Module, spec: Spec, mesh: Mesh, extent: Extent, *, is_kept: bool = False
) -> list[Any]:
    """`is_kept`: the module stays as it is."""
    facts = untraced_facts(module, spec)
    if spec.degree(Axis.PP) > 1:
        return stage_rows(module, spec, facts, mesh, extent=extent)
    part = rank_part(module, spec, facts, mesh, extent=extent)
    layers = EqualLayers.of(spec, facts.blocks)
    units = running_units(facts.unit_modules, facts.blocks, layers.ran)
    with only(module, facts.blocks, layers.ran):
        own = _copied(module) if is_kept else module
        uneven = uneven_loads(spec, lower(spec, facts), layers)
        changes = [uneven.assume] if uneven else []
        first, *others = part.traces(own, units, layers, *changes)
    traces = PartTraces(TracedLayers(first, layers, units), uneven, others)
    return [traces.row(layers, facts.unit_modules)]


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that has the module's own parameters, until others take their place."""
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _played(request: _PartRequest) -> list[Any]:
    """Play ranks on fake tensors, or on real ones if these are as quick or fakes do not suffice."""
    spec = load(json.loads(request.spec)).spec
    fake = fake_model(spec, allow_import=request.allow_import)
    play = partial(_play, spec, allow_import=request.allow_import, extent=request.extent)
    if fake is not None and not fake.is_better_real():
        try:
            return [play(index, fake) for index in request.indices]
        except (CodeRaised, RuntimeError):  # the errors of READ are RuntimeErrors
            if not fake.may_be_real:
                raise
    return [play(index, None) for index in request.indices]


def main(questions: Sequence[str]) -> int:
    """Answers one question from standard input. What the model's code prints goes to the errors."""
    text, indices, allow_import, extent = json.loads("".join(questions))
    answers, sys.stdout = sys.stdout, sys.stderr
    gc.freeze()  # each trace begins with a collection, which would visit all that was imported
    try:
        answers_of = _played(_PartRequest(text, (), indices, allow_import, Extent(extent)))
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answers_of), file=answers)
    return 0
