"""Time what users wait for: decoding and transformers' own, a training step, regeneration.

    make bench

writes bench/results/<device>.json, and what docs/performance.md has of these files. Medians of several repetitions on an otherwise
idle machine; nothing here is a test.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from bench.counting import ignore_stop_tokens
from bench.pages import write_between
from specdistill.decoding.decoder import Decoder, now
from specdistill.losses.divergence import forward_kl
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.chains.unroll import TrainingTimeTest
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.project import ROOT
from specdistill.report.text import table
from specdistill.targets.batch_generate import fast_dtype, generate, generation_mode
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import training_arguments
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.trainer import DraftTrainer

RESULTS = Path(__file__).parent / "results"
DEVICES = ("cpu", "cuda")  # a file of results for each
PAGE = ROOT / "docs" / "performance.md"


def median_seconds(target: FrozenTarget, work: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of a piece of work on the target's device, after one untimed call."""
    work()
    times = []
    for _ in range(repeats):
        start = now(target.device)
        work()
        times.append(now(target.device) - start)
    return statistics.median(times)


def decoding(target: FrozenTarget, new_tokens: int = 96) -> dict[str, float]:
    """Plain decoding and transformers' greedy generate, and the cost of a round of an (untrained) EAGLE-3 chain."""
    prompt = target.tokenizer("def main(arguments):\n    ").input_ids
    ids = torch.tensor([prompt], device=target.device)
    model: Any = target.model
    plain = Decoder(target)
    ours = median_seconds(target, lambda: plain.generate(prompt, max_new_tokens=new_tokens))
    theirs = median_seconds(
        target,
        lambda: model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0),
    )
    steps = plain.generate(prompt, max_new_tokens=new_tokens).rounds
    chain = Decoder(target, HeadProposer(build_eagle3(target)))
    rounds = chain.generate(prompt, max_new_tokens=new_tokens, num_speculative_tokens=4).rounds
    step = statistics.median(r.verify_seconds for r in steps)
    return {
        "plain_tokens_per_second": new_tokens / ours,
        "hf_generate_tokens_per_second": new_tokens / theirs,
        "step_ms": 1000 * step,
        "verify_ratio_v": statistics.median(r.verify_seconds for r in rounds) / step,
        "draft_ratio_c": statistics.median(r.draft_seconds for r in rounds) / 4 / step,
    }


def training_step(target: FrozenTarget, rows: int = 16, length: int = 256) -> dict[str, float]:
    """Optimizer steps of the pico recipe's shape: tokens that pass through target and draft per second."""
    generator = torch.Generator().manual_seed(0)
    columns = {
        "input_ids": torch.randint(
            4, target.vocab_size, (rows, length), generator=generator
        ).tolist(),
        "loss_mask": [[1] * length] * rows,
        "document_ids": [[0] * length] * rows,
        "position_ids": [list(range(length))] * rows,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(
            {
                "output_dir": folder,
                "per_device_train_batch_size": rows,
                "bf16": fast_dtype(target.device) == torch.bfloat16,
                "max_steps": 6,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "learning_rate": 1e-4,
            }
        )
        draft = build_eagle3(target)
        data = Dataset.from_dict(columns)
        objective = TrainingTimeTest(draft, forward_kl, 5)
        optimizer = MuonAdamW(draft, 1e-4)
        trainer = DraftTrainer(
            objective, target, arguments, data, data, save=save_eagle3, optimizer=optimizer
        )
        trainer.train()
        seconds = median_seconds(target, trainer.train, repeats=1) / 6
    return {"step_seconds": seconds, "tokens_per_second": rows * length / seconds}


def regeneration(target: FrozenTarget, rows: int = 256, new_tokens: int = 96) -> dict[str, float]:
    """Tokens the target generates per second, in the batches that regeneration uses."""
    prompts = [list(range(10, 42))] * rows
    with generation_mode(target.model, fast_dtype(target.device)) as model:  # type: ignore[arg-type]
        seconds = median_seconds(
            target,
            lambda: generate(
                model, prompts, [0.8] * rows, max_new_tokens=new_tokens, end_ids=(), seed=0
            ),
            repeats=2,
        )
    return {"tokens_per_second": rows * new_tokens / seconds}


def main() -> None:
    target = FrozenTarget.load("pico")
    ignore_stop_tokens(target)  # so that all decoders generate equally many tokens
    results: dict[str, Any] = {"created": datetime.now(UTC).isoformat(timespec="seconds")}
    results |= {"hardware": hardware(target.device), "software": software()}
    for measure in (decoding, training_step, regeneration):
        print(f"{measure.__name__} …", file=sys.stderr)
        results[measure.__name__] = {
            name: round(value, 4) for name, value in measure(target).items()
        }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{target.device.type}.json").write_text(
        json.dumps(results, indent=2) + "\n", encoding="utf-8"
    )
    paths = [path for device in DEVICES if (path := RESULTS / f"{device}.json").exists()]
    write_between(
        PAGE, "bench", page([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    )
    print(json.dumps(results, indent=2))


def page(all_results: list[dict[str, Any]]) -> str:
    """The results for people: one table for each piece of hardware."""
    return "\n\n".join(
        f"{heading(results)}\n\n{table(('what', 'measure', 'value'), measures(results))}"
        for results in all_results
    )


def heading(results: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {results['software'][name]}" for name in ("torch", "transformers", "python")
    )
    title = f"### {results['hardware']['name']}, {results['hardware']['cpu_threads']} CPU threads"
    return f"{title}\n\n{results['created']}; {versions}."


def measures(results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for what, numbers in results.items():
        if what not in ("created", "hardware", "software"):
            for name, value in numbers.items():
                yield what.replace("_", " "), name.replace("_", " "), f"{value:g}"


if __name__ == "__main__":
    main()
