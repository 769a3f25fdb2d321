"""Resolution of the sections that need no mesh: presets filled in, cluster rates merged with a
preset's tables, and the user's functions for data, loss and step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptrain.errors import Fault, SpecError
from ptrain.spec.activations import LossRaw
from ptrain.spec.block import UNSAID, BlockOptions
from ptrain.spec.check import validate
from ptrain.spec.cluster import Cluster, Rates, find_incomplete_tables
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.job import DataSpec, OptimizerSpec
from ptrain.spec.misfits import find_ineffective_options, find_misfits
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
    StepRaw,
    UserFunction,
)
from ptrain.spec.names import (
    explain_invalid_preset,
    explain_missing,
    file_of_preset,
    folder_of,
    home_of,
    list_files,
)
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP32, LAYOUTS, DType, Precision, PrecisionRaw, custom_layout
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import LossSpec
from ptrain.spec.text import Findings, Tree, read, require_file

if TYPE_CHECKING:
    from ptrain.spec.published import FieldFault

# By section: its place, the noun for its presets, their folder, and the noun for their contents.
_PRESETS: Mapping[type, tuple[str, str, str, str]] = {
    ModelRaw: ("model", "model", "models", "fields"),
    Cluster: ("cluster", "cluster", "clusters", "fields"),
    Rates: ("cluster.rates", "table of rates", "rates", "tables"),
}


def _load_preset(name: str | None, kind: type, report: Findings) -> Mapping[str, Any] | None:
    """Return the values of a preset's file; {} if `name` is None, None if the file cannot
    be used."""
    if name is None:
        return {}
    section, noun, folder, parts = _PRESETS[kind]
    # A built-in name takes precedence over a file. Only built-in files are cached: a user may edit
    # the others between two loads.
    path = list_files(folder).get(name)
    read_values = _read_builtin_values if path else _read_values
    if path is None and Path(name).suffix in (".yaml", ".yml"):
        path = file_of_preset(name, folder_of(report.tree))
    try:
        values = {} if path is None else read_values(path, kind)
    except SpecError as error:
        report.add(f"{section}.preset", *explain_invalid_preset(error))
        return None
    if path is None:
        report.add(f"{section}.preset", *explain_missing(name, noun, folder))
    elif "preset" in values:
        report.add(
            f"{section}.preset",
            f"{path.name} refers to another preset",
            f"Put the {parts} into the file.",
        )
    else:
        return {"name": path.stem, **values} if kind is Cluster else values
    return None


def _read_values(path: Path, kind: type) -> dict[str, Any]:
    """Return the values of a file. Raises SpecError with all its faults."""
    tree = read(path)
    values, faults = validate(tree, kind, is_partial=True)
    if faults or tree.faults:
        raise SpecError(*tree.faults.values(), *faults.values())
    return dict(values)


_read_builtin_values = cache(_read_values)  # built-in presets do not change while a process runs


def resolve_rates(written: Mapping[str, Any] | None, report: Findings) -> Rates | None:
    """Return the preset's rate tables, overridden by the tables in the spec.

    If nothing overrides a built-in preset, only its name is kept, and `tables` reads the tables
    when they are needed. Returns None without rates, or on faults.
    """
    if written is None:
        return None
    name = written.get("preset")
    # Rate tables are the largest files of a spec. Most commands never need them.
    if written.keys() == {"preset"} and name in list_files("rates"):
        return Rates(preset=name)
    if (preset := _load_preset(name, Rates, report)) is None:
        return None
    values = {**preset, **written, "preset": None}
    faults = tuple(find_incomplete_tables(values))
    for key, finding, remedy in faults:
        report.add(f"cluster.rates.{key}", finding, remedy)
    return None if faults else Rates(**values)


@cache
def _load_rates(name: str) -> Rates:
    values = _read_builtin_values(list_files("rates")[name], Rates)
    assert not tuple(find_incomplete_tables(values)), f"specs/rates/{name}.yaml: rows lack figures"
    return Rates(**values)


def expand_rates(rates: Rates) -> Rates:
    """Return the rate tables, read from specs/rates if `rates` only names a preset."""
    return rates if rates.preset is None else _load_rates(rates.preset)


CHUNK = 1024  # tokens by default: 125 MiB of fp32 logits over a vocabulary of 32000
CONFIG = "config.json"  # as a published model's folder has it
_PRETRAINED = "model.pretrained"
_ROPE, _OLD_ROPE = "rope_parameters", ("rope_theta", "rope_scaling")
ARCHITECTURES = "architectures"  # the classes that a published config is of


# Model keys that require another key: the finding and the remedy if that key is missing.
_ALONE = {
    "config": ("config requires `hf`", "Add `model.hf`, or remove this key."),
    "arguments": ("arguments require `target`", "Add `model.target`, or remove this key."),
    "blocks": (
        "`blocks` has no effect for built-in models",
        "Remove `model.blocks`, or set `model.target` or `model.hf`.",
    ),
}


def _refuse_shape(
    raw: ModelRaw, besides: tuple[str, ...], builds: str, own: str, report: Findings
) -> None:
    """Report the keys of built-in models that are set together with another way to build
    the model."""
    for key in _explicit_fields(raw):
        if key not in (*besides, "blocks", "folder", "pretrained"):
            report.add(
                f"model.{key}",
                f"{key} belongs to built-in models, but {builds}",
                f"{own}, or remove it.",
            )


def resolve_model(raw: ModelRaw, attention: Attention | None, report: Findings) -> ModelSpec | None:
    """Return the model that `target`, `hf`, `pretrained` or `preset` selects; None on faults."""
    if raw.target is not None:
        _refuse_shape(
            raw,
            ("target", "arguments"),
            "`target` builds the model",
            "Put it into `model.arguments`",
            report,
        )
        if attention not in (None, Attention.SDPA):
            finding = f"{attention} has no effect: the function of `model.target` decides its"
            report.add(
                "attention",
                f"{finding} attention",
                "Remove `attention`, or put it into `model.arguments`.",
            )
        return ExternalModel(
            target=raw.target,
            arguments=raw.arguments or {},
            blocks=raw.blocks,
            folder=resolve_folder(None if raw.folder == BESIDE else raw.folder, report)
            if raw.folder
            else None,
            pretrained=raw.pretrained,
        )
    if raw.folder != BESIDE:
        report.add(
            "model.folder", "folder requires `target`", "Add `model.target`, or remove this key."
        )
    if (
        raw.hf is not None
        or isinstance(raw.config, str)
        or (isinstance(raw.config, dict) and raw.config.get(ARCHITECTURES))
    ):
        _refuse_shape(
            raw,
            ("hf", "config"),
            "`hf` names a Transformers class",
            "Put the class's config fields into `model.config`",
            report,
        )
        return _hugging_face_model(raw, attention, report)
    for key, words in _ALONE.items():
        if getattr(raw, key) is not None:
            report.add(f"model.{key}", *words)
    if raw.pretrained is not None:
        return _published_shape(raw, raw.pretrained, attention, report)
    if (preset := _load_preset(raw.preset, ModelRaw, report)) is None:
        return None
    if (shape := _resolve_shape(preset, said := _explicit_fields(raw), report)) is None:
        return None
    name = raw.preset or ""
    if name and len(said) > 1 and (_missing_keys(preset) or _make_shape(preset) != shape):
        name = ""  # the overrides changed the shape, so it is not the preset's any more
    return replace(shape, attention=shape.attention_by(attention), preset=name)


def _published_shape(
    raw: ModelRaw, folder: str, attention: Attention | None, report: Findings
) -> ModelShape | None:
    """Return the built-in shape that matches a published model's config; None on faults."""
    from ptrain.spec.published import WHOLE, read_config

    path = Path(folder) / CONFIG
    if (config := _read_published(path, report)) is None:
        return None
    model = read_config(config, _explicit_fields(raw))
    values, faults = validate(Tree(root=model.keys, source=str(path)), ModelRaw, is_partial=True)
    _add_faults(path, model.faults, report)
    for fault in faults.values():
        report.add(
            _PRETRAINED,
            f"{path}: {fault.place}: {fault.finding}",
            fault.remedy or WHOLE,
            part=fault.place,
        )
    shape = (
        None if faults or model.faults else _resolve_shape(values, _explicit_fields(raw), report)
    )
    if shape is None:
        return None
    chosen = shape.attention_by(attention)
    return replace(shape, attention=chosen, pretrained=folder, ignored=model.ignored)


