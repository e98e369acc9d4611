"""`specdistill publish` against a Hub on loopback, which the real client asks: what is there
afterwards, whatever happens on the way."""

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
from tests.hub.conftest import NAME, contents
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
    """first: nothing was released before; or the same, which is there already."""
    named = ["baseline=none"] if first else []
    return main(["publish", f"run={run}", f"repo={repo}", *named, *arguments])


def refused(
    capsys: pytest.CaptureFixture[str],
    code: int,
    run: Path,
    *arguments: str,
    repo: str = NAME,
    first: bool = True,
) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert publish(run, *arguments, repo=repo, first=first) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def uploads(hub: Hub) -> int:
    return len(hub.asked("upload")) + len(hub.asked("commit"))


# What is there


def test_a_release_is_one_commit_with_everything_and_a_tag_on_it(hub: Hub, run: Path) -> None:
    assert publish(run) == 0
    new, _ = hub.commits(NAME)
    assert hub.tags(NAME) == {"v1": new} and hub.repositories[NAME].private
    there = contents(hub, "v1")
    assert there.keys() == RELEASE | {".gitattributes"}
    assert {name: there[name] for name in DRAFT} == {
        name: (run / "draft" / name).read_bytes() for name in DRAFT
    }
    assert there["provenance.json"] == (run / "run/provenance.json").read_bytes()
    assert there["report/samples.jsonl"] == (run / "report/samples.jsonl").read_bytes()
    report, _ = read_report(run / "report")
    assert json.loads(there["report/report.json"])["results"] == report["results"]
    assert {name: path.read_bytes() for name, path in files_in(run / "release").items()} == {
        name: there[name] for name in RELEASE
    }


def files_in(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }


