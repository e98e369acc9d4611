"""`specdistill publish` to a loopback Hub with the real client: what the Hub has afterwards."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from specdistill.cli.main import main
from specdistill.common.credentials import remove_places
from specdistill.common.documents import read_yaml
from specdistill.evaluation.report.files import compute_digest, read_report
from specdistill.hub import repository as released
from specdistill.hub.repository import is_same
from specdistill.serving.export import export
from tests.finished_runs import edit, edit_recipe, edit_report, remake
from tests.hub.conftest import NAME, read_contents
from tests.loopback_hub import Fault, Hub, loopback_hub
from tests.loopback_hub.store import Repository
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import SMALL, write_inputs

pytestmark = pytest.mark.xdist_group("measured run")  # one worker measures
DRAFT = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
REPORT = {
    f"report/{name}"
    for name in (
        "junit.xml",
        "report.html",
        "report.json",
        "report.md",
        "samples.jsonl",
        "picture.svg",
    )
}
RELEASE = {"README.md", "recipe.yaml", "provenance.json", *DRAFT, *REPORT}


def publish(run: Path, *arguments: str, repo: str = NAME, first: bool = True) -> int:
    """Run the command and return its exit code; `first` adds the baseline of a first release."""
    baseline_argument = ["baseline=none"] if first else []
    return main(["publish", f"run={run}", f"repo={repo}", *baseline_argument, *arguments])


def expect_refusal(
    capsys: pytest.CaptureFixture[str],
    code: int,
    run: Path,
    *arguments: str,
    repo: str = NAME,
    first: bool = True,
) -> str:
    """Run the command, check its exit code, and return the one line of its error."""
    capsys.readouterr()
    assert publish(run, *arguments, repo=repo, first=first) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def count_uploads(hub: Hub) -> int:
    return len(hub.asked("upload")) + len(hub.asked("commit"))


# What is published


def test_a_release_is_one_commit_with_everything_and_a_tag_on_it(hub: Hub, run: Path) -> None:
    assert publish(run) == 0
    new, _ = hub.commits(NAME)
    assert hub.tags(NAME) == {"v1": new} and hub.repositories[NAME].private
    published_files = read_contents(hub, "v1")
    assert published_files.keys() == RELEASE | {".gitattributes"}
    assert {name: published_files[name] for name in DRAFT} == {
        name: (run / "draft" / name).read_bytes() for name in DRAFT
    }
    assert published_files["provenance.json"] == (run / "run/provenance.json").read_bytes()
    assert published_files["report/samples.jsonl"] == (run / "report/samples.jsonl").read_bytes()
    report, _ = read_report(run / "report")
    assert json.loads(published_files["report/report.json"])["results"] == report["results"]
    assert {name: path.read_bytes() for name, path in list_files(run / "release").items()} == {
        name: published_files[name] for name in RELEASE
    }


def list_files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }


def test_the_card_describes_the_draft_and_its_results(lfs_hub: Hub, run: Path) -> None:
    assert publish(run) == 0
    card = ModelCard(read_contents(lfs_hub, "v1")["README.md"].decode())
    report, _ = read_report(run / "report")
    row = report["results"][0]
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "transformers",
        "text-generation",
        "unknown",
    )
    headline = card.text[: card.text.index("## Serving it")]
    assert "| acceptance length |" in headline and "report/picture.svg" in headline
    assert card.data.tags == ["speculative-decoding", "draft_model", "specdistill"]
    results = {result.metric_type: result for result in card.data.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        name: row[name] for name in results
    }
    assert results.keys() == {"mean_acceptance_length", "acceptance_rate", "speedup"}
    assert results["speedup"].metric_args["ci95"] == row["speedup_ci95"]
    assert results["speedup"].metric_args["hardware"] == report["hardware"]["name"]
    for fact in (
        (
            'vllm serve TARGET \\\n    --speculative-config \'{"method": "draft_model", "model":'
            f' "{NAME}"'
        ),
        f"--speculative-draft-model-path {NAME}",
        "8 to 8 tokens",
        "| training data | pico | PSF-2.0 |",
        "| target | target | unknown |",
        "Its gate: **passed**",
        f"| all of {row['suite']} | {row['num_prompts']} | {row['mean_acceptance_length']:.2f} (",
        "](report/picture.svg)",
        f"`{report['target']['weights']}`",
    ):
        assert fact in card.text


def test_the_card_repeats_what_the_check_against_the_target_says(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / "draft/config.json", lambda config: {**config, "max_position_embeddings": 64})
    tokenizer = (run / "draft/tokenizer.json").read_bytes()
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert (
        "- Compared with its target: the draft's context (max_position_embeddings) is 64 tokens"
        in read_card(run)
    )
    (run / "draft/tokenizer.json").unlink()
    assert publish(run) == 1
    assert "refused: not a draft for its target: " in capsys.readouterr().err
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert (
        "> - not a draft for its target: got draft without the files of a tokenizer"
        in read_card(run)
    )
    (run / "draft/tokenizer.json").write_bytes(tokenizer)
    assert "vllm serve" in read_card(run)
    # because no engine is started for it
    edit_report(run, "settings", "drafting", to={"heterogeneous_vocab": True})
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert "vllm serve" not in read_card(run) and "No engine serves it as it is" in read_card(run)


def read_card(run: Path) -> str:
    return (run / "release/README.md").read_text(encoding="utf-8")


def test_a_trial_writes_the_folder_and_sends_nothing(
    lfs_hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run, "dry_run=true", f"output_dir={tmp_path / 'trial'}") == 0
    assert NAME not in lfs_hub.repositories and count_uploads(lfs_hub) == 0
    assert list_files(tmp_path / "trial").keys() == RELEASE
    output = capsys.readouterr().out
    assert "new         712.2 KiB  model.safetensors" in output
    assert publish(run) == 0
    capsys.readouterr()
    assert publish(run, "tag=v2", "dry_run=true", first=False) == 0
    output = capsys.readouterr().out
    assert "same        712.2 KiB  model.safetensors" in output
    assert "changed" in next(line for line in output.splitlines() if line.endswith("README.md"))
    assert lfs_hub.tags(NAME).keys() == {"v1"}


def test_exports_are_in_folders_of_their_engines(lfs_hub: Hub, run: Path, tmp_path: Path) -> None:
    assert publish(run, "exports=[vllm]") == 0
    export(run / "draft", "vllm", tmp_path / "vllm")
    published_files = read_contents(lfs_hub, "v1")
    names = {path.name for path in (tmp_path / "vllm").iterdir()} - {"SERVE.md"}
    assert {name: published_files[f"vllm/{name}"] for name in names} == {
        name: (tmp_path / "vllm" / name).read_bytes() for name in names
    }
    assert published_files.keys() == RELEASE | {".gitattributes"} | {
        f"vllm/{name}" for name in names
    }
    assert "--include 'vllm/*'" in published_files["README.md"].decode()
    # The next release has no exports, and removes those of the first draft.
    assert publish(run, "tag=v2", first=False) == 0
    assert read_contents(lfs_hub, "v2").keys() == RELEASE | {".gitattributes"}


def test_a_recipe_gives_the_keys_that_the_command_lacks(lfs_hub: Hub, run: Path) -> None:
    path = run / "run/recipe.yaml"
    path.write_text(
        path.read_text().replace("repo: null\n  private: null", f"repo: {NAME}\n  private: false")
    )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    (run / "run/provenance.json").write_text(json.dumps({"recipe": sha256}))
    assert main(["publish", f"run={run}", "baseline=none", "license=apache-2.0"]) == 0
    assert not lfs_hub.repositories[NAME].private
    assert (
        ModelCard(read_contents(lfs_hub, "v1")["README.md"].decode()).data.license == "apache-2.0"
    )


def test_a_run_that_ran_somebodys_code_is_published_without_running_it(
    lfs_hub: Hub, run: Path
) -> None:
    edit_recipe(run, {"trust_remote_code: false": "trust_remote_code: true"})
    assert publish(run, "dry_run=true") == 0
    recipe = read_yaml(run / "run/recipe.yaml")
    assert recipe["target"]["trust_remote_code"] and read_yaml(
        run / "release/recipe.yaml"
    ) == remove_places(recipe)


def test_a_target_in_a_folder_may_be_one_of_the_hub(
    lfs_hub: Hub, run: Path, measured_run: Path, capsys
) -> None:
    files = {path.name: path for path in (measured_run.parent / "target").iterdir()}
    lfs_hub.create(
        "org/target",
        {**files, "README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"do what you like"},
    )
    other = json.loads(files["tokenizer.json"].read_text()) | {"truncation": None, "version": "1.1"}
    lfs_hub.create("org/other", {**files, "tokenizer.json": json.dumps(other).encode()})
    assert "base_model: got org/other@" in expect_refusal(capsys, 2, run, "base_model=org/other")
    assert publish(run, "base_model=org/target") == 0
    published_files = read_contents(lfs_hub, "v1")
    card = ModelCard(published_files["README.md"].decode())
    assert card.data.base_model == "org/target" and card.data.license == "mit"
    assert published_files["licenses/LICENSE"] == b"do what you like"
    assert "vllm serve org/target" in card.text and "TARGET" not in card.text


def test_a_licence_that_leads_out_of_the_targets_folder_is_not_published(
    lfs_hub: Hub, run: Path, measured_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "id_rsa").write_text("private")
    licence = measured_run.parent / "target/LICENSE"
    licence.symlink_to(tmp_path / "id_rsa")
    try:
        assert refused_key(expect_refusal(capsys, 2, run)) == "target"
    finally:
        licence.unlink()
    assert NAME not in lfs_hub.repositories and not (run / "release").exists()


# The next release


def test_a_file_is_the_same_by_its_content(tmp_path: Path) -> None:
    for content, same in ((b"abc", True), (b"abd", False)):
        (tmp_path / "file").write_bytes(content)
        large = SimpleNamespace(
            size=3, lfs=SimpleNamespace(sha256=hashlib.sha256(b"abc").hexdigest())
        )
        small = SimpleNamespace(size=3, lfs=None, blob_id=hashlib.sha1(b"blob 3\0abc").hexdigest())
        assert [is_same(tmp_path / "file", entry) for entry in (large, small)] == [same, same]  # type: ignore[arg-type]


def test_the_next_tag_follows_the_largest_number() -> None:
    tags = dict.fromkeys(("v2", "v10", "v10.1", "v7beta", "draft"), "commit")
    assert released.Repository(NAME, False, [], {}, tags).next_tag == "v11"


def test_a_release_is_not_published_again_and_a_tag_is_never_moved(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run) == 0
    before, tags = count_uploads(lfs_hub), lfs_hub.tags(NAME)
    assert publish(run) == publish(run, "tag=v1") == 0
    (run / "run/provenance.json").write_text(json.dumps({"created": "another day"}))
    assert refused_key(expect_refusal(capsys, 2, run, "tag=v1")) == "tag"
    assert count_uploads(lfs_hub) == before and lfs_hub.tags(NAME) == tags
    assert publish(run, first=False) == 0
    assert lfs_hub.tags(NAME) == {**tags, "v2": lfs_hub.commits(NAME)[0]}


@pytest.mark.parametrize(
    ("fault", "lands"),
    [
        pytest.param(Fault("status", "create", status=500), False, marks=pytest.mark.long),
        pytest.param(Fault("cut", "upload", times=20), False, marks=pytest.mark.long),
        (Fault("corrupt", "upload", times=20), False),
        pytest.param(
            Fault("status", "commit", status=503, times=20), False, marks=pytest.mark.long
        ),
        (Fault("cut", "commit"), False),
        (Fault("conflict", "commit"), False),
        (Fault("lost", "commit"), True),
        (Fault("status", "tag", status=500, times=20), True),
        pytest.param(Fault("cut", "tree", times=20), True, marks=pytest.mark.long),
    ],
    ids=lambda value: f"{value.kind} at {value.route}" if isinstance(value, Fault) else "",
)
def test_after_a_fault_nothing_is_half_there_and_the_command_goes_on(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], fault: Fault, lands: bool
) -> None:
    """Where `lands` is true the commit is on the Hub, and the next command tags that commit."""
    lfs_hub.inject(fault)
    expect_refusal(capsys, 3, run)
    if NAME in lfs_hub.repositories:
        assert lfs_hub.tags(NAME) == {}
        whole = lfs_hub.files(NAME).keys() >= RELEASE
        assert whole == lands and (lands or not RELEASE & lfs_hub.files(NAME).keys())
    lfs_hub.faults.clear()
    num_commits, num_uploads = (
        len(lfs_hub.commits(NAME)) if lands else 0,
        len(lfs_hub.asked("upload")),
    )
    assert publish(run) == 0
    assert lfs_hub.tags(NAME) == {"v1": lfs_hub.commits(NAME)[0]}
    assert read_contents(lfs_hub, "v1").keys() >= RELEASE
    if lands:
        assert (
            len(lfs_hub.commits(NAME)) == num_commits
            and len(lfs_hub.asked("upload")) == num_uploads
        )
    if fault.route == "commit":  # all large files had arrived
        assert len(lfs_hub.asked("upload")) == num_uploads


def test_a_commit_that_is_not_what_was_sent_gets_no_tag(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Repository.commit

    def commit_without_samples(self: Repository, files: dict[str, Any], *others: Any) -> Any:
        return commit(
            self,
            {path: file for path, file in files.items() if path != "report/samples.jsonl"},
            *others,
        )

    with monkeypatch.context() as broken:
        broken.setattr(Repository, "commit", commit_without_samples)
        assert "report/samples.jsonl" in expect_refusal(capsys, 3, run)
    assert lfs_hub.tags(NAME) == {}
    assert publish(run) == 0
    assert read_contents(lfs_hub, "v1").keys() >= RELEASE


def test_a_tag_that_was_set_meanwhile_stays(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tag is on somebody else's commit, and files that no release wrote are kept."""
    theirs = lfs_hub.create(NAME, {"notes.txt": b"of the team"}, private=True)
    lfs_hub.inject(Fault("slow", "tag", call=lambda: lfs_hub.tag(NAME, "v1", theirs)))
    expect_refusal(capsys, 3, run, "tag=v1")
    assert lfs_hub.tags(NAME) == {"v1": theirs}
    assert refused_key(expect_refusal(capsys, 2, run, "tag=v1")) == "tag"
    assert publish(run, "tag=v2") == 0
    assert read_contents(lfs_hub, "v2")["notes.txt"] == b"of the team"


