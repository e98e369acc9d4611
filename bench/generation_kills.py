"""Whether a killed generation gives the same rows: killed (SIGKILL) at random moments, in process and by a server, and repeated.

    python bench/generation_kills.py target=path/to/model source=path/to/rows.jsonl [num_kills=20]

Each run is killed several times, at moments drawn over the length of a whole run, start-up included, then left to end. Its rows must be,
byte for byte, those of a run that was left alone. What was generated more than once is counted. The server is the tests' own, whose
answers depend on the question alone.

Writes bench/results/generation_kills.json and the table in docs/data.md.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from specdistill.command import run
from specdistill.rows.cache import content_fingerprint
from specdistill.errors import ExitCode
from specdistill.measurement.hardware import hardware
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.text import table, write_between

sys.path.insert(0, str(ROOT))  # the tests' server
from tests.produce.openai_server import Behaviour, OpenAIServer, running

RESULTS = Path(__file__).with_name("results") / "generation_kills.json"
PAGE = ROOT / "docs" / "data.md"
KILLS_OF_A_RUN = 4
# As `python -m specdistill`, noting each batch that is begun.
IN_PROCESS = """
import os, sys
from specdistill.data import regeneration
from specdistill.data.answers import digest
from specdistill.cli import main

generate = regeneration.generate

def noted(model, prompts, temperatures, **how):
    with open(os.environ["BEGUN"], "a") as begun:
        begun.write(digest([prompts, how["seed"]]) + "\\n")
    return generate(model, prompts, temperatures, **how)

regeneration.generate = noted
sys.exit(main(sys.argv[1:]))
"""


class Options(Section):
    target: str = option(..., "a small target with a chat template: the runs are about files and processes")
    source: str = option(..., "texts or conversations to generate from")
    num_kills: int = option(20, "moments, of each way", ge=1)
    num_tokens: int = option(60_000, "tokens of a whole run in process; by the server a tenth", ge=100)
    seed: int = option(0, "of the moments", ge=0)
    output_dir: str = option("runs/generation_kills", "folder of the runs, emptied first")


def main(options: Options) -> ExitCode:
    folder = Path(options.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    keys = ["recipe=small/eagle3", f"target.model={options.target}", f"data.source={options.source}", "target.dtype=float32"]
    keys += ["train.bf16=false", "data.max_length=128", "data.validation_fraction=0.1", "data.decontaminate=[]"]
    sizes = {"in process": options.num_tokens, "by a server": options.num_tokens // 10}
    found = {}
    for way, num_tokens in sizes.items():
        place, more = folder / way.replace(" ", "-"), [*keys, f"data.regenerate.num_tokens={num_tokens}"]
        found[way] = trial(place, way, more, options.num_kills, random.Random(options.seed))
    made = {"hardware": hardware(torch.device("cpu")), "ways": found}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    write_between(PAGE, "generation_kills", page(made))
    return ExitCode.DONE if all(way["identical"] == way["runs"] for way in found.values()) else ExitCode.CHECK_FAILED


def trial(folder: Path, way: str, keys: Sequence[str], num_kills: int, moments: random.Random) -> dict[str, Any]:
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        server = None if way == "in process" else stack.enter_context(running(Behaviour(seconds=0.05)))
        start = time.monotonic()
        wait(launch(folder / "whole", keys, server))
        seconds, whole = time.monotonic() - start, rows(folder / "whole")
        needed = sum(begun(folder / "whole", server).values())
        kills: list[float] = []
        same, repeated = [], 0
        while len(kills) < num_kills:
            place = folder / f"killed-{len(same)}"
            for _ in range(min(KILLS_OF_A_RUN, num_kills - len(kills))):
                if (moment := killed(launch(place, keys, server), moments.uniform(0, seconds))) is not None:
                    kills.append(round(moment, 2))
            wait(launch(place, keys, server))
            same.append(rows(place) == whole)
            repeated += sum(count - 1 for count in begun(place, server).values())
            print(
                f"{way}: {len(kills)} kills, rows {'the same' if same[-1] else 'OTHERS'}, {repeated} generated again",
                flush=True,
            )
    units = "batches" if server is None else "answers"
    counted = {"unit": units, "needed": needed, "repeated": repeated, "repeated a kill": round(repeated / len(kills), 2)}
    return {
        "kills": len(kills),
        "runs": len(same),
        "identical": sum(same),
        "seconds": round(seconds, 1),
        **counted,
        "moments": kills,
    }


def launch(place: Path, keys: Sequence[str], server: OpenAIServer | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BEGUN": f"{place}.begun"}
    if server is None:
        how = [sys.executable, "-c", IN_PROCESS, "data", "show", "data.regenerate.batch_size=8"]
    else:
        how = [sys.executable, "-m", "specdistill", "data", "generate", "data.regenerate.batch_size=4"]
        how += [f"data.regenerate.server=[{server.address}]", "data.regenerate.set_aside=[]"]
    with open(f"{place}.log", "ab") as log:
        return subprocess.Popen([*how, *keys, f"data.cache_dir={place}"], env=environment, stdout=log, stderr=log)


def killed(process: subprocess.Popen[bytes], moment: float) -> float | None:
    """Kill it at a moment, in seconds; None: it had ended before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(moment)
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return moment


def wait(process: subprocess.Popen[bytes]) -> None:
    assert process.wait(1200) == 0


def rows(place: Path) -> list[bytes]:
    """The generated documents and what they are packed in, as the datasets library keeps them, without its own records."""
    made = [path for path in place.rglob("*.arrow") if "input_ids" in Dataset.from_file(str(path)).column_names]
    return sorted(content_fingerprint(Dataset.from_file(str(path))).encode() for path in made)


def begun(place: Path, server: OpenAIServer | None) -> Counter[str]:
    """How often each batch was begun, or each answer given, since this was asked last."""
    if server is None:
        return Counter(Path(f"{place}.begun").read_text(encoding="utf-8").split())
    answered, server.answered = server.answered, Counter()
    return answered


def page(made: dict[str, Any]) -> str:
    lines = [(way, str(it["kills"]), f"{it['identical']} of {it['runs']}", again(it)) for way, it in made["ways"].items()]
    return f"{made['hardware']['name']}:\n\n{table(('', 'kills', 'runs that gave the same rows', 'generated again'), lines)}"


def again(it: dict[str, Any]) -> str:
    return f"{it['repeated a kill']} {it['unit']} a kill; a whole run takes {it['needed']}"


if __name__ == "__main__":
    sys.exit(run(main, Options))
