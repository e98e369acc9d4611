"""Whether the report of a finished run is evidence for exactly the weights beside it.

A run's folder holds the draft, the record of its training and the report of its measurement: files that anybody can edit, and that can come
from different runs. So nothing that a report says of itself is taken for granted. Its draft and target are told by the hashes of their
files, its settings by the recipe, its numbers are computed again from its records, the records are held against the suite, the tokenizer
and a few prompts that are decoded again, and the gate is decided again: by the rules that the recipe names, those that the report was
measured under, and those that every release must pass.

What speaks against a release is a refusal. All of them are collected, so that `force` can list what it overrides. One thing is beyond
them: who measures on a machine of their own can make this very code claim times that never passed.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdistill import __version__
from specdistill.errors import ResourceError, UserError
from specdistill.gate.decide import Evidence, changes, decide, judge
from specdistill.gate.rules import Rule, load_gate, read_rule
from specdistill.measurement.configurations import Settings
from specdistill.measurement.hardware import fit_threads
from specdistill.measurement.measure import spell
from specdistill.measurement.quality import add_quality
from specdistill.measurement.spot_check import spot_check
from specdistill.methods.load import draft_files, draft_hash, load_proposer, method_of
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import check_target, recorded_target
from specdistill.project import git_revision
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import TargetConfig
from specdistill.report.files import digest, read_report
from specdistill.report.phrases import looks_up_first
from specdistill.report.recomputed import contradictions, defects, recomputed
from specdistill.statistics.records import PromptRecord
from specdistill.suites.suite import Prompt, Suite, load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.identity import SHOWN, content_hash
from specdistill.targets.loading import read_tokenizer

DRAFT, RECIPE, PROVENANCE, REPORT = "draft", "run/recipe.yaml", "run/provenance.json", "report"
FINISHED = "the folder of a run that was trained and measured: draft/, run/ and report/"
EVERY_RELEASE = {"specdistill": "default"}  # by what measured it, the gate that any release passes; of engines `server`
SPOT_CHECK = 8  # prompts that are decoded again
NOT_COMPARED = "not compared"  # with the last release
NUM_SHOWN = 3  # of several like things that are wrong


@dataclass(frozen=True)
class Refusal:
    """Why a run is not released. name: the kind, as `other weights`; why: what was found and what was expected, in one line."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Release:
    """A run, and what there is to publish of it.

    draft: its files, which are published as they are. report, records: judged again; to be written by `write_report`, so that its pages
    are rendered from them. provenance: of the training. refusals: none for a release; with `force` they are listed on the card.
    notes: sentences that a reader should know, and no reason to refuse. content: hash of the draft's files, recipe and provenance.
    """

    run: Path
    recipe: Recipe
    provenance: dict[str, Any]
    draft: tuple[Path, ...]
    report: dict[str, Any]
    records: list[PromptRecord]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    content: str

    @property
    def recipe_file(self) -> Path:
        return self.run / RECIPE

    @property
    def provenance_file(self) -> Path:
        return self.run / PROVENANCE


def check_finished(run: Path) -> None:
    """Raises UserError for a folder that is no finished run."""
    for part in (DRAFT, RECIPE, PROVENANCE, REPORT):
        if not (run / part).exists():
            raise UserError("run", got=f"{run}, which has no {part}", expected=FINISHED)


def check_evidence(
    run: Path,
    *,
    baseline: Evidence | None = None,
    first_release: bool = False,
    suite: str | None = None,
    num_speculative_tokens: int | None = None,
    num_prompts: int = SPOT_CHECK,
) -> Release:
    """The release of a run's folder, with all that speaks against it.

    baseline: the repository's last release (`releases.last_release`). first_release: there is none, and regressions are not asked.
    suite: what was measured, where the recipe names no suite. num_speculative_tokens: K that was chosen once the draft was trained; None:
    the recipe's. num_prompts: to decode again; 0 is a refusal.

    Raises UserError for a folder that is no finished run, and for a report or a recipe that cannot be read.
    """
    check_finished(run)
    draft = tuple(draft_files(run / DRAFT))
    content = content_hash([*draft, run / RECIPE, run / PROVENANCE])
    recipe, provenance = load_recipe(Recipe, [f"recipe={run / RECIPE}"]), _read_provenance(run / PROVENANCE)
    if suite and recipe.eval.suite not in (None, suite):
        raise UserError("suite", got=suite, expected=f"no such key: the run's recipe names {recipe.eval.suite}")
    if num_speculative_tokens:
        chosen = recipe.eval.model_copy(update={"num_speculative_tokens": num_speculative_tokens})
        recipe = recipe.model_copy(update={"eval": chosen})
    report, records = read_report(run / REPORT, "run")
    if not records:
        raise UserError("run", got=f"{run / REPORT}, whose samples.jsonl holds no record", expected=FINISHED)
    rules = rules_of(recipe, report)
    # What follows is decided by the records: a number that was edited is named, and used nowhere.
    computed = recomputed(report, records)
    measured = Evidence({**report, **computed}, records)

    refusals = [
        *_of_draft(run, report, recipe),
        *_of_recipe(run, provenance),
        *_of_report(report, records, computed),
        *_of_settings(measured, recipe),
    ]
    notes = list(_notes(report, provenance))
    try:
        decoding, decoded = _decoded(run, measured, recipe, rules, suite, num_prompts)
    except (UserError, ResourceError) as error:  # nothing can be decoded, and so nothing vouches for the records
        decoding, decoded = [Refusal("not decoded again", str(error))], []
    try:
        judged = judge(rules, measured, baseline, first_release=first_release)
        decided = [*_of_gate(judged, has_baseline=baseline is not None)]
    except UserError as error:  # the two measured different things
        assert baseline is not None
        judged = {**judge(rules, measured), "baseline": changes(measured, baseline)}  # which says why there are none
        others = [rule for rule in rules if rule.requirement != "max_regression"]
        decided = [Refusal(NOT_COMPARED, str(error)), *_of_gate(judge(others, measured))]
    refusals += [*decoding, *decided]
    return Release(run, recipe, provenance, draft, judged, records, tuple(refusals), tuple(notes + decoded), content)


