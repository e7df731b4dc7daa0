"""The command `jaxpar-launch`: from a command line to a `LaunchSpec`, and from its outcome to an exit code.

    [JAXPAR_... variables as options]  [options]  script  [arguments, untouched]
    <-------------- argparse -------------------> <---------- verbatim ---------->

Names and meanings are torchrun's (rows 10.1); what this version does not do is refused, not ignored.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jaxpar_launch._agent import run_agent
from jaxpar_launch._devices import num_gpus, resolve_workers
from jaxpar_launch._dry_run import dry_run_text
from jaxpar_launch._errors import LaunchSpecError, RendezvousError
from jaxpar_launch._help import HELP
from jaxpar_launch._rdzv_spec import rendezvous_of
from jaxpar_launch._spec import DEFAULT_PREFIX, RECOVERIES, LaunchSpec
from jaxpar_launch._streams import StreamChoice
from jaxpar_launch.env import inherited_environ, option_from_environ

_CHECK = "jaxpar.debug._preflight"  # a worker as any other; the launcher itself knows no jax
_MEETING = ("nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code (see `--help`).

    Example:
        >>> main(["--nproc-per-node", "0", "--no-python", "true"])
        2
    """
    try:
        options, command = _parse(list(sys.argv[1:] if argv is None else argv))
        if options.help:
            print(HELP, end="")
            return 0
        spec = _spec(options, command)
        if options.dry_run:
            print(dry_run_text(spec, inherited_environ()))
            return 0
        outcome = run_agent(spec, secret=option_from_environ("--rdzv-token"))
    except (LaunchSpecError, RendezvousError) as error:
        print(f"jaxpar-launch: {error}", file=sys.stderr)
        return error.exit_code
    if outcome.report:
        print(outcome.report, file=sys.stderr, flush=True)
    return outcome.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchSpecError(f"{message.removeprefix('argument ')} (see jaxpar-launch --help)")


def _parser() -> _Parser:
    # A formatter that knows its width never imports shutil to ask the terminal: some milliseconds of every start.
    formatter = functools.partial(argparse.HelpFormatter, width=100)
    parser = _Parser(add_help=False, allow_abbrev=False, formatter_class=formatter)
    add = parser.add_argument
    add("--nproc-per-node", default="1")
    add("--devices-per-proc", type=_number(int, "4"))
    add("-m", "--module", action="store_true")
    add("--no-python", action="store_true")
    add("--run-path", action="store_true")
    add("--start-method", choices=("spawn",), default="spawn")
    add("--role", default="default")
    for name in _MEETING:
        add(f"--{name}")
    add("--master-addr")
    add("--master-port", type=_number(int, "29500"))
    add("--standalone", action="store_true")
    add("--log-dir")
    add("-r", "--redirects", default="0")
    add("-t", "--tee")
    add("--local-ranks-filter", default="")
    add("--log-line-prefix-template", default=DEFAULT_PREFIX)
    add("--grace-period", type=_number(float, "30"), default=30.0)
    add("--failure-grace-period", type=_number(float, "1"), default=1.0)
    add("--max-restarts", type=_number(int, "3"), default=0)
    add("--recover", choices=RECOVERIES, default="restart")
    add("--recover-timeout", type=_number(float, "10"), default=10.0)
    add("--hang-timeout", type=_number(float, "600"))
    add("--health-check-port", type=_number(int, "8080"))
    add("--compilation-cache-dir")
    add("--monitor-interval", type=_number(float, "0.1"), default=0.1)
    add("--dry-run", action="store_true")
    add("--check", action="store_true")
    add("-h", "--help", action="store_true")
    return parser


def _number(kind: type[int] | type[float], example: str) -> Callable[[str], int | float]:
    def convert(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number of seconds"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}; write for example {example}") from None

    return convert


