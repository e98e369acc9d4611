"""Counters of a server: its Prometheus page, whose numbers only grow, so that what a completion took is the difference of two pages.

A page follows the answer that it counts with a short delay; the tokens that it counts tell when it is there, and that nobody else was
served meanwhile.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from specdistill.engines.client import Server
from specdistill.errors import ResourceError

POLL_SECONDS = 0.01
MAX_DELAY_SECONDS = 10.0


@dataclass(frozen=True)
class ServerCounts:
    """What a server counted for one completion: it shows no rounds. `token_ids`: of the completion, empty where it does not say.

    accepted_per_position [K]: drafts whose position k was accepted.
    """

    token_ids: tuple[int, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True)
class Counters:
    """Sums over a server's ranks. accepted_per_position [K] holds one count for each position; empty where none are counted."""

    generation_tokens: int | None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def since(self, before: "Counters") -> "Counters":
        positions = zip(self.accepted_per_position, before.accepted_per_position, strict=True)
        return Counters(
            (self.generation_tokens or 0) - (before.generation_tokens or 0),
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(count - earlier for count, earlier in positions),
        )


@dataclass(frozen=True)
class MetricsPage:
    """`/metrics` of an engine. prefix: of the names on it; hint: how to start a server that has it."""

    prefix: str
    hint: str

    def parse(self, page: str) -> Counters:
        """The counters on a page, as vLLM 0.32 and SGLang 0.5 name them. Raises ValueError for another kind of page."""
        sums: dict[str, float] = defaultdict(float)
        positions: dict[int, float] = defaultdict(float)
        for full_name, labels, value in samples(page):
            name = full_name.removeprefix(f"{self.prefix}:")
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                positions[int(labels["position"])] += value
            elif name != full_name:
                sums[name] += value
        return Counters(
            generation_tokens=int(sums["generation_tokens_total"]) if "generation_tokens_total" in sums else None,
            num_drafts=int(sums["spec_decode_num_drafts_total"]),
            num_draft_tokens=int(sums["spec_decode_num_draft_tokens_total"]),
            num_accepted_tokens=int(sums["spec_decode_num_accepted_tokens_total"]),
            accepted_per_position=tuple(int(positions[position]) for position in sorted(positions)),
        )

    def read(self, server: Server) -> Counters:
        """The counters as they stand. Raises ResourceError when the server has no such page."""
        page = server.text("/metrics", hint=self.hint)
        try:
            return self.parse(page)
        except ValueError as error:
            raise ResourceError(f"{server.address}/metrics is no Prometheus page ({error})", next_step=self.hint) from error

    def read_first(self, server: Server) -> Counters:
        """The counters of a server that was not asked before. Raises ResourceError when another engine serves."""
        counters = self.read(server)
        if counters.generation_tokens is None:
            missing = f"{server.address}/metrics has no {self.prefix}:generation_tokens_total"
            raise ResourceError(missing, next_step=f"{self.hint}, or name the engine that serves")
        return counters

    def read_after(self, server: Server, before: Counters, num_tokens: int) -> Counters:
        """What was counted since `before`, once it holds a completion of `num_tokens`. Raises ResourceError when it does not come to
        that, or holds more.
        """
        deadline = time.monotonic() + MAX_DELAY_SECONDS
        while True:
            counters = self.read(server).since(before)
            counted = counters.generation_tokens or 0
            if counted == num_tokens:
                return counters
            if counted > num_tokens:
                got = f"{server.address} served others too: it generated {counted} tokens, of which {num_tokens} are ours"
                raise ResourceError(got, next_step="measure a server that nobody else uses")
            if time.monotonic() > deadline:
                got = f"{server.address} counted {counted} tokens of an answer of {num_tokens}"
                raise ResourceError(got, next_step="is a proxy in front of several servers? measure one")
            time.sleep(POLL_SECONDS)


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line of a Prometheus page. Raises ValueError for another kind of page."""
    from prometheus_client.parser import text_string_to_metric_families  # slow to import

    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
