"""Fields of a published config.json that no key of a built-in model stands for.

`specs/published.yaml` lists them: fields without effect, fields that a key of the spec sets, and
fields that add a computation which is not built in.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from ptrain.spec.names import root
from ptrain.spec.text import read

Config = Mapping[str, Any]
_REFUSED = {
    "auto_map": (
        "it names code that comes with the weights, and it never runs",
        "Remove `auto_map` from config.json if transformers itself has this class; "
        "else name another model.",
    ),
    "quantization_config": (
        "its weights are quantized, and a training needs plain ones",
        "Name a folder of weights that are not quantized.",
    ),
}
_ID = ("_token_id", "_token_index")  # ends of names of tokens


class FieldFault(NamedTuple):
    """A field of a published config that cannot be used, with the finding and the remedy."""

    field: str
    finding: str
    remedy: str


def find_refused(config: Config) -> Iterator[FieldFault]:
    """Yield the fields that name code or quantized weights. An empty field names none."""
    for name, (finding, remedy) in _REFUSED.items():
        if config.get(name):
            yield FieldFault(name, f"{name}: {finding}", remedy)


def find_unbuilt(config: Config, known: Container[str]) -> Iterator[FieldFault]:
    """Yield the fields that add a computation, except those that are `known` or switched off."""
    for name, value in config.items():
        if name not in known and (added := _added(name, value)):
            finding = f"{name} is {value!r}, and the built-in model has no {added}"
            remedy = "Add `model.hf`, the class of the model; or remove the field from config.json "
            yield FieldFault(name, finding, f"{remedy}if it has no effect.")


def list_ignored(
    config: Config, known: Container[str] = (), written: Container[str] | None = None
) -> tuple[str, ...]:
    """Return the fields without effect, each with its reason.

    Args:
        config: fields of a published config.json.
        known: the fields that have an effect, or that are checked.
        written: the keys that the spec sets itself in a built-in model; None: a class of
            transformers, in which no key of a spec stands for a field.

    Returns:
        One phrase for each field that is neither known, silent, empty nor switched off.
    """
    phrases = (_reason(name, config[name], written) for name in config if name not in known)
    return tuple(filter(None, phrases))


def _reason(name: str, value: object, written: Container[str] | None) -> str:
    rows = table()
    keys, is_off = rows["keys"], not value and (name in rows["keys"] or name in rows["unbuilt"])
    is_off = is_off or (value == 1 and name in rows["factors"])
    if is_off or value in (None, "", [], {}) or name in _silent() or name.endswith(_ID):
        return ""
    if name not in keys or written is None:
        return f"{name} (nothing reads it)"
    key = keys[name]
    return "" if key.removeprefix("model.") in written else f"{name} (set {key}={value})"


def _added(name: str, value: object) -> str:
    """Return the listed computation that a field adds, or "" if it adds none."""
    if not value:
        return ""
    return table()["unbuilt"].get(name) or (value != 1 and table()["factors"].get(name)) or ""


@cache
def _silent() -> frozenset[str]:
    return frozenset(name for row in table()["silent"] for name in row)


@cache
def table() -> Mapping[str, Any]:
    """Return the tables of `specs/published.yaml`."""
    root_of_file = read(root() / "published.yaml").root
    assert isinstance(root_of_file, dict), "specs/published.yaml is a mapping"
    return root_of_file
