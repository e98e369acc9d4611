"""What servers count. vllm.txt was recorded from vLLM 0.32.0 on a CPU, with an EAGLE-3 head of K = 4 and after 26 texts (the families that
matter here, the model's name shortened), vllm_answer.json with n-gram lookup of K = 3; its page then said 7 drafts, 19 draft tokens, and
3 / 2 / 1 accepted by position. sglang.txt is built after the names and help texts in SGLang's sources
(srt/observability/metrics_collector.py, 2026), not taken from a running server.
"""

import json
from pathlib import Path

import pytest

from specdistill.engines import sglang, vllm
from specdistill.engines.server import Server, ServerCounts
from specdistill.engines.sglang import SGLANG
from specdistill.engines.vllm import VLLM
from specdistill.errors import ResourceError

HERE = Path(__file__).parent


@pytest.fixture
def sglang_page():
    return (HERE / "sglang.txt").read_text()


def test_tokens_are_summed_over_an_engines_ranks_and_must_be_ours_alone(monkeypatch):
    line = 'vllm:generation_tokens_total{{engine="{}"}} {}\n'
    pages = iter([line.format(0, 40.0) + line.format(1, 10.0 * step) for step in (1, 1, 3, 3)])
    monkeypatch.setattr(Server, "text", lambda *_, **__: next(pages))
    server = Server("http://nowhere", key="eval.server", timeout=1)
    before = VLLM.client.read(server)
    assert before == {"generation_tokens_total": 50.0}
    VLLM.client.check_alone(server, before, 20)  # the first page is too early
    with pytest.raises(ResourceError, match=r"\b20 tokens, of which 15\b"):
        VLLM.client.check_alone(server, before, 15)


def test_vllm_says_k_on_its_page_and_counts_in_its_answers(monkeypatch):
    page = VLLM.client.parse((HERE / "vllm.txt").read_text())
    assert page["generation_tokens_total"] == 1586
    pages = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "pico", "root": "/pico"}]}}
    monkeypatch.setattr(Server, "json", lambda _, path: pages[path])
    identity = vllm.describe_server(Server("http://nowhere", key="eval.server", timeout=1), page)
    assert (identity.version, identity.models, identity.num_speculative_tokens) == ("0.32.0", ("pico", "/pico"), 4)

    answer = json.loads((HERE / "vllm_answer.json").read_text())
    counts = vllm.answer_counts(answer, 3)
    assert counts == ServerCounts(tuple(answer["choices"][0]["token_ids"]), 7, 19, 6, (3, 2, 1))
    assert vllm.answer_counts(answer, 0) == ServerCounts(counts.token_ids, 0, 0, 0, ())
    del answer["metrics"]["speculative_decoding"]
    with pytest.raises(ResourceError, match="--per-request-spec-decode-metrics summary"):
        vllm.answer_counts(answer, 3)


def test_sglang_says_tokens_and_gauges(sglang_page):
    assert SGLANG.client.parse(sglang_page)["generation_tokens_total"] == 7557
    assert sglang.page_gauges(sglang_page) == {"mean_acceptance_length": 2.9, "acceptance_rate": 0.27}
    assert sglang.page_gauges(sglang_page.replace(" 2.9\n", " 0.0\n").replace(" 0.27\n", " 0.0\n")) == {}


def test_a_page_of_another_kind_is_no_page_of_counters(monkeypatch):
    monkeypatch.setattr(Server, "text", lambda *_, **__: "<html>\nfoo bar</html>")
    with pytest.raises(ResourceError, match="--enable-metrics"):
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
    assert sglang.answer_counts(answer, 3) == ServerCounts((1, 2), 5, 15, 6, (4, 1, 1))
    del meta[histogram]
    with pytest.raises(ResourceError, match=histogram):
        sglang.answer_counts(answer, 3)
    assert sglang.answer_counts({"meta_info": {"completion_tokens": 12}}, 3) == ServerCounts((), 0, 0, 0, ())
