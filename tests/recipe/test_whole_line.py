"""Every recipe runs from its data to an export, by the commands that a user types.

A recipe runs as it stands in its file, for a tiny random target of its target's class; what the
tables below name is made smaller or replaced, and nothing else. `recipes/<target>/config.json` says
which class that is.
"""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdistill.common.documents import read_yaml
from specdistill.common.project import PICO, RECIPES
from specdistill.methods import METHODS
from specdistill.recipe.data_sources import CONVERSATIONS, EXCHANGES, PROMPTS, SELF_SOURCE
from specdistill.recipe.load import REQUIRED_MARK, merge_values
from specdistill.serving.engines import list_engines_with
from specdistill.serving.engines.engine import Serving
from tests.data.produce.openai_server import Behaviour, running
from tests.families import Config, Family, family_of, write_model
from tests.launches import environment
from tests.scripts import specdistill

EXCEPTED = {"pico/target": "trains a target, in half an hour, and no draft"}
EVERY = sorted(
    {path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")}
    - EXCEPTED.keys()
)


def read_configuration_name(name: str) -> str:
    """Return the launch configuration that the first lines of a recipe name."""
    header = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    configuration, *_ = re.findall(r"(?:--config_file accelerate_configs/|launch=)(\w+)", header)
    return configuration


# The recipes that run even without ARGS=all, besides the first recipe of each method.
ALWAYS = {
    "llama-3.1-8b/eagle3": "the README's",
    "small/eagle3": "the first recipe for a model without one of its own",
    "qwen2.5-vl-7b/eagle3": "a target that also reads pictures",
}
# The first recipe of each method.
FIRST = {read_yaml(RECIPES / f"{name}.yaml")["method"]: name for name in reversed(EVERY)}.values()


def choose_launched_recipes() -> set[str]:
    """Return the recipes that are trained by processes of their own launch configuration.

    There is one for each method, but only one in all whose configuration is `cpu`. That
    configuration starts one process, in which every method trains as it does here, and starting it
    takes seconds of imports.
    """
    in_one_process = [name for name in FIRST if read_configuration_name(name) == "cpu"]
    return set(FIRST).difference(in_one_process[1:])


LAUNCHED = choose_launched_recipes()

# Numbers that replace larger ones of a recipe. Where a recipe does not set a key of UNLIMITED, its
# number counts as larger.
AT_MOST: dict[str, tuple[float, str]] = {
    "data.max_length": (
        300,
        "a row holds an answer or two, and half of it a recipe's system prompt in bytes",
    ),
    "data.regenerate.num_tokens": (2_000, "a dozen answers"),
    "data.regenerate.prompt_tokens": (24, "rows are short"),
    "data.regenerate.batch_size": (16, "a dozen answers"),
    "hidden_states.shard_tokens": (256, "a small store has several files"),
    "draft.vocab_size": (128, "the tiny target has not many more"),
    "draft.exit_layer": (2, "the tiny target has four"),
    "draft.hidden_size": (64, "that of the tiny target"),
    "draft.intermediate_size": (96, "that of the tiny target"),
    "draft.lora.rank": (4, "the tiny target is narrow"),
    "on_policy.prompt_tokens": (16, "rows are short"),
    "on_policy.num_tokens": (16, "rows are short"),
    "selection.num_prompts": (2, "time"),
    "selection.max_new_tokens": (8, "time"),
    "train.max_steps": (2, "the second step continues from the first one's state"),
    "train.warmup_steps": (1, "two steps"),
    "train.logging_steps": (1, "two steps"),
    "train.eval_steps": (2, "two steps"),
    "train.save_steps": (2, "two steps"),
    "train.per_device_train_batch_size": (2, "a dozen rows"),
    "train.per_device_eval_batch_size": (2, "a dozen rows"),
    "train.gradient_accumulation_steps": (2, "a dozen rows"),
    "train.dataloader_num_workers": (0, "processes take seconds to start"),
    "eval.num_prompts": (2, "time"),
    "eval.max_new_tokens": (12, "time"),
    "eval.repeats": (1, "times are not judged"),
    "eval.warmup": (0, "times are not judged"),
    "eval.sampling_draws": (40, "time"),
}
UNLIMITED = {"train.max_steps", *(key for key in AT_MOST if key.startswith("eval."))}
# Below 1 these are shares of the run. Two steps have too few for them.
SHARES = {"train.eval_steps", "train.save_steps"}

# Replacements of what is on the Hub or on somebody's disk. A key that becomes None is not passed.
REPLACED: dict[str, tuple[Callable[["Line", Any], Any], str]] = {
    "target.model": (lambda line, name: line.target, "a tiny model of the same class"),
    "target.revision": (lambda line, revision: revision and "null", "a folder has none"),
    "target.attn": (lambda line, attention: attention and "null", "kernels of a GPU"),
    "draft.init": (
        lambda line, init: line.smaller if "/" in str(init) else None,
        "a tiny model with the target's tokenizer",
    ),
    "data.source": (lambda line, source: line.source(), "rows of the same form in a file"),
    "data.split": (lambda line, split: "train", "the only one of a file"),
    "data.decontaminate": (lambda line, suites: "[]", "suites of others are fetched"),
    "data.regenerate.server": (
        lambda line, servers: servers and f"[{line.server}]",
        "one that answers at once",
    ),
    "data.cache_dir": (
        lambda line, folder: line.folder / "cache",
        "nothing that an earlier run kept",
    ),
    "hidden_states.path": (lambda line, path: path and line.folder / "features", "of this test"),
    "train.output_dir": (lambda line, folder: line.run, "of this test"),
    "train.torch_compile": (
        lambda line, compiled: compiled and "false",
        "a minute for two steps; tests/targets compiles",
    ),
    "eval.suite": (lambda line, suite: line.suite, "short prompts in a file"),
    "eval.engine": (
        lambda line, engine: engine and "specdistill",
        "no engine is installed with the tests",
    ),
    "eval.tensor_parallel": (
        lambda line, gpus: gpus and "null",
        "no engine is installed with the tests",
    ),
    "selection.suite": (lambda line, suite: suite and line.suite, "short prompts in a file"),
}

QUESTION, ANSWER = "What follows {}?", "It is {}, as everybody knows."
TEXT = "Row {} says {} and then again {}, which is all that it has to say.\n"


class Line:
    """A recipe whose commands run at tiny sizes.

    folder: where its files go. server: the address of a server with OpenAI's API.
    """

    def __init__(self, name: str, folder: Path, server: str) -> None:
        self.name, self.folder, self.run = name, folder, folder / "run"
        self.recipe = merge_values([f"recipe={name}"])
        self.method: str = self.recipe["method"]
        self.family: Family = family_of(Path(name).parent.name)
        self.server = server

    def get_value(self, key: str) -> Any:
        """Return the value of a key, or None where the file does not set it."""
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def published(self) -> Config:
        """The target's config.json, or a Llama's where the command line may name any target."""
        model = self.get_value("target.model")
        path = (PICO if model == "pico" else RECIPES / Path(self.name).parent) / "config.json"
        if model == REQUIRED_MARK and not path.is_file():
            return {"model_type": "llama"}
        assert path.is_file(), (
            f"recipes/{self.name}.yaml is for {model}, whose class {path} has to say"
        )
        config: Config = json.loads(path.read_text(encoding="utf-8"))
        assert config.get("model_type") in CONFIG_MAPPING, (
            f"{path}: {config.get('model_type')} is no class of transformers"
        )
        return config

    @cached_property
    def target(self) -> Path:
        has_layer = self.method == "mtp" and self.get_value("draft.init") is None
        write_model(self.folder / "target", self.published, self.family, has_layer=has_layer)
        return self.folder / "target"

    @cached_property
    def smaller(self) -> Path:
        """A language model half as deep as the target.

        Its class is that of the config.json in a folder of the recipe's name, or else that of the
        target.
        """
        own_path = RECIPES / self.name / "config.json"
        config = (
            json.loads(own_path.read_text(encoding="utf-8"))
            if own_path.is_file()
            else self.published
        )
        write_model(
            self.folder / "smaller",
            config.get("text_config", config),
            self.family,
            num_layers=2,
            seed=1,
        )
        return self.folder / "smaller"

    @property
    def sources(self) -> list[dict[str, Any]]:
        said = self.get_value("data.source")
        return [{"source": said}] if isinstance(said, str) else said

    def has_source(self, *names: str) -> bool:
        """Return whether a source has one of these names."""
        return any(entry["source"] in names for entry in self.sources)

    def source(self) -> str:
        """Return `data.source` with files in place of what a recipe names."""
        entries = []
        for number, entry in enumerate(self.sources):
            if entry["source"] == SELF_SOURCE:
                # A prompt of a random target ends soonest when all tokens are equally likely.
                entries.append({**entry, "num_prompts": 6, "temperature": 100})
                continue
            columns = entry.get("columns") or self.get_value("data.columns") or {}
            form = "text" if entry["source"] in ("pico", REQUIRED_MARK) else "messages"
            rows = list(
                build_rows(
                    columns or {form: form},
                    entry.get("where", {}),
                    max(1, entry.get("min_turns", 0)),
                )
            )
            path = self.folder / f"rows-{number}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            own = {
                key: value
                for key, value in entry.items()
                if key not in ("name", "split", "revision")
            }
            entries.append({**own, "source": str(path)})
        return json.dumps(entries)

    @cached_property
    def suite(self) -> Path:
        path = self.folder / "suite.jsonl"
        asked = [[{"role": "user", "content": QUESTION.format(number)}] for number in (7, 8)]
        path.write_text(
            "".join(
                json.dumps({"id": str(n), "messages": turns}) + "\n"
                for n, turns in enumerate(asked)
            ),
            encoding="utf-8",
        )
        return path

    @cached_property
    def keys(self) -> list[str]:
        """The key=value arguments of the recipe's commands."""
        values = {key: replace(self, self.get_value(key)) for key, (replace, _) in REPLACED.items()}
        for key, (limit, _) in AT_MOST.items():
            value = self.get_value(key)
            if (value is None and key in UNLIMITED) or (key in SHARES and value < 1):
                value = math.inf
            values[key] = limit if value is not None and value > limit else None
        return [
            f"recipe={self.name}",
            *(f"{key}={value}" for key, value in values.items() if value is not None),
        ]

    @property
    def required_engines(self) -> list[str]:
        """The engines that must take the draft: vLLM, and those that it is published for.

        There are none where the target's class lacks the layer: no engine looks for it there.
        """
        is_foreign = self.method == "mtp" and self.get_value("draft.init") == "scratch"
        return [] if is_foreign else ["vllm", *(self.get_value("publish.exports") or [])]

    @property
    def data_keys(self) -> list[str]:
        """The keys of commands that make no run."""
        return [key for key in self.keys if not key.startswith("train.output_dir=")]