def _read_published(path: Path, report: Findings) -> Mapping[str, Any] | None:
    """Return the fields of a published model's config; None, with a fault, if it cannot be read."""
    config = _read_json(path)
    if isinstance(config, str):
        remedy = "Use a folder that Transformers can load. If a checkpoint has all weights, "
        report.add(_PRETRAINED, f"{path}: {config}", f"{remedy}use `model.pretrained=null`.")
        return None
    return config


def _add_faults(path: Path, faults: Iterable[FieldFault], report: Findings) -> None:
    for fault in faults:
        report.add(_PRETRAINED, f"{path}: {fault.finding}", fault.remedy, part=fault.field)


def shape_of(keys: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape for keys of the section `model`; None if they are invalid or incomplete."""
    values, faults = validate(Tree(root=dict(keys), source=""), ModelRaw, is_partial=True)
    return None if faults or _missing_keys(values) else _make_shape(values)


def _hugging_face_model(
    raw: ModelRaw, attention: Attention | None, report: Findings
) -> HuggingFaceModel | None:
    """Return the Transformers model; None, with a fault, if its config or its class is unknown."""
    from ptrain.spec.published import find_refused

    config = raw.config if isinstance(raw.config, dict) else {}
    if isinstance(raw.config, str):
        read_config = _read_json(folder_of(report.tree) / raw.config)
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
        if (published := _read_published(path, report)) is None:
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
        hf=hf, config=config, blocks=raw.blocks, attention=attention, pretrained=raw.pretrained
    )


def _read_json(path: Path) -> dict[str, object] | str:
    """Return the mapping in a JSON file, or the reason why it cannot be read."""
    try:
        require_file(path, 4 * 2**20)  # the config of 20,000 named classes has 1 MB
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or "cannot be read"
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON: {error}"
    return value if isinstance(value, dict) else "does not contain a mapping"


def _explicit_fields(raw: ModelRaw) -> dict[str, Any]:
    """Return the fields that the file sets to a value other than the default.

    Options of a block default to UNSAID, so null counts as a value of theirs.
    """
    values = {spot.name: (getattr(raw, spot.name), spot.default) for spot in fields(raw)}
    return {
        name: value
        for name, (value, default) in values.items()
        if value is not UNSAID and value != default
    }


def _resolve_shape(
    preset: Mapping[str, Any], beside: Mapping[str, Any], report: Findings
) -> ModelShape | None:
    """Return the shape of a preset with the keys of the spec on top; None, with faults, if they
    misfit.

    Keys of the preset that an override makes ineffective are dropped instead of reported.
    """
    said = {**preset, **beside}
    if lacking := _missing_keys(said):
        finding = f"the model is incomplete: missing {', '.join(lacking)}"
        presets = ", ".join(list_files("models"))
        report.add("model", finding, f"Add them, or use a preset: {presets}.")
        return None
    shape = _make_shape(said)
    # An override such as `positions=learned` makes the preset's rotary keys ineffective. The user
    # did not write these, so that they are dropped and not reported.
    changed = {*beside, *(FAMILIES[shape.family] if "family" in beside else ())}
    while gone := {
        void.name for void in find_ineffective_options(shape) if void.cause in changed
    } - {*beside}:
        said = {name: value for name, value in said.items() if name not in gone}
        shape, changed = _make_shape(said), changed | gone
    faults = tuple(find_misfits(shape))
    for fault in faults:
        report.add(*_attribute_fault(fault, shape, said))
    return None if faults else shape


def _attribute_fault(
    fault: Fault, shape: ModelShape, said: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return place, finding and remedy of a misfit, attributed to `model.family` if the family's
    default caused it."""
    option = fault.place.rpartition(".")[2]
    if option in said or option not in FAMILIES[shape.family] or "family" not in said:
        return fault.place, fault.finding, fault.remedy
    given = (
        f"the family {shape.family} sets {option}: {FAMILIES[shape.family][option]}; "
        f"{fault.finding}"
    )
    return "model.family", given, f"{fault.remedy} Or use another `model.family`."


def _missing_keys(said: Mapping[str, Any]) -> list[str]:
    """Return the required keys that are missing."""
    activation = said.get("activation", FAMILIES[_family_of(said)]["activation"])
    needed = ["layers", "hidden", "heads", "vocab"] + ["ffn"] * activation.is_gated
    return [key for key in needed if key not in said]


def _make_shape(said: Mapping[str, Any]) -> ModelShape:
    """Return the shape for a complete set of fields."""
    family = _family_of(said)
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


def _family_of(said: Mapping[str, Any]) -> Family:
    return Family(said.get("family", Family.LLAMA))


def resolve_precision(raw: PrecisionRaw) -> Precision:
    """Return the named layout with the dtypes that the spec overrides."""
    layout = custom_layout(
        LAYOUTS[raw.layout or FP32.name],
        parameters=raw.parameters,
        gradients=raw.gradients,
        reduced=raw.reduced,
        master=raw.master if isinstance(raw.master, DType) else None,
        has_master=raw.master is None or isinstance(raw.master, DType),
        moments=raw.moments,
    )
    names = [spot.name for spot in fields(Precision) if hasattr(raw, spot.name)]
    said: dict[str, Any] = {name: getattr(raw, name) for name in names}
    return Precision(**{**said, "layout": layout, "compute_fp64": raw.compute is not None})


def resolve_optimizer(optimizer: OptimizerSpec, tree: Tree) -> OptimizerSpec:
    """Return the section with the optimizer's defaults for the keys that are not written."""
    keys = optimizer.properties.keys
    unsaid = {key: keys[key] for key in keys if not tree.has_key("optimizer", key)}
    return replace(optimizer, **unsaid)


def resolve_cluster(written: Mapping[str, Any] | None, report: Findings) -> Cluster | None:
    """Return the preset's cluster, overridden by the fields in the spec; None on faults."""
    if written is None:
        return None
    if (preset := _load_preset(written.get("preset"), Cluster, report)) is None:
        return None
    if written.get("kind") == "cpu":  # a GPU preset's multiprocessors do not apply to CPUs
        preset = {name: value for name, value in preset.items() if name != "sm"}
    values = {**preset, **written, "preset": None}
    values["rates"] = resolve_rates(values.get("rates"), report)
    needed = ("devices", "device_memory", "intra_node_bandwidth")
    if missing_keys := [key for key in needed if key not in values]:
        finding = f"the cluster is incomplete: missing {', '.join(missing_keys)}"
        presets = ", ".join(list_files("clusters"))
        report.add("cluster", finding, f"Add them, or use a preset: {presets}.")
        return None
    cluster = Cluster(**values)
    return replace(
        cluster,
        # 0: neither the preset nor the spec sets it. The cluster is then a single node.
        devices_per_node=cluster.devices_per_node or cluster.devices,
        inter_node_bandwidth=cluster.inter_node_bandwidth or cluster.intra_node_bandwidth,
    )


def resolve_data(raw: SpecRaw, report: Findings) -> DataSpec:
    """Return the data section with one of corpus, path, sources and target; report
    contradictions."""
    data, tree = raw.data, report.tree
    given = [key for key in ("corpus", "path", "sources") if tree.has_key("data", key)]
    ignoring = [key for key in ("ignored", "loss_mask") if getattr(data, key) is not None]
    if data.target is None:
        if _lacks_target("data", data, report):
            return data
        if data.loss_mask is not None and data.path is None:
            report.add("data.loss_mask", *(_ONE_MASK if data.sources is None else _MASK_EACH))
        elif len(given) > 1:
            report.add(
                f"data.{given[1]}",
                f"both a {given[0]} and {'a ' * (given[1] == 'path')}{given[1]} are given",
                _ONE,
            )
        return replace(data, corpus=None) if data.is_of_files else data
    if given:
        report.add(
            f"data.{given[0]}",
            f"`data.target` provides the samples, so {given[0]} has no effect",
            _ONE,
        )
    elif ignoring:
        for key in ignoring:
            report.add(
                f"data.{key}",
                f"{_NO_TOKENS}; this key selects target tokens",
                f"Remove `data.{key}`.",
            )
    elif raw.batch.pad:
        report.add("batch.pad", _NO_TOKENS, "Remove `batch.pad`.")
    elif not tree.has_key("step") and not tree.has_key("loss", "target"):
        report.add("data.target", "samples that are not tokens need a custom loss", _ADD_LOSS)
    folder = resolve_folder(data.folder, report)
    return replace(data, corpus=None, arguments=data.arguments or {}, folder=folder)


_ONE = "Remove one of the two."
_NO_TOKENS = "`data.target` provides samples that are not tokens"
_ADD_LOSS = (
    "Add `loss: {target: package.module:function}`, a function of the model's output and the "
    "batch, or `step: {target: package.module:function}`."
)
_ONE_MASK = (
    "a loss mask needs a token file, and `data.path` is not set",
    "Add `data.path=FILE`, or use `data.ignored=[ID, …]`.",
)
_MASK_EACH = (
    "a loss mask belongs to one file, but `data.sources` lists several",
    "Put `loss_mask` into the entry of its source.",
)


def resolve_functions(raw: SpecRaw, report: Findings) -> LossSpec:
    """Return the user-defined loss or step, if the spec sets one; report keys that
    contradict it."""
    loss, step = raw.loss or LossRaw(), raw.step
    kinds = [key for key in ("kind", "chunk", "fused") if getattr(loss, key) is not None]
    if loss.target is None:
        _lacks_target("loss", loss, report)
    elif kinds:
        report.add(
            f"loss.{kinds[0]}",
            f"`target` computes the loss, so {kinds[0]} has no effect",
            "Remove one of the two.",
        )
    if step is None:
        return LossSpec(function=_make_function("loss", loss, report))
    if loss.target is not None or kinds:
        report.add(
            "step", "`step` computes the loss, so `loss` has no effect", "Remove one of the two."
        )
    return LossSpec(step=_make_function("step", step, report))


def _lacks_target(section: str, raw: DataSpec | LossRaw, report: Findings) -> bool:
    """Report keys that require a `target`; return True if there are any."""
    keys = [key for key in ("arguments", "folder") if getattr(raw, key) is not None]
    for key in keys:
        report.add(
            f"{section}.{key}", f"{key} requires `target`", f"Add `target`, or remove `{key}`."
        )
    return bool(keys)


def _make_function(section: str, raw: LossRaw | StepRaw, report: Findings) -> UserFunction | None:
    if raw.target is None:
        return None
    return UserFunction(
        section=section,
        target=raw.target,
        arguments=raw.arguments or {},
        folder=resolve_folder(raw.folder, report),
    )


def resolve_folder(written: str | None, report: Findings) -> str | None:
    """Return a folder as an absolute path without symlinks, relative to the spec's folder; None if
    none is written and the spec is not a user's file."""
    home = home_of(report.tree)
    if home is None and written is None:
        return None
    return os.path.realpath((home or Path()) / (written or ""))


def resolve_attention(text: str | None) -> Attention | None:
    """Return the attention implementation; None if unset, a stand-in for the rejected `flash`."""
    return Attention({"math": "eager", "flash": "sdpa"}.get(text, text)) if text else None


def resolve_loss(raw: SpecRaw, degrees: Mapping[Axis, int], report: Findings) -> LossSpec:
    """Return the built-in computation of logits and loss, if no user-defined function replaces it.

    Contradictory keys of `loss` are reported as faults.
    """
    loss = raw.loss or LossRaw()
    if loss.kind == "vocab-parallel" and degrees.get(Axis.TP, 1) == 1:
        report.add(
            "loss",
            "vocab-parallel needs at least two tp ranks",
            f"Use `loss=cross-entropy`, or {two_ranks(Axis.TP)}",
        )
    elif loss.kind == "vocab-parallel" and not raw.tensor.loss_parallel:
        report.add("loss", "vocab-parallel contradicts tensor.loss_parallel: false", _ONE)
    is_cut = loss.kind in ("chunked", "fused") or loss.chunk is not None or bool(loss.fused)
    if loss.kind == "cross-entropy" and is_cut:
        key = "chunk" if loss.chunk is not None else "fused"
        report.add(
            f"loss.{key}",
            "cross-entropy computes all logits at once",
            f"Remove `{key}`, or use `loss.kind=chunked`.",
        )
    if loss.kind == "fused" and loss.fused is False:
        report.add("loss.fused", "false contradicts kind fused", _ONE)
    if not is_cut:
        return LossSpec()
    return LossSpec(chunk=loss.chunk or CHUNK, fused=loss.kind == "fused" or bool(loss.fused))
