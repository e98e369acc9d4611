"""Bundles: the same bytes again, restored where there is no Hub, and refused when they hold anything but what their manifest says."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdistill.methods.load import load_proposer, locate
from specdistill.repositories import offline
from specdistill.targets.frozen import FrozenTarget
from tests.hub.conftest import DRAFT, TARGET, Acquire, files_of
from tests.loopback_hub import Hub

pytestmark = pytest.mark.long  # archives of whole pairs
Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def bundle(acquire: Acquire, tmp_path: Path) -> Path:
    path = tmp_path / "pair.tar"
    said = acquire.head("revision=v1", f"bundle={path}")
    assert said.code == 0, said.err
    return path


def test_a_bundle_holds_both_and_no_token(bundle: Path, acquire: Acquire, hub: Hub, tmp_path: Path) -> None:
    with tarfile.open(bundle) as archive:
        names, manifest = archive.getnames(), json.loads(archive.extractfile("manifest.json").read())  # type: ignore[union-attr]
    wanted = {name for name in hub.files(TARGET) if name != "pytorch_model.bin"}
    drafts = {"config.json", "model.safetensors", "README.md"}
    assert names[0] == "manifest.json"
    assert set(names[1:]) == {f"draft/{name}" for name in drafts} | {f"target/{name}" for name in wanted}
    assert manifest["parts"]["draft"]["commit"] == hub.tags(DRAFT)["v1"] and manifest["parts"]["draft"]["revision"] == "v1"
    content = bundle.read_bytes()
    assert hub.token.encode() not in content and str(tmp_path).encode() not in content
    again = tmp_path / "again.tar"
    assert acquire.head("revision=v1", f"bundle={again}", home=tmp_path / "another").code == 0
    assert again.read_bytes() == content
    said = acquire.head(f"bundle={bundle}")
    assert (said.code, said.key) == (2, "bundle")


def test_a_bundle_fills_a_cache_without_a_hub(bundle: Path, acquire: Acquire, hub: Hub, tmp_path: Path) -> None:
    hub.requests.clear()
    home = tmp_path / "air-gapped"
    said = acquire(f"from_bundle={bundle}", home=home)
    assert said.code == 0, said.err
    folder = Path(said.out.removesuffix("\n"))
    assert folder == home / f"hub/models--someone--Tiny-4L-EAGLE3/snapshots/{hub.tags(DRAFT)['v1']}"
    again = acquire.head("revision=v1", "offline=true", "warm=true", "verify=true", home=home)
    assert (again.code, again.out) == (0, said.out), again.err
    assert acquire(f"from_bundle={bundle}", home=home).code == 0
    with hub.client(home), offline():  # as other commands find it
        target = FrozenTarget.load(TARGET)
        assert locate(f"{DRAFT}@v1", key="draft") == folder
        assert load_proposer("eagle3", f"{DRAFT}@v1", target) is not None
    assert hub.requests == [] and not list((home / "hub").glob("tmp*"))


def test_a_bundle_becomes_a_folder(bundle: Path, acquire: Acquire, saved: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "restored"
    said = acquire(f"from_bundle={bundle}", f"output_dir={out}")
    assert (said.code, said.out) == (0, f"{out / 'draft'}\n"), said.err
    assert files_of(out / "draft").items() >= files_of(saved["draft"]).items()
    assert files_of(out / "target") == files_of(saved["target"])
    said = acquire("method=eagle3", f"target={out / 'target'}", f"draft={out / 'draft'}")
    assert said.code == 0, said.err
    assert acquire(f"from_bundle={bundle}", f"output_dir={out}").code == 2


def test_folders_are_bundled_too(saved: dict[str, Path], acquire: Acquire, tmp_path: Path) -> None:
    keys = ("method=eagle3", f"target={saved['target']}", f"draft={saved['draft']}")
    said = acquire(*keys, f"bundle={tmp_path / 'local.tar'}")
    assert (said.code, said.out) == (0, f"{saved['draft']}\n"), said.err
    said = acquire(f"from_bundle={tmp_path / 'local.tar'}")
    assert (said.code, said.key) == (2, "output_dir")
    assert acquire(f"from_bundle={tmp_path / 'local.tar'}", f"output_dir={tmp_path / 'out'}").code == 0
    assert files_of(tmp_path / "out/draft") == files_of(saved["draft"])
    said = acquire(*keys, "verify=true")
    assert (said.code, said.key) == (2, "verify")


def rewritten(path: Path, change: Callable[[Members], Any]) -> None:
    with tarfile.open(path) as archive:
        members = [(info, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w") as archive:
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))


def index_of(members: Members, name: str) -> int:
    return [info.name for info, _ in members].index(name)


def another_byte(members: Members) -> None:
    index = index_of(members, "draft/model.safetensors")
    info, content = members[index]
    members[index] = (info, content[:-1] + bytes([content[-1] ^ 1]))


def link(members: Members) -> None:
    info = members[index_of(members, "draft/config.json")][0]
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"


def without(members: Members) -> None:
    del members[index_of(members, "target/config.json")]


def member(name: str) -> Callable[[Members], None]:
    return lambda members: members.append((tarfile.TarInfo(name), b"more"))


def in_manifest(change: Callable[[dict[str, Any]], Any], *also: tuple[str, bytes]) -> Callable[[Members], None]:
    def apply(members: Members) -> None:
        manifest = json.loads(members[0][1])
        change(manifest["parts"]["draft"])
        members[0] = (members[0][0], json.dumps(manifest).encode())
        members.extend((tarfile.TarInfo(name), content) for name, content in also)

    return apply


def lead_out(part: dict[str, Any]) -> None:
    part["files"]["../../outside"] = {"size": 4, "checksum": "0" * 64}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (another_byte, "whose draft/model.safetensors is not what its checksum says"),
        (link, "with 'draft/config.json', a link or a special file"),
        (without, "without target/config.json"),
        (member("draft/more"), "with 'draft/more', no file that its manifest lists so"),
        (member("../../outside"), "with '../../outside', no file"),
        (member("/outside"), "with '/outside', no file"),
        (in_manifest(lead_out, ("draft/../../outside", b"more")), "leads out of the folder"),
        (in_manifest(lambda part: part.update(revision="../../refs")), "leads out of the folder"),
        (in_manifest(lambda part: part.update(repository="../x/y")), "parts.draft.repository"),
        (in_manifest(lambda part: part.update(commit="main")), "parts.draft.commit"),
        (in_manifest(lambda part: part.update(repository=None)), "a repository and its commit, or neither"),
        (lambda members: members.reverse(), "which does not begin with manifest.json"),
        (lambda members: members.clear(), "which does not begin with manifest.json"),
    ],
)
def test_an_archive_that_was_changed_is_refused(
    change: Callable[[Members], Any], why: str, bundle: Path, acquire: Acquire, tmp_path: Path
) -> None:
    rewritten(bundle, change)
    before = {path for path in tmp_path.rglob("*") if "air-gapped" not in path.parts}
    for keys in ((), (f"output_dir={tmp_path / 'air-gapped' / 'out'}",)):
        said = acquire(f"from_bundle={bundle}", *keys, home=tmp_path / "air-gapped")
        assert (said.code, said.out) == (2, ""), said.err
        assert said.error.startswith(f"from_bundle: got {bundle}") and why in said.error, said.error
    assert not [path for path in (tmp_path / "air-gapped").rglob("*") if path.is_file()]
    assert {path for path in tmp_path.rglob("*") if "air-gapped" not in path.parts} == before


def test_what_is_no_archive_or_cut_short(bundle: Path, acquire: Acquire, tmp_path: Path) -> None:
    (tmp_path / "prose").write_text("once upon a time" * 100)
    for path, why in ((tmp_path / "prose", "(invalid header)"), (tmp_path / "none", "which is no file")):
        said = acquire(f"from_bundle={path}")
        assert said.code == 2 and why in said.error, said.error
    bundle.write_bytes(bundle.read_bytes()[:-30_000])
    said = acquire(f"from_bundle={bundle}", home=tmp_path / "air-gapped")
    assert said.code == 2 and "(unexpected end of data)" in said.error, said.error


def test_a_disk_that_is_too_small(bundle: Path, acquire: Acquire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdistill.cost.shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    said = acquire(f"from_bundle={bundle}", home=tmp_path / "air-gapped")
    assert said.code == 3 and "has 10.0 kB free; free disk space, or restore it elsewhere" in said.error
    said = acquire.head("revision=v1", f"bundle={tmp_path / 'more.tar'}")
    assert (
        said.code == 3
        and said.error.endswith("has 10.0 kB free; write it to another disk")
        and not (tmp_path / "more.tar").exists()
    )


def test_no_bundle_is_left_behind_by_a_failure(acquire: Acquire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdistill.hub.bundle._add", full)
    said = acquire.head(f"bundle={tmp_path / 'pair.tar'}")
    assert said.code == 3 and "No space left on device" in said.error
    assert not [path for path in tmp_path.iterdir() if "pair" in path.name]
