"""`specdistill acquire`: files that it fetches, drafts that it refuses, and errors of the Hub."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from huggingface_hub import constants, snapshot_download

from specdistill.cli.main import main
from tests.hub.conftest import read_files
from tests.loopback_hub import Fault, Hub, loopback_hub
from tests.mtp_targets import write_checkpoint
from tests.refusals import refused_key
from tests.tiny import write_target

TARGET, DRAFT = "someone/Tiny-4L", "someone/Tiny-4L-EAGLE3"
NEEDED = {"config.json", "model.safetensors", "README.md"}


class AcquireResult(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        return self.err.splitlines()[-1].removeprefix("error: ")

    @property
    def key(self) -> str:
        return refused_key(self.err)


class Acquire:
    """A function that runs `specdistill acquire key=value …` with the test's own cache."""

    def __init__(self, hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.hub, self.home, self._capsys = hub, home, capsys

    def __call__(
        self,
        *keys: str,
        token: str | None = Hub.token,
        home: Path | None = None,
        cache: Path | None = None,
    ) -> AcquireResult:
        """Run the command; `cache` replaces the cache in `home` and is read without the Hub."""
        cache_settings = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": True} if cache else {}
        with (
            self.hub.client(home or self.home, token=token),
            mock.patch.dict(vars(constants), cache_settings),
        ):
            code = main(["acquire", *keys])
        return AcquireResult(code, *self._capsys.readouterr())

    def head(self, *keys: str, **options: object) -> AcquireResult:
        """Acquire the EAGLE-3 head for its target."""
        return self("method=eagle3", f"target={TARGET}", f"draft={DRAFT}", *keys, **options)  # type: ignore[arg-type]

    def list_cached(self, home: Path | None = None) -> set[str]:
        """Return the names of the files in the cache's snapshots."""
        return {
            path.name for path in (home or self.home).rglob("snapshots/*/**/*") if path.is_file()
        }


@pytest.fixture
def hub(saved_models: dict[str, Path], tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a target and its draft, both with files that nobody needs."""
    ballast = {
        "pytorch_model.bin": b"pickled",
        "optimizer.pt": b"moments",
        "model-f16.gguf": b"GGUF",
        "training_args.bin": b"pickled",
        "vllm/model.safetensors": b"another layout",
        "report/report.json": b"{}",
    }
    with loopback_hub(tmp_path / "loopback") as loopback:
        loopback.create(
            TARGET, {**read_files(saved_models["target"]), "pytorch_model.bin": b"pickled"}
        )
        loopback.create(
            DRAFT,
            {**read_files(saved_models["draft"]), **ballast},
            card=f"---\nbase_model: {TARGET}\n---\n",
            tags=("eagle3",),
        )
        loopback.tag(DRAFT, "v1")
        yield loopback


@pytest.fixture
def acquire(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Acquire:
    return Acquire(hub, tmp_path / "home", capsys)


def list_weight_requests(hub: Hub) -> list[str]:
    """Return the paths of requests for more of the weights than their header."""
    requests = [
        request
        for request in hub.requests
        if request.method == "GET" and request.route in ("resolve", "download")
    ]
    full_requests = [
        request
        for request in requests
        if request.headers.get("range") not in ("bytes=0-100000", "bytes=0-7")
    ]
    return [request.path for request in full_requests if request.path.endswith(".safetensors")]


# What is fetched


def test_a_draft_is_acquired_and_used(hub: Hub, acquire: Acquire) -> None:
    """Only the path of the folder is on stdout, and the next command accepts it."""
    commit = hub.tags(DRAFT)["v1"]
    result = acquire("method=eagle3", f"target={TARGET}", f"draft={DRAFT}@v1")
    folder = acquire.home / f"hub/models--someone--Tiny-4L-EAGLE3/snapshots/{commit}"
    assert (result.code, result.out) == (0, f"{folder}\n"), result.err
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert f"{DRAFT}@v1 (commit {commit}), 3 files, 1 of them" in result.err
    with hub.client(acquire.home):
        assert main(["doctor", f"draft={folder}", f"target={TARGET}", "decode=false"]) == 0


def test_a_dry_run_fetches_no_weights(hub: Hub, acquire: Acquire) -> None:
    result = acquire.head("dry_run=true")
    assert result.code == 0, result.err
    assert "model.safetensors" not in acquire.list_cached() and list_weight_requests(hub) == []
    size = hub.files(DRAFT)["model.safetensors"].stat().st_size
    assert f"{size / 1000:.1f} kB  model.safetensors" in result.err
    assert acquire.head().out == result.out


def test_a_header_of_endless_depth_is_refused(hub: Hub, acquire: Acquire) -> None:
    hub.commit(DRAFT, {"model.safetensors": (50_000).to_bytes(8, "little") + b"[" * 50_000})
    result = acquire.head()
    assert (result.code, result.key) == (2, "draft"), result.err


@pytest.fixture
def carried_cache(acquire: Acquire, hub: Hub, tmp_path: Path) -> Path:
    """A cache with draft and target, as it is carried to a machine without the Hub."""
    with hub.client(acquire.home):
        snapshot_download(TARGET)
    result = acquire.head(f"draft={DRAFT}@v1")
    assert result.code == 0, result.err
    hub.requests.clear()
    return (acquire.home / "hub").rename(tmp_path / "carried")


def test_a_cache_is_filled_and_read_without_the_hub(
    carried_cache: Path, acquire: Acquire, hub: Hub
) -> None:
    result = acquire.head(f"draft={DRAFT}@v1", cache=carried_cache)
    assert (result.code, hub.requests) == (0, []), result.err
    folder = Path(result.out.strip())
    assert (
        folder
        == carried_cache / f"models--someone--Tiny-4L-EAGLE3/snapshots/{hub.tags(DRAFT)['v1']}"
    )


def test_a_local_folder_is_used_in_place(saved_models: dict[str, Path], acquire: Acquire) -> None:
    result = acquire(
        "method=eagle3", f"target={saved_models['target']}", f"draft={saved_models['draft']}"
    )
    assert (result.code, result.out) == (0, f"{saved_models['draft']}\n"), result.err


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_an_mtp_layer_comes_with_its_target(
    kind: str, hub: Hub, acquire: Acquire, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path / "native", sharded=True)
    commit = hub.create("someone/native", read_files(tmp_path / "native"))
    result = acquire("method=mtp", "target=someone/native")
    assert result.code == 0, result.err
    assert result.out.endswith(f"models--someone--native/snapshots/{commit}\n")
    assert acquire.list_cached() == {path.name for path in (tmp_path / "native").iterdir()}
    result = acquire("method=mtp", f"target={TARGET}")
    assert (result.code, result.key) == (2, "target")


def test_a_method_without_weights_is_refused(acquire: Acquire, hub: Hub) -> None:
    result = acquire("method=ngram", f"target={TARGET}")
    assert (result.code, result.out, result.key, hub.requests) == (2, "", "method", [])


# Which draft


def test_a_command_without_a_draft_is_refused(acquire: Acquire) -> None:
    result = acquire("method=eagle3", f"target={TARGET}")
    assert (result.code, result.out, result.key) == (2, "", "draft")
    assert result.error.endswith(f"`specdistill plan target={TARGET}` lists the drafts on the Hub")


# What is refused


def change_config(hub: Hub, saved_models: dict[str, Path], tmp_path: Path, **config: Any) -> None:
    """Commit the head's config.json with other values, and without the record of its target."""
    raw = json.loads((saved_models["draft"] / "config.json").read_text())
    raw.pop("specdistill")
    hub.commit(DRAFT, {"config.json": json.dumps({**raw, **config}).encode()})


def other_target(hub: Hub, saved_models: dict[str, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "other", seed=3)
    hub.create(TARGET, read_files(tmp_path / "other"))


def index_that_leads_out(hub: Hub, saved_models: dict[str, Path], tmp_path: Path) -> None:
    index = {"weight_map": {"fc.weight": "../../model.safetensors"}}
    hub.commit(DRAFT, {"model.safetensors.index.json": json.dumps(index).encode()})


Change = Callable[..., None]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (
            lambda *a: change_config(*a, intermediate_size=96),
            "layers.0.mlp.down_proj.weight of shape (64, 128)",
        ),
        (other_target, "a draft for "),
        (index_that_leads_out, "../../model.safetensors"),
        (lambda hub, *a: hub.commit(DRAFT, {"config.json": b"{"}), "config.json"),
        (lambda hub, *a: hub.commit(DRAFT, {"config.json": None}), "config.json"),
        (
            lambda hub, *a: hub.commit(DRAFT, {"model.safetensors": b"not safetensors"}),
            "weights cannot be read",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_its_weights_are_fetched(
    change: Change,
    got: str,
    hub: Hub,
    saved_models: dict[str, Path],
    acquire: Acquire,
    tmp_path: Path,
) -> None:
    change(hub, saved_models, tmp_path)
    result = acquire.head()
    assert (result.code, result.out, result.key) == (2, "", "draft"), result.err
    assert got in result.error and result.err.count("\n") == 1
    assert "model.safetensors" not in acquire.list_cached() and list_weight_requests(hub) == []


def test_a_card_that_names_another_target_is_a_warning(
    hub: Hub, saved_models: dict[str, Path], acquire: Acquire, tmp_path: Path
) -> None:
    """The draft does not record its target, and the sizes of the targets are the same."""
    change_config(hub, saved_models, tmp_path)
    hub.commit(DRAFT, {"README.md": b"---\nbase_model: someone/Else\n---\n"})
    result = acquire.head()
    assert result.code == 0 and "was made for someone/Else" in result.err


def test_a_draft_model_may_have_another_tokenizer_if_that_is_asked(
    hub: Hub, acquire: Acquire, tmp_path: Path
) -> None:
    write_target(tmp_path, num_layers=1)
    hub.create("someone/small", read_files(tmp_path))
    keys = ("method=draft_model", f"target={TARGET}", "draft=someone/small")
    assert acquire(*keys).code == 0
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    words = list(vocabulary["model"]["vocab"])
    vocabulary["model"]["vocab"] = {
        word: index for index, word in enumerate([*words[:4], *reversed(words[4:])])
    }
    hub.commit("someone/small", {"tokenizer.json": json.dumps(vocabulary).encode()})
    hub.requests.clear()
    result = acquire(*keys)
    assert result.code == 2 and "heterogeneous_vocab=true" in result.error, result.err
    assert list_weight_requests(hub) == []
    assert acquire(*keys, "heterogeneous_vocab=true").code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    hub.commit(
        "someone/small", {"config.json": json.dumps({**config, "num_hidden_layers": 2}).encode()}
    )
    result = acquire(*keys, "heterogeneous_vocab=true")
    assert result.code == 2 and "model.layers.1." in result.error


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (("draft=someone/x/model.gguf",), "draft"),
        (("draft=no/such/folder",), "draft"),
        (("from_bundle=x.tar",), "from_bundle"),
        (("offline=true",), "offline"),
        (("bundle=x.tar",), "bundle"),
        (("draft=a/b", "heterogeneous_vocab=true"), "heterogeneous_vocab"),
        (("revision=v1",), "revision"),
        (("target.adapter=mine",), "target.adapter"),
        (("warm=true",), "warm"),
    ],
)
def test_keys_that_cannot_go_together_are_refused(
    keys: tuple[str, ...], key: str, acquire: Acquire
) -> None:
    result = acquire("method=eagle3", "target=pico", *keys)
    assert (result.code, result.out, result.key) == (2, "", key), result.err


# What is damaged or missing


def test_a_byte_changed_on_the_way_is_noticed_and_not_left_in_the_cache(
    hub: Hub, acquire: Acquire
) -> None:
    hub.inject(
        Fault("corrupt", "download", path=hub.files(DRAFT)["model.safetensors"].name, skip=1)
    )
    result = acquire.head()
    assert (result.code, result.out) == (3, "")
    assert DRAFT in result.error and "model.safetensors" in result.error
    assert "model.safetensors" not in acquire.list_cached()
    result = acquire.head()
    original = hub.files(DRAFT)["model.safetensors"].read_bytes()
    assert (
        result.code == 0
        and (Path(result.out.strip()) / "model.safetensors").read_bytes() == original
    ), result.err


def test_files_that_are_missing_without_the_hub_are_named(
    carried_cache: Path, acquire: Acquire, hub: Hub, tmp_path: Path
) -> None:
    assert f"target: {TARGET} is no folder here" in acquire.head(cache=tmp_path / "empty").error
    (weights,) = carried_cache.glob("models--*EAGLE3/snapshots/*/model.safetensors")
    weights.unlink()
    result = acquire.head(f"draft={DRAFT}@v1", cache=carried_cache)
    assert result.code == 2 and f"{DRAFT}@v1 without weights" in result.error and hub.requests == []


# When the Hub gives no files


def test_an_unknown_repository_is_reported(hub: Hub, acquire: Acquire) -> None:
    keys = ("method=eagle3", f"target={TARGET}", "draft=someone/nothing")
    result = acquire(*keys, token=None)
    assert (result.code, result.out, result.err.count("\n")) == (3, "", 1)
    assert hub.address in result.error and "hf auth login" in result.error
    assert "hf auth login" not in acquire(*keys).error  # the user is logged in


@pytest.mark.parametrize("kind", ["private", "gated"])
def test_a_private_or_gated_repository_needs_access(kind: str, hub: Hub, acquire: Acquire) -> None:
    setattr(hub.repositories[DRAFT], kind, True)
    result = acquire.head(token=None)
    assert (result.code, result.err.count("\n")) == (3, 1)
    assert f"{hub.address}/{DRAFT}" in result.error or kind == "private"
    assert DRAFT in result.error and "hf auth login" in result.error
    result = acquire.head(token=Hub.other_token)
    assert result.code == 3 and DRAFT in result.error and Hub.other_token not in result.err
    if kind == "gated":
        hub.grant(DRAFT)
        assert acquire.head(token=Hub.other_token).code == 0
    assert acquire.head().code == 0


def test_a_revision_that_does_not_exist_is_reported(acquire: Acquire) -> None:
    result = acquire.head(f"draft={DRAFT}@v11")
    assert result.code == 3
    assert "has no such revision" in result.error, result.err


def test_a_full_disk_is_reported_before_weights_are_fetched(
    hub: Hub, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specdistill.common.progress.shutil.disk_usage", lambda path: SimpleNamespace(free=10_000)
    )
    result = acquire.head()
    assert result.code == 3 and "10.0 kB" in result.error and "HF_HOME" in result.error
    assert list_weight_requests(hub) == []


def test_a_cache_that_cannot_be_written_is_reported(hub: Hub, acquire: Acquire) -> None:
    result = acquire.head(home=Path("/dev/null/nowhere"))
    assert (result.code, result.out) == (3, "")
    assert "HF_HOME" in result.error
