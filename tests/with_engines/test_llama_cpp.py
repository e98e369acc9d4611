"""llama.cpp: with our drafts it generates what the target generates, and accepts as much of them as we do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.llama_cpp import KINDS, WITHOUT_DRAFT, AsLlamaCpp, complete
from specdistill.decoding.decoder import Decoder
from specdistill.export import export
from specdistill.methods.load import load_proposer
from specdistill.project import PICO
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.with_engines.conftest import NUM_TOKENS, K

pytestmark = [pytest.mark.long, pytest.mark.engines]  # llama.cpp in its own environment

# Keys and values, which are kept in float16 otherwise.
IN_FLOAT32 = ("-ctk", "f32", "-ctv", "f32", "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32")
LIMITS = {"max_new_tokens": NUM_TOKENS, "num_threads": 1}


@pytest.mark.parametrize("name", ["draft model", "EAGLE-3, chosen layers"])
def test_llama_cpp_writes_the_same_text_and_accepts_as_much(
    target_file: Path,
    to_gguf: Callable[..., Path],
    pico: FrozenTarget,
    trained: Callable[[str], Path],
    tmp_path: Path,
    name: str,
) -> None:
    method = "draft_model" if name == "draft model" else "eagle3"
    exported = tmp_path / "exported"
    export(trained(name), "gguf", exported, TargetFiles.of("pico"), dtype="f32" if method == "draft_model" else None)
    draft_file = exported / "draft-f32.gguf" if method == "draft_model" else to_gguf(exported, "--target-model-dir", PICO)
    draft = ("-md", draft_file, "--spec-type", KINDS[method], "--spec-draft-n-max", str(K))
    decoder = AsLlamaCpp(pico, load_proposer(method, trained(name), pico))
    theirs, ours, num_texts = [0, 0], [0, 0], 0
    prompts = tokenize(load_suite("pico"), pico.tokenizer, max_new_tokens=2 * NUM_TOKENS, max_length=512, num_prompts=16)
    for prompt in [row.token_ids for row in prompts]:
        plain = Decoder(pico).generate(prompt, max_new_tokens=NUM_TOKENS + 1).token_ids
        text = pico.tokenizer.decode(prompt)
        # llama.cpp takes prompts as text, and ends at stop tokens.
        if tuple(pico.tokenizer(text).input_ids) != prompt or set(pico.config.eos_token_id) & set(plain):
            continue
        file = tmp_path / "prompt.txt"
        file.write_text(f"{text}\n", encoding="utf-8")
        there = complete(target_file, file, *draft, *IN_FLOAT32, **LIMITS)
        assert pico.tokenizer.decode([*prompt, *plain]) in there.output
        here = decoder.count(prompt, NUM_TOKENS, K)
        theirs = [theirs[0] + there.counts.num_drafted, theirs[1] + there.counts.num_accepted]
        ours = [ours[0] + here.num_drafted, ours[1] + here.num_accepted]
        num_texts += 1
    assert num_texts >= 3 and ours[1] > num_texts
    assert theirs[0] / theirs[1] == pytest.approx(ours[0] / ours[1], rel=0.05), (theirs, ours)


def test_without_a_draft_the_same_loop_generates_a_token_a_round(target_file: Path, pico: FrozenTarget, tmp_path: Path) -> None:
    """Its speed is what `make smollm2-engines` divides by."""
    file, text = tmp_path / "prompt.txt", "def "
    file.write_text(f"{text}\n", encoding="utf-8")
    prompt = tuple(pico.tokenizer(text).input_ids)
    plain = Decoder(pico).generate(prompt, max_new_tokens=NUM_TOKENS + 1).token_ids
    there = complete(target_file, file, *WITHOUT_DRAFT, "-ctk", "f32", "-ctv", "f32", **LIMITS)
    assert pico.tokenizer.decode([*prompt, *plain]) in there.output
    assert (there.num_prompt_tokens, there.num_tokens) == (len(prompt), len(plain))
    assert (there.counts.num_rounds, there.counts.num_drafted) == (len(plain), 0) and there.seconds > 0
