"""Exchange of small JSON values between ranks, separate from the traffic of the training.

torch's object collectives unpickle the data that they receive; these do not. They run on a separate
gloo group or, between ranks of one host, on Unix sockets. A gloo collective of a few numbers takes
half a millisecond of CPU time, because its threads wake one another; a socket takes a tenth of it.
The meters do not count this traffic.

The check of one step on all ranks: its loss, whether it is finite, and received signals.

Either the host waits for these figures before the update. Or the device sums them over the ranks
and skips the update by a flag, and the host reads them when the next step has been launched. Then
the device never waits for the host.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from signal import Signals
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ptrain.axes.data.form import tier_of
from ptrain.codec import decode, encode
from ptrain.cost import State
from ptrain.files import temporary_folder
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.process_groups import all_gather_single
from ptrain.interpreter import program
from ptrain.interpreter.loss import LossScale, nonfinite_flag
from ptrain.interpreter.program import Program
from ptrain.models.objective import sent_to
from ptrain.runtime.queue import DeviceQueue, Milestone
from ptrain.runtime.world import World
from ptrain.spec.placement import Tier
from ptrain.train.rank_start import SIGNALS, Interrupts, strongest_signal

Gather: TypeAlias = "Callable[[Any], list[Any]]"  # every rank's value, on every rank

# The number of bytes that follow, in native byte order: both ends are on one host.
_LENGTH = struct.Struct("=Q")
_MOST_BYTES = 2**30  # of one message: the facts of a large model take some MB
_NONCE_BYTES, _HELLO_BYTES = 16, 32  # a hello is the nonce and the number of a rank
_CREDENTIALS = struct.Struct("3i")  # process, user and group, of SO_PEERCRED
# The other ranks wait longer than rank 0: its message, which names the silent rank, comes first.
_FOLLOWER_FACTOR = 1.25


class PeerConnection:
    """A connection to another rank, which is lost after some seconds of silence.

    Args:
        connected: The socket, which is closed with the connection.
        rank: The other rank.
        seconds: The silence after which the other rank counts as lost.
    """

    def __init__(self, connected: socket.socket, rank: int, seconds: float) -> None:
        self.rank, self._seconds, self._socket = rank, seconds, connected
        connected.settimeout(seconds)
        # `recv` may return fewer bytes than requested; `read` of a file waits for all of them.
        self._file = connected.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send bytes. Raises as `receive` does."""
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost_error(error) from error

    def receive(self, most: int = _MOST_BYTES) -> bytes:
        """Return the bytes that the other rank sent.

        Args:
            most: The largest length that is read.

        Raises:
            TimeoutError: The other rank was silent for too long.
            ConnectionError: The connection was closed, or the message is too long. From both
                messages the parent recognizes a rank that failed because of another
                (`launch.is_victim`).
        """
        try:
            (length,) = _LENGTH.unpack(self._read_bytes(_LENGTH.size))
            if length > most:
                raise ConnectionError(f"a message of {length} bytes; at most {most} are read")
            return self._read_bytes(length)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            raise self._lost_error(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def _read_bytes(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises ConnectionError if the connection ends before."""
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the process has ended")
        return data

    def _lost_error(self, error: Exception) -> OSError:
        """Return the error of a lost connection."""
        if isinstance(error, TimeoutError):
            whom = f"for rank {self.rank}" if self.rank else "at rank 0 for all ranks"
            return TimeoutError(f"Timed out waiting {whom}: no message for {self._seconds:g} s")
        return ConnectionError(f"Connection closed by peer, rank {self.rank}: {error}")


class HostGroup:
    """A star of connections: rank 0 is connected to each other rank.

    Args:
        rank: This rank.
        joined: On rank 0 the connections to all other ranks, in the order of ranks; on any other
            rank the connection to rank 0.
    """

    def __init__(self, rank: int, joined: Sequence[PeerConnection]) -> None:
        self._is_first, self._joined = rank == 0, tuple(joined)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in the order of ranks. All ranks call it.

        Raises:
            TimeoutError: A rank is silent. The group is closed.
            ConnectionError: A rank is gone. The group is closed.
        """
        rows: list[bytes] = []
        try:
            rows = self._gather_by_star(data)
        finally:
            if not rows:
                self.close()  # after a partial message, the start of the next one is unknown
        return rows

    def close(self) -> None:
        """Close all connections of this rank."""
        for other in self._joined:
            other.close()

    def _gather_by_star(self, data: bytes) -> list[bytes]:
        """Gather to rank 0, which sends the result to all other ranks."""
        if not self._is_first:
            (first,) = self._joined
            first.send(data)
            return _split_rows(first.receive())
        # The others send before they receive, and rank 0 receives before it sends, so no two ends
        # wait for each other.
        rows = [data, *(other.receive() for other in self._joined)]
        everything = _join_rows(rows)
        for other in self._joined:
            other.send(everything)
        return rows


def connect_ranks(rank: int, size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Connect all ranks by Unix sockets. All ranks call it.

    Args:
        rank: This rank.
        size: The number of ranks.
        seconds: The silence after which a rank counts as lost.
        gather: A function that gathers a value from all ranks.

    Returns:
        The group, or None on all ranks if they do not share a host and its folder of temporary
        files, or if it supports no Unix sockets.
    """
    return (
        _accept_others(size, seconds, gather)
        if rank == 0
        else _connect_to_first(rank, seconds, gather)
    )


def _accept_others(size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Accept the other ranks, as rank 0. Until then they wait in the queue of the socket."""
    with ExitStack() as opened:
        # The folder of the socket is removed on return: only connecting needs its path.
        listener = _open_listener(opened, size, seconds)
        # Whoever finds the socket does not know the nonce, which went through the store.
        nonce = secrets.token_hex(_NONCE_BYTES // 2)
        gather(None if listener is None else [listener.getsockname(), nonce])
        have_joined = gather(listener is not None)  # all ranks must agree on the use of sockets
        if listener is None or not all(have_joined):
            return None
        by_rank: dict[int, PeerConnection] = {}
        with ExitStack() as failing:
            while len(by_rank) < size - 1:
                # Connections arrive in any order, so each rank sends its number.
                if joined := _admit_rank(listener.accept()[0], nonce, size, seconds):
                    failing.callback(joined.close)
                    by_rank[joined.rank] = joined
            failing.pop_all()
        return HostGroup(0, [by_rank[rank] for rank in range(1, size)])


def _connect_to_first(rank: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Connect to rank 0, as any other rank."""
    with ExitStack() as failing:
        path, nonce = gather(None)[0] or ("", "")
        first = _open_connection(path, seconds * _FOLLOWER_FACTOR) if path else None
        if first is not None:
            failing.callback(first.close)
        have_joined = gather(first is not None)
        if first is None or not all(have_joined):
            return None
        first.send(f"{nonce}{rank}".encode())
        failing.pop_all()
        return HostGroup(rank, [first])


def _open_listener(opened: ExitStack, size: int, seconds: float) -> socket.socket | None:
    """Return a listening socket in a folder that only this user may enter; None on failure."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError):  # no temporary folder, or its path is too long for a socket
        folder = opened.enter_context(temporary_folder())
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(seconds)
        listener.bind(str(folder / "ranks"))
        # The queue must hold all ranks: rank 0 accepts them after all have connected.
        listener.listen(size)
        return listener
    return None


def _open_connection(path: str, seconds: float) -> PeerConnection | None:
    """Return a connection to rank 0.

    None on another host, where the path does not exist, or if the queue of the socket is full.
    """
    with suppress(OSError), ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX))
        connected.settimeout(seconds)  # without a timeout, connecting blocks on a full queue
        connected.connect(path)
        if not _is_own_process(connected):
            return None
        failing.pop_all()
        return PeerConnection(connected, 0, seconds)
    return None


def _admit_rank(
    connected: socket.socket, nonce: str, size: int, seconds: float
) -> PeerConnection | None:
    """Return the connection to a rank, None if another process or another user has connected."""
    joined = PeerConnection(connected, -1, seconds)
    with suppress(OSError, ValueError):
        hello = joined.receive(_HELLO_BYTES).decode() if _is_own_process(connected) else ""
        if hmac.compare_digest(hello[:_NONCE_BYTES].encode(), nonce.encode()):
            joined.rank = int(hello[_NONCE_BYTES:])
    if 0 < joined.rank < size:
        return joined
    joined.close()
    return None


def _is_own_process(connected: socket.socket) -> bool:
    """Return True if the process at the other end of a socket is of this user, or if unknown."""
    if not hasattr(socket, "SO_PEERCRED"):  # other systems than Linux
        return True
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()


def _join_rows(rows: Sequence[bytes]) -> bytes:
    """Concatenate rows, each with its length."""
    return b"".join(_LENGTH.pack(len(row)) + row for row in rows)


def _split_rows(data: bytes) -> list[bytes]:
    """Split the bytes of `_join_rows` into rows."""
    rows, start = [], 0
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size + length
        rows.append(data[start - length : start])
    return rows


class Exchange:
    """The group of all ranks of a world, on the CPU. With one rank, it returns its arguments.

    All ranks must create it, and call its methods in the same order.

    Attributes:
        world: The ranks.
        group: The gloo group. None: there is one rank.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: dist.ProcessGroup | None = None
        self._host: HostGroup | None = None
        if world.size > 1:
            waits = timedelta(seconds=world.timeout.step)
            self.group = dist.new_group(backend="gloo", timeout=waits, group_desc="ptrain exchange")
            # `gather` uses the gloo group as long as `_host` is not set.
            self._host = connect_ranks(world.rank, world.size, world.timeout.step, self.gather)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the sum over the ranks of each value.

        Between hosts it is an all-gather, which for a few numbers needs half the messages of an
        all-reduce. The meters do not count it.

        Args:
            values: This rank's numbers; equally many on all ranks.

        Returns:
            The sums, added in the order of ranks, so that they are equal on all ranks to the bit.
        """
        if self.group is None:
            return values
        return [
            sum(numbers) for numbers in zip(*self._gather_numbers(self.group, values), strict=True)
        ]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks."""
        return self.gather(value if self.world.is_first else None)[0]

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks.

        Args:
            value: This rank's value.
            kind: Its type hint, for `codec.decode`.
        """
        if self.group is None:
            return [value]
        if self._host is not None:
            texts = self._host.gather(json.dumps(encode(value, kind)).encode())
            return [decode(json.loads(text), kind) for text in texts]
        return program.gather(value, self.world.size, torch.device("cpu"), self.group, kind)

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        # A gather returns on a rank only after all ranks have sent.
        self.gather(None)

    def close(self) -> None:
        """Close the sockets and destroy the group, if the caller owns the default group."""
        if self._host is not None:
            self._host.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _gather_numbers(self, group: dist.ProcessGroup, values: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks."""
        if self._host is not None:
            # The bits of fp64: all ranks must add equal numbers and take equal branches.
            numbers = struct.Struct(f"={len(values)}d")
            return [list(numbers.unpack(row)) for row in self._host.gather(numbers.pack(*values))]
        with disable_modes():  # so that the meters do not see these tensors
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            by_rank = vector.new_empty(self.world.size * len(values))
            all_gather_single(by_rank, vector, group=group)
        rows: list[list[float]] = by_rank.view(self.world.size, -1).tolist()
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of one step.

    Attributes:
        loss: The global loss.
        is_sound: True if the loss and all gradients are finite.
        interrupt: The signal that a rank received. None: none.
        gradient_norm: The norm before clipping. None: not computed.
        loss_scale: The scale of the next step. None: the loss is not scaled.
        is_skipped: True if the loss scaler skipped the update.
    """

    loss: float
    is_sound: bool
    interrupt: Signals | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    is_skipped: bool = False


class StepCheck(Protocol):
    """The check of a step. `halted` is the flag that `Program.apply` takes."""

    halted: torch.Tensor | None

    def start_copy(self) -> None:
        """Start copying remaining figures to the host. Called after the update was launched."""

    def wait_for_figures(self) -> StepFigures:
        """Wait for the figures and return them."""
        ...


class HostStepCheck:
    """A check whose figures are on the host, except for the loss scale that the update changes.

    Args:
        queue: The queue of the device.
        figures: The figures, which are equal on all ranks.
        scaling: The loss scale. None: the loss is not scaled.
    """

    halted = None

    def __init__(self, queue: DeviceQueue, figures: StepFigures, scaling: LossScale | None) -> None:
        self._queue, self._figures, self._scaling = queue, figures, scaling
        self._sent: tuple[torch.Tensor, Milestone] | None = None

    @torch.no_grad()
    def start_copy(self) -> None:
        """Start copying the loss scale to the host, if there is one."""
        if self._scaling is not None:
            with disable_modes():
                numbers = torch.stack([self._scaling.scale, self._scaling.found_inf])
                self._sent = self._queue.to_host(numbers), self._queue.mark()

    def wait_for_figures(self) -> StepFigures:
        """Return the figures, after the loss scale has arrived."""
        if self._sent is None:
            return self._figures
        numbers, sent = self._sent
        sent.wait()
        scale, is_skipped = numbers.tolist()
        return replace(self._figures, loss_scale=scale, is_skipped=bool(is_skipped))


class DeviceStepCheck:
    """A check in the queue of the device.

    Args:
        queue: The queue.
        halted: The flag that skips updates, equal on all ranks.
        sums: Sums over the ranks, fp64 in one dimension: loss, number of ranks with gradients that
            are not finite, and one number per signal.
        norm: The gradient norm, equal on all ranks. None: not computed.
        scaling: The loss scale. None: the loss is not scaled.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        halted: torch.Tensor,
        sums: torch.Tensor,
        norm: torch.Tensor | None,
        scaling: LossScale | None,
    ) -> None:
        self.halted = halted
        self._queue, self._scaling, self._has_norm = queue, scaling, norm is not None
        self._known = [sums, *([] if norm is None else [norm])]  # freed by `start_copy`
        self._numbers: torch.Tensor | None = None
        self._sent: Milestone | None = None

    @torch.no_grad()
    def start_copy(self) -> None:
        """Start copying all figures to the host, and free their device tensors."""
        scaling = self._scaling
        (sums, *norm), self._known = self._known, []
        others = [self.halted, *norm]
        others += [] if scaling is None else [scaling.scale, scaling.found_inf]
        with disable_modes():
            # One tensor, so that one copy to the host suffices.
            numbers = torch.cat([sums, torch.stack([other.double() for other in others])])
            self._numbers = self._queue.to_host(numbers)
        self._sent = self._queue.mark()

    def wait_for_figures(self) -> StepFigures:
        """Return the figures, after they have arrived."""
        assert self._numbers is not None and self._sent is not None, (
            "values are sent before they are read"
        )
        self._sent.wait()
        loss, _, *numbers = self._numbers.tolist()
        # The order of `start_copy`: loss, unsound ranks, signals, halted, then the optional
        # figures.
        flags, (halted, *others) = numbers[: len(SIGNALS)], numbers[len(SIGNALS) :]
        scale, is_skipped = others[-2:] if self._scaling is not None else (None, False)
        return StepFigures(
            loss=loss,
            is_sound=not halted,
            interrupt=strongest_signal(flags),
            gradient_norm=others[0] if self._has_norm else None,
            loss_scale=scale,
            is_skipped=bool(is_skipped),
        )


def can_be_late(program: Program, queue: DeviceQueue) -> bool:
    """Return True if the host need not wait for the figures of a step.

    This requires a device that runs asynchronously, all states on the device, and an update that a
    flag on the device can skip: one fused kernel, not an update in backward. `verify_every`
    compares the state after each step, which waits anyway.
    """
    spec = program.spec
    is_read_at_once = spec.verify_every or program.updates_in_backward
    if not queue.runs_ahead or is_read_at_once or not spec.optimizer.properties.is_fused:
        return False
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    return all(tier_of(spec.factors, state) is Tier.DEVICE for state in states)


class DeviceSums:
    """The sums of the ranks on their devices, in each step of a training.

    The host reads none of them in the step, and the meters do not count them. `halted` (fp32, 0 or
    1, equal on all ranks) is 1 from the first step whose loss or gradients are not finite: all
    updates that are launched later change nothing.

    Args:
        program: The program.
        queue: The queue of its device.
        interrupts: The received signals, which are summed with the loss.
    """

    def __init__(self, program: Program, queue: DeviceQueue, interrupts: Interrupts) -> None:
        self._program, self._queue, self._interrupts = program, queue, interrupts
        self.halted = torch.zeros((), dtype=torch.float32, device=program.world.device)

    @torch.no_grad()
    def start_check(self, share: torch.Tensor, norm: torch.Tensor | None) -> DeviceStepCheck:
        """Launch the check of a step before its update.

        Args:
            share: This rank's share of the loss.
            norm: The result of `Program.reduce`.
        """
        device = self._program.world.device
        with disable_modes():
            seen = torch.tensor(self._interrupts.flags(), dtype=torch.float64, device="cpu")
            unsound = self._unsound_flag(norm)
            own = torch.stack([share.double(), unsound.double()])
            sums = torch.cat([own, sent_to(device, seen)])
            if self._program.world.size > 1:
                # On the default group, whose NCCL communicator exists: the ranks compared their
                # models with it. A group for these sums would create another communicator.
                dist.all_reduce(sums)
            is_unsound = sums[0].isfinite().logical_not_().logical_or_(sums[1] > 0)
            # A new tensor in each step: the meters count storages that are older than a step.
            self.halted = torch.maximum(self.halted, is_unsound.float())
        return DeviceStepCheck(self._queue, self.halted, sums, norm, self._program.scaling)

    def _unsound_flag(self, norm: torch.Tensor | None) -> torch.Tensor:
        """Return a flag that is set if this rank's gradients are not finite.

        It is not set if the loss scaler skips their update. The norm is global, and finite only if
        the gradients of all ranks are.
        """
        scaling = self._program.scaling
        if norm is not None:
            is_unsound = norm.isfinite().logical_not_()
            if scaling is not None:
                is_unsound.logical_and_(scaling.found_inf == 0)
            return is_unsound
        gradients = [] if scaling is not None else self._program.gradients()
        return nonfinite_flag(gradients) if gradients else torch.zeros_like(self.halted)
