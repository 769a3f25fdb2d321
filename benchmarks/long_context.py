"""`ptrain predict` and `ptrain select` of Llama 3.1 8B at 128k, 256k and 1M tokens on 64 H100s.

Claims: `predict` answers within a second of CPU time, without torch; `select` tries every attention
over cp that is legal, derives the best hundred, and of these none is less by closed form, beyond
what a search leaves for that at a bound, than by `exact`; the best is to the byte and to the second
what `predict` says of its spec.
Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _machine import ROOT, conclude, environment, header, this_command
from _tables import table
from predict_time import seconds as process_seconds

from ptrain.derivation.estimate import Derivation, derive
from ptrain.report.selection import described
from ptrain.selection.choose import select
from ptrain.selection.task import SLACK, TIME_SLACK
from ptrain.spec.load import load
from ptrain.spec.write import to_yaml

DEVICES, GB, AT_MOST = 64, 1e9, 1.0
TOKENS = 2**23  # of a step
CHUNK = 2048  # tokens whose logits are there at once: of 128k words all would take the most memory
_WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from ptrain.cli.main import main; "
    "raise SystemExit(main(sys.argv[1:]))"
)


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a sample, and the degrees of cp at which its variants stand side by side."""

    tokens: int
    degrees: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.tokens // 2**10}k" if self.tokens < 2**20 else f"{self.tokens // 2**20}M"


LENGTHS = (Length(2**17, (8,)), Length(2**18, (8, 16)), Length(2**20, (16, 32, 64)))


def variants(degree: int) -> Iterator[tuple[object, str]]:
    """Yield what a spec writes for attention over cp, and its mode of A: of the eight heads of keys
    each rank has some."""
    yield "ring", "S"
    yield "zigzag", "S"
    yield "all-gather", "S*"
    yield ("ulysses" if degree <= 8 else {"ulysses": 8, "ring": degree // 8}), "S"


def mapping(length: Length, degree: int, attention: object, mode: str) -> dict[str, Any]:
    """Return a spec: states sharded over all devices, blocks computed again."""
    mesh = {"dp_shard": DEVICES // degree, "cp": degree}
    return {
        "name": f"{length.name}-cp{degree}",
        "model": {"preset": "llama3.1-8b"},
        "mesh": mesh,
        "placement": {"dp_shard": "S*,S,S,R", "cp": f"S*,S,S,{mode}"},
        "precision": {"layout": "zero16"},
        "batch": {"global": TOKENS // length.tokens, "micro": 1, "sequence": length.tokens},
        "context": {"attention": attention},
        "activations": "M",
        "loss": {"chunk": CHUNK},
        "cluster": {"preset": "h100-64"},
    }


def predicted(length: Length) -> Iterator[tuple[str, ...]]:
    """Yield a row for each degree and variant."""
    for degree in length.degrees:
        for attention, mode in variants(degree):
            spec = load(mapping(length, degree, attention, mode)).spec
            yield length.name, str(degree), str(spec.context.attention), *figures(derive(spec))


def figures(derivation: Derivation) -> Iterator[str]:
    """Yield peak, time of a step, what of it waits for cp, and what cp sends."""
    exact = derivation.exact
    assert exact.step is not None, "the cluster has rates"
    waits = exact.step.exposed().get(("cp",), 0.0)
    sent = sum(row.sent_bytes for row in exact.traffic if row.key.axes == ("cp",))
    yield from (f"{exact.peak_bytes() / GB:.2f}", f"{exact.step.seconds:.1f}")
    yield from (f"{waits / exact.step.seconds:.1%}", f"{sent / GB:.0f}")


def long_contexts() -> str:
    """Steps and peaks by length, degree and variant, for a page."""
    by_case: dict[tuple[str, str], list[str]] = {}
    for length in LENGTHS:
        for tokens, degree, _, peak, seconds, *_ in predicted(length):
            by_case.setdefault((tokens, degree), []).append(f"{seconds} s · {peak} GB")
    columns = ["tokens", "cp", "ring", "zigzag", "all-gather", "Ulysses, or 8 × ring"]
    return table(columns, ((*case, *cells) for case, cells in by_case.items()))


TABLES = {"long contexts": long_contexts}


def timed(length: Length, folder: Path) -> float:
    """CPU seconds of a process that predicts, where torch cannot be imported."""
    file = folder / f"{length.name}.yaml"
    degree = length.degrees[-1]
    file.write_text(to_yaml(mapping(length, degree, "zigzag", "S")))
    command = [sys.executable, "-c", _WITHOUT_TORCH, "predict", str(file)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return min(process_seconds(command)[0] for _ in range(3))


def selected(length: Length, failed: list[str]) -> Iterator[str]:
    """Yield what `select` says of a length."""
    words = [f"batch.sequence={length.tokens}", f"batch.global={TOKENS // length.tokens}"]
    words.append(f"loss={{chunk: {CHUNK}}}")
    began = time.process_time()
    ranking = select("llama3.1-8b", words, cluster="h100-64", devices=DEVICES)
    took = time.process_time() - began
    counts, best = ranking.counts, ranking.best
    assert best is not None, "something fits"
    peaks = [row.closed.peak / row.peak_bytes for row in ranking.ranking]
    seconds = [row.closed.seconds / row.seconds for row in ranking.ranking if row.seconds]
    if max(peaks) > SLACK or max(seconds) > TIME_SLACK:
        failed.append(f"{length.name}: closed forms are {max(peaks):.3f}, {max(seconds):.3f}")
    again = derive(load(best.spec.resolved).spec).exact
    if again.step is None or (again.peak_bytes(), again.step.seconds) != (
        best.peak_bytes,
        best.seconds,
    ):
        failed.append(f"{length.name}: `predict` says another thing of the best")
    yield (
        f"{length.name}: {counts.scored} legal candidates, {counts.fitting} fit by closed form, "
        f"{ranking.derived} derived, {took:.0f} s of CPU time; closed form over exact: peaks "
        f"{min(peaks):.3f} to {max(peaks):.3f}, seconds {min(seconds):.3f} to {max(seconds):.3f}."
    )
    yield ""
    yield "| of its front | s | peak, GB |"
    yield "|---|---|---|"
    for row in ranking.front:
        yield f"| `{described(row.spec)}` | {row.seconds:.1f} | {row.peak_bytes / GB:.2f} |"
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("long_context: Llama 3.1 8B at 128k to 1M tokens", this_command())
    failed: list[str] = []
    lines = [
        f"Of {DEVICES} H100s in nodes of 8, {TOKENS} tokens a step, layout zero16, the loss in "
        f"chunks of {CHUNK} tokens. Predicted with Θ, Ω and G sharded over all devices and blocks "
        "computed again; peaks are those of a processor's kernels.",
        "",
        "| tokens | cp | attention | peak, GB | step, s | waits for cp | sent over cp, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for length in LENGTHS for row in predicted(length)]
    with tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            took = timed(length, Path(folder))
            lines += ["", f"`predict` of {length.name}, a process: {took:.2f} s of CPU time."]
            if took > AT_MOST:
                failed.append(f"{length.name}: predict takes {took:.2f} s, more than {AT_MOST:g}")
    lines += ["", "## Selected", ""]
    for length in LENGTHS:
        lines += selected(length, failed)
    return conclude(
        "long_context",
        [head, *lines],
        failed=failed,
        not_covered="NCCL and GPUs: no cp has run on either; tp beside cp, fp32, several samples a "
        "micro-batch and blocks in part computed again, which are traced and not searched",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
