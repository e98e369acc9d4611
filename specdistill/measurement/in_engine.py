"""A recipe's draft measured in an inference engine: a suite sent to its servers, with the draft and without.

The report says what a server does not show. When a server fails after the first answers, these are kept.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch

from specdistill.engines import ENGINES
from specdistill.engines.client import Completion
from specdistill.engines.engine import Served
from specdistill.engines.llama_cpp import convert
from specdistill.errors import UserError, refusing
from specdistill.export import export, merge_adapter
from specdistill.files.folders import empty_own
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import hardware
from specdistill.measurement.losslessness import first_difference, summary
from specdistill.measurement.quality import add_quality
from specdistill.measurement.servers import (
    ServerAnswers,
    ServerMeasurement,
    ServerTask,
    connect_pair,
    measure_running,
    measure_started,
    startable,
)
from specdistill.methods import METHODS
from specdistill.methods.load import describe_draft, locate
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import TEMPLATE, check_target, use_recorded_template
from specdistill.project import git_revision
from specdistill.recipe.sections import LlamaCppConfig
from specdistill.report.build import build_report, headline, result_rows
from specdistill.report.text import print_power_analysis
from specdistill.repositories import resolve, split_gguf
from specdistill.statistics.records import PromptRecord, Timing
from specdistill.suites.conversations import use_template
from specdistill.suites.suite import Prompt, Suite
from specdistill.targets.files import TargetFiles, combined, file_hashes
from specdistill.targets.loading import read_tokenizer

# Why numbers are missing from the report of a server
HIDDEN = "a server does not time its steps one by one"
SUMS = "a server counts over whole outputs, not round by round"
UNSAID = "a server does not say"
NO_LOGITS = "a server returns no logits that would tell a near-tie from a bug"
NO_BASELINE = "no eval.baseline_server was given"
NO_HF = "transformers' generate() is not timed next to a server"
ROW_REASONS = {
    **dict.fromkeys(
        ("draft_ms", "verify_ms", "baseline_step_ms", "predicted_speedup", "prediction_gap"), HIDDEN
    ),
    **dict.fromkeys(("num_rounds", "tokens_per_round", "context_ratio"), SUMS),
    **dict.fromkeys(("hf_generate_tokens_per_second", "hf_generate_num_prompts"), NO_HF),
    **dict.fromkeys(("baseline_over_hf_generate", "speedup_over_hf_generate"), NO_HF),
    "decode_speedup": "a server answers with the whole output: its prefill is not timed apart",
    "num_looping": "the server does not return its tokens",
    "vocabulary_coverage": "a server does not tell its draft's vocabulary",
}
NO_BASELINE_ROW = dict.fromkeys(
    ("baseline_tokens_per_second", "speedup", "overhead_factor"), NO_BASELINE
)
DOCUMENT_REASONS = {
    "theory": HIDDEN,
    "context": SUMS,
    "lossless.sampling_test": "a server cannot be given the rule that the test must reject",
    **dict.fromkeys(("target.parameters", "draft.parameters", "draft.bytes"), UNSAID),
    **dict.fromkeys(("measurement.peak_memory_bytes", "settings.draft_sampling"), UNSAID),
}
# Keys of the files that llama.cpp's server is started with.
MODEL, DRAFT = "eval.llama_cpp.model", "eval.llama_cpp.model_draft"
MOST_OTHER = 0.01  # share of the tokens that a converter may spell in another way
OF_RUNNING = {"hardware": "a server does not say what it runs on", "target.dtype": UNSAID}


def measure_in_engine(
    recipe: Recipe, suite: Suite, folder: Path
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The suite sent to an engine's servers: running ones, or those that are started here with the draft as it is exported for them."""
    config, target, draft = recipe.eval, recipe.target, recipe.eval.draft
    if target.adapter and (config.server or config.engine == "llama.cpp"):
        of = "eval.server" if config.server else "a GGUF file"
        expected = f"null with {of}: name the merged model that it serves in target.model"
        raise UserError("target.adapter", got=target.adapter, expected=expected)
    files = TargetFiles(target.model, target.revision, target.adapter, target.trust_remote_code)
    tokenizer, _, max_length = read_tokenizer(files)

    # What can be refused before anything is measured
    if (
        config.server
    ):  # which does not say what it drafts with, unless that is in the target's checkpoint
        if draft is not None and not METHODS[recipe.method].in_target:
            folder_of_draft = locate(draft, patterns=("config.json", TEMPLATE))
            check_target(folder_of_draft, files, "eval.draft")
            use_recorded_template([folder_of_draft], tokenizer, "eval.draft")
        speculative, baseline = connect_pair(config, (target.model, files.name))
        max_length = min(max_length, speculative.identity.max_length or max_length)
    else:
        startable(config.engine, recipe.method)
        in_gguf = (
            target_file(config.llama_cpp, files, tokenizer)
            if config.engine == "llama.cpp"
            else None
        )
        if METHODS[recipe.method].is_trained:
            draft = draft or str(Path(recipe.train["output_dir"]) / "draft")
            check_target(locate(draft), files, "eval.draft")
            use_recorded_template([locate(draft)], tokenizer, "eval.draft")
    use_template(tokenizer, recipe)
    task = ServerTask.of(config, suite, tokenizer, max_length)
    print_power_analysis([it.cluster or it.id for it in task.prompts])

    # Measure
    named = f"{target.model} + {target.adapter}" if target.adapter else target.model
    of_target: dict[str, Any] = {"model": named, "revision": target.revision}
    if config.server:
        measurement = measure_running(task, speculative, baseline)
        of_draft: dict[str, Any] = {"model": draft, "revision": None, "method": recipe.method}
        machine: dict[str, Any] = {"device": "server", "name": config.server}
    else:
        empty_own(folder, "eval.output_dir")
        served = _served(recipe, draft, folder / "draft", files)
        of_target |= {"dtype": target.dtype, "weights": files.identity.weights}
        if in_gguf:
            file, in_file = in_gguf
            served, of_target = with_files(served, config.llama_cpp, file), of_target | in_file
        of_draft = describe_draft(draft, served.method or recipe.method)
        measurement = measure_started(task, config, target, served, folder)
        found = hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        machine = {
            name: found[name] for name in ("device", "name", "count", "memory_bytes")
        }  # threads are the engine's own

    report, records = engine_report(
        task, measurement, target=of_target, draft=of_draft, hardware=machine
    )
    if config.lookup_first:
        report["settings"]["drafting"] = {"lookup_first": config.lookup_first.described}
    add_quality(
        report,
        records,
        suite,
        special_tokens=tokenizer.all_special_tokens,
        run_code=config.run_code,
    )
    return report, records


