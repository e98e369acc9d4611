"""Refuse secrets in commands and recipes before a command does anything else.

Commands and recipes are recorded, and these records are published with a draft. specdistill itself
never needs a token of the Hub: huggingface_hub reads it from HF_TOKEN, or from the file that
`hf auth login` writes, and sends it only to the Hub.
"""

import os
import re
from typing import Any

from specdistill.common.errors import UserError

# Environment variables that hold secrets. A user may type their values into a command by mistake.
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY")
# The environment variable with the API keys of inference servers: ADDRESS KEY [ADDRESS KEY …]. Each
# key has an address, so that it is not sent to another server that a recipe names.
SERVER_KEYS = "SPECDISTILL_SERVER_KEYS"
# The fewest characters of a secret in an environment variable. A shorter value, such as EMPTY, is a
# placeholder: tokens and API keys are longer.
MIN_SECRET_CHARACTERS = 8
# Tokens of users and of organizations on the Hub.
HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
# `user:password@` in an address of any kind. In a web address also `user@`, because a token may
# stand in the place of the user.
PASSWORD = re.compile(r"://[^/?#\s@:]+:[^/?#\s@]+@|https?://[^/?#\s@]+@")

# What `remove_places` removes from a text before it is published: the folders of an absolute path,
# which may contain spaces, and the host of a server with a port.
FOLDERS = re.compile(
    r"""(?:^|(?<=[\s=\[({,"':]))(?:~[\w.-]*|\.\.)?/(?!/)"""
    r"""(?:(?:[^/\s,"'\])}]| (?![-/~]))+/)*(?=[^/\s])"""
)
HOST = re.compile(r"(?<=://)[^/\s:]+(?=:\d)")


def remove_places(node: Any) -> Any:
    """Return a JSON value without paths and hosts of this machine, so that it can be published.

    An absolute path is shortened to its last part: `/home/me/draft` becomes `draft`. In the address
    of a server, the word HOST takes the place of the host: `http://10.0.0.7:8000` becomes
    `http://HOST:8000`.

    Args:
        node: a value of a JSON document. Texts inside lists and mappings are cleaned too.
    """
    if isinstance(node, dict):
        return {name: remove_places(value) for name, value in node.items()}
    if isinstance(node, list):
        return [remove_places(value) for value in node]
    # The pattern FOLDERS matches the folders of an absolute path, the pattern HOST a host name.
    return HOST.sub("HOST", FOLDERS.sub("", node)) if isinstance(node, str) else node


def find_secret(text: str) -> str | None:
    """Look for a secret in a text, and return its kind in words that do not reveal it.

    Returns:
        The kind of secret, such as "a token of the Hugging Face Hub"; None if none was found.
    """
    # Secrets that are recognized by their form.
    if HUB_TOKEN.search(text):
        return "a token of the Hugging Face Hub"
    if PASSWORD.search(text):
        return "an address with a password"

    # Secrets that are recognized because an environment variable holds the same text. A short value
    # is a placeholder, such as EMPTY, and no secret.
    secrets = [(name, os.environ.get(name, "")) for name in VARIABLES]
    secrets += [(SERVER_KEYS, key) for key in read_server_keys().values()]
    for name, secret in secrets:
        if len(secret) >= MIN_SECRET_CHARACTERS and secret in text:
            return f"the value of {name}"
    return None


def read_server_keys() -> dict[str, str]:
    """Read the API keys of inference servers from an environment variable.

    Returns:
        The address of each server -> its API key.
    """
    # The variable alternates between addresses and keys: ADDRESS KEY ADDRESS KEY …
    words = os.environ.get(SERVER_KEYS, "").split()
    addresses = [address.rstrip("/") for address in words[::2]]
    return dict(zip(addresses, words[1::2], strict=False))


def check_no_secret(key: str, text: str) -> None:
    """Raise UserError if a text holds a secret.

    Args:
        key: the key that the error names.
        text: the text, which the error does not show.
    """
    kind = find_secret(text)
    if kind:
        raise UserError(
            key,
            got=kind,
            expected=(
                "no secret, because commands and recipes are recorded. Set HF_TOKEN, or run"
                " `hf auth login`, for the token of the Hub"
            ),
        )


def check_arguments(arguments: list[str]) -> None:
    """Raise UserError if one of the `key=value` arguments holds a secret."""
    for argument in arguments:
        # The error names the key of the argument, unless the key itself holds a secret.
        key, separator, _ = argument.partition("=")
        has_safe_key = bool(separator) and not find_secret(key)
        check_no_secret(key if has_safe_key else "the command line", argument)
