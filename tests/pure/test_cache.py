"""The user's trace cache: contents, keys, and unreadable entries."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from ptrain.cli.main import main
from ptrain.codec import decode, encode
from ptrain.facts import cache
from ptrain.facts.model import ModelFacts, Passes, TensorFacts, UnitFacts
from ptrain.facts.stages import Chain, Ends
from ptrain.facts.traced_part import traced_part
from ptrain.spec.load import load
from ptrain.spec.placement import Axis, Role
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
from ptrain.timeline import Boundary, Complete, Kind, Mark, Repeated, Run, Timeline

CONFIG = "{hidden_size: 32, num_hidden_layers: 2}"
BATCH = "batch={global: 8, micro: 1, sequence: 16}"
TIMELINE = Timeline(
    forward=(Boundary(Mark.ENTER, 1), Run(5, -3), Repeated(2, (Run(1, 1), Complete("b", 0)))),
    backward=(Complete("a.weight", 8, True), Run(1, 1)),
    moved=(("host", 3),),
    repeated=(("all_reduce", 4, 2),),
)
FACTS = ModelFacts(
    units=(
        UnitFacts(
            modules=("",), tensors=(TensorFacts(name="w", shape=(3, 4), cut_over=(Axis.TP,)),)
        ),
    ),
    buffers=(("positions", 64),),
    gradient_order=("w",),
    timeline=TIMELINE,
    roles=(("w", Role.ROW),),
    chain=Chain(layers=("a", "b"), ends=Ends(front=("e",), behind=()), hidden=4),
    blocks=("a", "b"),
    stage_passes=((Passes(items={Kind.FORWARD: (Run(1, 2),)}, output=3, hidden=4),),),
    draws=True,
    vocabulary=261,
)


REAL_VERSION = cache._package_version


class Reader:
    """Gives facts, and counts how often."""

    def __init__(self, facts: ModelFacts = FACTS) -> None:
        self.facts, self.calls = facts, 0

    def __call__(self) -> ModelFacts:
        self.calls += 1
        return self.facts


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(cache, "_package_version", lambda name, otherwise=None: f"{name} 1.0")
    # Modules that earlier tests of this process wrote and loaded are not younger than the process.
    monkeypatch.setattr(cache, "_STARTED", time.time())
    return tmp_path / "caches" / "ptrain"


def spec_of(*changes: str, hf: str = "LlamaForCausalLM", strategy: str = "zero3") -> Spec:
    return load(strategy, [f"model={{hf: {hf}, config: {CONFIG}}}", BATCH, *changes]).spec


def test_decoded_facts_equal_the_original_facts() -> None:
    text = json.dumps(encode(FACTS, ModelFacts))
    again = decode(json.loads(text), ModelFacts)
    for name in ModelFacts.__dataclass_fields__:
        assert getattr(again, name) == getattr(FACTS, name), name


@pytest.mark.parametrize(
    "plain", [None, [], [1], "x", {}, encode(FACTS, ModelFacts) | {"units": [["w"]]}], ids=str
)
def test_decoding_other_data_as_facts_raises_value_error(plain: object) -> None:
    with pytest.raises(ValueError):
        decode(plain, ModelFacts)


def test_traces_are_cached(home: Path) -> None:
    reader = Reader()
    assert cache.read_or_cache(spec_of(), reader) == cache.read_or_cache(spec_of(), reader) == FACTS
    assert reader.calls == 1
    (file,) = cache.cached_files()
    assert file.parent == home
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.lr=0.5", "mesh.dp_shard=8", "cluster.price=3", "train.steps=9",
        "name=other",
    ],
)  # fmt: skip
def test_changing_an_unrelated_key_requests_no_new_trace(home: Path, change: str) -> None:
    reader = Reader()
    cluster = "cluster.preset=h100-8"
    cache.read_or_cache(spec_of(cluster), reader)
    cache.read_or_cache(spec_of(cluster, change), reader)
    assert reader.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        "batch.micro=2", "batch.sequence=32", "precision.layout=zero16", "activations=M",
        "loss.chunk=8", "unit=2 blocks", "device=cuda", "model.config.hidden_size=64",
        "attention=eager", "precision.compute=fp64", "frozen.dtype=nf4",
    ],
)  # fmt: skip
def test_changing_a_relevant_key_requests_a_new_trace(home: Path, change: str) -> None:
    reader = Reader()
    for changes in ((), (change,)):
        cache.read_or_cache(spec_of("device=cpu", *changes), reader)
    assert reader.calls == 2


@pytest.mark.parametrize("package", ["torch", "transformers", "flash-attn", "ptrain"])
def test_a_trace_of_other_code_is_another(
    home: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader()
    cache.read_or_cache(spec_of(), reader)
    if package == "ptrain":
        monkeypatch.setattr(cache, "_source_digest", lambda: "edited")
    else:
        monkeypatch.setattr(
            cache,
            "_package_version",
            lambda name, otherwise=None: f"{name} {1 + (name == package)}.0",
        )
    cache.read_or_cache(spec_of(), reader)
    assert reader.calls == 2


@pytest.mark.parametrize(
    ("version", "origin", "is_kept"),
    [
        ("5.3.0", None, True),
        ("5.3.0", '{"archive_info": {}}', True),
        ("5.4.0.dev0", None, False),
        ("5.3.0", '{"dir_info": {"editable": true}}', False),
    ],
)
def test_traces_of_code_in_development_are_not_cached(
    home: Path,
    version: str,
    origin: str | None,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Installed:
        def __init__(self) -> None:
            self.version = version

        def read_text(self, name: str) -> str | None:
            return origin

    monkeypatch.setattr(cache, "_package_version", REAL_VERSION)
    monkeypatch.setattr(cache.metadata, "distribution", lambda name: Installed())
    reader = Reader()
    cache.read_or_cache(spec_of(), reader)
    cache.read_or_cache(spec_of(), reader)
    assert reader.calls == (1 if is_kept else 2)


def test_micro_batches_count_where_a_schedule_needs_them(home: Path) -> None:
    for strategy, calls in (("tp", 1), ("pp-1f1b", 2)):
        reader = Reader()
        for accumulate in (8, 16):
            batch = f"batch={{accumulate: {accumulate}, micro: 1, sequence: 16}}"
            cache.read_or_cache(spec_of(batch, strategy=strategy), reader)
        assert reader.calls == calls


def test_an_edit_of_ptrain_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ptrain"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(cache.ptrain, "__file__", str(package / "__init__.py"))
    (package / "lock.py").symlink_to("nowhere")  # as editors leave them
    before = cache._source_digest.__wrapped__()
    (package / "more.py").write_text("x = 1\n")
    more = cache._source_digest.__wrapped__()
    (package / "more.py").write_text("x = 2\n")
    assert len({before, more, cache._source_digest.__wrapped__()}) == 3


# the seed, tp and pp, a micro-batch, the device, samples that are not tokens, storage of weights
IN_PART = {"train", "factors", "batch", "cluster", "data", "frozen"}
IRRELEVANT = {  # to what a micro-batch allocates within the model
    "optimizer", "sync", "eval", "checkpoint", "timeout", "log", "profile", "backend",
    "deterministic", "reduce_scatter", "bucket_bytes", "overlap", "prefetch", "gather_after_update",
    "offload", "consistency_every", "verify_every", "name", "resolved",
    "trivial_factors",
    "device",  # its kind counts
    "routing",  # formulas take any
}  # fmt: skip


def test_every_part_of_a_spec_counts_or_is_known_not_to() -> None:
    """A new key of a spec is put on one side or on the other."""
    spec, other = spec_of(), object()
    dropped = {
        field.name
        for field in fields(Spec)
        if field.init and field.name not in IN_PART
        and getattr(traced_part(replace(spec, **{field.name: other})), field.name) is not other
    }  # fmt: skip
    assert dropped == IRRELEVANT


def test_where_weights_lie_is_not_part_of_a_trace() -> None:
    spec = spec_of()
    begun = replace(spec, model=replace(spec.model, pretrained="/a/folder"))
    assert traced_part(begun) == traced_part(spec)


@pytest.mark.parametrize("section", ["model", "loss", "step"])
def test_the_trace_of_a_target_is_neither_read_nor_kept_without_leave(
    home: Path, section: str
) -> None:
    reader = Reader()
    spec = load("zero3", [f"{section}={{target: 'a.b:c'}}", BATCH]).spec
    cache.read_or_cache(spec, reader)
    assert not list(cache.cached_files())
    cache.read_or_cache(spec, reader, allow_import=True)
    assert len(cache.cached_files()) == 1
    cache.read_or_cache(spec, reader)
    assert reader.calls == 3


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a module, another module that it imports, and a data file that it
    opens."""
    (tmp_path / "code").mkdir()
    data = tmp_path / "code" / "sizes.json"
    reads = f"import pathlib, cached_layers\nTEXT = pathlib.Path({str(data)!r}).read_text()\n"
    files = {"cached_model.py": reads, "cached_layers.py": "WIDTH = 1\n", data.name: "{}"}
    for name, text in files.items():
        rewrite(tmp_path / "code" / name, text)
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield tmp_path / "code"
    for name in ("cached_model", "cached_layers"):
        sys.modules.pop(name, None)