def rules_of(recipe: Recipe, report: Mapping[str, Any]) -> list[Rule]:
    """What is asked of a release: by the recipe's gate, by the rules that the report was measured under, and of every release.

    So a gate that was changed once its verdict was known, or that never asked much, opens no way around the others.
    """
    names = [recipe.gate, EVERY_RELEASE.get(report.get("engine", {}).get("name", "specdistill"), "server")]
    rules = [rule for name in names for rule in load_gate(name)]
    for stated in report["gate"]["rules"]:
        if stated["metric"] != "incomplete":  # which is not asked but found
            asked = {name: stated[name] for name in ("metric", "scope", "confidence", "severity")}
            rules.append(read_rule("a rule of the run's report", {**asked, **stated["requirement"]}))
    return [rule for index, rule in enumerate(rules) if rule not in rules[:index]]


def _read_provenance(path: Path) -> dict[str, Any]:
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("run", got=f"{path} ({error})", expected=FINISHED) from error
    if not isinstance(provenance, dict):
        raise UserError("run", got=f"{path}, which holds no keys", expected=FINISHED)
    return provenance


def _of_draft(run: Path, report: Mapping[str, Any], recipe: Recipe) -> Iterator[Refusal]:
    measured, found = report["draft"].get("weights"), draft_hash(run / DRAFT)
    if measured != found:
        said = f"a draft with hash {measured[:SHOWN]}" if measured else "a draft whose hash it does not state"
        yield Refusal("other weights", f"the report measured {said}, and {run / DRAFT} has {found[:SHOWN]}: measure this one")
    everything = {path for path in (run / DRAFT).rglob("*") if not path.is_dir()}
    if added := sorted(str(path.relative_to(run / DRAFT)) for path in everything - set(draft_files(run / DRAFT))):
        yield Refusal("added files", f"{run / DRAFT} holds {_some(added)}, which no measurement reads and nothing publishes")
    methods = {"recipe": recipe.method, "report": report["draft"]["method"], "draft": method_of(run / DRAFT, key="run")}
    if len(set(methods.values())) > 1:
        yield Refusal("another method", ", ".join(f"the {what} is of {method}" for what, method in methods.items()))


def _of_recipe(run: Path, provenance: Mapping[str, Any]) -> Iterator[Refusal]:
    stated = provenance.get("recipe")
    if stated not in (None, hashlib.sha256((run / RECIPE).read_bytes()).hexdigest()):
        yield Refusal("edited recipe", f"{run / RECIPE} is not the recipe that {PROVENANCE} was written beside")


def _of_report(report: Mapping[str, Any], records: Sequence[PromptRecord], computed: Mapping[str, Any]) -> Iterator[Refusal]:
    if report.get("digest") != digest(report, records):
        yield Refusal("edited report", "report.json and samples.jsonl are not as they were measured: measure again")
    if found := [*contradictions(report, computed)]:
        yield Refusal("edited report", _some(found, "; "))
    if found := [*defects(records, report["settings"])]:
        yield Refusal("edited samples", _some(found, "; "))
    lossless = report["lossless"]
    divergences, ties = (lossless.get(name) for name in ("divergences", "near_ties"))
    expected = {
        "greedy_identical": divergences == 0,
        "first_divergence": None if divergences == 0 else lossless.get("first_divergence") or "one",
        **({"unexplained_divergences": divergences - ties} if None not in (divergences, ties) else {}),
    }
    wrong = [name for name, value in expected.items() if name in lossless and lossless[name] != value]
    if divergences is not None and wrong:
        yield Refusal("edited report", f"lossless.{wrong[0]} is {lossless[wrong[0]]} with {divergences} divergences")


