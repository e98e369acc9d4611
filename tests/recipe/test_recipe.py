"""Recipes load strictly: a mistake is one line that names the key and what is near it."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.pico.recipe import TargetRecipe
from specdistill.cli.command import print_help
from specdistill.cli.main import main
from specdistill.common.errors import UserError
from specdistill.common.project import GATES, RECIPES
from specdistill.methods.recipe import FeatureRecipe, Recipe
from specdistill.recipe.data_sources import list_entries
from specdistill.recipe.fields import describe, list_every_key, list_leaves
from specdistill.recipe.load import REQUIRED_MARK, format_recipe, load_recipe, merge_values
from specdistill.recipe.sections import TreeConfig
from specdistill.recipe.short_keys import select_recipe_keys
from specdistill.training.arguments import build_training_arguments
from tests.refusals import refused, refused_key

COMPLETE = ["target.model=pico", "train.output_dir=runs/x"]
EVERY_RECIPE = sorted(
    path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")
)
# Without SmolLM2's, whose inputs `make smollm2` pins by hashes.
PUBLISHED = [
    name
    for name in EVERY_RECIPE
    if (RECIPES / name).with_name("config.json").exists() and not name.startswith("smollm2/")
]
COMMIT = re.compile(r"[0-9a-f]{40}")
LICENCES = {"apache-2.0", "mit"}


def choose_schema(name: str) -> type:
    return (
        TargetRecipe
        if "curriculum" in yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
        else Recipe
    )


def read_header(name: str) -> str:
    """Return the comment that a recipe begins with."""
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return "\n".join(
        line[1:] for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    )


def list_commands(name: str) -> list[list[str]]:
    """Return the words of each command in a recipe's header, where commands are indented."""
    lines = re.sub(r"\\\n *", " ", read_header(name)).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("   ")]


def read_training_keys(name: str) -> list[str]:
    """Return the key=value arguments of the command in a recipe's header that trains."""
    (words,) = (
        words for words in list_commands(name) if any(word.startswith("train/") for word in words)
    )
    return [word for word in words if re.match(r"[a-z_.]+=", word)]


def load(*arguments: str) -> Recipe:
    return load_recipe(Recipe, [*COMPLETE, *arguments])


def record_and_reload(recipe: Any, folder: Path, *more: str) -> Any:
    """Write the record of a recipe and load that."""
    (folder / "recipe.yaml").write_text(format_recipe(recipe), encoding="utf-8")
    schema: type[Any] = TargetRecipe if isinstance(recipe, TargetRecipe) else Recipe
    return load_recipe(schema, [f"recipe={folder / 'recipe.yaml'}", *more])


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_every_recipe_loads_from_its_header_and_round_trips_with_valid_training_arguments(
    name: str, tmp_path: Path
):
    recipe: Any = load_recipe(choose_schema(name), read_training_keys(name))
    assert read_training_keys(name)[0] == f"recipe={name}"
    assert record_and_reload(recipe, tmp_path) == recipe
    build_training_arguments({**recipe.train, "output_dir": str(tmp_path)}, use_cpu=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_target_draft_and_data_are_pinned_to_a_commit_and_the_data_s_licences_stated(name: str):
    recipe: Any = load_recipe(Recipe, read_training_keys(name))
    # Such a target is a folder, whose commit a command of the header pins.
    is_folder = merge_values([f"recipe={name}"])["target"]["model"] == REQUIRED_MARK
    pinned = (
        [word for words in list_commands(name) for word in words if COMMIT.fullmatch(word)]
        if is_folder
        else [recipe.target.revision]
    )
    sources = [source for _, source in list_entries(recipe.data.source)]
    pinned += [source.revision for source in sources]
    if "/" in str(init := recipe.draft.init):
        pinned.append(init.partition("@")[2])
    assert all(COMMIT.fullmatch(str(revision)) for revision in pinned) and len(pinned) > len(
        sources
    )
    assert {source.known_license for source in sources} <= LICENCES


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_header_has_the_commands_and_the_gate_of_its_recipe(name: str):
    recipe: Any = load_recipe(Recipe, read_training_keys(name))
    assert (
        f"Gate: eval/gates/{recipe.gate}.yaml" in read_header(name)
        and (GATES / f"{recipe.gate}.yaml").is_file()
    )
    told = {
        tuple(words[:2]) if words[0] != "specdistill" else " ".join(words[1:3])
        for words in list_commands(name)
    }
    assert {"data make", f"eval recipe={recipe.train['output_dir']}/run/recipe.yaml"} <= told
    for words in list_commands(name):
        if words[0] == "specdistill":
            keys = [word for word in words if re.match(r"[a-z_.]+=", word)]
            assert keys[0] in (
                f"recipe={name}",
                f"recipe={recipe.train['output_dir']}/run/recipe.yaml",
            )
            load_recipe(Recipe, [*read_training_keys(name), *keys[1:]])
        if words[:2] == ["vllm", "serve"]:
            assert COMMIT.fullmatch(words[words.index("--revision") + 1])
            assert recipe.target.revision is None or words[2:5] == [
                recipe.target.model,
                "--revision",
                recipe.target.revision,
            ]


def test_strings_that_look_like_other_types_round_trip(tmp_path: Path):
    recipe = load(
        "target.model=org/target",
        "target.revision='1e5'",
        "data.cache_dir='true'",
        "eval.suite='null'",
        "draft.init='0123'",
    )
    assert (recipe.target.revision, recipe.data.cache_dir, recipe.eval.suite) == (
        "1e5",
        "true",
        "null",
    )
    assert record_and_reload(recipe, tmp_path) == recipe


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "target: {model: pico}\ntrain: {output_dir: a, max_steps: 3}\n", encoding="utf-8"
    )
    recipe = load_recipe(Recipe, ["train.output_dir=b", f"recipe={path}", "train.output_dir=c"])
    assert recipe.train == {"output_dir": "c", "max_steps": 3}


