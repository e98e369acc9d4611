import platform
import sysconfig

import pytest
from transformers import AutoTokenizer

from specdistill.pico.corpus import Module, standard_library
from specdistill.pico.suites import (
    EDIT_TOKENS,
    LINE_TOKENS,
    LONG_TOKENS,
    PICO_SUITES,
    SHORT_TOKENS,
    Candidate,
    chat_prompts,
    class_prompts,
    docstring_prompts,
    function_prompts,
    long_prompts,
    rename_prompts,
    revision_prompts,
    signature_prompts,
    write_pico_suites,
)
from specdistill.project import PICO, SUITES
from specdistill.suites.suite import load_suite, tokenize

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


def prompts_of(kind, count_tokens=len):
    return [candidate.row for candidate in kind(Module("m.py", SOURCE), count_tokens)]


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


def test_edit_prompts_hold_the_function_that_they_ask_for():
    request = "Write `first(path, *, strict=False)`: Return the first part of a path."
    function = "def first(path, *, strict=False):\n    parts = path.split(os.sep)\n    return parts[0]"
    (revision,), (rename,) = (
        prompts_of(kind, lambda text: EDIT_TOKENS.start // 2) for kind in (revision_prompts, rename_prompts)
    )
    assert revision == {"messages": [{"role": "user", "content": f"{request}\n\n{function}"}]}
    assert [turn["content"] for turn in rename["messages"]] == [request, function, request.replace("first(", "first_2(")]
    assert [turn["role"] for turn in rename["messages"]] == ["user", "assistant", "user"]
    assert not prompts_of(revision_prompts, lambda text: EDIT_TOKENS.stop)


def test_line_prompts_open_a_class_or_a_function():
    assert prompts_of(class_prompts) == [{"prompt": "class Tree:"}]
    assert prompts_of(signature_prompts) == [{"prompt": "def grow(self, by):"}]  # the other is longer than 32


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
    texts = [[row.content for row in load_suite(name).rows if row.kind == "prompt"] for name in ("pico", "pico-dev")]
    telling = [{line for text in suite for line in text.splitlines() if len(line) > 50} for suite in texts]
    assert all(len(suite) == 36 for suite in texts)
    assert min(map(len, telling)) > 30
    assert not telling[0] & telling[1]
    chosen = Candidate("m.py", "", {}, range(10, 20))
    assert chosen.overlaps(Candidate("m.py", "", {}, range(19, 30)))
    assert not chosen.overlaps(Candidate("m.py", "", {}, range(20, 30)))
    assert not chosen.overlaps(Candidate("n.py", "", {}, range(10, 20)))


def test_the_context_suite_holds_every_prompt_whole_and_cut_to_its_end():
    rows = load_suite("pico-context").rows
    ends, wholes = ([row for row in rows if row.category == category] for category in ("end", "whole"))
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    assert len(ends) == len(wholes) == 12
    for end, whole in zip(ends, wholes, strict=True):
        assert whole.content.endswith("\n" + end.content)
        assert len(tokenizer(whole.content)["input_ids"]) in LONG_TOKENS
        assert SHORT_TOKENS.start <= len(tokenizer(end.content)["input_ids"]) < SHORT_TOKENS.stop


@pytest.mark.long  # reads the whole standard library
def test_the_committed_suites_are_what_their_generator_writes(tmp_path):
    if f"Python {platform.python_version()}," not in load_suite("pico").source:
        pytest.skip(f"the suites were made from another standard library than {sysconfig.get_paths()['stdlib']}")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    write_pico_suites(standard_library("validation"), lambda text: len(tokenizer(text)["input_ids"]), tmp_path)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == sorted(f"{name}.{kind}" for name in PICO_SUITES for kind in ("jsonl", "yaml"))
    for path in written:
        assert path.read_bytes() == (SUITES / path.name).read_bytes()
