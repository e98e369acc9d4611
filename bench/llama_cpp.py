"""llama.cpp's converter and its program `llama-speculative-simple`, and our decoder with that program's rounds."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines import environment, run
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.errors import ResourceError

SOURCE = environment("llama.cpp") / "source" / "vendor" / "llama.cpp"
KINDS = {"draft_model": "draft-simple", "eagle3": "draft-eagle3"}  # method -> the program's word for it
# For the same loop without a draft: n-gram lookup with n-grams so long that none is found.
WITHOUT_DRAFT = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1024")


@dataclass(frozen=True)
class Counts:
    """Of one completion, up to its limit or a stop token; what is accepted past these is counted with its round."""

    num_rounds: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class Completion:
    """What the program printed and counted. seconds: of all rounds, without the prompt."""

    output: str
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    counts: Counts


def convert(checkpoint: Path, output: Path, *options: str | Path, script: tuple[str | Path, ...] | None = None) -> Path:
    """A checkpoint as a GGUF file, by llama.cpp's own converter, which runs in vLLM's environment: that has what it needs.

    script: what is run in its place. Raises ResourceError for what it does not convert.
    """
    converter = script or (SOURCE / "convert_hf_to_gguf.py",)
    run(environment("vllm") / "bin" / "python", *converter, checkpoint, *options, "--outfile", output)
    return output


def complete(target: Path, prompt: Path, *options: str | Path, max_new_tokens: int, num_threads: int) -> Completion:
    """A prompt, in a file that ends with one more newline, completed greedily. options: the draft, or WITHOUT_DRAFT.

    Raises ResourceError when the program fails or does not say what it counted.
    """
    program = SOURCE / "build" / "bin" / "llama-speculative-simple"
    limits = ("-n", str(max_new_tokens), "-t", str(num_threads), "--temp", "0", "--no-escape")
    output = run(program, "-m", target, "-f", prompt, *options, *limits)
    if "n_accept" not in output:
        raise ResourceError(
            f"{program} did not print what it counted", next_step="build it by `make engines`, which makes it print all"
        )
    number = {name: int(found) for name, found in re.findall(r"\b(n_\w+)\s*= (\d+)", output)}
    ((prompt_tokens, _), (tokens, seconds)) = re.findall(r"(?:en|de)coded +(\d+) tokens in +([\d.]+) seconds", output)
    # A round adds what it accepts, and one token more.
    num_rounds = number["n_predict"] - number["n_accept"]
    counts = Counts(num_rounds, number["n_drafted"], number["n_accept"])
    return Completion(output, int(prompt_tokens), int(tokens), float(seconds), counts)


class AsLlamaCpp(Decoder):
    """Our decoder with the rounds of `llama-speculative-simple`: it drafts at once after the prompt, whose last token stands where the
    target's first one does here, and towards the limit no further than to the last token but one; past that, without a limit.

    Its target ignores stop tokens (`ignore_stop_tokens` of bench/counting.py): a round is counted whole.
    """

    def count(self, prompt: tuple[int, ...], limit: int, k: int, stop_ids: Collection[int] = ()) -> Counts:
        """What is counted until more than `limit` tokens are generated, or one of `stop_ids`; K draft tokens a round."""
        self.prompt, self.limit, self.begun = prompt, limit, False
        rounds = self.generate(prompt[:-1], max_new_tokens=limit + 2 * k + 2, num_speculative_tokens=k).rounds
        num_rounds = drafted = accepted = generated = 0
        for entry in rounds:
            num_rounds += 1
            drafted, accepted = drafted + len(entry.drafted), accepted + entry.num_accepted
            generated += len(entry.emitted)
            if generated > limit or not set(stop_ids).isdisjoint(entry.emitted):
                break
        return Counts(num_rounds, drafted, accepted)

    def _propose(self, state: DecodingState, ahead: Any, *others: Any) -> Proposal:
        generated = len(state.token_ids) - len(self.prompt)
        room = self.limit - generated - 1
        return super()._propose(state, min(ahead, room) if room > 0 else ahead, *others)

    def _verify(self, *arguments: Any) -> Any:
        if self.begun:
            return super()._verify(*arguments)
        self.begun = True
        return (), self.prompt[-1]
