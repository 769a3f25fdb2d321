"""One HTML page about specs and runs: the answers first, then pictures and tables of the figures.

The page needs no network and no script. Each picture is drawn twice, for desktops and for phones;
colours follow the screen, light or dark. Names that users choose are escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

from ptrain.charts.figures import (
    held_sheet,
    mesh_sheet,
    plan_sheets,
    sources_sheet,
    time_sheet,
    traffic_sheet,
    training_sheets,
)
from ptrain.charts.memory import course_sheet, sweep_sheet
from ptrain.charts.schedule import timeline_sheet
from ptrain.charts.sheet import NARROW, Sheet
from ptrain.charts.svg import DARK_RULES, FONT, svg_text
from ptrain.cost import Column, Estimate
from ptrain.report.out_of_memory import is_out_of_memory
from ptrain.report.predict import Prediction, advice_lines, answer_line, prediction_screen
from ptrain.report.record import verdict_line
from ptrain.report.recorded import DecodedRecord
from ptrain.report.simulation import MemoryHistory
from ptrain.report.summary import training_summary
from ptrain.report.sweep import SweepPoint, sweep_table

_WIDE = 560.0  # points: a column of 747 pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """The first thing to read about a spec or run: a headline, and lines that explain it."""

    tone: Literal["good", "bad", "open"]
    headline: str
    lines: Sequence[str] = ()
    blocks: Sequence[str] = ()  # tables and logs


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSubject:
    """A spec or a run, with everything that is known about it.

    Attributes:
        name: The name, as the user gave it.
        prediction: The prediction of the spec. None: it could not be predicted.
        reason: The reason why there is no prediction.
        is_run: True for a run.
        record: The decoded result record of a finished run.
        torch: The version of torch of the record.
        rows: The rows of the metrics.
        failures: The failed attempts, the last one last: `time` and `error`.
        steps: The number of steps that the run should take.
        checkpoints: The names of the complete checkpoints.
        out_of_memory: The explanation of a failed allocation, its headline first.
        resume: The command that continues the run; empty if nothing was saved.
        simulation: The simulated figures of a rank.
        course: The simulated memory of that rank over a step.
    """

    name: str
    prediction: Prediction | None = None
    reason: str = ""
    is_run: bool = False
    record: DecodedRecord | None = None
    torch: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    failures: Sequence[Mapping[str, str]] = ()
    out_of_memory: Sequence[str] = ()
    steps: int = 0
    checkpoints: Sequence[str] = ()
    resume: str = ""
    simulation: Estimate | None = None
    course: MemoryHistory | None = field(default=None, repr=False)

    @property
    def last_step(self) -> int:
        """The last step with a row of metrics; 0 without one."""
        return max((row["step"] for row in self.rows if "loss" in row), default=0)

    @property
    def progress(self) -> str:
        """The last step, and the number of steps if the spec of the run could be read."""
        return f"{self.last_step} of {self.steps}" if self.steps else str(self.last_step)


def answer_of(subject: PageSubject) -> PageAnswer:
    """Return the answer about a subject: what failed, the verdict, or whether it fits."""
    if not subject.is_run:
        return _prediction_answer(subject)
    answer = _run_answer(subject)
    if subject.reason:
        answer = replace(answer, lines=[*answer.lines, f"Not predicted: {subject.reason}"])
    return answer


def _run_answer(subject: PageSubject) -> PageAnswer:
    """Return the answer about a run: what failed, the verdict, or how far it is."""
    progress = f"step {subject.progress}"
    if subject.record is not None:
        return _record_answer(subject, subject.record)
    if not subject.failures:
        line = "There is no result record: the run goes on, was interrupted, or was killed."
        return PageAnswer(
            tone="open",
            headline=f"Not finished: {progress} is done",
            lines=[line, *_next_lines(subject)],
        )
    return _failure_answer(subject, progress)


def _failure_answer(subject: PageSubject, progress: str) -> PageAnswer:
    """Return the answer about a failed run: its cause, and how to continue."""
    first, *rest = subject.failures[-1]["error"].splitlines()
    cause = first.removeprefix("error: ")
    is_full = is_out_of_memory(first)
    headline, lines, blocks = (
        f"Failed after {progress}: {cause}",
        _next_lines(subject),
        ["\n".join(rest)],
    )
    if subject.out_of_memory:
        headline, *explained = subject.out_of_memory
        table = explained.index("") if "" in explained else len(explained)
        blocks = ["\n".join(explained[table + 1 :])]
        lines = [*explained[:table], *lines]
        return PageAnswer(tone="bad", headline=headline, lines=lines, blocks=blocks)
    if is_full:
        rank = cause.partition(" raised ")[0]
        headline, lines = f"Out of memory on {rank} after {progress}", [cause, *lines]
    if (is_full or _KILLED in first) and subject.prediction is not None:
        lines = [f"Prediction: {answer_line(subject.prediction)}", *lines]
        blocks = ["\n".join(advice_lines(subject.prediction)).strip(), *blocks]
    return PageAnswer(tone="bad", headline=headline, lines=lines, blocks=blocks)


def _next_lines(subject: PageSubject) -> list[str]:
    """Return a line with the command that continues a run, if it saved a checkpoint."""
    nothing = "Nothing was saved: set checkpoint.every=N to be able to continue a run."
    return [f"Continue: {subject.resume}" if subject.resume else nothing]


_KILLED = "SIGKILL"  # by a user, or by the kernel because memory ran out


def _prediction_answer(subject: PageSubject) -> PageAnswer:
    """Return the answer about a spec: whether it fits, and the changes with which it does."""
    if subject.prediction is None:
        return PageAnswer(tone="open", headline=f"Not predicted: {subject.reason}")
    fits = subject.prediction.fit.fits
    headline, *paces = answer_line(subject.prediction).split(" · ")
    advice = "\n".join(advice_lines(subject.prediction)).strip()
    return PageAnswer(
        tone="open" if fits is None else "good" if fits else "bad",
        headline=headline,
        lines=[" · ".join(paces)],
        blocks=[advice],
    )


def _record_answer(subject: PageSubject, record: DecodedRecord) -> PageAnswer:
    """Return the answer about a finished run: its verdict, and the checks that fail."""
    finished = f"Finished {subject.progress} steps"
    if not record.checks:
        return PageAnswer(tone="open", headline=f"{finished}, no verdict")
    failing = [f"{check.name}: {check.why}" for check in record.checks if not check.holds]
    line = verdict_line(record.checks, torch=subject.torch, untold=record.predicted.undefined)
    return PageAnswer(
        tone="bad" if failing else "good",
        headline=line,
        lines=[finished, *(f"fails: {text}" for text in failing[:8])],
    )


Draw = Callable[[float], Iterable[Sheet]]  # the pictures for a width in points


def report_page(subjects: Sequence[PageSubject]) -> str:
    """Return the page about specs and runs as HTML.

    Args:
        subjects: The specs and runs, at least one.
    """
    names = ", ".join(subject.name for subject in subjects)
    parts = [f"<h1>{escape(names)}</h1>"]
    parts += (_answer_html(subject) for subject in subjects)
    if len(subjects) > 1:
        parts += _comparison_html(subjects)
    for subject in subjects:
        parts += _subject_html(subject, has_title=len(subjects) > 1)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>ptrain report: {escape(names)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _answer_html(subject: PageSubject) -> str:
    """Return the answer about a subject."""
    answer = answer_of(subject)
    lines = "".join(f"<p>{escape(line)}</p>" for line in answer.lines if line)
    blocks = "".join(f"<pre>{escape(block)}</pre>" for block in answer.blocks if block)
    return (
        f'<div class="answer {answer.tone}"><b>{escape(subject.name)}</b>'
        f'<p class="headline">{escape(answer.headline)}</p>{lines}{blocks}</div>'
    )


def _comparison_html(subjects: Sequence[PageSubject]) -> Iterator[str]:
    """Yield the parts of the page that compare several subjects."""
    points = [
        SweepPoint(label=subject.name, prediction=subject.prediction)
        for subject in subjects
        if subject.prediction is not None
    ]
    if len(points) > 1:
        yield _section_html(
            "Comparison", lambda width: [sweep_sheet(points, width)], sweep_table(points)
        )
    runs = {subject.name: subject.rows for subject in subjects if subject.rows}
    if len(runs) > 1:
        yield _section_html("Losses and throughput", lambda width: training_sheets(runs, width))


def _subject_html(subject: PageSubject, *, has_title: bool) -> Iterator[str]:
    """Yield the parts of the page about one subject."""
    if has_title:
        yield f"<h2>{escape(subject.name)}</h2>"
    name = subject.name
    if subject.rows:
        yield _section_html("Training", lambda width: training_sheets({name: subject.rows}, width))
    if subject.is_run:
        yield f"<h3>Checkpoints and restarts</h3>{_history_html(subject)}"
    yield from _record_html(subject)
    if (prediction := subject.prediction) is None:
        return
    derivation, exact = prediction.derivation, prediction.derivation.exact
    point = SweepPoint(label=name, prediction=prediction)
    yield _section_html("Memory", lambda width: _memory_sheets(subject, point, width))
    yield _section_html("Placement", lambda width: [mesh_sheet(derivation, width)])
    if exact.traffic:
        yield _section_html("Traffic", lambda width: [traffic_sheet(name, exact, width)])
    if exact.step is not None:
        yield _section_html(
            "Time",
            lambda width: [time_sheet(name, derivation, width), timeline_sheet(derivation, width)],
        )
    # As wide as their time or tokens, so they scroll.
    drawn = (svg_text(sheet, is_file=False) for sheet in plan_sheets(derivation.plan))
    if sheets := "".join(drawn):
        yield f'<h3>Schedule and tokens</h3><div class="scroll">{sheets}</div>'
    yield _details_html("All predicted figures", prediction_screen(prediction))


def _memory_sheets(subject: PageSubject, point: SweepPoint, width: float) -> Iterator[Sheet]:
    """Yield the pictures of memory: peak by state, and over a step if it was simulated."""
    yield sweep_sheet([point], width)
    if subject.course is not None and point.prediction is not None:
        usable = point.prediction.fit.usable_memory
        yield course_sheet(subject.course, subject.name, usable, width)
        yield held_sheet(subject.name, subject.course, width)


def _record_html(subject: PageSubject) -> Iterator[str]:
    """Yield the predicted, simulated and measured figures of a run or of a simulated spec."""
    sources: dict[str, Estimate] = {}
    record = subject.record
    if record is not None:
        sources["predicted"] = record.predicted
    elif subject.prediction is not None:
        sources["predicted"] = subject.prediction.derivation.exact
    if subject.simulation is not None:
        sources["simulated"] = subject.simulation
    measured = record.estimates.get(Column.MEASURED) if record else None
    if measured is not None:
        sources["measured"] = measured
    if len(sources) < 2:
        return
    text = ""
    if record is not None and measured is not None:
        text = training_summary(
            record.predicted,
            measured,
            record.checks,
            torch=subject.torch,
            wire=record.wire,
            step_seconds=record.step_seconds,
        )
    title = ", ".join(sources).capitalize()
    yield _section_html(title, lambda width: [sources_sheet(subject.name, sources, width)], text)


def _history_html(subject: PageSubject) -> str:
    """Return the checkpoints and the failed attempts of a run."""
    saved = ", ".join(subject.checkpoints) or "none"
    failed = (
        _details_html(f"Failed attempt of {failure['time']}", failure["error"])
        for failure in subject.failures
    )
    none = "<p>No attempt failed.</p>" * (not subject.failures)
    return f"<p>Checkpoints: {escape(saved)}</p>{none}{''.join(failed)}"


def _section_html(title: str, draw: Draw, text: str = "") -> str:
    """Return a section with pictures for both widths, and a table as text."""
    pictures = (
        f'<div class="{name}">{"".join(svg_text(sheet, is_file=False) for sheet in draw(width))}'
        "</div>"
        for name, width in (("wide", _WIDE), ("narrow", NARROW))
    )
    table = [_details_html("The figures as text", text)] if text else []
    return "".join([f"<h3>{escape(title)}</h3>", *pictures, *table])


def _details_html(summary: str, text: str) -> str:
    """Return a part of the page that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


