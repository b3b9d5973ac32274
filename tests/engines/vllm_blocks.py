"""The blocks of the naive engine: which are free, and how a request's tables grow and shrink.

Blocks of all groups have one numbering, as vLLM's do; 0 stands for one that was given back. A group
of kind `w` keeps what the next token's window needs. One of kind `s` has its running state in the
last block, and keeps the state of a border for one more step.
"""

SIZE = 4  # tokens of a block
WINDOW = 6  # tokens


class Blocks:
    """The blocks of vLLM's memory.

    Args:
        count: blocks, the null block included.
        kinds: the groups after the first.
        draw: the order in which free blocks are given.
    """

    def __init__(self, count, kinds, draw):
        self.count, self.kinds, self._draw = count, kinds, draw
        self.free = list(range(1, count))

    def tables(self, request):
        """A copy of a request's tables, by group."""
        return [list(request.table), *map(list, request.others)]

    def fits(self, request, count, had):
        """Whether there are blocks for a request's next tokens, at most one per group and block."""
        lacking = -(-(had + count) // SIZE) - len(request.table)
        return max(0, lacking) * (1 + len(self.kinds)) <= len(self.free)

    def grow(self, request, tokens):
        """Give a request blocks up to a number of tokens; the new ones of each group."""
        blocks, given = -(-tokens // SIZE), []
        request.others = request.others or [[] for _ in self.kinds]
        for kind, table in zip("f" + self.kinds, [request.table, *request.others], strict=True):
            if kind == "s":
                table.extend([0] * (blocks - 1 - len(table)))
            new = self._take(max(0, blocks - len(table)))
            table.extend(new)
            given.append(new)
        return given

    def give_for_load(self, request, tokens):
        """Give a request the blocks that a load of its first tokens fills."""
        request.table += self._take(tokens // SIZE)
        for kind in self.kinds:
            first = max(0, tokens - WINDOW + 1) // SIZE if kind == "w" else tokens // SIZE - 1
            request.others.append([0] * first + self._take(tokens // SIZE - first))

    def take_passed(self, request):
        """Take the blocks that no further token of a request attends to."""
        done = request.processed
        for kind, table in zip(self.kinds, request.others, strict=True):
            kept = (done - WINDOW + 1) // SIZE if kind == "w" else (done - 1) // SIZE
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
