"""The command `ptrain sample RUN [PROMPT]`: generate text from a checkpoint, or score a text."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.codec import encode
from ptrain.errors import input_error
from ptrain.installed import require_torch
from ptrain.report.screen import print_lines


def run(args: Namespace) -> int:
    """Print generated texts, or the score of a given text."""
    require_torch()
    import torch

    from ptrain.convert.saved import TextGenerator
    from ptrain.data.tokenized import read_text

    if args.chat and args.score is not None:
        raise input_error("--chat", "cannot be combined with --score", "Remove one of them.")
    if args.chat and not args.prompt:
        raise input_error(
            "PROMPT", "is missing, and --chat needs a message", "Add the message of the user."
        )
    text = None if args.score is None else read_text(Path(args.score))
    writer = TextGenerator(
        Path(args.run),
        args.step,
        tokenizer=None if args.tokenizer is None else Path(args.tokenizer),
        is_chat=args.chat,
        allow_import=args.allow_import,
    )
    if text is not None:
        score = writer.score(text)
        figures = {**encode(score), "perplexity": score.perplexity}
        if args.json:
            print_json({"step": writer.step, **figures})
        else:
            print(
                f"step {writer.step}, {score.tokens} tokens: loss {score.loss:.4f}, perplexity "
                f"{score.perplexity:.4g}, {score.bits:.4f} bits per byte"
            )
        return 0
    generator = torch.Generator().manual_seed(args.seed)
    options = {"tokens": args.tokens, "temperature": args.temperature, "generator": generator}
    texts = [writer.generate(args.prompt, **options) for _ in range(args.samples)]
    if args.json:
        print_json({"step": writer.step, "prompt": args.prompt, "texts": texts})
    else:
        prefix = "" if args.chat else args.prompt
        # A file gets the text as it was generated.
        show = print_lines if sys.stdout.isatty() else print
        show("\n\n".join(f"{prefix}{text}" for text in texts))
    return 0
