"""Check state consistency (Theorem 4) in a running program: a part that several ranks hold is
bitwise equal on all of them, dtype included, and a copy of a master equals the master.

Every rank digests its local storages in place and names each part by its place in the full tensor
(`meters.holdings`), so nothing has to declare what is replicated over which ranks: equal keys are
copies. The ranks exchange one digest per set of ranks that share something; only if these differ,
or at the first check, are all keys sent.

Random numbers: ranks draw the same where they compute the same, that is the same samples, in the
same layers, on copies of the activations; and over cp, where each takes its tokens' part of the
masks of all. Every other mesh axis separates them except the tensor axis, which does so only if its
ranks work on slices of the tokens.

Digests are fast enough for a full training state in a running job: the bytes are 64-bit words in
rows of 512, and a digest is the hash of the sums of all rows and all columns, modulo 2^64. A
flipped bit changes one word by a power of two, hence a row's and a column's sum; words that change
places change some sum unless they stay in one row and one column. Words after the last full row are
hashed as they are. Two passes over memory, no copy.
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

from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.holdings import Holding
from ptrain.models.ledger import local
from ptrain.models.modes import drops_out
from ptrain.models.watch import listening
from ptrain.report.copies import Copy, alike_apart, differing, holders, root_cause
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject, Way
from ptrain.spec.placement import CUTTING_AXES, SAMPLE_AXES, TOKEN_AXES, Axis
from ptrain.units import grouped

_WORD = 8  # bytes
_ROW = 512  # words: sums of 4 KiB and 1/512 of the tensor are all that leaves the device
_DIGEST_BYTES = 8  # two tensors of some 10^9 would have one digest


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of what this rank holds of each tensor, in hexadecimal. Equal bytes in
    equal order have equal digests, wherever they lie; shape and dtype are not in them. There is one
    copy to the host per device."""
    with without_modes():
        sums = [_sums(local(tensor.detach())) for tensor in tensors]
        devices = grouped((checksums.device, index) for index, checksums in enumerate(sums))
        texts = [""] * len(sums)
        for indices in devices.values():
            joined = torch.cat([sums[index] for index in indices]).cpu()
            sizes = [sums[index].numel() for index in indices]
            for index, part in zip(indices, joined.split(sizes), strict=True):
                texts[index] = of_bytes(part.numpy().tobytes())
    return texts


def of_bytes(data: bytes) -> str:
    """Return the digest of a few bytes on the host, all of which are hashed."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def kind(tensor: torch.Tensor) -> str:
    """Dtype and shape of what this rank holds, `float32[4, 8]`."""
    held = local(tensor)
    return f"{str(held.dtype).removeprefix('torch.')}{list(held.shape)}"


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of rows, then of columns, then what is left over, as words (1-d int64)."""
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
    return torch.cat([rows.sum(1), rows.sum(0), rest])


def drawn(program: Program) -> tuple[str, str] | None:
    """This rank's place among those that draw apart, and a digest of its generator's state. None
    for a model that draws nothing: then no state of a generator is part of the training's."""
    if not drops_out(program.model):
        return None
    mesh = program.mesh
    cutting = [axis for axis in CUTTING_AXES if axis not in SAMPLE_AXES]
    alike = TOKEN_AXES if has_token_slices(program.model) else cutting
    apart = (axis for axis in mesh.axes if axis not in alike)
    place = ",".join(f"{axis}={mesh.coordinate(axis)}" for axis in apart)
    return place, generator_digest(program.world.device)


def generator_digest(device: torch.device) -> str:
    """Return a digest of where the generator of a device stands."""
    is_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return of_bytes(state.numpy().tobytes())


def has_token_slices(model: nn.Module) -> bool:
    """Return whether the tensor axis cuts the tokens between sub-blocks: some module has nothing
    but whole tensors that are distributed all the same. (A row operator's bias is one beside a cut
    weight.)"""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(map(_is_whole, own)):
            return True
    return False


def _is_whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == Axis.TP and placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )


Identity = tuple[int, str, str, str]


