"""The options of `specdistill acquire` and `specdistill publish`."""

from typing import Annotated

from specdistill.methods import METHODS
from specdistill.recipe.fields import Condition, Section, allow_names, like, option, section
from specdistill.recipe.sections import PublishConfig, TargetConfig


class ExportedTarget(Section):
    """The target of a draft that is exported."""

    model: str | None = option(
        None,
        "the draft's target: pico (a tiny built-in model), a folder or a Hub id; needed for method"
        " mtp, and for heads whose files do not describe their target",
    )
    revision: str | None = like(TargetConfig, "revision")
    adapter: str | None = like(TargetConfig, "adapter")


class AcquiredTarget(ExportedTarget):
    """The target of a draft that is fetched."""

    model: str = option(
        ..., "the draft's target: pico (a tiny built-in model), a folder, a GGUF file or a Hub id"
    )


class AcquireOptions(Section):
    """The options of `specdistill acquire`."""

    method: Annotated[str, allow_names(lambda: list(METHODS))] = option(
        ..., "method of the draft (docs/methods.md)"
    )
    target: AcquiredTarget = section(AcquiredTarget)
    draft: str | None = option(
        None,
        "draft: org/name, org/name@revision or a folder; null: the target's own layer (method mtp)",
    )
    heterogeneous_vocab: bool = option(
        False,
        "accept a draft model with a different tokenizer",
        condition=Condition(
            "by methods pard and draft_model", lambda options: METHODS[options.method].standalone
        ),
    )
    dry_run: bool = option(
        False,
        "list the files that would be fetched; fetch only configs and headers, to check the draft",
    )


class PublishOptions(PublishConfig):
    """The options of `specdistill publish`.

    They are the keys of a recipe's section `publish`, whose values are the defaults here, and keys
    that only one release has.
    """

    run: str = option(..., "folder of a finished run: draft/, run/ and report/")
    tag: str | None = option(None, "tag of the release; null: the next of v1, v2, …")
    baseline: str | None = option(
        None,
        "report to compare with. null: the report that was published with the last release; a path:"
        " a newer report of that release; the word none: this is the first release",
    )
    force: str | None = option(
        None,
        "reason to publish although the release is refused; the model card states the reason",
        min_length=1,
    )
    dry_run: bool = option(
        False,
        "write the release's folder and list how its files differ from those on the Hub; publish"
        " nothing",
    )
    output_dir: str | None = option(
        None,
        "new folder to write the release into; null: <run>/release, replacing an earlier one there",
    )
