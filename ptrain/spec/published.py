"""The config.json of a published model as the keys of a built-in one, and back."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from ptrain.spec.config_fields import (
    Config,
    FieldFault,
    find_refused,
    find_unbuilt,
    list_ignored,
)
from ptrain.spec.published_kinds import ANOTHER, FIELDS, KINDS, WHOLE, Keys, PublishedKind

# A field that another one stands for in files of other versions.
_ALIASES = {"num_experts": "num_local_experts"}
_IMPLIED = {**_ALIASES, "use_sliding_window": "sliding_window"}  # fields that another one covers


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """The keys of the built-in model that a config describes, all faults of the config, and the
    fields that have no effect."""

    keys: Keys
    faults: tuple[FieldFault, ...]
    ignored: tuple[str, ...] = ()


def read_config(config: Config, written: Container[str] = ()) -> PublishedModel:
    """Read a published config as a built-in model.

    Args:
        config: the fields of a config.json.
        written: the keys of the section `model` that the spec sets itself.

    Returns:
        The keys of the spec's section `model`, which are not validated, with all faults.
    """
    faults = [*find_refused(config)]
    kind = KINDS.get(name := str(config.get("model_type")))
    if kind is None:
        finding = f"model_type {name!r} is not read as a built-in model"
        remedy = f"Built-in kinds: {', '.join(KINDS)}. For another causal language model of "
        remedy += "transformers add `model.hf`, its class."
        return PublishedModel(keys={}, faults=(*faults, FieldFault("", finding, remedy)))
    known = {*kind.sizes, *kind.demands, *FIELDS.get(kind.read, ()), "layer_types"}
    known |= {other for name, other in _IMPLIED.items() if name in known}
    ignored = list_ignored(config, known, written)
    faults += find_unbuilt(config, known)
    config = {**kind.usual, **_with_aliases(kind, config)}
    faults += _unmet(kind, config)
    keys = {**kind.keys, **{key: config.get(name) for name, key in kind.sizes.items()}}
    if keys["tied"] is None:
        keys["tied"] = kind.usual["tie_word_embeddings"]
    try:
        keys |= kind.read(config, faults)
        faults += _wrong_layers(config, keys)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        finding = f"a field is missing or no number: {error}"
        faults.append(FieldFault("", finding, WHOLE))
    keys = {key: value for key, value in keys.items() if not _is_void(key, value, keys)}
    return PublishedModel(keys=keys, faults=tuple(faults), ignored=ignored)


def _unmet(kind: PublishedKind, config: Config) -> Iterator[FieldFault]:
    """Yield the sizes that are missing, and the fields whose values are not built in."""
    needed = {"layers", "hidden", "heads", "vocab"}
    if kind.keys.get("family") != "gpt":  # which has a width of its own inside the feed-forward
        needed.add("ffn")
    for name, key in kind.sizes.items():
        if key in needed and config.get(name) is None:
            yield FieldFault(name, f"{name} is missing", WHOLE)
    for name, allowed in kind.demands.items():
        value = config.get(name, allowed[0])
        is_off = value is None and not allowed[0]  # null is how some files write false
        if value not in allowed and not is_off:
            finding = f"{name} is {value!r}, and built here is {allowed[0]!r}"
            yield FieldFault(name, finding, ANOTHER)


def config_of(name: str, keys: Keys) -> Keys:
    """Return the config of a model with these keys, said in full, as one of the kind `name`. Which
    keys it cannot say shows when it is read again."""
    kind = KINDS[name]
    config = {
        "architectures": [kind.architecture],
        "model_type": name,
        **{field: allowed[0] for field, allowed in kind.demands.items()},
        **{field: keys[key] for field, key in kind.sizes.items()},
        **kind.write(keys),
    }
    return config | {other: config[field] for field, other in _ALIASES.items() if field in config}


def _with_aliases(kind: PublishedKind, config: Config) -> Config:
    more = {
        name: config[other]
        for name, other in _ALIASES.items()
        if name in kind.sizes and name not in config and other in config
    }
    return {**config, **more}


def _wrong_layers(config: Config, keys: Keys) -> Iterator[FieldFault]:
    """Yield the first layer whose window is not by turns, as `global_every` has them."""
    has_windows, every = keys.get("window") is not None, keys.get("global_every")
    for layer, kind in enumerate(config.get("layer_types") or ()):
        is_global = not has_windows or (every and (layer + 1) % every == 0)
        if kind != (own := "full_attention" if is_global else "sliding_attention"):
            finding = f"layer_types: layer {layer} is {kind!r}, and built here is {own!r}"
            yield FieldFault("layer_types", finding, ANOTHER)
            return


def _is_void(key: str, value: object, keys: Keys) -> bool:
    """Return True if a key has the value that stands for it without the key."""
    sizes = keys["hidden"], keys["heads"]
    if value is None or not all(isinstance(size, int) and size > 0 for size in sizes):
        return value is None
    width = sizes[0] / sizes[1]
    if key == "attention_scale":
        own = keys.get("head_dim")
        features: float = own if isinstance(own, int) and own > 0 else width
        return bool(value == features**-0.5)
    return key == "head_dim" and value == width
