"""A server's Prometheus page: tokens written and, where the engine counts them, drafts.

Counters only grow, so what a text took is the difference of two pages. A page follows the answer that it counts with a short delay;
the tokens that it counts tell when it is there, and that nobody else was served meanwhile.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from specdistill.engines.client import Server
from specdistill.errors import ResourceError

POLL_SECONDS = 0.01
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Counters:
    """Sums over a server's engines. accepted_per_position [K] holds one count for each position; empty where none are counted."""

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


def parse(page: str, engine: str) -> Counters:
    """The counters of `engine` on a metrics page, as vLLM 0.32 and SGLang 0.5 name them. Raises ValueError for another kind of page.

    SGLang counts its drafts in each answer instead.
    """
    sums: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(f"{engine}:")
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                positions[int(sample.labels["position"])] += sample.value
            elif name != sample.name:
                sums[name] += sample.value
    return Counters(
        generation_tokens=int(sums["generation_tokens_total"]) if "generation_tokens_total" in sums else None,
        num_drafts=int(sums["spec_decode_num_drafts_total"]),
        num_draft_tokens=int(sums["spec_decode_num_draft_tokens_total"]),
        num_accepted_tokens=int(sums["spec_decode_num_accepted_tokens_total"]),
        accepted_per_position=tuple(int(positions[position]) for position in sorted(positions)),
    )


def gauges(page: str) -> dict[str, float]:
    """What SGLang says of its drafts on a metrics page, over its last interval and not over a suite; empty before it drafted any."""
    names = {"sglang:spec_accept_length": "mean_acceptance_length", "sglang:spec_accept_rate": "acceptance_rate"}
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {names[sample.name]: sample.value for sample in samples if sample.name in names and sample.value > 0}


def read(server: Server, engine: str) -> Counters:
    """The counters as they stand. Raises ResourceError when the server has no such page."""
    hint = "start SGLang with --enable-metrics" if engine == "sglang" else "start vLLM without --disable-log-stats"
    page = server.text("/metrics", hint=hint)
    try:
        return parse(page, engine)
    except ValueError as error:
        raise ResourceError(f"{server.address}/metrics is no Prometheus page ({error})", next_step=hint) from error


def read_after(server: Server, engine: str, before: Counters, num_tokens: int) -> Counters:
    """The counters once they hold a text of `num_tokens`. Raises ResourceError when they do not come to that, or hold more."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        counters = read(server, engine)
        counted = counters.since(before).generation_tokens or 0
        if counted == num_tokens:
            return counters
        if counted > num_tokens:
            got = f"{server.address} served others too: it wrote {counted} tokens, of which {num_tokens} are ours"
            raise ResourceError(got, next_step="measure a server that nobody else uses")
        if time.monotonic() > deadline:
            got = f"{server.address} counted {counted} tokens of an answer of {num_tokens}"
            raise ResourceError(got, next_step="is a proxy in front of several servers? measure one")
        time.sleep(POLL_SECONDS)
