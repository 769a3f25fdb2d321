"""Micro-batches, and the loss that a training minimizes.

The default loss is a sum of cross entropies over tokens. It is divided by a global count, so it
cannot be scaled wrongly (Theorem 3). A user's `loss:` or `step:` returns the mean over the samples
of a micro-batch. All micro-batches have one size, so the mean over them is the global mean.

The loss can be computed in chunks of tokens inside the model's forward pass, so that all logits
never exist at once. While targets are set, the head (or the method `logits(x)` of a built-in model
without a head) returns the summed loss instead of logits. It runs within the hooks of its module,
so its weights are all-gathered. The model's code is not changed: the head gets a subclass with the
same name, and an instance attribute shadows the method.

Note: in the fused mode a token's loss has the compute dtype, because torch's operator rounds it;
the sum is in at least fp32.

A user's `step:` may use parameters only inside calls of the model, because they are all-gathered
there, and the hooks that reduce gradients run there. autograd's graph of the loss shows which
parameters it uses, and where: autograd numbers its nodes in the order of the forward pass, so a
call is a range of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.checkpoint import checkpoint

from ptrain.errors import input_error
from ptrain.internals.autograd import next_sequence_number, sequence_number
from ptrain.internals.fakes import detect_fake_mode, unset_fake_temporarily
from ptrain.internals.part import replace_attributes
from ptrain.models.boundary import describe_value
from ptrain.models.compiled import LossProgram, compile_loss
from ptrain.models.cross_entropy import IGNORED, token_loss_sum
from ptrain.models.external import dataset_of, resolve_target
from ptrain.models.ledger import watch_modules
from ptrain.models.numerics import TORCH_DTYPES, widen
from ptrain.models.transformer import Transformer
from ptrain.spec.model import UserFunction
from ptrain.spec.spec import Spec
from ptrain.steps.step import CompiledLoss, LossStep


class ModelCalls:
    """The record of a model's calls while it is watched.

    Each call is a range of autograd's node numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begun: list[int] = []
        self._spans: list[range] = []

    @property
    def num_calls(self) -> int:
        return len(self._spans)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Temporarily record calls of the model. Its output does not change."""
        root = [("", self._model)]
        with watch_modules(root, before=self._begin, after=self._end, is_first=True):
            yield

    def used_beside(self, loss: Tensor) -> list[str]:
        """Return the names of the parameters that the loss uses outside calls of the model."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        beside = {
            names[id(leaf)]
            for leaf, user in uses_of_leaves(loss)
            if id(leaf) in names and not self._is_within(user)
        }
        return [name for name in names.values() if name in beside]

    def _is_within(self, node: Node | None) -> bool:
        return node is not None and any(sequence_number(node) in span for span in self._spans)

    def _begin(self, *_: object) -> None:
        # A stack, because calls may be nested.
        self._begun.append(next_sequence_number())

    def _end(self, *_: object) -> None:
        self._spans.append(range(self._begun.pop(), next_sequence_number()))


def uses_of_leaves(tensor: Tensor) -> Iterator[tuple[Tensor, Node | None]]:
    """Yield the leaves of a tensor's autograd graph, once for each node that uses one.

    The node is None if `tensor` is a leaf itself.
    """
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor, None
        return
    # A list and not recursion: graphs of deep models are deeper than Python's stack.
    seen, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            # Only AccumulateGrad nodes, at the leaves, have this attribute.
            if (variable := getattr(following, "variable", None)) is not None:
                yield variable, node
            elif following not in seen:
                seen.add(following)
                waiting.append(following)


