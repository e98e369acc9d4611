import platform
import sysconfig

import pytest
from transformers import AutoTokenizer

from specdistill.data.corpus import Module, standard_library
from specdistill.evaluation.pico_suite import (
    LONG_TOKENS,
    SHORT_TOKENS,
    chat_prompts,
    docstring_prompts,
    function_prompts,
    long_prompts,
    write_pico_suite,
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


@pytest.mark.skipif(not PICO.is_dir(), reason="pico is not built")
def test_the_committed_suite_fits_picos_context():
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    prompts = tokenize(load_suite("pico"), tokenizer, max_new_tokens=128, max_length=512)
    lengths = {prompt.id: len(prompt.token_ids) for prompt in prompts}
    for id, length in lengths.items():
        if id.startswith("long_context"):
            assert length in LONG_TOKENS, id
        elif not id.startswith("chat"):
            assert length in SHORT_TOKENS, id


@pytest.mark.slow
def test_the_committed_suite_is_what_its_generator_writes(tmp_path):
    if not PICO.is_dir():
        pytest.skip("pico is not built")
    if f"Python {platform.python_version()}," not in load_suite("pico").source:
        pytest.skip(f"the suite was made from another standard library than {sysconfig.get_paths()['stdlib']}")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    write_pico_suite(standard_library("validation"), lambda text: len(tokenizer(text)["input_ids"]), tmp_path)
    for name in ("pico.jsonl", "pico.yaml"):
        assert (tmp_path / name).read_bytes() == (SUITES / name).read_bytes()
