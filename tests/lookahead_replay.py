"""Lookahead decoding in plain Python; ``test_lookahead.py`` holds the drafter against it."""


class Window:
    """Lookahead decoding of one row after its authors' code: a dict of lists, lists of levels.

    ``said_after`` gives the target's most probable token after a text.
    """

    def __init__(self, drafter, levels, said_after):
        self.drafter, self.levels, self.said_after = drafter, levels, said_after
        self.pool, self.moved, self.read = {}, 0, 0

    def put(self, key, gram):
        known = self.pool.setdefault(key, [])
        if gram in known:
            known.remove(gram)
        elif len(known) == self.drafter.guesses:
            known.pop(0)
        known.append(gram)

    def read_text(self, text):
        size = self.drafter.ngram
        while self.drafter.reads_text and self.read + size <= len(text):
            key, *gram = text[self.read : self.read + size]
            self.put(key, tuple(gram))
            self.read += 1

    def guesses(self, text):
        self.read_text(text)
        return self.pool.get(text[-1], [])

    def step(self, text):
        """Moves the window over the text before a round."""
        top, others = [text[-1], *self.levels[0][1:]], self.levels[1:]
        new = []
        for column in range(self.drafter.window):
            above = [level[column] for level in others]
            new.append(self.said_after((*text[:-1], *top[: column + 1], *above)))
        moved = [*others, new]
        if self.moved >= self.drafter.ngram - 2:
            for column, key in enumerate(top):
                self.put(key, tuple(level[column] for level in moved))
        self.levels, self.moved = moved, self.moved + 1
