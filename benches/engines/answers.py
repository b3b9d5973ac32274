"""Prompts of many conversations, and the comparison of two servers' greedy answers to them."""

from __future__ import annotations

import random

import numpy as np

BLOCK = 32
TIE = 1e-3  # difference of log-probabilities
TURNS = 4
OPEN = 600  # conversations, more than the GPU has blocks for


def prompts_of(count, vocabulary, seed=0):
    """Prompts of conversations of four turns, many of them at a time, over 24 beginnings."""
    draw = random.Random(seed)

    def words(number):
        return [draw.randrange(1, vocabulary) for _ in range(number)]

    heads = [words(draw.randrange(BLOCK, 5 * BLOCK)) for _ in range(24)]
    prompts, open_ones = [], []
    while len(prompts) < count:
        if len(open_ones) < OPEN:
            open_ones.append((draw.choice(heads), 0))
        path, turns = open_ones.pop(draw.randrange(len(open_ones)))
        path = [*path, *words(draw.randrange(8, 2 * BLOCK))]
        prompts.append(path)
        if turns + 1 < TURNS:
            open_ones.append((path, turns + 1))
    return prompts


def compare(right, margins, got):
    """Return the number of answers that differ, and of those whose first difference is a tie.

    Args:
        right: tokens of the first server's answers, `(n, tokens)`; -1 after a shorter one.
        margins: how much more likely each of them was than the second best one.
        got: tokens of the other server's answers.
    """
    away = right != got
    rows = np.flatnonzero(away.any(axis=1))
    ties = int((margins[rows, away[rows].argmax(axis=1)] < TIE).sum())
    return len(rows) - ties, ties
