"""`specdistill acquire`: what it fetches, what it refuses before it fetches weights, and what it
says when the Hub does not give them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from huggingface_hub import constants, snapshot_download

from specdistill.cli.main import main
from tests.hub.conftest import files_of
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
    """`specdistill acquire key=value …` against the Hub, in a cache of the test's own."""

    def __init__(self, hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.hub, self.home, self._capsys = hub, home, capsys

    def __call__(
        self,
        *keys: str,
        token: str | None = Hub.token,
        home: Path | None = None,
        cache: Path | None = None,
    ) -> AcquireResult:
        """cache: another one than the home's, read without the Hub."""
        here = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": True} if cache else {}
        with (
            self.hub.client(home or self.home, token=token),
            mock.patch.dict(vars(constants), here),
        ):
            code = main(["acquire", *keys])
        return AcquireResult(code, *self._capsys.readouterr())

    def head(self, *keys: str, **options: object) -> AcquireResult:
        """The EAGLE-3 head for its target."""
        return self("method=eagle3", f"target={TARGET}", f"draft={DRAFT}", *keys, **options)  # type: ignore[arg-type]

    def cached(self, home: Path | None = None) -> set[str]:
        """Names of files in the cache's snapshots."""
        return {
            path.name for path in (home or self.home).rglob("snapshots/*/**/*") if path.is_file()
        }


@pytest.fixture
def hub(saved: dict[str, Path], tmp_path: Path) -> Iterator[Hub]:
    """Both repositories, with files that nobody needs."""
    ballast = {
        "pytorch_model.bin": b"pickled",
        "optimizer.pt": b"moments",
        "model-f16.gguf": b"GGUF",
        "training_args.bin": b"pickled",
        "vllm/model.safetensors": b"another layout",
        "report/report.json": b"{}",
    }
    with loopback_hub(tmp_path / "loopback") as made:
        made.create(TARGET, {**files_of(saved["target"]), "pytorch_model.bin": b"pickled"})
        made.create(
            DRAFT,
            {**files_of(saved["draft"]), **ballast},
            card=f"---\nbase_model: {TARGET}\n---\n",
            tags=("eagle3",),
        )
        made.tag(DRAFT, "v1")
        yield made


@pytest.fixture
def acquire(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Acquire:
    return Acquire(hub, tmp_path / "home", capsys)


def weights_asked(hub: Hub) -> list[str]:
    """Requests for bytes of weights beyond a header's."""
    asked = [
        request
        for request in hub.requests
        if request.method == "GET" and request.route in ("resolve", "download")
    ]
    whole = [
        request
        for request in asked
        if request.headers.get("range") not in ("bytes=0-100000", "bytes=0-7")
    ]
    return [request.path for request in whole if request.path.endswith(".safetensors")]


# What is fetched


def test_a_draft_is_acquired_and_used(hub: Hub, acquire: Acquire) -> None:
    """The path alone on stdout, of a folder that the next commands take."""
    commit = hub.tags(DRAFT)["v1"]
    said = acquire("method=eagle3", f"target={TARGET}", f"draft={DRAFT}@v1")
    folder = acquire.home / f"hub/models--someone--Tiny-4L-EAGLE3/snapshots/{commit}"
    assert (said.code, said.out) == (0, f"{folder}\n"), said.err
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert f"{DRAFT}@v1 (commit {commit}), 3 files, 1 of them" in said.err
    with hub.client(acquire.home):
        assert main(["doctor", f"draft={folder}", f"target={TARGET}", "decode=false"]) == 0


def test_a_dry_run_fetches_no_weights(hub: Hub, acquire: Acquire) -> None:
    said = acquire.head("dry_run=true")
    assert said.code == 0, said.err
    assert "model.safetensors" not in acquire.cached() and weights_asked(hub) == []
    size = hub.files(DRAFT)["model.safetensors"].stat().st_size
    assert f"{size / 1000:.1f} kB  model.safetensors" in said.err
    assert acquire.head().out == said.out


def test_a_header_of_endless_depth_is_refused(hub: Hub, acquire: Acquire) -> None:
    hub.commit(DRAFT, {"model.safetensors": (50_000).to_bytes(8, "little") + b"[" * 50_000})
    said = acquire.head()
    assert (said.code, said.key) == (2, "draft"), said.err


@pytest.fixture
def carried(acquire: Acquire, hub: Hub, tmp_path: Path) -> Path:
    """A cache of draft and target, as a machine without the Hub gets it."""
    with hub.client(acquire.home):
        snapshot_download(TARGET)
    said = acquire.head(f"draft={DRAFT}@v1")
    assert said.code == 0, said.err
    hub.requests.clear()
    return (acquire.home / "hub").rename(tmp_path / "carried")


def test_a_cache_is_filled_and_read_without_the_hub(
    carried: Path, acquire: Acquire, hub: Hub
) -> None:
    said = acquire.head(f"draft={DRAFT}@v1", cache=carried)
    assert (said.code, hub.requests) == (0, []), said.err
    folder = Path(said.out.strip())
    assert folder == carried / f"models--someone--Tiny-4L-EAGLE3/snapshots/{hub.tags(DRAFT)['v1']}"


def test_a_folder_is_taken_where_it_is(saved: dict[str, Path], acquire: Acquire) -> None:
    said = acquire("method=eagle3", f"target={saved['target']}", f"draft={saved['draft']}")
    assert (said.code, said.out) == (0, f"{saved['draft']}\n"), said.err


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_a_layer_comes_with_its_target(
    kind: str, hub: Hub, acquire: Acquire, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path / "native", sharded=True)
    commit = hub.create("someone/native", files_of(tmp_path / "native"))
    said = acquire("method=mtp", "target=someone/native")
    assert said.code == 0, said.err
    assert said.out.endswith(f"models--someone--native/snapshots/{commit}\n")
    assert acquire.cached() == {path.name for path in (tmp_path / "native").iterdir()}
    said = acquire("method=mtp", f"target={TARGET}")
    assert (said.code, said.key) == (2, "target")


def test_no_weights_no_work(acquire: Acquire, hub: Hub) -> None:
    said = acquire("method=ngram", f"target={TARGET}")
    assert (said.code, said.out, said.key, hub.requests) == (2, "", "method", [])


# Which draft


def test_no_draft_is_chosen(acquire: Acquire) -> None:
    said = acquire("method=eagle3", f"target={TARGET}")
    assert (said.code, said.out, said.key) == (2, "", "draft")
    assert said.error.endswith(f"`specdistill plan target={TARGET}` lists the drafts on the Hub")


# What is refused


def changed(hub: Hub, saved: dict[str, Path], tmp_path: Path, **config: Any) -> None:
    """The head with other keys in its config.json, and without the record of its target."""
    raw = json.loads((saved["draft"] / "config.json").read_text())
    raw.pop("specdistill")
    hub.commit(DRAFT, {"config.json": json.dumps({**raw, **config}).encode()})


def other_target(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "other", seed=3)
    hub.create(TARGET, files_of(tmp_path / "other"))


def index_that_leads_out(hub: Hub, saved: dict[str, Path], tmp_path: Path) -> None:
    index = {"weight_map": {"fc.weight": "../../model.safetensors"}}
    hub.commit(DRAFT, {"model.safetensors.index.json": json.dumps(index).encode()})


Change = Callable[..., None]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (
            lambda *a: changed(*a, intermediate_size=96),
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
def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(
    change: Change, got: str, hub: Hub, saved: dict[str, Path], acquire: Acquire, tmp_path: Path
) -> None:
    change(hub, saved, tmp_path)
    said = acquire.head()
    assert (said.code, said.out, said.key) == (2, "", "draft"), said.err
    assert got in said.error and said.err.count("\n") == 1
    assert "model.safetensors" not in acquire.cached() and weights_asked(hub) == []


def test_a_card_that_names_another_target_is_a_warning(
    hub: Hub, saved: dict[str, Path], acquire: Acquire, tmp_path: Path
) -> None:
    """Of a draft that records none: of another target of the same sizes nothing else tells."""
    changed(hub, saved, tmp_path)
    hub.commit(DRAFT, {"README.md": b"---\nbase_model: someone/Else\n---\n"})
    said = acquire.head()
    assert said.code == 0 and "was made for someone/Else" in said.err


def test_a_draft_model_may_have_another_tokenizer_if_that_is_asked(
    hub: Hub, acquire: Acquire, tmp_path: Path
) -> None:
    write_target(tmp_path, num_layers=1)
    hub.create("someone/small", files_of(tmp_path))
    keys = ("method=draft_model", f"target={TARGET}", "draft=someone/small")
    assert acquire(*keys).code == 0
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    words = list(vocabulary["model"]["vocab"])
    vocabulary["model"]["vocab"] = {
        word: index for index, word in enumerate([*words[:4], *reversed(words[4:])])
    }
    hub.commit("someone/small", {"tokenizer.json": json.dumps(vocabulary).encode()})
    hub.requests.clear()
    said = acquire(*keys)
    assert said.code == 2 and "heterogeneous_vocab=true" in said.error, said.err
    assert weights_asked(hub) == []
    assert acquire(*keys, "heterogeneous_vocab=true").code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    hub.commit(
        "someone/small", {"config.json": json.dumps({**config, "num_hidden_layers": 2}).encode()}
    )
    said = acquire(*keys, "heterogeneous_vocab=true")
    assert said.code == 2 and "model.layers.1." in said.error


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
def test_keys_that_cannot_go_together(keys: tuple[str, ...], key: str, acquire: Acquire) -> None:
    said = acquire("method=eagle3", "target=pico", *keys)
    assert (said.code, said.out, said.key) == (2, "", key), said.err


# What is damaged or missing


def test_a_byte_changed_on_the_way_is_noticed_and_not_left_in_the_cache(
    hub: Hub, acquire: Acquire
) -> None:
    hub.inject(
        Fault("corrupt", "download", path=hub.files(DRAFT)["model.safetensors"].name, skip=1)
    )
    said = acquire.head()
    assert (said.code, said.out) == (3, "")
    assert DRAFT in said.error and "model.safetensors" in said.error
    assert "model.safetensors" not in acquire.cached()
    said = acquire.head()
    original = hub.files(DRAFT)["model.safetensors"].read_bytes()
    assert (
        said.code == 0 and (Path(said.out.strip()) / "model.safetensors").read_bytes() == original
    ), said.err


def test_what_is_missing_without_the_hub_is_named(
    carried: Path, acquire: Acquire, hub: Hub, tmp_path: Path
) -> None:
    assert f"target: {TARGET} is no folder here" in acquire.head(cache=tmp_path / "empty").error
    (weights,) = carried.glob("models--*EAGLE3/snapshots/*/model.safetensors")
    weights.unlink()
    said = acquire.head(f"draft={DRAFT}@v1", cache=carried)
    assert said.code == 2 and f"{DRAFT}@v1 without weights" in said.error and hub.requests == []


# When the Hub does not give it


def test_an_unknown_repository(hub: Hub, acquire: Acquire) -> None:
    keys = ("method=eagle3", f"target={TARGET}", "draft=someone/nothing")
    said = acquire(*keys, token=None)
    assert (said.code, said.out, said.err.count("\n")) == (3, "", 1)
    assert hub.address in said.error and "hf auth login" in said.error
    assert "hf auth login" not in acquire(*keys).error  # who is logged in


@pytest.mark.parametrize("kind", ["private", "gated"])
def test_a_repository_that_not_everybody_reads(kind: str, hub: Hub, acquire: Acquire) -> None:
    setattr(hub.repositories[DRAFT], kind, True)
    said = acquire.head(token=None)
    assert (said.code, said.err.count("\n")) == (3, 1)
    assert f"{hub.address}/{DRAFT}" in said.error or kind == "private"
    assert DRAFT in said.error and "hf auth login" in said.error
    said = acquire.head(token=Hub.other_token)
    assert said.code == 3 and DRAFT in said.error and Hub.other_token not in said.err
    if kind == "gated":
        hub.grant(DRAFT)
        assert acquire.head(token=Hub.other_token).code == 0
    assert acquire.head().code == 0


def test_a_revision_that_does_not_exist(acquire: Acquire) -> None:
    said = acquire.head(f"draft={DRAFT}@v11")
    assert said.code == 3
    assert "has no such revision" in said.error, said.err


def test_a_full_disk_is_known_before(
    hub: Hub, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specdistill.common.progress.shutil.disk_usage", lambda path: SimpleNamespace(free=10_000)
    )
    said = acquire.head()
    assert said.code == 3 and "10.0 kB" in said.error and "HF_HOME" in said.error
    assert weights_asked(hub) == []


def test_a_cache_that_cannot_be_written(hub: Hub, acquire: Acquire) -> None:
    said = acquire.head(home=Path("/dev/null/nowhere"))
    assert (said.code, said.out) == (3, "")
    assert "HF_HOME" in said.error
