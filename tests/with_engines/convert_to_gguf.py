"""llama.cpp's own converter, with the rule by which pico's tokenizer cuts text.

    python convert_to_gguf.py LLAMA_CPP ARGUMENTS_OF_THE_CONVERTER

It knows tokenizers by a hash of what they make of a text, and refuses all others. Pico's is its
own, and cuts text as GPT-2's does.
"""

import runpy
import sys

source, *arguments = sys.argv[1:]
script = f"{source}/convert_hf_to_gguf.py"
sys.path[:0] = [source, f"{source}/gguf-py"]
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
