"""The examination of a draft: its files first, then a few prompts decoded with what is sound enough for that.

Files are to be whole, to fit the target, and to be loaded by an engine as the draft was trained. What readers refuse is a finding. So are
values that no training leaves, a vocabulary whose two maps do not agree, settings that differ from the target's, and what an engine's
loader makes of the folder.

Decoding says whether the draft accepts what its training saw, and if not, why. No measurement (`specdistill eval` is): a handful of short
greedy completions, enough to tell a draft that works from one that does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from specdistill.decoding.decoder import Decoder, Generation
from specdistill.decoding.proposer import Proposer
from specdistill.doctor.command import CommonDoctorOptions
from specdistill.doctor.prompts import DEFAULT_SUITE, NUM_TOKENS, prompts_of, run_of
from specdistill.engines import ENGINES
from specdistill.engines.engine import Engine, Serving
from specdistill.engines.loader import TensorShape, check_loader, loader_of
from specdistill.errors import UserError
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import FLOATS, extremes, read_config, read_tensors, stored_dtype
from specdistill.methods.contract import Implementation
from specdistill.methods.layers import HeadShape
from specdistill.methods.load import implementation, load_proposer, locate, method_of
from specdistill.methods.mtp.checkpoint import check_native
from specdistill.methods.recipe import options_by_method
from specdistill.methods.target_record import check_target, use_recorded_template
from specdistill.rows.packing import indexed
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

KEY = "draft"
LARGE = 1000.0  # weights of trained drafts stay far below
NO_BETTER_THAN_CHANCE = 0.05  # share of first draft tokens that are accepted
FAR_BELOW = 0.6  # of the draft tokens accepted in training
LEAST, CLEAR = (
    0.02,
    0.1,
)  # a repair counts when the divergence falls by the first and in every completion, or by the second
WORTH = 1.05  # a cause is a problem when its repair multiplies the accepted draft tokens by this
DEFAULT_STEPS = 4


@dataclass(frozen=True)
class Finding:
    """A problem makes a draft useless or worse than it is; a warning may; a note says what to know.

    what: the fact. do: what to do about it, where that is known.
    """

    severity: Literal["problem", "warning", "note"]
    what: str
    do: str = ""


problem, warning, note = (
    partial(Finding, "problem"),
    partial(Finding, "warning"),
    partial(Finding, "note"),
)


@dataclass(frozen=True)
class SimulatedAcceptance:
    """num_tokens: drafted per round. length: tokens per round, the target's own included. num_rounds: 0 where training simulated it."""

    num_tokens: int
    length: float
    num_rounds: int = 0


@dataclass
class Diagnosis:
    """method and config: None where they were not understood; only heads have a config here.

    refused: by a reader, so that nothing can be decoded with it. prompts: what was decoded, in words. acceptance: None where nothing was;
    behind_lookup: with a lookup in front. recorded: what training simulated when it chose these weights; None without a history.
    """

    folder: Path
    method: str | None = None
    config: HeadShape | None = None
    num_tensors: int = 0
    dtype: torch.dtype | None = None
    refused: bool = False
    findings: list[Finding] = field(default_factory=list)
    prompts: str | None = None
    acceptance: SimulatedAcceptance | None = None
    behind_lookup: SimulatedAcceptance | None = None
    recorded: SimulatedAcceptance | None = None

    @property
    def is_sound(self) -> bool:
        return all(finding.severity != "problem" for finding in self.findings)

    @property
    def description(self) -> str:
        """What the draft is, in a line."""
        if self.method is None:
            return "not recognised"
        parts = [f"method {self.method}", f"{self.num_tensors} tensors"]
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype else []
        if isinstance(self.config, HeadShape):
            layers = self.config.num_layers
            parts += [f"{layers} layer{'s' * (layers != 1)} of {self.config.hidden_size}"]
            aux: Sequence[int] = getattr(self.config, "aux_layers", ())
            parts += [f"reads the target after layers {', '.join(map(str, aux))}"] if aux else []
        return ", ".join(parts)


