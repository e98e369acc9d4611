"""The methods, named as vLLM names them: what each one is, and which script trains it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """trained_by: the script, from the project's root; None where there is nothing to train."""

    summary: str
    trained_by: str | None


METHODS = {
    "eagle3": Method("a head that reads three of the target's layers (arXiv 2503.01840)", "train/eagle.py"),
    "draft_model": Method("a smaller language model that drafts for the target (arXiv 2211.17192)", "train/draft.py"),
    "ngram": Method("guesses by looking the last tokens up in the text so far", None),
}
