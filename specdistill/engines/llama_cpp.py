"""llama.cpp, as in llama-cpp-python 0.3.36.

It has a converter of its own for EAGLE-3, which reads vLLM's folder and does not know the norms of EAGLE-3.1; a draft model is written as
one GGUF file here.
"""

import shlex

from specdistill.engines.engine import Engine, Served


def serve_command(served: Served) -> str:
    target, num = served.quoted_target, served.num_tokens
    commands = [f"python convert_hf_to_gguf.py {target} --outtype f16 --outfile target.gguf"]
    file = next((name for name in served.files if name.endswith(".gguf")), None)
    if file is None:
        source = f"{served.quoted_output} --target-model-dir {target}"
        commands += [f"python convert_hf_to_gguf.py {source} --outtype f16 --outfile draft.gguf"]
    draft = shlex.quote(str(served.output / file)) if file else "draft.gguf"
    return "\n".join(
        [*commands, f"llama-server -m target.gguf -md {draft} --spec-type {served.serving.name} --spec-draft-n-max {num}"]
    )


LLAMA_CPP = Engine(
    name="gguf",
    title="llama.cpp",
    versions="as in llama-cpp-python 0.3.36",
    serve_command=serve_command,
    counters="`llama-server` logs drafted and accepted tokens.",
    flags={
        "several GPUs": "`--split-mode layer --tensor-split 1,1`",
        "layers on the GPU": "`--gpu-layers 99`; of the draft: `--spec-draft-ngl 99`",
        "device of the draft": "`--spec-draft-device CUDA1`",
        "threads": "`--threads 8`; of the draft: `--spec-draft-threads 8`",
        "requests at once, tokens of all together": "`--parallel 4`, `--ctx-size 32768`",
        "type of keys and values": (
            "`--cache-type-k q8_0 --cache-type-v q8_0`; of the draft: `--spec-draft-type-k q8_0 --spec-draft-type-v q8_0`"
        ),
    },
)
