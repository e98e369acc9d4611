"""The methods, named as vLLM names them: what each one is, and which script trains it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """trained_by: the script, from the project's root; None where there is nothing to train."""

    summary: str
    trained_by: str | None


METHODS = {
    "eagle": Method("a head that continues the target's last hidden states (arXiv 2401.15077)", "train/eagle.py"),
    "eagle3": Method("a head that reads three of the target's layers (arXiv 2503.01840)", "train/eagle.py"),
    "mtp": Method("a layer of the target's own kind that predicts on from its last state (arXiv 2412.19437)", "train/mtp.py"),
    "draft_model": Method("a smaller language model that drafts for the target (arXiv 2211.17192)", "train/draft.py"),
    "ngram": Method("guesses by looking the last tokens up in the text so far", None),
}
