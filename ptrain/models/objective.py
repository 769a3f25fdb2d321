"""The minimised value: the loss of a micro-batch, of a model's output, or of the model.

A spec's `loss:` or `step:` returns the mean over a micro-batch's samples. Micro-batches have one
size, so the mean over them is the global batch's (Theorem 3).

Micro-batches as a model and its loss receive them, and one to inspect a model with.

The loss: a sum over tokens; divided by a global count it cannot be mis-scaled (Theorem 3).

The loss can be computed over a slice of the tokens at a time, inside the model's own forward pass,
so that all logits never exist at once. While targets are given, the head, or the method `logits(x)`
of a built-in model without one, returns the summed loss instead of logits. It runs where it always
ran, within the hooks of its module, so its weights are all-gathered. No model is edited: the head
gets another class under its old name, and an attribute of the instance hides the method.

Note: fused, a token's loss has the compute dtype (torch's operator rounds it as a head rounds its
logits); their sum is in at least fp32.

autograd's graph of a loss shows which leaves it is computed from, and in which calls of the model.
A step of the user's own must use parameters within calls of the model alone: there they are
all-gathered, and there the hooks that reduce their gradients run. Nodes of the graph are numbered
in the order in which the forward pass makes them, so a call is a span of numbers.
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

from ptrain.errors import refused
from ptrain.internals.autograd import next_number, number_of
from ptrain.internals.fakes import detect_fake_mode, unset_fake_temporarily
from ptrain.internals.part import replaced
from ptrain.models.boundary import kind_of
from ptrain.models.cross_entropy import IGNORED, token_loss_sum
from ptrain.models.external import dataset_of, resolved
from ptrain.models.numerics import TORCH_DTYPES, widen
from ptrain.models.transformer import Transformer
from ptrain.models.watch import watching
from ptrain.spec.function import UserFunction
from ptrain.spec.spec import Spec
from ptrain.steps.step import ChunkedLoss


class ModelCalls:
    """The calls of a model that return while it is watched."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begun: list[int] = []
        self._spans: list[range] = []

    @property
    def count(self) -> int:
        return len(self._spans)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, calls are noted. Nothing that the model gives is changed."""
        root = [("", self._model)]
        with watching(root, before=self._begin, after=self._end, is_first=True):
            yield

    def used_beside(self, loss: Tensor) -> list[str]:
        """Return the names of the parameters of which the loss is computed outside any call."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        beside = {
            names[id(leaf)]
            for leaf, user in uses_of_leaves(loss)
            if id(leaf) in names and not self._is_within(user)
        }
        return [name for name in names.values() if name in beside]

    def _is_within(self, node: Node | None) -> bool:
        return node is not None and any(number_of(node) in span for span in self._spans)

    def _begin(self, *_: object) -> None:
        self._begun.append(next_number())

    def _end(self, *_: object) -> None:
        self._spans.append(range(self._begun.pop(), next_number()))


