"""Refuse secrets in commands and recipes before anything is done.

Commands and recipes are recorded, and records are published. Only huggingface_hub handles tokens of
the Hub. It reads them from HF_TOKEN or from what `hf auth login` stores, and sends them to the Hub
and nowhere else.
"""

import os
import re
from typing import Any

from specdistill.common.errors import UserError

# Environment variables that hold secrets. Their values may be typed where they do not belong.
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY")
# The environment variable with the keys of servers: ADDRESS KEY [ADDRESS KEY …]. The addresses
# ensure that a server of a recipe gets no key that was meant for another one.
SERVER_KEYS = "SPECDISTILL_SERVER_KEYS"
# The fewest characters of a secret in a variable. A shorter value, such as EMPTY, is a placeholder.
MIN_SECRET_CHARACTERS = 8
HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
# `user:password@` in an address of any kind. In a web address also `user@`, which is a token there.
PASSWORD = re.compile(r"://[^/?#\s@:]+:[^/?#\s@]+@|https?://[^/?#\s@]+@")

# Removed from what may be published: the folders of an absolute path, which may contain spaces, and
# the host of a server.
FOLDERS = re.compile(
    r"""(?:^|(?<=[\s=\[({,"':]))(?:~[\w.-]*|\.\.)?/(?!/)"""
    r"""(?:(?:[^/\s,"'\])}]| (?![-/~]))+/)*(?=[^/\s])"""
)
HOST = re.compile(r"(?<=://)[^/\s:]+(?=:\d)")


def remove_places(node: Any) -> Any:
    """Return a JSON value without places on this machine, so that it can be published.

    Paths keep only their last part, and addresses of servers lose their host.
    """
    if isinstance(node, dict):
        return {name: remove_places(value) for name, value in node.items()}
    if isinstance(node, list):
        return [remove_places(value) for value in node]
    return HOST.sub("HOST", FOLDERS.sub("", node)) if isinstance(node, str) else node


def find_secret(text: str) -> str | None:
    """Return what kind of secret a text holds, in words that do not reveal it.

    Returns:
        The kind of secret; None if the text holds none that is known.
    """
    if HUB_TOKEN.search(text):
        return "a token of the Hugging Face Hub"
    if PASSWORD.search(text):
        return "an address with a password"
    values = [(name, os.environ.get(name, "")) for name in VARIABLES] + [
        (SERVER_KEYS, key) for key in read_server_keys().values()
    ]
    return next(
        (
            f"the value of {name}"
            for name, value in values
            if len(value) >= MIN_SECRET_CHARACTERS and value in text
        ),
        None,
    )


def read_server_keys() -> dict[str, str]:
    """Return the keys of servers by their addresses, from the environment."""
    words = os.environ.get(SERVER_KEYS, "").split()
    return dict(zip((address.rstrip("/") for address in words[::2]), words[1::2], strict=False))


def check_no_secret(key: str, text: str) -> None:
    """Raise UserError if a text holds a secret. The error names `key` and not the secret."""
    secret = find_secret(text)
    if secret:
        raise UserError(
            key,
            got=secret,
            expected=(
                "no secret: what is given here is recorded; the Hub's token is read from HF_TOKEN"
                " or `hf auth login`"
            ),
        )


def check_arguments(arguments: list[str]) -> None:
    """Raise UserError if one of the `key=value` arguments holds a secret."""
    for argument in arguments:
        key, separator, _ = argument.partition("=")
        check_no_secret(key if separator and not find_secret(key) else "the command line", argument)
