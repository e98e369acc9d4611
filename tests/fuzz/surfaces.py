"""Valid files of every kind that others may have written, and the commands that read them."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.advice.doctor.options import DoctorOptions
from specdistill.advice.plan.options import PlanOptions
from specdistill.cli.export import ExportOptions
from specdistill.cli.monitor import MonitorOptions
from specdistill.evaluation.gate.decide import GateOptions
from specdistill.hub.options import AcquireOptions, PublishOptions
from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import list_leaves
from specdistill.serving.engines import client, completions
from tests.finished_runs import finished_run
from tests.fuzz.hostile import (
    RAW,
    VALUES,
    damage_file,
    edit_binary_file,
    edit_card_file,
    edit_json_file,
    edit_jsonl_file,
    edit_safetensors_file,
    edit_yaml_file,
    pick,
)
from tests.gguf_writer import write_gguf
from tests.loopback_hub import loopback_hub, reading
from tests.scripts import specdistill
from tests.serving.engines.server_answers import AnswerHandler, completion, counters, pages
from tests.tiny import SMALL

PORT = 20_000 + os.getpid() % 10_000
ROWS = (
    "method=eagle3 target.model=target data.cache_dir=cache data.max_length=64"
    " data.validation_fraction=0.1 data.decontaminate=[]"
)
TRAINED = f"{ROWS} data.rows=rows draft.ttt_steps=2 {' '.join(SMALL)}"
STORED = "hidden_states.mode=hybrid hidden_states.path=features hidden_states.dtype=float32"
TINY = "eval.num_prompts=1 eval.max_new_tokens=4 eval.repeats=1 eval.warmup=0"
EVAL = (
    f"eval method=eagle3 target=target draft=trained/draft suite=suite.jsonl output_dir=out {TINY}"
)
SERVED = (
    f"{EVAL} eval.server=http://127.0.0.1:{PORT} eval.server_timeout=2"
    " eval.num_speculative_tokens=3"
)
# Sizes are small: steps are computed operation by operation.
PLAN = "plan hub=false training.batch_size=1 training.max_length=16"
PUBLISH = "publish run=run repo=someone/half-right baseline=none dry_run=true"
Hostile = Callable[[bytes], st.SearchStrategy[bytes]]


@dataclass(frozen=True)
class Surface:
    """Commands, and the inputs of theirs that are made hostile.

    commands: a line each. files: those that are made hostile, one at a time: path -> strategy of
    contents, given the valid one. arguments: strategy of what follows a command. around: what they
    run in.
    """

    commands: str
    files: Mapping[str, Hostile] | None = None
    arguments: st.SearchStrategy[list[str]] = st.just([])  # noqa: RUF009
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    weight: int = 1


def write_valid_files(folder: Path) -> None:
    """Write every valid file into an empty folder."""
    texts = {
        "rows.jsonl": "".join(
            json.dumps({"id": n, "text": f"Row {n} says {n * 7} again."}) + "\n" for n in range(30)
        ),
        "chat.jsonl": "".join(
            json.dumps({"id": n, "messages": _build_chat(n)}) + "\n" for n in range(6)
        ),
        "suite.yaml": (
            "name: a\nversion: '1'\nlicence: MIT\nsource: x\nsha256: null\nprompts:"
            " suite.jsonl\nsweep: {temperature: [0.5]}\n"
        ),
        "gate.yaml": (
            "- {metric: speedup, min: 0.5, confidence: 0.9, severity: warn}\n- {metric:"
            " lossless.greedy_identical, equals: true}\n- {metric: mean_acceptance_length, scope:"
            " {category: a, temperature: 0.0}, max_regression: 0.1}\n"
        ),
        "server.json": json.dumps(_build_answers()),
        "card.json": json.dumps(
            {"base_model": "someone/target", "license": "mit", "tags": ["eagle3"]}
        ),
        "target/README.md": (
            "---\nlicense: mit\nbase_model: a/b\ntags: [eagle3]\nlanguage: [en]\n---\n# A target\n"
        ),
        "chatting/chat_template.jinja": CHAT_TEMPLATE,
        "hidden/model.safetensors.lock": "",
    }
    with chdir(folder):
        finished_run(Path(), "eval.num_prompts=4")
        shutil.copytree("target", "chatting")
        Path("hidden").mkdir()
        shutil.copy("target/model.safetensors", "hidden")
        for name, text in texts.items():
            Path(name).write_text(text)
        _run_valid(f"data make data.source=rows.jsonl {ROWS}")
        shutil.move(next(Path("cache/rows").glob("*/manifest.json")).parent, "rows")
        shutil.rmtree("cache")
        _run_valid(f"train {TRAINED} train.output_dir=interrupted")
        for part in ("draft", "run"):
            shutil.copytree(f"interrupted/{part}", f"trained/{part}")
        shutil.rmtree("interrupted/draft")
        shutil.copy("trained/run/recipe.yaml", "recipe.yaml")
        _run_valid(f"data features {TRAINED} {STORED}")
        Path("gguf").mkdir()
        write_gguf(Path("target"), Path("gguf/target.gguf"), "f16")


def _run_valid(command: str) -> None:
    ended = specdistill(*command.split())
    assert ended.returncode == 0, ended.stderr


def _build_chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"{number} is {number}."},
    ]


def _build_answers() -> dict[str, Any]:
    """Return the answers of every kind of server by path.

    The kinds are vLLM's, SGLang's, OpenAI's, and one that writes hidden states.
    """
    completions_by_engine = {
        engine: completion(engine, 3, "abcd", [7, 8, 9, 10], [1, 2], 6)
        for engine in ("vllm", "sglang")
    }
    hidden = {
        "kv_transfer_params": {"hidden_states_path": "hidden/model.safetensors"},
        "model": "target",
    }
    return {
        **pages("sglang", "target", 3),
        "/v1/completions": {
            **completions_by_engine["vllm"],
            **hidden,
            "choices": [{"finish_reason": "stop", **completions_by_engine["vllm"]["choices"][0]}],
        },
        "/generate": completions_by_engine["sglang"],
        "/metrics": counters("vllm", 3, 0) + counters("sglang", 3, 0),
        "status": 200,
    }


def _read_json(name: str) -> Any:
    """Return what a JSON file holds, or an empty dict where it cannot be read."""
    try:
        return json.loads(Path(name).read_bytes())
    except (ValueError, RecursionError):
        return {}


@contextmanager
def run_server() -> Iterator[None]:
    """Run a server that answers as server.json says, or with its text where that is no JSON.

    Waits for it are short.
    """
    said, whole, generated = (
        _read_json("server.json"),
        Path("server.json").read_text(errors="replace"),
        [0],
    )

    class Handler(AnswerHandler):
        def do_GET(self) -> None:
            page = said.get(self.path, {}) if isinstance(said, dict) and said else whole
            if self.path == "/metrics" and isinstance(page, str):
                page = page.replace(" 0.0", f" {generated[0]}.0")
            status = said.get("status") if isinstance(said, dict) else 200
            self.answer(page, status if isinstance(status, int) and 200 <= status < 600 else 200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            generated[0] += 4
            self.do_GET()

    short = mock.patch.multiple(
        completions, RETRY_TIMEOUT_S=0.2, FIRST_DELAY=0.01, LONGEST_DELAY=0.01
    )
    with (
        ThreadingHTTPServer(("127.0.0.1", PORT), Handler) as server,
        short,
        mock.patch.object(client, "MAX_DELAY_SECONDS", 0.1),
    ):
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that waits no longer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield


@contextmanager
def run_hub() -> Iterator[None]:
    """Run a Hub with a target and a head, whose cards say what card.json does.

    Its client does not wait between its tries.
    """
    tags = ["eagle3", "base_model:someone/target"]
    said = _read_json("card.json")
    # The Hub itself refuses tags that are no list.
    if isinstance(said, dict) and not isinstance(said.get("tags", []), list):
        del said["tags"]
    card, tagged = (
        mock.patch.object(reading, "card_of", return_value=said),
        mock.patch.object(reading, "tags_of", return_value=tags),
    )
    with (
        loopback_hub(Path("../hub")) as local_hub,
        local_hub.client(Path("../../../home")),
        mock.patch("time.sleep"),
        card,
        tagged,
    ):
        for name, folder in (("target", "target"), ("head-eagle3", "trained/draft")):
            local_hub.create(
                f"someone/{name}", {path.name: path.read_bytes() for path in Path(folder).iterdir()}
            )
        yield


def arguments(options: Any, *without: str) -> st.SearchStrategy[list[str]]:
    """Draw up to three hostile key=value arguments of a schema."""
    keys = [key for key, *_ in list_leaves([options]) if not key.startswith(without)]
    values = [
        *map(json.dumps, VALUES),
        *RAW,
        *(value for value in VALUES if isinstance(value, str)),
    ]
    # A command line holds no NUL and no lone surrogates but those of bytes.
    words = [value[:9000].replace("\0", "").replace("\ud800", "\udcff") for value in values]
    own = st.tuples(pick(keys), pick(words)).map("=".join)
    odd = st.sampled_from(
        [
            "",
            "=",
            "x",
            "=x",
            "a.b.c=1",
            "[=1",
            "a[0]=1",
            "--x",
            "${a}=1",
            ".=1",
            "target.=1",
            "\udcff=1",
            "é=1",
        ]
    )
    return st.lists(own | odd, min_size=1, max_size=3)


MODEL_COMMANDS = f"""{PLAN} target=target draft=run/draft
    doctor draft=run/draft target=target engine=vllm decode=false
    doctor draft=trained/draft target=target engine=vllm decode=false
    doctor draft=run/draft target=target eval.num_prompts=1
    doctor draft=trained/draft target=target eval.num_prompts=1
    export draft=run/draft target=target engine=gguf output_dir=out
    export draft=run/draft target=target engine=vllm output_dir=out
    export draft=trained/draft target=target engine=sglang output_dir=out
    export draft=trained/draft target=target engine=speculators output_dir=out
    acquire method=eagle3 target=target draft=trained/draft
    acquire method=draft_model target=target draft=run/draft"""
TARGET_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
CONFIGS = [f"target/{name}" for name in TARGET_FILES] + [
    "run/draft/config.json",
    "trained/draft/config.json",
    "trained/run/history.json",
]
CHECKPOINT = [
    f"interrupted/checkpoint-2/{name}.json"
    for name in ("manifest", "trainer_state", "draft/config")
]
WITH_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    f"{PLAN} target=target": (PlanOptions, "output"),
    "doctor draft=trained/draft decode=false": (DoctorOptions,),
    "gate report=run/report output_dir=out": (GateOptions, "output_dir"),
    "export draft=run/draft engine=vllm output_dir=out": (ExportOptions, "output_dir"),
    "acquire method=eagle3 target=target draft=trained/draft": (AcquireOptions,),
    PUBLISH: (PublishOptions, "output_dir", "dry_run", "force"),
    f"monitor server=http://127.0.0.1:{PORT}": (MonitorOptions, "output"),
    f"train {TRAINED} target.model=nothere": (TrainedRecipe, "target.model", "train.output_dir"),
    "eval recipe=recipe.yaml suite=suite.jsonl draft=nothere output_dir=out": (
        TrainedRecipe,
        "eval.output_dir",
        "eval.draft",
    ),
}
SURFACES = {
    **{
        f"arguments of {it.split()[0]}": Surface(
            it, arguments=arguments(*of), around=run_hub if it == PUBLISH else nullcontext
        )
        for it, of in WITH_ARGUMENTS.items()
    },
    "recipe": Surface(
        f"""train recipe=recipe.yaml target.model=nothere train.output_dir=out
        train recipe=recipe.yaml target.model=target data.rows=rows train.output_dir=out {" ".join(SMALL)}
        data show recipe=recipe.yaml data.cache_dir=cache data.source=rows.jsonl data.regenerate.num_tokens=0
        eval recipe=recipe.yaml suite=suite.jsonl draft=nothere output_dir=out
        export recipe=recipe.yaml dry_run=true engine=vllm output_dir=out target.model=target""",  # noqa: E501
        {"recipe.yaml": edit_yaml_file},
        weight=2,
    ),
    "report": Surface(
        """gate report=run/report gates=gate.yaml output_dir=out
        gate report=run/report gates=default output_dir=out
        export draft=run/draft engine=vllm report=run/report output_dir=out target=target
        eval recipe=run/run/recipe.yaml output_dir=run/report eval.draft=nothere""",
        {"run/report/report.json": edit_json_file, "run/report/samples.jsonl": edit_jsonl_file},
        weight=2,
    ),
    "gate": Surface(
        "\n".join(
            f"gate report=run/report gates=gate.yaml output_dir=out baseline={it}"
            for it in ("none", "run/report")
        ),
        {"gate.yaml": edit_yaml_file},
    ),
    "suite": Surface(
        """doctor draft=run/draft target=target suite=suite.yaml eval.num_prompts=1
        eval method=eagle3 target=target draft=nothere suite=suite.yaml output_dir=out""",
        {"suite.yaml": edit_yaml_file, "suite.jsonl": edit_jsonl_file},
    ),
    "configs": Surface(MODEL_COMMANDS, dict.fromkeys(CONFIGS, edit_json_file), weight=2),
    "tensors": Surface(
        MODEL_COMMANDS,
        {
            f"{name}/model.safetensors": edit_safetensors_file
            for name in ("target", "run/draft", "trained/draft")
        },
    ),
    "GGUF": Surface(
        f"""{PLAN} target=gguf/target.gguf
        doctor draft=gguf
        doctor draft=trained/draft target=gguf/target.gguf eval.num_prompts=1""",
        {"gguf/target.gguf": edit_binary_file},
    ),
    "sources": Surface(
        f"data make {ROWS} data.source=rows.jsonl\n data show {ROWS} data.source=chat.jsonl"
        " target.model=chatting",
        {
            "rows.jsonl": edit_jsonl_file,
            "chat.jsonl": edit_jsonl_file,
            "chatting/chat_template.jinja": damage_file,
        },
    ),
    "row set": Surface(
        f"data show {ROWS} data.rows=rows\n train {TRAINED} train.output_dir=out",
        {"rows/manifest.json": edit_json_file, "rows/train-00000-of-00001.arrow": edit_binary_file},
    ),
    "features": Surface(
        f"data features {TRAINED} {STORED}",
        {"features/000000-of-000001.safetensors": edit_safetensors_file},
    ),
    "interrupted run": Surface(
        f"train {TRAINED} train.output_dir=interrupted",
        {
            "interrupted/run/recipe.yaml": edit_yaml_file,
            **dict.fromkeys(
                ["interrupted/run/provenance.json", "interrupted/run/history.json", *CHECKPOINT],
                edit_json_file,
            ),
            "interrupted/checkpoint-2/draft/model.safetensors": edit_safetensors_file,
        },
    ),
    "finished run": Surface(
        PUBLISH,
        {
            "run/run/recipe.yaml": edit_yaml_file,
            **dict.fromkeys(
                ["run/run/provenance.json", "run/report/report.json", "run/draft/config.json"],
                edit_json_file,
            ),
            "target/README.md": edit_card_file,
        },
        around=run_hub,
    ),
    "Hub": Surface(
        """acquire method=eagle3 target=someone/target draft=someone/head-eagle3
        acquire method=eagle3 target=someone/target""",
        {
            "card.json": edit_json_file,
            "trained/draft/config.json": edit_json_file,
            "trained/draft/model.safetensors": edit_safetensors_file,
        },
        around=run_hub,
    ),
    "servers": Surface(
        f"""{SERVED} eval.engine=vllm
        {SERVED} eval.engine=sglang
        monitor server=http://127.0.0.1:{PORT} seconds=0
        data make {ROWS} data.source=rows.jsonl data.regenerate.num_tokens=20 data.regenerate.prompt_tokens=4 data.regenerate.server=[http://127.0.0.1:{PORT}]
        data features {TRAINED} hidden_states.mode=hybrid hidden_states.path=out hidden_states.server=[http://127.0.0.1:{PORT}]""",  # noqa: E501
        {"server.json": edit_json_file},
        around=run_server,
    ),
}
