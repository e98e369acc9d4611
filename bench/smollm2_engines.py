"""What `make smollm2` trained, in engines: is as much accepted as in our decoder, and is it faster than the engine without it?

    make smollm2-engines                                         # the drafts that runs/smollm2/comparison.json compares, each with its K
    make smollm2-engines ARGS="drafts=[runs/mine/draft] num_speculative_tokens=[3]"
    make smollm2-engines ARGS="small=true"                       # few prompts of few tokens: its numbers mean nothing

vLLM's server decodes the target's folder in bfloat16, started and measured by `specdistill eval eval.engine=vllm`; llama.cpp decodes the
GGUF file of the package, with its Q4_1 weights, by `llama-speculative-simple`. Our decoder has the same prompts with the target's folder,
and counts by each engine's rounds. Leaves runs/smollm2/engines.json and the table of docs/smollm2.md.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.counting import generate_here, ignore_stop_tokens, total
from bench.drafts import reports, specdistill
from bench.engines import QUIET_VLLM, environment
from bench.llama_cpp import KINDS, WITHOUT_DRAFT, AsLlamaCpp, Completion, complete, convert
from bench.smollm2 import FOLDER, GGUF, PAGE
from specdistill.command import run
from specdistill.errors import UserError
from specdistill.export import export
from specdistill.measurement.hardware import hardware
from specdistill.methods.load import load_proposer, method_of
from specdistill.recipe.fields import Section, option
from specdistill.report.phrases import between, lookup_first, number, signed, times
from specdistill.report.text import plain, table, write_between
from specdistill.statistics.intervals import estimates
from specdistill.suites.suite import Prompt, load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

# With Intel's OpenMP, which vLLM asks for in its log when it drafts on an x86 CPU.
VLLM = f"env LD_PRELOAD={environment('vllm') / 'lib' / 'libiomp5.so'} {environment('vllm') / 'bin' / 'vllm'} serve"
TARGET, SUITE, OUTPUT = FOLDER / "target", FOLDER / "suites" / "smollm2.yaml", FOLDER / "engines"
METRICS = ("mean_acceptance_length", "tokens_per_second", "baseline_tokens_per_second", "speedup")
HEAD = (
    "draft",
    "engine, target",
    "acceptance length there",
    "here",
    "difference",
    "tokens/s plain",
    "with the draft",
    "speedup",
)


class Options(Section):
    drafts: list[str] | None = option(None, "folders of drafts; null: those that runs/smollm2/comparison.json compares")
    num_speculative_tokens: list[int] | None = option(None, "K of each; null: as they were compared")
    num_prompts: int = option(24, "prompts, spread evenly over the suites", ge=3)
    max_new_tokens: int = option(64, "tokens of a completion at most", ge=8)
    gguf: str = option(str(FOLDER / "download" / GGUF), "the target for llama.cpp, named as NAME.TYPE.gguf")
    vllm_options: str = option("--block-size 32", "more options of `vllm serve`; block sizes are multiples of 32 on CPUs")
    small: bool = option(False, "3 prompts of 8 tokens; docs/smollm2.md stays as it is")


@dataclass(frozen=True)
class Draft:
    folder: Path
    method: str
    k: int

    @property
    def name(self) -> str:
        return f"`{self.method}`, K = {self.k}"


def main(options: Options) -> None:
    num_prompts, max_new_tokens = (3, 8) if options.small else (options.num_prompts, options.max_new_tokens)
    drafts = chosen(options)
    os.environ.update(QUIET_VLLM)
    target = FrozenTarget.load(str(TARGET), dtype="bfloat16")
    room = {"max_new_tokens": max_new_tokens + 4 * max(draft.k for draft in drafts), "max_length": target.max_length}
    prompts = tokenize(load_suite(str(SUITE)), target.tokenizer, num_prompts=num_prompts, **room)
    stop_ids = target.eos_token_ids
    ignore_stop_tokens(target)

    rows = []
    for draft in drafts:
        proposer = load_proposer(draft.method, draft.folder, target)
        rows.append(in_vllm(draft, num_prompts, max_new_tokens, options.vllm_options))
        if "refused" not in rows[-1]:
            limits = {"max_new_tokens": max_new_tokens, "num_speculative_tokens": draft.k, "stop_ids": stop_ids}
            counted = generate_here(target, proposer, [prompt.token_ids for prompt in prompts], **limits)
            rows[-1]["here"] = total(counted).mean_acceptance_length

        row, alike = in_llama_cpp(draft, prompts, target, max_new_tokens, Path(options.gguf))
        rows.append(row)
        if alike:
            decoder = AsLlamaCpp(target, proposer)
            here = [decoder.count(prompt.token_ids, max_new_tokens, draft.k, stop_ids) for prompt in alike]
            row["here"] = 1 + sum(each.num_accepted for each in here) / sum(each.num_rounds for each in here)
    (OUTPUT.with_suffix(".json")).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

    shown = "\n\n".join(page(rows, len(prompts), max_new_tokens))
    print(shown, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2-engines", shown)


def chosen(options: Options) -> list[Draft]:
    """The drafts that are given, or those of the comparison. Raises UserError where there are none."""
    if options.drafts is None:
        if not (path := FOLDER / "comparison.json").is_file():
            expected = "folders of drafts, or `make smollm2` first"
            raise UserError("drafts", got=f"null, and no {path}", expected=expected)
        compared = reports(json.loads(path.read_text(encoding="utf-8"))).values()
        given = {
            each["draft"]["model"]: each["settings"]["num_speculative_tokens"]
            for each in compared
            if each["draft"]["model"] and not lookup_first(each["settings"])
        }
        folders, ks = list(given), options.num_speculative_tokens or list(given.values())
    else:
        folders, ks = options.drafts, options.num_speculative_tokens or []
    if len(folders) != len(ks):
        raise UserError("num_speculative_tokens", got=f"{ks} for {len(folders)} drafts", expected="K of each")
    return [Draft(Path(folder), method_of(Path(folder), key="drafts"), k) for folder, k in zip(folders, ks, strict=True)]


def in_vllm(draft: Draft, num_prompts: int, max_new_tokens: int, options: str) -> dict[str, Any]:
    """The row of its report, and the engine; or why vLLM does not load the draft."""
    folder = OUTPUT / draft.folder.parent.name / "vllm"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            export(draft.folder, "vllm", Path(scratch) / "draft", TargetFiles.of(str(TARGET)), num_speculative_tokens=draft.k)
        except UserError as error:
            if error.key != "engine":
                raise
            return {"draft": draft.name, "engine": "vLLM", "refused": str(error)}
    specdistill(
        "eval",
        f"target={TARGET}",
        "target.dtype=bfloat16",
        f"method={draft.method}",
        f"draft={draft.folder}",
        f"suite={SUITE}",
        "gate=server-bfloat16",
        f"output_dir={folder}",
        "eval.engine=vllm",
        f"eval.engine_command={VLLM} {options}",
        f"eval.num_speculative_tokens={draft.k}",
        f"eval.num_prompts={num_prompts}",
        f"eval.max_new_tokens={max_new_tokens}",
        "eval.repeats=1",
        failing=True,
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {"draft": draft.name, "engine": f"vLLM {report['engine']['version']}, bfloat16", **report["results"][0]}


def in_llama_cpp(
    draft: Draft, prompts: Sequence[Prompt], target: FrozenTarget, max_new_tokens: int, file: Path
) -> tuple[dict[str, Any], list[Prompt]]:
    """The same of llama.cpp with the target in a GGUF file, and the prompts that it splits into as many tokens as the target's tokenizer
    does; the others are filtered.
    """
    row = {"draft": draft.name, "engine": f"llama.cpp, {file.stem.rpartition('.')[2]}"}
    try:
        gguf = as_gguf(draft, OUTPUT / draft.folder.parent.name / "llama.cpp")
    except UserError as error:
        if error.key != "engine":
            raise
        return {**row, "refused": str(error)}, []
    settings = {
        "": ("-md", gguf, "--spec-type", KINDS[draft.method], "--spec-draft-n-max", str(draft.k)),
        "baseline_": WITHOUT_DRAFT,
    }
    limits = {"max_new_tokens": max_new_tokens, "num_threads": torch.get_num_threads()}
    found: dict[str, list[Completion]] = {prefix: [] for prefix in settings}
    alike = []
    for prompt in prompts:
        text = gguf.with_name("prompt.txt")
        text.write_text(f"{target.tokenizer.decode(prompt.token_ids)}\n", encoding="utf-8")
        completions = {prefix: complete(file, text, *options, **limits) for prefix, options in settings.items()}
        if completions[""].num_prompt_tokens == len(prompt.token_ids):
            alike.append(prompt)
            for prefix, completion in completions.items():
                found[prefix].append(completion)
    sums = {
        f"{prefix}{name}": [getattr(each, name) for each in completions]
        for prefix, completions in found.items()
        for name in ("num_tokens", "seconds")
    }
    sums["num_drafts"] = [each.counts.num_rounds for each in found[""]]
    sums["num_accepted_tokens"] = [each.counts.num_accepted for each in found[""]]
    numbers = estimates(METRICS, {name: np.array(values, dtype=np.float64) for name, values in sums.items()})
    return {**row, "num_filtered": len(prompts) - len(alike), **numbers}, alike


def as_gguf(draft: Draft, folder: Path) -> Path:
    """The draft as llama.cpp loads it, in float16. Raises UserError for what llama.cpp cannot express."""
    shutil.rmtree(folder, ignore_errors=True)
    export(draft.folder, "gguf", folder, TargetFiles.of(str(TARGET)), num_speculative_tokens=draft.k)
    if draft.method == "eagle3":
        return convert(folder, folder / "draft.gguf", "--target-model-dir", TARGET, "--outtype", "f16")
    return folder / "draft-f16.gguf"


def page(rows: Sequence[dict[str, Any]], num_prompts: int, max_new_tokens: int) -> Iterator[str]:
    """The section's text: how it was measured, the table, and what is not in it."""
    yield (
        f"Measured on {hardware(torch.device('cpu'))['name']}, {torch.get_num_threads()} threads, by `make smollm2-engines`: "
        f"{num_prompts} prompts of MT-bench, GSM8K and HumanEval, up to {max_new_tokens} tokens each, greedy, one prompt at a time."
    )
    yield table(HEAD, (_line(row) for row in rows))
    for row in rows:
        if row.get("num_filtered"):
            filtered = (
                f"{row['num_filtered']} of {num_prompts} prompts, which its tokenizer splits differently from the target's own"
            )
            yield f"{row['draft']} in {row['engine']} is without {filtered}."
        if "refused" in row:
            yield f"{row['draft']} is not in {row['engine']}: {plain(row['refused'])}."


def _line(row: dict[str, Any]) -> list[str]:
    length, here = row.get("mean_acceptance_length"), row.get("here")
    return [
        row["draft"],
        row["engine"],
        f"{number(length)}{between(row, 'mean_acceptance_length')}",
        number(here),
        signed(length / here - 1) if length and here else "–",
        number(row.get("baseline_tokens_per_second"), 1),
        number(row.get("tokens_per_second"), 1),
        f"{times(row.get('speedup'))}{between(row, 'speedup')}",
    ]


if __name__ == "__main__":
    sys.exit(run(main, Options))
