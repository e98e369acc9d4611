"""What the commands compute today, to the last bit: training curves, counts of accepted tokens, exported tensors.

    python tests/golden/record.py OUT.json                         # a fresh record; says which values differ from record.json
    python tests/golden/record.py tests/golden/record.json         # renews the record that the tests compare with

Every command runs as a user would start it, on pico, in float32 and with one thread, in a child of this process that starts with the
libraries loaded: two dozen commands would otherwise spend most of their time importing. Training text is taken from the prompt suites,
whose files are fixed, and not from the standard library of the Python at hand. A change of numbers on purpose renews the record.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Before any library is loaded that reads them: one thread, as sums round otherwise with more; no network, and no display.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "MPLBACKEND": "Agg"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import hashlib
import json
import multiprocessing
import runpy
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gguf
import torch
from safetensors.torch import load_file

RECORD = Path(__file__).with_name("record.json")


class Command(NamedTuple):
    """A script or a module's verb, and its key=value arguments. {name} stands for a folder or file that the record prepares."""

    script: str
    keys: tuple[str, ...]


# ---- Every key of a recipe, of a report and of a log that the record uses ----------------------------------------------------------

DATA = ("data.source={texts}", "data.cache_dir={cache}", "data.regenerate=null")
TRAIN = (
    *DATA,
    "train.bf16=false",
    "train.max_steps=20",
    "train.warmup_steps=5",  # so that the rate also falls
    "train.logging_steps=1",
    "train.eval_strategy=steps",
    "train.eval_steps=20",
    "train.save_strategy=no",
    "train.load_best_model_at_end=false",
    "train.disable_tqdm=true",
    "train.per_device_train_batch_size=2",
)
HEAD = (*TRAIN, "data.max_length=128")
NARROW = (*HEAD, "draft.intermediate_size=128")  # the optimizer's part of a step grows with it
IN_PARTS = ("train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=2")
SMALL = (*TRAIN, "data.max_length=192")
CURVES = {
    "eagle3": Command("train/eagle.py", ("recipe=pico/eagle3", *NARROW, "draft.vocab_size=768")),
    "eagle": Command("train/eagle.py", ("recipe=pico/eagle", *NARROW, "loss.noise=0.05")),
    "mtp": Command("train/mtp.py", ("recipe=pico/mtp", *HEAD, *IN_PARTS)),
    "draft_model": Command("train/draft.py", ("recipe=pico/draft", *SMALL)),
    "draft_model, lora and its own text": Command(
        "train/draft.py",
        (
            "recipe=pico/draft",
            *SMALL,
            "draft.lora.rank=8",
            "loss.divergence=[{{name: forward_kl, weight: 0.7}}, {{name: jsd, weight: 0.3, beta: 0.4}}]",
            "loss.temperature=1.5",
            "on_policy.fraction=0.5",
            "on_policy.num_tokens=24",
            "optimizer=adamw",
            "train.learning_rate=1e-3",
        ),
    ),
    "draft_model, hard labels": Command(
        "train/draft.py", ("recipe=pico/draft", *SMALL, "loss.labels=hard", "draft.init=scratch", "draft.hidden_size=64")
    ),
}
HISTORY = ("run/history.json", "log")
LOGGED = ("loss", "grad_norm", "learning_rate")
MEASURED = ("eval_loss", "eval_accuracy", "eval_acceptance")  # and what begins with them

EVAL = (
    "target=pico",
    "suite=pico",
    "gate={gate}",
    "eval.num_prompts=4",
    "eval.num_speculative_tokens=3",
    "eval.max_new_tokens=40",
    "eval.repeats=1",
    "eval.warmup=0",
    "eval.sampling_draws=0",
    "eval.seed=3",
)
GATE = "- {metric: mean_acceptance_length, min: 1}\n"  # passes whatever is measured
SAMPLED, TOGETHER = "eval.sweep.temperature=[0.8]", "eval.sweep.batch_size=[4]"
TREE = "{{budget: 8, depth: 3, top_k: 4}}"
REPORTS = {
    "ngram": ("method=ngram", SAMPLED),
    "eagle3": ("method=eagle3", "draft={eagle3}", SAMPLED, TOGETHER, f"eval.sweep.tree=[{TREE}]"),
    "eagle": ("method=eagle", "draft={eagle}"),
    "mtp": ("method=mtp", "draft={mtp}"),
    "draft_model": ("method=draft_model", "draft={draft_model}", SAMPLED, TOGETHER),
    "draft_model, tree": ("method=draft_model", "draft={draft_model}", f"eval.tree={TREE}"),
}
COUNTS = ("num_prompts", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "num_new_tokens")
SETTINGS = ("num_speculative_tokens", "temperature", "batch_size", "tree")  # of a report's row

