"""Record what the commands compute: training curves, counts of accepted tokens, exported tensors.

    # a new record; prints what differs from record.json, to the last bit
    python tests/golden/record.py OUT.json
    python tests/golden/record.py OUT.json curves exports/mtp  # only these parts
    # renews the record that the tests compare with
    python tests/golden/record.py tests/golden/record.json

A change of numbers on purpose renews the record.

Every command is a user's, on pico, in float32, with one thread. It runs in a child of this process
that starts with the libraries loaded: thirty commands would otherwise spend most of their time
importing. The text to train on is taken from the prompt suites, whose files are fixed, and not from
the standard library of the Python at hand.
"""

import os
import sys
from pathlib import Path

# These are set before the libraries that read them are imported. One thread, as more would round
# sums otherwise; no network and no display.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Import this checkout, whichever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hashlib
import importlib.util
import json
import multiprocessing
import runpy
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("record.json")

# ---- Every script, key and name of a column that is used here. {name} is a file or folder that the
# record makes. --------------------

TRAIN = (
    "data.source={texts}",
    "data.cache_dir={cache}",
    "data.regenerate=null",
    "train.bf16=false",
    "train.max_steps=20",
    "train.warmup_steps=5",  # so that the learning rate falls, too
    "train.logging_steps=1",
    "train.eval_strategy=steps",
    "train.eval_steps=20",
    "train.save_strategy=no",
    "train.load_best_model_at_end=false",
    "train.disable_tqdm=true",
    "train.per_device_train_batch_size=2",
)
# Muon orthogonalises in bfloat16, which makes last bits that differ between machines matter at
# once; AdamW is steadier.
HEAD = (
    *TRAIN,
    "data.max_length=128",
    "draft.ttt_steps=3",
    "optimizer=adamw",
    "train.learning_rate=1e-2",
)
EAGLE = (*HEAD, "train.per_device_train_batch_size=4", "draft.intermediate_size=256")
SMALL = (*TRAIN, "data.max_length=192")
CURVES = {
    "eagle3": ("train/eagle.py", "recipe=pico/eagle3", *EAGLE, "draft.vocab_size=768"),
    "eagle": ("train/eagle.py", "recipe=pico/eagle", *EAGLE, "loss.noise=0.05"),
    "mtp": ("train/eagle.py", "recipe=pico/mtp", *HEAD, "train.gradient_accumulation_steps=2"),
    "draft_model": (
        "train/draft.py",
        "recipe=pico/draft",
        *SMALL,
        "optimizer=adamw",
        "train.learning_rate=2e-3",
    ),
    "draft_model, a sum of divergences, LoRA, on-policy": (
        "train/draft.py",
        "recipe=pico/draft",
        *SMALL,
        "draft.lora.rank=8",
        (
            "loss.divergence=[{{name: forward_kl, weight: 0.7}}, {{name: jsd, weight: 0.3, beta:"
            " 0.4}}]"
        ),
        "loss.temperature=1.5",
        "on_policy.fraction=0.5",
        "on_policy.num_tokens=24",
        "optimizer=adamw",
        "train.learning_rate=1e-3",
    ),
    "draft_model, hard labels, from scratch, Muon": (
        "train/draft.py",
        "recipe=pico/draft",
        *SMALL,
        "loss.labels=hard",
        "draft.init=scratch",
        "draft.hidden_size=64",
        "optimizer=muon_adamw",
    ),
    "eagle3, Muon": (
        "train/eagle.py",
        "recipe=pico/eagle3",
        *EAGLE,
        "optimizer=muon_adamw",
        "train.learning_rate=2e-2",
        "train.max_steps=4",
        "train.eval_steps=4",
    ),
}
LOG = ("run/history.json", "log")  # a run's file, and the key of the Trainer's entries in it
LOGGED = ("loss", "grad_norm", "learning_rate")
EVALUATED = ("eval_loss", "eval_accuracy", "eval_acceptance")  # and what begins so

