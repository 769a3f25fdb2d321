"""A user's training loop and the terms on which it is judged; its ranks, their axes and exchanges;
and what must hold before two loops can be compared.

Nothing about the loop's workings is asked for: optimizers are found when they step, shards by their
tensors. The reference must be one device and equal on every rank, the loop must repeat itself when
it is run again, and the losses must add up to a global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from ptrain.errors import PtrainError, VerdictFailed
from ptrain.internals.dtensor import root_mesh
from ptrain.interpreter.program import gather
from ptrain.models.ledger import OperatorMode
from ptrain.report.finding import Mismatch, MismatchFound, RootCause
from ptrain.report.record import Check
from ptrain.spec.spec import Spec, groups
from ptrain.train.exchange import Exchange

if TYPE_CHECKING:
    from ptrain.verification.compare import Differences
    from ptrain.verification.jobs.record import Buffers, StepRecorder
    from ptrain.verification.jobs.shards import ParameterShard
    from ptrain.verification.jobs.step import StepComparison

RANKS = "ranks"
Explain: TypeAlias = Callable[[Sequence[Mismatch]], RootCause]
Axes: TypeAlias = dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """`axes`: of every axis with several places the groups of ranks that differ on it alone;
    without a mesh the only axis is that of all ranks."""

    rank: int
    size: int
    device: torch.device
    axes: Axes = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value of this type."""
        if self.size == 1:
            return [value]
        return gather(value, self.size, self.device, self.group, kind)

    def stack(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor of the same shape: [ranks, …] in fp64."""
        mine = tensor.detach().double().contiguous().to(self.device)
        if self.size == 1:
            return mine.unsqueeze(0).cpu()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows).cpu()

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor."""
        shared = tensor.contiguous().to(self.device)
        if self.size > 1:
            dist.broadcast(shared, src=0, group=self.group)
        return shared.cpu()

    def bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes."""
        if self.size == 1:
            return [mine]
        sizes = self.gather(len(mine))
        row = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        row[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[
            : len(mine)
        ]
        rows = [torch.empty_like(row, device=self.device) for _ in sizes]
        dist.all_gather(rows, row.to(self.device), group=self.group)
        return [its[:size].cpu().numpy().tobytes() for its, size in zip(rows, sizes, strict=True)]

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: len(groups[0]) for axis, groups in self.axes.items()}

    @property
    def summed(self) -> Axes:
        """What gradients may be summed over: every axis, then several together (`dp+cp`)."""
        together: Axes = {}
        for count in range(2, len(self.axes) + 1):
            for names in combinations(self.axes, count):
                groups = self.axes[names[0]]
                for name in names[1:]:
                    along = {rank: group for group in self.axes[name] for rank in group}
                    groups = tuple(
                        tuple(other for rank in group for other in along[rank])
                        for group in groups
                        if all(along[rank][0] == rank for rank in group)
                    )
                together["+".join(names)] = groups
        return self.axes | together

    def parting(self, chosen: Iterable[int], order: Iterable[str] | None = None) -> str:
        """Return the first axis (of this `order`) along which some of a rank's neighbours are among
        the chosen and others are not; "" where all ranks are."""
        who = set(chosen)
        for axis in self.axes if order is None else order:
            if any(set(group) & who and set(group) - who for group in self.axes.get(axis, ())):
                return axis
        return ""

    def axis_of(self, ranks: Sequence[int]) -> str:
        """The first axis on which these ranks differ."""
        for axis, lines in self.axes.items():
            if any(len(set(line) & set(ranks)) > 1 for line in lines):
                return axis
        return ""


def ranks_of(parameters: Iterable[Tensor], mesh: DeviceMesh | None) -> Ranks:
    """Return this process's place among those of the default group, and the axes they lie on."""
    parameters = list(parameters)
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    if not dist.is_initialized():
        return Ranks(rank=0, size=1, device=device)
    size = dist.get_world_size()
    placed = [its.device_mesh for its in parameters if isinstance(its, DTensor)]
    meshes = [mesh] if mesh else [root_mesh(part) for part in placed]
    widest = max(meshes, key=lambda candidate: (candidate.ndim, candidate.size()), default=None)
    axes = _axes(widest) if widest is not None and widest.size() == size else {}
    if not axes and size > 1:
        axes = {RANKS: (tuple(range(size)),)}
    return Ranks(rank=dist.get_rank(), size=size, device=device, axes=axes)


def ranks_of_spec(spec: Spec, exchange: Exchange) -> Ranks:
    """Return the ranks of a run, on the axes of its spec, which tell each other by its exchange."""
    return Ranks(
        rank=exchange.world.rank,
        size=exchange.world.size,
        device=torch.device("cpu"),
        axes={
            str(factor.axis): groups(spec, [factor.axis])
            for factor in spec.factors
            if factor.degree > 1
        },
        group=exchange.group,
    )


def _axes(mesh: DeviceMesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    names = mesh.mesh_dim_names
    if names is None:
        names = (RANKS,) if mesh.ndim == 1 else tuple(f"dim{dim}" for dim in range(mesh.ndim))
    axes = {}
    for dim, name in enumerate(names):
        groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.size(dim)).tolist()
        if mesh.mesh.size(dim) > 1:
            axes[name] = tuple(tuple(group) for group in groups)
    return axes


Known: TypeAlias = Literal["mean", "sum", "same"]
Average: TypeAlias = nn.Module | Mapping[str, Tensor]
Losses: TypeAlias = Known | Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model and one step of its training loop.

    Args:
        model: The module as the loop uses it: wrapped, or plain for the reference.
        step: Runs forward, backward and update on a batch. Returns the loss as a number or a
            tensor, or None on ranks that do not compute it.
        average: A moving average of the parameters, if the loop keeps one: a module
            (torch.optim.swa_utils.AveragedModel) or tensors by parameter name, the same object in
            every step; None on ranks that keep none.
        evidence: Shows more of the steps than their tensors do, as ptrain's programs can.
            Default: None.

    Example: see `ptrain.verify`.
    """

    model: nn.Module
    step: Callable[[Any], Any]
    average: Average | None = None
    evidence: Evidence | None = None


class Evidence(Protocol):
    """More that a job shows of its steps; `ranks`: on the axes of the mesh. All ranks call its
    methods alike."""

    ranks: Ranks

    def recorders(
        self, wholes: Mapping[str, ParameterShard], holds: Mapping[str, ParameterShard]
    ) -> tuple[StepRecorder, StepRecorder]:
        """Return a recorder of the reference's next step, and one of the job's."""

    def state(self) -> SavedState:
        """Return a copy of the job's state."""

    def shards(self) -> dict[str, ParameterShard]:
        """Return what this rank's optimizers update of each parameter, by name."""

    def values(self, holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
        """Return this rank's elements of all parameters, in a row each."""

    def kept(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what this rank's optimizers keep beside each parameter."""

    def buffers(self, reference: nn.Module) -> Buffers:
        """Yield the buffers that both sides have, of the reference this rank's part."""

    def compare_step(self, differences: Differences) -> None:
        """Compare the last step that both recorded with the reference's."""

    def explain(
        self, mismatches: Sequence[Mismatch], step: StepComparison, by_gradients: Explain
    ) -> RootCause:
        """Explain the first mismatch of a step; `by_gradients` explains those of gradients."""


class SavedState(Protocol):
    """A copy of a job's state."""

    def restore(self, *, gradients: bool = True) -> None:
        """Put it back, with the gradients that were there too."""


def each_tensor(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a batch with every tensor of samples changed."""
    if isinstance(batch, Mapping):  # a tokenizer's has its own type, which torch takes for a leaf
        return type(batch)({key: each_tensor(its, change) for key, its in batch.items()})  # type: ignore[call-arg]
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative, by the 2-norm. `gradients` of each parameter, `outputs` of each module, `updates`
    of the way that a parameter has gone since the start, `losses` of the global loss."""

    gradients: float
    outputs: float
    updates: float
    losses: float

    def length_of(self, rounding: float) -> float:
        """Return beside which length a rounding is just what an update may be off; none, where
        nothing may be."""
        return rounding / self.updates if self.updates else 0.0


# fp64 and fp32: sums over the same addends in another order, with room for three steps of Adam,
# which turns an element's rounding into a step of its own. 16 bits: a rounding is 2^-8 or 2^-11,
# and a layer's sum holds some; a fault is a factor.
TOLERANCES = {
    torch.float64: Tolerance(gradients=1e-11, outputs=1e-11, updates=1e-9, losses=1e-12),
    torch.float32: Tolerance(gradients=1e-5, outputs=1e-5, updates=1e-3, losses=1e-4),
    torch.float16: Tolerance(gradients=2e-2, outputs=1e-2, updates=0.2, losses=5e-3),
    torch.bfloat16: Tolerance(gradients=8e-2, outputs=4e-2, updates=0.5, losses=2e-2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of `ptrain.verify`.

    Args:
        steps: Number of updates. Default: one per batch. Beyond the batches, they repeat.
        examined: Number of leading steps that are compared tensor by tensor; later steps are
            compared by their losses. Default: all.
        dtype: The coarsest dtype in which the loop computes, which sets the tolerance. Default:
            the reference's.
        tolerance: Tolerances to use instead of those of `dtype`.
        loss: How the ranks' losses make up the global loss: `mean`, `sum`, `same` (every rank has
            the global loss), or a function of all ranks' losses.
        mesh: The device mesh of the ranks, if no DTensor refers to it.
        part: Returns this rank's shard, given a name and the full tensor, for tensors that are
            sharded in a way that neither a DTensor nor their shape shows.
        document_end: The token that ends a document, if samples contain several. Tokens after it
            belong to another document and are not expected to depend on it.
        padded: Number of rows (first dimension) of the loop's full tensor, by parameter name, where
            it is padded to more rows than in the reference, for example a vocabulary to a multiple
            of the ranks. The rows that the reference does not have are not compared.

    Raises:
        PtrainError: An option is invalid.

    Example:
        >>> import ptrain
        >>> ptrain.Terms(steps=10, loss="sum").steps
        10
        >>> vocabulary = 50304  # 50257 tokens, padded to a multiple of 128
        >>> terms = ptrain.Terms(padded={"embed.weight": vocabulary, "head.weight": vocabulary})
    """

    steps: int | None = None
    examined: int | None = None
    dtype: torch.dtype | None = None
    tolerance: Tolerance | None = None
    loss: Losses = "mean"
    mesh: DeviceMesh | None = None
    part: Callable[[str, Tensor], Tensor] | None = None
    document_end: int | None = None
    padded: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ways = ", ".join(map(repr, get_args(Known)))
        for term, is_wrong, finding, remedy in (
            (
                "steps", self.steps is not None and self.steps < 1,
                f"{self.steps} steps compare nothing",
                "Omit it for one step per batch, or use 1 or more.",
            ),
            (
                "examined", self.examined is not None and self.examined < 0,
                f"{self.examined} is not a number of steps", "Use 0 or more.",
            ),
            (
                "dtype", self.tolerance is None and self.dtype not in (None, *TOLERANCES),
                f"the rounding of {self.dtype} is unknown",
                f"Use one of {', '.join(map(str, TOLERANCES))}, or set `tolerance`.",
            ),
            (
                "loss", not callable(self.loss) and self.loss not in get_args(Known),
                f"{self.loss!r} is not a way to combine losses",
                f"Use one of {ways}, or a function of all ranks' losses.",
            ),
        ):  # fmt: skip
            if is_wrong:
                raise _refused(term, finding, remedy)


def _refused(term: str, finding: str, remedy: str) -> PtrainError:
    return PtrainError(f"verify: Terms.{term}: {finding}\n  remedy: {remedy}")


def require_padded(terms: Terms, wholes: Mapping[str, Tensor]) -> None:
    """Raises PtrainError for a padded parameter that the reference has not, or with more rows."""
    for name, rows in terms.padded.items():
        if name not in wholes or not wholes[name].dim() or rows < len(wholes[name]):
            raise _refused(
                "padded",
                f"the reference has no parameter {name} of up to {rows} rows",
                "Use a parameter's name, and the rows of the loop's full tensor.",
            )


def tolerance_of(dtype: torch.dtype | None, parameters: Iterable[Tensor]) -> Tolerance:
    """Return the tolerance of `dtype`, or without one that of the coarsest dtype of the reference's
    parameters. Raises PtrainError for one of which no rounding is known."""
    dtypes = {dtype} if dtype else {parameter.dtype for parameter in parameters}
    known = [TOLERANCES[known_dtype] for known_dtype in dtypes if known_dtype in TOLERANCES]
    if not known:
        names = ", ".join(sorted(map(str, dtypes)))
        raise PtrainError(
            f"verify: the reference's parameters are in {names}, with unknown rounding\n  "
            "remedy: Set `Terms(tolerance=...)`, or `Terms(dtype=...)` to the dtype in which "
            "it computes."
        )
    return max(known, key=lambda tolerance: tolerance.gradients)


_WRAPPERS = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
COLLECTIVES = ("c10d", "_c10d_functional")


def require_plain(reference: Job) -> None:
    """Raises PtrainError for a reference that is wrapped."""
    for module in reference.model.modules():
        if isinstance(module, _WRAPPERS):
            raise PtrainError(
                f"verify: the reference is wrapped ({type(module).__name__})\n  remedy: Pass "
                "the plain module, copied before it is wrapped."
            )
    if any(isinstance(parameter, DTensor) for parameter in reference.model.parameters()):
        raise PtrainError(
            "verify: the reference's parameters are DTensors\n  remedy: Pass the plain "
            "module, copied before it is parallelized."
        )


def _refused_of_reference(words: str) -> PtrainError:
    return PtrainError(
        f"verify: the reference's {words}\n  remedy: Give the reference a step without "
        "collectives. It has the full batch."
    )


class Alone(OperatorMode):
    """Refuses collectives: the reference is one device, on every rank, and a rank that repeats
    something by itself would meet no other."""

    def __init__(self, refused: Callable[[str], Exception] = _refused_of_reference) -> None:
        super().__init__()
        self._refused = refused

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.namespace in COLLECTIVES:
            raise self._refused(f"step communicates ({function.__name__})")
        return function(*args, **kwargs)


def require_one_reference(ranks: Ranks, checksums: Mapping[str, str]) -> None:
    """Raises PtrainError on every rank where the reference's weights are other ones on some."""
    everyones = ranks.gather(dict(checksums))
    for rank, other in enumerate(everyones):
        for name, checksum in everyones[0].items():
            if other.get(name) != checksum:
                raise PtrainError(
                    f"verify: reference: {name} differs between rank 0 and rank {rank}\n  "
                    "remedy: Seed every rank identically before the reference is built."
                )


def loss_dtype(loss: Any) -> torch.dtype | None:
    """Return the dtype that the loss itself is computed in: some models do that in fp32, whatever
    their own is. None where it is no tensor."""
    return loss.dtype if isinstance(loss, torch.Tensor) else None


def number(loss: Any) -> float | None:
    """A loss that was returned: None, a number, a tensor with one element, also a DTensor. None of
    anything else."""
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    is_one = loss.numel() == 1 if isinstance(loss, torch.Tensor) else not isinstance(loss, str)
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss) if is_one else None
    except (TypeError, ValueError, RuntimeError):
        return None


def odd_loss(loss: Any) -> str:
    """Return in words what was returned in the place of a loss; nothing where it is one."""
    if loss is None or number(loss) is not None:
        return ""
    is_tensor = isinstance(loss, torch.Tensor)
    return f"a tensor of {tuple(loss.shape)}" if is_tensor else f"{loss!r:.60}"


def has_parameters(model: nn.Module) -> None:
    """Raises PtrainError where nothing can be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PtrainError(
            "verify: the reference has no parameter that requires a gradient\n  remedy: Pass "
            "a module that trains. Call `requires_grad_(True)` on its parameters."
        )


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """How the ranks' losses make up the global one."""

    how: Losses
    ranks: Ranks

    def of(self, right: float | None, mine: float | None) -> float | None:
        """Return it, of the ranks that have one (of a pipeline the last stage alone); None where a
        side has none. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return None if right is None or not losses else self._made_up(self.how, right, losses)

    def notes(self, right: Any, mine: Any) -> list[str]:
        """Say what steps returned that is no loss. All ranks call it."""
        everyones = self.ranks.gather([odd_loss(right), odd_loss(mine)])
        rows = [row for its in everyones for row in zip(("reference", "loop"), its, strict=True)]
        return [
            f"losses: not compared, the step of the {side} returned {words}. Return the loss only, "
            "or None"
            for side, words in dict.fromkeys(rows)
            if words
        ]

    def ways(self, right: float, mine: float | None) -> dict[Known, float]:
        """Return what the global loss would be by each known way. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return {how: self._made_up(how, right, losses) for how in get_args(Known)}

    @staticmethod
    def _made_up(how: Losses, right: float, losses: Sequence[float]) -> float:
        match how:
            case "mean":
                return sum(losses) / len(losses)
            case "sum":
                return sum(losses)
            case "same":
                return max(losses, key=lambda loss: abs(loss - right))
            case reduce:
                total = reduce(losses)
                if words := odd_loss(total):
                    raise PtrainError(
                        f"verify: Terms.loss returned {words}\n  remedy: Return one number."
                    )
                value = number(total)
                return math.nan if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of a run, or of a part of it; equal on all ranks. `notes`: what was not tried,
    and why; `trajectory`: figures of every step, of a stage of many."""

    checks: tuple[Check, ...]
    mismatches: tuple[Mismatch, ...] = ()
    root_cause: RootCause | None = None
    notes: tuple[str, ...] = ()
    trajectory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def fails(self) -> bool:
        return self.root_cause is not None or not all(check.holds for check in self.checks)

    @property
    def holds(self) -> bool:
        return bool(self.checks) and not self.fails


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopVerdict(Verdict):
    """Printable. `losses` are the reference's and the loop's, as far as the run went."""

    losses: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    num_ranks: int = 1
    steps: int = 0

    def raise_for_verdict(self) -> None:
        """Raises MismatchFound with the root cause, VerdictFailed where there is none."""
        if self.root_cause is not None:
            raise MismatchFound(self.root_cause)
        if not self.holds:
            raise VerdictFailed(str(self))

    def __str__(self) -> str:
        held = sum(check.holds for check in self.checks)
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        head = (
            f"verdict: {'holds' if self.holds else 'fails'} ({held} of {len(self.checks)} "
            f"checks, {self.steps} step{'s' * (self.steps != 1)}, {ranks} against the "
            "single-device reference)"
        )
        rows = [str(self.root_cause)] if self.root_cause else []
        rows += [_row(check) for check in self.checks]
        rows += [f"note: {note}" for note in self.notes]
        return "\n".join([head, *(f"  {line}" for row in rows for line in row.splitlines())])


def _row(check: Check) -> str:
    mark = "ok  " if check.holds else "FAIL"
    limit = f" (limit {check.tolerance:g})" if check.tolerance else ""
    value = "" if check.measured is None else f": {check.measured:.3g}"
    return f"{mark} {check.name}{value}{limit}{f' · {check.why}' if check.why else ''}"
