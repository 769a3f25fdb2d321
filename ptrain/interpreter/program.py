"""Build the program of a plan: the wrapped model, ready to train, with one interface.

No value is read from a tensor between forward and update, so the same code runs on gloo, on NCCL,
and on fake ranks with fake tensors.

Before anything is wrapped, the ranks must agree on the names, shapes and dtypes of all parameters,
on the layout, and on samples of a user's dataset. Otherwise collectives of different sizes would
hang or mix up numbers. With the check, all ranks end with the same message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.data.run.target import Named
from ptrain.codec import decode, encode
from ptrain.cost import Phase, State
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import SampleSource, read_batch, shard_batch
from ptrain.errors import Fault, PtrainError, SpecError, input_error
from ptrain.interpreter.construction import Construction
from ptrain.interpreter.execute import execute
from ptrain.interpreter.look import build_and_inspect, inspect_module
from ptrain.interpreter.loss import Loss, StepLoss
from ptrain.models.attention import require_trainable
from ptrain.models.external import dataset_of
from ptrain.models.initialize import accept_module, keeps_its_weights
from ptrain.models.ledger import tensors_of
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import StepBatch, objective_of
from ptrain.optimizers.update import MASTER, TargetsUpdate
from ptrain.plan.show import format_plan
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.world import World
from ptrain.spec.model import UserFunction
from ptrain.spec.precision import Layout
from ptrain.spec.spec import Spec, require_leave_of

_REMEDY = "Use the same spec, model and code on every rank."
_SAMPLES_REMEDY = (
    "Compute samples from their index only: use a random generator with a fixed seed "
    "(`np.random.default_rng(0)`), and read the same files on every rank."
)


def require_equal_models(
    module: nn.Module, layout: Layout, world: World, *, are_given: bool = False
) -> None:
    """Require that all ranks have the same parameters and layout.

    The cost is two all-gathers of less than 100 bytes per rank if they agree. `are_given`: the
    weights come from the user, who may have drawn different ones per rank, so their sums are
    compared too.

    Raises:
        SpecError: Two ranks differ; it names the first tensor that does. Every rank raises it.
    """
    if world.size == 1 or world.backend == "fake":
        return
    tensors = [
        [
            name,
            list(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            _exact_sum(parameter) if are_given else "",
            parameter.requires_grad,
        ]
        for name, parameter in module.named_parameters()
    ]
    mine = {"layout": encode(layout), "tensors": tensors}
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    # A digest first: it has one size for every model. The full lists are sent only if ranks differ.
    if len(set(gather(digest, world.size, world.device))) == 1:
        return
    everyone = gather(mine, world.size, world.device)
    for rank, other in enumerate(everyone):
        if difference := _model_difference(everyone[0], other, rank):
            raise SpecError(difference)


def require_equal_samples(function: UserFunction | None, world: World) -> None:
    """Require that all ranks have the same dataset, by its size and some samples.

    Raises:
        SpecError: Two ranks differ. Every rank raises it.
    """
    if function is None or world.size == 1 or world.backend == "fake":
        return
    dataset = dataset_of(function)
    mine = {"size": dataset.size, "digests": [*dataset.compute_digests().items()]}
    first, *others = gather(mine, world.size, world.device)
    for rank, other in enumerate(others, 1):
        if finding := _describe_sample_difference(first, other, rank):
            raise input_error(function.target_key, finding, _SAMPLES_REMEDY)


def _describe_sample_difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """Describe how the samples of `rank` differ from rank 0's, "" if they agree."""
    if other["size"] != first["size"]:
        return f"it has {other['size']} samples on rank {rank}, but {first['size']} on rank 0"
    for (index, digest), (_, its_digest) in zip(first["digests"], other["digests"], strict=True):
        if digest != its_digest:
            return f"sample {index} has different values on rank {rank} and rank 0"
    return ""


@torch.no_grad()
def _exact_sum(parameter: Tensor) -> str:
    """Return the sum of a tensor's values in fp64 as hexadecimal text, without rounding."""
    return float(parameter.sum(dtype=torch.float64)).hex()


