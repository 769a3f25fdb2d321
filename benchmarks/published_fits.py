"""`fits` compared with published jobs that trained or ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from _script import Script, table_head, table_row

from ptrain.cli.predict import predict_spec
from ptrain.selection.fit import Fit
from ptrain.units import format_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A published job: `trained` is False if it ran out of memory."""

    name: str
    trained: bool
    source: str
    settings: tuple[str, ...]
    published: str = ""  # the memory that the source states, if it does


def published() -> Iterator[Job]:
    """Yield the jobs of published_jobs.yaml."""
    file = Path(__file__).with_name("published_jobs.yaml")
    for job in yaml.safe_load(file.read_text(encoding="utf-8")):
        yield Job(**{**job, "settings": tuple(job["settings"])})


JOBS = tuple(published())
SCRIPT = Script("published_fits")


def predict_fit(job: Job) -> Fit:
    """Return the fit of a job, as `ptrain predict` derives it."""
    return predict_spec(job.settings[0], job.settings[1:], allow_import=False).fit


def answer(fit: Fit) -> str:
    """Return the answer of `ptrain predict` as one word."""
    if fit.fits is None:
        return "unknown"
    if not fit.fits:
        return "does not fit"
    return "tight" if fit.is_tight else "fits"


def is_wrong(job: Job, fit: Fit) -> bool:
    """Return True if the answer contradicts the published outcome."""
    return fit.fits is not None and fit.fits is not job.trained


def table(fits: Sequence[Fit]) -> Iterator[str]:
    """Yield the rows of the table."""
    yield from table_head("job", "source", "published", "answer", "peak", "usable", "headroom")
    for job, fit in zip(JOBS, fits, strict=True):
        outcome = "trained" if job.trained else "out of memory"
        published = f"{outcome}, {job.published}" if job.published else outcome
        headroom = f"{'−' if fit.spare_bytes < 0 else ''}{format_memory(abs(fit.spare_bytes))}"
        sizes = (
            format_memory(fit.peak_bytes or 0),
            format_memory(fit.usable_memory or 0),
            headroom,
        )
        yield table_row(job.name, job.source, published, answer(fit), *sizes)


def main() -> int:
    parser = SCRIPT.parser()
    args = parser.parse_args()
    head = SCRIPT.head()
    fits = [predict_fit(job) for job in JOBS]
    wrong = [job.name for job, fit in zip(JOBS, fits, strict=True) if is_wrong(job, fit)]
    failed = [f"{name}: the answer contradicts the published outcome" for name in wrong]
    return SCRIPT.conclude([*head, *table(fits)], failed, args)


if __name__ == "__main__":
    raise SystemExit(main())
