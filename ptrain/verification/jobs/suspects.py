"""Modules that depart by themselves, by family, and what is said of one with which the step is
right again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptrain.report.finding import Culprit, Moment, Subject
from ptrain.verification.jobs.culprits import families, family, over_axis
from ptrain.verification.jobs.evidence import places_of
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.modules import Calls, Violation, innermost, is_within
from ptrain.verification.parts import canonical_modules, factor_text, missing_sum, multiple

_PLAIN = 1e-4  # a factor that is nearer to 1 is printed as 1
_LOOSE = 10  # tolerances of an output within which it is a sum or a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A family of modules (blocks.*.attn) that depart by themselves: where, in which pass, by how
    much at most, and which ranks saw it; `rewritten`: only where their parameters are not those of
    their first pass."""

    paths: tuple[str, ...]
    moment: Moment
    difference: float
    rewritten: bool
    ranks: tuple[int, ...]

    @property
    def place(self) -> str:
        return families(self.paths) or "the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Of one step of a job, whose plain model is the `reference`. All ranks call its methods
    alike."""

    ranks: Ranks
    limit: Tolerance
    step: int
    reference: nn.Module

    def of_dtypes(self, mine: Sequence[Violation], suspects: Sequence[Suspect]) -> Culprit | None:
        """All modules that depart return another dtype than the plain ones: no cure is tried, as
        the loop would cast between them."""
        kinds = {
            " for ".join(str(side.dtype).removeprefix("torch.") for side in (v.actual, v.expected))
            for v in mine
            if v.actual.dtype != v.expected.dtype
        }
        count = sum(v.actual.dtype != v.expected.dtype for v in mine)
        everyones = self.ranks.gather([sorted(kinds), count == len(mine)])
        known = {kind for its, _ in everyones for kind in its}
        if len(known) != 1 or not all(is_all for _, is_all in everyones):
            return None
        (kind,) = known
        actual, _, expected = kind.partition(" for ")
        return Culprit(
            state=Subject.ACTIVATIONS, axis="", factor=kind,
            place=families([path for suspect in suspects for path in suspect.paths]),
            step=self.step, ranks=tuple(range(self.ranks.size)),
            sentence=f"Its modules compute in {actual}, one device's in {expected}. If that is "
            f"meant, say so: Terms(dtype=torch.{actual}).",
        )  # fmt: skip

    def of_all_ranks(
        self, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> tuple[list[Suspect], set[str]]:
        """Return all ranks' suspects in the order in which their modules run, and the modules that
        some rank could run by themselves."""
        everyones = self.ranks.gather(
            [[v.path, int(v.moment), v.difference, v.rewritten] for v in mine]
        )
        tested = {path for paths in self.ranks.gather(sorted(tested)) for path in paths}
        rows = [(rank, *row) for rank, its in enumerate(everyones) for row in its]
        orders = self.ranks.gather(list(dict.fromkeys(path for path, _ in order)))
        every = (path for path, _ in canonical_modules(self.reference))
        places = list(dict.fromkeys([*(path for its in orders for path in its), *every]))
        paths = innermost([row[1] for row in rows])
        grouped: dict[str, list[str]] = {}
        for path in sorted(paths, key=places.index):
            grouped.setdefault(family(path), []).append(path)
        suspects = []
        for members in grouped.values():
            of = [row for row in rows if row[1] in members]
            suspects.append(
                Suspect(
                    paths=tuple(members),
                    moment=Moment(min(row[2] for row in of)),
                    difference=max(row[3] for row in of),
                    rewritten=all(row[4] for row in of),
                    ranks=tuple(sorted({row[0] for row in of})),
                )
            )
        return sorted(suspects, key=lambda suspect: suspect.moment), tested

    def blamed(
        self, suspect: Suspect, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> Culprit:
        """Say what the modules do, and over which axis a sum is missing."""
        axis, factor = self._shared(suspect, mine)
        if suspect.rewritten:
            return Culprit(
                state=Subject.PARAMETERS, axis="", factor=f"differs by {suspect.difference:.3g}",
                place=suspect.place, step=self.step, ranks=suspect.ranks,
                sentence=f"The parameters of {suspect.place} are written between the passes of one "
                "step (a moving average that follows each micro-batch, an update in backward): "
                "write them once, after the last.",
            )  # fmt: skip
        path = suspect.paths[0]
        inside = [
            other
            for other in dict.fromkeys(name for name, _ in order)  # those that run at all
            if other != path and is_within(other, path)
        ]
        inner = sorted(other for other in inside if other in tested)
        closed = innermost([other for other in inside if other not in tested])
        if suspect.moment is Moment.FORWARD:
            what = f"{suspect.place} returns something else than the plain module for the same "
            what += "inputs."
        else:
            what = f"{suspect.place} hands back another gradient of its input than the plain "
            what += "module, for the same gradient of its output."
        sentences = [what]
        if axis:
            when = "" if suspect.moment is Moment.FORWARD else " in backward"
            sentences.append(
                f"The ranks {over_axis(axis)} have parts of a sum: all-reduce it{when}."
            )
        else:
            if inner:
                sentences.append(f"Of its parts {families(inner)} do what the plain ones do.")
            if closed:
                sentences.append(f"{families(closed)} could not be run by itself.")
            sentences.append("Look at its own forward, or at what wraps it.")
        return Culprit(
            state=Subject.ACTIVATIONS, axis=axis,
            factor=factor or f"differs by {suspect.difference:.3g}",
            place=families(closed) if closed and not path else suspect.place,
            step=self.step, ranks=suspect.ranks, sentence=" ".join(sentences),
        )  # fmt: skip

    def _shared(self, suspect: Suspect, mine: Sequence[Violation]) -> tuple[str, str]:
        """The axis and the factor of a module's output (or of the gradient that it hands back): a
        sum over an axis that is missing, or a multiple. Empty strings where it is neither."""
        own = next(
            (v for v in mine if v.path == suspect.paths[0] and v.moment is suspect.moment), None
        )
        is_readable = own is not None and own.expected.shape == own.actual.shape
        kinds = [str(own.actual.dtype), str(own.expected.dtype)] if own is not None else None
        shape = list(own.expected.shape) if own is not None and is_readable else None
        everyones = self.ranks.gather([shape, kinds])
        dtypes = next((its for _, its in everyones if its and its[0] != its[1]), None)
        if dtypes is not None:
            return "", " for ".join(dtypes).replace("torch.", "")
        if own is None or any(its != everyones[0][0] or its is None for its, _ in everyones):
            return "", ""
        row = own.expected.flatten()
        (where,) = places_of(self.ranks, {"": row}).values()
        both = torch.stack([row[where].double(), own.actual.flatten()[where].to(row).double()])
        both = both.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # NaN: has it not
        tolerance = _LOOSE * self.limit.outputs
        return _factor(self.ranks, self.ranks.stack(both), tolerance)


def _factor(ranks: Ranks, everyones: Tensor, tolerance: float) -> tuple[str, str]:
    """[ranks, 2, elements]: what is right, and what is there."""
    truths, parts = everyones.unbind(1)
    for axis, groups in ranks.axes.items():
        if missing_sum(parts, truths, groups, tolerance) is not None:
            return axis, f"missing all-reduce {over_axis(axis)}"
    fit = multiple(parts, truths)
    is_multiple = fit.holds(tolerance) and abs(fit.factor - 1) > _PLAIN
    return "", factor_text(fit.factor, ranks.degrees) if is_multiple else ""
