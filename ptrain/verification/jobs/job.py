"""A training loop to verify, its options and its verdict; the ranks, their mesh axes and exchanges;
and the preconditions for a comparison of two loops.

The loop needs no annotations: optimizers are found when they step, and shards by their tensors. The
reference must be single-device and equal on all ranks, the loop must repeat itself bit by bit, and
the ranks' losses must combine into a global loss.
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
from ptrain.report.record import Check, CheckTable
from ptrain.spec.spec import Spec, rank_groups
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
    """The ranks of a loop, their mesh axes, and the exchanges between them.

    `device` holds the tensors that are exchanged over `group` (None: the default group). `axes`
    has, for each axis of degree 2 or more, the groups of ranks that differ on it alone. Without a
    mesh, the only axis is `RANKS`, with all ranks in one group.
    """

    rank: int
    size: int
    device: torch.device
    axes: Axes = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the values of all ranks, by rank. All ranks call it.

        Args:
            value: This rank's value, which is sent as JSON.
            kind: The type as which the values are decoded.
        """
        if self.size == 1:
            return [value]
        return gather(value, self.size, self.device, self.group, kind)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors (equal shapes) as fp64 [ranks, …]. All ranks call it."""
        # In fp64, which represents the values of all floating dtypes.
        mine = tensor.detach().double().contiguous().to(self.device)
        if self.size == 1:
            return mine.unsqueeze(0).cpu()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows).cpu()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on the CPU. All ranks pass a tensor of equal shape and dtype."""
        shared = tensor.contiguous().to(self.device)
        if self.size > 1:
            dist.broadcast(shared, src=0, group=self.group)
        return shared.cpu()

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank. Lengths may differ. All ranks call it."""
        if self.size == 1:
            return [mine]
        # all_gather needs equal sizes, so the rows are padded to the longest.
        sizes = self.gather(len(mine))
        row = torch.zeros(max(*sizes, 1), dtype=torch.uint8)  # 1 or more: frombuffer rejects none
        row[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[
            : len(mine)
        ]
        rows = [torch.empty_like(row, device=self.device) for _ in sizes]
        dist.all_gather(rows, row.to(self.device), group=self.group)
        return [its[:size].cpu().numpy().tobytes() for its, size in zip(rows, sizes, strict=True)]

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return {axis: len(groups[0]) for axis, groups in self.axes.items()}

    @property
    def sum_groups(self) -> Axes:
        """The groups over which gradients may be summed: each axis, then combinations (`dp+cp`)."""
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

    def separating_axis(self, chosen: Iterable[int], order: Iterable[str] | None = None) -> str:
        """Return the first axis (of `order`) with a group that contains chosen and other ranks.

        Returns "" if no axis has such a group, as when all ranks are chosen.
        """
        who = set(chosen)
        for axis in self.axes if order is None else order:
            if any(set(group) & who and set(group) - who for group in self.axes.get(axis, ())):
                return axis
        return ""

    def differing_axis(self, ranks: Sequence[int]) -> str:
        """Return the first axis on which at least two of these ranks differ, or ""."""
        for axis, lines in self.axes.items():
            if any(len(set(line) & set(ranks)) > 1 for line in lines):
                return axis
        return ""


def ranks_from_mesh(parameters: Iterable[Tensor], mesh: DeviceMesh | None) -> Ranks:
    """Return this process's rank, and the axes of the default process group.

    The axes are those of `mesh`, or else of the DTensors' root mesh with most dimensions. If no
    mesh covers all ranks, the only axis is `RANKS`.
    """
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


def ranks_from_spec(spec: Spec, exchange: Exchange) -> Ranks:
    """Return the ranks of a run on the axes of its spec, which communicate over its exchange."""
    return Ranks(
        rank=exchange.world.rank,
        size=exchange.world.size,
        device=torch.device("cpu"),
        axes={
            str(factor.axis): rank_groups(spec, [factor.axis])
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
    """The interface of a job that shows more than tensors. All ranks call its methods together."""

    ranks: Ranks

    def recorders(
        self, wholes: Mapping[str, ParameterShard], holds: Mapping[str, ParameterShard]
    ) -> tuple[StepRecorder, StepRecorder]:
        """Return a recorder for the reference's next step, and one for the job's."""

    def copy_state(self) -> SavedState:
        """Return a copy of the job's state."""

    def shards(self) -> dict[str, ParameterShard]:
        """Return the shard of each parameter that this rank's optimizers update, by name."""

    def parameter_values(self, holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter, flattened, by parameter name."""

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the optimizer state of this rank, by parameter name."""

    def buffers(self, reference: nn.Module) -> Buffers:
        """Yield the buffers that both sides have, with this rank's part of the reference's."""

    def compare_step(self, differences: Differences) -> None:
        """Add the differences between the last recorded steps of the job and of the reference."""

    def explain(
        self, mismatches: Sequence[Mismatch], step: StepComparison, by_gradients: Explain
    ) -> RootCause:
        """Return the root cause of the first mismatch; `by_gradients` explains gradients."""


class SavedState(Protocol):
    """A copy of a job's state that can be restored."""

    def restore(self, *, gradients: bool = True) -> None:
        """Restore the state, and the gradients of that time too if `gradients` is True."""


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a batch in which `change` is applied to every tensor that is not a scalar."""
    if isinstance(batch, Mapping):
        # tree_map treats a mapping of an unregistered type, as tokenizers return, as a leaf
        return type(batch)({key: map_tensors(its, change) for key, its in batch.items()})  # type: ignore[call-arg]
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative differences (2-norm) that count as rounding.

    They apply to the gradient of each parameter (`gradients`), the output of each module
    (`outputs`), each parameter's total change since the start (`updates`) and the global loss
    (`losses`).
    """

    gradients: float
    outputs: float
    updates: float
    losses: float


# fp64 and fp32: the limits allow sums over the same addends in another order. `updates` allow for
# three steps of Adam, which may turn the rounding of one element into a full step of it.
# 16 bits: one rounding is 2^-8 (bf16) or 2^-11 (fp16), and a layer's sum has several of them.
# A fault is larger than these limits: it multiplies a value.
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
                raise _option_error(term, finding, remedy)


def _option_error(term: str, finding: str, remedy: str) -> PtrainError:
    return PtrainError(f"verify: Terms.{term}: {finding}\n  remedy: {remedy}")


def require_padded(terms: Terms, wholes: Mapping[str, Tensor]) -> None:
    """Raise PtrainError if a padded parameter is not in the reference, or has more rows there."""
    for name, rows in terms.padded.items():
        if name not in wholes or not wholes[name].dim() or rows < len(wholes[name]):
            raise _option_error(
                "padded",
                f"the reference has no parameter {name} of up to {rows} rows",
                "Use a parameter's name, and the rows of the loop's full tensor.",
            )


def choose_tolerance(dtype: torch.dtype | None, parameters: Iterable[Tensor]) -> Tolerance:
    """Return the tolerance of `dtype`, or of the coarsest dtype of the parameters.

    Raises PtrainError if `TOLERANCES` has none of these dtypes.
    """
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


def require_unwrapped(reference: Job) -> None:
    """Raise PtrainError if a module of the reference is wrapped, or a parameter is a DTensor."""
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


def _reference_error(words: str) -> PtrainError:
    return PtrainError(
        f"verify: the reference's {words}\n  remedy: Give the reference a step without "
        "collectives. It has the full batch."
    )


class NoComms(OperatorMode):
    """An operator mode that rejects collectives.

    Only this rank runs a reference, or repeats a part of a step: a collective would never return.
    """

    def __init__(self, refused: Callable[[str], Exception] = _reference_error) -> None:
        super().__init__()
        self._refused = refused

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.namespace in COLLECTIVES:
            raise self._refused(f"step communicates ({function.__name__})")
        return function(*args, **kwargs)


def require_one_reference(ranks: Ranks, checksums: Mapping[str, str]) -> None:
    """Raise PtrainError on all ranks if the reference's checksums differ between them."""
    everyones = ranks.gather(dict(checksums))
    for rank, other in enumerate(everyones):
        for name, checksum in everyones[0].items():
            if other.get(name) != checksum:
                raise PtrainError(
                    f"verify: reference: {name} differs between rank 0 and rank {rank}\n  "
                    "remedy: Seed every rank identically before the reference is built."
                )


def loss_dtype(loss: Any) -> torch.dtype | None:
    """Return the dtype of a loss tensor, or None for others. It may differ from the parameters'."""
    return loss.dtype if isinstance(loss, torch.Tensor) else None


def loss_value(loss: Any) -> float | None:
    """Return a loss (number, tensor or DTensor of one element) as a float, else None."""
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    is_one = loss.numel() == 1 if isinstance(loss, torch.Tensor) else not isinstance(loss, str)
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss) if is_one else None
    except (TypeError, ValueError, RuntimeError):
        return None


