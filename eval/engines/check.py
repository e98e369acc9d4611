"""Decode with a draft in vLLM or SGLang and here, on the same prompts: are completions the same, is as much accepted?

    python eval/engines/check.py target=path/to/model draft=runs/mine/draft engine=vllm python=path/to/vllm/bin/python output_dir=runs/check

`python` is that of the engine's own environment. The draft is exported for the engine into <output_dir>/served; the counts go to
<output_dir>/engine.json. Exit code 1 when something differs: in float32 any completion, and in any dtype the acceptance length by more
than the tolerance. Decoding is greedy and goes on past stop tokens.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from specdistill.command import check_writable, run
from specdistill.engines import ENGINES, engines_with
from specdistill.errors import ExitCode, UserError
from specdistill.export.export import export
from specdistill.measurement import engine_counts
from specdistill.measurement.engine_counts import Job, generate_here, num_same
from specdistill.methods.load import load_proposer, locate, method_of
from specdistill.recipe.fields import Section, like, one_of, option
from specdistill.recipe.sections import EvalConfig, TargetConfig
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget


class CheckOptions(Section):
    target: str = option(..., "pico, a folder or a Hub id")
    draft: str = option(..., "draft, a folder or a Hub id")
    engine: Annotated[str, one_of(lambda: engines_with("plain_options"))] = option("vllm", "what serves it")
    python: str = option(..., "Python of the environment in which the engine is installed")
    output_dir: str = option(..., "a new folder for the served draft, the engine's log and engine.json")
    suite: str | None = like(EvalConfig, "suite")
    num_prompts: int = option(16, "prompts used, spread evenly over the suite's categories", ge=1)
    num_speculative_tokens: int = like(EvalConfig, "num_speculative_tokens")
    max_new_tokens: int = like(EvalConfig, "max_new_tokens")
    dtype: Literal["float32", "bfloat16", "float16"] = like(TargetConfig, "dtype")
    tolerance: float = option(0.01, "acceptance lengths may differ by this share", ge=0)


def main(options: CheckOptions) -> ExitCode:
    folder, k, length = Path(options.output_dir), options.num_speculative_tokens, options.max_new_tokens
    check_writable(folder, "output_dir")
    if not Path(options.python).is_file():
        raise UserError("python", got=options.python, expected="the Python of the engine's environment")

    # Here
    draft = locate(options.draft, key="draft")
    method = method_of(draft, key="draft")
    target = FrozenTarget.load(options.target, dtype=options.dtype)
    engine_counts.ignore_stop_tokens(target)
    proposer = load_proposer(method, draft, target, key="draft")
    suite = load_suite(options.suite, options.target)
    limits = {"max_new_tokens": length + k, "max_length": target.max_length, "num_prompts": options.num_prompts}
    prompts = [prompt.token_ids for prompt in tokenize(suite, target.tokenizer, **limits)]
    plain_here = generate_here(target, None, prompts, max_new_tokens=length)
    drafted_here = generate_here(target, proposer, prompts, max_new_tokens=length, num_speculative_tokens=k)

    # In the engine
    files = TargetFiles.of(options.target)
    export(draft, options.engine, folder / "served", files, num_speculative_tokens=k)
    engine = ENGINES[options.engine]
    assert engine.plain_options is not None
    without = engine.plain_options(files.name, options.dtype, target.max_length)
    with_draft = without | engine.draft_options(method, str(folder / "served"), k)
    jobs = [Job(without, prompts, length), Job(with_draft, prompts, length, k)]
    version, (plain_engine, drafted_engine) = engine_counts.generate_in_engine(
        options.engine, Path(options.python), jobs, folder
    )

    # Compared
    here, in_engine = engine_counts.total(drafted_here), engine_counts.total(drafted_engine)
    difference = abs(in_engine.mean_acceptance_length / here.mean_acceptance_length - 1)
    same = {
        "in the engine with and without the draft": num_same(drafted_engine, plain_engine),
        "in the engine and here, without the draft": num_same(plain_engine, plain_here),
        "in the engine and here, with the draft": num_same(drafted_engine, drafted_here),
    }
    passed = difference <= options.tolerance and (options.dtype != "float32" or set(same.values()) == {len(prompts)})
    result = {
        **options.model_dump(),
        "method": method,
        "version": version,
        "num_prompts": len(prompts),
        "same_completions": same,
        "here": asdict(here),
        "in_engine": asdict(in_engine),
        "passed": passed,
    }
    (folder / "engine.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for which, number in same.items():
        print(f"same completions {which}: {number} of {len(prompts)}")
    for name, counts in {"here": here, f"{options.engine} {version}": in_engine}.items():
        positions, average = " ".join(map(str, counts.accepted_per_position)), counts.mean_acceptance_length
        print(f"{name}: {counts.num_drafts} drafts, accepted by position {positions}, acceptance length {average:.4f}")
    print("passed" if passed else f"not passed; see {folder}")
    return ExitCode.DONE if passed else ExitCode.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run(main, CheckOptions))
