"""Resolution of the sections that need no mesh, and of the batch.

Resolution of a cluster's rates: those of a preset, and the tables that override it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ptrain.errors import Fault, SpecError
from ptrain.spec.block import UNSAID, BlockOptions
from ptrain.spec.check import validate
from ptrain.spec.cluster import Cluster
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.misfits import misfits, voids
from ptrain.spec.model import (
    BESIDE,
    FAMILIES,
    Attention,
    ExternalModel,
    Family,
    HuggingFaceModel,
    ModelRaw,
    ModelShape,
    ModelSpec,
)
from ptrain.spec.names import file_of_preset, listing, missing, unusable
from ptrain.spec.precision import FP32, LAYOUTS, DType, Precision, PrecisionRaw, custom
from ptrain.spec.rates import Rates, misshapen
from ptrain.spec.text import Tree, read

if TYPE_CHECKING:
    from ptrain.spec.published import FieldFault

_FOLDER, _PLACE = "rates", "cluster.rates"

Add = Callable[[str, str, str], None]  # place, finding, remedy


def resolve_rates(written: Mapping[str, Any] | None, folder: Path, add: Add) -> Rates | None:
    """Return the preset's tables with those that are written beside it on top; a file is looked for
    in `folder` first. Tables of specs/rates that nothing overrides stay by their name, which
    `tables` reads."""
    if written is None:
        return None
    name = written.get("preset")
    if name is None:
        return _sound(written, add)
    path = listing(_FOLDER).get(name)
    if path is not None and written.keys() == {"preset"}:
        return Rates(preset=name)
    if path is None and Path(name).suffix in (".yaml", ".yml"):
        path = file_of_preset(name, folder)
    if path is None:
        add(f"{_PLACE}.preset", *missing(name, "table of rates", _FOLDER))
        return None
    try:
        values = _rate_values(path)
    except SpecError as error:
        add(f"{_PLACE}.preset", *unusable(error))
        return None
    if "preset" in values:
        add(
            f"{_PLACE}.preset",
            f"{path.name} refers to another preset",
            "Put the tables into the file.",
        )
        return None
    return _sound({**values, **written, "preset": None}, add)


def _sound(values: Mapping[str, Any], add: Add) -> Rates | None:
    """The tables, if each row has a figure for each number of ranks at once."""
    faults = tuple(misshapen(values))
    for key, finding, remedy in faults:
        add(f"{_PLACE}.{key}", finding, remedy)
    return None if faults else Rates(**values)


def _rate_values(path: Path) -> Mapping[str, Any]:
    """The fields of a file. Raises SpecError with all its faults."""
    tree = read(path)
    values, faults = validate(tree, Rates, is_partial=True)
    if faults or tree.faults:
        raise SpecError(*tree.faults.values(), *faults.values())
    fields: Mapping[str, Any] = values
    return fields


def tables(rates: Rates) -> Rates:
    """The rates themselves, where they are those of specs/rates by name."""
    return rates if rates.preset is None else _named(rates.preset)


@cache
def _named(name: str) -> Rates:
    values = _rate_values(listing(_FOLDER)[name])
    assert not tuple(misshapen(values)), f"specs/rates/{name}.yaml: rows lack figures"
    return Rates(**values)


CONFIG = "config.json"  # as a published model's folder has it
_PRETRAINED = "model.pretrained"
_ROPE, _OLD_ROPE = "rope_parameters", ("rope_theta", "rope_scaling")
ARCHITECTURES = "architectures"  # the classes that a published config is of


class Report(Protocol):
    """Where faults go, and the folder that relative files stand in. `home` is the folder of the
    user's own spec file; None of a spec that is no such file."""

    @property
    def folder(self) -> Path: ...

    @property
    def home(self) -> Path | None: ...

    def add(self, place: str, finding: str, remedy: str = "", *, part: str = "") -> None: ...


