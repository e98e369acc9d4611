"""eval/run.py against servers that write pico's own text: the numbers are those of the decoder
inside them."""

from contextlib import ExitStack

import pytest

from specdistill.common.errors import ExitCode
from specdistill.common.project import PICO
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.prompt_runs import build_prompt_records
from specdistill.evaluation.report.build import build_result_rows
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.serving.engines.server import Server
from specdistill.targets.frozen import FrozenTarget
from tests.evaluation.measurement.peer import Behaviour, PeerServer, evaluate_pico
from tests.measuring import measure
from tests.proposers import ngram_proposer
from tests.refusals import refused_key

K, NUM_PROMPTS, NEW_TOKENS = 3, 6, 8
COUNTED = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_position",
    "num_new_tokens",
    "num_looping",
)


@pytest.fixture(scope="module")
def pico():
    target = FrozenTarget.load("pico")
    target.name = str(PICO)
    return target


@pytest.fixture
def draft_server(pico):
    with ExitStack() as peers:
        yield lambda engine="vllm", **behaviour: peers.enter_context(
            PeerServer(engine, pico, ngram_proposer(), K, behaviour=Behaviour(**behaviour))
        )


@pytest.fixture
def plain_server(pico):
    with ExitStack() as peers:
        yield lambda engine="vllm", **behaviour: peers.enter_context(
            PeerServer(engine, pico, behaviour=Behaviour(**behaviour))
        )


@pytest.fixture(scope="module")
def expected(pico):
    """The records and the rows of our own harness for the same prompts."""
    suite = load_suite("pico")
    prompts = tokenize(
        suite,
        pico.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=pico.max_length,
        num_prompts=NUM_PROMPTS,
    )
    settings = Settings(K, NEW_TOKENS, repeats=1, warmup=0)
    proposer = ngram_proposer()
    runs = measure(pico, proposer, prompts, settings)
    measured = build_prompt_records(suite.name, settings.configuration, pico, proposer, runs)
    return measured, build_result_rows(measured, suite, settings.configuration, seed=0)


def evaluate(folder, *arguments, gate="- {metric: acceptance_length_vllm, min: 1.0}\n"):
    numbers = {
        "num_speculative_tokens": K,
        "max_new_tokens": NEW_TOKENS,
        "num_prompts": NUM_PROMPTS,
    }
    settings = [f"eval.{name}={number}" for name, number in numbers.items()]
    return evaluate_pico(folder, "method=ngram", *settings, *arguments, gate=gate)


@pytest.mark.usefixtures("simulated_clock")
@pytest.mark.parametrize(
    "engine",
    # answers six prompts twice
    ["vllm", pytest.param("sglang", marks=pytest.mark.long)],
)
def test_a_servers_report_holds_the_decoders_own_numbers(
    engine, draft_server, plain_server, expected, tmp_path
):
    with_draft, without = draft_server(engine), plain_server(engine)
    servers = (
        f"eval.engine={engine}",
        f"eval.server={with_draft.address}",
        f"eval.baseline_server={without.address}",
    )
    gate = (
        "- {metric: lossless.greedy_identical, equals: true}\n- {metric: speedup, min: 0.01}\n-"
        " {metric: draft_ms, max: 1000}\n"
    )
    assert evaluate(tmp_path / "report", *servers, gate=gate) == ExitCode.CHECK_FAILED
    report, samples = read_report(tmp_path / "report")
    ours, rows = expected
    assert [sample.text for sample in samples] == [record.text for record in ours]
    assert [sample.baseline_text for sample in samples] == [record.text for record in ours]
    for row, theirs in zip(report["results"], rows, strict=True):
        assert {name: row[name] for name in COUNTED} == {name: theirs[name] for name in COUNTED}
        assert row.get("acceptance_length_vllm_ci95") == theirs.get("acceptance_length_vllm_ci95")
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["baseline_tokens_per_second"]
        )
    assert report["lossless"] == {
        "greedy_identical": True,
        "prompts_checked": NUM_PROMPTS,
        "divergences": 0,
        "first_divergence": None,
        "near_ties": 0,
        "unexplained_divergences": 0,
    }
    assert report["engine"]["name"] == engine
    assert report["software"][engine] == report["engine"]["version"] == "0.32.0"
    assert report["hardware"] == {"device": "server", "name": with_draft.address}
    assert set(report["target"]) == {"model", "revision"}
    assert ("past_the_end" in [finding["name"] for finding in report["findings"]]) == (
        engine == "vllm"
    )
    assert report["measurement"]["seconds"] > sum(
        sample.speculative.seconds + sample.baseline.seconds for sample in samples
    )
    assert report["quality"]["python_syntax"]["difference"] == 0
    # A number that a client cannot measure does not pass a gate.
    verdicts = {
        rule["metric"]: (rule["passed"], rule["reason"]) for rule in report["gate"]["rules"]
    }
    assert verdicts["lossless.greedy_identical"][0]
    assert verdicts["speedup"][0]
    assert not verdicts["draft_ms"][0]  # a server does not time its steps
    assert with_draft.num_answers == without.num_answers == NUM_PROMPTS + 1


