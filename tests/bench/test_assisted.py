"""bench/assisted.py on a tiny target: both ways generate the same, and every prompt is timed in both."""

from typing import Any

import pytest

from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right
from tests.scripts import load_script
from tests.tiny import tiny_target_model, tiny_tokenizer

assisted: Any = load_script("bench/assisted.py")
PROMPTS = [[5, 9, 5, 9, 20, 31], [7, 8, 9], [40, 41, 42, 43]]


def test_the_same_completions_and_a_ratio_with_its_interval() -> None:
    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    target = FrozenTarget(model, tiny_tokenizer(), name="tiny")
    draft = half_right(target)
    limits = {"k": 3, "max_new_tokens": 20}
    ways = {"first": assisted.in_transformers(target, draft, **limits), "second": assisted.here(target, draft, **limits)}
    calls: list[tuple[str, int]] = []

    def noted(name: str) -> Any:
        def generate(prompt: list[int]) -> list[int]:
            calls.append((name, PROMPTS.index(prompt)))
            completion: list[int] = ways[name](prompt)
            return completion

        return generate

    found = assisted.compare(target, {name: noted(name) for name in ways}, PROMPTS, 2)
    second = found["second"]
    assert found["first"]["speedup"] == 1 and (found["first"]["identical"], second["identical"]) == (3, 3)
    assert second["speedup"] == pytest.approx(second["tokens_per_second"] / found["first"]["tokens_per_second"])
    assert second["speedup_ci95"][0] <= second["speedup"] <= second["speedup_ci95"][1]
    timed = calls[6:]
    assert sorted(timed) == sorted([(name, prompt) for name in ways for prompt in range(3)] * 2)
    assert [name for name, _ in timed[:4]] == ["first", "second", "second", "first"]
    ways["second"] = lambda prompt: [0] * 20
    assert assisted.compare(target, ways, PROMPTS[:2], 1)["second"]["identical"] == 0
