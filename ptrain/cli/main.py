"""The command line: one module per command, imported only when its command runs.

A command's module has `run(args) -> int`; its options are in `ptrain.commands`. A `PtrainError`
ends the command: its message is printed to standard error, and it has an exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

from ptrain.version import VERSION

# Not typing.TYPE_CHECKING: `--version` and `--help` would have to import typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ptrain.errors import PtrainError

GROUPS = {
    "Plan": {
        "predict": "Predict memory, traffic and step time without running anything",
        "select": "Find the fastest placement of a model on a cluster",
        "plan": "Show how a spec wraps the model, step by step",
        "simulate": "Run one rank of a job of any size on fake tensors",
        "convert": "Convert another tool's config to a spec, or a spec to its config",
    },
    "Run": {
        "train": "Train a spec and compare the prediction with the measurement",
        "validate": "Run four steps and check memory and traffic only",
        "verify": "Compare gradients, optimizer state and losses with one device",
        "xray": "Find the placement, memory and traffic of an unmodified training script",
        "report": "Write one HTML page about runs and specs",
        "checkpoints": "List the checkpoints of a run and verify their files",
        "why-oom": "Explain why a run ran out of memory and find changes that fit",
        "compare": "Compare two runs, predictions or verifications",
        "doctor": "Check this machine for everything that training needs",
        "selftest": "Run the built-in specs on this machine and write a page of results",
    },
    "Data and models": {
        "tokenize": "Turn text, JSON lines or Parquet into a token file",
        "export": "Write a checkpoint as a Transformers folder",
        "sample": "Generate text from a checkpoint, or score a text",
    },
    "Reference": {
        "specs": "List or show the built-in specs",
        "help": "Show a topic or explain a spec key",
        "calibrate": "Measure this machine's operator and collective speeds",
        "schema": "Print the JSON Schema for editors",
        "cache": "Show or clear cached model traces",
        "completion": "Print the completion script of a shell",
    },
}
VERBS = {verb: about for commands in GROUPS.values() for verb, about in commands.items()}
# Commands of other tools, and the equivalent command here.
_OTHER_WORDS = {
    "estimate": "predict",
    "generate": "sample",
    "launch": "train",
    "list": "specs",
    "profile": "calibrate",
    "run": "train",
    "search": "select",
    "show": "specs",
    "test": "verify",
}
# Commands whose module imports torch at the top. Other commands that need torch import it in `run`.
OF_TORCH = (
    "simulate",
    "tokenize",
)
PURE = ("predict", "select")  # commands without tensors, whose objects form few reference cycles
WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The arguments after `ptrain`. None: read `sys.argv`, and tune garbage collection for a
            process that runs one command.

    Returns:
        0 for success, 1 if a verdict fails, 2 for wrong input, 3 if a rank fails, 4 if a check
        stops the training, 130 if interrupted, 141 if the reader of a pipe has closed it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run_command(arguments, is_process=argv is None)
        finally:
            # Flush here, so that a closed pipe or a full disk raises inside the handlers below, not
            # at interpreter exit. `finally`, because argparse exits after --help.
            print(end="", flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, a pager) has closed the pipe. The streams go to /dev/null, so that the
        # interpreter's flush at exit does not fail again.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE
    except OSError as error:
        import errno

        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename:
            from ptrain.report.screen import print_lines

            # A path of the user, of which any command may ask first whether it exists.
            print_lines(f"error: {error.filename}: {error.strerror}", stream=sys.stderr)
            return WRONG_INPUT
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: cannot write: {error.strerror}", file=sys.stderr)
        return WRONG_INPUT


def _run_command(arguments: list[str], *, is_process: bool) -> int:
    """Print the usage or the version, or run a command."""
    match arguments:
        case [] | ["-h" | "--help"]:
            print(_usage_text())
            return 0
        case ["--version" | "-V"]:
            print(f"ptrain {VERSION}")
            return 0
    from ptrain.errors import PtrainError

    try:
        return _dispatch(*arguments, is_process=is_process)
    except PtrainError as error:
        return _report_error(error, as_json="--json" in arguments)


def _dispatch(verb: str, *arguments: str, is_process: bool) -> int:
    """Import and run the module of a command.

    Raises:
        PtrainError: If the command is unknown or its input is wrong.
    """
    from ptrain.errors import PtrainError

    if verb not in VERBS:
        raise PtrainError(_unknown_command(verb))
    if is_process:
        gc.disable()  # imported modules live to the end, so collecting during imports is wasted
    from ptrain.cli.arguments import CommandParser

    args = CommandParser(verb).parse_words(arguments)
    if verb in OF_TORCH:
        _require_torch()
    module = import_module(f"ptrain.cli.{verb.replace('-', '_')}")
    if is_process:
        # Without this, collections would visit all imported objects: a tenth of predict's time.
        gc.freeze()
        gc.enable()
        if verb in PURE:
            gc.set_threshold(100_000)  # allocated objects per collection; Python's default is 700
    code = int(module.run(args))
    if is_process and verb in PURE:
        gc.freeze()  # the interpreter's end collects once more
    return code


def _require_torch() -> None:
    """Raise an error with an installation hint if torch is missing."""
    from ptrain.installed import require_torch

    require_torch()


def _unknown_command(word: str) -> str:
    """Return the message for an unknown command, with a suggestion."""
    from ptrain.spec.leaf import find_similar

    meant = _OTHER_WORDS.get(word) or find_similar(word, tuple(VERBS))
    hint = f"Did you mean `{meant}`?" if meant else "`ptrain --help` lists the commands."
    if word.startswith("-"):
        hint = f"Options follow the command: `ptrain COMMAND {word}`."
    return f"ptrain: unknown command {word!r}. {hint}"


def _usage_text() -> str:
    """Return the text of `ptrain --help`."""
    width = max(map(len, VERBS))
    lines = []
    for title, commands in GROUPS.items():
        lines.append(title)
        lines += [f"  {verb:<{width}}  {about}" for verb, about in commands.items()]
    return "\n".join(
        [
            "ptrain — predict, run and verify distributed PyTorch training from a placement spec",
            "",
            "Usage: ptrain COMMAND [SPEC ...] [key=value ...] [options]",
            "",
            *lines,
            "",
            "SPEC is a YAML file or a name from `ptrain specs`.",
            "Run `ptrain COMMAND --help` for options, `ptrain help` for topics.",
            "New here? Run `ptrain train` (one minute, CPU only).",
        ]
    )


def _report_error(error: PtrainError, *, as_json: bool) -> int:
    """Report an error as JSON if requested, and return its exit code.

    If a launcher has started several ranks, only the first one prints the record.
    """
    import json

    from ptrain.errors import SpecError
    from ptrain.train import environment
    from ptrain.train.rank_start import report_error

    code = report_error(error)
    # Under a launcher every rank meets the same error, and one record is enough.
    if as_json and environment.is_first():
        faults = error.faults if isinstance(error, SpecError) else ()
        record = {
            "error": str(error),
            "exit_code": code,
            "faults": [fault._asdict() for fault in faults],
        }
        print(json.dumps(record))
    return code


if __name__ == "__main__":
    sys.exit(main())
