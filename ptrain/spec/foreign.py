"""Other tools' keys and config files: the equivalent key of a spec, and conversion to specs.

`specs/hints.yaml` has an answer for each key, `specs/flags.yaml` the settings of each placement. An
answer is `key=value`, `key=value; a sentence`, or a sentence; N is the number that was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ptrain.errors import SpecError
from ptrain.spec.foreign_files import iter_leaves, read_tree
from ptrain.spec.foreign_rows import (
    DATA_NAMES,
    STATE_NAMES,
    Config,
    PlacementRow,
    as_tuple,
    choose_rows,
    is_case,
    is_number,
    key_text,
    look_up,
    parts_of,
)
from ptrain.spec.leaf import Route
from ptrain.spec.names import list_files, load_strategy, load_table
from ptrain.spec.text import COMMAND_LINE, SourceMark, Tree, parse_value, to_flow_yaml
from ptrain.word import MeantWord

Show = Callable[[Route, str], str]  # writes a key and its value in the syntax that the user typed
Said = str | Mapping[str, str]

ANSWER = re.compile(r"([a-z0-9_.]+)=(.+?)(?:; (.+))?")  # key=value, then an explanation
_KEY = re.compile(r"\{([\w.]+)\}")  # {max_steps}: the value of another key of the file
_TERM = re.compile(r"(\d[\d.e-]*)([*/])(?!0[.0]*$)(\d[\d.e-]*)")  # 128*8
_POWERS = {"*": 1, "/": -1}  # of the second number
_OPEN = re.compile(r"\b[A-Z]{2,}\b(?!\.)")  # STEPS, FOLDER: a value that only the user knows
DIFFERS = "It does something else: "
_OF_SPECS = frozenset(("mesh", "placement", "batch"))
_AXES = ("pp", *DATA_NAMES, "cp", "ep", "tp")  # outermost first
_WORD_OF = {"recompute": "policy"}  # the key that a section's only word stands for
NODE_SIZE = 8  # devices
_REPLICATED = ("R", "R", "R", "R")
_RANKS = "devices="  # an override that only a converted file has


class KeyEffect(MeantWord):
    """The effect that a key of another tool has on a converted spec."""

    MAPPED = "mapped", "a key of the spec has the same effect"
    DEFAULT = "default", "it is set to its default, or not set"
    NO_EFFECT = "no effect", "it does not change placement, memory, traffic or step time"
    DIFFERS = "differs", "it does something else than its name says"
    UNSUPPORTED = "unsupported", "no key of a spec has this effect: the spec is rejected"
    UNKNOWN = "unknown", "the key is in no table"
    ASSUMED = "assumed", "it is not in the file: the tool's default"


_SENTENCES = (  # the outcome of a sentence, by its beginning
    ("Set it", KeyEffect.UNSUPPORTED),
    (DIFFERS, KeyEffect.DIFFERS),
    ("Remove it: (this is|fp32 is|nothing is)", KeyEffect.DEFAULT),
    ("Remove it", KeyEffect.NO_EFFECT),
    ("", KeyEffect.UNKNOWN),
)


class KeyOutcome(NamedTuple):
    """The outcome of one key: the setting of the spec that stands for it, and a sentence."""

    key: str
    value: object
    outcome: KeyEffect
    setting: str = ""
    note: str = ""


def load_hints() -> Mapping[str, Any]:
    """Return the tables of `specs/hints.yaml`: answers by tool and key, and the files of tools."""
    return load_table("hints.yaml")


@cache
def foreign_keys(*tables: str) -> Mapping[str, Said]:
    """Return the answers for the keys of these tables (default: all): a text, or texts by value."""
    by_table = load_hints()["keys"]
    chosen = [by_table[name] for name in tables or by_table]
    return {key: said for rows in reversed(chosen) for key, said in rows.items()}


def find_answer(
    route: Route, value: object, keys: Mapping[str, Said], config: Config | None = None
) -> str:
    """Return the answer for another tool's key, or "" if no tool has it.

    Args:
        route: The key with the sections that it was written in.
        value: The value that was written.
        keys: The answers by key.
        config: The other values of the file, on which an answer may depend.
    """
    word = key_text(".".join(route))
    # A key may be known with its section (`zero_optimization.stage`) or without it.
    while not (said := keys.get(word)) and "." in word:
        word = word.partition(".")[2]  # without its outermost section
    if said is None and config is not None:
        around = (keys[word] for word in parts_of(route[:-1]) if word in keys)
        said = next((text for text in around if "=N" not in str(text)), None)
    elif said is None and "_" in word:  # in a spec, a key is often written without its section
        said = next((keys[name] for name in keys if name.endswith(f".{word}")), None)
    if isinstance(said, Mapping):
        cases = (text for case, text in said.items() if is_case(case, value, config))
        said = next(cases, said["else"])
    return shared_answer(said or "")


def shared_answer(text: str) -> str:
    """Return an answer, or the one of `shared` that it names."""
    return str(load_hints()["shared"][text[1:]]) if text.startswith("@") else text


def for_foreign(route: Route, value: object, show: Show) -> str:
    """Return the remedy for another tool's key.

    Args:
        route: The key with the sections that it was written in.
        value: The value that was written.
        show: Writes a key and its value in the syntax of the user.

    Returns:
        The remedy, or "" if no tool has such a key.
    """
    answer = find_answer(route, value, foreign_keys())
    if not (match := ANSWER.fullmatch(answer)):
        return answer
    key, right, more = match.groups()
    if is_number(value):
        right = re.sub(r"\bN\b", str(value), right)
    return f"Use `{show(tuple(key.split('.')), right)}`.{f' {more}' if more else ''}"


class Conversion(NamedTuple):
    """A config of another tool as a spec.

    Attributes:
        tool: The tool's row of `specs/hints.yaml`.
        tree: The spec; its faults are the reasons why the file has no equivalent.
        outcomes: An outcome for each key of the file, and for each assumed value.
    """

    tool: Mapping[str, Any]
    tree: Tree
    outcomes: list[KeyOutcome]


def is_spec(root: object) -> bool:
    """Return True if a file has a key that every spec has, and no config of another tool."""
    return isinstance(root, dict) and not _OF_SPECS.isdisjoint(root)


def find_tool(path: Path, root: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return the row of the tool that a file belongs to, or None for a spec and unknown files."""
    if is_spec(root) and path.suffix != ".toml":
        return None  # every spec has one of these keys, and need not load the hints
    keys, tools = {key_text(key) for key in root}, load_hints()["tools"]
    name = max(tools, key=lambda name: len(keys & {*tools[name]["keys"]}))
    is_known = len(keys & {*tools[name]["keys"]}) > 1 or keys & {*tools[name].get("alone", ())}
    return {"name": name, **tools[name]} if is_known else None