def uses_of_leaves(tensor: Tensor) -> Iterator[tuple[Tensor, Node | None]]:
    """Yield the tensors that autograd would give gradients, if it began at `tensor`, with every
    node that uses one; None where the tensor is one itself."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor, None
        return
    seen, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if (variable := getattr(following, "variable", None)) is not None:
                yield variable, node
            elif following not in seen:
                seen.add(following)
                waiting.append(following)


class TokenPair(NamedTuple):
    """Tokens and those that follow them, each int64 [batch, sequence]."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A micro-batch: `data` is what a function of the user's is given. Of tokens it is a TokenPair;
    else what the dataset's samples are, collated, with the samples in dimension 0 of each
    tensor."""

    data: Any

    @property
    def inputs(self) -> Any:
        """What a model is called with. Raises SpecError where the data do not say which of them it
        is."""
        match self.data:
            case {"inputs": inputs}:
                return inputs
            case Mapping():
                keys = ", ".join(map(str, self.data))
                finding = f"a sample is a dictionary with the keys {keys}; none of them is "
                finding += "`inputs`"
                raise refused(
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
        """The next tokens, of tokens."""
        assert isinstance(self.data, TokenPair), "only token samples have targets"
        return self.data.targets

    @property
    def contiguous(self) -> Any:
        """The data that a function of the user's is called with. Inputs and targets of tokens are
        views of one window, and of several samples `Tensor.view` refuses these: they are copied."""
        data = self.data
        return TokenPair(*(x.contiguous() for x in data)) if isinstance(data, TokenPair) else data

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it."""
        return [leaf for leaf in tree_iter(self.data) if isinstance(leaf, Tensor)]

    @property
    def rows(self) -> int:
        """How many samples it has."""
        return len(self.tensors[0])

    def between(self, start: int, end: int) -> SampleBatch:
        """Return some of its samples, as views."""
        return SampleBatch(tree_map(lambda leaf: leaf[start:end], self.data))

    def of(self, rows: list[int]) -> SampleBatch:
        """Return the samples of these rows."""
        return SampleBatch(tree_map(lambda leaf: leaf[rows], self.data))

    def to(self, device: torch.device) -> SampleBatch:
        return SampleBatch(tree_map(lambda leaf: sent_to(device, leaf), self.data))


class StepBatch(Protocol):
    """One data rank's share of a step's global batch, on one device. `global_samples` and
    `global_tokens` count the samples of the whole global batch, and its targets that count: what
    the micro-batches' losses are divided by. `sample_ids` name its samples."""

    @property
    def sample_ids(self) -> tuple[int, ...]: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def global_tokens(self) -> int: ...

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it, which a step keeps."""
        ...

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield it in parts of so many samples: views, nothing is copied."""
        ...

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that the first of its tensors has with so many samples."""
        ...

    def to(self, device: torch.device) -> Self: ...


def of_tokens(tokens: Tensor, labels: Tensor | None = None) -> SampleBatch:
    """Return the samples of tokens [batch, sequence + 1], and of labels like them: views, nothing
    is copied."""
    following = tokens if labels is None else labels
    return SampleBatch(TokenPair(tokens[:, :-1], following[:, 1:]))


def sample_batch(
    spec: Spec, *, rows: int | None = None, device: torch.device | None = None
) -> SampleBatch:
    """Return a micro-batch of the spec's shapes and dtypes, of so many samples (by default as many
    as its micro-batches have): zeros of tokens, else sample 0 over and over. Where fake tensors are
    made it is one. Raises SpecError for data that cannot be read."""
    rows = spec.batch.micro if rows is None else rows
    if (first := _first(spec)) is None:
        shape = rows, spec.batch.sequence + 1
        return of_tokens(torch.zeros(shape, dtype=torch.int64, device=device))
    of_leaf = _repeated if detect_fake_mode() is None else _zeros
    return SampleBatch(tree_map(lambda leaf: of_leaf(leaf, rows, device), first.data))


def sample_bytes(spec: Spec) -> int | None:
    """Return the bytes of one sample of the user's own dataset; None of tokens."""
    first = _first(spec)
    return None if first is None else sum(leaf.nbytes for leaf in first.tensors)


def in_dtype_of(spec: Spec, data: Any) -> SampleBatch:
    """Return collated samples with their real numbers in the dtype that the spec's model computes
    in."""
    dtype = TORCH_DTYPES[spec.precision.effective.parameters]
    return SampleBatch(
        tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, data)
    )


def _first(spec: Spec) -> SampleBatch | None:
    """Sample 0 of the user's own dataset, as a batch of one; None of tokens."""
    if (function := spec.data.function) is None:
        return None
    with unset_fake_temporarily():
        return in_dtype_of(spec, dataset_of(function).first)


def _zeros(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device)