def test_scientific_notation_is_a_number_in_files_and_on_the_command_line(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "target: {model: pico}\ntrain: {output_dir: x, learning_rate: 1e-4}\nloss: {step_decay:"
        " 8e-1}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(
        Recipe, [f"recipe={path}", "eval.temperature=5e-1", "train.weight_decay=1e-2"]
    )
    numbers = (
        recipe.train["learning_rate"],
        recipe.loss.step_decay,
        recipe.eval.temperature,
        recipe.train["weight_decay"],
    )
    assert numbers == (1e-4, 0.8, 0.5, 0.01)
    assert all(type(number) is float for number in numbers)


@pytest.mark.parametrize(
    ("arguments", "key", "near"),
    [
        ("draft.num_layer=2", "draft.num_layer", "draft.num_layers"),
        ("data.regenerate.num_token=5", "data.regenerate.num_token", "data.regenerate.num_tokens"),
        ("num_layers=2", "num_layers", "draft.num_layers"),
        ("targett.model=pico", "targett", "target"),
        (
            "draft.heterogeneous_vocab=true method=draft_model",
            "draft.heterogeneous_vocab",
            "eval.heterogeneous_vocab",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(arguments: str, key: str, near: str):
    with pytest.raises(UserError, match=rf"^{key}: got an unknown key, .* {near}\?$"):
        load(*arguments.split())


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], "target.model"),
        (["target.model=pico"], "train.output_dir"),
        (["recipe=small/eagle3", "data.source=x"], "target.model"),
    ],
)
def test_missing_keys_are_named(given: list[str], missing: str):
    with refused(missing, "nothing"):
        load_recipe(Recipe, given)


def test_a_required_key_of_a_recipe_gets_no_default():
    """Only commands that read the data require its source; measuring does not."""
    assert load_recipe(Recipe, ["recipe=small/eagle3", "target.model=x"]).data.source == "???"


