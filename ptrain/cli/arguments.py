"""The parser of a command: its help screen, and one message for a mistake in the arguments."""

from __future__ import annotations

import json
import os
import re
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from ptrain.cli.main import VERBS
from ptrain.commands import COMMANDS, add_arguments
from ptrain.errors import PtrainError
from ptrain.report.screen import print_lines
from ptrain.spec.names import load_names

# Options of launchers and other tools that set the number of ranks.
_RANKS = {"nproc", "nproc_per_node", "num_processes", "num_gpus", "gpus", "ranks", "world_size"}
_ALMOST = 0.85  # difflib similarity of an option and a misspelling such as --step for --steps


class CommandParser(ArgumentParser):
    """The parser of one command, which reports a mistake as a PtrainError with one message."""

    def __init__(self, verb: str) -> None:
        command = COMMANDS[verb]
        examples = [f"  {example}" for example in command.examples]
        topics = [f"`ptrain help {topic}`" for topic in command.topics]
        super().__init__(
            prog=f"ptrain {verb}",
            usage=f"\n{' ' * 7}".join(f"ptrain {verb} {form}" for form in command.usage),
            description="\n".join(filter(None, [f"{VERBS[verb]}.", command.details])),
            epilog="\n".join(["Examples:", *examples, "", f"See also: {', '.join(topics)}"]),
            formatter_class=RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        add_arguments(self, verb)
        about = "Print this help and exit."
        self.add_argument_group("Help").add_argument("-h", "--help", action="help", help=about)
        self.verb = verb

    def parse_words(self, words: Iterable[str]) -> Namespace:
        """Parse arguments, and add the command as typed.

        Args:
            words: The arguments after the command.

        Returns:
            The options; `typed` has the full command.

        Raises:
            PtrainError: If an argument is wrong.
        """
        typed = ("ptrain", self.verb, *words)
        given, command = typed[2:], tuple[str, ...]()
        if " -- " in (self.usage or "") and "--" in given:
            cut = given.index("--")
            given, command = given[:cut], given[cut + 1 :]
        arguments = list(_as_overrides(given))
        # Checked before parsing, because argparse would take the value of an unknown option for a
        # positional argument and report that instead.
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
            if word == "--":
                break
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown option {name}. {_suggest_option(self.verb, word, following)}")
        try:
            parsed, unknown = self.parse_known_intermixed_args(arguments)
        except ArgumentError as error:
            self.error(self._explain_error(error))
        if unknown:
            self.error(f"unknown argument {unknown[0]}")
        parsed.typed, parsed.verb = typed, self.verb
        if command:
            parsed.command = list(command)
        files = filter(os.path.isfile, getattr(parsed, "arguments", ()))
        if hasattr(parsed, "model") and (parsed.model or parsed.devices or any(files)):
            from ptrain.cli.convert import convert_arguments

            convert_arguments(parsed)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise PtrainError; argparse would print the usage and exit."""
        message = message.replace("the following arguments are required:", "missing")
        more = "" if message.endswith((".", "?")) else f". Run `{self.prog} --help`."
        raise PtrainError(f"{self.prog}: {message}{more}")

    def _explain_error(self, error: ArgumentError) -> str:
        """Return the message for a wrong value, with the accepted values."""
        for action in self._actions:
            names = "/".join(action.option_strings) or action.metavar
            if action.choices and names == error.argument_name:
                return f"{names} takes one of {', '.join(map(str, action.choices))}."
        return f"{error.argument_name}: {error.message}" if error.argument_name else error.message


def option_names(verb: str) -> Iterator[str]:
    """Yield the names of a command's options, without hidden ones."""
    for options in COMMANDS[verb].groups.values():
        for item in options:
            for flags, how in item if isinstance(item, list) else (item,):
                if flags[0].startswith("-") and how["help"] != SUPPRESS:
                    yield from flags


def _suggest_option(verb: str, word: str, following: str) -> str:
    """Return a suggestion for an unknown option.

    Candidates are tried from the most certain: a misspelled option, the number of ranks, a key of
    the spec, a key of another tool, a less similar option, an option of another command.

    Args:
        verb: The command.
        word: The option as typed, perhaps with `=VALUE`.
        following: The next argument, which may be the option's value.
    """
    from ptrain.spec.check import iter_key_rows, of_any_section
    from ptrain.spec.foreign import for_foreign
    from ptrain.spec.slips import NEAR, closest_word

    name, _, value = word.partition("=")
    key = name.lstrip("-").replace("-", "_")
    value = value or ("" if following.startswith("-") else following)
    options = tuple(option_names(verb))
    if "-- COMMAND" in " ".join(COMMANDS[verb].usage) and not closest_word(
        name, options, cutoff=NEAR
    ):
        return f"Write the command of the job after `--`: `ptrain {verb} -- COMMAND`."
    # A nearly exact option comes before keys: `--step` means --steps, not a key named step.
    if near := closest_word(name, options, cutoff=_ALMOST):
        return f"Did you mean `{near}`?"
    with_keys = "key=value" in " ".join(COMMANDS[verb].usage)
    if with_keys and key in _RANKS:
        number = value if value.isdecimal() else "N"
        return f"The number of ranks is the mesh: use `mesh.dp_shard={number}`."
    if with_keys:
        keys = [row.place for row in iter_key_rows() if not row.is_section]
        meant = [place for place in keys if place in (f"{key}.preset", key)]
        meant = meant or [place for place in keys if place.rpartition(".")[2] == key]
        if meant:
            shown = [f"`{place}={value or 'VALUE'}`" for place in meant[:3]]
            return f"Use the key {' or '.join(shown)}."
        route = tuple(key.split("."))
        typed = int(value) if value.isdecimal() else value
        if answer := for_foreign(route, typed, lambda place, text: f"{'.'.join(place)}={text}"):
            return answer
        if answer := of_any_section(key):
            return f"{answer[0].upper()}{answer[1:]}"
    if near := closest_word(name, options, cutoff=NEAR):
        return f"Did you mean `{near}`?"
    if others := [f"`ptrain {other}`" for other in COMMANDS if name in option_names(other)]:
        return f"{name} is an option of {', '.join(others)}."
    return f"Run `ptrain {verb} --help`."


def _as_overrides(arguments: Iterable[str]) -> Iterator[str]:
    """Yield `mesh.dp_shard=4` for `--mesh.dp_shard=4` and for `--mesh.dp_shard 4`."""
    remaining = iter(arguments)
    for argument in remaining:
        if not re.match(r"--\w+(\.[\w-]+)+(=|$)", argument):
            yield argument
        elif "=" in argument:
            yield argument[2:]
        else:
            yield f"{argument[2:]}={next(remaining, '')}"


def print_json(record: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    """Print a record, or a list of records if several specs were given."""
    print_lines(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def missing_spec(command: str) -> PtrainError:
    """Return the error of a command without a SPEC."""
    text = f"ptrain {command}: SPEC is missing. Try `ptrain {command} {load_names().default}`."
    return PtrainError(f"{text} `ptrain specs` lists all names.")
