# ruff: noqa: T201
"""Count words and constructions that make prose slow to read; `make lint` prints the table.

`CONTRIBUTING.md` has the rule. Reads comments, docstrings, error messages, help texts and pages of
the files that git tracks, without code in backticks and fenced blocks. A row is a folder or a page.
Pronouns, relatives and semicolons are limited in the sources of the product and in `docs/`.
`--list PREFIX` prints each hit below a path. `--check` exits with 1 if a row has more than one hit
of a kind and is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Per 1000 words; openings per 100 sentences.
LIMITS = {"marked": 3.0, "openings": 2.0, "pronouns": 8.0, "relatives": 18.0, "semicolons": 5.0}
CONSTRUCTIONS = {
    "pronouns": re.compile(
        r"\b(?:ones?|those|such|others?|another|whose|of\s+which|what\s+it)\b", re.IGNORECASE
    ),
    "relatives": re.compile(r"\b(?:that|which|what|who)\b", re.IGNORECASE),
    "semicolons": re.compile(r";"),
}
CONSTRUCTED = re.compile(r"^(rust/\w+/src|python/kvtrie|docs)(/|$)")
UNCOUNTED = re.compile(r"^(typings|benches/peers/envs)/")

MARKED = re.compile(
    r"""\b(?:
    tells? | told | telling | heed(?:s|ed|ing)? | beside | besides | anew | likewise | meanwhile
    | stands? (?![- ](?:in|alone)s?\b) | stood | standing
    | who | whom | whoever | nobody | somebody | so\s+(?:many|much|long|few)
    | (?:lies|lie|lay|lain|lying|laid|lays) (?!\s+out\b)
    | dear(?:er|est)? | mend(?:s|ed|ing)? | of\s+(?:its|their|our|one's)\s+own
    | (?<!fall\ )(?<!falls\ )(?<!left\ )(?<!leave\ )(?<!leaves\ )(?<!lags\ )
      behind (?!\ (?:an?|the|one)\ (?:\w+\ )?(?:lock|mutex|feature|flag|trait|proxy|router)\b)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
OPENING = re.compile(r"(?:What|Who|Whoever|Where|How\s+many)\b(?!.*\?$)", re.IGNORECASE | re.DOTALL)
# A sentence opens a text, paragraph, list item or table cell, or follows another's end.
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*(?:[-*#>]+|\d+\.)\s+|\s*\|\s*")
CODE = re.compile(
    r"```.*?(?:```|\Z)|``[^`]*``|`[^`]*`|\{[^{}]*\}|\]\([^)]*\)|https?://\S+"
    r"|^[ \t]*\w+:(?=[ \n])",  # an argument's name
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z']*")
FEWEST_WORDS = 4  # a sentence; a shorter text is a label

# Quoted texts of Rust and CUDA that are shorter are names and formats.
CLIKE = re.compile(
    r"""(?P<comment>(?:[ \t]*//[^\n]*(?:\n(?=[ \t]*//))?)+)|(?P<block>/\*.*?\*/)
    |r(?P<hash>\#*)"(?P<raw>.*?)"(?P=hash)|"(?P<quoted>(?:\\.|[^"\\])*)"|'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL | re.VERBOSE,
)
HELP = {"help", "description", "epilog", "title", "msg", "reason"}
SPOKEN = re.compile(r"(Error|Warning|warn|warning|error|info|debug|exception|fail|print|skip)$")


def prose(path, text):
    """Texts of a file for readers, as pairs of line number and text."""
    suffix = Path(path).suffix
    if suffix in {".py", ".pyi"}:
        return [*_comments(text), *_strings(ast.parse(text))]
    if suffix in {".rs", ".cu", ".cuh", ".cpp"}:
        return list(_c_like(text))
    if suffix == ".md":
        return [(1, text)]
    if suffix in {".toml", ".sh", ".yml"} or Path(path).name == "Makefile":
        return [
            (number, line[line.index("#") :].strip("# "))
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(r"(^|\s)#+ ", line)
        ]
    return []


def _comments(text):
    """Comments of a Python file; comments on consecutive lines are one text."""
    last, start, lines = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if lines and not (alone and token.start[0] == last + 1):
            yield start, "\n".join(lines)
            lines = []
        if not lines:
            start = token.start[0]
        lines.append(token.string.lstrip("#:! "))
        last = token.start[0]
    if lines:
        yield start, "\n".join(lines)


def _strings(tree):
    """Docstrings, and texts that are raised, logged, printed or shown as help."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found.update(_texts(node.value, deep=False))
        elif isinstance(node, ast.Raise) and node.exc:
            found.update(_texts(node.exc))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if SPOKEN.search(name):
                found.update(_texts(node))
            for keyword in node.keywords:
                if keyword.arg in HELP:
                    found.update(_texts(keyword.value))
    return found.values()


def _texts(node, *, deep=True):
    """The string constants of an expression; one formatted string is one text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        return {(node.lineno, node.col_offset): (node.lineno, "".join(map(str, parts)))}
    if isinstance(node, ast.Constant):
        place = (node.lineno, node.col_offset)
        return {place: (node.lineno, node.value)} if isinstance(node.value, str) else {}
    found = {}
    for child in ast.iter_child_nodes(node) if deep else ():
        found.update(_texts(child))
    return found


def _c_like(text):
    """Comments of Rust or CUDA, and quoted texts long enough to be a sentence."""
    for match in CLIKE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["comment"] or match["block"]:
            body = re.sub(r"^[ \t]*(?://[/!]*|/?\*+/?)[ \t]?", "", match[0], flags=re.MULTILINE)
            yield line, body
        elif quoted := match["raw"] or match["quoted"]:
            body = re.sub(r"\\\n\s*", "", quoted)
            if len(WORD.findall(CODE.sub("", body))) >= FEWEST_WORDS:
                yield line, body


def _plain(text):
    """The text without code; line breaks stay."""
    return CODE.sub(lambda code: "~" + "\n" * code[0].count("\n"), text)


def hits_of(text, pattern):
    """Matches of a pattern in a text, as pairs of offset in lines and matched words."""
    text = _plain(text)
    return [
        (text.count("\n", 0, hit.start()), " ".join(hit[0].lower().split()))
        for hit in pattern.finditer(text)
    ]


def sentences(text):
    """Sentences of a text, as pairs of offset in lines and sentence; labels are left out."""
    text = _plain(text)
    start = 0
    for end in [*SENTENCE.finditer(text), None]:
        raw = text[start : end.start() if end else len(text)]
        sentence = raw.strip().lstrip("#*_>-(\"'[ 0123456789.:")
        if len(WORD.findall(sentence)) >= FEWEST_WORDS:
            blank = len(raw) - len(raw.lstrip())
            yield text.count("\n", 0, start + blank), sentence
        start = end.end() if end else 0


def row_of(path):
    """A page's path, another file's folder. Decisions share a row: each is half a page."""
    parent = Path(path).parent.as_posix()
    return path if path.endswith(".md") and parent != "docs/decisions" else parent


def hits(name, text):
    """All hits of a text by kind, as pairs of offset in lines and what was found."""
    opened = [(at, sentence) for at, sentence in sentences(text) if OPENING.match(sentence)]
    found = {"marked": hits_of(text, MARKED), "openings": opened}
    if CONSTRUCTED.match(name):
        found |= {kind: hits_of(text, pattern) for kind, pattern in CONSTRUCTIONS.items()}
    return found


def count(root, listed=None):
    """Words, sentences and hits by kind per row; prints each hit below `listed`."""
    rows = defaultdict(Counter)
    names = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()  # noqa: S607
    for name in names:
        if UNCOUNTED.match(name) or not (root / name).is_file():
            continue
        if listed is not None and not name.startswith(listed):
            continue
        try:
            texts = prose(name, (root / name).read_text())
        except UnicodeDecodeError:
            continue
        for line, text in texts:
            row = rows[row_of(name)]
            row["words"] += len(WORD.findall(_plain(text)))
            row["sentences"] += len(list(sentences(text)))
            lines = text.splitlines()
            for kind, found in hits(name, text).items():
                row[kind] += len(found)
                for at, words in found if listed is not None else ():
                    print(f"{name}:{line + at}: {kind}: {words[:40]}: {lines[at].strip()}")
    return {name: row for name, row in rows.items() if row["words"]}


def figures(row):
    """Hits per 1000 words by kind; openings per 100 sentences."""
    return {
        kind: 100 * row[kind] / max(row["sentences"], 1)
        if kind == "openings"
        else 1000 * row[kind] / row["words"]
        for kind in LIMITS
    }


def main():
    """Print the table; with `--check` exit with 1 if a row is above a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 above a limit")
    parser.add_argument("--list", metavar="PREFIX", help="print each hit below this path first")
    args = parser.parse_args()
    rows = count(ROOT, args.list)
    above = []
    print(f"{'words':>7}", *(f"{kind:>10}" for kind in LIMITS), " folder or page")
    for name, row in sorted(rows.items()):
        values = figures(row)
        over = [kind for kind in LIMITS if values[kind] > LIMITS[kind] and row[kind] > 1]
        above += [name] if over else []
        columns = (f"{values[kind]:10.1f}" for kind in LIMITS)
        print(f"{row['words']:7}", *columns, f" {name}", "*" if over else "")
    print(f"{len(above)} of {len(rows)} above", ", ".join(f"{k} {v:g}" for k, v in LIMITS.items()))
    return 1 if args.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
