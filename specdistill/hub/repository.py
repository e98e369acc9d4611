"""Read the state of a repository of drafts on the Hub, and upload a release to it.

A release is one commit and a tag on it. A release is never incomplete: its commit holds all files
or does not exist. The commit is read back before it is tagged, and a tag is never moved. An
interrupted command can be repeated: files that the Hub has are not sent again, and a commit that
exists gets its tag. An earlier release can be restored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from specdistill.common.errors import ResourceError, UserError, join_lines
from specdistill.common.repositories import HTTP_ERROR, find_connection_failure
from specdistill.evaluation.report.files import REPORT as REPORT_FILE
from specdistill.methods.load import DRAFT_FILES
from specdistill.serving.engines import ENGINES
from specdistill.targets.files import hash_files

# Folders and a file of a release. They lie next to the draft's own files and a folder for each
# exported engine.
REPORT = "report"
LICENSES = "licenses"
NOTICE = "NOTICE"
# The characters that names may have, for errors; and what to type next.
NAME_CHARACTERS = "letters, digits, -, _ and ."
REPEAT_HINT = "repeat the command: what the Hub has is not sent again"
LOGIN = (
    "`hf auth login`, or HF_TOKEN, with a token that may write, and a name of yours or of an"
    " organisation that you are in"
)


@dataclass(frozen=True)
class FileChange:
    """A file of a release, compared with the file of the same path on the Hub.

    Attributes:
        path: the path of the file in the repository.
        what: what the release does with the file on the Hub.
        size: its size in bytes. For a removed file, the size that it has on the Hub.
    """

    path: str
    what: Literal["new", "changed", "same", "removed"]
    size: int


@dataclass(frozen=True)
class Repository:
    """The state of a repository on the Hub when it was read.

    Attributes:
        name: its Hub id.
        private: whether it is private.
        commits: the commits of its main branch, the last one first. Empty if the repository does
            not exist.
        files: the files of the last commit, by path.
        tags: the commit of each tag, by name.
    """

    name: str
    private: bool = True
    commits: Sequence[str] = ()
    files: Mapping[str, RepoFile] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> "Repository":
        """Read the state of a repository on the Hub; a state without commits if it does not exist.

        Args:
            name: the Hub id, `org/name`.

        Raises:
            ResourceError: when the Hub fails.
        """
        # The commits come from the Hub with the last one first.
        api = HfApi()
        with convert_upload_errors(name):
            try:
                info = api.model_info(name)
            except RepositoryNotFoundError:
                return cls(name)
            commits = [commit.commit_id for commit in api.list_repo_commits(name)]
            return cls(
                name,
                bool(info.private),
                commits,
                list_files(name, commits[0]),
                {tag.name: tag.target_commit for tag in api.list_repo_refs(name).tags},
            )

    def last_release(self) -> str | None:
        """Return the tag of the current release, with which the next one is compared.

        A release is a tagged commit with a report. The current release is the one whose report the
        main branch holds. This may be an older release that was restored. If the main branch holds
        no report of a release, the newest release is the current one.

        Returns:
            The tag; None if there is no release.
        """
        # Find the tagged commits that hold a report, the newest first. Git's hash of the report
        # (`blob_id`) is kept, because equal hashes mean equal reports.
        report = f"{REPORT}/{REPORT_FILE}"
        tag_of_commit = {commit: tag for tag, commit in self.tags.items()}
        tags = [tag_of_commit[commit] for commit in self.commits if commit in tag_of_commit]
        report_files = {tag: self.at(tag).get(report) for tag in tags}
        releases = {tag: file.blob_id for tag, file in report_files.items() if file}

        # Prefer the release whose report is in the main branch.
        report_blob = self.files[report].blob_id if report in self.files else None
        for tag, blob in releases.items():
            if blob == report_blob:
                return tag
        return next(iter(releases), None)

    def at(self, tag: str) -> dict[str, RepoFile]:
        """Return the files of a tag, by path; empty if there is no such tag."""
        with convert_upload_errors(self.name):
            return list_files(self.name, self.tags[tag]) if tag in self.tags else {}

    @property
    def next_tag(self) -> str:
        """The version tag that follows the highest of v1, v2 and so on."""
        # Tags such as v1.2 count as v1. The lookahead skips names such as v1a.
        numbers = []
        for tag in self.tags:
            match = re.match(r"v(\d+)(?!\w)", tag)
            if match:
                numbers.append(int(match[1]))
        return f"v{max(numbers, default=0) + 1}"

    def check_visible(self, private: bool | None) -> None:
        """Raise UserError if an existing repository is public and should be private, or vice versa.

        Args:
            private: whether the repository should be private; None if it does not matter.
        """
        if self.commits and private not in (None, self.private):
            raise UserError(
                "private",
                got=f"{str(private).lower()}, and {self.name} is"
                f" {'private' if self.private else 'public'}",
                expected=(
                    "null, or another repository: who sees a repository that exists is decided in"
                    " its settings on the Hub"
                ),
            )

    def compare_with(self, folder: Path) -> list[FileChange]:
        """Compare the files of a release in a folder with the files on the Hub.

        Returns:
            A change for each file of the folder: new, changed or the same; and a change, removed,
            for each file of an earlier release that the folder lacks.
        """
        # Compare the files that the folder holds.
        changes = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            what: Literal["new", "changed", "same"] = "changed"
            if name not in self.files:
                what = "new"
            elif is_same(path, self.files[name]):
                what = "same"
            changes.append(FileChange(name, what, path.stat().st_size))

        # Files of earlier releases that this release does not have are removed. Files on the Hub
        # that belong to no release stay.
        remaining = self.files.keys() - {change.path for change in changes}
        removed = sorted(name for name in remaining if is_of_a_release(name))
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
        """Upload a release as one commit on top of the state that was read, and tag the commit.

        Args:
            folder: the folder of the release.
            changes: how the files of the folder differ from those on the Hub.
            tag: the tag of the release.
            message: the message of the tag.
            private: whether the repository is created private, if it does not exist; None for
                private.

        Returns:
            The commit of the release.

        Raises:
            ResourceError: when the Hub fails, when the repository was changed meanwhile, and when
                the tag was set to something else.
        """
        api = HfApi()
        name = self.name

        # Create the repository if it does not exist yet.
        with convert_upload_errors(name):
            if not self.commits:
                api.create_repo(name, private=private is not False, exist_ok=True)

            # Commit what differs, on top of the commit that was read. A repository that was just
            # created has one commit already.
            head = self.commits[0] if self.commits else str(api.model_info(name).sha)
            added = [
                CommitOperationAdd(change.path, str(folder / change.path))
                for change in changes
                if change.what in ("new", "changed")
            ]
            removed = [
                CommitOperationDelete(change.path) for change in changes if change.what == "removed"
            ]
            if added or removed:
                head = api.create_commit(
                    name, [*added, *removed], commit_message=f"Release {tag}", parent_commit=head
                ).oid

            # Read the commit back, and tag it only if it holds what was sent.
            sent = replace(self, files=list_files(name, head)).compare_with(folder)
            unsent_paths = [change.path for change in sent if change.what != "same"]
            if unsent_paths:
                raise ResourceError(
                    f"repo: commit {head} was not tagged: these files on the Hub differ from"
                    f" the uploaded ones: {', '.join(unsent_paths[:3])}",
                    next_step=REPEAT_HINT,
                )

            # Tag the commit. The tag may exist already, from an interrupted release of the same
            # commit, or from somebody else.
            api.create_tag(name, tag=tag, revision=head, tag_message=message, exist_ok=True)
            tags = {entry.name: entry.target_commit for entry in api.list_repo_refs(name).tags}
            if tags[tag] != head:
                raise ResourceError(
                    f"repo: somebody else created the tag {tag} of {name} during the upload",
                    next_step="choose another tag",
                )
        return head


def list_files(repository: str, revision: str | None) -> dict[str, RepoFile]:
    """Return the files of a revision of a repository, by path."""
    return {
        entry.path: entry
        for entry in HfApi().list_repo_tree(repository, revision=revision, recursive=True)
        if isinstance(entry, RepoFile)
    }


def check_names(repository: str | None, tag: str | None) -> str:
    """Check the names of a repository and a tag, by rules that the Hub's client does not check.

    Args:
        repository: the name, `org/name`; None if none was given.
        tag: the name of the tag; None if none was given.

    Returns:
        The name of the repository.

    Raises:
        UserError: if no repository is named, and for a tag with an invalid name.
    """
    if not repository or repository.count("/") != 1:
        raise UserError(
            "repo",
            got=repository or "nothing",
            expected=f"a repository on the Hub, e.g. org/name: {NAME_CHARACTERS}",
        )
    # `main` is the name of the branch. A tag begins with a letter or a digit. As git demands, it
    # has no two dots in a row, and does not end with a dot or with `.lock`.
    if tag is not None and (
        tag == "main" or not re.fullmatch(r"[A-Za-z0-9](?:[\w-]|\.(?!\.|lock$|$))*", tag)
    ):
        raise UserError("tag", got=tag, expected=f"a name such as v1 or v1.2, of {NAME_CHARACTERS}")
    return repository


def is_same(path: Path, hub_file: RepoFile | None) -> bool:
    """Return whether a local file and a file on the Hub have the same content.

    The Hub lists the sha256 of large files (LFS), and git's hash of all others.

    Args:
        path: the local file.
        hub_file: the file on the Hub; None if it does not exist.
    """
    if hub_file is None or path.stat().st_size != hub_file.size:
        return False
    if hub_file.lfs is not None:
        # The file may be a link into the Hub's cache, where files are named by their sha256. For
        # such a link, `hash_files` would return this name without reading the file. So the link is
        # resolved, and the content is read.
        return hash_files([path.resolve()]) == [hub_file.lfs.sha256]
    return git_hash(path.read_bytes()) == hub_file.blob_id


def is_of_a_release(path: str) -> bool:
    """Return whether a file with this path in a repository belongs to a release.

    A release replaces or removes only such files. All other files on the Hub stay as they are.
    """
    # Files of a draft and the NOTICE are in the root, and all other files are in known folders.
    folder, _, name = path.rpartition("/")
    if not folder and any(fnmatch(name, pattern) for pattern in (*DRAFT_FILES, NOTICE)):
        return True
    return path.partition("/")[0] in {REPORT, LICENSES, *ENGINES}


@contextmanager
def convert_upload_errors(repository: str) -> Iterator[None]:
    """Convert errors of the Hub into ResourceErrors that say in one line what to do.

    An invalid name of a repository becomes a UserError.
    """
    try:
        yield
    except HFValidationError as error:
        raise UserError(
            "repo",
            got=repository,
            expected=f"a repository on the Hub, e.g. org/name: {NAME_CHARACTERS}",
        ) from error
    except (HTTP_ERROR, ValueError, RuntimeError, OSError) as error:
        # The Hub did not answer, there is no token, the Hub refused the request or the card, or
        # hf_xet failed, which raises RuntimeError because it has no error class of its own.
        # Status 404 may be a repository that the token may not see.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        no_token = isinstance(error, LocalTokenNotFoundError)
        reason = (
            find_connection_failure(error) or join_lines(str(error))[:300] or type(error).__name__
        )
        raise ResourceError(
            f"repo: {repository} at {constants.ENDPOINT}: {reason}",
            next_step=LOGIN if no_token or status in (401, 403, 404) else REPEAT_HINT,
        ) from error
