"""Build the model card of a published draft.

The card says what the model drafts for, how to serve it, what was measured, and what it was made
from. The Hub searches its metadata: `base_model` finds the drafts of a target.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData, constants

from specdistill import __version__
from specdistill.common.documents import read_yaml
from specdistill.common.errors import join_lines
from specdistill.common.project import SUITES
from specdistill.evaluation.report import phrases, tables
from specdistill.evaluation.report.text import (
    escape_markdown,
    format_cells,
    format_measurement,
    format_table,
)
from specdistill.hub.evidence import REPORT, Release
from specdistill.hub.licenses import DATA, Licensed, build_license_metadata
from specdistill.methods import METHODS
from specdistill.recipe.fields import find_default, format_value, list_fields, list_variants
from specdistill.serving.engines import ENGINES
from specdistill.serving.export import describe_lookup, read_measured_lookup
from specdistill.targets.files import TargetIdentity
from specdistill.training.history import History

TEMPLATE = Path(__file__).with_name("card.md.j2")
# Metrics of a report's row that the card's metadata has.
METRICS = ("mean_acceptance_length", "acceptance_rate", "speedup")
PICTURE = f"{REPORT}/picture.svg"
# Placeholders in commands for the files that llama.cpp needs, which the reader has to make.
GGUF_FILES = {"model": "TARGET.gguf", "model_draft": "DRAFT.gguf"}
# Settings of a report that the section `eval:` has under the same name.
SETTINGS = (
    "num_speculative_tokens",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "seed",
    "batch_size",
    "compile",
    "repeats",
    "warmup",
)


@dataclass(frozen=True)
class CardContents:
    """The contents of a card.

    Attributes:
        repository: the repository that the draft is published in.
        tag: the tag of the release.
        release: the run and what is published of it.
        history: the history of the training; None if it is not known.
        base_model: the target's Hub id; None if it has none.
        parts: what the draft was made from.
        license: the licence of the draft.
        overridden: the reasons against the release, which `reason` overrides.
        warnings: the warnings of the check of the draft against its target.
        reason: why the draft is published although something speaks against it.
        since: the tag of the release before; None for a first release.
        changes: what changed since that release, as Markdown.
    """

    repository: str
    tag: str
    release: Release
    history: History | None
    base_model: str | None
    parts: Sequence[Licensed]
    license: str
    overridden: Sequence[str] = ()
    warnings: Sequence[str] = ()
    reason: str | None = None
    since: str | None = None
    changes: str = ""

    @property
    def name(self) -> str:
        """The name of the repository without its owner."""
        return self.repository.rpartition("/")[2]


def build_model_card(contents: CardContents, serving: Iterable[tuple[str, str]]) -> ModelCard:
    """Build the model card of a release by filling in a template.

    Texts from reports and other cards are escaped, so that they cannot change the card's layout.
    Names of repositories and tags were checked before, by the Hub's own rules.

    Args:
        contents: the contents of the card.
        serving: the title of each engine that can serve the draft, and the commands to do so.
    """
    release = contents.release
    report = contents.release.report

    # Find the engines that serve the draft. It may have been measured behind a lookup, which
    # proposes what followed the last tokens earlier in the text; the draft then runs only if
    # nothing is found. In this case, say which engines support that.
    lookup = read_measured_lookup(report["settings"])
    engines = [
        ENGINES[name] for name in METHODS[release.method].serving() if ENGINES[name].serve_command
    ]
    num_tokens = report["settings"]["num_speculative_tokens"]
    lookup_text = describe_lookup(engines, lookup, num_tokens) if lookup else ""

    # Format the table of the measurement. The changes since the last release (`baseline`) are left
    # out here, because the card has a section about them.
    measurement = format_measurement(
        {name: part for name, part in report.items() if name != "baseline"}
    )

    # List the models and data sets that the draft was made from: the role of each in the draft, its
    # name and its licence.
    part_rows = [
        (part.what, escape_markdown(part.name), escape_markdown(part.shown))
        for part in contents.parts
    ]

    # The template has the text, and everything that varies is passed to it. Headings of the
    # measurement get one `#` more, because they are inside a section of the card.
    card: ModelCard = ModelCard.from_template(
        build_metadata(contents),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        contents=contents,
        report=report,
        phrases=phrases,
        tables=tables,
        plain=escape_markdown,
        endpoint=constants.ENDPOINT,
        # The folder of the run is a path of this machine, which is not published.
        overridden=[refusal.replace(f"{release.run}/", "") for refusal in contents.overridden],
        summary=METHODS[release.method].summary,
        terms=list(dict.fromkeys(part.terms for part in contents.parts if part.terms)),
        version=__version__,
        picture=PICTURE,
        headline=format_cells(tables.tabulate_whole_suite(report)),
        serving=[*serving],
        is_named_suite=_is_named_suite(report),
        gguf_files=GGUF_FILES.values(),
        measured=re.sub("^#", "##", measurement, flags=re.MULTILINE),
        front=lookup_text,
        parts=format_table(("", "what", "licence"), part_rows),
        identity=_format_identity(release.made_for),
        again=format_eval_command(contents),
    )
    return card


def build_metadata(contents: CardContents) -> ModelCardData:
    """Build the card's metadata, which the Hub reads and searches.

    The Hub knows four relations of a model to its base model. For a draft that needs the target's
    layers, the relation is `adapter`, the only one that says that the draft is of no use without
    the target. No relation describes a whole language model that drafts for another one, so for
    such a draft the relation is left out, and the Hub chooses one.
    """
    # List the models and data sets on the Hub that the draft was made from, the target first. One
    # base model is stated as a text, several as a list.
    method = contents.release.method
    standalone = METHODS[method].standalone
    hub_parts = [part for part in contents.parts if _is_hub_id(part.name)]
    base = [part.name for part in hub_parts if part.what == "initialization"]
    if contents.base_model:
        base.insert(0, contents.base_model)
    data = [part.name for part in hub_parts if part.what == DATA]
    return ModelCardData(
        **build_license_metadata(contents.license),
        base_model=base[0] if len(base) == 1 else base or None,
        base_model_relation="adapter" if base and not standalone else None,
        library_name="transformers" if standalone else "specdistill",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", method, "specdistill"],
        datasets=data or None,
        model_name=contents.name,
        eval_results=list(_list_results(contents)),
    )


def format_eval_command(contents: CardContents) -> str:
    """Return the command that measures the published draft with the report's main configuration."""
    # Begin with suite, number of prompts (if not all were measured), tree and engine of the report.
    # SUITE stands for a suite that readers of the card do not have. `eval_keys` are all keys that
    # the recipe may have in its section `eval`.
    report = contents.release.report
    settings = contents.release.report["settings"]
    target = contents.release.made_for
    eval_keys = list_fields(
        list_variants(type(contents.release.recipe).model_fields["eval"].annotation)
    )
    values: dict[str, object] = {
        "eval.suite": report["suite"]["name"] if _is_named_suite(report) else "SUITE"
    }
    if report["results"][0]["num_prompts"] < report["suite"]["num_prompts"]:
        values["eval.num_prompts"] = report["results"][0]["num_prompts"]
    if settings.get("tree"):
        values["eval.tree"] = settings["tree"]
    engine = report.get("engine", {}).get("name", "specdistill")
    # For a server the recipe calls the batch size `concurrency`.
    server_keys = {"batch_size": "concurrency"} if engine != "specdistill" else {}
    if server_keys:
        values["eval.engine"] = engine

    # Add the settings that differ from their defaults: those of every measurement (`SETTINGS`), and
    # those of this draft, such as `lookup_first`, which the report lists under `drafting`.
    draft_settings = settings.get("drafting", {})
    for name in (*SETTINGS, *draft_settings):
        value = draft_settings.get(name, settings.get(name))
        key = server_keys.get(name, name)
        if key in eval_keys and value is not None and value != find_default(eval_keys[key]):
            values[f"eval.{key}"] = value

    # llama.cpp reads target and draft from GGUF files, which fix the data type of the weights. All
    # others load the target in `target.dtype`, whose default is float32.
    if engine == "llama.cpp":
        values |= {f"eval.llama_cpp.{key}": file for key, file in GGUF_FILES.items()}
    elif report["target"].get("dtype", "float32") != "float32":
        values["target.dtype"] = report["target"]["dtype"]
    if target.adapter:
        values["target.adapter"] = target.adapter

    # Write the command, with the target and the draft as a reader names them.
    name = "pico" if target.name_or_path == "pico" else contents.base_model or "TARGET"
    keys = {
        "method": contents.release.method,
        "target": name,
        "draft": f"{contents.repository}@{contents.tag}",
    }
    arguments = {**keys, **values}
    words = [
        shlex.quote(join_lines(f"{key}={format_value(value)}")) for key, value in arguments.items()
    ]
    return " \\\n    ".join(["specdistill eval", *words])