def test_a_folder_named_release_that_is_no_release_stays(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "release").mkdir()
    (run / "release" / "thesis.tex").touch()
    assert refused_key(expect_refusal(capsys, 2, run)) == "output_dir"
    assert (run / "release" / "thesis.tex").exists() and NAME not in lfs_hub.repositories


# Refusals


def test_a_run_that_does_not_pass_is_published_only_with_a_reason(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "draft/config.json"
    weights.write_text(weights.read_text().replace("\n}", ',\n  "_touched": 1\n}'))
    assert publish(run) == publish(run, "dry_run=true") == 1
    error = capsys.readouterr().err
    assert "refused: other weights: " in error and "force=REASON" in error
    assert NAME not in lfs_hub.repositories and not (run / "release").exists()
    assert publish(run, "force=<b>we</b> know") == 0
    card = ModelCard(read_contents(lfs_hub, "v1")["README.md"].decode())
    top, _, _ = card.text.partition("\n# half-right\n")
    assert (
        "\\<b\\>we\\</b\\> know" in top
        and "> - other weights: " in top
        and str(run) not in card.text
    )


@pytest.mark.parametrize(
    ("license", "repo", "said"),
    [
        ("cc-by-nc-nd-4.0", NAME, "cc-by-nc-nd-4.0"),
        ("llama3.1", NAME, "half-right"),
        ("llama3.1", "someone/Llama-draft", ""),
    ],
)
def test_the_licence_of_the_target_is_followed(
    lfs_hub: Hub,
    run: Path,
    measured_run: Path,
    capsys: pytest.CaptureFixture[str],
    license: str,
    repo: str,
    said: str,
) -> None:
    card = measured_run.parent / "target/README.md"
    card.write_text(f"---\nlicense: {license}\n---\n")
    try:
        assert publish(run, repo=repo) == bool(said)
    finally:
        card.unlink()
    if said:
        assert said in capsys.readouterr().err and repo not in lfs_hub.repositories
        return
    published_files = {
        name: path.read_bytes().decode()
        for name, path in lfs_hub.files(repo).items()
        if name in ("README.md", "NOTICE")
    }
    assert (
        "**Built with Llama.**" in published_files["README.md"]
        and "license: llama3.1" in published_files["README.md"]
    )
    assert published_files["NOTICE"].startswith(
        "Llama 3.1 is licensed under the Llama 3.1 Community License, Copyright ©"
    )


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        *(
            (f"repo={name}", "repo")
            for name in ("half-right", "some one/half-right", "someone/half--right")
        ),
        *((f"tag={name}", "tag") for name in ("main", "v1..2", "-f")),
        ("exports=[vlm]", "exports[0]"),
        ("run=/nowhere", "run"),
        ("force=in a hurry", "force"),  # nothing is refused
    ],
)
def test_invalid_arguments_are_refused(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], argument: str, key: str
) -> None:
    assert refused_key(expect_refusal(capsys, 2, run, argument)) == key
    assert NAME not in lfs_hub.repositories


