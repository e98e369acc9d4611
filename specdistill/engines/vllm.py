"""vLLM, read in the sources of 0.32 and 0.33: llama_eagle3.py, llama_eagle.py, models/utils.py, configs/speculators, gpu_model_runner.py.

- Auxiliary layers count as here, in a top-level list that the older runner also looks for in `eagle_config`, where SGLang counts one
  less; so no file has both lists, and neither where the layers are the default ones.
- A true `bias` is taken for one of the attention, too; `fc` of EAGLE-1 has none.
- A layer has a window by `layer_types` alone.
- Names of tensors that are not known are an error; a tensor that is missing is not.
- Drafts are counted in each answer, where it is asked for, before the completion is cut at its limit or at a stop token.
"""

import json
from dataclasses import replace
from typing import Any

from specdistill.engines import limits, loader
from specdistill.engines.engine import NORMS, SIZES, Engine, HeadExport, Layout, Program, Served, eagle3_config
from specdistill.engines.limits import AUX_LAYERS
from specdistill.engines.loader import Loader, Setting, Slot
from specdistill.engines.server import PLAIN_SAMPLING, Client, Counters, Identity, Request, Server, ServerCounts, reached
from specdistill.errors import ResourceError

EAGLE3 = Loader(
    unknown="refused",
    unset="silent",
    # A name that is none of its classes gets `Eagle3` in front.
    architectures=frozenset(
        {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen2_5vlForCausalLM"}
        | {"Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"}
    ),
    slots=(
        *loader.EAGLE3_SLOTS,
        *loader.layer_slots("layers.{i}", "H", "input_layernorm"),
        Slot("layers.{i}.hidden_norm.weight", "H", source="unused"),
        Slot("lm_head.weight", "W H", source="shared"),
        Slot("embed_tokens.weight", "V H", source="shared"),
    ),
    settings={**loader.EAGLE3_SETTINGS, "norm_before_residual": Setting(("norm_before_residual",), False)},
    aux_layers={
        "V1 runner": {AUX_LAYERS: 0, f"eagle_config.{AUX_LAYERS}": 0},
        "V2 runner": {AUX_LAYERS: 0, "eagle_config.layer_ids": 0},
    },
    renamed=(("midlayer.", "layers.0.", ""),),
    ignored=("t2d", "mask_hidden", ".bias", "rotary_emb."),
)
SPECULATORS_EAGLE3 = replace(
    EAGLE3,
    architectures=frozenset(),
    settings={**EAGLE3.settings, "norm_before_residual": Setting(("norm_before_residual",), True)},
    inner="transformer_layer_config",
    taken=("draft_vocab_size", "target_hidden_size", "norm_before_residual", *NORMS, AUX_LAYERS),
    required=(
        "speculators_config.proposal_methods.0.speculative_tokens",
        "speculators_config.verifier.name_or_path",
        "transformer_layer_config",
    ),
)
EAGLE = Loader(
    unknown="refused",
    unset="silent",
    architectures=frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    slots=(*loader.EAGLE_SLOTS, Slot("embed_tokens.weight", "V H", source="shared")),
    settings={**loader.EAGLE_SETTINGS, "fc_bias": Setting(default=False)},
    ignored=(".bias", "rotary_emb."),
)
WRAPPED_EAGLE = replace(EAGLE, inner="model", required=("model",))
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


def wrapped_config(export: HeadExport) -> dict[str, Any]:
    return {
        "model_type": "eagle",
        "model": {"architectures": ["LlamaForCausalLM"], **export.llama, "bias": False},
        "truncated_vocab_size": None,
        "method": "eagle",
    }


def speculative_config(method: str, folder: str, num_tokens: int) -> dict[str, Any]:
    """A layer for multi-token prediction is in the target's folder."""
    return {"method": method, **({} if method == "mtp" else {"model": folder}), "num_speculative_tokens": num_tokens}


def served_config(served: Served) -> dict[str, Any]:
    assert served.method is not None
    sampled = {"draft_sample_method": "probabilistic"} if served.samples else {}
    return speculative_config(served.method, str(served.output), served.num_tokens) | sampled


def arguments(served: Served) -> list[str]:
    if served.method is None:
        return [served.target_name]
    model = str(served.output) if served.method == "mtp" else served.target_name
    return [model, "--speculative-config", json.dumps(served_config(served))]


PROGRAM = Program(
    "vllm serve",
    arguments,
    measured=("--no-enable-prefix-caching",),
    measured_draft=("--per-request-spec-decode-metrics", "summary"),
)
FLAGS = {
    "several GPUs": '`--tensor-parallel-size 2`; a draft on fewer of them: `"draft_tensor_parallel_size": 1` in the speculative config',
    "share of the GPU's memory": "`--gpu-memory-utilization 0.9`",
    "requests at once, tokens of a sequence": "`--max-num-seqs 256`, `--max-model-len 8192`",
    "chunked prefill": "`--max-num-batched-tokens 8192` tokens a step; `--no-enable-chunked-prefill`",
    "eager, without CUDA graphs": "`--enforce-eager`",
    "weights' dtype": "`--dtype bfloat16`",
}


def snippet(served: Served) -> str:
    model = str(served.output) if served.method == "mtp" else served.target_name
    return f"""from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM({model!r}, speculative_config={served_config(served)!r}, disable_log_stats=False)
    (output,) = llm.generate("def main():", SamplingParams(temperature=0, max_tokens=64))
    print(output.outputs[0].text)
    counted = {{metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}}
    drafts, accepted = (counted[f"vllm:spec_decode_num_{{name}}"].value for name in ("drafts", "accepted_tokens"))
    print("acceptance length", 1 + accepted / drafts)"""


def describe_server(server: Server, counters: Counters) -> Identity:
    served = server.json("/v1/models")["data"][0]
    return Identity(
        version=str(server.json("/version")["version"]),
        models=tuple(filter(None, (served["id"], served.get("root")))),
        max_length=served.get("max_model_len"),
        num_speculative_tokens=sum(PER_POSITION in name for name in counters) or None,
    )


def request_body(request: Request) -> dict[str, Any]:
    return {
        "model": request.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        **sampling_parameters(request),
        "seed": request.seed,
        "return_token_ids": True,
    }


def answer_counts(answer: Any, k: int) -> ServerCounts:
    """Raises ResourceError where a server that drafts does not count in its answers."""
    token_ids = tuple(answer["choices"][0].get("token_ids") or ())
    if not k:
        return ServerCounts(token_ids, 0, 0, 0, ())
    counted = (answer.get("metrics") or {}).get("speculative_decoding")
    if counted is None:
        option = " ".join(PROGRAM.measured_draft)
        raise ResourceError("vLLM does not say in its answers what it accepted", next_step=f"start it with {option}")
    histogram = counted["acceptance_histogram"]
    return ServerCounts(
        token_ids,
        counted["num_spec_steps"],
        counted["num_draft_tokens"],
        counted["num_accepted_draft_tokens"],
        reached(histogram),
    )


def sampling_parameters(request: Request) -> dict[str, Any]:
    """In the words of vLLM, which SGLang shares."""
    chosen = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k or -1}
    return {**PLAIN_SAMPLING, **chosen, "skip_special_tokens": False}


