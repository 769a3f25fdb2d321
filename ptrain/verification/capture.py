"""Run single steps of a program, and map between its ranks' tensors and the reference's.

A step runs as in the training loop, without journal, checkpoints and signals. It is recorded from
outside: the outputs of modules, their gradients, the gradient of every parameter as the optimizer
receives it, and the samples that the ranks saw.

Inside layers with experts or latent features, a rank of tp holds only an addend of some values. One
sum follows after these layers; until then the values differ from the reference's.

The samples of a rank, and its tokens if cp shards the sequence, follow from the spec alone, so that
a program that reads other samples is detected. The sample ledger identifies samples by the tokens
that the model received: no sample of the global batch may be missing or doubled (Theorem 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_low, multimode
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.attention import Span, context_of, spans_at
from ptrain.axes.data.run.target import NamedTarget
from ptrain.data.sampler import SampleSource
from ptrain.facts.model import module_prefixes
from ptrain.facts.parameters import OF_TOKENS
from ptrain.facts.stages import is_within
from ptrain.interpreter.program import Program
from ptrain.models.moe import MoE
from ptrain.models.objective import SampleBatch, StepBatch
from ptrain.optimizers.build import tensor_of
from ptrain.report.finding import Mismatch, Moment, Subject
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import SAMPLE_AXES, Role, Roles, matches_pattern
from ptrain.spec.spec import Spec, coordinates
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch, seed_dropout
from ptrain.train.loop_inputs import learning_rate
from ptrain.units import row_major
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import full_copy, local_cpu
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.updates.repeat import UpdateRecorder

Patterns = tuple[str, ...]


def is_output_addend(roles: Roles, module: str) -> bool:
    """Return True if the outputs of a module on the ranks sum to the reference's output."""
    return any(matches_pattern(pattern, module) for pattern in _output_addends(roles))


def is_gradient_addend(roles: Roles, module: str) -> bool:
    """Return True if the ranks' gradients of a module's output sum to the reference's gradient."""
    return any(
        matches_pattern(pattern, name)
        for pattern in _gradient_addends(roles)
        for name in module_prefixes(module)
    )


@lru_cache(maxsize=16)
def _output_addends(roles: Roles) -> Patterns:
    """Return the modules with sharded inputs and the modules that contain them, except the expert
    layer that sums."""
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    rows = (pattern for pattern, role in roles if role is Role.INNER_ROW)
    around = (name for row in rows for name in module_prefixes(row) if is_within(name, sums))
    return tuple(name for name in dict.fromkeys(around) if name not in sums)


@lru_cache(maxsize=16)
def _gradient_addends(roles: Roles) -> Patterns:
    """Return the modules whose output gradient on a rank is an addend.

    These are latent projections, whose output all heads share while a rank has only some heads, and
    the routers of expert layers, which weight a rank's addends.
    """
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    return tuple(
        name
        for name, role in roles
        if role is Role.LATENT or (role is Role.SHARED and is_within(name, sums))
    )


@dataclass(slots=True, kw_only=True)
class LeafShard(ParameterShard):
    """The elements of a parameter that this rank's optimizer updates, with their update target."""

    target: NamedTarget
    numel: int  # of the tensor that the optimizer steps, and of its elementwise state
    elements: slice  # its elements in the target
    size: int  # of the target, which stores the state of all its leaves

    def select_state(self, state: Tensor) -> Tensor | None:
        row = local_cpu(state).flatten()
        if row.numel() == self.size:
            row = row[self.elements]
        is_elementwise = state.dim() > 0 and row.numel() == self.numel
        row = row if self.flat_index is None or row.numel() != self.numel else row[self.flat_index]
        return row if is_elementwise else None


_APART = 2.0**40  # more elements than a rank has, so that the numbers of two ranks never collide
_MOST_RANKS = int(2.0**53 / _APART) - 1  # above 2**53 fp64 cannot represent every integer


