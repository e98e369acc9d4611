"""Where to start: the method that a plan recommends, why, and the commands that train or measure it for this target."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.methods import METHODS
from specdistill.planning.budget import MOST_DEVICES, Budget
from specdistill.planning.estimates import PlanRow
from specdistill.planning.training import GPUS_PER_MACHINE, SMALL, header_commands, launch_of, read_recipe

DATA, PROMPTS, HOST = "path/to/conversations.jsonl", "path/to/prompts.jsonl", "FIRST_MACHINE"  # the blanks of a command
SERVER = "data.regenerate.server=[http://127.0.0.1:8000]"  # as `vllm serve` listens
PROMPT_TOKENS = 128  # of a text that the target continues
LEARNING_RATE, ADAMW_LEARNING_RATE = 1e-3, 1e-4  # of a target of billions; recipes of small ones have more
MOST_GENERATED = 512  # sequences at a time
EVALUATIONS = 10  # at least, in a run


def recommend(rows: Sequence[PlanRow], target: Mapping[str, Any], whole: Budget | None = None) -> dict[str, str | None]:
    """The method to start with, why, the commands that start it (`start`, a line each), and the one that measures n-gram lookup (`lookup`).

    target: as in a plan. whole: what one device holds that serves it without a draft.

    It is what has the highest middle of its speedup, n-gram lookup included. Layers that come with the target cost no training either: they
    win unless another draft promises more at its low end, or n-gram lookup at its high end.
    """
    ends = {row.method: (row.low.speedup, row.high.speedup) for row in rows if row.low and row.high}
    lookup = next(row for row in rows if not METHODS[row.method].is_trained)
    drafts = sorted((row for row in rows if row.method in ends and row is not lookup), key=lambda row: -row.middle)
    native = drafts and target["native_mtp"] and METHODS[max(drafts, key=lambda row: ends[row.method][0]).method].in_target
    if native:
        drafts.sort(key=lambda row: not METHODS[row.method].in_target)
    promise = (lambda row: ends[row.method][1]) if native else (lambda row: row.middle)
    best = drafts[0] if drafts and promise(drafts[0]) > promise(lookup) else lookup
    low, high = ends[best.method]
    own = (read_recipe(row.recipe) for row in rows if row.recipe)
    suites = (keys["eval"].get("suite") for keys in own if keys["target"]["model"] == target["model"])
    commands = Commands(target, whole, next(filter(None, suites), PROMPTS))
    advice: dict[str, str | None] = {"lookup": shlex.join(commands.measuring(lookup))}
    if high <= 1:
        return {"method": None, "reason": "no method promises more than plain decoding", "start": None, **advice}
    why = "the highest middle of all methods"
    if best is lookup:
        why = "without training, and no draft promises more"
    elif native:
        why = "its layer comes with the target, and nothing else promises more at its low end"
    reason = f"an estimated {low:.2f} to {high:.2f} times the speed of plain decoding, {why}.{_training(best, target)}"
    start = "\n".join(map(shlex.join, commands.starting(best)))
    return {"method": best.method, "reason": reason, "start": start or None, **advice}


def _training(row: PlanRow, target: Mapping[str, Any]) -> str:
    """What it takes to train it, in the order in which it is decided: the launch, the sharding, who generates the data."""
    if row.draft or not row.micro_batch:
        return ""
    launch, kind = row.training_launch, target["quantization"]
    if launch is None:
        rows, length = row.micro_batch
        what = f"{rows} rows of {length:,} tokens at a time: lower training.batch_size or training.max_length"
        return f" Training fits on none of up to {MOST_DEVICES} devices with {what}."
    held = f" Training holds {launch.device_bytes / 2**30:.3g} GiB on "
    if launch.num_processes == 1:
        return f"{held}one device."
    machines = ", on each machine with its machine_rank" if launch.num_processes > GPUS_PER_MACHINE else ""
    refused = f", which takes no {kind}: save the target in {target['dtype']} first" if kind else ""
    shard = f"; target.shard=layers shares the target{refused}" if launch.is_sharded else ""
    launched = f"{held}each of {launch.num_processes} devices: launch={launch.configuration} starts them{machines}{shard}"
    return f"{launched}; a server generates the data first, and is stopped before training."


@dataclass(frozen=True)
class Commands:
    """Words of commands for a target. suite: of its own recipes, or a blank."""

    target: Mapping[str, Any]
    whole: Budget | None
    suite: str

    @property
    def given(self) -> list[str]:
        """What was said of the target in addition to its name."""
        revision = [f"target.revision={self.target['revision']}"] if self.target["revision"] else []
        return revision + ["target.trust_remote_code=true"] * self.target["trust_remote_code"]

    def measuring(self, row: PlanRow) -> list[str]:
        draft = [f"draft={row.draft}"] if row.draft else []
        tokens = (row.low.num_speculative_tokens + row.high.num_speculative_tokens) // 2 if row.low and row.high else 1
        spread = ["target.device_map=auto"] if self.whole and not self.whole.fits else []
        keys = [
            f"method={row.method}",
            f"target={self.target['model']}",
            *self.given,
            *draft,
            f"target.dtype={self.target['dtype']}",
        ]
        keys += [
            *spread,
            f"eval.num_speculative_tokens={tokens}",
            f"suite={self.suite}",
            f"output_dir={self._folder(row)}/report",
        ]
        return ["specdistill", "eval", *keys]

    def starting(self, row: PlanRow) -> list[list[str]]:
        """What measures a draft that is there, or trains the one that the row describes; none where no recipe of the method ships."""
        if row.draft or not METHODS[row.method].is_trained:
            return [self.measuring(row)]
        if row.recipe is None or row.training_launch is None:
            return []
        if read_recipe(row.recipe)["target"]["model"] == self.target["model"]:
            return self._as_in_header(row.recipe)
        model = [f"recipe={row.recipe}", f"target.model={self.target['model']}", *self.given]
        launch, data, training = self._sizes(row)
        train = ["specdistill", "train", *model, *launch, *data, *training]
        return (
            [self._server(row.training_launch.num_processes), ["specdistill", "data", "make", *model, *data], train]
            if launch
            else [train]
        )

    def _as_in_header(self, recipe: str) -> list[list[str]]:
        """The commands of the header of the target's own recipe, up to its training."""
        name, number = launch_of(recipe)
        launch = [] if name == "cpu" else [f"launch={name}", f"num_processes={number}"]
        commands = [command.split() for command in header_commands(recipe)]
        first = [command for command in commands if command[0] == "vllm" or command[1] == "data"]
        trusted = self.target["trust_remote_code"]
        consent = {"vllm": ["--trust-remote-code"], "specdistill": ["target.trust_remote_code=true"]}
        commands = [*first, ["specdistill", "train", f"recipe={recipe}", *launch]]
        return [[*command, *consent[command[0]] * trusted] for command in commands]

    def _server(self, devices: int) -> list[str]:
        """What generates on these devices, in as many copies as they hold."""
        each = (self.whole and self.whole.tensor_parallel) or 1
        sizes = {"tensor": each, "data": devices // each}
        flags = [word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))]
        revision = ["--revision", self.target["revision"]] if self.target["revision"] else []
        return [
            "vllm",
            "serve",
            self.target["model"],
            *revision,
            *flags,
            *["--trust-remote-code"] * self.target["trust_remote_code"],
        ]

    def _folder(self, row: PlanRow) -> str:
        return f"runs/{self.target['model'].rstrip('/').split('/')[-1].lower()}-{row.method.replace('_', '-')}"

    def _sizes(self, row: PlanRow) -> tuple[list[str], list[str], list[str]]:
        """Keys that fit a recipe of small targets to this one: of the launch and its sharding, of the data, of the training."""
        assert row.recipe is not None and row.training_launch is not None and row.micro_batch is not None
        recipe, launch, (rows, length) = read_recipe(row.recipe), row.training_launch, row.micro_batch
        data, training = [f"data.source={DATA}"], [f"train.output_dir={self._folder(row)}", *row.recipe_keys]
        data += ["data.packing=false"] if self.target["recurrent"] else []
        if self.target["parameters"] <= SMALL:
            return [], data + ([f"data.max_length={length}"] if recipe["data"]["max_length"] > length else []), training
        tokens = row.training_tokens or recipe["data"]["regenerate"]["num_tokens"]
        steps = max(1, round(tokens / (rows * length * launch.num_processes)))
        every, positions = max(1, min(1000, steps // EVALUATIONS)), METHODS[row.method].cost.positions
        at_a_time, of_launch, optimizer, rate = MOST_GENERATED, [], [], LEARNING_RATE
        if launch.configuration:
            of_launch = [f"launch={launch.configuration}", f"num_processes={launch.num_processes}"]
            if (machines := launch.num_processes // GPUS_PER_MACHINE) > 1:
                of_launch += [f"num_machines={machines}", "machine_rank=0", f"main_process_ip={HOST}"]
            of_launch.append("target.shard=layers")
            data.append(SERVER)
            if launch.configuration.startswith("zero"):
                optimizer, rate = ["optimizer=adamw"], ADAMW_LEARNING_RATE
        elif self.whole:
            at_a_time = max(1, min(MOST_GENERATED, (self.whole.room or 0) // length))
        of_regenerate = {
            "num_tokens": f"{tokens:_}",
            "prompt_tokens": min(PROMPT_TOKENS, length // 2),
            "batch_size": 1 << (at_a_time.bit_length() - 1),
        }
        data += [f"data.max_length={length}", *(f"data.regenerate.{name}={value}" for name, value in of_regenerate.items())]
        of_train = {
            "per_device_train_batch_size": rows,
            "max_steps": steps,
            "eval_steps": every,
            "save_steps": every,
            "learning_rate": rate,
        }
        unrolled = [f"draft.ttt_steps={positions}"] if recipe["draft"].get("ttt_steps", positions) != positions else []
        training += [f"target.dtype={self.target['dtype']}", *unrolled, *optimizer]
        return of_launch, data, training + [f"train.{name}={value}" for name, value in of_train.items()]
