"""Sources of samples: built-in corpora, token files, weighted mixtures of them, and your dataset.

Order: each epoch is a permutation by a Feistel network, which needs no memory for indices. A
mixture is a pure function of (seed, index), so a run resumes without state and draws the same
samples on every mesh: the stream is divided into cycles in which each file has samples in
proportion to its weight, spread evenly, and each file runs through its epochs without repeats.

Held-out data: every tenth document of a built-in corpus, and the last twentieth of a token file or
of a dataset.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptrain.data.sampler import DatasetBatch, LocalBatch, SampleSource, Split, local_batch
from ptrain.data.tokenized import TokenOrigin, read_origin, require_one_tokenizer, require_tokenizer
from ptrain.data.vocabulary import START, TARGET, VOCAB, encode, mask_path, open_mask, open_tokens
from ptrain.errors import Fault, SpecError, input_error
from ptrain.models.cross_entropy import IGNORED
from ptrain.models.external import dataset_of
from ptrain.models.objective import in_dtype_of
from ptrain.spec.job import DataSource, DataSpec, cycle_quotas
from ptrain.spec.model import ExternalModel, ModelShape, ModelSpec, UserFunction
from ptrain.spec.spec import Spec

# Rounds of the Feistel network. Luby and Rackoff prove that four rounds of pseudo-random functions
# cannot be distinguished from a random permutation; the halves of small ranges have few bits.
_ROUNDS = 6
_MASK = 2**64 - 1  # arithmetic modulo 2**64, as in splitmix64


def stream_sample(index: int, *, windows: int, seed: int) -> int:
    """Return the sample at `index` of the endless stream, as epoch · windows + window.

    An epoch has `windows` samples, in an order that the seed decides.
    """
    epoch, place = divmod(index, windows)
    # The seed is hashed before it is combined with the epoch, so that seeds and epochs that differ
    # by 1 do not share permutations.
    return epoch * windows + permute(place, windows, splitmix64(splitmix64(seed & _MASK) ^ epoch))


def permute(place: int, size: int, key: int) -> int:
    """Return the image of `place` under a pseudo-random permutation of range(size).

    The Feistel network permutes the next power of four. A result outside the range is permuted
    again until it is inside (cycle walking).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each half of the network
    mask = (1 << half) - 1
    # The network's range is at most four times the size, so four passes suffice on average.
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (splitmix64(key + number ^ right << 32) & mask)
        place = left << half | right
        if place < size:
            return place


def splitmix64(number: int) -> int:
    """Return the splitmix64 hash of a number: each bit of the result depends on all of its bits."""
    # Constants of splitmix64.c by Sebastiano Vigna (Steele, Lea and Flood, 2014).
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


Rows = NDArray[Any]


def require_edges(name: str, tokens: Rows, marks: Rows, model: ModelSpec) -> None:
    """Raise SpecError if tokens of packed rows would attend to other documents.

    Also raise it if they would not attend to all of their document. User models are not checked:
    their attention is unknown.

    Args:
        name: The name of the token file.
        tokens: Token ids [rows, sequence + 1].
        marks: The marks (INPUT, TARGET, START) of the tokens.
        model: The model.
    """
    begins = marks == START
    is_packed = bool(begins[:, 1:].any())
    if isinstance(model, ExternalModel) or (not is_packed and not _has_documents(model)):
        return
    # Packed documents must be separated by one token: model.document_end finds their ends by it.
    before = tokens[:, :-1][begins[:, 1:]]
    if len(np.unique(before)) > 1:
        finding = (
            f"the mask does not belong to {name}: documents would start after different tokens"
        )
        remedy = "Use the mask that was written with the file, or run `ptrain tokenize` again."
        raise input_error("data.loss_mask", finding, remedy)
    remedy = f"Use `model.document_end={before[0]}`." if is_packed else "Remove the key."
    if not isinstance(model, ModelShape) or not model.has_documents:
        finding = f"{name} has rows with several documents, which would attend to each other"
        alone = "the file with `ptrain tokenize --alone`, one document per row."
        is_ours = isinstance(model, ModelShape)
        remedy = f"{remedy} Or write {alone}" if is_ours else f"Write {alone}"
        raise input_error("data.path", finding, remedy)
    if (row := _first_mismatch(tokens, marks, model)) is not None:
        key = model.document_key
        if is_packed and key == "document_start":
            remedy = f"Remove `model.{key}`. {remedy}"
        raise input_error(
            f"model.{key}", f"the documents of row {row} of {name} do not match model.{key}", remedy
        )