@torch.no_grad()
def leaf_shards(program: Program) -> dict[str, LeafShard]:
    """Return the elements of each parameter that this rank's optimizers update, by canonical name.

    An optimizer may step tensors that are no parameters (flat units, shards, master copies). So
    each element of these tensors gets a number that is unique over all ranks, and
    `program.canonical` moves the numbers to the positions of the elements in full parameters. All
    ranks must call it.
    """
    assert program.world.size <= _MOST_RANKS, "fp64 cannot number the elements of so many ranks"
    first = (program.world.rank + 1) * _APART  # zero is padding
    shards = {}
    for target, leaf, elements in program.update.leaves():
        # `value()` of one tensor all-gathers a unit that is updated tensor by tensor, so the
        # target's shape is used if it has one
        shape = torch.Size(getattr(target, "shape", None) or target.value().shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float64, device=program.world.device)
        numbers = torch.arange(whole[elements].numel(), dtype=whole.dtype, device=whole.device)
        whole[elements] = numbers + first
        placed = program.canonical(target.named_tensors(whole.view(shape)))
        for name, row in ((name, full_copy(its)) for name, its in placed.items()):
            at = ((row >= first) & (row < first + _APART)).flatten().nonzero().flatten()
            if name in shards and not at.numel():
                continue  # another leaf of the target has the elements
            within = (row.flatten()[at] - first).long()
            shards[name] = LeafShard(
                name, tensor_of(leaf), row.shape, target=target, numel=numbers.numel(),
                elements=elements, size=whole.numel(),
                indices=None if at.numel() == row.numel() else at,
                flat_index=None if torch.equal(within, numbers.cpu().long()) else within,
            )  # fmt: skip
    return shards


def optimizer_gradients(updates: UpdateRecorder, factor: float = 1.0) -> dict[str, Tensor]:
    """Return this rank's gradients before clipping, for the parameters that an optimizer updated.

    Args:
        updates: This rank's record of the step.
        factor: The factor by which clipping multiplied the gradients; they are divided by it.
            Default: no clipping.

    Returns:
        This rank's elements of each gradient, by parameter name.
    """
    gradients = updates.gradients
    return {name: gradients[name] / factor for name in gradients if name in updates.updated}


def full_gradients(
    program: Program, updates: UpdateRecorder, exchange: Exchange, norm: float | None
) -> dict[str, Tensor]:
    """Return the full gradients before clipping, by name, in fp64 on the CPU.

    All ranks must call it.

    Args:
        program: The program that ran the step.
        updates: This rank's record of the step.
        exchange: The group of all ranks.
        norm: The gradient norm by which the program clipped; None if unknown.

    Returns:
        The gradients. Elements that several ranks hold are averaged over these ranks.
    """
    own = optimizer_gradients(updates, clip_factor(program.spec, norm))
    shapes: dict[str, list[int]] = {}
    for its in exchange.gather({name: list(updates.holds[name].shape) for name in own}):
        shapes |= its
    gradients = {}
    for name, shape in shapes.items():
        sums = torch.zeros(2, math.prod(shape), dtype=torch.float64)  # row 1: the number of copies
        if name in own:
            at = updates.holds[name].indices
            rows = torch.stack([own[name].double(), torch.ones_like(own[name]).double()])
            sums[:, slice(None) if at is None else at] = rows
        # Each element is added once per copy, and then divided by the number of copies.
        if exchange.world.size > 1:
            dist.all_reduce(sums, group=exchange.group)
        gradients[name] = (sums[0] / sums[1].clamp(min=1)).view(shape)
    return gradients


def shard_outputs(
    program: Program, outputs: Mapping[str, Tensor], is_addend: Callable[[Roles, str], bool]
) -> dict[str, Tensor]:
    """Return the reference's outputs in the layout of this rank's modules, by path.

    They are reduced to the rank's tokens, with features in the order of the ranks. Modules without
    a comparable output are left out: those for which `is_addend` is true, those inside experts, and
    routers and experts if a rank has only some tokens of a sample.

    Args:
        program: The program, for the layout of this rank.
        outputs: The reference's outputs by path.
        is_addend: Returns True, given roles and a path, for a module whose tensor on a rank is an
            addend of the reference's.
    """
    tensor, experts = program.plan.tensor, program.plan.experts
    own, roles = TokenSelection(program.spec, program.world.rank), tensor.roles if tensor else ()
    routes_slices = program.plan.context or (experts and experts.folded)
    apart = tuple(_flattened_modules(program)) if routes_slices else ()
    return {
        path: program.order.held_features(path, own.select_output(output))
        for path, output in outputs.items()
        if not is_addend(roles, path)
        and not (experts and experts.is_inside(path))
        and not is_within(path, apart)
    }


def clip_factor(spec: Spec, norm: float | None) -> float:
    """Return the factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients.

    Args:
        spec: The spec with the largest norm, `optimizer.clip`; None disables clipping.
        norm: The global gradient norm before clipping; None if unknown.

    Returns:
        clip / (norm + 1e-6), at most 1.0. It is 1.0 if the spec does not clip, or if the norm is
        None or not finite.
    """
    clip = spec.optimizer.clip
    if clip is None or norm is None or not math.isfinite(norm):
        return 1.0
    # As in torch/nn/utils/clip_grad.py (torch 2.13).
    return min(1.0, clip / (norm + 1e-6))


