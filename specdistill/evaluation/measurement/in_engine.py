"""Measure a recipe's draft in an inference engine, whose servers run with and without the draft.

A server does not show all numbers of a report. For each missing number the report states the
reason. If a server fails during the measurement, the answers until then are kept in the report.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.reader import read_gguf_metadata

from specdistill.common.errors import UserError, convert_errors, make_unused_key_error
from specdistill.common.folders import empty_output_folder
from specdistill.common.gguf_files import check_gguf
from specdistill.common.project import read_git_revision
from specdistill.common.repositories import resolve, split_gguf
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.hardware import describe_hardware
from specdistill.evaluation.measurement.losslessness import find_first_difference, summarize_greedy
from specdistill.evaluation.measurement.quality import add_quality
from specdistill.evaluation.measurement.servers import (
    ServerAnswers,
    ServerMeasurement,
    ServerTask,
    connect_pair,
    find_startable_serving,
    measure_running,
    measure_started,
)
from specdistill.evaluation.report.build import (
    Numbers,
    build_report,
    build_result_rows,
    select_headline,
)
from specdistill.evaluation.report.phrases import Report
from specdistill.evaluation.report.schema import (
    FirstDivergenceDocument,
    LosslessDocument,
)
from specdistill.evaluation.report.text import print_power_analysis
from specdistill.evaluation.statistics.records import PromptRecord, Timing
from specdistill.evaluation.suites.conversations import use_template
from specdistill.evaluation.suites.suite import Prompt, Suite
from specdistill.methods import METHODS
from specdistill.methods.compatibility import check_draft
from specdistill.methods.load import describe_draft, find_method, locate
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import TEMPLATE, check_target, use_recorded_template
from specdistill.recipe.sections import LlamaCppConfig, TargetConfig
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.client import EngineCompletion
from specdistill.serving.engines.engine import Served
from specdistill.serving.engines.llama_cpp import convert
from specdistill.serving.export import export, load_safetensors_target, merge_target_adapter
from specdistill.targets.files import TargetFiles, combine_hashes, hash_files
from specdistill.targets.loading import read_tokenizer

# The report's sections `target`, `draft` and `hardware`.
Sections = dict[str, Mapping[str, object]]

# Reasons why numbers are missing from a report that was measured with a server.
HIDDEN = "a server does not time its steps one by one"
SUMS = "a server counts over whole outputs, not round by round"
NOT_STATED_REASON = "a server does not say"
NO_BASELINE = "no eval.baseline_server was given"
NO_HF = "transformers' generate() is not timed next to a server"
# A field of a result row -> the reason why it is missing.
ROW_REASONS = {
    **dict.fromkeys(
        ("draft_ms", "verify_ms", "baseline_step_ms", "predicted_speedup", "prediction_gap"), HIDDEN
    ),
    **dict.fromkeys(
        ("num_rounds", "mean_acceptance_length", "overhead_factor"),
        "a server does not count the rounds in which this method drafts nothing",
    ),
    **dict.fromkeys(("emitted_per_position", "context_ratio"), SUMS),
    **dict.fromkeys(("hf_generate_tokens_per_second", "hf_generate_num_prompts"), NO_HF),
    **dict.fromkeys(("baseline_over_hf_generate", "speedup_over_hf_generate"), NO_HF),
    "decode_speedup": "a server answers with the whole output: its prefill is not timed apart",
    "num_looping": "the server does not return its tokens",
    "vocabulary_coverage": "a server does not tell its draft's vocabulary",
}
# Further reasons, if no server without a draft was measured.
NO_BASELINE_ROW = dict.fromkeys(
    ("baseline_tokens_per_second", "speedup", "overhead_factor"), NO_BASELINE
)
# A dotted path into report.json -> the reason why it is missing.
DOCUMENT_REASONS = {
    "theory": HIDDEN,
    "context": SUMS,
    "lossless.sampling_test": "a server cannot be given the rule that the test must reject",
    **dict.fromkeys(("target.parameters", "draft.parameters", "draft.bytes"), NOT_STATED_REASON),
    **dict.fromkeys(
        ("measurement.peak_memory_bytes", "settings.draft_sampling"), NOT_STATED_REASON
    ),
}
# Recipe keys of the files that llama.cpp's server is started with.
MODEL = "eval.llama_cpp.model"
DRAFT = "eval.llama_cpp.model_draft"
TOKENS = "tokenizer.ggml.tokens"  # key in the metadata of a GGUF file
# The largest share of the vocabulary that a GGUF file may spell in another way than the tokenizer.
# A smaller share would refuse files whose converter spells a few tokens differently.
MAX_RESPELLED_SHARE = 0.01
# Further reasons, for servers that were not started here.
RUNNING_SERVER_REASONS = {
    "hardware": "a server does not say what it runs on",
    "target.dtype": NOT_STATED_REASON,
}


def measure_in_engine(
    recipe: Recipe, suite: Suite, folder: Path
) -> tuple[Report, list[PromptRecord]]:
    """Measure a recipe's draft in an inference engine, by sending prompts to its servers.

    If `eval.server` is set, these are servers that run already. Otherwise the draft is exported,
    and servers are started with it.

    Args:
        recipe: the recipe.
        suite: the suite whose prompts are sent.
        folder: the folder for the exported draft and for the logs of servers that are started here.

    Returns:
        The report, which no gate has judged yet, and its records.
    """
    config = recipe.eval
    target = recipe.target

    # A server that runs already, or a GGUF file, has a finished model, to which no adapter is
    # added.
    if target.adapter and (config.server or config.engine == "llama.cpp"):
        raise make_unused_key_error(
            "target.adapter",
            target.adapter,
            f"{'eval.server' if config.server else 'a GGUF file'} serves a merged model",
            alternative="name the merged model in target.model",
        )

    # Measure. `sections` describes the target, the draft and the machine for the report.
    files = TargetFiles.from_config(target)
    tokenizer, _, max_length = read_tokenizer(files)
    if config.server:
        task, measurement, sections = _measure_running(recipe, suite, files, tokenizer, max_length)
    else:
        task, measurement, sections = _measure_started(
            recipe, suite, files, tokenizer, max_length, folder
        )

    # Build the report. Drafts that are trained propose tokens in every round, unlike lookups.
    report, records = build_engine_report(
        task, measurement, always_drafts=METHODS[recipe.method].is_trained, **sections
    )
    if config.lookup_first:
        report["settings"]["drafting"] = {"lookup_first": config.lookup_first.described}
    if not METHODS[recipe.method].is_trained and not config.server:
        report["settings"]["drafting"] = _describe_lookup(recipe)
    add_quality(report, records, suite, special_tokens=tokenizer.all_special_tokens)
    return report, records


def _measure_running(
    recipe: Recipe,
    suite: Suite,
    files: TargetFiles,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> tuple[ServerTask, ServerMeasurement, Sections]:
    """Measure a recipe's draft with servers that run already.

    Args:
        recipe: the recipe.
        suite: the suite whose prompts are sent.
        files: the files of the target.
        tokenizer: the target's tokenizer.
        max_length: the most tokens of a sequence that the target can read.

    Returns:
        The requests, their answers, and the report's sections `target`, `draft` and `hardware`.
    """
    # A running server does not say which draft it uses, so the server's draft cannot be checked.
    # Check at least that the draft in the recipe was made for the target. The weights of the draft
    # are not needed, so only two small files are fetched. A draft that is a part of the target's
    # own checkpoint needs no check.
    target = recipe.target
    draft = recipe.eval.draft
    if draft is not None and not METHODS[recipe.method].in_target:
        draft_folder = locate(draft, patterns=("config.json", TEMPLATE))
        check_target(draft_folder, files, "eval.draft")
        use_recorded_template([draft_folder], tokenizer, "eval.draft")

    # Connect to the servers, and send them the prompts.
    speculative, baseline = connect_pair(recipe.eval, (target.model, files.name))
    max_length = min(max_length, speculative.identity.max_length or max_length)
    task = _plan_requests(recipe, suite, tokenizer, max_length)
    measurement = measure_running(task, speculative, baseline)
    sections: Sections = {
        "target": {"model": _name_target(target), "revision": target.revision},
        "draft": {"model": draft, "revision": None, "method": recipe.method},
        "hardware": {"device": "server", "name": recipe.eval.server},
    }
    return task, measurement, sections


def _measure_started(
    recipe: Recipe,
    suite: Suite,
    files: TargetFiles,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    folder: Path,
) -> tuple[ServerTask, ServerMeasurement, Sections]:
    """Export a recipe's draft, and measure it with servers that are started here.

    Args:
        recipe: the recipe.
        suite: the suite whose prompts are sent.
        files: the files of the target.
        tokenizer: the target's tokenizer.
        max_length: the most tokens of a sequence that the target can read.
        folder: the folder for the exported draft and for the logs of the servers.

    Returns:
        The requests, their answers, and the report's sections `target`, `draft` and `hardware`.
    """
    # Check the engine, the target's file and the draft before anything is exported.
    config = recipe.eval
    target = recipe.target
    find_startable_serving(config.engine, recipe.method)
    gguf_target = None
    if config.engine == "llama.cpp":
        gguf_target = find_target_file(config.llama_cpp, files, tokenizer)
    draft = config.draft
    if METHODS[recipe.method].is_trained:
        draft = draft or str(Path(recipe.train["output_dir"]) / "draft")
        check_draft(find_method(locate(draft)), locate(draft), files, "eval.draft")
        use_recorded_template([locate(draft)], tokenizer, "eval.draft")
    task = _plan_requests(recipe, suite, tokenizer, max_length)

    # Export the draft. llama.cpp is started with GGUF files in place of the export and the target.
    empty_output_folder(folder, "eval.output_dir")
    served = _describe_served(recipe, draft, folder / "draft", files)
    target_section: dict[str, object] = {
        "model": _name_target(target),
        "revision": target.revision,
        "dtype": target.dtype,
        "weights": files.identity.weights,
    }
    if gguf_target:
        gguf_path, gguf_section = gguf_target
        served = replace_with_gguf(served, config.llama_cpp, gguf_path)
        target_section |= gguf_section
    draft_section = describe_draft(draft, served.method or recipe.method)

    # Start the servers, and send them the prompts.
    measurement = measure_started(task, config, target, served, folder)

    # The number of threads is left out of the hardware, because the engine has its own threads.
    hardware = describe_hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    hardware_section = {
        name: hardware[name] for name in ("device", "name", "count", "memory_bytes")
    }
    sections: Sections = {
        "target": target_section,
        "draft": draft_section,
        "hardware": hardware_section,
    }
    return task, measurement, sections


def _plan_requests(
    recipe: Recipe, suite: Suite, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> ServerTask:
    """Plan the requests to servers, and print how small a change their prompts can detect.

    Args:
        recipe: the recipe.
        suite: the suite whose prompts are sent.
        tokenizer: the target's tokenizer. It gets the chat template that the recipe asks for.
        max_length: the most tokens of a prompt and its completion together.
    """
    use_template(tokenizer, recipe)
    task = ServerTask.from_config(recipe.eval, suite, tokenizer, max_length)
    # Prompts of one cluster, such as the turns of a conversation, are not independent, so they
    # count as a single prompt. A prompt without a cluster is a cluster of its own.
    print_power_analysis([prompt.cluster or prompt.id for prompt in task.prompts])
    return task


def _describe_lookup(recipe: Recipe) -> dict[str, object]:
    """Return the settings of the lookup that an engine was started with, for the report."""
    # `rule` says which match of an n-gram is continued. The recipe may have the default rule, but
    # an engine always follows its own. So the report names the engine as the rule.
    lookup_settings = dict(vars(getattr(recipe.eval, recipe.method)))
    if "rule" in lookup_settings:
        lookup_settings["rule"] = recipe.eval.engine
    return lookup_settings


def _name_target(target: TargetConfig) -> str:
    """Return the name of a target in reports, with its adapter if it has one."""
    return f"{target.model} + {target.adapter}" if target.adapter else target.model


def find_target_file(
    config: LlamaCppConfig, target: TargetFiles, tokenizer: PreTrainedTokenizerBase
) -> tuple[Path, dict[str, str]]:
    """Find the GGUF file of the target, the format that llama.cpp reads.

    Args:
        config: the recipe's section `eval.llama_cpp`.
        target: the files of the target.
        tokenizer: the target's tokenizer.

    Returns:
        The path of the GGUF file, and what the report's section `target` says about it: `dtype`,
        the type in which it stores weights, and `weights`, a hash of the file.

    Raises:
        UserError: if there is no such file, or if it has another vocabulary than the target.
    """
    # Either the recipe names a GGUF file on this machine, or the target itself is one, perhaps on
    # the Hub. `file` is the name of the file without its folder or repository; None if `name` is no
    # GGUF file.
    name = resolve(config.model, MODEL) if config.model else target.name
    _, file = split_gguf(name)
    if file is None or (config.model and not Path(name).is_file()):
        command = f"python convert_hf_to_gguf.py {target.name} --outtype f16 --outfile target.gguf"
        raise UserError(
            MODEL,
            got=config.model or "nothing",
            expected=f"the target as a GGUF file, which llama.cpp writes with: {command}",
        )

    # Read the vocabulary and the file type from the metadata of the file.
    path = Path(name) if Path(name).is_file() else target.fetch(file) / file
    check_gguf(path, MODEL)
    with convert_errors((ValueError, KeyError), MODEL, path, "the GGUF file of a model"):
        metadata, _ = read_gguf_metadata(str(path), (TOKENS,))
        tokens = metadata[TOKENS]
        dtype = gguf.LlamaFileType(metadata["general.file_type"]).name

    # A file that the recipe names must have the target's vocabulary. A converter may spell a few
    # tokens in another way. The file may have fewer tokens than the tokenizer: past their end, the
    # slice `index : index + 1` is an empty list, which differs from every token.
    vocabulary = tokenizer.get_vocab()
    num_differing = sum(tokens[index : index + 1] != [token] for token, index in vocabulary.items())
    if config.model and num_differing > MAX_RESPELLED_SHARE * len(vocabulary):
        raise UserError(
            MODEL, got=f"{path}, with another vocabulary", expected=f"{target.name}, as a GGUF file"
        )
    return path, {"dtype": dtype, "weights": combine_hashes(hash_files([path]))}


def replace_with_gguf(served: Served, config: LlamaCppConfig, target: Path) -> Served:
    """Replace the target and the draft that a server loads by their GGUF files, for llama.cpp.

    Args:
        served: the target and draft that the server would load otherwise.
        config: the recipe's section `eval.llama_cpp`, which names the GGUF file of the draft.
        target: the GGUF file of the target.

    Raises:
        UserError: if there is no GGUF file of the draft. The error has the command that writes one.
    """
    # A draft that is a part of the target's checkpoint, or that has no weights, needs no file.
    if served.in_target:
        return replace(served, target=str(target))

    # Otherwise the recipe must name the draft's file.
    draft = resolve(config.model_draft, DRAFT) if config.model_draft else None
    if draft is None or not Path(draft).is_file():
        command = convert(served, "EXPORTED", served.target_name)
        raise UserError(
            DRAFT,
            got=draft or "nothing",
            expected=(
                "the draft as a GGUF file: run `specdistill export engine=gguf`, then convert the"
                f" exported folder (EXPORTED) with {command}"
            ),
        )
    return replace(served, target=str(target), output=Path(draft))


def _describe_served(recipe: Recipe, draft: str | None, folder: Path, files: TargetFiles) -> Served:
    """Export the draft in the engine's format, and return what a server of the engine loads.

    Args:
        recipe: the recipe.
        draft: the draft's folder or Hub id; None for a method without weights, and for a draft that
            is a part of the target's checkpoint.
        folder: the folder to which the draft is exported.
        files: the files of the target.
    """
    engine = recipe.eval.engine
    k = recipe.eval.num_speculative_tokens

    # Export the draft in the format (layout) that the engine loads, its own or that of another
    # engine. By default, an export takes settings of the engine from an earlier report of the
    # draft, for example that draft tokens are sampled. A new measurement must not depend on an
    # earlier one (finds_report=False). So draft tokens are greedy, the default of engines.
    if draft is not None:
        served = export(
            locate(draft),
            ENGINES[engine].layouts or engine,
            folder,
            files,
            num_speculative_tokens=k,
            finds_report=False,
            logs=False,
        )
        return replace(served, lookup_first=recipe.eval.lookup_first)

    # Without a draft folder, a server loads the target alone, with the settings of the method.
    # First merge an adapter into the target, or convert a GGUF file for an engine that does not
    # read it.
    if files.adapter:
        files = merge_target_adapter(files, folder.with_name("target"), recipe.target.dtype)
    elif engine != "llama.cpp" and files.gguf:
        files = load_safetensors_target(files, recipe.target.dtype)
    return Served(
        method=recipe.method,
        output=Path(files.name),
        target=files.name,
        num_tokens=k,
        samples=False,
        config=vars(getattr(recipe.eval, recipe.method)),
        serving=find_startable_serving(engine, recipe.method),
        in_target=True,
        revision=files.commit,
    )


def build_engine_report(
    task: ServerTask,
    measurement: ServerMeasurement,
    *,
    always_drafts: bool,
    **described: Mapping[str, object],
) -> tuple[Report, list[PromptRecord]]:
    """Build the report of a measurement with servers, and the record of each prompt.

    No gate has judged the report yet.

    Args:
        task: the requests that were sent.
        measurement: the answers of the servers.
        always_drafts: whether every round has a draft. The number of rounds is then the number of
            drafts, which the server counts.
        **described: the report's sections `target`, `draft` and `hardware`.

    Raises:
        ResourceError: when a server failed before it answered a prompt in the main configuration.
    """
    settings = task.settings
    failure = measurement.failure
    has_baseline = measurement.has_baseline

    # Collect the answers of each configuration (variant). Without answers in the main configuration
    # there is nothing to report, so pass on the error that ended the measurement.
    answered = {
        variant: _pair_answers(task, measurement.answers, variant, has_baseline)
        for variant in task.configurations
    }
    if failure and not answered[settings]:
        raise failure

    # Build the records and the rows of each configuration that has answers.
    reasons = {**ROW_REASONS, **({} if has_baseline else NO_BASELINE_ROW)}
    records: dict[Settings, list[PromptRecord]] = {}
    rows: dict[Settings, list[Numbers]] = {}
    for variant, entries in answered.items():
        if not entries:
            continue
        records[variant] = [_build_record(task, variant, entry, always_drafts) for entry in entries]
        rows[variant] = build_result_rows(
            records[variant],
            task.suite,
            variant.configuration,
            seed=settings.seed,
            reasons=reasons,
        )

    # Compare the outputs in the main configuration, and build the report.
    lossless, not_compared = _compare_outputs(answered[settings], has_baseline, settings)
    progress = f"{len(records[settings])} of {len(task.prompts)} prompts were measured"
    report = build_report(
        **described,
        software={
            "python": platform.python_version(),
            "transformers": version("transformers"),
            measurement.engine["name"]: measurement.engine["version"],
        },
        settings=settings.described,
        suite=task.suite,
        results=list(chain.from_iterable(rows.values())),
        context=[],
        headline=select_headline(rows[settings], records[settings]),
        theory=None,
        lossless=lossless,
        not_measured={
            **DOCUMENT_REASONS,
            **({} if "command" in measurement.engine else RUNNING_SERVER_REASONS),
            **not_compared,
        },
        measurement={"seconds": measurement.seconds},
        git_revision=read_git_revision(),
        engine=measurement.engine,
        incomplete=f"{failure} ({progress})" if failure else None,
    )
    return report, list(chain.from_iterable(records.values()))


class AnsweredPrompt(NamedTuple):
    """A prompt with the completions of each repetition, with the draft and without it.

    `baseline` is empty if no server without a draft is measured.
    """

    prompt: Prompt
    speculative: list[EngineCompletion]
    baseline: list[EngineCompletion]


def _pair_answers(
    task: ServerTask, answers: ServerAnswers, settings: Settings, has_baseline: bool
) -> list[AnsweredPrompt]:
    """Return the prompts that were answered in a configuration, with all their completions.

    If there is a baseline server, a prompt counts only if both servers answered it.

    Args:
        task: the requests.
        answers: (K, load) -> the completions of each prompt. The load is the number of requests in
            flight.
        settings: the settings of the configuration, whose batch size is its load.
        has_baseline: whether there is a baseline server, which has no draft.
    """
    # Take the completions with the draft and, under K = 0, those of the baseline server.
    no_completions: list[list[EngineCompletion]] = [[] for _ in task.prompts]
    load = settings.batch_size
    speculative = answers.get((settings.num_speculative_tokens, load), no_completions)
    baseline = answers.get((0, load), no_completions)

    answered_prompts = []
    for prompt, with_draft, plain in zip(task.prompts, speculative, baseline, strict=True):
        if with_draft and (plain or not has_baseline):
            answered_prompts.append(AnsweredPrompt(prompt, with_draft, plain))
    return answered_prompts


def _build_record(
    task: ServerTask, settings: Settings, entry: AnsweredPrompt, always_drafts: bool
) -> PromptRecord:
    """Build the record of a prompt, with its completion and times, for the report.

    Of all repetitions with the draft, the one of median speed is recorded, and likewise without the
    draft. So the tokens, counts and seconds of a record belong to the same completion.

    Args:
        task: the requests.
        settings: the settings of the configuration.
        entry: the prompt with its completions.
        always_drafts: whether every round has a draft (see `build_engine_report`). Only then the
            number of rounds is known: it is the number of drafts that the engine counts.
    """
    prompt = entry.prompt
    with_draft = _select_median(entry.speculative)
    plain = _select_median(entry.baseline) if entry.baseline else None
    return PromptRecord(
        suite=task.suite.name,
        configuration=settings.configuration,
        id=prompt.id,
        category=prompt.category,
        num_prompt_tokens=len(prompt.token_ids),
        prompt=prompt.text,
        text=_decode_text(task.tokenizer, with_draft),
        first_token=None,
        first_token_text="",
        rounds=(),
        # Requests overlap, so each prompt gets only a share of the time of its request: the seconds
        # divided by the number of requests in flight, which the batch size stands for. Summed over
        # all prompts, these shares are the time that passed (Little's law).
        speculative=Timing(
            num_tokens=with_draft.num_tokens,
            num_rounds=with_draft.counts.num_drafts if always_drafts else None,
            seconds=with_draft.seconds / settings.batch_size,
        ),
        baseline=(
            Timing(
                num_tokens=plain.num_tokens,
                num_rounds=None,
                seconds=plain.seconds / settings.batch_size,
            )
            if plain
            else None
        ),
        baseline_text=_decode_text(task.tokenizer, plain) if plain else None,
        counts=with_draft.counts,
        cluster=prompt.cluster,
    )


def _select_median(completions: Sequence[EngineCompletion]) -> EngineCompletion:
    """Return the completion of median speed; of two in the middle, the faster one.

    The speed is measured in seconds per token.
    """
    ordered = sorted(completions, key=lambda completion: completion.seconds / completion.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _decode_text(tokenizer: PreTrainedTokenizerBase, completion: EngineCompletion) -> str:
    """Return the text of a completion, with its stop token if possible.

    The text that a server returns lacks the stop token. So if the server returns token ids, too,
    the text is decoded from these.
    """
    token_ids = completion.counts.token_ids
    if not token_ids:
        return completion.text
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _compare_outputs(
    answers: Sequence[AnsweredPrompt], has_baseline: bool, settings: Settings
) -> tuple[LosslessDocument, dict[str, str]]:
    """Compare the greedy outputs with and without the draft, which should be equal (lossless).

    Args:
        answers: the prompts with their completions by the server with the draft and by the one
            without it (baseline).
        has_baseline: whether there is a baseline server.
        settings: the settings of the configuration.

    Returns:
        The section `lossless` of report.json; and for each key that is missing from this section,
        the reason why.
    """
    # Without a baseline server, or if outputs are sampled, there is nothing to compare.
    if not has_baseline or not settings.sampling.is_greedy:
        reason = "sampled outputs differ by chance" if has_baseline else NO_BASELINE
        return {"prompts_checked": 0}, dict.fromkeys(
            ("lossless.greedy_identical", "lossless.unexplained_divergences"), reason
        )

    # Count the outputs that differ. Differences at near-ties, where two tokens have almost the same
    # logit, would be harmless. A server returns no logits, so the number of near-ties is unknown,
    # unless all outputs are equal.
    lossless = summarize_greedy([_find_divergence(entry) for entry in answers])
    unknown = [name for name in ("near_ties", "unexplained_divergences") if name not in lossless]
    return lossless, {
        f"lossless.{name}": "a server returns no logits that would tell a near-tie from a bug"
        for name in unknown
    }


def _find_divergence(entry: AnsweredPrompt) -> FirstDivergenceDocument | None:
    """Compare a prompt's outputs with the draft and without it, in the first repetition.

    The outputs are greedy, so all repetitions should be equal, and one is enough.

    Returns:
        None for equal outputs. Otherwise the prompt's id and, if both servers return token ids, the
        first position where these differ.
    """
    with_draft = entry.speculative[0]
    plain = entry.baseline[0]
    ours = with_draft.counts.token_ids
    theirs = plain.counts.token_ids
    # Without the token ids of both, compare the texts.
    if not ours or not theirs:
        return {"prompt_id": entry.prompt.id} if with_draft.text != plain.text else None
    return find_first_difference(entry.prompt.id, ours, theirs)
