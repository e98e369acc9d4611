"""Decoding with a draft model here beside transformers' assisted generation: the same two models, prompts and K, greedy.

    python bench/assisted.py draft=runs/methods/draft_model/draft    # pico's, which make methods trains; null: its layers, untrained

The ways of a prompt run one right after the other, and which of them is first rotates; of a prompt's repetitions the lower median counts.
Writes bench/results/assisted.json and the table between two marks of docs/decoding.md. Exits with 1 where a completion differs, or the
compiled way is less than 1.5 times as fast.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdistill.command import run
from specdistill.decoding.decoder import Decoder, now
from specdistill.errors import ExitCode
from specdistill.measurement.hardware import fit_threads, hardware, software
from specdistill.methods.draft_model.checkpoint import load_draft_model
from specdistill.methods.draft_model.create import from_layers
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.phrases import between, number, times
from specdistill.report.text import table, write_between
from specdistill.statistics.intervals import estimates
from specdistill.suites.suite import evenly, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget

RESULTS = Path(__file__).with_name("results") / "assisted.json"
PAGE = ROOT / "docs" / "decoding.md"
UNTRAINED_LAYERS = 2
EXPECTED = 1.5  # of the compiled way: all of them wait for the same target
ASSISTED, COMPILED = "transformers' assisted generation", "here, `eval.compile=true`"

Way = Callable[[Sequence[int]], list[int]]  # token ids of a prompt -> of its completion


class Options(Section):
    target: str = option("pico", "the target")
    draft: str | None = option(None, "folder of a draft model; null: layers of the target, untrained")
    suite: str = option("pico", "prompts")
    num_prompts: int = option(24, "of the suite, spread over its categories", ge=2)
    num_speculative_tokens: int = option(4, "K, draft tokens a round", ge=1)
    max_new_tokens: int = option(96, "tokens generated for each prompt", ge=1)
    repeats: int = option(5, "timed repetitions", ge=1)


def main(options: Options) -> ExitCode:
    target = FrozenTarget.load(options.target)
    fit_threads(target)
    draft = load_draft_model(options.draft)[0] if options.draft else from_layers(target.model, UNTRAINED_LAYERS)
    draft.to(target.device).eval()
    prompts = tokenize(
        load_suite(options.suite), target.tokenizer, max_new_tokens=options.max_new_tokens, max_length=target.max_length
    )
    prompts = evenly(prompts, [prompt.category for prompt in prompts], options.num_prompts)
    limits = {"k": options.num_speculative_tokens, "max_new_tokens": options.max_new_tokens}
    ways = {
        ASSISTED: in_transformers(target, draft, **limits),
        "here": here(target, draft, **limits),
        COMPILED: here(target, draft, compiled=True, **limits),
    }
    found = compare(target, ways, [prompt.token_ids for prompt in prompts], options.repeats)
    shown = {"hardware": hardware(target.device), "software": software(), "settings": options.model_dump(), "ways": found}
    RESULTS.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    text = f"{caption(shown, draft)}\n\n{rows(found)}"
    write_between(PAGE, "assisted", text)
    print(text)
    is_met = all(way["identical"] == len(prompts) for way in found.values()) and found[COMPILED]["speedup"] >= EXPECTED
    return ExitCode.DONE if is_met else ExitCode.CHECK_FAILED


def here(target: FrozenTarget, draft: Any, *, k: int, max_new_tokens: int, compiled: bool = False) -> Way:
    decoder = Decoder(target, DraftModelProposer(draft, target_max_length=target.max_length), compiled=compiled)
    options = {"max_new_tokens": max_new_tokens, "num_speculative_tokens": k}
    return lambda prompt: list(decoder.generate(prompt, **options).token_ids)


def in_transformers(target: FrozenTarget, draft: Any, *, k: int, max_new_tokens: int) -> Way:
    """Its assisted generation, K draft tokens in every round."""
    draft.generation_config.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    model: Any = target.model

    @torch.inference_mode()
    def generate(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        fixed = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        output = model.generate(ids, assistant_model=draft, max_new_tokens=max_new_tokens, **fixed)
        completion: list[int] = output[0, len(prompt) :].tolist()
        return completion

    return generate


def compare(
    target: FrozenTarget, ways: dict[str, Way], prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Of each way: tokens a second, the ratio to the first way's with its interval over prompts, and how many completions are the same."""
    names = [*ways]
    completions = {name: [ways[name](prompt) for prompt in prompts] for name in names}  # untimed
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in names}
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(names)
            for name in [*names[first:], *names[:first]]:
                start = now(target.device)
                ways[name](prompt)
                seconds[name][index].append(now(target.device) - start)
    counts = {name: np.array([len(completion) for completion in of_way], dtype=float) for name, of_way in completions.items()}
    usual = {name: np.array([statistics.median_low(repeated) for repeated in of_way]) for name, of_way in seconds.items()}
    baseline = {"baseline_num_tokens": counts[names[0]], "baseline_seconds": usual[names[0]]}
    return {
        name: {
            "tokens_per_second": counts[name].sum() / usual[name].sum(),
            **estimates(("speedup",), {"num_tokens": counts[name], "seconds": usual[name], **baseline}),
            "identical": sum(first == own for first, own in zip(completions[names[0]], completions[name], strict=True)),
        }
        for name in names
    }


def caption(shown: dict[str, Any], draft: Any) -> str:
    """What was measured, in a sentence."""
    machine, versions, settings = shown["hardware"], shown["software"], shown["settings"]
    kind = "trained" if settings["draft"] else "the target's first and last, untrained"
    return (
        f"{settings['target']} with a draft model of {draft.config.num_hidden_layers} layers ({kind}), "
        f"K = {settings['num_speculative_tokens']}, greedy, {settings['max_new_tokens']} tokens for each of {settings['num_prompts']} "
        f"prompts, {settings['repeats']} repetitions; {machine['cpu']}, {machine['cpu_threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}."
    )


def rows(found: dict[str, dict[str, Any]]) -> str:
    head = ("the same two models", "tokens a second", "ratio", "same completions")
    return table(
        head,
        [
            (
                name,
                number(way["tokens_per_second"], 0),
                f"{times(way['speedup'])}{between(way, 'speedup')}",
                str(way["identical"]),
            )
            for name, way in found.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(run(main, Options))
