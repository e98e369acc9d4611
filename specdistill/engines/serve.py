"""SERVE.md: how to serve what was exported, and which acceptance to expect."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specdistill
from specdistill.errors import UserError

DEFAULT_NUM_TOKENS = 3  # drafted in a round, where no report says how many were measured


@dataclass(frozen=True)
class Engine:
    """versions: those whose loaders the layouts were made for. counts: where a running engine says what it accepts."""

    name: str
    versions: str
    counts: str


VLLM_COUNTS = "At `/metrics`, acceptance length is 1 + `vllm:spec_decode_num_accepted_tokens_total` / `vllm:spec_decode_num_drafts_total`."
ENGINES = {
    "vllm": Engine("vLLM", "0.32 and 0.33", VLLM_COUNTS),
    "sglang": Engine("SGLang", "0.5.23", "Its log says `accept len`, `/server_info` says `avg_spec_accept_length`."),
    "speculators": Engine("speculators, served by vLLM", "speculators 0.9; vLLM 0.32 and 0.33", VLLM_COUNTS),
    "safeailab": Engine(
        "SafeAILab/EAGLE", "the release with EAGLE-3", "`eagenerate(…, log=True)` gives new tokens and rounds of drafted trees."
    ),
    "gguf": Engine("llama.cpp", "as in llama-cpp-python 0.3.36", "`llama-server` logs drafted and accepted tokens."),
}
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "mtp": "NEXTN"}


@dataclass(frozen=True)
class Served:
    """What a command is made of. target: the name an engine is given, None where it is not known.

    config: the config.json that was written, empty for a GGUF file.
    """

    method: str
    engine: str
    output: Path
    target: str | None
    num_tokens: int
    samples: bool
    config: Mapping[str, Any]


def serve_md(served: Served, report: Mapping[str, Any] | None) -> str:
    """The whole file. `report`: a report.json of the draft, if there is one."""
    engine = ENGINES[served.engine]
    return f"""# How to serve this draft

Method {served.method}, written by specdistill {specdistill.__version__} for {engine.name} ({engine.versions}). Paths and names are those of
the machine it was written on{"" if served.target else "; TARGET stands for the model that the draft was made for"}.

```bash
{command(served)}
```

## What to expect

{expectation(report)}

{engine.counts}
"""


def command(served: Served) -> str:
    """Lines for a shell."""
    output, target, num = shlex.quote(str(served.output)), shlex.quote(served.target or "TARGET"), served.num_tokens
    if served.engine == "speculators":
        return f"vllm serve {output}   # names its target, and {num} drafted tokens"
    if served.engine == "vllm":
        own = {} if served.method == "mtp" else {"model": str(served.output)}
        settings = {"method": served.method, **own, "num_speculative_tokens": num}
        if served.samples:
            settings["draft_sample_method"] = "probabilistic"
        return f"vllm serve {output if served.method == 'mtp' else target} --speculative-config {shlex.quote(json.dumps(settings))}"
    if served.engine == "sglang":
        parts = [f"python -m sglang.launch_server --model-path {output if served.method == 'mtp' else target}"]
        parts += [f"--speculative-algorithm {SGLANG_ALGORITHMS[served.method]}"]
        parts += [] if served.method == "mtp" else [f"--speculative-draft-model-path {output}"]
        parts += [f"--speculative-num-steps {num} --speculative-eagle-topk 1 --speculative-num-draft-tokens {num + 1}"]
        if served.method == "eagle3" and served.config.get("layer_types"):
            parts += [f"--speculative-draft-window-size {served.config['sliding_window']}"]
        return " \\\n    ".join(parts)
    if served.engine == "safeailab":
        names = f"base_model_path={served.target or 'TARGET'!r}, ea_model_path={str(served.output)!r}"
        code = f"EaModel.from_pretrained(use_eagle3={served.method == 'eagle3'}, {names}, depth={num})"
        return f"python -c {shlex.quote(f'from eagle.model.ea_model import EaModel; model = {code}')}"
    converted = f"python convert_hf_to_gguf.py {target} --outtype f16 --outfile target.gguf\n"
    if served.method == "eagle3":
        converted += f"python convert_hf_to_gguf.py {output} --target-model-dir {target} --outtype f16 --outfile draft.gguf\n"
        return converted + f"llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max {num}"
    draft = " ".join(shlex.quote(str(served.output / path.name)) for path in served.output.glob("*.gguf"))
    return converted + f"llama-server -m target.gguf -md {draft} --spec-type draft-simple --spec-draft-n-max {num}"


def expectation(report: Mapping[str, Any] | None) -> str:
    """What was measured, and under which settings."""
    if report is None:
        return "Not measured: no report.json was named by `report=` or lay in `../report` beside the draft. `specdistill eval` writes one."
    row, settings = report["results"][0], report["settings"]
    length = row.get("mean_acceptance_length")
    if length is None:
        return "Not measured: the report has no acceptance length."
    low, high = row.get("mean_acceptance_length_ci95") or (length, length)
    positions = " / ".join(f"{rate:.0%}" for rate in row["acceptance_rate_per_position"])
    drafted = f"{settings['num_speculative_tokens']} drafted tokens in a chain at temperature {settings['temperature']:g}"
    where = f"{row['num_prompts']} prompts of suite {row['suite']}"
    target = f"{report['target']['model']} in {report['target']['dtype']}"
    return f"""Acceptance length **{length:.2f}** (95 % interval {low:.2f} to {high:.2f}), the target's own token included; accepted by
position: {positions}. Measured in transformers with {drafted}, on {where},
target {target}. Other prompts and temperatures give other numbers, and trees more."""


def find_report(draft: Path, report: Path | None, method: str) -> dict[str, Any] | None:
    """A draft's report.json: the file or folder that was named, or `<run>/report` of `<run>/draft`; None where there is none.

    Raises UserError when it was named and is not there, cannot be read, or is the report of a draft of another method.
    """
    path = report or draft.absolute().parent / "report"
    path = path / "report.json" if path.is_dir() else path
    if report is None and not path.is_file():
        return None
    expected = f"the report.json of a draft of method {method}"
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = read["draft"]["method"]
        expectation(read)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError("report", got=f"{path} ({error or type(error).__name__})", expected=expected) from error
    if found != method:
        raise UserError("report", got=f"{path}, of a draft of method {found}", expected=expected)
    return read
