"""The printed claims of the paper and the notes against prediction and measurement: one page.

Every claim of paper_cases.yaml is worked out by the column `paper` (the theorems as printed) and
by the column `exact` (what a rank will hold and send), and measured by running the same specs,
shrunk, on gloo ranks. `benchmarks/results/paper.md` is the page; without --save it is printed.
--check works out again everything but the measurements, which it takes from the page, and exits 1
where the page says something else; --reword writes the page anew in that way, for a change of words
that leaves the measurements and their date as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from functools import cache

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, in the ranks

from _claims import FIGURES, INTRODUCTION, Case, Claim, Figures, Form, Source, View
from _machine import RESULTS, ROOT, header
from _paper_cases import CLAIMS
from _paper_composition import section as composition
from _paper_digest import section as digest
from _paper_lectures import section as lectures
from _paper_seconds import section as seconds
from _script import table_head, table_row

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import Derivation, derive
from ptrain.plan.lower import built_in_facts
from ptrain.report.record import PEAK_TOLERANCE
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

PAGE = RESULTS / "paper.md"
TOLERANCE = 0.001  # of a claim: step counters and the scalar of the gradient's norm are below it
STEADY_STEP = 3
SMALL = ("model.preset=llama-tiny", "model.vocab=260", "batch.sequence=64", "batch.micro=1")
_MACHINE = "## How it was measured"

Measured = dict[Source, Figures]


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of a case: claimed and predicted at both scales, measured at the small one."""

    claimed: float
    exact: float
    small_claimed: float
    small_exact: float
    measured: float

    def off(self) -> tuple[float, float]:
        """Return the relative differences between execution and claim at both scales."""
        return self.exact / self.claimed - 1, self.measured / self.small_claimed - 1


def spec_of(source: Source, *, small: bool) -> Spec:
    return require_runnable(load(source.name, overrides_of(source, small=small)))


def overrides_of(source: Source, *, small: bool) -> tuple[str, ...]:
    """Return the overrides of the large spec; tiny shapes and few ranks replace them for the small
    run."""
    if not small:
        return source.overrides
    factors = spec_of(source, small=False).factors
    axis = str(factors[-1].axis) if factors else "dp_replicate"
    batch = f"batch.global={source.ranks * source.samples}"
    shrunk = (*SMALL, f"mesh.{axis}={source.ranks}", batch, "cluster.preset=laptop", *source.small)
    kept = {text.partition("=")[0]: text for text in source.overrides if text != "cluster=null"}
    kept |= {text.partition("=")[0]: text for text in shrunk}
    return tuple(kept.values())


@cache
def derived(source: Source, small: bool) -> tuple[Spec, Derivation]:
    spec = spec_of(source, small=small)
    return spec, derive(spec)


def view(source: Source, column: str, *, small: bool) -> View:
    spec, derivation = derived(source, small)
    return View(spec, built_in_facts(spec), Figures.of(getattr(derivation, column)))


def find(case: Case, measured: Measured) -> Found:
    sizes = []
    for small in (False, True):
        by = [view(each, "paper", small=small) for each in case.claimed_by or case.sources]
        exact = [view(each, "exact", small=small) for each in case.sources]
        claimed = case.claimed(by, exact) if case.claimed else case.figure(*by)
        sizes += [claimed, case.figure(*exact)]
    executed = [
        View(each.spec, each.facts, measured[source])
        for each, source in zip(exact, case.sources, strict=True)
    ]
    return Found(*sizes, case.figure(*executed))


def holds(case: Case, found: Found) -> bool:
    """Return True if the claim is right for this case, at its scale and in the measurement."""
    if case.at_most:
        return found.exact <= found.claimed
    tolerance = PEAK_TOLERANCE if case.loose else TOLERANCE
    return all(abs(off) <= tolerance for off in found.off())


# Measurement


def sources() -> list[Source]:
    """Return every spec of the claims once."""
    return list(
        dict.fromkeys(each for claim in CLAIMS for case in claim.cases for each in case.sources)
    )