def test_a_run_that_is_not_measured_is_refused(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "report")
    assert f"run: got {run}, which has no report" in expect_refusal(capsys, 2, run)
    shutil.rmtree(run / "draft")
    assert f"run: got {run}, which has no draft, no report, expected" in expect_refusal(
        capsys, 2, run
    )


@pytest.mark.parametrize(
    "name",
    [
        "draft/tokenizer_config.json",
        "draft/notes.txt",
        "run/provenance.json",
        "run/recipe.yaml",
        "report/report.json",
        "draft",
    ],
)
def test_a_link_out_of_the_run_is_refused_by_name(
    lfs_hub: Hub, run: Path, tmp_path: Path, capsys, name: str
) -> None:
    """An export copies files next to a draft, such as notes.txt."""
    if (run / name).exists():
        (run / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_text("private")
    (run / name).symlink_to(tmp_path / "elsewhere")
    error = expect_refusal(capsys, 2, run, "exports=[vllm]")
    assert refused_key(error) == "run" and f"{run / name}" in error
    assert NAME not in lfs_hub.repositories and not (run / "release").exists()


def test_a_link_within_the_run_is_published(lfs_hub: Hub, run: Path) -> None:
    (run / "draft/config.json").rename(run / "config.json")
    (run / "draft/config.json").symlink_to("../config.json")
    assert (
        publish(run) == 0
        and read_contents(lfs_hub, "v1")["config.json"] == (run / "config.json").read_bytes()
    )


@pytest.mark.long  # trains and measures
def test_no_path_of_a_machine_is_published(
    lfs_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is trained, measured and released in a home whose name is nowhere else."""
    home = tmp_path / "home" / "ada lovelace"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "ada lovelace")
    monkeypatch.setattr("socket.gethostname", lambda: "adas-machine")
    run, keys = home / "run", write_inputs(home)
    (home / "suite.jsonl").write_text(
        "".join(json.dumps({"id": f"{n}", "prompt": f"Row {n} says "}) + "\n" for n in range(2))
    )
    keys += [
        f"eval.suite={home / 'suite.jsonl'}",
        "eval.max_new_tokens=4",
        "eval.repeats=1",
        "eval.warmup=0",
    ]
    keys += ["method=eagle3", "draft.ttt_steps=2", *SMALL, f"train.output_dir={run}"]
    for verb in ("train", "eval"):
        assert specdistill(verb, *keys).returncode in (0, 1, 4)
    assert publish(run, "exports=[vllm]", "force=a trial") == 0
    private = (str(tmp_path), str(Path.home()), "lovelace", "adas-machine")
    texts = {
        name: content.decode("latin-1") for name, content in read_contents(lfs_hub, "v1").items()
    }
    assert [(name, word) for name, text in texts.items() for word in private if word in text] == []
    provenance = json.loads(texts["provenance.json"])
    assert "target.model=model" in provenance["command"] and provenance["target"] == "model"
    assert provenance["recipe"] == hashlib.sha256(texts["recipe.yaml"].encode()).hexdigest()
    report, records = read_report(run / "release" / "report")
    assert (
        report["digest"] == compute_digest(report, records)
        and report["suite"]["source"] == "suite.jsonl"
    )


def test_a_private_release_in_a_public_repository_is_refused(
    lfs_hub: Hub, run: Path, capsys
) -> None:
    lfs_hub.create(NAME)
    assert refused_key(expect_refusal(capsys, 2, run, "private=true")) == "private"
    assert publish(run, "private=false") == 0


@pytest.mark.parametrize(
    ("token", "told"),
    [(None, "hf auth login"), (Hub.other_token, "may write"), ("hf_unknown", "token")],
)
def test_a_user_who_may_not_write_is_refused(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], token: str | None, told: str
) -> None:
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home", token=token):
        assert told in expect_refusal(capsys, 3, run)
        hub.create(NAME)
        assert told in expect_refusal(capsys, 3, run)
        assert hub.tags(NAME) == {}


def test_a_full_disk_is_reported(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", raise_disk_full)
    monkeypatch.setattr(shutil, "copy2", raise_disk_full)
    assert "No space left on device" in expect_refusal(capsys, 3, run)
    assert NAME not in lfs_hub.repositories and not (run / "release").exists()


def test_a_hub_that_cannot_be_reached_is_reported(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loopback_hub(tmp_path / "hub") as hub:
        pass
    with hub.client(tmp_path / "home"):
        assert hub.address in expect_refusal(capsys, 3, run)
        assert hub.address in expect_refusal(capsys, 3, run, "dry_run=true", first=False)
        shutil.rmtree(run / "report")
        assert f"run: got {run}, which has no report" in expect_refusal(
            capsys, 2, run, "dry_run=true"
        )


def test_a_secret_in_any_file_is_not_published(
    lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_report(run, "suite", "source", to="https://me:a-password@example.org/prompts")
    remake(run, lambda record: record)
    error = expect_refusal(capsys, 2, run)
    assert refused_key(error) == "README.md" and "a-password" not in error
    assert NAME not in lfs_hub.repositories


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n"])
def test_a_last_release_that_cannot_be_read_is_refused_in_one_line(
    content: bytes, lfs_hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run) == 0
    lfs_hub.commit(NAME, {"report/report.json": content})
    lfs_hub.tag(NAME, "v2")
    assert "report.json" in expect_refusal(capsys, 2, run, "tag=v3", first=False)
