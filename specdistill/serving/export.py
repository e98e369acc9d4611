"""Export a draft for an engine: a folder in the engine's layout, with SERVE.md next to the files.

SERVE.md says how to serve the draft, and which acceptance to expect.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jinja2 import Environment, StrictUndefined
from torch import nn

import specdistill
from specdistill.common.errors import UserError, logger
from specdistill.common.folders import check_new, create_folder
from specdistill.data.rows.packing import COLUMNS
from specdistill.evaluation.report import phrases, tables
from specdistill.evaluation.report.files import read_document
from specdistill.evaluation.report.tables import (
    DraftLength,
    draft_lengths,
    find_fastest_lengths,
    tabulate_by_load,
)
from specdistill.evaluation.report.text import escape_markdown, format_cells, format_table
from specdistill.methods import METHODS
from specdistill.methods.chains.serving import describe_head_engines
from specdistill.methods.checkpoint import read_config
from specdistill.methods.compatibility import Finding, check_draft
from specdistill.methods.load import check_initialization, create_draft, find_method, load_method
from specdistill.methods.recipe import Recipe, TrainedRecipe, check_trainable
from specdistill.methods.target_record import TEMPLATE, copy_record, save_draft
from specdistill.recipe.load import validate_recipe
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.engine import Engine, Layout, Served, Serving
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.gguf_cache import find_converted
from specdistill.targets.loading import convert_gguf

SERVE_MD = Path(__file__).with_name("serve.md.j2")
# The training data of a draft that is created before any data exist.
NO_ROWS = Dataset.from_dict({column: [] for column in COLUMNS})
RECIPE_DRAFT_NAME = "the recipe's draft"  # the name of an untrained draft in errors
# Engines that have a lookup built in -> the names that users type for them. The same names stand
# for the engines' rules of n-gram lookup, in `eval.ngram.rule`.
LOOKUP_ENGINES = {"vllm": "vllm", "gguf": "llama.cpp"}
# K, if no report says which K was measured. A small K costs little where a draft accepts little.
DEFAULT_NUM_TOKENS = 3


def export(
    draft: Path,
    engine: str,
    output_dir: Path,
    target: TargetFiles | None = None,
    *,
    report: Path | None = None,
    num_speculative_tokens: int | None = None,
    finds_report: bool = True,
    merges: bool = True,
    logs: bool = True,
) -> Served:
    """Write a draft into a new folder that an inference engine can load, with SERVE.md in it.

    SERVE.md says how to serve the draft with this engine. The draft itself may be in the layout
    (names of files, tensors and keys) of any project that specdistill reads. The facts that the
    commands in SERVE.md are built from are returned.

    Args:
        draft: the folder of the draft.
        engine: the name of an engine that has a `serve_command`, e.g. `vllm`.
        output_dir: the new folder.
        target: the draft's target. It is needed if the engine's layout contains a part of it
            (`mtp`, speculators), or if a draft in another project's layout lacks such a part.
        report: the draft's report.json. None: the one next to the draft, if `finds_report`.
        num_speculative_tokens: K, the draft tokens per round in the commands; None: as in the
            report.
        finds_report: whether to look next to the draft for a report if none is given.
        merges: whether to merge the target's adapter, if it has one, into a copy of the target in
            `<output_dir>-target`, which the commands then serve.
        logs: whether to log the warnings of the checks, which SERVE.md has in any case.

    Raises:
        UserError: before anything is written, for a draft that is not complete, does not belong to
            the target, or has a setting that the engine does not support.
        ResourceError: if the Hub or the disk fails.
    """
    # Check the draft, the engine and the target before anything is written.
    check_new(output_dir)
    method = find_method(draft, key="draft")
    engine_facts = ENGINES[engine]
    serving, layout = find_serving(engine, method, draft)
    findings = check_draft(method, draft, target, "draft", logs=logs)
    if target is None:
        logger.warning(f"{draft} was not checked against its target. Pass target=… to check it.")

    # Take K, the lookup and the options of the commands from the draft's report.
    measured = find_report(draft, report, method) if report or finds_report else None
    settings = measured["settings"] if measured else {}
    _check_token_replacements(settings, engine, draft)
    measured_k = settings.get("num_speculative_tokens", DEFAULT_NUM_TOKENS)
    num_tokens, lookup = engine_facts.drafting(
        num_speculative_tokens or measured_k, read_measured_lookup(settings)
    )
    lengths = () if num_speculative_tokens else draft_lengths(measured)
    served_fields = list_measured_fields(
        measured, target, lengths, num_speculative_tokens or num_tokens
    )

    # Write the folder. If anything fails, the merged target is removed, too. llama.cpp loads a GGUF
    # target as it is. But a head is converted with the target's vocabulary, and so with a copy of
    # the target in safetensors. Draft models (`standalone`) are converted without it.
    gguf_file = target.gguf if target and not (target.adapter and merges) else None
    reads_gguf = engine_facts.name == "gguf" and METHODS[method].standalone
    with ExitStack() as cleanup, create_folder(output_dir) as folder:
        target = _prepare_target(
            target, output_dir, served_fields, cleanup, merges=merges, reads_gguf=reads_gguf
        )
        load_method(method).export(
            draft, engine, layout, folder, target, served_fields["num_tokens"]
        )
        copy_record(draft, folder)

        # Collect the facts for the commands, and write SERVE.md.
        served = Served(
            method=method,
            output=output_dir,
            target=target.name if target else None,
            config=read_config(folder, "output_dir"),
            serving=serving,
            in_target=METHODS[method].in_target,
            lookup_first=lookup,
            chat_template=str(output_dir / TEMPLATE) if (folder / TEMPLATE).is_file() else None,
            gguf=str(gguf_file) if gguf_file else None,
            **served_fields,
        )
        model_type = target.text_config.get("model_type") if target else None
        head_engines = describe_head_engines(method, model_type) if target else ""
        text = serve_md(engine_facts, served, measured, lengths, findings, head_engines)
        (folder / "SERVE.md").write_text(text, encoding="utf-8")
        cleanup.pop_all()  # Everything is written, so the merged target stays.
    return served


def export_lookup(
    method: str,
    engine: str,
    output_dir: Path,
    target: TargetFiles | None = None,
    *,
    report: Path | None = None,
    num_speculative_tokens: int | None = None,
) -> Served:
    """Write SERVE.md for a lookup that an engine has built in, into a new folder.

    A lookup has no weights, so the folder has no other file.

    Args:
        method: the name of a method that is not trained, e.g. `ngram`.
        engine: the name of the engine, e.g. `vllm`.
        output_dir: the new folder.
        target: the target; None for a placeholder in the commands.
        report: the report of the lookup, which gives its settings and K; None for the defaults.
        num_speculative_tokens: K, the draft tokens per round in the commands; None: as in the
            report.

    Raises:
        UserError: before anything is written, for an engine without this lookup.
        ResourceError: if the Hub or the disk fails.
    """
    # Check the engine, and take K and the settings of the lookup from the report.
    check_new(output_dir)
    engine_facts = ENGINES[engine]
    serving = _find_lookup_serving(engine, method)
    measured = find_report(output_dir, report, method) if report else None
    settings = measured["settings"] if measured else {}
    lookup_settings = _read_lookup_settings(method, settings)
    lengths = () if num_speculative_tokens else draft_lengths(measured)
    measured_k = settings.get("num_speculative_tokens", DEFAULT_NUM_TOKENS)
    served_fields = list_measured_fields(
        measured, target, lengths, num_speculative_tokens or measured_k
    )
    served_fields["lengths"] = ()  # An engine's lookup has one K, whatever the load.
    _check_lookup_length(engine_facts, lookup_settings, served_fields["num_tokens"])

    # Write SERVE.md. If anything fails, the merged target is removed, too. There is no draft, so
    # the model that the engine loads (`output`) is the target.
    reads_gguf = engine_facts.name == "gguf"
    gguf_file = target.gguf if target and not target.adapter else None
    with ExitStack() as cleanup, create_folder(output_dir) as folder:
        target = _prepare_target(target, output_dir, served_fields, cleanup, reads_gguf=reads_gguf)
        served = Served(
            method=method,
            output=Path(target.name if target else "TARGET"),
            target=target.name if target else None,
            config=lookup_settings,
            serving=serving,
            in_target=True,
            gguf=str(gguf_file) if gguf_file else None,
            **served_fields,
        )
        note = _compare_lookup_rules(engine, lookup_settings) if measured else ""
        text = serve_md(engine_facts, served, measured, lengths, note=note)
        (folder / "SERVE.md").write_text(text, encoding="utf-8")
        cleanup.pop_all()  # Everything is written, so the merged target stays.
    return served


def _find_lookup_serving(engine: str, method: str) -> Serving:
    """Return how an engine is configured for a lookup, such as n-gram lookup.

    Args:
        engine: the name of the engine.
        method: the name of a method that is not trained.

    Raises:
        UserError: for an engine without this lookup.
    """
    serving_by_engine = METHODS[method].serving()
    if engine not in serving_by_engine:
        # Name the engines as users type them: LOOKUP_ENGINES has `llama.cpp` for `gguf`.
        raise UserError(
            "engine",
            got=f"{LOOKUP_ENGINES.get(engine, engine)} with method={method}",
            expected=" or ".join(LOOKUP_ENGINES[name] for name in serving_by_engine),
        )
    return serving_by_engine[engine]


def _read_lookup_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a lookup: those of its measurement, or else the recipe's defaults.

    Args:
        method: the name of a method that is not trained.
        settings: the settings in the report; empty without a report.

    Raises:
        UserError: for a report that was measured at a running server, because the settings of the
            server's lookup are not known.
    """
    if settings and "drafting" not in settings:
        raise UserError(
            "report",
            got="a report that was measured at a running server, whose lookup settings are not"
            " known",
            expected="a report that was measured with eval.engine=specdistill, or with an engine"
            " that specdistill started (without eval.server)",
        )
    # A recipe has the default settings. The values of its other keys do not matter here.
    recipe = validate_recipe(
        Recipe,
        {"method": method, "target": {"model": "pico"}, "train": {"output_dir": "runs"}},
    )
    return {**vars(getattr(recipe.eval, method)), **settings.get("drafting", {})}


