"""eval/run.py against servers that write pico's own text: the numbers are those of the decoder inside them."""

import json

import pytest
import requests

from specdistill.errors import ExitCode
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measure import prompt_records
from specdistill.methods.ngram.method import NgramProposer
from specdistill.project import PICO
from specdistill.report.build import result_rows
from specdistill.report.files import read_report
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from tests import scripts
from tests.measuring import measure
from tests.servers.peer import Behaviour, PeerServer

K, NUM_PROMPTS, NEW_TOKENS = 3, 6, 24
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "num_new_tokens", "num_looping")


@pytest.fixture(scope="module")
def pico():
    target = FrozenTarget.load("pico")
    target.name = str(PICO)
    return target


@pytest.fixture
def speculative(pico):
    made = []

    def start(engine="vllm", **behaviour):
        made.append(PeerServer(engine, pico, NgramProposer(), K, behaviour=Behaviour(**behaviour)).__enter__())
        return made[-1]

    yield start
    for peer in made:
        peer.close()


@pytest.fixture
def plain(pico):
    made = []

    def start(engine="vllm", **behaviour):
        made.append(PeerServer(engine, pico, behaviour=Behaviour(**behaviour)).__enter__())
        return made[-1]

    yield start
    for peer in made:
        peer.close()


@pytest.fixture(scope="module")
def expected(pico):
    """The rows of our own harness over the same prompts."""
    suite = load_suite("pico")
    prompts = tokenize(suite, pico.tokenizer, max_new_tokens=NEW_TOKENS, max_length=pico.max_length, num_prompts=NUM_PROMPTS)
    settings = Settings(K, NEW_TOKENS, repeats=1, warmup=0)
    proposer = NgramProposer()
    runs = measure(pico, proposer, prompts, settings)
    measured = prompt_records(suite.name, settings.configuration, pico, proposer, runs)
    return measured, result_rows(measured, suite, settings.configuration, seed=0)


def evaluate(folder, *arguments, gate="- {metric: mean_acceptance_length, min: 1.0}\n"):
    (folder.parent / "gate.yaml").write_text(gate)
    return scripts.evaluate(
        "target=pico",
        "method=ngram",
        "suite=pico",
        f"output_dir={folder}",
        f"gate={folder.parent / 'gate.yaml'}",
        f"eval.num_speculative_tokens={K}",
        f"eval.max_new_tokens={NEW_TOKENS}",
        f"eval.num_prompts={NUM_PROMPTS}",
        "eval.repeats=1",
        "eval.warmup=1",
        *arguments,
    )


@pytest.mark.usefixtures("simulated_clock")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_servers_report_holds_the_decoders_own_numbers(engine, speculative, plain, expected, tmp_path):
    with_draft, without = speculative(engine), plain(engine)
    servers = (f"eval.engine={engine}", f"eval.server={with_draft.address}", f"eval.baseline_server={without.address}")
    gate = (
        "- {metric: lossless.greedy_identical, equals: true}\n- {metric: speedup, min: 0.01}\n- {metric: draft_ms, max: 1000}\n"
    )
    assert evaluate(tmp_path / "report", *servers, gate=gate) == ExitCode.CHECK_FAILED
    report, samples = read_report(tmp_path / "report")
    ours, rows = expected
    assert [sample.text for sample in samples] == [record.text for record in ours]
    assert [sample.baseline_text for sample in samples] == [record.text for record in ours]
    for row, theirs in zip(report["results"], rows, strict=True):
        assert {name: row[name] for name in COUNTED} == {name: theirs[name] for name in COUNTED}
        assert row.get("mean_acceptance_length_ci95") == theirs.get("mean_acceptance_length_ci95")
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["baseline_tokens_per_second"])
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
    assert ("gauges" in report["engine"]) == (engine == "sglang")
    assert ("past_the_end" in [finding["name"] for finding in report["findings"]]) == (engine == "vllm")
    assert report["measurement"]["seconds"] > sum(sample.speculative.seconds + sample.baseline.seconds for sample in samples)
    assert report["quality"]["python_syntax"]["difference"] == 0
    assert "Task quality" in (tmp_path / "report" / "report.md").read_text()
    # What nobody can see from outside does not pass a gate.
    verdicts = {rule["metric"]: (rule["passed"], rule["reason"]) for rule in report["gate"]["rules"]}
    assert verdicts["lossless.greedy_identical"][0]
    assert verdicts["speedup"][0]
    assert verdicts["draft_ms"] == (False, "no evidence: a server does not time its steps one by one")
    assert with_draft.num_answers == without.num_answers == NUM_PROMPTS + 1


