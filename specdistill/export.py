"""Export a draft for an engine: its folder in the engine's layout, and SERVE.md: how to serve it, and which acceptance to expect."""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jinja2 import Environment, StrictUndefined

import specdistill
from specdistill.engines import ENGINES
from specdistill.engines.engine import Engine, Layout, Served, Serving
from specdistill.errors import UserError
from specdistill.files.folders import check_new, new_folder
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.contract import Draft
from specdistill.methods.load import create_draft, implementation, method_of
from specdistill.methods.recipe import Recipe, TrainedRecipe, trainable
from specdistill.methods.target_record import TEMPLATE, check_target, copy_record, save_draft
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.report import phrases, tables
from specdistill.report.draft_lengths import (
    DraftLength,
    by_load,
    draft_lengths,
    fastest_lengths,
    usual_length,
)
from specdistill.report.files import read_document
from specdistill.report.text import cells, plain, table
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

SERVE_MD = Path(__file__).with_name("serve.md.j2")
THE_DRAFT = "the recipe's draft"
DEFAULT_NUM_TOKENS = 3  # drafted per round, where no report says how many were measured


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
) -> Served:
    """Write the draft of a folder, in any layout that is read, into a new folder in the layout of an engine, with SERVE.md next to it.

    Args:
        target: the draft's target; needed where a layout holds some of it (`mtp`, speculators), and where a draft in
            another project's layout leaves something to it. Whenever it is given, the draft must be its own.
        report: report.json of the draft; None looks for `../report/report.json` next to it, if finds_report.
        num_speculative_tokens: drafted per round, for the commands; None takes the report's.
        merges: an adapter of the target into a copy of it, `<output_dir>-target`, which is then what is served.

    Returns what a command that serves it is made of. Raises UserError, before anything is written, for what is no whole draft and for what
    the engine cannot express; ResourceError when the Hub or the disk fails.
    """
    check_new(output_dir)
    method, to = method_of(draft, key="draft"), ENGINES[engine]
    given, layout = serving_of(engine, method, draft)
    if target is not None:
        check_target(draft, target, "draft")
    measured = find_report(draft, report, method) if report or finds_report else None
    settings = measured["settings"] if measured else {}
    if settings.get("drafting", {}).get("token_replacements"):
        got = f"{engine} for {draft}, which was measured with eval.token_replacements"
        raise UserError(
            "engine",
            got=got,
            expected="a draft that reads the target's tokens: no engine replaces them",
        )
    k = num_speculative_tokens or (usual_length(measured) if measured else DEFAULT_NUM_TOKENS)
    num_tokens, lookup = to.drafting(k, measured_lookup(settings))
    lengths = () if num_speculative_tokens else draft_lengths(measured)
    drafting = as_measured(measured, target, lengths, num_speculative_tokens or num_tokens)
    with ExitStack() as undone, new_folder(output_dir) as folder:
        if target is not None and target.adapter and merges:
            dtype = drafting.get("dtype", Served.dtype)
            target = merge_adapter(target, output_dir.with_name(f"{output_dir.name}-target"), dtype)
            undone.callback(shutil.rmtree, target.name)
            drafting["revision"] = None  # of a folder
        implementation(method).export(draft, engine, layout, folder, target, drafting["num_tokens"])
        copy_record(draft, folder)
        served = Served(
            method=method,
            output=output_dir,
            target=target.name if target else None,
            config=read_config(folder, "output_dir"),
            serving=given,
            in_target=METHODS[method].in_target,
            lookup_first=lookup,
            chat_template=str(output_dir / TEMPLATE) if (folder / TEMPLATE).is_file() else None,
            **drafting,
        )
        (folder / "SERVE.md").write_text(serve_md(to, served, measured, lengths), encoding="utf-8")
        undone.pop_all()
    return served