def _check_lookup_length(engine: Engine, lookup_settings: Mapping[str, Any], k: int) -> None:
    """Raise UserError for a K with which llama.cpp's lookup would draft nothing.

    llama.cpp drafts up to K of the tokens that follow an earlier occurrence of an n-gram, and
    discards a draft of fewer than n tokens. So it never drafts if n > K.

    Args:
        engine: the engine.
        lookup_settings: the settings of the lookup; `max` is the length of n-grams.
        k: K, draft tokens per round.
    """
    # Exports for llama.cpp go by the engine name `gguf`.
    n = lookup_settings["max"]
    if engine.name == "gguf" and n > k:
        raise UserError(
            "num_speculative_tokens",
            got=k,
            expected=(
                f"at least {n}, the length of the n-grams: llama.cpp discards a draft of fewer"
                " tokens"
            ),
        )


def _compare_lookup_rules(engine: str, lookup_settings: Mapping[str, Any]) -> str:
    """Return a note if an engine looks up by another rule than was measured, else an empty text.

    A rule of n-gram lookup says which earlier occurrence of an n-gram is taken, and which of the
    tokens after it are drafted. Each engine has one rule, whose name is in LOOKUP_ENGINES.

    Args:
        engine: the name of the engine.
        lookup_settings: the settings of the measured lookup. Only those of n-gram lookup name a
            rule.
    """
    engine_rule = LOOKUP_ENGINES[engine]
    measured_rule = lookup_settings.get("rule", engine_rule)
    if measured_rule == engine_rule:
        return ""
    return (
        f"It was measured with the rule of {measured_rule}, and {ENGINES[engine].title} has a rule"
        f" of its own, which `eval.ngram.rule={engine_rule}` measures"
    )


