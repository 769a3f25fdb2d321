"""The placements of training scripts that know nothing of ptrain, inferred and compared."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _xray_inputs
import yaml
from _machine import version
from _script import Script, table_head, table_row

HERE = Path(__file__).parent
DATA = yaml.safe_load((HERE / "xray.yaml").read_text(encoding="utf-8"))
STATES = ("kind", "parameters", "optimizer", "gradients", "activations")
AT_LEAST, LIMIT = 0.95, 150  # share of right answers; seconds of a script
RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"
PACKAGES = ("accelerate", "transformers", "deepspeed", "lightning-fabric")
SCRIPT = Script(
    "xray",
    number=len(DATA["cases"]),
    at_least=f"{AT_LEAST:.0%}",
    packages=", ".join(f"{name} {version(name)}" for name in PACKAGES),
)


@dataclass(kw_only=True)
class Outcome:
    """The comparison of an X-ray with the documented placement of a script."""

    error: str = ""
    answers: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def check_out(case: dict[str, Any], cache: Path, folder: Path) -> Path:
    """Check a case's script out and return its path.

    Args:
        case: The case.
        cache: The folder of the repositories.
        folder: An empty folder for the files.
    """
    if "source" not in case:
        return HERE / case["script"]
    source = DATA["sources"][case["source"]]
    repository = cache / case["source"].replace("/", "+")
    git = ["git", "-C", str(repository)]
    if not repository.exists():
        repository.mkdir()
        url = f"https://github.com/{case['source']}"
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run(
            [*git, "fetch", "--quiet", "--depth", "1", url, source["commit"]], check=True
        )
    packed = subprocess.run(
        [*git, "archive", source["commit"], *source["paths"]], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    for file, changes in {**source.get("changes", {}), **case.get("changes", {})}.items():
        text = (folder / file).read_text(encoding="utf-8")
        for before, after in changes.items():
            if before not in text:
                raise ValueError(f"{file} has no {before!r}")
            text = text.replace(before, after)
        (folder / file).write_text(text, encoding="utf-8")
    script: Path = folder / case["script"]
    if inputs := source.get("inputs"):
        getattr(_xray_inputs, inputs)(script.parent, case)
    return script


def run_case(case: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Run a script under `ptrain xray` and return the record, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        script = check_out(case, cache, Path(folder))
        driver = [str(HERE / "_xray_driver.py")] if "source" in case else []
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]
        command = [
            *(sys.executable, "-c", "from ptrain.cli.main import main; raise SystemExit(main())"),
            *("xray", "--json", "--stop", "--"),
            *(sys.executable, "-m", *launcher, *driver, str(script)),
            *map(str, case.get("arguments", ())),
        ]
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        cwd = script.parent if "source" in case else folder
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, timeout=LIMIT, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {LIMIT} s"}
    try:
        record: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return {"error": lines[-1]}
    return record


def compare(case: dict[str, Any], record: dict[str, Any]) -> Outcome:
    """Compare a record with the documented placement."""
    if "axes" not in record:
        return Outcome(error=record["error"].splitlines()[0])
    outcome = Outcome()
    axes = [tuple(axis[state] for state in STATES) for axis in record["axes"]]
    outcome.found = [" ".join(modes) for modes in axes]
    expected = [tuple(modes) for modes in case["axes"]]
    if len(axes) != len(expected):
        answer = WRONG if axes else UNKNOWN
        outcome.answers[answer] += len(expected) * len(STATES)
        outcome.differences.append(f"{len(axes)} axes instead of {len(expected)}")
    else:
        for found, meant in zip(axes, expected, strict=True):
            for state, mode, right in zip(STATES, found, meant, strict=True):
                answer = RIGHT if mode == right else UNKNOWN if mode == UNKNOWN else WRONG
                outcome.answers[answer] += 1
                if answer != RIGHT:
                    outcome.differences.append(f"{state} {mode} instead of {right}")
    known = case.get("traps", [])
    outcome.traps = [row["code"] for row in record["findings"] if row["code"] in known]
    outcome.missed = [code for code in known if code not in outcome.traps]
    outcome.wrong = [
        f"{row['code']}: {row['text']}" for row in record["findings"] if row["code"] not in known
    ]
    return outcome


def case_row(case: dict[str, Any], outcome: Outcome) -> str:
    """Return the row of a case."""
    shown = outcome.error or "<br>".join(outcome.found)
    counts = [outcome.answers[answer] for answer in (RIGHT, WRONG, UNKNOWN)]
    remarks = [*outcome.differences, *(f"missed: {code}" for code in outcome.missed)]
    traps = ", ".join(outcome.traps) or "–"
    return table_row(
        case["name"],
        case["ranks"],
        shown,
        *counts,
        traps,
        "; ".join(remarks + outcome.wrong) or "–",
    )


def source_rows() -> Iterator[str]:
    """Yield the commits and the documents of the placements."""
    yield from table_head("repository", "commit")
    for name, source in DATA["sources"].items():
        yield table_row(name, f"`{source['commit'][:12]}`")
    yield ""
    yield from table_head("script", "documented", "as")
    for case in DATA["cases"]:
        axes = "<br>".join(" ".join(modes) for modes in case["axes"])
        yield table_row(case["name"], axes, case["evidence"])


def main(options: argparse.Namespace) -> int:
    """Run all cases and print the page."""
    lines = SCRIPT.head()
    rows, failed, unproven = [], [], []
    answers, traps = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as new:
        cache = options.repositories or Path(new)
        for case in DATA["cases"]:
            if options.only and options.only not in case["name"]:
                continue
            outcome = compare(case, run_case(case, cache))
            rows.append(case_row(case, outcome))
            print(rows[-1], file=sys.stderr, flush=True)
            answers += outcome.answers
            traps.update(outcome.traps)
            failed += [f"{case['name']}: {text}" for text in outcome.wrong]
            failed += [f"{case['name']}: missed {code}" for code in outcome.missed]
            if outcome.error:
                unproven.append(f"{case['name']}: {outcome.error}")
    share = answers[RIGHT] / max(answers.total(), 1)
    if share < AT_LEAST:
        failed.append(f"{share:.1%} of the answers are right")
    counts = ", ".join(f"{answers[answer]} {answer}" for answer in (RIGHT, WRONG, UNKNOWN))
    named = ", ".join(f"`{code}` in {number}" for code, number in sorted(traps.items())) or "none"
    lines += SCRIPT.method()
    head = ("script", "ranks", "found, outermost axis first", RIGHT, WRONG, UNKNOWN, "traps named")
    lines += [*table_head(*head, "differences"), *rows, ""]
    lines += [f"Answers: {counts} ({share:.1%} right). Traps named: {named}.", ""]
    lines += source_rows()
    return SCRIPT.conclude(lines, failed, options, unproven=unproven)


if __name__ == "__main__":
    parser = SCRIPT.parser()
    parser.add_argument("--only", default="", help="run the scripts whose name contains this text")
    parser.add_argument(
        "--repositories", type=Path, help="folder with clones named OWNER+NAME, instead of GitHub"
    )
    raise SystemExit(main(parser.parse_args()))