EVAL = (
    "eval/run.py",
    "target=pico",
    "suite=pico",
    "gate={gate}",
    "eval.num_prompts=4",
    "eval.num_speculative_tokens=3",
    "eval.max_new_tokens=24",
    "eval.repeats=1",
    "eval.warmup=0",
    "eval.sampling_draws=0",
    "eval.seed=3",
)
GATE = "- {metric: mean_acceptance_length, min: 1}\n"  # passes, whatever is measured
SAMPLED, TOGETHER = "eval.sweep.temperature=[0.8]", "eval.sweep.batch_size=[4]"
TREE = "{{budget: 8, depth: 3, top_k: 4}}"
REPORTS = {
    "ngram": (*EVAL, "method=ngram", SAMPLED),
    "eagle3": (
        *EVAL,
        "method=eagle3",
        "draft={eagle3}",
        SAMPLED,
        TOGETHER,
        f"eval.sweep.tree=[{TREE}]",
    ),
    "eagle": (*EVAL, "method=eagle", "draft={eagle}"),
    "mtp": (*EVAL, "method=mtp", "draft={mtp}"),
    "draft_model": (*EVAL, "method=draft_model", "draft={draft_model}", SAMPLED, TOGETHER),
    "draft_model, tree": (*EVAL, "method=draft_model", "draft={draft_model}", f"eval.tree={TREE}"),
}
ROWS = "results"  # of report.json
SETTINGS = ("num_speculative_tokens", "temperature", "batch_size", "tree", "category")
COUNTS = (
    "num_prompts",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_position",
    "num_new_tokens",
)
# of a row of samples.jsonl
ROUNDS, DRAFTED, ACCEPTED, EMITTED = "rounds", "drafted", "accepted", "emitted"

EXPORT = ("-m specdistill", "export", "dry_run=true", "train.seed=0")
EXPORTS = {
    "eagle3, vllm": (*EXPORT, "recipe=pico/eagle3", "engine=vllm"),
    "eagle3, sglang": (*EXPORT, "recipe=pico/eagle3", "engine=sglang"),
    "eagle3, speculators": (
        *EXPORT,
        "recipe=pico/eagle3",
        "engine=speculators",
        "draft.vocab_size=500",
    ),
    "eagle3, gguf": (
        *EXPORT,
        "recipe=pico/eagle3",
        "draft.fc_norm=false",
        "draft.norm_output=false",
        "engine=gguf",
    ),
    "eagle3 of another shape, vllm": (
        *EXPORT,
        "recipe=pico/eagle3",
        "engine=vllm",
        "draft.num_layers=2",
        "draft.vocab_size=500",
        "draft.aux_layers=[1,4,9,14]",
    ),
    "eagle, vllm": (*EXPORT, "recipe=pico/eagle", "engine=vllm"),
    "eagle, sglang": (*EXPORT, "recipe=pico/eagle", "engine=sglang"),
    "draft_model, vllm": (*EXPORT, "recipe=pico/draft", "engine=vllm"),
    "draft_model, sglang": (*EXPORT, "recipe=pico/draft", "engine=sglang"),
    "mtp of qwen3_next, vllm": (*EXPORT, "recipe=pico/mtp", "engine=vllm", "target={qwen3_next}"),
    "mtp of qwen3_next, sglang": (
        *EXPORT,
        "recipe=pico/mtp",
        "engine=sglang",
        "target={qwen3_next}",
    ),
    "mtp of deepseek_v3, vllm": (*EXPORT, "recipe=pico/mtp", "engine=vllm", "target={deepseek_v3}"),
    "mtp of deepseek_v3, its own layer, vllm": (
        *EXPORT,
        "recipe=pico/mtp",
        "engine=vllm",
        "target={deepseek_v3}",
        "draft.init=null",
    ),
}
# Keys of a config.json that are not compared: versions of libraries, paths on this machine, and the
# record of a target that lies there.
NOT_COMPARED = {
    "transformers_version",
    "speculators_version",
    "name_or_path",
    "_name_or_path",
    "specdistill",
}

# -------------------------------------------------------------------------------------------------

# What the commands import in addition to specdistill, which a child imports itself. DeepSpeed is
# there where it is installed.
LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "evaluate",
    "matplotlib.pyplot",
    "omegaconf",
    "peft",
    "rich.console",
    "scipy.io",
    "scipy.stats",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


