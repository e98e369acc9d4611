"""The counters of servers are read from recorded pages and answers.

vllm.txt was recorded from vLLM 0.32.0 on a CPU, with an EAGLE-3 head of K = 4 and after 26 texts
(only the metrics that matter here, with a shorter name of the model). vllm_answer.json was recorded
with n-gram lookup of K = 3; the server's page then said 7 drafts, 19 draft tokens, and 3 / 2 / 1
accepted by position. sglang.txt is built after the names and help texts in SGLang's sources
(srt/observability/metrics_collector.py, 2026), not taken from a running server.
"""

import json
from itertools import repeat
from pathlib import Path

import pytest

from specdistill.common.errors import ResourceError, UserError
from specdistill.evaluation.measurement.servers import connect
from specdistill.serving.engines.client import CompletionRequest, ServerCounts
from specdistill.serving.engines.llama_cpp import LLAMA_CPP
from specdistill.serving.engines.server import Response, Server
from specdistill.serving.engines.sglang import SGLANG
from specdistill.serving.engines.vllm import VLLM
from tests.serving.engines.server_answers import pages

HERE = Path(__file__).parent
REQUEST = CompletionRequest("pico", [1], 32, 0.0, 1.0, 0, 0)


@pytest.fixture
def server_with_answers(monkeypatch):
    """Return a function that makes a server from the answers of each path, as text or JSON."""

    def make(**answers):
        def ask(self, path, body=None, hint=""):
            answer = next(answers[path.rpartition("/")[2]])
            return Response(
                path,
                200,
                {},
                (answer if isinstance(answer, str) else json.dumps(answer)).encode(),
                1.0,
            )

        monkeypatch.setattr(Server, "ask", ask)
        return Server("http://nowhere", key="eval.server", timeout=1)

    return make


def test_tokens_are_summed_over_ranks_and_foreign_requests_are_refused(server_with_answers):
    line = 'vllm:generation_tokens_total{{engine="{}"}} {}\n'
    server = server_with_answers(
        metrics=iter([line.format(0, 40.0) + line.format(1, 10.0 * step) for step in (1, 1, 3, 3)])
    )
    before = VLLM.client.read(server)
    assert before == {"generation_tokens_total": 50.0}
    # The first page is read before the engine has counted all tokens.
    VLLM.client.check_alone(server, before, 20)
    with pytest.raises(ResourceError, match=r"\b20 tokens, 15 of them\b"):
        VLLM.client.check_alone(server, before, 15)


def test_vllm_reports_k_on_its_page_and_counts_in_its_answers(server_with_answers):
    page, answer = (
        (HERE / "vllm.txt").read_text(),
        json.loads((HERE / "vllm_answer.json").read_text()),
    )
    served = {"data": [{"id": "pico", "root": "/pico"}]}
    pages = {
        "metrics": repeat(page),
        "version": repeat({"version": "0.32.0"}),
        "models": repeat(served),
    }
    server = server_with_answers(**pages, completions=repeat(answer))
    assert VLLM.client.read(server)["generation_tokens_total"] == 1586
    identity = VLLM.client.identify(server)
    assert (identity.version, identity.models, identity.num_speculative_tokens) == (
        "0.32.0",
        ("pico", "/pico"),
        4,
    )

    completion = VLLM.client.complete(server, REQUEST, 3)
    assert completion.counts == ServerCounts(
        tuple(answer["choices"][0]["token_ids"]), 7, 19, 6, (3, 2, 1)
    )
    assert (completion.text, completion.num_tokens) == (answer["choices"][0]["text"], 32)
    plain = VLLM.client.complete(server, REQUEST, 0)
    assert plain.counts == ServerCounts(completion.counts.token_ids, 0, 0, 0, ())
    del answer["metrics"]["speculative_decoding"]
    with pytest.raises(ResourceError, match="--per-request-spec-decode-metrics summary"):
        VLLM.client.complete(server, REQUEST, 3)


def test_sglang_reports_generated_tokens(server_with_answers):
    page = (HERE / "sglang.txt").read_text()
    assert (
        SGLANG.client.read(server_with_answers(metrics=iter([page])))["generation_tokens_total"]
        == 7557
    )


@pytest.mark.parametrize("page", ["<html>\nfoo bar</html>", "# nothing yet"])
def test_a_page_without_counters_is_refused(page, server_with_answers):
    with pytest.raises(ResourceError, match="--enable-metrics"):
        SGLANG.client.read(server_with_answers(metrics=iter([page])))


@pytest.mark.parametrize(
    "names",
    [
        ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
        ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
    ],
)
def test_sglang_reports_counts_of_drafts_under_two_sets_of_names(names, server_with_answers):
    drafted, accepted, histogram = names
    meta = {
        "completion_tokens": 12,
        "spec_verify_ct": 5,
        drafted: 15,
        accepted: 6,
        histogram: [1, 3, 0, 1],
    }
    server = server_with_answers(
        generate=repeat({"text": "ab", "meta_info": meta, "output_ids": [1, 2]})
    )
    assert SGLANG.client.complete(server, REQUEST, 3).counts == ServerCounts(
        (1, 2), 5, 15, 6, (4, 1, 1)
    )
    del meta[histogram]
    with pytest.raises(ResourceError, match="use a version of SGLang"):
        SGLANG.client.complete(server, REQUEST, 3)
    server = server_with_answers(
        generate=repeat({"text": "ab", "meta_info": {"completion_tokens": 12}})
    )
    assert SGLANG.client.complete(server, REQUEST, 3).counts == ServerCounts((), 0, 0, 0, ())


