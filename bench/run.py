"""Time what users wait for: decoding (also transformers' own), a training step, regeneration.

    make bench

writes bench/results/<device>.json and its table in docs/performance.md. The numbers are medians of
several repetitions on an otherwise idle machine. Nothing here is a test.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from bench.counting import ignore_stop_tokens
from bench.pages import write_between
from specdistill.common.project import ROOT
from specdistill.decoding.decoder import Decoder, read_clock
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.evaluation.report.text import format_table
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.targets.batch_generate import choose_fast_dtype, generate_batch, prepare_generation
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import build_training_arguments
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.trainer import DistillationTrainer

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "performance.md"

Results = dict[str, Any]  # the content of the JSON: the machine, and the numbers of each part


def measure_median_seconds(
    target: FrozenTarget, work: Callable[[], object], repeats: int = 5
) -> float:
    """Return the median seconds that a function takes, after one call that is not timed.

    Args:
        target: the target, on whose device the function works.
        work: the function.
        repeats: the number of timed calls.
    """
    # The first call loads kernels and allocates memory.
    work()
    times = []
    for _ in range(repeats):
        start = read_clock(target.device)
        work()
        times.append(read_clock(target.device) - start)
    return statistics.median(times)


def measure_decoding(target: FrozenTarget, new_tokens: int = 96) -> dict[str, float]:
    """Measure plain decoding, transformers' greedy `generate()`, and decoding with an EAGLE-3 head.

    The head is untrained and drafts K = 4 tokens per round. The time of a round does not depend on
    how many of them are accepted.

    Returns:
        Tokens per second of plain decoding and of `generate()`; `step_ms`, the milliseconds of a
        plain step; `verify_ratio_v`, the time of verifying a round, and `draft_ratio_c`, the time
        of drafting one token, both divided by the time of a plain step.
    """
    # Time plain decoding, and transformers' decoding of the same prompt.
    prompt = target.tokenizer("def main(arguments):\n    ").input_ids
    plain = Decoder(target)
    plain_seconds = measure_median_seconds(
        target, lambda: plain.generate(prompt, max_new_tokens=new_tokens)
    )
    generate = partial(
        target.model.generate,
        torch.tensor([prompt], device=target.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    hf_generate_seconds = measure_median_seconds(target, generate)

    # Take the median times of a plain step, and of a round with four draft tokens.
    steps = plain.generate(prompt, max_new_tokens=new_tokens).rounds
    chain = Decoder(target, HeadProposer(build_eagle3(target)))
    rounds = chain.generate(prompt, max_new_tokens=new_tokens, num_speculative_tokens=4).rounds
    step_seconds = statistics.median(entry.verify_seconds for entry in steps)
    verify_seconds = statistics.median(entry.verify_seconds for entry in rounds)
    draft_seconds = statistics.median(entry.draft_seconds for entry in rounds)
    return {
        "plain_tokens_per_second": new_tokens / plain_seconds,
        "hf_generate_tokens_per_second": new_tokens / hf_generate_seconds,
        "step_ms": 1000 * step_seconds,
        "verify_ratio_v": verify_seconds / step_seconds,
        "draft_ratio_c": draft_seconds / 4 / step_seconds,
    }


def draw_rows(target: FrozenTarget, rows: int, length: int) -> Dataset:
    """Return training rows of random tokens; each row is one document with a loss on every token.

    Args:
        target: the target, whose vocabulary the tokens are from.
        rows: the number of rows.
        length: the tokens of each row.
    """
    generator = torch.Generator().manual_seed(0)

    # Ids below 4 are left out, because they are special tokens of the model pico.
    ids = torch.randint(4, target.vocab_size, (rows, length), generator=generator)
    columns = {
        "input_ids": ids.tolist(),
        "loss_mask": [[1] * length] * rows,
        "document_ids": [[0] * length] * rows,
        "position_ids": [list(range(length))] * rows,
    }
    return Dataset.from_dict(columns)


def measure_training_step(
    target: FrozenTarget, rows: int = 16, length: int = 256
) -> dict[str, float]:
    """Time training steps of an EAGLE-3 head, with the sizes of the recipe for pico.

    Args:
        target: the target.
        rows: rows of a step.
        length: tokens of a row.

    Returns:
        The seconds of a step, and how many tokens per second it trains on.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A few steps with the settings of the recipe, without logging and checkpoints.
        arguments = build_training_arguments(
            {
                "output_dir": folder,
                "per_device_train_batch_size": rows,
                "bf16": choose_fast_dtype(target.device) == torch.bfloat16,
                "max_steps": 6,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "learning_rate": 1e-4,
            }
        )

        # Train a fresh head with an unroll of five steps.
        draft = build_eagle3(target)
        data = draw_rows(target, rows, length)
        objective = TrainingTimeTest(draft, forward_kl, 5)
        optimizer = MuonAdamW(draft, 1e-4)
        trainer = DistillationTrainer(
            objective, target, arguments, data, data, save=save_eagle3, optimizer=optimizer
        )

        # This first training of six steps warms up. `measure_median_seconds` trains twice more,
        # and times the last training.
        trainer.train()
        seconds = measure_median_seconds(target, trainer.train, repeats=1) / 6
    return {"step_seconds": seconds, "tokens_per_second": rows * length / seconds}


