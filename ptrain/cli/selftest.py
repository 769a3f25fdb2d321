"""The command `ptrain selftest`: run the built-in specs here and write a page of results.

Each spec trains four steps in separate processes. Memory and traffic are compared with the
prediction, and losses with a single-device training. A spec that hangs ends by its timeouts, and
the next spec runs. On GPUs, a calibration and the MFU of three model sizes follow. The page is
written after every spec, so that an interrupted test leaves the results so far.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ptrain.cli.doctor import probe_torch
from ptrain.cli.progress import show_progress
from ptrain.derivation.estimate import step_tokens, token_operations
from ptrain.errors import PtrainError, VerdictFailed, input_error
from ptrain.files import temporary_folder
from ptrain.installed import require_torch, versions
from ptrain.plan.lower import built_in_facts
from ptrain.processor import cores, shares_gpus
from ptrain.report.screen import next_line, print_screen
from ptrain.report.table import Importance, TableColumn, name_column, render_table
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import list_files, load_names
from ptrain.spec.spec import Spec
from ptrain.train.notebook import Run, load_trainable, run_command
from ptrain.train.notebook import run as train
from ptrain.units import with_noun

_FOLDERS = ("strategies", "experts")
# DDP rebuilds its buckets after the first step and optimizers create their state in it; memory and
# traffic are measured in the third step.
_STEPS = 4
_SHORT_RUN = (
    f"train.steps={_STEPS}",
    "eval.every=0",
    "checkpoint.at_end=false",
    "checkpoint.every=0",
    "cluster=null",  # built-in specs name a laptop
    "timeout.init=60",
    "timeout.step=60",
)
# Sections of a spec that determine the losses. Mesh and placement do not.
_LOSS_SECTIONS = ("model", "precision", "batch", "optimizer", "data", "train", "device")
# Allowed relative differences of a loss, by bytes per parameter element. Sums in another order
# differ by some units in the last place. AdamW's first updates are near the sign of the gradient,
# which makes such differences larger.
_LIMITS = {2: 2e-2, 4: 1e-4, 8: 1e-9}
_CALIBRATION_SECONDS = 100  # the default of `ptrain calibrate`
_SIZES = (
    ("gpt2-124m", "batch.micro=8", "batch.sequence=1024"),
    ("gpt2-774m", "batch.micro=4", "batch.sequence=1024"),
    ("llama3.2-1b", "batch.micro=2", "batch.sequence=2048"),
)
_SIZE_STEPS = 12
_SETTLED = 4  # warm-up steps, left out of the median step time


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecResult:
    """The result of one spec.

    Attributes:
        holds: The verdict on memory and traffic.
        seconds: The wall time of the training and of a new reference.
        difference: The largest relative difference of a loss from the reference. None: not
            compared.
        limit: The allowed relative difference of a loss.
        error: The reason why the training failed; empty if it ended.
    """

    name: str
    ranks: int
    holds: bool
    seconds: float
    difference: float | None = None
    limit: float = 0.0
    error: str = ""

    @property
    def has_passed(self) -> bool:
        """True if the verdict holds and the losses are within the limit."""
        return (
            not self.error
            and self.holds
            and (self.difference is None or self.difference <= self.limit)
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the page's row."""
        measured = self.error or ("as predicted" if self.holds else "differ from the prediction")
        apart = "" if self.difference is None else f"{self.difference:.1e} (limit {self.limit:.0e})"
        verdict = "ok" if self.has_passed else "FAIL"
        return verdict, self.name, str(self.ranks), measured, apart, f"{self.seconds:.0f} s"


_HEADS = ("", "spec", "ranks", "memory and traffic", "largest loss difference", "time")


