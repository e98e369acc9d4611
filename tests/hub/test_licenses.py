"""What licences require of a published draft, and how they are stated."""

from pathlib import Path
from typing import Any

import pytest

from specdistill.data.produce.sources import load_sources
from specdistill.hub.licenses import (
    Licensed,
    build_license_metadata,
    choose_draft_license,
    find_data_licenses,
    license_from_card,
    list_prohibitions,
    read_model_license,
)
from specdistill.hub.publish import list_ingredients
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import DataConfig
from specdistill.targets.files import TargetFiles
from tests.loopback_hub import loopback_hub
from tests.refusals import refused
from tests.tiny import tiny_tokenizer


def make_part(license: str | None, what: str = "target") -> Licensed:
    return Licensed(what, "org/it", license)


@pytest.mark.parametrize(
    ("license", "name", "refused"),
    [
        ("apache-2.0", "draft", False),
        (None, "draft", False),
        ("other", "draft", False),
        ("cc-by-nd-4.0", "draft", True),
        ("CC-BY-NC-ND-3.0", "draft", True),
        ("cc-by-nc-4.0", "draft", False),
        ("standard-terms", "draft", False),  # has an nd in it
        ("llama2", "draft", False),
        ("llama3", "llama-draft", True),
        ("llama3", "Llama-3-8B-eagle3", False),
        ("llama3.1", "eagle3-Llama-3.1", True),
        ("llama3.1", "llama3.1-eagle3", False),
        ("llama4", "Llama_4-Scout-eagle3", False),
    ],
)
def test_a_licence_that_forbids_the_draft_or_its_name_is_refused(
    license: str | None, name: str, refused: bool
) -> None:
    for what in ("target", *(["training data"] if license else [])):
        assert (
            bool(
                list(
                    list_prohibitions(
                        [make_part("mit", "data"), make_part(license, what)], f"Llama/{name}"
                    )
                )
            )
            == refused
        )


def test_data_of_no_stated_licence_is_refused() -> None:
    (prohibition,) = list_prohibitions(
        [make_part("mit"), make_part(None, "training data")], "org/draft"
    )
    assert "org/it" in prohibition


def test_an_initialization_of_the_hub_is_read_at_its_revision_and_named_without_it(
    tmp_path: Path,
) -> None:
    keys = [
        "method=eagle3",
        "target.model=pico",
        "data.source=self",
        "draft.init=org/first@v1",
        f"train.output_dir={tmp_path}",
    ]
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        hub.create("org/first", card="---\nlicense: mit\n---\n")
        hub.tag("org/first", "v1")
        hub.commit("org/first", {"README.md": b"---\nlicense: cc-by-nd-4.0\n---\n"})
        parts = list_ingredients(load_recipe(Recipe, keys), TargetFiles("pico"), None)
    assert parts[-1] == Licensed("initialization", "org/first", "mit")


@pytest.mark.parametrize(
    ("metadata", "license"),
    [
        ({"license": "mit"}, "mit"),
        ({"license": ["mit", "apache-2.0"]}, "mit"),
        ({"license": "other", "license_name": "llama3"}, "llama3"),
        ({"license": "other"}, "other"),
        ({"language": "en"}, None),
        (None, None),
    ],
)
def test_the_licence_is_read_from_a_cards_metadata(
    metadata: dict[str, Any] | None, license: str | None
) -> None:
    assert license_from_card(metadata) == license


def test_a_draft_has_the_licence_that_is_given_or_its_targets() -> None:
    parts = [make_part("cc0-1.0", "training data"), make_part("gemma")]
    assert choose_draft_license(None, parts) == "gemma"
    assert choose_draft_license("mit", parts) == "mit"
    assert (
        choose_draft_license(None, parts[:1])
        == choose_draft_license(None, [make_part(None)])
        == "unknown"
    )
    assert build_license_metadata("gemma") == {"license": "gemma"}
    assert build_license_metadata("acme-1.0") == {"license": "other", "license_name": "acme-1.0"}


def test_a_card_that_cannot_be_read_is_refused(tmp_path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
    with refused("target", holds="README.md"):
        read_model_license("target", "it", tmp_path)


def test_licences_of_data_are_read_from_their_sources(tmp_path) -> None:
    """A source may state its licence, and pico's is known; only the name of a file is published.

    Prompts of the target itself have the target's licence.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    source = [
        {"source": "pico"},
        {"source": "self"},
        {"source": str(rows)},
        {"source": str(rows), "license": "cc-by-4.0", "weight": 2},
    ]
    licenses = [(part.name, part.license) for part in find_data_licenses(source)]
    assert licenses == [("pico", "PSF-2.0"), ("rows.jsonl", None), ("rows.jsonl", "cc-by-4.0")]
    assert [
        len(loaded.rows)
        for loaded in load_sources(
            DataConfig(source=source[2:], cache_dir=str(tmp_path)), tiny_tokenizer()
        )
    ] == [1, 1]


def test_licences_of_data_on_the_hub_are_read_from_their_cards(tmp_path) -> None:
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        hub.create("org/chats", card="---\nlicense: odc-by\n---\n")
        shown, hidden = find_data_licenses([{"source": "org/chats"}, {"source": "org/others"}])
    assert (shown.name, shown.license) == ("org/chats", "odc-by")
    assert (hidden.name, hidden.shown) == ("org/others", "unknown")
