"""`ptrain sample RUN [PROMPT]`: what a trained model writes, and how well it foresees a text."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.codec import encode
from ptrain.errors import refused
from ptrain.installed import require_torch


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, like runs/latest")
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", default="", help="what to go on with"
    )
    parser.add_argument("--tokens", type=_whole, default=200, metavar="N", help="at most; 200")
    parser.add_argument("--samples", type=_whole, default=1, metavar="N", help="how many texts; 1")
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.8,
        metavar="T",
        help="0: always the most probable token; default: 0.8",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; 0")
    parser.add_argument("--score", metavar="FILE", help="a text: loss, perplexity, bits per byte")
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, or its folder")
    parser.add_argument("--chat", action="store_true", help="PROMPT is said to the model in a chat")
    parser.add_argument("--allow-import", action="store_true", help="run the model's own code")
    parser.add_argument("--json", action="store_true", help="as a record")


def _whole(written: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise ArgumentTypeError(f"{written!r} is no number from 1")
    return int(written)


def _temperature(written: str) -> float:
    try:
        temperature = float(written)
    except ValueError as error:
        raise ArgumentTypeError(f"{written!r} is no number") from error
    if not 0.0 <= temperature < float("inf"):
        raise ArgumentTypeError(f"{written} is no temperature: 0 or more")
    return temperature


def run(args: Namespace) -> int:
    """Print the texts, or the score of one."""
    require_torch()
    import torch

    from ptrain.convert.saved import Writer
    from ptrain.data.tokenized import text_of

    if args.chat and args.score is not None:
        raise refused("--chat", "a text is scored as it is", "leave out one of --chat and --score")
    if args.chat and not args.prompt:
        raise refused("PROMPT", "nothing is said to the model", "give what a user says")
    text = None if args.score is None else text_of(Path(args.score))
    writer = Writer(
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
    how = {"tokens": args.tokens, "temperature": args.temperature, "generator": generator}
    texts = [writer.written(args.prompt, **how) for _ in range(args.samples)]
    if args.json:
        print_json({"step": writer.step, "prompt": args.prompt, "texts": texts})
    else:
        begun = "" if args.chat else args.prompt
        print("\n\n".join(f"{begun}{text}" for text in texts))
    return 0
