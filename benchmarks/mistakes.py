"""Compare the messages for sixty typical mistakes in a spec, before and after a change.

    python benchmarks/mistakes.py COMMIT [--save]

Each case is the valid spec `zero3` with an override as typed, or with one line of its file changed.
Claim: every case is rejected with exit code 2, a place, and a remedy or the allowed values, without
a traceback, and no message is more than one line longer than before.
Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _machine import ROOT, conclude, environment, header, this_command
from against import checked_out, is_commit

SPEC = """\
name: mine
model: {preset: llama-tiny}
mesh: {dp_shard: 2}
placement: zero3
batch: {global: 16, micro: 2, sequence: 128}
optimizer: {lr: 3e-4}
train: {steps: 4}
"""
MOST_LINES_MORE = 1

TYPED = """\
seq_len=256 | batch.seq_len=256 | batch.sequence_length=256 | sequence=256 | lr=1e-3
learning_rate=1e-3 | optimizer.learning_rate=1e-3 | optimizer.lr=fast | optimizer.lr=-1
optimizer.clip=none | clip=1.0 | max_grad_norm=1.0 | optimizer.max_grad_norm=1 | optimizer=adamw
optimizer.name=adam | optimizer.betas=0.9 | weight_decay=0.1 | warmup=100 | steps=100
train.steps=1e3 | train.steps=0 | train.steps=ten | max_steps=100 | epochs=3 | batch=16
batch_size=16 | batch.micro=0 | batch.micro_batch_size=2 | gradient_accumulation_steps=4
batch.global=15 | model=llama-tiny
model.preset=llama-tinny | model.n_layers=2 | model.hidden_size=256 | model.heads=3 | mesh=4
mesh.dp_shard=0 | mesh.fsdp=2 | mesh.tensor=2 | mesh.tp=2 | placement=zero4 | placement=fsdp3
placement.dp_shard=S,S,S | placement.dp_shard=X,S,S,R | precision=bf16 | precision.layout=float16
precision.dtype=bf16 | cluster=h100-8 | cluster.preset=h100 | cluster.device_memory=80
pipeline=gpipe | pipeline.schedule=1F1B | unit=2 | bucket=25 | overlap=yes | prefetch=true
offload.tier=nvme | device=gpu | backend=mpi | checkpoint.every=never | activations=checkpoint
recompute=true | sede=1
"""
WRITTEN = (
    ("optimizer: {lr: 3e-4}", "optimizer: {lr: '3e-4'}"),
    ("precision", "precision: bf16\n"),
    ("train: {steps: 4}", "train: {step: 4}"),
    ("mesh: {dp_shard: 2}", "mesh: {dp_shard 2}"),
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A spec with a mistake in its text, or with overrides that contain one."""

    shown: str
    text: str
    overrides: tuple[str, ...] = ()


def mistakes() -> Iterator[Mistake]:
    """Yield the mistakes in overrides, then those in the file."""
    for line in TYPED.splitlines():
        for override in line.split("|"):
            yield Mistake(override.strip(), SPEC, (override.strip(),))
    for right, wrong in WRITTEN:
        text = SPEC.replace(right, wrong) if right in SPEC else SPEC + wrong
        yield Mistake(f"in the file: {wrong.strip()}", text)


def message(root: Path, mistake: Mistake) -> tuple[int, str]:
    """Return the exit code of `ptrain validate` in a source tree, and its error message."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(mistake.text, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "ptrain", "validate", "mine.yaml", *mistake.overrides],
            cwd=folder,
            env=environment(root),
            capture_output=True,
            text=True,
            check=False,
        )
    return ended.returncode, ended.stderr.rstrip()


def problem(code: int, text: str, before: str) -> str:
    """Return how a message violates the claim, or ""."""
    if code != 2:
        return f"exit code {code}"
    if "Traceback" in text:
        return "a traceback"
    if "error:" not in text or not ("remedy:" in text or "must be" in text):
        return "no remedy"
    if len(text.splitlines()) > len(before.splitlines()) + MOST_LINES_MORE:
        return "longer than before"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    if not is_commit(args.commit):
        parser.error(f"there is no commit {args.commit}")
    lines, failed = [header("mistakes: messages for typical mistakes", this_command())], []
    characters = [0, 0]
    with checked_out(args.commit) as old:
        for mistake in mistakes():
            _, before = message(old.root, mistake)
            code, after = message(ROOT, mistake)
            characters[0] += len(before)
            characters[1] += len(after)
            if wrong := problem(code, after, before):
                failed.append(f"{mistake.shown}: {wrong}")
            lines += [f"`{mistake.shown}`", "", "```text", before, "```", "", "```text", after]
            lines += ["```", ""]
    total = f"Characters: {characters[0]:,} before, {characters[1]:,} after."
    lines.insert(1, f"{total} In each case the first message is the one before.\n")
    return conclude(
        "mistakes",
        lines,
        failed=failed,
        not_covered="whether a remedy is the right one; mistakes in code and data",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
