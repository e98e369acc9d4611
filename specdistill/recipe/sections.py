"""Sections that recipes of every method share. Units and limits are in each key's help."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from specdistill.engines import ENGINES, engines_with
from specdistill.engines.server import MOST_IN_FLIGHT
from specdistill.errors import UserError
from specdistill.recipe.fields import (
    AtLeastOne,
    NonNegative,
    ReadWhen,
    Section,
    one_of,
    option,
    section,
    shown,
)


def swept(it: Any, axis: str) -> list[Any]:
    """The values of an axis of `eval.sweep`, which not all commands that measure have."""
    values: list[Any] = getattr(getattr(it, "sweep", None), axis, [])
    return values


# Commands that measure have some of the keys of `eval:` and not others: without an engine they decode in this process.
BY_SERVER = ReadWhen(
    f"with eval.engine={' or '.join(engines_with('client'))}", lambda it: it.engine != "specdistill"
)
STARTED = ReadWhen(
    f"with eval.engine={' or '.join(engines_with('program'))} and no eval.server",
    lambda it: it.engine != "specdistill" and it.server is None,
)
LLAMA_CPP = ReadWhen(
    "with eval.engine=llama.cpp and no eval.server",
    lambda it: STARTED.holds(it) and it.engine == "llama.cpp",
)
SEVERAL_GPUS = ReadWhen(
    "with eval.engine=vllm or sglang and no eval.server",
    lambda it: STARTED.holds(it) and it.engine in ("vllm", "sglang"),
)
RUNNING = ReadWhen("with eval.server", lambda it: it.server is not None)
NOT_RUNNING = ReadWhen(
    "without eval.server: a server drafts as it was started",
    lambda it: getattr(it, "server", None) is None,
)
IN_PROCESS = ReadWhen(
    "with eval.engine=specdistill: a server drafts as it was started",
    lambda it: getattr(it, "engine", "specdistill") == "specdistill",
)
# A suite's own YAML may say which temperatures to sweep.
SAMPLED = ReadWhen(
    "at a temperature above 0",
    lambda it: (
        it.temperature > 0
        or any(swept(it, "temperature"))
        or (it.suite or "").endswith((".yaml", ".yml"))
    ),
)
A_CHAIN = ReadWhen(
    "without eval.tree, or as the depth of that",
    lambda it: it.tree is None or it.num_speculative_tokens == it.tree.levels,
)
CHAINS = ReadWhen("without lookup_first.draft_tree", lambda it: it.draft_tree is None)
LOOKED_UP = ReadWhen(
    f"with eval.engine={' or '.join(['specdistill', *(name for name in engines_with('lookup') if name in engines_with('program'))])} "
    "and without eval.server or eval.tree: the draft's tree is eval.lookup_first.draft_tree",
    lambda it: (
        (IN_PROCESS.holds(it) or (STARTED.holds(it) and it.engine in engines_with("lookup")))
        and not (it.tree or swept(it, "tree"))
    ),
)
LONE_CHAINS = ReadWhen(
    "with eval.engine=specdistill, eval.batch_size=1 and no eval.tree: one shape is compiled",
    lambda it: IN_PROCESS.holds(it) and it.batch_size == 1 and it.tree is None,
)
ALL_CHAINS = ReadWhen(
    "with eval.engine=specdistill and without trees, which have a size of their own",
    lambda it: (
        IN_PROCESS.holds(it)
        and not (it.tree or swept(it, "tree") or (it.lookup_first and it.lookup_first.draft_tree))
    ),
)
FROM_HUB = ReadWhen(
    "of a model on the Hub: pico and folders have no revisions",
    lambda it: it.model is not None and it.model != "pico" and not Path(it.model).exists(),
)
UNMERGED = ReadWhen(
    "without target.adapter: merge that into a checkpoint first", lambda it: it.adapter is None
)
WHOLE = ReadWhen("with target.shard=none", lambda it: it.shard == "none")
GENERATED = ReadWhen(
    "when num_tokens is above 0; data.regenerate=null resets the section",
    lambda it: it.num_tokens > 0,
)
SERVED = ReadWhen("with data.regenerate.server", lambda it: it.num_tokens > 0 and bool(it.server))

STORED = ReadWhen("with hidden_states.mode=offline or hybrid", lambda it: it.mode != "online")
MADE = ReadWhen("with hidden_states.mode=hybrid", lambda it: it.mode == "hybrid")
WAITING = "generated"  # folder in a store of what servers gave with their answers
MADE_BY_SERVERS = ReadWhen("with hidden_states.server", lambda it: bool(it.server))

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
AnswerRule = Literal["refused", "empty", "truncated", "looping", "off_template"]
ATTENTION = (
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "ORG/KERNEL",
)
AttentionImplementation = Annotated[str, one_of(lambda: ATTENTION, also=lambda name: "/" in name)]


def _names(value: Any) -> Any:
    """A name, several, or none; of a union pydantic would name each of its types."""
    several = value if isinstance(value, list) and value else [value]
    if value is not None and not all(isinstance(name, str) for name in several):
        raise PydanticCustomError("names_type", "neither a name nor a list of names")
    return value


class TargetConfig(Section):
    model: str = option(..., "`pico`, a folder, a GGUF file or a Hub id")
    revision: str | None = option(None, "branch, tag or commit of a Hub id", read_when=FROM_HUB)
    adapter: Annotated[str | list[str] | None, PlainValidator(_names)] = option(
        None,
        "LoRA adapter of the target (peft): a folder or a Hub id; the draft learns the adapted target; `eval` also takes a list, each a "
        "category of the report",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "data type of the weights")
    quantization: Literal["fp8", "bitsandbytes-8bit"] | None = option(
        None,
        "round a bfloat16 target's weights when they are loaded: fp8 by torchao, activations too, on a GPU of Ada's generation or later; "
        "null: as the checkpoint has them",
        read_when=UNMERGED,
    )
    attn: AttentionImplementation | None = option(
        None,
        "attention implementation of transformers, or a kernel on the Hub; null: the default of the model class",
    )
    trust_remote_code: bool = option(
        False, "run Python code from the model's repository; must be given on the command line"
    )
    shard: Literal["none", "layers"] = option(
        "none",
        "how a launch splits the target: none: a copy per process; layers: parameters sharded, gathered layer by layer; "
        "a single process holds all of it",
        read_when=UNMERGED,
    )
    device_map: str | None = option(
        None,
        "placement of an unsharded target: auto, balanced or sequential over all devices of one process, or one device, e.g. cpu; "
        "null: the process's own device",
        read_when=WHOLE,
    )


class RegenerateConfig(Section):
    num_tokens: int = option(
        0,
        "tokens of training data that the target generates; 0: train on the source as it is",
        ge=0,
    )
    prompt_tokens: int = option(
        32, "tokens from the start of a text row that are its prompt", ge=1, read_when=GENERATED
    )
    temperatures: list[NonNegative] = option(
        [0.0, 0.8],
        "sampling temperatures, each for an equal share of the rows; 0 is greedy",
        min_length=1,
        read_when=GENERATED,
    )
    batch_size: int = option(
        128, "sequences generated at a time, per process or server", ge=1, read_when=GENERATED
    )
    server: list[str] = option(
        [],
        "addresses of OpenAI-compatible servers of the target (vLLM, SGLang, llama.cpp) that generate instead of this process",
        read_when=GENERATED,
    )
    timeout: float = option(600.0, "timeout of a response, in seconds", gt=0, read_when=SERVED)
    template: dict[str, Any] = option(
        {},
        "additional arguments of the chat template, e.g. {enable_thinking: false}",
        read_when=GENERATED,
    )
    filter: list[AnswerRule] = option(
        [*get_args(AnswerRule)], "kinds of responses that are dropped and counted", read_when=SERVED
    )


class DataConfig(Section):
    source: Any = option(
        "pico",
        "training data: pico, self (prompts generated by the target), a jsonl/json/parquet file, a Hub id, "
        "or a list of {source, weight, split}",
    )
    split: str = option("train", "split of the source")
    columns: dict[str, str] = option(
        {}, "column names, ours to the source's, e.g. {messages: turns}; {}: detected"
    )
    chat_template: str | None = option(
        None,
        "file of a chat template that replaces the target's, in rows, evaluation and the draft's folder; null: the target's",
    )
    max_length: int = option(
        512, "tokens per packed row; longer texts are cut, longer conversations at a turn", ge=8
    )
    validation_fraction: float = option(
        0.02, "fraction of the rows held out for evaluation during training", ge=0, le=0.9
    )
    validation_split: Literal["hash", "sample"] = option(
        "hash",
        "how held-out rows are chosen: hash: by content, so that duplicates stay together and added rows move no others; sample: a "
        "random sample of exactly that fraction",
    )
    decontaminate: list[str] = option(
        ["all"],
        "drop rows that share 13 consecutive words with a prompt of these suites; "
        "all: built-in suites and those of eval and selection; []: none",
    )
    packing: bool = option(
        True, "pack several documents into a row, with attention kept within each"
    )
    loss_mask: Literal["assistant", "all"] = option(
        "assistant", "tokens that carry loss: of the assistant, or all"
    )
    regenerate: RegenerateConfig = section(RegenerateConfig)
    seed: int = option(0, "seed of the document order and of regeneration", ge=0)
    num_proc: int | None = option(
        None,
        "processes that prepare rows; null: one per core, at most 16, fewer for few rows",
        ge=1,
    )
    rows: str | None = option(
        None, "row set made by `specdistill data make`; null: the recipe's own, made if missing"
    )
    shard: str | None = option(
        None,
        "for `data make`: i/n generates blocks i, i + n, …; auto: from the array job's environment; null: all",
    )
    cache_dir: str | None = option(
        None, "folder for row sets and intermediate files; null: the cache of the datasets library"
    )
    force: bool = option(False, "start even if the disk has less free space than estimated")

    @field_validator("regenerate", mode="before")
    @classmethod
    def _null_is_none_at_all(cls, value: Any) -> Any:
        return RegenerateConfig() if value is None else value


class HiddenStatesConfig(Section):
    """Where training takes the target's features from."""

    mode: Literal["online", "offline", "hybrid"] = option(
        "online",
        "where the target's hidden states come from: online: a target pass in each step; offline: a store; hybrid: a store that is "
        "filled before the first step, and target passes for rows that do not fit",
    )
    path: str | None = option(None, "folder of the store", read_when=STORED)
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16", "data type of the store", read_when=STORED
    )
    max_bytes: int | None = option(
        None, "maximum size of the store in bytes; null: unlimited", ge=1, read_when=MADE
    )
    shard_tokens: int = option(
        32_768,
        "tokens per file of the store: at most this much is repeated after a kill",
        ge=1,
        read_when=MADE,
    )
    server: list[str] = option(
        [],
        "addresses of vLLM servers of the target that write hidden states to a folder readable from here; []: this process "
        "computes them",
        read_when=MADE,
    )
    timeout: float = option(
        600.0, "timeout of a server's response, in seconds", gt=0, read_when=MADE_BY_SERVERS
    )

    @property
    def runs_layers(self) -> bool:
        """Whether training may have to run the target's layers."""
        return self.mode == "online" or (
            self.mode == "hybrid" and (not self.server or self.max_bytes is not None)
        )

    @property
    def waiting(self) -> Path | None:
        """Where the hidden states of what servers generate wait for the store of all rows; None without one."""
        return (
            Path(self.path) / WAITING
            if self.path and self.mode == "hybrid" and self.max_bytes is None
            else None
        )

    @model_validator(mode="after")
    def _a_store_has_a_place(self) -> "HiddenStatesConfig":
        if self.mode != "online" and self.path is None:
            raise UserError("hidden_states.path", got="nothing", expected="a folder")
        return self


