"""Timelines of full models, from the tables alone."""

from __future__ import annotations

from ptrain.derivation import layers
from ptrain.derivation.layers import Representatives, Turns, Units
from ptrain.derivation.tables import Place, Setting
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.timeline import Timeline


def model_timeline(
    setting: Setting, played: Representatives | None = None, kept: tuple[ActivationMode, ...] = ()
) -> Timeline:
    """Return the timeline of one micro-batch of a full model.

    Args:
        setting: The setting of the tables.
        played: The simulated units. By default one unit for each block, and the root.
        kept: How each block keeps its activations. By default as autograd does.
    """
    numbers = tuple(str(block) for block in range(setting.shape.layers))
    units: Units = (*((f"blocks.{number}",) for number in numbers), ("",))
    turns: Turns = tuple((block, 1) for block in range(len(numbers)))
    if played is not None:
        units, turns = played.modules, played.turns
    kept = kept or (PLAIN,) * len(numbers)
    return layers._setting_passes(setting, Place.ALONE, numbers, kept, units, turns).timeline
