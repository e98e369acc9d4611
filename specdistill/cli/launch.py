"""Run a command in several processes with accelerate's launcher (`specdistill … launch=NAME`).

NAME is a file of `accelerate_configs/`, which the wheel contains too, or any other YAML file of
accelerate. A launch is refused at once if its processes would fail one by one, or would wait for
each other forever.

The exit code of a launch is that of the process that failed first. SIGTERM and SIGINT are passed on
to the processes. A Ctrl-C in a terminal is not, because the terminal itself sends SIGINT to all
processes in its foreground.
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

# The other options of a launch have no effect without `launch`.
LAUNCH_IS_GIVEN = Condition("with launch=NAME", lambda options: options.launch is not None)


class LaunchOptions(Section):
    """The keys with which a command starts processes with accelerate."""

    launch: str | None = option(
        None,
        "run in several processes: a name under accelerate_configs/ (e.g. ddp) or a YAML file;"
        " null: in this process",
    )
    num_processes: int | None = option(
        None,
        "number of processes on all machines together, one per GPU; null: as in launch's YAML file",
        ge=1,
        condition=LAUNCH_IS_GIVEN,
    )
    num_machines: int | None = option(
        None,
        "number of machines; null: as in launch's YAML file, else 1",
        ge=1,
        condition=LAUNCH_IS_GIVEN,
    )
    machine_rank: int | None = option(
        None, "rank of this machine, from 0", ge=0, condition=LAUNCH_IS_GIVEN
    )
    main_process_ip: str | None = option(
        None, "address of machine 0, where the processes meet", condition=LAUNCH_IS_GIVEN
    )
    main_process_port: int | None = option(
        None,
        "port of machine 0, where the processes meet; null: as in launch's YAML file, else any free"
        " port for one machine, and 29500 for several",
        ge=1,
        le=65535,
        condition=LAUNCH_IS_GIVEN,
    )


# The libraries that are slow to import, which all jobs need.
LIBRARIES = ("torch", "transformers.trainer", "datasets")


def import_libraries() -> None:
    """Import torch, transformers and datasets while the garbage collector is switched off.

    The imports create a million objects that live until the process ends. If the collector is on,
    it goes over them again and again, which took 3 of the 8 seconds until a command reported a
    mistake.
    """
    # If the caller has switched the collector off already, there is no reason to import ahead: the
    # libraries are imported where they are first needed, and the collector stays off.
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            for name in LIBRARIES:
                importlib.import_module(name)
        finally:
            # Make later collections skip the objects that exist now.
            gc.freeze()
            gc.enable()
    hide_bars_of_transformers()


def launch(script: Path, arguments: Sequence[str], options: LaunchOptions) -> int:
    """Run a script in several processes with `accelerate launch`.

    Args:
        script: the file of the script.
        arguments: the arguments of the script.
        options: the configuration file of accelerate, and values that override its values.

    Returns:
        The exit code of the process that failed first; 0 if none failed.

    Raises:
        UserError: for options with which no process can be started. The error names the option.
        ResourceError: if a signal killed a process, for example when memory ran out.
    """
    # These modules import torch, so they are imported only here.
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Find the configuration, and check the options before a process is started.
    configuration = find_yaml(str(options.launch), LAUNCHES, "launch")
    typed_options = options.model_dump(exclude={"launch"}, exclude_none=True)
    checked_options = _check_launch_options(configuration, typed_options)

    # The command is logged, so that a user can type it without specdistill.
    command = [
        f"--config_file={configuration}",
        *(f"--{name}={value}" for name, value in checked_options.items()),
        str(script),
        *arguments,
    ]
    logger.info(f"$ accelerate launch {shlex.join(command)}")

    # torch logs a long report about a failed process. The errors below take its place.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Pass signals on to the processes. If there are several processes, torch replaces these
    # handlers by its own while it runs; for one process accelerate sets no handlers.
    previous_handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous_handlers[number] = signal.signal(number, _forward_signal)

    # Run the processes, and turn each kind of failure into an exit code or an error.
    try:
        launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _check_exit_code(failure.exitcode, f"process {rank}")
    except subprocess.CalledProcessError as error:
        return _check_exit_code(error.returncode, "the process")
    except (ValueError, ConnectionError) as error:  # accelerate's own checks raise these.
        reason = join_lines(str(error)) or type(error).__name__
        raise UserError("launch", got=reason, text=f"launch: {reason}") from error
    except SignalException as error:
        # Shells report a signal as 128 plus its number.
        return 128 + error.sigval
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    return ExitCode.DONE


def _check_launch_options(configuration: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Check the options of a launch, and return those to pass to accelerate.

    Args:
        configuration: accelerate's configuration file.
        options: the options that the user typed, without `launch`.

    Returns:
        The options that override the configuration. `main_process_port` is always among them.

    Raises:
        UserError: for an option that accelerate would ignore, and for options with which the
            processes would wait for each other forever.
    """
    # These modules import torch, so they are imported only here.
    from accelerate.utils import DistributedType, is_deepspeed_available

    from specdistill.common.processes import check_devices

    # Read the configuration. DeepSpeed is an optional dependency.
    settings, file_options = _read_configuration(configuration)
    if settings.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise UserError(
            "launch",
            got=f"{configuration.stem} without DeepSpeed",
            text=(
                f"launch: {configuration.stem} needs DeepSpeed, which is not installed. Run:"
                " DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
            ),
        )

    # Check the numbers of processes and machines. Options that the user typed override the values
    # of the configuration.
    chosen = validate_recipe(
        LaunchOptions,
        {"launch": str(configuration), **file_options, **options},
        f"{configuration}: ",
    )
    processes = chosen.num_processes or settings.num_processes
    machines = chosen.num_machines or 1
    if processes < 1:
        raise UserError(
            "num_processes",
            got=None,
            text=f"{configuration} does not set num_processes. Add num_processes=N.",
        )
    if processes % machines:
        raise UserError(
            "num_processes",
            got=f"{processes} on {machines} machines",
            expected="a multiple of the number of machines: each machine runs the same number",
        )
    check_devices(processes // machines, "num_processes")
    _check_machines(machines, chosen, options)

    # If no port is set: on one machine, port 0 lets accelerate take any free port. Several machines
    # have to name the same port, which is torch's default, 29500.
    default_port = 29500 if machines > 1 else 0
    return {**options, "main_process_port": chosen.main_process_port or default_port}


def _check_machines(machines: int, chosen: LaunchOptions, options: dict[str, Any]) -> None:
    """Check the rank of this machine and the address of machine 0.

    A launch on several machines needs both. On a single machine accelerate ignores both.

    Args:
        machines: the number of machines.
        chosen: the options that apply: those that the user typed, and otherwise the values of the
            configuration.
        options: only the options that the user typed.

    Raises:
        UserError: for an option that is missing or ignored, and for a rank that is too large.
    """
    for name in ("machine_rank", "main_process_ip"):
        if machines == 1 and name in options:
            raise make_unused_key_error(
                name,
                options[name],
                "only used with several machines",
                alternative="add num_machines=2",
            )
        if machines > 1 and getattr(chosen, name) is None:
            description = LaunchOptions.model_fields[name].description
            raise UserError(
                name, got=None, text=f"{name} is required with {machines} machines: {description}"
            )

    # Ranks of machines count from 0, so the largest is one less than the number of machines.
    rank = chosen.machine_rank or 0
    if machines > 1 and rank >= machines:
        raise UserError(
            "machine_rank", got=rank, expected=f"a rank below {machines}, the number of machines"
        )


def _read_configuration(configuration: Path) -> tuple[Any, dict[str, Any]]:
    """Read a configuration file of accelerate.

    accelerate fills in a default for each key that the file does not set, and does not say which
    values are defaults. So the keys that the file itself sets are returned separately.

    Returns:
        The configuration as accelerate reads it, and the keys of LaunchOptions that the file sets.

    Raises:
        UserError: for a file that accelerate refuses.
    """
    # This module imports torch, so it is imported only here.
    from accelerate.commands.config.config_args import ClusterConfig

    expected = "a configuration of accelerate"
    file_keys = read_keys(configuration, "launch", expected)
    with convert_errors((ValueError, TypeError, KeyError), "launch", configuration, expected):
        settings = ClusterConfig.from_yaml_file(str(configuration))

    # `accelerate config` writes port 0 for any free port. In LaunchOptions, a port that is not set
    # means the same.
    if file_keys.get("main_process_port") == 0:
        del file_keys["main_process_port"]
    return settings, {
        name: file_keys[name]
        for name in LaunchOptions.model_fields
        if file_keys.get(name) is not None
    }


def _check_exit_code(code: int, process: str) -> int:
    """Return the exit code of a process, or raise ResourceError if a signal killed the process.

    Args:
        code: the exit code; for a killed process, minus the number of the signal.
        process: the name of the process, for the error.
    """
    if code >= 0:
        return code
    raise ResourceError(
        f"{process} was killed by {signal.Signals(-code).name}",
        next_step=(
            "the same command resumes from the newest checkpoint; after SIGKILL, free memory first"
        ),
    )


def _forward_signal(number: int, _frame: FrameType | None) -> None:
    """Pass a signal on to the child processes of this process, except a Ctrl-C in a terminal.

    A Ctrl-C is the signal SIGINT. The terminal sends it to this process and to the children itself,
    so they would get the signal twice.

    Args:
        number: the number of the signal.
    """
    import psutil

    if number == signal.SIGINT and _is_in_foreground():
        return
    for child in psutil.Process().children():
        child.send_signal(number)


def _is_in_foreground() -> bool:
    """Return whether this process runs in the foreground of a terminal.

    If so, the terminal sends the SIGINT of a Ctrl-C to this process and to its children.
    """
    # The process group in the foreground of the terminal is the one that gets its SIGINT.
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # The process has no terminal.
        return False
