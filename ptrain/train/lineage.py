"""Whether a checkpoint is of the training that is to continue from it. Torch-free.

Another model is refused. Another optimizer, text, seed or global batch may be meant, and is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ptrain.errors import Fault
from ptrain.spec.spec import Spec

_REMEDY = "give the model that was trained, or train anew without --resume"
_WHEREABOUTS = ("preset", "folder")  # a name and a place: the model is the same without
_WATCHED = {
    "optimizer.name": "optimizer",
    "data": "text",
    "train.seed": "seed",
    "batch.global": "global batch",
}


def trained(spec: Spec) -> dict[str, object]:
    """What a manifest keeps of a spec, as JSON reads it back."""
    plain = json.loads(json.dumps(spec.resolved, default=str))
    model = {key: value for key, value in plain["model"].items() if key not in _WHEREABOUTS}
    kept = {"model": model}
    return kept | {place: _at(plain, place) for place in _WATCHED}


def other_model(was: Mapping[str, object], spec: Spec) -> Fault | None:
    """How the model section differs from the one that was saved; None for an older manifest."""
    before, now = was.get("model"), trained(spec)["model"]
    if not isinstance(before, dict) or _text(before) == _text(now):
        return None
    assert isinstance(now, dict)
    names = [name for name in {**before, **now} if _text(before.get(name)) != _text(now.get(name))]
    saved = ", ".join(f"{name}: {before.get(name)}" for name in names)
    asked = ", ".join(f"{name}: {now.get(name)}" for name in names)
    return Fault(
        place="model",
        finding=f"the checkpoint is of another model: {saved}; this spec has {asked}",
        remedy=_REMEDY,
    )


def warnings(was: Mapping[str, object], spec: Spec) -> Iterator[str]:
    """One line for each thing that is not as it was, and may be meant."""
    now = trained(spec)
    for place, noun in _WATCHED.items():
        if place in was and _text(was[place]) != _text(now[place]):
            yield f"{place}: continues with another {noun}: {was[place]} before, {now[place]} now"


def is_other_optimizer(was: Mapping[str, object], spec: Spec) -> bool:
    return was.get("optimizer.name", spec.optimizer.name) != spec.optimizer.name


def _at(plain: Any, place: str) -> object:
    for key in place.split("."):
        plain = plain[key]
    return plain


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