def test_without_a_baseline_server_there_is_no_speedup(speculative, tmp_path):
    peer = speculative(returns_tokens=False)
    peer.model = "pico"  # --served-model-name
    assert evaluate(tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}") == ExitCode.DONE
    report, samples = read_report(tmp_path / "report")
    row = report["results"][0]
    assert "speedup" not in row
    assert row["not_measured"]["speedup"] == "no eval.baseline_server was given"
    assert row["not_measured"]["num_looping"] == "the server does not return its tokens"
    assert report["not_measured"]["lossless.greedy_identical"] == "no eval.baseline_server was given"
    assert report["lossless"] == {"prompts_checked": 0}
    assert row["tokens_per_second"] > 0
    assert samples[0].text


def test_old_names_of_sglang_count_too(speculative, expected, tmp_path):
    peer = speculative("sglang", old_names=True)
    assert evaluate(tmp_path / "report", "eval.engine=sglang", f"eval.server={peer.address}") == ExitCode.DONE
    report, _ = read_report(tmp_path / "report")
    assert report["results"][0]["accepted_per_position"] == expected[1][0]["accepted_per_position"]


def test_sampled_texts_are_not_compared_token_for_token(speculative, plain, tmp_path):
    servers = (f"eval.server={speculative().address}", f"eval.baseline_server={plain().address}")
    assert evaluate(tmp_path / "report", "eval.engine=vllm", *servers, "eval.temperature=0.8") == ExitCode.DONE
    report, samples = read_report(tmp_path / "report")
    assert report["not_measured"]["lossless.greedy_identical"] == "sampled outputs differ by chance"
    assert any(sample.text != sample.baseline_text for sample in samples)


def test_a_text_that_differs_is_shown_and_fails(pico, plain, tmp_path):
    """The draft's server writes another text: it samples, whatever it is asked."""
    with PeerServer("vllm", pico, NgramProposer(), K) as wrong:
        generate = wrong.decoder.generate

        def hot(*arguments, sampling, **options):
            return generate(*arguments, sampling=type(sampling)(temperature=2.0), **options)

        wrong.decoder.generate = hot
        servers = (f"eval.server={wrong.address}", f"eval.baseline_server={plain().address}")
        gate = "- {metric: lossless.unexplained_divergences, equals: 0}\n"
        assert evaluate(tmp_path / "report", "eval.engine=vllm", *servers, gate=gate) == ExitCode.CHECK_FAILED
    report, samples = read_report(tmp_path / "report")
    lossless = report["lossless"]
    assert not lossless["greedy_identical"]
    assert lossless["divergences"] == sum(sample.text != sample.baseline_text for sample in samples) > 0
    first = lossless["first_divergence"]
    assert first["speculative_token"] != first["baseline_token"]
    assert "no logits" in report["gate"]["rules"][0]["reason"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [({"dies_after": 4}, "does not answer"), ({"silent_after": 4}, "did not answer in 500 s")],
)
def test_a_server_that_dies_leaves_what_it_answered_and_a_failed_gate(
    speculative, plain, tmp_path, capsys, monkeypatch, behaviour, reason
):
    peer, baseline = speculative(**behaviour), plain()
    request = requests.Session.request

    def impatient(session, method, url, *, timeout, **options):
        """Waits for a tenth of a second, not for `server_timeout`, when there will be no answer."""
        if method == "POST" and url.startswith(peer.address) and peer.num_answers == peer.behaviour.silent_after:
            assert timeout[1] == 500
            timeout = 0.1
        return request(session, method, url, timeout=timeout, **options)

    monkeypatch.setattr(requests.Session, "request", impatient)
    servers = (f"eval.server={peer.address}", f"eval.baseline_server={baseline.address}", "eval.server_timeout=500")
    assert evaluate(tmp_path / "report", "eval.engine=vllm", *servers) == ExitCode.RESOURCE_ERROR
    report, samples = read_report(tmp_path / "report")
    assert report["incomplete"] is True
    assert reason in report["not_measured"]["incomplete"]
    assert "(3 of 6 prompts were measured)" in report["not_measured"]["incomplete"]
    assert report["results"][0]["num_prompts"] == len(samples) == 3
    assert not report["gate"]["passed"]
    assert [(rule["metric"], rule["passed"]) for rule in report["gate"]["rules"]] == [
        ("incomplete", False),
        ("mean_acceptance_length", True),
    ]
    assert reason in capsys.readouterr().err.strip().splitlines()[-1]
    assert "The measurement was cut short" in (tmp_path / "report" / "report.md").read_text()


def test_a_server_that_dies_at_once_leaves_nothing(speculative, tmp_path, capsys):
    peer = speculative(dies_after=0)
    assert evaluate(tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}") == ExitCode.RESOURCE_ERROR
    assert "does not answer; start the server" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def refused(capsys, folder, *arguments):
    code = evaluate(folder, *arguments)
    assert not folder.exists()
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    return code, said