class TreeConfig(Section):
    budget: int | None = option(
        None, "dynamic tree (EAGLE-2): nodes proposed per round; needs depth and top_k", ge=1
    )
    depth: int | None = option(None, "dynamic tree: levels, one draft step each", ge=1)
    top_k: int | None = option(
        None, "dynamic tree: nodes expanded per level, and children of each", ge=1
    )
    branching: list[AtLeastOne] | None = option(
        None, "static tree: children per node at each level, e.g. 4,2,1"
    )

    @property
    def levels(self) -> int:
        return self.depth or len(self.branching or ())


def check_lengths(it: Any) -> Any:
    """The validator of a section with lengths `min` and `max`; `validate` makes the error, with the keys where it stands."""
    if it.min > it.max:
        raise PydanticCustomError(
            "min_above_max", "min {min} is above max {max}", {"min": it.min, "max": it.max}
        )
    return it


class LookupFirstConfig(Section):
    """A lookup in front of a draft (see specdistill.decoding.lookup_first)."""

    method: Literal["ngram", "suffix"] = option("ngram", "lookup method")
    min: int = option(2, "shortest n-gram to match", ge=1)
    max: int = option(5, "longest n-gram to match", ge=1)
    draft_tokens: int = option(
        2,
        "draft tokens per round from the draft where the lookup finds nothing; a lookup gives num_speculative_tokens",
        ge=1,
        read_when=CHAINS,
    )
    draft_tree: TreeConfig | None = option(
        None, "draft a token tree instead of draft_tokens; null: a chain"
    )

    _has_lengths = model_validator(mode="after")(check_lengths)

    @property
    def levels(self) -> int:
        """Draft steps per round in which the draft drafts."""
        return self.draft_tree.levels if self.draft_tree else self.draft_tokens

    @property
    def described(self) -> dict[str, Any]:
        """As a report's `settings.drafting` states it, and as `eval.lookup_first` takes it."""
        unread = "draft_tokens" if self.draft_tree else "draft_tree"
        return self.model_dump(exclude={unread}, exclude_none=True)

    def check_engine(self, section: str, engine: str, k: int) -> None:
        """Raises UserError for what an engine cannot look up with K = k."""
        front = ENGINES[engine].lookup if engine in ENGINES else None
        if front and (lacking := front.lacks(self, k)):
            name, expected = lacking
            got = f"{shown(getattr(self, name))} with eval.engine={engine}"
            raise UserError(f"{section}.{name}", got=got, expected=expected)

    def check(self, settings: "MeasurementConfig", k: int) -> None:
        """Raises UserError where it cannot stand in front of a draft that is measured so, with K = k."""
        key = f"{settings.SECTION}lookup_first"
        if self.levels > k:
            name, shape = (
                ("draft_tree", "a tree of depth ") if self.draft_tree else ("draft_tokens", "")
            )
            got = f"{shape}{self.levels} with K = {k}"
            raise UserError(f"{key}.{name}", got=got, expected="at most K, which a lookup gives")
        self.check_engine(
            key, getattr(settings, "engine", "specdistill"), getattr(settings, "smallest_k", k)
        )
        if self.draft_tree and settings.compile:
            expected = f"false, or {key}.draft_tokens"
            raise UserError(
                f"{settings.SECTION}compile", got=f"true with {key}.draft_tree", expected=expected
            )