def _of_settings(measured: Evidence, recipe: Recipe) -> Iterator[Refusal]:
    """Whether what was measured is what the recipe's section `eval` asks."""
    report, config, asked = measured.report, recipe.eval, Settings.of(recipe.eval)
    load = asked.batch_size if config.engine == "specdistill" else config.concurrency
    expected: dict[str, Any] = {
        "num_speculative_tokens": asked.num_speculative_tokens,
        **vars(asked.sampling),
        "tree": asked.tree and json.loads(json.dumps(asked.tree.settings)),
        "batch_size": load,
        **{name: getattr(asked, name) for name in ("max_new_tokens", "compile", "seed")},
        "target_precision": config.target_precision,
        "interim_analyses": bool(config.target_precision or config.max_minutes),
    }
    stated = {name: report["settings"].get(name) for name in expected}
    expected |= {"engine": config.engine, "target.dtype": recipe.target.dtype}
    stated |= {"engine": report.get("engine", {}).get("name", "specdistill"), "target.dtype": report["target"].get("dtype")}
    for name, value in expected.items():
        if (stated[name] or None) != (value or None):  # a server leaves out what it does not have
            yield Refusal("another measurement", f"{name} {stated[name]}, and the recipe asks for {value}")
    configuration = replace(asked, batch_size=load).configuration
    if measured.records[0].configuration != configuration:
        yield Refusal("another measurement", f"its first records are of {measured.records[0].configuration}")
    if looks_up_first(report):
        yield Refusal("another measurement", "a look-up stood in front of the draft: measure the draft on its own")
    if report["settings"]["repeats"] < asked.repeats:
        repeats = f"{report['settings']['repeats']} repetitions"
        yield Refusal("another measurement", f"{repeats}, and the recipe asks for {asked.repeats}")