class TokenPair(NamedTuple):
    """Input tokens and the next tokens, each int64 [batch, sequence]."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A micro-batch.

    Attributes:
        data: The argument of a user's function: a TokenPair, or collated samples of the user's
            dataset, with samples in dimension 0 of each tensor.
    """

    data: Any

    @property
    def inputs(self) -> Any:
        """The argument of the model: the input tokens, the entry `inputs` of a mapping, the first
        entry of a sequence, or the data themselves.

        Raises:
            SpecError: The data are a mapping without `inputs`.
        """
        match self.data:
            case {"inputs": inputs}:
                return inputs
            case Mapping():
                keys = ", ".join(map(str, self.data))
                finding = f"a sample is a dictionary with the keys {keys}; none of them is "
                finding += "`inputs`"
                raise input_error(
                    "data.target",
                    finding,
                    "Rename the input of the model to `inputs`, or set "
                    "`step.target=package.module:function`, which calls the model.",
                )
            case tuple() | list():
                return self.data[0]
        return self.data

    @property
    def targets(self) -> Tensor:
        """The next tokens; only token samples have them."""
        assert isinstance(self.data, TokenPair), "only token samples have targets"
        return self.data.targets

    @property
    def contiguous(self) -> Any:
        """The data with contiguous tokens, for a user's function.

        Inputs and targets are views of one window [batch, sequence + 1]. They are copied, because
        `Tensor.view` fails on such views if there are several samples.
        """
        data = self.data
        return TokenPair(*(x.contiguous() for x in data)) if isinstance(data, TokenPair) else data

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the data."""
        return [leaf for leaf in tree_iter(self.data) if isinstance(leaf, Tensor)]

    @property
    def rows(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    def slice_rows(self, start: int, end: int) -> SampleBatch:
        """Return the samples from `start` up to `end`, as views."""
        return SampleBatch(tree_map(lambda leaf: leaf[start:end], self.data))

    def select_rows(self, rows: list[int]) -> SampleBatch:
        """Return the samples of these rows."""
        return SampleBatch(tree_map(lambda leaf: leaf[rows], self.data))

    def to(self, device: torch.device) -> SampleBatch:
        return SampleBatch(tree_map(lambda leaf: sent_to(device, leaf), self.data))


class StepBatch(Protocol):
    """One data rank's share of a step's global batch, on one device.

    Attributes:
        sample_ids: The identifiers of its samples.
        global_samples: The number of samples in the global batch.
        global_tokens: The number of targets with a loss in the global batch. Losses of
            micro-batches are divided by one of these two counts.
    """

    @property
    def sample_ids(self) -> tuple[int, ...]: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def global_tokens(self) -> int: ...

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, which live for the full step."""
        ...

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield the micro-batches of `micro` samples each, as views."""
        ...

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape of the first tensor for this number of samples."""
        ...

    def to(self, device: torch.device) -> Self: ...


def of_tokens(tokens: Tensor, labels: Tensor | None = None) -> SampleBatch:
    """Return a micro-batch of views of tokens.

    Args:
        tokens: The tokens, [batch, sequence + 1].
        labels: The labels in the same layout; None to use the tokens.
    """
    following = tokens if labels is None else labels
    return SampleBatch(TokenPair(tokens[:, :-1], following[:, 1:]))


def sample_batch(
    spec: Spec, *, rows: int | None = None, device: torch.device | None = None
) -> SampleBatch:
    """Return a micro-batch with the spec's shapes and dtypes, to inspect a model.

    Args:
        spec: The spec.
        rows: The number of samples. Default: the spec's micro-batch.
        device: The device. Default: torch's current default.

    Returns:
        Zeros for token data; otherwise copies of sample 0. Under a fake mode all tensors are fake.

    Raises:
        SpecError: The dataset cannot be read.
    """
    rows = spec.batch.micro if rows is None else rows
    if (first := _first_sample(spec)) is None:
        shape = rows, spec.batch.sequence + 1
        return of_tokens(torch.zeros(shape, dtype=torch.int64, device=device))
    of_leaf = _repeat_leaf if detect_fake_mode() is None else _zero_leaf
    return SampleBatch(tree_map(lambda leaf: of_leaf(leaf, rows, device), first.data))


def sample_bytes(spec: Spec) -> int | None:
    """Return the bytes of one sample of the user's dataset; None for token data."""
    first = _first_sample(spec)
    return None if first is None else sum(leaf.nbytes for leaf in first.tensors)


def in_dtype_of(spec: Spec, data: Any) -> SampleBatch:
    """Return collated samples with floating-point tensors cast to the spec's compute dtype."""
    dtype = TORCH_DTYPES[spec.precision.effective_layout.parameters]
    return SampleBatch(
        tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, data)
    )


def _first_sample(spec: Spec) -> SampleBatch | None:
    """Return sample 0 of the user's dataset, as a batch of one; None for token data."""
    if (function := spec.data.function) is None:
        return None
    with unset_fake_temporarily():
        return in_dtype_of(spec, dataset_of(function).first)


def _zero_leaf(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device)