def find_conversion(path: Path, tree: Tree, overrides: Sequence[str]) -> Conversion | None:
    """Return the conversion of a file of another tool, or None if it is none.

    Args:
        path: The file.
        tree: Its contents.
        overrides: Overrides of the command line; `devices=N` is the number of ranks, and a model
            replaces the file's.

    Raises:
        SpecError: The file is of a tool whose files are no configs, or of no known format.
    """
    assert isinstance(tree.root, dict), "a file holds a mapping"
    tool = find_tool(path, tree.root)
    if tool is None and path.suffix in (".yaml", ".yml", ".json", ""):
        return None
    if tool is None or "next" in tool:
        kinds = ["a TOML file"] * (path.suffix == ".toml") + ([tool["is"]] if tool else [])
        kind = ": ".join(kinds) or "a file of no known tool"
        finding = f"this is {kind}. A spec is a YAML file with other keys"
        file, more = to_flow_yaml(str(path.resolve())), "`ptrain help other-tools` lists more."
        remedy = f"Use `ptrain specs show zero3 > spec.yaml`, and edit it. {more}"
        remedy = f"Use `{tool['next'].replace('FILE', file)}`." if tool else remedy
        raise SpecError(SourceMark(source=str(path)).make_fault("", finding, remedy))
    ranks = next((word for word in overrides[::-1] if word.startswith(_RANKS)), "")
    if ranks and not re.fullmatch(r"devices=[1-9]\d{0,8}", ranks):
        finding, mark = "must be an integer of 1 or more", SourceMark(f"{COMMAND_LINE}{ranks}")
        raise SpecError(mark.make_fault("devices", finding, "Use `--devices 8`."))
    models = " ".join(word for word in overrides if re.match(r"model(\.\w+)?=", word))
    number = int(ranks.removeprefix(_RANKS)) if ranks else 0
    return _Converter(path, tree, tool, number, models).convert_file()