def test_without_a_baseline_server_there_is_no_speedup(draft_server, tmp_path):
    peer = draft_server(returns_tokens=False)
    peer.model = "pico"  # --served-model-name
    assert (
        evaluate(tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}")
        == ExitCode.DONE
    )
    report, samples = read_report(tmp_path / "report")
    row = report["results"][0]
    assert "speedup" not in row
    # A lookup does not draft in every round, and the server does not count rounds.
    assert "rounds" in row["not_measured"]["mean_acceptance_length"]
    assert (
        row["not_measured"].keys() >= {"speedup", "num_looping"}
        and "lossless.greedy_identical" in report["not_measured"]
    )
    assert report["lossless"] == {"prompts_checked": 0}
    assert row["tokens_per_second"] > 0
    assert samples[0].text


def test_sampled_texts_are_not_compared_token_for_token(draft_server, plain_server, tmp_path):
    servers = (
        f"eval.server={draft_server().address}",
        f"eval.baseline_server={plain_server().address}",
    )
    assert (
        evaluate(
            tmp_path / "report",
            "eval.engine=vllm",
            *servers,
            "eval.temperature=0.8",
            "eval.max_new_tokens=16",
            "eval.num_prompts=2",
        )
        == ExitCode.DONE
    )
    report, samples = read_report(tmp_path / "report")
    assert "lossless.greedy_identical" in report["not_measured"]
    assert any(sample.text != sample.baseline_text for sample in samples)


def test_a_text_that_differs_is_shown_and_fails(pico, plain_server, tmp_path):
    """The server with the draft writes another text, because it samples at every temperature."""
    with PeerServer("vllm", pico, ngram_proposer(), K) as sampling_peer:
        generate = sampling_peer.decoder.generate

        def generate_hot(*arguments, sampling, **options):
            return generate(*arguments, sampling=type(sampling)(temperature=2.0), **options)

        sampling_peer.decoder.generate = generate_hot
        servers = (
            f"eval.server={sampling_peer.address}",
            f"eval.baseline_server={plain_server().address}",
        )
        gate = "- {metric: lossless.unexplained_divergences, equals: 0}\n"
        assert (
            evaluate(
                tmp_path / "report", "eval.engine=vllm", *servers, "eval.num_prompts=2", gate=gate
            )
            == ExitCode.CHECK_FAILED
        )
    report, samples = read_report(tmp_path / "report")
    lossless = report["lossless"]
    assert not lossless["greedy_identical"]
    assert (
        lossless["divergences"]
        == sum(sample.text != sample.baseline_text for sample in samples)
        > 0
    )
    first = lossless["first_divergence"]
    assert first["speculative_token"] != first["baseline_token"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"dies_after": 4}, "http://"),
        # a second and a half each
        pytest.param({"silent_after": 4}, "did not answer", marks=pytest.mark.long),
        pytest.param({"malformed_after": 4}, "choices.0.text", marks=pytest.mark.long),
    ],
)
def test_a_server_that_dies_leaves_what_it_answered_and_a_failed_gate(
    draft_server, plain_server, tmp_path, capsys, monkeypatch, behaviour, reason
):
    peer, baseline = draft_server(**behaviour), plain_server()
    ask = Server.ask

    def ask_with_short_timeout(server, path, body=None, **options):
        """Wait for a tenth of a second, not for `server_timeout`, when no answer will come."""
        if (
            body
            and server.address == peer.address
            and peer.num_answers == peer.behaviour.silent_after
        ):
            assert server.timeout == 500
            server.timeout = 0.1
        return ask(server, path, body, **options)

    monkeypatch.setattr(Server, "ask", ask_with_short_timeout)
    servers = (
        f"eval.server={peer.address}",
        f"eval.baseline_server={baseline.address}",
        "eval.server_timeout=500",
    )
    assert evaluate(tmp_path / "report", "eval.engine=vllm", *servers) == ExitCode.RESOURCE_ERROR
    report, samples = read_report(tmp_path / "report")
    assert report["incomplete"] is True
    assert reason in report["not_measured"]["incomplete"]
    assert "3 of 6 prompts" in report["not_measured"]["incomplete"]
    assert report["results"][0]["num_prompts"] == len(samples) == 3
    assert not report["gate"]["passed"]
    assert [(rule["metric"], rule["passed"]) for rule in report["gate"]["rules"]] == [
        ("incomplete", False),
        ("acceptance_length_vllm", True),
    ]
    assert reason in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_server_that_dies_at_once_leaves_nothing(draft_server, tmp_path, capsys):
    peer = draft_server(dies_after=0)
    assert (
        evaluate(tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}")
        == ExitCode.RESOURCE_ERROR
    )
    assert peer.address in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def check_refused(capsys, folder, code, fact, *arguments):
    """Check that an evaluation ends with `code` and writes no report.

    `fact` is the key of a user's mistake, and a part of the message of any other error.
    """
    assert (evaluate(folder, *arguments), folder.exists()) == (code, False)
    error = capsys.readouterr().err
    assert refused_key(error) == fact if code == ExitCode.USER_ERROR else fact in error, error


