import copy
import html as html_library
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.pages import write_between
from specdistill.common.errors import ResourceError
from specdistill.common.project import ROOT
from specdistill.evaluation.gate.decide import Evidence, decide, judge
from specdistill.evaluation.gate.rules import load_gate, read_rule
from specdistill.evaluation.measurement.in_engine import (
    DOCUMENT_REASONS,
    NO_BASELINE,
    NO_BASELINE_ROW,
    ROW_REASONS,
)
from specdistill.evaluation.report import charts, phrases, tables
from specdistill.evaluation.report.build import build_result_rows, list_findings
from specdistill.evaluation.report.files import (
    read_report,
    render,
    select_samples,
    to_html,
    to_picture,
    validate_report,
    write_report,
)
from specdistill.evaluation.report.phrases import describe_procedure, format_settings
from specdistill.evaluation.report.schema import build_schema
from specdistill.evaluation.report.tables import sweep
from specdistill.evaluation.report.text import print_gate, print_report, to_markdown
from specdistill.evaluation.statistics.records import Configuration
from tests.refusals import refused
from tests.rendered import HOSTILE as HOSTILE_MARKDOWN
from tests.rendered import Page, renamed
from tests.rounds import with_rounds
from tests.simulated import (
    SUITE,
    as_from_server,
    edited,
    simulate,
    simulated_report,
    simulated_sweep,
    with_text,
)

FILES = ["junit.xml", "report.html", "report.json", "report.md", "samples.jsonl"]
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">|`'


@pytest.fixture(scope="module")
def records():
    return simulate()


@pytest.fixture(scope="module")
def judged_report(records):
    report = simulated_report(records)
    report["gate"] = decide(load_gate("pico"), Evidence(report, records))
    return report


@pytest.fixture
def report(judged_report):
    return copy.deepcopy(judged_report)


def test_the_report_fits_its_schema(report):
    validate_report(report)
    assert report["results"][0]["category"] == "all"
    # Only a comparison or a real run has these parts.
    absent = {"baseline", "digest", "incomplete", "measurement", "quality"}
    assert set(build_schema()["properties"]) - set(report) == absent
    assert set(report) <= set(build_schema()["properties"])


def test_the_schema_that_ships_is_printed_from_the_code():
    shipped = json.loads((ROOT / "specdistill/evaluation/report/report.schema.json").read_text())
    assert shipped == build_schema(), "python -m specdistill.evaluation.report.schema"


@pytest.mark.parametrize(
    ("path", "value", "got"),
    [
        (("results", 0, "speedup"), "fast", "with results.0.speedup"),
        (("results", 0, "speed"), 1.0, "with results.0"),
        (("results",), [], "with results"),
        (("schema_version",), 1, "with schema_version"),
        (("settings", "drafting"), {"lookup": None}, "with settings.drafting"),
        (("lossless", "greedy_identical"), None, "with lossless.greedy_identical"),
    ],
)
def test_a_report_that_does_not_fit_the_schema_is_not_written(
    tmp_path, report, records, path, value, got
):
    with refused("report", f"report.json {got}"):
        write_report(tmp_path / "report", edited(report, path, value), records)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"drafting": {"min": 2, "lookup": "prompt"}}, ("min 2", "lookup prompt")),
        (
            {"drafting": {"min": 3, "max": 3, "lookup": "prompt"}},
            ("n-gram lookup (n = 3) in the prompt",),
        ),
        (
            {"drafting": {"rule": "vllm", "min": 1, "max": 3, "lookup": "sequence"}},
            ("n-gram lookup (rule vllm, n = 1 to 3) in prompt and output",),
        ),
        (
            {"drafting": {"rule": "llama.cpp", "min": 1, "max": 3, "lookup": "sequence"}},
            ("n-gram lookup (rule llama.cpp, n = 3) in prompt and output",),
        ),
        ({"tree": {"budget": 16, "depth": 4, "top_k": 3}}, ("16 tokens, 4 deep, top 3",)),
        ({"tree": {"branching": [4, 2]}}, ("branching 4, 2",)),
    ],
)
def test_the_drafting_settings_are_shown(report, records, settings, shown):
    report["settings"] |= settings
    report["results"] = [{**row, "tree": settings.get("tree")} for row in report["results"]]
    validate_report(report)
    for fact in shown:
        assert all(
            fact in text
            for text in (format_settings(report), to_markdown(report), to_html(report, records))
        )


