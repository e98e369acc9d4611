"""How a published draft is served: each engine's command with the repository's name in place of a folder."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from specdistill.engines import ENGINES
from specdistill.engines.engine import Engine, Served, Serving
from specdistill.engines.loader import check_loader, loader_of
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import implementation
from specdistill.targets.files import Shards


def loads_as_is(engine: Engine, method: str, folder: Path) -> bool:
    """Whether an engine loads a draft's folder as training wrote it. Of the weights the names and shapes alone are read."""
    row = METHODS[method]
    serving = row.serving().get(engine.name, Serving())
    if serving.layout is None or row.in_target:  # an engine takes that from its target's checkpoint alone
        return False
    if row.standalone:
        return not serving.layout.gguf_types
    config, shards = read_config(folder, "draft"), Shards.open(folder, "draft")
    head, loader = implementation(method).head_shape(config, None), loader_of(serving.loaders, config)
    if head is None or loader is None:
        return False
    result = check_loader(loader, config, {name: tuple(shards.describe(name)[1]) for name in shards.file_of}, head)
    return not (result.refused or result.silent)


def serving_lines(
    served: Served, draft: Path, exports: Mapping[str, Served], *, repository: str, tag: str
) -> Iterator[tuple[str, str]]:
    """(engine's title, commands) for each engine that can be given the draft: as it is, or as exported for it.

    served: the draft in the repository's root. draft: its folder here. exports: engine -> what was exported for it, into a folder of that
    name.
    """
    assert served.method is not None
    row, local = METHODS[served.method], repository.rpartition("/")[2]
    for name, serving in row.serving().items():
        engine = ENGINES[name]
        if engine.serve_command is None:
            continue
        if name in exports:
            exported = replace(exports[name], output=Path(local) / name, target=served.target)
            fetch = f"hf download {repository} --revision {tag} --local-dir {local} --include {shlex.quote(f'{name}/*')}"
            yield engine.title, f"{fetch}\n{engine.serve_command(exported)}"
        elif loads_as_is(engine, served.method, draft):
            yield engine.title, engine.serve_command(replace(served, serving=serving, in_target=row.in_target))
