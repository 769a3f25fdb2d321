"""Spec -> a plain mapping -> YAML that loads to an equal Spec: what ran can be rerun from it."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import yaml

from ptrain.costs import PLACED
from ptrain.spec.axis import Axis
from ptrain.spec.batch import Reshard
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec
from ptrain.spec.orders import ListedSchedule
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import CUSTOM, LAYOUTS, Precision
from ptrain.spec.spec import WHOLE_BUCKET, Offload, Spec, TensorSpec
from ptrain.spec.write_keep import UNWRITTEN, kept


def to_mapping(spec: Spec, *, sync_is_written: bool) -> dict[str, object]:
    """Every key with its value, but what follows and would hinder another mesh or placement
    (`accumulate`, the number of stages, and when gradients are reduced unless that is written), and
    dials that are left to the wrapper."""
    return {
        "name": spec.name,
        "model": _model(spec.model),
        "mesh": {factor.axis.value: factor.degree for factor in spec.factors},
        "placement": {
            factor.axis.value: {str(state): str(factor.placement[state]) for state in PLACED}
            for factor in spec.factors
        },
        "precision": _precision(spec.precision),
        "batch": {
            "global": spec.batch.global_samples,
            "micro": spec.batch.micro,
            "sequence": spec.batch.sequence,
        },
        "optimizer": _optimizer(spec),
        "data": {key: value for key, value in asdict(spec.data).items() if value is not None},
        "train": asdict(spec.train),
        **({"cluster": _cluster(spec)} if spec.cluster else {}),
        "sync": {
            **({"gradients": spec.sync.gradients.value} if sync_is_written else {}),
            "reshard_after_forward": _given_back(spec.sync.reshard_after_forward),
            "reshard_after_backward": spec.sync.reshard_after_backward,
        },
        "reduce_scatter": spec.reduce_scatter.value,
        "bucket": {1: "per-tensor", WHOLE_BUCKET: "whole"}.get(
            spec.bucket_bytes, spec.bucket_bytes
        ),
        "unit": str(spec.unit),
        **({"overlap": spec.overlap.value} if spec.overlap else {}),
        **({"prefetch": spec.prefetch} if spec.prefetch is not None else {}),
        "gather_after_update": spec.gather_after_update.value,
        **({"offload": _offload(spec.offload)} if _says_offload(spec) else {}),
        **({"tensor": _tensor(spec.tensor)} if _says_tensor(spec) else {}),
        **({"pipeline": _pipeline(spec.pipeline)} if _says_pipeline(spec) else {}),
        **kept(spec),
        "eval": asdict(spec.eval),
        "checkpoint": asdict(spec.checkpoint),
        "timeout": asdict(spec.timeout),
        "profile": list(spec.profile),
        "log": {"every": spec.log_every},
        "consistency_every": spec.consistency_every,
        "deterministic": spec.deterministic,
        "device": spec.device,
        "backend": spec.backend,
    }


def _given_back(after_forward: bool | int | Reshard) -> bool | int | str:
    return after_forward.value if isinstance(after_forward, Reshard) else after_forward


def _precision(precision: Precision) -> dict[str, object]:
    """A layout without a name as all its dtypes, over one that has its structure."""
    layout = precision.layout
    compute = {"compute": "fp64"} if precision.compute_fp64 else {}
    if layout.name != CUSTOM:
        return {"layout": layout.name, **compute}
    base = next(known for known in LAYOUTS.values() if known.keeps_both is layout.keeps_both)
    return {
        "layout": base.name,
        "parameters": layout.parameters.value,
        "reduced": layout.reduced.value,
        "gradients": layout.gradients.value,
        "master": layout.master.value if layout.master else "none",
        "moments": layout.moments.value,
        **compute,
    }


def _says_offload(spec: Spec) -> bool:
    """Whether something is written, or optimizer state is updated where it may not be computed."""
    return spec.offload != Offload() or any(
        factor.placement.optimizer.tier is not Tier.DEVICE for factor in spec.factors
    )


def _offload(offload: Offload) -> dict[str, object]:
    path = {"path": offload.path} if offload.path is not None else {}
    return {**path, "update": offload.update.value}


def _model(model: ModelSpec) -> dict[str, object]:
    match model:
        case ModelShape():
            shape = asdict(model)
            preset = shape.pop("preset")
            del shape["attention"]  # written on top, for an hf class too
            named = {"preset": preset} if preset else {}
            return {**named, **shape, "family": model.family.value}
        case ExternalModel():
            named = {"target": model.target, "folder": model.folder}
            return {**named, "arguments": model.arguments, **_blocks(model)}
        case HuggingFaceModel():
            return {"hf": model.hf, "config": model.config, **_blocks(model)}


def _blocks(model: ExternalModel | HuggingFaceModel) -> dict[str, object]:
    return {"blocks": model.blocks} if model.blocks is not None else {}


def unwritten() -> dict[str, object]:
    """What a section means that `to_mapping` leaves out where nothing else is said."""
    return {
        "offload": _offload(Offload()),
        "tensor": _tensor(TensorSpec()),
        "pipeline": _pipeline(PipelineSpec()),
        **UNWRITTEN,
    }


def _says_tensor(spec: Spec) -> bool:
    return spec.degree(Axis.TP) > 1 or spec.tensor != TensorSpec()


def _tensor(tensor: TensorSpec) -> dict[str, object]:
    return {"plan": _tensor_plan(tensor), "loss_parallel": tensor.loss_parallel}


def _tensor_plan(tensor: TensorSpec) -> object:
    if tensor.roles:
        return {pattern: role.value for pattern, role in tensor.roles}
    return "naive" if tensor.is_naive else "paired"


def _says_pipeline(spec: Spec) -> bool:
    return spec.degree(Axis.PP) > 1 or spec.pipeline != PipelineSpec()


def _pipeline(pipeline: PipelineSpec) -> dict[str, object]:
    """Without a number of stages that follows: it would hinder another mesh."""
    stages = {"stages": pipeline.stages} if pipeline.stages is not None else {}
    split = pipeline.split
    named = list(split) if isinstance(split, tuple) else split.value
    said = pipeline.schedule
    schedule = said.lines() if isinstance(said, ListedSchedule) else said.value
    return {"schedule": schedule, **stages, "split": named}


def _optimizer(spec: Spec) -> dict[str, object]:
    values = asdict(spec.optimizer)
    schedule = {key: values.pop(key) for key in ("warmup", "decay_steps", "min_lr_ratio")}
    return {**values, "betas": list(values["betas"]), "schedule": schedule}


def _cluster(spec: Spec) -> dict[str, object]:
    values = asdict(spec.cluster) if spec.cluster else {}
    for key in ("intra_node_bandwidth", "inter_node_bandwidth"):
        values[key] = round(values[key])
    return {key: value for key, value in values.items() if value is not None}


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or YAML 1.2 would read as something other than a text."""

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
    """Sections in the order of the mapping; short ones on a line of their own."""
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
