"""The plan itself: each method's row for one target, the assumptions behind the rows, and which method to start with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from specdistill.errors import UserError
from specdistill.methods.draft_model.create import on_meta, parameters_read, propose_shape, weights_read
from specdistill.methods.draft_model.pruning import Shape, check_decoder, shape_of
from specdistill.planning import costs
from specdistill.planning.published import FRESH_MTP, PUBLISHED, TOKENS_PER_SAMPLE
from specdistill.planning.reading import MTP_KEYS, Described, build, check_fit, method_of_config
from specdistill.project import RECIPES
from specdistill.targets.frozen import is_recurrent

DRAFT_VOCABULARY = 32_000
# Of the target's parameters; published draft models have 2 % (arXiv 2403.00858) to 10 % (arXiv 2402.01528).
SMALL_SHARE = 1 / 16
MICRO_BATCH_TOKENS = 4 * 2048
# Steps that training unrolls, and tensors of the target [H] that it reads for each token.
UNROLLED = {"eagle3": 5, "eagle": 1, "mtp": 3, "draft_model": 1}
TENSORS = {"eagle3": 4, "eagle": 1, "mtp": 1, "draft_model": 0}
ASSUMPTIONS = (
    "Nothing here is measured. Parameters follow from configs, acceptance from the sources named, speedup S = AL / (v + c·K) from both.",
    "Batch 1, short contexts. c is the larger of a step's shares of weights read and of layers run; draft and target have one dtype.",
    f"S from: the lower acceptance, v + {costs.VERIFY_OVERHEAD} and {costs.LAYERS_OVERHEAD:g} layers' time more a draft step, as fitted "
    "to vLLM issue 20780, and every token of a mixture to experts of its own. S to: the higher acceptance, and only the weights read "
    "take time (v = 1).",
    f"Acceptance is taken as the same at every position; K is the fewest tokens within 1 % of the best, at most {costs.MAX_K}.",
    f"{TOKENS_PER_SAMPLE} training tokens a conversation. Disk: if hidden states were stored. Memory, roughly: features computed in "
    f"each step, {MICRO_BATCH_TOKENS:,} tokens in a micro-batch, draft and AdamW in float32, logits not fused.",
)


@dataclass(frozen=True)
class Row:
    """One method. Numbers that do not exist or that nobody published are None, and `note` says why.

    draft: the one that was given; None for the one that the recipe would train.
    bytes: in the target's dtype. disk_bytes: the hidden states of all training tokens. step_ratio: c, the larger of the
    step_shares. low, high: the two ends of the speedup.
    """

    method: str
    available: bool
    note: str
    recipe: str | None
    draft: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    parameters: int | None = None
    bytes: int | None = None
    training_tokens: int | None = None
    training_source: str | None = None
    disk_bytes: int | None = None
    training_memory_bytes: int | None = None
    step_ratio: float | None = None
    step_shares: dict[str, float] | None = None
    alphas: tuple[float, float] | None = None
    acceptance_source: str | None = None
    low: costs.Expected | None = None
    high: costs.Expected | None = None

    @property
    def middle(self) -> float:
        """Geometric mean of the speedup's two ends; 0 where there are none."""
        return math.sqrt(self.low.speedup * self.high.speedup) if self.low and self.high else 0.0


@dataclass(frozen=True)
class Plan:
    target: dict[str, Any]
    methods: list[Row]
    recommendation: dict[str, str | None]
    warnings: list[str]
    assumptions: Sequence[str] = ASSUMPTIONS


def make_plan(target: Described, draft: Described | None = None, *, trust_remote_code: bool = False) -> Plan:
    """Plan for a target, and for a draft of it where one is given. Raises UserError for what is no target, or no draft of it."""
    planner = _Planner(target, build(target, key="target.model", trust_remote_code=trust_remote_code))
    rows = {method: planner.row(method) for method in PUBLISHED}
    warnings = planner.warnings()
    if draft is not None:
        method = method_of_config(draft, target)
        warnings += check_fit(draft, target, method)
        rows[method] = row = planner.row(method, draft)
        if row.high and (row.parameters or 0) > planner.parameters:
            sizes = f"{draft.name} has {row.parameters:,} parameters, the target {planner.parameters:,}"
            warnings.append(f"{sizes}: a predicted speedup of at most {row.high.speedup:.2f}")
    methods, facts = list(rows.values()), planner.facts()
    return Plan(facts, methods, recommend(methods, facts), warnings)