def _has_documents(model: ModelSpec) -> bool:
    """Return True if attention of the model is limited to documents."""
    return isinstance(model, ModelShape) and model.has_documents


def _first_mismatch(tokens: Rows, marks: Rows, model: ModelShape) -> int | None:
    """Return the first row in which the documents of marks and model differ, None without one.

    Boundaries after the last target of a row are ignored: no loss depends on them.
    """
    begins = marks == START
    begins[:, 0] = True
    if model.document_start is not None:
        edges = tokens == model.document_start
    else:
        edges = np.roll(tokens == model.document_end, 1, axis=1)
    edges[:, 0] = True
    is_target = marks == TARGET
    counts = is_target[:, ::-1].cumsum(1)[:, ::-1] > 0
    rows = np.flatnonzero(((begins != edges) & counts).any(1))
    return int(rows[0]) if len(rows) else None


HELD_OUT_OF_FILE = 20  # the last twentieth of a token file is held out
_NUM_CHECKED, _NUM_ROWS_CHECKED = 2**20, 256  # tokens and rows that are checked before ranks start

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A corpus of token ids. The samples are its windows, or its rows if it has two dimensions.

    Attributes:
        name: The name of the corpus, or the path of the file.
        train: The tokens of the train split; a token file stays on disk, mapped into memory.
        held_out: The tokens of the held-out split.
        vocab: The size of the tokenizer. None: unknown, for token files.
        masks: The loss masks of the two splits. For tokens in one dimension, 0 marks a token that
            is no target; for rows, TARGET marks a token that is one. None: all tokens are targets.
        origin: The tokenizer of a token file. None: unknown.
    """

    name: str
    train: Tokens
    held_out: Tokens
    vocab: int | None
    masks: tuple[NDArray[Any], NDArray[Any]] | None = None
    origin: TokenOrigin | None = None

    def split(self, split: Split) -> Tokens:
        """Return the tokens of a split."""
        return self.train if split is Split.TRAIN else self.held_out

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the number of samples of an epoch.

        Raises SpecError if the split is too short for a sample, or has rows of another length.
        """
        tokens = self.split(split)
        if tokens.ndim == 2:
            return self._num_rows(sequence, split)
        num_tokens = len(tokens)
        windows = (num_tokens - 1) // sequence
        if windows < 1:
            raise input_error(
                "data",
                f"the {split.value} split of {self.name} has {num_tokens} tokens, but a "
                f"sample needs {sequence + 1}",
                "Use a smaller `batch.sequence`, or more text.",
            )
        return windows

    def _num_rows(self, sequence: int, split: Split) -> int:
        """Return the rows of a split; raises SpecError for none, or for rows of another length."""
        rows, width = self.split(split).shape
        if width != sequence + 1:
            finding = f"{self.name} has rows of {width - 1} tokens, but samples have {sequence}"
            raise input_error(
                "batch.sequence",
                finding,
                f"Use `batch.sequence={width - 1}`, or write the file with `ptrain tokenize "
                f"--sequence {sequence}`.",
            )
        if rows < 1:
            finding = f"the {split.value} split of {self.name} has no rows: one row of "
            finding += f"{HELD_OUT_OF_FILE} is held out"
            raise input_error("data", finding, "Use `eval.every=0`, or more chats.")
        return int(rows)

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the sample at an index of the stream, as epoch · windows + window."""
        return stream_sample(index, windows=self.num_samples(sequence, split), seed=seed)

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> LocalBatch:
        """Return the samples at these places."""
        return local_batch(*self.rows(places, spec, split), sample_ids, spec.batch)

    def rows(self, places: Sequence[int], spec: Spec, split: Split) -> tuple[Tensor, Tensor | None]:
        """Return tokens and labels [places, window + 1]; no labels if all tokens are targets."""
        tokens, window = self.split(split), spec.batch.unpadded_tokens
        rows = np.stack([_sample_tokens(tokens, place, window) for place in places], dtype=np.int64)
        self._require_vocab(spec, int(rows.max()))
        ids, labels = torch.from_numpy(rows), None
        if spec.ignores_targets:
            counts = np.stack([self._target_flags(place, spec, split) for place in places])
            labels = ids.masked_fill(torch.from_numpy(~counts), IGNORED)
        return ids, labels

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return the number of targets in these samples that count in the loss."""
        return sum(int(np.count_nonzero(self._target_flags(p, spec, split)[1:])) for p in places)

    def _target_flags(self, place: int, spec: Spec, split: Split) -> NDArray[np.bool_]:
        """Return for each token of a sample [sequence + 1] whether it counts as a target."""
        sequence, ignored = spec.batch.unpadded_tokens, spec.data.ignored or ()
        counts = np.ones(sequence + 1, dtype=np.bool_)
        if self.masks is not None:
            mask = self.masks[split is not Split.TRAIN]
            own = _sample_tokens(mask, place, sequence)
            counts &= _are_targets(own, of_rows=mask.ndim == 2)
        if ignored:
            own = _sample_tokens(self.split(split), place, sequence)
            counts &= np.isin(own, ignored, invert=True)
        return counts

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raise SpecError if the model cannot train on the tokens.

        The reasons: ids beyond the vocabulary, another tokenizer, a mask without targets, or packed
        documents that the model does not separate. Only the beginning of a token file is checked.
        """
        num_checked = _NUM_CHECKED if self.train.ndim == 1 else _NUM_ROWS_CHECKED
        first = self.train[:num_checked]
        largest = self.vocab - 1 if self.vocab else int(first.max())
        self._require_vocab(spec, largest)
        if logits is not None and largest >= logits:
            name = spec.model.target if isinstance(spec.model, ExternalModel) else "the model"
            raise input_error(
                "data",
                f"{self.name} contains token {largest}, but {name} returns {logits} "
                "logits per token",
                f"Use a model with a vocabulary of {self.vocab or largest + 1} or more.",
            )
        require_tokenizer(self.name, self.origin, spec.model)
        if self.masks is not None:
            self._require_targets(self.masks[0], num_checked)
        if self.train.ndim == 2 and self.masks is not None:
            require_edges(self.name, first, self.masks[0][:num_checked], spec.model)

    def _require_targets(self, mask: NDArray[Any], num_checked: int) -> None:
        """Raise SpecError if a mask has no target.

        The full mask is only read if its beginning has none.
        """
        if not any(
            _are_targets(part, of_rows=part.ndim == 2).any() for part in (mask[:num_checked], mask)
        ):
            raise input_error(
                "data",
                f"the mask excludes every token of the train split of {self.name}",
                "Use a mask that is true for target tokens.",
            )

    def _require_vocab(self, spec: Spec, largest: int) -> None:
        """Raise SpecError if the largest id exceeds the vocabulary of the model."""
        size, key = spec.model.vocabulary
        if size is not None and largest >= size:
            raise input_error(
                "data",
                f"{self.name} contains token {largest}, but {key} is {size}",
                f"Use `{key}={self.vocab or largest + 1}` or more.",
            )

    def digest(self) -> str | None:
        """Return a digest of a built-in corpus, whose text may depend on the Python version.

        It is None for a token file, which is recorded by name and may be too large to read.
        """
        if self.vocab is None:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for tokens in (self.train, self.held_out):
            digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()


def _are_targets(mask: NDArray[Any], *, of_rows: bool) -> NDArray[np.bool_]:
    """Return for each token whether a mask includes it; `of_rows` selects the marks of rows."""
    return mask == TARGET if of_rows else mask != 0


def _sample_tokens(values: NDArray[Any], place: int, sequence: int) -> NDArray[Any]:
    """Return the tokens of a sample.

    Its last token is only a target. In one dimension it is also the first input of the next sample.
    """
    if values.ndim == 2:
        return values[place]
    return values[sequence * place : sequence * (place + 1) + 1]


HELD_OUT = 20  # the last twentieth of a dataset is held out, as for a token file


class UserSamples:
    """The items of the dataset that a user function returns."""

    def __init__(self, function: UserFunction) -> None:
        self._function, self._dataset = function, dataset_of(function)
        self._num_train = self._dataset.size - self._dataset.size // HELD_OUT

    @property
    def name(self) -> str:
        return self._function.target

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the number of items of a split. Raises SpecError if it has none."""
        is_train = split is Split.TRAIN
        size = self._num_train if is_train else self._dataset.size - self._num_train
        if size < 1:
            finding = f"{self.name} has {self._dataset.size} samples, too few to hold out "
            raise input_error(
                "data.target",
                f"{finding}one in {HELD_OUT}",
                f"Use `eval.every=0`, or a dataset with {HELD_OUT} samples or more.",
            )
        return size

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the item at an index of the stream, as epoch · items + item."""
        return stream_sample(index, windows=self.num_samples(sequence, split), seed=seed)

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> DatasetBatch:
        """Return the items at these places, collated, in the dtype of the model."""
        first = 0 if split is Split.TRAIN else self._num_train
        return DatasetBatch(
            samples=in_dtype_of(spec, self._dataset.read([first + place for place in places])),
            global_samples=spec.batch.global_samples,
            sample_ids=sample_ids,
        )

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return the number of samples: each counts as one target."""
        return len(places)

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Read the last item; raises SpecError if it cannot be read or differs from the first."""
        self._dataset.read([self._dataset.size - 1])

    def digest(self) -> None:
        """Return None: the code may return other samples in the next run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A weighted mixture of token files. Its samples are numbered file by file.

    Attributes:
        files: The files.
        quotas: The number of samples of each file per cycle.
    """

    files: tuple[Corpus, ...]
    quotas: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of the files."""
        return " + ".join(file.name for file in self.files)

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the number of samples of all files. Raises SpecError with all faults."""
        return self._sample_offsets(sequence, split)[-1]

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the sample at an index of the stream, with the epoch of its file."""
        cycle, place = divmod(index, sum(self.quotas))
        whose, turns = _cycle_order(self.quotas, seed)
        number = int(whose[place])
        own_index = cycle * self.quotas[number] + int(turns[place])
        edges = self._sample_offsets(sequence, split)
        windows = edges[number + 1] - edges[number]
        # A seed per file: files of equal length would otherwise have the same order.
        drawn = stream_sample(own_index, windows=windows, seed=splitmix64(seed + number))
        epoch, window = divmod(drawn, windows)
        return epoch * edges[-1] + edges[number] + window

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> LocalBatch:
        """Return the samples at these places."""
        rows = [
            file.rows([place], spec, split)
            for file, place in self._locate_files(places, spec, split)
        ]
        labels = [own for _, own in rows if own is not None]
        return local_batch(
            torch.cat([tokens for tokens, _ in rows]),
            torch.cat(labels) if labels else None,
            sample_ids,
            spec.batch,
        )

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return the number of targets in these samples that count in the loss."""
        own = self._locate_files(places, spec, split)
        return sum(file.num_targets([place], spec, split) for file, place in own)

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raise SpecError, with all faults, if a file does not fit the model or the first file."""
        require_one_tokenizer([(file.name, file.origin) for file in self.files])
        call_all([partial(file.require_known, spec, logits) for file in self.files])

    def digest(self) -> None:
        """Return None: the files are recorded by name, and may be too large to read."""

    def _locate_files(
        self, places: Sequence[int], spec: Spec, split: Split
    ) -> list[tuple[Corpus, int]]:
        """Return for each place its file and the place in this file."""
        edges = self._sample_offsets(spec.batch.unpadded_tokens, split)
        numbers = [bisect_right(edges, place) - 1 for place in places]
        both = zip(numbers, places, strict=True)
        return [(self.files[number], place - edges[number]) for number, place in both]

    def _sample_offsets(self, sequence: int, split: Split) -> list[int]:
        """Return the number of the first sample of each file, and the number of all samples."""
        counts = call_all([partial(file.num_samples, sequence, split) for file in self.files])
        return [0, *accumulate(counts)]