_STYLE = (
    ":root{--ink:#000;--paper:#fff;--muted:#555;--line:#ccc;--card:#f4f5f7}"
    "@media(prefers-color-scheme:dark){:root{--ink:#f2f4f6;--paper:#15181c;--muted:#b3bac2;"
    f"--line:#4a5158;--card:#20252b}}{DARK_RULES}}}"
    f"body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 {FONT}}}"
    "main{max-width:747px;margin:0 auto;padding:16px}"
    "h1{font-size:1.4rem;margin:0 0 12px;overflow-wrap:anywhere}"
    "h2{font-size:1.25rem;margin:40px 0 0;border-top:1px solid var(--line);padding-top:16px;"
    "overflow-wrap:anywhere}h3{font-size:1.05rem;margin:28px 0 4px}"
    ".answer{background:var(--card);border-left:6px solid #e69f00;padding:10px 14px;"
    "margin:0 0 12px;overflow-wrap:anywhere}"
    ".good{border-color:#009e73}.bad{border-color:#d55e00}"
    ".answer p{margin:4px 0}.headline{font-size:1.15rem;font-weight:600}"
    "pre{overflow-x:auto;font:12px/1.4 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "margin:8px 0}summary{cursor:pointer;color:var(--muted)}details{margin:6px 0}"
    "svg.c{display:block;max-width:100%;height:auto}.scroll{overflow-x:auto}"
    ".scroll svg.c{max-width:none}"
    "@media(max-width:700px){.wide{display:none}}@media(min-width:700.02px){.narrow{display:none}}"
)