def measure() -> Measured:
    """Run each reduced spec on its ranks and measure a steady step."""
    from ptrain.meters.measure import join_estimates
    from tests.gloo.runs import train_on_rank
    from tests.ranks import Ranks

    pool, found, known = Ranks(), {}, {}
    for source in sources():
        if (text := command(source)) in known:
            found[source] = known[text]
            continue
        spec = spec_of(source, small=True)
        reports = pool.run(
            spec.world_size, train_on_rank, spec, STEADY_STEP + 1, STEADY_STEP, timeout=600
        )
        estimate = join_estimates([report.measured for report in reports])
        found[source] = known[text] = Figures.of(estimate)
        print(f"measured: {text}", file=sys.stderr)
    pool.close()
    return found


def command(source: Source) -> str:
    return " ".join(["ptrain validate", source.name, *overrides_of(source, small=True)])


def apart(source: Source, measured: Figures) -> list[str]:
    """Yield measurements that differ from the prediction."""
    exact = view(source, "exact", small=True).found
    wrong = []
    for field, left, right in zip(fields(Figures), astuple(exact), astuple(measured), strict=True):
        tolerance = PEAK_TOLERANCE if field.name == "peak" else 0
        if abs(right - left) > tolerance * left:
            wrong.append(f"{field.name}: predicted {left}, measured {right}")
    return wrong


# The page


