"""`python -m examples.agents URL`: agents in turn, other users in between, tokens found per turn.

With `--plain` the agents send neither names of sessions nor markers.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any
from urllib.request import urlopen

from examples.agents.loop import Agent, Turn, post

_TIMEOUT_S = 60


def main() -> None:
    """Run the agents and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m examples.agents", description=__doc__)
    parser.add_argument("url", metavar="URL", help="a vLLM server, http://HOST:PORT")
    parser.add_argument("--agents", type=int, default=2, metavar="N")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each agent")
    parser.add_argument("--others", type=int, default=6, metavar="N", help="users while tools run")
    parser.add_argument("--words", type=int, default=120, metavar="N", help="of another user")
    parser.add_argument("--plain", action="store_true", help="without sessions and markers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    url = args.url.rstrip("/")
    with urlopen(f"{url}/v1/models", timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the user's
        model = json.loads(answer.read())["data"][0]["id"]
    agents = [Agent(url, model, f"agent-{at}", plain=args.plain) for at in range(args.agents)]
    drawn, turns = random.Random(0), list[Turn]()  # noqa: S311 - prompts
    for at in range(args.turns):
        for agent in agents:
            turns.append(agent.turn())
            if not args.json:
                print(f"{agent.name} turn {at}: {turns[-1].found} of {turns[-1].prompt} found")
            for _ in range(args.others):
                other(url, model, drawn, args.words)
    found, prompt = (sum(getattr(turn, name) for turn in turns) for name in ("found", "prompt"))
    if args.json:
        rows = [[turn.prompt, turn.found, turn.answer] for turn in turns]
        print(json.dumps({"found": found, "prompt": prompt, "turns": rows}))
    else:
        print(f"{found} of {prompt} prompt tokens found: {found / prompt:.0%}")


def other(url: str, model: str, drawn: random.Random, words: int) -> dict[str, Any]:
    """Send a prompt that no other user has."""
    text = " ".join(str(drawn.randrange(10**4)) for _ in range(words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return post(f"{url}/v1/chat/completions", body)


if __name__ == "__main__":
    main()