def test_a_setting_or_a_server_that_does_not_fit_is_refused(
    draft_server, plain_server, tmp_path, capsys
):
    vllm, good, other = (
        "eval.engine=vllm",
        f"eval.server={draft_server().address}",
        plain_server().address,
    )
    for key, *arguments in (
        ("method", "eval.engine=sglang"),
        ("eval.ngram.rule", vllm, "eval.ngram.rule=llama.cpp"),
        ("eval.ngram.lookup", vllm, "eval.ngram.lookup=prompt"),
        ("eval.engine_command", vllm, good, "eval.engine_command=vllm serve"),
        ("eval.baseline_server", vllm, "eval.baseline_server=http://a"),
        ("eval.sweep.num_speculative_tokens", vllm, good, "eval.sweep.num_speculative_tokens=[2]"),
        ("eval.sweep.concurrency", "eval.sweep.concurrency=[2]"),
        ("eval.concurrency", "eval.concurrency=2"),
        ("eval.engine", "eval.engine=vlm"),
        ("eval.server", good),
        ("eval.server", vllm, "eval.server=localhost:8000"),
        ("eval.num_speculative_tokens", vllm, good, "eval.num_speculative_tokens=5"),
        ("eval.server", vllm, f"eval.server={other}"),
        ("eval.baseline_server", vllm, good, good.replace("eval.", "eval.baseline_")),
        ("suite", vllm, good, "eval.max_new_tokens=500"),
        ("eval.sweep.temperature", vllm, good, "eval.sweep.temperature=[0.5]"),
        ("eval.ngram.max", vllm, good, "eval.ngram.max=5"),
    ):
        check_refused(capsys, tmp_path / "report", ExitCode.USER_ERROR, key, *arguments)
    nobody = "http://127.0.0.1:9"
    check_refused(
        capsys, tmp_path / "report", ExitCode.RESOURCE_ERROR, nobody, vllm, f"eval.server={nobody}"
    )
    lacks = "sglang:generation_tokens_total"
    check_refused(
        capsys, tmp_path / "report", ExitCode.RESOURCE_ERROR, lacks, "eval.engine=sglang", good
    )


def test_a_server_of_another_model_or_version_is_refused(
    pico, draft_server, plain_server, tmp_path, capsys
):
    folder, good = tmp_path / "report", f"eval.server={draft_server().address}"
    with PeerServer("vllm", pico, ngram_proposer(), K, model="Qwen/Qwen3-8B") as other:
        check_refused(
            capsys, folder, 2, "eval.server", "eval.engine=vllm", f"eval.server={other.address}"
        )
    newer = f"eval.baseline_server={plain_server(version='0.33.0').address}"
    check_refused(capsys, folder, 2, "eval.baseline_server", "eval.engine=vllm", good, newer)
    hidden = f"eval.server={draft_server('sglang', metrics=False).address}"
    check_refused(capsys, folder, 3, "--enable-metrics", "eval.engine=sglang", hidden)


def test_a_server_that_serves_others_meanwhile_is_noticed(draft_server, tmp_path, capsys):
    peer = draft_server(counts_of_others=2)
    check_refused(
        capsys,
        tmp_path / "report",
        3,
        f"{NEW_TOKENS + 2} tokens, {NEW_TOKENS} of them",
        "eval.engine=vllm",
        f"eval.server={peer.address}",
    )
