"""The part of a spec that a trace of its model depends on."""

from __future__ import annotations

import math
from dataclasses import replace

from ptrain.spec.cluster import Cluster
from ptrain.spec.job import DataSpec, TrainSpec
from ptrain.spec.keys import FrozenSpec
from ptrain.spec.model import ModelSpec
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, TOKEN_AXES, Axis, Factor, R
from ptrain.spec.spec import Spec, ranks_over


def traced_part(spec: Spec) -> Spec:
    """Return a spec with only the settings that a trace depends on.

    Specs that differ in other settings have equal parts, so they share a cached trace.
    """
    cutting = tuple(
        _traced_factor(factor) for factor in spec.factors if factor.axis not in DATA_AXES
    )
    # The number of micro-batches matters only to a pipeline's schedule.
    times = spec.batch.accumulate if spec.degree(Axis.PP) > 1 else 1
    # Expert parallelism exchanges tokens of several ranks: the trace covers their samples.
    samples = times * spec.batch.micro * ranks_over(spec, EXPERT_AXES)
    batch = replace(spec.batch, global_samples=samples, accumulate=times)
    return Spec(
        name="part",
        model=replace(spec.model, pretrained=None)
        if isinstance(spec.model, ModelSpec)
        else spec.model,
        factors=cutting,
        batch=batch,
        precision=spec.precision,
        frozen=FrozenSpec(dtype=spec.frozen.dtype),  # quantized weights have other shapes
        train=replace(TrainSpec(), seed=spec.train.seed),
        unit=spec.unit_size,
        tensor=spec.tensor,
        pipeline=spec.pipeline,
        context=spec.context,
        overlap_shared_experts=spec.overlap_shared_experts,
        activations=spec.activations,
        loss=spec.loss,
        compile=spec.compile,
        data=spec.data if spec.data.function else DataSpec(),
        device="cuda" if spec.is_for_cuda else "cpu",
        cluster=_minimal_cluster(spec.cluster, math.prod(factor.degree for factor in cutting))
        if spec.is_for_cuda and spec.cluster
        else None,
    )


def _traced_factor(factor: Factor) -> Factor:
    """Return a factor without the placements that a trace does not depend on.

    On an axis that shards tokens or experts, states are placed as on a data axis.
    """
    if factor.axis not in (*TOKEN_AXES, *EXPERT_AXES):
        return factor
    placement = replace(factor.placement, parameters=R, optimizer=R, gradients=R)
    return factor._replace(placement=placement)


def _minimal_cluster(cluster: Cluster, ranks: int) -> Cluster:
    """Return a cluster with this number of ranks and the devices' compute capability only.

    Other figures are placeholders, since a trace does not depend on them.
    """
    return Cluster(
        devices=ranks,
        devices_per_node=ranks,
        device_memory=1,
        intra_node_bandwidth=1.0,
        inter_node_bandwidth=1.0,
        kind="cuda",
        sm=cluster.sm,
    )
