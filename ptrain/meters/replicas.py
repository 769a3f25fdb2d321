"""The replica meter: check state consistency (Theorem 4) in a running program.

A part that several ranks hold must be bitwise equal on all of them, dtype included, and a copy of a
master must equal the master.

Each rank digests its local storages in place and names each part by its position in the full tensor
(`meters.holdings`). Equal keys are copies, so no declaration of replication is needed. The ranks
exchange one digest per set of ranks that share a part. They exchange all keys only if these digests
differ, and at the first check.

Ranks draw equal random numbers if they run the same layers on the same samples with replicated
activations. Over cp they also draw equal numbers, since each rank takes its tokens' part of the
masks of all tokens. Ranks that differ along another mesh axis draw different numbers. The tensor
axis separates ranks only if it shards activations by tokens.

Digests are fast enough for a full training state in a running job. The bytes are read as 64-bit
words in rows of 512, and the digest hashes the sums of all rows and all columns, modulo 2^64. A
flipped bit changes one word by a power of two, hence one row sum and one column sum. Swapped words
change some sum unless they lie in one row and one column. Words after the last full row are hashed
directly. This takes two passes over memory and no copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.internals.dispatch import disable_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.holdings import Holding
from ptrain.models.ledger import add_listeners, local_tensor
from ptrain.models.modes import drops_out
from ptrain.report.copies import (
    Replica,
    explain_replica_mismatches,
    find_differing_replicas,
    find_equal_generators,
    ranks_by_value,
)
from ptrain.report.finding import DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.spec.placement import CUTTING_AXES, SAMPLE_AXES, TOKEN_AXES, Axis
from ptrain.units import group_by_key

_WORD = 8  # bytes
_ROW = 512  # words: the sums that leave the device are 4 KiB and 1/512 of the tensor
_DIGEST_BYTES = 8  # 64 bits: among about 10^9 tensors, some two would collide by chance


@torch.no_grad()
def compute_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of the local part of each tensor.

    Equal bytes in equal order have equal digests on every device. Shape and dtype are not part of
    the digest.

    Args:
        tensors: The tensors, on any devices. One copy to the host is made per device.

    Returns:
        The hexadecimal digests, in the order of the tensors.
    """
    with disable_modes():
        sums = [_compute_checksums(local_tensor(tensor.detach())) for tensor in tensors]
        devices = group_by_key((checksums.device, index) for index, checksums in enumerate(sums))
        texts = [""] * len(sums)
        for indices in devices.values():
            joined = torch.cat([sums[index] for index in indices]).cpu()
            sizes = [sums[index].numel() for index in indices]
            for index, part in zip(indices, joined.split(sizes), strict=True):
                texts[index] = digest_bytes(part.numpy().tobytes())
    return texts


def digest_bytes(data: bytes) -> str:
    """Return the digest of a few bytes on the host; all of them are hashed."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape of the local part of a tensor, such as `float32[4, 8]`."""
    held = local_tensor(tensor)
    return f"{str(held.dtype).removeprefix('torch.')}{list(held.shape)}"


def _compute_checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksums of a tensor as a 1-d int64 tensor.

    The order is: row sums, column sums, then the words that fill no row, zero-padded.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % _WORD:
        data = data.clone()  # words begin at multiples of their size
    full = data.numel() // (_WORD * _ROW) * _WORD * _ROW
    rest = data[full:]
    if missing := -rest.numel() % _WORD:
        rest = torch.cat([rest, rest.new_zeros(missing)])
    rest = rest.view(torch.int64)
    if not full:
        return rest
    rows = data[:full].view(torch.int64).view(-1, _ROW)
    # Sums of integers wrap around and do not depend on the order of addition, which differs between
    # devices.
    return torch.cat([rows.sum(1), rows.sum(0), rest])


def random_state_digest(program: Program) -> tuple[str, str] | None:
    """Return this rank's random-number group and a digest of its generator's state.

    Args:
        program: The program, whose axes determine which ranks draw different numbers.

    Returns:
        The rank's coordinates on the axes along which ranks draw different numbers, and the
        hexadecimal digest. None for a model without dropout: its training state includes no
        generator.
    """
    if not drops_out(program.model):
        return None
    mesh = program.mesh
    cutting = [axis for axis in CUTTING_AXES if axis not in SAMPLE_AXES]
    alike = TOKEN_AXES if has_token_slices(program.model) else cutting
    apart = (axis for axis in mesh.axes if axis not in alike)
    place = ",".join(f"{axis}={mesh.coordinate(axis)}" for axis in apart)
    return place, generator_digest(program.world.device)


