"""The command `ptrain schema`: print the JSON Schema of specs, or write it to a file."""

from __future__ import annotations

from argparse import Namespace

from ptrain.errors import PtrainError
from ptrain.spec.check import schema_text


def run(args: Namespace) -> int:
    """Print or write the schema.

    Raises:
        PtrainError: If the file cannot be written.
    """
    if args.out is None:
        print(schema_text(), end="")
        return 0
    try:
        args.out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise PtrainError(f"{args.out}: cannot write: {error.strerror}") from None
    return 0