def gather(
    value: Any,
    size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    kind: Any = Any,
) -> list[Any]:
    """Return the values of all `size` ranks in order, sent as JSON and read as `kind`."""
    body = json.dumps(encode(value, kind)).encode()
    mine = torch.tensor([len(body)], device=device)
    sizes = [torch.zeros_like(mine) for _ in range(size)]
    # Sizes first, because an all-gather needs tensors of one size.
    dist.all_gather(sizes, mine, group=group)
    lengths = [int(length) for length in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    padded = padded.to(device)
    rows = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [
        decode(json.loads(row[:length].cpu().numpy().tobytes()), kind)
        for row, length in zip(rows, lengths, strict=True)
    ]


def _model_difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> Fault | None:
    """Return the difference of `rank`'s model from rank 0's, None if they agree."""
    for own, its in zip(first["tensors"], other["tensors"], strict=False):
        name, shape, dtype, total, is_trained = own
        its_name, its_shape, its_dtype, its_total, is_its_trained = its
        if name != its_name:
            return _fault_at(
                name, f"rank 0 has {name}, but rank {rank} has {its_name} in its place"
            )
        if dtype != its_dtype:
            return _fault_at(name, f"its dtype is {dtype} on rank 0, {its_dtype} on rank {rank}")
        if shape != its_shape:
            return _fault_at(name, f"its shape is {shape} on rank 0, {its_shape} on rank {rank}")
        if is_trained != is_its_trained:
            trains, freezes = (0, rank) if is_trained else (rank, 0)
            return _fault_at(
                name, f"it is trainable on rank {trains}, but frozen on rank {freezes}"
            )
        if total != its_total:
            finding = f"rank {rank} and rank 0 have different values"
            remedy = (
                "Build the model after `torch.manual_seed` with the same seed on every rank, "
                "or load"
            )
            return Fault(place=name, finding=finding, remedy=f"{remedy} the same weights.")
    counts = len(first["tensors"]), len(other["tensors"])
    if counts[0] != counts[1]:
        return _fault_at(
            "model", f"rank 0 has {counts[0]} tensors, but rank {rank} has {counts[1]}"
        )
    for key, value in first["layout"].items():
        if value != other["layout"][key]:
            return _fault_at(
                "precision.layout",
                f"{key} is {value} on rank 0, {other['layout'][key]} on rank {rank}",
            )
    return None


def _fault_at(place: str, finding: str) -> Fault:
    return Fault(place=place, finding=finding, remedy=_REMEDY)


@dataclass(frozen=True, slots=True)
class SkipFlag:
    """The skip flag of an unscaled loss's update: `flag` (0-d fp32) is 1 to skip it."""

    flag: torch.Tensor

    def scalars_for(self, tensor: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return no scale, and the flag on the device of `tensor`."""
        assert tensor.device == self.flag.device, "the tensor is on another device"
        return None, self.flag


class Observer(Protocol):
    """An observer of the phases of a step."""

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that `phase` begins for this micro-batch (from 0; 0 in the update)."""


class GradientObserver(Protocol):
    """An observer of the gradients of an update; `Program.gradients` returns them."""

    def on_reduced(self) -> None:
        """Note that gradients are summed over the ranks, in the optimizer's layout."""

    def on_clipped(self, norm: torch.Tensor | None) -> None:
        """Note that gradients are clipped; `norm` (0-d) is their norm before it."""


class Program:
    """One rank of a training job: alternate `forward_backward(batch, lr)` and `step(lr)`.

    `step` is `reduce()` followed by `apply(lr)`, for callers that decide between the two.

    Attributes:
        scaling: The scale of the loss, None without.
        whole_because: The reason why this rank built the model with all weights, "" if weights were
            read or drawn part by part.
        updates_in_backward: Gradients are materialized (G = M): every unit is updated within the
            backward pass, and `step` only ends the update.
        admits: With `updates_in_backward`, decides whether the i-th group of targets takes its
            reduced gradient. A group that does not is unchanged, with the same collectives. None:
            all do.
    """

    def __init__(self, rank: Construction) -> None:
        """Build the program from a construction whose steps have all been executed."""
        assert rank.update is not None and rank.passes_of is not None, "the plan is not executed"
        self.spec, self.plan, self.ran = rank.spec, rank.plan, tuple(rank.ran)
        self.mesh, self.world = rank.mesh, rank.world
        self.model, self.wrapped, self.pieces = rank.model, rank.wrapped, tuple(rank.pieces)
        self.clipping, self.scaling, self.update = rank.clipping, rank.scaling, rank.update
        self.balancing = rank.balancing
        self.whole_because = rank.whole_because
        self.observers: list[Observer] = []
        self.gradient_observers: list[GradientObserver] = []
        self.batch: StepBatch | None = None
        # offset of `sampler.batch`, set by a resume with another batch.global
        self.sample_offset = 0
        # fingerprints of the data for checkpoint manifests
        self.data_prints: Mapping[str, Any] = {}
        self.updates_in_backward = self.plan.wrap.is_updated_in_backward
        self.admits: Callable[[int], bool] | None = None
        self._source: SampleSource | None = None  # opened on the first call of `samples`
        # between the halves of a step: the norm of `_measured`
        self._norm: torch.Tensor | None = None
        self._measured: list[torch.Tensor] = []
        self._lr: float | None = None
        self._operators = rank.operators
        self.order = rank.order
        self.own_tokens = rank.own_tokens  # selects the rank's tokens of its samples
        self._sharers = self.mesh.group_size(self.plan.loss_axes)
        if self.updates_in_backward:
            self.wrapped.consume_with(self._update_unit)
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        self.loss = StepLoss(rank.loss, self.scaling, dtype, self.world.device)
        self._enter = partial(_notify_observers, self.observers)
        self.passes = rank.passes_of(rank, self.loss, self._enter)

    def __repr__(self) -> str:
        return f"Program({self.spec.name}: rank {self.world.rank} of {self.world.size})"

    def __str__(self) -> str:
        return format_plan(self.spec, self.plan)

    @property
    def registry(self) -> TagRegistry:
        """The tags of the program's storages."""
        return self.mesh.registry

    @property
    def data_index(self) -> int:
        """This rank's row-major position over the data axes, which selects its samples."""
        return self.mesh.position(self.plan.sample_axes)

    @property
    def random_index(self) -> int:
        """The row-major position over the axes along which ranks draw different random numbers."""
        return self.mesh.position(self.plan.drawing_axes)

    def samples(self, step: int) -> StepBatch:
        """Return this rank's samples of a step (from 0), read from the spec's `data`."""
        if self._source is None:
            self._source = open_corpus(self.spec.data)
        local = read_batch(
            self._source,
            spec=self.spec,
            step=step,
            data_index=self.data_index,
            data_degree=self.spec.data_degree,
            offset=self.sample_offset,
        )
        return self.own_tokens(local).to(self.world.device)

    def share(self, samples: Any) -> StepBatch:
        """Copy this rank's samples of a step out of a global batch that every rank has.

        Args:
            samples: Tokens, int64 [batch.global, sequence + 1], or (tokens, labels). If the spec's
                `data` are not tokens: collated samples of the dataset. No meter counts them.

        Raises:
            SpecError: The batch has another shape.
        """
        for tensor in tensors_of(samples):
            self.registry.mark_input(tensor)
        local = shard_batch(samples, self.spec, self.data_index)
        return self.own_tokens(local).to(self.world.device)

    def forward_backward(self, batch: StepBatch, lr: float | None = None) -> torch.Tensor:
        """Run forward and backward of all micro-batches of a step.

        Args:
            batch: This rank's samples.
            lr: The learning rate of the update. Required if backward runs the optimizer (G = M).

        Returns:
            This rank's share of the global mean loss (0-d, valid until the next call). The shares
                of all ranks add up to it.
        """
        if lr is None and self.updates_in_backward:
            raise PtrainError(
                "forward_backward: gradients are materialized (M), so backward runs the "
                "optimizer step\n  remedy: Pass the learning rate: `forward_backward(batch, "
                "lr)`."
            )
        self._lr = lr
        self.batch = batch
        self.loss.begin(batch)
        if self.balancing is not None:
            self.balancing.begin()
        with self._operators():
            self.passes.train(batch)
        share = self.loss.share
        return share if self._sharers == 1 else share.div_(self._sharers)

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor | None:
        """Reduce partial gradients, clip them, and update the parameters.

        If a gradient of a scaled loss overflowed, only the scale is updated.

        Returns:
            The global gradient norm before clipping (0-d), None if the spec does not clip.
        """
        norm = self.reduce()
        self.apply(lr)
        return norm

    @torch.no_grad()
    def reduce(self) -> torch.Tensor | None:
        """Run the first half of `step`: complete the gradients and return their norm."""
        self._enter(Phase.UPDATE, 0)
        if not self.updates_in_backward:
            self.wrapped.reduce_gradients()
            for observer in self.gradient_observers:
                observer.on_reduced()
            self._norm = self._check_and_measure()
        return self._norm

    @torch.no_grad()
    def apply(self, lr: float, halted: torch.Tensor | None = None) -> None:
        """Run the second half of `step`: clip, update, and move the routers' biases.

        Args:
            lr: The learning rate.
            halted: Flag (0-d fp32 on the device, 0 or 1). If 1, all state that a checkpoint saves
                stays unchanged. The host never reads it, so it does not wait.
        """
        if not self.updates_in_backward:
            if self._norm is not None and self.clipping is not None:
                self.clipping.scale_down(self._measured, self._norm)
            # drop the references: the update frees gradients one after the other
            self._measured = []
            for observer in self.gradient_observers:
                observer.on_clipped(self._norm)
            self._run_update(lr, halted)
        self._norm = None
        self.wrapped.finish_update()
        if self.balancing is not None:
            self.balancing.update_biases(halted)
        self.wrapped.clear_gradients()

    def _check_and_measure(self) -> torch.Tensor | None:
        """Check and measure gradients; a function, so that no local keeps them alive."""
        gradients = self.gradients() if self.scaling or self.clipping else []
        if self.scaling is not None:
            self.scaling.update_overflow_flag(gradients)
        if self.clipping is None:
            return None
        # The same tensors are scaled in `apply`, after a caller has decided on the step.
        self._measured = gradients
        return self.clipping.norm(gradients, self.wrapped, self.scaling)

    def _run_update(self, lr: float, halted: torch.Tensor | None) -> None:
        """Run the optimizer, and update the loss scale."""
        if self.scaling is None:
            self.update.step(lr, None if halted is None else SkipFlag(halted))
            return
        assert isinstance(self.update, TargetsUpdate), "a scaled loss needs master copies"
        if halted is not None:
            # One flag for both reasons to skip, so that optimizers read a single scalar.
            torch.maximum(self.scaling.found_inf, halted, out=self.scaling.found_inf)
        self.update.step(lr, self.scaling)
        # After the optimizer, which divides by the scale of this step.
        self.scaling.update(halted)

    @torch.no_grad()
    def _update_unit(self, index: int) -> None:
        """Update one unit within backward."""
        assert self._lr is not None, "forward_backward needs a learning rate"
        assert isinstance(self.update, TargetsUpdate), "backward updates flat units only"
        is_taken = self.admits is None or self.admits(index)
        self.update.step_group(index, self._lr, is_taken=is_taken)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> torch.Tensor:
        """Return this rank's share of the global mean loss of a batch, without gradients (0-d)."""
        self.model.eval()
        # A separate tensor: `share` belongs to the training step.
        total = torch.zeros_like(self.loss.share)

        with self._operators(), self.loss.evaluate_batch(batch):
            self.passes.evaluate(batch, total.add_)
        # Ranks that compute the same loss each add their share of it.
        total.div_(self._sharers)
        # No backward pass follows that would free the gathered parameters.
        self.wrapped.end_evaluation()
        self.model.train()
        return total

    def gradients(self) -> list[torch.Tensor]:
        """Return the local gradients as the optimizer sees them, after `reduce_gradients`.

        They are one tensor per parameter or, with DDP, a bucket for many.
        """
        return self.wrapped.gradients()

    @torch.no_grad()
    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the training state, with equal names, shapes and dtypes for every placement.

        It has `model` by parameter name and `optimizer` by `name.exp_avg`, `name.step` …, as full
        tensors, or DTensors if a rank holds a part; `scaling` if the loss is scaled, `routers` if
        they have biases.
        """
        dtype = TORCH_DTYPES[self.plan.update.layout.parameters]
        model: dict[str, torch.Tensor] = {}
        optimizer: dict[str, torch.Tensor] = {}
        for target, tensors in self.update.tensors():
            exported = self.canonical(target.export())
            # The master copy is exported as optimizer state, and the model gets its rounded values,
            # so that a checkpoint has the same tensors for every placement.
            if target.owns_master:
                if not target.is_frozen:  # frozen parameters have no master copy
                    optimizer.update(_with_key(exported, MASTER))
                exported = {name: value.to(dtype) for name, value in exported.items()}
            model.update(exported)
            for key, tensor in tensors.items():
                optimizer.update(_with_key(self.canonical(target.split(tensor)), key))
        state = {"model": model, "optimizer": optimizer}
        if self.balancing is not None:
            state["routers"] = dict(self.balancing.state())
        return state | ({"scaling": self.scaling.state()} if self.scaling else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load a state with the structure of `state_dict`, from a checkpoint of any placement."""
        model = self.order.to_rank_order(state["model"])
        keys = {key for _, tensors in self.update.tensors() for key in (MASTER, *tensors)}
        optimizer = {
            key: self.order.to_rank_order(_select_key(state["optimizer"], key)) for key in keys
        }
        for target, tensors in self.update.tensors():
            has_master = target.owns_master and not target.is_frozen
            target.load(self.wrapped.with_wrap_names(optimizer[MASTER] if has_master else model))
            for key, tensor in tensors.items():
                tensor.copy_(target.join(self.wrapped.with_wrap_names(optimizer[key])))
        if self.scaling is not None:
            for key, tensor in self.scaling.state().items():
                tensor.copy_(state["scaling"][key])
        if self.balancing is not None:
            for name, tensor in self.balancing.state().items():
                tensor.copy_(state["routers"][name])

    def canonical(self, named: Named) -> Named:
        """Return tensors by the model's names, in its order of features. Collective."""
        return self.order.to_model_order(
            {self.wrapped.canonical_name(name): tensor for name, tensor in named.items()}
        )

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield every live local tensor but activations, with its state; storages may repeat."""
        yield from self.wrapped.storages()
        yield from self.update.storages()
        if self.scaling is not None:
            yield from self.scaling.storages()
        for buffer in self.model.buffers():
            yield State.OTHER, buffer
        yield State.OTHER, self.loss.share
        if self.batch is not None:
            yield from ((State.OTHER, tensor) for tensor in self.batch.tensors)


def _notify_observers(observers: list[Observer], phase: Phase, micro_batch: int) -> None:
    """Report a phase to all observers."""
    for observer in observers:
        observer.phase(phase, micro_batch)


def _with_key(named: Named, key: str) -> Named:
    """Append the key of an optimizer state to the names."""
    return {f"{name}.{key}": value for name, value in named.items()}


def _select_key(optimizer: Mapping[str, torch.Tensor], key: str) -> Named:
    """Return one kind of optimizer state, by parameter name."""
    end = f".{key}"
    return {
        name.removesuffix(end): value for name, value in optimizer.items() if name.endswith(end)
    }


def interpret(
    spec: Spec,
    model: nn.Module | None = None,
    world: World | None = None,
    *,
    allow_import: bool = False,
) -> Program:
    """Build the training program of a legal spec on this rank.

    Args:
        spec: The spec (`ptrain.load(...).spec`).
        model: An unwrapped module to use instead of the spec's, with identical weights on every
            rank.
        world: The ranks. Default: the ranks that the launcher started; without a launcher, one
            rank.
        allow_import: Allow the spec to import your code.

    Returns:
        The program: `forward_backward(samples)` runs one step's passes, `step(lr)` the update.

    Raises:
        SpecError: The spec is not legal, the mesh needs another number of ranks, or models,
            weights, layouts or samples differ between ranks. Every rank raises it.

    Example: see `ptrain.measure`.
    """
    if faults := (*check(spec), *find_unsupported(spec)):
        raise SpecError(*faults)
    rank = prepare_construction(spec, model, world, allow_import=allow_import)
    execute(rank)
    return Program(rank)


def prepare_construction(
    spec: Spec,
    model: nn.Module | None = None,
    world: World | None = None,
    *,
    allow_import: bool = False,
) -> Construction:
    """Return the construction of `interpret`'s program before any step of its plan has run."""
    world = world or World.join(spec.timeout, device=spec.device, backend=spec.backend)
    require_trainable(spec.model, world.device)
    if spec.loss.user_function is not None:
        require_leave_of(spec.loss.user_function, allow_import=allow_import)
    if model is None:
        seen = build_and_inspect(spec, world.device, allow_import=allow_import)
    else:
        spec = accept_module(model, spec)
        seen = inspect_module(model, spec)
    are_given = model is not None and keeps_its_weights(seen.module)
    # Before any mesh or wrap: a difference would otherwise show as a collective that hangs.
    require_equal_models(seen.module, seen.plan.update.layout, world, are_given=are_given)
    require_equal_samples(spec.data.function, world)
    return Construction(
        spec=spec,
        plan=seen.plan,
        world=world,
        module=seen.module,
        head=seen.head,
        attending=seen.facts.attending,
        stages=seen.stages,
        weights=seen.weights,
        whole_because=seen.whole_because,
        loss=Loss(objective_of(spec)),
    )
