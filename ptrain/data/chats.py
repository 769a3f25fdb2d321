"""Chats in rows: `messages`, each with a role and what was said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptrain.data.documents import has_rows, is_encodable, lacking, rows
from ptrain.errors import PtrainError, refused

ANSWERS = "assistant"  # the role whose messages are learned
_TOOLS = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as a template takes them, with the tools that a model may call, and where they
    stand."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def chats(path: Path, field: str) -> Iterator[Chat]:
    """Yield the chats of a file of JSON lines or Parquet, the messages of which stand in `field`.
    Raises SpecError, with the row, for what is none."""
    if not has_rows(path):
        remedy = "give .jsonl or .parquet, or leave out --chat"
        raise refused(str(path), "chats are rows of JSON lines or of Parquet", remedy)
    for place, row in rows(path, [field, _TOOLS]):
        yield _of_row(row, field, place)


def _of_row(row: object, field: str, place: str) -> Chat:
    said = row if isinstance(row, dict) else {}
    messages = said.get(field)
    if not isinstance(messages, list) or not messages:
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
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_message(place, lacking(message, "role", "text"))
    said = {key: value for key, value in message.items() if value is not None}
    content = said.get("content")
    if content is None and not said.get("tool_calls"):
        raise _no_message(place, lacking(said, "content", "text"))
    if isinstance(content, str) and not is_encodable(content):
        raise refused(place, "the text has half a character, which UTF-8 has not", "mend it")
    return {"content": None, **said}  # as templates have it beside a call of tools


def _no_message(place: str, finding: str) -> PtrainError:
    remedy = 'messages are [{"role": "user", "content": "…"}, {"role": "assistant", …}]'
    return refused(place, finding, remedy)