@cache
def _cycle_order(quotas: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each place of a cycle its file, and how many samples of the file come before it.

    The i-th of q samples of a file has the position (i + u) / q of the cycle, with u drawn by the
    seed. This spreads the samples of each file evenly.
    """
    whose = np.repeat(np.arange(len(quotas)), quotas)
    turns = np.concatenate([np.arange(quota) for quota in quotas])
    drawn = np.array([splitmix64(splitmix64(seed) + n) / 2**64 for n in range(len(quotas))])
    # Stable: equal positions have the same order on every machine.
    order = np.argsort((turns + drawn[whose]) / np.asarray(quotas)[whose], kind="stable")
    return whose[order], turns[order]


Answer = TypeVar("Answer")


def call_all(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Call all functions and return their results. Raises SpecError with the faults of all."""
    answers: list[Answer] = []
    faults: list[Fault] = []
    for call in calls:
        try:
            answers.append(call())
        except SpecError as error:
            faults.extend(error.faults)
    if faults:
        raise SpecError(*faults)
    return answers


_HELD_OUT_EVERY = 10  # every tenth document is held out


def open_corpus(data: DataSpec) -> SampleSource:
    """Open the data section of a spec. Raises SpecError if a file, dataset or name is unusable."""
    return UserSamples(data.function) if data.function is not None else _open_tokens(data)


def _open_tokens(data: DataSpec) -> Corpus | Mixture:
    """Open a built-in corpus, a token file, or several token files."""
    if data.path is not None:
        file = DataSource(path=data.path, loss_mask=data.loss_mask)
        return _open_file(file, "data.path", has_ignored=data.ignored is not None)
    if data.sources is not None:
        opened = partial(_open_file, place="data.sources", has_ignored=data.ignored is not None)
        files = call_all([partial(opened, source) for source in data.sources])
        weights = [source.weight for source in data.sources]
        return Mixture(files=tuple(files), quotas=cycle_quotas(weights))
    if data.tokenizer != "bytes":
        raise input_error(
            "data.tokenizer",
            f"unknown tokenizer {data.tokenizer!r}",
            "Use `data.tokenizer=bytes`. For another tokenizer, run `ptrain tokenize` and set "
            "`data.path`.",
        )
    match data.corpus:
        case "python-docs":
            return _encode_documents("python-docs", _python_documents())
        case "synthetic":
            return _encode_documents("synthetic", _synthetic_documents())
        case name:
            raise input_error(
                "data.corpus",
                f"unknown corpus {name!r}",
                "Use python-docs or synthetic, or set `data.path=FILE`, a token file.",
            )


def _open_file(source: DataSource, place: str, *, has_ignored: bool) -> Corpus:
    """Open a token file with its mask.

    Raises SpecError if a file is unusable, or if it has a mask in the same folder that the spec
    neither uses nor overrides by `data.ignored`.
    """
    tokens, masks = open_tokens(Path(source.path), place), None
    # The held-out part is at the end, so that both splits are views of the mapped file.
    num_train = len(tokens) - len(tokens) // HELD_OUT_OF_FILE
    unused = mask_path(Path(source.path))
    of_mask = "data.loss_mask" if place == "data.path" else place
    if source.loss_mask is not None:
        mask = open_mask(Path(source.loss_mask), tokens, of_mask)
        masks = mask[:num_train], mask[num_train:]
    elif not has_ignored and unused.is_file():
        raise input_error(
            of_mask,
            f"{unused} is the loss mask of {source.path}, but the spec does not use it",
            f"Use `data.loss_mask={unused}`, or `data.ignored=[]` to train on all tokens.",
        )
    return Corpus(
        name=source.path,
        train=tokens[:num_train],
        held_out=tokens[num_train:],
        vocab=None,
        masks=masks,
        origin=read_origin(Path(source.path)),
    )


def _encode_documents(name: str, documents: Iterable[str]) -> Corpus:
    """Encode documents as bytes, and hold out every tenth."""
    encoded = [encode(document) for document in documents]
    held_out = encoded[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [tokens for i, tokens in enumerate(encoded, 1) if i % _HELD_OUT_EVERY]
    return Corpus(
        name=name, train=np.concatenate(train), held_out=np.concatenate(held_out), vocab=VOCAB
    )


def _python_documents() -> list[str]:
    """Return the language reference that `help()` shows. Topics with equal texts count once."""
    return list(dict.fromkeys(topics[name] for name in sorted(topics)))


def _synthetic_documents(num_documents: int = 200, words_per_document: int = 500) -> Iterator[str]:
    """Yield documents of synthetic words, with the same text on every machine (SHAKE-256).

    The product of two uniform bytes favors small ranks: the first words are the frequent ones.
    """
    stream = hashlib.shake_256(b"ptrain synthetic corpus").digest(2**19)
    words = [_draw_word(stream[8 * i : 8 * i + 8]) for i in range(256)]
    cursor = 8 * len(words)
    for _ in range(num_documents):
        drawn = stream[cursor : cursor + 2 * words_per_document]
        cursor += 2 * words_per_document
        ranks = (first * second >> 8 for first, second in zip(drawn[::2], drawn[1::2], strict=True))
        yield " ".join(words[rank] for rank in ranks) + "."


def _draw_word(drawn: bytes) -> str:
    """Return a word of 2 to 7 letters."""
    length = 2 + drawn[0] % 6
    return "".join("etaoinshrdlucmfw"[byte % 16] for byte in drawn[1 : 1 + length])
