"""The model card of a published draft: what it drafts for, how to serve it, what was measured, and what it was made from.

Its metadata is what the Hub searches: `base_model` finds the drafts of a target.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, constants

from specdistill import __version__
from specdistill.engines import ENGINES
from specdistill.errors import one_line
from specdistill.export import measured_lookup, of_lookup
from specdistill.files.documents import read_yaml
from specdistill.hub.evidence import REPORT, Release
from specdistill.hub.licenses import DATA, Licensed, front_matter
from specdistill.methods import METHODS
from specdistill.project import SUITES
from specdistill.recipe.fields import default_of, shown
from specdistill.report import phrases, tables
from specdistill.report.text import cells, measured, plain, table
from specdistill.targets.files import TargetIdentity
from specdistill.training.history import History

TEMPLATE = Path(__file__).with_name("card.md.j2")
METRICS = (
    "mean_acceptance_length",
    "acceptance_rate",
    "speedup",
)  # of a report's row, that a card's metadata has
PICTURE = f"{REPORT}/picture.svg"
GGUF_FILES = {
    "model": "TARGET.gguf",
    "model_draft": "DRAFT.gguf",
}  # names, in commands, of what llama.cpp needs
# Settings of a report that `eval:` has under the same name.
SAMPLING = ("num_speculative_tokens", "temperature", "top_p", "top_k", "max_new_tokens", "seed")
SETTINGS = (*SAMPLING, "batch_size", "compile", "repeats", "warmup")


@dataclass(frozen=True)
class CardContents:
    """What a card is about.

    repository, tag: where it will be. history: of the training; None where it is not known. base_model: the target's Hub id, where it has
    one. parts: what the draft was made from. license: of the draft. overridden: the refusals that `reason` overrode. since: tag of the
    release before, None for a first; changes: what changed since, as Markdown.
    """

    repository: str
    tag: str
    release: Release
    history: History | None
    base_model: str | None
    parts: Sequence[Licensed]
    license: str
    overridden: Sequence[str] = ()
    reason: str | None = None
    since: str | None = None
    changes: str = ""

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]


def model_card(of: CardContents, serving: Iterable[tuple[str, str]]) -> ModelCard:
    """The card of what is published; serving: (engine, commands).

    Everything from outside is escaped; names of repositories and tags are checked by the Hub's own rules before.
    """
    release, report = of.release, of.release.report
    lookup = measured_lookup(report["settings"])
    engines = [
        ENGINES[name] for name in METHODS[release.method].serving() if ENGINES[name].serve_command
    ]
    numbers_of_all = measured({name: part for name, part in report.items() if name != "baseline"})
    card: ModelCard = ModelCard.from_template(
        metadata(of),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        of=of,
        report=report,
        phrases=phrases,
        tables=tables,
        plain=plain,
        endpoint=constants.ENDPOINT,
        overridden=[
            refusal.replace(f"{release.run}/", "") for refusal in of.overridden
        ],  # a folder of one machine
        summary=METHODS[release.method].summary,
        terms=list(dict.fromkeys(part.terms for part in of.parts if part.terms)),
        version=__version__,
        picture=PICTURE,
        headline=cells(tables.whole_suite(report)),
        serving=serving,
        is_named_suite=_is_named_suite(report),
        gguf_files=GGUF_FILES.values(),
        measured=re.sub(
            "^#", "##", numbers_of_all, flags=re.MULTILINE
        ),  # below the heading of a section
        front=of_lookup(engines, lookup, report["settings"]["num_speculative_tokens"])
        if lookup
        else "",
        parts=table(
            ("", "what", "licence"),
            ((part.what, plain(part.name), plain(part.shown)) for part in of.parts),
        ),
        identity=_identity(release.made_for),
        again=measured_again(of),
    )
    return card


def metadata(of: CardContents) -> ModelCardData:
    """What the Hub reads. A head or a layer is of no use without its very target, which of the four relations that the Hub knows only
    `adapter` says; none of them says what a model of its own is to its target, and there the Hub makes its own choice.
    """
    method = of.release.method
    standalone = METHODS[method].standalone
    began = [
        part.name for part in of.parts if part.what == "initialization" and _is_hub_id(part.name)
    ]
    data = [part.name for part in of.parts if part.what == DATA and _is_hub_id(part.name)]
    base = [*filter(None, [of.base_model]), *began]
    return ModelCardData(
        **front_matter(of.license),
        base_model=base[0] if len(base) == 1 else base or None,
        base_model_relation="adapter" if base and not standalone else None,
        library_name="transformers" if standalone else "specdistill",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", method, "specdistill"],
        datasets=data or None,
        model_name=of.name,
        eval_results=list(_results(of)),
    )


def measured_again(of: CardContents) -> str:
    """The command that measures the published draft as the report's main configuration was."""
    report, settings, target = of.release.report, of.release.report["settings"], of.release.made_for
    section: Any = type(of.release.recipe).model_fields["eval"].annotation
    values: dict[str, Any] = {
        "eval.suite": report["suite"]["name"] if _is_named_suite(report) else "SUITE"
    }
    if report["results"][0]["num_prompts"] < report["suite"]["num_prompts"]:
        values["eval.num_prompts"] = report["results"][0]["num_prompts"]
    if settings.get("tree"):
        values["eval.tree"] = settings["tree"]
    engine = report.get("engine", {}).get("name", "specdistill")
    of_server = {"batch_size": "concurrency"} if engine != "specdistill" else {}
    if of_server:
        values["eval.engine"] = engine
    drafting = settings.get("drafting", {})
    for name in (*SETTINGS, *drafting):
        value, key = drafting.get(name, settings.get(name)), of_server.get(name, name)
        if (
            key in section.model_fields
            and value is not None
            and value != default_of(section.model_fields[key])
        ):
            values[f"eval.{key}"] = value
    if engine == "llama.cpp":
        values |= {f"eval.llama_cpp.{key}": file for key, file in GGUF_FILES.items()}
    elif report["target"].get("dtype", "float32") != "float32":
        values["target.dtype"] = report["target"]["dtype"]
    if target.adapter:
        values["target.adapter"] = target.adapter
    name = "pico" if target.name_or_path == "pico" else of.base_model or "TARGET"
    named = {"method": of.release.method, "target": name, "draft": f"{of.repository}@{of.tag}"}
    words = [
        shlex.quote(one_line(f"{key}={shown(value)}")) for key, value in {**named, **values}.items()
    ]
    return " \\\n    ".join(["specdistill eval", *words])


