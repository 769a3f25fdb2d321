"""Writing of a spec as a plain mapping and as YAML that loads to an equal spec, so that a run can
be repeated from its record. Keys at their default are left out."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ptrain.cost import PLACED
from ptrain.spec.activations import NAMED_POLICIES, ActivationMode, belongs_to_rank
from ptrain.spec.batch import AUTO
from ptrain.spec.block import BlockOptions
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.keys import FrozenSpec, Offload, TensorSpec
from ptrain.spec.leaf import Leaf, Section, section_keys
from ptrain.spec.model import (
    FAMILIES,
    Attention,
    ExternalModel,
    HuggingFaceModel,
    ModelShape,
    ModelSpec,
    UserFunction,
)
from ptrain.spec.names import list_files
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.placement import (
    DATA_AXES,
    EXPERT_AXES,
    OF_EXPERTS,
    Axis,
    Distribution,
    Factor,
    Mode,
    Tier,
)
from ptrain.spec.precision import CUSTOM, LAYOUTS, Precision, PrecisionRaw
from ptrain.spec.spec import ActivationSpec, LossSpec, Spec

_NAMED = {policy: name for name, policy in NAMED_POLICIES.items()}
UNWRITTEN: dict[str, object] = {
    "activations": "R",
    "recompute": "none",
    "attention": Attention.SDPA.value,
    "loss": "cross-entropy",
}


def activation_keys(spec: Spec) -> dict[str, object]:
    """Return the keys `activations`, `recompute`, `attention`, `loss` and `step` that differ from
    the default.

    `activations` is left out if a placement tuple on the mesh sets it.
    """
    said = {
        "activations": None if _is_in_a_tuple(spec) else _activation_modes(spec.activations),
        "recompute": _recompute_value(spec.activations),
        "attention": _attention_word(spec.model),
        "loss": _loss_value(spec.loss),
        "step": _function_value(spec.loss.step),
    }
    return {
        key: value
        for key, value in said.items()
        # without the key, a Transformers class chooses its attention implementation itself
        if value is not None
        and (
            value != UNWRITTEN.get(key)
            or (key == "attention" and isinstance(spec.model, HuggingFaceModel))
        )
    }


def _attention_word(model: ModelSpec) -> str | None:
    kind = None if isinstance(model, ExternalModel) else model.attention
    return kind.value if kind else None


def _is_in_a_tuple(spec: Spec) -> bool:
    return any(
        factor.axis in DATA_AXES and belongs_to_rank(factor.placement.activations)
        for factor in spec.factors
    )


def _activation_modes(activations: ActivationSpec) -> object:
    """Return one mode, or a mapping from block range to mode."""
    if not activations.by_block:
        return _mode_text(activations.default)
    return {
        _range_text(first, last): _mode_text(kept) for first, last, kept in activations.by_block
    }


def _range_text(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first}-{'' if last is None else last}"


def _mode_text(kept: ActivationMode) -> str:
    if kept.policy is not None:
        return str(Mode(Distribution.MATERIALIZED, kept.tier))
    return "R" if kept.tier is Tier.DEVICE else str(Mode(Distribution.SHARDED, kept.tier))


def _recompute_value(activations: ActivationSpec) -> object:
    """Return a policy name, or a mapping if `every`, `budget` or a custom policy is set."""
    policy = next((kept.policy for kept in activations.modes if kept.policy), None)
    name = "none" if policy is None else _NAMED.get(policy)
    operators = [] if policy is None else [operators.value for operators in policy.keep]
    said: dict[str, object] = {"policy": name} if name else {"keep": operators}
    every = {"every": activations.every} if activations.every != 1 else {}
    if activations.budget is not None:
        return {"budget": activations.budget, **({} if activations.is_open else said), **every}
    if policy is None:
        return None
    return name if name and not every else {**said, **every}


def _loss_value(loss: LossSpec) -> object:
    if loss.function is not None:
        return _function_value(loss.function)
    return None if loss.chunk is None else {"chunk": loss.chunk, "fused": loss.fused}


def _function_value(function: UserFunction | None) -> dict[str, object] | None:
    if function is None:
        return None
    folder = {"folder": function.folder} if function.folder else {}
    return {"target": function.target, **folder, "arguments": function.arguments}


def to_mapping(spec: Spec, *, sync_is_written: bool) -> dict[str, object]:
    """Return the full spec as a mapping in file syntax.

    Values that follow from others and would not fit another mesh or placement are left out:
    `accumulate`, the number of stages, and `sync.gradients` unless `sync_is_written`. So are
    sections without effect (`offload`, `frozen`, `tensor`, `pipeline`), keys that only other
    optimizers read, and dials that the wrapper chooses.
    """
    said = section_mapping(spec)
    said["optimizer"] = _optimizer_section(spec.optimizer)
    sync = said["sync"]
    assert isinstance(sync, dict), "a section"
    if not sync_is_written:
        del sync["gradients"]
    for name, is_said in (
        ("offload", _needs_offload(spec)),
        ("frozen", spec.frozen.is_written),
        ("tensor", spec.degree(Axis.TP) > 1 or spec.tensor != TensorSpec()),
        ("pipeline", spec.degree(Axis.PP) > 1 or spec.pipeline != PipelineSpec()),
    ):
        if not is_said:
            del said[name]
    first: dict[str, object] = {
        "name": spec.name,
        "model": _model_section(spec.model),
        "mesh": {factor.axis.value: factor.degree for factor in spec.factors},
        "placement": {factor.axis.value: _tuples_value(factor) for factor in spec.factors},
        "precision": _precision_section(spec.precision),
        "batch": {
            "global": spec.batch.global_samples,
            "micro": AUTO if spec.batch.micro_is_open else spec.batch.micro,
            "sequence": spec.batch.unpadded_tokens,
            **({"pad": True} if spec.batch.allows_padding else {}),
        },
    }
    cluster = {"cluster": section_mapping(spec.cluster)} if spec.cluster else {}
    return {**first, **said, **cluster, **activation_keys(spec)}


def _optimizer_section(optimizer: OptimizerSpec) -> dict[str, object]:
    """Return the section without the keys that only other optimizers read, at their default."""
    others = [OPTIMIZERS[row.remainder] for row in optimizer.rows if row.remainder]
    read = {key for row in (*optimizer.rows, *others) for key in row.keys}
    usual = section_mapping(OptimizerSpec())
    unread = {
        (key, str(usual.get(key))) for row in OPTIMIZERS.values() for key in row.keys.keys() - read
    }
    written = section_mapping(optimizer).items()
    return {key: value for key, value in written if (key, str(value)) not in unread}


def _tuples_value(factor: Factor) -> dict[str, object]:
    """Return the modes of an axis by state; on an expert axis, the `experts` and `rest` tuples."""
    modes: dict[str, object] = {str(state): str(factor.placement[state]) for state in PLACED}
    if factor.axis not in EXPERT_AXES:
        return modes
    return {"experts": {str(state): str(OF_EXPERTS[state]) for state in PLACED}, "rest": modes}


def section_mapping(
    values: object, kind: type | None = None, *, is_sparse: bool = False
) -> dict[str, object]:
    """Return a section as a mapping that loads to an equal section.

    Keys that are not supported yet are left out, and so is None if leaving out the key means None.
    A sparse section also leaves out keys at their default. `kind` declares the keys; by default,
    the class of `values` does.
    """
    said: dict[str, object] = {}
    for key, (spot, holds) in section_keys(kind or type(values)).items():
        # Only a declaration of another class has keys without a value.
        value = getattr(values, spot.name, *([spot.default] if kind else []))
        is_unsaid = value is None and (spot.default is None or not holds.accepts_null)
        if holds.supported is None and not is_unsaid and not (is_sparse and value == spot.default):
            said[key] = _file_value(holds, value)
    return said


def _file_value(holds: Leaf | Section, value: object) -> object:
    if isinstance(holds, Leaf):
        return holds.dump(value)
    return section_mapping(value, is_sparse=holds.is_sparse)


def _precision_section(precision: Precision) -> dict[str, object]:
    """Return the precision section. A custom layout is written as all its dtypes, based on a named
    layout with the same `keeps_both`."""
    layout = precision.layout
    said = {**section_mapping(precision, PrecisionRaw, is_sparse=True), "layout": layout.name}
    if layout.name == CUSTOM:
        # `keeps_both` has no key of its own: only the named layout on which the dtypes are based
        # sets it.
        said |= {
            "layout": next(k.name for k in LAYOUTS.values() if k.keeps_both is layout.keeps_both),
            "parameters": layout.parameters.value,
            "reduced": layout.reduced.value,
            "gradients": layout.gradients.value,
            "master": layout.master.value if layout.master else "none",
            "moments": layout.moments.value,
        }
    return {**said, **({"compute": "fp64"} if precision.compute_fp64 else {})}


def _needs_offload(spec: Spec) -> bool:
    """Return True if `offload` is set, or some optimizer state is off the device and `offload`
    selects the device that updates it."""
    return spec.offload != Offload() or any(
        factor.placement.optimizer.tier is not Tier.DEVICE for factor in spec.factors
    )


def _model_section(model: ModelSpec) -> dict[str, object]:
    match model:
        case ModelShape():
            known = {"preset": model.preset} if model.preset in list_files("models") else {}
            begun = _drop_none(pretrained=model.pretrained)
            sizes = {name: getattr(model, name) for name in SIZES}
            return {
                **known,
                **begun,
                "family": model.family.value,
                **sizes,
                **_written_options(model),
            }
        case ExternalModel():
            own: dict[str, object] = {"target": model.target, "folder": model.folder}
            fields: dict[str, object] = {"arguments": model.arguments}
        case HuggingFaceModel():
            own, fields = {"hf": model.hf}, {"config": model.config}
    return {
        **own,
        **_drop_none(pretrained=model.pretrained),
        **fields,
        **_drop_none(blocks=model.blocks),
    }


def _drop_none(**values: object) -> dict[str, object]:
    """Return the values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def _written_options(model: ModelShape) -> dict[str, object]:
    """Return the block options to write: those always written, and those that differ from the
    default of the model's family."""
    said: dict[str, object] = {}
    for key, (option, holds) in section_keys(BlockOptions).items():
        value = getattr(model, option.name)
        usual = FAMILIES[model.family].get(option.name, option.default)
        if key in _ALWAYS_WRITTEN or value != usual:
            said[key] = _file_value(holds, value)
    return said


