"""Suffix decoding (arXiv 2411.04975).

The draft is what most often followed the last tokens, in the request or in outputs of earlier ones.

Let x be the sequence and the draft tokens so far. Of the suffixes of x with `min` to `max` tokens,
the lookup searches for the longest that was followed by a token in the request (prompt and output)
or in a past output. If both have it, the request decides, because it is most like itself. The next
draft token is the one that followed this suffix most often, and of several the latest. Its share of
all tokens that followed estimates its probability. The product of the shares estimates the
probability of the draft. The draft ends before this product falls below `min_token_prob`, or after
`max_spec_factor` tokens for each token that agreed.

Two tries hold the counts, one for the request and one for all past outputs. A round takes at most
`max`^2 steps of a dictionary for each token that it drafts or commits, however long the texts are.
Memory grows by about 450 bytes per token of source code.

Past outputs are those that `set_past_outputs` is given. The proposer adds none by itself.

A trie counts how often each token followed each string of up to `depth` tokens in some texts. Its
leaves are lazy. A node stands for a string that occurred at least twice, and counts what followed
it. A string that occurred once has no node: its place in the trie is the position after it, and
what follows is read in the text itself. So memory is only used for what repeats.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from specdistill.methods.suffix.config import SuffixConfig

END_MARK = -1  # the mark after each text, which nothing follows


@dataclass(slots=True)
class Node:
    """A string of tokens that occurred at least twice.

    Attributes:
        count: how often it occurred.
        followed: how many of its occurrences a token follows.
        best: the token that follows most often; of several, the latest.
        children: the place of each longer string, by the token that follows.
    """

    count: int
    followed: int = 0
    best: int = END_MARK
    children: "dict[int, Place]" = field(default_factory=dict)


Place: TypeAlias = Node | int  # int: the position after a string's only occurrence


class SuffixTrie:
    """A trie of the strings in some texts.

    Adding a token takes one step for each suffix of the text that has a node, and one for the empty
    suffix: at most depth + 1 steps.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tokens: list[int] = []  # the tokens of all texts, with END_MARK after each ended text
        self._root = Node(count=0)
        # The nodes of the last text's suffixes that occurred before, the longest first.
        self._open_nodes: list[Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the end of the last text, and count which strings each token follows.

        A token follows each suffix of the text before it: after `a b` these are `a b`, `b` and the
        empty string. The token is counted for each suffix that has a node and at most `depth`
        tokens. A suffix has a node if it also occurred earlier.
        """
        for token in tokens:
            # Find the nodes of the suffixes of up to `depth` tokens. `_open_nodes` holds a node for
            # each suffix that has one, the longest suffix first. If a suffix has a node, all
            # shorter ones have one, too. So the last node is that of the suffix of one token, the
            # one before it that of two tokens, and so on. The empty suffix has the root as node,
            # which is not in `_open_nodes`.
            self.tokens.append(token)
            suffix_nodes = [*self._open_nodes[-self.depth :], self._root]

            # Count the token for each suffix. A token `c` after `a b` makes the suffixes `a b c`,
            # `b c` and `c`. `_count_follower` returns the node of each, or None if it has none.
            longer_nodes = [self._count_follower(node, token) for node in suffix_nodes]
            self._open_nodes = [node for node in longer_nodes if node]

    def end(self) -> None:
        """End the last text, so that the next token begins another one."""
        self.tokens.append(END_MARK)
        self._open_nodes = []

    def find_next_token(self, tokens: Sequence[int]) -> tuple[int, float] | None:
        """Return the token that most often followed a string of up to `depth` tokens.

        If several tokens are equally frequent, the latest is returned.

        Returns:
            The token, and its share of all tokens that followed the string. None if no token ever
            followed it.
        """
        # Walk down the trie, token by token. The place of a string is its node or, if the string
        # occurred only once, the position after it in the text.
        place: Place = self._root
        for token in tokens:
            longer_place = self._extend_place(place, token)
            if longer_place is None:
                return None
            place = longer_place

        # A string without a node occurred once. The token after it is the only candidate, with the
        # share 1, unless the text ended there.
        if not isinstance(place, Node):
            token = self._read_token(place)
            return None if token == END_MARK else (token, 1.0)
        if not place.followed:
            return None
        return place.best, count_occurrences(place.children[place.best]) / place.followed

    def _extend_place(self, place: Place, token: int) -> Place | None:
        """Return the place in the trie of a string that is extended by one token.

        Args:
            place: the place of the string: a node or, if the string occurred only once, the
                position after it in the text.
            token: the further token.

        Returns:
            The place of the longer string; None if the longer string did not occur.
        """
        if isinstance(place, Node):
            return place.children.get(token)
        return place + 1 if self._read_token(place) == token else None

    def _read_token(self, position: int) -> int:
        """Return the token at a position of `tokens`; END_MARK past the last token."""
        return self.tokens[position] if position < len(self.tokens) else END_MARK

    def _count_follower(self, node: Node, token: int) -> Node | None:
        """Count that a token followed the string of a node.

        Args:
            node: the node of a string.
            token: the token, which is the last one of `self.tokens`.

        Returns:
            The node of the longer string, which is the node's string and then the token. None if
            the longer string occurred for the first time: it then has no node, to save memory.
        """
        # `node.children[token]` is the place of the longer string. If the longer string occurred
        # several times, its place is a Node. If it occurred once, its place is a number: the
        # position in `self.tokens` after that occurrence.
        node.followed += 1
        old_place = node.children.get(token)
        place: Place
        if old_place is None:
            # This is the first occurrence of the longer string. `self.tokens` ends with it.
            place = len(self.tokens)
        elif isinstance(old_place, Node):
            old_place.count += 1
            place = old_place
        else:
            # This is the second occurrence of the longer string, so it gets a node. Its first
            # occurrence ended before the position `old_place`. If a token stands there, it followed
            # the longer string, so the node counts it. The longer string and this follower together
            # are again a string that occurred once. Its place is the position after the follower.
            follower = self._read_token(old_place)
            if follower == END_MARK:
                place = Node(count=2)
            else:
                place = Node(count=2, followed=1, best=follower, children={follower: old_place + 1})
        node.children[token] = place

        # Update the token that followed most often. If two are equal, the latest is kept, hence >=.
        # A node that nothing followed before has no best token yet.
        best_place = node.children.get(node.best)
        if best_place is None or count_occurrences(place) >= count_occurrences(best_place):
            node.best = token
        return place if isinstance(place, Node) else None


def count_occurrences(place: Place) -> int:
    """Return how often the string of a place occurred."""
    return place.count if isinstance(place, Node) else 1


class SuffixLookup:
    """A lookup in two tries: one of the request, and one of past outputs that its copies share."""

    def __init__(self, **keys: object) -> None:
        """Create an empty lookup.

        Args:
            **keys: the keys of `eval.suffix`.
        """
        self.config = SuffixConfig.model_validate(keys)
        self.settings = self.config.model_dump()
        self._request_trie = SuffixTrie(self.config.max)
        self._past_trie = SuffixTrie(self.config.max)
        self._past_outputs: list[Sequence[int]] = []  # the outputs that `_past_trie` holds

    def restart(self) -> None:
        """Forget the request."""
        self._request_trie = SuffixTrie(self.config.max)

    def set_past_outputs(self, outputs: Sequence[Sequence[int]]) -> None:
        """Replace the known outputs of earlier requests (see `UsesPastOutputs`).

        If the new list only adds outputs to the old one, only the added outputs are counted.
        """
        # Keep only the latest outputs, at most `max_cached_requests`. (Fewer outputs would make the
        # start of the slice negative, hence the `max`.)
        kept_outputs = list(outputs[max(0, len(outputs) - self.config.max_cached_requests) :])

        # Texts cannot be removed from the trie. So it is built anew, unless the new list begins
        # with all outputs that the trie holds.
        if kept_outputs[: len(self._past_outputs)] != self._past_outputs:
            self._past_outputs = []
            self._past_trie = SuffixTrie(self.config.max)
        for output in kept_outputs[len(self._past_outputs) :]:
            self._past_trie.extend(output)
            self._past_trie.end()
        self._past_outputs = kept_outputs

    def find(self, text: list[int], k: int) -> list[int]:
        """Return up to k draft tokens for a request.

        Args:
            text: the request. It begins with the text of the call before.
            k: the most draft tokens.
        """
        # Add the request's new tokens to its trie. Find the longest suffix that occurred before,
        # and the first draft token with its share of all tokens that followed. A suffix has at most
        # `max` tokens, so the end of the request is enough.
        self._request_trie.extend(text[len(self._request_trie.tokens) :])
        tokens: list[int] = []
        last_tokens = text[-self.config.max :]
        probability = 1.0
        token, share, length = self._find_next(last_tokens, self.config.max)

        # The longer the suffix, the more tokens are drafted. The draft ends early if its estimated
        # probability, the product of the shares, becomes too small. With one more token, the
        # longest suffix can become longer by one token only.
        max_tokens = min(k, int(self.config.max_spec_factor * length))
        while len(tokens) < max_tokens and length:
            probability *= share
            if probability < self.config.min_token_prob:
                break
            tokens.append(token)
            last_tokens = [*last_tokens, token][-self.config.max :]
            token, share, length = self._find_next(last_tokens, length + 1)
        return tokens

    def _find_next(self, text: list[int], longest: int) -> tuple[int, float, int]:
        """Find the longest suffix of a text that occurred before, and the token to expect next.

        Args:
            text: the request and the draft tokens so far, or the end of them.
            longest: the most tokens of the suffix.

        Returns:
            The token that most often followed the suffix, its share of all tokens that followed,
            and the length of the suffix. All three are 0 if no suffix occurred before.
        """
        # Shorten the suffix until a token followed it. The request is searched before past outputs,
        # because it is most like itself.
        for length in range(min(longest, len(text)), self.config.min - 1, -1):
            for trie in (self._request_trie, self._past_trie):
                next_token = trie.find_next_token(text[-length:])
                if next_token:
                    return *next_token, length
        return 0, 0.0, 0
