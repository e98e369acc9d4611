"""The command line as a person meets it: its messages, its files and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdistill.cli.command import run
from specdistill.cli.main import VERBS, main
from specdistill.common import errors
from specdistill.common.project import ROOT
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused_key
from tests.scripts import specdistill


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_usage_lists_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(VERBS)


def test_an_interrupt_ends_the_command_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The interrupt comes while pico is loaded."""
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "a few words"}\n' * 30, encoding="utf-8")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FrozenTarget, "load", interrupt)
    assert main(["data", "recipe=pico/eagle3", f"data.source={source}"]) == 130
    assert main(["eval", "method=ngram", "target.model=pico", "eval.suite=pico"]) == 130
    assert capfd.readouterr().err.splitlines()[-2:] == [
        "interrupted",
        "interrupted; the same command resumes",
    ]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("trian", "specdistill trian: got an unknown verb, expected .*; did you mean train\\?"),
        (
            "train recipe=pico/eagl",
            "recipe: got 'pico/eagl', expected .*; did you mean pico/eagle\\?",
        ),
        ("train recipe=pico/target shape.layers=1", "shape.layers: got an unknown key"),
        ("train target.model=pico", "train.output_dir is required: "),
        (
            "train --recipe pico/eagle3",
            "unknown option --recipe. Options are key=value: recipe=pico/eagle3\n",
        ),
        (
            "train --train.output-dir=x",
            "unknown option --train.output-dir. Options are key=value: train.output_dir=x\n",
        ),
        (
            "train recipe=pico/eagle3 warmup_ratio=0.1",
            "warmup_ratio: .*did you mean train.warmup_steps, ",
        ),
        (
            "train recipe=pico/eagle3 data.max_seq_length=9",
            "data.max_seq_length: .*did you mean data.max_length\\?",
        ),
        (
            "export engine=llama_cpp draft=a output_dir=b",
            "engine: got 'llama_cpp', .*did you mean gguf\\?",
        ),
        (
            (
                "train recipe=pico/eagle3 data.decontaminate=pico,near"
                " data.regenerate.temperatures=0,hot"
            ),
            "data.regenerate.temperatures\\[1\\]: got 'hot'",
        ),
        ("train recipe=pico/eagle3 method=ngram", "method: got ngram, which needs no training"),
        ("eval recipe=nope", "recipe: got 'nope'"),
        ("demo eval.temperature=-1", "eval.temperature: got -1"),
        ("plan", "target.model is required: "),
        ("plan target=pico suite=pico", "suite: got an unknown key"),
        ("plan target=nowhere/at/all", "target: got nowhere/at/all"),
        (
            "plan target=pico training.batch_size=2147483648",
            "training.batch_size: got 2147483648, .* at most 1024",
        ),
        ("acquire target=pico", "method is required: "),
        ("acquire target=pico method=eagle4", "method: got 'eagle4'"),
        (
            "doctor draft=runs/x target.dtype=bfloat16",
            "target.dtype: only used with target=PATH. Remove ",
        ),
        (
            "doctor draft=runs/x target.adapter=somewhere",
            "target.adapter: only used with target=PATH. Remove ",
        ),
        ("doctor draft=runs/x suite=pico", "suite: only used .*decode=true. Remove suite=pico."),
        (
            "doctor draft=runs/x target=pico decode=false eval.num_prompts=3",
            "eval.num_prompts: only used .*decode=true. ",
        ),
        (
            "doctor draft=runs/x target=pico decode=false target.device_map=cpu",
            "target.device_map: .* Remove ",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments: str, refused: str):
    """It is the only line on stderr, and nothing is on stdout."""
    result = specdistill(*arguments.split())
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert re.match(f"error: {refused}", result.stderr)