def _repeat_leaf(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return leaf.to(device).repeat_interleave(rows, dim=0)


_LOSS = "Return the mean loss of the micro-batch as a floating-point tensor with zero dimensions."

AROUND_CALLS = "parameters are all-gathered, and gradients reduced, around calls of the full model."


class Objective:
    """The loss of a micro-batch (0-d): the summed cross entropy of the next tokens, in nats.

    Divide it by `divisor`. The last `padding` logits belong to no token.
    """

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run the model forward, and return the loss."""
        output = model(samples.inputs)
        return self.compute_loss(output, samples)

    def compute_loss(self, output: Any, samples: SampleBatch) -> Tensor:
        """Return the loss of a model's output."""
        return token_loss_sum(output, samples.targets, self.padding)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Run the part of the objective inside a pipeline stage's forward.

        Returns:
            The model's output; the loss if it comes from a user's function.
        """
        logits: Tensor = model(samples.inputs)
        return logits

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the loss of the result of `forward`."""
        return self.compute_loss(output, samples)

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        """Return the divisor of these samples' loss, so that the losses of a global batch sum to
        its mean."""
        return batch.global_tokens


class OutputLoss(Objective):
    """The mean loss that a user's function computes from the model's output and the batch.

    Every call raises SpecError if the result is no loss.
    """

    given = ("output", "batch")

    def __init__(self, function: UserFunction) -> None:
        super().__init__()
        self.function = function
        self._call: Any = resolve_target(function, *self.given)

    def compute_loss(self, output: Any, samples: SampleBatch) -> Tensor:
        loss = self._call(output, samples.contiguous, **self.function.arguments)
        return _require_loss(loss, self.function)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.run(model, samples)

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        return output

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        return batch.global_samples / samples.rows


class ModelLoss(OutputLoss):
    """The mean loss that a user's function computes with the model and the batch."""

    given = ("model", "batch")

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run the user's function, and return the loss.

        Raises:
            SpecError: The function does not call the model, so that no hook of its wrapper runs.
        """
        calls = ModelCalls(model)
        with calls.watch():
            loss = self.compute_loss(model, samples)
        if not calls.num_calls:
            raise input_error(
                self.function.target_key,
                f"{self.function.target} does not call the model",
                f"Call `model(…)` in it: {AROUND_CALLS}",
            )
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.compute_loss(model, samples)


def objective_of(spec: Spec) -> Objective:
    """Return the objective that a spec minimizes.

    Raises:
        SpecError: The user's function has other parameters.
    """
    loss = spec.loss
    if loss.step is not None:
        return ModelLoss(loss.step)
    if loss.function is not None:
        return OutputLoss(loss.function)
    return Objective(spec.vocab_padding)


def _require_loss(loss: object, function: UserFunction) -> Tensor:
    """Return the loss if it is a 0-d floating-point tensor with a gradient.

    Raises:
        SpecError: It is not.
    """
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise input_error(
            function.target_key, f"{function.target} returned {describe_value(loss)}", _LOSS
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        finding = f"{function.target} returned a loss that depends on no trainable "
        raise input_error(
            function.target_key, f"{finding}parameter", "Compute it from the output of the model."
        )
    return loss


Make = Callable[[Tensor], Tensor]  # returns the logits of hidden states
# Returns the loss of logits and targets, summed over tokens, given the number of padding logits.
LossOf = Callable[[Tensor, Tensor, int], Tensor]


class LossInHead:
    """A change of a model's head, which returns the summed loss instead of logits while targets
    are set."""

    def __init__(self, step: LossStep, loss: LossOf = token_loss_sum) -> None:
        self.step, self.loss = step, loss
        self.targets: Tensor | None = None
        self._program: LossProgram | None = None

    def provide_targets(self, targets_BT: Tensor) -> AbstractContextManager[None]:
        """Temporarily make the model return the summed loss (0-d) of these targets. IGNORED targets
        have no loss."""
        return replace_attributes(self, targets=targets_BT)

    def attach(self, model: nn.Module, head: str) -> None:
        """Change a model, or the stage of it that computes the logits.

        Args:
            model: The model, changed in place.
            head: The path of the module that computes the logits; unused for built-in models.
        """
        module = _find_head(model, head)
        if isinstance(self.step, CompiledLoss):
            assert isinstance(model, Transformer), "other models are not compiled"
            make: Make = model.logits if module is None else module.forward
            self._program = compile_loss(make, self.step.padding)
        if module is None:
            assert isinstance(model, Transformer), "other models have a head"
            plain = model.logits
            model.__dict__["logits"] = lambda x_BTC: self._logits_or_loss(model.embed, plain, x_BTC)
        else:
            module.__class__ = _with_loss(type(module), self)

    @staticmethod
    def detach(model: nn.Module, head: str) -> None:
        """Undo `attach`."""
        if (module := _find_head(model, head)) is None:
            del model.__dict__["logits"]
        else:
            module.__class__ = type(module).__base__

    def _logits_or_loss(self, owner: nn.Module, make: Make, x_BTC: Tensor) -> Tensor:
        """Return the logits of hidden states, or their summed loss while targets are set."""
        if self.targets is None:
            return make(x_BTC)
        assert x_BTC.shape[:-1] == self.targets.shape, "the head receives all tokens"
        if isinstance(self.step, CompiledLoss):
            if self._program is not None and torch.is_grad_enabled():
                return self._program(x_BTC, self.targets)
            # An evaluation saves nothing, so it needs no second program.
            return self.loss(make(x_BTC), self.targets, self.step.padding)
        targets_N = self.targets.flatten()
        if self.step.fused:
            return _fused_loss(x_BTC.flatten(0, 1), targets_N, owner, self.step.tokens)
        # Once for all chunks: each DTensor input would reduce its gradient separately.
        x_BTC, whole = _to_plain_tensor(x_BTC)
        chunks = zip(
            x_BTC.flatten(0, 1).split(self.step.tokens),
            targets_N.split(self.step.tokens),
            strict=True,
        )
        return sum_of(
            self._recomputed_loss(lambda x: make(whole(x)), x, targets) for x, targets in chunks
        )

    def _recomputed_loss(self, make: Make, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        """Return the loss of a chunk, and recompute its logits in backward. The chunk is passed as
        one sample, because a head may expect [batch, tokens, features]."""

        def loss(x_NC: Tensor, targets_N: Tensor) -> Tensor:
            logits_1NV = make(x_NC.unsqueeze(0))
            return self.loss(logits_1NV, targets_N.unsqueeze(0), self.step.padding)

        if not torch.is_grad_enabled():
            return loss(x_NC, targets_N)
        # Without the random state, which a head does not use and which would be copied for each
        # chunk.
        chunk_loss: Tensor = checkpoint(
            loss, x_NC, targets_N, use_reentrant=False, preserve_rng_state=False
        )
        return chunk_loss


def sum_of(losses: Iterator[Tensor]) -> Tensor:
    """Add losses one after the other, so that no chunk's loss is kept until the last one."""
    total = next(losses)
    for loss in losses:
        total = total + loss
    return total


def can_fuse() -> bool:
    """Return True if torch has `linear_cross_entropy` with a configurable chunk size."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def _fused_loss(x_NC: Tensor, targets_N: Tensor, owner: nn.Module, tokens: int) -> Tensor:
    """Return the loss by torch's fused operator, summed here over tokens, because the operator's
    sum is rounded to the compute dtype."""
    weight, bias = owner.get_parameter("weight"), getattr(owner, "bias", None)
    losses_N = F.linear_cross_entropy(
        x_NC,
        weight,
        targets_N,
        linear_bias=bias,
        reduction="none",
        ignore_index=IGNORED,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=tokens, chunking_method=None),
    )
    return widen(losses_N).sum()


def _find_head(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that computes the logits; None for a built-in model with a tied head."""
    return model.head if isinstance(model, Transformer) else model.get_submodule(name)


def _with_loss(kind: Any, inside: LossInHead) -> type:
    """Return a subclass of the head's class, so that its hooks run once around all chunks."""

    class Head(kind):
        def forward(self, x_BTC: Tensor) -> Tensor:
            return inside._logits_or_loss(self, super().forward, x_BTC)

    # Code that finds modules by class name still finds the head.
    Head.__name__ = Head.__qualname__ = kind.__name__
    return Head


def _to_plain_tensor(x_BTC: Tensor) -> tuple[Tensor, Make]:
    """Return replicated hidden states as a plain tensor, and a function that makes a chunk of them
    a DTensor again.

    Their gradients are partial sums, which are reduced once for all chunks.
    """
    if not isinstance(x_BTC, DTensor):
        return x_BTC, lambda x: x
    mesh = x_BTC.device_mesh
    return x_BTC.to_local(grad_placements=[Partial()]), lambda x: _ReplicatedTensor.apply(x, mesh)


class _ReplicatedTensor(torch.autograd.Function):
    """A replicated DTensor of a plain tensor, whose gradient stays a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert isinstance(gradient, DTensor)
        assert gradient.placements == (Partial(),), "the head is sharded"
        return gradient.to_local(), None


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device.

    A copy to CUDA starts from pinned memory and is asynchronous in stream order; a copy from
    pageable memory would block the host until the device is idle. torch's caching host allocator
    keeps the pinned memory until the copy ends.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and detect_fake_mode() is None:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
