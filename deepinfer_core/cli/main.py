"""The ``deepinfer`` command: its subcommands, its errors and its exit codes."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deepinfer_core import __version__
from deepinfer_core.cli.interrupts import EXIT_CODE as INTERRUPTED
from deepinfer_core.cli.interrupts import WORD, Remembered
from deepinfer_core.cli.options import CONFIG_EPILOG, dotted_to_set
from deepinfer_core.errors import DeepinferError

COMMANDS = (
    "generate", "chat", "serve", "quantize", "eval", "plan", "explain", "tune", "bench", "plugins", "config", "doctor",
)  # fmt: skip
"""Modules of this package in the order of ``--help``; each has a ``command`` function, or an ``app`` of several."""

TOP_EPILOG = (
    "To begin: deepinfer doctor, then deepinfer quantize MODEL.gguf models/m --recipe w4, then deepinfer chat models/m."
    "\n\nExit codes: 0 done, 1 error, 2 wrong flag or config, 3 plugin, 4 nothing serves what was asked, 5 model "
    "files, 6 kernel, 7 does not fit, 8 a request failed, 130 Ctrl-C. docs/cli.md has every command with an example."
)


def build_app() -> typer.Typer:
    """Return the command line with every subcommand; no module of it imports torch before its command runs."""
    app = typer.Typer(
        name="deepinfer",
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Quantized LLM inference assembled from plugins by name.",
        epilog=TOP_EPILOG,
    )
    app.callback()(_top)
    for name in COMMANDS:
        module = import_module(f"deepinfer_core.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            takes_config = "sets" in signature(module.command).parameters
            app.command(name, epilog=CONFIG_EPILOG if takes_config else None)(module.command)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0, the `exit_code` of the error that was printed, 2 for wrong flags, 130 after Ctrl-C.
    """
    _never_fail_to_print()

    def run() -> None:
        build_app()(args=dotted_to_set(sys.argv[1:] if argv is None else argv), prog_name="deepinfer")

    with Remembered() as ctrl_c:
        try:
            return _guarded(run)
        except Exception:
            if not ctrl_c.happened:
                raise
            print(WORD, file=sys.stderr)  # an import that was interrupted can fail with anything
            return INTERRUPTED


def _guarded(run: Callable[[], object]) -> int:
    try:
        run()
    except DeepinferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(WORD, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `deepinfer explain | head`
        sys.stdout = io.TextIOWrapper(io.BytesIO())
        return 1
    except OSError as error:  # what no module turned into an error of ours: mostly output that cannot be written
        print(f"the system refused: {error}", file=sys.stderr)
        sys.stdout = io.TextIOWrapper(io.BytesIO())  # what is still buffered would fail once more at the end
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


class _Commands(TyperGroup):
    """Runs a command so that our errors leave it as exit codes, before typer turns Ctrl-C into code 1."""

    def invoke(self, ctx: Any) -> Any:
        code = _guarded(lambda: super(_Commands, self).invoke(ctx))
        if code:
            raise SystemExit(code)
        return None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"deepinfer {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is chosen, and why.")] = False,
) -> None:
    """Quantized LLM inference assembled from plugins by name."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log = logging.getLogger("deepinfer")
    log.handlers = [handler]
    log.setLevel(logging.INFO if verbose else logging.WARNING)


def _never_fail_to_print() -> None:
    """Replace what a console's encoding cannot show (Windows code pages) instead of stopping in the middle."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
