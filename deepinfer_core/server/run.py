"""``serve``: bind, answer /health, load the model beside that, serve until told to stop, drain, give all back."""

from __future__ import annotations

import gc
import importlib.util
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

from fastapi import APIRouter

from deepinfer_core.assemble import Progress, RunningModel, assemble
from deepinfer_core.config import ResolvedConfig
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.server.access import read_key
from deepinfer_core.server.app import create_app
from deepinfer_core.server.front import Front, bind, url_of
from deepinfer_core.server.requests_log import JsonLines
from deepinfer_core.server.service import ServedModel, Service

log = logging.getLogger("deepinfer.server")

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

SWITCH_SECONDS = 0.001
"""How long the engine's thread may keep the interpreter while the event loop has a token to send; Python's own 5 ms
are as long as a decode step of a small model."""

PAGE = "deepinfer_core.server.page"


def serve(
    resolved: ResolvedConfig,
    *,
    catalog: Catalog | None = None,
    progress: Progress | None = None,
    before_start: Callable[[RunningModel], None] | None = None,
    after_stop: Callable[[], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        resolved: The config; ``[server]`` says where and within which limits.
        catalog: Installed plugins; found anew when None.
        progress: Called with (parts loaded, parts in all) on the loader's thread.
        before_start: Called on the loader's thread with the loaded, warm model, before its engine runs.
        after_stop: Called when the engine has stopped.
        on_ready: Called once with the address, when requests are taken.

    Returns:
        The exit code: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        ConfigError: It cannot listen there, or the API key cannot be read.
        DeepinferError: The model cannot be loaded.
    """
    settings = resolved.config.server
    service = Service(settings)
    if settings.log_format == "json":
        for handler in logging.getLogger("deepinfer").handlers:
            handler.setFormatter(JsonLines())
    app = create_app(service, settings, _page())
    sock = bind(settings)
    url = url_of(sock)
    if not settings.host.startswith(("127.", "localhost", "::1")) and read_key(settings) is None:
        log.warning("anyone who reaches %s may use it: set [server] api_key_file, or DEEPINFER_API_KEY", url)
    front = Front(app, service, settings)
    failed: list[BaseException] = []
    engines: list[RunningModel] = []

    def load() -> None:
        try:
            running = assemble(resolved.config, catalog=catalog, progress=progress, describe=resolved.describe)
            warm_up(running)
            if before_start is not None:
                before_start(running)
            engines.append(running)
            running.engine.start()
            gc.collect()
            gc.freeze()  # what is loaded stays: the collector need not walk over it while tokens wait
            service.attach(ServedModel.of(running, settings.served_model_name))
            log.info("ready at %s", url)
            if on_ready is not None:
                on_ready(url)
        except BaseException as error:
            failed.append(error)
            front.abandon()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    threading.Thread(target=load, name="deepinfer-loader", daemon=True).start()
    try:
        front.run(sockets=[sock])
    finally:
        sys.setswitchinterval(interval)
        sock.close()
        for running in engines:
            running.engine.stop()
        if engines and after_stop is not None:
            after_stop()
    if failed:
        raise failed[0]
    return INTERRUPTED if front.stopped_by == signal.SIGINT else 0


def warm_up(running: RunningModel) -> None:
    """Run what every request will run once, so that the first client does not wait for it.

    On a card, prompts of several lengths: each kernel of the dispatch tables is loaded by the first M that it serves.
    """
    engine = running.engine
    lengths = [4]
    if running.place.device.type == "cuda":
        lengths += [1, 16, 64, engine.limits.prefill_chunk_tokens]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    longest = engine.limits.max_model_len - 2
    handles = [engine.submit([0] * min(length, longest), params) for length in lengths if longest > 0]
    engine.drive(lambda: all(handle.done for handle in handles))
    for handle in handles:
        handle.result(timeout=0)


def _page() -> Sequence[APIRouter]:
    """Return the built-in page's routes, where this installation has them."""
    if importlib.util.find_spec(PAGE) is None:
        return ()
    return (import_module(PAGE).page_router(),)
