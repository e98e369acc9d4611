"""Metrics pages. vllm.txt was recorded from vLLM 0.32.0 on a CPU, with an EAGLE-3 head of K = 4 and after 26 texts (the families that
matter here, the model's name shortened). sglang.txt is built after the names and help texts in SGLang's sources
(srt/observability/metrics_collector.py, 2026), not taken from a running server.
"""

from pathlib import Path

import pytest

from specdistill.engines import sglang, vllm
from specdistill.engines.server import Request, Server, ServerCounts
from specdistill.engines.sglang import SGLANG
from specdistill.engines.vllm import VLLM
from specdistill.errors import ResourceError

HERE = Path(__file__).parent
NO_IDS = {"choices": [{"text": ""}]}


@pytest.fixture
def sglang_page():
    return (HERE / "sglang.txt").read_text()


def test_what_an_engine_counts_is_summed_over_its_ranks_and_differences_are_taken(monkeypatch):
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
    pages = iter([page.replace(" 100.0", " 50.0").replace(" 25.0", " 20.0"), page])
    monkeypatch.setattr(Server, "text", lambda *_, **__: next(pages))
    answer = {"choices": [{"text": "it", "token_ids": [1, 2]}], "usage": {"completion_tokens": 100}}
    monkeypatch.setattr(Server, "json", lambda *_, **__: answer)
    server, request = Server("http://nowhere", key="eval.server", timeout=1), Request("it", [5], 100, 0.0, 1.0, 0, seed=0)
    completion = VLLM.client.complete(server, request)
    assert (completion.text, completion.num_tokens) == ("it", 100)
    assert completion.counts == ServerCounts((1, 2), 0, 0, 0, (10, 0))
    assert vllm.answer_counts(answer, VLLM.client.parse(page)) == ServerCounts((1, 2), 60, 120, 90, (50, 40))
    assert SGLANG.client.parse(page) == {}


def test_vllm_counts_what_it_wrote_and_drafted():
    counters = VLLM.client.parse((HERE / "vllm.txt").read_text())
    assert counters["generation_tokens_total"] == 1586
    counts = vllm.answer_counts(NO_IDS, counters)
    assert counts == ServerCounts((), 601, 2404, 994, (377, 258, 200, 159))
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens
    assert counts.num_draft_tokens == 4 * counts.num_drafts


def test_sglang_says_tokens_and_gauges(sglang_page):
    assert SGLANG.client.parse(sglang_page)["generation_tokens_total"] == 7557
    assert vllm.answer_counts(NO_IDS, SGLANG.client.parse(sglang_page)) == ServerCounts((), 0, 0, 0, ())
    assert sglang.page_gauges(sglang_page) == {"mean_acceptance_length": 2.9, "acceptance_rate": 0.27}
    assert sglang.page_gauges(sglang_page.replace(" 2.9\n", " 0.0\n").replace(" 0.27\n", " 0.0\n")) == {}


def test_a_page_of_another_kind_is_no_page_of_counters(monkeypatch):
    monkeypatch.setattr(Server, "text", lambda *_, **__: "<html>\nfoo bar</html>")
    with pytest.raises(ResourceError, match=r"is no Prometheus page .*--enable-metrics"):
        SGLANG.client.read(Server("http://nowhere", key="eval.server", timeout=1))


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
    answer = {"meta_info": meta, "output_ids": [1, 2]}
    assert sglang.answer_counts(answer, {}) == ServerCounts((1, 2), 5, 15, 6, (4, 1, 1))
    del meta[histogram]
    with pytest.raises(ResourceError, match=f"has no .*{histogram}"):
        sglang.answer_counts(answer, {})
    assert sglang.answer_counts({"meta_info": {"completion_tokens": 12}}, {}) == ServerCounts((), 0, 0, 0, ())