@dataclass(slots=True, kw_only=True)
class Page:
    """The page of results, as far as the test has run.

    Attributes:
        planned: The number of specs to run.
        left_out: The specs that need more ranks, with their number of ranks.
        rates: The output of the calibration.
        sizes: A row for each model size.
        errors: Failures of the calibration and of the model sizes.
    """

    path: Path
    ranks: int
    device: str
    planned: int
    left_out: Mapping[str, int]
    results: list[SpecResult] = field(default_factory=list)
    rates: str = ""
    sizes: list[tuple[str, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write the file.

        Raises:
            SpecError: If the file cannot be written.
        """
        try:
            self.path.write_text(self.text, encoding="utf-8")
        except OSError as error:
            finding = f"cannot write {self.path}: {error.strerror}"
            raise input_error(
                "--out", finding, "Use `--out FILE` with a file that can be written."
            ) from None

    @property
    def summary(self) -> str:
        """A sentence with the number of specs that passed, and that did not run."""
        number = sum(result.has_passed for result in self.results)
        waiting = self.planned - len(self.results)
        more = f"; interrupted before {waiting} more" * bool(waiting)
        return f"{number} of {len(self.results)} specs pass{more}"

    @property
    def text(self) -> str:
        """The page as Markdown."""
        about = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "ranks": f"{self.ranks} on {self.device}, {cores()} cores",
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "result": self.summary,
        }
        rows = (result.cells for result in self.results)
        lines = ["# ptrain selftest", "", *_markdown_table(("", ""), about.items())]
        lines += ["", "## Built-in specs", "", *_markdown_table(_HEADS, rows), "", _LOSSES]
        if self.ranks == 1:
            lines += ["", _ONE_RANK]
        if self.left_out:
            listed = ", ".join(f"{name} ({number})" for name, number in self.left_out.items())
            lines += ["", f"Not run, because they need more ranks: {listed}."]
        if self.sizes:
            heads = ("model", "step", "tokens/s/GPU", "MFU")
            lines += [
                "",
                "## Model sizes, FSDP2 in bf16, eager",
                "",
                *_markdown_table(heads, self.sizes),
            ]
        if self.rates:
            lines += ["", "## Calibration", "", "```", self.rates, "```"]
        lines += [f"\nFailed: {error}" for error in self.errors]
        return "\n".join([*lines, ""])


_LOSSES = (
    "The last figure compares the losses of all steps with those of the same training on one "
    "device, relative."
)
_ONE_RANK = (
    "With one rank nothing was communicated. `PTRAIN_SHARE_GPUS=1 ptrain selftest --ranks 2` runs "
    "two ranks on one GPU."
)


def run(args: Namespace) -> int:
    """Run the self-test and return 0 if every spec passes, else 1."""
    require_torch()
    available = 0 if args.device == "cpu" else _usable_gpus()
    if args.device == "cuda" and not available:
        raise input_error("--device", "torch finds no GPU", "Use `--device cpu`.")
    ranks = args.ranks or available or 2
    device = "cuda" if available else "cpu"
    if available and ranks > available and not shares_gpus():
        raise input_error(
            "--ranks",
            f"{ranks} ranks, and torch finds {with_noun(available, 'GPU')}",
            f"Use `--ranks {available}`, or set PTRAIN_SHARE_GPUS=1 to let ranks share a GPU.",
        )
    specs, left_out = _select_specs(
        ranks, device, load_names().kinds if args.brief else list_files(*_FOLDERS)
    )
    page = Page(
        path=args.out or Path(f"selftest_{datetime.now(UTC):%Y-%m-%d_%H%M}.md"),
        ranks=ranks,
        device=device,
        planned=len(specs),
        left_out=left_out,
    )
    page.write()  # a path that cannot be written is reported before anything runs
    try:
        with temporary_folder() as folder:
            _run_specs(specs, page, folder)
            if device == "cuda" and not shares_gpus():
                _measure_speed(page, folder)
    finally:
        page.write()
        _print_results(page)
    fails = page.errors or not all(result.has_passed for result in page.results)
    return VerdictFailed.exit_code if fails else 0


def _print_results(page: Page) -> None:
    """Print the results: failed specs if there are any, else all."""
    failed = [result for result in page.results if not result.has_passed]
    following = f"ptrain verify {failed[0].name}" if failed else "ptrain train"
    table = [_results_table(failed or page.results), ""] if page.results else []
    failures = [f"failed: {error}" for error in page.errors]
    print_screen(*table, page.summary, *failures, f"page: {page.path}", "", next_line(following))


def _usable_gpus() -> int:
    """Return the number of GPUs that torch can use, which CUDA_VISIBLE_DEVICES may limit.

    Another process counts them, because this one does not import torch.
    """
    return len(probe_torch().gpus)


def _select_specs(
    ranks: int, device: str, chosen: Iterable[str]
) -> tuple[list[Spec], dict[str, int]]:
    """Return the specs for a number of ranks, and the number of ranks of specs that need more.

    A mesh of one axis is extended to as many of the ranks as is legal. Other meshes stay as
    written.

    Args:
        ranks: The number of ranks of this test.
        device: `cpu` or `cuda`.
        chosen: The names of specs.
    """
    specs, left_out = [], {}
    for name in chosen:
        words = [*_SHORT_RUN, f"device={device}"]
        spec = load(name, words).spec
        axes = [factor.axis for factor in spec.factors]
        # The largest legal degree wins. The batch grows to a multiple of the data ranks' need.
        for degree in range(ranks, spec.world_size, -1) if len(axes) == 1 else ():
            samples = math.lcm(spec.batch.global_samples, spec.batch.micro * degree)
            more = [f"mesh.{axes[0]}={degree}", f"batch.global={samples}"]
            with suppress(PtrainError):  # heads, layers or experts may not be multiples of it
                spec = load_trainable(name, [*words, *more])
                break
        if ranks == 1 and len(axes) == 1:
            spec = load(name, [*words, f"mesh.{axes[0]}=1"]).spec
        if spec.world_size <= ranks:
            specs.append(spec)
        else:
            left_out[name] = spec.world_size
    return specs, left_out


def _run_specs(specs: Sequence[Spec], page: Page, folder: Path) -> None:
    """Run each spec. Specs with the same reference share one single-device run."""
    alone: dict[str, list[float]] = {}
    with show_progress("running the built-in specs") as step:
        for index, spec in enumerate(specs):
            step(index, len(specs), f"running {spec.name}")
            page.results.append(_test_spec(spec, folder, alone))
            page.write()


def _test_spec(spec: Spec, folder: Path, alone: dict[str, list[float]]) -> SpecResult:
    """Run one spec and compare its losses with the reference.

    Args:
        spec: The spec to run.
        folder: The folder of all runs.
        alone: The losses of references so far, by the settings that determine them.
    """
    start = time.monotonic()
    holds, loss_difference, error = False, None, ""
    try:
        reference = {key: spec.resolved[key] for key in _LOSS_SECTIONS if key in spec.resolved}
        key = json.dumps(reference, sort_keys=True, default=str)
        if key not in alone:
            one = {**reference, "name": "one-device", "mesh": {}, "placement": {}}
            alone[key] = _train_losses(one, folder)[1]
        holds, losses = _train_losses(spec.resolved, folder)
        loss_difference = largest_difference(losses, alone[key])
    except PtrainError as failure:
        error = str(failure).strip().splitlines()[0]
    return SpecResult(
        name=spec.name,
        ranks=spec.world_size,
        holds=holds,
        seconds=time.monotonic() - start,
        difference=loss_difference,
        limit=_LIMITS[spec.precision.effective_layout.parameters.itemsize],
        error=error,
    )


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference; infinity if a loss is missing or not finite.

    Args:
        losses: The losses of each step.
        others: The losses of the reference, by which differences are divided.
    """
    if len(losses) != len(others) or not all(map(math.isfinite, (*losses, *others))):
        return math.inf
    # 1e-12 avoids a division by zero.
    pairs = zip(losses, others, strict=True)
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def _train_losses(written: Mapping[str, Any], folder: Path) -> tuple[bool, list[float]]:
    """Train a spec; return its verdict and the loss of every step."""
    ran = _train_in_new_folder(dict(written), folder)
    return ran.holds, [line["loss"] for line in ran.metrics]


def _train_in_new_folder(spec: Any, folder: Path) -> Run:
    """Train a spec in a new folder, because a failed training leaves a folder that is not empty."""
    return train(spec, run_dir=Path(tempfile.mkdtemp(dir=folder), "run"))


def _measure_speed(page: Page, folder: Path) -> None:
    """Calibrate this machine, and measure the speed of each model size.

    A row has the step time, tokens/s/GPU, and MFU: the share of the calibrated matrix-product
    speed.
    """
    cluster = folder / "cluster.yaml"
    words = ["calibrate", "--ranks", str(page.ranks), "--seconds", str(_CALIBRATION_SECONDS)]
    ended = run_command(*words, "--out", str(cluster), "--force")
    if ended.returncode:
        page.errors.append(f"calibration: {ended.stderr.strip()}")
        return
    page.rates = ended.stdout.strip()
    for size in _SIZES:
        try:
            page.sizes.append(_size_row(size, page.ranks, cluster, folder))
        except PtrainError as failure:
            page.errors.append(f"{size[0]}: {str(failure).strip().splitlines()[0]}")
        page.write()


def size_spec(size: Sequence[str], ranks: int, cluster: Path | str) -> Spec:
    """Return the spec that trains one model size.

    Args:
        size: The preset of the model, and overrides of the micro-batch and the sequence.
        ranks: The number of ranks, all on the axis dp_shard.
        cluster: The file of a calibrated cluster, or a preset.
    """
    model, micro, sequence = size
    samples = int(micro.partition("=")[2]) * ranks
    words = (
        *_SHORT_RUN, f"train.steps={_SIZE_STEPS}", f"model.preset={model}", micro, sequence,
        f"batch.global={samples}", f"mesh.dp_shard={ranks}", "precision.layout=fsdp-mixed",
        f"cluster={{preset: {cluster}}}", "device=cuda",
    )  # fmt: skip
    return load(load_names().default, words).spec


def _size_row(size: Sequence[str], ranks: int, cluster: Path, folder: Path) -> tuple[str, ...]:
    """Train one model size and return its row.

    Args:
        size: The preset of the model, and overrides of the micro-batch and the sequence.
        ranks: The number of ranks.
        cluster: The file with this machine's calibrated rates.
        folder: The folder of all runs.

    Returns:
        The model, the median step time, tokens/s/GPU, and the MFU.
    """
    spec = size_spec(size, ranks, cluster)
    ran = _train_in_new_folder(spec, folder)
    seconds = median(line["seconds"] for line in ran.metrics[_SETTLED:])
    facts, shape = built_in_facts(spec), spec.model
    assert isinstance(shape, ModelShape), "presets are built-in models"
    tokens = (step_tokens(spec, facts) or 0) / seconds / ranks
    operations = token_operations(shape, facts, spec.batch.sequence, is_causal=False)
    flops = spec.cluster.flops if spec.cluster else None
    mfu = f"{tokens * operations / flops:.1%}" if flops else "unknown: the peak of the GPU"
    return size[0], f"{seconds * 1e3:.1f} ms", f"{tokens:,.0f}", mfu


def _results_table(results: Sequence[SpecResult]) -> str:
    """Return the results as a table for the terminal."""
    cells = zip(*(result.cells for result in results), strict=True)
    first, name, *others = (list(column) for column in cells)
    columns = [TableColumn(_HEADS[0], Importance.NAME, first), name_column(_HEADS[1], name)]
    columns += [
        TableColumn(head, Importance.FIGURE, column)
        for head, column in zip(_HEADS[2:], others, strict=True)
    ]
    return render_table(columns)


def _markdown_table(heads: Sequence[str], rows: Any) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
