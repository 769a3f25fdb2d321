"""What a model must do: take tokens and give logits. The first forward pass of a model is where its
code shows whether it does.

One sample goes through it to inspect that pass, or several to see whether its code depends on their
values: the first are all equal, the others differ from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.errors import SpecError, refused
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.boundary import boundary, kind_of, raising
from ptrain.models.external import MapDataset, dataset_of, named_in_spec, raised
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
from ptrain.models.watch import watching
from ptrain.spec.function import UserFunction
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
    """Return the logits that `model` gives of tokens. Raises SpecError where its code raises, and
    where what it gives is no logits."""
    with forward_of(model, tokens_BT, spec):
        output = model(tokens_BT)
    return require_logits(output, model, tokens_BT, spec)


def forward_of(model: nn.Module, inputs: Any, spec: Spec) -> AbstractContextManager[None]:
    """Around a forward pass of these inputs: raises SpecError in place of what the model raises."""
    place, name = named_in_spec(model, spec)
    is_of_tokens = spec.data.function is None
    given = f"given {'tokens ' * is_of_tokens}{kind_of(inputs)},"
    remedy = f"The model must define {NEEDED}." if is_of_tokens else _OTHER_INPUTS
    return raising(place, f"{type(model).__name__}.forward of {name}, {given}", remedy)


def require_logits(output: Any, model: nn.Module, tokens_BT: Tensor, spec: Spec) -> Tensor:
    """Raises SpecError for what is not the logits of these tokens."""
    if isinstance(output, Tensor) and _is_of(output, tokens_BT):
        if torch.is_grad_enabled() and not output.requires_grad:
            raise _refused(model, spec, "logits that depend on no trainable parameter")
        return output
    raise _refused(model, spec, kind_of(output), f", given tokens {kind_of(tokens_BT)},")


def require_takes_tokens(model: nn.Module, spec: Spec) -> None:
    """Raises SpecError for a forward that other inputs than tokens must be given. For a model that
    nobody runs."""
    try:
        inspect.signature(model.forward).bind(None)
    except ValueError:
        pass  # a builtin may have no signature to compare with
    except TypeError as error:
        place, name = named_in_spec(model, spec)
        raise refused(
            place,
            f"{type(model).__name__}.forward of {name}, called with tokens only: {error}",
            f"The model must define {NEEDED}.",
        ) from error


def _is_of(output: Tensor, tokens_BT: Tensor) -> bool:
    is_each = output.dim() == 3 and output.shape[:2] == tokens_BT.shape
    return is_each and output.is_floating_point()


def _refused(model: nn.Module, spec: Spec, output: str, given: str = "") -> SpecError:
    place, name = named_in_spec(model, spec)
    return refused(
        place,
        f"{type(model).__name__}.forward of {name}{given} returned {output}",
        f"The model must define {NEEDED}.{_OTHERWISE}",
    )


def outcome_of(model: nn.Module, samples: SampleBatch, spec: Spec) -> Tensor:
    """Run the model forward on samples of the spec's. Return its logits, or the loss where a
    function of the user's takes part. Raises SpecError as `logits_of` and `loss_of` do."""
    if spec.loss.user_function is None:
        return logits_of(model, samples.inputs, spec)
    return loss_of(model, samples, objective_of(spec), spec)


def forward_once(model: nn.Module, spec: Spec) -> int | None:
    """Run a micro-batch of the spec's forward. Return how many logits a token has; None where the
    loss is a function of the user's. Raises SpecError as `logits_of` and `loss_of` do."""
    samples = sample_batch(spec)
    if spec.loss.user_function is None:
        return logits_of(model, samples.inputs, spec).shape[-1]
    loss_of(model, samples, objective_of(spec), spec)
    return None


def loss_of(model: nn.Module, samples: SampleBatch, objective: Objective, spec: Spec) -> Tensor:
    """Return the loss that a function of the user's gives of a micro-batch. Raises SpecError where
    the model's code or the function raises, and where what it gives is no loss."""
    function = spec.loss.user_function
    assert function is not None, "other losses are computed from logits"
    if spec.loss.step is not None:
        return _loss_of_step(model, samples, objective, function)
    inputs = samples.inputs  # which the data may not say
    with forward_of(model, inputs, spec):
        output = model(inputs)
    with boundary(lambda error: raised(function, error, f", given {_given(output, samples)},")):
        return objective.of(output, samples)


