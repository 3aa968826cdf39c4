"""Exports on disk for the next process, each under a key of everything that its trace could depend on."""


class Uncovered(Exception):  # noqa: N818 - an answer, not an error
    """Something that a fingerprint cannot describe."""

    # `thing` says what it is, in words: "`scale`, which Net.forward uses: an object of class foreign.Scale".

    def __init__(self, thing: str) -> None:
        self.thing = thing
        super().__init__(thing)
