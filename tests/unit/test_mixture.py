"""Several token files: each has its share of the samples and separate epochs on any mesh, and a
resumed run draws the same samples."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptrain.data.corpus import HELD_OUT_OF_FILE, open_corpus
from ptrain.data.sampler import LocalBatch, SampleSource, Split, read_batch, require_trainable_data
from ptrain.errors import SpecError
from ptrain.models.cross_entropy import IGNORED
from ptrain.spec.job import CYCLE, cycle_quotas
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping

SEQUENCE = 4
SIZES = {"a": 23, "b": 7, "c": 40}  # windows to train on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of windows of which the tokens tell file and place."""
    place = tmp_path_factory.mktemp("tokens")
    for number, (name, windows) in enumerate(SIZES.items()):
        tokens = windows * SEQUENCE + 1
        sizes = range(tokens, 2 * tokens)  # with what is held out
        whole = next(size for size in sizes if size - size // HELD_OUT_OF_FILE >= tokens)
        np.save(place / f"{name}.npy", (1000 * number + np.arange(whole)).astype(np.uint16))
    return place


def spec_of(folder: Path, *words: str, sources: Any = None, **batch: Any) -> Spec:
    weights = {"a": 3, "b": 1, "c": 0.5}
    given = [{"path": str(folder / f"{k}.npy"), "weight": w} for k, w in weights.items()]
    return load(
        {
            "name": "mixed",
            "model": {"layers": 1, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 4000},
            "mesh": {"dp_shard": 2},
            "placement": "zero2",
            "batch": {"global": 12, "micro": 1, "sequence": SEQUENCE, **batch},
            "data": {"sources": given if sources is None else sources},
            "eval": {"every": 0},
        },
        words,
    ).spec


def first_tokens(source: SampleSource, spec: Spec, step: int, degree: int) -> list[int]:
    """Return the first token of each sample of a step, in the order of the global batch."""
    rows: list[list[int]] = []
    for index in range(degree):
        share = read_batch(source, spec=spec, step=step, data_index=index, data_degree=degree)
        assert isinstance(share, LocalBatch)
        rows.append(share.tokens[:, 0].tolist())
    micro = spec.batch.micro
    turns = range(0, len(rows[0]), micro)
    return [token for turn in turns for own in rows for token in own[turn : turn + micro]]


def first_tokens_of_steps(spec: Spec, steps: range, degree: int = 1) -> list[int]:
    source = open_corpus(spec.data)
    return [*chain.from_iterable(first_tokens(source, spec, step, degree) for step in steps)]


def test_each_file_has_its_share_and_separate_epochs(folder: Path):
    spec = spec_of(folder)
    stream = first_tokens_of_steps(spec, range(60))
    files = [token // 1000 for token in stream]
    for cycle in range(0, len(files) - 8, 9):  # 6 : 2 : 1
        assert Counter(files[cycle : cycle + 9]) == {0: 6, 1: 2, 2: 1}
    for number, windows in enumerate(SIZES.values()):
        own = [token for token in stream if token // 1000 == number]
        whole = {1000 * number + SEQUENCE * window for window in range(windows)}
        epochs = [own[first : first + windows] for first in range(0, len(own), windows)]
        for epoch in epochs[:-1]:
            assert len(epoch) == windows and set(epoch) == whole
        assert len(set(epochs[-1])) == len(epochs[-1])
        assert len(epochs) < 3 or epochs[0] != epochs[1], "an order of its own"


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3])
def test_every_mesh_draws_the_same_samples_and_a_run_resumes(folder: Path, degree: int, micro: int):
    spec = spec_of(folder)
    other = spec_of(folder, f"mesh.dp_shard={degree}", micro=micro)
    assert (
        first_tokens_of_steps(other, range(5, 9), degree)
        == first_tokens_of_steps(spec, range(9))[5 * 12 :]
    )


def test_another_seed_draws_in_another_order(folder: Path):
    assert first_tokens_of_steps(spec_of(folder), range(3)) != first_tokens_of_steps(
        spec_of(folder, "train.seed=1"), range(3)
    )


def test_held_out_samples_of_each_file_are_equal_on_every_mesh(folder: Path, tmp_path: Path):
    files = []
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", (1000 * number + np.arange(900)).astype(np.uint16))
        files.append({"path": str(tmp_path / f"{number}.npy"), "weight": 1 + number})
    spec = spec_of(folder, sources=files)
    share = read_batch(open_corpus(spec.data), spec=spec, step=0, split=Split.HELD_OUT)
    assert isinstance(share, LocalBatch)
    first = share.tokens[:, 0]
    assert Counter((first // 1000).tolist()) == {0: 4, 1: 8}
    assert ((first % 1000) >= 855).all()


def test_names_of_samples_are_those_of_no_other(folder: Path):
    spec, ids = spec_of(folder), Counter[int]()
    source = open_corpus(spec.data)
    for step in range(60):
        ids.update(read_batch(source, spec=spec, step=step).sample_ids)
    assert set(ids.values()) == {1}


def test_masks_of_some_files_apply_to_those_only(folder: Path):
    mask = np.arange(len(np.load(folder / "b.npy"))) % 2 == 0
    np.save(folder / "own.npy", mask)
    sources = [
        {"path": str(folder / "a.npy")},
        {"path": str(folder / "b.npy"), "loss_mask": str(folder / "own.npy")},
    ]
    spec = spec_of(folder, sources=sources)
    share = read_batch(open_corpus(spec.data), spec=spec, step=0)
    assert isinstance(share, LocalBatch) and share.labels is not None
    numbers, places = share.tokens // 1000, share.tokens % 1000
    ignored = (numbers == 1) & (places % 2 == 1)
    assert bool(((share.labels == IGNORED) == ignored).all())
    assert share.global_tokens == int((~ignored[:, 1:]).sum())


def test_the_written_mixture_reads_back(folder: Path):
    spec = spec_of(folder)
    assert load(to_mapping(spec, sync_is_written=False)).spec == spec


@pytest.mark.parametrize(
    ("weights", "cycle"),
    [
        ([1, 1], (1, 1)),
        ([3, 1], (3, 1)),
        ([0.7, 0.3], (7, 3)),
        ([5], (1,)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
    ],
)
def test_a_cycle_has_the_shares_to_the_digit(weights: list[float], cycle: tuple[int, ...]):
    assert cycle_quotas(weights) == cycle


def test_shares_without_a_short_cycle_are_approximated():
    weights = [0.123456789, 1.0, 3.14159]
    shares = [weight / sum(weights) for weight in weights]
    cycle = cycle_quotas(weights)
    assert sum(cycle) == CYCLE
    for quota, share in zip(cycle, shares, strict=True):
        assert abs(quota - share * CYCLE) < 1


@pytest.mark.parametrize(
    ("sources", "finding"),
    [
        ([], "must be a list of {path, weight, loss_mask}; got an empty list"),
        ("a.npy", "got the string 'a.npy'"),
        (["a.npy"], "source 1 must be a mapping"),
        ([{"weight": 1}], "source 1 has no path"),
        ([{"path": "a", "weight": 0}], "source 1, weight: must be a finite number > 0"),
        ([{"path": "a"}, {"path": "b", "weight": -1}], "source 2, weight: must be"),
        ([{"path": "a", "weight": float("nan")}], "source 1, weight: must be"),
        ([{"path": "a", "weight": "2"}], "source 1, weight: must be"),
        ([{"path": "a", "epochs": 2}], "source 1 has no key 'epochs'"),
        ([{"path": "a"}, {"path": "a"}], "source 2 repeats the file of source 1"),
        ([{"path": "a"}, {"path": "./b/../a"}], "source 2 repeats the file of source 1"),
        ([{"path": "a"}, {"path": "b", "weight": 1e-6}], "source 2 gets less than one sample in"),
    ],
    ids=str,
)
def test_sources_that_are_none_are_rejected(folder: Path, sources: Any, finding: str):
    with pytest.raises(SpecError) as caught:
        spec_of(folder, sources=sources)
    (fault,) = caught.value.faults
    assert fault.place == "data.sources" and finding in fault.finding and fault.remedy


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("data.path=a.npy", "data.sources=[{path: b.npy}]"), "data.sources"),
        (("data.loss_mask=m.npy",), "data.loss_mask"),
    ],
)
def test_keys_that_exclude_sources_are_rejected_with_them(
    folder: Path, words: tuple[str, ...], place: str
):
    with pytest.raises(SpecError) as caught:
        spec_of(folder, *words)
    assert [fault.place for fault in caught.value.faults] == [place]


def test_a_path_on_the_command_line_takes_the_place_of_sources(folder: Path):
    assert spec_of(folder, "data.path=a.npy").data.sources is None


def test_all_unreadable_files_are_named_at_once(folder: Path):
    np.save(folder / "small.npy", np.zeros(3, np.uint16))
    np.save(folder / "large.npy", np.full(400, 5000, np.uint16))
    gone = [{"path": str(folder / name)} for name in ("gone.npy", "a.npy", "lost.npy")]
    with pytest.raises(SpecError) as caught:
        open_corpus(spec_of(folder, sources=gone).data)
    faults = caught.value.faults
    assert [fault.place for fault in faults] == ["data.sources"] * 2
    for fault, name in zip(faults, ("gone.npy", "lost.npy"), strict=True):
        assert fault.finding == f"{folder / name}: No such file or directory"
    spec = spec_of(folder, sources=[{"path": str(folder / "small.npy")}, gone[1]])
    with pytest.raises(SpecError, match=r"small.npy has 3 tokens, but a sample needs 5"):
        require_trainable_data(open_corpus(spec.data), spec)
    spec = spec_of(folder, sources=[{"path": str(folder / "large.npy")}, gone[1]])
    with pytest.raises(SpecError, match=r"large.npy contains token 5000, but model.vocab is 4000"):
        require_trainable_data(open_corpus(spec.data), spec)