def rewrite(path: Path, text: str, age: float = 3600.0) -> None:
    """Write a file that looks older than this process."""
    path.write_text(text)
    os.utime(path, (cache._STARTED - age, cache._STARTED - age))


class Importing(Reader):
    """An importer that reloads the user's module, as another process does."""

    def __call__(self) -> ModelFacts:
        for name in ("cached_model", "cached_layers"):
            sys.modules.pop(name, None)
        importlib.import_module("cached_model")
        return super().__call__()


def kept_of_target(reader: Reader) -> None:
    spec = load("zero3", ["model={target: 'cached_model:build'}", BATCH]).spec
    cache.read_or_cache(spec, reader, allow_import=True)


@pytest.mark.parametrize("name", ["cached_model.py", "cached_layers.py", "sizes.json"])
def test_the_trace_of_a_target_is_kept_until_a_file_that_it_read_changes(
    home: Path, user_module: Path, name: str
) -> None:
    reader = Importing()
    kept_of_target(reader)
    kept_of_target(reader)
    assert reader.calls == 1
    rewrite(user_module / name, (user_module / name).read_text() + "\n")
    kept_of_target(reader)
    kept_of_target(reader)
    assert reader.calls == 2
    (user_module / name).unlink()
    with pytest.raises((ImportError, OSError)):
        kept_of_target(reader)