def _results(of: CardContents) -> Iterator[EvalResult]:
    """For the whole suite each metric, with its interval and what it was measured on."""
    report, row = of.release.report, of.release.report["results"][0]
    for metric in METRICS:
        if metric in row:
            settings = {
                key: row[key]
                for key in ("num_speculative_tokens", "temperature", "batch_size", "num_prompts")
            }
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
                source_url=f"{constants.ENDPOINT}/{of.repository}/blob/{of.tag}/report/report.md",
            )


def _identity(target: TargetIdentity) -> str:
    rows = {
        "name": Path(target.name_or_path).name
        if Path(target.name_or_path).is_absolute()
        else target.name_or_path,
        "commit": target.revision,
        "adapter": target.adapter,
        "sha256 of its weights' sha256": target.weights,
        "sha256 of its tokenizer's sha256": target.tokenizer,
    }
    stated = (
        (name, f"`{plain(value)}`" if "sha256" in name else plain(value))
        for name, value in rows.items()
        if value
    )
    return table(("", ""), stated)


def _is_named_suite(report: Mapping[str, Any]) -> bool:
    """Whether the suite is one that ships, which a command names, and no other of that name."""
    path = SUITES / f"{report['suite']['name']}.yaml"
    return path.is_file() and str(read_yaml(path)["version"]) == report["suite"]["version"]


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not Path(name).exists()
