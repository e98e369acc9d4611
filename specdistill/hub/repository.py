"""A repository of drafts as the Hub has it, and what changes there: one commit for a release and a tag on it, and the way back to another.

A release is never half there. Its commit holds all files or does not exist, is read back before it is tagged, and a tag is never moved. A
command that was interrupted is repeated: files that the Hub has are not sent again, and a commit that is there gets its tag.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from specdistill.engines import ENGINES
from specdistill.errors import ResourceError, UserError, one_line
from specdistill.methods.load import WHOLE_DRAFT
from specdistill.report.files import REPORT as REPORT_FILE
from specdistill.repositories import HTTP_ERROR
from specdistill.targets.files import file_hashes

# Folders and a file of a release, next to the draft's own files and an engine's folder for each export.
REPORT, LICENSES, NOTICE = "report", "licenses", "NOTICE"
NAMES = "a repository on the Hub, e.g. org/name: letters, digits, -, _ and ."
AGAIN = "repeat the command: what the Hub has is not sent again"
LOGIN = "`hf auth login`, or HF_TOKEN, with a token that may write, and a name of yours or of an organisation that you are in"


@dataclass(frozen=True)
class FileChange:
    """A file of a release, compared with what the Hub has under its name. size: bytes, of what is removed there."""

    path: str
    what: Literal["new", "changed", "same", "removed"]
    size: int


@dataclass(frozen=True)
class Repository:
    """A repository as the Hub has it. commits: of its main branch, the last first, none where there is no repository. files: of the last
    commit. tags: name -> commit.
    """

    name: str
    private: bool = True
    commits: Sequence[str] = ()
    files: Mapping[str, RepoFile] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> "Repository":
        """Raises ResourceError when the Hub fails."""
        api = HfApi()
        with hub_failures(name):
            try:
                info = api.model_info(name)
            except RepositoryNotFoundError:
                return cls(name)
            commits = [commit.commit_id for commit in api.list_repo_commits(name)]
            tags = {tag.name: tag.target_commit for tag in api.list_repo_refs(name).tags}
            return cls(name, bool(info.private), commits, files_at(name, commits[0]), tags)

    def last_release(self) -> str | None:
        """The tag of the release that the main branch holds, restored or new; else of the last of its commits that is a release.

        A release is a tag with a report.
        """
        report, tagged = (
            f"{REPORT}/{REPORT_FILE}",
            {commit: tag for tag, commit in self.tags.items()},
        )
        reports = {
            tagged[commit]: self.at(tagged[commit]).get(report)
            for commit in self.commits
            if commit in tagged
        }
        releases = {tag: file.blob_id for tag, file in reports.items() if file}
        here = self.files[report].blob_id if report in self.files else None
        return next(
            (tag for tag, blob in releases.items() if blob == here), next(iter(releases), None)
        )

    def at(self, tag: str) -> dict[str, RepoFile]:
        """The files of a tag; none where there is no such tag."""
        with hub_failures(self.name):
            return files_at(self.name, self.tags[tag]) if tag in self.tags else {}

    @property
    def next_tag(self) -> str:
        numbers = [int(found[1]) for tag in self.tags if (found := re.match(r"v(\d+)(?!\w)", tag))]
        return f"v{max(numbers, default=0) + 1}"

    def check_visible(self, private: bool | None) -> None:
        """Raises UserError where a repository that exists is seen by others than `private` says."""
        if self.commits and private not in (None, self.private):
            is_what = "private" if self.private else "public"
            expected = "null, or another repository: its settings on the Hub say who sees it"
            raise UserError(
                "private",
                got=f"{str(private).lower()}, and {self.name} is {is_what}",
                expected=expected,
            )

    def difference(self, folder: Path) -> list[FileChange]:
        """Every file of a release in a folder, compared with the Hub's, and what is there of another release and has no place in it."""
        changes = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            same, is_new = is_same(path, self.files.get(name)), name not in self.files
            changes.append(
                FileChange(
                    name, "new" if is_new else "same" if same else "changed", path.stat().st_size
                )
            )
        removed = sorted(
            name
            for name in self.files.keys() - {it.path for it in changes}
            if is_of_a_release(name)
        )
        return changes + [FileChange(name, "removed", self.files[name].size) for name in removed]

    def upload(
        self,
        folder: Path,
        changes: Sequence[FileChange],
        tag: str,
        *,
        message: str,
        private: bool | None,
    ) -> str:
        """Commit a release on top of what the Hub was seen to have, and tag it with a message; returns the commit.

        Raises ResourceError when the Hub fails, when it was changed meanwhile, and when the tag was set to something else.
        """
        api, name = HfApi(), self.name
        with hub_failures(name):
            if not self.commits:
                api.create_repo(name, private=private is not False, exist_ok=True)
            head = self.commits[0] if self.commits else str(api.model_info(name).sha)
            added = [
                CommitOperationAdd(it.path, str(folder / it.path))
                for it in changes
                if it.what in ("new", "changed")
            ]
            removed = [CommitOperationDelete(it.path) for it in changes if it.what == "removed"]
            if added or removed:
                head = api.create_commit(
                    name, [*added, *removed], commit_message=f"Release {tag}", parent_commit=head
                ).oid
            sent = replace(self, files=files_at(name, head)).difference(folder)
            if left := [it.path for it in sent if it.what != "same"]:
                what = f"repo: the Hub holds other content than was sent in {', '.join(left[:3])}, so {head} is not tagged"
                raise ResourceError(what, next_step=AGAIN)
            api.create_tag(name, tag=tag, revision=head, tag_message=message, exist_ok=True)
            if {entry.name: entry.target_commit for entry in api.list_repo_refs(name).tags}[
                tag
            ] != head:
                raise ResourceError(
                    f"repo: somebody else set {tag} of {name} meanwhile",
                    next_step="choose another tag",
                )
        return head