def make_stream(*sums):
    """Return an answer of llama.cpp.

    sums: For each event, the tokens, draft tokens and accepted tokens so far, and the tokens that
        it sends.
    """
    events = [
        {
            "content": "a",
            "tokens": sent,
            "stop": False,
            "timings": {"predicted_n": n, "draft_n": drafted, "draft_n_accepted": kept},
        }
        for n, drafted, kept, sent in sums
    ]
    return "".join(
        f"data: {json.dumps(event)}\n\n"
        for event in [*events, {**events[-1], "content": "", "tokens": [], "stop": True}]
    )


def test_rounds_of_llama_cpp_are_counted_from_its_stream(server_with_answers):
    """llama_cpp_answer.txt was recorded; the server's page then said 7 drafts, and 5 / 3 / 1
    accepted by position."""
    complete, recorded = LLAMA_CPP.client.complete, (HERE / "llama_cpp_answer.txt").read_text()
    stopped = make_stream((1, 0, 0, [5]), (2, 3, 3, [6]), (3, 3, 3, [7]))
    # The token of a rejected draft is the first half of a character.
    unsent = make_stream((1, 0, 0, [5]), (3, 6, 2, [7]), (4, 6, 2, [8]), (5, 6, 2, [9]))
    broken = recorded[: recorded.rindex("data: ")]
    too_far = make_stream((1, 0, 0, [5]), *((number, 4, 4, [6]) for number in range(2, 8)))
    server = server_with_answers(
        completion=iter([recorded, recorded, stopped, unsent, broken, too_far])
    )
    completion = complete(server, REQUEST, 3)
    assert (
        completion.text.startswith("\n            if len(args) >= 2:\n")
        and completion.num_tokens == len(completion.counts.token_ids) == 24
    )
    assert completion.counts == ServerCounts(completion.counts.token_ids, 7, 19, 9, (5, 3, 1))
    assert complete(server, REQUEST, 0).counts == ServerCounts(
        completion.counts.token_ids, 0, 0, 0, ()
    )
    # The last accepted token is past the end of the completion.
    assert complete(server, REQUEST, 3).counts == ServerCounts((5, 6, 7), 1, 3, 2, (1, 1, 0))
    assert complete(server, REQUEST, 3).counts == ServerCounts((), 2, 6, 2, (1, 1, 0))
    for why in ("ended its answer early", "impossible ones"):
        with pytest.raises(ResourceError, match=why):
            complete(server, REQUEST, 3)


def test_rounds_of_llama_cpp_inside_a_character_share_their_accepted_tokens(server_with_answers):
    """Two drafts of two tokens: one and two are accepted; only the second round sends a token."""
    first, merged = (1, 0, 0, [5]), (4, 4, 3, [7])
    whole, cut, impossible = (
        make_stream(first, merged, (6, 4, 3, [8, 9])),
        make_stream(first, merged),
        make_stream(first, (9, 4, 5, [7])),
    )
    server = server_with_answers(completion=iter([whole, cut, impossible]))
    assert LLAMA_CPP.client.complete(server, REQUEST, 2).counts == ServerCounts((), 2, 4, 3, (2, 1))
    # One accepted token is past the end of the completion.
    assert LLAMA_CPP.client.complete(server, REQUEST, 2).counts == ServerCounts((), 2, 4, 2, (2, 0))
    with pytest.raises(ResourceError, match="impossible ones"):
        LLAMA_CPP.client.complete(server, REQUEST, 2)


@pytest.mark.parametrize(
    ("engine", "option"), [("llama.cpp", "--alias"), ("vllm", "--served-model-name")]
)
def test_the_error_for_a_server_of_another_model_names_the_option(
    engine, option, server_with_answers
):
    page = "llamacpp:tokens_predicted_total 1\nvllm:generation_tokens_total 1\n"
    answers = {
        path.rpartition("/")[2]: repeat(answer)
        for path, answer in pages(engine, "other", 3).items()
    }
    server_with_answers(metrics=repeat(page), **answers)
    with pytest.raises(
        UserError, match=rf"^eval\.server: got http://nowhere, which serves other, .* {option} pico"
    ):
        connect(engine, "http://nowhere", "eval.server", ["pico"], 1.0, 3)


def test_llama_cpp_reports_k_after_its_first_draft(server_with_answers):
    page = "llamacpp:tokens_predicted_total 1.23457e+06\n"
    drafted = page + "".join(
        f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} 0\n'
        for k in range(3)
    )
    answers, slots = (
        pages("llama.cpp", "t.gguf", 3),
        [[{"speculative": True}], [{"speculative": True}], [{"speculative": False}]],
    )
    server = server_with_answers(
        metrics=iter([page, drafted, page, page, page]),
        props=repeat(answers["/props"]),
        slots=iter(slots),
    )
    identities = [LLAMA_CPP.client.identify(server) for _ in slots]
    assert [(identity.num_speculative_tokens, identity.hides_k) for identity in identities] == [
        (None, True),
        (3, False),
        (None, False),
    ]
    assert (identities[0].models, identities[0].max_length) == (("t.gguf", "t.gguf"), 512)
    before = LLAMA_CPP.client.read(server)
    LLAMA_CPP.client.check_alone(server, before, 4)  # its page rounds to six digits
