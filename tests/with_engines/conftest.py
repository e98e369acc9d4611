"""Inputs of the engines: pico, prompts, and drafts trained for a few steps.

So few steps are enough for drafts that are accepted now and then.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from bench.counting import ignore_stop_tokens
from bench.engines import LLAMA_CPP, convert
from specdistill.common.project import PICO
from specdistill.evaluation.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from tests.scripts import specdistill
from tests.with_engines.environments import environment

NUM_TOKENS, K = 48, 4  # tokens generated for each prompt, and drafted in each round
CHOSEN = (
    "draft.fc_norm=false",
    "draft.norm_output=false",
    "draft.aux_layers=[3,7,12]",
    "draft.vocab_size=700",
)
# Larger batches and a high rate learn from more tokens in few steps.
FAST = ("train.per_device_train_batch_size=8", "train.learning_rate=2e-2")
# Each draft's recipe, and the keys that are changed in it.
TRAINED: dict[str, tuple[str, tuple[str, ...]]] = {
    "EAGLE-3.1": ("pico/eagle3", FAST),
    "EAGLE-3, chosen layers": ("pico/eagle3", (*FAST, *CHOSEN)),
    "EAGLE": ("pico/eagle", FAST),
    "draft model": ("pico/draft", ()),
    "PARD": ("pico/pard", FAST),
    # One layer, since vLLM on a CPU normalises the keys of all layers by the first one's weights.
    "DFlash": ("pico/dflash", (*FAST, "train.max_steps=200", "draft.num_layers=1")),
    "DFlash, two layers": ("pico/dflash", (*FAST, "train.max_steps=200")),
    "DSpark": ("pico/dspark", (*FAST, "draft.markov_head_type=vanilla")),
}


@pytest.fixture(scope="session")
def pico() -> FrozenTarget:
    target = FrozenTarget.load("pico")
    ignore_stop_tokens(target)
    return target


@pytest.fixture(scope="session")
def prompts(pico: FrozenTarget) -> list[tuple[int, ...]]:
    suite_prompts = tokenize(
        load_suite("pico"),
        pico.tokenizer,
        max_new_tokens=NUM_TOKENS + K,
        max_length=512,
        num_prompts=6,
    )
    return [prompt.token_ids for prompt in suite_prompts]


@pytest.fixture(scope="session")
def trained_draft(
    tmp_path_factory: pytest.TempPathFactory, testrun_uid: str
) -> Callable[[str], Path]:
    """A function from a name to the folder of that draft, trained when first asked for."""
    folder = tmp_path_factory.getbasetemp().parent / f"drafts-{testrun_uid}"
    # Every worker has its own cache, because rows can have only one writer at a time.
    cache = tmp_path_factory.mktemp("cache")

    def draft(name: str) -> Path:
        run = folder / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        with FileLock(f"{run}.lock"):
            if not run.exists():
                train(name, run, cache)
        return run / "draft"

    return draft


def train(name: str, run: Path, cache: Path) -> None:
    recipe, changes = TRAINED[name]
    small = (
        "max_steps=100",
        "eval_strategy=no",
        "save_strategy=no",
        "load_best_model_at_end=false",
        "warmup_steps=5",
    )
    data = (
        "max_length=128",
        "regenerate.num_tokens=40000",
        "regenerate.prompt_tokens=32",
        "regenerate.temperatures=[0.0]",
    )
    arguments = [f"recipe={recipe}", f"train.output_dir={run}", f"data.cache_dir={cache}"]
    arguments += [f"train.{change}" for change in small] + [f"data.{change}" for change in data]
    done = specdistill("train", *arguments, *changes)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def to_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that converts a checkpoint to a GGUF file in float32 and returns the file."""
    for name in ("llama.cpp", "vllm"):
        environment(name)
    script = (Path(__file__).with_name("convert_to_gguf.py"), LLAMA_CPP)

    def convert_checkpoint(checkpoint: Path, *options: str | Path) -> Path:
        output = tmp_path_factory.mktemp("gguf") / f"{checkpoint.name}.gguf"
        return convert(checkpoint, output, *options, "--outtype", "f32", script=script)

    return convert_checkpoint


@pytest.fixture(scope="session")
def target_file(to_gguf: Callable[..., Path]) -> Path:
    return to_gguf(PICO)