def _repeated(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return leaf.to(device).repeat_interleave(rows, dim=0)


_LOSS = "Return the mean loss of the micro-batch as a floating-point tensor with zero dimensions."

AROUND_CALLS = "parameters are all-gathered, and gradients reduced, around calls of the full model."


class Objective:
    """The loss of one micro-batch (0-d), which a global batch's `divisor` divides: the cross
    entropies of the next tokens, in nats, summed over the tokens. The last `padding` logits belong
    to no token."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run the model forward; return the loss."""
        output = model(samples.inputs)
        return self.of(output, samples)

    def of(self, output: Any, samples: SampleBatch) -> Tensor:
        """Return the loss of what the model returned."""
        return token_loss_sum(output, samples.targets, self.padding)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Run what a stage of a pipeline runs of it, with `model` to call: return what the model
        returns, or the loss where a function of the user's takes part."""
        logits: Tensor = model(samples.inputs)
        return logits

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the loss of what `forward` returned."""
        return self.of(output, samples)

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        """Return what the loss of these samples is divided by, so that a global batch's add up to
        its mean."""
        return batch.global_tokens


class OfOutput(Objective):
    """The mean loss that a function of the user's computes of the model's output and the batch.
    Raises SpecError for what is no loss, at any call."""

    given = ("output", "batch")

    def __init__(self, function: UserFunction) -> None:
        super().__init__()
        self.function = function
        self._call: Any = resolved(function, *self.given)

    def of(self, output: Any, samples: SampleBatch) -> Tensor:
        loss = self._call(output, samples.contiguous, **self.function.arguments)
        return _require_loss(loss, self.function)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.run(model, samples)

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        return output

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        return batch.global_samples / samples.rows


class OfModel(OfOutput):
    """The mean loss that a function of the user's computes with the model and the batch."""

    given = ("model", "batch")

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Raises SpecError where the function does without the model: hooks of what wraps it would
        not run."""
        calls = ModelCalls(model)
        with calls.watching():
            loss = self.of(model, samples)
        if not calls.count:
            raise refused(
                self.function.place,
                f"{self.function.target} does not call the model",
                f"Call `model(…)` in it: {AROUND_CALLS}",
            )
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.of(model, samples)


def objective_of(spec: Spec) -> Objective:
    """Return the objective that a spec minimises. Raises SpecError for a function with other
    arguments."""
    loss = spec.loss
    if loss.step is not None:
        return OfModel(loss.step)
    if loss.function is not None:
        return OfOutput(loss.function)
    return Objective(spec.vocab_padding)


def _require_loss(loss: object, function: UserFunction) -> Tensor:
    """Raises SpecError for what is no loss that can be trained on."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise refused(function.place, f"{function.target} returned {kind_of(loss)}", _LOSS)
    if torch.is_grad_enabled() and not loss.requires_grad:
        finding = f"{function.target} returned a loss that depends on no trainable "
        raise refused(
            function.place, f"{finding}parameter", "Compute it from the output of the model."
        )
    return loss


Make = Callable[[Tensor], Tensor]  # logits of hidden states
# Returns the loss of logits and targets, summed over the tokens, of which the last logits pad.
LossOf = Callable[[Tensor, Tensor, int], Tensor]


class LossInside:
    """What turns a model that returns logits into one that returns their summed loss."""

    def __init__(self, step: ChunkedLoss, loss: LossOf = token_loss_sum) -> None:
        self.step, self.loss = step, loss
        self.targets: Tensor | None = None

    def given(self, targets_BT: Tensor) -> AbstractContextManager[None]:
        """While entered, the model returns the loss of these, of which IGNORED count for nothing;
        0-d."""
        return replaced(self, targets=targets_BT)

    def attach(self, model: nn.Module, head: str) -> None:
        """To a model, or to that part of it which makes the logits; `head` names the module that
        does where the model is not built in."""
        if (module := _head(model, head)) is None:
            assert isinstance(model, Transformer), "other models have a head"
            plain = model.logits
            model.__dict__["logits"] = lambda x_BTC: self._instead(model.embed, plain, x_BTC)
        else:
            module.__class__ = _with_loss(type(module), self)

    @staticmethod
    def detach(model: nn.Module, head: str) -> None:
        """Undo `attach`."""
        if (module := _head(model, head)) is None:
            del model.__dict__["logits"]
        else:
            module.__class__ = type(module).__base__

    def _instead(self, owner: nn.Module, make: Make, x_BTC: Tensor) -> Tensor:
        if self.targets is None:
            return make(x_BTC)
        assert x_BTC.shape[:-1] == self.targets.shape, "the head receives all tokens"
        targets_N = self.targets.flatten()
        if self.step.fused:
            return _fused(x_BTC.flatten(0, 1), targets_N, owner, self.step.tokens)
        x_BTC, whole = _local(x_BTC)
        chunks = zip(
            x_BTC.flatten(0, 1).split(self.step.tokens),
            targets_N.split(self.step.tokens),
            strict=True,
        )
        return sum_of(self._again(lambda x: make(whole(x)), x, targets) for x, targets in chunks)

    def _again(self, make: Make, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        """Return the loss of a chunk, whose logits are computed once more in backward. The chunk
        goes in as one sample: a head is used to samples."""

        def loss(x_NC: Tensor, targets_N: Tensor) -> Tensor:
            logits_1NV = make(x_NC.unsqueeze(0))
            return self.loss(logits_1NV, targets_N.unsqueeze(0), self.step.padding)

        if not torch.is_grad_enabled():
            return loss(x_NC, targets_N)
        chunk_loss: Tensor = checkpoint(
            loss, x_NC, targets_N, use_reentrant=False, preserve_rng_state=False
        )
        return chunk_loss


def sum_of(losses: Iterator[Tensor]) -> Tensor:
    """One after the other: none waits for the others."""
    total = next(losses)
    for loss in losses:
        total = total + loss
    return total


def can_fuse() -> bool:
    """Return whether torch has the fused operator, with chunks whose size is said."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def _fused(x_NC: Tensor, targets_N: Tensor, owner: nn.Module, tokens: int) -> Tensor:
    """By token: of a sum torch rounds the whole to the compute dtype."""
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


def _head(model: nn.Module, name: str) -> nn.Module | None:
    """The module that makes the logits; None of a built-in model whose head is its embedding."""
    return model.head if isinstance(model, Transformer) else model.get_submodule(name)


def _with_loss(kind: Any, inside: LossInside) -> type:
    """`kind`, whose hooks run around all chunks together."""

    class Head(kind):
        def forward(self, x_BTC: Tensor) -> Tensor:
            return inside._instead(self, super().forward, x_BTC)

    Head.__name__ = Head.__qualname__ = kind.__name__
    return Head


def _local(x_BTC: Tensor) -> tuple[Tensor, Make]:
    """Hidden states that are whole on every rank of an axis, as plain tensors, and what makes them
    a DTensor again. Their gradients are the ranks' terms, summed once for all chunks."""
    if not isinstance(x_BTC, DTensor):
        return x_BTC, lambda x: x
    mesh = x_BTC.device_mesh
    return x_BTC.to_local(grad_placements=[Partial()]), lambda x: _Whole.apply(x, mesh)


class _Whole(torch.autograd.Function):
    """A DTensor of what all ranks have alike, whose gradient goes back as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert isinstance(gradient, DTensor)
        assert gradient.placements == (Partial(),), "the head is sharded"
        return gradient.to_local(), None


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device. To CUDA it travels from pinned memory, in the stream's order,
    and the host goes on: a copy from other memory waits until the device has nothing left to do.
    torch's allocator keeps the pinned memory until the copy is over."""
    if device.type == "cuda" and tensor.device.type == "cpu" and detect_fake_mode() is None:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
