"""``deepinfer doctor``: what this machine has, and what to install next; works with torch missing too."""

from __future__ import annotations

import importlib
import json as json_text
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from attrs import asdict, frozen
from rich.markup import escape

from deepinfer_core import __version__
from deepinfer_core.cli.console import console
from deepinfer_core.cli.cuda_driver import Driver, ask_driver
from deepinfer_core.errors import DeepinferError
from deepinfer_core.kernels.cubin_cache import cache_directory
from deepinfer_core.kernels.nvrtc import nvrtc_version, toolkit_headers
from deepinfer_core.registry.discovery import Discovery, discover

Status = Literal["ok", "note", "missing"]
_COLOURS: dict[Status, str] = {"ok": "green", "note": "yellow", "missing": "red"}


@frozen(kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        what: The part of the machine.
        status: ``ok``; ``note`` for what limits but does not stop; ``missing`` for what nothing runs without.
        found: What is there.
        next: What to do about it; empty when nothing is.
    """

    what: str
    status: Status
    found: str
    next: str = ""


class NotReadyError(DeepinferError):
    """Something is missing without which no model runs."""


def command(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has and what to install next; exit code 1 when no model can run.

    Example: deepinfer doctor
    """
    findings = list(examine())
    if json:
        print(json_text.dumps([asdict(f) for f in findings], indent=2))
    else:
        out = console()
        for finding in findings:
            colour = _COLOURS[finding.status]
            out.print(f"[{colour}]{finding.status:>7}[/{colour}]  {finding.what}: {escape(finding.found)}")
            if finding.next:
                out.print(f"         next: {escape(finding.next)}")
    missing = [f.what for f in findings if f.status == "missing"]
    if missing:
        raise NotReadyError(f"not ready: {', '.join(missing)}")


def examine(
    driver: Callable[[], Driver] = ask_driver,
    load: Callable[[str], Any] = importlib.import_module,
    version_of: Callable[[str], str] = metadata.version,
    plugins: Callable[[], Discovery] = lambda: discover(quiet=True),
) -> Iterator[Finding]:
    """Yield findings, what everything rests on first.

    Args:
        driver: Asks for cards.
        load: Imports a module by name; what it raises is reported.
        version_of: Returns the version of an installed distribution.
        plugins: Finds plugins.
    """
    yield _python()
    torch, finding = _torch(load)
    yield finding
    cards = driver()
    yield from _cards(cards, torch)
    if cards.cards:
        yield _cupy(load, cards)
        yield _nvrtc()
        yield _headers()
    for name, why in (("transformers", "tokenizers"), ("safetensors", "checkpoints"), ("gguf", "GGUF files")):
        yield _library(version_of, name, why)
    yield from _plugins(plugins())
    yield _cache()


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, deepinfer-core {__version__}"
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding(what="Python", status="ok", found=found)
    return Finding(what="Python", status="note", found=found, next="3.11 to 3.13 are what deepinfer is tested on")


def _torch(load: Callable[[str], Any]) -> tuple[Any, Finding]:
    try:
        torch = load("torch")
    except (Exception, SystemExit) as error:
        step = "pip install torch (https://pytorch.org/get-started names the right build for a card)"
        return None, Finding(what="torch", status="missing", found=_cause(error), next=step)
    cuda = torch.version.cuda
    threads = torch.get_num_threads()
    found = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU only'}, {threads} CPU threads"
    return torch, Finding(what="torch", status="ok", found=found)


def _cards(driver: Driver, torch: Any) -> Iterator[Finding]:
    if not driver.cards:
        yield Finding(what="CUDA card", status="note", found=f"{driver.problem}; models run on the CPU")
        return
    for card in driver.cards:
        major, minor = card.capability
        found = f"{card.name}, compute capability {major}.{minor}, {card.memory / 2**30:.1f} GiB"
        if card.capability < (8, 0):
            step = 'deepinfer\'s CUDA kernels need 8.0 or newer; use device = "cpu"'
            yield Finding(what="CUDA card", status="note", found=found, next=step)
        else:
            yield Finding(what="CUDA card", status="ok", found=found)
    if torch is not None and not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) cannot use it"
        newest = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else "its CUDA version"
        yield Finding(
            what="torch on the card",
            status="note",
            found=f"torch {built}; the driver supports up to {newest}",
            next="install the torch build for that CUDA version: https://pytorch.org/get-started",
        )


def _cupy(load: Callable[[str], Any], driver: Driver) -> Finding:
    extra = "cuda13" if driver.cuda is not None and driver.cuda[0] >= 13 else "cuda12"
    try:
        cupy = load("cupy")
    except (Exception, SystemExit) as error:
        step = f'pip install "deepinfer-core[{extra}]"'
        return Finding(what="CuPy", status="note", found=f"{_cause(error)}; CUDA kernels need it", next=step)
    return Finding(what="CuPy", status="ok", found=str(cupy.__version__))


def _nvrtc() -> Finding:
    try:
        major, minor = nvrtc_version()
    except (Exception, SystemExit) as error:
        return Finding(what="NVRTC", status="note", found=_cause(error), next='pip install "deepinfer-core[cuda12]"')
    return Finding(what="NVRTC", status="ok", found=f"{major}.{minor}")


def _headers() -> Finding:
    try:
        paths = toolkit_headers()
    except DeepinferError as error:
        return Finding(what="CUDA headers", status="note", found=str(error))
    return Finding(what="CUDA headers", status="ok", found=", ".join(map(str, paths)))


def _library(version_of: Callable[[str], str], distribution: str, why: str) -> Finding:
    """Look at the installed version alone: importing transformers takes seconds, and nothing here needs it."""
    try:
        version = version_of(distribution)
    except metadata.PackageNotFoundError:
        found = f"not installed; it reads {why}"
        return Finding(what=distribution, status="missing", found=found, next=f"pip install {distribution}")
    return Finding(what=distribution, status="ok", found=version)


def _plugins(found: Discovery) -> Iterator[Finding]:
    if found.plugins:
        names = ", ".join(f"{p.name} ({p.distribution} {p.version})" for p in found.plugins)
        yield Finding(what="plugins", status="ok", found=names)
    for fault in found.faults:
        step = "mend or uninstall it, or name it under [plugins] disable"
        yield Finding(what="plugin fault", status="note", found=str(fault), next=step)
    schemes = sorted({s.name for p in found.plugins for b in p.backends for s in b.schemes})
    attention = sorted({a.name for p in found.plugins for a in p.attention})
    if not schemes or not attention:
        lacking = [word for word, names in (("weight scheme", schemes), ("attention backend", attention)) if not names]
        step = "pip install deepinfer-plugin-w3a16 (brings w3a16, w4a16, fp16 and the policies)"
        yield Finding(what="backends", status="missing", found=f"no {' and no '.join(lacking)}", next=step)
    else:
        found_text = f"schemes {', '.join(schemes)}; attention {', '.join(attention)}"
        yield Finding(what="backends", status="ok", found=found_text)


def _cache() -> Finding:
    directory = cache_directory()
    existing = next((p for p in (directory, *directory.parents) if p.is_dir()), Path.cwd())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(
            what="cache directory",
            status="note",
            found=f"{directory} cannot be written ({error.strerror}); kernels are compiled at every start",
            next="set DEEPINFER_CACHE_DIR to a directory that can be",
        )
    return Finding(what="cache directory", status="ok", found=str(directory))


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
