"""Whether a checkpoint is of the training that is to continue from it. Torch-free.

Another model is refused. Another learning rate or optimizer, text, seed or batch may be meant, and
each key that differs is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ptrain.errors import Fault
from ptrain.spec.spec import Spec

_REMEDY = "give the model that was trained, or train anew without --resume"
# Names and places: the model is the same without, and a checkpoint has its weights.
_WHEREABOUTS = ("preset", "folder", "pretrained")
_WATCHED = {"optimizer": (), "data": (), "train": ("seed",), "batch": ("global", "sequence")}


def trained(spec: Spec) -> dict[str, object]:
    """Return what a manifest keeps of a spec, as JSON reads it back."""
    plain = json.loads(json.dumps(spec.resolved, default=str))
    model = {key: value for key, value in plain["model"].items() if key not in _WHEREABOUTS}
    watched = {
        section: {key: plain[section][key] for key in keys or plain[section]}
        for section, keys in _WATCHED.items()
    }
    return {"model": model, **watched}


def other_model(was: Mapping[str, object], spec: Spec) -> Fault | None:
    """Return how the model section differs from the one that was saved; None for an older
    manifest."""
    before, now = was.get("model"), trained(spec)["model"]
    if not isinstance(before, dict) or _text(before) == _text(now):
        return None
    assert isinstance(now, dict)
    names = [name for name in {**before, **now} if _text(before.get(name)) != _text(now.get(name))]
    saved = ", ".join(f"{name}: {before.get(name)}" for name in names)
    current = ", ".join(f"{name}: {now.get(name)}" for name in names)
    return Fault(
        place="model",
        finding=f"the checkpoint is of another model: {saved}; this spec has {current}",
        remedy=_REMEDY,
    )


def warnings(was: Mapping[str, object], spec: Spec) -> Iterator[str]:
    """One line for each key that is not as it was, and may be meant. What a manifest of an older
    format did not keep is not compared."""
    before, now = dict(leaves(was)), dict(leaves(trained(spec)))
    for place in {**before, **now}:
        section = place.partition(".")[0]
        is_kept = place in before or isinstance(was.get(section), dict)
        if section in _WATCHED and is_kept and before.get(place) != now.get(place):
            yield f"{place}: {_said(before, place)} in the checkpoint, {_said(now, place)} now"


def is_other_optimizer(was: Mapping[str, object], spec: Spec) -> bool:
    return dict(leaves(was)).get("optimizer.name", spec.optimizer.name) != spec.optimizer.name


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each value under its dotted key."""
    for key, value in tree.items():
        place = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{place}.")
        else:
            yield place, value


def _said(values: Mapping[str, object], place: str) -> str:
    return _text(values[place]) if place in values else "nothing"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
