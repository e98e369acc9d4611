"""`specdistill monitor` reads recorded pages of counters.

tests/serving/engines/test_server.py says where vllm.txt and sglang.txt are from.

llama_cpp.txt is the page of the llama-server of llama-cpp-python 0.3.36 after two prompts with
`--spec-type ngram-simple` and K = 4, whose answers said 50 and 24 draft tokens, 49 and 4 of them
accepted.
"""

import json
import re
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from itertools import accumulate, chain, repeat
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from specdistill.cli import monitor as command
from specdistill.cli.main import main
from specdistill.serving.engines.client import PER_POSITION, SPEC_DECODE_COUNTERS
from specdistill.serving.engines.llama_cpp import LLAMA_CPP
from specdistill.serving.engines.vllm import VLLM
from specdistill.serving.monitor import summarize_acceptance
from tests.refusals import refused_key
from tests.serving.engines.server_answers import AnswerHandler

HERE = Path(__file__).parent / "engines"
RECORDED, K = (HERE / "vllm.txt").read_text(), 4
PARTS, SOME_TIME = command.NUM_PARTS, "seconds=0.06"


@contextmanager
def serve_pages(pages, status=200):
    """Serve each page once and yield the address of the server."""

    class Handler(AnswerHandler):
        def do_GET(self):
            self.answer(next(self.server.pages), status)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.pages = iter(pages)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_page(drafts, reached):
    """Return vLLM's page with other counts, and with the latency of the requests that have ended.

    Each request has ten drafts and took 1 ms.
    """
    counts = {"drafts": drafts, "draft_tokens": K * drafts, "accepted_tokens": sum(reached)}
    text = RECORDED
    for name, count in counts.items():
        text = re.sub(
            rf"^(vllm:spec_decode_num_{name}_total\{{.*\}}) .*", rf"\1 {count}.0", text, flags=re.M
        )
    for position, count in enumerate(reached):
        text = re.sub(
            rf'^(vllm:\w+_per_pos_total\{{.*position="{position}"\}}) .*',
            rf"\1 {count}.0",
            text,
            flags=re.M,
        )
    requests = {"sum": drafts / 10_000, "count": drafts / 10}
    return text + "".join(
        f"vllm:e2e_request_latency_seconds_{name} {value}\n" for name, value in requests.items()
    )


def make_growing_pages(*accepted, drafts=100):
    """Return a page for finding the engine, one for the beginning, and one after each part.

    accepted: The tokens accepted at each of the four positions, part by part.
    """
    sums = [*accumulate(accepted, initial=1000)]
    return [
        make_page(5000, [1000] * K),
        *(make_page(5000 + drafts * n, [total] * K) for n, total in enumerate(sums)),
    ]


def run_monitor(pages, tmp_path, *keys):
    """Run `specdistill monitor` and return its exit code and the exported summary."""
    output = tmp_path / "new" / "acceptance.json"
    with serve_pages(pages) as address:
        code = main(["monitor", f"server={address}", f"output={output}", *keys])
    return code, json.loads(output.read_text()) if output.exists() else None


def test_monitor_with_zero_seconds_reports_the_counters_of_the_page(tmp_path, capsys):
    # The first page shows which engine it is, and the second is the reading.
    code, summary = run_monitor([RECORDED] * 2, tmp_path, "seconds=0")
    assert (
        code == 4 and summary["verdict"] == "inconclusive" and "acceptance_rate_ci95" not in summary
    )
    assert (summary["engine"], summary["num_drafts"], summary["num_draft_tokens"]) == (
        "vllm",
        601,
        2404,
    )
    assert (
        summary["accepted_per_position"] == [377, 258, 200, 159]
        and summary["num_accepted_tokens"] == 994
    )
    assert summary["acceptance_rate_per_position"] == pytest.approx(
        [377 / 601, 258 / 601, 200 / 601, 159 / 601]
    )
    assert summary["acceptance_length_vllm"] == pytest.approx(1 + 994 / 601)
    assert (
        "acceptance length 2.65, accepted at position 1, 2, …: 63%  43%  33%  26%, acceptance rate"
        " 0.41" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("accepted", "code", "verdict"),
    [
        ((40, 42, 38, 41, 39, 43), 1, "failed"),
        ((60, 62, 58, 61, 59, 63), 0, "passed"),
        ((40, 60, 45, 58, 41, 55), 4, "inconclusive"),
    ],
)
def test_monitor_fails_where_the_interval_lies_below_a_half(
    accepted, code, verdict, tmp_path, capsys
):
    """The rate over parts with equally many drafts is the mean of their rates."""
    exit_code, summary = run_monitor(make_growing_pages(*accepted), tmp_path, SOME_TIME)
    assert (exit_code, summary["verdict"]) == (code, verdict)
    rates = np.array(accepted) / 100
    judge = stats.ttest_1samp(rates, 0.5).confidence_interval()
    assert summary["acceptance_rate"] == pytest.approx(rates.mean())
    assert summary["acceptance_rate_ci95"] == pytest.approx([judge.low, judge.high])
    assert summary["acceptance_length_vllm_ci95"] == pytest.approx(
        [1 + K * judge.low, 1 + K * judge.high]
    )
    assert summary["num_drafts"] == 600 and summary[
        "acceptance_rate_per_position"
    ] == pytest.approx([rates.mean()] * K)
    first, second = capsys.readouterr().out.splitlines()
    assert (
        "6 parts of 0.0 s" in first
        and f"{verdict}: " in second
        and f"({judge.low:.2f} to {judge.high:.2f})" in second
    )


