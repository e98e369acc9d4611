"""Answers of the servers of vLLM, SGLang and llama.cpp, for tests that stand in for one.

They are pages, and completions with counts of their drafts.
"""

import json
from http.server import BaseHTTPRequestHandler


class AnswerHandler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        content = content if isinstance(content, str | bytes) else json.dumps(content)
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def pages(engine, model, k, *, version="0.32.0", max_length=None):
    """Return the JSON of each path. k: The draft tokens of a draft; 0 without one."""
    drafting = {
        "speculative_algorithm": "EAGLE3" if k else None,
        "speculative_num_steps": k or None,
    }
    engine_pages = (
        {"/server_info": {"version": version, "model_path": model, **drafting}}
        if engine == "sglang"
        else {}
    )
    if engine == "llama.cpp":
        props = {"build_info": version, "model_path": model, "model_alias": model}
        engine_pages = {
            "/props": {**props, "default_generation_settings": {"n_ctx": 512}},
            "/slots": [{"speculative": bool(k)}],
        }
    served = {"id": model, "root": model, "max_model_len": max_length}
    return {
        "/health": {},
        "/version": {"version": version},
        "/v1/models": {"data": [served]},
        **engine_pages,
    }


def counters(engine, k, generated, labels=""):
    """Return the page of counters. labels: The labels of each line, with a comma at the end."""
    if engine == "llama.cpp":  # llama.cpp prints six digits
        return f"llamacpp:tokens_predicted_total {float(generated):g}\n"
    lines = [f"{engine}:generation_tokens_total{{{labels}}} {float(generated)}"]
    if engine == "vllm":
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{labels}position="{position}"}} 0.0' for position in range(k)]
        names = ("drafts", "draft_tokens", "accepted_tokens") if k else ()
        lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} 0.0" for name in names]
    return "".join(f"{line}\n" for line in lines)


def stream(k, text, token_ids, accepted):
    """Return a completion of llama.cpp: an event for each token, with the sums so far.

    accepted: The number of accepted tokens of each draft.
    """
    timings, events, rounds = {"predicted_n": 0}, [], iter(accepted)
    left = 1  # tokens until the next round begins: at first the prompt's own
    for number, token in enumerate(token_ids, start=1):
        if not left and k:
            count = next(rounds, 0)
            drafted, kept = (
                timings.get("draft_n", 0) + k,
                timings.get("draft_n_accepted", 0) + count,
            )
            timings, left = {**timings, "draft_n": drafted, "draft_n_accepted": kept}, count + 1
        timings, left = {**timings, "predicted_n": number}, max(left - 1, 0)
        events.append(
            {
                "content": text if number == 1 else "",
                "tokens": [token],
                "stop": False,
                "timings": timings,
            }
        )
    events.append({"content": "", "tokens": [], "stop": True, "timings": timings})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def completion(engine, k, text, token_ids, accepted, num_drafted, *, counts=True):
    """Return a completion of vLLM or SGLang, with the counts of its drafts.

    accepted: The number of accepted tokens of each draft.
    counts: Whether vLLM was started with the option that adds the counts.
    """
    histogram = [accepted.count(count) for count in range(k + 1)]
    counted = (len(accepted), num_drafted, sum(accepted), histogram)
    if engine == "sglang":
        names = (
            "spec_verify_ct",
            "spec_num_proposed_drafts",
            "spec_num_correct_drafts",
            "spec_correct_drafts_histogram",
        )
        drafts = dict(zip(names, counted, strict=True)) if accepted and k else {}
        return {
            "text": text,
            "output_ids": token_ids,
            "meta_info": {"completion_tokens": len(token_ids), **drafts},
        }
    names = (
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "acceptance_histogram",
    )
    drafts = dict(zip(names, counted, strict=True)) if k and counts else None
    return {
        "choices": [{"text": text, "token_ids": token_ids}],
        "usage": {"completion_tokens": len(token_ids)},
        "metrics": {"speculative_decoding": drafts},
    }