def build_record(folder: Path, only: Sequence[str]) -> dict[str, Any]:
    """Run the commands in an empty folder and return the whole record.

    only: beginnings of the parts to record, with the trainings that they need; all parts if empty.
    """

    def select(part: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if not only or f"{part}/{name}".startswith(tuple(only))]

    curves, reports, exports = (
        select("curves", CURVES),
        select("reports", REPORTS),
        select("exports", EXPORTS),
    )
    curves += [
        name for name in CURVES if any(f"draft={{{name}}}" in REPORTS[report] for report in reports)
    ]
    places = prepare(folder) | write_targets(folder)
    return {
        "curves": {name: record_curve(name, folder, places) for name in dict.fromkeys(curves)},
        "reports": {name: record_report(name, folder, places) for name in reports},
        "exports": {name: record_export(name, folder, places) for name in exports},
    }


def prepare(folder: Path) -> dict[str, Path]:
    """Write what the commands read, and return the paths that their keys name.

    These include the drafts that the trainings will leave.
    """
    places = {
        "texts": folder / "texts.jsonl",
        "cache": folder / "cache",
        "gate": folder / "gate.yaml",
    }
    places["texts"].write_text(
        "".join(json.dumps(row) + "\n" for row in build_training_rows()), encoding="utf-8"
    )
    places["gate"].write_text(GATE, encoding="utf-8")
    return places | {name: folder / "curves" / name / "draft" for name in CURVES}


def build_training_rows() -> Iterator[dict[str, Any]]:
    """Yield texts, every fourth as a conversation.

    Its first line is the question, the rest the answer, which alone has a loss.
    """
    files = (ROOT / "eval" / "suites" / f"{name}.jsonl" for name in ("pico-dev", "pico-context"))
    rows = [
        json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()
    ]
    texts = [row["prompt"] for row in rows if "prompt" in row]
    for number, text in enumerate(texts):
        question, _, answer = text.strip("\n").partition("\n")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield (
            {"text": None, "messages": turns}
            if number % 4 == 3 and answer
            else {"text": text, "messages": None}
        )


def write_targets(folder: Path) -> dict[str, Path]:
    """Write tiny random targets whose multi-token-prediction layers engines load.

    pico is of no such type.
    """
    places = {kind: folder / kind for kind in ("qwen3_next", "deepseek_v3")}
    for kind, place in places.items():
        run_in_child(folder / f"{kind}.log", write_target, kind, place)
    return places


def write_target(kind: str, folder: Path) -> None:
    from tests.mtp_targets import write_checkpoint

    write_checkpoint(kind, folder)


def record_curve(name: str, folder: Path, places: Mapping[str, Path], *keys: str) -> dict[str, Any]:
    """Return a training's numbers as the Trainer logged them, step by step.

    Those of the evaluation at its end follow. keys: more of the recipe's.
    """
    output = folder / "curves" / name
    start(f"curves/{name}", (*CURVES[name], f"train.output_dir={output}", *keys), folder, places)
    file, key = LOG
    entries = json.loads((output / file).read_text(encoding="utf-8"))[key]
    steps = {what: [entry[what] for entry in entries if what in entry] for what in LOGGED}
    return steps | {
        what: value
        for entry in entries
        for what, value in entry.items()
        if what.startswith(EVALUATED)
    }


def record_report(name: str, folder: Path, places: Mapping[str, Path]) -> dict[str, Any]:
    """Return a report's counts, by settings and category, and hashes of each prompt's tokens.

    `emitted` is of the completion, `rounds` of what each round drafted and accepted; both in the
    order of the rows, that is by settings.
    """
    output = folder / "reports" / name
    start(f"reports/{name}", (*REPORTS[name], f"output_dir={output}"), folder, places)
    rows = json.loads((output / "report.json").read_text(encoding="utf-8"))[ROWS]
    samples = [
        json.loads(line)
        for line in (output / "samples.jsonl").read_text(encoding="utf-8").split("\n")
        if line
    ]
    emitted = [
        [sample["first_token"], *(entry[EMITTED] for entry in sample[ROUNDS])] for sample in samples
    ]
    rounds = [[(entry[DRAFTED], entry[ACCEPTED]) for entry in sample[ROUNDS]] for sample in samples]
    return {
        "rows": [{what: row[what] for what in (*SETTINGS, *COUNTS)} for row in rows],
        "emitted": [
            f"{sample['id']} {compute_digest(tokens)}"
            for sample, tokens in zip(samples, emitted, strict=True)
        ],
        "rounds": [
            f"{sample['id']} {compute_digest(tokens)}"
            for sample, tokens in zip(samples, rounds, strict=True)
        ],
    }