def _given(output: object, samples: SampleBatch) -> str:
    """Return what a loss receives: `float32 [2, 1] and list (float32 [2, 16], int64 [2])`."""
    data = samples.data
    batch = "(inputs, targets)" if isinstance(data, TokenPair) else kind_of(data)
    return f"output {kind_of(output)} and batch {batch}"


def _loss_of_step(
    model: nn.Module, samples: SampleBatch, objective: Objective, function: UserFunction
) -> Tensor:
    calls = ModelCalls(model)
    with (
        _without_backward(model, function),
        boundary(lambda error: raised(function, error, f", given {kind_of(samples.data)},")),
        calls.watching(),
    ):
        loss = objective.run(model, samples)
    if names := calls.used_beside(loss):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise refused(
            function.place,
            f"{function.target} uses {names[0]}{more} outside of the model call",
            f"{_WITHIN}: {AROUND_CALLS}",
        )
    return loss


@contextmanager
def _without_backward(model: nn.Module, function: UserFunction) -> Iterator[None]:
    """Raises SpecError where a parameter has another gradient afterwards, whatever else is wrong:
    what runs backward is not the step."""
    before = [parameter.grad for parameter in model.parameters()]

    def require_none() -> None:
        for (name, parameter), grad in zip(model.named_parameters(), before, strict=True):
            if parameter.grad is not grad:
                raise refused(
                    function.place,
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
    """Return the rows of a model's smallest embedding: tokens below it are in all of them. None
    where it has none."""
    tables = (child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding))
    return min(tables, default=None)


def other_samples(module: nn.Module, spec: Spec, vocabulary: int | None) -> list[SampleBatch]:
    """Return micro-batches of the spec's shapes and dtypes: of the user's own dataset its last
    sample over and over, and some from all over it; else tokens that are drawn below `vocabulary`,
    or, where None says how many logits a token has, below the rows of the smallest embedding. Empty
    where nobody knows which tokens the model takes, and where tensors are fake. Raises SpecError
    for a sample that cannot be read."""
    if detect_fake_mode() is not None:
        return []
    rows, function = spec.batch.micro, spec.data.function
    if function is not None:
        return [in_dtype_of(spec, data) for data in _of_dataset(dataset_of(function), rows)]
    count = least_embeddings(module) if vocabulary is None else vocabulary
    if count is None or count < 2:
        return []
    generator = torch.Generator().manual_seed(0)
    return [of_tokens(torch.randint(count, (rows, spec.batch.sequence + 1), generator=generator))]


def _of_dataset(dataset: MapDataset, rows: int) -> Iterator[object]:
    last = dataset.read([dataset.size - 1])
    yield tree_map(lambda leaf: leaf.repeat_interleave(rows, dim=0), last)
    yield dataset.read([dataset.size * row // rows for row in range(rows)])


class OnePass:
    """One sample of the spec's data through its model: of tokens zeros. Where the spec has a step
    that calls the model, the pass is that step's."""

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self._module, self._spec = module, spec
        self.samples = sample_batch(spec, rows=1, device=next(module.parameters()).device)

    def vectors(self, block: str) -> int | None:
        """Return how many vectors of the sample a block gives; None where it gives no tensor."""
        counts: list[int] = []

        def note(_: str, __: nn.Module, ___: object, output: object) -> None:
            real = (leaf for leaf in tree_iter(output) if isinstance(leaf, torch.Tensor))
            counts.extend(leaf.numel() // leaf.shape[-1] for leaf in real if leaf.dim() > 1)

        watch = watching([(block, self._module.get_submodule(block))], after=note)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self.prepared() as run, watch:
            run()
        return next(iter(counts), None)

    @contextmanager
    def prepared(self) -> Iterator[Callable[[], object]]:
        """Give what runs the pass and returns the model's output, or the step's loss; the model's
        buffers are left as they were."""
        copies = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        if self._spec.loss.step is None:
            yield partial(torch.func.functional_call, self._module, copies, (self.samples.inputs,))
            return
        try:
            yield partial(objective_of(self._spec).run, self._module, self.samples)
        finally:
            for name, buffer in self._module.named_buffers():
                buffer.copy_(copies[name])
