"""What comparison.json holds, field by field. Printed by `python -m specdistill.comparison.schema`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdistill.recipe.fields import AtLeastOne, NonNegative
from specdistill.report.schema import ConfidenceInterval, Count, Document, about, print_schema

Point = Annotated[list[float], Field(min_length=2, max_length=2)]


class DifferenceDocument(Document):
    change: Annotated[float, about("relative: this candidate's / the best one's - 1")]
    ci95: Annotated[ConfidenceInterval | None, about("paired, from a bootstrap over prompts; null with too few of them")]


class TrainingDocument(Document):
    seconds: Annotated[NonNegative | None, about("wall time; null when training was resumed: the total is unknown")]
    steps: Annotated[Count, about("optimizer steps")]
    curve: Annotated[list[Point], about("[step, simulated acceptance length] of each evaluation")]


class CandidateDocument(Document):
    name: Annotated[str, about("also the folder of its own report")]
    training: Annotated[TrainingDocument | None, about("of the draft, from its run's history.json; null without one")]
    report: Annotated[dict[str, Any], about("to report.schema.json")]


class PartsDocument(Document):
    tokens_per_round: Annotated[float | None, about("1 + accepted / rounds; rounds without a draft count")]
    round_cost: Annotated[float | None, about("of drafting and verifying, in plain decoding steps")]
    acceptance_rate: Annotated[float | None, about("of draft tokens")]
    drafted_per_round: Annotated[float | None, about("tokens")]
    first_position_rate: Annotated[float | None, about("of drafts whose first token was accepted")]
    later_position_rate: Annotated[float | None, about("of later positions that were reached")]
    draft_step: Annotated[float | None, about("drafting one token, in plain decoding steps; of a chain c")]
    verification: Annotated[float | None, about("v, in plain decoding steps")]
    draft_share: Annotated[float | None, about("of a round that goes into drafting")]


class DifferencesDocument(Document):
    speedup: DifferenceDocument | None
    tokens_per_round: DifferenceDocument | None
    round_cost: DifferenceDocument | None
    acceptance_rate: DifferenceDocument | None
    drafted_per_round: DifferenceDocument | None
    first_position_rate: DifferenceDocument | None
    later_position_rate: DifferenceDocument | None
    draft_step: DifferenceDocument | None
    verification: DifferenceDocument | None
    draft_share: DifferenceDocument | None


class RankDocument(Document):
    rank: AtLeastOne
    name: str
    speedup: Annotated[NonNegative, about("over plain decoding")]
    lossless: Annotated[bool, about("greedy completions are those of the target, but for near-ties")]
    separable_from_best: Annotated[
        bool | None, about("whether the interval of the difference in speedup excludes 0; null for the best")
    ]
    parts: PartsDocument
    difference_to_best: DifferencesDocument | None


class ReasonDocument(Document):
    name: Literal["fastest", "gap", "cause", "lossless"]
    message: Annotated[str, about("sentences")]


class ComparisonDocument(Document):
    schema_version: Literal[3]
    created: Annotated[str, about("UTC, ISO 8601")]
    specdistill_version: Annotated[str, about("version of the package")]
    candidates: Annotated[list[CandidateDocument], Field(min_length=2, description="in the order they were given")]
    ranking: Annotated[list[RankDocument], Field(min_length=2, description="by speedup, candidates that are not lossless last")]
    why: Annotated[list[ReasonDocument], Field(min_length=1, description="why they differ, in reading order")]


if __name__ == "__main__":
    print_schema(ComparisonDocument, Path(__file__).with_name("comparison.schema.json"))
