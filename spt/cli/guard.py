"""How a command starts and ends: option groups, several processes, and errors as one sentence with an exit code."""

import contextlib
import errno
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import typer

from spt.cli import streams
from spt.cli.options import RuntimeOptions, smoke_size
from spt.cli.output import notify, results_only, wrapped
from spt.errors import (
    BackendError,
    Interrupted,
    OutputError,
    SptError,
    Stopped,
    UsageError,
    displayable,
    hide_secrets,
    one_line,
)
from spt.runtime import launch
from spt.runtime.progress import forward_messages
from spt.runtime.signals import stop_error


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose errors are one sentence and an exit code; `--debug` shows the traceback instead.

    A parameter whose annotation is a NamedTuple of options stands for all of them; with `RuntimeOptions`, the command
    can run as several processes.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature, groups = _signature(function)
        runs = RuntimeOptions in groups.values()

        @wraps(function)
        def guarded(**options: Any) -> None:
            debug = bool(options.get("debug")) or os.environ.get("SPT_DEBUG", "") not in ("", "0")
            for option, variable in (("data_dir", "SPT_DATA_DIR"), ("workers", "SPT_WORKERS")):
                if options.get(option) is not None:
                    os.environ[variable] = str(options[option])
            out = options.get("out")
            for name, group in groups.items():
                options[name] = group(**{field: options.pop(field) for field in group._fields})
            try:
                _check_places(out)
                with forward_messages(notify):
                    if runs and _hand_over(options):
                        return
                    with results_only() if _option(options, "as_json") else contextlib.nullcontext():
                        function(**options)
                launch.leave_group()
            except (SptError, Stopped) as error:
                _fail(str(error), error.exit_code, debug, alone=not getattr(error, "known_to_all", False))
            except KeyboardInterrupt:
                _fail(str(stop_error(signal.SIGINT)), Interrupted.exit_code, debug)
            except (typer.Exit, typer.Abort):
                raise
            except OSError as error:
                if isinstance(error, BrokenPipeError) and streams.reader_has_left():  # `spt … | head`
                    streams.discard()
                    launch.leave_group(patience=10)
                    raise typer.Exit(0) from None
                if error.errno == errno.ENAMETOOLONG:
                    _fail(f"the name {error.filename} is too long for this system", UsageError.exit_code, debug)
                where = error.filename or "standard output or a file"
                _fail(f"cannot use {where}: {error.strerror or error}", OutputError.exit_code, debug)
            except SystemExit as error:
                _fail(f"the code of a task or a model called sys.exit({error.code!r})", UsageError.exit_code, debug)
            except Exception as error:
                if _is_lost_peer(error):
                    _fail(
                        "another process of this run has ended", BackendError.exit_code, debug, quiet=launch.is_child()
                    )
                if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding() != "utf-8":
                    name = displayable(str(error.object)[:200])  # of a file, which this locale cannot name
                    why = f"{name!r} has characters that are not in this locale's encoding, {error.encoding}"
                    _fail(f"{why}; set PYTHONUTF8=1, or a locale with UTF-8", UsageError.exit_code, debug)
                if (refused := _refused_variable(error)) is not None:
                    why = f"the variable {refused} is {displayable(os.environ[refused])!r}, which a library refuses"
                    _fail(f"{why} ({one_line(error)}); correct it, or unset it", UsageError.exit_code, debug)
                who = f" (process {launch.rank()} of {launch.world_size()})" if launch.world_size() > 1 else ""
                text = f"a bug in spt{who}: {one_line(error)} (repeat with --debug for the traceback)"
                _fail(text, 1, debug, alone=True)

        guarded.__signature__ = signature  # type: ignore[attr-defined]
        guarded.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        guarded.__doc__ = _in_paragraphs(function.__doc__ or "")
        return group.command(name)(guarded)

    return decorate


