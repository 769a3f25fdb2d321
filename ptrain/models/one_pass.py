"""Run one sample through a model to inspect its forward pass, or several samples to see whether its
code depends on their values. The first samples are all equal; the others differ from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.dataset import MapDataset, dataset_of
from ptrain.models.objective import SampleBatch, in_dtype_of, objective_of, of_tokens, sample_batch
from ptrain.models.watch import watching
from ptrain.spec.spec import Spec


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
            yield partial(objective_of(self._spec.loss).run, self._module, self.samples)
        finally:
            for name, buffer in self._module.named_buffers():
                buffer.copy_(copies[name])