def target_file(
    config: LlamaCppConfig, target: TargetFiles, tokenizer: Any
) -> tuple[Path, dict[str, str]]:
    """The target as a GGUF file, and what a report says of it: its file type as dtype, and as weights sha256 of its sha256.

    Raises UserError without such a file, and for one with another vocabulary.
    """
    named = resolve(config.model, MODEL) if config.model else target.name
    file = split_gguf(named)[1]
    if file is None or (config.model and not Path(named).is_file()):
        convert = f"python convert_hf_to_gguf.py {target.name} --outtype f16 --outfile target.gguf"
        raise UserError(
            MODEL,
            got=config.model or "null",
            expected=f"the target as a GGUF file, as llama.cpp writes it: {convert}",
        )
    path = Path(named) if Path(named).is_file() else target.fetch(file) / file
    with refusing((ValueError, KeyError, IndexError), MODEL, path, "the GGUF file of a model"):
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        dtype = gguf.LlamaFileType(fields["general.file_type"].contents()).name
    ours = tokenizer.get_vocab()
    if config.model and sum(
        tokens[index : index + 1] != [token] for token, index in ours.items()
    ) > MOST_OTHER * len(ours):
        raise UserError(
            MODEL, got=f"{path}, with another vocabulary", expected=f"{target.name}, as a GGUF file"
        )
    return path, {"dtype": dtype, "weights": combined(file_hashes([path]))}


def with_files(served: Served, config: LlamaCppConfig, target: Path) -> Served:
    """What is served, from files. Raises UserError without one of a draft."""
    if served.in_target:
        return replace(served, target=str(target))
    draft = resolve(config.model_draft, DRAFT) if config.model_draft else None
    if draft is None or not Path(draft).is_file():
        command = convert(served, "EXPORTED", served.target_name)
        expected = f"the draft as a GGUF file, as llama.cpp writes it of its export (specdistill export engine=gguf): {command}"
        raise UserError(DRAFT, got=draft or "null", expected=expected)
    return replace(served, target=str(target), output=Path(draft))


def _served(recipe: Recipe, draft: str | None, folder: Path, files: TargetFiles) -> Served:
    """What the engine is started with: the draft as it is exported into a folder, or the settings of a method without one. An earlier
    report says nothing of it: drafts are greedy, as an engine's own are.
    """
    engine, k = recipe.eval.engine, recipe.eval.num_speculative_tokens
    if draft is not None:
        layout = ENGINES[engine].layouts or engine
        served = export(
            locate(draft), layout, folder, files, num_speculative_tokens=k, finds_report=False
        )
        return replace(served, lookup_first=recipe.eval.lookup_first)
    if files.adapter:
        files = merge_adapter(files, folder.with_name("target"), recipe.target.dtype)
    serving = startable(engine, recipe.method)
    output, config = Path(files.name), vars(getattr(recipe.eval, recipe.method))
    told: dict[str, Any] = {
        "config": config,
        "serving": serving,
        "in_target": True,
        "revision": files.commit,
    }
    return Served(recipe.method, output, files.name, k, samples=False, **told)


