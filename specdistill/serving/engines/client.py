"""Completions from an engine's server, with the server's counts of their draft tokens.

Each answer counts its own drafts, whatever else is served meanwhile. But other requests would
disturb the times. So the number of generated tokens on the server's Prometheus page is compared
with that in the answers: without other requests, the two are equal. The page is updated shortly
after an answer is sent.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.common.errors import ResourceError, join_lines
from specdistill.serving.engines.server import (
    POLL_SECONDS,
    SEE_LOG_HINT,
    Count,
    JsonAnswer,
    Positive,
    Response,
    Server,
)

# How long the page of counters may lag behind an answer. With a larger value, a measurement would
# wait longer for a server that never counts the tokens.
MAX_DELAY_SECONDS = 10.0
# Counters that vLLM and llama.cpp share: drafts, draft tokens and accepted tokens, and the accepted
# tokens of each position.
SPEC_DECODE_COUNTERS = tuple(
    f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")
)
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
# Name -> value on a page of counters. A counter is the sum over the server's ranks, and a gauge the
# largest value of a rank. If a line has a position, the position is a part of the name.
Counters = Mapping[str, float]


@dataclass(frozen=True)
class ServerIdentity:
    """A server's description of itself.

    Attributes:
        version: the version of the engine.
        models: the names and the folder of the served model. A request names the first one.
        max_length: the most tokens of a sequence; None if the server does not say.
        num_speculative_tokens: K, draft tokens per round; None for a server that does not draft, or
            does not say K.
        hides_k: whether the server drafts and does not say K.
    """

    version: str
    models: tuple[str, ...]
    max_length: int | None
    num_speculative_tokens: int | None
    hides_k: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt to complete.

    Attributes:
        model: the name of the model.
        prompt_ids: the token ids of the prompt.
        max_new_tokens: the most tokens of the completion.
        temperature: the sampling temperature; 0 is greedy.
        top_p: nucleus sampling; 1 keeps every token.
        top_k: top-k sampling; 0 keeps every token.
        seed: the seed of the sampling, for engines whose requests have one.
    """

    model: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class ServerCounts:
    """A server's counts for one completion, summed over its rounds.

    Attributes:
        token_ids: the tokens of the completion; empty if the server does not return them.
        num_drafts: the number of proposals.
        num_draft_tokens: the number of draft tokens in all proposals.
        num_accepted_tokens: the number of accepted draft tokens.
        accepted_per_position: [K], the number of drafts whose position k was accepted.
    """

    token_ids: tuple[int, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True)
class EngineCompletion:
    """A completion from a server.

    Attributes:
        text: the text of the completion.
        num_tokens: the number of tokens of the completion.
        seconds: the time from the request to the whole answer.
        counts: the drafts and draft tokens that the server counted.
    """

    text: str
    num_tokens: int
    seconds: float
    counts: ServerCounts


class CompletionAnswer(JsonAnswer):
    """An answer to a completion request. A subclass for each engine says where each field is.

    Attributes:
        text: the text of the completion.
        num_tokens: the number of tokens of the completion.
        token_ids: the tokens of the completion.
        num_drafts: the number of proposals.
        num_draft_tokens: the number of draft tokens in all proposals.
        num_accepted_tokens: the number of accepted draft tokens.
        histogram: how many drafts had 0, 1, … K accepted tokens.
    """

    text: str
    num_tokens: Positive
    token_ids: list[Count] | None
    num_drafts: Count | None
    num_draft_tokens: Count | None
    num_accepted_tokens: Count | None
    histogram: list[Count] | None

    def counts(self, k: int) -> ServerCounts | None:
        """Return how many tokens were drafted and accepted, as this answer of a server says.

        Args:
            k: K, the most draft tokens per round; 0 if the server has no draft.

        Returns:
            The counts. None if the answer lacks one of them, or if they contradict each other.
        """
        # `histogram` says how many drafts had 0, 1, … K accepted tokens.
        token_ids = tuple(self.token_ids or ())
        histogram = self.histogram or []
        num_drafts = self.num_drafts
        num_drafted = self.num_draft_tokens
        num_accepted = self.num_accepted_tokens

        # Without a draft there is nothing to count. In a short completion, it can happen that
        # nothing is drafted.
        if not k or num_drafts == 0:
            return ServerCounts(
                token_ids,
                num_drafts=0,
                num_draft_tokens=0,
                num_accepted_tokens=0,
                accepted_per_position=(),
            )
        if num_drafts is None or num_drafted is None or num_accepted is None:
            return None
        if not 0 < len(histogram) <= k + 1:
            return None

        # Tokens are accepted from the front. So the token at position 1, 2, … was accepted in all
        # drafts with at least as many accepted tokens.
        per_position = tuple(sum(histogram[position:]) for position in range(1, len(histogram)))

        # Check the counts: a position cannot be accepted more often than there are drafts, and each
        # draft belongs to a round, which emits at least one token.
        is_possible = max(per_position, default=0) <= num_drafts <= self.num_tokens
        if not is_possible or num_accepted > num_drafted:
            return None
        return ServerCounts(token_ids, num_drafts, num_drafted, num_accepted, per_position)


