"""Runs as training and measuring leave them.

They have a tiny target and a draft model that needs no training.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from specdistill.evaluation.gate.decide import Evidence, judge
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.build import (
    build_context_rows,
    build_result_rows,
    select_headline,
)
from specdistill.evaluation.report.files import compute_digest, read_report, write_report
from specdistill.evaluation.statistics.records import HFGenerate, PromptRecord, Timing
from specdistill.evaluation.suites.suite import load_suite
from specdistill.hub.evidence import PROVENANCE, RECIPE
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import save_draft
from specdistill.recipe.load import format_recipe, load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right
from tests.scripts import evaluate
from tests.tiny import tiny_target_model, tiny_tokenizer

SURER = 3.0  # times its logits: so few outcomes are likely that a few draws test sampling
PLAIN_STEP, ROUND = 2.5e-3, 3.5e-3  # seconds


def finished_run(folder: Path, *more: str) -> Path:
    """Measure a run for real and return its folder, with its target and suite next to it.

    It passes the default gate. more: keys of its recipe. Its times are set, as a tiny target gains
    nothing by speculation.
    """
    model = tiny_target_model()
    model.lm_head.weight.data *= SURER
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    rows = [
        {"id": f"{kind}{n}", "category": kind, "prompt": f"{kind} {n} {kind} {n} "}
        for kind in "ab"
        for n in range(6)
    ]
    (folder / "suite.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    run = folder / "run"
    keys = [
        "method=draft_model",
        f"target.model={folder / 'target'}",
        f"train.output_dir={run}",
        f"eval.suite={folder / 'suite.jsonl'}",
        "eval.max_new_tokens=16",
        "eval.repeats=1",
        "eval.warmup=0",
        "eval.sampling_draws=60",
        *more,
    ]
    recipe = load_recipe(Recipe, keys)
    target = FrozenTarget.load(**vars(recipe.target))
    save_draft(METHODS["draft_model"].load(), target, half_right(target), run / "draft")
    (run / "run").mkdir()
    (run / RECIPE).write_text(format_recipe(recipe), encoding="utf-8")
    sha256 = hashlib.sha256((run / RECIPE).read_bytes()).hexdigest()
    provenance = {"created": "2026-11-23T04:00:00+00:00", "recipe": sha256}
    (run / PROVENANCE).write_text(json.dumps(provenance), encoding="utf-8")
    evaluate(f"recipe={run / RECIPE}")
    remake(run, timed)
    return run


def again(run: Path, folder: Path, changes: Mapping[str, str], *, scale: float = 1.001) -> Path:
    """Measure another run for real.

    It is a run's copy with other weights and these lines of its recipe changed.
    """
    shutil.copytree(run, folder)
    weights = load_file(folder / "draft" / "model.safetensors")
    scaled = {name: tensor * scale for name, tensor in weights.items()}
    save_file(scaled, folder / "draft" / "model.safetensors", {"format": "pt"})
    edit_recipe(folder, changes)
    keys = [
        f"recipe={folder / RECIPE}",
        f"draft={folder / 'draft'}",
        f"output_dir={folder / 'report'}",
    ]
    evaluate(*keys)
    remake(folder, timed)
    return folder


def edit_recipe(run: Path, changes: Mapping[str, str], *, with_hash: bool = True) -> None:
    """Change lines of a run's recipe, and the hash of it that was kept when it was trained."""
    text = (run / RECIPE).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    (run / RECIPE).write_text(text, encoding="utf-8")
    if with_hash:
        provenance = json.loads((run / PROVENANCE).read_text(encoding="utf-8"))
        provenance["recipe"] = hashlib.sha256(text.encode()).hexdigest()
        (run / PROVENANCE).write_text(json.dumps(provenance), encoding="utf-8")


def remake(
    run: Path, change: Callable[[PromptRecord], PromptRecord], report: Path | None = None
) -> None:
    """Replace a report of a run, its own or another, by that of changed records.

    The new report is whole in itself, as if the records had been measured so.
    """
    folder = report or run / "report"
    stated, records = read_report(folder)
    write(run, stated, [change(record) for record in records], folder)


def write(
    run: Path, report: dict[str, Any], records: Sequence[PromptRecord], folder: Path | None = None
) -> None:
    """Write a report that is whole in itself.

    Its numbers are those of its records; its digest and its verdict are its own.
    """
    recipe = load_recipe(Recipe, [f"recipe={run / RECIPE}"])
    rows = build_result_rows(
        records,
        load_suite(recipe.eval.suite, recipe.target.model),
        records[0].configuration,
        seed=report["settings"]["seed"],
    )
    report = {
        **report,
        "results": rows,
        "headline": select_headline(rows, records),
        "context": build_context_rows(records),
    }
    report["digest"] = compute_digest(report, records)
    write_report(
        folder or run / "report", judge(load_gate(recipe.gate), Evidence(report, records)), records
    )


def slower(record: PromptRecord, factor: float = 3.0) -> PromptRecord:
    """Return the record as if drafting cost more."""
    record = timed(record)
    return replace(
        record, speculative=replace(record.speculative, seconds=factor * record.speculative.seconds)
    )


def timed(record: PromptRecord) -> PromptRecord:
    """Return the record with times by which a round takes somewhat longer than a step."""
    spec, plain = record.speculative, record.baseline
    assert plain and plain.num_rounds is not None and spec.num_rounds is not None
    rounds, steps = spec.num_rounds * ROUND, plain.num_rounds * PLAIN_STEP
    return replace(
        record,
        speculative=Timing(
            spec.num_tokens,
            spec.num_rounds,
            PLAIN_STEP + rounds,
            PLAIN_STEP,
            rounds * 0.1,
            rounds * 0.9,
        ),
        baseline=Timing(
            plain.num_tokens, plain.num_rounds, PLAIN_STEP + steps, PLAIN_STEP, 0.0, steps
        ),
        hf_generate=HFGenerate(plain.num_tokens, (PLAIN_STEP + steps) * 1.1),
    )


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(
        json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8"
    )


def edit_report(run: Path, *place: str | int, to: Any) -> None:
    def change(report: Any) -> Any:
        part = report
        for name in place[:-1]:
            part = part[name]
        part[place[-1]] = to
        return report

    edit(run / "report/report.json", change)


def scale_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor * 1.01 for name, tensor in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
