"""Public configs of other tools as specs: every key accounted for, and placements as measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from _machine import version
from _script import Script, table_head, table_row

from ptrain.spec.foreign import KeyEffect

HERE = Path(__file__).parent
DATA = yaml.safe_load((HERE / "convert.yaml").read_text(encoding="utf-8"))
PUBLISHED = yaml.safe_load((HERE / "published_configs.yaml").read_text(encoding="utf-8"))
LIMIT = 300  # seconds of one measured config
SECONDS = 20  # within which a published config.json is predicted or rejected
SCRIPT = Script("convert", number=len(DATA["configs"]), models=len(PUBLISHED), seconds=SECONDS)
_JOB = ("mesh.dp_shard=8", "batch={global: 8, micro: 1, sequence: 1024}", "--json")
_PATHS = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_PATHS)}


def measured_rows() -> Iterator[tuple[str, bool]]:
    """Yield a row for each config that its tool runs, and whether the prediction holds."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (file, config) in DATA["measured"].items():
            path, out = Path(folder) / file, Path(folder) / "out.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            out.unlink(missing_ok=True)
            ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command = [sys.executable, "-m", *ranks, str(HERE / "_converted.py"), path, out]
            subprocess.run(command, env=_ENV, capture_output=True, timeout=LIMIT, check=False)
            if not out.exists():
                yield table_row(name, "–", "did not run", "–"), False
                continue
            found = json.loads(out.read_text(encoding="utf-8"))
            differs = [
                line[7:].split(" (")[0]
                for line in found["checks"].splitlines()
                if line.startswith("fails:")
            ]
            shown = "; ".join(differs) or "–"
            yield table_row(name, f"`{found['spec']}`", found["verdict"], shown), not differs


def config_row(row: dict[str, str], folder: Path) -> tuple[str, Counter[str], int]:
    """Return the row of a public config, its outcomes, and the number of keys without one."""
    file = folder / row["repository"] / row["path"]
    words = [
        sys.executable,
        "-m",
        "ptrain",
        "convert",
        str(file),
        "--json",
        *shlex.split(row["adds"]),
    ]
    done = subprocess.run(words, env=_ENV, capture_output=True, text=True, check=False)
    record = json.loads(done.stdout)
    counts = Counter(key["outcome"] for key in record["keys"])
    reasons = [f"`{fault['key']}`: {fault['finding']}" for fault in record.get("faults", ())]
    verdict = "rejected: " + "; ".join(reasons) if reasons else "valid"
    in_file = len(record["keys"]) - counts[KeyEffect.ASSUMED.value]
    lost = sum(not key["outcome"] for key in record["keys"])
    name = "/".join((row["repository"], row["path"]))
    cells = [counts[outcome.value] or "–" for outcome in KeyEffect]
    return table_row(f"{name} @{row['commit'][:8]}", in_file, *cells, verdict), counts, lost


def model_row(name: str, billions: float, config: dict[str, object]) -> tuple[str, bool]:
    """Return the row of a folder with a published config.json alone, and whether it is predicted
    with the published number of parameters, or rejected with reasons, in time."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = [sys.executable, "-m", "ptrain", "predict", "fsdp-mixed", "--model", folder, *_JOB]
        start = time.perf_counter()
        done = subprocess.run(words, env=_ENV, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
    if done.returncode == 0:
        found = json.loads(done.stdout)["parameters"] / 1e9
        shown, is_right = "predicted", abs(found / billions - 1) < 0.005
    else:
        reasons = re.findall(r"error: (.*)", done.stderr)
        found, shown, is_right = 0, "rejected: " + "; ".join(reasons), bool(reasons)
    cells = (name, billions, f"{found:.4g}" if found else "–", f"{seconds:.1f}", shown)
    return table_row(*cells), is_right and seconds <= SECONDS


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="holds the public configs")
    parser.add_argument("--no-ranks", action="store_true", help="convert only")
    options = parser.parse_args()
    lines, failed = SCRIPT.head(), []
    lines += SCRIPT.method(accelerate=version("accelerate"), deepspeed=version("deepspeed"))
    if not options.no_ranks:
        lines += ["## Placements as measured", ""]
        lines += table_head(
            "config", "Θ,Ω,G,A and layout of the spec", "verdict", "figures that differ"
        )
        for row, _ in measured_rows():
            lines.append(row)
        lines.append("")
    lines += ["## Public configs", ""]
    total: Counter[str] = Counter()
    lines += table_head("config", "keys", *(outcome.value for outcome in KeyEffect), "spec")
    for config in DATA["configs"]:
        row, counts, lost = config_row(config, options.folder)
        lines.append(row)
        total += counts
        failed += [f"{config['path']}: {lost} keys without an outcome"] if lost else []
    sums = ", ".join(f"{total[outcome.value]} {outcome.value}" for outcome in KeyEffect)
    lines += ["", f"All keys: {sums}.", ""]
    lines += ["## Published config.json files", "", SCRIPT.text("published"), ""]
    lines += table_head("model", "published, 1e9", "predicted, 1e9", "seconds", "result")
    for name, row in PUBLISHED.items():
        line, is_right = model_row(name, row["billions"], row["config"])
        lines.append(line)
        failed += [] if is_right else [f"{name}: {line}"]
    lines.append("")
    return SCRIPT.conclude(lines, failed, options)


if __name__ == "__main__":
    sys.exit(main())
