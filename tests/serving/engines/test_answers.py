"""Every answer of a server, however slow, becomes a completion or a one-line error.

An interrupt ends the requests.
"""

import signal
import threading
import time

import pytest

from specdistill.common.errors import ResourceError
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.servers import ConnectedServer, complete_all
from specdistill.evaluation.suites.suite import Prompt
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.client import CompletionRequest
from specdistill.serving.engines.completions import CompletionServer, UnavailableError
from specdistill.serving.engines.server import Server
from tests.serving.engines.hostile_server import BOMB, DRIP, DRIP_HEAD, FLOOD, SILENCE, K, hostile
from tests.serving.engines.server_answers import completion, pages
from tests.simulated import edited

VLLM, SGLANG = "/v1/completions", "/generate"
SECONDS = 0.5
NO_JSON = [
    b"",
    b"{",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"deep": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"text": "a", "text": "b"}',
    b'{"text": "\\ud800"}',
    b'{"usage": NaN}',
    b"<html>",
]
NO_OBJECT = [b"null", b"3", b'"text"', b"[]", b"{}"]


def ask_server(address, engine="vllm", timeout=20.0):
    """Ask what `eval` asks of a server: its identity, and a completion, which is returned."""
    client, server = ENGINES[engine].client, Server(address, key="eval.server", timeout=timeout)
    assert client.identify(server).num_speculative_tokens == K
    return client.complete(server, CompletionRequest("pico", [1], 2, 0.0, 1.0, 0, 0), K)


@pytest.mark.parametrize("path", ["/metrics", VLLM])
@pytest.mark.parametrize("wrong", [DRIP, DRIP_HEAD, SILENCE])
def test_the_timeout_covers_the_whole_answer(wrong, path):
    with hostile({path: wrong}) as server:
        start = time.monotonic()
        with pytest.raises(
            ResourceError, match=rf"{path} did not answer in 0.5 s; .* eval\.server_timeout"
        ):
            ask_server(server.address, timeout=SECONDS)
        assert SECONDS <= time.monotonic() - start < SECONDS + 1


@pytest.mark.parametrize("path", ["/metrics", VLLM])
@pytest.mark.parametrize("wrong", [FLOOD, BOMB])
def test_an_answer_that_is_too_large_is_refused(wrong, path):
    with (
        hostile({path: wrong}) as server,
        pytest.raises(ResourceError, match=f"{path} sent an answer of more than 64 MiB"),
    ):
        ask_server(server.address)


def build_page_cases(*places_and_values):
    right = pages("sglang", "pico", K)
    return [
        ({path: edited(right[path], place, value)}, path)
        for path, place, value in places_and_values
    ]


def build_completion_cases(engine, path, *places_and_values):
    right = completion(engine, K, "ab", [66, 67], [1], K)
    return [({path: edited(right, place, value)}, path) for place, value in places_and_values]


DRAFTS = ("metrics", "speculative_decoding")
VLLM_CASES = [
    *(
        ({path: wrong}, path)
        for path in ("/v1/models", "/version", VLLM)
        for wrong in (*NO_JSON, *NO_OBJECT)
    ),
    *(
        ({"/metrics": wrong}, "/metrics")
        for wrong in (b"", b"\xff", b"<html>", b"vllm:generation_tokens_total NaN\n")
    ),
    *(
        ({"/metrics": f"vllm:generation_tokens_total {wrong}\n".encode()}, "/metrics")
        for wrong in ("1e999", "-1", "many")
    ),
    *build_page_cases(
        ("/v1/models", ["data"], []),
        ("/v1/models", ["data"], None),
        ("/v1/models", ["data", 0], "pico"),
        ("/v1/models", ["data", 0, "id"], 3),
        ("/v1/models", ["data", 0, "root"], ["pico"]),
        ("/v1/models", ["data", 0, "max_model_len"], -1),
        ("/v1/models", ["data", 0, "max_model_len"], "many"),
        ("/version", ["version"], None),
    ),
    *build_completion_cases(
        "vllm",
        VLLM,
        (["choices"], []),
        (["choices"], "ab"),
        (["choices", 0], None),
        (["choices", 0, "text"], None),
        (["choices", 0, "token_ids"], ["66"]),
        (["choices", 0, "token_ids"], [-1]),
        (["choices", 0, "token_ids"], [2**70]),
        (["choices", 0, "token_ids"], {"66": 67}),
        (["usage"], None),
        (["usage", "completion_tokens"], 0),
        (["usage", "completion_tokens"], -2),
        (["usage", "completion_tokens"], 2.5),
        (["usage", "completion_tokens"], True),
        (["metrics"], []),
        (DRAFTS, None),
        ([*DRAFTS, "num_spec_steps"], 2**30),
        ([*DRAFTS, "num_spec_steps"], "1"),
        ([*DRAFTS, "num_draft_tokens"], -3),
        ([*DRAFTS, "num_accepted_draft_tokens"], 4),
        ([*DRAFTS, "acceptance_histogram"], [0, 1, 0, 0, 0]),
        ([*DRAFTS, "acceptance_histogram"], [0, 9, 0, 0]),
        ([*DRAFTS, "acceptance_histogram"], []),
        ([*DRAFTS, "acceptance_histogram"], [[0]]),
    ),
]
SGLANG_CASES = [
    *(({path: wrong}, path) for path in ("/server_info", SGLANG) for wrong in NO_OBJECT),
    *build_page_cases(
        ("/server_info", ["version"], 5),
        ("/server_info", ["speculative_num_steps"], "three"),
        ("/server_info", ["speculative_num_steps"], -3),
        ("/server_info", ["model_path"], {}),
    ),
    *build_completion_cases(
        "sglang",
        SGLANG,
        (["text"], 3),
        (["output_ids"], "66"),
        (["meta_info"], None),
        (["meta_info", "completion_tokens"], 0),
        (["meta_info", "spec_verify_ct"], -1),
        (["meta_info", "spec_num_correct_drafts"], 4),
        (["meta_info", "spec_correct_drafts_histogram"], None),
        (["meta_info", "spec_correct_drafts_histogram"], [0, 1, 0, 0, 0]),
    ),
]