def files_at(repository: str, revision: str | None) -> dict[str, RepoFile]:
    tree = HfApi().list_repo_tree(repository, revision=revision, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def check_names(repository: str | None, tag: str | None) -> str:
    """The repository; raises UserError for what names none and for what is no name of a tag. The client knows the other rules of names."""
    if not repository or repository.count("/") != 1:
        raise UserError("repo", got=repository or "nothing", expected=NAMES)
    if tag is not None and (
        tag == "main" or not re.fullmatch(r"[A-Za-z0-9](?:[\w-]|\.(?!\.|lock$|$))*", tag)
    ):
        raise UserError(
            "tag", got=tag, expected="a name such as v1 or v1.2, of letters, digits, -, _ and ."
        )
    return repository


def is_same(path: Path, there: RepoFile | None) -> bool:
    """Whether a file here has the content of one on the Hub."""
    if there is None or path.stat().st_size != there.size:
        return False
    if there.lfs is not None:
        return file_hashes([path.resolve()]) == [there.lfs.sha256]
    return git_hash(path.read_bytes()) == there.blob_id


def is_of_a_release(path: str) -> bool:
    """Whether a file of a repository is where releases write; others there are left alone."""
    folder, _, name = path.rpartition("/")
    of_draft = not folder and any(fnmatch(name, pattern) for pattern in (*WHOLE_DRAFT, NOTICE))
    return of_draft or path.partition("/")[0] in {REPORT, LICENSES, *ENGINES}


@contextmanager
def hub_failures(repository: str) -> Iterator[None]:
    """Raises ResourceError, in one line that says what to do, for whatever the Hub answers to who writes; UserError for a wrong name."""
    try:
        yield
    except HFValidationError as error:
        raise UserError("repo", got=repository, expected=NAMES) from error
    except (HTTP_ERROR, ValueError, RuntimeError, OSError) as error:
        # No answer, or a refusal; no token; a card that the Hub refuses; and whatever hf_xet meets: it knows no other class.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        what = f"repo: {repository} at {constants.ENDPOINT}: {one_line(str(error))[:300] or type(error).__name__}"
        raise ResourceError(
            what, next_step=LOGIN if status in (401, 403, 404) else AGAIN
        ) from error
