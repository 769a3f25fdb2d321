"""Random numbers that are not what they must be: drawn on one side alone, otherwise by ranks that
have the same samples, or otherwise by a recomputation. Each is tried: the step once more, with the
right ones in their place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ptrain.report.finding import Culprit, Departure, Subject
from ptrain.verification.jobs.culprits import proven
from ptrain.verification.jobs.everyones_draws import Key, drawn_again_otherwise
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.words import families

if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry


def culprit_of_masks(inquiry: Inquiry, first: Sequence[Departure]) -> Culprit | None:
    """Return the culprit that a trial proves; None where none does. All ranks call it."""
    drawing = inquiry.drawing
    if not drawing.any:
        return None
    everyones, ranks = drawing.everyones, inquiry.ranks
    alone, loop_only = everyones.alone, set(everyones.by_key) - everyones.used  # as on all ranks
    unlike = dict(everyones.unlike)
    mine = sorted({draw.path or draw.outer for draw in drawn_again_otherwise(drawing.loop)})
    again = {path for paths in ranks.gather(mine) for path in paths}
    blame, everywhere = partial(proven, step=first[0].step), range(ranks.size)
    if unlike and (left := _left_alike(inquiry)) is not None:
        who = tuple(sorted({rank for its in unlike.values() for rank in its}))
        return blame(
            Subject.RANDOM, "other masks for the same samples", families(unlike) or "the model",
            f"Ranks {', '.join(map(str, who))} have the same samples and draw other masks for them "
            f"in {families(unlike)}: what they should have as copies differs. Seed these ranks "
            "alike, and apart from those with other samples.",
            f"with the masks of the first of them on all, the gradients are one device's to "
            f"{left:.1e}", ranks=who, axis=ranks.axis_of(who),
        )  # fmt: skip
    if again and (left := _left_alike(inquiry)) is not None:
        place = families(again) or "the model"
        return blame(
            Subject.GRADIENTS, "another mask in the recomputation", place,
            f"What is recomputed of {place} in backward draws other "
            "random numbers than in forward: keep the generator's state "
            "(checkpoint(..., preserve_rng_state=True)), or draw outside of what is recomputed.",
            f"with forward's masks in backward, the gradients are one device's to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    if alone and (left := _left_of_reference(inquiry, alone)) is not None:
        return blame(
            Subject.RANDOM, "dropout on one device alone", _modules(alone),
            f"In {_modules(alone)} one device drops out, and no rank of the loop does: that is in "
            "evaluation mode (call model.train() before the step), or its rate is 0.",
            f"with nothing dropped there on one device, its gradients are the loop's to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    if loop_only and (left := _left_of_loop(inquiry, loop_only)) is not None:
        return blame(
            Subject.RANDOM, "dropout in the loop alone", _modules(loop_only),
            f"In {_modules(loop_only)} the loop drops out, and one device does not: the rates or "
            "the modes (train, eval) of both are not the same.",
            f"with nothing dropped there, the gradients are one device's to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    return None


def _left_alike(inquiry: Inquiry) -> float | None:
    return inquiry.left_with(inquiry.drawing.repeated(inquiry.pair.loop.model, alike=True))


def _left_of_loop(inquiry: Inquiry, still: set[Key]) -> float | None:
    return inquiry.left_with(inquiry.drawing.repeated(inquiry.pair.loop.model, still=still))


def _left_of_reference(inquiry: Inquiry, still: set[Key]) -> float | None:
    """Run one device's step once more; return how far the loop's is from it, if that is near."""
    inquiry.rewind()
    pair = inquiry.pair
    draws = inquiry.drawing.replayed(pair.reference.model, still=still)
    with StepRecorder(pair.reference.model, pair.wholes) as expected, draws:
        pair.reference.step(inquiry.batch)
    return inquiry.left(inquiry.step.seen.gradients, expected.gradients)


def _modules(keys: set[Key]) -> str:
    return families(path or "the model" for path, _ in sorted(keys))