def test_few_drafts_or_drafts_in_one_part_are_inconclusive(tmp_path):
    code, summary = run_monitor(make_growing_pages(0, 0, 0, 0, 0, 1, drafts=4), tmp_path, SOME_TIME)
    assert (code, summary["num_drafts"]) == (4, 24) and "24 drafts are too few" in summary["reason"]
    quiet = [make_page(5000, [1000] * K)] * (1 + PARTS)
    code, summary = run_monitor([*quiet, make_page(5100, [1010] * K)], tmp_path, SOME_TIME)
    assert (code, summary["acceptance_rate"]) == (4, pytest.approx(0.1)) and "one part" in summary[
        "reason"
    ]
    code, summary = run_monitor(repeat(RECORDED), tmp_path, SOME_TIME)
    assert code == 4 and summary["num_drafts"] == 0 and "acceptance_rate" not in summary


def test_the_interval_is_limited_to_possible_values(tmp_path):
    _, summary = run_monitor(make_growing_pages(0, 0, 0, 0, 0, 30), tmp_path, SOME_TIME)
    assert (
        summary["acceptance_rate_ci95"][0] == 0 and summary["acceptance_length_vllm_ci95"][0] == 1
    )


def make_rounded_pages(drafts, *of_parts):
    """Yield llama.cpp's pages, whose counters are rounded to six digits.

    drafts: The drafts that it counted before.
    of_parts: The drafts of each part, and their accepted tokens at each position.
    """
    taken = 0
    for more, accepted in ((0, 0), *of_parts):
        drafts, taken = drafts + more, taken + accepted
        counts = dict(zip(SPEC_DECODE_COUNTERS, (drafts, K * drafts, K * taken), strict=True))
        positions = {f"{PER_POSITION}{position}": float(taken) for position in range(K)}
        yield {name: float(f"{count:g}") for name, count in counts.items()} | positions


def test_rounded_counters_of_few_drafts_are_inconclusive():
    def summarize(drafts, *of_parts, seconds=60.0):
        return summarize_acceptance(
            LLAMA_CPP.client, list(make_rounded_pages(drafts, *of_parts)), seconds
        )

    for part in ((6, 3), (1, 1)):  # 36 drafts, and so few that six digits do not show them
        few = summarize(5_000_000, *[part] * PARTS)
        assert (
            few["verdict"] == "inconclusive"
            and "too few drafts: the server rounds its counters to six digits; " in few["reason"]
        )
        assert not any(
            "acceptance" in name for name in few
        ) and "acceptance length –, " in command.format_line(few)
    assert "raise seconds" in summarize(5_000_000, *[(0, 0)] * PARTS)["reason"]
    advice = re.search(
        r"use seconds=(\d+) or more", summarize(5_000_000, *[(100, 40)] * PARTS)["reason"]
    )
    longer = [(int(100 * int(advice[1]) / 60), int(40 * int(advice[1]) / 60))] * PARTS
    enough = summarize(5_000_000, *longer, seconds=float(advice[1]))
    assert enough["verdict"] == "failed" and enough["acceptance_rate"] == pytest.approx(
        0.4, rel=0.01
    )
    # Six digits show every count up to a million.
    assert summarize(200_000, *[(100, 40)] * PARTS)["acceptance_rate"] == pytest.approx(0.4)
    # The second part has no draft token.
    assert "in one part" in summarize(5_000_004, (30_000, 12_000), (2, 1), *[(0, 0)] * 4)["reason"]


