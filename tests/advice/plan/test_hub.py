"""`specdistill plan` asks a Hub on loopback with the real client."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdistill.advice.plan.reading import has_target_name, infer_method
from specdistill.common.project import PICO
from tests.loopback_hub import Hub, fetched, loopback_hub
from tests.scripts import specdistill

TARGET = "someone/Tiny-3.1-4M-Instruct"
CONFIG = (PICO / "config.json").read_bytes()
DRAFTS = [
    ("a/EAGLE3-TINY3.1-Instruct-4M", (), 900),
    ("b/my-drafter", (f"base_model:{TARGET}", "eagle3"), 7),
    ("c/EAGLE3-Tiny-3.1-70M-Instruct", (), 5000),
    ("d/Tiny-3.1-4M-Instruct-GGUF", (f"base_model:{TARGET}",), 9000),
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with loopback_hub(tmp_path / "hub") as hub:
        hub.create(TARGET, {"config.json": CONFIG})
        for repository, tags, downloads in DRAFTS:
            hub.create(repository, tags=tags, downloads=downloads)
        yield hub


def run_plan(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with hub.client(home, token=None):
        return specdistill("plan", *arguments)


@pytest.mark.long  # plans several times
def test_drafts_are_found_by_card_and_by_name(hub: Hub, tmp_path: Path):
    result = run_plan(hub, tmp_path / "home", f"target={TARGET}", "--json")
    assert result.returncode == 0, result.stderr
    written = json.loads(result.stdout)
    assert (
        written["target"]["revision"] == hub.commits(TARGET)[0]
        and written["target"]["parameters"] == 3_674_240
    )
    assert written["hub"] == {
        "not_asked": None,
        "drafts": [
            {
                "repository": "a/EAGLE3-TINY3.1-Instruct-4M",
                "method": "eagle3",
                "found_by": "name",
                "downloads": 900,
            },
            {"repository": "b/my-drafter", "method": "eagle3", "found_by": "card", "downloads": 7},
        ],
    }
    assert fetched(tmp_path / "home") == {"config.json"}


@pytest.mark.usefixtures("given_training_step")
def test_a_plan_without_the_hub_says_so(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_bytes(CONFIG)
    with loopback_hub(tmp_path / "hub") as hub:
        pass  # the Hub stops here, so nothing answers at its address
    keys = [f"target={tmp_path / 'mine'}", "serving.device=h100"]
    result = run_plan(hub, tmp_path / "home", *keys)
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        f"not asked: {hub.address}" in " ".join(result.stdout.split())
        and "Recommended: " in result.stdout
    )


@pytest.mark.parametrize(
    ("repository", "tags", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", [], "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", [], "eagle"),
        ("amazon/GPT-OSS-20B-P-EAGLE", [], "peagle"),
        ("z-lab/Qwen3-8B-DFlash-b16", ["eagle3"], "dflash"),
        ("someone/Qwen3.5-9B-MTP", [], "mtp"),
        ("someone/attempts", [], None),
        ("someone/Qwen3-8B-speculator", ["speculators", "eagle3"], "eagle3"),
    ],
)
def test_methods_are_inferred_from_names_and_tags(
    repository: str, tags: list[str], method: str | None
):
    assert infer_method(repository, tags) == method


@pytest.mark.parametrize(
    ("repository", "target", "same"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("Tengyunw/qwen3_8b_eagle3", "Qwen/Qwen3-8B", True),
        ("someone/Qwen-8B-eagle3", "Qwen/Qwen3-8B", False),
        ("someone/EAGLE3-Qwen3-30B-A3B", "Qwen/Qwen3-8B", False),
        ("someone/EAGLE3.1-Qwen3-8B", "/models/Qwen3-8B", True),
    ],
)
def test_names_are_compared_word_by_word(repository: str, target: str, same: bool):
    assert has_target_name(repository, target) == same