PLAIN_EAGLE3 = ("recipe=pico/eagle3", "draft.fc_norm=false", "draft.norm_output=false")  # what every engine can express
EAGLE_WIDTH = ("recipe=pico/eagle", "draft.num_attention_heads=2", "draft.num_key_value_heads=2")
EXPORTS = {
    "eagle3, vllm": ("recipe=pico/eagle3", "engine=vllm"),
    "eagle3, sglang": ("recipe=pico/eagle3", "engine=sglang"),
    "eagle3, speculators": ("recipe=pico/eagle3", "engine=speculators"),
    "eagle3, safeailab": (*PLAIN_EAGLE3, "engine=safeailab"),
    "eagle3, gguf": (*PLAIN_EAGLE3, "engine=gguf"),
    "eagle3 of another shape, vllm": (
        "recipe=pico/eagle3",
        "engine=vllm",
        "draft.num_layers=2",
        "draft.vocab_size=500",
        "draft.aux_layers=[1,4,9,14]",
    ),
    "eagle3 of another shape, speculators": ("recipe=pico/eagle3", "engine=speculators", "draft.vocab_size=500"),
    "eagle, vllm": ("recipe=pico/eagle", "engine=vllm"),
    "eagle, sglang": ("recipe=pico/eagle", "engine=sglang"),
    "eagle, safeailab": (*EAGLE_WIDTH, "engine=safeailab"),
    "draft_model, vllm": ("recipe=pico/draft", "engine=vllm"),
    "draft_model, sglang": ("recipe=pico/draft", "engine=sglang"),
    "draft_model, gguf": ("recipe=pico/draft", "engine=gguf"),
    "draft_model, gguf in 8 bits": ("recipe=pico/draft", "engine=gguf", "dtype=q8_0"),
    "mtp of qwen3_next, vllm": ("recipe=pico/mtp", "engine=vllm", "target={qwen3_next}"),
    "mtp of qwen3_next, sglang": ("recipe=pico/mtp", "engine=sglang", "target={qwen3_next}"),
    "mtp of deepseek_v3, vllm": ("recipe=pico/mtp", "engine=vllm", "target={deepseek_v3}"),
    "mtp of deepseek_v3, its own layer, vllm": ("recipe=pico/mtp", "engine=vllm", "target={deepseek_v3}", "draft.init=null"),
}
# Versions of libraries and places on this machine, in a config.json.
NOT_COMPARED = {"transformers_version", "speculators_version", "name_or_path", "_name_or_path"}

# ------------------------------------------------------------------------------------------------------------------------------------


def record(folder: Path) -> dict[str, Any]:
    """All of it, made in an empty folder."""
    places = prepare(folder)
    curves, reports, exports = {}, {}, {}
    for name, command in CURVES.items():
        curves[name] = trained(name, command, folder, places)
    for name, keys in REPORTS.items():
        reports[name] = measured(name, keys, folder, places)
    for name, keys in EXPORTS.items():
        exports[name] = exported(name, keys, folder, places)
    return {"curves": curves, "reports": reports, "exports": exports}


def prepare(folder: Path) -> dict[str, str]:
    """What commands read, and the names by which their keys call it."""
    places = {"texts": folder / "texts.jsonl", "cache": folder / "cache", "gate": folder / "gate.yaml"}
    places["texts"].write_text("".join(json.dumps(row) + "\n" for row in training_rows()), encoding="utf-8")
    places["gate"].write_text(GATE, encoding="utf-8")
    for kind in ("qwen3_next", "deepseek_v3"):
        places[kind] = folder / kind
        in_child(folder / f"{kind}.log", write_target, kind, places[kind])
    return {name: str(path) for name, path in places.items()}


def training_rows() -> Iterator[dict[str, Any]]:
    """Texts, every fourth as a conversation whose answer alone carries loss: its first line is the question, the rest is the answer."""
    files = (ROOT / "eval" / "suites" / f"{name}.jsonl" for name in ("pico-dev", "pico-context"))
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [row["prompt"] for row in rows if "prompt" in row]
    for number, text in enumerate(texts):
        question, _, answer = text.strip("\n").partition("\n")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"text": None, "messages": turns} if number % 4 == 3 and answer else {"text": text, "messages": None}


def write_target(kind: str, folder: Path) -> None:
    """A tiny random target of a type whose multi-token-prediction layer engines load; pico is none."""
    from tests.mtp_targets import write_checkpoint

    write_checkpoint(kind, folder)


