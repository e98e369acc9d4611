"""Measure what a server in service accepts, by its counters, and compare it with the default gate.

The verdict says whether acceptance is below what the default gate warns of.

Counters tell how many drafts there were, but not to which requests they belong. Acceptance is
similar within a draft and within a request, so an interval over draft tokens or drafts would be too
narrow. Here time is cut into equal parts, with a reading after each part (batch means). A rate is
the ratio of sums over all parts. Its error is the jackknife's over the parts in which something was
drafted. Its interval is Student's t, with one degree of freedom less than the number of these
parts.

This assumes parts that are nearly independent:

- An engine that counts a request when it has ended has each request in one part.
- An engine that counts while requests run has a request in several parts. Where requests take more
  than MAX_BLUR_SHARE of a part on average, there is no interval, as it would be too narrow.
- The time since a server started is one part, so there is no interval for it.

llama.cpp's page prints six digits, so the counters of a long-running server grow in jumps: by 10
from a million on. If such a jump is more than the share MAX_BLUR of a counter's growth in a part,
no metrics are computed. Accepted tokens by position are whole numbers.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from specdistill.common.errors import ResourceError
from specdistill.evaluation.gate.decide import Estimate, compare_with_threshold
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.phrases import format_duration
from specdistill.evaluation.statistics.intervals import compute_macro_interval
from specdistill.evaluation.statistics.metrics import METRICS, MIN_BUCKET_ROUNDS, compute_value
from specdistill.serving.engines import ENGINES, list_engines_with
from specdistill.serving.engines.client import Client, Counters
from specdistill.serving.engines.server import Server

# The longest mean duration of a request, as a share of the duration of a part. Longer requests
# extend over several parts, which are then not independent, and the interval is too narrow. A
# smaller share would make users wait longer for an interval.
MAX_BLUR_SHARE = 0.25
# The largest jump of a counter, as a share of the counter's growth in a part. So rounding changes
# the metrics by at most 1 %.
MAX_BLUR = 0.01
# Metric -> (lowest, highest possible value).
POSSIBLE_RANGES = {"acceptance_length_vllm": (1.0, np.inf), "acceptance_rate": (0.0, 1.0)}


def find_engine(server: Server) -> tuple[str, Client]:
    """Find out which engine runs a server, by the names of the counters on its /metrics page.

    Args:
        server: a running server, to which requests can be sent.

    Returns:
        The name of the engine, and its client.

    Raises:
        ResourceError: for a server without the counters of a known engine.
    """
    # A client knows the counters of an engine. Not every engine has a client.
    clients: dict[str, Client] = {}
    for name in list_engines_with("client"):
        client = ENGINES[name].client
        if client is not None:
            clients[name] = client
    hint = "; ".join(client.hint for client in clients.values())

    # The names of an engine's counters begin with its prefix, e.g. `vllm:`.
    samples = server.read_samples(hint)
    for engine, client in clients.items():
        if any(name.startswith(f"{client.prefix}:") for name, _, _ in samples):
            return engine, client
    raise ResourceError(
        f"{server.address}/metrics has no counters of {', '.join(clients)}", next_step=hint
    )


def summarize_acceptance(
    client: Client, pages: Sequence[Counters], seconds: float
) -> dict[str, Any]:
    """Compute the acceptance of a running server from readings of its counters, and judge it.

    Counters only grow, so two readings say how much was drafted and accepted in between. The time
    is cut into equal parts, with a reading at both ends of each part. The spread between the parts
    gives the confidence intervals.

    Args:
        client: the client of the engine, which knows the counters.
        pages: the readings, as name -> value. Part i lies between readings i and i + 1.
        seconds: the time between the first reading and the last.

    Returns:
        The counts and the metrics, named as in a row of a report, with `verdict` and `reason`.

    Raises:
        ResourceError: for counters that are missing or fall, and for more accepted than drafted
            tokens.
    """
    # Count what was drafted and accepted over the whole time.
    row = client.compute_drafted(pages[0], pages[-1])
    num_drafts = row["num_drafts"]
    drafted = row["num_draft_tokens"]
    accepted = row["num_accepted_tokens"]

    # No more tokens can be accepted than were drafted. But the page may round its counters, so
    # allow for the rounding error of the largest one, the count of tokens (`drafting[1]`).
    rounding_error = _estimate_rounding_error(client, pages[-1], name=client.drafting[1])
    if not 0 <= accepted <= drafted + rounding_error:
        raise ResourceError(
            f"the server's counters cannot be right: {accepted} of only {drafted} draft tokens"
            " were accepted",
            next_step="look at the server's page /metrics",
        )

    # Count what was drafted in each part. SGLang has no counters of drafts until a request has
    # ended, so the first readings may lack them. Only the very first of these is used, as the
    # start.
    idle_pages = list(takewhile(lambda page: not page.keys() >= set(client.drafting), pages))
    used_pages = [*idle_pages[:1], *pages[len(idle_pages) :]]
    all_parts = [client.compute_drafted(before, after) for before, after in pairwise(used_pages)]
    parts = [part for part in all_parts if part["num_drafts"] and part["num_draft_tokens"]]

    # If the page rounds its counters too coarsely, no metric is computed.
    reason = _explain_missing_numbers(client, pages, seconds)
    if reason:
        return {**row, "verdict": "inconclusive", "reason": reason}

    # Compute the metrics from the sums of each part, and their intervals. The parts take the place
    # of prompts here.
    sums = {}
    for name in row:
        if name != "accepted_per_position":
            sums[name] = np.array([part[name] for part in parts], float)
    accepted_per_position = row["accepted_per_position"] if num_drafts else []
    row["acceptance_rate_per_position"] = [count / num_drafts for count in accepted_per_position]

    # An interval by Student's t may exceed the possible range, so its ends are cut to this range.
    reason = _explain_missing_interval(client, pages, seconds, num_drafts, len(parts))
    for name, (lowest, highest) in POSSIBLE_RANGES.items():
        value = compute_value(METRICS[name], sums)
        if value is not None:
            row[name] = value
        interval = None
        if not reason:
            interval = compute_macro_interval(METRICS[name], sums, ["all"] * len(parts))
        if interval is not None:
            row[f"{name}_ci95"] = [min(max(end, lowest), highest) for end in interval]

    # The verdict is that of the default gate's rule for the acceptance rate. Without an interval it
    # is inconclusive.
    verdict = "inconclusive"
    bounds = row.get("acceptance_rate_ci95")
    if bounds:
        (rule,) = (rule for rule in load_gate("default") if rule.metric == "acceptance_rate")
        verdict, reason, _ = compare_with_threshold(
            rule, Estimate(row["acceptance_rate"], tuple(bounds))
        )
    return {**row, "verdict": verdict, "reason": reason}


def _estimate_rounding_error(client: Client, page: Counters, name: str) -> float:
    """Return by how much the growth of a counter may be wrong because its value is rounded.

    This is the unit of the last digit that the page prints. In 1.23457e+06 the last digit counts
    tens, so the unit is 10. The error is 0 for a counter that is printed with all its digits.

    Args:
        client: the client of the engine. `client.rounding` is the largest possible unit as a share
            of the value: 1e-5 for six digits, 0 for all digits.
        page: a reading of the counters, as name -> value.
        name: the name of the counter.
    """
    # The unit is the largest power of ten up to `max_unit`. For 1.23457e+06 `max_unit` is 12.3, and
    # the unit is 10. Below 10, the unit is 1 or less, so the value is exact: counts are whole
    # numbers.
    max_unit = client.rounding * page[name]
    if max_unit < 10:
        return 0
    unit: float = 10 ** math.floor(math.log10(max_unit))
    return unit


def _explain_missing_numbers(client: Client, pages: Sequence[Counters], seconds: float) -> str:
    """Return why no metrics can be computed: because the server rounds its counters too coarsely.

    Args:
        client: the client of the engine.
        pages: the readings of the server's counters, at equal intervals of time.
        seconds: the time between the first reading and the last.

    Returns:
        The reason, with the advice to watch the server for longer; empty if the counters are
        precise enough.
    """
    # Check the counters of drafts and of tokens, which are the first two in `drafting`. In each
    # interval a counter should on average grow by its rounding error / MAX_BLUR or more. If it grew
    # by less, find by which factor to watch longer. For a counter that did not grow at all, no
    # factor is known to be enough.
    first_page = pages[0]
    last_page = pages[-1]
    num_intervals = len(pages) - 1
    needed_factor = 0.0
    for name in client.drafting[:2]:
        growth = last_page[name] - first_page.get(name, 0.0)
        rounding_error = _estimate_rounding_error(client, last_page, name)
        needed_growth = num_intervals * rounding_error / MAX_BLUR
        if growth:
            needed_factor = max(needed_factor, needed_growth / growth)
        elif needed_growth:
            needed_factor = math.inf
    if needed_factor <= 1:
        return ""
    advice = _suggest_longer_time(needed_factor * seconds)
    return f"too few drafts: the server rounds its counters to six digits; {advice}"


def _suggest_longer_time(seconds: float) -> str:
    """Return the advice to set `seconds` to this number or more; it is infinite if not known."""
    return f"use seconds={math.ceil(seconds)} or more" if seconds < math.inf else "raise seconds"


def _explain_missing_interval(
    client: Client, pages: Sequence[Counters], seconds: float, num_drafts: int, num_parts: int
) -> str:
    """Return the reason why no confidence interval can be computed; empty if one can.

    The time is cut into equal parts, and the spread between parts gives the interval.

    Args:
        client: the client of the engine.
        pages: the readings of the counters, at the ends of the parts.
        seconds: the time between the first reading and the last.
        num_drafts: the number of drafts in that time.
        num_parts: the number of parts in which something was drafted.
    """
    # An interval needs at least MIN_BUCKET_ROUNDS drafts, in at least two parts of the time.
    if num_drafts < MIN_BUCKET_ROUNDS:
        return f"{num_drafts} drafts are too few, at least {MIN_BUCKET_ROUNDS}"
    if num_parts < 2:
        return "no interval: something was drafted in one part of the time only"

    # An interval also needs independent parts: the drafts of most requests must lie in one part.
    # For an engine that counts all drafts of a request when the request ends, this is always so.
    # `latency` is empty for such an engine.
    if not client.latency:
        return ""

    # Other engines count drafts while a request runs. A long request then has drafts in several
    # parts. So requests must be short: on average they must take less than MAX_BLUR_SHARE times the
    # duration of a part. `latency` is the name of the engine's histogram of request durations.
    sum_name = f"{client.latency}_sum"
    count_name = f"{client.latency}_count"
    request_seconds = pages[-1].get(sum_name, 0.0) - pages[0].get(sum_name, 0.0)
    num_requests = pages[-1].get(count_name, 0.0) - pages[0].get(count_name, 0.0)
    max_mean_seconds = MAX_BLUR_SHARE * seconds / (len(pages) - 1)
    if request_seconds < max_mean_seconds * num_requests:
        return ""
    if not num_requests:
        return f"no interval: no request ended in this time; {_suggest_longer_time(math.inf)}"
    mean_seconds = request_seconds / num_requests
    return (
        f"no interval: requests take {format_duration(mean_seconds)} on average;"
        f" {_suggest_longer_time(mean_seconds / max_mean_seconds * seconds)}"
    )