def diagnose(options: CommonDoctorOptions) -> Diagnosis:
    """Examine the draft that the options name; with a target, unless they say otherwise, decode prompts with it.

    Raises UserError for a draft, a target or a suite that is none, ResourceError when the Hub fails.
    """
    model, engine, lookup_first = options.target.model, options.engine, options.eval.lookup_first
    in_target = options.draft == model  # its own layer, of which no weights are read
    draft = Path(options.draft) if in_target else locate(options.draft, key=KEY)
    of_files = options.target.model_dump(include={"revision", "adapter", "trust_remote_code"})
    files = TargetFiles(model, **of_files) if model else None
    if files and draft.resolve() == Path(files.name).resolve():
        return examine_native(files)
    made = examine(draft, files, engine, options)
    run = run_of(draft)
    made.recorded = recorded(
        run / "draft" if run else draft
    )  # of an export in the run's folder, too
    if engine and lookup_first and not ENGINES[engine].front(lookup_first):
        made.findings.append(
            problem(f"specdistill starts {ENGINES[engine].title} without a lookup in front")
        )
    if model and options.decode and made.method is not None and not made.refused:
        loaded = FrozenTarget.load(**vars(options.target))
        use_recorded_template([draft], loaded.tokenizer, KEY)
        prompts, made.prompts, is_known = prompts_of(
            run, options.eval.suite, loaded, options.eval.num_prompts
        )
        if not is_known:
            made.recorded = None  # of other text, it may be
            what = f"the draft is tried on lines of Python ({DEFAULT_SUITE}): no run here says what text it is for"
            made.findings.append(warning(what, "name prompts of that text with suite="))
        with refusals(made):
            of_method = options_by_method(options, [made.method])[0]
            proposer = load_proposer(made.method, draft, loaded, key=KEY, **of_method)
            made.acceptance = check_acceptance(made, loaded, proposer, prompts)
            if lookup_first:
                behind = load_proposer(
                    made.method, draft, loaded, key=KEY, lookup_first=lookup_first, **of_method
                )
                num_tokens = max(made.acceptance.num_tokens, lookup_first.levels)
                made.behind_lookup = acceptance_of(
                    complete(Decoder(loaded, behind), prompts, num_tokens), num_tokens
                )
    elif model and options.decode:
        made.findings.append(note("skipped decoding: fix the problems above first"))
    return made


def examine(
    folder: Path,
    target: TargetFiles | None = None,
    engine: str | None = None,
    options: CommonDoctorOptions | None = None,
) -> Diagnosis:
    """Examine the files of a draft.

    target: what it drafts for. engine: one with `loaders`, which the draft is checked against. options: of decoding are read, if there are
    any. Raises as `diagnose` does.
    """
    seen = Diagnosis(folder)
    with refusals(seen):
        config, seen.method = read_config(folder, KEY), method_of(folder, key=KEY)
        tensors, method = read_tensors(folder, KEY), implementation(seen.method)
        seen.config = method.head_shape(config, target.num_layers if target else None)
    if seen.refused:
        return seen
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    seen.num_tensors, seen.dtype = len(tensors), stored_dtype(floats) if floats else None
    seen.findings += [*_values(tensors), *_config(config, seen)]
    of_method = options_by_method(options, [seen.method])[0] if options else {}
    if target is not None:
        with refusals(seen):
            check_target(folder, target, KEY, **of_method)
    with refusals(seen):
        seen.config = method.check(folder, tensors, target, key=KEY, name=folder, **of_method)
    if isinstance(seen.config, HeadShape):
        seen.findings += _vocabulary(tensors, seen.config)
    if target is not None:
        seen.findings += _against(target, seen.config, config)
    if engine is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        seen.findings += findings_of_engine(
            ENGINES[engine], seen.method, seen.config, config, shapes, target
        )
    return seen


def examine_native(target: TargetFiles) -> Diagnosis:
    """Examine the layer that predicts further tokens in a target's own checkpoint, by names and shapes."""
    seen = Diagnosis(Path(target.name))
    with refusals(seen, "target.model"):
        shards = Shards.open(target.fetch("config.json", INDEX, SINGLE), "target.model")
        seen.num_tensors = check_native(
            {name: tensor.shape for name, tensor in shards.without_content().items()}, target
        )
        seen.method = "mtp"
        seen.findings.append(
            note(
                "the layer is in its target's own checkpoint, from which engines serve it; not decoded"
            )
        )
    return seen


@contextmanager
def refusals(seen: Diagnosis, key: str = KEY) -> Iterator[None]:
    """What a reader refuses about the draft, as a finding, without the key that an argument has on the command line."""
    try:
        yield
    except UserError as error:
        if error.key != key:
            raise
        seen.refused = True
        seen.findings.append(problem(str(error).removeprefix(f"{key}: got ")))