@pytest.mark.parametrize(
    ("argument", "key", "got"),
    [
        ("draft.num_layers=two", "draft.num_layers", "'two' (str)"),
        ("draft.num_layers='2'", "draft.num_layers", "'2' (str)"),
        ("draft.ttt_steps=null", "draft.ttt_steps", "null"),
        ("data.packing=3", "data.packing", "3 (int)"),
        ("target.adapter=[a,5]", "target.adapter", "['a', 5] (list)"),
        ("target.revision=12e4", "target.revision", "120000.0 (float)"),
        ("draft.aux_layers=[1,x]", "draft.aux_layers[1]", "'x' (str)"),
        ("draft.aux_layers.first=1", "draft.aux_layers", "a section with the keys first"),
        ("method.name=eagle3", "method", "a section with the keys name"),
        ("target=pico", "target", "'pico'"),
        ("train=null", "train", "null"),
        ("target.model=[1", "target.model", "'[1'"),
        ("target.model=${nowhere}", "target.model", "${nowhere}, which names no key"),
        ("target.model=${oc.env:PATH}", "target.model", "the environment variable PATH"),
        ("target.dtype=flaot32", "target.dtype", "'flaot32'"),
        ("method=eagle4", "method", "eagle4"),
        (f"train.max_steps=1{'0' * 400}", "train.max_steps", "an integer of 401 digits"),
        ("eval.num_speculative_tokens=0", "eval.num_speculative_tokens", "0"),
        ("eval.temperature=-0.5", "eval.temperature", "-0.5"),
        ("eval.temperature=.nan", "eval.temperature", "nan"),
        ("eval.top_p=1.5", "eval.top_p", "1.5"),
        (
            "data.regenerate={num_tokens: 9, temperatures: [0, -1]}",
            "data.regenerate.temperatures[1]",
            "-1",
        ),
        ("data.regenerate=3", "data.regenerate", "3"),
        ("data.regenerate.num_tokens=false", "data.regenerate.num_tokens", "False (bool)"),
        ("data.regenerate.num_tokens=-1", "data.regenerate.num_tokens", "-1"),
        ("hidden_states=null", "hidden_states", "null"),
        ("hidden_states.mode=null", "hidden_states.mode", "None"),
        ("hidden_states.mode=nope", "hidden_states.mode", "'nope'"),
        ("eval.tree=4", "eval.tree", "4"),
        ("eval.tree.branching=x", "eval.tree.branching[0]", "'x' (str)"),
        ("eval.sweep.tree=[{bugdet: 16}]", "eval.sweep.tree[0].bugdet", "an unknown key"),
        ("eval.draft_length=online", "eval.draft_length", "an unknown key"),
        ("eval.run_code=true", "eval.run_code", "an unknown key"),
        ("eval.sweep.tree=[{budget: 0}]", "eval.sweep.tree[0].budget", "0"),
        ("eval.sweep.tree=[4]", "eval.sweep.tree[0]", "4"),
        ("eval.sweep.tree=4", "eval.sweep.tree[0]", "4"),
        ("--recipe", "--recipe", "an unknown option"),
    ],
)
def test_a_mistake_is_refused_by_its_key_and_value(argument: str, key: str, got: str):
    with refused(key, got):
        load(argument)


def test_an_int_is_accepted_for_a_float():
    recipe = load("eval.temperature=1", "data.regenerate={num_tokens: 1, temperatures: [0,1]}")
    assert recipe.data.regenerate.temperatures == [0.0, 1.0]


def test_a_value_interpolates_other_keys_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("USER", "me")
    assert load("eval.output_dir=${oc.env:USER}/here").eval.output_dir == "me/here"
    assert (
        load("eval.output_dir=${train.output_dir}/elsewhere").eval.output_dir == "runs/x/elsewhere"
    )


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "target: {model: pico\n", "target: {model: a}\ntarget: {model: b}\n"]
)
def test_a_file_that_is_no_recipe_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with refused("recipe", path):
        load_recipe(Recipe, [f"recipe={path}"])


def test_a_number_may_lie_at_its_bound():
    recipe = load(
        "eval.num_speculative_tokens=1", "eval.temperature=1e-9", "eval.top_p=1", "eval.repeats=1"
    )
    assert (recipe.eval.num_speculative_tokens, recipe.eval.top_p, recipe.eval.repeats) == (
        1,
        1.0,
        1,
    )


def test_a_divergence_is_a_name_or_a_weighted_sum(tmp_path: Path):
    assert load("loss.divergence=tvd").loss.divergence == "tvd"
    recipe = load("loss.divergence={forward_kl: 0.5, tvd: 1}", "loss.divergence.tvd=2")
    assert recipe.loss.divergence == {"forward_kl": 0.5, "tvd": 2}
    assert record_and_reload(recipe, tmp_path) == recipe
    assert record_and_reload(recipe, tmp_path, "loss.divergence=jsd").loss.divergence == "jsd"


@pytest.mark.parametrize(
    ("of_file", "given", "value"),
    [
        ("[{name: tvd}, {name: nla}]", "{name: jsd, beta: 0.3}", {"name": "jsd", "beta": 0.3}),
        ("{name: jsd, beta: 0.3}", "[{name: tvd, weight: 2}]", [{"name": "tvd", "weight": 2}]),
        ("tvd", "[{name: tvd, weight: 2}]", [{"name": "tvd", "weight": 2}]),
        ("[{name: tvd}]", "nla", "nla"),
    ],
)
def test_an_override_of_another_kind_replaces_the_value_of_the_file(
    of_file: str, given: str, value: Any, tmp_path: Path
):
    (tmp_path / "r.yaml").write_text(f"loss: {{divergence: {of_file}}}\n", encoding="utf-8")
    assert (
        load(f"recipe={tmp_path / 'r.yaml'}", f"loss.divergence={given}").loss.divergence == value
    )


