"""The interface that a model must have: it takes tokens and returns logits. The first forward pass
checks it.

The pass uses one sample to inspect the model, or several samples to find out if the code depends on
token values: the first samples are all equal, the others differ from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.errors import SpecError, input_error
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.boundary import convert_exceptions, describe_value, report_exceptions
from ptrain.models.external import MapDataset, dataset_of, named_in_spec, target_fault
from ptrain.models.ledger import watch_modules
from ptrain.models.objective import (
    AROUND_CALLS,
    ModelCalls,
    Objective,
    SampleBatch,
    TokenPair,
    in_dtype_of,
    objective_of,
    of_tokens,
    sample_batch,
)
from ptrain.spec.model import UserFunction
from ptrain.spec.spec import Spec

NEEDED = (
    "`forward(tokens: int64 [batch, sequence]) -> logits [batch, sequence, vocabulary]`, one "
    "floating-point tensor"
)
_OTHERWISE = " For another output, set `loss.target=package.module:function`, which receives it."
_OTHER_INPUTS = (
    "Accept the inputs of the dataset in `forward`, or set "
    "`step.target=package.module:function`, which calls the model."
)
_WITHIN = (
    "Compute it in the `forward` of the model, which may return it too (for weight decay, "
    "use `optimizer.weight_decay`)"
)


def logits_of(model: nn.Module, tokens_BT: Tensor, spec: Spec) -> Tensor:
    """Return the logits of `model` for tokens.

    Args:
        model: The model to run forward.
        tokens_BT: int64 tokens [batch, sequence].
        spec: Names the model in messages.

    Raises:
        SpecError: The model's code raises, or its output is not a tensor of logits.
    """
    with forward_of(model, tokens_BT, spec):
        output = model(tokens_BT)
    return require_logits(output, model, tokens_BT, spec)


def forward_of(model: nn.Module, inputs: Any, spec: Spec) -> AbstractContextManager[None]:
    """Temporarily turn exceptions of a forward pass with these inputs into SpecError.

    Args:
        model: The model.
        inputs: The inputs of the forward pass, for messages.
        spec: Names the model in messages.
    """
    place, name = named_in_spec(model, spec)
    is_of_tokens = spec.data.function is None
    given = f"given {'tokens ' * is_of_tokens}{describe_value(inputs)},"
    remedy = f"The model must define {NEEDED}." if is_of_tokens else _OTHER_INPUTS
    return report_exceptions(place, f"{type(model).__name__}.forward of {name}, {given}", remedy)


def require_logits(output: Any, model: nn.Module, tokens_BT: Tensor, spec: Spec) -> Tensor:
    """Return `output` if it holds the logits of these tokens; raise SpecError otherwise.

    The output must be one floating-point tensor [batch, sequence, vocabulary]. With gradients
    enabled it must also depend on a trainable parameter.

    Args:
        output: The output of a forward pass.
        model: The model, for messages.
        tokens_BT: The int64 tokens [batch, sequence] of the pass.
        spec: Names the model in messages.
    """
    if isinstance(output, Tensor) and _is_of(output, tokens_BT):
        if torch.is_grad_enabled() and not output.requires_grad:
            raise _output_error(model, spec, "logits that depend on no trainable parameter")
        return output
    raise _output_error(
        model, spec, describe_value(output), f", given tokens {describe_value(tokens_BT)},"
    )


def require_takes_tokens(model: nn.Module, spec: Spec) -> None:
    """Check the signature of a model's `forward` without running it.

    Args:
        model: The model, which may be on meta.
        spec: The spec, which names the model in the message.

    Raises:
        SpecError: `forward` cannot be called with tokens only.
    """
    try:
        inspect.signature(model.forward).bind(None)
    except ValueError:
        pass  # a builtin may have no signature to compare with
    except TypeError as error:
        place, name = named_in_spec(model, spec)
        raise input_error(
            place,
            f"{type(model).__name__}.forward of {name}, called with tokens only: {error}",
            f"The model must define {NEEDED}.",
        ) from error


def _is_of(output: Tensor, tokens_BT: Tensor) -> bool:
    """Return True for a floating-point tensor [batch, sequence, any] that matches the tokens'
    shape."""
    is_each = output.dim() == 3 and output.shape[:2] == tokens_BT.shape
    return is_each and output.is_floating_point()


def _output_error(model: nn.Module, spec: Spec, output: str, given: str = "") -> SpecError:
    """Return the error for an output that is not a tensor of logits."""
    place, name = named_in_spec(model, spec)
    return input_error(
        place,
        f"{type(model).__name__}.forward of {name}{given} returned {output}",
        f"The model must define {NEEDED}.{_OTHERWISE}",
    )


def outcome_of(model: nn.Module, samples: SampleBatch, spec: Spec) -> Tensor:
    """Run the model forward on samples of the spec, and return its logits or the user's loss.

    Args:
        model: The model to run forward.
        samples: The samples.
        spec: Names the loss, and the model in messages.

    Returns:
        The logits, or the loss (0-d) if the spec names a loss or step function.

    Raises:
        SpecError: See `logits_of` and `loss_of`.
    """
    if spec.loss.user_function is None:
        return logits_of(model, samples.inputs, spec)
    return loss_of(model, samples, objective_of(spec), spec)


def forward_once(model: nn.Module, spec: Spec) -> int | None:
    """Run one micro-batch of the spec forward.

    Returns:
        The vocabulary size of the logits, or None if the spec names a loss or step function.

    Raises:
        SpecError: See `logits_of` and `loss_of`.
    """
    samples = sample_batch(spec)
    if spec.loss.user_function is None:
        return logits_of(model, samples.inputs, spec).shape[-1]
    loss_of(model, samples, objective_of(spec), spec)
    return None


def loss_of(model: nn.Module, samples: SampleBatch, objective: Objective, spec: Spec) -> Tensor:
    """Return the loss of a micro-batch by the user's loss or step function.

    Args:
        model: The model to run forward.
        samples: The micro-batch.
        objective: Calls the user's function.
        spec: Names that function; it must have one.

    Raises:
        SpecError: The model or the function raises, the loss is invalid, or a step function runs
            backward or uses parameters outside of the model call.
    """
    function = spec.loss.user_function
    assert function is not None, "other losses are computed from logits"
    if spec.loss.step is not None:
        return _loss_of_step(model, samples, objective, function)
    inputs = samples.inputs  # raises here if the dataset has no key `inputs`
    with forward_of(model, inputs, spec):
        output = model(inputs)
    with convert_exceptions(
        lambda error: target_fault(
            function, error, f", given {_describe_arguments(output, samples)},"
        )
    ):
        return objective.compute_loss(output, samples)


def _describe_arguments(output: object, samples: SampleBatch) -> str:
    """Describe a loss function's arguments: `float32 [2, 1] and list (float32 [2, 16], int64
    [2])`."""
    data = samples.data
    batch = "(inputs, targets)" if isinstance(data, TokenPair) else describe_value(data)
    return f"output {describe_value(output)} and batch {batch}"


def _loss_of_step(
    model: nn.Module, samples: SampleBatch, objective: Objective, function: UserFunction
) -> Tensor:
    """Return the loss of a user's step function, which calls the model itself."""
    calls = ModelCalls(model)
    with (
        _without_backward(model, function),
        convert_exceptions(
            lambda error: target_fault(function, error, f", given {describe_value(samples.data)},")
        ),
        calls.watch(),
    ):
        loss = objective.run(model, samples)
    if names := calls.used_beside(loss):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise input_error(
            function.target_key,
            f"{function.target} uses {names[0]}{more} outside of the model call",
            f"{_WITHIN}: {AROUND_CALLS}",
        )
    return loss


@contextmanager
def _without_backward(model: nn.Module, function: UserFunction) -> Iterator[None]:
    """Temporarily watch gradients, and raise SpecError if any parameter's gradient was replaced.

    This fault takes precedence over others: a function that runs backward is no step function.
    """
    # Compared by identity: a backward pass replaces a missing gradient by a new tensor.
    before = [parameter.grad for parameter in model.parameters()]

    def require_none() -> None:
        for (name, parameter), grad in zip(model.named_parameters(), before, strict=True):
            if parameter.grad is not grad:
                raise input_error(
                    function.target_key,
                    f"{function.target} runs backward: {name} has a gradient afterwards",
                    "Return the loss; ptrain runs backward.",
                )

    try:
        yield
    except SpecError:
        require_none()
        raise
    require_none()


def least_embeddings(module: nn.Module) -> int | None:
    """Return the row count of the smallest embedding, or None without one.

    Every embedding of the model accepts tokens below this number.
    """
    tables = (child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding))
    return min(tables, default=None)


def other_samples(module: nn.Module, spec: Spec, vocabulary: int | None) -> list[SampleBatch]:
    """Return micro-batches of the spec's shapes and dtypes with other values than the first
    sample's.

    Args:
        module: The model, whose smallest embedding bounds the tokens if `vocabulary` is None.
        spec: Gives shapes, dtypes and the user's dataset, if any.
        vocabulary: Exclusive upper bound of random tokens.

    Returns:
        For a user's dataset two micro-batches: its last sample repeated, and samples spread over
            the dataset. Otherwise one micro-batch of random tokens. Empty under fake tensors, and
            if no bound on the tokens is known.

    Raises:
        SpecError: A sample cannot be read.
    """
    if detect_fake_mode() is not None:
        return []
    rows, function = spec.batch.micro, spec.data.function
    if function is not None:
        return [in_dtype_of(spec, data) for data in _of_dataset(dataset_of(function), rows)]
    count = least_embeddings(module) if vocabulary is None else vocabulary
    if count is None or count < 2:
        return []
    # A separate generator, so that a check does not change the numbers that the run draws.
    generator = torch.Generator().manual_seed(0)
    return [of_tokens(torch.randint(count, (rows, spec.batch.sequence + 1), generator=generator))]


def _of_dataset(dataset: MapDataset, rows: int) -> Iterator[object]:
    """Yield two micro-batches: the last sample repeated, and samples at even distances."""
    last = dataset.read([dataset.size - 1])
    yield tree_map(lambda leaf: leaf.repeat_interleave(rows, dim=0), last)
    yield dataset.read([dataset.size * row // rows for row in range(rows)])


class OnePass:
    """A forward pass of one sample of the spec through its model; token samples are zeros.

    If the spec has a step function, the function runs instead and calls the model.
    """

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self._module, self._spec = module, spec
        self.samples = sample_batch(spec, rows=1, device=next(module.parameters()).device)

    def count_vectors(self, block: str) -> int | None:
        """Return the number of vectors in a block's output for the sample; None without a
        tensor.

        Args:
            block: The dotted name of the block.

        Returns:
            The number of elements of the first output tensor with two or more dimensions, divided
            by its last size; None if the block returns no such tensor.
        """
        counts: list[int] = []

        def record_output(_: str, __: nn.Module, ___: object, output: object) -> None:
            real = (leaf for leaf in tree_iter(output) if isinstance(leaf, torch.Tensor))
            counts.extend(leaf.numel() // leaf.shape[-1] for leaf in real if leaf.dim() > 1)

        watch = watch_modules([(block, self._module.get_submodule(block))], after=record_output)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.prepare() as run, watch:
            run()
        return next(iter(counts), None)

    @contextmanager
    def prepare(self) -> Iterator[Callable[[], object]]:
        """Temporarily provide a function that runs the pass; buffers are restored afterwards.

        The function returns the model's output, or the loss of the step function.
        """
        # The pass may write into buffers, for example a running mean.
        copies = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        if self._spec.loss.step is None:
            yield partial(torch.func.functional_call, self._module, copies, (self.samples.inputs,))
            return
        try:
            yield partial(objective_of(self._spec).run, self._module, self.samples)
        finally:
            for name, buffer in self._module.named_buffers():
                buffer.copy_(copies[name])
