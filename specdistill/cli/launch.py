"""`specdistill train … launch=NAME`: a script in several processes, with accelerate's launcher.

A name is a file of `accelerate_configs/`, which the wheel carries. Launches are refused here if
their processes would fail one by one, or wait for each other. The exit code is that of the process
that failed first. SIGTERM and SIGINT reach every process. In a terminal's foreground a single
process gets SIGINT from Ctrl-C itself, so it is not passed on.
"""

import gc
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from specdistill.common.documents import read_keys
from specdistill.common.errors import (
    ExitCode,
    ResourceError,
    UserError,
    convert_errors,
    join_lines,
    logger,
    make_unused_key_error,
)
from specdistill.common.progress import hide_bars_of_transformers
from specdistill.common.project import LAUNCHES, find_yaml
from specdistill.recipe.fields import Condition, Section, option
from specdistill.recipe.load import validate_recipe

LAUNCH_IS_GIVEN = Condition("with launch=NAME", lambda options: options.launch is not None)


class LaunchOptions(Section):
    """The keys by which a command starts processes with accelerate."""

    launch: str | None = option(
        None,
        "run in several processes: a name under accelerate_configs/ (e.g. ddp) or a YAML file;"
        " null: in this process",
    )
    num_processes: int | None = option(
        None,
        "processes on all machines, one per GPU; null: as in the configuration",
        ge=1,
        condition=LAUNCH_IS_GIVEN,
    )
    num_machines: int | None = option(
        None, "number of machines; null: the configuration's", ge=1, condition=LAUNCH_IS_GIVEN
    )
    machine_rank: int | None = option(
        None, "rank of this machine, from 0", ge=0, condition=LAUNCH_IS_GIVEN
    )
    main_process_ip: str | None = option(None, "address of machine 0", condition=LAUNCH_IS_GIVEN)
    main_process_port: int | None = option(
        None,
        "rendezvous port; null: the configuration's, else any free port on one machine, 29500 on"
        " several",
        ge=1,
        le=65535,
        condition=LAUNCH_IS_GIVEN,
    )


LIBRARIES = ("torch", "transformers.trainer", "datasets")  # These are slow to import.


def import_libraries() -> None:
    """Import torch, transformers and datasets without the garbage collector, if they are not yet.

    Importing them creates a million objects that live until the process ends. Going over them again
    and again took the collector 3 of the 8 seconds in which a command reported a mistake.
    """
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            for name in LIBRARIES:
                importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    hide_bars_of_transformers()


def launch(script: Path, arguments: Sequence[str], options: LaunchOptions) -> int:
    """Run a script with `accelerate launch`.

    Args:
        script: the file.
        arguments: of the script.
        options: which configuration, and what is changed in it.

    Returns:
        The exit code.

    Raises:
        UserError: for what cannot be started.
        ResourceError: for a killed process.
    """
    # These modules import torch, so they are imported only here.
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    configuration = find_yaml(str(options.launch), LAUNCHES, "launch")
    launching = _check_launch_options(
        configuration, options.model_dump(exclude={"launch"}, exclude_none=True)
    )
    command = [
        f"--config_file={configuration}",
        *(f"--{name}={value}" for name, value in launching.items()),
        str(script),
        *arguments,
    ]
    logger.info(f"$ accelerate launch {shlex.join(command)}")
    # torch's messages are replaced by those below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # For several processes torch sets handlers of its own. For one process nobody does.
    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        handlers[number] = signal.signal(number, _forward)
    try:
        launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(failure.exitcode, f"process {rank}")
    except subprocess.CalledProcessError as error:
        return _exit_code(error.returncode, "the process")
    except (ValueError, ConnectionError) as error:  # accelerate's own checks raise these.
        reason = join_lines(str(error)) or type(error).__name__
        raise UserError("launch", got=reason, text=f"launch: {reason}") from error
    except SignalException as error:
        return 128 + error.sigval
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ExitCode.DONE


def _check_launch_options(configuration: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that accelerate is given besides its configuration.

    Args:
        configuration: the file.
        options: the options that the user set.

    Raises:
        UserError: for values that accelerate ignores, or with which the processes would wait for
            each other.
    """
    from accelerate.utils import DistributedType, is_deepspeed_available

    from specdistill.common.processes import check_devices

    settings, file_keys = _read(configuration)
    if settings.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise UserError(
            "launch",
            got=f"{configuration.stem} without DeepSpeed",
            expected="DeepSpeed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed",
        )

    # What the user sets overrides what the configuration sets.
    chosen = validate_recipe(
        LaunchOptions, {"launch": str(configuration), **file_keys, **options}, f"{configuration}: "
    )
    processes = chosen.num_processes or settings.num_processes
    machines = chosen.num_machines or 1
    if processes < 1:
        raise UserError(
            "num_processes",
            got=None,
            text=f"{configuration} names no num_processes. Add num_processes=N.",
        )
    if processes % machines:
        raise UserError(
            "num_processes",
            got=f"{processes} on {machines} machines",
            expected="a multiple of the number of machines",
        )
    check_devices(processes // machines, "num_processes")

    # Several machines need a rank and an address each; a single machine ignores both.
    for name in ("machine_rank", "main_process_ip"):
        if machines == 1 and name in options:
            raise make_unused_key_error(
                name,
                options[name],
                "only used with several machines",
                alternative="add num_machines=2",
            )
        if machines > 1 and getattr(chosen, name) is None:
            raise UserError(
                name,
                got=f"nothing with {machines} machines",
                expected=LaunchOptions.model_fields[name].description or "",
            )

    rank = chosen.machine_rank or 0
    if machines > 1 and rank >= machines:
        raise UserError(
            "machine_rank", got=rank, expected=f"below {machines}, the number of machines"
        )
    # Port 0 stands for any that is free.
    return {
        **options,
        "main_process_port": chosen.main_process_port or (29500 if machines > 1 else 0),
    }


def _read(configuration: Path) -> tuple[Any, dict[str, Any]]:
    """Return a configuration as accelerate reads it, and which of our keys the file itself sets.

    Raises:
        UserError: for what accelerate refuses.
    """
    from accelerate.commands.config.config_args import ClusterConfig

    expected = "a configuration of accelerate"
    file_keys = read_keys(configuration, "launch", expected)
    with convert_errors((ValueError, TypeError, KeyError), "launch", configuration, expected):
        settings = ClusterConfig.from_yaml_file(str(configuration))
    if file_keys.get("main_process_port") == 0:  # accelerate writes 0 for any port that is free.
        del file_keys["main_process_port"]
    return settings, {
        name: file_keys[name]
        for name in LaunchOptions.model_fields
        if file_keys.get(name) is not None
    }


def _exit_code(code: int, process: str) -> int:
    """Return the exit code of a process, or raise ResourceError if a signal killed it."""
    if code >= 0:
        return code
    raise ResourceError(
        f"{process} was killed by {signal.Signals(-code).name}",
        next_step=(
            "the same command resumes from the newest checkpoint; SIGKILL mostly means: free memory"
        ),
    )


def _forward(number: int, _frame: FrameType | None) -> None:
    """Pass a signal on to this process's children, except a terminal's Ctrl-C.

    A Ctrl-C reaches them anyway.
    """
    import psutil

    if number == signal.SIGINT and _is_in_foreground():
        return
    for child in psutil.Process().children():
        child.send_signal(number)


def _is_in_foreground() -> bool:
    """Return whether a terminal's Ctrl-C goes to this process and those that it has started."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # The process has no terminal.
        return False