def _signature(function: Callable[..., None]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A command's signature with its groups of options written out, and the groups by parameter."""
    given = inspect.signature(function, eval_str=True)
    groups = {name: p.annotation for name, p in given.parameters.items() if hasattr(p.annotation, "_field_defaults")}
    parameters = [p for p in given.parameters.values() if p.name not in groups]
    for group in groups.values():
        known = inspect.get_annotations(group, eval_str=True)
        parameters += [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=known[field])
            for field, default in group._field_defaults.items()
        ]
    for parameter in parameters:
        for info in getattr(parameter.annotation, "__metadata__", ()):
            if hasattr(info, "readable"):  # what cannot be read is our sentence and code, not click's
                info.readable = False
    ordered = sorted(parameters, key=lambda p: p.kind)
    return given.replace(parameters=ordered), groups


def _in_paragraphs(text: str) -> str:
    """The docstring with one line for each paragraph: Typer keeps the line breaks of all but the first."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _check_places(out: object) -> None:
    """Refuse a folder that neither JSON nor safetensors could name, before anything is trained for it, and to work in
    one that is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the folder in which this command was started does not exist any more; change to another"
        ) from None
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UsageError(f"--out {out} is not a name in UTF-8; choose another") from None


def _hand_over(options: dict[str, Any]) -> bool:
    """Where several processes are asked for and none was started: start them, and end as process 0 does."""
    runtime: RuntimeOptions = options["runtime"]
    launch.check_request(runtime.num_processes, runtime.accelerate_config)
    if not launch.needs_launch(runtime.num_processes, runtime.accelerate_config):
        return False
    from spt.api import load_recipe
    from spt.config.overrides import split_arguments

    sources, overrides = split_arguments(options.get("arguments", []))
    smoke = smoke_size(bool(_option(options, "smoke")), bool(_option(options, "smoke_full")))
    with contextlib.redirect_stdout(sys.stderr):
        for source in sources:  # what is wrong with them is said once; data are prepared while nobody waits
            load_recipe(source, overrides, smoke=smoke)
    code = launch.relaunch(runtime.num_processes, runtime.accelerate_config, sys.argv[1:])
    if code:
        raise typer.Exit(code)
    return True


def _option(options: dict[str, Any], name: str) -> Any:
    """An option's value, whether it stands alone or in a group."""
    return next((getattr(value, name) for value in options.values() if hasattr(value, name)), options.get(name))


def _is_lost_peer(error: BaseException) -> bool:
    runtime = sys.modules.get("spt.runtime.distributed")  # without it, no process has met another
    return runtime is not None and bool(runtime.is_lost_peer(error))


def _refused_variable(error: Exception) -> str | None:
    """The variable that a library reads while it is imported or starts, and whose value its complaint quotes."""
    told = str(error).lower() if isinstance(error, ValueError) else ""
    read = [name for name in os.environ if name.startswith(("ACCELERATE_", "TORCH")) or name == "SOURCE_DATE_EPOCH"]
    return next((name for name in read if len(os.environ[name]) > 2 and os.environ[name].lower() in told), None)


def _fail(message: str, code: int, debug: bool = False, alone: bool = False, quiet: bool = False) -> NoReturn:
    """End with a sentence and a code.

    Of several processes the first one speaks; where something has happened to one `alone`, that one does, and the
    others, which notice that it is gone, keep quiet.
    """
    several = launch.world_size() > 1
    if several:
        # The launcher stops all processes as soon as one of them has failed; this one is ending as it should.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = not quiet and launch.leave_code(code, message) if alone or launch.rank() == 0 else False
    if debug:
        print(hide_secrets(traceback.format_exc()), end="", file=sys.stderr)
    if first and not (launch.is_child() and code in (Stopped.exit_code, Interrupted.exit_code)):  # its parent says it
        print(wrapped(f"spt: {displayable(hide_secrets(message))}", sys.stderr), file=sys.stderr, flush=True)
    if several and launch.rank() > 0:
        launch.wait_for_code(1.0)  # the launcher ends all processes with the first: let process 0 say what happened
    raise typer.Exit(code)
