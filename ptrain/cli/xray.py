"""The command `ptrain xray`: infer the placement of an unmodified training job.

The job runs with the hook of `xray.hook` in its environment. The X-ray is printed as soon as all
ranks of this machine have written their observations, while the job continues. The exit code is
the job's, 128 + N if signal N ended it; 2 if the job succeeded but could not be observed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ptrain.cli.arguments import print_json
from ptrain.cli.predict import load_facts
from ptrain.codec import decode
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError, input_error
from ptrain.files import temporary_folder, write_text
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.units import with_noun
from ptrain.xray.findings import compare_with_spec, find_traps, spec_skeleton
from ptrain.xray.hook import WATCHED, job_environment
from ptrain.xray.infer import Inference
from ptrain.xray.observation import Observation
from ptrain.xray.screen import XRay

_POLL, _GRACE = 0.1, 20.0  # seconds between two looks, and for a job to end after a signal


def run(args: Namespace) -> int:
    """Run the job, print its X-ray, and return the job's exit code."""
    if not args.command:
        raise PtrainError(
            "ptrain xray: the command of the job is missing. Write it after `--`: "
            "ptrain xray -- torchrun --nproc-per-node 2 train.py"
        )
    if args.first < 2:
        raise input_error(
            "--first", "must be 2 or more: the first step allocates", "Use --first 3."
        )
    if args.out and not args.out.absolute().parent.is_dir():
        raise input_error("--out", f"{args.out.parent} is no folder", "Use an existing folder.")
    spec = load(args.config).spec if args.config else None
    with temporary_folder() as folder:
        environment = job_environment(folder, args.first)
        printed = False
        with _running_job(args.command, environment, to_stderr=args.json) as process:
            while process.poll() is None:
                time.sleep(_POLL)
                if not printed and _is_complete(observations := read_observations(folder)):
                    _try_to_print(observations, spec, args)
                    printed = True
                    if args.stop:
                        return 0
        code = process.returncode
        code = code if code >= 0 else 128 - code
        if not printed:
            if not (observations := read_observations(folder)):
                raise _observation_error(folder, args, code)
            _print_xray(observations, spec, args)
    return code


@contextmanager
def _running_job(
    command: list[str], environment: dict[str, str], *, to_stderr: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job, and end it with this command.

    Args:
        command: The command of the job.
        environment: Its environment.
        to_stderr: Keep standard output free for JSON.
    """

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, raise_interrupt) for number in ends]
    try:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=sys.stderr if to_stderr else None,
                start_new_session=True,  # so that a launcher's processes end with it
            )
        except OSError as error:
            text = f"cannot start {command[0]}: {error.strerror}"
            raise input_error("command", text, "Check the command after `--`.") from None
        try:
            yield process
        finally:
            _end_job(process)
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def _end_job(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the job's session if it runs."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_observations(folder: Path) -> list[Observation]:
    """Return the observations in a folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("rank-*.json"))]
    return [decode(json.loads(text), Observation) for text in texts]


def _is_complete(observations: list[Observation]) -> bool:
    return bool(observations) and len(observations) == observations[0].world_size


def _observation_error(folder: Path, args: Namespace, code: int) -> PtrainError:
    """Return the error of a job without an observation; its exit code is the job's, or 2."""
    statuses = [json.loads(path.read_text()) for path in folder.glob("process-*.json")]
    steps = max((status["steps"] for status in statuses), default=0)
    last = args.first + WATCHED - 1
    errors = [status["error"] for status in statuses if status["error"]]
    if code:
        text = f"the job failed with exit code {code} after {with_noun(steps, 'optimizer step')}"
        remedy = f"Fix the job's error, printed above. Or run it alone: {shlex.join(args.command)}"
    elif not statuses:
        text = "no Python process of the job imported torch"
        remedy = "Start the job's Python without -I, -E and -S, and outside a container."
    elif errors:
        text, remedy = f"the meters failed: {errors[0]}", "Report this message as an issue."
    elif not steps:
        text = "no torch optimizer stepped"
        remedy = "Pass a command that trains, and whose optimizer is a torch.optim.Optimizer."
    else:
        text = f"the job ended after {steps} steps, but steps {args.first} to {last} are watched"
        first = max(2, steps - WATCHED + 1)
        remedy = f"Train for {last} steps or more." + (
            f" Or use `--first {first}`." if steps > WATCHED else ""
        )
    error = PtrainError(f"xray: {text}\n  remedy: {remedy}")
    error.exit_code = code or error.exit_code
    return error


def _try_to_print(observations: list[Observation], spec: Spec | None, args: Namespace) -> None:
    """Print the X-ray while the job runs, or an error, which does not end the job."""
    try:
        _print_xray(observations, spec, args)
    except (PtrainError, OSError) as error:
        print(f"xray: not printed: {error}", file=sys.stderr)


def _print_xray(observations: list[Observation], spec: Spec | None, args: Namespace) -> None:
    """Infer the placement and print the X-ray."""
    result = infer_xray(observations, spec, allow_import=args.allow_import)
    if args.out and result.spec:
        write_text(args.out, result.spec)
    if args.json:
        print_json(result.as_record())
        return
    print_screen(*result.screen_lines())
    if result.spec:
        print_screen(f"Spec written to {args.out}" if args.out else result.spec.rstrip(), "")
    # A written skeleton has no model yet, so it cannot be predicted.
    topic = "ptrain help " + ("writing-a-spec" if args.out else "what-an-x-ray-shows")
    print_screen(next_line(command_line("predict", [args.config]) if args.config else topic))


def infer_xray(
    observations: list[Observation], spec: Spec | None = None, *, allow_import: bool = False
) -> XRay:
    """Return the X-ray of a job from the observations of its ranks.

    Args:
        observations: The observations.
        spec: A spec to compare with.
        allow_import: Run code that the spec names.
    """
    job = Inference(observations)
    text, reason = spec_skeleton(job)
    result = XRay(job=job, findings=find_traps(job), spec=text, no_spec=reason)
    if spec is None:
        result.no_prediction = "An X-ray does not see the model. Add `--config SPEC`."
        return result
    result.findings += compare_with_spec(job, spec)
    exact = derive(spec, load_facts(spec, allow_import=allow_import, is_quiet=True)).exact
    result.predicted_bytes = {
        str(row.state): row.device_bytes or 0 for row in exact.memory if not row.rank
    }
    if (peak := exact.peak_bytes()) is not None:
        result.predicted_bytes["peak"] = peak
    return result
