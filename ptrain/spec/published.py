"""Conversion between a published model's config.json and the keys of a built-in model.

`specs/published.yaml` has a row for each built-in kind of model. It also lists the fields without
effect, the fields that a key of the spec sets, and those that add a computation which the built-in
models do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ptrain.spec.names import load_table

Config = Mapping[str, Any]
_REFUSED = {
    "auto_map": (
        "it refers to code that comes with the weights, which ptrain never runs",
        "Remove `auto_map` from config.json if Transformers has this class; "
        "otherwise use another model.",
    ),
    "quantization_config": (
        "its weights are quantized; training needs unquantized weights",
        "Use a folder with unquantized weights.",
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
    """Yield the fields that add a computation, unless they are in `known` or switched off."""
    for name, value in config.items():
        if name not in known and (added := _added_computation(name, value)):
            finding = f"{name} is {value!r}; the built-in model has no {added}"
            remedy = "Add `model.hf`, the class of the model; or remove the field from config.json "
            yield FieldFault(name, finding, f"{remedy}if it has no effect.")


def list_ignored(
    config: Config, known: Container[str] = (), written: Container[str] | None = None
) -> tuple[str, ...]:
    """Return the fields without effect, each with a reason.

    Args:
        config: The fields of a published config.json.
        known: The fields that have an effect or are checked.
        written: The keys that the spec sets for a built-in model; None for a Transformers class,
            whose fields no key of the spec sets.

    Returns:
        One phrase for each field that is not known, silent, empty or switched off.
    """
    phrases = (_ignored_phrase(name, config[name], written) for name in config if name not in known)
    return tuple(filter(None, phrases))


def _ignored_phrase(name: str, value: object, written: Container[str] | None) -> str:
    rows = load_tables()
    keys, is_off = rows["keys"], not value and (name in rows["keys"] or name in rows["unbuilt"])
    is_off = is_off or (value == 1 and name in rows["factors"])
    if is_off or value in (None, "", [], {}) or name in _silent_fields() or name.endswith(_ID):
        return ""
    if name not in keys or written is None:
        return f"{name} (ignored)"
    key = keys[name]
    return "" if key.removeprefix("model.") in written else f"{name} (set {key}={value})"


def _added_computation(name: str, value: object) -> str:
    """Return the listed computation that a field adds, or "" if it adds none."""
    if not value:
        return ""
    return (
        load_tables()["unbuilt"].get(name)
        or (value != 1 and load_tables()["factors"].get(name))
        or ""
    )


@cache
def _silent_fields() -> frozenset[str]:
    return frozenset(name for row in load_tables()["silent"] for name in row)


def load_tables() -> Mapping[str, Any]:
    """Return the tables of `specs/published.yaml`."""
    return load_table("published.yaml")


Keys = dict[str, Any]  # of the spec's section `model`
Faults = list[FieldFault]
_Read = Callable[[Config, Faults], Keys]
_Write = Callable[[Keys], Keys]

_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_PARTIAL = "partial_rotary_factor"
ANOTHER = "Use the folder of another model."
WHOLE = "Use a folder with a complete config.json."
_OF_LLAMA3 = {
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original",
}
_TURNS = "sliding_window_pattern"


@dataclass(frozen=True, kw_only=True)
class PublishedKind:
    """The models of one `model_type`.

    Attributes:
        architecture: The class in `architectures` of a written config.
        sizes: The keys by field.
        usual: The values of fields that a file may leave out.
        keys: The keys that all models of the kind have.
        demands: The allowed values of a field, of which the first is written.
        read: Converts the other `fields` to keys, and appends faults.
        write: Converts keys to those fields.
        fields: The fields that `read` and `write` convert.
    """

    architecture: str
    sizes: Mapping[str, str]
    usual: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    read: _Read
    write: _Write
    fields: tuple[str, ...]


def _read_rope(config: Config, faults: Faults) -> Keys:
    """Return the keys of rotary embeddings, from `rope_parameters` or, in older files, from
    `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 1e4), **scaling}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get(_PARTIAL, config.get(_PARTIAL)) not in (1, None):
        faults.append(
            FieldFault(
                _PARTIAL, f"{_PARTIAL}: partial rotary embeddings are not supported", ANOTHER
            )
        )
    if kind not in _SCALINGS:
        faults.append(
            FieldFault(
                "rope_type",
                f"rotary scaling {kind!r} is not supported",
                f"Supported: {', '.join(_SCALINGS)}.",
            )
        )
        return {}
    names = {"factor": "rope_factor"} if kind != "default" else {}
    names |= _OF_LLAMA3 if kind == "llama3" else {}
    if missing := [name for name in ("rope_theta", *names) if name not in rope]:
        faults.append(
            FieldFault("rope_scaling", f"the rotary scaling has no {', '.join(missing)}", WHOLE)
        )
        return {}
    keys: Keys = {"rope_base": float(rope["rope_theta"])}
    if names:
        keys["rope_scaling"] = _SCALINGS[kind]
    return keys | {
        key: float(rope[name]) if name == "factor" else rope[name] for name, key in names.items()
    }


def _write_rope(keys: Keys) -> Keys:
    """Return the rotary fields in the syntax of older files."""
    fields: Keys = {"rope_theta": keys["rope_base"], "rope_scaling": None}
    if (kind := keys["rope_scaling"]) != "none":
        words = {name: keys[key] for name, key in _OF_LLAMA3.items()} if kind == "llama3" else {}
        fields["rope_scaling"] = {"rope_type": kind, "factor": keys["rope_factor"], **words}
    return fields


def _read_window(config: Config, faults: Faults) -> Keys:
    return {**_read_rope(config, faults), "window": config.get("sliding_window")}


def _write_window(keys: Keys) -> Keys:
    return {**_write_rope(keys), "sliding_window": keys["window"]}


def _read_gemma(config: Config, faults: Faults) -> Keys:
    return {**_read_rope(config, faults), "embedding_scale": config["hidden_size"] ** 0.5}


def _read_gemma2(config: Config, faults: Faults) -> Keys:
    """Return the keys of Gemma 2, whose attention scale is a config field instead of the head
    dimension."""
    scale = config["query_pre_attn_scalar"] ** -0.5
    keys = {**_read_gemma(config, faults), "window": config.get("sliding_window")}
    return {**keys, "attention_scale": scale}


def _write_gemma2(keys: Keys) -> Keys:
    scale = keys["attention_scale"] or keys["head_dim"] ** -0.5
    return {
        **_write_window(keys),
        "query_pre_attn_scalar": round(scale**-2),
    }  # files have an integer


def _read_gemma3(config: Config, faults: Faults) -> Keys:
    """Return the keys of a model that alternates sliding-window and full-attention layers.

    Windowed layers have a separate rotary base. Newer files store it in `rope_parameters` by kind
    of layer, older ones in `rope_local_base_freq`.
    """
    by_layer = config.get("rope_parameters") or {}
    older = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    local = _read_rope({"rope_parameters": by_layer.get("sliding_attention", older)}, faults)
    if local.keys() > {"rope_base"}:
        faults.append(
            FieldFault(
                "rope_parameters",
                "rotary scaling of sliding-window layers is not supported",
                ANOTHER,
            )
        )
    whole = {**config, "rope_parameters": by_layer.get("full_attention")}
    every = config.get(_TURNS, config.get(f"_{_TURNS}", 6))
    own = {"window_rope_base": local.get("rope_base"), "global_every": every}
    return {**_read_gemma2(whole, faults), **own}


def _write_gemma3(keys: Keys) -> Keys:
    own = {"rope_local_base_freq": keys["window_rope_base"], _TURNS: keys["global_every"]}
    return {**_write_gemma2(keys), **own}


# By `reads` of a kind: the conversion of fields to keys, its inverse, and the fields concerned.
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", _PARTIAL)
_WINDOW = (*_ROPE, "sliding_window")
_GEMMA2 = (*_WINDOW, "query_pre_attn_scalar")
_GEMMA3 = (*_GEMMA2, "rope_local_base_freq", _TURNS, f"_{_TURNS}")
_READERS: Mapping[str, dict[str, Any]] = {
    "": {"read": lambda _, __: {}, "write": lambda _: {}, "fields": ()},
    "rope": {"read": _read_rope, "write": _write_rope, "fields": _ROPE},
    "windows": {"read": _read_window, "write": _write_window, "fields": _WINDOW},
    "gemma": {"read": _read_gemma, "write": _write_rope, "fields": _ROPE},
    "gemma2": {"read": _read_gemma2, "write": _write_gemma2, "fields": _GEMMA2},
    "gemma3": {"read": _read_gemma3, "write": _write_gemma3, "fields": _GEMMA3},
}


@cache
def load_kinds() -> Mapping[str, PublishedKind]:
    """Return the built-in kinds of `specs/published.yaml`, by `model_type`."""
    return {
        name: PublishedKind(
            **{key: value for key, value in row.items() if key != "reads"},
            **_READERS[row.get("reads", "")],
        )
        for name, row in load_tables()["kinds"].items()
    }


# Fields by their names in files of other Transformers versions.
_ALIASES = {"num_experts": "num_local_experts"}
_IMPLIED = {**_ALIASES, "use_sliding_window": "sliding_window"}  # fields that another one covers


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """The keys of the built-in model that a config describes, with the config's faults and the
    fields without effect."""

    keys: Keys
    faults: tuple[FieldFault, ...]
    ignored: tuple[str, ...] = ()


def read_config(config: Config, written: Container[str] = ()) -> PublishedModel:
    """Read a published config as a built-in model.

    Args:
        config: The fields of a config.json.
        written: The keys of the section `model` that the spec sets.

    Returns:
        The keys of the section `model`, not validated, with all faults.
    """
    faults = [*find_refused(config)]
    if (kind := load_kinds().get(name := str(config.get("model_type")))) is None:
        finding = f"model_type {name!r} is not a built-in model"
        remedy = f"Built-in kinds: {', '.join(load_kinds())}. For another causal language model of "
        remedy += "Transformers, add `model.hf`, its class."
        return PublishedModel(keys={}, faults=(*faults, FieldFault("", finding, remedy)))
    known = {*kind.sizes, *kind.demands, *kind.fields, "layer_types"}
    # A field that another one implies is known with it: otherwise it would be reported as ignored.
    known |= {other for name, other in _IMPLIED.items() if name in known}
    ignored = list_ignored(config, known, written)
    faults += find_unbuilt(config, known)
    config = {**kind.usual, **_with_aliases(kind, config)}
    faults += _check_required(kind, config)
    keys = {**kind.keys, **{key: config.get(name) for name, key in kind.sizes.items()}}
    if keys["tied"] is None:
        keys["tied"] = kind.usual["tie_word_embeddings"]
    try:
        keys |= kind.read(config, faults)
        faults += _wrong_layers(config, keys)
        keys = {key: value for key, value in keys.items() if not _is_void(key, value, keys)}
    # A published config is foreign input: any field may be missing or have another type.
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        faults.append(FieldFault("", f"a field is missing or has the wrong type: {error}", WHOLE))
    return PublishedModel(keys=keys, faults=tuple(faults), ignored=ignored)


def _check_required(kind: PublishedKind, config: Config) -> Iterator[FieldFault]:
    """Yield the required sizes that are missing, and the fields with unsupported values."""
    needed = {"layers", "hidden", "heads", "vocab"}
    if kind.keys.get("family") != "gpt":  # its feed-forward width defaults to 4 x hidden
        needed.add("ffn")
    for name, key in kind.sizes.items():
        if key in needed and config.get(name) is None:
            yield FieldFault(name, f"{name} is missing", WHOLE)
    for name, allowed in kind.demands.items():
        value = config.get(name, allowed[0])
        is_off = value is None and not allowed[0]  # null is how some files write false
        if value not in allowed and not is_off:
            yield FieldFault(
                name, f"{name} is {value!r}; the built-in model supports {allowed[0]!r}", ANOTHER
            )


def config_of(name: str, keys: Keys) -> Keys:
    """Return the complete config of a model with these keys, as kind `name`.

    Keys that the kind cannot represent are lost; reading the config again shows which ones.
    """
    kind = load_kinds()[name]
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
    """Yield the first layer whose attention differs from the pattern that `global_every`
    describes."""
    has_windows, every = keys.get("window") is not None, keys.get("global_every")
    for layer, kind in enumerate(config.get("layer_types") or ()):
        is_global = not has_windows or (every and (layer + 1) % every == 0)
        if kind != (own := "full_attention" if is_global else "sliding_attention"):
            yield FieldFault(
                "layer_types",
                f"layer_types: layer {layer} is {kind!r}; the built-in model supports {own!r}",
                ANOTHER,
            )
            return


def _is_void(key: str, value: object, keys: Keys) -> bool:
    """Return True if a key has the value that also applies without it."""
    sizes = keys["hidden"], keys["heads"]
    if value is None or not all(isinstance(size, int) and size > 0 for size in sizes):
        return value is None
    width = sizes[0] / sizes[1]
    if key == "attention_scale":
        own = keys.get("head_dim")
        features: float = own if isinstance(own, int) and own > 0 else width
        return bool(value == features**-0.5)
    return key == "head_dim" and value == width
