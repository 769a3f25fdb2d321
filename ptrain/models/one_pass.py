"""A forward pass of one sample through a model, to look at what happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ptrain.models.batch import sample_batch
from ptrain.models.objective import objective_of
from ptrain.spec.spec import Spec


class OnePass:
    """One sample of the spec's data through its model: of tokens zeros. Where the spec has a step
    that calls the model, the pass is that step's."""

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self._module, self._spec = module, spec
        self.samples = sample_batch(spec, rows=1, device=next(module.parameters()).device)

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
