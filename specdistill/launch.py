"""`specdistill train … launch=NAME`: the script in several processes, started by accelerate's own launcher.

A name is a file of `accelerate_configs/`, which the wheel carries. What is refused here would otherwise start processes that fail one by
one, or wait for each other. The exit code is that of the process that failed first. SIGTERM and SIGINT reach every process; in a terminal's
foreground a single process gets SIGINT from Ctrl-C itself, so it is not passed on.
"""

import logging
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from specdistill.errors import ExitCode, ResourceError, UserError, logger, refusing
from specdistill.files.documents import read_keys
from specdistill.project import LAUNCHES, ROOT, find_yaml
from specdistill.recipe.fields import ReadWhen, Section, option
from specdistill.recipe.load import validate

LAUNCHED = ReadWhen("with launch=…", lambda it: it.launch is not None)


class LaunchOptions(Section):
    launch: str | None = option(
        None,
        "run in several processes: a name under accelerate_configs/ (e.g. ddp) or a YAML file; null: in this process",
    )
    num_processes: int | None = option(
        None,
        "processes on all machines, one per GPU; null: as in the configuration",
        ge=1,
        read_when=LAUNCHED,
    )
    num_machines: int | None = option(
        None, "number of machines; null: the configuration's", ge=1, read_when=LAUNCHED
    )
    machine_rank: int | None = option(
        None, "rank of this machine, from 0", ge=0, read_when=LAUNCHED
    )
    main_process_ip: str | None = option(None, "address of machine 0", read_when=LAUNCHED)
    main_process_port: int | None = option(
        None,
        "rendezvous port; null: the configuration's, else any free port on one machine, 29500 on several",
        ge=1,
        le=65535,
        read_when=LAUNCHED,
    )


def run_script(script: str, arguments: list[str], options: LaunchOptions | None = None) -> int:
    """Run one of the project's scripts as if by `python script arguments`; its own exit code ends this process."""
    if options and options.launch is not None:
        return launch(ROOT / script, arguments, options)
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return ExitCode.DONE


def launch(script: Path, arguments: Sequence[str], options: LaunchOptions) -> int:
    """Run `accelerate launch`; returns the exit code. Raises UserError for what cannot be started, ResourceError for a killed process."""
    from accelerate.commands.launch import (
        launch_command,
        launch_command_parser,
    )  # here, and not above: these import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    configuration = find_yaml(str(options.launch), LAUNCHES, "launch")
    given = options.model_dump(exclude={"launch"}, exclude_none=True)
    launching = _checked(configuration, given)
    flags = [
        f"--config_file={configuration}",
        *(f"--{name}={value}" for name, value in launching.items()),
    ]
    command = [*flags, str(script), *arguments]
    logger.info(f"$ accelerate launch {shlex.join(command)}")
    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # its messages are replaced by those below
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # for several processes torch sets handlers of its own; for one nobody does
        signal.signal(number, _forward)
    try:
        launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(failure.exitcode, f"process {rank}")
    except subprocess.CalledProcessError as error:
        return _exit_code(error.returncode, "the process")
    except SignalException as error:
        return 128 + error.sigval
    return ExitCode.DONE


def check_devices(num_processes: int, key: str) -> None:
    """Raises UserError for more processes on this machine than it has GPUs; without one they share its cores."""
    import torch

    devices = torch.cuda.device_count()
    if 0 < devices < num_processes:
        got = f"{num_processes} processes on a machine with {devices} GPU{'s' * (devices > 1)}"
        raise UserError(key, got=got, expected=f"at most {devices} on each machine")


def _checked(configuration: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What accelerate is told in addition to its configuration. Raises UserError for processes that cannot start, or could not meet."""
    from accelerate.utils import DistributedType, is_deepspeed_available, is_port_in_use

    settings, named = _read(configuration)
    if settings.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        expected = "DeepSpeed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
        raise UserError("launch", got=f"{configuration.stem} without DeepSpeed", expected=expected)
    chosen = validate(
        LaunchOptions, {"launch": str(configuration), **named, **given}, f"{configuration}: "
    )
    processes, machines = chosen.num_processes or settings.num_processes, chosen.num_machines or 1
    if processes < 1:
        raise UserError(
            "num_processes",
            got=f"nothing with {configuration}, which names none",
            expected="their number",
        )
    if processes % machines:
        raise UserError(
            "num_processes",
            got=f"{processes} on {machines} machines",
            expected="as many on each machine",
        )
    check_devices(processes // machines, "num_processes")
    for name in ("machine_rank", "main_process_ip"):
        if machines == 1 and name in given:
            raise UserError(name, got=given[name], expected="no such key, or num_machines above 1")
        if machines > 1 and getattr(chosen, name) is None:
            what = LaunchOptions.model_fields[name].description
            raise UserError(
                name, got=f"nothing with {machines} machines", expected=f"a value ({what})"
            )
    rank = (chosen.machine_rank or 0) if machines > 1 else 0
    if rank >= machines:
        raise UserError(
            "machine_rank", got=rank, expected=f"below {machines}, the number of machines"
        )
    port = chosen.main_process_port or (29500 if machines > 1 else 0)  # 0: any that is free
    if port and rank == 0 and is_port_in_use(port):
        expected = "a free port, the same on every machine"
        raise UserError(
            "main_process_port",
            got=f"{port}, which another program on this machine uses",
            expected=expected,
        )
    return {**given, "main_process_port": port}


def _read(configuration: Path) -> tuple[Any, dict[str, Any]]:
    """accelerate's view of its configuration, and which of our keys the file names itself. Raises UserError for what accelerate refuses."""
    from accelerate.commands.config.config_args import ClusterConfig

    expected = "a configuration of accelerate"
    own = read_keys(configuration, "launch", expected)
    with refusing((ValueError, TypeError, KeyError), "launch", configuration, expected):
        settings = ClusterConfig.from_yaml_file(str(configuration))
    if own.get("main_process_port") == 0:  # accelerate's word for any that is free
        del own["main_process_port"]
    return settings, {
        name: own[name] for name in LaunchOptions.model_fields if own.get(name) is not None
    }


def _exit_code(code: int, process: str) -> int:
    if code >= 0:
        return code
    next_step = (
        "the same command resumes from the newest checkpoint; SIGKILL mostly means: free memory"
    )
    raise ResourceError(
        f"{process} was killed by {signal.Signals(-code).name}", next_step=next_step
    )


def _forward(number: int, _frame: FrameType | None) -> None:
    """Pass a signal on to this process's children, except a terminal's Ctrl-C, which reaches them anyway."""
    import psutil

    if number == signal.SIGINT and _in_foreground():
        return
    for child in psutil.Process().children():
        child.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C goes to this process and those that it has started."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False