class SweepConfig(Section):
    num_speculative_tokens: list[AtLeastOne] = option(
        [], "additional K to measure; each axis is varied alone"
    )
    temperature: list[NonNegative] = option([], "additional temperatures to measure")
    batch_size: list[Annotated[int, Field(ge=1, le=64)]] = option(
        [], "additional batch sizes to measure"
    )
    concurrency: list[Annotated[int, Field(ge=1, le=MOST_IN_FLIGHT)]] = option(
        [], "additional concurrencies to measure, of a server"
    )
    tree: list[TreeConfig] = option(
        [], "additional trees to measure, each with the keys of eval.tree"
    )
    context: list[AtLeastOne] = option(
        [], "prompt lengths to measure, powers of two: long prompts are cut to that many tokens"
    )


class MeasurementConfig(Section):
    """How prompts are decoded to measure a draft, whatever the command.

    SECTION: in front of its keys in errors.
    """

    SECTION: ClassVar[str] = ""

    suite: str | None = option(
        None,
        "prompts: suite name, suite YAML, or a jsonl file with prompt, messages or text rows; null: pico, for the target pico only",
    )
    num_speculative_tokens: int = option(4, "K, draft tokens per round", ge=1, read_when=A_CHAIN)
    draft_length: Literal["fixed", "online"] = option(
        "fixed",
        "fixed: K draft tokens per round; online: up to K, by acceptance so far and measured costs",
        read_when=ALL_CHAINS,
    )
    tree: TreeConfig | None = option(
        None, "draft a token tree of depth K instead of a chain", read_when=IN_PROCESS
    )
    lookup_first: LookupFirstConfig | None = option(
        None,
        "try an n-gram or suffix lookup first, and the draft where that finds nothing",
        read_when=LOOKED_UP,
    )
    temperature: float = option(0.0, "0 is greedy", ge=0)
    top_p: float = option(
        1.0, "nucleus sampling, for target and draft", ge=0.01, le=1, read_when=SAMPLED
    )
    top_k: int = option(0, "top-k sampling, for target and draft; 0: off", ge=0, read_when=SAMPLED)
    max_new_tokens: int = option(128, "tokens generated per prompt", ge=1)
    num_prompts: int | None = option(
        None,
        "number of prompts, spread evenly over the categories; null: all of a suite, at most 200 of a file of prompts",
        ge=1,
    )
    batch_size: int = option(
        1, "prompts decoded together, with and without the draft", ge=1, le=64, read_when=IN_PROCESS
    )
    compile: bool = option(
        False,
        "compile the target's verification pass (torch.compile), with and without the draft, and a head's passes",
        read_when=LONE_CHAINS,
    )
    repeats: int = option(
        3,
        "timed repetitions per prompt, with and without the draft; the lower median of each round counts",
        ge=1,
    )
    warmup: int = option(2, "untimed prompts or batches before timing", ge=0)
    sampling_draws: int = option(
        400,
        "draws of the test that sampling is lossless; 0: skip the test",
        ge=0,
        read_when=IN_PROCESS,
    )
    seed: int = option(0, "seed of sampling and bootstrap", ge=0)

    @model_validator(mode="after")
    def _lookups_fit(self) -> "MeasurementConfig":
        if self.lookup_first:
            self.lookup_first.check(self, self.num_speculative_tokens)
        return self


