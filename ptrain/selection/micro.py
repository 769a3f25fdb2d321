"""`batch.micro: auto`: the largest micro-batch whose predicted peak fits the cluster's device.

Step 4 of the notes' recipe, which raises it on a device until that runs out of memory: here it is
predicted, before anything is built and so alike on every rank, and `ptrain simulate --rehearse`
runs it on one. What a step accumulates follows (Theorem 3: the global batch stays what it is).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.algebra.legality import is_sound
from ptrain.derivation.estimate import derive
from ptrain.errors import refused
from ptrain.selection.alternatives import with_micro
from ptrain.selection.fit import Fit, fit
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_PLACE = "batch.micro"
_NUMBER = "Set `batch.micro` to a number."


def with_largest_micro(spec: Spec) -> Spec:
    """Return the spec with the largest micro-batch that fits; where none does, with the smallest
    that is legal, so that what does not fit is told like any other spec. The spec itself, whose
    faults say why, where none is legal. Raises SpecError where nobody knows what fits."""
    if spec.cluster is None:
        finding = "auto: the device memory is unknown"
        raise refused(
            _PLACE, finding, f"{_NUMBER} Or name a cluster, for example `cluster.preset=h100-8`."
        )
    if not isinstance(spec.model, ModelShape):
        finding = "not supported yet: auto for a model whose peaks need a trace"
        raise refused(_PLACE, finding, _NUMBER)
    if spec.activations.budget is not None:
        finding = (
            "not supported yet: auto together with recompute.budget, which is also "
            "chosen by the peak"
        )
        raise refused(
            _PLACE, finding, f"{_NUMBER} Or use `recompute=selective` or `recompute=full`."
        )
    smallest = spec
    for candidate in _candidates(spec):
        memory_fit = _fit(candidate)
        # offloaded states on a host of unknown memory are the same for all micro-batches
        if memory_fit.fits_device and memory_fit.fits is not False:
            return _because(candidate, f"the largest with a predicted peak that fits{_tries(spec)}")
        smallest = _because(candidate, "the smallest; none fits")
    return smallest


def _candidates(spec: Spec) -> Iterator[Spec]:
    """Yield the legal specs of the same global batch, the largest micro-batch first."""
    samples = spec.batch.global_samples // spec.data_degree
    for micro in range(samples, 0, -1):
        if samples % micro == 0:
            candidate = _chosen(spec, micro)
            if is_sound(candidate):
                yield candidate


def _chosen(spec: Spec, micro: int) -> Spec:
    """Return the spec with a micro-batch that is written, in what it resolves to as well."""
    variant = with_micro(spec, micro)
    batch = replace(variant.batch, micro_is_open=False)
    said = spec.resolved["batch"]
    assert isinstance(said, dict), "a section"
    return replace(
        variant, batch=batch, resolved=spec.resolved | {"batch": said | {"micro": micro}}
    )


def _tries(spec: Spec) -> str:
    """Where a GPU can be asked, how."""
    return "; `ptrain simulate SPEC --rehearse` runs it on a GPU" if spec.is_for_cuda else ""


def _because(spec: Spec, choice: str) -> Spec:
    return replace(spec, batch=replace(spec.batch, micro_choice=choice))


def _fit(spec: Spec) -> Fit:
    """Raises SpecError where the peak is not known."""
    memory_fit = fit(spec, derive(spec).exact)
    if memory_fit.unknown and not memory_fit.fits_device:
        raise refused(_PLACE, f"auto: the peaks are unknown: {memory_fit.why}", _NUMBER)
    return memory_fit
