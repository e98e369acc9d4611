"""How often which token followed each string of up to `depth` tokens in some texts: a suffix trie with lazy leaves.

A node stands for a string that occurred twice or more, and counts what followed it. A string that occurred once has no node: its place in
the trie is the position after it, and what follows is read in the text itself. So memory goes to what repeats.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

END = -1  # stands behind each text: nothing follows it


@dataclass(slots=True)
class Node:
    """count: occurrences. followed: those that a token follows. best: the most frequent of these tokens, of several the latest."""

    count: int
    followed: int = 0
    best: int = END
    children: "dict[int, Place]" = field(default_factory=dict)


Place: TypeAlias = Node | int  # int: the position after a string's only occurrence


class SuffixTrie:
    """A token costs as many steps as the longest string that ends with it and occurred before has tokens, at most depth + 1."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tokens: list[int] = []  # of all texts, END after each that has ended
        self._root = Node(0)
        # Of the last text's suffixes, as far as they occurred before; the longest first.
        self._open: list[Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Continue the last text."""
        for token in tokens:
            self.tokens.append(token)
            longer = [self._count(node, token) for node in [*self._open[-self.depth :], self._root]]
            self._open = [node for node in longer if node]

    def end(self) -> None:
        """Let the next token begin another text."""
        self.tokens.append(END)
        self._open = []

    def next_token(self, tokens: Sequence[int]) -> tuple[int, float] | None:
        """The token that most often followed a string of up to `depth` tokens, of several the latest, and its share of all that did."""
        place: Place = self._root
        for token in tokens:
            if (longer := self._longer(place, token)) is None:
                return None
            place = longer
        if not isinstance(place, Node):
            return (self._at(place), 1.0) if self._at(place) != END else None
        return (
            (place.best, occurrences(place.children[place.best]) / place.followed)
            if place.followed
            else None
        )

    def _longer(self, place: Place, token: int) -> Place | None:
        """The place of the string with one more token, None where it did not occur."""
        if isinstance(place, Node):
            return place.children.get(token)
        return place + 1 if self._at(place) == token else None

    def _at(self, position: int) -> int:
        return self.tokens[position] if position < len(self.tokens) else END

    def _count(self, node: Node, token: int) -> Node | None:
        """Count a token, the last one, after a node's string; the longer string's node, if that has occurred before."""
        node.followed += 1
        child = node.children.get(token)
        if child is None:
            child = len(self.tokens)
        elif isinstance(child, Node):
            child.count += 1
        elif (after := self._at(child)) == END:  # what followed the only occurrence so far
            child = Node(2)
        else:
            child = Node(2, 1, after, {after: child + 1})
        node.children[token] = child
        if occurrences(child) >= occurrences(node.children.get(node.best, 0)):
            node.best = token
        return child if isinstance(child, Node) else None


def occurrences(place: Place) -> int:
    return place.count if isinstance(place, Node) else 1
