"""A forward pass of one sample through a model, to look at what happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ptrain.models.objective import objective_of, sample_batch
from ptrain.spec.spec import Spec


class OnePass:
    """One sample of the spec's data through its model: of tokens zeros. Where the spec has a step
    that calls the model, the pass is that step's."""

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self._module, self._spec = module, spec
        self.samples = sample_batch(spec, rows=1, device=next(module.parameters()).device)

    def vectors(self, block: str) -> int | None:
        """Return how many vectors of the sample a block gives; None where it gives no tensor."""
        counts: list[int] = []

        def note(_: nn.Module, __: object, output: object) -> None:
            real = (leaf for leaf in tree_iter(output) if isinstance(leaf, torch.Tensor))
            counts.extend(leaf.numel() // leaf.shape[-1] for leaf in real if leaf.dim() > 1)

        handle = self._module.get_submodule(block).register_forward_hook(note)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), self.prepared() as run:
                run()
        finally:
            handle.remove()
        return next(iter(counts), None)

    @contextmanager
    def prepared(self) -> Iterator[Callable[[], object]]:
        """Give what runs the pass and returns the model's output, or the step's loss; the model's
        buffers are left as they were."""
        copies = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        if self._spec.loss.step is None:
            call = torch.func.functional_call
            yield partial(call, self._module, copies, (self.samples.inputs,))
            return
        try:
            yield partial(objective_of(self._spec.loss).run, self._module, self.samples)
        finally:
            for name, buffer in self._module.named_buffers():
                buffer.copy_(copies[name])