@dataclass(frozen=True)
class Client:
    """The client of an engine's server: how to request completions, and where to read the counts.

    Methods raise ResourceError if the server does not answer as it should.

    Attributes:
        prefix: the prefix of all names on the server's page of counters, `/metrics`.
        hint: how to start a server that has this page.
        describe: (server, counters) -> the server's description of itself.
        path: the path to which a request is posted.
        body: request -> the JSON of the request.
        parse: (response, K) -> the parsed answer.
        counts_hint: how to start a server that counts drafts in its answers.
        name_option: the server's option that gives its model another name.
        generated: the name of the counter of generated tokens.
        rounding: the largest rounding error of a counter on the page, as a share of its value.
        drafting: the names of the counters from which drafts are counted.
        latency: the name of the histogram of the seconds of a request, for engines that count
            drafts while a request runs. Empty for engines that count them when it has ended.
        drafted_by: (the growth of each counter in `drafting`, or the value if it is a gauge) -> the
            number of drafts, draft tokens and accepted tokens.
    """

    prefix: str
    hint: str
    describe: Callable[[Server, Counters], ServerIdentity]
    path: str
    body: Callable[[CompletionRequest], dict[str, object]]
    parse: Callable[[Response, int], CompletionAnswer]
    counts_hint: str
    name_option: str = "--served-model-name"
    generated: str = "generation_tokens_total"
    rounding: float = 0.0
    drafting: tuple[str, ...] = SPEC_DECODE_COUNTERS
    latency: str = ""
    drafted_by: Callable[..., tuple[float, float, float]] = lambda drafts, drafted, accepted: (
        drafts,
        drafted,
        accepted,
    )

    def identify(self, server: Server) -> ServerIdentity:
        """Ask a server for its version, model, context and K (draft tokens per round)."""
        return self.describe(server, self.read(server))

    def complete(self, server: Server, request: CompletionRequest, k: int) -> EngineCompletion:
        """Request the completion of a prompt. Several threads may call this at once.

        Args:
            server: the server.
            request: the prompt and how to sample.
            k: K, draft tokens per round; 0 without a draft.

        Raises:
            ResourceError: if the server does not answer, if the answer lacks the counts of draft
                tokens, or if the counts contradict each other.
        """
        response = server.ask(self.path, self.body(request), hint=SEE_LOG_HINT)
        answer = self.parse(response, k)
        counts = answer.counts(k)
        if counts is None:
            raise ResourceError(
                (
                    f"{response.url} sent no counts of accepted tokens, or impossible ones"
                    f" ({join_lines(repr(answer))[-400:]})"
                ),
                next_step=self.counts_hint,
            )
        return EngineCompletion(answer.text, answer.num_tokens, response.seconds, counts)

    def read_counters(self, server: Server) -> Counters:
        """Read the server's Prometheus page: name of a counter -> value.

        The engine's prefix (e.g. `vllm:`) is left out of the names. For counters by position of a
        draft token, the position is appended to the name.
        """
        counters: dict[str, float] = defaultdict(float)
        for name, labels, value in server.read_samples(self.hint):
            if name.startswith(f"{self.prefix}:"):
                # Each rank (GPU) of a server may have a line of its own. Counters are added up over
                # the ranks. Gauges, which show a current value, are not: the largest is taken.
                key = name.removeprefix(f"{self.prefix}:") + labels.get("position", "")
                is_sum = name.endswith(("_total", "_sum", "_count"))
                counters[key] = counters[key] + value if is_sum else max(counters[key], value)
        return dict(counters)

    def read(self, server: Server) -> Counters:
        """Read the server's counters, and check that they have a count of generated tokens.

        Without this count, the page belongs to another engine, or its statistics are switched off.
        """
        # A missing counter counts as NaN, for which the comparison is false.
        counters = self.read_counters(server)
        if not 0 <= counters.get(self.generated, math.nan) < math.inf:
            raise ResourceError(
                f"{server.address}/metrics has no {self.prefix}:{self.generated}",
                next_step=f"{self.hint}, or pass the name of the engine that runs there",
            )
        return counters

    def compute_drafted(self, before: Counters, after: Counters) -> dict[str, Any]:
        """Compute the number of drafts and draft tokens between two readings of the counters.

        Args:
            before: the first reading; empty to count everything since the server started.
            after: the second reading.

        Returns:
            num_drafts, num_draft_tokens, num_accepted_tokens and accepted_per_position [K]. The
            last one is empty for an engine that does not count positions.

        Raises:
            ResourceError: if a counter is missing or has fallen.
        """
        # Find the counters of accepted tokens by position, which some engines have. Their names end
        # in the position. Sorting by length first puts position 10 after position 9.
        position_counters = sorted(
            {name for name in (*before, *after) if PER_POSITION in name},
            key=lambda name: (len(name), name),
        )
        # `drafting` names the counters from which all other numbers are computed.
        missing = [name for name in self.drafting if name not in after]
        if missing:
            raise ResourceError(
                f"the server's /metrics has no {self.prefix}:{missing[0]}",
                next_step=(
                    "start the server with a draft; SGLang shows this counter only after a request"
                    " has ended"
                ),
            )

        # Compute by how much each counter grew between the readings. Names without `_total` are
        # those of gauges. A gauge is not a sum that grows, but a current value. For example,
        # SGLang's `spec_num_draft_tokens` is the number of tokens of one verification. So the value
        # of a gauge is taken, not its growth. A reading that lacks the gauge has 0 here, so the
        # larger of the two values is taken.
        pairs = {
            name: (before.get(name, 0.0), after.get(name, 0.0))
            for name in (*self.drafting, *position_counters)
        }
        growths = {
            name: new - old if "_total" in name else max(old, new)
            for name, (old, new) in pairs.items()
        }

        # A counter that falls or is no number cannot be used: the server has probably restarted.
        for name, growth in growths.items():
            if not 0 <= growth < math.inf:
                raise ResourceError(
                    "the counter {}:{} went from {:g} to {:g}".format(
                        self.prefix, name, *pairs[name]
                    ),
                    next_step=(
                        "check whether the server restarted, or whether several servers share its"
                        " address; then start again"
                    ),
                )

        # Convert the growth to numbers of drafts and tokens, by the formula of the engine.
        drafts, drafted, accepted = self.drafted_by(*(growths[name] for name in self.drafting))
        accepted_per_position = [int(growths[name]) for name in position_counters]
        return {
            "num_drafts": int(drafts),
            "num_draft_tokens": int(drafted),
            "num_accepted_tokens": (
                sum(accepted_per_position) if accepted_per_position else int(accepted)
            ),
            "accepted_per_position": accepted_per_position,
        }

    def check_alone(self, server: Server, before: Counters, num_tokens: int) -> None:
        """Raise ResourceError if the server also generated tokens for other clients.

        Other requests would make the measured times worthless.

        Args:
            server: the server.
            before: the reading of the server's counters before the requests of this process.
            num_tokens: the number of tokens that this process has received since that reading.
        """
        # The counters lag behind the answers. So read them again and again, until they have caught
        # up with the answers or the time is over.
        deadline = time.monotonic() + MAX_DELAY_SECONDS
        while True:
            after = self.read(server)[self.generated]
            num_counted = int(after - before[self.generated])
            # A page with rounded counters may be off by this many tokens.
            rounding_error = int(self.rounding * after)
            if abs(num_counted - num_tokens) <= rounding_error:
                return
            if num_counted > num_tokens:
                raise ResourceError(
                    (
                        f"{server.address} also served other requests: it generated {num_counted}"
                        f" tokens, {num_tokens} of them for this measurement"
                    ),
                    next_step="measure a server that nobody else uses",
                )
            if time.monotonic() > deadline:
                raise ResourceError(
                    (
                        f"{server.address} counted {num_counted} tokens, but its answers have"
                        f" {num_tokens}"
                    ),
                    next_step=(
                        "if a proxy divides requests among several servers, measure one of them"
                    ),
                )
            time.sleep(POLL_SECONDS)