def _prepare_target(
    target: TargetFiles | None,
    output_dir: Path,
    served_fields: dict[str, Any],
    cleanup: ExitStack,
    *,
    merges: bool = True,
    reads_gguf: bool,
) -> TargetFiles | None:
    """Return the target in a form that an engine loads.

    A target with an adapter becomes a new folder with the adapter merged into the weights. A GGUF
    file that the engine cannot load becomes a copy in safetensors. Any other target is returned as
    it is.

    Args:
        target: the target; None if it is not known.
        output_dir: the folder of the export. A merged target is written to `<output_dir>-target`.
        served_fields: fields of `Served`, from which the engine's command is built. `revision`
            is set to None if the target is replaced by a new folder, which has no revision.
        cleanup: gets a callback that removes the merged target if the export fails. After a
            successful export the target is needed: the commands in SERVE.md serve it.
        merges: whether to merge an adapter.
        reads_gguf: whether the engine loads a GGUF target as it is.
    """
    if target is None:
        return None
    dtype = served_fields.get("dtype", Served.dtype)
    if target.adapter and merges:
        merged_folder = output_dir.with_name(f"{output_dir.name}-target")
        target = merge_target_adapter(target, merged_folder, dtype)
        cleanup.callback(shutil.rmtree, target.name)
        served_fields["revision"] = None
    elif target.gguf and not reads_gguf:
        target = load_safetensors_target(target, dtype)
        served_fields["revision"] = None
    return target


