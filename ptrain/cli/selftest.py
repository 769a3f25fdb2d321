"""`ptrain selftest`: run the built-in specs on this machine's devices, and write a page of results.

Each spec trains four steps in processes of its own: memory and traffic are compared with the
prediction, and the losses with those of one device. A spec that hangs ends by its own timeouts, and
the next one runs. On GPUs, rates and the MFU of three model sizes follow.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ptrain.cli.progress import progress
from ptrain.derivation.throughput import step_tokens, token_operations
from ptrain.errors import PtrainError, VerdictFailed, refused
from ptrain.installed import require_torch, versions
from ptrain.plan.lower import own_facts
from ptrain.processor import cores, gpus, shares_gpus
from ptrain.report.screen import next_line, show
from ptrain.report.table import Importance, TableColumn, name_column, render
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import listing, names
from ptrain.spec.spec import Spec
from ptrain.train import environment
from ptrain.train.folder import write_text
from ptrain.train.notebook import run as train

_FOLDERS = ("strategies", "experts")
_STEPS = 4  # two settle (buckets, optimizer state), the third is measured
_BRIEFLY = (
    f"train.steps={_STEPS}",
    "eval.every=0",
    "checkpoint.at_end=false",
    "checkpoint.every=0",
    "cluster=null",  # that of a built-in spec is a laptop
    "timeout.init=120",
    "timeout.step=60",
)
# What decides the losses; where the states are does not.
_OF_LOSSES = ("model", "precision", "batch", "optimizer", "data", "train", "device")
# Relative. Sums in another order differ by some units in the last place, which the first steps of
# AdamW, whose update is near the sign of the gradient, make larger.
_LIMITS = {2: 2e-2, 4: 1e-4, 8: 1e-9}  # by bytes of an element
_CALIBRATION_SECONDS = 100
_SIZES = (
    ("gpt2-124m", "batch.micro=8", "batch.sequence=1024"),
    ("gpt2-774m", "batch.micro=4", "batch.sequence=1024"),
    ("llama3.2-1b", "batch.micro=2", "batch.sequence=2048"),
)
_SIZE_STEPS = 12
_SETTLED = 4  # steps that the seconds of a step are not taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one spec gave. `apart`: the largest relative difference of a loss from one device's;
    None if it was not compared. `error`: why it did not run to its end."""

    name: str
    ranks: int
    holds: bool
    seconds: float
    apart: float | None = None
    limit: float = 0.0
    error: str = ""

    @property
    def passes(self) -> bool:
        """Whether the verdict holds and the losses are within the limit."""
        return not self.error and self.holds and (self.apart is None or self.apart <= self.limit)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the page."""
        measured = self.error or ("as predicted" if self.holds else "differ from the prediction")
        apart = "" if self.apart is None else f"{self.apart:.1e} (limit {self.limit:.0e})"
        verdict = "ok" if self.passes else "FAIL"
        return verdict, self.name, str(self.ranks), measured, apart, f"{self.seconds:.0f} s"


_HEADS = ("", "spec", "ranks", "memory and traffic", "losses from one device's", "time")


def run(args: Namespace) -> int:
    """Run the self-test and return 0 if every spec passes, else 1."""
    require_torch()
    ranks = args.ranks or gpus() or 2
    device = "cuda" if args.device == "auto" and gpus() else args.device.replace("auto", "cpu")
    if device == "cuda" and ranks > gpus() and not shares_gpus():
        raise refused("--ranks", f"{ranks} ranks, and {gpus()} GPUs", f"Use `--ranks {gpus()}`.")
    is_timed = device == "cuda" and not shares_gpus()
    specs, left_out = _cases(ranks, device, names().kinds if args.brief else listing(*_FOLDERS))
    with tempfile.TemporaryDirectory(prefix="ptrain-selftest-") as folder:
        results = list(_results(specs, Path(folder)))
        rates, sizes = _on_gpus(ranks, Path(folder)) if is_timed else ("", [])
    page = _page(ranks, device, results, left_out, rates, sizes)
    out = args.out or Path(f"selftest_{datetime.now(UTC):%Y-%m-%d_%H%M}.md")
    write_text(out, page)
    failed = [result for result in results if not result.passes]
    show(
        _screen(failed or results), "", f"{len(results) - len(failed)} of {len(results)} specs pass"
    )
    show(
        f"page: {out}",
        "",
        next_line(f"ptrain verify {failed[0].name}" if failed else "ptrain train"),
    )
    return VerdictFailed.exit_code if failed else 0


def _cases(ranks: int, device: str, chosen: Iterable[str]) -> tuple[list[Spec], dict[str, int]]:
    """Return the specs for so many ranks, and the names of those that need more, with the number.
    A mesh of one axis spans all ranks if it can; any other mesh stays as it is written."""
    specs, left_out = [], {}
    for name in chosen:
        words = [*_BRIEFLY, f"device={device}"]
        spec = load(name, words).spec
        axes = [factor.axis for factor in spec.factors]
        if len(axes) == 1:
            with suppress(PtrainError):  # heads, layers or samples may not be multiples of it
                spec = load(name, [*words, f"mesh.{axes[0]}={ranks}"]).spec
        if spec.world_size <= ranks:
            specs.append(spec)
        else:
            left_out[name] = spec.world_size
    return specs, left_out


def _results(specs: Sequence[Spec], folder: Path) -> Iterator[Result]:
    """Yield the result of each spec. One device's losses are computed once for all specs that have
    the same."""
    alone: dict[str, list[float]] = {}
    with progress("running the built-in specs") as step:
        for index, spec in enumerate(specs):
            step(index, len(specs), f"running {spec.name}")
            yield _result(spec, folder, alone)


def _result(spec: Spec, folder: Path, alone: dict[str, list[float]]) -> Result:
    start = time.monotonic()
    holds, apart, error = False, None, ""
    try:
        reference = {key: spec.resolved[key] for key in _OF_LOSSES if key in spec.resolved}
        key = json.dumps(reference, sort_keys=True, default=str)
        if key not in alone:
            one = {**reference, "name": "one-device", "mesh": {}, "placement": {}}
            alone[key] = _losses(one, folder)[1]
        holds, losses = _losses(spec.resolved, folder)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, alone[key], strict=True))
    except PtrainError as failure:
        error = str(failure).strip().splitlines()[0]
    return Result(
        name=spec.name,
        ranks=spec.world_size,
        holds=holds,
        seconds=time.monotonic() - start,
        apart=apart,
        limit=_LIMITS[spec.precision.effective.parameters.itemsize],
        error=error,
    )


def _losses(written: Mapping[str, Any], folder: Path) -> tuple[bool, list[float]]:
    """Train a spec; return its verdict and the loss of every step."""
    ran = train(dict(written), run_dir=folder / "run")
    losses = [line["loss"] for line in ran.metrics]
    shutil.rmtree(ran.folder)
    return ran.holds, losses


def _on_gpus(ranks: int, folder: Path) -> tuple[str, list[tuple[str, ...]]]:
    """Return the table that a calibration prints, and a row per model size: milliseconds of a step,
    tokens per second and GPU, and the share of the measured speed of products (MFU)."""
    cluster = folder / "cluster.yaml"
    command = [sys.executable, "-P", "-m", "ptrain", "calibrate", "--ranks", str(ranks), "--force"]
    command += ["--seconds", str(_CALIBRATION_SECONDS), "--out", str(cluster)]
    ended = subprocess.run(
        command,
        env=environment.of_ptrain(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        return ended.stderr.strip(), []
    return ended.stdout.strip(), [_size_row(size, ranks, cluster, folder) for size in _SIZES]


def _size_row(size: Sequence[str], ranks: int, cluster: Path, folder: Path) -> tuple[str, ...]:
    model, micro, sequence = size
    number = int(micro.partition("=")[2]) * ranks
    words = (
        *_BRIEFLY, f"train.steps={_SIZE_STEPS}", f"model.preset={model}", micro, sequence,
        f"batch.global={number}", f"mesh.dp_shard={ranks}", "precision.layout=fsdp-mixed",
        f"cluster.preset={cluster}", "device=cuda",
    )  # fmt: skip
    try:
        spec = load(names().default, words).spec
        ran = train(spec, run_dir=folder / "run")
    except PtrainError as failure:
        return model, str(failure).strip().splitlines()[0], "", ""
    seconds = median(line["seconds"] for line in ran.metrics[_SETTLED:])
    shutil.rmtree(ran.folder)
    facts, shape = own_facts(spec), spec.model
    assert isinstance(shape, ModelShape), "presets are built-in models"
    tokens = (step_tokens(spec, facts) or 0) / seconds / ranks
    operations = token_operations(shape, facts, spec.batch.sequence, is_causal=False)
    flops = spec.cluster.flops if spec.cluster else None
    mfu = f"{tokens * operations / flops:.1%}" if flops else "unknown: the peak of the GPU"
    return model, f"{seconds * 1e3:.1f} ms", f"{tokens:,.0f}", mfu


def _screen(results: Sequence[Result]) -> str:
    cells = zip(*(result.cells for result in results), strict=True)
    first, name, *others = (list(column) for column in cells)
    columns = [TableColumn(_HEADS[0], Importance.NAME, first), name_column(_HEADS[1], name)]
    columns += [
        TableColumn(head, Importance.FIGURE, column)
        for head, column in zip(_HEADS[2:], others, strict=True)
    ]
    return render(columns)


def _page(
    ranks: int,
    device: str,
    results: Sequence[Result],
    left_out: Mapping[str, int],
    rates: str,
    sizes: Sequence[tuple[str, ...]],
) -> str:
    """Return the page as Markdown."""
    passed = sum(result.passes for result in results)
    about = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": f"{ranks} ranks on {device}, {gpus()} GPUs, {cores()} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "specs": f"{passed} of {len(results)} pass",
    }
    lines = ["# ptrain selftest", "", *_table(("", ""), about.items())]
    lines += ["", "## Built-in specs", "", *_table(_HEADS, (result.cells for result in results))]
    if left_out:
        listed = ", ".join(f"{name} ({number} ranks)" for name, number in left_out.items())
        lines += ["", f"Not run, because they need more ranks: {listed}."]
    if sizes:
        heads = ("model", "step", "tokens/s/GPU", "MFU")
        lines += ["", "## Model sizes, FSDP2 in bf16, eager", "", *_table(heads, sizes)]
    if rates:
        lines += ["", "## Calibration", "", "```", rates, "```"]
    else:
        why = "GPUs that ranks share" if device == "cuda" else "CPUs"
        lines += ["", f"Not measured on {why}: rates and the MFU (`ptrain calibrate`)."]
    return "\n".join([*lines, ""])


def _table(heads: Sequence[str], rows: Any) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
