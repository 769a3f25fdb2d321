"""Culprits that are not gradients: weights that differ before the first step, modules that return
something else for the same inputs, updates, optimizer state, replicas, losses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from ptrain.report.finding import Culprit, Departure, Moment, Subject, Way
from ptrain.verification.factors import factor_text
from ptrain.verification.jobs.explain import families
from ptrain.verification.jobs.ranks import Ranks


def culprit(
    departures: Sequence[Departure],
    ranks: Ranks,
    *,
    state: Subject,
    factor: str,
    sentence: str,
    axis: str | None = None,
) -> Culprit:
    """Return the culprit of these departures, in these words."""
    who = sorted({departure.rank for departure in departures})
    return Culprit(
        state=state,
        axis=_axis(departures, ranks) if axis is None else axis,
        factor=factor,
        place=families(departure.name for departure in departures),
        step=departures[0].step,
        ranks=tuple(who),
        sentence=sentence,
    )


def _axis(departures: Sequence[Departure], ranks: Ranks) -> str:
    """Return the axis on which the ranks that depart differ from the others, if only some do."""
    who = {departure.rank for departure in departures}
    if len(who) == ranks.size or ranks.size == 1:
        return ""
    for axis, groups in ranks.axes.items():
        if any(set(group) & who and set(group) - who for group in groups):
            return axis
    return ""


def explain_start(departures: Sequence[Departure], ranks: Ranks) -> Culprit:
    """The loop does not start with the reference's weights."""
    missing = [departure for departure in departures if departure.way is Way.MISSING]
    if missing:
        return culprit(
            missing, ranks, state=Subject.PARAMETERS, factor="missing",
            sentence=f"{missing[0].name}: {missing[0].told}. Build both from the same module.",
        )  # fmt: skip
    return culprit(
        departures, ranks, state=Subject.PARAMETERS, factor="other weights at the start",
        sentence="The loop does not start from the reference's weights: copy the module before it "
        "is wrapped (copy.deepcopy), or seed both, on every rank alike.",
    )  # fmt: skip


def explain_outputs(
    first: Departure, departures: Sequence[Departure], ranks: Ranks, axis_factor: tuple[str, str]
) -> Culprit:
    """Blame the first module of the model, in the order of time, that departs; `axis_factor` is the
    axis and the factor where they are known."""
    here = [departure for departure in departures if departure.name == first.name]
    place = first.place
    if first.told:
        dtype = first.told.replace("torch.", "")
        return culprit(
            here, ranks, state=Subject.ACTIVATIONS, factor=dtype,
            sentence=f"{place} computes in {dtype.split()[0]}, one device in {dtype.split()[-1]}. "
            "If that is meant, say so: Terms(dtype=...).",
        )  # fmt: skip
    is_forward = first.moment is Moment.FORWARD
    axis, factor = axis_factor
    if axis:
        cure = f"What the ranks along {axis} have are parts of a sum: all-reduce it over {axis}."
    else:
        cure = "It is the first that does, so the fault is in it or right before it."
    what = (
        f"{place} returns something else than on one device for the same inputs."
        if is_forward
        else f"The gradient of what {place} returns is not one device's, from the same loss."
    )
    return culprit(
        here, ranks, state=Subject.ACTIVATIONS, axis=axis or None,
        factor=factor or f"differs by {first.difference:.3g}", sentence=f"{what} {cure}",
    )  # fmt: skip


def explain_slices(
    unclear: Culprit, names: Collection[str], parameters: Sequence[str], axis: str
) -> Culprit | None:
    """Say of gradients that depart where ranks have slices of a sequence down to which module the
    backward pass is right; `names` depart of all `parameters`, which are in the order in which
    their modules run forward. None where none is right that runs later."""
    last = max((parameters.index(name) for name in names if name in parameters), default=-1)
    later = parameters[last + 1 :]
    if last < 0 or not later:
        return None
    module = parameters[last].rpartition(".")[0]
    return replace(
        unclear,
        axis=axis,
        factor="other gradients from the ranks' other slices",
        place=module,
        sentence=f"Backward is right down to {module}: parameters that are used after it "
        f"({families(later)}) have one device's gradients. So the gradient of what {module} "
        f"returns is wrong, of which the ranks of {axis} have shares: look at the backward pass of "
        "what exchanges it, which must sum them. torch.distributed.nn.functional.all_gather takes "
        "gradients for contiguous on gloo: make them so.",
    )


def explain_precision(actual: str, expected: str, step: int, ranks: Ranks) -> Culprit:
    """The loop's forward runs under another autocast than the reference's."""
    return Culprit(
        state=Subject.ACTIVATIONS, axis="", factor=f"{actual} for {expected}", place="autocast",
        step=step, ranks=tuple(range(ranks.size)),
        sentence=f"The loop's forward runs in {actual} (autocast), one device's in {expected}. Let "
        f"both run in one, or say what is meant: Terms(dtype=torch.{actual}).",
    )  # fmt: skip


def _size(departures: Sequence[Departure]) -> str:
    return f"differs by {max(departure.difference for departure in departures):.3g}"


def batch_statistics(explanation: Culprit, model: nn.Module) -> Culprit | None:
    """Blame batch norms where nothing else explains the gradients: every rank normalises by the
    statistics of its own samples."""
    norms = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if not norms or not explanation.factor.startswith("differs by"):
        return None
    return replace(
        explanation, state=Subject.ACTIVATIONS, factor="statistics of a rank's own batch",
        place=families(norms),
        sentence="Batch norms take mean and variance of each rank's own samples, not of the whole "
        "batch: torch.nn.SyncBatchNorm.convert_sync_batchnorm, or another norm.",
    )  # fmt: skip


def reference_not_finite(step: int, ranks: Ranks) -> Culprit:
    """One device has no numbers either."""
    return Culprit(
        state=Subject.PARAMETERS, axis="", factor="the reference is not finite", place="reference",
        step=step, ranks=tuple(range(ranks.size)),
        sentence="One device's own gradients or parameters are infinite or NaN after this step: "
        "there is nothing to compare with. Lower the learning rate, or take a wider dtype.",
    )  # fmt: skip


def explain_loss(
    departures: Sequence[Departure], ranks: Ranks, expected: float, actual: float
) -> Culprit:
    """Everything else held: the loss is reported wrong."""
    ratio = actual / expected if expected else 0.0
    is_near = abs(ratio - 1) < 1e-3
    return culprit(
        departures, ranks, state=Subject.LOSS, axis="",
        factor=_size(departures) if is_near else factor_text(ratio, ranks.degrees),
        sentence=f"The loss is {actual:.6g}, on one device {expected:.6g}, with the same "
        "gradients: it is reduced in another way than they are. Say how the ranks' losses make up "
        "the global one: Terms(loss='mean' | 'sum' | 'same' or a function).",
    )  # fmt: skip
