"""Explanations of misses on a vLLM server with SmolLM2: each break's cause and exact token.

    make eval-why
    make eval-why ARGS="--report"

Two servers in the engine's environment (`server`), one of them with little memory, answer pairs of
prompts (`breaks`): a conversation, and the same with one change, or a new one after the same system
prompt. Each asked prompt must get its cause, and the token at which it parts.
Cost: three minutes on two idle cores.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benches.engines.__main__ import smollm_folder
from benches.engines.launch import PYTHON
from benches.evaluation import Cell, Evaluation, evaluate, lines_of, started, table_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benches.evaluation import Key

KINDS = (
    "date in the system prompt",
    "tools reordered",
    "tool inserted",
    "whitespace",
    "chat template drift",
    "thinking removed",
    "history truncated",
    "request id in the prompt",
    "new conversation",
    "another new conversation",
    "old paragraph quoted",
    "tokens merged at a text border",
    "salt",
    "adapter",
    "eviction",
    "placeholder digest",
)
FEW = ("date in the system prompt", "new conversation", "salt")


@dataclass(frozen=True, slots=True)
class Record:
    """The explanation of one break.

    Attributes:
        kind: of the break.
        expected: the cause that its computed tokens should have.
        token: the first token that differs, or is computed if none does.
        causes: computed tokens by cause.
        at: the token that the explanation names.
        computed: computed tokens.
        recurring: tokens after the divergence that recur in a cached branch.
        detail: a remark.
        answered: whether the request's own answer had an explanation.
    """

    kind: str
    expected: str
    token: int
    causes: dict[str, int] = field(default_factory=dict)
    at: int | None = None
    computed: int = 0
    recurring: int = 0
    detail: str = ""
    answered: bool = False

    @property
    def key(self) -> tuple[str]:
        """The kind."""
        return (self.kind,)

    @property
    def right(self) -> bool:
        """Whether all but the last block has the expected cause, and the token is exact."""
        causes = set(self.causes) - {"not cacheable"}
        counted = sum(self.causes.values()) == self.computed
        return causes == {self.expected} and self.at == self.token and counted and self.answered


class WhyEvaluation(Evaluation[Record]):
    """One cell: the servers answer all breaks that have no record."""

    name = "eval-why"
    record_name = "eval_why.json"
    record = Record

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add the list of divergence points."""
        parser.add_argument(
            "--show", action="store_true", help="print `kvtrie why --show-text` too"
        )
        parser.set_defaults(least={})

    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """All breaks, or few."""
        kinds = FEW if self.given.quick else KINDS
        yield "Breaks", [Cell([(kind,) for kind in kinds], self.ask)]

    def ask(self, keys: list[Key]) -> Iterator[Record]:
        """Start the servers, and yield a record per break."""
        model = smollm_folder(Console(stderr=True))
        words = ["--show"] if self.given.show else []
        words += ["--model", model, "--kinds", *(key[0] for key in keys)]
        for row in lines_of(started("benches.eval_why.server", *words, python=PYTHON)):
            yield Record(**row)

    def rows(self) -> list[Record]:
        """The records, in the order of kinds."""
        return [self.by_key[kind,] for kind in KINDS if (kind,) in self.by_key]

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """All records."""
        rows = [
            {"kind": row.kind, "expected": row.expected, "token": row.token, "right": row.right}
            | {"causes": row.causes, "at": row.at, "recurring": row.recurring, "detail": row.detail}
            for row in self.rows()
        ]
        return {"about": about, "rows": rows}

    def show(self, console: Console) -> None:
        """Print the table."""
        columns = {
            "break": lambda row: row.kind,
            "expected": lambda row: row.expected,
            "computed tokens by cause": lambda row: ", ".join(
                f"{cause} {count}" for cause, count in row.causes.items()
            ),
            "recurring": lambda row: str(row.recurring),
            "differs at": lambda row: str(row.token),
            "explained at": lambda row: str(row.at),
            "": lambda row: "right" if row.right else "wrong",
            "detail": lambda row: row.detail,
        }
        console.print(table_of("Breaks", columns, self.rows()))


if __name__ == "__main__":
    sys.exit(evaluate(WhyEvaluation))