def record_export(name: str, folder: Path, places: Mapping[str, Path]) -> dict[str, Any]:
    """Return a hash of every tensor that an export of an untrained draft holds, and its config.

    The draft is untrained because the initialization is the same on every x86-64 machine; weights
    after twenty steps differ in the last bits.
    """
    output = folder / "exports" / name
    start(f"exports/{name}", (*EXPORTS[name], f"output_dir={output}"), folder, places)
    tensors: dict[str, str] = {}
    export_record: dict[str, Any] = {"tensors": tensors}
    for path in sorted(output.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= {
                key: compute_tensor_digest(tensor) for key, tensor in load_file(path).items()
            }
        elif path.suffix == ".bin":
            tensors |= {
                key: compute_tensor_digest(tensor)
                for key, tensor in torch.load(path, weights_only=True).items()
            }
        elif path.name == "config.json":
            export_record["config"] = drop_uncompared_keys(
                json.loads(path.read_text(encoding="utf-8"))
            )
    assert tensors, output
    return export_record


def drop_uncompared_keys(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: drop_uncompared_keys(value)
            for key, value in config.items()
            if key not in NOT_COMPARED
        }
    return [drop_uncompared_keys(item) for item in config] if isinstance(config, list) else config


def compute_tensor_digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return compute_digest([str(tensor.dtype), list(tensor.shape), content.hex()])


def compute_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def start(name: str, command: Sequence[str], folder: Path, places: Mapping[str, Path]) -> None:
    """Run a command, with the places in its keys filled in, and say how long it took."""
    begin = time.monotonic()
    script, *keys = command
    run_in_child(
        folder / f"{name.replace('/', ' ')}.log",
        run_script,
        script,
        [key.format(**places) for key in keys],
    )
    print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def run_script(script: str, keys: list[str]) -> None:
    """Run a script as `python script keys` does; `-m name` is a module."""
    sys.argv = [str(ROOT / script), *keys]
    if script.startswith("-m "):
        runpy.run_module(script.removeprefix("-m "), run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_in_child(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a process of its own, so that nothing it leaves reaches the next one.

    log: the file for what it prints.
    """
    child = multiprocessing.get_context("fork").Process(
        target=_run_logged, args=(log, work, *arguments)
    )
    child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit(f"{log.stem}: exit code {child.exitcode}\n{log.read_text(encoding='utf-8')}")


def _run_logged(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    # In a forked process, torch replaces its pool of threads at the next call that asks for one,
    # without a lock: two threads that load weights at once may find none ("Invalid thread pool").
    torch.set_num_threads(torch.get_num_threads())
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(log.parent)
    work(*arguments)


def find_differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield where two records are not the same, to the last bit."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if key in before and key in now:
                yield from find_differences(before[key], now[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: {'is new' if key in now else 'is gone'}"
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from find_differences(*pair, f"{where}[{index}]")
    elif before != now:
        yield f"{where}: {before} was recorded, now {now}"


def main(output: Path, only: Sequence[str]) -> int:
    """Write a record; return 1 if it differs, to the last bit, from what the tests compare with."""
    with tempfile.TemporaryDirectory(prefix="specdistill-golden-") as folder:
        os.environ["HF_HOME"] = f"{folder}/huggingface"
        for library in LIBRARIES:
            if library != "deepspeed" or importlib.util.find_spec(library):
                importlib.import_module(library)
        new_record = build_record(Path(folder), only)
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    output.write_text(json.dumps(new_record, indent=1) + "\n", encoding="utf-8")
    if only:
        before = {
            part: {name: before[part][name] for name in new_record[part] if name in before[part]}
            for part in before
        }
    differences = list(find_differences(before, new_record))
    print("\n".join(differences) or f"{RECORD.name} says the same")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