def merge_adapter(target: TargetFiles, output: Path, dtype: str) -> TargetFiles:
    """Write a copy of a target with its adapter merged into the weights, which engines load as any model. Raises UserError as
    `FrozenTarget.load`, and for a folder that exists.
    """
    check_new(output)
    adapted = FrozenTarget.load(
        target.name,
        revision=target.revision,
        adapter=target.adapter,
        dtype=dtype,
        trust_remote_code=target.trust_remote_code,
    )
    with new_folder(output) as folder:
        adapted.model.save_pretrained(folder)
        adapted.tokenizer.save_pretrained(folder)
    return TargetFiles(str(output))


def serving_of(engine: str, method: str, draft: Path | str) -> tuple[Serving, Layout]:
    """How an engine is given drafts of a method, and in which layout. Raises UserError, calling the draft so, where none is exported."""
    serving = METHODS[method].serving()
    able = {name: (given, given.layout) for name, given in serving.items() if given.layout}
    if (name := ENGINES[engine].layouts or engine) not in able:
        got = f"{engine} for {draft}, of method {method}"
        raise UserError(
            "engine", got=got, expected=" or ".join(able) or "a draft that some engine loads"
        )
    return able[name]


def check_engines(recipe: TrainedRecipe, target: FrozenTarget) -> None:
    """Raises UserError for an engine that a recipe names and that cannot be given its draft, as far as an untrained one tells."""
    named = {
        f"publish.exports[{index}]": engine for index, engine in enumerate(recipe.publish.exports)
    }
    named |= {"eval.engine": recipe.eval.engine} if recipe.eval.engine in ENGINES else {}
    if not named:
        return
    check_exports(recipe.publish.exports, recipe.method, "publish.exports")
    with torch.random.fork_rng():
        draft = create_untrained(recipe, target)
    for key, engine in named.items():
        try:
            _, layout = serving_of(engine, recipe.method, THE_DRAFT)
            layout.check(engine, draft.config, THE_DRAFT)
            implementation(recipe.method).check_served(engine, layout, draft, target)
        except UserError as error:
            if error.key != "engine":
                raise
            raise UserError(
                key, got=error.got, text=f"{key}: {str(error).removeprefix('engine: ')}"
            ) from error


def check_exports(engines: Sequence[str], method: str, key: str) -> None:
    """Raises UserError for engines whose exports are to be published of a method's drafts, and would hold the whole target."""
    if engines and METHODS[method].in_target:
        expected = "none: engines load such a draft in a copy of its target, which is exported where it is served"
        raise UserError(key, got=", ".join(engines), expected=expected)


def as_measured(
    report: Mapping[str, Any] | None,
    target: TargetFiles | None,
    lengths: Sequence[DraftLength],
    num_tokens: int,
) -> dict[str, Any]:
    """What `Served` has of a target and of how a draft was measured with it, as far as that is known.

    lengths: those of the report that K is from. num_tokens: K where there are none, or where no draft is faster.
    """
    config, known = target.text_config if target else {}, report or {}
    settings, engine, dtype = (
        known.get("settings", {}),
        known.get("engine", {}),
        known.get("target", {}).get("dtype"),
    )
    dtype = (
        None if engine.get("name") == "llama.cpp" else dtype
    )  # a type of GGUF files, which no other engine knows
    gpus = re.search(r"--(?:tensor-parallel-size|tp-size) (\d+)", engine.get("command", ""))
    found = {length.batch_size: length.k for length in lengths}
    best = found[known["results"][0]["batch_size"]] if found else None
    fitting = {
        "revision": target.commit if target else None,
        "max_length": config.get("max_position_embeddings"),
        "dtype": dtype or config.get("dtype") or config.get("torch_dtype"),
        "num_gpus": int(gpus[1]) if gpus else None,
    }
    return {
        "num_tokens": best or num_tokens,
        "lengths": tuple(found.items()) if len(set(found.values())) > 1 else (),
        "samples": settings.get("temperature", 0) > 0
        and settings.get("draft_sampling", "greedy") != "greedy",
        **{name: value for name, value in fitting.items() if value},
    }


def measured_lookup(settings: Mapping[str, Any]) -> LookupFirstConfig | None:
    """What stood in front of the draft in a measurement with these settings. Raises ValueError for what is no lookup."""
    lookup = settings.get("drafting", {}).get("lookup_first")
    return LookupFirstConfig.model_validate(lookup) if lookup else None