def page(measured: Measured, machine: str) -> str:
    found = {case: find(case, measured) for claim in CLAIMS for case in claim.cases}
    parts = [_introduction(found), _table(found), *_sections(found)]
    parts += [digest(), lectures(), seconds(), composition(), _MACHINE, machine, _runs(measured)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _introduction(found: dict[Case, Found]) -> str:
    verdicts = [_verdict(claim, found) for claim in CLAIMS]
    counts = {each: verdicts.count(each) for each in dict.fromkeys(verdicts)}
    summary = ", ".join(f"{number} {_plural(each, number)}" for each, number in counts.items())
    return INTRODUCTION.format(
        ranks=max(source.ranks for source in sources()),
        number=len(CLAIMS),
        summary=summary,
        tolerance=TOLERANCE,
        peak=PEAK_TOLERANCE,
    )


def _plural(verdict: str, number: int) -> str:
    return verdict if number == 1 else verdict.replace("holds", "hold").replace("does", "do")


def _table(found: dict[Case, Found]) -> str:
    columns = ("claim", "", "paper", "exact", "off", "small: paper", "exact", "measured", "verdict")
    rows = (
        _row(0 if index else number, claim, case, found)
        for number, claim in enumerate(CLAIMS, 1)
        for index, case in enumerate(claim.cases)
    )
    return "\n".join([*table_head(*columns), *rows])


def _row(number: int, claim: Claim, case: Case, found: dict[Case, Found]) -> str:
    figures = found[case]
    name = f"{number}. **{claim.title}** ({claim.where})" if number else ""
    verdict = f"**{_verdict(claim, found)}**" if number else ""
    if len(claim.cases) > 1:
        verdict += ("<br>" if verdict else "") + ("yes" if holds(case, figures) else "no")
    return table_row(
        name,
        case.label,
        ("≤ " if case.at_most else "") + written(figures.claimed, case.form),
        written(figures.exact, case.form),
        percent(figures.off()[0]),
        written(figures.small_claimed, case.form),
        written(figures.small_exact, case.form),
        written(figures.measured, case.form),
        verdict,
    )


def _verdict(claim: Claim, found: dict[Case, Found]) -> str:
    held = [holds(case, found[case]) for case in claim.cases]
    if all(held):
        return "holds"
    return "holds with a condition" if held[0] and claim.condition else "does not hold"


def _sections(found: dict[Case, Found]) -> Iterator[str]:
    yield "## The claims that fail, or need a condition"
    for number, claim in enumerate(CLAIMS, 1):
        verdict = _verdict(claim, found)
        if verdict != "holds":
            yield _section(number, claim, verdict, found)
    yield "## The claims that hold"
    yield "\n".join(
        f"- {number}. **{claim.title}** ({claim.where}): {claim.printed}. {claim.why}"
        for number, claim in enumerate(CLAIMS, 1)
        if _verdict(claim, found) == "holds"
    )


def _section(number: int, claim: Claim, verdict: str, found: dict[Case, Found]) -> str:
    if claim.condition:
        verdict += f": {claim.condition}"
    failing = [case for case in claim.cases if not holds(case, found[case])]
    by_how_much = "; ".join(
        f"{case.label}: {written(found[case].exact, case.form)} instead of "
        f"{written(found[case].claimed, case.form)} ({percent(found[case].off()[0])})"
        for case in failing
    )
    return (
        f"### {number}. {claim.title}\n\n"
        f"*Printed* ({claim.where}): {claim.printed}.\n\n"
        f"*Verdict*: {verdict}.\n\n"
        + (f"*By how much*: {by_how_much}.\n\n" if failing else "")
        + f"*Why*: {claim.why}"
    )


def _runs(measured: Measured) -> str:
    names = [field.name for field in fields(Figures)]
    lines = [
        "One row per run: bytes of the rank that has most, as measured. The command gives the same "
        "figures with their predictions beside them, state by state and call by call.",
        "",
        *table_head(*names, "command"),
    ]
    for text, figures in {command(each): found for each, found in measured.items()}.items():
        lines.append(table_row(*astuple(figures), f"`{text}`"))
    return "\n".join(lines)


def written(value: float, form: Form) -> str:
    match form:
        case Form.BYTES:
            return _bytes(value)
        case Form.UNITS:
            return f"{value:.2f} u"
        case Form.TIMES:
            return f"{value:.3f}×"
        case Form.PER_PARAMETER:
            return f"{value:.2f} B/P"
        case Form.COUNT:
            return f"{value / 1e9:.2f} G" if value >= 1e8 else f"{value / 1e6:.3f} M"
        case Form.SHARE:
            return f"{value:.1%}"


def _bytes(value: float) -> str:
    scale, unit = next(
        (each for each in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if abs(value) >= each[0]),
        (1.0, "B"),
    )
    return (
        f"{value / scale:.4g} {unit}"
        if abs(value) / scale < 1000
        else f"{value / scale:.0f} {unit}"
    )


def percent(value: float) -> str:
    return "0" if abs(value) < TOLERANCE / 2 else f"{value:+.1%}".replace("-", "−")


# Reading it back


def read_back(text: str) -> tuple[Measured, str]:
    """Return the page's measurements and its description of the machine."""
    rest = text.partition(_MACHINE)[2]
    machine = rest.partition("\nOne row per run")[0].strip()
    rows = {
        match[2]: Figures(**dict(zip(FIGURES, map(int, match[1].split("|")), strict=True)))
        for match in re.finditer(r"^\| ([\d |]+) \| `(.+)` \|$", rest, re.MULTILINE)
    }
    return {each: rows[command(each)] for each in sources() if command(each) in rows}, machine


def differences() -> list[str]:
    """Yield differences between the page and the current sources."""
    text = PAGE.read_text(encoding="utf-8")
    measured, machine = read_back(text)
    missing = [f"not measured: {command(each)}" for each in sources() if each not in measured]
    if missing:
        return missing
    wrong = _apart(measured)
    now = page(measured, machine)
    if now != text:
        wrong += _changed_lines(text.splitlines(), now.splitlines())
    return wrong


def reword() -> list[str]:
    """Rewrite the page around its measurements, unless one is missing or differs from the current
    prediction."""
    measured, machine = read_back(PAGE.read_text(encoding="utf-8"))
    wrong = [f"not measured: {command(each)}" for each in sources() if each not in measured]
    if wrong := wrong or _apart(measured):
        return wrong
    PAGE.write_text(page(measured, machine), encoding="utf-8")
    return []


def _apart(measured: Measured) -> list[str]:
    return [
        f"{command(each)}: {line}"
        for each, figures in measured.items()
        for line in apart(each, figures)
    ]


def _changed_lines(before: Iterable[str], now: Iterable[str]) -> list[str]:
    known = set(before)
    return [f"the page lacks: {line}" for line in now if line not in known] or ["order of lines"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="compare the page with the sources")
    parser.add_argument("--reword", action="store_true", help="keep the page's measurements")
    args = parser.parse_args()
    if args.reword:
        wrong = reword()
        print("\n".join(wrong) or f"written: {PAGE.relative_to(ROOT)}")
        return 1 if wrong else 0
    if args.check:
        wrong = differences()
        print("\n".join(wrong) or "the page says what the sources say")
        return 1 if wrong else 0
    machine = header("", ["python", "benchmarks/paper.py", "--save"]).partition("\n")[2].strip()
    measured = measure()
    wrong = _apart(measured)
    text = page(measured, machine)
    PAGE.write_text(text, encoding="utf-8") if args.save else print(text)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
