"""Root causes that are neither gradients nor updates, and phrases for parameters and axes.

The causes are different weights or buffers at the start, parameters that are written before a
forward pass, another autocast dtype, a reference that is not finite, and a loss that is combined
differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ptrain.report.finding import (
    POSSIBLE,
    Certainty,
    DifferenceKind,
    Mismatch,
    Moment,
    RootCause,
    Subject,
)
from ptrain.verification.capture import SampleFaults
from ptrain.verification.jobs.evidence import JobEvidence
from ptrain.verification.jobs.job import RANKS, Ranks
from ptrain.verification.jobs.record import checksum, shared_buffers
from ptrain.verification.parts import (
    COARSER,
    dtype_name,
    factor_text,
    fit_multiple,
    is_representable,
    local_cpu,
    missing_sum_factor,
)


def layer_family(name: str) -> str:
    """Return a name with the numbers of its layers replaced: `blocks.*.norm.weight`.

    A leading number stays, because the layers of a plain nn.Sequential are unrelated.
    """
    return re.sub(r"(?<=\.)\d+\b", "*", name)


def list_families(names: Iterable[str]) -> str:
    """Return a list of at most three families: `blocks.*.norm.weight, head.weight and 2 more`.

    A family with one member is listed by its full name.
    """
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(layer_family(name), []).append(name)
    shown = [kind if len(members) > 1 else members[0] for kind, members in kinds.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def axis_text(axis: str) -> str:
    """Return "over all ranks", or "over" with the names of a combined axis ("dp+cp")."""
    return "over all ranks" if axis == RANKS else f"over {axis.replace('+', ' and ')}"


def make_root_cause(
    mismatches: Sequence[Mismatch],
    ranks: Ranks,
    *,
    state: Subject,
    factor: str,
    sentence: str,
    fix: str = "",
    names: Iterable[str] | None = None,
    who: Iterable[int] | None = None,
    axis: str | None = None,
    certainty: Certainty = Certainty.FITS,
    tried: str = "",
) -> RootCause:
    """Return the root cause of these mismatches.

    Args:
        mismatches: The mismatches, at least one. The first sets the step.
        ranks: The ranks of the loop.
        state: The kind of state that differs.
        factor: A short label of the difference.
        sentence: The explanation.
        fix: The instruction.
        names: The names that make the place. Default: those of the mismatches.
        who: The ranks to blame. Default: those of the mismatches.
        axis: The axis to blame. Default: the first that separates these ranks from others.
        certainty: How sure the explanation is.
        tried: The test that supports it.
    """
    blamed = sorted({mismatch.rank for mismatch in mismatches} if who is None else set(who))
    return RootCause(
        state=state, axis=ranks.separating_axis(blamed) if axis is None else axis, factor=factor,
        place=list_families([mismatch.name for mismatch in mismatches] if names is None else names),
        step=mismatches[0].step, ranks=tuple(blamed), sentence=sentence, certainty=certainty,
        tried=tried, fix=fix,
    )  # fmt: skip


def make_untested_cause(
    state: Subject, factor: str, place: str, sentence: str, fix: str, *, step: int,
    ranks: Iterable[int], axis: str = "",
) -> RootCause:  # fmt: skip
    """Return a root cause without a test.

    Args:
        state: The kind of value that differs.
        factor: The kind of difference.
        place: The first module or tensor that differs.
        sentence: The facts.
        fix: The change that removes the cause.
        step: The step.
        ranks: The ranks with the difference.
        axis: The mesh axes involved, "" for none.
    """
    return RootCause(
        state=state, axis=axis, factor=factor, place=place, step=step, ranks=tuple(ranks),
        sentence=sentence, fix=fix,
    )  # fmt: skip


def first_mismatch_cause(
    mismatches: Sequence[Mismatch], ranks: Ranks, tried: str = ""
) -> RootCause:
    """Return the first mismatch as a root cause, with all ranks where it occurs.

    Any differing gradient counts as the same occurrence, because a rank may hold no element of the
    first one. The root cause is unexplained, except for samples that are not in the batch.

    Args:
        mismatches: The mismatches of all ranks in order, at least one.
        ranks: The ranks of the loop.
        tried: The trials that explained nothing; "" if there were none.
    """
    one = mismatches[0]
    alike = [
        its
        for its in mismatches
        if (its.order_key, its.subject) == (one.order_key, one.subject)
        and (its.name == one.name or one.subject in (Subject.GRADIENTS, Subject.BATCH))
    ]
    size = one.told or f"differs by {one.difference:.3g}"
    what = str(one.subject)
    if one.subject is Subject.ACTIVATIONS:
        what = "gradient of the output" if one.moment is Moment.BACKWARD else "output"
    what += f" of {one.place}" if one.place != what else ""
    certainty, fix = Certainty.UNEXPLAINED, "how it is computed and communicated between ranks"
    if one.subject is Subject.BATCH:
        certainty, fix = Certainty.FITS, "the sampler, and which share of the batch each rank takes"
        tried = "the inputs of each rank's model were compared with the batch, row by row"
    return make_root_cause(
        alike, ranks, state=one.subject, factor=size, names=[one.place], tried=tried,
        certainty=certainty, fix=f"Check {fix}.",
        sentence=f"The first difference is in the {what}: {size}. Everything before it matches the "
                 "reference.",
    )  # fmt: skip


def explain_start(mismatches: Sequence[Mismatch], ranks: Ranks) -> RootCause:
    """Return the root cause of parameters that are missing or differ before the first step."""
    missing = [mismatch for mismatch in mismatches if mismatch.way is DifferenceKind.MISSING]
    if missing:
        return make_root_cause(
            missing, ranks, state=Subject.PARAMETERS, factor="missing",
            sentence=f"{missing[0].name}: {missing[0].told}.",
            fix="Build both from the same module.",
        )  # fmt: skip
    mismatches = [its for its in mismatches if its.subject is not Subject.BUFFERS]
    return make_root_cause(
        mismatches, ranks, state=Subject.PARAMETERS, factor="other weights at the start",
        sentence="The loop does not start from the reference's weights.",
        fix="Copy the module before it is wrapped (copy.deepcopy), or seed both identically on "
            "every rank.",
    )  # fmt: skip


def explain_buffers(
    mismatches: Sequence[Mismatch], models: tuple[nn.Module, nn.Module], ranks: Ranks, limit: float
) -> RootCause:
    """Return the root cause of buffers that differ although nothing else does.

    The first buffer decides: it may be rounded, equal on all ranks, or different on each rank. All
    ranks call it.

    Args:
        mismatches: The mismatches of buffers on all ranks, at least one.
        models: The models of the reference and of the loop.
        ranks: The ranks of the loop.
        limit: The largest relative residual at which a buffer counts as a multiple of the
            reference's.
    """
    first = mismatches[0]
    blame = partial(
        make_root_cause, [its for its in mismatches if its.name == first.name], ranks,
        state=Subject.BUFFERS,
    )  # fmt: skip
    right, own = next(
        (
            (local_cpu(its), local_cpu(other))
            for name, its, other in shared_buffers(*models)
            if name == first.name
        ),
        (torch.empty(0), torch.empty(0)),  # another stage has the buffer
    )
    coarse = [d for d in COARSER if is_representable(own, d) and not is_representable(right, d)]
    dtype = dtype_name(coarse[0]) if coarse else ""
    fit = fit_multiple(own, right)
    times = f"× {fit.factor:.4g}" if fit.is_within(limit) else ""
    everyones = ranks.gather((checksum(own), dtype, times), tuple[str, str, str])
    dtypes = {everyones[its.rank][1] for its in mismatches if its.name == first.name}
    when = "at the start" if first.moment is Moment.START else "at the end of the step"
    if (dtype := min(dtypes)) and len(dtypes) == 1:
        return blame(
            factor=f"rounded to {dtype}",
            sentence=f"Every element of the buffer is {when} a number of {dtype}, unlike in the "
            "reference.",
            fix="Keep it in the dtype of the reference when the model is cast.",
        )
    bits = [its for its, *_ in everyones if its != checksum(torch.empty(0))]
    if len(set(bits)) == 1:
        times = everyones[first.rank][2]
        return blame(
            factor=times or "other values on all ranks",
            sentence=f"The buffer has {when} the same values on all ranks"
            f"{times and f', the reference {times}'}.",
            fix="Check what writes it.",
        )
    if first.moment is Moment.START:
        return blame(
            factor="other values at the start",
            sentence="The ranks start with different values of the buffer.",
            fix="Broadcast it from one rank, or compute it from the same seed on every rank.",
        )
    return blame(
        factor="ranks differ",
        sentence=f"The ranks have different values of the buffer {when}. {POSSIBLE}it is computed "
        "from what is not reduced over the ranks; it is not broadcast from one rank.",
        fix="Reduce what it is computed from, or broadcast it.",
    )


def explain_average(mismatches: Sequence[Mismatch], ranks: Ranks) -> RootCause:
    """Return the root cause of moving averages that differ although the parameters match."""
    return make_root_cause(
        mismatches, ranks, state=Subject.AVERAGE, factor=_size_label(mismatches),
        sentence="The parameters match the reference, but their moving average differs.",
        fix="Update it once per step, from the parameters after the update, on every rank, with "
            "the reference's decay.",
        tried="all that is compared before it matches",
    )  # fmt: skip


def explain_in_use(
    mismatches: Sequence[Mismatch],
    ranks: Ranks,
    everyones: Sequence[Mapping[str, tuple[str, str]]],
) -> RootCause:
    """Return the root cause of parameters that were written before the forward pass.

    No trial can prove it, because a repeated step may not write the parameters again.

    Args:
        mismatches: The mismatches of these parameters, at least one.
        ranks: The ranks of the loop.
        everyones: A factor and a phrase for known values, by rank and parameter name; both are ""
            for unknown values.
    """
    kinds = {everyones[mismatch.rank][mismatch.name] for mismatch in mismatches}
    factor, what = kinds.pop() if len(kinds) == 1 else ("", "")
    blamed = make_root_cause(
        mismatches, ranks, state=Subject.PARAMETERS, factor=factor or _size_label(mismatches),
        sentence="The parameters in use differ from the reference before this forward pass, and "
        f"not after the previous update{what and f': each {what}'}.",
        fix="Load the same checkpoint as the reference, in its dtype, on every rank.",
    )  # fmt: skip
    if not factor:
        return blamed.as_unexplained("the values of an earlier step, a rounding")
    return blamed.as_fitting(f"to the bit, each {what}")


def explain_precision(actual: str, expected: str, step: int, ranks: Ranks) -> RootCause:
    """Return the root cause of a forward pass under another autocast dtype than the reference's.

    Args:
        actual: The dtype of the loop's autocast, as text.
        expected: The dtype of the reference's autocast, as text.
        step: The step.
        ranks: The ranks.
    """
    return RootCause(
        state=Subject.ACTIVATIONS, axis="", factor=f"{actual} for {expected}", place="autocast",
        step=step, ranks=tuple(range(ranks.size)),
        sentence=f"The loop's forward runs in {actual}, the reference's in {expected}, "
                 "according to autocast.",
        fix="Run both in one dtype, or set the intended one: `Terms(dtype=...)`.",
    )  # fmt: skip


def _size_label(mismatches: Sequence[Mismatch]) -> str:
    """Return the largest difference as a label."""
    return f"differs by {max(mismatch.difference for mismatch in mismatches):.3g}"


def non_finite_reference_cause(step: int, ranks: Ranks) -> RootCause:
    """Return the root cause of a reference whose gradients or parameters are not finite."""
    return RootCause(
        state=Subject.PARAMETERS, axis="", factor="the reference is not finite", place="reference",
        step=step, ranks=tuple(range(ranks.size)),
        sentence="The gradients or parameters of the reference are infinite or NaN after "
                 "this step, so there is nothing to compare with.",
        fix="Lower the learning rate, or use a wider dtype.",
    )  # fmt: skip


def explain_loss(
    mismatches: Sequence[Mismatch],
    ranks: Ranks,
    losses: tuple[float, float],
    fitting: Sequence[str],
    gradients: str = "match",
) -> RootCause:
    """Return the root cause of a loss that is the first mismatch.

    Only if the gradients match as backward leaves them, the trained loss is right and the reported
    one is wrong.

    Args:
        mismatches: The mismatches of the loss.
        ranks: The ranks.
        losses: The reference's loss, and the global loss of the ranks.
        fitting: Ways to combine the ranks' losses that give the reference's.
        gradients: A phrase for the comparison of the gradients.
    """
    expected, actual = losses
    ratio = actual / expected if expected else 0.0
    is_near = abs(ratio - 1) < 1e-3
    blamed = make_root_cause(
        mismatches, ranks, state=Subject.LOSS, axis="",
        factor=_size_label(mismatches) if is_near else factor_text(ratio, ranks.degrees),
        sentence=f"The loss is {actual:.6g}, the reference loss is {expected:.6g}, and the "
                 f"gradients {gradients}{': ' if gradients == 'match' else f'. {POSSIBLE}'}"
                 + ("the reported loss is combined in another way than the trained loss."
                    if gradients == "match" else
                    "the ranks' losses combine in another way; the trained loss differs, for "
                    "example by a factor that clipping hides."),
        fix="Set how the ranks' losses combine: "
            "`Terms(loss='mean' | 'sum' | 'same' or a function)`.",
    )  # fmt: skip
    if not fitting:
        return blamed.as_unexplained("the mean, the sum and the loss of one rank")
    tried = f"with loss={fitting[0]!r} it matches the reference"
    return blamed.as_proven(tried) if gradients == "match" else blamed.as_fitting(tried)


def explain_samples(
    ledger: SampleFaults, mismatches: Sequence[Mismatch], ranks: Ranks
) -> RootCause:
    """Return the root cause of samples that are missing or processed twice.

    Args:
        ledger: The missing and doubled rows.
        mismatches: The mismatches of the step.
        ranks: The ranks.
    """
    lists = {"missing": ledger.missing, "doubled": ledger.doubled}
    words = [
        f"{len(rows)} of {ledger.count} {word} (row {', '.join(map(str, rows[:4]))}"
        f"{', …' if len(rows) > 4 else ''})"
        for word, rows in lists.items()
        if rows
    ]
    return make_root_cause(
        mismatches, ranks, state=Subject.BATCH, names=["samples"], who=range(ranks.size),
        axis=next(iter(ranks.axes), "") if ledger.doubled else "",
        factor=" and ".join(word for word, rows in lists.items() if rows),
        sentence="The ranks together do not process the global batch exactly once: "
                 f"{' and '.join(words)}.",
        fix="Check how each rank's share is drawn (sampler, drop_last, padding to an even split).",
    )  # fmt: skip


# Largest relative change of a gradient by rounding. The coarsest dtype is tried first, because its
# numbers are numbers of fp32 too.
_MOST_OFF = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-5}


def unexplained_gradients_cause(
    mismatches: Sequence[Mismatch], evidence: JobEvidence, names: Sequence[str], ranks: Ranks
) -> RootCause:
    """Return the root cause of gradients that no sum explains. All ranks call it.

    It is unexplained, unless all ranks' gradients are the reference's rounded to a coarser dtype.

    Args:
        mismatches: The mismatches of the gradients.
        evidence: The evidence of all ranks.
        names: The parameters that differ.
        ranks: The ranks.
    """
    first = mismatches[0]
    largest = max(mismatch.difference for mismatch in mismatches)
    coarse = next(
        (
            dtype
            for dtype, most in _MOST_OFF.items()
            if largest <= most and all(ranks.gather(evidence.own.is_rounded_to(dtype, names)))
        ),
        None,
    )
    unknown = make_root_cause(
        mismatches, ranks, state=first.subject, axis="", factor=f"differs by {largest:.3g}",
        names=names or [first.name], certainty=Certainty.UNEXPLAINED,
        sentence="It is not a multiple of the reference and not an addend of a sum over an axis.",
        fix="Compare the inputs of this place.",
    )  # fmt: skip
    if coarse is None:
        return unknown
    dtype = dtype_name(coarse)
    return replace(
        unknown,
        factor=f"rounded to {dtype}",
        sentence=f"It differs by {largest:.3g}, as roundings to {dtype} do: a reduction, a "
        "communication hook or an operator computes in it.",
        fix=f"Compute it as the reference does. If this is intended, set "
        f"`Terms(dtype=torch.{dtype})`.",
        certainty=Certainty.FITS,
        tried=f"every element is a number of {dtype}, and few elements of the reference are",
    )


PLAIN = 1e-4  # a factor that is closer to 1 counts as 1


def shared_factor(ranks: Ranks, everyones: Tensor, tolerance: float) -> tuple[str, str]:
    """Return the axis of a missing sum with a phrase, or "" with the factor of a multiple.

    Both are "" if neither fits.

    Args:
        ranks: The ranks.
        everyones: The expected and the actual values of all ranks, [ranks, 2, elements].
        tolerance: The relative residual up to which a fit holds.
    """
    truths, parts = everyones.unbind(1)
    for axis, groups in ranks.axes.items():
        if missing_sum_factor(parts, truths, groups, tolerance) is not None:
            return axis, f"missing all-reduce {axis_text(axis)}"
    fit = fit_multiple(parts, truths)
    is_multiple = fit.is_within(tolerance) and abs(fit.factor - 1) > PLAIN
    return "", factor_text(fit.factor, ranks.degrees) if is_multiple else ""
