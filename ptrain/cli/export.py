"""The command `ptrain export RUN --to FOLDER`: write a checkpoint as a Transformers folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.codec import encode
from ptrain.installed import require_torch
from ptrain.report.screen import print_lines
from ptrain.units import format_bytes


def run(args: Namespace) -> int:
    """Write the folder and print its contents."""
    require_torch()
    from ptrain.convert.export import Adapters, export_checkpoint

    exported = export_checkpoint(
        Path(args.run),
        Path(args.to),
        args.step,
        allow_import=args.allow_import,
        adapters=Adapters(args.adapters) if args.adapters else None,
    )
    if args.json:
        print_json(encode(exported))
        return 0
    weights = f"{exported.tensors} tensors, {format_bytes(exported.size)}"
    print_lines(f"step {exported.step} of {args.run} as {exported.architecture}: {weights}")
    if exported.copied:
        print_lines(f"with {', '.join(exported.copied)}")
    if exported.no_tokenizer:
        print_lines(f"without a tokenizer: {exported.no_tokenizer}")
    for key in exported.unsaid:
        print_lines(f"model.{key} is of this training: nothing in {exported.folder} says it")
    print_lines(f"written: {exported.folder}")
    return 0
