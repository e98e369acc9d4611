"""Drafts that others published for a target, searched on the Hub: by what their cards say they belong to, and by their names."""

import re
from dataclasses import dataclass

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

TIMEOUT_SECONDS = 5
# httpx's base class, under the name of the release that huggingface_hub stands on.
HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
# What drafts call themselves, special names first; some are methods that are not trained here.
METHOD_PATTERNS = (
    (r"p-?eagle", "peagle"),
    (r"dflash", "dflash"),
    (r"dspark", "dspark"),
    (r"eagle[-_ ]?3", "eagle3"),
    (r"eagle", "eagle"),
    (r"(?<![a-z])mtp(?![a-z])", "mtp"),
    (r"draft", "draft_model"),
)
SEARCHES = ("eagle", "speculator", "draft", "dflash", "mtp")


@dataclass(frozen=True)
class KnownDraft:
    """found_by: `card` when the repository names the target as its base model, `name` when only their names are alike."""

    repository: str
    method: str
    found_by: str
    downloads: int


def known_drafts(name: str, hub_id: str | None) -> tuple[list[KnownDraft], str | None]:
    """Drafts for a target, the most downloaded first, methods inferred from names and tags; and why the Hub was not asked, if it was not.

    Cards are searched for `hub_id`; names are compared here, since the Hub looks for one word: every word and number of the target's name
    must be in the draft's.
    """
    if name == "pico":
        return [], "not asked: pico ships with this package"
    api = HfApi()
    found: dict[str, KnownDraft] = {}
    try:
        # First with a time limit: the listing has none, and tries an unreachable Hub for half a minute.
        answer = get_session().get(f"{constants.ENDPOINT}/api/models", params={"limit": 1}, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        for search in SEARCHES:
            for base in [f"base_model:{hub_id}", None] if hub_id else [None]:
                models = api.list_models(filter=base, search=search, sort="downloads", limit=500, expand=["downloads", "tags"])
                for model in models:
                    method = infer_method(model.id, model.tags or [])
                    if method and model.id != hub_id and (base or names_target(model.id, name)):
                        known = KnownDraft(model.id, method, "card" if base else "name", model.downloads or 0)
                        found.setdefault(model.id, known)
    except (HfHubHTTPError, OfflineModeIsEnabled, HTTP_ERROR, ValueError) as error:
        return [], f"not asked: {constants.ENDPOINT} did not answer ({str(error).splitlines()[0] or type(error).__name__})"
    return sorted(found.values(), key=lambda draft: -draft.downloads), None


def infer_method(repository: str, tags: list[str]) -> str | None:
    """What a repository's name and tags say it is, the more special word counting; None where nothing sounds like a draft."""
    text = " ".join([repository, *tags]).lower()
    return next((method for pattern, method in METHOD_PATTERNS if re.search(pattern, text)), None)


def names_target(repository: str, target: str) -> bool:
    """Whether every word and number of the target's name is among the draft's: `EAGLE3-LLaMA3.1-Instruct-8B`, `Llama-3.1-8B-Instruct`."""
    words, wanted = (
        set(re.findall(r"\d+(?:\.\d+)?[bm]?|[a-z]+", re.sub(r"eagle[-_ ]?3(\.1)?", " ", name.split("/")[-1].lower())))
        for name in (repository, target)
    )
    return bool(wanted) and wanted <= words
