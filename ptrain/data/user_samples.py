"""A dataset of the user's own as a source of samples. Its last twentieth is held out."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.data.order import sample
from ptrain.data.sampler import DatasetBatch
from ptrain.data.source import Split
from ptrain.errors import refused
from ptrain.models.batch import in_dtype_of
from ptrain.models.dataset import dataset_of
from ptrain.spec.function import UserFunction
from ptrain.spec.spec import Spec

HELD_OUT = 20  # as of a token file


class UserSamples:
    """The items of the dataset that `function` returns."""

    def __init__(self, function: UserFunction) -> None:
        self._function, self._dataset = function, dataset_of(function)
        self._num_train = self._dataset.size - self._dataset.size // HELD_OUT

    @property
    def name(self) -> str:
        return self._function.target

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the items of a split; raises SpecError where it has none."""
        is_train = split is Split.TRAIN
        size = self._num_train if is_train else self._dataset.size - self._num_train
        if size < 1:
            finding = f"{self.name} gives {self._dataset.size} samples, and the last twentieth of "
            remedy = f"write eval.every=0, or give {HELD_OUT} samples or more"
            raise refused("data.target", f"{finding}them is held out: none", remedy)
        return size

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the item at this index, as epoch · items + item."""
        return sample(index, windows=self.num_samples(sequence, split), seed=seed)

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> DatasetBatch:
        """Return the items at these places, collated."""
        first = 0 if split is Split.TRAIN else self._num_train
        samples = self._dataset.read([first + place for place in places])
        return DatasetBatch(
            samples=in_dtype_of(spec, samples),
            global_samples=spec.batch.global_samples,
            sample_ids=sample_ids,
        )

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """A sample counts as one."""
        return len(places)

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raises SpecError where the last sample cannot be read, or is not as the first."""
        self._dataset.read([self._dataset.size - 1])

    def digest(self) -> None:
        """Its code may give other samples tomorrow."""
