"""Export a draft for an engine: its folder in the engine's layout, and SERVE.md."""

from pathlib import Path

from specdistill.engines import ENGINES
from specdistill.engines.engine import Served
from specdistill.engines.serving import DEFAULT_NUM_TOKENS, find_report, serve_md
from specdistill.errors import UserError, nearest
from specdistill.methods import layouts_of
from specdistill.methods.checkpoint import read_config
from specdistill.methods.folder import check_new
from specdistill.methods.load import implementation
from specdistill.methods.recognize import method_of
from specdistill.targets.files import TargetFiles


def export(
    draft: Path,
    engine: str,
    output_dir: Path,
    target: TargetFiles | None = None,
    *,
    report: Path | None = None,
    dtype: str | None = None,
    num_speculative_tokens: int | None = None,
) -> str:
    """Write the draft of a folder, in any layout that is read, into a new folder in the layout of an engine, with SERVE.md beside it.

    Args:
        target: the draft's target; needed where a layout holds some of it (`mtp`, speculators, SafeAILab's EAGLE-1), and where a draft in
            another project's layout leaves something to it. Whenever it is given, the draft must fit it.
        report: report.json of the draft; None looks for `../report/report.json` beside it.
        dtype: of a GGUF file: f32, f16 (also None) or q8_0.
        num_speculative_tokens: drafted in a round, for the commands; None takes the report's.

    Returns the draft's method. Raises UserError, before anything is written, for what is no whole draft and for what the engine cannot
    express; ResourceError when the Hub or the disk fails.
    """
    check_new(output_dir)
    method, to = method_of(draft, key="draft"), ENGINES[engine]
    if method not in to.layouts:
        got = f"{engine} for {draft}, which holds a draft of method {method}"
        raise UserError("engine", got=got, expected=" or ".join(layouts_of(method)) or "a draft that some engine loads")
    types = to.layouts[method].gguf_types
    if dtype is not None and not types:
        got = f"{dtype} with engine {engine} and method {method}"
        raise UserError("dtype", got=got, expected="null: weights keep their own")
    if dtype is not None and dtype not in types:
        raise UserError("dtype", got=dtype, expected=f"one of {', '.join(types)}", nearest=nearest(dtype, types))
    measured = find_report(draft, report, method)
    settings = measured["settings"] if measured else {}
    num_tokens = num_speculative_tokens or settings.get("num_speculative_tokens", DEFAULT_NUM_TOKENS)
    write, options = implementation(method).export, {"dtype": dtype} if dtype else {}
    assert write is not None, method
    write(draft, to, output_dir, target, num_tokens, **options)
    served = Served(
        method=method,
        output=output_dir,
        target=target.name if target else None,
        num_tokens=num_tokens,
        samples=settings.get("temperature", 0) > 0 and settings.get("draft_sampling", "greedy") != "greedy",
        config={} if types else read_config(output_dir, "output_dir"),
    )
    (output_dir / "SERVE.md").write_text(serve_md(to, served, measured), encoding="utf-8")
    return method
