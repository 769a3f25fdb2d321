"""The command line: one module per verb, imported when its verb is called.

A verb's module has `run(args) -> int`; its options are in `ptrain.commands`. A `PtrainError` ends
as its message on standard error and its exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

from ptrain.version import VERSION

TYPE_CHECKING = False  # not typing's: what neither `--version` nor `--help` needs is imported below
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ptrain.errors import PtrainError

GROUPS = {
    "Plan": {
        "predict": "Predict memory, traffic and step time without running anything",
        "select": "Find the fastest placement of a model on a cluster",
        "plan": "Show how a spec wraps the model, step by step",
        "simulate": "Run one rank of a job of any size on fake tensors",
    },
    "Run": {
        "train": "Train a spec and compare the prediction with the measurement",
        "validate": "Run four steps and check memory and traffic only",
        "verify": "Compare gradients, optimizer state and losses with one device",
        "compare": "Compare two runs, predictions or verifications",
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
# Words of other tools, and the command that is meant.
_OTHER_WORDS = {
    "convert": "export",
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
OF_TORCH = (
    "simulate",
    "tokenize",
)  # verbs whose module imports it; the others that need it do when they run
PURE = ("predict", "select")  # verbs without tensors, whose objects form few cycles
WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code (0, 1 a verdict failed, 2 wrong input, 3 a rank failed,
    4 a check stopped the training, 130 interrupted). Without `argv` the process is this command's,
    and what it imports is kept to its end."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _answer(arguments, is_process=argv is None)
        finally:
            print(end="", flush=True)  # here and not at exit; argparse exits after --help
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, a pager) has read enough: no flush at exit may fail
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE
    except OSError as error:
        import errno

        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: cannot write: {error.strerror}", file=sys.stderr)
        return WRONG_INPUT


def _answer(arguments: list[str], *, is_process: bool) -> int:
    match arguments:
        case [] | ["-h" | "--help"]:
            print(_usage())
            return 0
        case ["--version" | "-V"]:
            print(f"ptrain {VERSION}")
            return 0
    from ptrain.errors import PtrainError

    try:
        return _dispatch(*arguments, is_process=is_process)
    except PtrainError as error:
        return _refuse(error, as_json="--json" in arguments)


def _dispatch(verb: str, *arguments: str, is_process: bool) -> int:
    from ptrain.errors import PtrainError

    if verb not in VERBS:
        raise PtrainError(_unknown_command(verb))
    if is_process:
        gc.disable()  # nothing that is imported is garbage
    from ptrain.cli.arguments import CommandParser

    args = CommandParser(verb).read(arguments)
    if verb in OF_TORCH:
        _require_torch()
    module = import_module(f"ptrain.cli.{verb}")
    if is_process:
        gc.freeze()  # a tenth of predict: collections would visit all that was imported
        gc.enable()
        if verb in PURE:
            gc.set_threshold(100_000)  # objects, in place of 700
    code = int(module.run(args))
    if is_process and verb in PURE:
        gc.freeze()  # the interpreter's end collects once more
    return code


def _require_torch() -> None:
    from ptrain.installed import require_torch

    require_torch()


def _unknown_command(word: str) -> str:
    from ptrain.spec.leaf import nearest

    meant = _OTHER_WORDS.get(word) or nearest(word, tuple(VERBS))
    hint = f"Did you mean `{meant}`?" if meant else "`ptrain --help` lists the commands."
    if word.startswith("-"):
        hint = f"Options follow the command: `ptrain COMMAND {word}`."
    return f"ptrain: unknown command {word!r}. {hint}"


def _usage() -> str:
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


def _refuse(error: PtrainError, *, as_json: bool) -> int:
    """Return the exit code of an error, which one rank says where a launcher started many."""
    import json

    from ptrain.errors import SpecError
    from ptrain.train import environment
    from ptrain.train.rank_start import code_of

    code = code_of(error)
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