@pytest.mark.parametrize(
    ("engine", "wrong", "path"),
    [*(("vllm", *case) for case in VLLM_CASES), *(("sglang", *case) for case in SGLANG_CASES)],
)
def test_a_malformed_answer_is_refused_in_one_line(engine, wrong, path):
    message = (
        f"{path} (sent an unexpected answer|sent no counts of accepted tokens|is no Prometheus"
        " page|has no vllm:)"
    )
    with (
        hostile(wrong, engine=engine) as server,
        pytest.raises(ResourceError, match=message) as caught,
    ):
        ask_server(server.address, engine)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("engine", "path", "place", "value", "message"),
    [
        ("vllm", VLLM, ["choices", 0, "text"], 3, r"choices\.0\.text: .* string, not 3"),
        (
            "sglang",
            SGLANG,
            ["meta_info", "completion_tokens"],
            3.5,
            r"meta_info\.completion_tokens: .* integer, not 3\.5",
        ),
    ],
)
def test_the_error_names_the_wrong_field(engine, path, place, value, message):
    ((wrong, _),) = build_completion_cases(engine, path, (place, value))
    with hostile(wrong, engine=engine) as server, pytest.raises(ResourceError, match=message):
        ask_server(server.address, engine)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:99999", "http://[::1", "http://:80", "http://\u2028"]
)
def test_an_invalid_address_is_refused(address):
    with pytest.raises(ResourceError, match="does not answer"):
        ask_server(address)


RIGHT = {"choices": [{"text": "ab", "token_ids": [66, 67], "finish_reason": "stop"}]}
WRONG_DATA_ANSWERS = [
    *NO_JSON,
    *NO_OBJECT,
    *(edited(RIGHT, ["choices", 0, "text"], wrong) for wrong in (None, 3, ["ab"])),
    *(
        edited(RIGHT, ["choices", 0, "token_ids"], wrong)
        for wrong in ("ab", [6.5], [-1], [None], {"a": 1})
    ),
    *(edited(RIGHT, ["choices"], wrong) for wrong in ([], {}, [None], "ab")),
    edited(RIGHT, ["choices", 0, "finish_reason"], {}),
    DRIP,
    DRIP_HEAD,
    SILENCE,
    FLOOD,
    BOMB,
]


@pytest.mark.parametrize("wrong", WRONG_DATA_ANSWERS)
def test_a_wrong_answer_makes_a_data_server_unavailable(wrong):
    timeout = SECONDS if wrong in (DRIP, DRIP_HEAD, SILENCE) else 20.0
    with hostile({VLLM: wrong}) as server, pytest.raises(UnavailableError, match=VLLM):
        CompletionServer(server.address, timeout).complete({"prompt": [1]})


@pytest.mark.parametrize(
    "wrong", [b"[" * 100_000, {"data": []}, {"data": [{"id": None}]}, {"data": [{"id": 3}]}]
)
def test_a_wrong_list_of_models_is_refused_from_a_data_server(wrong):
    with hostile({"/v1/models": wrong}) as server, pytest.raises(ResourceError, match="/v1/models"):
        CompletionServer(server.address, 20.0).find_model(["pico"])


@pytest.mark.parametrize("wrong", [DRIP, DRIP_HEAD, SILENCE])
def test_an_interrupt_ends_requests_to_a_server(wrong):
    with hostile({VLLM: wrong}) as server:
        client, connected = (
            ENGINES["vllm"].client,
            Server(server.address, key="eval.server", timeout=20.0),
        )
        peer = ConnectedServer("vllm", client, connected, client.identify(connected))
        prompts = [Prompt(str(number), "c", "a", (1,)) for number in range(40)]

        def interrupt():
            while server.num_asked < 8:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            list(complete_all(peer, prompts, Settings(K, 2), 8))
        assert time.monotonic() - start < 2
        assert server.num_asked == 8