class SupportsGather(Protocol):
    """How ranks tell each other small values."""

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value of this type, in the order of the ranks."""
        ...


class ReplicaMeter:
    """Compares what the ranks hold. `noted()` around a step notes its gradients; `check` afterwards
    compares these and all else. Every rank calls both alike, and gets the same answer.

    Costs a pass over what a rank stores, at some 10 GB/s and core, and one exchange of some hundred
    bytes. Nothing is gathered or moved.
    """

    def __init__(self, program: Program, exchange: SupportsGather) -> None:
        self.program = program
        self.exchange = exchange
        self.last_good: int | None = None  # the last step that all agreed after
        self._noted: list[Copy] = []
        self._holders: dict[Identity, tuple[int, ...]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A step's gradients are digested when they are reduced, and their norm is kept."""
        self._noted = []
        with listening(self.program.gradient_observers, self):
            yield

    def reduced(self) -> None:
        """The program has the gradients' sums."""
        self._noted += _copies(Moment.GRADIENTS, holdings.gradients(self.program))

    def clipped(self, norm: torch.Tensor | None) -> None:
        """The program has clipped them."""
        if norm is not None:
            self._noted.append(_number(Moment.CLIP, Subject.NORM, "norm", repr(float(norm))))

    def check(self, step: int, moment: Moment = Moment.UPDATE) -> tuple[Mismatch, ...]:
        """Return what differs between ranks now, in the order of time. `step` is this rank's."""
        if self.program.world.size == 1 or self.program.world.backend == "fake":
            return ()
        table = [*self._noted, *self._now(step, moment)]
        self._noted = []
        with without_modes():
            is_known = all(copy.identity in self._holders for copy in table)
            answers = self.exchange.gather(
                {
                    "known": is_known and _agrees_with_itself(table),
                    "classes": self._classes(table) if is_known else {},
                    "random": self._drawn(moment),
                    "stale": [list(copy) for copy in holdings.stale_copies(self.program)],
                }
            )
            mismatches = [*_stale(answers, moment, step)]
            if not _all_agree(answers):
                mismatches += self._in_full(table, step)
        mismatches += alike_apart([answer["random"] for answer in answers], moment, step)
        mismatches.sort(key=lambda mismatch: mismatch.when)
        if not mismatches:
            self.last_good = step
        return tuple(mismatches)

    def root_cause(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Whose fault it is, of what `check` found; None where that is nothing."""
        return root_cause(mismatches, coordinates(self.program), self.last_good)

    def _now(self, step: int, moment: Moment) -> Iterator[Copy]:
        """Yield a `Copy` of all that this rank holds between steps."""
        program = self.program
        held = (holdings.parameters, holdings.optimizer, holdings.buffers)
        yield from _copies(moment, chain.from_iterable(read(program) for read in held))
        counts = holdings.counters(program)
        updates = {f"{name}.step": count for name, count in counts.items()}
        if counts:
            updates["updates"] = max(counts.values())
        for name, count in {"training step": step, **updates}.items():
            yield _number(moment, Subject.COUNTER, name, str(count))
        for name, values in holdings.hyperparameters(program).items():
            yield _number(moment, Subject.LEARNING_RATE, name, " ".join(map(repr, values)))
        if (random := self._drawn(moment)) is not None:
            place, digest = random
            yield Copy(moment, Subject.RANDOM, "generator", place, "state", digest)

    def _drawn(self, moment: Moment) -> tuple[str, str] | None:
        """Generators are seeded when a step begins, and nothing is to be said of them before."""
        return None if moment is Moment.START else drawn(self.program)

    def _classes(self, table: Iterable[Copy]) -> dict[str, str]:
        """For every set of ranks that share something, one digest of all of it."""
        of_ranks = grouped(
            (tuple(dict.fromkeys(self._holders[copy.identity])), copy) for copy in table
        )
        return {
            ",".join(map(str, ranks)): of_bytes(repr(sorted(map(repr, copies))).encode())
            for ranks, copies in of_ranks.items()
            if len(ranks) > 1
        }

    def _in_full(self, table: Sequence[Copy], step: int) -> Iterator[Mismatch]:
        tables = self.exchange.gather(table, list[Copy])
        before, now = self._holders, holders(tables)
        self._holders = before | now
        yield from _missing(before, now, step)
        yield from differing(tables, step)


def coordinates(program: Program) -> dict[int, dict[str, int]]:
    """Return every rank's place along every axis."""
    if (mesh := program.mesh.device_mesh) is None:
        return {0: {}}
    places = torch.cartesian_prod(*(torch.arange(size) for size in mesh.mesh.shape))
    rows = places.view(-1, mesh.mesh.dim()).tolist()
    names = [str(axis) for axis in program.mesh.axes]
    return {
        rank: dict(zip(names, place, strict=True))
        for rank, place in zip(mesh.mesh.flatten().tolist(), rows, strict=True)
    }


def _copies(moment: Moment, held: Iterable[Holding]) -> list[Copy]:
    things = list(held)
    texts = digests([thing.tensor for thing in things])
    return [
        Copy(
            moment,
            thing.subject,
            f"{thing.name}.{thing.key}" if thing.key else thing.name,
            thing.part,
            kind(thing.tensor),
            digest,
        )
        for thing, digest in zip(things, texts, strict=True)
    ]


def _number(moment: Moment, subject: Subject, name: str, value: str) -> Copy:
    return Copy(moment, subject, name, "", "", value)


def _agrees_with_itself(table: Iterable[Copy]) -> bool:
    """Two stages of one rank may both have a tensor."""
    seen: dict[Identity, Copy] = {}
    return all(seen.setdefault(copy.identity, copy) == copy for copy in table)


def _all_agree(answers: Sequence[Mapping[str, Any]]) -> bool:
    if not all(answer["known"] for answer in answers):
        return False
    return all(
        answers[int(rank)]["classes"].get(ranks) == digest
        for answer in answers
        for ranks, digest in answer["classes"].items()
        for rank in ranks.split(",")
    )


def _stale(answers: Sequence[Mapping[str, Any]], moment: Moment, step: int) -> Iterator[Mismatch]:
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


def _missing(
    before: Mapping[Identity, tuple[int, ...]], now: Mapping[Identity, tuple[int, ...]], step: int
) -> Iterator[Mismatch]:
    """What a rank had at an earlier check and has no more, and others still have."""
    for identity, ranks in now.items():
        moment, subject, name, _ = identity
        for rank in sorted({*before.get(identity, ())} - {*ranks}):
            yield Mismatch(
                step=step,
                moment=Moment(moment),
                subject=Subject(subject),
                name=name,
                rank=rank,
                way=Way.MISSING,
                between=tuple(sorted({*ranks, rank})),
                told="is missing",
            )
