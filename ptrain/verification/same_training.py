"""What two specs must have in common to be one training on two meshes. Torch-free: wrong input is
refused before a rank starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ptrain.errors import refused
from ptrain.spec.spec import Spec


def common(spec: Spec) -> dict[str, str]:
    """Return what another spec must have in common with this one, as text, by key of the spec."""
    shape = {"model": spec.model, "optimizer": spec.optimizer, "data": spec.data}
    batch = {"batch.global": spec.batch.global_samples, "batch.sequence": spec.batch.window}
    rest = {"train.seed": spec.train.seed}
    return {key: str(value) for key, value in (shape | batch | rest).items()}


def is_within(route: Sequence[str], keys: Iterable[str]) -> bool:
    """Return whether a key of a spec, part by part, is one of `keys` or stands below one."""
    return any(".".join(route[: key.count(".") + 1]) == key for key in keys)


def require_alike(one: Mapping[str, str], other: Mapping[str, str], place: str) -> None:
    """Raises SpecError for two specs that are not the same training."""
    for key, value in one.items():
        if other[key] != value:
            raise refused(
                place,
                f"{key} is {other[key][:120]} there, and {value[:120]} here",
                "Use a spec that differs only in mesh and placement.",
            )
