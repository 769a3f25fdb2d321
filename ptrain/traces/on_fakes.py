"""Models on fake tensors: those whose weights are too many for real ones are built and traced so.

What a trace reads is sizes, births and deaths, and fake tensors have these as real ones do: of the
same module the two traces are equal (tests/unit/test_on_fakes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ptrain.internals.fakes import FakeTensorMode
from ptrain.interpreter.materialize import build_module
from ptrain.models.boundary import CodeRaised
from ptrain.models.fake_values import READ
from ptrain.rooms.fake import fake_tensors, new_fakes
from ptrain.rooms.patches import patched
from ptrain.spec.spec import Spec
from ptrain.version import TESTED_TORCH, is_tested

X = TypeVar("X")
REAL_BYTES = 2 * 2**30  # of weights: more than a laptop copies within seconds
# A trace on fake tensors takes one to five seconds, whatever the sizes. Real tensors take as long
# with 8 million parameters in fp32, or 1e11 operations at some 50 GFLOP/s of two cores.
QUICK_BYTES, QUICK_OPERATIONS = 32 * 2**20, 10**11


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A spec's model on the fake tensors of a mode."""

    spec: Spec
    module: nn.Module
    mode: FakeTensorMode

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(weight.numel() for weight in self.module.parameters())

    @property
    def may_be_real(self) -> bool:
        """Whether its weights are few enough for a trace on real tensors."""
        return self.parameters * self._itemsize <= REAL_BYTES

    @property
    def is_quick(self) -> bool:
        """Whether a trace on real tensors takes no longer than one on fakes: by the weights, and
        by two operations forward and four backward of each weight and position of a micro-batch."""
        batch, count = self.spec.batch, self.parameters
        operations = 6 * count * batch.micro * batch.sequence
        return count * self._itemsize <= QUICK_BYTES and operations <= QUICK_OPERATIONS

    def is_better_real(self, *, runs_fakes: bool = True) -> bool:
        """Return True if a trace on real tensors is quick, or the only one that there can be.
        `runs_fakes`: whether the model may run on fake tensors in this process."""
        return self.may_be_real and (self.is_quick or not runs_fakes or bool(why_untraced()))

    @property
    def _itemsize(self) -> int:
        return self.spec.precision.effective.parameters.itemsize

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it the module runs as it would on real tensors. Raises PtrainError for a torch of
        which `why_untraced` says something."""
        with patched(self.spec.model), fake_tensors(self.mode):
            yield


def fake_model(spec: Spec, *, allow_import: bool = False) -> FakeModel | None:
    """Return the spec's model on fake tensors; None where its constructor reads values, which a
    fake lacks."""
    mode = new_fakes()
    module = unless_it_takes_values(mode, partial(build_module, spec, allow_import=allow_import))
    return None if module is None else FakeModel(spec, module, mode)


def unless_it_takes_values(mode: FakeTensorMode, read: Callable[[], X]) -> X | None:
    """Return what `read` gives on the fake tensors of a mode; None where it takes what fakes lack.
    Raises CodeRaised for what code would raise on real tensors too."""
    try:
        with fake_tensors(mode):
            return read()
    except READ:
        return None
    except CodeRaised as error:
        if error.is_certain:
            raise
        return None


def why_untraced() -> str:
    """Return why this torch traces nothing on fake tensors; nothing where it does."""
    if is_tested(torch.__version__):
        return ""
    return (
        f"it is too large to be traced on real tensors, and what fake ones replace of torch is "
        f"known of {' and '.join(TESTED_TORCH)}, not of {torch.__version__}"
    )
