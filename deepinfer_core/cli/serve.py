"""``deepinfer serve``: the OpenAI-compatible HTTP server over one model, with the built-in page at ``/``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import evolve

from deepinfer_core.cli import options
from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_core.assemble import RunningModel
    from deepinfer_core.engine.engine import Engine


def command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or GGUF file.", show_default=False)] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless the config says so.", show_default=False)
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default=False)] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API key; or set DEEPINFER_API_KEY.", show_default=False, metavar="FILE"),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model.", show_default=False)
    ] = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KvMemory = None,
    policy: options.Policy = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    no_prefill_decode_overlap: options.NoOverlap = False,
    trace: options.Trace = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, until Ctrl-C or SIGTERM.

    Example: deepinfer serve models/m --port 8000 --max-model-len 4096

    Then open http://127.0.0.1:8000 in a browser, or point any OpenAI client at http://127.0.0.1:8000/v1. Memory is
    budgeted as deepinfer plan prints it: without --max-model-len the context shrinks to what fits, and a line says so.
    """
    from deepinfer_core.config import load_config

    given: dict[str, object] = {
        "server.host": host,
        "server.port": port,
        "server.api_key_file": None if api_key_file is None else str(api_key_file),
        "server.served_model_name": served_model_name,
    }
    overrides = options.overrides(
        sets=sets,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        policy=policy,
        dtype=dtype,
        device=device,
        backend=backend,
        no_prefill_decode_overlap=no_prefill_decode_overlap,
    )
    resolved = load_config(config, overrides | {key: value for key, value in given.items() if value is not None})
    if model is not None:
        resolved = evolve(resolved, config=evolve(resolved.config, model=model))
    if not resolved.config.model:
        raise ConfigError('no model was named: give a path, or model = "PATH" in the config')
    serve = _server()
    _say(f"loading {resolved.config.model} ...")
    with options.tracing(trace) as attach:
        code = serve(resolved, before_start=_before_start(attach), on_ready=_on_ready)
    if code:
        raise typer.Exit(code)


def _server() -> Callable[..., int]:
    """Return the server's `serve`.

    Raises:
        ConfigError: What it is built on is not installed.
    """
    try:
        from deepinfer_core.server.run import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("deepinfer_core"):
            raise
        raise ConfigError(
            f'serve needs {error.name}, which is not installed: pip install "deepinfer-core[server]"'
        ) from error
    return serve


def _before_start(attach: Callable[[Engine], None]) -> Callable[[RunningModel], None]:
    from deepinfer_core.cli.plan import budget_lines

    def before_start(running: RunningModel) -> None:
        attach(running.engine)
        for line in budget_lines(running.budget, running.config):
            _say(line)

    return before_start


def _on_ready(url: str) -> None:
    _say(f"listening on {url}: a chat page at {url}/, the API at {url}/v1; Ctrl-C ends it")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