class LlamaCppConfig(Section):
    """The GGUF files that llama.cpp's server loads, and options of `llama-server` in its own words, each of which reaches its command line,
    both with the draft and without; null: its default.
    """

    model: str | None = option(None, "the target as a GGUF file; null: target.model is one")
    model_draft: str | None = option(
        None, "the draft as a GGUF file, which llama.cpp's converter makes of its export"
    )
    ctx_size: int | None = option(
        None,
        "tokens of all slots together, in the target and in the draft; null: the longest sequence in each slot",
        ge=1,
    )
    parallel: int | None = option(
        None, "slots, requests decoded together; null: one for each request in flight", ge=1
    )
    batch_size: int | None = option(None, "most tokens in a batch", ge=1)
    ubatch_size: int | None = option(None, "most tokens computed together", ge=1)
    threads: int | None = option(None, "CPU threads", ge=1)
    spec_draft_threads: int | None = option(None, "CPU threads of the draft", ge=1)
    device: str | None = option(None, "devices, e.g. CUDA0,CUDA1; none: the CPU")
    spec_draft_device: str | None = option(None, "devices of the draft")
    gpu_layers: int | None = option(None, "layers on the devices", ge=0)
    spec_draft_ngl: int | None = option(None, "layers of the draft on its devices", ge=0)
    cache_type_k: CacheType | None = option(None, "type of the keys that are kept")
    cache_type_v: CacheType | None = option(None, "type of the values that are kept")
    spec_draft_type_k: CacheType | None = option(None, "type of the draft's keys")
    spec_draft_type_v: CacheType | None = option(None, "type of the draft's values")