def test_a_full_accelerator_ends_with_exit_code_three(capsys: pytest.CaptureFixture[str]):
    import torch

    def run_out_of_memory(recipe: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert run(run_out_of_memory, Recipe, ["target.model=pico", "train.output_dir=runs"]) == 3
    assert "CUDA out of memory." in capsys.readouterr().err


def test_a_script_does_not_repeat_a_secret(capsys: pytest.CaptureFixture[str]):
    secret = "hf_" + "abCD12" * 6
    assert run(lambda recipe: None, Recipe, [f"recipe={secret}"]) == 2
    assert secret not in capsys.readouterr().err


def test_the_first_process_of_a_machine_reports_an_error_first(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", "recipe=nope"]) == 2
    assert slept == [errors.SECONDS_APART]


def test_debug_shows_the_traceback_and_keeps_the_exit_code(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe=nope", "debug=true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and refused_key(said) == "recipe"


def test_a_mistake_in_the_training_arguments_writes_nothing(in_empty_folder: Path):
    result = specdistill("train", "recipe=pico/eagle3", "train.output_dir=run", "train.max_stepz=1")
    assert (result.returncode, refused_key(result.stderr)) == (2, "train.max_stepz")
    assert list(in_empty_folder.iterdir()) == []


def test_light_verbs_do_not_import_torch():
    helped = [f"{verb} --help" for verb in ("", *VERBS) if verb != "compare"]
    light = [*helped, "train recipe=nope", "gate report=nowhere"]
    tried = (
        f"import sys, specdistill.cli.main as c; heavy = [a for a in {light} if [c.main(a.split()),"
        " 'torch' in sys.modules][1]]"
    )
    line = [sys.executable, "-c", f"{tried}; sys.exit(str(heavy) if heavy else 0)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr


def test_wrong_files_are_refused_before_torch_is_imported(tmp_path: Path):
    (tmp_path / "column.jsonl").write_text('{"q": "hi"}\n', encoding="utf-8")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tmp_path / "text.jsonl").write_text('{"text": "hi"}\n', encoding="utf-8")
    train = "train recipe=small/eagle3 target=nobody/nothing"
    compare = "compare target=nobody/nothing drafts=[ngram,suffix] output_dir=out"
    wrong = [
        f"{train} data.source=nowhere.jsonl",
        f"{train} data.source=column.jsonl",
        f"{train} data.source=rows.csv",
        f"{train} data.source=text.jsonl gate=nogate",
        f"{train} data.source=text.jsonl suite=nowhere.jsonl",
        "data make recipe=small/eagle3 target=nobody/nothing data.source=nowhere.jsonl",
        "eval method=ngram target=nobody/nothing suite=column.jsonl output_dir=out",
        "eval method=ngram target=nobody/nothing suite=pico gate=nogate output_dir=out",
        f"{compare} suite=column.jsonl",
    ]
    line = (
        f"import sys, specdistill.cli.main as c; print([int(c.main(a.split())) for a in {wrong}],"
        " 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", line],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    keys = [refused_key(error) for error in result.stderr.splitlines()]
    assert keys == [*["data.source"] * 3, "gate", "suite", "data.source", "suite", "gate", "suite"]
    assert result.stdout == f"{[2] * len(wrong)} False\n"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("train recipe=pico/target", "curriculum.batch_tokens"),
        ("train", "num_machines"),
        ("demo", "eval.num_speculative_tokens"),
        ("data", "data.max_length"),
        ("gate", "baseline"),
        ("acquire", "dry_run"),
        ("export", "output_dir"),
        ("publish", "force"),
    ],
)
def test_help_of_a_verb_lists_its_keys(arguments: str, key: str):
    result = specdistill(*arguments.split(), "--help", "all")
    assert result.returncode == 0 and f"  {key} " in result.stdout


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "compare"])
def test_help_is_one_screen_and_its_keys_exist(verb: str):
    shown, whole = (specdistill("help", verb, *more).stdout for more in ((), ("all",)))
    assert shown.count("\n") <= 60
    keys = [re.findall(r"^  ([\w.]+) ", text, re.MULTILINE) for text in (shown, whole)]
    assert set(VERBS[verb].common.split()) <= set(keys[0]) <= set(keys[1])


def test_help_lists_the_keys_of_one_method(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "method=draft_model", "--help", "all"]) == 0
    shown = capsys.readouterr().out
    assert "  draft.lora.rank " in shown and "hidden_states." not in shown


def test_json_is_one_document_and_quiet_prints_no_messages(shell: "Shell", in_empty_folder: Path):
    for arguments in (["help"], ["help", "train"], ["--version"]):
        assert json.loads(specdistill(*arguments, "--json").stdout)
    assert specdistill("demo").stderr.startswith("$ specdistill train")
    assert specdistill("demo", "--quiet").stderr == ""
    refused = specdistill("train", "recipe=nope", "--json", "--quiet")
    assert refused.stdout == "" and refused_key(refused.stderr) == "recipe"
    assert specdistill("--version").stdout.startswith("specdistill ")  # earlier flags no longer act


def test_quiet_hides_progress_and_keeps_the_error(in_empty_folder: Path):
    Path("rows.jsonl").write_text(
        '{"text": "Once upon a time there was a cat."}\n' * 4, encoding="utf-8"
    )
    keys = (
        "target.model=pico data.source=rows.jsonl data.decontaminate=[pico-short]"
        " train.output_dir=run"
    )
    runs = (["data.cache_dir=one"], ["data.cache_dir=other", "--quiet"])
    shown, quiet = (
        specdistill("data", "show", *keys.split(), *more).stderr.splitlines() for more in runs
    )
    assert any(line.startswith("Comparing: 4 of 4 rows") for line in shown)
    assert [line.partition(":")[0] for line in quiet] == [
        "error"
    ] and "all with the same content" in quiet[0]