def _values(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Weights that no training leaves so; NaN and infinity are refused by the readers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            continue
        largest = max(map(abs, extremes(tensor)))
        if not largest and not name.endswith(".bias"):
            yield problem(
                f"{name} is all zeros", "it was not saved, or not trained: save the draft again"
            )
        elif largest > LARGE:
            yield warning(f"{name} has a weight of {largest:.3g}", "look at how training ended")


def _config(config: Mapping[str, Any], seen: Diagnosis) -> Iterator[Finding]:
    """Whether config.json says what engines read, and the same twice."""
    flat = config.get("model") or config.get("transformer_layer_config") or config
    if not (config.get("architectures") or flat.get("architectures")):
        yield problem(
            "config.json names no architectures",
            "engines choose the code that loads a draft by them",
        )
    stated = (
        config.get("dtype")
        or config.get("torch_dtype")
        or flat.get("dtype")
        or flat.get("torch_dtype")
    )
    held = str(seen.dtype).removeprefix("torch.")
    if stated is not None and stated != held:
        yield warning(
            f"config.json says {stated}, the weights are {held}",
            "engines convert them to what it says",
        )
    rope = flat.get("rope_parameters") or {}
    newer, older = rope.get("rope_theta"), flat.get("rope_theta")
    if newer is not None and older is not None and newer != older:
        what = f"config.json says rope_parameters.rope_theta {newer} and rope_theta {older}"
        yield warning(what, "they are read before and since transformers 5: make them the same")


def _vocabulary(tensors: Mapping[str, Tensor], config: HeadShape) -> Iterator[Finding]:
    """Whether d2t is what it should be: offsets, and the same tokens as in t2d."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_floating_point() or len(d2t) == config.vocab_size:
        return
    num = len(d2t)
    ids = torch.arange(num) + d2t
    if num > 1 and bool((d2t.diff() > 0).all()):
        what = f"d2t grows with every token, so no two of the {num} draft tokens stand side by side in the target's vocabulary"
        yield warning(
            what, "d2t holds offsets, target id - draft id: it seems to hold the ids themselves"
        )
    if t2d is not None and t2d.shape == (config.vocab_size,):
        named = t2d.nonzero().flatten()
        if named.shape != ids.shape or not torch.equal(named, ids.to(named)):
            yield problem(
                "d2t and t2d name different tokens",
                "make d2t again: the ids that t2d marks, less 0, 1, 2, …",
            )


def _against(
    target: TargetFiles, head: HeadShape | None, config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Settings that usually are the target's own. head: None for a whole model, of which config.json alone tells."""
    text = target.text_config
    rope = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or text.get("rope_theta")
    if head and theta is not None and theta != head.rope_theta:
        what = (
            f"the draft's rotary base (rope_theta) is {head.rope_theta:g}, the target's {theta:g}"
        )
        yield warning(what, "heads are trained with the target's, unless this one was not")
    own = (
        head.max_position_embeddings
        if head
        else (config.get("text_config") or config).get("max_position_embeddings")
    )
    length = text.get("max_position_embeddings")
    if own is not None and length is not None and own < length:
        what = f"the draft's context (max_position_embeddings) is {own:,} tokens, the target's {length:,}"
        yield warning(
            what, "longer sequences are not drafted for, or at positions that were never trained."
        )


def findings_of_engine(
    engine: Engine,
    method: str,
    head: HeadShape | None,
    config: Mapping[str, Any],
    shapes: Mapping[str, TensorShape],
    target: TargetFiles | None = None,
) -> Iterator[Finding]:
    """What an engine would make of a draft's folder, by its config.json and the shapes of its tensors. It loads a draft model as any model,
    and compares its tokens with the target's.
    """
    row, size = METHODS[method], config.get("vocab_size")
    serving = row.serving().get(engine.name, Serving())
    exported = (
        f"specdistill export engine={engine.name} writes a draft as it loads it"
        if serving.layout
        else ""
    )
    loader = loader_of(serving.loaders, config)
    if row.in_target:
        yield problem(
            f"{engine.title} loads such a layer from its target's checkpoint alone", exported
        )
    elif row.standalone:
        if target is not None and size != target.vocab_size:
            wanted = f"{engine.title} needs a vocabulary of {target.vocab_size}, as the target has"
            yield problem(f"{wanted}, and the draft's is {size}")
    elif head is None:
        yield problem(
            f"method {method} does not say what its heads look like, so no loader can be checked",
            exported,
        )
    elif loader is None:
        yield problem(
            f"{engine.title} is not known to load method {method} in this layout", exported
        )
    else:
        result = check_loader(loader, config, shapes, head, target)
        name = f"{engine.title} {engine.loader_version or engine.versions}"
        yield from (problem(f"{name} stops: {what}", exported) for what in result.refused)
        yield from (
            problem(f"{name} does not say so, but {what}", exported) for what in result.silent
        )
        yield from (note(f"{name}: {what}") for what in result.notes)


def recorded(draft: Path) -> SimulatedAcceptance | None:
    """The best acceptance length in the run's history, which is what the weights were chosen by; None where there is none."""
    history = read_history(draft, key=KEY)
    evaluations = (
        [entry for entry in history.log if "eval_acceptance_length" in entry] if history else []
    )
    if not evaluations:
        return None
    best = max(evaluations, key=lambda entry: float(entry["eval_acceptance_length"]))
    steps = [key for key in best if key.startswith("eval_acceptance_") and key[-1].isdigit()]
    return SimulatedAcceptance(len(steps) or DEFAULT_STEPS, float(best["eval_acceptance_length"]))


def check_acceptance(
    made: Diagnosis, target: FrozenTarget, proposer: Proposer, prompts: Sequence[Sequence[int]]
) -> SimulatedAcceptance:
    """Decode prompts (token ids) with a draft that was examined, and add what that says to the findings."""
    assert made.method is not None
    expected, window = (
        made.recorded,
        made.config.sliding_window if made.config else None,
    )  # which must hold what it drafts
    num_tokens = expected.num_tokens if expected else min(DEFAULT_STEPS, window or DEFAULT_STEPS)
    completions = complete(Decoder(target, proposer), prompts, num_tokens)
    decoded = acceptance_of(completions, num_tokens)
    accepted = [entry.num_accepted > 0 for completion in completions for entry in completion.rounds]
    length, first = decoded.length, sum(accepted) / max(1, len(accepted))
    found: list[Finding] = []
    if first < NO_BETTER_THAN_CHANCE:
        found.append(problem(f"{first:.0%} of its first draft tokens are accepted"))
    elif expected is not None and length - 1 < FAR_BELOW * (expected.length - 1):
        what = f"acceptance length {length:.2f} on {len(prompts)} prompts, far below the {expected.length:.2f} that"
        found.append(problem(f"{what} its training saw with as many draft tokens"))
    of_method = implementation(made.method)
    if cause := _cause(of_method, proposer, target, completions, num_tokens):
        found.append(cause)
    elif found:
        likely = [
            "it was trained for another target, or another revision of it",
            "it was hardly trained",
        ]
        likely += [
            of_method.likely_cause,
            "the prompts are unlike its training data: choose others with suite=",
        ]
        found.append(note(f"likely causes: {'; '.join(likely)}"))
    elif expected is None:
        found.append(
            warning("no training history to compare with", "`specdistill eval` measures the draft")
        )
    made.findings += found
    return decoded


def complete(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Generation]:
    """Greedy completions of prompts (token ids), drafting num_tokens per round."""
    return [
        decoder.generate(prompt, max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_tokens)
        for prompt in prompts
    ]


def acceptance_of(completions: Sequence[Generation], num_tokens: int) -> SimulatedAcceptance:
    accepted = [entry.num_accepted for completion in completions for entry in completion.rounds]
    return SimulatedAcceptance(num_tokens, 1 + sum(accepted) / max(1, len(accepted)), len(accepted))


def _cause(
    method: Implementation,
    proposer: Any,
    target: FrozenTarget,
    completions: Sequence[Generation],
    num_tokens: int,
) -> Finding | None:
    """The likely cause whose repair brings the draft closest to the target's distributions on the completions, if one does beyond doubt."""
    completions = [
        completion for completion in completions if len(completion.token_ids) > 2 * num_tokens
    ]
    if not completions or (simulated := method.simulated) is None:
        return None

    def fits(candidate: Any) -> list[tuple[float, float]]:
        objective = simulated(candidate, num_tokens)
        return [_fit(objective, target, completion) for completion in completions]

    before = best = fits(proposer.draft)
    best_fall, cause = 0.0, ""
    for likely, repaired in method.repaired(proposer.draft, target):
        after = fits(repaired)
        falls = [
            1 - there / here if here else 0.0
            for (here, _), (there, _) in zip(before, after, strict=True)
        ]
        fall = fmean(falls)
        if fall > best_fall and (fall > CLEAR or (fall > LEAST and min(falls) > 0)):
            best, best_fall, cause = after, fall, likely
    was, becomes = (fmean(length for _, length in measured) for measured in (before, best))
    if (
        not cause or becomes - 1 < NO_BETTER_THAN_CHANCE
    ):  # nearer to the target, and still of no use: not what is wrong
        return None
    repair = f"after the repair, KL to the target drops {best_fall:.0%}, and simulated acceptance length rises from"
    return (problem if becomes - 1 > WORTH * (was - 1) else warning)(
        cause, f"{repair} {was:.2f} to {becomes:.2f}"
    )


@torch.inference_mode()
def _fit(objective: Any, target: FrozenTarget, completion: Generation) -> tuple[float, float]:
    """How close a head is to the target on a completion: mean forward KL of its drafted positions, and simulated acceptance length.

    Steadier than counting accepted tokens, and one pass of the draft.
    """
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    inputs = {
        "input_ids": ids,
        "loss_mask": (positions >= len(completion.prompt_ids)).long(),
        "document_ids": torch.zeros_like(ids),
        "position_ids": positions,
    }
    objective, inputs = objective.eval(), objective.prepare(indexed(inputs), None)
    _, sums = objective(**inputs, **objective.read_target(target, inputs), measure=True)
    divergence = fmean(
        float(total / kept) for total, kept in zip(sums.loss, sums.loss_tokens, strict=True)
    )
    return divergence, 1 + sum(
        float(right / chains) for right, chains in zip(sums.chain_correct, sums.chains, strict=True)
    )
