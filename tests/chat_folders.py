"""Tokenizers in transformers folders with chat templates, and chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

PAD, BEGIN, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# As of models that think: the thoughts of all answers but the last are left out.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(think)' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ("red", "green", "blue", "seven", "eight", "a", "the", "of", "is", "what")
Messages = list[dict[str, Any]]
CHAT: Messages = [
    {"role": "system", "content": "the numbers"},
    {"role": "user", "content": "what is red"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "blue"},
    {"role": "assistant", "content": "zwölf"},
]


def save_tokenizer(folder: Path, template: str | None = CHATML, *, specials: int = 3) -> Path:
    """Save a byte-pair tokenizer, trained on a few words, to a new or existing folder; its first
    special tokens are those of the templates."""
    import tokenizers
    import transformers

    whole = tokenizers.Tokenizer(tokenizers.models.BPE())
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    names = (END, BEGIN, PAD)[:specials]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*names],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    named = {"eos_token": END, **({"pad_token": PAD} if PAD in names else {})}
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **named)
    saved.chat_template = template
    saved.save_pretrained(folder)
    return folder


def random_chats(count: int, seed: int = 0, most: int = 3) -> list[Messages]:
    """Return chats of up to `most` answers, some with a system message. Answers follow from
    questions: a colour is answered with a number."""
    draw = Random(seed)
    drawn = []
    for _ in range(count):
        chat: Messages = []
        if draw.random() < 0.3:
            chat.append({"role": "system", "content": "the numbers"})
        for _ in range(draw.randint(1, most)):
            colours = draw.choices(("red", "green", "blue"), k=draw.randint(1, 4))
            numbers = {"red": "seven", "green": "eight", "blue": "zwölf"}
            answer = " ".join(numbers[colour] for colour in colours)
            chat.append({"role": "user", "content": f"what is {' '.join(colours)}"})
            chat.append({"role": "assistant", "content": answer})
        drawn.append(chat)
    return drawn


def write_chats(path: Path, chats: Iterable[Messages], **others: Any) -> Path:
    """Write chats as JSON lines."""
    rows: Iterable[Mapping[str, Any]] = ({"messages": chat, **others} for chat in chats)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
