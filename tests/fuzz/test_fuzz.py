"""Every command ends as the contract of exit codes says, whatever it reads.

`make test` tries a few hostile inputs, always the same ones; `make fuzz` tries many, others each
time.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdistill.common.documents import read_json, read_yaml
from specdistill.common.errors import ExitCode
from tests.fuzz.hostile import EDITS, apply_edits
from tests.fuzz.sandbox import Sandbox, broken
from tests.fuzz.surfaces import SURFACES, write_valid_files
from tests.processes import needs_gradients_in_forks

FEW = 60
NUM_INPUTS = int(os.environ.get("SPECDISTILL_FUZZ", FEW))  # inputs of all surfaces together
# Their commands plan, train or decode, which takes seconds.
LONG_SURFACES = ("arguments of plan", "configs", "interrupted run")

pytestmark = [needs_gradients_in_forks]
if NUM_INPUTS == FEW:
    pytestmark.append(pytest.mark.xdist_group("fuzz"))  # one worker builds what is valid


@cache
def of_kind(what: str) -> type[AssertionError]:
    """Return one class for each broken clause, so that hypothesis shrinks each by itself."""
    return type(what, (AssertionError,), {})


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "valid").mkdir()
    write_valid_files(folder / "valid")
    return Sandbox(folder / "box", folder / "valid")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG_SURFACES else [])
        for name in SURFACES
    ],
)
def test_a_hostile_input_is_refused_or_read(name: str, sandbox: Sandbox) -> None:
    surface = SURFACES[name]
    commands = [line.split() for line in surface.commands.splitlines()]
    contents = {
        path: make((sandbox.valid / path).read_bytes())
        for path, make in (surface.files or {}).items()
    }
    files = [
        strategy.map(lambda content, path=path: {path: content})
        for path, strategy in contents.items()
    ]
    share = surface.weight / sum(other.weight for other in SURFACES.values())

    @settings(
        max_examples=round(NUM_INPUTS * share),
        deadline=None,
        derandomize=NUM_INPUTS == FEW,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(commands), st.one_of(files) if files else st.just({}), surface.arguments)
    def attempt(command: list[str], files: dict[str, bytes], arguments: list[str]) -> None:
        ended = sandbox.run([*command, *arguments], files, surface.around)
        if what := broken(ended):
            raise of_kind(what)(f"{' '.join([*command, *arguments])[:500]}\n{ended.err[-1000:]}")

    attempt()


# Inputs that once broke the contract: a command, a file, the path to a node in it, and the value
# that replaces the node.
TRAIN, DOCTOR = (
    SURFACES["interrupted run"].commands,
    "doctor draft=trained/draft target=target decode=false",
)
GATE = "gate report=run/report gates=gate.yaml output_dir=out baseline=none"
FOUND: list[Any] = [
    (TRAIN, "interrupted/run/recipe.yaml", (), "x"),
    (TRAIN, "interrupted/run/recipe.yaml", ("train",), None),
    (TRAIN, "interrupted/run/provenance.json", (), []),
    pytest.param(
        TRAIN,
        "interrupted/checkpoint-2/manifest.json",
        ("launch",),
        {},
        marks=pytest.mark.long,  # trains
    ),
    (SURFACES["row set"].commands.splitlines()[0], "rows/manifest.json", ("shards",), []),
    (
        "eval recipe=recipe.yaml suite=suite.jsonl draft=run/draft output_dir=out",
        "recipe.yaml",
        ("gate",),
        "x" * 300,
    ),
    ("data show recipe=recipe.yaml", "recipe.yaml", (), {0.5: "x"}),
    ("data show recipe=recipe.yaml", "recipe.yaml", ("data", "columns"), {"text": 5}),
    ("eval recipe=recipe.yaml suite=suite.jsonl", "recipe.yaml", ("train", "output_dir"), True),
    (
        DOCTOR.replace("trained", "run"),
        "target/generation_config.json",
        ("eos_token_id",),
        ["x", 0],
    ),
    (
        DOCTOR.replace("decode=false", "eval.num_prompts=1"),
        "target/generation_config.json",
        ("eos_token_id",),
        [[0]],
    ),
    (
        "plan target=target draft=run/draft hub=false",
        "run/draft/config.json",
        ("architectures",),
        2,
    ),
    (
        "export draft=run/draft target=target engine=gguf output_dir=out",
        "target/config.json",
        ("max_position_embeddings",),
        {"x": 1},
    ),
    pytest.param(
        DOCTOR.replace("decode=false", "eval.num_prompts=1"),
        "trained/run/recipe.yaml",
        ("eval",),
        None,
        marks=pytest.mark.long,  # decodes
    ),
    (DOCTOR, "trained/draft/config.json", ("hidden_size",), 2**63),
    (DOCTOR, "trained/draft/config.json", ("num_attention_heads",), 2**62),
    (DOCTOR, "trained/draft/config.json", ("num_hidden_layers",), 10**9),
    (DOCTOR.replace("trained", "run"), "run/draft/config.json", ("num_hidden_layers",), 10**9),
    (DOCTOR, "target/config.json", ("num_hidden_layers",), 10**9),
    ("plan target=target hub=false", "target/config.json", ("num_hidden_layers",), 10**9),
    (DOCTOR, "trained/draft/config.json", ("eagle_config",), [1]),
    (
        DOCTOR,
        "trained/draft/config.json",
        ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
        [{}],
    ),
    (
        "export draft=run/draft engine=vllm report=run/report output_dir=out target=target",
        "run/report/report.json",
        ("results", 0),
        None,
    ),
    (
        "export draft=trained/draft target=target engine=sglang output_dir=out",
        "trained/draft/config.json",
        ("num_hidden_layers",),
        None,
    ),
    pytest.param(
        TRAIN,
        "interrupted/checkpoint-2/manifest.json",
        ("seconds",),
        None,
        marks=pytest.mark.long,  # trains
    ),
    (GATE, "gate.yaml", (0, "min"), 10**400),
    (GATE, "gate.yaml", (1, "equals"), 10**400),
    (GATE, "gate.yaml", (1, "equals"), None),
]


@pytest.mark.parametrize(("command", "path", "place", "value"), FOUND)
def test_an_input_that_once_broke_the_contract_is_handled(
    command: str, path: str, place: tuple[Any, ...], value: Any, sandbox: Sandbox
) -> None:
    valid = (read_json if path.endswith(".json") else read_yaml)(sandbox.valid / path)
    ended = sandbox.run(
        command.split(), {path: apply_edits(valid, [(place, EDITS[0], value)])}, nullcontext
    )
    assert broken(ended) is None and ended.code != ExitCode.RESOURCE_ERROR, ended


@pytest.mark.long  # every command once
def test_every_command_reads_valid_files(sandbox: Sandbox) -> None:
    for surface in SURFACES.values():
        for command in surface.commands.splitlines():
            ended = sandbox.run(command.split(), {}, surface.around)
            assert broken(ended) is None, ended
            # The last one leaves the choice of a draft to the user.
            refused = ("nothere", "server=", "acquire method=eagle3 target=someone/target")
            assert ended.code in (0, 1) or any(word in command for word in refused), (
                command,
                ended.err,
            )