def test_the_card_says_what_it_is_and_what_was_measured(lfs: Hub, run: Path) -> None:
    assert publish(run) == 0
    card = ModelCard(contents(lfs, "v1")["README.md"].decode())
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
    for said in (
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
        assert said in card.text


def test_the_card_repeats_what_the_check_against_the_target_says(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / "draft/config.json", lambda config: {**config, "max_position_embeddings": 64})
    tokenizer = (run / "draft/tokenizer.json").read_bytes()
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert (
        "- Compared with its target: the draft's context (max_position_embeddings) is 64 tokens"
        in readme(run)
    )
    (run / "draft/tokenizer.json").unlink()
    assert publish(run) == 1
    assert "refused: not a draft for its target: " in capsys.readouterr().err
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert "> - not a draft for its target: got draft without the files of a tokenizer" in readme(
        run
    )
    (run / "draft/tokenizer.json").write_bytes(tokenizer)
    assert "vllm serve" in readme(run)
    # which engines are not started to do
    edit_report(run, "settings", "drafting", to={"heterogeneous_vocab": True})
    assert publish(run, "force=a trial", "dry_run=true") == 0
    assert "vllm serve" not in readme(run) and "No engine serves it as it is" in readme(run)


def readme(run: Path) -> str:
    return (run / "release/README.md").read_text(encoding="utf-8")


def test_a_trial_writes_the_folder_and_sends_nothing(
    lfs: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run, "dry_run=true", f"output_dir={tmp_path / 'trial'}") == 0
    assert NAME not in lfs.repositories and uploads(lfs) == 0
    assert files_in(tmp_path / "trial").keys() == RELEASE
    said = capsys.readouterr().out
    assert "new         712.2 KiB  model.safetensors" in said
    assert publish(run) == 0
    capsys.readouterr()
    assert publish(run, "tag=v2", "dry_run=true", first=False) == 0
    said = capsys.readouterr().out
    assert "same        712.2 KiB  model.safetensors" in said
    assert "changed" in next(line for line in said.splitlines() if line.endswith("README.md"))
    assert lfs.tags(NAME).keys() == {"v1"}


def test_exports_stand_in_folders_of_their_engines(lfs: Hub, run: Path, tmp_path: Path) -> None:
    assert publish(run, "exports=[vllm]") == 0
    export(run / "draft", "vllm", tmp_path / "vllm")
    there = contents(lfs, "v1")
    names = {path.name for path in (tmp_path / "vllm").iterdir()} - {"SERVE.md"}
    assert {name: there[f"vllm/{name}"] for name in names} == {
        name: (tmp_path / "vllm" / name).read_bytes() for name in names
    }
    assert there.keys() == RELEASE | {".gitattributes"} | {f"vllm/{name}" for name in names}
    assert "--include 'vllm/*'" in there["README.md"].decode()
    # The next release has none, and takes away what would be of another draft.
    assert publish(run, "tag=v2", first=False) == 0
    assert contents(lfs, "v2").keys() == RELEASE | {".gitattributes"}


def test_a_recipe_says_what_the_command_does_not(lfs: Hub, run: Path) -> None:
    path = run / "run/recipe.yaml"
    path.write_text(
        path.read_text().replace("repo: null\n  private: null", f"repo: {NAME}\n  private: false")
    )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    (run / "run/provenance.json").write_text(json.dumps({"recipe": sha256}))
    assert main(["publish", f"run={run}", "baseline=none", "license=apache-2.0"]) == 0
    assert not lfs.repositories[NAME].private
    assert ModelCard(contents(lfs, "v1")["README.md"].decode()).data.license == "apache-2.0"


def test_a_run_that_ran_somebodys_code_is_published_without_running_it(lfs: Hub, run: Path) -> None:
    edit_recipe(run, {"trust_remote_code: false": "trust_remote_code: true"})
    assert publish(run, "dry_run=true") == 0
    recipe = read_yaml(run / "run/recipe.yaml")
    assert recipe["target"]["trust_remote_code"] and read_yaml(
        run / "release/recipe.yaml"
    ) == remove_places(recipe)


def test_a_target_in_a_folder_may_be_one_of_the_hub(
    lfs: Hub, run: Path, measured: Path, capsys
) -> None:
    files = {path.name: path for path in (measured.parent / "target").iterdir()}
    lfs.create(
        "org/target",
        {**files, "README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"do what you like"},
    )
    other = json.loads(files["tokenizer.json"].read_text()) | {"truncation": None, "version": "1.1"}
    lfs.create("org/other", {**files, "tokenizer.json": json.dumps(other).encode()})
    assert "base_model: got org/other@" in refused(capsys, 2, run, "base_model=org/other")
    assert publish(run, "base_model=org/target") == 0
    there = contents(lfs, "v1")
    card = ModelCard(there["README.md"].decode())
    assert card.data.base_model == "org/target" and card.data.license == "mit"
    assert there["licenses/LICENSE"] == b"do what you like"
    assert "vllm serve org/target" in card.text and "TARGET" not in card.text


def test_a_licence_that_leads_out_of_the_targets_folder_is_not_published(
    lfs: Hub, run: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "id_rsa").write_text("private")
    licence = measured.parent / "target/LICENSE"
    licence.symlink_to(tmp_path / "id_rsa")
    try:
        assert refused_key(refused(capsys, 2, run)) == "target"
    finally:
        licence.unlink()
    assert NAME not in lfs.repositories and not (run / "release").exists()


# Again


def test_a_file_is_the_same_by_its_content(tmp_path: Path) -> None:
    for content, same in ((b"abc", True), (b"abd", False)):
        (tmp_path / "file").write_bytes(content)
        large = SimpleNamespace(
            size=3, lfs=SimpleNamespace(sha256=hashlib.sha256(b"abc").hexdigest())
        )
        small = SimpleNamespace(size=3, lfs=None, blob_id=hashlib.sha1(b"blob 3\0abc").hexdigest())
        assert [is_same(tmp_path / "file", there) for there in (large, small)] == [same, same]  # type: ignore[arg-type]


def test_the_next_tag_follows_the_largest_number() -> None:
    tags = dict.fromkeys(("v2", "v10", "v10.1", "v7beta", "draft"), "commit")
    assert released.Repository(NAME, False, [], {}, tags).next_tag == "v11"


def test_what_is_released_is_not_released_again_and_a_tag_is_never_moved(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run) == 0
    before, tags = uploads(lfs), lfs.tags(NAME)
    assert publish(run) == publish(run, "tag=v1") == 0
    (run / "run/provenance.json").write_text(json.dumps({"created": "another day"}))
    assert refused_key(refused(capsys, 2, run, "tag=v1")) == "tag"
    assert uploads(lfs) == before and lfs.tags(NAME) == tags
    assert publish(run, first=False) == 0
    assert lfs.tags(NAME) == {**tags, "v2": lfs.commits(NAME)[0]}


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
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str], fault: Fault, lands: bool
) -> None:
    """lands: whether the commit is there, which then gets its tag and no other."""
    lfs.inject(fault)
    refused(capsys, 3, run)
    if NAME in lfs.repositories:
        assert lfs.tags(NAME) == {}
        whole = lfs.files(NAME).keys() >= RELEASE
        assert whole == lands and (lands or not RELEASE & lfs.files(NAME).keys())
    lfs.faults.clear()
    num_commits, num_uploads = len(lfs.commits(NAME)) if lands else 0, len(lfs.asked("upload"))
    assert publish(run) == 0
    assert lfs.tags(NAME) == {"v1": lfs.commits(NAME)[0]}
    assert contents(lfs, "v1").keys() >= RELEASE
    if lands:
        assert len(lfs.commits(NAME)) == num_commits and len(lfs.asked("upload")) == num_uploads
    if fault.route == "commit":  # all large files had arrived
        assert len(lfs.asked("upload")) == num_uploads


