"""`ptrain completion SHELL`: print a script that completes commands, options, names and keys.

The script contains every word that it offers, so a completion starts no process. Its rules are
patterns of `COMMAND PREVIOUS CURRENT`, and the first pattern that matches gives the words. If there
are none, the shell completes file names.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptrain.cli.arguments import option_names
from ptrain.cli.main import VERBS
from ptrain.commands import COMMANDS
from ptrain.spec.names import SPEC_FOLDERS, list_files, specs_folder

Rule = tuple[Sequence[str], Sequence[str]]  # patterns, words

_BASH = """\
# ptrain completion for bash. Add to ~/.bashrc: eval "$(ptrain completion bash)"
_ptrain_words() {
    case "$1 $2 $3" in
@RULES@
    esac
}
_ptrain() {
    local line="${COMP_LINE:0:COMP_POINT}" current word count
    local -a before
    current="${line##*[[:space:]]}"
    read -ra before <<< "${line%"$current"}"
    count=${#before[@]}
    COMPREPLY=()
    while IFS= read -r word; do
        [[ -z $word || $word != "$current"* ]] && continue
        # readline replaces only the part after "=", where "=" breaks words
        [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && word="${word#"${current%%=*}"=}"
        [[ $word == *= ]] && compopt -o nospace 2> /dev/null
        COMPREPLY+=("$word")
    done < <(_ptrain_words "${before[1]-}" "${before[count-1]-}" "$current")
}
complete -o default -F _ptrain ptrain
"""
_ZSH = """\
#compdef ptrain
# ptrain completion for zsh. Add to ~/.zshrc: eval "$(ptrain completion zsh)"
_ptrain_words() {
    case "$1 $2 $3" in
@RULES@
    esac
}
_ptrain() {
    local -a found
    local current="${words[CURRENT]}" command=""
    (( CURRENT > 2 )) && command="${words[2]}"
    found=(${(f)"$(_ptrain_words "$command" "${words[CURRENT-1]}" "$current")"})
    found=(${(M)found:#${(b)current}*})
    (( ${#found} )) || { _files; return }
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _ptrain ptrain
"""
_FISH = """\
# ptrain completion for fish. Save as ~/.config/fish/completions/ptrain.fish
function __ptrain_words
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l command
    test (count $before) -gt 1; and set command $before[2]
    switch "$command $before[-1] $current"
@RULES@
    end
end
function __ptrain_files
    test -z "$(__ptrain_words)"
end
complete -c ptrain -f -a "(__ptrain_words)"
complete -c ptrain -n __ptrain_files -F
"""


def run(args: Namespace) -> int:
    """Print the script of a shell."""
    rules = list(_completion_rules())
    if args.shell == "fish":
        print(_FISH.replace("@RULES@", "\n".join(map(_fish_clause, rules))), end="")
    else:
        script = _BASH if args.shell == "bash" else _ZSH
        print(script.replace("@RULES@", "\n".join(map(_case_clause, rules))), end="")
    return 0


def _case_clause(rule: Rule) -> str:
    """Return a rule as a clause of `case` in bash and zsh."""
    patterns, words = rule
    text = "|".join(pattern.replace(" ", "\\ ") for pattern in patterns)
    output = "\n".join(words)
    return f"    {text})\n        echo '{output}' ;;" if words else f"    {text}) ;;"


def _fish_clause(rule: Rule) -> str:
    """Return a rule as a clause of `switch` in fish."""
    patterns, words = rule
    text = " ".join(f"'{pattern}'" for pattern in patterns)
    output = "\n".join(words)
    return (
        f"    case {text}\n        echo '{output}'" if words else f"    case {text}\n        true"
    )


def _completion_rules() -> Iterator[Rule]:
    """Yield the rules, the most specific first."""
    specs, models, clusters = (
        list(list_files(*folders)) for folders in (SPEC_FOLDERS, ("models",), ("clusters",))
    )
    pairs = dict(
        keys_of_schema(
            json.loads((specs_folder() / "ptrain.schema.json").read_text(encoding="utf-8"))
        )
    )
    pairs |= {"model.preset": models, "cluster.preset": clusters}
    pairs |= {key: [*list_files("strategies")] for key in pairs if _is_placement(key)}
    keys = [f"{key}=" for key in pairs]
    values = [f"{key}={word}" for key, words in pairs.items() for word in words]
    # The first matching pattern wins, so options with values come before the rules of commands.
    yield [" *"], [*VERBS]
    yield ["* --cluster *"], clusters
    files = []
    for verb in COMMANDS:
        for name, words in _option_values(verb):
            if words:
                yield [f"{verb} {name} *"], words
            else:
                files.append(f"{verb} {name} *")
    yield files, []
    for verb in COMMANDS:
        yield [f"{verb} * -*"], [*option_names(verb), "--help"]
    with_keys = [verb for verb in COMMANDS if "key=value" in " ".join(COMMANDS[verb].usage)]
    yield [f"{verb} * *=*" for verb in with_keys], values
    yield ["specs specs *"], ["show"]
    yield ["specs show *"], [*specs, *models, *clusters]
    takes_models = ["select * ", "predict * "]
    yield takes_models, [*models, *specs]
    yield [f"{verb} * " for verb in with_keys], specs  # keys after the first letter
    yield [f"{words}*" for words in takes_models], [*models, *specs, *keys]
    yield [f"{verb} * *" for verb in with_keys], [*specs, *keys]
    yield ["calibrate * *"], clusters
    topics = dict.fromkeys(topic for command in COMMANDS.values() for topic in command.topics)
    yield ["help * *"], [*VERBS, *topics, *pairs]


def _is_placement(key: str) -> bool:
    """Return True if a strategy's name is a value of the key."""
    return key == "placement" or (key.startswith("placement.") and key.count(".") == 1)


def _option_values(verb: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each option that takes a value, with the accepted words; any text has none."""
    for options in COMMANDS[verb].groups.values():
        for item in options:
            for names, how in [item] if isinstance(item, tuple) else item:
                if "action" not in how or how["action"] == "append":
                    is_option = names[0].startswith("-")
                    for name in names if is_option else [verb] if "choices" in how else []:
                        yield name, list(how.get("choices", ()))


def keys_of_schema(schema: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of a spec that take a value, with the accepted words.

    Args:
        schema: The JSON Schema of specs.
    """

    def variants(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield node
        if "$ref" in node:
            yield from variants(schema["$defs"][node["$ref"].rpartition("/")[2]])
        for inner in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from variants(inner)

    def walk(node: Mapping[str, Any], place: str) -> Iterator[tuple[str, list[str]]]:
        forms = list(variants(node))
        words = [str(form["const"]) for form in forms if "const" in form]
        kinds = {form.get("type") for form in forms if "properties" not in form}
        words += ["true", "false"] * ("boolean" in kinds)
        if place and (words or kinds - {None, "null"}):
            yield place, words
        for form in forms:
            for key, inner in form.get("properties", {}).items():
                yield from walk(inner, f"{place}.{key}" if place else key)

    return walk(schema, "")
