import platform
import sysconfig

import pytest
from transformers import AutoTokenizer

from recipes.pico.suites import (
    LINE_TOKENS,
    LONG_TOKENS,
    PICO_SUITES,
    SHORT_TOKENS,
    Candidate,
    write_pico_suites,
)
from specdistill.common.project import PICO, SUITES
from specdistill.data.produce.pico import load_standard_library
from specdistill.evaluation.suites.suite import load_suite, tokenize


@pytest.mark.parametrize("name", PICO_SUITES)
def test_a_committed_suite_fits_picos_context(name):
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    prompts = tokenize(load_suite(name), tokenizer, max_new_tokens=128, max_length=512)
    lengths = {prompt.id: len(prompt.token_ids) for prompt in prompts}
    for id, length in lengths.items():
        if id.startswith("long_context"):
            assert length in LONG_TOKENS, id
        elif id.startswith(("class", "signature")):
            assert length in LINE_TOKENS, id
        elif id.startswith(("function", "docstring")):
            assert length in SHORT_TOKENS, id


def test_no_line_is_both_in_the_suite_to_choose_on_and_in_the_one_that_judges():
    texts = [
        [row.content for row in load_suite(name).rows if row.kind == "prompt"]
        for name in ("pico", "pico-dev")
    ]
    telling = [
        {line for text in suite for line in text.splitlines() if len(line) > 50} for suite in texts
    ]
    assert all(len(suite) == 36 for suite in texts)
    assert min(map(len, telling)) > 30
    assert not telling[0] & telling[1]
    chosen = Candidate("m.py", "", {}, range(10, 20))
    assert chosen.overlaps(Candidate("m.py", "", {}, range(19, 30)))
    assert not chosen.overlaps(Candidate("m.py", "", {}, range(20, 30)))
    assert not chosen.overlaps(Candidate("n.py", "", {}, range(10, 20)))


def test_the_context_suite_holds_every_prompt_whole_and_cut_to_its_end():
    rows = load_suite("pico-context").rows
    ends, wholes = (
        [row for row in rows if row.category == category] for category in ("end", "whole")
    )
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    assert len(ends) == len(wholes) == 12
    for end, whole in zip(ends, wholes, strict=True):
        assert whole.content.endswith("\n" + end.content)
        assert len(tokenizer(whole.content)["input_ids"]) in LONG_TOKENS
        assert SHORT_TOKENS.start <= len(tokenizer(end.content)["input_ids"]) < SHORT_TOKENS.stop


@pytest.mark.long  # reads the whole standard library
def test_the_committed_suites_are_what_their_generator_writes(tmp_path):
    if f"Python {platform.python_version()}," not in load_suite("pico").source:
        pytest.skip(
            "the suites were made from another standard library than"
            f" {sysconfig.get_paths()['stdlib']}"
        )
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    write_pico_suites(
        load_standard_library("validation"),
        lambda text: len(tokenizer(text)["input_ids"]),
        tmp_path,
    )
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == sorted(
        f"{name}.{kind}" for name in PICO_SUITES for kind in ("jsonl", "yaml")
    )
    for path in written:
        assert path.read_bytes() == (SUITES / path.name).read_bytes()
