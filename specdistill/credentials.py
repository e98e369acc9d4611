"""Secrets that somebody types: refused before anything is done, because commands and recipes are recorded, and records are published.

Tokens of the Hub are huggingface_hub's alone: it reads HF_TOKEN or what `hf auth login` keeps, and sends them to the Hub and nowhere else.
"""

import os
import re
from typing import Any

from specdistill.errors import UserError

# Environment variables that hold secrets, which may also be written out where they do not belong.
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY")
SERVER_KEYS = "SPECDISTILL_SERVER_KEYS"  # ADDRESS KEY [ADDRESS KEY …]: a recipe's servers get no key that was meant for others
FEWEST_CHARACTERS = 8  # of a variable that is looked for; a shorter one, as EMPTY, is a placeholder
HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
# user:password@ in an address of any kind, user@ in one of the web, where it is a token.
PASSWORD = re.compile(r"://[^/?#\s@:]+:[^/?#\s@]+@|https?://[^/?#\s@]+@")

# In what may be published: the folders of an absolute path, which may hold spaces, and a server's host.
FOLDERS = re.compile(
    r"""(?:^|(?<=[\s=\[({,"':]))(?:~[\w.-]*|\.\.)?/(?!/)(?:(?:[^/\s,"'\])}]| (?![-/~]))+/)*(?=[^/\s])"""
)
HOST = re.compile(r"(?<=://)[^/\s:]+(?=:\d)")


def without_places(node: Any) -> Any:
    """JSON as others may read it: of a path on this machine the last part, of a server no host."""
    if isinstance(node, dict):
        return {name: without_places(value) for name, value in node.items()}
    if isinstance(node, list):
        return [without_places(value) for value in node]
    return HOST.sub("HOST", FOLDERS.sub("", node)) if isinstance(node, str) else node


def secret_in(text: str) -> str | None:
    """What kind of secret a text holds, in words that do not tell it; None: none that is known."""
    if HUB_TOKEN.search(text):
        return "a token of the Hugging Face Hub"
    if PASSWORD.search(text):
        return "an address with a password"
    values = [(name, os.environ.get(name, "")) for name in VARIABLES] + [
        (SERVER_KEYS, key) for key in server_keys().values()
    ]
    return next(
        (
            f"the value of {name}"
            for name, value in values
            if len(value) >= FEWEST_CHARACTERS and value in text
        ),
        None,
    )


def server_keys() -> dict[str, str]:
    """The keys that the environment has for servers, by the servers' addresses."""
    words = os.environ.get(SERVER_KEYS, "").split()
    return dict(zip((address.rstrip("/") for address in words[::2]), words[1::2], strict=False))


def check_no_secret(key: str, text: str) -> None:
    """Raises UserError, naming `key` and not the secret, for a text that holds one."""
    if found := secret_in(text):
        expected = "no secret: what is given here is recorded; the Hub's token is read from HF_TOKEN or `hf auth login`"
        raise UserError(key, got=found, expected=expected)


def check_arguments(arguments: list[str]) -> None:
    """Raises UserError for `key=value` arguments that hold a secret."""
    for argument in arguments:
        key, separator, _ = argument.partition("=")
        check_no_secret(key if separator and not secret_in(key) else "the command line", argument)
