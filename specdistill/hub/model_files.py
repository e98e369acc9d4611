"""The files of a draft or a target: a folder's, or those of one commit of a repository on the Hub, of which some, all or none are here.

What is fetched is compared with the checksums that the Hub lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import SafetensorsParsingError, XetDownloadError
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from specdistill.errors import ResourceError, UserError, logger, one_line, refusing
from specdistill.methods.load import TOKENIZER
from specdistill.repositories import hub_errors, resolve
from specdistill.targets.files import INDEX, SINGLE, Shards

SMALL = ("config.json", "generation_config.json", INDEX, "README.md")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MODEL = (*SMALL, *TOKENIZER, "*processor_config.json")
# What reading a header raises that holds other JSON; the last of negative sizes, and of what is too deep.
OTHER_HEADERS = (SafetensorsParsingError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class ModelFiles:
    """A folder, or a commit of a repository; without the Hub, what its cache has of that commit, which is a folder too.

    key: what errors name. name: as the user gave it. folder: where the files are, or will be once they are fetched. sizes: bytes of each
    file next to config.json that a model may need, and of its pickles. repository: None for a folder.
    """

    key: str
    name: str
    folder: Path
    sizes: Mapping[str, int]
    repository: str | None = None

    @classmethod
    def of(cls, name: str, revision: str | None, *, key: str, expected: str) -> "ModelFiles":
        """The folder `name`, or a revision of a repository, with its small files fetched.

        Raises UserError for what is neither, ResourceError when the Hub fails, and without it for a repository that is not in its cache.
        """
        place = resolve(name, key)
        if Path(place).is_dir():
            if revision is not None:
                raise UserError("revision", got=revision, expected=f"none with a folder, {name}")
            return cls(key, name, Path(place), _sizes(Path(place)))
        shown = f"{name}@{revision}" if revision else name
        with hub_errors(key, shown, expected=expected):
            folder = Path(snapshot_download(place, revision=revision, allow_patterns=list(SMALL)))
            if constants.is_offline_mode():
                return cls(key, shown, folder, _sizes(folder))
            patterns = [*MODEL, "*.safetensors", "*.gguf", *PICKLES]
            files = snapshot_download(place, revision=folder.name, allow_patterns=patterns, dry_run=True)
        return cls(key, shown, folder, {it.filename: it.file_size or 0 for it in files if "/" not in it.filename}, place)

    def matching(self, *patterns: str) -> list[str]:
        """The files whose names match."""
        return [path for path in self.sizes if any(fnmatch(path, pattern) for pattern in patterns)]

    def weights(self) -> list[str]:
        """The safetensors files that hold the weights. Raises UserError where there are none."""
        if INDEX in self.sizes:
            named = Shards.open(self.folder, self.key, complete=False).files
            if lacking := next((file for file in named if file not in self.sizes), None):
                raise UserError(self.key, got=f"{self.name} without {lacking}", expected="every file that its index names")
            return named
        if SINGLE in self.sizes:
            return [SINGLE]
        if pickles := self.matching(*PICKLES):
            got = f"{self.name} with weights in a pickle alone ({', '.join(pickles[:3])}), of which nothing can be known unread"
            instead = "specdistill export reads plain tensors of one and writes safetensors"
            raise UserError(self.key, got=got, expected=f"safetensors; {instead}")
        found = ", ".join(sorted(self.sizes)[:5]) or "nothing"
        raise UserError(self.key, got=f"{self.name} without weights, with {found}", expected=f"{SINGLE}, or {INDEX}")

    def missing(self, files: Sequence[str]) -> list[str]:
        return [file for file in files if not (self.folder / file).is_file()]

    def fetch(self, files: Sequence[str]) -> Path:
        """The folder, once these files are in it; when one was missing, compared with the checksums that the Hub lists.

        Raises ResourceError where they stay damaged, and when the Hub or its cache fails.
        """
        if missing := self.missing(files):
            self._download(missing)
            self.verify()
        return self.folder

    def verify(self) -> None:
        """Compare what is here with the checksums that the Hub lists, and fetch what differs again, once.

        Raises as `fetch`, after what stays damaged was taken out of the cache, where whoever reads it next would take it.
        """
        assert self.repository is not None  # `_download` refuses a folder that lacks files
        for is_last in (False, True):
            with hub_errors(self.key, self.name, expected="a Hub id"):
                found = HfApi().verify_repo_checksums(self.repository, revision=self.folder.name).mismatches
            damaged = sorted(it["path"] for it in found)
            if not damaged:
                return
            if not is_last:
                logger.info(f"{self.name}: not what the Hub lists, so fetched again: {', '.join(damaged)}")
                self._download(damaged, again=True)
        for link in (self.folder / file for file in damaged):
            link.resolve().unlink()
            link.unlink(missing_ok=True)
        next_step = "run it again, or look at what stands between this machine and the Hub"
        raise ResourceError(f"{self.key}: {self.name} is damaged: {', '.join(damaged)}", next_step=next_step)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weights by name, without their content: of each file the header alone is read, here or on the Hub.

        Raises UserError for files that cannot be read, or are not those that the index names.
        """
        if not self.missing(self.weights()):
            shards = Shards.open(self.folder, self.key)
            shards.check()
            return shards.without_content()
        assert self.repository is not None
        what = f"{self.name}, whose weights cannot be read"
        with refusing(OTHER_HEADERS, self.key, what, "whole safetensors files"):
            with hub_errors(self.key, self.name, expected="a Hub id"):
                read = HfApi().get_safetensors_metadata(self.repository, revision=self.folder.name).files_metadata.values()
            return {
                name: torch.empty(tuple(it.shape), dtype=str_to_torch_dtype[it.dtype], device="meta")
                for file in read
                for name, it in file.tensors.items()
            }

    def _download(self, files: Sequence[str], *, again: bool = False) -> None:
        if self.repository is None:
            what = f"{self.key}: of {self.name} these files are not in {self.folder}: {', '.join(files)}"
            raise ResourceError(what, next_step="acquire it where there is a network")
        try:
            with hub_errors(self.key, self.name, expected="a Hub id"):
                snapshot_download(
                    self.repository,
                    revision=self.folder.name,
                    allow_patterns=[escape(file) for file in files],
                    force_download=again,
                )
        except (OSError, XetDownloadError, RuntimeError) as error:  # the last is hf_xet's
            what = f"{self.key}: {self.name} was not fetched whole ({one_line(str(error))[:200]})"
            raise ResourceError(what, next_step="run it again: what is whole is kept") from error


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
