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
    """Write a draft into a new folder in the layout of an engine, with SERVE.md in it.

    The draft may be in any layout that this project reads.

    Args:
        draft: the folder of the draft.
        engine: the name of an engine that has a `serve_command`.
        output_dir: the new folder.
        target: the draft's target. It is needed if the engine's layout contains a part of the
            target (`mtp`, speculators), or if a draft in another project's layout lacks a part
            that the target has. If it is given, the draft must belong to it.
        report: the draft's report.json. None: `report/report.json` next to the draft's folder, if
            `finds_report`.
        num_speculative_tokens: K in the commands, draft tokens per round. None: K of the report.
        finds_report: whether to look for the report if `report` is None.
        merges: whether to merge the target's adapter into a copy of the target, in the folder
            `<output_dir>-target`. The commands then serve this copy.
        logs: whether to log the warnings of the check of the draft against its target. SERVE.md
            has them in any case.

    Returns:
        The facts that a command to serve the draft is built from.

    Raises:
        UserError: before anything is written, for a draft that is not complete, and for what the
            engine cannot express.
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
    drafting = list_measured_fields(measured, target, lengths, num_speculative_tokens or num_tokens)

    # Engines other than llama.cpp load a GGUF target as its copy in safetensors. llama.cpp loads
    # the GGUF file itself, but converts a head with the target's vocabulary, and so with the copy.
    merges_adapter = target is not None and target.adapter and merges
    gguf_file = target.gguf if target and not merges_adapter else None
    reads_gguf = engine_facts.name == "gguf" and METHODS[method].standalone
    if target is not None and gguf_file and not reads_gguf:
        target = load_safetensors_target(target, drafting.get("dtype", Served.dtype))
        drafting["revision"] = None

    # Write the folder. If anything fails, the merged target is removed, too.
    with ExitStack() as cleanup, create_folder(output_dir) as folder:
        if target is not None and merges_adapter:
            merged_folder = output_dir.with_name(f"{output_dir.name}-target")
            target = merge_target_adapter(
                target, merged_folder, drafting.get("dtype", Served.dtype)
            )
            cleanup.callback(shutil.rmtree, target.name)
            drafting["revision"] = None  # The merged target is a folder, which has no revision.
        load_method(method).export(draft, engine, layout, folder, target, drafting["num_tokens"])
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
            **drafting,
        )
        model_type = target.text_config.get("model_type") if target else None
        head_engines = describe_head_engines(method, model_type) if target else ""
        text = serve_md(engine_facts, served, measured, lengths, findings, head_engines)
        (folder / "SERVE.md").write_text(text, encoding="utf-8")
        cleanup.pop_all()  # Everything is written, so the merged target stays.
    return served


def _check_token_replacements(settings: Mapping[str, Any], engine: str, draft: Path) -> None:
    """Raise UserError for a draft that was measured with `eval.token_replacements`."""
    if settings.get("drafting", {}).get("token_replacements"):
        raise UserError(
            "engine",
            got=f"{engine} for {draft}, which was measured with eval.token_replacements",
            expected="a draft measured without it: no engine can replace tokens",
        )


def load_safetensors_target(target: TargetFiles, dtype: str) -> TargetFiles:
    """Return a GGUF target as its copy in safetensors, which engines other than llama.cpp load.

    The copy is written if it does not exist. If it cannot be written, the target itself is
    returned.

    Args:
        target: a target that is a GGUF file.
        dtype: the dtype of the weights in the copy.
    """
    assert target.gguf is not None, target.name
    folder = find_converted(target.gguf) or convert_gguf(target.gguf, dtype)
    return TargetFiles(str(folder), adapter=target.adapter) if folder else target


def merge_target_adapter(target: TargetFiles, output: Path, dtype: str) -> TargetFiles:
    """Write a copy of a target with its adapter merged into the weights.

    Engines load the copy as they load any model.

    Args:
        target: a target with an adapter.
        output: the new folder of the copy.
        dtype: the dtype of the weights in the copy.

    Returns:
        The copy, as a target without an adapter.

    Raises:
        UserError: as `FrozenTarget.load` does, and for a folder that exists.
    """
    # Loading a target merges its adapter into the weights, so the model is saved as it is.
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
        engine: the name of the engine.
        method: the draft's method.
        draft: the name of the draft in the error.

    Raises:
        UserError: if no draft of this method is exported for the engine.
    """
    # Collect the engines for which drafts of this method are exported.
    layouts_by_engine = {
        name: (serving, serving.layout)
        for name, serving in METHODS[method].serving().items()
        if serving.layout
    }

    # An engine may use the layouts of another engine.
    name = ENGINES[engine].layouts or engine
    if name not in layouts_by_engine:
        raise UserError(
            "engine",
            got=f"{engine} for {draft}, of method {method}",
            expected=" or ".join(layouts_by_engine) or "a draft that some engine loads",
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

    # Check that each of them loads drafts of the method.
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
    """Replace `engine` in the errors of the block by the recipe key that names the engine."""
    try:
        yield
    except UserError as error:
        error.rename_key("engine", key)
        raise


def check_exports(engines: Sequence[str], method: str, key: str) -> None:
    """Raise UserError if an export that is to be published would contain the whole target.

    This is so for methods whose draft is a part of the target's checkpoint.

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
                f"no engine: engines load a draft of method {method} inside a copy of its target;"
                " export it on the machine that serves it"
            ),
        )


def list_measured_fields(
    report: phrases.Report | None,
    target: TargetFiles | None,
    lengths: Sequence[DraftLength],
    num_tokens: int,
) -> dict[str, Any]:
    """Return the fields of `Served` that follow from the measurement and from the target's files.

    Fields that are not known are absent, so that `Served` has its defaults.

    Args:
        report: the draft's report; None if there is none.
        target: the target's files; None if they are not known.
        lengths: the best draft length of each load, from which K is chosen; may be empty.
        num_tokens: K if there are no lengths, or if no draft is faster at the measured load.
    """
    # Read the dtype of the target's weights from the report.
    config = target.text_config if target else {}
    report_keys = report or {}
    settings = report_keys.get("settings", {})
    engine = report_keys.get("engine", {})
    dtype = report_keys.get("target", {}).get("dtype")
    # The dtype of a llama.cpp measurement is a type of GGUF files, which no other engine knows.
    dtype = None if engine.get("name") == "llama.cpp" else dtype

    # Read the number of GPUs from the command that started the engine: vLLM has
    # --tensor-parallel-size, SGLang --tp-size. Then find the best K at the measured load.
    gpus = re.search(r"--(?:tensor-parallel-size|tp-size) (\d+)", engine.get("command", ""))
    k_by_load = {length.batch_size: length.k for length in lengths}
    best_k = k_by_load[report_keys["results"][0]["batch_size"]] if k_by_load else None

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
    """Return the lookup that drafted before the draft in a measurement.

    Args:
        settings: the settings of the report.

    Returns:
        The settings of the lookup; None if there was none.

    Raises:
        ValueError: for settings that describe no lookup.
    """
    lookup = settings.get("drafting", {}).get("lookup_first")
    return LookupFirstConfig.model_validate(lookup) if lookup else None


def write_untrained(recipe: Recipe, folder: Path) -> None:
    """Create the untrained draft of a recipe without any data, and save it.

    Choices that training makes from data are arbitrary here: a pruned draft vocabulary has the
    first tokens of the target's vocabulary.

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
    engines: str = "",
) -> str:
    """Return the text of SERVE.md, which says how to serve an exported draft.

    Args:
        engine: the engine that serves.
        served: the facts for the commands.
        report: the report of the draft; None if there is none.
        lengths: the best draft length of each load, from which K is chosen; may be empty.
        findings: the findings of the check of the draft against its target.
        engines: a sentence about which engines serve such a draft; empty if all of them do.
    """
    # Fill the lengths and the dtype into the engine's flags.
    assert engine.serve_command is not None
    values = {"length": served.max_length, "total": 4 * served.max_length, "dtype": served.dtype}
    flag_rows = [(name, how.format(**values)) for name, how in engine.flags.items()]

    # Show the loads that an engine measured, or else the best draft length of each load.
    in_engine = report is not None and report.get("engine", {}).get("name") in ENGINES
    by_load = ""
    if report and in_engine:
        by_load = format_cells(tabulate_by_load(find_fastest_lengths(report)))
    by_length = format_cells(tabulate_by_load(lengths)) if lengths and not in_engine else ""

    # The engine uses the table of lengths if its command differs without it.
    command_without_lengths = engine.serve_command(replace(served, lengths=()))
    takes_lengths = engine.serve_command(served) != command_without_lengths

    # Render the template, with the reasons against serving.
    caveats = [f"{engines}."] if engines else []
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    template = environment.from_string(SERVE_MD.read_text(encoding="utf-8"))
    return template.render(
        version=specdistill.__version__,
        engine=engine,
        served=served,
        report=report,
        caveats=[*caveats, *list_caveats(report, engine, served.num_tokens)],
        findings=findings,
        flags=format_table(("what else is set", "how"), flag_rows),
        by_load=by_load,
        by_length=by_length,
        takes_lengths=takes_lengths,
        cells=format_cells,
        plain=escape_markdown,
        phrases=phrases,
        tables=tables,
    )


def list_caveats(report: phrases.Report | None, engine: Engine, k: int) -> list[str]:
    """Return the reasons against serving a draft, as one or more sentences for each reason.

    The reasons are a gate that the draft did not pass, and a speed below that of plain decoding.
    For a draft that was measured behind a lookup, a text says whether the engine has such a lookup.

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

    # A draft that slows decoding down.
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
    """Say how engines serve a lookup in front of a draft, and which engines serve without it.

    Args:
        engines: the engines that serve.
        lookup: the lookup; None for none.
        k: K, the most tokens that the lookup drafts per round.
    """
    # An engine that cannot express the lookup starts the draft alone.
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
        UserError: if the report that `report` names does not exist, and for a report that cannot be
            read or that is of a draft of another method.
    """
    path = report or draft.absolute().parent / "report"
    if report is None and not (path / "report.json").is_file():
        return None

    # A report of another method cannot be of this draft.
    document = read_document(path)
    measured_method = document["draft"]["method"]
    if measured_method != method:
        raise UserError(
            "report",
            got=f"{path}, of a draft of method {measured_method}",
            expected=f"the report.json of a draft of method {method}",
        )
    return document
