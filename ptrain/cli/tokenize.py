"""`ptrain tokenize TEXT… --out FILE.npy`: documents as the token file that a training reads."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.data.tokenized import TokenizingProgress, tokenize
from ptrain.data.vocabulary import ByteVocabulary, FileVocabulary, Vocabulary
from ptrain.errors import refused

_SECONDS = 5.0  # between two lines of progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help=".txt, .jsonl or .parquet; others are texts"
    )
    parser.add_argument("--out", required=True, metavar="FILE.npy", help="the token file")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json; without: a token for each byte"
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="of rows; default: text")
    parser.add_argument(
        "--end",
        metavar="TOKEN",
        help="behind every document; default: what tokenizer_config.json calls eos_token",
    )
    parser.add_argument("--json", action="store_true", help="as a record")


def run(args: Namespace) -> int:
    """Write the file, and say what is in it."""
    vocabulary: Vocabulary
    if args.tokenizer is not None:
        vocabulary = FileVocabulary(Path(args.tokenizer), args.end)
    elif args.end is not None:
        raise refused("--end", "bytes have an end of their own", "leave it out")
    else:
        vocabulary = ByteVocabulary()
    last = time.monotonic()

    def tell(progress: TokenizingProgress) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS:
            last = time.monotonic()
            done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            print(f"{progress.files + 1}/{len(args.texts)}  {done}", file=sys.stderr)

    out = Path(args.out)
    done = tokenize(
        [Path(text) for text in args.texts], out, vocabulary, field=args.field, tell=tell
    )
    if args.json:
        record = {"path": str(out), "documents": done.documents, "tokens": done.tokens}
        print_json({**record, "vocab": vocabulary.size})
        return 0
    print(f"{out}: {done.documents:,} documents, {done.tokens:,} tokens of {vocabulary.size:,}")
    print(f"train on it with data.path={out} model.vocab={vocabulary.size}")
    return 0