def _decoded(
    run: Path, measured: Evidence, recipe: Recipe, rules: Sequence[Rule], suite: str | None, num_prompts: int
) -> tuple[list[Refusal], list[str]]:
    """What target, tokenizer and suite say of the records, and the notes of what was decoded again.

    Raises UserError and ResourceError where one of them cannot be read.
    """
    report, records, config = measured.report, measured.records, _target(run, recipe)
    files = TargetFiles.of(config.model, config.revision, config.adapter, config.trust_remote_code)
    refusals = [*_other_target(run, report, recipe, files)]
    tokenizer, longest = read_tokenizer(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    asked = load_suite(recipe.eval.suite or suite, config.model)
    room = {"max_new_tokens": recipe.eval.max_new_tokens, "max_length": longest}
    every = {prompt.id: prompt for prompt in tokenize(asked, tokenizer, **room)}
    chosen = tokenize(asked, tokenizer, num_prompts=recipe.eval.num_prompts, **room)
    main = [record for record in records if record.configuration == records[0].configuration]
    if other := [*_other_prompts(report, main, asked, every, chosen, recipe)]:
        return [*refusals, *other], []
    refusals += _other_texts(measured, main, every, asked, tokenizer, recipe)
    if num_prompts < 1:
        return [*refusals, Refusal("not decoded again", "no prompt was decoded again, as was asked")], []

    target = FrozenTarget.load(**vars(config))
    fit_threads(target)
    proposer = load_proposer(recipe.method, run / DRAFT, target, key="run", **recipe.proposer_options())
    prompts, settings = [every[record.id] for record in main], Settings.of(recipe.eval)
    check = spot_check(target, proposer, prompts, settings, report, main, num_prompts=num_prompts)
    refusals += [Refusal("not reproduced", difference) for difference in check.differences]
    of_lossless = [rule for rule in rules if rule.metric.startswith("lossless.")]
    again = decide(of_lossless, Evidence({**report, "lossless": check.lossless}, main))
    refusals += [Refusal("not reproduced", f"decoded again, {refusal.why}") for refusal in _of_gate({"gate": again})]
    how = "token for token as recorded" if check.is_exact else "to the recorded acceptance length, on another machine"
    return refusals, [] if refusals else [f"{len(check.prompts)} prompts were decoded again with these weights, {how}."]


def _target(run: Path, recipe: Recipe) -> TargetConfig:
    """The recipe's target as it is measured; of a Hub id the commit that the draft was made for, unless the recipe names one."""
    made_for, config = recorded_target(run / DRAFT, "run"), recipe.target
    revision = config.revision or (made_for.revision if made_for and not Path(config.model).is_dir() else None)
    return config.model_copy(update={"revision": revision})


def _other_target(run: Path, report: Mapping[str, Any], recipe: Recipe, files: TargetFiles) -> Iterator[Refusal]:
    measured = report["target"].get("weights")
    if measured != files.identity.weights:
        said = f"one with weights {measured[:SHOWN]}" if measured else "one whose weights it does not state"
        yield Refusal("another target", f"the report measured {said}, and the recipe's is {files.identity}")
    try:
        check_target(run / DRAFT, files, "run", **recipe.proposer_options())
    except UserError as error:
        yield Refusal("another target", str(error))


def _other_prompts(
    report: Mapping[str, Any],
    main: Sequence[PromptRecord],
    asked: Suite,
    every: Mapping[str, Prompt],
    chosen: Sequence[Prompt],
    recipe: Recipe,
) -> Iterator[Refusal]:
    """Whether a report is of the suite that was asked for, and of as many of its prompts."""
    if (report["suite"]["name"], report["suite"]["sha256"]) != (asked.name, asked.sha256):
        suites = (
            f"{report['suite']['name']} ({report['suite']['sha256'][:SHOWN]}), expected {asked.name} ({asked.sha256[:SHOWN]})"
        )
        yield Refusal("another measurement", f"its suite is {suites}")
        return
    ids = {record.id for record in main}
    if foreign := sorted(ids - every.keys()):
        yield Refusal("edited samples", f"{asked.name} has no {_some(foreign)}")
    missing = sorted({prompt.id for prompt in chosen} - ids)
    if missing and recipe.eval.target_precision is None and not report.get("incomplete"):
        yield Refusal("another measurement", f"{len(missing)} prompts of {asked.name} are missing ({_some(missing)})")


def _other_texts(
    measured: Evidence,
    main: Sequence[PromptRecord],
    every: Mapping[str, Prompt],
    asked: Suite,
    tokenizer: Any,
    recipe: Recipe,
) -> Iterator[Refusal]:
    """Whether prompts are the suite's, completions what their tokens spell, and answers worth what the report says."""
    found = []
    for record in main:
        prompt, context = (
            every[record.id],
            [*every[record.id].token_ids, *([] if record.first_token is None else [record.first_token])],
        )
        said = record.prompt, record.num_prompt_tokens, record.category
        if said != (prompt.text, len(prompt.token_ids), prompt.category):
            found.append(f"the prompt of {record.id} is not the suite's")
        if record.token_ids and record.text != tokenizer.decode(record.token_ids, skip_special_tokens=False):
            found.append(f"the text of {record.id} is not that of its tokens")
        for entry in record.rounds:
            texts = tuple(spell(tokenizer, context, tokens) for tokens in (entry.drafted, entry.emitted))
            if texts != (entry.drafted_text, entry.emitted_text):
                found.append(f"the text of a round of {record.id} is not that of its tokens")
                break
            context += entry.emitted
    if found:
        yield Refusal("edited samples", _some(found, "; "))
    answered: dict[str, Any] = {**measured.report, "findings": [], "not_measured": {}}
    add_quality(answered, main, asked, special_tokens=tokenizer.all_special_tokens, run_code=recipe.eval.run_code)
    stated = measured.report.get("quality", {})
    compared = (stated.keys() | answered["quality"].keys()) - (set() if recipe.eval.run_code else {"pass_rate"})
    if wrong := sorted(name for name in compared if stated.get(name) != answered["quality"].get(name)):
        yield Refusal("edited report", f"quality.{wrong[0]} is not what the answers score")


def _of_gate(report: Mapping[str, Any], *, has_baseline: bool = False) -> Iterator[Refusal]:
    for rule in report["gate"]["rules"]:
        if rule["verdict"] != "passed" and rule["severity"] != "warn":
            name = rule["metric"] if rule["metric"] == "incomplete" else f"gate {rule['verdict']}"
            if has_baseline and "max_regression" in rule["requirement"] and rule["value"] is None:
                name = NOT_COMPARED  # as on another machine: nobody has measured both alike
            yield Refusal(name, f"{rule['metric']}: {rule['reason']}")


def _notes(report: Mapping[str, Any], provenance: Mapping[str, Any]) -> Iterator[str]:
    by, here = (report["specdistill_version"], report.get("git_revision")), (__version__, git_revision())
    if (by[1] or "").endswith("-dirty"):
        yield f"It was measured with changes to specdistill that were not committed ({by[1]})."
    if by != here:
        shown = (f"{version} ({revision or 'no git checkout'})" for version, revision in (by, here))
        yield "It was measured by specdistill {} and judged by {}.".format(*shown)
    if "recipe" not in provenance:
        yield "An earlier version trained it, which kept no hash of its recipe."


def _some(found: Sequence[str], separator: str = ", ") -> str:
    return separator.join([*found[:NUM_SHOWN], *([f"and {len(found) - NUM_SHOWN} more"] if len(found) > NUM_SHOWN else [])])
