"""The Hub on loopback, judged by the real client: what huggingface_hub reads and writes, by LFS and by Xet, and what faults do to it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import RemoteProtocolError
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.loopback_hub import Fault, Hub, Sparse, loopback_hub

NAME = "someone/draft"
WEIGHTS = os.urandom(400_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "report/report.json": b'{"schema": 1}'}


@pytest.fixture(params=["lfs", "xet"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client of this process asks it as the owner, and does not wait between its tries."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with loopback_hub(tmp_path / "hub", request.param) as hub, hub.client(tmp_path / "home"):
        yield hub


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        yield hub


def folder_with(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path | str) -> dict[str, bytes]:
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def additions(**files: bytes) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(name.replace("_", "."), content) for name, content in files.items()]


def test_what_is_uploaded_is_what_is_fetched(hub: Hub, tmp_path: Path) -> None:
    api = HfApi()
    api.create_repo(NAME, private=True)
    commit = api.upload_folder(repo_id=NAME, folder_path=folder_with(FILES, tmp_path / "mine"))
    api.create_tag(NAME, tag="v1")
    assert hub.tags(NAME) == {"v1": commit.oid} and hub.commits(NAME)[0] == commit.oid
    fetched = contents(snapshot_download(NAME, revision="v1"))
    assert fetched.pop(".gitattributes") and fetched == FILES
    assert {name: path.read_bytes() for name, path in hub.files(NAME, "v1").items() if name in FILES} == FILES
    routes = {request.route for request in hub.requests}
    assert ("xet-token" in routes, "upload" in routes) == (hub.transfer == "xet", hub.transfer == "lfs")
    assert [tag.name for tag in api.list_repo_refs(NAME).tags] == ["v1"]
    assert [one.commit_id for one in api.list_repo_commits(NAME)] == hub.commits(NAME)


def test_what_is_described_is_what_is_there(hub: Hub) -> None:
    hub.create(NAME, FILES, tags=("eagle3",), downloads=7)
    api = HfApi()
    info = api.model_info(NAME, files_metadata=True)
    assert info.sha == hub.commits(NAME)[0] and info.downloads == 7 and info.tags == ["eagle3"] and not info.gated
    assert {one.rfilename: one.size for one in info.siblings or []} == {name: len(body) for name, body in FILES.items()}
    (large,) = [one for one in info.siblings or [] if one.lfs]
    assert large.lfs and large.lfs.sha256 == hub.files(NAME)["model.safetensors"].name
    assert {one.path for one in api.list_repo_tree(NAME)} == {"config.json", "model.safetensors", "report"}
    assert {one.path for one in api.list_repo_tree(NAME, recursive=True)} == {*FILES, "report"}
    assert [one.path for one in api.list_repo_tree(NAME, "report")] == ["report/report.json"]
    assert [one.path for one in api.get_paths_info(NAME, ["config.json", "none"])] == ["config.json"]
    metadata = get_hf_file_metadata(hf_hub_url(NAME, "model.safetensors"))
    assert (metadata.commit_hash, metadata.size, metadata.etag) == (info.sha, len(WEIGHTS), large.lfs.sha256)
    assert (metadata.xet_file_data is not None) == (hub.transfer == "xet")
    assert api.verify_repo_checksums(NAME, local_dir=snapshot_download(NAME)).mismatches == []
    assert api.whoami()["name"] == "someone"


def test_repositories_are_found_by_name_and_by_card(lfs: Hub) -> None:
    card = ModelCard.from_template(
        ModelCardData(base_model="org/target", license="mit", tags=["eagle3"]),
        template_str="---\n{{ card_data }}\n---\n# A draft\n",
    )
    lfs.create("a/draft", card=str(card), downloads=3)
    lfs.create("b/other", downloads=9)
    lfs.create("a/hidden-draft", private=True)
    api = HfApi()
    assert [model.id for model in api.list_models(filter=["base_model:org/target", "license:mit", "eagle3"])] == ["a/draft"]
    assert [model.id for model in api.list_models(sort="downloads", limit=2)] == ["b/other", "a/draft"]
    assert [model.id for model in HfApi(token=False).list_models(search="DRAFT")] == ["a/draft"]
    assert api.model_info("a/draft").card_data == card.data


def test_a_stale_parent_and_an_existing_tag_are_refused(lfs: Hub) -> None:
    first = lfs.create(NAME, {"a.txt": b"1"})
    api = HfApi()
    second = api.create_commit(NAME, additions(b_txt=b"2"), commit_message="second", parent_commit=first)
    with pytest.raises(HfHubHTTPError, match="412") as stale:
        api.create_commit(NAME, additions(c_txt=b"3"), commit_message="third", parent_commit=first)
    assert "A commit has happened since" in str(stale.value)
    api.create_commit(NAME, [CommitOperationDelete("a.txt")], commit_message="less", parent_commit=second.oid)
    assert set(lfs.files(NAME)) == {"b.txt"} and len(lfs.commits(NAME)) == 3
    api.create_tag(NAME, tag="v1", revision=first)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(NAME, tag="v1")
    api.create_tag(NAME, tag="v1", exist_ok=True)
    assert lfs.tags(NAME) == {"v1": first}
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(NAME)


@pytest.mark.parametrize("metadata", ["license: my own", "base_model: [no id]", "model-index: [{name: draft}]", "a: b: c"])
def test_a_card_is_checked(lfs: Hub, metadata: str) -> None:
    lfs.create(NAME)
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        HfApi().create_commit(NAME, additions(README_md=f"---\n{metadata}\n---\n".encode()), commit_message="card")
    assert len(lfs.commits(NAME)) == 1


# Whom it lets in


@pytest.mark.parametrize("token", [None, Hub.other_token], ids=["nobody", "a stranger"])
def test_what_is_not_for_everybody(lfs: Hub, token: str | None) -> None:
    lfs.create("a/private", FILES, private=True)
    lfs.create("a/gated", FILES, gated=True)
    lfs.create("a/public", FILES)
    api = HfApi(token=token or False)
    for name in ("a/private", "a/nothing"):
        with pytest.raises(RepositoryNotFoundError, match="404" if token else "401"):
            api.model_info(name)
    assert api.model_info("a/gated").gated == "manual"
    with pytest.raises(GatedRepoError, match="Visit .*/a/gated to ask for access" if token else "Please log in"):
        api.hf_hub_download("a/gated", "config.json")
    with pytest.raises(HfHubHTTPError, match="403" if token else "401"):
        api.create_commit("a/public", additions(a_txt=b"a"), commit_message="mine")
    with pytest.raises(HfHubHTTPError, match="rights to create a model" if token else "401"):
        api.create_repo("a/new")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("a/public", revision="v9")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("a/public", "nothing.json")
    lfs.grant("a/gated")
    if token:
        assert Path(api.hf_hub_download("a/gated", "config.json")).read_bytes() == b"{}"
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(token="hf_" + "x" * 34).model_info("a/public")


# What goes wrong


def test_a_download_that_was_cut_goes_on(lfs: Hub) -> None:
    """The client asks again from the last block of 10 MiB that it has, and within a run only."""
    files = {"config.json": b"{}", "model.safetensors": Sparse(b"head", 24 * 1024**2)}
    lfs.create(NAME, files)
    lfs.inject(Fault("cut", "download"))
    path = hf_hub_download(NAME, "model.safetensors")
    assert Path(path).read_bytes() == b"head" + bytes(24 * 1024**2 - 4)
    asked = [request.headers.get("range") for request in lfs.asked("download") if request.method == "GET"]
    assert asked == [None, f"bytes={10 * 1024**2}-"]


@pytest.mark.parametrize(
    "fault", [Fault("cut", "info"), Fault("status", "tree", status=403), Fault("status", "resolve", times=99)]
)
def test_a_download_that_fails_is_done_again(lfs: Hub, fault: Fault) -> None:
    lfs.create(NAME, FILES)
    lfs.inject(fault)
    with pytest.raises((HfHubHTTPError, LocalEntryNotFoundError, RemoteProtocolError)):
        snapshot_download(NAME)
    lfs.faults.clear()
    assert contents(snapshot_download(NAME)) == FILES


def test_the_client_takes_bytes_that_are_wrong(hub: Hub) -> None:
    """It checks sizes alone, and so does Xet of a folder; `verify_repo_checksums` is what finds them."""
    hub.create(NAME, FILES)
    if hub.cas:
        hub.cas.damage()
    hub.inject(Fault("corrupt", "download"))
    folder = snapshot_download(NAME)
    assert contents(folder).keys() == FILES.keys() and contents(folder) != FILES
    (wrong,) = HfApi().verify_repo_checksums(NAME, local_dir=folder).mismatches
    assert wrong["path"] == "model.safetensors"


@pytest.mark.parametrize("fault", ["status", "cut", "corrupt", "slow", "lost"])
def test_an_upload_survives_or_leaves_nothing(lfs: Hub, fault: Any, tmp_path: Path) -> None:
    first = lfs.create(NAME)
    lfs.inject(Fault(fault, "upload", status=503))
    mine = folder_with(FILES, tmp_path / "mine")
    try:
        HfApi().upload_folder(repo_id=NAME, folder_path=mine)
    except RuntimeError:
        assert fault == "corrupt" and lfs.commits(NAME) == [first]
        HfApi().upload_folder(repo_id=NAME, folder_path=mine)
    assert {name: path.read_bytes() for name, path in lfs.files(NAME).items()} == FILES
    assert len(lfs.commits(NAME)) == 2 and [one.kind for one in lfs.faults.met] == [fault]


def test_a_commit_with_another_byte_is_taken(lfs: Hub) -> None:
    """Nothing in it has a checksum but large files: who commits reads back what is there."""
    lfs.create(NAME)
    lfs.inject(Fault("corrupt", "commit"))
    HfApi().create_commit(NAME, additions(a_txt=b"some text " * 99), commit_message="mine")
    assert len(lfs.commits(NAME)) == 2 and lfs.files(NAME)["a.txt"].read_bytes() != b"some text " * 99
