"""A step whose gradients depart, run again from the state that it began with: what the ranks' own
samples give, which module is not what the plain one is, and whether the step is right with plain
modules in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.report.finding import Certainty, Culprit, Departure, Moment, Subject
from ptrain.verification.factors import are_alike, factor_text, multiple, share_of_sum
from ptrain.verification.jobs.again import modules_of, swapped
from ptrain.verification.jobs.compare import Magnitude, difference, digests
from ptrain.verification.jobs.conditions import number
from ptrain.verification.jobs.evidence import JobEvidence, evidence, places_of
from ptrain.verification.jobs.explain import explain_gradients, of_own_samples
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.losses import GlobalLoss, apart
from ptrain.verification.jobs.modules import Calls, Violation, innermost, is_within, violations
from ptrain.verification.jobs.probe import ProbeResult, autocast_of, probed, untouched
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.step import LoopPair, StepComparison
from ptrain.verification.jobs.words import families, over_axis

_MOST_TRIALS = 6  # families of modules that are replaced, one after the other
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


class Inquiry:
    """All ranks make one of the same step, and call its methods alike."""

    def __init__(
        self,
        pair: LoopPair,
        step: StepComparison,
        limit: Tolerance,
        *,
        loss: GlobalLoss,
        share: Any,
    ) -> None:
        self.pair, self.step, self.ranks, self.limit = pair, step, loss.ranks, limit
        self._loss, self._share = loss, share
        self._ruled_out: list[str] = []

    def culprit(self, first: Sequence[Departure], before: Mapping[str, Tensor]) -> Culprit:
        """Explain the first departures, at the moment of gradients; `before` are one device's
        gradients of the step before."""
        self._rewind()
        modules, again = self._run_again()
        probe = self._probe()
        job_evidence = evidence(
            self.ranks, self.pair.holds, reference=self.step.expected, run=self.step.seen,
            probe=probe, before=before,
        )  # fmt: skip
        by_sums = explain_gradients(first, job_evidence, self.ranks, self.limit)
        if by_sums.certainty is Certainty.PROVEN:
            return by_sums
        self._ruled_out.append(
            "one multiple, a sum over an axis, other micro-batches or the step before in all "
            "gradients"
        )
        if again and (by_modules := self._of_modules(probe, modules)) is not None:
            return by_modules
        if (dropped := self._dropped_arguments(first)) is not None:
            return dropped
        own = of_own_samples(first, job_evidence, self.ranks, self.limit)
        if own is not None and own.certainty is Certainty.PROVEN:
            return _with_norms(own, self.pair.reference.model)
        if by_sums.certainty is Certainty.FITS:
            return by_sums
        return self._unexplained(first, job_evidence, probe, again)

    def _dropped_arguments(self, first: Sequence[Departure]) -> Culprit | None:
        """Arguments by name that one device's model is given and the loop's, within its wrappers,
        is not."""
        expected, seen = self.step.expected.calls, self.step.seen.calls
        named = set(expected[0].kwargs) if expected else set()
        own = set(seen[0].kwargs) if seen else named
        lacking = {name for names in self.ranks.gather(sorted(named - own)) for name in names}
        if not lacking:
            return None
        listed = ", ".join(sorted(lacking))
        return Culprit(
            state=Subject.BATCH, axis="", factor="an argument is not handed on", place=listed,
            step=first[0].step, ranks=tuple(range(self.ranks.size)),
            sentence=f"One device's model is called with {listed}, and the loop's is not: a "
            "wrapper or the step does not hand it on.",
        )  # fmt: skip

    def _rewind(self) -> None:
        self.step.loop_state.restore()
        self.step.reference_state.restore()

    def _run_again(self) -> tuple[Calls, bool]:
        """Every module's passes, and whether the step gave the same bits."""
        model, holds = self.pair.loop.model, self.pair.holds
        with StepRecorder(model, holds) as seen:
            modules, _ = modules_of(model, lambda: self.pair.loop.step(self._share))
        same = digests(holds, seen.gradients) == digests(holds, self.step.seen.gradients)
        return modules, all(self.ranks.gather(same))

    def _probe(self) -> ProbeResult:
        return probed(self.pair.reference.model, self.step.seen.calls)

    def _of_modules(self, probe: ProbeResult, modules: Calls) -> Culprit | None:
        """Put plain modules in the place of those that depart by themselves, the innermost, one
        family after the other and then all; what makes the step right is where the fault is."""
        with untouched(self.pair.reference.model), autocast_of(self.step.seen.calls[:1]):
            mine = violations(self.pair.reference.model, probe.modules, modules, self.limit)
        suspects, tested = self._suspects(mine.list, mine.tested, probe.modules)
        trials: list[tuple[Suspect, ...]] = [(suspect,) for suspect in suspects[:_MOST_TRIALS]]
        trials += [tuple(suspects)] if len(suspects) > 1 else []
        for chosen in trials:
            paths = [path for suspect in chosen for path in suspect.paths]
            left, count = self._with_plain(paths)
            places = " and ".join(suspect.place for suspect in chosen)
            if left is not None and left <= self.limit.gradients * _LOOSE:
                others = f" and the other {count} gradients" if count else ""
                be = "are" if count else "is"
                tried = (
                    f"with the plain module in the place of {places} the loss{others} {be} one "
                    f"device's to {left:.1e}"
                )
                blamed = self._blamed(chosen[0], mine.list, tested, probe.modules)
                return replace(
                    blamed,
                    certainty=Certainty.PROVEN,
                    tried=tried,
                    place=places if len(chosen) > 1 else blamed.place,
                )
            self._ruled_out.append(f"the plain module in the place of {places}")
        return self._of_dtypes(mine.list, suspects)

    def _of_dtypes(self, mine: Sequence[Violation], suspects: Sequence[Suspect]) -> Culprit | None:
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
            step=self.step.differences.step, ranks=tuple(range(self.ranks.size)),
            sentence=f"Its modules compute in {actual}, one device's in {expected}. If that is "
            f"meant, say so: Terms(dtype=torch.{actual}).",
        )  # fmt: skip

    def _suspects(
        self, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> tuple[list[Suspect], set[str]]:
        """Return all ranks' suspects in the order in which their modules run, and the modules that
        some rank could run by themselves."""
        everyones = self.ranks.gather(
            [[v.path, int(v.moment), v.difference, v.rewritten] for v in mine]
        )
        tested = {path for paths in self.ranks.gather(sorted(tested)) for path in paths}
        rows = [(rank, *row) for rank, its in enumerate(everyones) for row in its]
        places = list(dict.fromkeys(path for path, _ in order))
        paths = innermost([row[1] for row in rows])
        grouped: dict[str, list[str]] = {}
        for path in sorted(paths, key=places.index):
            grouped.setdefault(_family(path), []).append(path)
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

    def _with_plain(self, paths: Sequence[str]) -> tuple[float | None, int]:
        """Run the step with plain modules in these places. Return the largest difference that is
        left (relative) over all ranks, of the loss and of the gradients of what is not in them, and
        how many gradients these are; None where neither can be compared."""
        self._rewind()
        reference, model = self.pair.reference.model, self.pair.loop.model
        plain = {path: reference.get_submodule(path) for path in paths}
        holds = self.pair.holds
        inside = {id(parameter) for path in paths for parameter in plain[path].parameters()}
        names = [
            name for name, whole in self.pair.wholes.items()
            if id(whole.parameter) not in inside and name in self.step.expected.gradients
        ]  # fmt: skip
        with untouched(reference), swapped(model, plain), StepRecorder(model, holds) as seen:
            loss = self.pair.loop.step(self._share)
        expected = self.step.expected.gradients
        scale = Magnitude.of(expected)
        right = number(self.step.losses[0])
        measured = self._loss.of(right, number(loss))
        sizes = [] if right is None or measured is None else [apart(right, measured)]
        for name in names:
            if name not in holds or name not in seen.gradients:
                continue
            whole = expected[name]
            part = holds[name].of(whole.view(holds[name].shape))
            sizes.append(difference(seen.gradients[name], part, scale.length(whole, part)))
        worst = [size for size in self.ranks.gather(max(sizes, default=None)) if size is not None]
        return (max(worst) if worst else None), len(names)

    def _blamed(
        self, suspect: Suspect, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> Culprit:
        """Say what the modules do, and over which axis a sum is missing."""
        axis, factor = self._shared(suspect, mine)
        if suspect.rewritten:
            return Culprit(
                state=Subject.PARAMETERS, axis="", factor=f"differs by {suspect.difference:.3g}",
                place=suspect.place, step=self.step.differences.step, ranks=suspect.ranks,
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
        if axis:
            when = "" if suspect.moment is Moment.FORWARD else " in backward"
            cure = f" The ranks {over_axis(axis)} have parts of a sum: all-reduce it{when}."
        else:
            does = " does what the plain module does:" if len(inner) == 1 else " do:"
            what += f" Of what it is made of {families(inner)}{does}" if inner else ""
            cure = f"{' look' if inner else ' Look'} at what its forward does beside them"
            cure = cure if inner else " Look at its own forward, or at what wraps it"
            cure += "." if not inner else ", or at what wraps it"
            if closed:
                cure = cure.rstrip(".") + f"; {families(closed)} could not be run by itself"
            cure = cure if cure.endswith(".") else f"{cure}."
        return Culprit(
            state=Subject.ACTIVATIONS, axis=axis,
            factor=factor or f"differs by {suspect.difference:.3g}",
            place=families(closed) if closed and not path else suspect.place,
            step=self.step.differences.step, ranks=suspect.ranks, sentence=what + cure,
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
        tolerance = _LOOSE * self.limit.outputs
        return _factor(self.ranks, self.ranks.stack(both), tolerance)

    def _unexplained(
        self, first: Sequence[Departure], job_evidence: JobEvidence, probe: ProbeResult, again: bool
    ) -> Culprit:
        names = [n for n in job_evidence.samples if any(d.name == n for d in first)]
        largest = max(departure.difference for departure in first)
        out = "; ".join(self._ruled_out)
        module, later = _right_down_to(names, _in_order(job_evidence, probe.modules))
        place = module or families(names) or first[0].name
        if len(later) > 0:
            where = (
                f" Backward is right down to {module}: parameters that are used after it "
                f"({families(later)}) have one device's gradients; look at what takes what "
                f"{module} returns, and at its backward pass."
            )
        else:
            where = ""
        if not again:
            out += "; the step does not give the same bits again, so that no module could be tried"
        right, own = (number(loss) for loss in self.step.losses)
        measured = self._loss.of(right, own)
        is_forward = right is not None and measured is not None
        is_forward = is_forward and apart(right or 0.0, measured or 0.0) > self.limit.losses
        return Culprit(
            state=Subject.LOSS if is_forward else first[0].subject,
            axis="",
            factor=f"differs by {largest:.3g}",
            place=place,
            step=first[0].step,
            ranks=tuple(sorted({departure.rank for departure in first})),
            sentence=f"The gradient of {len(names)} of {len(job_evidence.samples)} parameters is "
            "not one device's when the optimizer steps"
            f"{', and neither is the loss' if is_forward else ''}; that is what departs first."
            f"{where}",
            certainty=Certainty.UNEXPLAINED,
            tried=f"ruled out: {out}",
        )


def _in_order(job_evidence: JobEvidence, modules: Calls) -> list[str]:
    """Return the parameters that have a gradient, as the modules that have them first run."""
    order = list(dict.fromkeys(path for path, _ in modules))
    known = [name for name in job_evidence.samples if name.rpartition(".")[0] in order]
    return sorted(known, key=lambda name: order.index(name.rpartition(".")[0]))


def _right_down_to(names: Sequence[str], parameters: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return down to which module the backward pass is right, and the parameters that are used
    after it; nothing where none is right that runs later."""
    last = max((parameters.index(name) for name in names if name in parameters), default=-1)
    later = parameters[last + 1 :]
    return (parameters[last].rpartition(".")[0], later) if last >= 0 and later else ("", ())


def _with_norms(culprit: Culprit, model: nn.Module) -> Culprit:
    """Say which batch norms the model has, as they tie samples together."""
    norms = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if not norms:
        return culprit
    return replace(
        culprit, factor="statistics of a rank's own batch", place=families(norms),
        state=Subject.ACTIVATIONS,
        sentence=f"{culprit.sentence} {families(norms)} takes mean and variance of each "
        "micro-batch's own samples: torch.nn.SyncBatchNorm, or another norm.",
    )  # fmt: skip


def _family(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _factor(ranks: Ranks, everyones: Tensor, tolerance: float) -> tuple[str, str]:
    """[ranks, 2, elements]: what is right, and what is there."""
    for axis, groups in ranks.axes.items():
        fits = []
        for group in groups:
            truths, parts = everyones[list(group), 0], everyones[list(group), 1]
            if not are_alike(list(truths), 1e-6) or are_alike(list(parts), 1e-6):
                break
            fits.append(share_of_sum(list(parts), truths[0]))
        if len(fits) == len(groups) and all(fit.holds(tolerance) for fit in fits):
            return axis, "missing all-reduce"
    fit = multiple(everyones[:, 1], everyones[:, 0])
    return "", factor_text(fit.factor, ranks.degrees) if fit.holds(tolerance) else ""