def trained(name: str, command: Command, folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """The log of a training, every number of it as the Trainer wrote it; the draft is at `places[name]` from then on."""
    output = folder / "runs" / name
    start(command.script, (*command.keys, f"train.output_dir={output}"), places, log=folder / f"train {name}.log")
    places[name] = str(output / "draft")
    file, key = HISTORY
    entries = json.loads((output / file).read_text(encoding="utf-8"))[key]
    curve: dict[str, Any] = {what: [entry[what] for entry in entries if what in entry] for what in LOGGED}
    last = next(entry for entry in entries if MEASURED[0] in entry)
    return curve | {what: value for what, value in last.items() if what.startswith(MEASURED)}


def measured(name: str, keys: Sequence[str], folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """A report's counts by settings and category, and hashes of each prompt's tokens.

    `emitted` hashes the text's tokens, `rounds` what each round drafted and accepted, both in the order of the records.
    """
    output = folder / "reports" / name
    start("eval/run.py", (*EVAL, *keys, f"output_dir={output}"), places, log=folder / f"eval {name}.log")
    rows = json.loads((output / "report.json").read_text(encoding="utf-8"))["results"]
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text(encoding="utf-8").split("\n") if line]
    return {
        "rows": [{what: row[what] for what in (*SETTINGS, "category", *COUNTS)} for row in rows],
        "emitted": [
            f"{sample['id']} {digest([sample['first_token'], *(entry['emitted'] for entry in sample['rounds'])])}"
            for sample in samples
        ],
        "rounds": [
            f"{sample['id']} {digest([[entry['drafted'], entry['accepted']] for entry in sample['rounds']])}"
            for sample in samples
        ],
    }


def exported(name: str, keys: Sequence[str], folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """Every tensor that an export of an untrained draft holds, and its config.json.

    Untrained, because initial weights are the same on every machine, while those after a few steps differ in the last bits.
    """
    output = folder / "exports" / name
    start(
        "-m specdistill",
        ("export", "dry_run=true", "train.seed=0", *keys, f"output_dir={output}"),
        places,
        log=folder / f"export {name}.log",
    )
    tensors: dict[str, str] = {}
    fields: dict[str, str] = {}
    for path in sorted(output.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= {key: tensor_digest(tensor) for key, tensor in load_file(path).items()}
        elif path.suffix == ".bin":
            tensors |= {key: tensor_digest(tensor) for key, tensor in torch.load(path, weights_only=True).items()}
        elif path.suffix == ".gguf":
            reader = gguf.GGUFReader(path)
            for tensor in reader.tensors:
                kind = [tensor.tensor_type.name, tensor.shape.tolist()]
                tensors[tensor.name] = digest([kind, hashlib.sha256(tensor.data.tobytes()).hexdigest()])
            fields |= {key: digest(field.contents()) for key, field in reader.fields.items()}
    assert tensors, output
    config = output / "config.json"
    return {
        "tensors": tensors,
        **({"config": comparable(json.loads(config.read_text(encoding="utf-8")))} if config.is_file() else {}),
        **({"fields": fields} if fields else {}),
    }


def tensor_digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return digest([str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def comparable(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: comparable(value) for key, value in config.items() if key not in NOT_COMPARED}
    return [comparable(item) for item in config] if isinstance(config, list) else config


def start(script: str, keys: Sequence[str], places: dict[str, str], log: Path) -> None:
    """Run a command with {name} in its keys filled in."""
    print(f"{script} {' '.join(keys)}", file=sys.stderr, flush=True)
    in_child(log, run_command, script, [key.format(**places) for key in keys])


def run_command(script: str, arguments: list[str]) -> None:
    if script.startswith("-m "):
        sys.argv = [script, *arguments]
        runpy.run_module(script.removeprefix("-m "), run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(ROOT / script), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")


def in_child(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    """Run it in a process of its own, so that nothing it leaves behind reaches the next; what it prints goes to `log`."""
    child = multiprocessing.get_context("fork").Process(target=_logged, args=(log, work, *arguments))
    child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit(f"{log.stem}: exit code {child.exitcode}\n{log.read_text(encoding='utf-8')}")


def _logged(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(log.parent)
    try:
        work(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def load_libraries() -> None:
    """What the commands import, but for specdistill itself."""
    import accelerate
    import datasets
    import evaluate
    import matplotlib.pyplot
    import peft
    import scipy.stats
    import transformers.models.llama.modeling_llama
    import transformers.trainer

    assert all((accelerate, datasets, evaluate, matplotlib, peft, scipy, transformers))


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two records are not the same, to the last bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                yield f"{where}/{key}: {'missing' if key not in other else 'new'}"
            else:
                yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif one != other:
        yield f"{where}: {one} was recorded, {other} is now"


def main(output: Path) -> int:
    """Write a record; returns 1 when it is not exactly the one that the tests compare with."""
    folder = Path(tempfile.mkdtemp(prefix="specdistill-golden-"))
    os.environ["HF_HOME"] = str(folder / "huggingface")
    try:
        load_libraries()
        made = record(folder)
    finally:
        shutil.rmtree(folder)
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    found = list(differences(before, made))
    print("\n".join(found) if found else f"exactly as in {RECORD.name}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
