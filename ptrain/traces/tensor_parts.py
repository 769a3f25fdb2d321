"""Trace the part of a model on each rank of tp, cp and ep, for models without tables. Large models
are traced on fake tensors.

A process plays one rank among fake ranks, shards the model as the plan does, and traces one
micro-batch of its part, or of every stage with pp. The first ranks are traced in this process,
because each other process must import torch. This process traces none if it belongs to a group of
real ranks, or if operators are sharded over tp. Ranks with shards of the same shapes are traced
once. One process plays ranks at the same place along tp one after the other, because torch caches
the sharding of one rank per mesh. A trace reads sizes, allocations and frees, which are identical
on fake tensors (tests/unit/test_traces_on_fake_tensors.py).
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
from ptrain.codec import decode, encode
from ptrain.derivation.tensor import units_by_place
from ptrain.errors import PtrainError, input_error
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.internals.dtensor import clear_shape_caches
from ptrain.internals.fakes import READ, FakeTensorMode
from ptrain.interpreter.look import build_module
from ptrain.models.boundary import PYTHONS, UserCodeError
from ptrain.models.compiled import silent_blocks
from ptrain.models.facts import untraced_facts
from ptrain.models.initialize import build_model, cast_module
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.quantized import quantize_frozen
from ptrain.models.trace import Extent
from ptrain.plan.lower import lower
from ptrain.processor import cores
from ptrain.runtime.comm import Mesh
from ptrain.runtime.patches import patch_torch
from ptrain.runtime.world import create_fake_mode, fake_tensors, fake_world
from ptrain.spec.load import load
from ptrain.spec.placement import CUTTING_AXES, EXPERT_AXES, TOKEN_AXES, Axis
from ptrain.spec.spec import Spec, place_of, ranks_over
from ptrain.spec.write import to_mapping
from ptrain.steps.step import CreateMesh, Plan
from ptrain.traces.attention_kernels import kernels_for
from ptrain.traces.rank_part import EqualLayers, TracedLayers, run_only, running_units
from ptrain.traces.stage_parts import PartTraces, StageTrace, rank_part, stage_traces, uneven_loads
from ptrain.units import group_by_key
from ptrain.version import TESTED_TORCH, is_tested

X = TypeVar("X")
REAL_BYTES = 2 * 2**30  # of weights; a laptop needs more than seconds to copy more
# A trace on fake tensors takes one to five seconds at any size. Real tensors take as long with
# 8 million parameters in fp32, or with 1e11 operations at about 50 GFLOP/s on two cores.
QUICK_BYTES, QUICK_OPERATIONS = 32 * 2**20, 10**11
_READING = 5.0  # minimum seconds to read a process's answer, even past the deadline
_FEWEST = 5  # ranks per process: importing torch takes as long as playing about four ranks


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
        """True if the weights are small enough for a trace on real tensors."""
        return self.parameters * self._itemsize <= REAL_BYTES

    @property
    def is_quick(self) -> bool:
        """True if a trace on real tensors takes no longer than one on fake tensors.

        Judged by the bytes of weights, and by six operations per weight and token of a micro-batch:
        two forward, four backward.
        """
        batch, count = self.spec.batch, self.parameters
        operations = 6 * count * batch.micro * batch.sequence
        return count * self._itemsize <= QUICK_BYTES and operations <= QUICK_OPERATIONS

    def is_better_real(self, *, runs_fakes: bool = True) -> bool:
        """Return True if a trace on real tensors is quick, or is the only possible one.

        Args:
            runs_fakes: Whether the model may run on fake tensors in this process.
        """
        return self.may_be_real and (self.is_quick or not runs_fakes or bool(why_untraced()))

    @property
    def _itemsize(self) -> int:
        return self.spec.precision.effective_layout.parameters.itemsize

    @contextmanager
    def running(self) -> Iterator[None]:
        """Temporarily run the module on fake tensors as it would run on real ones.

        Raises:
            PtrainError: This version of torch is not supported; see `why_untraced`.
        """
        with patch_torch(self.spec.model), fake_tensors(self.mode):
            yield


def fake_model(spec: Spec, *, allow_import: bool = False) -> FakeModel | None:
    """Return the spec's model on fake tensors.

    Args:
        spec: A resolved spec.
        allow_import: Whether the user's code may be imported.

    Returns:
        The model, or None if its constructor reads values.
    """
    mode = create_fake_mode()
    module = unless_it_takes_values(mode, partial(build_module, spec, allow_import=allow_import))
    return None if module is None else FakeModel(spec, module, mode)


def unless_it_takes_values(mode: FakeTensorMode, read: Callable[[], X]) -> X | None:
    """Return the result of `read` on fake tensors; None if it reads values or fails only on fakes.

    Args:
        mode: The mode in which fake tensors are created.
        read: Builds or runs a module. It is called once.

    Raises:
        UserCodeError: The code would raise on real tensors too.
    """
    try:
        with fake_tensors(mode):
            return read()
    except READ:
        return None
    except UserCodeError as error:
        if error.is_certain:
            raise
        return None


def why_untraced() -> str:
    """Return the reason why this torch version cannot trace on fake tensors, or ""."""
    if is_tested(torch.__version__):
        return ""
    return (
        "it is too large to be traced on real tensors, and fake tensors work with torch "
        f"{' and '.join(TESTED_TORCH)}, not {torch.__version__}"
    )


# The program of another process: it sets this process's import path before its imports.
_ANSWER = f"""
import sys
sys.path[:] = sys.argv[1:]
from {__name__} import main
sys.exit(main(sys.stdin.readlines()))
"""

# Remedies for a model that does not run on a rank's part along an axis.
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
    """The task of another process: ranks along the sharding axes of a spec."""

    spec: str
    axes: tuple[Axis, ...]
    indices: tuple[int, ...]
    allow_import: bool
    extent: Extent


def trace_parts(
    spec: Spec, facts: ModelFacts, *, allow_import: bool, extent: Extent = Extent.GIVEN
) -> Traced:
    """Trace every place along the sharding axes, within `timeout.init` seconds in total.

    Args:
        spec: The spec.
        facts: Facts of its model.
        allow_import: Whether the user's code may be imported.
        extent: Number of elements that data-dependent operators select.

    Returns:
        The timeline and work per place, with pp one entry per stage; or the `problem`.
    """
    alone = traced_part(spec)
    plan = lower(alone, facts)
    players = _representative_places(alone, plan, facts)
    try:
        request = partial(_PartRequest, _as_text(spec), plan.cutting_axes)
        requests = tuple(
            request(indices, allow_import, extent)
            for indices in _group_places(alone, plan, tuple(dict.fromkeys(players)))
        )
        answers = _request_answers(requests, spec.timeout.init)
        answer_of = {
            index: answer
            for request, of_request in zip(requests, answers, strict=True)
            for index, answer in zip(request.indices, of_request, strict=True)
        }
    except PtrainError as error:
        return {"problem": str(error)}
    return {"timelines": [answer_of[index] for index in players]}


def _as_text(spec: Spec) -> str:
    """Return the part of the spec that a trace depends on, as JSON."""
    try:
        return json.dumps(to_mapping(traced_part(spec), sync_is_written=False))
    except TypeError as error:  # YAML has dates and sets, JSON does not
        raise input_error(
            "model.arguments",
            f"the model is built in another process, which needs JSON arguments: {error}",
            "Use only numbers, strings, lists and mappings.",
        ) from error


def by_place(traces: Traced) -> list[list[StageTrace]]:
    """Return the traces by place along the sharding axes; raise PtrainError for a problem."""
    if "problem" in traces:
        raise PtrainError(traces["problem"])
    return [decode(places, list[StageTrace]) for places in traces["timelines"]]


def _representative_places(spec: Spec, plan: Plan, facts: ModelFacts) -> list[int]:
    """Return for each place along the sharding axes the first place with an equal trace.

    Traces are equal if shards have the same shapes and attention treats the tokens the same.
    """
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


def _group_places(spec: Spec, plan: Plan, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return groups of places, one group per process.

    There are at most as many processes as cores, except that each place along tp needs one, and
    none has too few ranks to pay for importing torch.
    """
    places = ((place_of(spec, plan.cutting_axes, index), index) for index in indices)
    own = group_by_key((at[plan.tensor.axis] if plan.tensor else 0, index) for at, index in places)
    most = max(map(len, own.values()))
    number = max(1, min(cores() // len(own), most // _FEWEST))
    parts = (tuple(of_place[first::number]) for of_place in own.values() for first in range(number))
    return [part for part in parts if part]


@cache
def _request_answers(requests: tuple[_PartRequest, ...], seconds: float) -> list[list[Traced]]:
    """Return the answers of all requests, from this process and from others.

    At most as many processes run at once as there are cores, since each imports torch: more would
    take memory and save no time. This process runs no user code, because it cannot be stopped at
    the deadline.

    Raises:
        SpecError: The traces take longer than `seconds` in total.
    """
    ends, at_once, axes = time.monotonic() + seconds, cores(), requests[0].axes
    is_trusted = not requests[0].allow_import
    plays_first = is_trusted and Axis.TP not in axes and not dist.is_initialized()
    processes: list[Popen[str]] = []
    answers = []
    try:
        for number, request in enumerate(requests[plays_first:]):
            if number >= at_once:
                answers.append(_read_answer(processes[number - at_once], axes, ends))
            processes.append(_start_process(request))
        rest = processes[-at_once:]
        if plays_first and (own := _played_here(requests[0])):
            answers.insert(0, own)
        elif plays_first:  # another process reports the error
            processes.append(_start_process(requests[0]))
            rest.insert(0, processes[-1])
        return answers + [_read_answer(process, axes, ends) for process in rest]
    except TimeoutExpired as error:
        raise input_error(
            "timeout.init",
            f"tracing the shards of each rank took longer than {seconds:g} s",
            "Use a larger `timeout.init`, or a smaller `batch.micro` or `batch.sequence`.",
        ) from error
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes


def _played_here(request: _PartRequest) -> list[Traced]:
    """Return this process's answer, or [] if it fails."""
    # Each trace starts with a garbage collection, which would visit all imported objects. A
    # program that froze its objects (to fork workers) keeps them frozen.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            # Through JSON, as the answers of other processes come: equal types, whichever process
            # traced a part.
            answers: list[Traced] = json.loads(json.dumps(encode(_trace_request(request))))
            return answers
    except (PtrainError, RuntimeError, ValueError, OSError, ImportError, *PYTHONS):
        return []
    finally:
        _forget_ranks()
        if freezes:
            gc.unfreeze()


def _start_process(request: _PartRequest) -> Popen[str]:
    """Start a process and send its request."""
    process = Popen(
        [sys.executable, "-P", "-c", _ANSWER, *sys.path],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )
    assert process.stdin is not None
    question = [request.spec, request.indices, request.allow_import, request.extent]
    with suppress(BrokenPipeError):  # a process that ended has written the reason to stderr
        process.stdin.write(json.dumps(question))
        process.stdin.close()
    process.stdin = None  # so that `communicate` does not write
    return process


def _read_answer(process: Popen[str], axes: tuple[Axis, ...], ends: float) -> list[Traced]:
    """Return the answer of a process; raise its error."""
    # A process that has finished may wait for its full pipe to be read.
    output, errors = process.communicate(timeout=max(_READING, ends - time.monotonic()))
    said = errors.strip()
    if process.returncode == PtrainError.exit_code:
        raise PtrainError(said)
    if process.returncode:
        last = said.splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise input_error(
            f"mesh.{axes[-1]}",
            f"the full model runs, but the sharded model does not: {last[0]}",
            " ".join(_REMEDIES[axis] for axis in axes),
        )
    answers: list[Traced] = json.loads(output.splitlines()[-1])
    return answers


def _play(
    spec: Spec, index: int, large: FakeModel | None, *, allow_import: bool, extent: Extent
) -> list[StageTrace]:
    """Trace the rank at `index` along the sharding axes.

    `large` is the model on fake tensors, which is left unchanged; None builds it on real ones. The
    mesh is created before fake tensors are enabled, because it reads its ranks.
    """
    _forget_ranks()
    mesh = _mesh(spec, index)
    if large is not None:
        with large.running(), kernels_for(spec), silent_blocks(spec.compile):
            return _part_of(large.module, spec, mesh, extent, is_kept=True)
    module = build_model(
        spec.model,
        sequence=spec.batch.sequence,
        allow_import=allow_import,
        seed=spec.train.seed,
    )
    cast_module(module, TORCH_DTYPES[spec.precision.effective_layout.parameters])
    quantize_frozen(module, spec)
    with kernels_for(spec), silent_blocks(spec.compile):
        return _part_of(module, spec, mesh, extent)


def _forget_ranks() -> None:
    """Destroy the process group of the previous rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
        clear_shape_caches()  # DTensor caches them together with destroyed groups


def _mesh(spec: Spec, index: int) -> Mesh:
    """Return the mesh of sharding axes, as seen by the rank at `index`."""
    axes = tuple(factor.axis for factor in spec.factors if factor.axis in CUTTING_AXES)
    degrees = tuple(spec.degree(axis) for axis in axes)
    # Two replicas: an axis over all ranks would use the default group, which names no axis.
    step = CreateMesh(axes=(Axis.DP_REPLICATE, *axes), degrees=(2, *degrees))
    return Mesh(step, fake_world(index, 2 * math.prod(degrees)))


def _part_of(
    module: nn.Module, spec: Spec, mesh: Mesh, extent: Extent, *, is_kept: bool = False
) -> list[StageTrace]:
    """Trace a rank's part of a module; with `is_kept` the module is left unchanged."""
    facts = untraced_facts(module, spec)
    if spec.degree(Axis.PP) > 1:
        return stage_traces(module, spec, facts, mesh, extent=extent)
    part = rank_part(module, spec, facts, mesh, extent=extent)
    layers = EqualLayers.from_spec(spec, facts.blocks)
    units = running_units(facts.unit_modules, facts.blocks, layers.run_layers)
    with run_only(module, facts.blocks, layers.run_layers):
        own = _copy_module(module) if is_kept else module
        uneven = uneven_loads(spec, lower(spec, facts), layers)
        changes = [uneven.overload_experts] if uneven else []
        first, *others = part.traces(own, units, layers, *changes)
    traces = PartTraces(TracedLayers(first, layers, units), uneven, others)
    return [traces.stage_trace(layers, facts.unit_modules)]


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of the module that shares its parameters, until they are replaced."""
    # Sharding replaces parameters and never changes them, so that copies may share them.
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _trace_request(request: _PartRequest) -> list[list[StageTrace]]:
    """Trace ranks on fake tensors, or on real ones if these are as quick or fakes do not
    suffice."""
    spec = load(json.loads(request.spec)).spec
    fake = fake_model(spec, allow_import=request.allow_import)
    play = partial(_play, spec, allow_import=request.allow_import, extent=request.extent)
    if fake is not None and not fake.is_better_real():
        try:
            return [play(index, fake) for index in request.indices]
        except (UserCodeError, RuntimeError):  # the errors of READ are RuntimeErrors
            if not fake.may_be_real:
                raise
    return [play(index, None) for index in request.indices]


def main(questions: Sequence[str]) -> int:
    """Answer one request from standard input; output of the model's code goes to stderr."""
    text, indices, allow_import, extent = json.loads("".join(questions))
    answers, sys.stdout = sys.stdout, sys.stderr
    gc.freeze()  # each trace starts with a collection, which would visit all imported objects
    try:
        answers_of = _trace_request(_PartRequest(text, (), indices, allow_import, Extent(extent)))
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(encode(answers_of)), file=answers)
    return 0