def generator_digest(device: torch.device) -> str:
    """Return a digest of the state of the device's default random generator."""
    is_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return digest_bytes(state.numpy().tobytes())


def has_token_slices(model: nn.Module) -> bool:
    """Return True if the tensor axis shards activations by tokens between sub-blocks.

    This holds if all parameters of some module are distributed over tp and replicated. (The bias of
    a row-parallel operator is replicated too, but its weight is sharded.)
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(map(_is_replicated_over_tp, own)):
            return True
    return False


def _is_replicated_over_tp(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a DTensor that is replicated over the tensor axis."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == Axis.TP and placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )


Identity = tuple[int, str, str, str]


class SupportsGather(Protocol):
    """An exchange of small values between all ranks."""

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the values of all ranks, in rank order; `kind` is their type."""
        ...


class ReplicaMeter:
    """The meter that compares the copies that ranks hold.

    `record_gradients()` around a step records digests of its gradients. `check` then compares them
    and all other state. All ranks must call both in the same order, and all get the same result.

    The cost is one pass over a rank's stored state, at about 10 GB/s per core, and one exchange of
    a few hundred bytes. No state is moved.

    Args:
        program: The program.
        exchange: The exchange between all ranks.
    """

    def __init__(self, program: Program, exchange: SupportsGather) -> None:
        self.program = program
        self.exchange = exchange
        self.last_good: int | None = None  # the last step after which all ranks agreed
        self._noted: list[Replica] = []
        self._holders: dict[Identity, tuple[int, ...]] = {}

    @contextmanager
    def record_gradients(self) -> Iterator[None]:
        """Temporarily record the digests of the reduced gradients and the value of their norm."""
        self._noted = []
        with add_listeners(self.program.gradient_observers, self):
            yield

    def on_reduced(self) -> None:
        """Record the gradients, which the program has just reduced."""
        self._noted += _digest_copies(Moment.GRADIENTS, holdings.gradients(self.program))

    def on_clipped(self, norm: torch.Tensor | None) -> None:
        """Record the norm by which the program has just clipped the gradients."""
        if norm is not None:
            self._noted.append(_number_copy(Moment.CLIP, Subject.NORM, "norm", repr(float(norm))))

    def check(self, step: int, moment: Moment = Moment.UPDATE) -> tuple[Mismatch, ...]:
        """Return the differences between ranks in order of time; empty if all ranks agree.

        All ranks must call it. A single rank and fake ranks have nothing to compare.

        Args:
            step: This rank's step number, which is compared too.
            moment: The moment of the step that the check belongs to.
        """
        if self.program.world.size == 1 or self.program.world.backend == "fake":
            return ()
        table = [*self._noted, *self._copies_between_steps(step, moment)]
        self._noted = []
        with disable_modes():
            # The holders are unknown at the first check, and after a part got a new name or shard.
            is_known = all(copy.identity in self._holders for copy in table)
            answers = self.exchange.gather(
                {
                    "known": is_known and _agrees_with_itself(table),
                    "classes": self._digest_by_ranks(table) if is_known else {},
                    "random": self._random_state(moment),
                    "stale": [list(copy) for copy in holdings.stale_copies(self.program)],
                }
            )
            mismatches = [*_stale_mismatches(answers, moment, step)]
            if not _all_agree(answers):
                mismatches += self._compare_in_full(table, step)
        mismatches += find_equal_generators([answer["random"] for answer in answers], moment, step)
        mismatches.sort(key=lambda mismatch: mismatch.order_key)
        if not mismatches:
            self.last_good = step
        return tuple(mismatches)

    def root_cause(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Return the root cause of the mismatches that `check` found, None if there are none."""
        return explain_replica_mismatches(
            mismatches, gather_coordinates(self.program), self.last_good
        )

    def _copies_between_steps(self, step: int, moment: Moment) -> Iterator[Replica]:
        """Yield a `Replica` of each part, counter and hyperparameter of this rank between steps."""
        program = self.program
        held = (holdings.parameters, holdings.optimizer_state, holdings.buffers)
        yield from _digest_copies(moment, chain.from_iterable(read(program) for read in held))
        counts = holdings.update_counts(program)
        updates = {f"{name}.step": count for name, count in counts.items()}
        if counts:
            updates["updates"] = max(counts.values())
        for name, count in {"training step": step, **updates}.items():
            yield _number_copy(moment, Subject.COUNTER, name, str(count))
        for name, values in holdings.hyperparameters(program).items():
            yield _number_copy(moment, Subject.LEARNING_RATE, name, " ".join(map(repr, values)))
        if (random := self._random_state(moment)) is not None:
            place, digest = random
            yield Replica(moment, Subject.RANDOM, "generator", place, "state", digest)

    def _random_state(self, moment: Moment) -> tuple[str, str] | None:
        """Return the state of random numbers.

        Returns None before a step begins, since the step seeds the generators.
        """
        return None if moment is Moment.START else random_state_digest(self.program)

    def _digest_by_ranks(self, table: Iterable[Replica]) -> dict[str, str]:
        """Return one digest of all shared parts for each set of ranks that shares some."""
        of_ranks = group_by_key(
            (tuple(dict.fromkeys(self._holders[copy.identity])), copy) for copy in table
        )
        return {
            ",".join(map(str, ranks)): digest_bytes(repr(sorted(map(repr, copies))).encode())
            for ranks, copies in of_ranks.items()
            if len(ranks) > 1
        }

    def _compare_in_full(self, table: Sequence[Replica], step: int) -> Iterator[Mismatch]:
        """Exchange the full tables, remember the holders, and yield the differences."""
        tables = self.exchange.gather(table, list[Replica])
        before, now = self._holders, ranks_by_value(tables)
        self._holders = before | now
        yield from _missing_mismatches(before, now, step)
        yield from find_differing_replicas(tables, step)


def gather_coordinates(program: Program) -> dict[int, dict[str, int]]:
    """Return the mesh coordinates of every rank.

    Args:
        program: The program, for its mesh.

    Returns:
        The coordinates (from 0) by axis, for each global rank. Without a mesh, rank 0 has no axes.
    """
    if (mesh := program.mesh.device_mesh) is None:
        return {0: {}}
    places = torch.cartesian_prod(*(torch.arange(size) for size in mesh.mesh.shape))
    rows = places.view(-1, mesh.mesh.dim()).tolist()
    names = [str(axis) for axis in program.mesh.axes]
    return {
        rank: dict(zip(names, place, strict=True))
        for rank, place in zip(mesh.mesh.flatten().tolist(), rows, strict=True)
    }


def _digest_copies(moment: Moment, held: Iterable[Holding]) -> list[Replica]:
    """Return a `Replica` with a digest for each held part."""
    things = list(held)
    texts = compute_digests([thing.tensor for thing in things])
    return [
        Replica(
            moment,
            thing.subject,
            f"{thing.name}.{thing.key}" if thing.key else thing.name,
            thing.part,
            describe_tensor(thing.tensor),
            digest,
        )
        for thing, digest in zip(things, texts, strict=True)
    ]


def _number_copy(moment: Moment, subject: Subject, name: str, value: str) -> Replica:
    """Return a `Replica` of a number that all ranks must agree on."""
    return Replica(moment, subject, name, "", "", value)


def _agrees_with_itself(table: Iterable[Replica]) -> bool:
    """Return True if all copies within this rank are equal.

    Two pipeline stages of a rank may hold one tensor.
    """
    seen: dict[Identity, Replica] = {}
    return all(seen.setdefault(copy.identity, copy) == copy for copy in table)


def _all_agree(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if every rank knew all holders and has equal digests for each set of ranks."""
    if not all(answer["known"] for answer in answers):
        return False
    return all(
        answers[int(rank)]["classes"].get(ranks) == digest
        for answer in answers
        for ranks, digest in answer["classes"].items()
        for rank in ranks.split(",")
    )


def _stale_mismatches(
    answers: Sequence[Mapping[str, Any]], moment: Moment, step: int
) -> Iterator[Mismatch]:
    """Yield a mismatch for each parameter that differs from its master copy on its rank."""
    for rank, answer in enumerate(answers):
        for name, words in answer["stale"]:
            yield Mismatch(
                step=step,
                moment=moment,
                subject=Subject.PARAMETERS,
                name=name,
                rank=rank,
                between=(rank,),
                told=words,
            )


def _missing_mismatches(
    before: Mapping[Identity, tuple[int, ...]], now: Mapping[Identity, tuple[int, ...]], step: int
) -> Iterator[Mismatch]:
    """Yield a mismatch for each part that a rank has lost, but other ranks still hold."""
    for identity, ranks in now.items():
        moment, subject, name, _ = identity
        for rank in sorted({*before.get(identity, ())} - {*ranks}):
            yield Mismatch(
                step=step,
                moment=Moment(moment),
                subject=Subject(subject),
                name=name,
                rank=rank,
                way=DifferenceKind.MISSING,
                between=tuple(sorted({*ranks, rank})),
                told="is missing",
            )
