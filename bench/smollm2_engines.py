"""What `make smollm2` trained, in engines: is as much accepted as in our decoder, and is it faster than the engine without it?

    make smollm2-engines                                         # the chains that runs/smollm2/comparison.json compares, each with its K
    make smollm2-engines ARGS="drafts=[runs/mine/draft] num_speculative_tokens=[3]"
    make smollm2-engines ARGS="small=true"                       # few prompts of few tokens: its numbers mean nothing

`specdistill eval` starts vLLM with the target's folder in bfloat16, and llama.cpp's server with the GGUF file of the package, which holds
the same weights in Q4_1. Our decoder has the same prompts with the target's folder, and counts by each engine's rounds. Leaves
runs/smollm2/engines.json and the table of docs/smollm2.md.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.counting import generate_here, ignore_stop_tokens, total
from bench.drafts import reports, specdistill
from bench.engines import QUIET_VLLM, SERVER, convert, environment, with_plugin
from bench.pages import write_between
from bench.smollm2 import FOLDER, GGUF, PAGE
from specdistill.command import run
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.errors import UserError
from specdistill.export import export
from specdistill.measurement.hardware import hardware
from specdistill.methods.load import load_proposer, method_of
from specdistill.methods.ngram.config import NgramConfig
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.report.phrases import between, number, signed, times
from specdistill.report.text import plain, table
from specdistill.suites.suite import Prompt, load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

TARGET, SUITE, OUTPUT = FOLDER / "target", FOLDER / "suites" / "smollm2.yaml", FOLDER / "engines"
# With our plugin, and Intel's OpenMP, which vLLM asks for in its log when it drafts on an x86 CPU.
OPENMP, PROGRAM = environment("vllm") / "lib" / "libiomp5.so", environment("vllm") / "bin" / "vllm"
COMPARED = (
    3  # tokens that llama.cpp's lookup compares, neither more nor fewer; as many have to follow
)
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
    drafts: list[str] | None = option(
        None, "folders of drafts; null: what runs/smollm2/comparison.json compares"
    )
    num_speculative_tokens: list[int] | None = option(
        None, "K of each; null: as they were compared"
    )
    num_prompts: int = option(24, "prompts, spread evenly over the suites", ge=3)
    max_new_tokens: int = option(64, "tokens of a completion at most", ge=8)
    gguf: str = option(
        str(FOLDER / "download" / GGUF), "the target for llama.cpp, named as NAME.TYPE.gguf"
    )
    vllm_options: str = option(
        "--block-size 32", "more options of `vllm serve`; block sizes are multiples of 32 on CPUs"
    )
    small: bool = option(False, "3 prompts of 8 tokens; docs/smollm2.md stays as it is")


@dataclass(frozen=True)
class Draft:
    """lookup: what stands in front of it."""

    folder: Path
    method: str
    k: int
    lookup: LookupFirstConfig | None = None

    @property
    def name(self) -> str:
        front = (
            f", {self.lookup.draft_tokens} behind n-gram lookup of {self.lookup.min} to {self.lookup.max}"
            if self.lookup
            else ""
        )
        return f"`{self.method}`, K = {self.k}{front}"

    @property
    def of_llama_cpp(self) -> "Draft":
        """With the lookup that its server has."""
        return replace(
            self,
            lookup=self.lookup
            and self.lookup.model_copy(update={"min": COMPARED, "max": COMPARED}),
        )


def main(options: Options) -> None:
    num_prompts, max_new_tokens = (
        (3, 8) if options.small else (options.num_prompts, options.max_new_tokens)
    )
    drafts = chosen(options)
    os.environ.update(QUIET_VLLM)
    vllm = f"env LD_PRELOAD={OPENMP} PYTHONPATH={with_plugin((OUTPUT / 'site').absolute())} {PROGRAM} serve {options.vllm_options}"
    target, unstopped = (FrozenTarget.load(str(TARGET), dtype="bfloat16") for _ in range(2))
    ignore_stop_tokens(unstopped)
    room = {
        "max_new_tokens": max_new_tokens + 4 * max(draft.k for draft in drafts),
        "max_length": target.max_length,
    }
    prompts = tokenize(load_suite(str(SUITE)), target.tokenizer, num_prompts=num_prompts, **room)

    rows = []
    for draft in drafts:
        row = measured(draft, "vllm", num_prompts, max_new_tokens, [f"eval.engine_command={vllm}"])
        rows.append(
            {
                **row,
                "here": as_vllm(draft, unstopped, prompts, max_new_tokens, target.eos_token_ids),
            }
        )
        there = draft.of_llama_cpp
        try:
            file = as_gguf(there, OUTPUT / draft.folder.parent.name / "gguf")
        except UserError as error:
            if error.key != "engine":
                raise
            rows.append({"draft": there.name, "engine": "llama.cpp", "refused": str(error)})
            continue
        own = [f"eval.engine_command={SERVER}", f"eval.llama_cpp.model={options.gguf}"]
        own += [f"eval.llama_cpp.model_draft={file}"]
        own += [
            f"eval.llama_cpp.{name}={torch.get_num_threads()}"
            for name in ("threads", "spec_draft_threads")
        ]
        row = measured(there, "llama.cpp", num_prompts, max_new_tokens, own)
        rows.append({**row, "here": as_llama_cpp(there, target, prompts, max_new_tokens)})
    (OUTPUT.with_suffix(".json")).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

    shown = "\n\n".join(page(rows, len(prompts), max_new_tokens))
    print(shown, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2-engines", shown)


def chosen(options: Options) -> list[Draft]:
    """The drafts that are given, or what the comparison has: each alone, and those behind a lookup that draft a chain there.

    Raises UserError where there are none.
    """
    if options.drafts is None:
        if not (path := FOLDER / "comparison.json").is_file():
            expected = "folders of drafts, or `make smollm2` first"
            raise UserError("drafts", got=f"null, and no {path}", expected=expected)
        compared = list(reports(json.loads(path.read_text(encoding="utf-8"))).values())
        fronts = [each["settings"].get("drafting", {}).get("lookup_first") for each in compared]
        shown = [
            (
                each["draft"]["model"],
                each["settings"]["num_speculative_tokens"],
                front and LookupFirstConfig(**front),
            )
            for each, front in zip(compared, fronts, strict=True)
            if each["draft"]["model"] and not (front and front.get("draft_tree"))
        ]
    else:
        ks = options.num_speculative_tokens or []
        if len(options.drafts) != len(ks):
            raise UserError(
                "num_speculative_tokens",
                got=f"{ks} for {len(options.drafts)} drafts",
                expected="K of each",
            )
        shown = [(folder, k, None) for folder, k in zip(options.drafts, ks, strict=True)]
    return [
        Draft(Path(folder), method_of(Path(folder), key="drafts"), k, front)
        for folder, k, front in shown
    ]


def measured(
    draft: Draft, engine: str, num_prompts: int, max_new_tokens: int, own: Sequence[str]
) -> dict[str, Any]:
    """The row of the report that `specdistill eval` writes of an engine, and its name and target. own: the engine's keys."""
    folder = OUTPUT / draft.folder.parent.name / f"{engine}{'-lookup' if draft.lookup else ''}"
    lookup = [f"eval.lookup_first={json.dumps(draft.lookup.described)}"] if draft.lookup else []
    specdistill(
        "eval",
        f"target={TARGET}",
        "target.dtype=bfloat16",
        f"method={draft.method}",
        f"draft={draft.folder}",
        f"suite={SUITE}",
        "gate=server-bfloat16",
        f"output_dir={folder}",
        f"eval.engine={engine}",
        f"eval.num_speculative_tokens={draft.k}",
        f"eval.num_prompts={num_prompts}",
        f"eval.max_new_tokens={max_new_tokens}",
        "eval.repeats=1",
        *lookup,
        *own,
        failing=True,
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    version, dtype = report["engine"]["version"], report["target"]["dtype"]
    return {"draft": draft.name, "engine": f"{engine} {version}, {dtype}", **report["results"][0]}


def as_vllm(
    draft: Draft,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> float:
    """Our acceptance length, with what is accepted past the end of a completion. The target ignores stop tokens."""
    proposer = load_proposer(draft.method, draft.folder, target, lookup_first=draft.lookup)
    limits = {
        "max_new_tokens": max_new_tokens,
        "num_speculative_tokens": draft.k,
        "stop_ids": stop_ids,
    }
    return total(
        generate_here(target, proposer, [prompt.token_ids for prompt in prompts], **limits)
    ).mean_acceptance_length


def as_llama_cpp(
    draft: Draft, target: FrozenTarget, prompts: Sequence[Prompt], max_new_tokens: int
) -> float:
    """Our acceptance length, of the tokens of completions alone, with llama.cpp's rule in front of the draft."""
    proposer = load_proposer(draft.method, draft.folder, target)
    if draft.lookup:
        lookup = load_proposer(
            "ngram", None, target, ngram=NgramConfig(rule="llama.cpp", max=draft.lookup.max)
        )
        proposer = LookupFirstProposer(proposer, lookup, draft.lookup)
    decoder, limits = (
        Decoder(target, proposer),
        {"max_new_tokens": max_new_tokens, "num_speculative_tokens": draft.k},
    )
    rounds = [
        entry
        for prompt in prompts
        for entry in decoder.generate(prompt.token_ids, **limits).rounds
        if entry.drafted
    ]
    return 1 + sum(entry.num_accepted for entry in rounds) / len(rounds)


def as_gguf(draft: Draft, folder: Path) -> Path:
    """The draft as llama.cpp loads it, in float16. Raises UserError for what llama.cpp cannot express."""
    shutil.rmtree(folder, ignore_errors=True)
    export(draft.folder, "gguf", folder, TargetFiles(str(TARGET)), num_speculative_tokens=draft.k)
    of_target = () if draft.method == "draft_model" else ("--target-model-dir", TARGET)
    return convert(folder, folder / "draft.gguf", *of_target, "--outtype", "f16")


def page(rows: Sequence[dict[str, Any]], num_prompts: int, max_new_tokens: int) -> Iterator[str]:
    """The section's text: how it was measured, the table, and what is not in it."""
    yield (
        f"Measured on {hardware(torch.device('cpu'))['name']}, {torch.get_num_threads()} threads, by `make smollm2-engines`: "
        f"{num_prompts} prompts of MT-bench, GSM8K and HumanEval, up to {max_new_tokens} tokens each, greedy, one prompt at a time."
    )
    yield table(HEAD, (_line(row) for row in rows))
    for row in rows:
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
