"""The command line: one module per verb, imported when its verb is called.

A verb's module has `add_arguments(parser)` and `run(args) -> int`. What a verb raises for its
user (`PtrainError`) ends as its message on standard error and its exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

from ptrain.version import VERSION

TYPE_CHECKING = False  # not typing's: what neither `--version` nor `--help` needs is imported below
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from ptrain.errors import PtrainError

VERBS = {
    "train": "train a spec, with predicted and measured figures at the end",
    "predict": "memory and traffic of specs, before anything runs",
    "plan": "the steps that will wrap the model, as text",
    "validate": "run a few steps and compare what was predicted with what was measured",
    "verify": "run against one device: gradients, state, trajectory, and whose fault it is",
    "select": "which placement of a model on so many devices: all legal ones, ranked",
    "compare": "two runs, predictions or verifications side by side, as for a pull request",
    "simulate": "the program that trains on fake ranks: memory and traffic at any size",
    "calibrate": "what operators, collectives and updates take on this machine: a cluster's rates",
    "tokenize": "texts, JSON lines or Parquet as the token file that a training reads",
    "export": "a checkpoint as a folder that transformers loads",
    "sample": "what a trained model writes, and how well it foresees a text",
    "cache": "the traces of models that predictions keep: where, how many; clear them",
    "specs": "list the named specs, or show one",
    "schema": "the JSON Schema of specs, for editors",
    "help": "a section of the pages by its topic, or a key of a spec; else the topics",
}
OF_TORCH = (
    "simulate",
    "tokenize",
)  # verbs whose module imports it; the others that need it do when they run
PURE = ("predict", "select")  # verbs without tensors, whose objects form few cycles
NOT_YET = ("convert", "report", "doctor", "launch")
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

    if verb in NOT_YET:
        raise PtrainError(f"ptrain {verb}: not yet; what works: {', '.join(VERBS)}")
    if verb not in VERBS:
        raise PtrainError(f"ptrain: {verb!r} is no command; choose from {', '.join(VERBS)}")
    if verb in OF_TORCH:
        _require_torch()
    if is_process:
        gc.disable()  # nothing that is imported is garbage
    module = import_module(f"ptrain.cli.{verb}")
    if is_process:
        gc.freeze()  # a tenth of predict: collections would visit all that was imported
        gc.enable()
        if verb in PURE:
            gc.set_threshold(100_000)  # objects, in place of 700
    code = int(module.run(_parse(verb, module, arguments)))
    if is_process and verb in PURE:
        gc.freeze()  # the interpreter's end collects once more
    return code


def _require_torch() -> None:
    from ptrain.installed import require_torch

    require_torch()


def _parse(verb: str, module: ModuleType, arguments: Sequence[str]) -> Namespace:
    from argparse import ArgumentParser

    parser = ArgumentParser(prog=f"ptrain {verb}", description=f"{verb}: {VERBS[verb]}")
    module.add_arguments(parser)
    parser.set_defaults(typed=("ptrain", verb, *arguments))
    return parser.parse_intermixed_args(list(_as_overrides(arguments)))


def _as_overrides(arguments: Iterable[str]) -> Iterable[str]:
    """`--mesh.dp_shard=4` and `--mesh.dp_shard 4` are `mesh.dp_shard=4`."""
    import re

    remaining = iter(arguments)
    for argument in remaining:
        if not re.match(r"--\w+(\.[\w-]+)+(=|$)", argument):
            yield argument
        elif "=" in argument:
            yield argument[2:]
        else:
            yield f"{argument[2:]}={next(remaining, '')}"


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {help_text}" for verb, help_text in VERBS.items()]
    return "\n".join(
        [
            "usage: ptrain COMMAND [SPEC ...] [a.b=c ...] [options]",
            "",
            "A SPEC is a YAML file or a name from `ptrain specs`; a.b=c overrides one of its keys.",
            "",
            *lines,
            "",
            "`ptrain COMMAND --help` says more, and `ptrain help` what can be read.",
            "Start with: ptrain train",
        ]
    )


def _refuse(error: PtrainError, *, as_json: bool) -> int:
    """Return the exit code of an error, which one rank says where a launcher started many."""
    import json

    from ptrain.errors import SpecError
    from ptrain.train import environment
    from ptrain.train.refusal import code_of

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