def _flattened_modules(program: Program) -> Iterator[str]:
    """Yield the paths of routers and experts, whose outputs have samples and tokens in one
    dimension, so that their shape does not show which rows belong to a token shard."""
    for path, module in module_paths(program):
        if isinstance(module, MoE):
            yield from (f"{path}.{name}" for name in ("router", "experts"))


def model_parts(program: Program) -> list[nn.Module]:
    """Return this rank's pieces of the model (the model, or its pipeline stages)."""
    return [piece.module for piece in program.pieces]


def module_paths(program: Program) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that this rank runs, by path in the model; the root of a pipeline stage is
    left out, because the model has no such module."""
    for piece in program.pieces:
        for path, module in piece.module.named_modules():
            if path or piece.is_whole:
                yield path, module


def run_training_step(
    program: Program, source: SampleSource, step: int
) -> tuple[float, float | None]:
    """Run one training step of the program.

    Args:
        program: The program.
        source: The training samples.
        step: The step, from 0.

    Returns:
        This rank's share of the loss, and the gradient norm (None if the spec does not clip).
    """
    rate = learning_rate(program.spec.optimizer, step)
    # As the training loop does, so that both draw the same masks.
    seed_dropout(program, step)
    share = program.forward_backward(local_batch(program, source, step), rate)
    loss = float(share)
    norm = program.step(rate)
    return loss, None if norm is None else float(norm)


def run_step_for_global_loss(
    program: Program, source: SampleSource, step: int, exchange: Exchange
) -> tuple[float, float | None]:
    """Run one training step and return the global loss and the gradient norm.

    All ranks must call it.

    Args:
        program: The program to advance by one step.
        source: The training samples.
        step: The step, from 0.
        exchange: The group of all ranks.

    Returns:
        The mean loss of the global batch, equal on all ranks, and the gradient norm (None if the
        spec does not clip).
    """
    share, norm = run_training_step(program, source, step)
    return exchange.sum_over_ranks([share])[0], norm


def data_rank_index(spec: Spec, rank: int) -> int:
    """Return the index of a rank's share of every global batch.

    Args:
        spec: The spec, for its mesh.
        rank: The global rank.

    Returns:
        The index, from 0; equal for ranks that process the same samples.
    """
    where = coordinates(spec, rank)
    return row_major((where[axis], spec.degree(axis)) for axis in SAMPLE_AXES if axis in where)


_OF_HEADS = 4  # dimensions of a tensor [samples, heads, tokens, features]


def token_spans(spec: Spec, rank: int) -> tuple[Span, ...]:
    """Return the token ranges of a rank.

    Args:
        spec: A spec, with or without context parallelism.
        rank: The global rank.

    Returns:
        The ranges (first, end), end exclusive, in the order in which the rank stores them. Empty if
        the rank has all tokens of a sample.
    """
    step = context_of(spec)
    return spans_at(step, coordinates(spec, rank)[step.axis]) if step else ()


class TokenSelection:
    """The selection of a rank's tokens (or of the tokens in `spans`) from full tensors.

    Args:
        spec: The spec.
        rank: The rank.
        spans: Token ranges [first, last), in this order. Default: the ranges of the rank.
    """

    def __init__(self, spec: Spec, rank: int, spans: Sequence[Span] | None = None) -> None:
        self._spans = token_spans(spec, rank) if spans is None else spans
        self._sequence = spec.batch.sequence
        self._is_built_in = isinstance(spec.model, ModelShape)

    def select_output(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's tokens of a module's output.

        Args:
            whole: The output for all tokens, [samples, tokens, ...] or [samples, heads, tokens,
                features].

        Returns:
            The rank's tokens; `whole` if no token dimension has the full sequence length.
        """
        dims = (2, 1) if whole.dim() == _OF_HEADS else (1,)
        sizes = dict(zip(range(whole.dim()), whole.shape, strict=True))
        dim = next((dim for dim in dims if sizes.get(dim) == self._sequence), None)
        return whole if dim is None else self._select(whole, dim)

    def select_buffer(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's rows of a buffer that has a row per token.

        Args:
            name: The buffer's name, from which a row per token is inferred.
            whole: The full buffer, [tokens, ...].

        Returns:
            The rank's rows of a built-in model's buffer with a row per token; any other buffer
            unchanged.
        """
        is_cut = self._is_built_in and name.endswith(OF_TOKENS)
        return self._select(whole, 0) if is_cut else whole

    def _select(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        if not self._spans:
            return whole
        parts = [whole.narrow(dim, first, behind - first) for first, behind in self._spans]
        return torch.cat(parts, dim)


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SampleFaults:
    """The rows of a global batch that the ranks missed or saw too often.

    Attributes:
        missing: Indices of rows that all ranks together saw less often than the batch has them.
        doubled: Indices of rows that they saw more often than the other rows.
        count: The number of rows in the batch.
    """

    missing: tuple[int, ...]
    doubled: tuple[int, ...]
    count: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.doubled)


def find_sample_faults(
    reference: Sequence[T], everyones: Sequence[Sequence[T]]
) -> SampleFaults | None:
    """Compare the rows that all ranks saw with the rows of the global batch.

    Ranks that share a batch (tp, cp) all see it, so absolute counts differ on purpose. A row is
    doubled if it came more often than the usual row, relative to its count in the batch.

    Args:
        reference: The rows of the global batch.
        everyones: The rows that each rank saw.

    Returns:
        The missing and doubled rows; None if no row is known, or if a rank saw an unknown row.
    """
    expected = Counter(reference)
    seen = Counter(row for rows in everyones for row in rows)
    known = {row: seen[row] / times for row, times in expected.items() if seen[row]}
    if not known or set(seen) - set(expected):
        return None
    usual = median_low(multimode(known.values()))
    return SampleFaults(
        missing=tuple(i for i, row in enumerate(reference) if seen[row] < expected[row]),
        doubled=tuple(i for i, row in enumerate(reference) if known.get(row, 0) > usual),
        count=len(reference),
    )


UNKNOWN = -1


def sample_mismatches(
    given: StepBatch, reference: ReferenceTraining, step: int, rank: int, exchange: Exchange
) -> Iterator[Mismatch]:
    """Yield a mismatch if this rank's model ran on other samples than the spec assigns to it.

    All ranks must call it.

    Args:
        given: The batch that this rank's model ran on.
        reference: The reference, which has the samples of all ranks.
        step: The step, from 0.
        rank: This rank.
        exchange: The group of all ranks.
    """
    spec = reference.spec
    what = "tokens" if spec.data.function is None else "samples"
    own_tokens = TokenSelection(spec, rank)
    expected = _expected_samples(reference, step, own_tokens)
    names: dict[bytes, int] = {}  # equal tokens count as one sample, even if the batch repeats them
    for ids in expected.values():
        for sample, key in ids:
            names.setdefault(key, sample)
    given_tokens = TokenSelection(spec, rank, ())
    seen = [names.get(_input_key(row, given_tokens), UNKNOWN) for row in given.micro_batches(1)]
    everyone: list[list[int]] = exchange.gather(seen)
    own = [names[key] for _, key in expected[data_rank_index(spec, rank)]]
    if seen == own:
        return
    wanted = [names[key] for ids in expected.values() for _, key in ids]
    known = [[sample for sample in its if sample != UNKNOWN] for its in everyone]
    ledger = find_sample_faults(wanted, known) or SampleFaults((), (), len(wanted))
    is_order = not ledger and UNKNOWN not in seen
    descriptions = [
        _samples_text("missing", [*dict.fromkeys(wanted[row] for row in ledger.missing)]),
        _samples_text("seen twice", [*dict.fromkeys(wanted[row] for row in ledger.doubled)]),
        _samples_text("in another order or place", own if is_order else []),
        f"{what} of no sample of this step" if UNKNOWN in seen else "",
    ]
    yield Mismatch(
        step=step,
        moment=Moment.BATCH,
        subject=Subject.BATCH,
        name=what,
        rank=rank,
        told="; ".join(filter(None, descriptions)) or "samples of another rank",
    )


def _expected_samples(
    reference: ReferenceTraining, step: int, own: TokenSelection
) -> dict[int, list[tuple[int, bytes]]]:
    """Return the samples of each data rank as (sample, key of the tokens that this rank has)."""
    samples: dict[int, list[tuple[int, bytes]]] = {}
    for micro_batch in reference.micro_batches(step):
        samples.setdefault(micro_batch.data_index, []).extend(
            (sample, _input_key(micro_batch.samples.slice_rows(row, row + 1), own))
            for row, sample in enumerate(micro_batch.sample_ids)
        )
    return samples


def _input_key(sample: SampleBatch, own: TokenSelection) -> bytes:
    """Return the bytes of a sample's model input at a rank's tokens. Targets are not included,
    because the comparison of losses covers them."""
    tensor = own.select_output(sample.tensors[0])
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _samples_text(what: str, samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:4])) + (" …" if len(samples) > 4 else "")
    return f"sample{'s' * (len(samples) != 1)} {shown} {what}" if samples else ""
