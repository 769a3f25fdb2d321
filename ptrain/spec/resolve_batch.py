"""Resolution of the batch: what is not written of global, micro, accumulate follows."""

from __future__ import annotations

from dataclasses import replace

from ptrain.spec.batch import (
    AUTO,
    MAX_SAMPLES,
    Batch,
    BatchRaw,
    Rounding,
    WrittenTokens,
    rounded_samples,
    written_tokens,
)
from ptrain.spec.resolve_sections import Report


def resolve_batch(raw: BatchRaw, data_degree: int, report: Report) -> Batch | None:
    """global = micro x accumulate x data degree; any one of the first and third may be left out,
    and for a `micro` that is to be chosen there must be a global batch and nothing else."""
    if raw.micro == AUTO:
        return _open(raw, data_degree, report)
    assert isinstance(raw.micro, int), "the other word is auto"
    return _batch(raw, raw.micro, data_degree, report)


def _open(raw: BatchRaw, data_degree: int, report: Report) -> Batch | None:
    """The batch in micro-batches of one sample, which is what a smaller one cannot be."""
    if raw.samples is None:
        finding = "auto: how many samples a step takes nobody says, so nothing bounds it"
        report.add("batch.micro", finding, "write batch.global too: samples, or 4M tokens")
    elif raw.accumulate is not None:
        finding = f"auto: accumulate follows from it, and {raw.accumulate} is written"
        report.add("batch.micro", finding, "remove batch.accumulate, or write micro as a number")
    elif batch := _batch(raw, 1, data_degree, report):
        return replace(batch, micro_is_open=True)
    return None


def _batch(raw: BatchRaw, micro: int, data_degree: int, report: Report) -> Batch | None:
    unit = micro * data_degree
    step = unit * (raw.accumulate or 1)
    written = _written(raw, report)
    samples = _global(raw, written, step, report)
    if samples is None:
        return None
    accumulate = raw.accumulate or max(1, samples // unit)
    if samples == unit * accumulate:
        return Batch(
            global_samples=samples,
            micro=micro,
            sequence=raw.sequence,
            accumulate=accumulate,
            written=written,
            pads=raw.pad,
        )
    below, above = samples // step * step, -(-samples // step) * step
    valid = [step] if raw.accumulate else sorted({max(below, step), above})
    factor = f" x accumulate={raw.accumulate}" if raw.accumulate else ""
    product = f"micro={raw.micro}{factor} x data degree={data_degree}"
    relation = "is not" if raw.accumulate else "is not a multiple of"
    report.add(
        "batch.global",
        f"global={samples} {relation} {product} = {step}",
        f"write batch.global={' or '.join(map(str, valid))}"
        + _other_accumulate(raw, samples, unit),
    )
    return None


def _other_accumulate(raw: BatchRaw, samples: int, unit: int) -> str:
    if raw.accumulate and samples % unit == 0:
        return f", or batch.accumulate={samples // unit}"
    return ""


def _written(raw: BatchRaw, report: Report) -> WrittenTokens | None:
    """The tokens that are written; None of samples, which nothing rounds."""
    if isinstance(raw.samples, str):
        rounding = Rounding(raw.rounding or Rounding.POWER_OF_TWO)
        return written_tokens(raw.samples, raw.sequence, rounding)
    if raw.rounding is not None:
        finding = f"{raw.rounding} says how tokens become samples, and batch.global has none"
        report.add("batch.round", finding, 'remove it, or write batch.global="4M tokens"')
    return None


def _global(raw: BatchRaw, written: WrittenTokens | None, step: int, report: Report) -> int | None:
    """Samples: as written, or as many as come nearest to the tokens that are written."""
    if written is None:
        return raw.samples if isinstance(raw.samples, int) else step
    samples = rounded_samples(written, step)
    if samples <= MAX_SAMPLES:
        return samples
    finding = f"{written.text} are {written.samples} samples; a step takes 1..{MAX_SAMPLES}"
    report.add("batch.global", finding, "write fewer tokens")
    return None
