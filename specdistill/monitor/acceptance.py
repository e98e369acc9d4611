"""What a server in service accepts, by its own counters, and whether that is below what the default gate warns of.

Counters tell how many drafts there were, not whose. The tokens of a draft are accepted or rejected together, and so are the drafts of a
request, so an interval over draft tokens or drafts is too narrow. Here time is cut into equal parts, with a reading after each (batch
means). A rate is the ratio of sums over all parts; its error is the jackknife's over the parts in which something was drafted, its interval
Student's t with one degree of freedom less than these. That takes parts that are nearly independent. An engine that counts a request when
it has ended has each in one part. One that counts while requests run has them in several; where they take more than a part's SHARE on
average, there is no interval, as it would be too narrow. What was counted since a server started is one part, without an interval.

llama.cpp's page prints six digits: a long-running server's counters jump, by 10 from a million on. Where such a jump is more than BLUR of a
part's growth, there are no numbers. Accepted tokens by position are whole.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from specdistill.engines import ENGINES, engines_with
from specdistill.engines.client import Client, Counters
from specdistill.engines.server import Server
from specdistill.errors import ResourceError
from specdistill.gate.decide import Estimate, holds
from specdistill.gate.rules import load_gate
from specdistill.report.phrases import duration
from specdistill.statistics.intervals import macro_interval
from specdistill.statistics.metrics import METRICS, MIN_BUCKET_DRAFTS, value

SHARE, BLUR = 0.25, 0.01
POSSIBLE = {
    "mean_acceptance_length": (1.0, np.inf),
    "acceptance_rate": (0.0, 1.0),
}  # metrics, and what each can be


def engine_of(server: Server) -> tuple[str, Client]:
    """Whose page of counters a server has. Raises ResourceError for one without."""
    clients = {name: client for name in engines_with("client") if (client := ENGINES[name].client)}
    hint = "; ".join(client.hint for client in clients.values())
    page = server.samples(hint)
    for engine, client in clients.items():
        if any(name.startswith(f"{client.prefix}:") for name, _, _ in page):
            return engine, client
    raise ResourceError(
        f"{server.address}/metrics has no counters of {', '.join(clients)}", next_step=hint
    )


def acceptance(client: Client, pages: Sequence[Counters], seconds: float) -> dict[str, Any]:
    """Counts from the first page to the last, what follows from them, both named as in a report's row, and the verdict.

    seconds: between the two. Raises as `Client.drafted`, and for more accepted than drafted tokens.
    """
    row = client.drafted(pages[0], pages[-1])
    num_drafts, drafted, accepted = (
        row["num_drafts"],
        row["num_draft_tokens"],
        row["num_accepted_tokens"],
    )
    if not 0 <= accepted <= drafted + _blur(client, pages[-1], client.drafting[1]):
        what = f"the server says that it accepted {accepted} of {drafted} draft tokens"
        raise ResourceError(what, next_step="look at its /metrics")
    idle = list(
        takewhile(lambda page: not page.keys() >= set(client.drafting), pages)
    )  # SGLang, until a request has ended
    grown = (client.drafted(*pair) for pair in pairwise([*idle[:1], *pages[len(idle) :]]))
    parts = [part for part in grown if part["num_drafts"] and part["num_draft_tokens"]]
    if lacking := _no_numbers(client, pages, seconds):
        return {**row, "verdict": "inconclusive", "reason": lacking}
    sums = {
        name: np.array([part[name] for part in parts], float)
        for name in row
        if name != "accepted_per_position"
    }
    row["acceptance_rate_per_position"] = [
        count / num_drafts for count in row["accepted_per_position"] if num_drafts
    ]
    lacking = _no_interval(client, pages, seconds, num_drafts, len(parts))
    for name, (least, most) in POSSIBLE.items():
        if (point := value(METRICS[name], sums)) is not None:
            row[name] = point
        if not lacking and (bounds := macro_interval(METRICS[name], sums, ["all"] * len(parts))):
            row[f"{name}_ci95"] = [min(max(end, least), most) for end in bounds]
    verdict, reason = "inconclusive", lacking
    if bounds := row.get("acceptance_rate_ci95"):
        (rule,) = (rule for rule in load_gate("default") if rule.metric == "acceptance_rate")
        verdict, reason, _ = holds(rule, Estimate(row["acceptance_rate"], tuple(bounds)))
    return {**row, "verdict": verdict, "reason": reason}


def _blur(client: Client, page: Counters, name: str) -> float:
    """How far off a counter's growth may be: a unit of the last digit that is printed, nothing while it prints them all."""
    unit: float = 10 ** math.floor(math.log10(max(1.0, client.rounding * page[name])))
    return unit if unit > 1 else 0


def _no_numbers(client: Client, pages: Sequence[Counters], seconds: float) -> str:
    """Why what was counted says nothing; empty where it does."""
    needed = 0.0  # of `seconds`
    for name in client.drafting[:2]:
        growth, most = (
            pages[-1][name] - pages[0].get(name, 0.0),
            _blur(client, pages[-1], name) * (len(pages) - 1) / BLUR,
        )
        needed = max(needed, most / growth if growth else math.inf if most else 0.0)
    if needed <= 1:
        return ""
    return "too few drafts for counters of six digits; " + _longer(needed * seconds)


def _longer(seconds: float) -> str:
    return f"use seconds={math.ceil(seconds)} or more" if seconds < math.inf else "raise seconds"


def _no_interval(
    client: Client, pages: Sequence[Counters], seconds: float, num_drafts: int, num_parts: int
) -> str:
    """Why there is none; empty where there is one. num_parts: those in which something was drafted."""
    if num_drafts < MIN_BUCKET_DRAFTS:
        return f"{num_drafts} drafts are too few, at least {MIN_BUCKET_DRAFTS}"
    if num_parts < 2:
        return "drafts in one part have no interval"
    names = [f"{client.latency}_{what}" for what in ("sum", "count")]
    total, ended = (pages[-1].get(name, 0.0) - pages[0].get(name, 0.0) for name in names)
    most = SHARE * seconds / (len(pages) - 1)  # seconds of a request
    if not client.latency or total < most * ended:
        return ""
    if not ended:
        return f"no interval: no request ended in this time; {_longer(math.inf)}"
    return f"no interval: requests take {duration(total / ended)} on average; {_longer(total / ended / most * seconds)}"
