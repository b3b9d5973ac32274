"""The blocks of the naive engine: which are free, and how a request's tables grow and shrink.

Blocks of all groups have one numbering, as vLLM's do; 0 stands for one that was given back. A group
of kind `w` or `n` keeps what the next token's window needs. One of kind `s` has its running state
in the last block, and keeps the state of a border for one more step. A group whose blocks are pages
has several of them per block of the manager.
"""

SIZE = 4  # tokens of a block
WINDOWS = {"w": 6, "n": 2}  # tokens, by kind of group


class Blocks:
    """The blocks of vLLM's memory.

    Args:
        count: blocks, the null block included.
        kinds: the groups after the first.
        draw: the order in which free blocks are given.
        pages: blocks of each group per `SIZE` tokens; None for one.
    """

    def __init__(self, count, kinds, draw, pages=None):
        self.count, self.kinds, self._draw = count, kinds, draw
        self.free = list(range(1, count))
        self.pages = pages or (1,) * (1 + len(kinds))
        self.sizes = [SIZE // each for each in self.pages]

    def tables(self, request):
        """A copy of a request's tables, by group."""
        return [list(request.table), *map(list, request.others)]

    def fits(self, request, count, had):
        """Whether there are blocks for a request's next tokens, states as often as others."""
        tables = [request.table, *(request.others or [[]] * len(self.kinds))]
        lacking = [
            max(0, -(-(had + count) // size) - len(table))
            for table, size in zip(tables, self.sizes, strict=True)
        ]
        return sum(lacking) <= len(self.free)

    def grow(self, request, tokens):
        """Give a request blocks up to a number of tokens; the new ones of each group."""
        given = []
        request.others = request.others or [[] for _ in self.kinds]
        tables = [request.table, *request.others]
        for kind, table, size in zip("f" + self.kinds, tables, self.sizes, strict=True):
            blocks = -(-tokens // size)
            if kind == "s":
                table.extend([0] * (blocks - 1 - len(table)))
            new = self._take(max(0, blocks - len(table)))
            table.extend(new)
            given.append(new)
        return given

    def give_for_load(self, request, tokens):
        """Give a request the blocks that a load of its first tokens fills."""
        request.table += self._take(tokens // self.sizes[0])
        for kind, size in zip(self.kinds, self.sizes[1:], strict=True):
            first = tokens // size - 1 if kind == "s" else passed(kind, tokens) // size
            request.others.append([0] * first + self._take(tokens // size - first))

    def take_passed(self, request):
        """Take the blocks that no further token of a request attends to."""
        done = request.processed
        for kind, table, size in zip(self.kinds, request.others, self.sizes[1:], strict=True):
            kept = (done - 1) // size if kind == "s" else passed(kind, done) // size
            for at in range(min(max(0, kept), len(table))):
                self.free += [table[at]] * (table[at] > 0)
                table[at] = 0

    def release(self, request):
        """Take all blocks of a request."""
        self.free += request.table + [slot for table in request.others for slot in table if slot]
        request.table, request.others, request.computed, request.processed = [], [], 0, 0
        request.loaded = None

    def _take(self, count):
        self._draw.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def passed(kind, tokens):
    """The tokens that the next one after `tokens` does not attend to."""
    return max(0, tokens - WINDOWS[kind] + 1)