def test_a_file_of_the_targets_folder_counts_if_native_code_reads_it(
    home: Path, user_module: Path
) -> None:
    rewrite(user_module / "tokenizer.json", "{}")
    reader = Importing()
    kept_of_target(reader)
    kept_of_target(reader)
    assert reader.calls == 1
    rewrite(user_module / "tokenizer.json", '{"vocab": 2}')
    kept_of_target(reader)
    assert reader.calls == 2


def test_modules_that_an_installed_package_generates_do_not_prevent_caching(
    home: Path, user_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    module = ModuleType("pytest.program")  # as inductor adds modules below torch
    module.__file__ = str(program)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    reader = Importing()
    kept_of_target(reader)
    kept_of_target(reader)
    assert reader.calls == 1


def test_files_are_watched_for_the_users_code_alone(
    home: Path, user_module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[None] = []
    monkeypatch.setattr(cache, "_watch_opened", lambda: watched.append(None))
    cache.read_or_cache(spec_of(), Reader())
    assert not watched
    kept_of_target(Importing())
    assert watched


def test_a_module_that_hides_another_is_another_model(
    home: Path, user_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Importing()
    kept_of_target(reader)
    (tmp_path / "first").mkdir()
    rewrite(tmp_path / "first" / "cached_model.py", "")
    monkeypatch.syspath_prepend(tmp_path / "first")
    kept_of_target(reader)
    assert reader.calls == 2


def test_code_that_was_edited_after_the_process_began_is_not_kept(
    home: Path, user_module: Path
) -> None:
    reader = Importing()
    rewrite(user_module / "cached_layers.py", "WIDTH = 2\n", age=-1.0)
    kept_of_target(reader)
    assert reader.calls == 1 and not list(cache.cached_files())


def test_the_cache_can_be_switched_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    cache.read_or_cache(spec_of(), reader)
    monkeypatch.setenv("PTRAIN_CACHE", "off")
    cache.read_or_cache(spec_of(), reader)
    cache.read_or_cache(spec_of(), reader)
    assert reader.calls == 3
    assert not Path("off").exists()


def test_failed_traces_are_retried(home: Path) -> None:
    reader = Reader(ModelFacts(units=(), untraced="its code reads values"))
    cache.read_or_cache(spec_of(), reader)
    cache.read_or_cache(spec_of(), reader)
    assert reader.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{"),
        gzip.compress(b"[1, 2]"),
        gzip.compress(json.dumps({"facts": encode(FACTS, ModelFacts), "files": []}).encode())[:-20],
        gzip.compress(json.dumps(encode(FACTS, ModelFacts)).encode()),
        gzip.compress(b"[]")[:10] + b"\xff" * 20,
    ],
    ids=["empty", "other", "broken", "no facts", "short", "older", "flipped"],
)
def test_unreadable_entries_are_retraced_and_replaced(home: Path, damage: bytes) -> None:
    reader = Reader()
    cache.read_or_cache(spec_of(), reader)
    (file,) = cache.cached_files()
    file.write_bytes(damage)
    assert cache.read_or_cache(spec_of(), reader) == FACTS
    assert reader.calls == 2
    assert cache.read_or_cache(spec_of(), reader) == FACTS
    assert reader.calls == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_unwritable_folder_caches_nothing(home: Path) -> None:
    home.parent.mkdir(mode=0o500)
    assert cache.read_or_cache(spec_of(), Reader()) == FACTS


def test_a_file_in_the_folders_place_keeps_nothing(home: Path) -> None:
    home.parent.write_text("")
    assert cache.read_or_cache(spec_of(), Reader()) == FACTS


def test_without_a_word_of_the_environment_the_folder_is_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache.cache_folder() == tmp_path / ".cache" / "ptrain"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache.cache_folder() == tmp_path / "Library/Caches" / "ptrain"
    monkeypatch.setenv("PTRAIN_CACHE", str(tmp_path / "here"))
    assert cache.cache_folder() == tmp_path / "here"


def test_the_command_shows_the_cache_and_clears_it(home: Path, capsys) -> None:
    cache.read_or_cache(spec_of(), Reader())
    (size,) = (file.stat().st_size for file in cache.cached_files())
    assert main(["cache", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"folder": str(home), "traces": 1, "bytes": size, "cleared": False}
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{home}: 1 trace, {size} B, removed\n"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{home}: 0 traces, 0 B, kept\n"


def test_the_command_states_that_the_cache_is_off(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("PTRAIN_CACHE", "off")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == "The cache is off (PTRAIN_CACHE=off).\n"
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] is None


def test_the_command_keeps_foreign_files(home: Path, capsys) -> None:
    home.mkdir(parents=True)
    theirs = [home / "notes.txt", home / "data.json.gz"]
    for path in theirs:
        path.write_text("mine")
    left = home / f"{'a' * 32}.json.gzhalf_written"
    left.write_text("")
    main(["cache", "--clear"])
    assert all(path.exists() for path in theirs) and not left.exists()


def test_without_a_home_there_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    for name in ("PTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", homeless)
    assert main(["cache"]) == 2
    assert "no cache folder" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["device=cpu", "cluster.preset=h100-8", "device=cuda"])
def test_another_process_can_load_a_described_trace(change: str) -> None:
    """The description is a spec with the compute capability of its GPUs."""
    part = traced_part(spec_of(change))
    again = load(to_mapping(part, sync_is_written=False)).spec
    assert traced_part(again) == part
    assert (again.cluster.sm if again.cluster else None) == (90 if "h100" in change else None)
