"""Helpers of trace readers: small files of each format, and the rows that they become."""

import itertools
import json

SECOND = 10**9

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,40,7
2023-11-16 18:15:46.6805907,16,1
2023-11-16 18:15:48.0000000,33,0
"""

HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"

BURST = f"""{HEAD},Log Type
5,a,1.0,ChatGPT,40,10,50,Conversation log
6,b,1.0,ChatGPT,16,0,16,Conversation log
7.5,a,1.0,GPT-4,70,5,75,Conversation log
8,a,1.0,GPT-4,20,5,25,Conversation log
9,,1.0,GPT-4,20,5,25,API log
"""


def write(folder, text, name="trace"):
    path = folder / name
    path.write_text(text)
    return path


def rows(path, *lines):
    return write(path, "".join(json.dumps(line) + "\n" for line in lines))


def plain(requests):
    return [(at, tokens.tolist(), *rest) for at, tokens, *rest in requests]


def chat(name, *texts):
    """A conversation in which `human` and `gpt` take turns."""
    turns = [
        {"from": who, "value": text} for who, text in zip(itertools.cycle(["human", "gpt"]), texts)
    ]
    return {"id": name, "conversations": turns}


CHATS = [
    chat("one", "a b", "c d e", "f"),
    chat("two", "a b", "c d e", "f g", "h"),
    {"id": "three", "conversations": [{"from": "gpt", "value": "hello"}]},
    {
        "conversations": [
            {"from": "system", "value": "s s"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
        ]
    },
]


def letters(text):
    return [ord(each[0]) for each in text.split()]
