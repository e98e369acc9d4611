import platform
import sysconfig

import pytest
from transformers import AutoTokenizer

from specdistill.data.corpus import Module, standard_library
from specdistill.evaluation.pico_suite import (
    LONG_TOKENS,
    SHORT_TOKENS,
    SUITE_NAMES,
    Candidate,
    chat_prompts,
    docstring_prompts,
    function_prompts,
    long_prompts,
    write_pico_suites,
)
from specdistill.evaluation.suites import load_suite, tokenize
from specdistill.project import PICO, SUITES

SOURCE = '''"""A module."""

import os


def first(path, *, strict=False):
    """Return the first part of a path."""
    parts = path.split(os.sep)
    return parts[0]


class Tree:
    height = 0
    def grow(self, by):
        self.height += by
        return self
'''


def prompts_of(kind):
    return [candidate.row for candidate in kind(Module("m.py", SOURCE), len)]


def test_function_prompts_end_at_the_signature_or_after_the_docstring():
    texts = [row["prompt"] for row in prompts_of(function_prompts)]
    assert [text.splitlines()[-1].strip() for text in texts] == [
        '"""Return the first part of a path."""',
        "def grow(self, by):",
    ]
    assert all(len(text) in SHORT_TOKENS for text in texts)


def test_docstring_prompts_end_after_the_opening_quotes():
    texts = [row["prompt"] for row in prompts_of(docstring_prompts)]
    assert len(texts) == 1
    assert texts[0].endswith('def first(path, *, strict=False):\n    """')


def test_chat_prompts_are_the_users_turn():
    rows = prompts_of(chat_prompts)
    content = "Write `first(path, *, strict=False)`: Return the first part of a path."
    assert rows == [{"messages": [{"role": "user", "content": content}]}]


def test_long_prompts_leave_text_to_write():
    lines = [f"value_{number} = {number} + {number}" for number in range(400)]
    module = Module("long.py", "\n".join([*lines[:150], "", *lines[150:]]))
    texts = [candidate.row["prompt"] for candidate in long_prompts(module, lambda text: len(text.split()))]
    assert texts
    assert all(len(text.split()) in LONG_TOKENS for text in texts)
    assert len(list(long_prompts(Module("short.py", "\n".join(lines[:100])), lambda text: len(text.split())))) == 0


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_a_committed_suite_fits_picos_context(name):
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    prompts = tokenize(load_suite(name), tokenizer, max_new_tokens=128, max_length=512)
    lengths = {prompt.id: len(prompt.token_ids) for prompt in prompts}
    for id, length in lengths.items():
        if id.startswith("long_context"):
            assert length in LONG_TOKENS, id
        elif not id.startswith("chat"):
            assert length in SHORT_TOKENS, id


def test_no_line_is_in_two_suites():
    texts = [[row.content for row in load_suite(name).rows if row.kind == "prompt"] for name in SUITE_NAMES]
    telling = [{line for text in suite for line in text.splitlines() if len(line) > 50} for suite in texts]
    assert all(len(suite) == 36 for suite in texts)
    assert min(map(len, telling)) > 30
    assert not telling[0] & telling[1]
    chosen = Candidate("m.py", "", {}, range(10, 20))
    assert chosen.overlaps(Candidate("m.py", "", {}, range(19, 30)))
    assert not chosen.overlaps(Candidate("m.py", "", {}, range(20, 30)))
    assert not chosen.overlaps(Candidate("n.py", "", {}, range(10, 20)))


@pytest.mark.slow
def test_the_committed_suites_are_what_their_generator_writes(tmp_path):
    if f"Python {platform.python_version()}," not in load_suite("pico").source:
        pytest.skip(f"the suites were made from another standard library than {sysconfig.get_paths()['stdlib']}")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    write_pico_suites(standard_library("validation"), lambda text: len(tokenizer(text)["input_ids"]), tmp_path)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == ["pico-dev.jsonl", "pico-dev.yaml", "pico.jsonl", "pico.yaml"]
    for path in written:
        assert path.read_bytes() == (SUITES / path.name).read_bytes()
