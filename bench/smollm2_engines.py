"""Measure the drafts of `make smollm2` in vLLM and in llama.cpp's server.

Is as much accepted as in our decoder, and is the engine faster than without the draft?

    make smollm2-engines  # the chains that runs/smollm2/comparison.json compares, each with its K
    make smollm2-engines ARGS="small=true"  # few prompts of few tokens: the numbers mean nothing

`specdistill eval` starts vLLM with the target's folder in bfloat16. It starts llama.cpp's server
with the GGUF file of the package, which holds the same weights in Q4_1. Our decoder reads the same
prompts with the target's folder, and counts as each engine counts its rounds. The results are in
runs/smollm2/engines.json and in the table of docs/smollm2.md.
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

from bench.counting import generate_here, ignore_stop_tokens, sum_counts
from bench.drafts import reports_by_name, run_specdistill
from bench.engines import QUIET_VLLM, SERVER, convert, find_environment, install_plugin
from bench.pages import write_between
from bench.smollm2 import FOLDER, GGUF, PAGE
from specdistill.cli.command import run
from specdistill.common.errors import UserError
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.evaluation.measurement.hardware import describe_hardware
from specdistill.evaluation.report.phrases import (
    format_bracketed_interval,
    format_number,
    format_signed,
    format_times,
)
from specdistill.evaluation.report.text import escape_markdown, format_table
from specdistill.evaluation.suites.suite import Prompt, load_suite, tokenize
from specdistill.methods.load import find_method, load_proposer
from specdistill.methods.ngram.config import NgramConfig
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

TARGET = FOLDER / "target"
SUITE = FOLDER / "suites" / "smollm2.yaml"

# Where the engines' reports and the exported drafts go.
OUTPUT = FOLDER / "engines"
# vLLM runs with our plugin and with Intel's OpenMP, which it asks for in its log when it drafts on
# an x86 CPU.
OPENMP = find_environment("vllm") / "lib" / "libiomp5.so"
PROGRAM = find_environment("vllm") / "bin" / "vllm"
# The length of the n-grams that llama.cpp's lookup compares: exactly this many tokens. As many
# tokens have to follow the n-gram.
LLAMA_CPP_NGRAM_LENGTH = 3
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


# A row of the results: the numbers of a report, the names of draft and engine, and in `here` the
# acceptance length in our decoder.
EngineRow = dict[str, Any]


class Options(Section):
    """The options of this script."""

    vllm_options: str = option(
        "--block-size 32",
        "further options of `vllm serve`; on a CPU, the block size must be a multiple of 32",
    )
    small: bool = option(
        False, "generate 8 tokens for 3 prompts only, and do not write docs/smollm2.md"
    )


@dataclass(frozen=True)
class Draft:
    """A draft to measure.

    Attributes:
        folder: its folder.
        method: its method.
        k: K, draft tokens per round.
        lookup: the lookup in front of the draft; None for no lookup.
    """

    folder: Path
    method: str
    k: int
    lookup: LookupFirstConfig | None = None

    @property
    def name(self) -> str:
        """The draft's name in tables, such as "`eagle3`, K = 3".

        With a lookup in front, it is for example "`eagle3`, K = 14, 2 behind n-gram lookup of 2 to
        5". The lookup then proposes up to 14 tokens, after n-grams of 2 to 5 tokens that occurred
        before. Where it finds nothing, the draft proposes 2 tokens.
        """
        name = f"`{self.method}`, K = {self.k}"
        if self.lookup:
            name += (
                f", {self.lookup.draft_tokens} behind n-gram lookup of {self.lookup.min} to"
                f" {self.lookup.max}"
            )
        return name

    @property
    def of_llama_cpp(self) -> "Draft":
        """The same draft, with a lookup in front that llama.cpp's server can run.

        That server looks up n-grams of one length only. A draft without a lookup is unchanged.
        """
        if self.lookup is None:
            return self
        lengths = {"min": LLAMA_CPP_NGRAM_LENGTH, "max": LLAMA_CPP_NGRAM_LENGTH}
        return replace(self, lookup=self.lookup.model_copy(update=lengths))


def main(options: Options) -> None:
    """Measure each draft in vLLM, in llama.cpp and in our decoder, and write docs/smollm2.md."""
    num_prompts = 3 if options.small else 24
    max_new_tokens = 8 if options.small else 64
    drafts = load_compared_drafts()

    # Prepare vLLM with the plugin of this checkout.
    os.environ.update(QUIET_VLLM)
    python_path = install_plugin((OUTPUT / "site").absolute())
    vllm_command = (
        f"env LD_PRELOAD={OPENMP} PYTHONPATH={python_path} {PROGRAM} serve {options.vllm_options}"
    )

    # In a round with a stop token, vLLM also counts the accepted tokens after the stop token, and
    # llama.cpp does not. So our decoder uses two targets: one that stops at stop tokens, and one
    # without stop tokens.
    target = FrozenTarget.load(str(TARGET), dtype="bfloat16")
    endless_target = FrozenTarget.load(str(TARGET), dtype="bfloat16")
    ignore_stop_tokens(endless_target)

    # Select prompts that leave room in the context for the completion and for the draft tokens of
    # the last round: four times K tokens are more than enough.
    prompts = tokenize(
        load_suite(str(SUITE)),
        target.tokenizer,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens + 4 * max(draft.k for draft in drafts),
        max_length=target.max_length,
    )

    # Measure each draft in both engines. For each engine, measure it in our decoder, too, with
    # rounds counted as that engine counts them.
    rows = []
    for draft in drafts:
        row = measure_in_engine(
            draft, "vllm", num_prompts, max_new_tokens, [f"eval.engine_command={vllm_command}"]
        )
        row["here"] = measure_as_vllm(
            draft, endless_target, prompts, max_new_tokens, target.eos_token_ids
        )
        rows.append(row)
        rows.append(measure_in_llama_cpp(draft.of_llama_cpp, target, prompts, max_new_tokens))
    OUTPUT.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

    # Write the section of docs/smollm2.md.
    text = "\n\n".join(format_page(rows, len(prompts), max_new_tokens))
    print(text, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2-engines", text)


def measure_in_llama_cpp(
    draft: Draft, target: FrozenTarget, prompts: Sequence[Prompt], max_new_tokens: int
) -> EngineRow:
    """Measure a draft in llama.cpp's server and in our decoder.

    Args:
        draft: the draft. If it has a lookup in front, this is one that llama.cpp's server can run
            (`Draft.of_llama_cpp`).
        target: the target for our decoder.
        prompts: the prompts for our decoder.
        max_new_tokens: tokens per prompt.

    Returns:
        The row that `measure_in_engine` returns, with the acceptance length of our decoder in
        `here`. If the draft cannot be converted for llama.cpp, the row has the reason in `refused`,
        and no numbers.
    """
    try:
        draft_file = export_gguf(draft, OUTPUT / draft.folder.parent.name / "gguf")
    except UserError as error:
        # Only an error about the key `engine` says that llama.cpp cannot load the draft.
        if error.key != "engine":
            raise
        return {"draft": draft.name, "engine": "llama.cpp", "refused": str(error)}
    num_threads = torch.get_num_threads()
    engine_keys = [
        f"eval.engine_command={SERVER}",
        f"eval.llama_cpp.model={FOLDER / 'download' / GGUF}",
        f"eval.llama_cpp.model_draft={draft_file}",
        f"eval.llama_cpp.threads={num_threads}",
        f"eval.llama_cpp.spec_draft_threads={num_threads}",
    ]
    row = measure_in_engine(draft, "llama.cpp", len(prompts), max_new_tokens, engine_keys)
    row["here"] = measure_as_llama_cpp(draft, target, prompts, max_new_tokens)
    return row


def load_compared_drafts() -> list[Draft]:
    """Return the trained drafts that `make smollm2` compared and that engines can serve.

    Engines let a draft propose only chains, alone or behind a lookup. Trees were compared, too:
    - If a draft proposed trees without a lookup, it is returned, and will propose chains of K
      tokens, where K was the depth of the trees.
    - If it proposed trees behind a lookup, it is left out, because engines refuse this setting.

    Raises:
        UserError: if `make smollm2` has not been run.
    """
    # Read the comparison of `make smollm2`.
    path = FOLDER / "comparison.json"
    if not path.is_file():
        raise UserError(
            "drafts",
            got=f"no {path}",
            text=f"No drafts to measure: {path} does not exist. Run `make smollm2` first.",
        )
    comparison = json.loads(path.read_text(encoding="utf-8"))

    # Leave out lookups alone, which have no folder, and drafts that propose trees behind a lookup.
    drafts = []
    for report in reports_by_name(comparison).values():
        settings = report["settings"]
        lookup_keys = settings.get("drafting", {}).get("lookup_first")
        has_tree_behind_lookup = lookup_keys and lookup_keys.get("draft_tree")
        if report["draft"]["model"] and not has_tree_behind_lookup:
            folder = Path(report["draft"]["model"])
            lookup = LookupFirstConfig(**lookup_keys) if lookup_keys else None
            method = find_method(folder, key="drafts")
            drafts.append(Draft(folder, method, settings["num_speculative_tokens"], lookup))
    return drafts


def measure_in_engine(
    draft: Draft, engine: str, num_prompts: int, max_new_tokens: int, engine_keys: Sequence[str]
) -> EngineRow:
    """Measure a draft in an engine: run `specdistill eval`, and read its report.

    Args:
        draft: the draft.
        engine: the name of the engine: vllm or llama.cpp.
        num_prompts: the number of prompts.
        max_new_tokens: tokens per prompt.
        engine_keys: keys of `eval` that start this engine.

    Returns:
        The results in the report, such as acceptance length and tokens per second, together with
        `draft`, the name of the draft, and `engine`, the engine's name, version and dtype.
    """
    folder = OUTPUT / draft.folder.parent.name / f"{engine}{'-lookup' if draft.lookup else ''}"
    lookup = [f"eval.lookup_first={json.dumps(draft.lookup.described)}"] if draft.lookup else []
    run_specdistill(
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
        *engine_keys,
        accepts_failed_gate=True,
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    version = report["engine"]["version"]
    dtype = report["target"]["dtype"]
    return {"draft": draft.name, "engine": f"{engine} {version}, {dtype}", **report["results"][0]}


def measure_as_vllm(
    draft: Draft,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> float:
    """Return the acceptance length of a draft in our decoder, counted as vLLM counts it.

    A completion may end in the middle of its last round, at a stop token or at the limit of tokens.
    vLLM counts all accepted draft tokens of this round, also those after the end. So our decoder
    goes on past the end, and cuts the completion afterwards.

    Args:
        draft: the draft.
        target: the target, from which the stop tokens were removed (`ignore_stop_tokens`). So
            decoding does not end at one of them.
        prompts: the prompts.
        max_new_tokens: tokens per prompt.
        stop_ids: the stop tokens, at which the completion is cut afterwards.
    """
    proposer = load_proposer(draft.method, draft.folder, target, lookup_first=draft.lookup)
    completions = generate_here(
        target,
        proposer,
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=max_new_tokens,
        num_speculative_tokens=draft.k,
        stop_ids=stop_ids,
    )
    return sum_counts(completions).mean_acceptance_length


def measure_as_llama_cpp(
    draft: Draft, target: FrozenTarget, prompts: Sequence[Prompt], max_new_tokens: int
) -> float:
    """Return the acceptance length of a draft in our decoder, counted as llama.cpp counts it.

    Unlike vLLM, llama.cpp does not count draft tokens that were accepted after the end of the
    completion.

    Args:
        draft: the draft.
        target: the target, which stops at its stop tokens.
        prompts: the prompts.
        max_new_tokens: tokens per prompt.
    """
    # llama.cpp looks up n-grams by a rule of its own, so our lookup in front of the draft follows
    # that rule.
    proposer = load_proposer(draft.method, draft.folder, target)
    if draft.lookup:
        lookup = load_proposer(
            "ngram", None, target, ngram=NgramConfig(rule="llama.cpp", max=draft.lookup.max)
        )
        proposer = LookupFirstProposer(proposer, lookup, draft.lookup)
    decoder = Decoder(target, proposer)
    limits = {"max_new_tokens": max_new_tokens, "num_speculative_tokens": draft.k}

    # Count as llama.cpp does. `num_accepted` of a round leaves out accepted tokens after the end of
    # the completion. Rounds in which nothing was drafted do not count.
    num_accepted = []
    for prompt in prompts:
        generation = decoder.generate(prompt.token_ids, **limits)
        num_accepted += [entry.num_accepted for entry in generation.rounds if entry.drafted]
    return 1 + sum(num_accepted) / len(num_accepted)


def export_gguf(draft: Draft, folder: Path) -> Path:
    """Export a draft to a GGUF file in float16, which llama.cpp loads.

    Args:
        draft: the draft.
        folder: the folder of the export, which is replaced.

    Returns:
        The GGUF file.

    Raises:
        UserError: if the format of llama.cpp cannot hold such a draft.
    """
    shutil.rmtree(folder, ignore_errors=True)
    export(draft.folder, "gguf", folder, TargetFiles(str(TARGET)), num_speculative_tokens=draft.k)

    # For a head, the converter takes the embedding and the tokenizer from the target's folder.
    target_options = () if draft.method == "draft_model" else ("--target-model-dir", TARGET)
    return convert(folder, folder / "draft.gguf", *target_options, "--outtype", "f16")


def format_page(rows: Sequence[EngineRow], num_prompts: int, max_new_tokens: int) -> Iterator[str]:
    """Yield the paragraphs of a section of docs/smollm2.md.

    They are a sentence on how the drafts were measured, the table, and a sentence for each draft
    that llama.cpp cannot load.
    """
    yield (
        f"Measured on {describe_hardware(torch.device('cpu'))['name']},"
        f" {torch.get_num_threads()} threads, by `make smollm2-engines`: {num_prompts} prompts of"
        " MT-bench, GSM8K and HumanEval, up to"
        f" {max_new_tokens} tokens each, greedy, one prompt at a time."
    )
    yield format_table(HEAD, (_format_line(row) for row in rows))
    for row in rows:
        if "refused" in row:
            yield f"{row['draft']} is not in {row['engine']}: {escape_markdown(row['refused'])}."


def _format_line(row: EngineRow) -> list[str]:
    """Return the cells of a row, in the order of the columns HEAD.

    The difference is the acceptance length in the engine relative to the one in our decoder.
    """
    # The reports of all engines have this key. It is the acceptance length as vLLM defines it, from
    # a server's counters: 1 + accepted tokens / drafts.
    engine_length = row.get("acceptance_length_vllm")
    own_length = row.get("here")
    difference = "–"
    if engine_length and own_length:
        difference = format_signed(engine_length / own_length - 1)
    return [
        row["draft"],
        row["engine"],
        f"{format_number(engine_length)}{format_bracketed_interval(row, 'acceptance_length_vllm')}",
        format_number(own_length),
        difference,
        format_number(row.get("baseline_tokens_per_second"), 1),
        format_number(row.get("tokens_per_second"), 1),
        f"{format_times(row.get('speedup'))}{format_bracketed_interval(row, 'speedup')}",
    ]


if __name__ == "__main__":
    sys.exit(run(main, Options))