def test_what_is_no_such_server_is_refused(speculative, plain, tmp_path, capsys):
    folder, drafting, other = tmp_path / "report", speculative(), plain()
    good = f"eval.server={drafting.address}"
    for arguments, code, message in (
        (
            ["eval.engine=vllm"],
            2,
            "method: got ngram with eval.engine=vllm, expected a method with a draft to serve, or a running",
        ),
        (
            ["eval.engine=vllm", good, "eval.engine_command=vllm serve"],
            2,
            "read only with eval.engine=vllm or sglang and no eval.server",
        ),
        (
            ["eval.engine=vllm", "eval.baseline_server=http://a"],
            2,
            "eval.baseline_server: got http://a, expected null: it is read only",
        ),
        (["eval.engine=vllm", good, "eval.sweep.num_speculative_tokens=[2]"], 2, "it is read only without eval.server"),
        (
            ["eval.sweep.concurrency=[2]"],
            2,
            "eval.sweep.concurrency: got [2], expected []: it is read only with eval.engine=vllm",
        ),
        (["eval.concurrency=2"], 2, "eval.concurrency: got 2, expected 1: it is read only with eval.engine=vllm"),
        (["eval.engine=vlm"], 2, "did you mean vllm?"),
        ([good], 2, f"eval.server: got {drafting.address}, expected null: it is read only with eval.engine=vllm or sglang"),
        (["eval.engine=vllm", "eval.server=localhost:8000"], 2, "expected the address of a running server, as http://"),
        (["eval.engine=vllm", "eval.server=http://127.0.0.1:9"], 3, "http://127.0.0.1:9/metrics does not answer"),
        (["eval.engine=vllm", good, "eval.num_speculative_tokens=5"], 2, "got 5, expected 3, as the server at"),
        (["eval.engine=vllm", f"eval.server={other.address}"], 2, "which does not draft"),
        (["eval.engine=vllm", good, f"eval.baseline_server={drafting.address}"], 2, "eval.baseline_server: got"),
        (["eval.engine=sglang", good], 3, "has no sglang:generation_tokens_total"),
        (["eval.engine=vllm", good, "eval.max_new_tokens=500"], 2, "the target's context"),
        (
            ["eval.engine=vllm", good, "eval.sweep.temperature=[0.5]"],
            2,
            "it is read only with eval.engine=specdistill: a server drafts as it was started",
        ),
        (["eval.engine=vllm", good, "eval.ngram.max=5"], 2, "it is read only with eval.engine=specdistill"),
    ):
        got, said = refused(capsys, folder, *arguments)
        assert (got, message in said) == (code, True), said


def test_a_server_of_another_model_or_version_is_refused(pico, speculative, plain, tmp_path, capsys):
    folder, good = tmp_path / "report", f"eval.server={speculative().address}"
    with PeerServer("vllm", pico, NgramProposer(), K, model="Qwen/Qwen3-8B") as other:
        code, said = refused(capsys, folder, "eval.engine=vllm", f"eval.server={other.address}")
    assert (code, "which serves Qwen/Qwen3-8B, expected a server of" in said) == (2, True)
    newer = plain(version="0.33.0")
    code, said = refused(capsys, folder, "eval.engine=vllm", good, f"eval.baseline_server={newer.address}")
    assert (code, "got vllm 0.33.0, expected 0.32.0" in said) == (2, True)
    hidden = speculative("sglang", metrics=False)
    code, said = refused(capsys, folder, "eval.engine=sglang", f"eval.server={hidden.address}")
    assert (code, "answered 404" in said, "start SGLang with --enable-metrics" in said) == (3, True, True)


def test_a_server_that_serves_others_meanwhile_is_noticed(speculative, tmp_path, capsys):
    peer = speculative(counts_of_others=2)
    code, said = refused(capsys, tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}")
    assert (code, "served others too: it generated 26 tokens, of which 24 are ours" in said) == (3, True)


def test_samples_hold_what_the_report_is_made_of(speculative, tmp_path):
    peer = speculative()
    evaluate(tmp_path / "report", "eval.engine=vllm", f"eval.server={peer.address}")
    rows = [json.loads(line) for line in (tmp_path / "report" / "samples.jsonl").read_text().splitlines()]
    report, _ = read_report(tmp_path / "report")
    assert sum(row["counts"]["num_accepted_tokens"] for row in rows) == report["results"][0]["num_accepted_tokens"]
    assert all(len(row["counts"]["token_ids"]) == row["speculative"]["num_tokens"] for row in rows)
    assert all(row["speculative"]["draft_seconds"] is None for row in rows)