def test_requests_that_span_several_parts_give_no_interval():
    """A minute has six parts of 10 s. vLLM counts while requests run, llama.cpp when they end."""

    def pages(latency):
        counts = [
            dict(zip(SPEC_DECODE_COUNTERS, (100 * n, 400 * n, 160 * n + n % 2), strict=True))
            for n in range(PARTS + 1)
        ]
        ended = {"sum": 10 * latency, "count": 10 if latency else 0}
        return [
            page | {f"{VLLM.client.latency}_{name}": n * ended[name] for name in ended}
            for n, page in enumerate(counts)
        ]

    for client, latency, said in (
        (VLLM.client, 5.0, "seconds=120"),
        (VLLM.client, 0.0, "raise seconds"),
    ):
        summary = summarize_acceptance(client, pages(latency), 60.0)
        assert (
            "acceptance_rate_ci95" not in summary
            and summary["verdict"] == "inconclusive"
            and said in summary["reason"]
        )
    for client, latency in ((VLLM.client, 2.4), (LLAMA_CPP.client, 5.0)):
        assert summarize_acceptance(client, pages(latency), 60.0)["verdict"] == "failed"


@pytest.mark.parametrize(
    ("engine", "drafts", "drafted", "accepted", "reached"),
    # SGLang's gauges on the same page say 2.9 and 0.27.
    [("sglang", 2602, 2602 * 7, 4943, []), ("llama_cpp", 19, 74, 53, [14, 14, 13, 12])],
)
def test_counters_of_other_engines_are_read_by_their_own_names(
    engine, drafts, drafted, accepted, reached, tmp_path, capsys
):
    _, summary = run_monitor(repeat((HERE / f"{engine}.txt").read_text()), tmp_path, "seconds=0")
    assert (summary["num_drafts"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (
        drafts,
        drafted,
        accepted,
    )
    assert summary["accepted_per_position"] == reached and summary["engine"] == engine.replace(
        "_", "."
    )
    if engine == "sglang":
        assert (summary["acceptance_length_vllm"], summary["acceptance_rate"]) == pytest.approx(
            (2.9, 0.27), abs=0.005
        )
        assert "position 1, 2, …: –" in capsys.readouterr().out


def test_counters_are_summed_over_ranks(tmp_path):
    text = (HERE / "sglang.txt").read_text()
    _, summary = run_monitor(
        repeat(text + text.replace('tp_rank="0"', 'tp_rank="1"')), tmp_path, "seconds=0"
    )
    assert (summary["num_drafts"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (
        5204,
        5204 * 7,
        9886,
    )
    later = (
        text.replace(" 2602.0", " 2702.0").replace(" 7557.0", " 7777.0").replace(" 12.0", " 13.0")
    )
    _, summary = run_monitor([text, *[text] * PARTS, later], tmp_path, SOME_TIME)
    assert (summary["num_drafts"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (
        100,
        700,
        119,
    )


def test_counters_that_appear_later_start_at_zero(tmp_path):
    """SGLang has no counters before its first request."""
    text = (HERE / "sglang.txt").read_text()
    idle = "".join(line for line in text.splitlines(True) if "_total{" not in line)
    code, summary = run_monitor([idle] * 5 + [text] * (PARTS - 3), tmp_path, SOME_TIME)
    assert (code, summary["num_drafts"], summary["num_accepted_tokens"]) == (
        4,
        2602,
        4943,
    ) and "one part" in summary["reason"]


def test_json_output_is_one_object_for_each_time(tmp_path, capsys):
    with serve_pages(make_growing_pages(*[60] * PARTS)) as address:
        assert main(["monitor", f"server={address}", SOME_TIME, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    _, exported = run_monitor(make_growing_pages(*[60] * PARTS), tmp_path, SOME_TIME)
    assert {**json.loads(line), "time": 0, "server": ""} == {**exported, "time": 0, "server": ""}


def repeat_page_without(name):
    return repeat("".join(line for line in RECORDED.splitlines(True) if name not in line))


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        # The server was started without a draft.
        (repeat_page_without("spec_decode"), "no vllm:spec_decode_num_drafts_total"),
        (repeat_page_without("num_draft_tokens"), "no vllm:spec_decode_num_draft_tokens_total"),
        (repeat("go_goroutines 7\n"), "no counters of vllm, sglang, llama.cpp"),
        (repeat("<html>\nfoo bar</html>"), "is no Prometheus page"),
        # The server was started again, and its counters end above where they began.
        (
            make_growing_pages(40, 40)[:3]
            + [make_page(12, [3] * K)]
            + [make_page(9000, [2000] * K)] * PARTS,
            "num_drafts_total went from 5100 to 12",
        ),
        (
            make_growing_pages(40, 40)[:3] + [make_page(5200, [999] * K)] * PARTS,
            "num_accepted_tokens_total went from 4000 to 3996",
        ),
        (repeat(RECORDED.replace(" 601.0", " NaN")), "num_drafts_total went from"),
        (
            repeat(RECORDED.replace('"0"} 377.0', '"0"} 9377.0')),
            "9994 of only 2404 draft tokens were accepted",
        ),
    ],
)
def test_unusable_counters_are_a_resource_error(pages, said, tmp_path, capsys):
    keys = ["seconds=0"] if said.startswith("9994") else [SOME_TIME]
    assert run_monitor(pages, tmp_path, *keys) == (3, None)
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error


def test_the_error_for_a_server_without_metrics_names_the_option(capsys):
    with serve_pages(repeat({"detail": "Not Found"}), status=404) as address:
        assert main(["monitor", f"server={address}"]) == 3
    error = capsys.readouterr().err
    assert "--enable-metrics" in error and "--metrics" in error and "--disable-log-stats" in error
    assert main(["monitor", f"server={address}"]) == 3  # the server has ended
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("", "server"),
        ("server=localhost:8000", "server"),
        ("server=http://127.0.0.1:1 seconds=-1", "seconds"),
        ("server=http://127.0.0.1:1 seconds=0 watch=true", "watch"),
        ("server=http://127.0.0.1:1 output=/proc/x.json", "output"),
        ("server=http://127.0.0.1:1 output=/tmp", "output"),
        ("server=http://127.0.0.1:1 output=/dev/null", "output"),
        ("server=http://127.0.0.1:1 output=", "output"),
    ],
)
def test_mistakes_name_their_key(arguments, key, capsys):
    assert main(["monitor", *arguments.split()]) == 2
    assert refused_key(capsys.readouterr().err) == key


def test_watch_continues_until_an_interrupt(tmp_path, monkeypatch, capsys):
    """Each period begins where the one before it ended, and its summary replaces the file."""
    lines, shown = [], command.format_line

    def interrupt_after_two_lines(row):
        lines.append(row)
        if len(lines) == 3:
            raise KeyboardInterrupt
        return shown(row)

    monkeypatch.setattr(command, "format_line", interrupt_after_two_lines)
    pages = make_growing_pages(*([40] * PARTS), *([60] * PARTS), *([50] * PARTS))
    code, summary = run_monitor(chain(pages), tmp_path, SOME_TIME, "watch=true")
    assert code == 130 and [row["num_accepted_tokens"] for row in lines] == [960, 1440, 1200]
    assert summary["num_accepted_tokens"] == 1440 and [
        path.name for path in (tmp_path / "new").iterdir()
    ] == ["acceptance.json"]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "failed:",
        "passed:",
    ]


def test_the_interval_has_its_nominal_coverage():
    """Each part has about 11 requests of 20 drafts, whose acceptance rates are 0.5 on average.

    A binomial interval over all draft tokens misses 0.5 far too often.
    """
    random, hits, by_token = np.random.default_rng(0), [], []
    for _ in range(400):
        pages, drafts, accepted = [dict.fromkeys(SPEC_DECODE_COUNTERS, 0.0)], 0, 0
        for _ in range(PARTS):
            rates = random.beta(3, 3, 1 + random.poisson(10))
            drafts, accepted = (
                drafts + 20 * len(rates),
                accepted + random.binomial(20 * K, rates).sum(),
            )
            pages.append(
                dict(zip(SPEC_DECODE_COUNTERS, (drafts, K * drafts, accepted), strict=True))
            )
        low, high = summarize_acceptance(LLAMA_CPP.client, pages, 60.0)["acceptance_rate_ci95"]
        narrow = stats.binomtest(accepted, K * drafts).proportion_ci(method="wilson")
        hits.append(low <= 0.5 <= high)
        by_token.append(narrow.low <= 0.5 <= narrow.high)
    assert 0.93 <= np.mean(hits) <= 0.97 and np.mean(by_token) < 0.6, (
        np.mean(hits),
        np.mean(by_token),
    )