def recommend(rows: Sequence[Row], target: Mapping[str, Any]) -> dict[str, str | None]:
    """The method to start with, why, and the command; `target` as in a plan.

    It is the draft whose speedup has the highest middle, but for what costs nothing: layers that come with the target are preferred as
    long as nothing promises more at its low end, and look-up is when no draft promises more than it at the high end.
    """
    ends = {row.method: (row.low.speedup, row.high.speedup) for row in rows if row.low and row.high}
    drafts = sorted((row for row in rows if row.method in ends and row.method != "ngram"), key=lambda row: -row.middle)
    native = drafts and target["native_mtp"] and max(drafts, key=lambda row: ends[row.method][0]).method == "mtp"
    if native:
        drafts.sort(key=lambda row: row.method != "mtp")
    lookup = next(row for row in rows if row.method == "ngram")
    ranked = [*drafts, lookup] if drafts and ends[drafts[0].method][1] > ends["ngram"][1] else [lookup, *drafts]
    best = ranked[0]
    low, high = ends[best.method]
    if high <= 1:
        return {"method": None, "reason": "no method promises more than plain decoding", "start": None}
    why = "the most of the drafts in the middle of its range, and more at its best than look-up without training"
    if best is lookup:
        why = "it needs no training, and no draft promises more at its best"
    elif native:
        why = "its layer comes with the target, and nothing else promises more at its low end"
    others = ", ".join(f"{row.method} {row.middle:.2f}" for row in ranked[1:])
    reason = f"{why}: {low:.2f} to {high:.2f} times plain decoding, middle {best.middle:.2f}{f' ({others})' if others else ''}"
    return {"method": best.method, "reason": reason, "start": _command(best, target)}