@pytest.mark.parametrize("field", ["accepted_per_position", "conditional_acceptance_rate"])
def test_lists_by_position_have_a_number_for_each(report, field):
    report["results"][0] = {**report["results"][0], field: report["results"][0][field][:-1]}
    with refused("report", f"report.json with results.0: {field}"):
        validate_report(report)


def test_a_written_report_is_read_back_equal(tmp_path, report, records):
    write_report(tmp_path / "report", report, records)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == FILES
    assert read_report(tmp_path / "report") == (report, records)
    assert read_report(tmp_path / "report" / "report.json") == (report, records)


def test_rendering_depends_on_the_json_files_alone(tmp_path, report, records):
    write_report(tmp_path, report, records)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    for name in ("report.html", "report.md", "junit.xml"):
        (tmp_path / name).unlink()
    render(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_a_missing_or_invalid_report_is_refused(tmp_path, report, records):
    with refused("baseline", tmp_path / "report.json"):
        read_report(tmp_path / "report.json", key="baseline")
    (tmp_path / "report.json").write_text("{}")
    with refused("report", f"{tmp_path / 'report.json'} with schema_version"):
        read_report(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=str(tmp_path / "file")):
        write_report(tmp_path / "file" / "report", report, records)


def test_the_page_stands_alone(report, records):
    page = to_html(report, records)
    references = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", page)
    assert [reference for reference in references if not reference.startswith("data:,")] == []
    assert "url(" not in page
    assert "@import" not in page
    # Only generated text may name an address.
    silent = [replace(record, rounds=()) for record in records]
    assert "http" not in to_html(report, silent)


def test_the_verdict_comes_first(report, records):
    page = to_html(report, records)
    text = html_library.unescape(re.sub(r"<[^>]+>", " ", page[page.index("<main>") :]))
    assert text.split()[0] == "Passed"
    assert to_markdown(report).startswith("# Passed: eagle3 draft for pico\n")
    report["gate"]["rules"][0].update(verdict="failed", passed=False)
    report["gate"].update(verdict="failed", passed=False)
    assert "1 of 9 rules failed: greedy completions that are not" in to_html(report, records)
    assert to_markdown(report).startswith("# Failed: ")
    report["gate"] = {"verdict": None, "passed": False, "rules": []}
    assert "Not judged" in to_html(report, records)


@pytest.mark.parametrize(
    ("needed", "how"), [(60, "eval.num_prompts=60"), (900, "a suite with more than the 80 of")]
)
def test_an_inconclusive_verdict_says_what_it_lacks(report, records, needed, how):
    report["suite"]["num_prompts"] = 80
    report["gate"].update(verdict="inconclusive", passed=False)
    report["gate"]["rules"][4].update(verdict="inconclusive", passed=False, prompts_needed=needed)
    for page in (to_html(report, records), to_markdown(report)):
        assert "Inconclusive" in page and f"about {needed} prompts could" in page and how in page


def test_model_output_and_names_cannot_become_markup(report, records):
    hostile = [with_text(record, HOSTILE) for record in records[:4]]
    report["target"]["model"] = report["draft"]["model"] = report["suite"]["source"] = HOSTILE
    report["results"][1]["category"] = report["gate"]["rules"][0]["reason"] = HOSTILE
    report["findings"].append({"name": "x", "message": HOSTILE})
    page = to_html(report, hostile)
    assert page.count("<script") == 2  # the data and the code
    assert "<img" not in page
    data = re.search(
        r'<script type="application/json" id="samples">(.*?)</script>', page, re.DOTALL
    )[1]
    assert json.loads(data)[0]["prompt"] == HOSTILE


def test_names_cannot_become_markup_in_markdown(report, records):
    assert len(Page(HOSTILE_MARKDOWN).elements) > 5 and len(Page(HOSTILE_MARKDOWN).references) >= 8
    report["gate"]["rules"][0].update(verdict="failed", passed=False)
    del report["results"][0]["speedup"]
    report["results"][0]["not_measured"]["speedup"] = "no baseline"
    report = judge(
        load_gate("default"),
        Evidence(report, records),
        Evidence(simulated_report(records), records),
    )
    friendly, hostile = (
        Page(to_markdown(renamed(report, name))) for name in ("name", HOSTILE_MARKDOWN)
    )
    assert hostile.elements == friendly.elements and hostile.references == []
    assert "org/name@v1.2" in to_markdown(edited(report, ("target", "model"), "org/name@v1.2"))


def test_a_report_of_almost_nothing_still_renders(records):
    from specdistill.evaluation.statistics.records import RoundRecord

    nothing = [
        replace(with_rounds(record, rounds), hf_generate=None, num_in_draft_vocabulary=None)
        for record, rounds in zip(
            records[:2], ([RoundRecord((), (), (), (1,), ("x",))], []), strict=True
        )
    ]
    report = simulated_report(nothing, git_revision=None)
    validate_report(report)
    assert "git_revision" not in report
    assert report["not_measured"]["theory"]
    assert "nothing was drafted" in to_html(report, nothing)
    assert "| all of simulated | 2 | 1.00 |" in to_markdown(report)


def test_a_report_of_a_server_without_a_baseline_renders(tmp_path, records):
    served = [as_from_server(record, with_baseline=False) for record in records]
    report = simulated_report(
        served,
        results=build_result_rows(
            served, SUITE, Configuration(4), seed=0, reasons={**ROW_REASONS, **NO_BASELINE_ROW}
        ),
        target={"model": "pico", "revision": None},
        draft={"model": None, "revision": None, "method": "eagle3"},
        hardware={"device": "server", "name": "http://127.0.0.1:8000"},
        software={"python": "3.11.7", "vllm": "0.32.0"},
        engine={
            "name": "vllm",
            "version": "0.32.0",
            "server": "http://127.0.0.1:8000",
            "baseline_server": None,
        },
        lossless={"prompts_checked": 0},
        not_measured={
            **dict.fromkeys(
                ("lossless.greedy_identical", "lossless.unexplained_divergences"), NO_BASELINE
            ),
            **DOCUMENT_REASONS,
        },
        incomplete="the server died",
        theory=None,
    )
    report["gate"] = decide(load_gate("pico"), Evidence(report, served))
    write_report(tmp_path, report, served)
    assert not report["gate"]["passed"]
    failed = {
        rule["metric"]: rule["reason"] for rule in report["gate"]["rules"] if not rule["passed"]
    }
    assert failed["lossless.unexplained_divergences"] == f"no evidence: {NO_BASELINE}"
    assert "incomplete" in failed
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for rendered in (page, text):
        assert (
            "the server died" in rendered and rendered.replace("\\_", "_").count(NO_BASELINE) >= 2
        )
    assert 'id="samples"' not in page
    assert read_report(tmp_path) == (report, served)
    print_report(report, tmp_path)


def test_the_token_view_has_every_round(report, records):
    page = to_html(report, records)
    data = json.loads(re.search(r'id="samples">(.*?)</script>', page, re.DOTALL)[1])
    assert [sample["id"] for sample in data] == [record.id for record in records]
    assert {sample["category"].replace(" ", "_") for sample in data} == {
        record.category for record in records
    }
    for (emitted, accepted, rejected), entry in zip(
        data[7]["rounds"], records[7].rounds, strict=True
    ):
        assert (tuple(emitted), accepted) == (entry.emitted_text, len(entry.accepted))
        assert (*emitted[:accepted], *rejected) == entry.drafted_text


def test_samples_that_do_not_fit_the_page_are_left_out_evenly(report, records):
    whole = len(json.dumps(select_samples(records), ensure_ascii=False, separators=(",", ":")))
    some = select_samples(records, max_bytes=whole // 3)
    assert len(json.dumps(some, ensure_ascii=False, separators=(",", ":"))) <= whole // 3
    assert 12 <= len(some) <= 16
    assert {sample["category"] for sample in some} == {
        "function",
        "docstring",
        "chat",
        "long context",
    }
    assert select_samples(records, max_bytes=10) == []


def test_the_page_shows_the_first_completions_without_scripts(report, records):
    shown = re.search(r"<noscript>(.*?)</noscript>", to_html(report, records), re.DOTALL)[1]
    for record in records[:3]:
        text = html_library.unescape(
            re.sub(r"<[^>]+>", "", shown[shown.index(f"<h3>{record.id}") :])
        )
        assert record.prompt + record.text in text
    assert records[3].id not in shown


def test_junit_has_one_case_a_rule(tmp_path, report, records):
    report["gate"]["rules"][0].update(
        verdict="inconclusive",
        passed=False,
        value=None,
        reason="no evidence: control \x00 character & <markup>",
    )
    report["gate"]["rules"][6].update(verdict="failed", passed=False, severity="warn")
    write_report(tmp_path, report, records)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == [
        "9",
        "1",
        "0",
        "0",
    ]
    properties, *cases = suite
    assert [case.get("name") for case in cases[:2]] == [
        "lossless.unexplained_divergences.equals",
        "lossless.sampling_test.p_value.min",
    ]
    assert cases[-1].get("name") == "context_ratio.min@0.8"
    assert "<markup>" in cases[0].find("failure").get("message")
    assert cases[0].find("failure").get("type") == "inconclusive"
    assert (cases[6].find("failure"), cases[6].get("classname")) == (None, "gate.warnings")
    notes = {entry.get("name"): entry.get("value") for entry in properties}
    assert notes["warning.acceptance_rate.min"].startswith("acceptance rate ≥ 50%: 4")
    assert notes["finding.best_k"] == report["findings"][0]["message"]
    assert [child.tag for child in cases[2]] == ["system-out"]


@pytest.mark.parametrize("gate", sorted(path.stem for path in (ROOT / "eval/gates").glob("*.yaml")))
def test_names_of_rules_differ_and_stay_when_a_threshold_changes(records, gate):
    evidence = Evidence(simulated_report(records), records)
    rules = load_gate(gate)
    names = [
        phrases.identify_rule(rule) for rule in decide(rules, evidence, first_release=True)["rules"]
    ]
    assert len(set(names)) == len(names)
    stricter = [replace(rule, threshold=rule.threshold * 2) for rule in rules]
    assert [
        phrases.identify_rule(rule)
        for rule in decide(stricter, evidence, first_release=True)["rules"]
    ] == names


def test_a_warning_says_whether_its_rule_is_missed_undecided_or_without_evidence(report, records):
    rules = [
        {"metric": "acceptance_rate", "min": 0.9, "severity": "warn"},
        {"metric": "acceptance_rate", "min": 0.45, "severity": "warn"},
        {
            "metric": "acceptance_rate",
            "min": 0.5,
            "severity": "warn",
            "scope": {"category": "none"},
        },
    ]
    judged = judge([read_rule("gate", rule) for rule in rules], Evidence(report, records))
    missed, undecided, unknown = phrases.list_warnings(judged)
    assert "≥ 90% is not reached: " in missed and "≥ 45% is undecided: " in undecided
    assert "[none] cannot be judged: no evidence; " in unknown


def test_a_rule_says_each_value_once_with_its_unit(report, records):
    page = html_library.unescape(re.sub(r"<[^>]+>", " ", to_html(report, records))).replace(
        "\xa0", " "
    )
    assert "Acceptance length ≥ 2.7 tokens" in page and "2.79 tokens (2.70 to 2.88)" in page
    assert (
        "Warning: acceptance rate ≥ 50% is not reached: measured 44.8% (42.6 to 47)."
        in page[: page.index("The gate")]
    )
    gate = page[page.index("Outcome") : page.index("Token by token")]
    assert "lower 95%" not in gate and "required" not in gate and gate.count("0.42") == 1
    budget = {
        **report["gate"]["rules"][0],
        "metric": "measurement.peak_memory_bytes",
        "requirement": {"max": 80_000_000_000},
    }
    assert phrases.name_rule(budget) == "peak memory ≤ 80 GB"
    assert phrases.format_measured({**budget, "value": 678_000_000}) == "0.678 GB"
    unsure = {
        **budget,
        "passed": False,
        "verdict": "inconclusive",
        "confidence": 0.8,
        "prompts_needed": 45_634,
    }
    assert phrases.note(unsure) == "more than 10,000 prompts could decide at 80% confidence"


def test_a_page_changes_between_its_marks_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\nend\n", encoding="utf-8"
    )
    for mark, text in (("a", "| \\1 |"), ("b", "new")):
        write_between(page, mark, text)
    assert (
        page.read_text(encoding="utf-8")
        == "# Title\n<!-- a -->\n| \\1 |\n<!-- /a -->\n<!-- b -->\nnew\n<!-- /b -->\nend\n"
    )
    with pytest.raises(AssertionError):
        write_between(page, "c", "lost")


def test_changes_since_the_baseline_stand_beside_the_verdict(tmp_path, report, records):
    before = simulate(conditional=(0.6, 0.55, 0.5, 0.5))
    old = simulated_report(before)
    old["draft"]["model"] = "runs/before/<draft>"
    report = judge(load_gate("pico"), Evidence(report, records), Evidence(old, before))
    write_report(tmp_path, report, records)
    page = html_library.unescape((tmp_path / "report.html").read_text())
    markdown = (tmp_path / "report.md").read_text()
    assert page.index("Passed") < page.index("Since the last release") < page.index("The gate")
    for rendered in (page, markdown.replace("\\", "")):
        for fact in ("runs/before/<draft>", "10 numbers", "8 better", "0 worse", "2 open"):
            assert fact in rendered
    length = next(
        entry
        for entry in report["baseline"]["changes"]
        if entry["metric"] == "mean_acceptance_length"
    )
    assert f"{length['change']:+.1%}" in page
    assert "| acceptance length, long context |" in markdown
    quiet = judge(load_gate("pico"), Evidence(report, records))
    assert "baseline" not in quiet
    assert "Since the last release" not in to_html(quiet, records)


def test_absent_numbers_say_why_and_are_never_zero(report, records):
    row = report["results"][0]
    for name in (
        "speedup",
        "speedup_ci95",
        "predicted_speedup",
        "prediction_gap",
        "draft_ms",
        "verify_ms",
        "baseline_step_ms",
    ):
        del row[name]
        row["not_measured"][name] = "the server does not tell"
    report["theory"] = None
    del report["theory"]
    page, markdown = to_html(report, records), to_markdown(report)
    assert all(text.count("the server does not tell") >= 2 for text in (page, markdown))
    assert "nan" not in re.sub(r"<script.*", "", page, flags=re.DOTALL).lower()
    print_report(report, Path("somewhere"))


def test_a_sweep_is_drawn_and_listed_whole(report, records):
    swept = simulated_sweep(report, num_prompts=8)
    validate_report(swept)
    page, markdown = to_html(swept, records), to_markdown(swept)
    measured = {
        row["num_speculative_tokens"]: row["speedup"]
        for row in sweep(swept, "num_speculative_tokens")
    }
    assert sorted(measured) == [1, 2, 4, 6, 8]
    assert all(f"K = {k}: {speedup:.2f}×" in page for k, speedup in measured.items())
    for average in (report["headline"], report["headline"]["micro"]):
        assert (
            f"{average['average'][1:]}: acceptance length {average['mean_acceptance_length']:.2f} ("
            in page
        )
    assert "64 tokens</text>" in page
    assert "whole prompts" not in page
    for figure in ("By temperature", "By prompt length", "Speedup against the batch"):
        assert figure in page
        assert figure not in to_html(report, records)
    assert "All 12 configurations measured" in page
    assert "| all of simulated | 48 | " in markdown and "| passed | speedup |" in markdown
    assert "| simulated, K = 4, T = 0.8, batch 1 | 8 | " in markdown
    assert "| simulated, K = 4, greedy, batch 1, prompts cut to 64 tokens | 8 | " in markdown
    assert markdown.count("| function | ") == 1  # categories of the main configuration alone
    assert len(markdown) < 10_000


def test_task_quality_stands_beside_losslessness(report, records):
    entry = {"num_prompts": 48, "with_draft": 0.75, "without_draft": 0.7708, "difference": -0.0208}
    entry |= {
        "difference_ci95": [-0.09, 0.05],
        "only_with_draft": 1,
        "only_without_draft": 2,
        "p_value": 1.0,
    }
    report["quality"] = {
        "exact_match": entry,
        "python_syntax": {**entry, "difference_ci95": [-0.2, -0.01]},
    }
    page, markdown = to_html(report, records), to_markdown(report)
    for rendered in (page, markdown):
        assert "Task quality" in rendered
        assert rendered.count("equal within the interval") == 1
        assert "−9.0 to +5.0" in rendered
    assert (
        "| python syntax | 48 | 77.1% | 75.0% | −2.1 (−20.0 to −1.0) | different (1 only with it, 2"
        " only without it) |" in markdown
    )
    assert "Task quality" not in to_html({**report, "quality": {}}, records)
    del entry["difference_ci95"]
    report["quality"] = {"exact_match": entry}
    assert "(too few completions) | open (" in to_markdown(report)


def test_batches_and_engines_are_described_with_the_settings(report, records):
    report["settings"] |= {"batch_size": 8}
    assert all(
        fact in describe_procedure(report)
        for fact in ("3 times", "2 warm-up batches", "8 at a time")
    )
    report["engine"] = {
        "name": "vllm",
        "version": "0.32.0",
        "server": "http://a",
        "baseline_server": None,
    }
    report["settings"] |= {"repeats": 1, "warmup": 1}
    assert all(
        fact in describe_procedure(report)
        for fact in ("no baseline", "1 time ", "1 warm-up prompt")
    )
    report["engine"]["baseline_server"] = "http://b"
    assert "no baseline" not in describe_procedure(report)
    page = to_html(report, records)
    assert "vllm 0.32.0" in page and "8 requests in flight" in page
    report["engine"] = {
        "name": "vllm",
        "version": "0.32.0",
        "command": "vllm serve it",
        "baseline_command": "vllm serve",
    }
    page = to_html(report, records)
    assert "<code>vllm serve it</code>" in page and "<code>vllm serve</code>" in page


def test_a_prompt_of_a_batch_has_no_speedup_of_its_own(records):
    alone, together = select_samples(
        [
            records[0],
            replace(records[1], configuration=replace(records[1].configuration, batch_size=4)),
        ]
    )
    assert alone["speedup"] > 1
    assert together["speedup"] is None


def test_the_parts_of_a_token_s_time_add_up(records):
    noisy = [
        replace(record, baseline=replace(record.baseline, draft_seconds=0.001))
        for record in records
    ]
    rows = {
        name: [float(value.replace("–", "0")) for (value,) in values]
        for (name,), *values in tables.tabulate_latency(noisy).rows
    }
    for column, side in enumerate(("baseline", "speculative")):
        timings = [getattr(record, side) for record in noisy]
        whole = 1000 * sum(timing.seconds for timing in timings)
        counts = {
            "prefill of a prompt": len(timings),
            "per token, in all": sum(timing.num_tokens for timing in timings),
        }
        times = {
            name: line[column] * counts.get(name, sum(timing.num_rounds for timing in timings))
            for name, line in rows.items()
        }
        assert times.pop("per token, in all") == pytest.approx(whole, rel=0.01)
        assert sum(times.values()) == pytest.approx(whole, rel=0.01)
    # Plain decoding drafts nothing, although its timing holds some draft seconds.
    assert rows["drafting, per round"] == [0, 1.20]
    assert rows["target's step, per round"] == [2.50, 3.21]


def test_the_chart_draws_the_acceptance_length_as_the_ceiling(report):
    row, theory = report["results"][0], report["theory"]
    plot = ElementTree.fromstring(charts.draw_speedup_by_k(theory, [row]))
    up, predicted = (
        [float(point.split(",")[1]) for point in curve.get("points").split()]
        for curve in plot.iter("polyline")
    )
    (one,) = (
        float(line.get("y1")) for line in plot.iter("line") if line.get("stroke-dasharray") == "3 4"
    )
    (measured,) = (
        float(dot.get("cy")) for dot in plot.iter("circle") if dot.find("title") is not None
    )
    assert up[0] == one == predicted[0]  # a draft of no tokens gains nothing
    # A higher point of the chart has a smaller y.
    assert all(high < low for high, low in zip(up[1:], predicted[1:], strict=True))
    assert up[4] < measured < one
    assert [text.text for text in plot.iter("text") if text.get("text-anchor") == "middle"][:5] == [
        *"01234"
    ]


def test_a_screen_reader_finds_a_text_for_every_figure(report, records):
    page = to_html(simulated_sweep(report, num_prompts=8), records)
    figures = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(figures) >= 7
    for figure in figures:
        svg = ElementTree.fromstring(figure)
        assert svg.get("aria-label") and re.search(r"\d", svg.findtext("desc"))
    heads = re.findall(r"<th\b[^>]*>", page)
    assert heads and all(re.search(r'scope="(col|row)"', head) for head in heads)


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_bars_stand_out_from_the_page(number):
    style = (ROOT / "specdistill/evaluation/report/style.css").read_text(encoding="utf-8")
    colours = dict(
        re.findall(
            r"--(\w+): (#[0-9a-f]+)", re.findall(r":root \{(.*?)\}", style, re.DOTALL)[number]
        )
    )

    def luminance(colour):
        channels = (
            int(digits * (2 // len(digits)), 16) / 255
            for digits in re.findall("." * ((len(colour) - 1) // 3), colour[1:])
        )
        linear = [
            channel / 12.92 if channel <= 0.03928 else ((channel + 0.055) / 1.055) ** 2.4
            for channel in channels
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = luminance(colours["paper"])
    for name in {"bar", "low", "good", "bonus", "mine", "muted"}:
        darker, lighter = sorted((luminance(colours[name]), paper))
        assert (lighter + 0.05) / (darker + 0.05) >= 3, name


def test_the_picture_is_one_file_of_xml(report, records):
    hostile = [with_text(record, f"{HOSTILE}\x00") for record in records]
    report["target"]["model"] = HOSTILE
    picture = ElementTree.fromstring(to_picture(report, hostile))
    text = "".join(picture.itertext())
    for shown in (
        "Passed",
        "2.79 tokens",
        "1.56×",
        "yes",
        "74%",
        "position in the draft",
        "alert(1)",
    ):
        assert shown in text
    assert {element.tag.rpartition("}")[2] for element in picture.iter()} & {
        "script",
        "img",
    } == set()
    nothing = to_picture(simulated_report(records[:1], theory=None), [])
    assert "Not judged" in "".join(ElementTree.fromstring(nothing).itertext())


def test_the_console_says_the_main_things(report, tmp_path, capsys):
    report["gate"]["rules"][3].update(verdict="failed", passed=False)
    report["gate"].update(verdict="failed", passed=False)
    print_report(report, tmp_path)
    printed = capsys.readouterr().out
    for word in (
        "acceptance length",
        "accepted per position",
        "speedup",
        "predicted speedup",
        "Failed",
        "report.html",
    ):
        assert word in printed
    assert "failed" in printed.split("note:")[-1]
    print_gate(report)
    printed = capsys.readouterr().out
    assert printed.count("passed") == 7
    assert printed.rstrip().endswith("Failed")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("prediction_gap", lambda report: report["results"][0].update(prediction_gap=0.2)),
        ("divergence", lambda report: report["lossless"].update(unexplained_divergences=1)),
        ("near_ties", lambda report: report["lossless"].update(near_ties=2)),
        (
            "insensitive_sampling_test",
            lambda report: report["lossless"]["sampling_test"].update(
                negative_control_p_value=0.02
            ),
        ),
        ("disturbed", lambda report: report["results"][0].update(num_disturbed_rounds=3)),
        ("loops", lambda report: report["results"][0].update(num_looping=9)),
        ("best_k", lambda report: report["theory"].update(best_k=2, predicted=1.2)),
        ("wide_interval", lambda report: report["results"][0].update(speedup_ci95=[1.0, 2.0])),
    ],
)
def test_each_suspicious_number_gives_a_finding(report, name, change):
    quiet = simulated_report(simulate(), theory=None)
    assert [finding["name"] for finding in quiet["findings"]] == []
    report["findings"] = []
    change(report)
    assert name in list_findings(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report["theory"].update(cost_deviation=0.5),
        lambda report: report["results"][0].update(speedup_ci95=[0.7, 2.4]),
    ],
)
def test_a_gain_within_the_noise_gives_no_advice(report, change):
    report["theory"].update(best_k=2, predicted=1.2)
    assert "best_k" in list_findings(report)
    change(report)
    assert "best_k" not in list_findings(report)


@pytest.mark.parametrize(("device", "most"), [("cpu", 0.1), ("cuda", 0.03)])
def test_the_limit_on_the_prediction_gap_is_stricter_on_a_gpu(report, device, most):
    report["hardware"]["device"] = device
    for gap in (most, most + 1e-6):
        assert (
            "prediction_gap" in list_findings(edited(report, ("results", 0, "prediction_gap"), gap))
        ) == (gap > most)