def _check_token_replacements(settings: Mapping[str, Any], engine: str, draft: Path) -> None:
    """Raise UserError for a draft that was measured with `eval.token_replacements`.

    This setting maps texts of target tokens to the texts that the draft reads and writes instead.
    No engine can do this, so a served draft would propose other tokens than those that were
    measured.

    Args:
        settings: the settings in the draft's report.
        engine: the name of the engine, for the error.
        draft: the folder of the draft, for the error.
    """
    if settings.get("drafting", {}).get("token_replacements"):
        raise UserError(
            "engine",
            got=f"{engine} for {draft}, which was measured with eval.token_replacements",
            expected="a draft measured without this setting: no engine can replace draft tokens",
        )


def load_safetensors_target(target: TargetFiles, dtype: str) -> TargetFiles:
    """Return the copy of a GGUF target in safetensors, which engines other than llama.cpp load.

    The copy is written now if there is none yet. If no copy can be written, the GGUF target itself
    is returned.

    Args:
        target: a target that is a GGUF file.
        dtype: the dtype of the weights in the copy.
    """
    assert target.gguf is not None, target.name
    folder = find_converted(target.gguf) or convert_gguf(target.gguf, dtype)
    return TargetFiles(str(folder), adapter=target.adapter) if folder else target


def merge_target_adapter(target: TargetFiles, output: Path, dtype: str) -> TargetFiles:
    """Write a copy of a target with its adapter (PEFT, e.g. LoRA) merged into the weights.

    Engines load the copy like any other model.

    Args:
        target: a target with an adapter.
        output: the new folder of the copy.
        dtype: the dtype of the weights in the copy.

    Returns:
        The copy, as a target without an adapter.

    Raises:
        UserError: if `output` exists already, or if the target cannot be loaded.
    """
    # `FrozenTarget.load` merges the adapter into the weights, so the loaded model is saved as it
    # is.
    check_new(output)
    adapted = FrozenTarget.load(
        target.name,
        revision=target.revision,
        adapter=target.adapter,
        dtype=dtype,
        trust_remote_code=target.trust_remote_code,
    )
    with create_folder(output) as folder:
        adapted.model.save_pretrained(folder)
        adapted.tokenizer.save_pretrained(folder)
    return TargetFiles(str(output))


def find_serving(engine: str, method: str, draft: Path | str) -> tuple[Serving, Layout]:
    """Return how an engine loads drafts of a method, and the layout of such a draft's folder.

    Args:
        engine: the name of the engine, e.g. `vllm`.
        method: the draft's method, e.g. `eagle3`.
        draft: the name of the draft in the error.

    Raises:
        UserError: if no draft of this method is exported for the engine.
    """
    # Collect the engines for which drafts of this method are exported: those with a layout for it.
    layouts_by_engine = {
        name: (serving, serving.layout)
        for name, serving in METHODS[method].serving().items()
        if serving.layout
    }

    # An engine may read the layouts of another engine, which `layouts` then names.
    name = ENGINES[engine].layouts or engine
    if name not in layouts_by_engine:
        raise UserError(
            "engine",
            got=f"{engine} for {draft}, of method {method}",
            expected=" or ".join(layouts_by_engine) or "a draft of a method that an engine loads",
        )
    return layouts_by_engine[name]