def measure_regeneration(
    target: FrozenTarget, rows: int = 256, new_tokens: int = 96
) -> dict[str, float]:
    """Measure how fast the target generates training data, in batches of many rows.

    Args:
        target: the target.
        rows: prompts of a batch.
        new_tokens: tokens generated for each prompt.

    Returns:
        The generated tokens per second, over all rows.
    """
    # All prompts have 32 tokens. Which tokens they are does not change the time. Answers are
    # sampled at temperature 0.8, and no token ends them early (`end_ids`).
    prompts = [list(range(10, 42))] * rows
    with prepare_generation(target.model, choose_fast_dtype(target.device)) as model:  # type: ignore[arg-type]
        seconds = measure_median_seconds(
            target,
            lambda: generate_batch(
                model, prompts, [0.8] * rows, max_new_tokens=new_tokens, end_ids=(), seed=0
            ),
            repeats=2,
        )
    return {"tokens_per_second": rows * new_tokens / seconds}


def main() -> None:
    """Measure decoding, training and regeneration with pico, and write docs/performance.md."""
    # Run all measurements on the same target.
    target = FrozenTarget.load("pico")
    ignore_stop_tokens(target)  # So that all decoders generate equally many tokens.
    results: Results = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_hardware(target.device),
        "software": list_software(),
    }
    measurements = {
        "decoding": measure_decoding,
        "training_step": measure_training_step,
        "regeneration": measure_regeneration,
    }
    for part, measure in measurements.items():
        print(f"Measuring {part} …", file=sys.stderr)
        results[part] = {name: round(value, 4) for name, value in measure(target).items()}

    # Write the results, and the table of docs/performance.md.
    (RESULTS / f"{target.device.type}.json").write_text(
        json.dumps(results, indent=2) + "\n", encoding="utf-8"
    )
    write_between(PAGE, "bench", format_page(results))
    print(json.dumps(results, indent=2))


def format_page(results: Results) -> str:
    """Return the results as Markdown: a heading and a table with a row for each number."""
    table = format_table(("what", "measure", "value"), list_measures(results))
    return f"{format_heading(results)}\n\n{table}"


def format_heading(results: Results) -> str:
    """Return a Markdown heading with the machine, and a line with the date and the versions."""
    software = results["software"]
    versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "transformers", "python"))
    hardware = results["hardware"]
    title = f"### {hardware['name']}, {hardware['cpu_threads']} CPU threads"
    return f"{title}\n\n{results['created']}; {versions}."


def list_measures(results: Results) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each number: the measurement, the measure and its value."""
    for part, numbers in results.items():
        if part not in ("created", "hardware", "software"):
            for name, value in numbers.items():
                yield part.replace("_", " "), name.replace("_", " "), f"{value:g}"


if __name__ == "__main__":
    main()
