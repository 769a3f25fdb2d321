"""What verbs share: SPEC and a.b=c in any order on the command line, --json and --allow-import."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping


def add_spec_arguments(parser: ArgumentParser) -> None:
    """One list, `arguments`, of specs and overrides; `spec.load.split_arguments` tells them
    apart."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="SPEC",
        help="a YAML file or a name from `ptrain specs`; a.b=c overrides a key, as in a file",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, only that")
    parser.add_argument(
        "--allow-import", action="store_true", help="let the spec's `target:` import code"
    )


def print_json(record: Mapping[str, object] | list[dict[str, object]]) -> None:
    """A record, or a list of them when several specs were asked for."""
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def positive(text: str) -> int:
    """Return a whole number above 0, which an option is given."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be a whole number above 0; got {text!r}")
    return int(text)
