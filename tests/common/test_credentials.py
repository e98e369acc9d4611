"""Every command refuses a typed secret, names its key, and does not repeat the secret."""

from pathlib import Path

import pytest

from specdistill.cli.main import VERBS, main
from specdistill.common.credentials import find_secret, remove_places
from tests.refusals import refused_key

TOKEN = "hf_" + "abCD12" * 6


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TOKEN, "a token"),
        (f"vllm serve --hf-token {TOKEN}", "a token"),
        ("https://me:pass@host/rows.jsonl", "a password"),
        (f"see https://{'x' * 30}@host/", "a password"),
        ("ssh://me:pass@host", "a password"),
        ("an-api-key-of-mine", "OPENAI_API_KEY"),
        ("the-key-of-a-server", "SPECDISTILL_SERVER_KEYS"),
        ("ssh://git@host/repo", None),
        ("hf://datasets/org/name@v1/rows.parquet", None),
        ("https://host/rows.jsonl?mail=me@host", None),
        ("http://127.0.0.1:8000", None),
        ("org/name@v1.2", None),
        ("hf_transfer", None),
        ("EMPTY", None),
    ],
)
def test_tokens_passwords_and_keys_are_found_as_secrets(
    text: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "an-api-key-of-mine")
    monkeypatch.setenv("HF_TOKEN", "EMPTY")
    monkeypatch.setenv("SPECDISTILL_SERVER_KEYS", "http://127.0.0.1:8000 the-key-of-a-server")
    secret = find_secret(text)
    assert (
        secret is None
        if kind is None
        else secret is not None and kind in secret and text not in secret
    )


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/ada lovelace/run/", "run/"),
        ("~ada/target", "target"),
        ("../../home/ada/target", "target"),
        (
            "data.source=[/home/ada/my chats.jsonl,~/more.jsonl,org/name@v1]",
            "data.source=[my chats.jsonl,more.jsonl,org/name@v1]",
        ),
        (
            '/opt/vllm serve /home/ada/t --config \'{"model": "/tmp/d/draft"}\'',
            'vllm serve t --config \'{"model": "draft"}\'',
        ),
        ("http://gpu-7.corp:8000/v1", "http://HOST:8000/v1"),
        *(
            (text, text)
            for text in (
                "org/name",
                "runs/mine",
                "https://huggingface.co/datasets/org/name",
                "4 / 2 = 2",
                "<b>1</b>",
            )
        ),
    ],
)
def test_published_values_have_no_paths_or_hosts_of_a_machine(text: str, public: str) -> None:
    assert remove_places({"a": [text, 1, None]}) == {"a": [public, 1, None]}


WORDS = ("target={}", "{}", "{}=1", "train.hub_token={}", "recipe={}")


@pytest.mark.parametrize(
    ("verb", "word"),
    [*((verb, WORDS[0]) for verb in (*VERBS, "unknown")), *(("eval", word) for word in WORDS[1:])],
)
def test_every_verb_refuses_a_secret_and_does_not_repeat_it(
    verb: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, word.format(TOKEN), "debug=true"]) == 2
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err and shown.out == ""
    assert refused_key(shown.err) == (
        "the command line" if word.startswith("{") else word.partition("=")[0]
    )


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("data: {source: ['https://me:pass@host/rows.jsonl']}", "recipe"),
        ("data: {source: ['${oc.env:HF_TOKEN}']}", "data.source[0]"),
        ("name: env\ndata: {source: ['${oc.${name}:HF_TOKEN}']}", "data.source[0]"),
        ("# {token}", "recipe"),
        ("a: [{token}", "recipe"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    line: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "mine.yaml").write_text(line.replace("{token}", TOKEN) + "\n")
    arguments = [
        f"recipe={tmp_path / 'mine.yaml'}",
        "target=pico",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    assert main(["train", *arguments, "debug=true"]) == 2
    error = capsys.readouterr().err
    assert TOKEN not in error and "me:pass" not in error and refused_key(error) == key
    assert not (tmp_path / "run").exists()