def build_rows(
    columns: Mapping[str, str], where: Mapping[str, Any], turns: int, count: int = 24
) -> Iterator[dict[str, Any]]:
    """Yield rows whose columns have the names that a recipe reads.

    They hold conversations, texts, and instructions with or without an answer.
    """
    wanted = {name: value[0] if isinstance(value, list) else value for name, value in where.items()}
    for number in range(count):
        said = [
            (QUESTION.format(number + turn), ANSWER.format(number + turn + 1))
            for turn in range(turns)
        ]
        conversation = [
            {"role": role, "content": content}
            for pair in said
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        contents = dict.fromkeys(PROMPTS, said[0][0]) | {
            answer: said[0][1] for _, answer in EXCHANGES
        }
        contents |= dict.fromkeys(CONVERSATIONS, conversation) | {
            "text": TEXT.format(number, number + 1, number + 1) * 3
        }
        yield wanted | {own: contents[ours] for ours, own in columns.items() if ours in contents}


def run_command(*arguments: str, codes: Collection[int] = (0,)) -> int:
    """Run a command, and return its exit code, which must be one of `codes`."""
    began = time.perf_counter()
    ended = specdistill(*arguments)
    print(
        f"{time.perf_counter() - began:.1f} s: specdistill"
        f" {' '.join(arguments)}\n{ended.stdout}{ended.stderr}"
    )
    assert ended.returncode in codes, ended.stderr[-2000:]
    return ended.returncode


@pytest.mark.long  # a whole recipe each, several of them in processes of their own
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name not in {*FIRST, *ALWAYS}))
        for name in EVERY
    ],
)
def test_a_recipe_runs_from_its_data_to_an_export(name: str, tmp_path: Path) -> None:
    with running(Behaviour(returns_tokens=False)) as server:
        line = Line(name, tmp_path, server.address)
        if line.get_value("data.regenerate.server"):
            run_command("data", "make", *line.data_keys)
    check_data(line, "answer " if line.get_value("data.regenerate.server") else "")
    if not line.has_source("pico", SELF_SOURCE, REQUIRED_MARK):
        check_data(line, "as everybody knows", "data.regenerate=null")
    if line.get_value("hidden_states.mode") not in (None, "online"):
        run_command("data", "features", *line.data_keys, "hidden_states.mode=hybrid")
    check_training(line)
    check_report(line)
    for engine in list_engines_with("serve_command"):
        if engine in METHODS[line.method].serving():
            check_export(line, engine)


