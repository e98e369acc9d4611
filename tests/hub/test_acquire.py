"""`specdistill acquire`: what it fetches, what it refuses before it fetches weights, and what it says when the Hub does not give them."""

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdistill.hub.sources import Source
from specdistill.repositories import HTTP_ERROR
from tests.hub.conftest import DRAFT, TARGET, Acquire, Said, files_of
from tests.loopback_hub import Fault, Hub, Sparse
from tests.mtp_targets import write_checkpoint
from tests.public_pairs import PAIRS, WRONG_PAIRS, Repository, one_a_method
from tests.tiny import tiny_target_model, tiny_tokenizer

NEEDED = {"config.json", "model.safetensors", "README.md"}


def weights_asked(hub: Hub) -> list[str]:
    """Requests for bytes of weights beyond a header's."""
    asked = [request for request in hub.requests if request.method == "GET" and request.route in ("resolve", "download")]
    whole = [request for request in asked if request.headers.get("range") not in ("bytes=0-100000", "bytes=0-7")]
    return [request.path for request in whole if request.path.endswith(".safetensors")]


# What is fetched


@pytest.mark.long  # three processes
def test_a_draft_is_acquired_and_used(hub: Hub, tmp_path: Path) -> None:
    """As a shell uses it: the path alone on stdout, of a folder that the next commands take."""

    def specdistill(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specdistill", *arguments]
        env = hub.environment(tmp_path / "home", token=None)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, env=env)

    result = specdistill("acquire", "method=eagle3", f"target={TARGET}", f"draft={DRAFT}@v1")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.removesuffix("\n"))
    commit = hub.tags(DRAFT)["v1"]
    assert folder == tmp_path / f"home/hub/models--someone--Tiny-4L-EAGLE3/snapshots/{commit}"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert f"{DRAFT}@v1 (commit {commit}), 3 files, 1 of them" in result.stderr
    examined = specdistill("doctor", f"draft={folder}", f"target={TARGET}", "decode=false")
    assert examined.returncode == 0, examined.stdout + examined.stderr
    again = specdistill("acquire", "method=eagle3", f"target={TARGET}", f"draft={DRAFT}@v1", "offline=true")
    assert (again.returncode, again.stdout) == (0, f"{folder}\n"), again.stderr


def test_a_dry_run_fetches_no_weights(hub: Hub, acquire: Acquire) -> None:
    said = acquire.head("dry_run=true", "warm=true")
    assert said.code == 0, said.err
    assert "model.safetensors" not in acquire.cached() and weights_asked(hub) == []
    size = hub.files(DRAFT)["model.safetensors"].stat().st_size
    assert f"{size / 1000:.1f} kB  model.safetensors" in said.err
    assert "kB  model-00001-of-" in said.err
    assert acquire.head().out == said.out


def test_warm_fetches_what_offline_jobs_need(acquire: Acquire, hub: Hub) -> None:
    said = acquire.head("warm=true")
    assert said.code == 0, said.err
    wanted = {name for name in hub.files(TARGET) if name != "pytorch_model.bin"}
    assert acquire.cached() == wanted | NEEDED
    hub.requests.clear()
    again = acquire.head("offline=true", "warm=true")
    assert (again.code, again.out, hub.requests) == (0, said.out, []), again.err


def test_a_folder_is_taken_where_it_is(saved: dict[str, Path], acquire: Acquire) -> None:
    said = acquire("method=eagle3", f"target={saved['target']}", f"draft={saved['draft']}")
    assert (said.code, said.out) == (0, f"{saved['draft']}\n"), said.err


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_a_layer_comes_with_its_target(kind: str, hub: Hub, acquire: Acquire, tmp_path: Path) -> None:
    write_checkpoint(kind, tmp_path / "native", sharded=True)
    commit = hub.create("someone/native", files_of(tmp_path / "native"))
    said = acquire("method=mtp", "target=someone/native")
    assert said.code == 0, said.err
    assert said.out.endswith(f"models--someone--native/snapshots/{commit}\n")
    assert acquire.cached() == {path.name for path in (tmp_path / "native").iterdir()}
    said = acquire("method=mtp", f"target={TARGET}")
    assert (said.code, said.key) == (2, "target.model")


