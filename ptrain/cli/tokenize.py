"""`ptrain tokenize TEXT… --out FILE.npy`: documents as the token file that a training reads, or
chats as the rows that it learns answers from."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptrain.cli.arguments import print_json
from ptrain.data.chat_rows import ChatPacking, ChatTemplate, tokenize_chats
from ptrain.data.tokenized import TokenizingProgress, tokenize
from ptrain.data.vocabulary import ByteVocabulary, FileVocabulary, Vocabulary, mask_beside
from ptrain.errors import refused
from ptrain.spec.resolve_sections import CONFIG

_SECONDS = 5.0  # between two lines of progress
_OF_CHATS = ("sequence", "alone", "separator")


def run(args: Namespace) -> int:
    """Write the file, and say what is in it."""
    record, lines = _of_chats(args) if args.chat else _of_documents(args)
    if args.json:
        print_json(record)
    else:
        print("\n".join(lines))
    return 0


def _of_documents(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what was made of texts, as a record and in words."""
    for option in _OF_CHATS:
        if getattr(args, option):
            raise refused(f"--{option}", "applies to chats only", "Add `--chat`, or remove it.")
    vocabulary: Vocabulary
    if args.tokenizer is not None:
        vocabulary = FileVocabulary(Path(args.tokenizer), args.end)
    elif args.end is not None:
        raise refused(
            "--end",
            "needs a tokenizer; byte tokens have a fixed end",
            "Remove it, or add --tokenizer FILE.",
        )
    else:
        vocabulary = ByteVocabulary()
    out, texts, teller = Path(args.out), [Path(text) for text in args.texts], _Teller(args)
    done = tokenize(texts, out, vocabulary, field=args.field or "text", tell=teller.tell)
    record = {"path": str(out), "documents": done.documents, "tokens": done.tokens}
    keys = {"data.path": str(out), **_key_of_model(vocabulary.path, vocabulary.size)}
    return {**record, "vocab": vocabulary.size}, [
        f"{out}: {done.documents:,} documents, {done.tokens:,} tokens of {vocabulary.size:,}",
        _advice(keys),
    ]


def _of_chats(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what was made of chats, as a record and in words."""
    if args.tokenizer is None:
        raise refused(
            "--chat",
            "needs the chat template of a tokenizer",
            "Add `--tokenizer FOLDER`, the folder of a Transformers model.",
        )
    if args.sequence is None:
        raise refused(
            "--chat",
            "the number of tokens per row is missing",
            "Add `--sequence 4096`, the `batch.sequence` of the training.",
        )
    if args.end is not None:
        raise refused("--end", "the chat template ends a chat", "Remove it.")
    out, teller = Path(args.out), _Teller(args)
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
    keys: dict[str, Any] = {"data.path": str(out), "data.loss_mask": str(mask_beside(out))}
    keys["batch.sequence"] = args.sequence
    if packing.is_packed:
        keys["model.document_end"] = done.separator
    keys |= _key_of_model(template.path, template.size)
    counts = {"chats": done.documents, "cut": done.cut, "left_out": done.left_out}
    counts |= {why: number for why, (number, _) in _left_out(done).items()}
    sizes = {"rows": done.entries, "tokens": done.tokens, "targets": done.targets}
    return {"path": str(out), **counts, **sizes, "keys": keys}, _in_words(args, done, keys)


def _in_words(args: Namespace, done: TokenizingProgress, keys: dict[str, Any]) -> list[str]:
    share = done.tokens / (done.entries * (args.sequence + 1))
    lines = [
        f"{args.out}: {done.documents:,} chats in {done.entries:,} rows of {args.sequence:,} "
        f"tokens, {share:.0%} full; {done.targets:,} of {done.tokens:,} tokens are learned"
    ]
    if done.cut:
        lines.append(f"cut behind the last answer that fits: {done.cut:,}")
    lines += [f"left out, {why}: {n:,}" for n, why in _left_out(done).values() if n]
    return [*lines, _advice(keys)]


def _key_of_model(tokenizer: Path | None, size: int) -> dict[str, object]:
    """Return the key of a model for tokens of so many words: one that stands beside the tokenizer
    begins a training."""
    if tokenizer is not None and (tokenizer.parent / CONFIG).is_file():
        return {"model.pretrained": str(tokenizer.parent)}
    return {"model.vocab": size}


def _advice(keys: Mapping[str, object]) -> str:
    return f"train on it with {' '.join(f'{key}={value}' for key, value in keys.items())}"


def _left_out(done: TokenizingProgress) -> dict[str, tuple[int, str]]:
    """Return how many chats are left out, by why, which has a name and words."""
    return {
        "unanswered": (done.unanswered, "without an answer"),
        "too_long": (done.too_long, "without an answer that fits"),
        "divided": (done.divided, "with the token within them that stands between two"),
    }


class _Teller:
    """Says where it begins, if another call broke off, and from time to time how far it is."""

    def __init__(self, args: Namespace) -> None:
        self._files, self._last = len(args.texts), 0.0

    def tell(self, progress: TokenizingProgress) -> None:
        is_first, now = not self._last, time.monotonic()
        if is_first:
            self._last = now
            if progress.documents:
                print(f"goes on behind {progress.documents:,} documents", file=sys.stderr)
        elif now - self._last > _SECONDS:
            self._last = now
            done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            print(f"{progress.files + 1}/{self._files}  {done}", file=sys.stderr)