def test_a_commit_that_is_not_what_was_sent_gets_no_tag(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Repository.commit

    def losing(self: Repository, files: dict[str, Any], *others: Any) -> Any:
        return commit(
            self,
            {path: file for path, file in files.items() if path != "report/samples.jsonl"},
            *others,
        )

    with monkeypatch.context() as broken:
        broken.setattr(Repository, "commit", losing)
        assert "report/samples.jsonl" in refused(capsys, 3, run)
    assert lfs.tags(NAME) == {}
    assert publish(run) == 0
    assert contents(lfs, "v1").keys() >= RELEASE


def test_a_tag_that_was_set_meanwhile_stays(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To somebody else's commit; and what no release put there is left alone."""
    theirs = lfs.create(NAME, {"notes.txt": b"of the team"}, private=True)
    lfs.inject(Fault("slow", "tag", call=lambda: lfs.tag(NAME, "v1", theirs)))
    refused(capsys, 3, run, "tag=v1")
    assert lfs.tags(NAME) == {"v1": theirs}
    assert refused_key(refused(capsys, 2, run, "tag=v1")) == "tag"
    assert publish(run, "tag=v2") == 0
    assert contents(lfs, "v2")["notes.txt"] == b"of the team"


def test_a_folder_called_release_that_is_none_stays(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "release").mkdir()
    (run / "release" / "thesis.tex").touch()
    assert refused_key(refused(capsys, 2, run)) == "output_dir"
    assert (run / "release" / "thesis.tex").exists() and NAME not in lfs.repositories


# Not at all


def test_what_did_not_pass_is_published_only_with_a_reason(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "draft/config.json"
    weights.write_text(weights.read_text().replace("\n}", ',\n  "_touched": 1\n}'))
    assert publish(run) == publish(run, "dry_run=true") == 1
    said = capsys.readouterr().err
    assert "refused: other weights: " in said and "force=REASON" in said
    assert NAME not in lfs.repositories and not (run / "release").exists()
    assert publish(run, "force=<b>we</b> know") == 0
    card = ModelCard(contents(lfs, "v1")["README.md"].decode())
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
def test_the_licence_of_the_target(
    lfs: Hub,
    run: Path,
    measured: Path,
    capsys: pytest.CaptureFixture[str],
    license: str,
    repo: str,
    said: str,
) -> None:
    card = measured.parent / "target/README.md"
    card.write_text(f"---\nlicense: {license}\n---\n")
    try:
        assert publish(run, repo=repo) == bool(said)
    finally:
        card.unlink()
    if said:
        assert said in capsys.readouterr().err and repo not in lfs.repositories
        return
    there = {
        name: path.read_bytes().decode()
        for name, path in lfs.files(repo).items()
        if name in ("README.md", "NOTICE")
    }
    assert (
        "**Built with Llama.**" in there["README.md"] and "license: llama3.1" in there["README.md"]
    )
    assert there["NOTICE"].startswith(
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
def test_what_the_user_got_wrong(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str], argument: str, key: str
) -> None:
    assert refused_key(refused(capsys, 2, run, argument)) == key
    assert NAME not in lfs.repositories


def test_a_run_that_is_not_measured(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "report")
    assert f"run: got {run}, which has no report" in refused(capsys, 2, run)
    shutil.rmtree(run / "draft")
    assert f"run: got {run}, which has no draft, no report, expected" in refused(capsys, 2, run)


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
    lfs: Hub, run: Path, tmp_path: Path, capsys, name: str
) -> None:
    """notes.txt: of the files next to a draft, which an export copies."""
    if (run / name).exists():
        (run / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_text("private")
    (run / name).symlink_to(tmp_path / "elsewhere")
    said = refused(capsys, 2, run, "exports=[vllm]")
    assert refused_key(said) == "run" and f"{run / name}" in said
    assert NAME not in lfs.repositories and not (run / "release").exists()


def test_a_link_within_the_run_is_published(lfs: Hub, run: Path) -> None:
    (run / "draft/config.json").rename(run / "config.json")
    (run / "draft/config.json").symlink_to("../config.json")
    assert (
        publish(run) == 0
        and contents(lfs, "v1")["config.json"] == (run / "config.json").read_bytes()
    )


@pytest.mark.long  # trains and measures
def test_no_place_of_a_machine_is_published(
    lfs: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that was trained, measured and released in the home of somebody whose name is
    nowhere else."""
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
    read = {name: content.decode("latin-1") for name, content in contents(lfs, "v1").items()}
    assert [(name, word) for name, text in read.items() for word in private if word in text] == []
    provenance = json.loads(read["provenance.json"])
    assert "target.model=model" in provenance["command"] and provenance["target"] == "model"
    assert provenance["recipe"] == hashlib.sha256(read["recipe.yaml"].encode()).hexdigest()
    report, records = read_report(run / "release" / "report")
    assert (
        report["digest"] == compute_digest(report, records)
        and report["suite"]["source"] == "suite.jsonl"
    )


def test_a_public_repository_is_no_place_for_what_is_private(lfs: Hub, run: Path, capsys) -> None:
    lfs.create(NAME)
    assert refused_key(refused(capsys, 2, run, "private=true")) == "private"
    assert publish(run, "private=false") == 0


@pytest.mark.parametrize(
    ("token", "told"),
    [(None, "hf auth login"), (Hub.other_token, "may write"), ("hf_unknown", "token")],
)
def test_who_may_not_write(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], token: str | None, told: str
) -> None:
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home", token=token):
        assert told in refused(capsys, 3, run)
        hub.create(NAME)
        assert told in refused(capsys, 3, run)
        assert hub.tags(NAME) == {}


def test_a_full_disk(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copy2", full)
    assert "No space left on device" in refused(capsys, 3, run)
    assert NAME not in lfs.repositories and not (run / "release").exists()


def test_a_hub_that_is_not_there(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loopback_hub(tmp_path / "hub") as hub:
        pass
    with hub.client(tmp_path / "home"):
        assert hub.address in refused(capsys, 3, run)
        assert hub.address in refused(capsys, 3, run, "dry_run=true", first=False)
        shutil.rmtree(run / "report")
        assert f"run: got {run}, which has no report" in refused(capsys, 2, run, "dry_run=true")


def test_a_secret_in_any_file_is_not_published(
    lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_report(run, "suite", "source", to="https://me:a-password@example.org/prompts")
    remake(run, lambda record: record)
    said = refused(capsys, 2, run)
    assert refused_key(said) == "README.md" and "a-password" not in said
    assert NAME not in lfs.repositories


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n"])
def test_a_last_release_that_does_not_read_is_one_line(
    content: bytes, lfs: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run) == 0
    lfs.commit(NAME, {"report/report.json": content})
    lfs.tag(NAME, "v2")
    assert "report.json" in refused(capsys, 2, run, "tag=v3", first=False)
