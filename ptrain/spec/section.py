"""A section of a spec: the keys that it holds, declared as the annotated fields of a class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, dataclass_transform

from ptrain.spec.leaf import Kind, Leaf, declared


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(kind: type[Kind]) -> type[Kind]:
    """A section of a spec whose values are at once those that a file says and those that ptrain
    reads: each field is declared here alone."""
    return dataclass(frozen=True, kw_only=True)(kind)


@declared
class Section:
    """A nested mapping of the grammar; `also` is what may stand for it in a file. What
    `is_partial` may lack what the section needs, which a preset gives; of what `is_sparse` only
    what is not the default is written."""

    kind: type = field(kw_only=False)
    about: str = field(kw_only=False)
    also: tuple[dict[str, Any], ...] = ()
    null: bool = False
    key: str = ""
    is_partial: bool = False
    is_sparse: bool = False


@cache
def keys(kind: type) -> Mapping[str, tuple[Field[Any], Leaf | Section]]:
    """The keys of a section as they are written, each with its field and what it holds: the
    annotations of a section are evaluated, not texts. A field without one is no key."""
    declared_as: Mapping[str, Any] = {spot.name: spot.type for spot in fields(kind)}
    holds = {
        spot: declared_as[spot.name].__metadata__[0]
        for spot in fields(kind)
        if hasattr(declared_as[spot.name], "__metadata__")
    }
    return {leaf.key or spot.name: (spot, leaf) for spot, leaf in holds.items()}


@cache
def is_required(spot: Field[Any]) -> bool:
    """Return whether there is no section without this field."""
    return spot.default is MISSING and spot.default_factory is MISSING