def check_data(line: Line, answer: str, *keys: str) -> None:
    """Check that only answers carry loss, as `data show` prints them.

    answer: what each answer contains, and nothing else does.
    """
    shown = specdistill("data", "show", *line.data_keys, *keys, "documents=999", "--json")
    assert shown.returncode == 0, shown.stderr
    documents = json.loads(shown.stdout)["documents"]
    assert documents
    for document in documents:
        loss, context = (
            "".join(text for text, has in document["pieces"] if has is wanted)
            for wanted in (True, False)
        )
        assert loss
        # The document is a text, or answers a question of the target itself.
        if "Row " in loss or (line.has_source(SELF_SOURCE) and "What follows" not in context):
            continue
        assert "What follows" in context and "What follows" not in loss, document
        assert answer in loss and not (answer and answer in context), document


def check_training(line: Line) -> None:
    """Train two steps, in this process or by the recipe's launch configuration."""
    if line.name in LAUNCHED:
        launch_training(line)
    else:
        run_command("train", *line.keys)
    state = json.loads(
        (line.run / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8")
    )
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 2 and all(map(math.isfinite, losses)), losses
    assert any("eval_acceptance_length" in entry for entry in state["log_history"])


def launch_training(line: Line) -> None:
    configuration = read_configuration_name(line.name)
    began = time.perf_counter()
    several = ["num_processes=2"] if configuration != "cpu" else []
    command = [
        sys.executable,
        "-m",
        "specdistill",
        "train",
        *line.keys,
        f"launch={configuration}",
        *several,
    ]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    print(
        f"{time.perf_counter() - began:.1f} s: specdistill train launch={configuration}", flush=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def check_report(line: Line) -> None:
    """Check that greedy completions are those of generate() and sampled ones follow the target.

    Whether decoding is faster is not checked.
    """
    run_command("eval", *line.keys, codes=(0, 1, 4))
    report = json.loads((line.run / "report" / "report.json").read_text(encoding="utf-8"))
    assert (line.run / "report" / "report.html").stat().st_size > 10_000
    settings = report["settings"]
    assert report["gate"]["rules"]
    assert settings["num_speculative_tokens"] == line.get_value("eval.num_speculative_tokens")
    found, reasons = report["lossless"], str(report["not_measured"])
    assert found["prompts_checked"] == 2 and found["unexplained_divergences"] == 0, found
    # A random target may be too sure of its tokens for a test. That a wrong rule shows is not
    # checked: such a draft is hardly accepted.
    assert "sampling_test" in found or "no two outcomes" in reasons, reasons
    assert "sampling_test" not in found or found["sampling_test"]["p_value"] > 0.001, found


def check_export(line: Line, engine: str) -> None:
    """Check that the draft is written as the engine loads it, or refused by `engine`."""
    folder = line.folder / engine
    ended = specdistill(
        "export",
        f"draft={line.run / 'draft'}",
        f"engine={engine}",
        f"target={line.target}",
        f"output_dir={folder}",
    )
    if ended.returncode == 2 and engine not in line.required_engines:
        assert ended.stderr.startswith("error: engine: got "), ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    if line.method == "draft_model":
        _, read = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(read.values()), read
    elif line.method == "mtp":  # the export is a copy of the target
        run_command("doctor", f"draft={folder}", f"target={folder}", "decode=false")
    else:
        loader = (
            [f"engine={engine}"]
            if METHODS[line.method].serving().get(engine, Serving()).loaders
            else []
        )
        run_command("doctor", f"draft={folder}", f"target={line.target}", "decode=false", *loader)