def test_no_weights_no_work(acquire: Acquire, hub: Hub) -> None:
    said = acquire("method=ngram", f"target={TARGET}")
    assert (said.code, said.out, said.key, hub.requests) == (2, "", "method", [])


# Which draft


def test_candidates_are_shown_and_none_is_chosen(hub: Hub, acquire: Acquire) -> None:
    card = f"---\nbase_model: {TARGET}\n---\n"
    hub.create("a/liked-eagle3", {"config.json": b"{}"}, card=card, downloads=900)
    hub.create("b/Tiny-4L-eagle3-mine", {"config.json": b"{}"}, downloads=5000)
    hub.create("c/a-draft-model", {"config.json": b"{}"}, card=card, downloads=7000)
    said = acquire("method=eagle3", f"target={TARGET}")
    command = f"specdistill acquire method=eagle3 target={TARGET} draft="
    assert (said.code, said.out, said.key) == (2, "", "draft")
    assert [line.split()[0] if command not in line else line.strip() for line in said.err.splitlines() if line[0] == " "] == [
        f"{command}a/liked-eagle3    900 downloads",  # whose card names the target, the most downloaded first
        f"{command}{DRAFT}    0 downloads",
        "b/Tiny-4L-eagle3-mine",  # which is called like it
    ]
    assert said.error.endswith(f"{command}a/liked-eagle3") and acquire.cached() == set()
    said = acquire("method=eagle", f"target={TARGET}")
    assert (said.code, said.key) == (2, "draft")


# What is refused


def changed(hub: Hub, saved: dict[str, Path], tmp_path: Path, **config: Any) -> None:
    """The head with other keys in its config.json, and without the record of its target."""
    raw = json.loads((saved["draft"] / "config.json").read_text())
    raw.pop("specdistill")
    hub.commit(DRAFT, {"config.json": json.dumps({**raw, **config}).encode()})


