"""Findings: traps that the observations of a job prove, and differences from a spec.

A finding is a sentence on a fact that was observed on every rank that it concerns, with a fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ptrain.cost import Collective, Phase, State
from ptrain.spec.placement import DATA_AXES, Axis, in_any_block
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, sum_by_key, with_noun
from ptrain.xray.infer import NONE, REDUCTIONS, UNKNOWN, Inference, MeshAxis
from ptrain.xray.observation import DDP, FSDP2

_TENSOR_NAMES = ("tp", "tensor", "tensor_parallel", "model", "mp")
_SHARDED = ("S", "S*", "M", "O", "S*@host", "M@host")
KINDS = {
    Axis.DP_REPLICATE: "data",
    Axis.DP_SHARD: "data",
    Axis.TP: "tensor",
    Axis.PP: "pipeline",
    Axis.EP: "expert",
}
_CONTEXT = "context"


class Finding(NamedTuple):
    """A finding.

    Attributes:
        code: A short name of the kind of finding.
        text: The fact.
        fix: What to change.
    """

    code: str
    text: str
    fix: str = ""


def find_traps(job: Inference) -> list[Finding]:
    """Return the findings that need no spec."""
    return [
        *_find_repeated_reductions(job),
        *_find_idle_parameters(job),
        *_find_gathered_units(job),
        *chain.from_iterable(_axis_findings(job, axis) for axis in job.axes),
    ]


def _find_repeated_reductions(job: Inference) -> Iterator[Finding]:
    """Yield a finding if gradients are all-reduced in more than one backward pass of a step."""
    passes, sizes = set[int](), []
    for seen in job.observations:
        calls = [
            call
            for call in seen.calls
            if call.state is State.GRADIENTS
            and call.collective is Collective.ALL_REDUCE
            and call.phase is Phase.BACKWARD
        ]
        payloads = sum_by_key((call.micro_batch, call.payload_bytes) for call in calls)
        # Passes of different models, such as a GAN's, reduce different bytes.
        passes.add(len(payloads) if len(set(payloads.values())) == 1 else 0)
        sizes.append(sum(call.sent_bytes for call in calls))
    number = passes.pop() if len(passes) == 1 else 0
    if number > 1 and job.accumulation == number:
        saved = min(sizes) * (number - 1) // number
        yield Finding(
            "accumulation-reduces",
            f"Gradients are all-reduced in each of the {number} backward passes of a step. "
            f"Reducing them in the last one would send {format_bytes(saved)} less per rank.",
            "Run all but the last micro-batch inside `with model.no_sync():`.",
        )


def _find_idle_parameters(job: Inference) -> Iterator[Finding]:
    """Yield findings on parameters that get no gradient, or that no optimizer updates."""
    held = [t for seen in job.observations for t in seen.tensors]
    received = {t.name for t in held if t.state is State.GRADIENTS}
    parameters = [t for t in held if t.state is State.PARAMETERS and t.is_trained]
    # Flat master copies stand for parameters that keep no gradient and are in no optimizer.
    if any(t.key == "master" for t in held) or not received:
        return
    wrapped = any(unit.kind == DDP for seen in job.observations for unit in seen.wrappers)
    unused = {t.name: t.nbytes for t in parameters if t.name not in received and not t.flat}
    if wrapped and unused:
        yield Finding(
            "no-gradient",
            f"{_name_list(unused)} got no gradient in the watched step, but DDP holds and reduces "
            f"{format_bytes(sum(unused.values()))} for them.",
            "Set `requires_grad=False` before wrapping, or remove the modules.",
        )
    updated = {t.name for t in parameters if t.is_updated}
    frozen = {t.name: t.nbytes for t in parameters if t.name not in updated}
    if frozen:
        yield Finding(
            "no-optimizer",
            f"No optimizer that stepped has {_name_list(frozen)} "
            f"({format_bytes(sum(frozen.values()))}), although they require gradients.",
            "Pass them to an optimizer, or set `requires_grad=False`.",
        )


def _name_list(sizes: dict[str, int]) -> str:
    names = list(dict.fromkeys(map(in_any_block, sizes)))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _find_gathered_units(job: Inference) -> Iterator[Finding]:
    """Yield a finding on units of FSDP2 that stay all-gathered between forward and backward."""
    stored, gathered = job.dtype_of(State.PARAMETERS), job.moved_dtype(State.PARAMETERS)
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    # Full parameters are kept in the dtype in which they are all-gathered.
    ratio = sizes.get(gathered, 4) / sizes.get(stored, 4)
    kept = {
        in_any_block(unit.path) or "the root": int(unit.nbytes * len(unit.ranks) * ratio)
        for seen in job.observations
        for unit in seen.wrappers
        if unit.kind == FSDP2 and unit.reshards is False and unit.nbytes
    }
    if kept:
        yield Finding(
            "not-resharded",
            f"{', '.join(kept)} is not resharded after forward: {format_bytes(sum(kept.values()))} "
            "stay all-gathered until its backward pass.",
            "If memory is short, use `fully_shard(..., reshard_after_forward=True)`.",
        )


def _axis_findings(job: Inference, axis: MeshAxis) -> Iterator[Finding]:
    """Yield the findings on one axis."""
    calls = job.calls_over(axis)
    is_observed = all(rank in job.by_rank for ranks in axis.ranks for rank in ranks)
    if not is_observed:
        return
    is_tensor = axis.name.lower() in _TENSOR_NAMES
    reduces = any(c.state is State.GRADIENTS and c.collective in REDUCTIONS for c in calls)
    if not calls:
        yield Finding(
            "idle-axis",
            f"{axis.label} = {axis.size} has no effect: no collective ran over it.",
            "Apply the parallelism of this axis, or use its ranks for another one.",
        )
    elif not any(call.state in _PLACED for call in calls):
        yield Finding(
            "idle-axis",
            f"{axis.label} = {axis.size} shares no training state: no collective moved parameters, "
            "gradients or activations over it.",
            "Wrap the model, such as by DistributedDataParallel.",
        )
    elif is_tensor and axis.kind == "data" and axis.parameters == "R" and reduces:
        yield Finding(
            "tensor-as-data",
            f"{axis.label} = {axis.size} runs as data parallelism: gradients are reduced over it, "
            "and its ranks hold equal parameters.",
            "Parallelize the modules over this axis, and reduce gradients over the data axes only.",
        )
    if axis.kind == "data" and job.has_equal_inputs(axis):
        yield Finding(
            "equal-samples",
            f"The ranks of {axis.label} = {axis.size} received equal inputs in the first forward "
            "pass of the watched step.",
            "Give each rank its samples, such as by a DistributedSampler.",
        )
    if axis.parameters in _SHARDED and axis.kind == "data" and axis.optimizer == "R":
        size = axis.replicated_bytes.get(str(State.OPTIMIZER), 0)
        yield Finding(
            "optimizer-replicated",
            f"Parameters are sharded over {axis.label}, but each rank holds all "
            f"{format_bytes(size)} of optimizer state.",
            "Create the optimizer after sharding the model.",
        )


def replication_notes(axis: MeshAxis) -> Iterator[str]:
    """Yield a sentence for each state whose replicas a data axis does not need."""
    for state, name in ((State.PARAMETERS, "parameters"), (State.OPTIMIZER, "optimizer state")):
        size = axis.replicated_bytes.get(str(state), 0)
        if axis.kind == "data" and axis[state] == "R" and size:
            saved = size - size // axis.size
            yield (
                f"{axis.label}: {name} {format_bytes(size)} on each of {axis.size} ranks; sharding "
                f"frees {format_bytes(saved)} per rank"
            )


def compare_with_spec(job: Inference, spec: Spec) -> Iterator[Finding]:
    """Yield the differences between the job and a spec.

    Args:
        job: The inference.
        spec: The spec that the job should execute.
    """
    open_axes = list(job.axes)
    for factor in spec.factors:
        if factor.degree == 1:
            continue
        kind = KINDS.get(factor.axis, _CONTEXT)
        axis = next(
            (a for a in open_axes if a.size == factor.degree and a.name == factor.axis), None
        ) or next((a for a in open_axes if a.size == factor.degree and a.kind == kind), None)
        if axis is None:
            yield Finding("spec-axis", f"{factor.axis} = {factor.degree}: no such axis was found.")
            continue
        open_axes.remove(axis)
        placed = {state: str(factor.placement[state]) for state in State if state in _PLACED}
        differing = [
            f"{state} {axis[state]} instead of {mode}"
            for state, mode in placed.items()
            if axis[state] not in (mode, UNKNOWN)
        ]
        if axis.kind not in (kind, UNKNOWN):
            differing.insert(0, f"it is a {axis.kind} axis")
        if differing:
            text = f"{factor.axis} = {factor.degree} differs from the spec: {', '.join(differing)}."
            yield Finding("spec-placement", text)
    for axis in open_axes:
        text = f"{axis.label} = {axis.size} ({axis.kind}) is not in the spec."
        yield Finding("spec-axis", text)
    if job.accumulation not in (None, spec.batch.accumulate) and not spec.degree(Axis.PP) > 1:
        yield Finding(
            "spec-accumulation",
            f"A step has {with_noun(job.accumulation or 0, 'micro-batch')}; the spec has "
            f"{spec.batch.accumulate}.",
        )
    moved = job.moved_dtype(State.GRADIENTS)
    meant = _TORCH_NAMES.get(str(spec.precision.effective_layout.reduced))
    if meant and moved not in (NONE, meant):
        yield Finding("spec-dtype", f"Gradients are reduced in {moved}; the spec has {meant}.")


_PLACED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def spec_skeleton(job: Inference) -> tuple[str, str]:
    """Return the spec of the observed placement as YAML, and the reason if there is none.

    The model and the sizes of the batch are not observed, so they are comments.
    """
    degrees: dict[Axis, int] = {}
    tuples: dict[Axis, tuple[str, ...]] = {}
    if not job.axes:
        return "", "The job has one rank, or its groups form no mesh."
    for axis in job.axes:
        name = _spec_axis(axis)
        if name is None or UNKNOWN in axis.modes:
            return "", f"The placement on {axis.label} is not fully known."
        if tuples.setdefault(name, axis.modes) != axis.modes:
            return "", f"Two axes of kind {axis.kind} have different placements."
        degrees[name] = degrees.get(name, 1) * axis.size
    mesh = ", ".join(f"{axis}: {degree}" for axis, degree in degrees.items())
    states = ("parameters", "optimizer", "gradients", "activations")
    rows = [
        f"  {axis}: {{{', '.join(f'{s}: {m}' for s, m in zip(states, modes, strict=True))}}}"
        for axis, modes in tuples.items()
    ]
    dtypes = [
        job.dtype_of(State.PARAMETERS),
        job.moved_dtype(State.PARAMETERS),
        job.moved_dtype(State.GRADIENTS),
    ]
    is_fp32 = {*dtypes} <= {"float32", NONE}
    is_mixed = dtypes == ["float32", "bfloat16", "bfloat16"]
    layout = "fp32" if is_fp32 else "fsdp-mixed" if is_mixed else ""
    precision = (
        f"precision: {{layout: {layout}}}"
        if layout
        else "# precision: "
        + ", ".join(
            f"{what} {dtype}"
            for what, dtype in zip(("parameters", "gathered", "reduced"), dtypes, strict=True)
        )
    )
    batches = job.accumulation or UNKNOWN
    return "\n".join([
        "# The placement that `ptrain xray` observed. Complete `model` and `batch`.",
        "name: xray",
        '# model: {target: "MODULE:FUNCTION"}',
        f"mesh: {{{mesh}}}",
        "placement:",
        *rows,
        precision,
        f"# batch: {{global: N, micro: N, sequence: N}}   # micro-batches per step: {batches}",
        "",
    ]), ""  # fmt: skip


def _spec_axis(axis: MeshAxis) -> Axis | None:
    """Return the axis of a spec for an observed axis, None for an unknown kind."""
    if axis.kind == "data":
        shards = {*axis.modes[:3]} & {*_SHARDED}
        return DATA_AXES[1] if shards else DATA_AXES[0]
    if axis.kind == _CONTEXT:
        return next(one for one in Axis if one not in KINDS)
    return next((one for one, kind in KINDS.items() if kind == axis.kind), None)
