"""Metrics pages. vllm.txt was recorded from vLLM 0.32.0 on a CPU, with an EAGLE-3 head of K = 4 and after 26 texts (the families that
matter here, the model's name shortened). sglang.txt is built after the names and help texts in SGLang's sources
(srt/observability/metrics_collector.py, 2026), not taken from a running server.
"""

from pathlib import Path

import pytest

from specdistill.engines.client import Server
from specdistill.engines.counters import Counters, ServerCounts
from specdistill.engines.sglang import SglangClient, answer_counts, page_gauges
from specdistill.engines.vllm import VllmClient
from specdistill.errors import ResourceError

HERE = Path(__file__).parent


@pytest.fixture
def sglang_page():
    return (HERE / "sglang.txt").read_text()


def test_what_an_engine_counts_is_summed_over_its_ranks_and_differences_are_taken():
    page = "".join(
        f'# TYPE vllm:{name} counter\nvllm:{name}_total{{engine="{engine}"{more}}} {value}\n'
        for engine in "01"
        for name, more, value in (
            ("generation_tokens", "", 100.0),
            ("spec_decode_num_drafts", "", 30.0),
            ("spec_decode_num_draft_tokens", "", 60.0),
            ("spec_decode_num_accepted_tokens", "", 45.0),
            ("spec_decode_num_accepted_tokens_per_pos", ',position="1"', 20.0),
            ("spec_decode_num_accepted_tokens_per_pos", ',position="0"', 25.0),
        )
    )
    counters = VllmClient.page.parse(page)
    assert counters == Counters(200, 60, 120, 90, (50, 40))
    assert counters.since(Counters(150, 40, 80, 60, (30, 30))) == Counters(50, 20, 40, 30, (20, 10))
    assert SglangClient.page.parse(page) == Counters(None)


def test_vllm_counts_what_it_wrote_and_drafted():
    counters = VllmClient.page.parse((HERE / "vllm.txt").read_text())
    assert counters == Counters(1586, 601, 2404, 994, (377, 258, 200, 159))
    assert sum(counters.accepted_per_position) == counters.num_accepted_tokens
    assert counters.num_draft_tokens == 4 * counters.num_drafts


def test_sglang_says_tokens_and_gauges(sglang_page):
    assert SglangClient.page.parse(sglang_page) == Counters(7557)
    assert page_gauges(sglang_page) == {"mean_acceptance_length": 2.9, "acceptance_rate": 0.27}
    assert page_gauges(sglang_page.replace(" 2.9\n", " 0.0\n").replace(" 0.27\n", " 0.0\n")) == {}


def test_a_page_of_another_kind_is_no_page_of_counters(monkeypatch):
    monkeypatch.setattr(Server, "text", lambda *_, **__: "<html>\nfoo bar</html>")
    with pytest.raises(ResourceError, match=r"is no Prometheus page .*--enable-metrics"):
        SglangClient.page.read(Server("http://nowhere", key="eval.server", timeout=1))


@pytest.mark.parametrize(
    "names",
    [
        ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
        ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
    ],
)
def test_sglang_counts_drafts_in_its_answers_under_two_sets_of_names(names):
    drafted, accepted, histogram = names
    meta = {"completion_tokens": 12, "spec_verify_ct": 5, drafted: 15, accepted: 6, histogram: [1, 3, 0, 1]}
    assert answer_counts(meta, [1, 2]) == ServerCounts((1, 2), 5, 15, 6, (4, 1, 1))
    del meta[histogram]
    with pytest.raises(ResourceError, match=f"has no .*{histogram}"):
        answer_counts(meta, [])
    assert answer_counts({"completion_tokens": 12}, []) == ServerCounts((), 0, 0, 0, ())