def engine_report(
    task: ServerTask, measurement: ServerMeasurement, **described: Mapping[str, Any]
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report, before a gate has judged it, and its records.

    described: the report's sections `target`, `draft` and `hardware`. Raises ResourceError when a server failed before it answered
    a prompt in the main configuration.
    """
    settings, failure, has_baseline = task.settings, measurement.failure, measurement.has_baseline
    answered = {
        at: _answered(task, measurement.answers, at, has_baseline) for at in task.configurations
    }
    if failure and not answered[settings]:
        raise failure
    reasons = {**ROW_REASONS, **({} if has_baseline else NO_BASELINE_ROW)}
    records = {
        at: [_record(task, at, entry) for entry in entries]
        for at, entries in answered.items()
        if entries
    }
    rows = {
        at: result_rows(found, task.suite, at.configuration, seed=settings.seed, reasons=reasons)
        for at, found in records.items()
    }
    lossless, not_compared = _compare(answered[settings], has_baseline, settings)
    measured = f"{len(records[settings])} of {len(task.prompts)} prompts were measured"
    report = build_report(
        **described,
        software={
            "python": platform.python_version(),
            "transformers": version("transformers"),
            measurement.engine["name"]: measurement.engine["version"],
        },
        settings=settings.described,
        suite=task.suite,
        results=[row for made in rows.values() for row in made],
        context=[],
        headline=headline(rows[settings], records[settings]),
        theory=None,
        lossless=lossless,
        not_measured={
            **DOCUMENT_REASONS,
            **({} if "command" in measurement.engine else OF_RUNNING),
            **not_compared,
        },
        measurement={"seconds": measurement.seconds},
        git_revision=git_revision(),
        engine=measurement.engine,
        incomplete=f"{failure} ({measured})" if failure else None,
    )
    return report, [record for found in records.values() for record in found]


class AnsweredPrompt(NamedTuple):
    """All repetitions of one prompt; `baseline` is empty where there is none."""

    prompt: Prompt
    speculative: list[Completion]
    baseline: list[Completion]


def _answered(
    task: ServerTask, answers: ServerAnswers, settings: Settings, has_baseline: bool
) -> list[AnsweredPrompt]:
    """The prompts that both sides answered."""
    none: list[list[Completion]] = [[] for _ in task.prompts]
    sides = (
        answers.get((k, settings.batch_size), none) for k in (settings.num_speculative_tokens, 0)
    )
    entries = [AnsweredPrompt(*entry) for entry in zip(task.prompts, *sides, strict=True)]
    return [
        entry for entry in entries if entry.speculative and (entry.baseline or not has_baseline)
    ]


def _record(task: ServerTask, settings: Settings, entry: AnsweredPrompt) -> PromptRecord:
    """The repetition of median speed of each side; its tokens, counts and seconds belong together."""
    prompt, drafted, plain = (
        entry.prompt,
        _median(entry.speculative),
        _median(entry.baseline) if entry.baseline else None,
    )
    return PromptRecord(
        suite=task.suite.name,
        configuration=settings.configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=_text(task.tokenizer, drafted),
        first_token=None,
        first_token_text="",
        rounds=(),
        # Shares of the server's time: as many requests as the load are in flight, so that they add up to what passed (Little's law).
        speculative=Timing(drafted.num_tokens, None, drafted.seconds / settings.batch_size),
        baseline=Timing(plain.num_tokens, None, plain.seconds / settings.batch_size)
        if plain
        else None,
        baseline_text=_text(task.tokenizer, plain) if plain else None,
        counts=drafted.counts,
        cluster=prompt.cluster,
    )


def _median(completions: Sequence[Completion]) -> Completion:
    ordered = sorted(completions, key=lambda completion: completion.seconds / completion.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _text(tokenizer: Any, completion: Completion) -> str:
    """Decoded from its tokens where the server returns them: its own text lacks the stop token."""
    ids = completion.counts.token_ids
    return str(tokenizer.decode(ids, skip_special_tokens=False)) if ids else completion.text


def _compare(
    answers: Sequence[AnsweredPrompt], has_baseline: bool, settings: Settings
) -> tuple[dict[str, Any], dict[str, str]]:
    """The report's `lossless`, and reasons for what it lacks. Greedy outputs of both servers are compared by tokens, or else by text."""
    if not has_baseline or not settings.sampling.is_greedy:
        reason = "sampled outputs differ by chance" if has_baseline else NO_BASELINE
        return {"prompts_checked": 0}, dict.fromkeys(
            ("lossless.greedy_identical", "lossless.unexplained_divergences"), reason
        )
    lossless = summary([_divergence(entry) for entry in answers])
    unknown = [name for name in ("near_ties", "unexplained_divergences") if name not in lossless]
    return lossless, {f"lossless.{name}": NO_LOGITS for name in unknown}


def _divergence(entry: AnsweredPrompt) -> dict[str, Any] | None:
    """The prompt whose outputs differ, and where, if both servers return their tokens."""
    with_draft, plain = entry.speculative[0], entry.baseline[0]
    ours, theirs = with_draft.counts.token_ids, plain.counts.token_ids
    if not ours or not theirs:
        return {"prompt_id": entry.prompt.id} if with_draft.text != plain.text else None
    return first_difference(entry.prompt.id, ours, theirs)
