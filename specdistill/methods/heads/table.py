"""The draft heads by method: how each is made for a target, read and written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdistill.methods.eagle.checkpoint import load_eagle, save_eagle
from specdistill.methods.eagle.create import build_eagle
from specdistill.methods.eagle3.checkpoint import load_eagle3, save_eagle3
from specdistill.methods.eagle3.create import build_eagle3
from specdistill.methods.mtp.checkpoint import build_mtp, load_mtp, save_mtp


@dataclass(frozen=True)
class HeadMethod:
    """build(target, **shape, seed=), load(folder, target, key=) and save(head, folder) of one method's heads."""

    build: Callable[..., Any]
    load: Callable[..., Any]
    save: Callable[..., None]


HEADS = {
    "eagle": HeadMethod(build_eagle, load_eagle, save_eagle),
    "eagle3": HeadMethod(build_eagle3, load_eagle3, save_eagle3),
    "mtp": HeadMethod(build_mtp, load_mtp, save_mtp),
}