def unrecorded(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    """For another target of the same sizes, which only the card can tell."""
    changed(hub, saved, tmp_path)
    hub.commit(DRAFT, {"README.md": b"---\nbase_model: someone/Else\n---\n"})


def other_target(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    tiny_target_model(seed=3).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    hub.create(TARGET, files_of(tmp_path / "other"))


def cut_short(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    hub.commit(DRAFT, {"model.safetensors": (saved["draft"] / "model.safetensors").read_bytes()[:-100]})


def without_tensor(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(saved["draft"] / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    changed(hub, saved, tmp_path)
    hub.commit(DRAFT, {"model.safetensors": tmp_path / "model.safetensors"})


def index_that_leads_out(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    index = {"weight_map": {"fc.weight": "../../model.safetensors"}}
    hub.commit(DRAFT, {"model.safetensors.index.json": json.dumps(index).encode()})


Change = Callable[..., None]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda *a: changed(*a, intermediate_size=96), "layers.0.mlp.down_proj.weight of shape (64, 128)"),
        (lambda *a: changed(*a, vocab_size=32000), "vocab_size 32000"),
        (lambda *a: changed(*a, target_hidden_size=128), "target_hidden_size 128"),
        (lambda *a: changed(*a, draft_vocab_size=50), "d2t of shape (100,)"),
        (other_target, "a draft for "),
        (cut_short, "model.safetensors"),
        (without_tensor, "fc.weight"),
        (index_that_leads_out, "../../model.safetensors"),
        (lambda hub, *a: hub.commit(DRAFT, {"../../outside.json": b"{}"}), "../../outside.json"),
        (lambda hub, *a: hub.commit(DRAFT, {"/etc/passwd": b"{}"}), "/etc/passwd"),
        (lambda hub, *a: hub.commit(DRAFT, {"config.json": b"{"}), "config.json"),
        (lambda hub, *a: hub.commit(DRAFT, {"config.json": None}), "config.json"),
        (lambda hub, *a: hub.commit(DRAFT, {"model.safetensors": None}), "pickle"),
        (lambda hub, *a: hub.commit(DRAFT, {"model.safetensors": b"not safetensors"}), "model.safetensors"),
    ],
)
def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(
    change: Change, got: str, hub: Hub, saved: dict[str, Path], acquire: Acquire, tmp_path: Path
) -> None:
    change(hub, saved, tmp_path)
    said = acquire.head()
    assert (said.code, said.out, said.key) == (2, "", "draft"), said.err
    assert got in said.error and said.err.count("\n") == 1
    assert "model.safetensors" not in acquire.cached() and weights_asked(hub) == []


def test_a_draft_of_another_method_is_refused(acquire: Acquire, hub: Hub) -> None:
    said = acquire("method=eagle", f"target={TARGET}", f"draft={DRAFT}")
    assert (said.code, said.key) == (2, "draft") and "eagle3" in said.error
    assert weights_asked(hub) == []


def test_a_card_that_names_another_target_is_a_warning(
    hub: Hub, saved: dict[str, Path], acquire: Acquire, tmp_path: Path
) -> None:
    unrecorded(hub, saved, tmp_path)
    said = acquire.head()
    assert said.code == 0 and "warning: " in said.err and "someone/Else" in said.err


def draft_model(folder: Path, tokenizer: Any) -> dict[str, bytes]:
    tiny_target_model(num_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return files_of(folder)


def test_a_draft_model_is_compared_token_by_token(hub: Hub, acquire: Acquire, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    hub.create("someone/small", draft_model(tmp_path / "small", tokenizer))
    keys = ("method=draft_model", f"target={TARGET}")
    assert acquire(*keys, "draft=someone/small").code == 0
    other = tiny_tokenizer()
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    words = list(vocabulary["model"]["vocab"])
    vocabulary["model"]["vocab"] = {word: index for index, word in enumerate([*words[:4], *reversed(words[4:])])}
    other._tokenizer = other.backend_tokenizer.from_str(json.dumps(vocabulary))
    hub.create("someone/other", draft_model(tmp_path / "other", other))
    hub.requests.clear()
    said = acquire(*keys, "draft=someone/other")
    assert said.code == 2 and "heterogeneous_vocab=true" in said.error, said.err
    assert weights_asked(hub) == []
    assert acquire(*keys, "draft=someone/other", "heterogeneous_vocab=true").code == 0
    raw = json.loads((tmp_path / "small/config.json").read_text())
    hub.commit("someone/small", {"config.json": json.dumps({**raw, "num_hidden_layers": 2}).encode()})
    said = acquire(*keys, "draft=someone/small")
    assert said.code == 2 and "model.layers.1." in said.error


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (("revision=v1", "draft=someone/x@v2"), "revision"),
        (("draft=someone/x/model.gguf",), "draft"),
        (("draft=no/such/folder",), "draft"),
        (("from_bundle=x.tar",), "method"),
        (("output_dir=x", "draft=a/b"), "output_dir"),
        (("draft=a/b", "bundle=x.tar", "dry_run=true"), "dry_run"),
        (("draft=a/b", "heterogeneous_vocab=true"), "heterogeneous_vocab"),
        (("revision=v1",), "revision"),
        (("target.adapter=mine",), "target.adapter"),
        (("draft=a/b", "warm=true"), "warm"),
    ],
)
def test_keys_that_cannot_go_together(keys: tuple[str, ...], key: str, acquire: Acquire) -> None:
    said = acquire("method=eagle3", "target=pico", *keys)
    assert (said.code, said.out, said.key) == (2, "", key), said.err


def test_a_target_or_a_bundle_is_needed(acquire: Acquire) -> None:
    assert acquire("method=eagle3").key == "target.model"


# What is damaged or missing


def test_damaged_files_are_fetched_again(hub: Hub, acquire: Acquire) -> None:
    folder = Path(acquire.head().out.strip())
    blob = (folder / "model.safetensors").resolve()
    intact = blob.read_bytes()
    blob.write_bytes(intact[:-1] + b"\xff")
    (folder / "config.json").resolve().write_text("{}")
    assert acquire.head("offline=true", "verify=true").code == 3
    said = acquire.head("verify=true")
    assert said.code == 0, said.err
    assert "fetched again: config.json" in said.err
    assert (folder / "model.safetensors").read_bytes() == intact


def test_a_byte_changed_on_the_way_is_noticed(hub: Hub, acquire: Acquire) -> None:
    hub.inject(Fault("corrupt", "download", path=hub.files(DRAFT)["model.safetensors"].name, skip=2))
    said = acquire.head()
    assert said.code == 0 and "fetched again: model.safetensors" in said.err, said.err
    original = hub.files(DRAFT)["model.safetensors"].read_bytes()
    assert (Path(said.out.strip()) / "model.safetensors").read_bytes() == original


def test_what_stays_damaged_is_not_left_in_the_cache(hub: Hub, acquire: Acquire) -> None:
    hub.inject(Fault("corrupt", "download", path=hub.files(DRAFT)["model.safetensors"].name, skip=2, times=20))
    said = acquire.head()
    assert (said.code, said.out) == (3, "")
    assert DRAFT in said.error and "model.safetensors" in said.error
    assert "model.safetensors" not in acquire.cached()


def test_offline_names_every_file_that_is_missing(hub: Hub, acquire: Acquire) -> None:
    said = acquire.head("offline=true")
    assert (said.code, said.out) == (3, "") and TARGET in said.error
    folder = Path(acquire.head().out.strip())
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    hub.requests.clear()
    said = acquire.head("offline=true")
    assert said.code == 3 and "config.json, model.safetensors" in said.error
    said = acquire.head("offline=true", "warm=true")
    assert said.code == 3 and hub.requests == []


# When the Hub does not give it


def test_an_unknown_repository(hub: Hub, acquire: Acquire) -> None:
    keys = ("method=eagle3", f"target={TARGET}", "draft=someone/nothing")
    said = acquire(*keys, token=None)
    assert (said.code, said.out, said.err.count("\n")) == (3, "", 1)
    assert hub.address in said.error and "hf auth login" in said.error
    assert "hf auth login" not in acquire(*keys).error  # who is logged in


def test_a_private_repository(hub: Hub, acquire: Acquire) -> None:
    hub.repositories[DRAFT].private = True
    said = acquire.head(token=Hub.other_token)
    assert said.code == 3 and DRAFT in said.error and Hub.other_token not in said.err
    assert acquire.head().code == 0


def test_a_gated_repository(hub: Hub, acquire: Acquire) -> None:
    hub.repositories[DRAFT].gated = True
    said = acquire.head(token=None)
    assert (said.code, said.err.count("\n")) == (3, 1)
    assert f"{hub.address}/{DRAFT}" in said.error and "hf auth login" in said.error
    assert acquire.head(token=Hub.other_token).code == 3
    hub.grant(DRAFT)
    assert acquire.head(token=Hub.other_token).code == 0


def test_a_revision_that_does_not_exist(acquire: Acquire) -> None:
    said = acquire.head("revision=v11")
    assert said.code == 3
    assert "did you mean v1?" in said.error, said.err


def test_a_full_disk_is_known_before(hub: Hub, acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdistill.cost.shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    said = acquire.head()
    assert said.code == 3 and "10.0 kB" in said.error and "HF_HOME" in said.error
    assert weights_asked(hub) == []


def test_a_cache_that_cannot_be_written(hub: Hub, acquire: Acquire) -> None:
    said = acquire.head(home=Path("/dev/null/nowhere"))
    assert (said.code, said.out) == (3, "")
    assert "HF_HOME" in said.error


def test_minutes_come_from_a_timed_sample(hub: Hub, acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdistill.hub.acquire.WORTH_TIMING", 1000)
    said = acquire.head("dry_run=true")
    assert "time: about 0 min" in said.err and " of model.safetensors " in said.err


def test_a_clock_that_is_wrong(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that is not valid yet, as every certificate is for a clock that stands in the past."""
    refused = ssl.SSLCertVerificationError()
    refused.verify_message = "certificate is not yet valid"

    def connect(*_: object, **__: object) -> None:
        raise HTTP_ERROR("no connection") from refused

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", connect)
    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", connect)
    said = acquire.head()
    assert (said.code, said.out) == (3, "") and refused.verify_message in said.error and "clock" in said.error


# Public pairs


def publish(hub: Hub, repository: Repository, folder: Path) -> None:
    """Its files, large ones by their first bytes, the rest zeros that take no disk."""
    if repository.name in hub.repositories:
        shutil.rmtree(folder, ignore_errors=True)
    repository.write(folder)
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
            file.seek(0)
            files[path.name] = Sparse(file.read(8 + length), path.stat().st_size) if length else path.read_bytes()
    hub.create(repository.name, files)


@pytest.fixture
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdistill.cost.shutil.disk_usage", lambda path: SimpleNamespace(free=10**13))


def told(name: str, hub: Hub, acquire: Acquire, tmp_path: Path) -> Said:
    pair = {**PAIRS, **WRONG_PAIRS}[name]
    publish(hub, pair.target, tmp_path / "target")
    if pair.draft:
        publish(hub, pair.draft, tmp_path / "draft")
    draft = (f"draft={pair.draft.name}",) if pair.draft else ()
    said = acquire(f"method={pair.method}", f"target={pair.target.name}", *draft, "dry_run=true")
    assert not [name for name in acquire.cached() if name.endswith(".safetensors")]
    return said


@pytest.mark.parametrize("name", one_a_method(sorted(PAIRS.keys() - {"qwen3-dflash"})))
def test_public_pairs_that_are_right(name: str, large_disk: None, hub: Hub, acquire: Acquire, tmp_path: Path) -> None:
    said = told(name, hub, acquire, tmp_path)
    assert said.code == 0 and "warning" not in said.err, said.err
    assert "time: about " in said.err


# Of two that are wrong in the numbers that tensors hold, which nothing but the weights tell: what the doctor is for.
UNREAD = {"d2t-range", "zeros"}


@pytest.mark.parametrize("name", [*sorted(WRONG_PAIRS.keys() - UNREAD), "qwen3-dflash"])
def test_public_pairs_that_are_wrong(name: str, large_disk: None, hub: Hub, acquire: Acquire, tmp_path: Path) -> None:
    said = told(name, hub, acquire, tmp_path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    assert said.error.startswith(("draft: got ", "target.model: got ", "method: got "))


def test_what_arrived_wrong_before_a_run_ended_is_compared_by_the_next(
    hub: Hub, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    weights, download = hub.files(DRAFT)["model.safetensors"], Source._download

    class Killed(BaseException):
        """In the place of a signal, which would end the tests, too."""

    def killed(source: Source, files: Sequence[str]) -> None:
        download(source, files)
        if "model.safetensors" in files:
            (here,) = acquire.home.rglob(f"models--{DRAFT.replace('/', '--')}/snapshots/*/model.safetensors")
            here.write_bytes(weights.read_bytes()[:-1] + b"?")
            raise Killed

    monkeypatch.setattr(Source, "_download", killed)
    with pytest.raises(Killed):
        acquire.head()
    monkeypatch.setattr(Source, "_download", download)
    said = acquire.head()
    assert said.code == 0 and "fetched again: model.safetensors" in said.err
    assert (Path(said.out.strip()) / "model.safetensors").read_bytes() == weights.read_bytes()
    assert not [*acquire.home.rglob(".unchecked-*")]
