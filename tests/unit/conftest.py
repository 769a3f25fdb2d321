"""Fixtures shared by modules of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat_folders import save_tokenizer
from tests.forked import forked_traces

__all__ = ["forked_traces"]  # of every test of this folder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained tokenizer, whose template is ChatML's."""
    pytest.importorskip("transformers")
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat_tokenizer(chat_folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(chat_folder)