def check_engine_names(recipe: TrainedRecipe) -> dict[str, str]:
    """Check the engines that a recipe names, and return them: recipe key -> name of the engine.

    Raises:
        UserError: for an engine that cannot load a draft of the recipe's method.
    """
    # A recipe names engines to export for, and the engine to measure in.
    names_by_key = {
        f"publish.exports[{index}]": engine for index, engine in enumerate(recipe.publish.exports)
    }
    if recipe.eval.engine in ENGINES:
        names_by_key["eval.engine"] = recipe.eval.engine

    # Check that each engine loads drafts of the method. An error names the recipe key, e.g.
    # publish.exports[0].
    if names_by_key:
        check_exports(recipe.publish.exports, recipe.method, "publish.exports")
    for key, engine in names_by_key.items():
        with _report_engine_key(key):
            find_serving(engine, recipe.method, RECIPE_DRAFT_NAME)
    return names_by_key


def check_engines(
    recipe: TrainedRecipe, target: FrozenTarget, draft: nn.Module | None = None
) -> None:
    """Check that the engines that a recipe names can load its draft.

    The check uses an untrained draft, so it runs before training and finds every problem that does
    not depend on the trained weights.

    Args:
        recipe: the recipe.
        target: the target of the recipe.
        draft: an untrained draft, if one has been created already.

    Raises:
        UserError: for an engine that cannot load the draft.
    """
    names_by_key = check_engine_names(recipe)
    if not names_by_key:
        return

    # Create an untrained draft. The state of the random numbers is restored afterwards, so that the
    # check does not change the initialization of the draft that is trained.
    if draft is None:
        with torch.random.fork_rng():
            draft = load_method(recipe.method).create(recipe, target, NO_ROWS)

    # Check the settings that each engine's layout can express, and what the method itself requires.
    for key, engine in names_by_key.items():
        with _report_engine_key(key):
            _, layout = find_serving(engine, recipe.method, RECIPE_DRAFT_NAME)
            layout.check(engine, draft.config, RECIPE_DRAFT_NAME)
            load_method(recipe.method).check_served(engine, layout, draft, target)


@contextmanager
def _report_engine_key(key: str) -> Iterator[None]:
    """Let a UserError of a `with` block name a recipe key instead of the argument `engine`.

    Args:
        key: the recipe key that names the engine, e.g. publish.exports[0].
    """
    try:
        yield
    except UserError as error:
        error.rename_key("engine", key)
        raise


def check_exports(engines: Sequence[str], method: str, key: str) -> None:
    """Raise UserError if an export that is to be published would contain the whole target.

    Engines load some drafts (MTP layers) as a part of the target's checkpoint. An export of such a
    draft is a copy of the target, which is too large to be published with each draft.

    Args:
        engines: the names of the engines to export for.
        method: the method of the draft.
        key: the recipe key that the error names.
    """
    if engines and METHODS[method].in_target:
        raise UserError(
            key,
            got=", ".join(engines),
            expected=(
                f"an empty list: engines load a draft of method {method} inside a copy of its"
                " target; run `specdistill export` on the machine that serves the draft"
            ),
        )


