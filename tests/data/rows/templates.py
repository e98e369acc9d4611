"""Chat templates of the kinds that models have, written for these tests, and conversations to
render by them."""

import random
import re

from specdistill.common.project import PICO

Conversation = list[dict[str, str]]

TAGGED = (PICO / "chat_template.jinja").read_text(encoding="utf-8")
UNTAGGED = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", TAGGED)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last turn opens with an empty thought, which the generation prompt only begins.
THOUGHT_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last"
    " %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Thoughts stay in the turns after the last question, and are dropped from those before.
THOUGHTS_STRIPPED = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool'"
    " %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% elif"
    " m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last"
    " %}<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{%"
    " else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role =="
    " 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}{% if"
    " add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The system text stands before the last question, roles have to alternate, and there is no
# generation prompt.
MISTRAL = (
    "{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}{% set"
    " turns = messages[1:] if system else messages %}<s>{% set ns = namespace(last=0) %}{% for m in"
    " turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must"
    " alternate user/assistant') }}{% endif %}{% if m.role == 'user' %}{% set ns.last = loop.index0"
    " %}{% endif %}{% endfor %}{% for m in turns %}{% if m.role == 'user' %}[INST] {{ system if"
    " loop.index0 == ns.last }}{{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif"
    " %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%"
    " endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role"
    " }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt"
    " %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{%"
    " endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content"
    " }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1]"
    " }}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content"
    " }}<｜tool▁output▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<｜Assistant｜><think>\n{% endif %}"
)
# Every message names its channel, and the last answer ends in a token of its own.
HARMONY = (
    "<|start|>system<|message|>You help.<|end|>{% for m in messages %}{% if m.role == 'assistant'"
    " %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last"
    " else '<|end|>' }}{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role"
    " }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|start|>assistant{% endif %}"
)
PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: '}.get(m.role, '') }}{{"
    " m.content }}{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if"
    " add_generation_prompt %}ASSISTANT: {% endif %}"
)
# An answer before a call of a tool is dropped, as if it were the call.
CALLS_ALONE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or loop.nextitem.role !="
    " 'tool' else 'CALL' }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITHOUT_TURN_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant: {% endif %}"
)
# A word moves to the last question, so that no turn follows what was rendered without it, and
# answers begin with an empty thought.
MOVING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user'"
    " %}[INST]{% if loop.index == ns.last %}NOW {% endif %}{{ m.content }}[/INST]{% elif m.role =="
    " 'assistant' %}<think></think>{{ m.content }}</s>{% endif %}{% endfor %}"
)
UNTAGGED_TEMPLATES = {
    "pico": UNTAGGED,
    "chatml": CHATML,
    "thought at the end": THOUGHT_AT_THE_END,
    "thoughts stripped": THOUGHTS_STRIPPED,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
    "vicuna": VICUNA,
    "without turn ends": WITHOUT_TURN_ENDS,
    "calls alone": CALLS_ALONE,
    "moving": MOVING,
}

WORDS = [
    "Hi",
    "what",
    "assistant",
    "user:",
    "— über",
    "👩‍💻 code",
    "<think>",
    "[/INST]",
    "def f():\n    return",
    "\n\n",
    "  ",
    "7.",
]
TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello — you?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye, assistant!\n"},
]
THOUGHT = "<think>\nlet me see\n</think>\n\n"


def make_conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Return conversations of one to five exchanges; some have white space at the ends of turns,
    empty answers, thoughts, tools and a system message."""
    generator = random.Random(seed)

    def make_text() -> str:
        text = " ".join(generator.choices(WORDS, k=generator.randint(1, 6)))
        return generator.choice(["", " ", "\n"]) + text + generator.choice(["", " ", "\n", " \n\n"])

    chats = []
    for _ in range(count):
        turns = [("system", make_text())] if generator.random() < 0.3 else []
        for _ in range(generator.randint(1, 5)):
            turns.append(("user", make_text()))
            if generator.random() < 0.1:
                turns += [("assistant", make_text()), ("tool", make_text())]
            answer = generator.choice(
                [make_text(), make_text(), make_text(), THOUGHT + make_text(), ""]
            )
            turns.append(("assistant", answer))
        turns += [("user", make_text())] if generator.random() < 0.2 else []
        chats.append([{"role": role, "content": content} for role, content in turns])
    return chats
