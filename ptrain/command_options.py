"""Options of commands as values: the parts of the tables in `ptrain.commands`."""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path
from typing import Any, NamedTuple

from ptrain.units import positive

Option = tuple[tuple[str, ...], dict[str, Any]]
Group = tuple[Option | list[Option], ...]  # a list holds mutually exclusive options


class Command(NamedTuple):
    """The help of one command.

    `usage` lists the forms of the command line, `groups` the arguments and options by title,
    `examples` command lines to paste, and `topics` the sections of the docs that explain it;
    `details` follows the one-line description.
    """

    usage: tuple[str, ...]
    groups: dict[str, Group]
    examples: tuple[str, ...]
    topics: tuple[str, ...]
    details: str = ""


def option(*names: str, **how: Any) -> Option:
    """Return the arguments of `ArgumentParser.add_argument` for one argument or option."""
    return names, how


def flag(name: str, text: str) -> Option:
    """Return an option that takes no value."""
    return option(name, action="store_true", help=text)


def value(name: str, metavar: str, text: str, **how: Any) -> Option:
    """Return a positional argument, or an option that takes a value."""
    return option(name, metavar=metavar, help=text, **how)


def chart_option(text: str, name: str = "--chart") -> Option:
    """Return an option that names the image file of a chart."""
    return value(name, "FILE", f"{text} Format: .png or .svg.", type=Path)


JSON = flag("--json", "Print the result as JSON and nothing else.")
ALLOW_IMPORT = flag("--allow-import", "Run code that the spec names (`target`). Default: reject.")
CODE_OF_RUN = flag("--allow-import", "Run code that the run's spec names. Default: reject.")
DEVICES = ("auto", "cpu", "cuda")


MODEL = value(
    "--model",
    "MODEL",
    "Use this model: a name from `ptrain specs`, or a folder with a "
    "config.json. Default: from the spec.",
)
RANKS = value("--devices", "N", "Use N devices. Default: from the FILE.", type=positive)
STEP = value("--step", "N", "Use the checkpoint of step N. Default: the newest.", type=int)
RUN = value("run", "RUN", "Run folder, such as runs/latest.")
SET = "Set a key of the spec, such as `mesh.dp_shard=4`. `ptrain help keys` lists them."
OVERRIDES = value("overrides", "key=value", SET, nargs="*", default=SUPPRESS)  # for the help

XRAY = Command(
    usage=("[options] -- COMMAND",),
    details="Three steps of the job are watched. The exit code is the job's.",
    groups={
        "Arguments": (
            value(
                "command",
                "COMMAND",
                "Command that starts the job, such as torchrun or python with its arguments.",
                nargs="*",
            ),
        ),
        "Watch": (
            value(
                "--first",
                "N",
                "Watch steps N to N+2. Steps are counted from 1. Default: 3.",
                type=positive,
                default=3,
            ),
            flag("--stop", "End the job after the watched steps. The exit code is then 0."),
        ),
        "Output": (
            value(
                "--config",
                "SPEC",
                "Compare with this spec: placement, dtypes and predicted memory. Default: do not "
                "compare.",
            ),
            value(
                "--out",
                "FILE",
                "Write the spec of the same placement, as a skeleton. Default: print it.",
                type=Path,
            ),
            ALLOW_IMPORT,
            JSON,
        ),
    },
    examples=(
        "ptrain xray -- torchrun --nproc-per-node 2 train.py",
        "ptrain xray --stop --out job.yaml -- python train.py",
        "ptrain xray --config zero3 -- torchrun --nproc-per-node 2 train.py",
    ),
    topics=("what-an-x-ray-shows", "verify-a-loop"),
)
