"""Where frozen parameters are on the data axes: those of a model of yours that nothing trains."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from ptrain.spec.leaf import MODE_MEANINGS, ModeText, declared, refuse
from ptrain.spec.placement import Axis, Mode
from ptrain.spec.section import section

_NO_PLACE = ("S", "M")  # no whole values to use, and no masters to make them of
_TUPLE = (
    "frozen parameters have no optimizer state, gradients or activations, so their "
    "placement is one mode"
)


@declared
class FrozenMode(ModeText):
    """The tuple of a frozen parameter on one axis: the mode of its Θ, which is all that it has."""

    def check(self, value: Any) -> object:
        if isinstance(value, str) and "," in value:
            refuse(f"{value!r} has several modes", f"{_TUPLE}. Use `{value.partition(',')[0]}`.")
        if value == "M":
            refuse(
                "M is cast from the master copy in the optimizer state, and frozen "
                "parameters have none",
                "Use `S*`, `R` or `O`.",
            )
        return super().check(value)

    def say(self, value: object) -> object:
        return None if value is None else super().say(value)

    def takes(self) -> str:
        return "a mode of Θ: R, S* or O, or with a tier (R@host, S*@file)"

    def meant(self, value: object) -> str:
        return "Did you mean `S*`?" if value == "S" else super().meant(value)

    def words(self) -> Mapping[str, str]:
        return {mode: about for mode, about in MODE_MEANINGS.items() if mode not in _NO_PLACE}


@section
class FrozenSpec:
    """The modes of frozen parameters by axis; without one they are where all others are."""

    dp_replicate: Annotated[
        Mode | None,
        FrozenMode(
            "Mode of frozen parameters on dp_replicate. Default: as for trained parameters."
        ),
    ] = None
    dp_shard: Annotated[
        Mode | None,
        FrozenMode("Mode of frozen parameters on dp_shard. Default: as for trained parameters."),
    ] = None

    @property
    def is_written(self) -> bool:
        """Return whether there is any mode."""
        return self.dp_replicate is not None or self.dp_shard is not None

    def of(self, axis: Axis) -> Mode | None:
        """Return the mode that is written for an axis, if any is."""
        mode: Mode | None = getattr(self, axis.value, None)
        return mode

    def written(self) -> dict[Axis, Mode]:
        """Return the modes that are, by axis."""
        modes = {Axis(spot.name): getattr(self, spot.name) for spot in fields(self)}
        return {axis: mode for axis, mode in modes.items() if mode is not None}