VLLM = Engine(
    name="vllm",
    title="vLLM",
    versions="0.32 and 0.33",
    layouts={
        "eagle3": Layout(
            lambda export: eagle3_config(export, *SIZES, *NORMS, "norm_before_residual"),
            limits=(limits.LAYERS_OUT_OF_ORDER,),
        ),
        "eagle": Layout(wrapped_config, limits=(limits.FC_BIAS, limits.SLIDING_WINDOW)),
        "draft_model": Layout(),
        "mtp": Layout(),
    },
    serve_command=PROGRAM.shell,
    counters=(
        "At `/metrics`, acceptance length is 1 + `vllm:spec_decode_num_accepted_tokens_total` / "
        "`vllm:spec_decode_num_drafts_total`."
    ),
    flags=FLAGS,
    snippet=snippet,
    program=PROGRAM,
    loaders={"eagle3": (SPECULATORS_EAGLE3, EAGLE3), "eagle": (WRAPPED_EAGLE, EAGLE)},
    loader_version="0.33",
    # OpenAI's completions, with a prompt of token ids.
    client=Client(
        prefix="vllm",
        hint="start vLLM without --disable-log-stats",
        describe=describe_server,
        path="/v1/completions",
        body=request_body,
        text_and_length=lambda answer: (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]),
        counts=answer_counts,
    ),
    counts_past_end=True,
)
