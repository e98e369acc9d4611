"""`specdistill eval eval.engine=llama.cpp` starts a real llama-server and counts as our decoder.

Its GGUF files are in float32.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.engines import SERVER
from specdistill.common.errors import ExitCode
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.methods.load import load_proposer
from specdistill.methods.ngram.config import NgramConfig
from specdistill.recipe.sections import LlamaCppConfig
from specdistill.serving.engines.llama_cpp import LLAMA_CPP
from specdistill.serving.export import export
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.scripts import specdistill
from tests.with_engines.conftest import K
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # llama.cpp in its own environment

NUM_PROMPTS, NEW_TOKENS, LOADS = 8, 48, (1, 4)
# By default llama.cpp keeps keys and values in float16.
IN_FLOAT32 = [
    f"eval.llama_cpp.{name}=f32"
    for name in ("cache_type_k", "cache_type_v", "spec_draft_type_k", "spec_draft_type_v")
]
THREADS = ["eval.llama_cpp.threads=1", "eval.llama_cpp.spec_draft_threads=1"]
Files = Callable[[str], tuple[Path, Path]]


class AsLlamaServer(Decoder):
    """A decoder that drafts no further than the last token but one of a completion."""

    def __init__(self, target: FrozenTarget, proposer: Any) -> None:
        propose = proposer.propose

        def propose_up_to_the_end(state: DecodingState, *others: Any) -> list[Proposal]:
            proposals = zip(propose(state, *others), state.token_ids, strict=True)
            return [
                Proposal(proposal.tokens[: self.limit - len(text) - 1])
                for proposal, text in proposals
            ]

        proposer.propose = propose_up_to_the_end
        super().__init__(target, proposer)

    def count(
        self, prompt: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, int, tuple[int, ...]]]:
        """Return the completion, and its drafts, draft tokens and accepted tokens by position."""
        self.limit = len(prompt) + NEW_TOKENS
        generation = self.generate(prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K)
        drafts = [entry for entry in generation.rounds if entry.drafted]
        reached = tuple(
            sum(entry.num_accepted > position for entry in drafts) for position in range(K)
        )
        return generation.token_ids, (
            len(drafts),
            sum(len(entry.drafted) for entry in drafts),
            reached,
        )


@pytest.fixture(scope="session")
def stopping_pico() -> FrozenTarget:
    return FrozenTarget.load("pico")


@pytest.fixture(scope="session")
def files(
    trained_draft: Callable[[str], Path],
    to_gguf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Files:
    """A function from a name to the folder of that draft and to its GGUF file in float32."""

    def export_and_convert(name: str) -> tuple[Path, Path]:
        exported, is_model = tmp_path_factory.mktemp("exported") / "draft", name == "draft model"
        export(trained_draft(name), "gguf", exported, TargetFiles("pico"))
        return trained_draft(name), to_gguf(
            exported, *(() if is_model else ("--target-model-dir", TargetFiles("pico").name))
        )

    return export_and_convert


def run_eval(folder: Path, target_file: Path, *options: str) -> tuple[dict[str, Any], list[Any]]:
    """Run an evaluation and return its report and samples.

    The speed is not tested here, so the gate may pass or fail.
    """
    numbers = {
        "num_speculative_tokens": K,
        "repeats": 1,
        "num_prompts": NUM_PROMPTS,
        "max_new_tokens": NEW_TOKENS,
    }
    keys = [f"eval.{name}={number}" for name, number in numbers.items()]
    keys += [
        "eval.engine=llama.cpp",
        f"eval.engine_command={SERVER}",
        f"eval.llama_cpp.model={target_file}",
    ]
    keys += [
        key
        for key in (*IN_FLOAT32, *THREADS)
        if "draft" not in key or "method=ngram" not in options
    ]  # n-gram lookup has no draft
    process = specdistill(
        "eval", "target=pico", "suite=pico", "gate=server", f"output_dir={folder}", *keys, *options
    )
    assert process.returncode in (
        ExitCode.DONE,
        ExitCode.CHECK_FAILED,
        ExitCode.INCONCLUSIVE,
    ), process.stderr[-4000:]
    report, samples = read_report(folder)
    assert (
        report["lossless"]["greedy_identical"]
        and report["lossless"]["prompts_checked"] == NUM_PROMPTS
    )
    return report, samples


def count_on_both_sides(
    samples: list[Any], target: FrozenTarget, proposer: Proposer
) -> tuple[list[Any], list[Any]]:
    """Return the counts of the server and ours for each prompt; check that completions agree."""
    decoder, there, here = AsLlamaServer(target, proposer), [], []
    prompts = tokenize(
        load_suite("pico"),
        target.tokenizer,
        max_new_tokens=NEW_TOKENS,
        max_length=512,
        num_prompts=NUM_PROMPTS,
    )
    for prompt, sample in zip(prompts, samples, strict=True):
        token_ids, counts = decoder.count(prompt.token_ids)
        assert sample.token_ids == token_ids, prompt.id
        there.append(
            (
                sample.counts.num_drafts,
                sample.counts.num_draft_tokens,
                sample.counts.accepted_per_position,
            )
        )
        here.append(counts)
    return there, here


def compute_acceptance_length(counts: list[Any]) -> float:
    num_drafts, num_accepted = (
        sum(drafts for drafts, _, _ in counts),
        sum(sum(reached) for _, _, reached in counts),
    )
    assert num_accepted > NUM_PROMPTS
    return 1 + num_accepted / num_drafts


METHODS = {
    "draft model": "draft_model",
    "EAGLE-3, chosen layers": "eagle3",
    "DFlash": "dflash",
    "DSpark": "dspark",
}


@pytest.mark.parametrize("name", METHODS)
def test_eval_counts_in_llama_cpp_what_our_decoder_counts(
    name: str, files: Files, target_file: Path, stopping_pico: FrozenTarget, tmp_path: Path
) -> None:
    method = METHODS[name]
    draft, file = files(name)
    keys = [
        f"method={method}",
        f"draft={draft}",
        f"eval.llama_cpp.model_draft={file}",
        f"eval.sweep.concurrency={[*LOADS]}",
    ]
    report, samples = run_eval(tmp_path / "report", target_file, *keys)
    alone, together = samples[:NUM_PROMPTS], samples[NUM_PROMPTS:]
    assert [sample.configuration.batch_size for sample in (alone[0], together[0])] == [*LOADS]
    # Rounding decides a draft's near-ties and depends on the batch, so counts differ a little.
    for measured in (alone, together):
        there, here = count_on_both_sides(
            measured, stopping_pico, load_proposer(method, draft, stopping_pico)
        )
        assert compute_acceptance_length(there) == pytest.approx(
            compute_acceptance_length(here), rel=0.03
        ), (
            there,
            here,
        )
    assert report["target"]["dtype"] == "ALL_F32" and "--parallel 4" in report["engine"]["command"]


def test_llama_cpps_own_lookup_accepts_what_its_rule_does_here(
    target_file: Path, stopping_pico: FrozenTarget, tmp_path: Path
) -> None:
    ngram = NgramConfig(rule="llama.cpp", max=2)
    keys = ["method=ngram", "eval.ngram.rule=llama.cpp", f"eval.ngram.max={ngram.max}"]
    _, samples = run_eval(tmp_path / "report", target_file, *keys)
    there, here = count_on_both_sides(
        samples, stopping_pico, load_proposer("ngram", None, stopping_pico, ngram=ngram)
    )
    assert there == here and compute_acceptance_length(there) > 1


def test_a_lookup_drafts_in_front_of_the_draft(
    files: Files, target_file: Path, tmp_path: Path
) -> None:
    draft, file = files("EAGLE-3, chosen layers")
    lookup = "eval.lookup_first={method: ngram, min: 2, max: 2, draft_tokens: 2}"
    keys = ["method=eagle3", f"draft={draft}", f"eval.llama_cpp.model_draft={file}", lookup]
    report, _ = run_eval(tmp_path / "report", target_file, *keys)
    drafting = (
        "--spec-type ngram-simple,draft-eagle3 --spec-ngram-simple-size-n 2"
        " --spec-ngram-simple-size-m 4 --spec-draft-n-max 2"
    )
    assert drafting in report["engine"]["command"]
    row = report["results"][0]
    # Lookup and draft both drafted.
    assert 2 * row["num_drafts"] < row["num_draft_tokens"] < K * row["num_drafts"]
    assert all(row["accepted_per_position"])  # only lookups reach the last two


def test_llama_cpp_knows_every_option_that_specdistill_passes() -> None:
    environment("llama.cpp")
    help_text = subprocess.run(
        [SERVER, "--help"], capture_output=True, text=True, check=True
    ).stdout
    program = LLAMA_CPP.program
    assert program is not None
    config_options = {f"--{name.replace('_', '-')}" for name in LlamaCppConfig.model_fields} - {
        "--model-draft"
    }
    options = {
        *re.findall(r"--[a-z-]+", " ".join(LLAMA_CPP.flags.values())),
        *program.measured,
        *config_options,
        "--spec-type",
    }
    for option in options:
        assert re.search(rf"(^|[\s,]){option}\b", help_text, re.M), option