def list_measured_fields(
    report: phrases.Report | None,
    target: TargetFiles | None,
    lengths: Sequence[DraftLength],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the fields of `Served` that follow from the measurement and from the target's files.

    `Served` holds the facts for the command that serves a draft. Fields that are not known are left
    out of the result, so that the defaults of `Served` apply.

    Args:
        report: the draft's report; None if there is none.
        target: the target's files; None if they are not known.
        lengths: the best K (`k`) for each load (`batch_size`, sequences at once); may be empty.
        num_tokens: the K to use if no best K is known (`lengths` is empty), or if the best K of the
            measured load is 0, because plain decoding is the fastest.
    """
    # Read the dtype of the target's weights from the report.
    config = target.text_config if target else {}
    report_sections = report or {}
    settings = report_sections.get("settings", {})
    engine = report_sections.get("engine", {})
    dtype = report_sections.get("target", {}).get("dtype")
    # The dtype of a llama.cpp measurement is a type of GGUF files, which no other engine knows.
    dtype = None if engine.get("name") == "llama.cpp" else dtype

    # Read the number of GPUs from the command that started the engine: vLLM has
    # --tensor-parallel-size, SGLang --tp-size. Then find the best K at the measured load, which is
    # that of the first row of the results.
    gpus = re.search(r"--(?:tensor-parallel-size|tp-size) (\d+)", engine.get("command", ""))
    k_by_load = {length.batch_size: length.k for length in lengths}
    best_k = k_by_load[report_sections["results"][0]["batch_size"]] if k_by_load else None

    # Collect the fields. A table of K by load is needed only if K differs between loads.
    changes_with_load = len(set(k_by_load.values())) > 1
    optional_fields = {
        "revision": target.commit if target else None,
        "max_length": config.get("max_position_embeddings"),
        "dtype": dtype or config.get("dtype") or config.get("torch_dtype"),
        "num_gpus": int(gpus[1]) if gpus else None,
    }
    return {
        "num_tokens": best_k or num_tokens,
        "lengths": tuple(k_by_load.items()) if changes_with_load else (),
        "samples": (
            settings.get("temperature", 0) > 0
            and settings.get("draft_sampling", "greedy") != "greedy"
        ),
        **{name: value for name, value in optional_fields.items() if value},
    }


def read_measured_lookup(settings: Mapping[str, Any]) -> LookupFirstConfig | None:
    """Return the settings of the lookup (`eval.lookup_first`) of a measurement, from its report.

    In each round, such a lookup is tried first; the draft drafts only if nothing is looked up.

    Args:
        settings: the settings in the report.

    Returns:
        The settings of the lookup; None if the draft was measured without a lookup.

    Raises:
        ValueError: if the report's lookup has unknown keys or invalid values.
    """
    lookup = settings.get("drafting", {}).get("lookup_first")
    return LookupFirstConfig.model_validate(lookup) if lookup else None


def write_untrained(recipe: Recipe, folder: Path) -> None:
    """Create the untrained draft of a recipe without any data, and save it in a folder.

    Training makes some choices from its data. Without data they are arbitrary: a pruned draft
    vocabulary, for example, gets the first tokens of the target's vocabulary.

    Raises:
        UserError: for a recipe that cannot be trained.
    """
    recipe = check_trainable(recipe)
    check_initialization(recipe, TargetFiles.from_config(recipe.target))
    target = FrozenTarget.load(**vars(recipe.target))
    save_draft(load_method(recipe.method), target, create_draft(recipe, target, NO_ROWS), folder)


def serve_md(
    engine: Engine,
    served: Served,
    report: phrases.Report | None,
    lengths: Sequence[DraftLength],
    findings: Sequence[Finding] = (),
    note: str = "",
) -> str:
    """Return the text of SERVE.md, which says how to serve an exported draft or a lookup.

    Args:
        engine: the engine that serves.
        served: the facts that the command to serve is built from.
        report: the report of the draft; None if there is none.
        lengths: the best K for each load (sequences at once); may be empty.
        findings: the findings of the check of the draft against its target.
        note: what to know before serving, a sentence without its full stop; empty if nothing.
    """
    # The engine's flags are texts with {length}, {total} and {dtype}, e.g. `--dtype {dtype}`. Fill
    # in the most tokens of one sequence, those of four sequences at once, and the dtype.
    assert engine.serve_command is not None
    values = {"length": served.max_length, "total": 4 * served.max_length, "dtype": served.dtype}
    flag_rows = [(name, how.format(**values)) for name, how in engine.flags.items()]

    # Build a table of the best K by load. `engine_table` is for a report that was measured in an
    # engine. Otherwise `decoder_table` has what specdistill measured or predicts for its decoder.
    in_engine = report is not None and report.get("engine", {}).get("name") in ENGINES
    engine_table = ""
    if report and in_engine:
        engine_table = format_cells(tabulate_by_load(find_fastest_lengths(report)))
    decoder_table = format_cells(tabulate_by_load(lengths)) if lengths and not in_engine else ""

    # An engine can change K with the load if `served.lengths` makes a difference to its command.
    command_without_lengths = engine.serve_command(replace(served, lengths=()))
    takes_lengths = engine.serve_command(served) != command_without_lengths

    # Render the template, with the notes on what to know before serving.
    caveats = [f"{note}."] if note else []
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    template = environment.from_string(SERVE_MD.read_text(encoding="utf-8"))
    return template.render(
        version=specdistill.__version__,
        engine=engine,
        served=served,
        is_lookup=served.method in METHODS and not METHODS[served.method].is_trained,
        report=report,
        caveats=[*caveats, *list_caveats(report, engine, served.num_tokens)],
        findings=findings,
        flags=format_table(("what else is set", "how"), flag_rows),
        engine_table=engine_table,
        decoder_table=decoder_table,
        takes_lengths=takes_lengths,
        cells=format_cells,
        plain=escape_markdown,
        phrases=phrases,
        tables=tables,
    )


def list_caveats(report: phrases.Report | None, engine: Engine, k: int) -> list[str]:
    """Return what to know before serving a draft, as a list of notes of one or more sentences.

    The notes are about a gate that the draft did not pass, and about a speed below that of plain
    decoding. If the draft was measured behind a lookup, the last note says whether the engine can
    serve this lookup, too.

    Args:
        report: the draft's report; None gives no caveats.
        engine: the engine that serves.
        k: K, draft tokens per round.
    """
    if report is None:
        return []

    # A gate that the draft did not pass.
    caveats = []
    row = report["results"][0]
    if "gate" in report:
        verdict = phrases.format_verdict(report)
        if verdict not in ("Passed", "Not judged"):
            reasons = phrases.describe_failed_rules(report)
            caveats.append(escape_markdown(f"Its gate: {verdict}. {reasons}"))

    # A draft that slows decoding down. A row without a measured speedup is no reason against it.
    if row.get("speedup", 1) < 1:
        caveats.append(
            escape_markdown(
                "It was slower than plain decoding where it was measured:"
                f" {phrases.format_times(row['speedup'])} its speed"
                f"{phrases.format_bracketed_interval(row, 'speedup')}."
            )
        )

    # A lookup, without which the measured numbers do not hold.
    lookup = phrases.lookup_first(report["settings"])
    if lookup:
        needed = describe_lookup([engine], read_measured_lookup(report["settings"]), k)
        caveats.append(f"It was measured behind a lookup ({lookup}). {needed}")
    return caveats


def describe_lookup(engines: Iterable[Engine], lookup: LookupFirstConfig | None, k: int) -> str:
    """Say how engines serve a lookup in front of a draft, and which engines serve only the draft.

    Args:
        engines: the engines.
        lookup: the settings of the lookup; None if there is no lookup.
        k: K, the most tokens that the lookup drafts per round.

    Returns:
        One or more sentences, for SERVE.md and model cards.
    """
    # `describe_front` returns None for an engine that has no such lookup.
    fronts = {engine.title: engine.describe_front(lookup, k) for engine in engines}
    notes = [front.note for front in fronts.values() if front]
    titles_without_lookup = [title for title, front in fronts.items() if not front]
    if titles_without_lookup:
        titles = " and ".join(titles_without_lookup)
        notes.append(f"The commands for {titles} start the draft alone, which accepts less.")
    return " ".join(notes)


def find_report(draft: Path, report: Path | None, method: str) -> phrases.Report | None:
    """Find and read the report.json of a draft.

    Args:
        draft: the folder of the draft.
        report: the path of the report or its folder. None: the folder `report` next to the draft's
            folder, where training and evaluation put it.
        method: the method of the draft.

    Returns:
        The report; None if `report` is None and there is no report next to the draft.

    Raises:
        UserError: if `report` names a file that does not exist, if the report cannot be read, or if
            it was measured with a draft of another method.
    """
    path = report or draft.absolute().parent / "report"
    if report is None and not (path / "report.json").is_file():
        return None

    # A report about a draft of another method cannot be the report of this draft.
    document = read_document(path)
    measured_method = document["draft"]["method"]
    if measured_method != method:
        raise UserError(
            "report",
            got=f"{path}, which is about a draft of method {measured_method}",
            expected=f"the report.json of a draft of method {method}",
        )
    return document
