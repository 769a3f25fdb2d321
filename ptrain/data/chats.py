"""Chats in rows: `messages`, each with a role and what was said, or `conversations`, as ShareGPT
has them: each with a speaker (`from`) and what was said (`value`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptrain.data.documents import OF_CHATS, has_rows, is_encodable, lacking, rows
from ptrain.errors import PtrainError, refused

ANSWERS = "assistant"  # the role whose messages are learned
_TOOLS = "tools"
# By the names that ShareGPT's datasets have for them.
_ROLES: Mapping[object, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ANSWERS), ANSWERS),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as a template takes them, with the tools that a model may call, and where they
    stand."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def chats(path: Path, field: str | None) -> Iterator[Chat]:
    """Yield the chats of a file of JSON lines or Parquet, the messages of which stand in `field`;
    None: in `messages`, or else in `conversations`. Raises SpecError, with the row, for what is
    none."""
    if not has_rows(path):
        remedy = "give .jsonl or .parquet, or leave out --chat"
        raise refused(str(path), "chats are rows of JSON lines or of Parquet", remedy)
    fields = OF_CHATS if field is None else (field,)
    for place, row in rows(path, fields, [_TOOLS]):
        yield _of_row(row, fields, place)


def _of_row(row: object, fields: Sequence[str], place: str) -> Chat:
    said = row if isinstance(row, dict) else {}
    field = next((name for name in fields if said.get(name) is not None), fields[0])
    messages = said.get(field)
    if messages == []:
        raise refused(place, f"the list in the field {field!r} is empty", "leave the row out")
    if not isinstance(messages, list):
        remedy = "name the field that has them: --field NAME"
        raise refused(place, lacking(row, field, "list of messages"), remedy)
    tools = said.get(_TOOLS) or None
    if tools is not None and not isinstance(tools, list):
        raise refused(place, "its tools are no list", "give a list, as templates take them")
    numbered = enumerate(messages, 1)
    return Chat(
        messages=[_message(message, f"{place}, message {number}") for number, message in numbered],
        tools=tools,
        place=place,
    )


def _message(message: object, place: str) -> dict[str, Any]:
    """Return a message without the fields that a column has and this one has not."""
    message = _of_speaker(message, place)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_message(place, lacking(message, "role", "text"))
    said = {key: value for key, value in message.items() if value is not None}
    content = said.get("content")
    if content is None and not said.get("tool_calls"):
        raise _no_message(place, lacking(message, "content", "text"))
    if isinstance(content, str) and not is_encodable(content):
        raise refused(place, "the text has half a character, which UTF-8 has not", "mend it")
    return {"content": None, **said}  # as templates have it beside a call of tools


def _of_speaker(message: object, place: str) -> object:
    """Return a message of ShareGPT in the words of templates; any other as it is."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    role = _ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        finding = f"nobody is known as {message['from']!r}"
        raise refused(place, finding, f"those who speak are {', '.join(map(str, _ROLES))}")
    return {"role": role, "content": message.get("value")}


def _no_message(place: str, finding: str) -> PtrainError:
    remedy = 'messages are [{"role": "user", "content": "…"}, {"role": "assistant", …}]'
    return refused(place, finding, remedy)