class EvalConfig(MeasurementConfig):
    """How a draft is measured; methods add the keys that only they read."""

    SECTION = "eval."

    engine: Annotated[str, one_of(lambda: ["specdistill", *engines_with("client")])] = option(
        "specdistill",
        "what decodes: this package, or an inference engine, started here or already running (eval.server)",
    )
    engine_command: str | None = option(
        None,
        "command that starts the engine, with options, e.g. 'vllm serve --max-num-seqs 64'; must be given on the "
        "command line; null: the default",
        read_when=STARTED,
    )
    tensor_parallel: int | None = option(
        None,
        "tensor parallel size of an engine started here; null: 1",
        ge=1,
        read_when=SEVERAL_GPUS,
    )
    llama_cpp: LlamaCppConfig = option(
        LlamaCppConfig(), "files and options of llama.cpp's server", read_when=LLAMA_CPP
    )
    server: str | None = option(
        None,
        "address of a running server with the draft, e.g. http://127.0.0.1:8000; null: start one",
        read_when=BY_SERVER,
    )
    baseline_server: str | None = option(
        None,
        "address of a running server without a draft; null: no speedup is measured",
        read_when=RUNNING,
    )
    server_timeout: float = option(
        300.0, "timeout of a response, in seconds", ge=0.1, read_when=BY_SERVER
    )
    draft: str | None = option(None, "draft folder; null: <train.output_dir>/draft")
    output_dir: str | None = option(None, "folder of the report; null: <train.output_dir>/report")
    concurrency: int = option(
        1, "requests in flight at a server", ge=1, le=MOST_IN_FLIGHT, read_when=BY_SERVER
    )
    run_code: bool = option(
        False,
        "run generated programs of rows with a `test`, with your permissions; must be given on the command line",
    )
    baseline: str | None = option(
        None,
        "report that max_regression rules compare with: a report.json, its folder, or a Hub revision, e.g. org/name@v1.2",
    )
    sweep: SweepConfig = option(
        SweepConfig(),
        "additional settings to measure, one axis at a time; with an engine, every K at every concurrency",
    )

    @property
    def smallest_k(self) -> int:
        """Of all that are measured."""
        return min([self.num_speculative_tokens, *self.sweep.num_speculative_tokens])

    @model_validator(mode="after")
    def _sweeps_are_of_what_decodes(self) -> "EvalConfig":
        for name, values in vars(self.sweep).items():
            condition = {"concurrency": BY_SERVER, "num_speculative_tokens": NOT_RUNNING}.get(
                name, IN_PROCESS
            )
            if values and not condition.holds(self):
                raise UserError(
                    f"eval.sweep.{name}",
                    got=shown(values),
                    expected=f"[]: it is read only {condition.text}",
                )
        return self


class SelectionConfig(Section):
    """Prompts on which each evaluation of a training decodes. Best not those of eval.suite, which would judge what it has chosen."""

    suite: str = option(..., "prompts: suite name, suite YAML or jsonl file, as for eval.suite")
    num_prompts: int | None = option(
        16, "number of prompts, spread evenly over the categories; null: all", ge=1
    )
    max_new_tokens: int = option(64, "tokens generated per prompt", ge=1)


class PublishConfig(Section):
    """What `specdistill publish` does with a finished run, unless its command says otherwise."""

    repo: str | None = option(None, "Hub repository, org/name; created if missing")
    private: bool | None = option(
        None, "private repository; null: new repositories are private, existing ones unchanged"
    )
    license: str | None = option(
        None, "licence of the draft, as the Hub names it; null: the target's"
    )
    base_model: str | None = option(
        None, "Hub id of a target that was read from a folder; its files must have the same hashes"
    )
    exports: list[Annotated[str, one_of(lambda: engines_with("serve_command"))]] = option(
        [], "engines for which an export is published too, each in its own folder"
    )