@pytest.mark.long  # plans twice
def test_plan_for_pico_names_its_own_recipe_and_prints_its_numbers(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["plan", "target=pico", "serving.device=h100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["target"]["parameters"] == 3_674_240
    methods = {row["method"] for row in plan["methods"]}
    assert (
        methods
        == {
            "eagle",
            "eagle3",
            "dflash",
            "dspark",
            "mtp",
            "pard",
            "draft_model",
            "ngram",
            "suffix",
            "early_exit",
        }
        >= set(METHODS)
    )
    eagle3 = next(row for row in plan["methods"] if row["method"] == "eagle3")
    assert (eagle3["training_tokens"], eagle3["training_source"]) == (420_000, "recipe pico/eagle3")
    assert eagle3["recipe"] == "pico/eagle3"
    # N-gram lookup was measured to be the fastest (README.md).
    assert plan["recommendation"]["method"] == "ngram"
    assert plan["hub"] == {"not_asked": "not asked: pico ships with this package", "drafts": []}
    assert main(["plan", "target=pico", "serving.device=h100"]) == 0
    assert plan["recommendation"]["start"] in " ".join(
        capsys.readouterr().out.replace("\\\n", " ").split()
    )


def test_plan_with_hub_false_does_not_ask_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("specdistill.advice.plan.reading.find_published_drafts", None)
    from specdistill.advice.plan import plan

    make_plan = plan.make_plan

    def estimate_plan(*arguments: object, **options: object) -> object:
        """Leave out the computed costs of steps, which take seconds."""
        return make_plan(*arguments, **{**options, "computed": False})

    monkeypatch.setattr(plan, "make_plan", estimate_plan)
    assert main(["plan", "target=pico", "hub=false", "--json"]) == 0
    assert "hub=false" in json.loads(capsys.readouterr().out)["hub"]["not_asked"]


class Shell:
    """A stand-in for `subprocess.run` that records commands and returns the given exit codes.

    The commands that the demo starts have tests of their own.
    """

    def __init__(self, codes: list[int]) -> None:
        self.codes = codes
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command[1:])
        return subprocess.CompletedProcess(command, self.codes[len(self.commands) - 1])


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    recorder = Shell([0] * 6)
    monkeypatch.setattr(subprocess, "run", recorder)
    return recorder


def test_demo_trains_then_measures_and_prints_both_commands(
    shell: Shell, in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", "train.max_steps=3"]) == 0
    keys = ["recipe=pico/eagle3", "train.output_dir=runs/demo", "train.max_steps=3"]
    assert shell.commands == [
        ["-m", "specdistill", "train", *keys],
        ["-m", "specdistill", "eval", *keys],
    ]
    assert capsys.readouterr().err.splitlines() == [
        f"$ specdistill {verb} {' '.join(keys)}" for verb in ("train", "eval")
    ]
    assert main(["demo", "--json"]) == 0
    # Only the report is printed as JSON, so that stdout is one document.
    assert ["--json" in command for command in shell.commands[2:]] == [False, True]


@pytest.mark.parametrize(
    ("codes", "code", "started"), [([3, 0], 3, 1), ([0, 1], 1, 2), ([-9, 0], 3, 1)]
)
def test_demo_ends_with_the_code_of_the_command_that_failed(
    shell: Shell, in_empty_folder: Path, codes: list[int], code: int, started: int
):
    shell.codes = codes
    assert main(["demo"]) == code
    assert len(shell.commands) == started


def test_the_quick_demo_measures_the_draft_that_ships(shell: Shell, in_empty_folder: Path):
    shell.codes = [4]  # a quick look leaves the gate inconclusive
    assert main(["demo", "quick=true", "eval.num_prompts=4"]) == 0
    ((_, _, verb, *keys),) = shell.commands
    assert verb == "eval" and keys[-1] == "eval.num_prompts=4"
    draft = Path(dict(key.split("=", 1) for key in keys)["eval.draft"])
    assert (draft / "config.json").is_file()
    assert (draft / "model.safetensors").stat().st_size < 1_300_000
    assert main(["demo", "quick=true", "train.max_steps=3"]) == 2
    assert len(shell.commands) == 1


@pytest.mark.long  # decodes eight prompts, with and without the draft
def test_the_draft_that_ships_is_accepted(in_empty_folder: Path):
    command = [sys.executable, "-m", "specdistill", "demo", "quick=true", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["results"][0]["mean_acceptance_length"] > 1.6
    assert report["lossless"]["unexplained_divergences"] == 0


def test_demo_clears_its_own_earlier_run_and_nothing_else(shell: Shell, in_empty_folder: Path):
    for folder in ("runs/demo", "runs/mine"):
        (in_empty_folder / folder / "run").mkdir(parents=True)
        (in_empty_folder / folder / "run" / "recipe.yaml").write_text(
            "method: eagle3\n", encoding="utf-8"
        )
    assert main(["demo", "train.output_dir=runs/mine"]) == 0
    assert main(["demo", "draft.layers=1"]) == 2
    assert (in_empty_folder / "runs/demo").exists()
    assert main(["demo"]) == 0
    assert not (in_empty_folder / "runs/demo").exists()
    assert (in_empty_folder / "runs/mine/run/recipe.yaml").exists()
    (in_empty_folder / "runs/demo").mkdir()  # a folder without a run
    (in_empty_folder / "runs/demo/thesis.txt").touch()
    assert main(["demo"]) == 0
    assert (in_empty_folder / "runs/demo/thesis.txt").exists()
    (in_empty_folder / "runs/demo").rename(in_empty_folder / "runs/other")
    (in_empty_folder / "runs/demo").symlink_to(in_empty_folder / "runs/mine")
    assert main(["demo"]) == 2
    assert (in_empty_folder / "runs/mine/run/recipe.yaml").exists()
