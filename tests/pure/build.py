"""Specs and model facts made by hand, so that the pure tests need no file and no model."""

from __future__ import annotations

from collections.abc import Mapping

from ptrain.derivation.tables import Setting
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.spec.batch import Batch
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import GradientSync, ReduceScatterVia, SyncPolicy, UnitSize
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.model import ExternalModel, Family, ModelShape, ModelSpec
from ptrain.spec.placement import SAMPLE_AXES, Axis, Factor, Mode, Placement
from ptrain.spec.precision import FP32, DType, Layout, Precision
from ptrain.spec.spec import Spec


def tuple_of(text: str) -> Placement:
    """`"S*,S,S"` or `"S*,S,S,R"` -> Placement."""
    modes = [Mode.parse(part) for part in text.split(",")]
    names = ("parameters", "optimizer", "gradients", "activations")
    return Placement(**dict(zip(names, modes, strict=False)))


BLOCK = UnitSize()
WHOLE = tuple_of("R,R,R")
ZERO_1 = tuple_of("R,S,R")
ZERO_2 = tuple_of("R,S,S")
GATHERED = tuple_of("S*,S,S")

ODD_SHAPE = ModelShape(
    family=Family.LLAMA, layers=3, hidden=42, heads=3, kv_heads=1, ffn=101, vocab=259
)

BY_HAND = ExternalModel(target="tests.models:by_hand")  # for facts from make_facts


def make_spec(
    mesh: Mapping[Axis, tuple[int, Placement]],
    *,
    accumulate: int = 1,
    layout: Layout = FP32,
    compute_fp64: bool = False,
    sync: SyncPolicy | None = None,
    clip: float | None = 1.0,
    optimizer: str = "adamw",
    momentum: float = 0.0,
    model: ModelSpec = ODD_SHAPE,
    cluster: Cluster | None = None,
    reduce_scatter: ReduceScatterVia = ReduceScatterVia.NATIVE,
    bucket_bytes: int = 25 * 2**20,
    micro: int = 2,
    sequence: int = 16,
    unit: UnitSize | None = BLOCK,
) -> Spec:
    """A resolved spec over `mesh`, outermost axis first: `{axis: (degree, placement)}`. Its models
    are small, and a bucket has room for all of one: units are blocks, so that there are some."""
    factors = tuple(
        Factor(axis=axis, degree=degree, placement=placement)
        for axis, (degree, placement) in mesh.items()
    )
    data_degree = 1
    for factor in factors:
        data_degree *= factor.degree if factor.axis in SAMPLE_AXES else 1
    whole = all(str(factor.placement.gradients) == "R" for factor in factors)
    default = SyncPolicy(gradients=GradientSync.LAST if whole else GradientSync.EVERY)
    return Spec(
        name="made-by-hand",
        model=model,
        factors=factors,
        batch=Batch(
            global_samples=micro * accumulate * data_degree,
            micro=micro,
            sequence=sequence,
            accumulate=accumulate,
        ),
        precision=Precision(layout=layout, compute_fp64=compute_fp64),
        optimizer=OptimizerSpec(name=optimizer, clip=clip, momentum=momentum),
        sync=sync or default,
        cluster=cluster,
        reduce_scatter=reduce_scatter,
        bucket_bytes=bucket_bytes,
        unit=unit,
    )


def make_facts(
    *shapes_by_unit: tuple[tuple[int, ...], ...], buffers: tuple[tuple[str, int], ...] = ()
) -> ModelFacts:
    """Units of tensors with these shapes, the last one the root; gradients arrive backwards."""
    names = [f"blocks.{index}" for index in range(len(shapes_by_unit) - 1)] + [""]
    units = tuple(
        UnitFacts(
            modules=(name,),
            tensors=tuple(
                TensorFacts(name=f"{name or 'root'}.{index}", shape=shape)
                for index, shape in enumerate(shapes)
            ),
        )
        for name, shapes in zip(names, shapes_by_unit, strict=True)
    )
    order = tuple(tensor.name for unit in reversed(units) for tensor in reversed(unit.tensors))
    return ModelFacts(units=units, buffers=buffers, gradient_order=order)


def setting(
    shape: ModelShape, compute: DType = DType.FP32, *, batch: int = 2, sequence: int = 8
) -> Setting:
    """Return the setting of a whole model on one device."""
    return Setting(shape=shape, batch=batch, sequence=sequence, compute=compute)
