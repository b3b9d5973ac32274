"""Answers of two servers: a difference counts unless the two best tokens there were as likely."""

import numpy as np

from benches.engines.answers import BLOCK, OPEN, TIE, compare, prompts_of

RIGHT = np.array([[1, 2, 3]] * 4)
MARGINS = np.array([[1.9, 1.9, TIE / 2]] * 4)


def test_an_answer_that_parts_at_a_clear_token_is_different():
    got = np.array([[1, 2, 3], [1, 5, 3], [1, 2, 4], [6, 2, 4]])
    assert compare(RIGHT, MARGINS, got) == (2, 1)
    assert compare(RIGHT, MARGINS, RIGHT) == (0, 0)


def test_an_answer_that_is_shorter_is_different():
    got = RIGHT.copy()
    got[0, 1:] = -1
    assert compare(RIGHT, MARGINS, got) == (1, 0)


def test_prompts_are_turns_of_conversations_that_come_back_later():
    prompts = prompts_of(3000, 512)
    assert len(prompts) == 3000
    assert max(map(len, prompts)) < 640 - 6
    seen, apart = {}, []
    for at, prompt in enumerate(prompts):
        begun = [seen[key] for end in range(len(prompt)) if (key := tuple(prompt[:end])) in seen]
        apart += [at - one for one in begun[-1:]]
        seen[tuple(prompt)] = at
    assert len(apart) > 1500
    assert sum(apart) / len(apart) > OPEN / 4
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == 24
