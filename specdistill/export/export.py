"""One draft for one engine: what is written, or why it cannot be."""

from pathlib import Path

from specdistill.engines.serve import DEFAULT_NUM_TOKENS, Served, find_report, serve_md
from specdistill.errors import UserError, nearest
from specdistill.export.folder import check_new
from specdistill.export.heads import export_eagle, export_eagle3
from specdistill.methods.checkpoint import read_config
from specdistill.methods.draft_model.export import export_draft_model
from specdistill.methods.draft_model.gguf import FILE_TYPES, export_gguf
from specdistill.methods.mtp.merge import merge_mtp_weights
from specdistill.methods.mtp.tensor_names import SERVED_TYPES
from specdistill.methods.recognize import method_of
from specdistill.targets.files import TargetFiles, needed

# Pairs of method and engine for which there is nothing to write.
UNABLE = {
    ("eagle", "speculators"): "vllm, sglang or safeailab: speculators has no EAGLE-1",
    ("eagle", "gguf"): "vllm, sglang or safeailab: llama.cpp has no EAGLE-1",
    ("draft_model", "speculators"): "vllm, sglang or gguf: speculators holds heads alone",
    ("draft_model", "safeailab"): "vllm, sglang or gguf: SafeAILab's code loads heads alone",
    ("mtp", "speculators"): "vllm or sglang: no engine serves such a layer from speculators' form",
    ("mtp", "safeailab"): "vllm or sglang: SafeAILab's code loads EAGLE heads alone",
    ("mtp", "gguf"): "vllm or sglang: llama.cpp's converter reads the checkpoint that those get",
}


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
    method = method_of(draft, key="draft")
    if (method, engine) in UNABLE:
        got = f"{engine} for {draft}, which holds a draft of method {method}"
        raise UserError("engine", got=got, expected=UNABLE[method, engine])
    as_gguf = (method, engine) == ("draft_model", "gguf")
    if dtype is not None and not as_gguf:
        raise UserError(
            "dtype", got=f"{dtype} with engine {engine} and method {method}", expected="null: weights keep their own"
        )
    if dtype is not None and dtype not in FILE_TYPES:
        raise UserError("dtype", got=dtype, expected=f"one of {', '.join(FILE_TYPES)}", nearest=nearest(dtype, FILE_TYPES))
    measured = find_report(draft, report, method)
    settings = measured["settings"] if measured else {}
    num_tokens = num_speculative_tokens or settings.get("num_speculative_tokens", DEFAULT_NUM_TOKENS)
    if method == "eagle3":
        export_eagle3(draft, engine, output_dir, target, num_tokens)
    elif method == "eagle":
        export_eagle(draft, engine, output_dir, target)
    elif method == "mtp":
        _export_mtp(draft, engine, output_dir, needed(target, "the layer goes into its checkpoint"))
    elif as_gguf:
        export_gguf(draft, output_dir, target, dtype or "f16")
    else:
        export_draft_model(draft, engine, output_dir, target)
    served = Served(
        method=method,
        engine=engine,
        output=output_dir,
        target=target.name if target else None,
        num_tokens=num_tokens,
        samples=settings.get("temperature", 0) > 0 and settings.get("draft_sampling", "greedy") != "greedy",
        config={} if as_gguf else read_config(output_dir, "output_dir"),
    )
    (output_dir / "SERVE.md").write_text(serve_md(served, measured), encoding="utf-8")
    return method


def _export_mtp(draft: Path, engine: str, output_dir: Path, target: TargetFiles) -> None:
    """Stitch; raises UserError for a target whose multi-token-prediction layer no engine would look for."""
    kind = target.text_config.get("model_type")
    if kind not in SERVED_TYPES:
        got = f"{engine} for a layer of {target.name}, a {kind}"
        raise UserError("engine", got=got, expected=f"a target that it loads such layers of: {', '.join(sorted(SERVED_TYPES))}")
    merge_mtp_weights(draft, target.fetch("*"), output_dir)