def _list_results(contents: CardContents) -> Iterator[EvalResult]:
    """Yield the report's main metrics, in the form in which the Hub shows results of evaluations.

    Each metric has its value over the whole suite, its confidence interval and the settings of the
    measurement.
    """
    report = contents.release.report
    # The first row of a report's results is the main configuration over all prompts of the suite.
    row = contents.release.report["results"][0]
    setting_names = ("num_speculative_tokens", "temperature", "batch_size", "num_prompts")
    for metric in METRICS:
        if metric in row:
            settings = {name: row[name] for name in setting_names}
            interval = {"ci95": list(row[f"{metric}_ci95"])} if row.get(f"{metric}_ci95") else {}
            yield EvalResult(
                task_type="text-generation",
                task_name="speculative decoding",
                dataset_type=row["suite"],
                dataset_name=f"{row['suite']}, version {row['suite_version']}",
                metric_type=metric,
                metric_name=phrases.METRICS[metric][0],
                metric_value=row[metric],
                metric_args={**settings, "hardware": report["hardware"]["name"], **interval},
                source_name="its report",
                source_url=f"{constants.ENDPOINT}/{contents.repository}/blob/{contents.tag}/report/report.md",
            )


def _format_identity(target: TargetIdentity) -> str:
    """Return the table that identifies the target: name, commit, adapter and hashes."""
    # A local path is shortened to its name, so that no folders of this machine are published. Each
    # hash is one sha256 of the sha256 hashes of several files.
    path = Path(target.name_or_path)
    rows = {
        "name": path.name if path.is_absolute() else target.name_or_path,
        "commit": target.revision,
        "adapter": target.adapter,
        "sha256 of its weights' sha256": target.weights,
        "sha256 of its tokenizer's sha256": target.tokenizer,
    }
    identity_rows = (
        (name, f"`{escape_markdown(value)}`" if "sha256" in name else escape_markdown(value))
        for name, value in rows.items()
        if value
    )
    return format_table(("", ""), identity_rows)


def _is_named_suite(report: phrases.Report) -> bool:
    """Return whether a report's suite ships with the package, so that a command can name it.

    A suite of the user may have the same name, so the versions must be equal, too.
    """
    path = SUITES / f"{report['suite']['name']}.yaml"
    return path.is_file() and str(read_yaml(path)["version"]) == report["suite"]["version"]


def _is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a Hub id, and is no local path."""
    return name.count("/") == 1 and not Path(name).exists()
