"""The whole examination: files first, and a few prompts decoded with what is sound enough for that; and how a person reads it.

Decoding says whether the draft accepts what its training saw, and if not, why. No measurement (`specdistill eval` is): a handful of short
greedy completions, enough to tell a draft that works from one that does not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.text import Text

from specdistill.decoding.decoder import Decoder, Generation
from specdistill.doctor.checkpoint import Examination, Finding, describe, examine, note, problem, refusals, warning
from specdistill.methods.contract import Simulation
from specdistill.methods.load import implementation, load_proposer
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

NUM_TOKENS = 96  # generated for each prompt: completions repeat themselves later on, so short ones accept less than long ones
NO_BETTER_THAN_CHANCE = 0.05  # share of first draft tokens that are accepted
FAR_BELOW = 0.6  # of the draft tokens accepted in training
LEAST, CLEAR = 0.02, 0.1  # a repair counts when the divergence falls by so much and in every completion, or by so much
WORTH = 1.05  # a cause is a problem when, undone, so many times as many draft tokens would be accepted
DEFAULT_STEPS = 4
DEFAULT_SUITE = "pico-short"  # plain text, which asks for no chat template
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}  # the worst first
INDENT = 9


@dataclass(frozen=True)
class Acceptance:
    """num_tokens: drafted a round. length: tokens a round, the target's own included. num_rounds: 0 where training simulated it."""

    num_tokens: int
    length: float
    num_rounds: int = 0


@dataclass
class Diagnosis(Examination):
    """acceptance: None where nothing was decoded. recorded: what training simulated when it chose these weights; None without a history."""

    acceptance: Acceptance | None = None
    recorded: Acceptance | None = None

    @property
    def is_sound(self) -> bool:
        return all(finding.severity != "problem" for finding in self.findings)


def diagnose(
    draft: Path,
    engine: str | None = None,
    *,
    decode: bool = True,
    suite: str | None = None,
    num_prompts: int = 8,
    model: str | None = None,
    **target: Any,
) -> Diagnosis:
    """Examine the draft in a folder.

    Args:
        engine: one with `loaders`, which the draft is checked against.
        decode: with a target, decode `num_prompts` prompts of a suite (see `prompts_of`).
        model: its target, pico, a folder or a Hub id; `target`: the other arguments of `FrozenTarget.load`.

    Raises UserError for a target or a suite that is none, ResourceError when the Hub fails.
    """
    files = examine(draft, TargetFiles.of(model, target.get("revision")) if model else None, engine)
    made = Diagnosis(**vars(files), recorded=recorded(draft))
    if model and decode and made.method is not None and not made.refused:
        loaded = FrozenTarget.load(model, **target)
        prompts = prompts_of(draft, suite, loaded, num_prompts)
        with refusals(made):
            made.acceptance, more = check_acceptance(draft, made.method, loaded, prompts, made.recorded)
            made.findings += more
    elif model and decode:
        made.findings.append(note("not decoded: what is broken comes first"))
    return made


def recorded(draft: Path) -> Acceptance | None:
    """The best acceptance length in the run's history, which is what the weights were chosen by; None where there is none."""
    history = read_history(draft, key="draft")
    evaluations = [entry for entry in history.log if "eval_acceptance_length" in entry] if history else []
    if not evaluations:
        return None
    best = max(evaluations, key=lambda entry: float(entry["eval_acceptance_length"]))
    steps = [key for key in best if key.startswith("eval_acceptance_") and key != "eval_acceptance_length"]
    return Acceptance(len(steps) or DEFAULT_STEPS, float(best["eval_acceptance_length"]))


def prompts_of(draft: Path, suite: str | None, target: FrozenTarget, num_prompts: int) -> list[tuple[int, ...]]:
    """Prompts as the target's tokens: of the suite, else of the one in the recipe of the draft's run, else plain ones.

    Raises UserError for a suite that cannot be read, or does not fit the target.
    """
    recipe = draft.resolve().parent / "run" / "recipe.yaml"
    if suite is None and draft.resolve().name == "draft" and recipe.is_file():
        suite = yaml.safe_load(recipe.read_text(encoding="utf-8"))["eval"]["suite"]
    rows = load_suite(suite or DEFAULT_SUITE)
    limits = {"max_new_tokens": NUM_TOKENS, "max_length": target.max_length, "num_prompts": num_prompts}
    return [prompt.token_ids for prompt in tokenize(rows, target.tokenizer, **limits)]