def without_devices(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a converted spec, without the number of ranks."""
    return [word for word in overrides if not word.startswith(_RANKS)]


class _Converter:
    """Converts one file. Every key has an outcome."""

    def __init__(
        self, path: Path, tree: Tree, tool: Mapping[str, Any], ranks: int, models: str
    ) -> None:
        self.path, self.tree, self.tool, self.ranks = path, tree, tool, ranks
        self.models = models  # the overrides that name one
        self.root: dict[str, Any] = {}
        self.spec = Tree(root=self.root, source=str(path), faults=dict(tree.faults))
        self.outcomes: list[KeyOutcome] = []
        self.settings: dict[Route, Any] = {}
        self.leaves = list(iter_leaves((), tree.root))
        self.columns, self.tables = [*tool["flags"]], [*tool["tables"]]
        for key in tool.get("includes", ()):
            self._include_deepspeed(key)
        self.keys = foreign_keys(*self.tables)
        self.config: dict[str, object] = {
            key_text(".".join(self._rename_section(route))): _plain_value(route, value)
            for route, value in self.leaves
            if value is not None
        }

    def _rename_section(self, route: Route) -> Route:
        """Return a key of an earlier version of the tool in the section that it is in now."""
        moved = (self.tool.get("renamed", {}).get(route[0], ""), *route[1:])
        words = [key_text(".".join(names)) for names in (moved, route)]
        return moved if words[0] in self.keys and words[1] not in self.keys else route

    def _include_deepspeed(self, key: str) -> None:
        """Add the keys of a DeepSpeed config that a key of the file names, or holds."""
        if any(key in route for route, _ in self.leaves):
            self.columns.append("DeepSpeed")
            self.tables.insert(0, "DeepSpeed")
        for route, name in [leaf for leaf in self.leaves if leaf[0][-1] == key]:
            try:
                if isinstance(name, str):
                    root = read_tree(self.path.parent / name).root
                    self.leaves += iter_leaves((*route, name.rpartition("/")[2]), root)
            except SpecError as error:
                self._reject_key(route, f"{name}: {error.faults[0].finding}", "Correct the path.")

    def convert_file(self) -> Conversion:
        """Return the conversion."""
        defaults = self.tool.get("defaults", {}).items()
        assumed = {key: value for key, value in defaults if look_up(self.config, key) is None}
        self.config |= assumed
        rows = choose_rows(self.columns, self.config)
        placed = rows.get("offload", rows.get("data"))
        modes = placed.tuples.get("dp_shard", "R") if placed else "R"
        self.config["placed"] = "sharded" if modes[0].startswith("S*") else "replicated"
        self.outcomes += [self._account_for_key(route, value) for route, value in self.leaves]
        for key, value in assumed.items():
            row = self._account_for_key(tuple(key.split(".")), value, is_assumed=True)
            is_noted = key in self.tool.get("notes", ()) and row.outcome is KeyEffect.DIFFERS
            if is_noted or (row.setting and not row.setting.startswith(("placement", "reshard"))):
                self.outcomes.append(row._replace(outcome=KeyEffect.ASSUMED))
        self._name_model()
        self._place_states(rows)
        written = {key for route in self.settings for key in parts_of(route)}
        self.outcomes += [
            KeyOutcome(place, None, KeyEffect.ASSUMED, "", note)
            for place, note in load_hints()["open"].items()
            if place not in written
        ]
        self.outcomes = list(map(self._show_placed, self.outcomes))
        for key, value in (("micro", 1), ("sequence", 4096)):
            if ("batch", key) not in self.settings:
                self._assume_value(("batch", key), value, f"Add `batch.{key}=N` to change it.")
        accumulate, at = self.settings.get(("batch", "accumulate")), ("batch", "micro")
        if self.tool.get("splits_batch") and accumulate and self.root["mesh"].get("pp", 1) > 1:
            if accumulate % self.settings[at]:
                finding = f"is no multiple of the microbatch size {self.settings[at]}"
                self._reject_key(("training", "local_batch_size"), finding, "Set a multiple.")
            self.settings["batch", "accumulate"] = max(1, accumulate // self.settings[at])
        if ("batch", "global") not in self.settings:
            self.settings.setdefault(("batch", "accumulate"), 1)
        for route, value in self.settings.items():
            if route[0] != "placement" and (route, value) != (("activations",), "R"):
                set_value(self.root, route, value)
        return Conversion(self.tool, self.spec, self.outcomes)

    def _assume_value(self, route: Route, value: object, note: str) -> None:
        self.settings[route] = value
        key = ".".join(route)
        setting = f"{key}={to_flow_yaml(value)}"
        self.outcomes.append(KeyOutcome(key, None, KeyEffect.ASSUMED, setting, note))

    def _reject_key(self, route: Route, finding: str, remedy: str) -> None:
        fault = self.tree.locate(route, key=True).make_fault(".".join(route), finding, remedy)
        # A fault of the mesh or the model replaces that of the spec.
        at = route if route in (("mesh",), ("model",)) else ("", *route[:2], remedy)
        self.spec.faults.setdefault(at, fault)

    def _account_for_key(
        self, route: Route, value: object, *, is_assumed: bool = False
    ) -> KeyOutcome:
        """Return the outcome of a key, and keep the setting that stands for it."""
        key, value = ".".join(route), _plain_value(route, value)
        answer = self._answer_of(route, value)
        match = ANSWER.fullmatch(answer)
        place, right, note = (match[1], match[2], match[3] or "") if match else ("", "", answer)
        right = _KEY.sub(lambda key: str(look_up(self.config, key[1])), right)
        right = right.replace("VALUE", to_flow_yaml(value)) if isinstance(value, list) else right
        if re.search(r"\bN\b", right) and not is_number(value):
            note, place = f"Set it to a number: it is `{place}`.", ""
        elif place == "model.target" and "target" not in self.models:
            note, place = f"Set it to none, or add `{place}={right}`. {note}", ""
        elif _OPEN.search(right.replace("MiB", "")) or place.startswith("model.arguments"):
            note, place = f"Remove it: set `{place}={right}`. {note}".strip(), ""
        if not place:
            outcome = next(each for start, each in _SENTENCES if re.match(start, note))
            if outcome is KeyEffect.UNSUPPORTED:
                self._reject_key(route, f"{to_flow_yaml(value)} has no equivalent in a spec", note)
            note = re.sub(f"^(Remove it: |{DIFFERS})", "", note)
            return KeyOutcome(key, value, outcome, note=note[:1].upper() + note[1:])
        outcome = KeyEffect.DIFFERS if note.startswith(DIFFERS) else KeyEffect.MAPPED
        if place == "devices" and self.ranks and self.ranks != self._count_ranks({}):
            return KeyOutcome(key, value, KeyEffect.DIFFERS, place, f"{self.ranks} replaces it.")
        if place in ("model", "devices") and right == "1":
            return KeyOutcome(key, value, outcome, place)
        setting = self._keep_setting(
            tuple(place.split(".")), right, value, route, is_assumed=is_assumed
        )
        return KeyOutcome(key, value, outcome, f"{place}={setting}", note.removeprefix(DIFFERS))

    def _answer_of(self, route: Route, value: object) -> str:
        """Return the answer for a key of the file, as in the tables."""
        route = self._rename_section(route)
        word, names = key_text(".".join(route)), set(parts_of(route))
        for table in (*self.tables, self.tool["title"]) if word not in self.keys else ():
            for reason, words in load_hints()["unaffected"].get(table, {}).items():
                if names & _word_set(words):
                    return f"Remove it: {load_hints()['reasons'][reason]}"
        answer = find_answer(route, value, self.keys, self.config)
        for place in ("model", "devices") if value is not None else ():
            if {word, key_text(route[-1])} & {*self.tool.get(place, ())}:
                return f"{place}=1"
        if not answer and any("=N" in str(self.keys.get(part)) for part in parts_of(route[:-1])):
            return "Set it to a number, not to a mapping."
        if answer and value is None:
            return "Remove it: nothing is set."
        if answer and value == "auto" and "auto" not in str(self.keys.get(word)):
            return "Remove it: this is left open. The launcher or the command line fills it in."
        return answer

    def _keep_setting(
        self, place: Route, right: str, value: Any, route: Route, *, is_assumed: bool
    ) -> str:
        """Keep the value of a key of the spec; return it as text."""
        is_whole = isinstance(value, float) and abs(value) >= 1 and value.is_integer()
        number = int(value) if is_whole else value
        text, right = right, re.sub(r"\bN\b", str(number), right)
        right = _TERM.sub(
            lambda term: f"{float(term[1]) * float(term[3]) ** _POWERS[term[2]]:.12g}", right
        )
        parsed = parse_value(right, "").root
        if isinstance(parsed, list) and "N" in text:  # one of two numbers, such as beta1
            at = re.findall(r"[\w.]+", text).index("N")
            parsed = [*self.settings.get(place, parsed)]
            parsed[at] = number
        if not (is_assumed and place in self.settings):
            self.settings[place] = parsed
            self.spec.keys[place] = self.spec.values[place] = self.tree.locate(route)
        return to_flow_yaml(parsed)

    def _name_model(self) -> None:
        """Set the model that the file names, if it is built in."""
        words = [str(look_up(self.config, key) or "") for key in self.tool.get("model", ())]
        if name := find_preset("-".join(words)):
            self.settings[("model", "preset")] = name
        elif any(route[0] == "model" for route in self.settings):
            shape = self.tool.get("shape", {}).items()
            is_given = re.search(r"vocab|preset|model=", self.models)
            self.settings |= {("model", key): text for key, text in shape}
            if shape and ("model", "vocab") not in self.settings and not is_given:
                remedy = "Add `model.vocab=N`: the number of tokens of the tokenizer."
                self._reject_key(("model",), "the file has no size of the vocabulary", remedy)
        elif not self.models:
            said = f"{'-'.join(filter(None, words)) or 'the file'} names no model that is built in"
            file = to_flow_yaml(str(self.path))
            remedy = "Add `model.preset=llama3-8b`. For the config.json of a folder, use `ptrain "
            remedy += f"convert {file} --model FOLDER --out spec.yaml`."
            self._reject_key(("model",), said, remedy)

    def _place_states(self, rows: Mapping[str, PlacementRow]) -> None:
        """Set the mesh, the placement and what belongs to it."""
        data = rows["data"].tuples if "data" in rows else {"dp_replicate": _REPLICATED}
        data = rows["offload"].tuples if "offload" in rows and "dp_shard" not in data else data
        mesh = self._resolve_mesh(data)
        tuples = {axis: data.get(axis, _REPLICATED) for axis in DATA_NAMES}
        last = "dp_shard" if "dp_shard" in data else "dp_replicate"
        modes = list(rows["offload"].tuples[last] if "offload" in rows else tuples[last])
        for at, state in enumerate(STATE_NAMES[:2]) if "offload" not in rows else ():
            tier = self.settings.get(("placement", "dp_shard", state))  # of an offload alone
            modes[at] = (
                {"O": "S*@host", "S@file": "S*@file"}[tier]
                if tier and not at
                else tier or modes[at]
            )
        is_cast = "cast" in rows or self.settings.get(("precision", "layout")) == "fsdp-mixed"
        modes[0] = "M" if is_cast and modes[0] == "S*" else modes[0]
        tuples[last] = tuple(modes)
        for axis in mesh:
            if axis not in tuples:
                tuples[axis] = rows[axis].tuples[axis] if axis in rows else tuple(modes)
            if axis == "cp":  # the ranks of a sequence share the states of their data axis
                tuples[axis] = (*modes[:3], tuples[axis][3])
        placement = {axis: list(tuples[axis]) for axis in mesh}
        self.root |= {"mesh": mesh, "placement": placement}
        for family, row in rows.items():
            if family in mesh or family in ("data", "activations"):
                self.settings |= row.settings
            if family == "activations":
                self.settings[("activations",)] = next(iter(row.tuples.values()))[3]

    def _resolve_mesh(self, data: Mapping[str, object]) -> dict[str, int]:
        """Return the degrees of the file, and of the data axis that is left open."""
        degrees = {axis: self.settings.pop(("mesh", axis), None) for axis in _AXES}
        mesh = {axis: n for axis, n in degrees.items() if isinstance(n, int) and n > 1}
        ranks, given = self.ranks or self._count_ranks(mesh), math.prod(mesh.values())
        open_axis = "dp_shard" if "dp_shard" in data else "dp_replicate"
        if len(data) == 2 and ranks and mesh.keys().isdisjoint(DATA_NAMES):  # hybrid: by node
            mesh["dp_shard"] = min(ranks // given, NODE_SIZE)
            note = "Shards within a node of at most 8 devices, replicas between nodes."
            self._assume_value(("mesh", "dp_shard"), mesh["dp_shard"], note)
            open_axis, given = "dp_replicate", given * mesh["dp_shard"]
        if ranks and ranks % given:
            text = f"the degrees multiply to {given}, which does not divide {ranks} devices"
            self._reject_key(("mesh",), text, f"Use `devices={given}`.")
        elif ranks and ranks > given:
            axis = "dp_replicate" if open_axis in mesh else open_axis
            mesh[axis] = mesh.get(axis, 1) * (ranks // given)
        elif not ranks and mesh.keys().isdisjoint(DATA_NAMES):
            self._reject_key(("mesh",), "the file has no number of devices", "Add `devices=8`.")
        return {axis: mesh[axis] for axis in _AXES if axis in mesh} or {open_axis: 1}

    def _count_ranks(self, mesh: Mapping[str, int]) -> int:
        """Return the number of ranks that the file sets, or that its batch leads to, or 0."""
        found = [look_up(self.config, key) for key in self.tool.get("devices", ())]
        counts = [len(n) if isinstance(n, list) else n for n in found if n is not None]
        if counts and all(isinstance(n, int) and n > 0 for n in counts):
            return math.prod(n for n in counts if isinstance(n, int))
        batch = [self.settings.get(("batch", key), 1) for key in ("global", "micro", "accumulate")]
        if not self.tool.get("counts_batch") or not all(isinstance(n, int) and n for n in batch):
            return 0
        if not {("batch", "global"), ("batch", "micro")} <= self.settings.keys():
            return 0
        others = math.prod(n for axis, n in mesh.items() if axis not in DATA_NAMES)
        return int(batch[0] // (batch[1] * batch[2])) * others

    def _show_placed(self, row: KeyOutcome) -> KeyOutcome:
        """Return an outcome with the model, devices or placement that it led to."""
        kind = re.split(r"[.=]", row.setting)[0]
        placement = self.root["placement"]
        values = {
            "placement": f"placement={to_flow_yaml(placement)}",
            "reshard": f"reshard={to_flow_yaml(self.settings.get(('reshard',)))}",
            "model": f"model.preset={self.settings.get(('model', 'preset'), '')}",
        }
        is_shape = kind == "model" and row.setting != "model"
        strategy = load_strategy(row.setting.partition("=")[2]) if kind == "placement" else None
        if strategy and row.outcome is KeyEffect.MAPPED:
            wanted = {_plain_modes(as_tuple(modes)) for modes in strategy["placement"].values()}
            if wanted.isdisjoint(map(_plain_modes, placement.values())):
                note = "Other keys, or the number of devices, decide the placement."
                row = row._replace(outcome=KeyEffect.DIFFERS, note=row.note or note)
        return row if is_shape else row._replace(setting=values.get(kind, row.setting))


def _plain_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """Return the modes of parameters, optimizer state and gradients without tiers and casts."""
    plain = {"M": "S*", "O": "S"}
    return tuple(plain.get(mode, mode.partition("@")[0]) for mode in modes[:3])


def _plain_value(route: Route, value: object) -> object:
    """Return a value without the modules of a class name, and a number in quotes as a number."""
    if isinstance(value, str) and route[-1] == "class_path":
        return value.rpartition(".")[2]
    is_number = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?([eE]-?\d+)?", value)
    return parse_value(str(value), "").root if is_number else value


def set_value(mapping: dict[str, Any], route: Route, value: object) -> None:
    """Set a key; a section that is written as one word, such as `recompute: full`, stays one."""
    node = mapping
    for key in route[:-1]:
        inner = node.get(key, {})
        node[key] = inner if isinstance(inner, dict) else {_WORD_OF.get(key, "kind"): inner}
        node = node[key]
    held = node.get(route[-1])
    if isinstance(held, dict):
        held |= value if isinstance(value, dict) else {_WORD_OF.get(route[-1], "kind"): value}
    else:
        node[route[-1]] = value


@cache
def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


@lru_cache
def find_preset(name: str) -> str | None:
    """Return the built-in model with a published name, such as `meta-llama/Llama-3.1-8B`."""
    word = _plain_name(name.rpartition("/")[2])
    return next((preset for preset in list_files("models") if _plain_name(preset) == word), None)


def _plain_name(name: str) -> str:
    word = re.sub(r"^meta-|-(instruct|base|chat|hf|it|fp16|v0\.\d)\b", "", name.lower())
    return word.replace("_", ".").replace("-", "")
