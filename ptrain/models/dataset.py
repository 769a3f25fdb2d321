"""A map-style dataset of the user's own: what `data: {target: …}` returns, as torch.utils.data has
it.

Its code runs with the generators of torch, numpy and Python at a seed: a sample's own index while
it is read, so that what it draws of them is the same each time, on every rank and in a resumed run.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.data import default_collate

from ptrain.errors import Fault, SpecError, refused
from ptrain.models.boundary import boundary, said
from ptrain.models.external import called
from ptrain.spec.function import UserFunction

_NEEDED = (
    "The dataset needs `__len__()` and `__getitem__(index)`, which returns a tensor, or a "
    "tuple or a dictionary of tensors, with the same shapes for every index."
)


class Readable(Protocol):
    """What the user's function returns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class MapDataset:
    """Its samples, collated. `first` is sample 0, as a batch of one."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._samples = self._opened()
        self.size = self._length()
        self._form: tuple[str, ...] = ()  # of sample 0, which is read first
        self.first = self.read([0])
        if not _equal(self.first, self.read([0])):
            raise self._refused(
                "sample 0 has different values when it is read again",
                "Compute a sample from its index only, or from the global random generators "
                "without seeding them.",
            )

    @property
    def name(self) -> str:
        return self._function.target

    def read(self, indices: Sequence[int]) -> Any:
        """Return these samples, collated: a tree of tensors with the samples in dimension 0. Raises
        SpecError for what the user's code raises, and for a sample of another form than sample
        0."""
        with _apart():
            return default_collate([self._sample(index) for index in indices])

    def digests(self) -> dict[int, str]:
        """Return one of the values of the first sample and of the last, by their indices."""
        return {index: _digest(self.read([index])) for index in (0, self.size - 1)}

    def _opened(self) -> Readable:
        with _apart(), _seeded(0):
            dataset = called(self._function)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise self._refused(
                f"{self.name} returned {type(dataset).__name__}, not a map-style dataset"
            )
        readable: Any = dataset
        return readable

    def _length(self) -> int:
        with boundary(lambda error: self._fault(f"__len__ of {self.name} raised {said(error)}")):
            size = len(self._samples)
        if size < 1:
            raise self._refused(f"{self.name} has no samples: its length is {size}")
        return size

    def _sample(self, index: int) -> Any:
        def fault(error: BaseException) -> Fault:
            return self._fault(f"sample {index} of {self.name} raised {said(error)}")

        with _seeded(index), boundary(fault):
            sample = default_collate([self._samples[index]])
        form = _form(sample)
        if not form or not all(form):
            raise self._refused(f"sample {index} of {self.name} is {_described(sample)}")
        self._form = self._form or form
        if form != self._form:
            finding = f"sample {index} of {self.name} has {_worded(form)}, but sample 0 has "
            raise self._refused(f"{finding}{_worded(self._form)}")
        return tree_map(lambda leaf: leaf[0], sample)

    def _refused(self, finding: str, remedy: str = _NEEDED) -> SpecError:
        return refused(self._function.place, finding, remedy)

    def _fault(self, finding: str) -> Fault:
        return Fault(place=self._function.place, finding=finding, remedy=_NEEDED)


def dataset_of(function: UserFunction) -> MapDataset:
    """Return what a spec's function gives, opened once in a process. Raises SpecError for one that
    gives no dataset."""
    return _opened_once(function, function.folder)


@cache
def _opened_once(function: UserFunction, _folder: str | None) -> MapDataset:
    return MapDataset(function)


@contextmanager
def _apart() -> Iterator[None]:
    """Real tensors on the processor, whatever the model is built of."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators that code draws of without seeding them, at this seed; as they were
    afterwards."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


def _digest(samples: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_iter(samples):
        digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
        digest.update(leaf.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _form(sample: Any) -> tuple[str, ...]:
    """A word for each tensor of a sample; empty for what is none."""
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape[1:])}"
        if isinstance(leaf, Tensor)
        else ""
        for leaf in tree_iter(sample)
    )


def _worded(form: Sequence[str]) -> str:
    return " and ".join(form)


def _described(sample: Any) -> str:
    kinds = [type(leaf).__name__ for leaf in tree_iter(sample) if not isinstance(leaf, Tensor)]
    return f"not made of tensors only: it contains a {kinds[0]}" if kinds else "empty"


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_iter(one), tree_iter(other), strict=True)
    return all(torch.equal(leaf.nan_to_num(), its.nan_to_num()) for leaf, its in pairs)
