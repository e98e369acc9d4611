"""llama.cpp: with our drafts it generates what the target generates, and accepts as much of them as we do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.export.export import export
from specdistill.methods.load import load_proposer
from specdistill.project import PICO
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.with_engines.conftest import NUM_TOKENS, K
from tests.with_engines.environments import environment, run

pytestmark = [pytest.mark.engines, pytest.mark.slow]


# Keys and values, which are kept in float16 otherwise.
IN_FLOAT32 = ("-ctk", "f32", "-ctv", "f32", "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32")


@pytest.fixture(scope="module")
def source() -> Path:
    return environment("llama.cpp") / "source" / "vendor" / "llama.cpp"


@pytest.fixture(scope="module")
def convert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint as a GGUF file, by llama.cpp's own converter, in float32; it needs what vLLM's environment has."""
    python = environment("vllm") / "bin" / "python"
    folder = tmp_path_factory.mktemp("gguf")

    def converted(checkpoint: Path, *options: str | Path) -> Path:
        path = folder / f"{checkpoint.name}.gguf"
        script = Path(__file__).with_name("convert_to_gguf.py")
        run(python, script, source, checkpoint, *options, "--outtype", "f32", "--outfile", path)
        return path

    return converted


@pytest.fixture(scope="module")
def target_file(convert: Callable[..., Path]) -> Path:
    return convert(PICO)


def speculate(source: Path, *arguments: str | Path) -> str:
    """What the program says, all of it: it logs from a thread of its own, and in about one run of ten ends before that has."""
    program = source / "build" / "bin" / "llama-speculative-simple"
    for _ in range(10):
        said = run(program, *arguments, *IN_FLOAT32, "--temp", "0", "-t", "1")
        if "n_accept" in said:
            return said
    pytest.fail("ten runs without counts")


class AsLlamaCpp(Decoder):
    """Our decoder with the rounds of `llama-speculative-simple`: it drafts at once after the prompt, whose last token stands where the
    target's first one does here, and towards the limit no further than to the last token but one; past that, as far as ever.
    """

    def count(self, prompt: tuple[int, ...], limit: int) -> tuple[int, int]:
        """Tokens drafted and accepted until more than `limit` are generated."""
        self.prompt, self.limit, self.begun = prompt, limit, False
        rounds = self.generate(prompt[:-1], max_new_tokens=limit + 2 * K + 2, num_speculative_tokens=K).rounds
        drafted = accepted = generated = 0
        for entry in rounds:
            if generated > limit:
                break
            drafted, accepted, generated = (
                drafted + len(entry.drafted),
                accepted + entry.num_accepted,
                generated + len(entry.emitted),
            )
        return drafted, accepted

    def _propose(self, state: DecodingState, ahead: Any, *others: Any) -> Proposal:
        generated = len(state.token_ids) - len(self.prompt)
        room = self.limit - generated - 1
        return super()._propose(state, min(ahead, room) if room > 0 else ahead, *others)

    def _verify(self, *arguments: Any) -> Any:
        if self.begun:
            return super()._verify(*arguments)
        self.begun = True
        return (), self.prompt[-1]


@pytest.mark.parametrize("name", ["draft model", "EAGLE-3, chosen layers"])
def test_llama_cpp_writes_the_same_text_and_accepts_as_much(
    source: Path,
    target_file: Path,
    convert: Callable[..., Path],
    pico: FrozenTarget,
    trained: Callable[[str], Path],
    tmp_path: Path,
    name: str,
) -> None:
    method, kind = ("draft_model", "draft-simple") if name == "draft model" else ("eagle3", "draft-eagle3")
    exported = tmp_path / "exported"
    export(trained(name), "gguf", exported, TargetFiles.of("pico"), dtype="f32" if method == "draft_model" else None)
    draft_file = exported / "draft-f32.gguf" if method == "draft_model" else convert(exported, "--target-model-dir", PICO)
    proposer = load_proposer(method, trained(name), pico)
    theirs, ours, num_texts = [0, 0], [0, 0], 0
    prompts = tokenize(load_suite("pico"), pico.tokenizer, max_new_tokens=2 * NUM_TOKENS, max_length=512, num_prompts=16)
    for prompt in [row.token_ids for row in prompts]:
        plain = Decoder(pico).generate(prompt, max_new_tokens=NUM_TOKENS + 1).token_ids
        text = pico.tokenizer.decode(prompt)
        # llama.cpp takes prompts as text, and ends at stop tokens.
        if tuple(pico.tokenizer(text).input_ids) != prompt or set(pico.config.eos_token_id) & set(plain):
            continue
        (tmp_path / "prompt.txt").write_text(f"{text}\n", encoding="utf-8")  # it drops the last line's end
        models = ("-m", target_file, "-md", draft_file, "--spec-type", kind, "--spec-draft-n-max", str(K))
        said = speculate(source, *models, "-f", tmp_path / "prompt.txt", "-n", str(NUM_TOKENS))
        assert pico.tokenizer.decode([*prompt, *plain]) in said
        counts = [int(re.search(rf"{what}\s*= (\d+)", said)[1]) for what in ("n_drafted", "n_accept")]
        theirs = [total + count for total, count in zip(theirs, counts, strict=True)]
        here = AsLlamaCpp(pico, proposer).count(prompt, NUM_TOKENS)
        ours = [total + count for total, count in zip(ours, here, strict=True)]
        num_texts += 1
    assert num_texts >= 3 and ours[1] > num_texts
    assert theirs[0] / theirs[1] == pytest.approx(ours[0] / ours[1], rel=0.05), (theirs, ours)