def _preset(name: str | None, kind: type, section: str, report: Report) -> Mapping[str, Any] | None:
    """The values that a preset's file says; None where it says none that can be used."""
    if name is None:
        return {}
    folder = f"{section}s"
    path = listing(folder).get(name)
    read_values: Callable[[Path, type], Mapping[str, Any]] = _values_of_own if path else _values
    if path is None and Path(name).suffix in (".yaml", ".yml"):
        path = file_of_preset(name, report.folder)
    if path is None:
        report.add(f"{section}.preset", *missing(name, section, folder))
        return None
    try:
        values = read_values(path, kind)
    except SpecError as error:
        report.add(f"{section}.preset", *unusable(error))
        return None
    if "preset" in values:
        report.add(
            f"{section}.preset",
            f"{path.name} refers to another preset",
            "Put the fields into the file.",
        )
        return None
    named: Mapping[str, Any] = {"name": path.stem, **values} if section == "cluster" else values
    return named


def _values(path: Path, kind: type) -> Mapping[str, Any]:
    """Return the values of a file. Raises SpecError with all its faults."""
    tree = read(path)
    values, faults = validate(tree, kind, is_partial=True)
    if faults or tree.faults:
        raise SpecError(*tree.faults.values(), *faults.values())
    said: Mapping[str, Any] = values
    return said


_values_of_own = cache(_values)  # of presets in `specs/`, which are as the process finds them first


def resolve_model(raw: ModelRaw, attention: Attention | None, report: Report) -> ModelSpec | None:
    if raw.target is not None:
        for key in _written(raw, besides=("target", "arguments", "blocks", "folder", "pretrained")):
            report.add(
                f"model.{key}",
                f"{key} belongs to built-in models, but `target` builds the model",
                "Put it into `model.arguments`, or remove it.",
            )
        if attention not in (None, Attention.SDPA):
            report.add(
                "attention",
                f"{attention} has no effect: the function of `model.target` decides its attention",
                "Remove `attention`, or put it into `model.arguments`.",
            )
        return ExternalModel(
            target=raw.target,
            arguments=raw.arguments or {},
            blocks=raw.blocks,
            folder=_folder(raw.folder, report.home),
            pretrained=raw.pretrained,
        )
    if raw.folder != BESIDE:
        report.add(
            "model.folder", "folder requires `target`", "Add `model.target`, or remove this key."
        )
    if raw.hf is not None or isinstance(raw.config, str) or _names_class(raw.config):
        for key in _written(raw, besides=("hf", "config", "blocks", "folder", "pretrained")):
            report.add(
                f"model.{key}",
                f"{key} belongs to built-in models, but `hf` names a Transformers class",
                "Put the class's config fields into `model.config`, or remove it.",
            )
        return _hugging_face_model(raw, attention, report)
    if raw.config is not None:
        report.add("model.config", "config requires `hf`", "Add `model.hf`, or remove this key.")
    if raw.arguments is not None:
        report.add(
            "model.arguments",
            "arguments require `target`",
            "Add `model.target`, or remove this key.",
        )
    if raw.blocks is not None:
        report.add(
            "model.blocks",
            "`blocks` has no effect for built-in models",
            "Remove `model.blocks`, or set `model.target` or `model.hf`.",
        )
    if raw.pretrained is not None:
        return _begun(raw, raw.pretrained, attention, report)
    preset = _preset(raw.preset, ModelRaw, "model", report)
    if preset is None:
        return None
    shape = _shape(preset, said := _said(raw), report)
    if shape is None:
        return None
    name = raw.preset or ""
    if name and len(said) > 1 and (_lacking(preset) or _composed(preset) != shape):
        name = ""  # another shape by now
    return replace(shape, attention=attention or Attention.SDPA, preset=name)


def _begun(
    raw: ModelRaw, folder: str, attention: Attention | None, report: Report
) -> ModelShape | None:
    """The model of a published folder, which stands for a preset."""
    from ptrain.spec.published import WHOLE, read_config

    path = Path(folder) / CONFIG
    config = _published(path, report)
    if config is None:
        return None
    model = read_config(config, _said(raw))
    values, faults = validate(Tree(root=model.keys, source=str(path)), ModelRaw, is_partial=True)
    _add_faults(path, model.faults, report)
    for fault in faults.values():
        report.add(
            _PRETRAINED,
            f"{path}: {fault.place}: {fault.finding}",
            fault.remedy or WHOLE,
            part=fault.place,
        )
    shape = None if faults or model.faults else _shape(values, _said(raw), report)
    if shape is None:
        return None
    chosen = attention or Attention.SDPA
    return replace(shape, attention=chosen, pretrained=folder, ignored=model.ignored)