def keys_of_shape(model: ModelShape) -> dict[str, Any]:
    """Return all keys of a shape, including those that a file leaves out."""
    options = {
        key: _file_value(holds, getattr(model, option.name))
        for key, (option, holds) in section_keys(BlockOptions).items()
    }
    sizes = {name: getattr(model, name) for name in SIZES}
    return {"family": model.family.value, **options, **sizes, "head_dim": model.head_dim}


SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_ALWAYS_WRITTEN = ("tied", "dropout", "rope_base")


def omitted_sections() -> dict[str, object]:
    """Return the sections that `to_mapping` leaves out, whole or in part, with their defaults."""
    return {
        "offload": section_mapping(Offload()),
        "frozen": section_mapping(FrozenSpec()),
        "tensor": section_mapping(TensorSpec()),
        "pipeline": section_mapping(PipelineSpec()),
        "optimizer": section_mapping(OptimizerSpec()),
        **UNWRITTEN,
    }


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every string that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|0o[0-7]+$|0x[0-9a-fA-F]+$"),
    list("-+0123456789."),
)


def to_yaml(mapping: dict[str, object]) -> str:
    """Return the YAML text of a mapping: sections in its order, short ones on one line."""
    return "".join(
        yaml.dump(
            {key: value},
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=None if isinstance(value, dict | list) else False,
            width=100,
        )
        for key, value in mapping.items()
    )
