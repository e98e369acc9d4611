"""The drafts of a comparison: recognised by what their folders hold, told apart by name, and
refused when they are the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file

from specdistill.cli.main import main
from specdistill.common.errors import ResourceError, UserError
from specdistill.evaluation.comparison.candidates import find_candidates
from specdistill.methods.load import find_method
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import FrozenTarget
from tests.heads import build_head, save_head
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs next to each other: `eagle`, `eagle3` and `model`, each with its `draft`."""
    path = tmp_path_factory.mktemp("runs")
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    for method in ("eagle", "eagle3"):
        save_head(method, build_head(method, target), path / method / "draft")
    tiny_target_model(num_layers=2, seed=1).save_pretrained(path / "model" / "draft")
    return path


def find_names(*entries: Path | str) -> list[str]:
    return [candidate.name for candidate in find_candidates([str(entry) for entry in entries])]


def copy_draft(source: Path, folder: Path) -> Path:
    """Copy a draft and change its config, so that it counts as another draft."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"made_for": str(folder)}))
    return folder


def test_each_kind_of_draft_is_recognised(runs: Path) -> None:
    candidates = find_candidates(
        [
            str(runs / "eagle" / "draft"),
            "ngram",
            str(runs / "eagle3" / "draft"),
            str(runs / "model" / "draft"),
        ]
    )
    assert [candidate.method for candidate in candidates] == [
        "eagle",
        "ngram",
        "eagle3",
        "draft_model",
    ]
    assert [candidate.name for candidate in candidates] == [
        "eagle-draft",
        "ngram",
        "eagle3-draft",
        "model-draft",
    ]
    assert (candidates[1].draft, candidates[1].folder) == (None, None)
    draft = runs / "eagle" / "draft"
    assert (candidates[0].draft, candidates[0].folder) == (str(draft), draft)


def test_a_lookup_may_stand_in_front_of_a_draft(runs: Path) -> None:
    draft, lookup = str(runs / "eagle3" / "draft"), LookupFirstConfig()
    alone, together = find_candidates([draft, draft], [None, lookup])
    assert (alone.name, together.name) == ("draft", "ngram+draft")
    assert (together.draft, together.folder, together.method) == (
        draft,
        runs / "eagle3" / "draft",
        "eagle3",
    )
    with refused("drafts", f"{draft} and {draft}"):
        find_candidates([draft, draft], [lookup, LookupFirstConfig()])
    with refused("lookup_first_each", "a lookup in front of ngram"):
        find_candidates([draft, "ngram"], [None, lookup])


def test_the_tensors_decide_the_method_and_not_the_config(runs: Path, tmp_path: Path) -> None:
    folder = copy_draft(runs / "eagle3" / "draft", tmp_path / "named")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"]})
    )
    assert find_method(folder) == "eagle3"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert find_method(folder) == "eagle3"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": None}, "architectures not named"),
        ("weights", "LlamaForCausalLM and no weights"),
        ("torn", "model.safetensors"),
    ],
)
def test_a_folder_without_a_draft_is_refused_with_the_reason(
    runs: Path, tmp_path: Path, change, fact: str
) -> None:
    folder = copy_draft(runs / "model" / "draft", tmp_path / "odd")
    if change == "weights":
        (folder / "model.safetensors").unlink()
    elif change == "torn":
        (folder / "model.safetensors").write_bytes(b"x" * 40)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError) as caught:
        find_candidates([str(folder), "ngram"])
    assert caught.value.key == "drafts" and fact in caught.value.got


def test_names_are_only_as_long_as_they_need_to_differ(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = runs / "model" / "draft"
    one, two = (
        copy_draft(source, tmp_path / "x" / "run" / "draft"),
        copy_draft(source, tmp_path / "y" / "run" / "draft"),
    )
    alone = copy_draft(source, tmp_path / "x" / "run" / "best")
    assert find_names(one, alone, "ngram") == ["draft", "best", "ngram"]
    assert find_names(one, two, alone) == ["x-run-draft", "y-run-draft", "best"]
    monkeypatch.chdir(tmp_path)
    assert find_names("x/run/draft", "./y/run/draft") == ["x-run-draft", "y-run-draft"]
    monkeypatch.chdir(one)
    assert find_names(".", "../best") == ["draft", "best"]


def test_names_that_differ_only_in_case_are_lengthened(runs: Path, tmp_path: Path) -> None:
    """A name is also a folder, and some file systems ignore case."""
    source = runs / "model" / "draft"
    one, two = (
        copy_draft(source, tmp_path / "run" / "a" / "Draft"),
        copy_draft(source, tmp_path / "run" / "b" / "draft"),
    )
    assert find_names(one, two) == ["a-Draft", "b-draft"]
    paths = [Path("p") / "q-s", Path("p-q") / "s", Path("x") / "q-s", Path("y") / "s"]
    one, two, *others = (copy_draft(source, tmp_path / path) for path in paths)
    assert find_names(*others) == ["q-s", "s"]
    with refused("drafts", holds="-p-q-s"):  # alike up to the root
        find_names(one, two, *others)
    assert find_names(copy_draft(source, tmp_path / "ngram"), "ngram") == [
        f"{tmp_path.name}-ngram",
        "ngram",
    ]


def test_the_same_draft_twice_is_refused(runs: Path, tmp_path: Path) -> None:
    draft = runs / "eagle3" / "draft"
    (tmp_path / "link").symlink_to(draft)
    for entries in (["ngram", "ngram"], [draft, draft], [draft, "ngram", tmp_path / "link"]):
        with refused("drafts", f"{entries[0]} and {entries[-1]}"):
            find_names(*entries)


def test_a_draft_can_be_compared_with_itself_at_other_settings(runs: Path) -> None:
    draft, lookup = str(runs / "eagle3" / "draft"), LookupFirstConfig()
    candidates = find_candidates(
        [draft, "ngram", draft, draft, draft], [None, None, lookup, None, lookup], [1, 1, 1, 2, 2]
    )
    assert [candidate.name for candidate in candidates] == [
        "draft",
        "ngram",
        "ngram+draft",
        "draft-2",
        "ngram+draft-2",
    ]
    with refused("drafts", f"{draft} and {draft}"):
        find_candidates([draft, draft, draft], [None] * 3, [1, 2, 1])


@pytest.mark.parametrize("entry", ["ngrm", "./nowhere", "a/b/c", "", "no spaces/allowed"])
def test_an_entry_that_names_no_draft_is_refused(entry: str) -> None:
    with refused("drafts", entry or "an empty name"):
        find_candidates([entry, "ngram"])


def test_a_comparison_in_two_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = tmp_path / "comparison"
    assert main(["compare", "target=pico", "drafts=ngram,suffix", f"output_dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert "compare runs in one process, but 2 were started. Run it without torchrun" in error
    assert not folder.exists()


def test_a_run_folder_is_refused_with_the_path_of_its_draft(runs: Path) -> None:
    with pytest.raises(UserError, match=str(runs / "model" / "draft")):
        find_names(runs / "model", "ngram")


def test_revisions_of_one_hub_id_are_candidates_of_their_own(runs: Path) -> None:
    cached = Path(HF_HUB_CACHE) / "models--someone--head"
    commits = {"v1": "1" * 40, "refs/pr/2": "2" * 40}
    for revision, commit in commits.items():
        copy_draft(runs / "eagle" / "draft", cached / "snapshots" / commit)
        (cached / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (cached / "refs" / revision).write_text(commit)
    try:
        candidates = find_candidates([f"someone/head@{revision}" for revision in commits])
    finally:
        shutil.rmtree(cached)
    assert [candidate.name for candidate in candidates] == ["head@v1", "head@refs-pr-2"]
    assert [candidate.draft for candidate in candidates] == [
        "someone/head@v1",
        "someone/head@refs/pr/2",
    ]
    assert [candidate.folder and candidate.folder.name for candidate in candidates] == list(
        commits.values()
    )


def test_a_hub_that_cannot_be_reached_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="drafts: someone/nothing "):
        find_candidates(["someone/nothing", "ngram"])