def _command(row: Row, target: Mapping[str, Any]) -> str | None:
    """What measures a draft that is there, or trains the one that the row describes; None where no recipe of the method ships."""
    if row.draft or row.method == "ngram":
        draft = f" draft={row.draft}" if row.draft else ""
        return f"specdistill eval target={target['model']}{draft} method={row.method} suite=… output_dir=…"
    if row.recipe is None:
        return None
    keys = [f"recipe={row.recipe}"]
    if row.recipe.split("/")[0] != target["model"]:
        keys += [f"target.model={target['model']}", "data.source=…"]
        if row.method == "eagle3" and target["vocab_size"] > DRAFT_VOCABULARY:
            keys.append(f"draft.vocab_size={DRAFT_VOCABULARY}")
        if row.method == "mtp" and target["native_mtp"]:
            keys.append("draft.init=null")
        if target["recurrent"]:
            keys.append("data.packing=false")
        if row.method == "eagle":
            keys += [f"draft.{name}=null" for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")]
        if row.method == "draft_model":
            keys += ["draft.init=width", "draft.num_layers=null", f"draft.max_parameters={row.parameters}"]
    return f"specdistill train {' '.join(keys)}"


def recipe_for(method: str, target: str) -> tuple[str | None, dict[str, Any]]:
    """The recipe to start from, and its keys when it is the target's own: else that of small targets, else any of the method."""
    found = {}
    for path in sorted(RECIPES.rglob("*.yaml")):
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
        if keys.get("method") == method:
            found[path.parent.name] = (path.relative_to(RECIPES).with_suffix("").as_posix(), keys)
    if target in found:
        return found[target]
    name, _ = found.get("small") or next(iter(found.values()), (None, {}))
    return name, {}


class _Planner:
    """A target's sizes, and the rows that follow from them."""

    def __init__(self, target: Described, model: Any) -> None:
        self.target, self.model, self.text = target, model, target.text
        self.parameters = int(model.num_parameters())
        self.read = weights_read(model)
        self.verify = [weights_read(model, k + 1) / self.read for k in range(1, costs.MAX_K + 1)]
        self.itemsize = target.dtype.itemsize
        self.bytes = self.parameters * self.itemsize

    def facts(self) -> dict[str, Any]:
        native = self.target.native_mtp
        return {
            "model": self.target.name,
            "revision": self.target.revision,
            "model_type": self.text.model_type,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "parameters": self.parameters,
            "bytes": self.bytes,
            "parameters_read": round(self.read),
            "num_layers": self.text.num_hidden_layers,
            "hidden_size": self.text.hidden_size,
            "vocab_size": self.text.vocab_size,
            "recurrent": is_recurrent(self.text),
            "native_mtp": native and {"key": native[0], "layers": native[1]},
        }

    def warnings(self) -> list[str]:
        dtype, quantised = str(self.target.dtype).removeprefix("torch."), self.target.raw.get("quantization_config")
        found = [] if self.target.names_dtype else [f"the config names no dtype: bytes are of {dtype}"]
        if quantised:
            kind = quantised.get("quant_method", "quantised")
            found.append(f"the target's weights are {kind}: bytes here are of {dtype}, and c of a draft in that is higher")
        return found

    def row(self, method: str, given: Described | None = None) -> Row:
        """The method's row, for the draft that is given or else for the one a recipe would train."""
        depth = self.text.num_hidden_layers
        published = FRESH_MTP if method == "mtp" and not self.target.native_mtp else PUBLISHED[method]
        recipe, settings = recipe_for(method, self.target.name)
        try:
            parts, shape, width, note = self._draft(method, given, settings.get("draft", {}))
        except UserError as error:
            if given is not None:
                raise
            return Row(method, False, str(error), recipe)
        written = settings.get("data", {}).get("regenerate", {}).get("num_tokens")
        tokens = written or published.training_tokens
        shares = costs.step_shares(parts, self.read, depth)
        low, high = costs.speedup_range(published.alphas, self.verify, shares, depth) if published.alphas else (None, None)
        memory = disk = 0
        if shape is not None:
            memory = costs.training_bytes(parts, self.bytes, shape, width, UNROLLED[method], MICRO_BATCH_TOKENS)
            disk = TENSORS[method] * self.text.hidden_size * self.itemsize * (tokens or 0)
        return Row(
            method=method,
            available=True,
            note=note,
            recipe=recipe,
            draft=given.name if given else None,
            num_layers=parts.num_layers,
            hidden_size=shape.hidden_size if shape else 0,
            parameters=parts.parameters,
            bytes=parts.parameters * self.itemsize,
            training_tokens=tokens,
            training_source=f"recipe {recipe}" if written else published.training_source,
            disk_bytes=None if tokens is None else disk,
            training_memory_bytes=memory,
            step_ratio=max(shares.values()),
            step_shares=shares,
            alphas=published.alphas,
            acceptance_source=published.acceptance_source,
            low=low,
            high=high,
        )

    def _draft(
        self, method: str, given: Described | None, settings: dict[str, Any]
    ) -> tuple[costs.Parts, Shape | None, int, str]:
        """Parts, shape, tokens that its logits span, and what it is in words. Raises UserError when the target cannot have one."""
        sizes = {name: settings[name] for name in Shape.__annotations__ if name in settings}
        vocabulary, hidden_size = self.text.vocab_size, self.text.hidden_size
        if method == "ngram":
            return costs.Parts(0, 0, 0), None, vocabulary, "looks the last tokens up in the text so far"
        if method == "draft_model":
            model = build(given, key="draft") if given else self._small(sizes)
            shape = shape_of(model.config.get_text_config())
            parts = costs.Parts(int(model.num_parameters()), weights_read(model), shape.num_layers)
            return parts, shape, vocabulary, "a smaller language model with a head of its own"
        decoder = self.model.get_decoder()
        if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
            expected = "a decoder with layers and norm, as Llama's, for a head to read"
            raise UserError("target.model", got=f"a {self.text.model_type} target", expected=expected)
        if method == "mtp":
            key, layers = self.target.native_mtp or (None, 1)
            last = decoder.layers[-1]
            own = sum(parameter.numel() for parameter in last.parameters())
            parts = costs.mtp_head(hidden_size, vocabulary, own, parameters_read(last, self.text), layers)
            note = (
                f"the target's own ({key}: {layers})" if key else f"a fresh layer: the config has no {', no '.join(MTP_KEYS)}"
            )
            return parts, replace(shape_of(self.text), num_layers=1), vocabulary, note
        shape = shape_of(given.text) if given else replace(shape_of(self.text), **{"num_layers": 1, **sizes})
        if method == "eagle":
            return (
                costs.eagle_head(shape, vocabulary),
                shape,
                vocabulary,
                "reads the last hidden state, borrows the target's head",
            )
        if given:
            width, num_aux = given.raw.get("draft_vocab_size") or vocabulary, given.raw.get("num_aux_hidden_states") or 3
        else:
            width, num_aux = settings.get("vocab_size") or (vocabulary if settings else min(vocabulary, DRAFT_VOCABULARY)), 3
        parts = costs.eagle3_head(shape, vocabulary, width, hidden_size, num_aux)
        return parts, shape, width, f"reads {num_aux} of the target's layers, its own head of {width:,} tokens"

    def _small(self, sizes: dict[str, int]) -> Any:
        """A draft model without weights: in the sizes of the target's own recipe, or else in the shape proposed for SMALL_SHARE."""
        check_decoder(self.model)
        shape = (
            replace(shape_of(self.text), **sizes) if sizes else propose_shape(self.model, int(self.parameters * SMALL_SHARE))
        )
        return on_meta(self.model.config, shape)