def test_an_item_of_a_list_has_no_key_of_its_own(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("data: {source: [{source: pico}]}\n", encoding="utf-8")
    recipe = load(f"recipe={tmp_path / 'r.yaml'}", "data.source.0.weight=2")
    with refused("data.source", "{'0': {'weight': 2}}"):
        list(list_entries(recipe.data.source))


@pytest.mark.parametrize(
    ("of_file", "given", "key"),
    [
        ("train: {output_dir: '${'}", "method=eagle3", "train.output_dir"),
        ("target: {model: 'x${a.b'}", "method=eagle3", "target.model"),
        ("data: {source: [pico, '${:}']}", "method=eagle3", "data.source[1]"),
        ("target: {model: '${target.model.b}'}", "method=eagle3", "target.model"),
        ("target: {model: '${target.model}'}", "method=eagle3", "target.model"),
        ("null: 3", "method=eagle3", "recipe"),
        ('"-1"', "method=eagle3", "recipe"),
        ("[1]", "method=eagle3", "recipe"),
        (
            "{a0: xx, " + ", ".join(f"a{n + 1}: '${{a{n}}}${{a{n}}}'" for n in range(60)) + "}",
            "method=eagle3",
            "recipe",
        ),
        # Python decodes a byte of an argument that is not UTF-8 so.
        ("target: {model: pico}", "train.output_dir=\udcff", "train.output_dir"),
    ],
)
def test_a_value_that_omegaconf_cannot_read_is_refused_by_its_key(
    of_file: str, given: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "r.yaml").write_text(of_file, encoding="utf-8")
    assert main(["data", "show", f"recipe={tmp_path / 'r.yaml'}", given]) == 2
    assert refused_key(capsys.readouterr().err) == key


def test_a_section_may_be_null_until_one_of_its_keys_is_given():
    assert load_recipe(Recipe, ["recipe=pico/eagle3"]).eval.tree is None
    given = ["recipe=pico/eagle3", "eval.tree.budget=16", "eval.tree.depth=4", "eval.tree.top_k=4"]
    assert load_recipe(Recipe, given).eval.tree == TreeConfig(budget=16, depth=4, top_k=4)
    assert load_recipe(Recipe, [*given, "eval.tree=null"]).eval.tree is None


@pytest.mark.parametrize(
    ("argument", "key", "got"),
    [
        ("shape.hidden_size=100", "shape.hidden_size", "100"),
        ("curriculum.shares=[0.5, 0.1]", "curriculum.shares", "[0.5, 0.1]"),
        ("curriculum.lengths=[256]", "curriculum.lengths", "[256]"),
        ("curriculum.lengths=[256, 1024]", "curriculum.lengths", "[256, 1024]"),
        ("curriculum.batch_tokens=64", "curriculum.lengths", "[256, 512]"),
        ("train.max_steps=-1", "train.max_steps", "-1"),
        ("train.per_device_train_batch_size=4", "train.per_device_train_batch_size", "4"),
    ],
)
def test_a_target_that_could_not_be_trained_is_refused(argument: str, key: str, got: str):
    with refused(key, got):
        load_recipe(TargetRecipe, ["recipe=pico/target", argument])


@pytest.mark.parametrize("schema", [Recipe, TargetRecipe])
def test_help_lists_every_key_with_type_default_and_meaning(
    schema: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    print_help("What it does.", [schema], [])
    shown = " ".join(capsys.readouterr().out.split())
    for key, kind, default, text in describe(schema):
        assert text
        stated = {"null": "", "required": ", required"}.get(default, f"; default {default}")
        assert f" {key} {text} [{kind.replace(' or null', '')}{stated}] " in shown


@pytest.mark.parametrize(
    ("arguments", "key", "reader"),
    [
        ("draft.lora.alpha=32 method=draft_model", "draft.lora.alpha", "rank"),
        ("eval.heterogeneous_vocab=true method=eagle3", "eval.heterogeneous_vocab", "draft_model"),
        (
            "eval.token_replacements={a: b} method=draft_model",
            "eval.token_replacements",
            "heterogeneous_vocab=true",
        ),
        ("on_policy.temperature=0.5 method=draft_model", "on_policy.temperature", "fraction"),
        ("on_policy.fraction=0.5 method=eagle", "on_policy.fraction", "draft_model"),
        ("eval.ngram.max=5 method=eagle3", "eval.ngram.max", "ngram"),
        ("draft.vocab_size=512 method=eagle", "draft.vocab_size", "eagle3"),
        ("loss.noise=0.1 method=mtp", "loss.noise", "eagle"),
        ("loss.divergence=tvd loss.labels=hard method=draft_model", "loss.divergence", "soft"),
        ("data.regenerate.batch_size=8", "data.regenerate.batch_size", "num_tokens"),
        ("eval.server=http://127.0.0.1:8000", "eval.server", "eval.engine"),
        ("eval.batch_size=8 eval.engine=vllm", "eval.batch_size", "eval.engine"),
        ("eval.tree={branching: [2]} eval.engine=sglang", "eval.tree", "eval.engine"),
        ("eval.sweep.temperature=[1] eval.engine=sglang", "eval.sweep.temperature", "eval.engine"),
        ("eval.compile=true eval.engine=vllm", "eval.compile", "eval.engine"),
        ("eval.compile=true eval.batch_size=2", "eval.compile", "batch_size"),
        ("eval.compile=true eval.tree={branching: [2]}", "eval.compile", "tree"),
        ("eval.top_p=0.9", "eval.top_p", "temperature"),
        ("target.revision=v1", "target.revision", "Hub"),
        ("train.optim=sgd", "train.optim", "adamw"),
        ("train.label_smoothing_factor=0.1", "train.label_smoothing_factor", "labels"),
        (
            "on_policy.fraction=0.5 loss.labels=hard method=draft_model",
            "on_policy.fraction",
            "hard",
        ),
        ("eval.tree={branching: [2]} method=ngram", "eval.tree", "chains"),
        (
            "eval.tree={branching: [2]} eval.num_speculative_tokens=3",
            "eval.num_speculative_tokens",
            "depth",
        ),
        ("eval.ngram.min=5 eval.ngram.max=2 method=ngram", "eval.ngram.min", "eval.ngram.max"),
        ("loss.step_decay=0.5 method=ngram", "loss.step_decay", "eagle3"),
        ("train.max_steps=5 method=ngram", "train.max_steps", "not trained"),
        ("eval.draft=runs/x method=ngram", "eval.draft", "no draft"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_naming_who_reads_it(
    arguments: str, key: str, reader: str
):
    with pytest.raises(UserError, match=f"^{re.escape(key)}: .*{reader}"):
        load(*re.findall(r"\S+=(?:\{.*?\}|\S+)", arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["method=draft_model", "draft.lora.rank=4", "draft.lora.alpha=32"],
        ["method=draft_model", "on_policy.fraction=0.5", "on_policy.temperature=0.5"],
        ["method=ngram", "eval.ngram.max=5"],
        ["eval.top_p=0.9", "eval.temperature=1"],
        ["eval.tree={branching: [2, 2, 1]}", "eval.num_speculative_tokens=3"],
        ["eval.top_p=0.9", "eval.sweep.temperature=[1]"],
        ["eval.sweep.tree=[{budget: 16, depth: 4, top_k: 4}, {branching: [4, 2, 1]}]"],
        ["eval.engine=vllm", "eval.server=http://127.0.0.1:8000"],
        ["optimizer=adamw", "train.optim=sgd"],
        ["hidden_states.mode=offline", "hidden_states.path=store"],
        ["hidden_states.mode=hybrid", "hidden_states.path=store", "hidden_states.max_bytes=9"],
    ],
)
def test_a_key_that_something_reads_is_accepted_and_survives_the_record(
    arguments: list[str], tmp_path: Path
):
    recipe = load(*arguments)
    assert record_and_reload(recipe, tmp_path) == recipe


def test_a_record_lists_the_keys_of_all_variants_and_may_choose_another(tmp_path: Path) -> None:
    online, offline, hybrid = (
        load(f"hidden_states.mode={mode}", *path)
        for mode, path in (
            ("online", []),
            ("offline", ["hidden_states.path=store"]),
            ("hybrid", ["hidden_states.path=store"]),
        )
    )
    assert isinstance(online, FeatureRecipe) and not hasattr(online.hidden_states, "path")
    keys = [*list_every_key(hybrid)["hidden_states"]]
    assert (
        [*list_every_key(online)["hidden_states"]]
        == [*list_every_key(offline)["hidden_states"]]
        == keys
    )
    assert set(keys) == {
        row[0].removeprefix("hidden_states.")
        for row in list_leaves([FeatureRecipe])
        if row[0].startswith("hidden_states.")
    }
    store = ["hidden_states.mode=offline", "hidden_states.path=store"]
    assert record_and_reload(online, tmp_path, *store) == offline
    assert record_and_reload(offline, tmp_path, "hidden_states.mode=hybrid") == hybrid
    with refused("hidden_states.path", "nothing"):
        record_and_reload(online, tmp_path, "hidden_states.mode=offline")
    with refused("hidden_states.path", "store"):
        record_and_reload(hybrid, tmp_path, "hidden_states.mode=online")


def test_a_misspelt_key_is_reported_before_a_key_that_does_not_apply() -> None:
    with refused("hidden_states.mod", "an unknown key"):
        load("hidden_states.mod=offline", "hidden_states.path=store")


def test_lists_need_no_brackets() -> None:
    plain = [
        "eval.sweep.temperature=0,1.5",
        "data.regenerate.server=http://a:1,http://b:2",
        "eval.tree.branching=4",
        "data.decontaminate=pico",
    ]
    lists = [
        "eval.sweep.temperature=[0,1.5]",
        "data.regenerate.server=['http://a:1','http://b:2']",
        "eval.tree.branching=[4]",
    ]
    base = [
        "target.model=pico",
        "train.output_dir=runs",
        "data.regenerate.num_tokens=9",
        "eval.num_speculative_tokens=1",
    ]
    assert load_recipe(Recipe, [*base, *plain]) == load_recipe(
        Recipe, [*base, *lists, "data.decontaminate=[pico]"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["data.source=[a.jsonl,org/name]"],
        ["data.source=[a.jsonl,", "org/name]"],  # as a shell splits `[a.jsonl, org/name]`
        ["data.source=a.jsonl,org/name"],
    ],
)
def test_several_sources_need_no_quotes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["target.model=pico", "train.output_dir=runs"]
    for after in ([], ["data.max_length=64"], ["--json"]):
        recipe = load_recipe(Recipe, select_recipe_keys([*base, *words, *after]))
        assert [
            (key, entry.source, entry.weight) for key, entry in list_entries(recipe.data.source)
        ] == [
            ("data.source[0]", "a.jsonl", 1.0),
            ("data.source[1]", "org/name", 1.0),
        ]
        assert record_and_reload(recipe, tmp_path) == recipe
    (tmp_path / "a,b.jsonl").touch()
    assert load_recipe(Recipe, [*base, "data.source=a,b.jsonl"]).data.source == "a,b.jsonl"
    typed = (
        "data.source=[{source: a.jsonl, where: {language: [fr, de]}}, {source: b.jsonl, weight: 2},"
        " self]"
    )
    mixed = load_recipe(Recipe, select_recipe_keys([*base, *typed.split()])).data.source
    assert [(entry.source, entry.weight) for _, entry in list_entries(mixed)] == [
        ("a.jsonl", 1),
        ("b.jsonl", 2),
        ("self", 1),
    ]
    # A list that is not closed does not swallow the next key.
    assert select_recipe_keys(["a=[b", "c=d", "--json"]) == ["a=[b", "c=d"]


def test_typed_epochs_replace_the_steps_of_a_recipe() -> None:
    epochs = load_recipe(Recipe, ["recipe=pico/eagle3", "train.num_train_epochs=2"])
    assert epochs.train["num_train_epochs"] == 2 and "max_steps" not in epochs.train
    small = ["recipe=small/eagle3", "target.model=x", "data.source=x"]
    steps = load_recipe(Recipe, [*small, "train.max_steps=7"])
    assert steps.train["max_steps"] == 7 and "num_train_epochs" not in steps.train
    unlimited = load_recipe(Recipe, [*small, "train.max_steps=-1"])
    assert unlimited.train["num_train_epochs"] == 2
    with refused("train.num_train_epochs", "2 with train.max_steps=5"):
        load_recipe(Recipe, ["recipe=pico/eagle3", "train.num_train_epochs=2", "train.max_steps=5"])
    with refused("train"):
        load_recipe(Recipe, ["recipe=pico/eagle3", "train.num_train_epochs=2", "train=null"])
