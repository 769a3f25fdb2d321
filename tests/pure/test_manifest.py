"""The checkpoint manifest protects its files and itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ptrain.errors import PtrainError
from ptrain.train import manifest
from ptrain.train.manifest import Manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / manifest.folder_name(7)
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (path / ".metadata").write_bytes(b"index")
    files = manifest.file_digests(path, ["__0_0.distcp", ".metadata"])
    manifest.write(path, Manifest(step=7, spec="ddp", world_size=1, torch="2", files=files))
    return path


def damage(path: Path) -> list[str]:
    found = manifest.read(path)
    return manifest.file_problems(path, found, sorted(found.files))


def test_a_sound_checkpoint_has_no_problems(checkpoint):
    assert damage(checkpoint) == []
    assert manifest.complete_checkpoints(checkpoint.parent) == [checkpoint]


@pytest.mark.parametrize("position", range(0, 2048, 97))
def test_every_flipped_bit_is_found(checkpoint, position):
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << position % 8
    file.write_bytes(content)
    assert damage(checkpoint) == ["__0_0.distcp: its content was modified (SHA-256)"]


def test_missing_short_and_linked_files_are_found(checkpoint):
    file, outside = checkpoint / "__0_0.distcp", checkpoint.parent / "outside"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert damage(checkpoint) == ["__0_0.distcp: has 2047 bytes, but 2048 were written"]
    outside.write_bytes(content)
    file.unlink()
    assert damage(checkpoint) == ["__0_0.distcp: missing"]
    file.symlink_to(outside)
    assert damage(checkpoint) == ["__0_0.distcp: missing"]


def content_of(checkpoint: Path) -> dict[str, Any]:
    content = json.loads((checkpoint / manifest.NAME).read_text())
    del content["seal"]
    return dict(content)


def rewrite(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Rewrite the manifest consistently."""
    (checkpoint / manifest.NAME).write_bytes(manifest.seal_text(content))


@pytest.mark.parametrize(
    "bit", [0, *(pytest.param(bit, marks=pytest.mark.nightly) for bit in range(1, 8))]
)
def test_no_flipped_bit_of_a_manifest_is_read(checkpoint, bit):
    path = checkpoint / manifest.NAME
    text = path.read_bytes()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position + bit) % 8  # by default one bit of each byte
        path.write_bytes(damaged)
        with pytest.raises(PtrainError, match=r"^checkpoint .*manifest\.json"):
            manifest.read(checkpoint)


def test_a_manifest_cut_short_anywhere_is_rejected(checkpoint):
    path = checkpoint / manifest.NAME
    text = path.read_bytes()
    for length in range(len(text)):
        path.write_bytes(text[:length])
        with pytest.raises(PtrainError):
            manifest.read(checkpoint)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_that_names_anything_but_a_bare_file_is_rejected(checkpoint, name):
    content = content_of(checkpoint)
    content["files"][name] = [1, "0" * 64]
    rewrite(checkpoint, content)
    with pytest.raises(PtrainError, match="bare file name"):
        manifest.read(checkpoint)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"files": 3}', '{"files": {"a": 1}}', "[" * 99999, "\udcff"]
)
def test_an_unreadable_manifest_is_rejected(checkpoint, text):
    (checkpoint / manifest.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PtrainError, match="is not readable"):
        manifest.read(checkpoint)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"step": "7"}, "step"),
        ({"step": 7.0}, "step"),
        ({"step": True}, "step"),
        ({"step": -7}, "step"),
        ({"world_size": 0}, "world_size"),
        ({"spec": None}, "spec"),
        ({"torch": 2}, "torch"),
        ({"files": []}, "files"),
        ({"files": {"a": [-1, "0" * 64]}}, "files: a: 0"),
        ({"files": {"a": [1, "0"]}}, "files: a: 1"),
        ({"files": {"a": [1, "0" * 64, 2]}}, "files: a"),
        ({"trained": 3}, "trained"),
        ({"extra": 1}, "extra"),
        ({"format": 0}, "format"),
    ],
)
def test_a_sealed_manifest_is_held_to_its_schema(checkpoint, change, place):
    rewrite(checkpoint, content_of(checkpoint) | change)
    with pytest.raises(PtrainError, match=f"manifest.json is not readable: {place}: "):
        manifest.read(checkpoint)


def test_a_manifest_of_another_step_than_its_folder_is_rejected(checkpoint):
    rewrite(checkpoint, content_of(checkpoint) | {"step": 8})
    with pytest.raises(PtrainError, match="belongs to step 8"):
        manifest.read(checkpoint)


def test_an_older_manifest_without_a_seal_is_read_and_a_newer_one_is_not(checkpoint):
    content, path = content_of(checkpoint), checkpoint / manifest.NAME
    path.write_text(json.dumps(content | {"format": manifest.UNSEALED}))
    assert manifest.read(checkpoint).step == 7
    path.write_text(json.dumps(content))
    with pytest.raises(PtrainError, match="has no seal"):
        manifest.read(checkpoint)


def test_a_newer_format_is_rejected(checkpoint):
    for more in ({}, {"field": "of that format"}):
        rewrite(checkpoint, content_of(checkpoint) | {"format": 99} | more)
        with pytest.raises(PtrainError, match="format 99"):
            manifest.read(checkpoint)


def test_a_half_written_checkpoint_is_never_complete(checkpoint):
    half = checkpoint.with_name("step-00000009.tmp-0a1b")
    checkpoint.rename(half)
    assert manifest.complete_checkpoints(half.parent) == []
    assert manifest.incomplete_checkpoints(half.parent) == [half]