def _published(path: Path, report: Report) -> Mapping[str, Any] | None:
    """Return the fields of a published model's config; None, with a fault, if it has none."""
    config = _json(path)
    if isinstance(config, str):
        remedy = "Use a folder that Transformers can load. If a checkpoint has all weights, "
        report.add(_PRETRAINED, f"{path}: {config}", f"{remedy}use `model.pretrained=null`.")
        return None
    return config


def _add_faults(path: Path, faults: Iterable[FieldFault], report: Report) -> None:
    for fault in faults:
        report.add(_PRETRAINED, f"{path}: {fault.finding}", fault.remedy, part=fault.field)


def shape_of(keys: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of keys of the section `model` that lack nothing; None where there is none
    such."""
    values, faults = validate(Tree(root=dict(keys), source=""), ModelRaw, is_partial=True)
    return None if faults or _lacking(values) else _composed(values)


def _names_class(config: object) -> bool:
    """Whether a config says by itself of which class it is."""
    return isinstance(config, dict) and bool(config.get(ARCHITECTURES))


def _hugging_face_model(
    raw: ModelRaw, attention: Attention | None, report: Report
) -> HuggingFaceModel | None:
    """None, with a fault, where the config cannot be read or nobody says of which class it is."""
    from ptrain.spec.published import find_refused

    config = raw.config if isinstance(raw.config, dict) else {}
    if isinstance(raw.config, str):
        read_config = _json(report.folder / raw.config)
        if not isinstance(read_config, dict):
            report.add(
                "model.config",
                f"{raw.config}: {read_config}",
                "Use the name of a config.json file, or a mapping with its fields.",
            )
            return None
        config = read_config
    if raw.pretrained is not None:
        path = Path(raw.pretrained) / CONFIG
        published = _published(path, report)
        if published is None:
            return None
        _add_faults(path, find_refused(published), report)
        for name in _OLD_ROPE if _ROPE in published and _ROPE not in config else ():
            if name in config and config[name] != published.get(name):
                report.add(
                    f"model.config.{name}",
                    f"the config of the folder sets this in {_ROPE}",
                    f"Set all fields of {_ROPE}.",
                )
        config = {**published, **config}
    classes = config.get(ARCHITECTURES)
    hf = raw.hf or (str(classes[0]) if isinstance(classes, list) and classes else None)
    if hf is None:
        report.add(
            "model.config",
            f"the config has no {ARCHITECTURES}, so its class is unknown",
            "Set `model.hf` to the class, for example `model.hf=LlamaForCausalLM`.",
        )
        return None
    return HuggingFaceModel(
        hf=hf,
        config=config,
        blocks=raw.blocks,
        attention=attention,
        pretrained=raw.pretrained,
    )


def _json(path: Path) -> dict[str, object] | str:
    """What a file says, or why it says nothing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or "cannot be read"
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON: {error}"
    return value if isinstance(value, dict) else "does not contain a mapping"


def _folder(written: str | None, home: Path | None) -> str | None:
    """Absolute, without links; a relative one stands in the spec's own."""
    if written is None or (written == BESIDE and home is None):
        return None
    return os.path.realpath((home or Path()) / written)


def _written(raw: ModelRaw, besides: tuple[str, ...]) -> list[str]:
    return [name for name in _said(raw) if name not in besides]


def _said(raw: ModelRaw) -> dict[str, Any]:
    """Return what a file says, by field: None where it says that there is none."""
    values = {spot.name: (getattr(raw, spot.name), spot.default) for spot in fields(raw)}
    return {
        name: value
        for name, (value, default) in values.items()
        if value is not UNSAID and value != default
    }


def _shape(
    preset: Mapping[str, Any], beside: Mapping[str, Any], report: Report
) -> ModelShape | None:
    """What is written beside a preset overrides it, and so takes from it what it makes void."""
    said = {**preset, **beside}
    if lacking := _lacking(said):
        finding = f"the model is incomplete: missing {', '.join(lacking)}"
        presets = ", ".join(listing("models"))
        report.add("model", finding, f"Add them, or use a preset: {presets}.")
        return None
    shape = _composed(said)
    changed = {*beside, *(FAMILIES[shape.family] if "family" in beside else ())}
    while gone := {void.name for void in voids(shape) if void.by in changed} - {*beside}:
        said = {name: value for name, value in said.items() if name not in gone}
        shape, changed = _composed(said), changed | gone
    faults = tuple(misfits(shape))
    for fault in faults:
        report.add(*_blamed(fault, shape, said))
    return None if faults else shape


def _blamed(fault: Fault, shape: ModelShape, said: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return place, finding and remedy of a misfit: of an option that nobody has written, and that
    the family gives, it is the family's."""
    option = fault.place.rpartition(".")[2]
    if option in said or option not in FAMILIES[shape.family] or "family" not in said:
        return fault.place, fault.finding, fault.remedy
    given = (
        f"the family {shape.family} sets {option}: {FAMILIES[shape.family][option]}; "
        f"{fault.finding}"
    )
    return "model.family", given, f"{fault.remedy} Or use another `model.family`."


def _lacking(said: Mapping[str, Any]) -> list[str]:
    """Return the keys without which there is no shape."""
    activation = said.get("activation", FAMILIES[_family(said)]["activation"])
    needed = ["layers", "hidden", "heads", "vocab"] + ["ffn"] * activation.is_gated
    return [key for key in needed if key not in said]


def _composed(said: Mapping[str, Any]) -> ModelShape:
    """Return the shape of fields that lack nothing."""
    family = _family(said)
    options = {spot.name: said[spot.name] for spot in fields(BlockOptions) if spot.name in said}
    return ModelShape(
        family=family,
        layers=said["layers"],
        hidden=said["hidden"],
        heads=said["heads"],
        kv_heads=said.get("kv_heads", said["heads"]),
        ffn=said.get("ffn", 4 * said["hidden"]),
        vocab=said["vocab"],
        **{"tied": FAMILIES[family]["tied"], **options},
    )


def _family(said: Mapping[str, Any]) -> Family:
    return Family(said.get("family", Family.LLAMA))


def resolve_precision(raw: PrecisionRaw) -> Precision:
    """The named layout, with the dtypes that are written beside it."""

    def dtype(text: str | None) -> DType | None:
        return DType(text) if text and text != "none" else None

    layout = custom(
        LAYOUTS[raw.layout or FP32.name],
        parameters=dtype(raw.parameters),
        gradients=dtype(raw.gradients),
        reduced=dtype(raw.reduced),
        master=dtype(raw.master),
        has_master=raw.master != "none",
        moments=dtype(raw.moments),
    )
    return Precision(layout=layout, compute_fp64=raw.compute is not None)


def resolve_optimizer(optimizer: OptimizerSpec, tree: Tree) -> OptimizerSpec:
    """Return it with the values of its row in place of the keys that are not written."""
    keys = optimizer.row.keys
    unsaid = {key: keys[key] for key in keys if not tree.has("optimizer", key)}
    return replace(optimizer, **unsaid)


def resolve_cluster(written: Mapping[str, Any] | None, report: Report) -> Cluster | None:
    """The preset's fields, with those that are written beside it on top."""
    if written is None:
        return None
    preset = _preset(written.get("preset"), Cluster, "cluster", report)
    if preset is None:
        return None
    if written.get("kind") == "cpu":  # processors in the preset's place
        preset = {name: value for name, value in preset.items() if name != "sm"}
    values = {**preset, **written, "preset": None}
    values["rates"] = resolve_rates(values.get("rates"), report.folder, report.add)
    needed = ("devices", "device_memory", "intra_node_bandwidth")
    missing_keys = [key for key in needed if key not in values]
    if missing_keys:
        finding = f"the cluster is incomplete: missing {', '.join(missing_keys)}"
        presets = ", ".join(listing("clusters"))
        report.add("cluster", finding, f"Add them, or use a preset: {presets}.")
        return None
    cluster = Cluster(**values)
    return replace(
        cluster,
        devices_per_node=cluster.devices_per_node or cluster.devices,
        inter_node_bandwidth=cluster.inter_node_bandwidth or cluster.intra_node_bandwidth,
    )
