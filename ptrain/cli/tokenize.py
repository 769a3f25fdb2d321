"""The command `ptrain tokenize TEXT… --out FILE.npy`: write the token file of a training.

The file has documents, or with `--chat` rows of chats whose answers are learned.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptrain.cli.arguments import print_json
from ptrain.data.chat_rows import ChatPacking, tokenize_chats
from ptrain.data.chats import ChatTemplate
from ptrain.data.tokenized import TokenizingProgress, tokenize
from ptrain.data.vocabulary import ByteVocabulary, FileVocabulary, Vocabulary, mask_path
from ptrain.errors import input_error
from ptrain.report.screen import print_lines
from ptrain.spec.resolve_sections import CONFIG

_SECONDS = 5.0  # interval between two lines of progress
_CHAT_OPTIONS = ("sequence", "alone", "separator")


def run(args: Namespace) -> int:
    """Write the token file and print its contents."""
    record, lines = _tokenize_chats(args) if args.chat else _tokenize_documents(args)
    if args.json:
        print_json(record)
    else:
        print_lines(*lines)
    return 0


def _tokenize_documents(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Tokenize documents; return the record and its lines of text."""
    for option in _CHAT_OPTIONS:
        if getattr(args, option):
            raise input_error(f"--{option}", "applies to chats only", "Add `--chat`, or remove it.")
    vocabulary: Vocabulary
    if args.tokenizer is not None:
        vocabulary = FileVocabulary(Path(args.tokenizer), args.end)
    elif args.end is not None:
        raise input_error(
            "--end",
            "needs a tokenizer; byte tokens have a fixed end",
            "Remove it, or add --tokenizer FILE.",
        )
    else:
        vocabulary = ByteVocabulary()
    out, texts, teller = Path(args.out), [Path(text) for text in args.texts], _ProgressPrinter(args)
    done = tokenize(texts, out, vocabulary, field=args.field or "text", tell=teller.tell)
    record = {"path": str(out), "documents": done.documents, "tokens": done.tokens}
    keys = {"data.path": str(out), **_model_setting(vocabulary.path, vocabulary.size)}
    return {**record, "vocab": vocabulary.size}, [
        f"{out}: {done.documents:,} documents, {done.tokens:,} tokens of {vocabulary.size:,}",
        _advice_line(keys),
    ]


def _tokenize_chats(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Tokenize chats; return the record and its lines of text."""
    if args.tokenizer is None:
        raise input_error(
            "--chat",
            "needs the chat template of a tokenizer",
            "Add `--tokenizer FOLDER`, the folder of a Transformers model.",
        )
    if args.sequence is None:
        raise input_error(
            "--chat",
            "the number of tokens per row is missing",
            "Add `--sequence 4096`, the `batch.sequence` of the training.",
        )
    if args.end is not None:
        raise input_error("--end", "the chat template ends a chat", "Remove it.")
    out, teller = Path(args.out), _ProgressPrinter(args)
    template = ChatTemplate(Path(args.tokenizer))
    packing = ChatPacking(
        sequence=args.sequence, is_packed=not args.alone, separator=args.separator
    )
    done = tokenize_chats(
        [Path(text) for text in args.texts],
        out,
        template,
        packing,
        field=args.field,
        tell=teller.tell,
    )
    keys: dict[str, Any] = {"data.path": str(out), "data.loss_mask": str(mask_path(out))}
    keys["batch.sequence"] = args.sequence
    if packing.is_packed:
        keys["model.document_end"] = done.separator
    keys |= _model_setting(template.path, template.size)
    counts = {"chats": done.documents, "cut": done.cut, "left_out": done.left_out}
    counts |= {why: number for why, (number, _) in _omitted_chats(done).items()}
    sizes = {"rows": done.entries, "tokens": done.tokens, "targets": done.targets}
    return {"path": str(out), **counts, **sizes, "keys": keys}, _chat_lines(args, done, keys)


def _chat_lines(args: Namespace, done: TokenizingProgress, keys: dict[str, Any]) -> list[str]:
    """Return the lines of text about tokenized chats."""
    share = done.tokens / (
        done.entries * (args.sequence + 1)
    )  # a row has inputs and the last target
    lines = [
        f"{args.out}: {done.documents:,} chats in {done.entries:,} rows of {args.sequence:,} "
        f"tokens, {share:.0%} full; {done.targets:,} of {done.tokens:,} tokens are learned"
    ]
    if done.cut:
        lines.append(f"cut behind the last answer that fits: {done.cut:,}")
    lines += [f"left out, {why}: {n:,}" for n, why in _omitted_chats(done).values() if n]
    return [*lines, _advice_line(keys)]


def _model_setting(tokenizer: Path | None, size: int) -> dict[str, object]:
    """Return the setting that gives a model this vocabulary.

    If a model's config is in the tokenizer's folder, the setting starts from that model.
    """
    if tokenizer is not None and (tokenizer.parent / CONFIG).is_file():
        return {"model.pretrained": str(tokenizer.parent)}
    return {"model.vocab": size}


def _advice_line(keys: Mapping[str, object]) -> str:
    """Return a sentence with the overrides for a training on the file."""
    return f"train on it with {' '.join(f'{key}={value}' for key, value in keys.items())}"


def _omitted_chats(done: TokenizingProgress) -> dict[str, tuple[int, str]]:
    """Return the number of chats left out, by the name of the reason, with the reason in words."""
    return {
        "unanswered": (done.unanswered, "without an answer"),
        "too_long": (done.too_long, "without an answer that fits"),
        "divided": (done.divided, "with the token within them that stands between two"),
    }


class _ProgressPrinter:
    """A printer of the progress of tokenizing to standard error, at most every few seconds.

    The first line states the position if the call continues an interrupted one.
    """

    def __init__(self, args: Namespace) -> None:
        self._files, self._last = len(args.texts), 0.0

    def tell(self, progress: TokenizingProgress) -> None:
        """Print a line if enough time has passed since the last one."""
        is_first, now = not self._last, time.monotonic()
        if is_first:
            self._last = now
            if progress.documents:
                print(f"goes on behind {progress.documents:,} documents", file=sys.stderr)
        elif now - self._last > _SECONDS:
            self._last = now
            done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            print(f"{progress.files + 1}/{self._files}  {done}", file=sys.stderr)