def _parse(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Splits the launcher's options from the script and its arguments, and parses the former."""
    parser = _parser()
    is_switch = {name: action.nargs == 0 for action in parser._actions for name in action.option_strings}
    own, rest = [], list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        flag, equals, value = token.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag not in is_switch:
            raise LaunchSpecError(_unknown(flag, list(is_switch)))
        if not equals and not is_switch[flag] and rest:
            equals, value = "=", rest.pop(0)
        # "--flag=value" in one token: argparse takes a separate value that begins with a dash for an option.
        own += [flag + equals + value] if flag.startswith("--") else [flag, value][: 1 + bool(equals)]
    return parser.parse_args(_from_environ(is_switch) + own), tuple(rest)


def _from_environ(is_switch: dict[str, bool]) -> list[str]:
    """The options that came as variables, as tokens; a switch is on unless its variable says 0, false or no."""
    tokens = []
    for flag, switch in is_switch.items():
        value = option_from_environ(flag) if flag.startswith("--") else None
        if value and not switch:
            tokens.append(f"{flag}={value}")
        elif value and value.lower() not in ("0", "false", "no"):
            tokens.append(flag)
    return tokens


def _unknown(flag: str, flags: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(flag, flags, n=1)
    hint = f"Did you mean {near[0]}?" if near else "See jaxpar-launch --help."
    return f"there is no option {flag}. {hint} Options of the script stand after its name."


def _spec(options: argparse.Namespace, command: tuple[str, ...]) -> LaunchSpec:
    if options.module and options.no_python:
        raise LaunchSpecError(
            "-m and --no-python exclude each other: a module needs Python. Leave one of them out."
        )
    if options.run_path and (options.module or options.no_python):
        raise LaunchSpecError("--run-path means a Python script: leave out -m and --no-python.")
    if options.standalone and (options.master_addr or options.master_port or options.rdzv_endpoint):
        raise LaunchSpecError(
            "--standalone means this host and a free port: leave out --master-addr, --master-port and --rdzv-endpoint."
        )
    if options.check and command:
        raise LaunchSpecError(f"--check starts no script: leave {command[0]!r} out.")
    inherited = inherited_environ()
    meeting = _meeting(options, inherited)
    rendezvous = rendezvous_of(meeting)
    nproc, platform = resolve_workers(options.nproc_per_node, inherited)
    redirects = StreamChoice.parse(options.redirects, flag="--redirects")
    # Whoever names a folder for logs wants logs, unless the choice is made by hand.
    tee = options.tee or ("3" if options.log_dir and not redirects else "0")
    return LaunchSpec(
        command=(_CHECK,) if options.check else command,
        kind="module" if options.module or options.check else "program" if options.no_python else "script",
        nproc=nproc,
        platform=platform,
        devices_per_proc=options.devices_per_proc,
        num_gpus=num_gpus(inherited) if platform == "gpu" else 0,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port,
        rendezvous=rendezvous,
        run_id=meeting["rdzv_id"] or "none",
        role=options.role,
        grace_s=options.grace_period,
        failure_grace_s=options.failure_grace_period,
        max_restarts=options.max_restarts,
        recover=options.recover,
        recover_timeout_s=options.recover_timeout,
        hang_timeout_s=options.hang_timeout,
        health_check_port=options.health_check_port,
        monitor_interval_s=options.monitor_interval,
        log_dir=options.log_dir,
        redirects=redirects,
        tee=StreamChoice.parse(tee, flag="--tee"),
        local_ranks_filter=_ranks(options.local_ranks_filter),
        log_line_prefix_template=options.log_line_prefix_template,
        compilation_cache_dir=options.compilation_cache_dir,
    )


def _meeting(options: argparse.Namespace, inherited: Mapping[str, str]) -> dict[str, str | None]:
    """The options that say where other hosts are met; from Slurm if it is asked, or if nothing else is said."""
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in _MEETING}
    by_hand = {name: value for name, value in given.items() if value and name not in ("rdzv_conf", "rdzv_id")}
    is_asked = options.rdzv_backend == "slurm"
    if is_asked or not (by_hand or options.standalone or options.master_addr):
        from jaxpar_launch._slurm import is_step_of_several_nodes, slurm_meeting

        if is_asked and (said := sorted(by_hand.keys() - {"rdzv_backend", "local_addr"})):
            raise LaunchSpecError(
                f"--rdzv-backend slurm takes --{said[0].replace('_', '-')} from Slurm: leave it out, or leave the backend out."
            )
        if is_asked or is_step_of_several_nodes(inherited):
            found = slurm_meeting(inherited)
            return given | found | {"rdzv_backend": None, "rdzv_id": given["rdzv_id"] or found["rdzv_id"]}
    return given | {"master_addr": options.master_addr, "master_port": options.master_port}


def _ranks(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise LaunchSpecError(
            f"--local-ranks-filter {text} is not a list of local ranks, as in --local-ranks-filter 0,1."
        )
    return tuple(int(part) for part in text.split(","))