def describe_non_loss(loss: Any) -> str:
    """Describe a returned value that is not a loss; return "" for a loss or None."""
    if loss is None or loss_value(loss) is not None:
        return ""
    is_tensor = isinstance(loss, torch.Tensor)
    return f"a tensor of {tuple(loss.shape)}" if is_tensor else f"{loss!r:.60}"


def require_trainable(model: nn.Module) -> None:
    """Raise PtrainError if no parameter of the model requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PtrainError(
            "verify: the reference has no parameter that requires a gradient\n  remedy: Pass "
            "a module that trains. Call `requires_grad_(True)` on its parameters."
        )


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """The rule by which the ranks' losses combine into the global loss."""

    how: Losses
    ranks: Ranks

    def combine(self, right: float | None, mine: float | None) -> float | None:
        """Return the loop's global loss, or None if the reference or all ranks have none.

        Ranks without a loss, such as the earlier stages of a pipeline, do not count. All ranks call
        it.
        """
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return (
            None if right is None or not losses else self._combine_by_rule(self.how, right, losses)
        )

    def notes(self, right: Any, mine: Any) -> list[str]:
        """Return notes on returned values that are not losses. All ranks call it."""
        everyones = self.ranks.gather([describe_non_loss(right), describe_non_loss(mine)])
        rows = [row for its in everyones for row in zip(("reference", "loop"), its, strict=True)]
        return [
            f"losses: not compared, the step of the {side} returned {words}. Return the loss only, "
            "or None"
            for side, words in dict.fromkeys(rows)
            if words
        ]

    def combine_by_rules(self, right: float, mine: float | None) -> dict[Known, float]:
        """Return the global loss by each known rule (`mean`, `sum`, `same`). All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return {how: self._combine_by_rule(how, right, losses) for how in get_args(Known)}

    @staticmethod
    def _combine_by_rule(how: Losses, right: float, losses: Sequence[float]) -> float:
        match how:
            case "mean":
                return sum(losses) / len(losses)
            case "sum":
                return sum(losses)
            case "same":
                return max(losses, key=lambda loss: abs(loss - right))  # the worst of equal losses
            case reduce:
                total = reduce(losses)
                if words := describe_non_loss(total):
                    raise PtrainError(
                        f"verify: Terms.loss returned {words}\n  remedy: Return one number."
                    )
                value = loss_value(total)
                return math.nan if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a verification, or of a part of it, equal on all ranks.

    `notes` list things that were not tried, and the reasons. `trajectory` has figures of every
    step, by name, for a stage of many steps.
    """

    checks: tuple[Check, ...]
    mismatches: tuple[Mismatch, ...] = ()
    root_cause: RootCause | None = None
    notes: tuple[str, ...] = ()
    trajectory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """True if there is a root cause, or a check that does not hold."""
        return self.root_cause is not None or not all(check.holds for check in self.checks)

    @property
    def holds(self) -> bool:
        """True if there are checks, and nothing fails."""
        return bool(self.checks) and not self.has_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopVerdict(Verdict, CheckTable):
    """The verdict of `ptrain.verify`, which prints as a report.

    `losses` are those of the reference and of the loop, by step.
    """

    losses: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    num_ranks: int = 1
    steps: int = 0

    def raise_for_verdict(self) -> None:
        """Raise MismatchFound with the root cause, or VerdictFailed if a check fails without it."""
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
