"""Passages: six pieces of text, cut at the worst places, and a question about them.

An archive's name ends a passage, and the next passage begins with its facts: a passage computed
alone lacks the archive of its first fact.
Invariant: the text is fixed, for comparable runs. Cost: none.
"""

__all__ = ["FAMILIAR", "PASSAGES", "QUESTION", "SYSTEM"]

SYSTEM = "Notes of a courier who visits the archives of the northern coast.\n\n"

PASSAGES = (
    (
        "The round begins at the harbour, where the boat leaves at six in the morning. Take "
        "bread and a thermos of tea, for there is nothing to buy on board. The skipper is "
        "called Halvard and does not talk before noon. All archives are closed on Mondays, and "
        "at all of them one is let in at the back door, by a code that must not be written on "
        "the envelopes. If a lamp is lit over the door, wait until it goes out. The access code "
        "of Bergen"
    ),
    (
        " is 4821. The archive there has a long cellar with a vault of brick, in which the "
        "parish registers lie. It smells of apples, because the guard keeps his harvest between "
        "the shelves. Leave the red folder on his desk, and bring back the grey one. He will "
        "offer you coffee, and it is wise to say yes. From there the road climbs to the "
        "plateau, and in winter the bus takes two hours more. The guard of Tromso"
    ),
    (
        " is called Ragnhild. Mind the step behind the door, on which two couriers have fallen "
        "already. The maps of the coast are kept in drawers that stick when the weather is wet. "
        "Nobody has counted them, but they say that there are nine thousand. The lady at the "
        "desk collects stamps, so keep those of foreign letters for her. In the yard stands a "
        "statue of a whaler who has lost his nose. The house of Alesund"
    ),
    (
        " is the youngest one. It burned down in 1904 and was built again in stone, with dragons "
        "over the windows. Its papers are all younger than the fire, and most of them are about "
        "fish. You may sleep in the room under the roof if the ferry does not run. In the "
        "morning one hears the gulls walking on the tiles. Do not feed them, or they will "
        "follow you to the pier and farther. The room of Bodo"
    ),
    (
        " has the number 2087. It is the smallest of all, a single room above the bank, and the "
        "light is switched on by a string. The letters of the polar explorers are here, in blue "
        "boxes that are tied with tape. One of them has never been opened. Put the parcels on "
        "the left side, those with a seal on the right, and write the hour into the book. The "
        "dog is friendly. The garden of Molde"
    ),
    (
        " is famous. Roses grow in front of the windows until late in October. The archivist "
        "plays the trumpet and practises after work, so come early if you are tired. Here the "
        "round ends, and the night train takes you home. Hand in the keys, the list and the "
        "empty bag, and note what you have spent. The next round begins a week later, whatever "
        "the weather may be."
    ),
)

FAMILIAR = (3, 0, 5, 1, 4, 2)
"""A different order of the passages in earlier requests."""

QUESTION = "\n\nQuestion: What is the access code of Bergen?\nAnswer: The access code of Bergen is"