def check_acceptance(
    draft: Path, method: str, target: FrozenTarget, prompts: Sequence[Sequence[int]], expected: Acceptance | None
) -> tuple[Acceptance, list[Finding]]:
    """Decode prompts (token ids) with a draft. Raises UserError where the draft cannot be loaded for the target."""
    proposer = load_proposer(method, draft, target, key="draft")
    num_tokens = expected.num_tokens if expected else DEFAULT_STEPS
    decoder = Decoder(target, proposer)
    completions = [decoder.generate(prompt, max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_tokens) for prompt in prompts]
    accepted = [entry.num_accepted for completion in completions for entry in completion.rounds]
    rounds = max(1, len(accepted))
    length, first = 1 + sum(accepted) / rounds, sum(number > 0 for number in accepted) / rounds
    found: list[Finding] = []
    if first < NO_BETTER_THAN_CHANCE:
        found.append(problem(f"{first:.0%} of its first draft tokens are accepted"))
    elif expected is not None and length - 1 < FAR_BELOW * (expected.length - 1):
        what = f"acceptance length {length:.2f} on {len(prompts)} prompts, far below the {expected.length:.2f} that"
        found.append(problem(f"{what} its training saw with as many draft tokens"))
    of_method = implementation(method)
    simulation = of_method.simulation
    cause = _cause(simulation, simulation.draft_of(proposer), target, completions, num_tokens) if simulation else None
    if cause:
        found.append(cause)
    elif found:
        likely = ["it was trained for another target, or another revision of it", "it was hardly trained"]
        likely += [*of_method.likely_causes, "the prompts are unlike its training data: choose others with suite="]
        found.append(note(f"likely causes: {'; '.join(likely)}"))
    elif expected is None:
        found.append(warning("no training history to compare with", "`specdistill eval` measures the draft"))
    return Acceptance(num_tokens, length, len(accepted)), found


def _cause(
    simulation: Simulation, draft: Any, target: FrozenTarget, completions: Sequence[Generation], num_tokens: int
) -> Finding | None:
    """The mistake that, undone, brings the draft closest to the target's distributions on the completions, if one does beyond doubt."""
    completions = [completion for completion in completions if len(completion.token_ids) > 2 * num_tokens]
    if not completions:
        return None

    def fits(candidate: Any) -> list[tuple[float, float]]:
        objective = simulation.objective(candidate, num_tokens)
        return [_fit(objective, target, completion) for completion in completions]

    before = best = fits(draft)
    best_fall, cause = 0.0, ""
    for mistake, repaired in simulation.mistakes(draft, target):
        after = fits(repaired)
        falls = [1 - there / here if here else 0.0 for (here, _), (there, _) in zip(before, after, strict=True)]
        fall = fmean(falls)
        if fall > best_fall and (fall > CLEAR or (fall > LEAST and min(falls) > 0)):
            best, best_fall, cause = after, fall, mistake
    was, becomes = (fmean(length for _, length in measured) for measured in (before, best))
    if not cause or becomes - 1 < NO_BETTER_THAN_CHANCE:  # nearer to the target, and still of no use: not what is wrong
        return None
    undone = f"undone, its divergence from the target falls by {best_fall:.0%}, and its simulated acceptance length goes from"
    return (problem if becomes - 1 > WORTH * (was - 1) else warning)(cause, f"{undone} {was:.2f} to {becomes:.2f}")


@torch.inference_mode()
def _fit(objective: Any, target: FrozenTarget, completion: Generation) -> tuple[float, float]:
    """How close a head is to the target on a completion: mean forward KL of its drafted positions, and the simulated acceptance length.

    Steadier than counting accepted tokens, and one pass of the draft.
    """
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    inputs = {
        "input_ids": ids,
        "loss_mask": (positions >= len(completion.prompt_ids)).long(),
        "document_ids": torch.zeros_like(ids),
        "position_ids": positions,
    }
    objective = objective.eval()
    _, sums = objective(**inputs, **objective.read_target(target, inputs), measure=True)
    divergence = fmean(float(total / kept) for total, kept in zip(sums.loss, sums.loss_tokens, strict=True))
    return divergence, 1 + sum(float(right / chains) for right, chains in zip(sums.chain_correct, sums.chains, strict=True))


def print_diagnosis(made: Diagnosis, console: Console | None = None) -> None:
    """What the draft is, every finding with what to do about it, what was accepted, and the verdict."""
    console = console or Console(highlight=False)
    title = Text(f"{made.folder}", style="bold").append(f": {describe(made)}", style="not bold")
    console.print(title, soft_wrap=True)
    for finding in sorted(made.findings, key=lambda finding: list(STYLES).index(finding.severity)):
        line = Text(f"{finding.severity:<{INDENT}}", style=STYLES[finding.severity]).append(finding.what, style="not bold")
        console.print(line, soft_wrap=True)
        if finding.do:
            console.print(" " * INDENT + finding.do, soft_wrap=True)
    if made.acceptance:
        seen = made.acceptance
        said = f"acceptance length {seen.length:.2f} with {seen.num_tokens} draft tokens, greedy, {seen.num_rounds} rounds"
        if simulated := made.recorded:
            said += f"; training simulated {simulated.length:.2f} with {simulated.num_tokens}"
        console.print(said, soft_wrap=True)
    count = Counter(finding.severity for finding in made.findings)
    counted = [f"{count[kind]} {kind}{'s' * (count[kind] != 1)}" for kind in ("problem", "warning") if count[kind]]
    console.print(Text(", ".join(counted) or "no problem found", style="bold"))