def write_untrained(recipe: Recipe, folder: Path) -> None:
    """Create the draft as its training script would, without data, and save it.

    What data would choose is arbitrary here: a pruned vocabulary holds the first tokens. Raises UserError where training would.
    """
    recipe = trainable(recipe)
    target = FrozenTarget.load(**vars(recipe.target))
    save_draft(implementation(recipe.method), target, create_untrained(recipe, target), folder)


def create_untrained(recipe: TrainedRecipe, target: FrozenTarget) -> Draft:
    tokens = list(range(min(target.vocab_size, target.max_length, recipe.data.max_length)))
    return create_draft(
        recipe, target, Dataset.from_dict({"input_ids": [tokens], "loss_mask": [[0] * len(tokens)]})
    )


def serve_md(
    engine: Engine, served: Served, report: Mapping[str, Any] | None, lengths: Sequence[DraftLength]
) -> str:
    """The whole file. `report`: a report.json of the draft, if there is one; `lengths`: those of it that K is from."""
    assert engine.serve_command is not None
    fitting = {"length": served.max_length, "total": 4 * served.max_length, "dtype": served.dtype}
    in_engine = report is not None and report.get("engine", {}).get("name") in ENGINES
    templates = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return templates.from_string(SERVE_MD.read_text(encoding="utf-8")).render(
        version=specdistill.__version__,
        engine=engine,
        served=served,
        report=report,
        caveats=caveats(report, engine, served.num_tokens),
        flags=table(
            ("what else is set", "how"),
            ((name, how.format(**fitting)) for name, how in engine.flags.items()),
        ),
        by_load=cells(by_load(fastest_lengths(report))) if report and in_engine else "",
        by_length="" if in_engine or not lengths else cells(by_load(lengths)),
        takes_lengths=engine.serve_command(served)
        != engine.serve_command(replace(served, lengths=())),
        cells=cells,
        plain=plain,
        phrases=phrases,
        tables=tables,
    )


def caveats(report: Mapping[str, Any] | None, engine: Engine, k: int) -> list[str]:
    """What speaks against serving the draft: a gate that it did not pass, and a speed below that of plain decoding; and what the engine
    does about a lookup in front of it, with K = k.
    """
    if report is None:
        return []
    found, row = [], report["results"][0]
    if "gate" in report and (judged := phrases.verdict(report)) not in ("Passed", "Not judged"):
        found.append(plain(f"Its gate: {judged}. {phrases.failed_rules(report)}"))
    if row.get("speedup", 1) < 1:
        speed = f"{phrases.times(row['speedup'])} its speed{phrases.between(row, 'speedup')}"
        found.append(plain(f"It was slower than plain decoding where it was measured: {speed}."))
    if lookup := phrases.lookup_first(report["settings"]):
        needed = of_lookup([engine], measured_lookup(report["settings"]), k)
        found.append(f"It was measured behind a lookup ({lookup}). {needed}")
    return found


def of_lookup(engines: Iterable[Engine], lookup: LookupFirstConfig | None, k: int) -> str:
    """What engines need for a lookup of up to k tokens in front of a draft, and which ones are started without."""
    fronts = {engine.title: engine.front(lookup, k) for engine in engines}
    alone = " and ".join(title for title, front in fronts.items() if not front)
    notes = [front.note for front in fronts.values() if front]
    return " ".join(
        [*notes, f"The commands for {alone} start the draft alone, which accepts less."]
        if alone
        else notes
    )


def find_report(draft: Path, report: Path | None, method: str) -> dict[str, Any] | None:
    """A draft's report.json: the file or folder that was named, or `<run>/report` of `<run>/draft`; None where there is none.

    Raises UserError when it was named and is not there, cannot be read, or is the report of a draft of another method.
    """
    path = report or draft.absolute().parent / "report"
    if report is None and not (path / "report.json").is_file():
        return None
    read = read_document(path)
    if (measured := read["draft"]["method"]) != method:
        got = f"{path}, of a draft of method {measured}"
        raise UserError(
            "report", got=got, expected=f"the report.json of a draft of method {method}"
        )
    return read
