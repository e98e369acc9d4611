"""`specdistill eval eval.engine=llama.cpp` starts a real llama-server with GGUF files in float32,
and counts what our decoder counts."""

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
# Keys and values are kept in float16 otherwise.
IN_FLOAT32 = [
    f"eval.llama_cpp.{name}=f32"
    for name in ("cache_type_k", "cache_type_v", "spec_draft_type_k", "spec_draft_type_v")
]
THREADS = ["eval.llama_cpp.threads=1", "eval.llama_cpp.spec_draft_threads=1"]
Files = Callable[[str], tuple[Path, Path]]


class AsLlamaServer(Decoder):
    """Drops of a draft what reaches past the last token but one of a completion."""

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
        """The completion, and its drafts, draft tokens and accepted tokens of each position."""
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
    trained: Callable[[str], Path],
    to_gguf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Files:
    """Name -> the draft's folder, and its GGUF file in float32."""

    def found(name: str) -> tuple[Path, Path]:
        exported, is_model = tmp_path_factory.mktemp("exported") / "draft", name == "draft model"
        export(trained(name), "gguf", exported, TargetFiles("pico"))
        return trained(name), to_gguf(
            exported, *(() if is_model else ("--target-model-dir", TargetFiles("pico").name))
        )

    return found


def evaluated(folder: Path, target_file: Path, *options: str) -> tuple[dict[str, Any], list[Any]]:
    """The report and its samples. Speed is not what is tested here, so the gate may say either."""
    numbers = {
        "num_speculative_tokens": K,
        "repeats": 1,
        "num_prompts": NUM_PROMPTS,
        "max_new_tokens": NEW_TOKENS,
    }
    given = [f"eval.{name}={number}" for name, number in numbers.items()]
    given += [
        "eval.engine=llama.cpp",
        f"eval.engine_command={SERVER}",
        f"eval.llama_cpp.model={target_file}",
    ]
    given += [
        key
        for key in (*IN_FLOAT32, *THREADS)
        if "draft" not in key or "method=ngram" not in options
    ]  # which has no draft
    ran = specdistill(
        "eval", "target=pico", "suite=pico", "gate=server", f"output_dir={folder}", *given, *options
    )
    assert ran.returncode in (
        ExitCode.DONE,
        ExitCode.CHECK_FAILED,
        ExitCode.INCONCLUSIVE,
    ), ran.stderr[-4000:]
    report, samples = read_report(folder)
    assert (
        report["lossless"]["greedy_identical"]
        and report["lossless"]["prompts_checked"] == NUM_PROMPTS
    )
    return report, samples


def both_counts(
    samples: list[Any], target: FrozenTarget, proposer: Proposer
) -> tuple[list[Any], list[Any]]:
    """Those of the server and ours, of each prompt; the completions are the same."""
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


def acceptance_length(counts: list[Any]) -> float:
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
def test_one_command_measures_what_we_count(
    name: str, files: Files, target_file: Path, stopping_pico: FrozenTarget, tmp_path: Path
) -> None:
    method = METHODS[name]
    draft, file = files(name)
    given = [
        f"method={method}",
        f"draft={draft}",
        f"eval.llama_cpp.model_draft={file}",
        f"eval.sweep.concurrency={[*LOADS]}",
    ]
    report, samples = evaluated(tmp_path / "report", target_file, *given)
    alone, together = samples[:NUM_PROMPTS], samples[NUM_PROMPTS:]
    assert [sample.configuration.batch_size for sample in (alone[0], together[0])] == [*LOADS]
    # rounding decides a draft's near-ties, and depends on the batch
    for measured in (alone, together):
        there, here = both_counts(
            measured, stopping_pico, load_proposer(method, draft, stopping_pico)
        )
        assert acceptance_length(there) == pytest.approx(acceptance_length(here), rel=0.03), (
            there,
            here,
        )
    assert report["target"]["dtype"] == "ALL_F32" and "--parallel 4" in report["engine"]["command"]


def test_its_own_lookup_accepts_what_its_rule_does_here(
    target_file: Path, stopping_pico: FrozenTarget, tmp_path: Path
) -> None:
    ngram = NgramConfig(rule="llama.cpp", max=2)
    given = ["method=ngram", "eval.ngram.rule=llama.cpp", f"eval.ngram.max={ngram.max}"]
    _, samples = evaluated(tmp_path / "report", target_file, *given)
    there, here = both_counts(
        samples, stopping_pico, load_proposer("ngram", None, stopping_pico, ngram=ngram)
    )
    assert there == here and acceptance_length(there) > 1


def test_a_lookup_stands_in_front_of_the_draft(
    files: Files, target_file: Path, tmp_path: Path
) -> None:
    draft, file = files("EAGLE-3, chosen layers")
    lookup = "eval.lookup_first={method: ngram, min: 2, max: 2, draft_tokens: 2}"
    given = ["method=eagle3", f"draft={draft}", f"eval.llama_cpp.model_draft={file}", lookup]
    report, _ = evaluated(tmp_path / "report", target_file, *given)
    drafting = (
        "--spec-type ngram-simple,draft-eagle3 --spec-ngram-simple-size-n 2"
        " --spec-ngram-simple-size-m 4 --spec-draft-n-max 2"
    )
    assert drafting in report["engine"]["command"]
    row = report["results"][0]
    assert 2 * row["num_drafts"] < row["num_draft_tokens"] < K * row["num_drafts"]  # both drafted
    assert all(row["accepted_per_position"])  # the last two by lookups alone


def test_it_knows_every_option_that_it_may_be_given() -> None:
    environment("llama.cpp")
    known = subprocess.run([SERVER, "--help"], capture_output=True, text=True, check=True).stdout
    program = LLAMA_CPP.program
    assert program is not None
    own = {f"--{name.replace('_', '-')}" for name in LlamaCppConfig.model_fields} - {
        "--model-draft"
    }
    options = {
        *re.findall(r"--[a-z-]+", " ".join(LLAMA_CPP.flags.values())),
        *program.measured,
        *own,
        "--spec-type",
    }
    for option in options:
        assert re.search(rf"(^|[\s,]){option}\b", known, re.M), option
