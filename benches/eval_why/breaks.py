"""Breaks: pairs of prompts, of which the second computes again what the first has cached.

A break is a change of a prompt that an agent, a gateway or a chat template makes. Each kind has its
own system prompt, so that no prompt of one kind recurs in those of another.
Invariant: `token` is the first token at which the second prompt differs from the first. Cost: the
tokenizer's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Encode: TypeAlias = Callable[[str], list[int]]
    Turns: TypeAlias = Sequence[tuple[str, str]]

TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text())
TOOLS = tuple(json.dumps(tool) for tool in TEXTS["tools"])
NEW_TOOL = json.dumps(TEXTS["new tool"])
TURNS = [(asked, answer) for asked, answer in TEXTS["turns"]]
THOUGHT = f"{TEXTS['thought']}\n"
ASTRONOMY, SAILING = TEXTS["astronomy"], TEXTS["sailing"]


@dataclass(frozen=True)
class Break:
    """A kind of break, as it is sent.

    Attributes:
        kind: its name.
        cached: prompts that are sent first.
        asked: the prompt that is explained.
        cause: the cause that its computed tokens should have.
        token: the first token that differs, or is computed if none does.
        parts: whether the prompt parts from a cached branch.
        asked_with: what it is sent with in addition: a "salt" or an "adapter".
        server: the server that it needs.
    """

    kind: str
    cached: list[list[int]]
    asked: list[int]
    cause: str
    token: int
    parts: bool = True
    asked_with: dict[str, Any] = field(default_factory=dict)
    server: str = "plain"


def system(name: str, *, date: str = "Today is 12 May.", tools: tuple[str, ...] = TOOLS) -> str:
    """A system prompt of its own firm."""
    listed = "\n".join(tools)
    return f"You serve the customers of {name}. {date}\n{TEXTS['rules']}\nTools:\n{listed}\n"


def message(role: str, text: str) -> str:
    """A message in the model's template."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def talk(turns: Turns, thought: str = "", form: Callable[[str, str], str] = message) -> str:
    """Turns of a conversation; the first answer begins with a thought."""
    return "".join(
        form("user", asked) + form("assistant", (thought if not at else "") + answer)
        for at, (asked, answer) in enumerate(turns)
    )


def chat(
    head: str,
    turns: Turns = TURNS,
    *,
    last: str = TEXTS["last"],
    thought: str = "",
    form: Callable[[str, str], str] = message,
) -> str:
    """A conversation after a system prompt."""
    return form("system", head) + talk(turns, thought, form) + form("user", last)


def conversation(head: str, texts: list[str]) -> str:
    """A conversation of another subject."""
    return chat(head, [(texts[0], texts[1])], last=texts[2])


def drifted(role: str, text: str) -> str:
    """A message in another version of the template: a space follows its end."""
    return f"<|im_start|>{role}\n{text}<|im_end|> \n"


def texts() -> Iterator[tuple[str, str, str, str]]:
    """Kind, the cached text, the asked text, and the cause."""
    yield (
        "date in the system prompt",
        chat(system("Alder")),
        chat(system("Alder", date="Today is 13 May.")),
        "diverged",
    )
    yield (
        "tools reordered",
        chat(system("Birch")),
        chat(system("Birch", tools=(TOOLS[2], TOOLS[0], TOOLS[3], TOOLS[1]))),
        "diverged",
    )
    yield (
        "tool inserted",
        chat(system("Cedar")),
        chat(system("Cedar", tools=(TOOLS[0], NEW_TOOL, *TOOLS[1:]))),
        "diverged",
    )
    yield (
        "whitespace",
        chat(system("Elm")),
        chat(system("Elm").replace("Tools:\n", "Tools: \n\n")),
        "diverged",
    )
    yield (
        "chat template drift",
        chat(system("Fir")),
        chat(system("Fir"), form=drifted),
        "diverged",
    )
    yield (
        "thinking removed",
        chat(system("Hazel"), thought=THOUGHT),
        chat(system("Hazel")),
        "diverged",
    )
    yield (
        "history truncated",
        chat(system("Larch")),
        chat(system("Larch"), TURNS[1:]),
        "diverged",
    )
    yield (
        "request id in the prompt",
        chat(system("Maple", date="Request 5f1c9a.")),
        chat(system("Maple", date="Request 07be42.")),
        "diverged",
    )
    yield (
        "new conversation",
        chat(system("Oak")),
        conversation(system("Oak"), ASTRONOMY),
        "new",
    )
    yield (
        "another new conversation",
        chat(system("Pine")),
        conversation(system("Pine"), SAILING),
        "new",
    )
    yield (
        "old paragraph quoted",
        chat(system("Rowan")),
        chat(
            system("Rowan"),
            [(SAILING[0], SAILING[1]), (ASTRONOMY[0], ASTRONOMY[1])],
            last=f"{SAILING[2]} {ASTRONOMY[2]} I have read this: {TURNS[2][1]} Is that right?",
        ),
        "new",
    )


def breaks(encode: Encode) -> list[Break]:
    """All kinds, in tokens of a model.

    Args:
        encode: the tokenizer.
    """
    found = [
        Break(kind, [one := encode(cached)], other := encode(asked), cause, diverged_at(one, other))
        for kind, cached, asked, cause in texts()
    ]
    found.append(merged(encode))
    plain = encode(chat(system("Spruce")))
    found.append(Break("salt", [plain], plain, "new", 0, parts=False, asked_with={"salt": "guest"}))
    plain = encode(chat(system("Teak")))
    found.append(
        Break(
            "adapter", [plain], plain, "other scope", 0, parts=False, asked_with={"adapter": True}
        )
    )
    plain = encode(chat(system("Walnut")))
    draw = random.Random(0)
    flood = [[draw.randrange(1_000, 40_000) for _ in range(850)] for _ in range(3)]
    found.append(
        Break("eviction", [plain, *flood], plain, "evicted", 0, parts=False, server="small")
    )
    return found


def merged(encode: Encode) -> Break:
    """A history whose last answer is read as text again: its tokens merge at the border."""
    before = chat(system("Willow"), TURNS[:1], last=TURNS[1][0])
    answer = "The spare valve is "
    more = " until June.<|im_end|>\n" + talk(TURNS[2:]) + message("user", TEXTS["last"])
    head = before + "<|im_start|>assistant\n" + answer
    # As a model may generate it: the tokenizer itself makes one token of the word.
    made = encode(head) + encode("un") + encode("avail") + encode("able") + encode(more)
    read = encode(head + "unavailable" + more)
    at = diverged_at(made, read)
    return Break("tokens merged at a text border", [made], read, "diverged", at)


def diverged_at(one: list[int], other: list[int]) -> int:
    """Return the index of the first different token."""
    pairs = zip(one, other, strict=False)
    return next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
