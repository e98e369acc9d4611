"""An interrupt ends commands while servers say nothing, whatever their threads wait for."""

import fcntl
import signal
import subprocess
import sys
import time

import pytest

from tests.launches import environment
from tests.serving.engines.hostile_server import DRIP, SILENCE, hostile
from tests.tiny import SMALL, write_inputs

# A command imports its libraries first, which takes most of the time.
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
VLLM = "/v1/completions"


def check_interrupted(folder, server, num_asked, *arguments):
    """Check that a command reports an interrupt within two seconds, with exit code 130.

    The interpreter takes a while more to end.
    """
    line, said = [sys.executable, "-m", "specdistill", *arguments], folder / "stderr"
    with (
        said.open("w") as stderr,
        subprocess.Popen(line, env=environment(), stderr=stderr) as process,
    ):
        try:
            while server.num_asked < num_asked and process.poll() is None:
                time.sleep(0.05)
            time.sleep(0.5)
            assert process.poll() is None, said.read_text()
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 2
            while "interrupted" not in said.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert said.read_text().splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("wrong", [SILENCE, DRIP])
def test_an_interrupt_ends_data_make_while_a_server_hangs(wrong, tmp_path):
    keys = [
        *write_inputs(tmp_path),
        "data.regenerate.num_tokens=9000",
        "data.regenerate.batch_size=8",
        "data.max_length=96",
    ]
    with hostile({VLLM: wrong}, model="tiny") as server:
        check_interrupted(
            tmp_path,
            server,
            8,
            "data",
            "make",
            "recipe=small/eagle3",
            *keys,
            f"data.regenerate.server=[{server.address}]",
        )


def test_an_interrupt_ends_data_features_while_a_file_is_locked(tmp_path):
    """The server answers, and never gives back the lock on what it writes."""
    keys = [
        *write_inputs(tmp_path, num_rows=40),
        "method=eagle3",
        "draft.ttt_steps=2",
        *SMALL,
        "train.max_steps=4",
    ]
    keys += [
        "hidden_states.mode=hybrid",
        f"hidden_states.path={tmp_path / 'store'}",
        "hidden_states.shard_tokens=256",
    ]
    written = {
        "kv_transfer_params": {"hidden_states_path": str(tmp_path / "of-server.safetensors")}
    }
    with (
        (tmp_path / "of-server.safetensors.lock").open("w") as lock,
        hostile({VLLM: written}) as server,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_interrupted(
            tmp_path,
            server,
            1,
            "data",
            "features",
            *keys,
            f"hidden_states.server=[{server.address}]",
        )
