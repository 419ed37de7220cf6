"""The config: a TOML file, overridden key by key by flags, checked strictly, every value with its origin."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import cattrs
from attrs import field, frozen
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote

from deepinfer_core.config_parsing import Bytes, Port, Positive, converter, from_flag, toml_text
from deepinfer_core.errors import ConfigError, nearest


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@frozen(kw_only=True)
class LinearConfig:
    """``[linear.<scheme>]``: what serves the layers of one weight scheme.

    Attributes:
        backend: A linear backend's name, or ``"auto"``.
        kernels: Pins: range of M -> kernel name; they fix the layout for every M.
        allow_experimental: Experimental kernels may be chosen without being named.
        strict: What no kernel serves is an error; core's fallback does not fill it.
    """

    backend: str = "auto"
    kernels: Mapping[str, str] = field(factory=_empty)
    allow_experimental: bool = False
    strict: bool = False


@frozen(kw_only=True)
class AttentionConfig:
    """``[attention]``: backend by name, and the dtype of stored keys and values (``auto``: that of activations)."""

    backend: str = "auto"
    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "int8"] = "auto"


@frozen(kw_only=True)
class SchedulerConfig:
    """``[scheduler]``: the policy by name, its options, and what one step may hold.

    Attributes:
        policy: A scheduling policy's name, or ``"auto"``.
        options: Keys of the policy's own.
        prefill_chunk_tokens: Prompt tokens of one chunk.
        max_batched_tokens: Most tokens of one step; also the largest M that kernels are chosen for.
        max_requests: Most requests admitted at once.
        prefill_decode_overlap: False: one lane, one work after another.
    """

    policy: str = "auto"
    options: Mapping[str, Any] = field(factory=_empty)
    prefill_chunk_tokens: Positive = 512
    max_batched_tokens: Positive = 2048
    max_requests: Positive = 64
    prefill_decode_overlap: bool = True


@frozen(kw_only=True)
class CacheConfig:
    """``[cache]``: context length and KV memory.

    Attributes:
        max_model_len: Longest context of one request in tokens; None: the model's own.
        memory: Bytes of the KV cache; None: what is free, less ``reserve``.
        reserve: Bytes to leave free on the card; on a CPU, of the memory of the machine.
        page_size: Tokens of one page.
        prefix_cache: Keep full pages of finished requests for prompts that begin alike.
    """

    max_model_len: Positive | None = None
    memory: Bytes | None = None
    reserve: Bytes | None = None
    page_size: Positive = 16
    prefix_cache: bool = True


@frozen(kw_only=True)
class PluginsConfig:
    """``[plugins]``: what is not loaded, and whether what fails stops the start.

    Attributes:
        disable: Names of plugins or distributions.
        strict: A plugin that was held back is an error; so is a gap between kernels, for every scheme.
    """

    disable: tuple[str, ...] = ()
    strict: bool = False


@frozen(kw_only=True)
class ServerConfig:
    """``[server]``: where the HTTP server listens, who may use it, and what a client may take of it.

    Attributes:
        host: Address to listen on; the default takes connections from this machine alone.
        port: Its port; 0 takes any that is free.
        served_model_name: What clients call the model; None: the last part of its path.
        api_key_file: File whose text is the API key; None: the environment's DEEPINFER_API_KEY, or no key.
        cors_origins: Origins whose web pages may use the server, such as ``http://localhost:3000``.
        grace_seconds: How long running requests may go on after the server was told to stop.
        max_queue: Answers that may wait, beside those in work; more are refused with 429.
        max_body: Bytes of one request.
        max_choices: Most answers of one request: prompts times ``n`` or ``best_of``.
        max_stop: Most stop strings of one request.
        read_timeout_seconds: How long a client may take to send its request.
        write_timeout_seconds: How long a client may leave a piece of an answer unread.
        log_format: Lines of text, or of JSON.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    served_model_name: str | None = None
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    grace_seconds: Positive = 10
    max_queue: Positive = 256
    max_body: Bytes = 8 << 20
    max_choices: Positive = 256
    max_stop: Positive = 32
    read_timeout_seconds: Positive = 20
    write_timeout_seconds: Positive = 30
    log_format: Literal["text", "json"] = "text"


@frozen(kw_only=True)
class Config:
    """Everything that a config file can say; "auto" is resolved into a new object when the engine is assembled.

    Attributes:
        model: Directory of a checkpoint or a GGUF file, relative to the working directory.
        dtype: Dtype of activations.
        device: Where it runs.
        batch_invariant: Compute every token by itself, so that a request's tokens do not depend on its neighbours.
        linear: Weight scheme -> `LinearConfig`.
        attention: See `AttentionConfig`.
        scheduler: See `SchedulerConfig`.
        cache: See `CacheConfig`.
        plugins: See `PluginsConfig`.
        server: See `ServerConfig`.
    """

    model: str | None = None
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_invariant: bool = False
    linear: Mapping[str, LinearConfig] = field(factory=_empty)
    attention: AttentionConfig = field(factory=AttentionConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    plugins: PluginsConfig = field(factory=PluginsConfig)
    server: ServerConfig = field(factory=ServerConfig)

    def linear_for(self, scheme: str) -> LinearConfig:
        """Return what holds for a scheme, ``[plugins] strict`` included; ``LinearChoice.from_settings`` takes it."""
        mine = self.linear.get(scheme, LinearConfig())
        return attrs.evolve(mine, strict=mine.strict or self.plugins.strict)


@frozen(kw_only=True)
class ResolvedConfig:
    """A config and where each value came from.

    Attributes:
        config: The values.
        origins: Dotted key -> ``"default"``, ``"file PATH"`` or ``"flag"``, or the last two
            joined, for every key of `rows` and every scheme's table.
    """

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[tuple[str, ...], Any, str]]:
        """Yield (path of the key, value, origin) in the order of the classes; pins and options are one value each."""
        for path, value in _leaves(self.config, ()):
            yield path, value, self.origins[_dotted(path)]

    def describe(self, key: str) -> str:
        """Return how an error names a value: ``deepinfer.toml: scheduler.policy = "slo"``."""
        for path, value, origin in self.rows():
            name = _dotted(path)
            if key == name or key.startswith(f"{name}."):
                return f"{origin.removeprefix('file ')}: {name} = {toml_text(value)}"
        return f"{self.origins.get(key, 'default').removeprefix('file ')}: [{key}]"


def load_config(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> ResolvedConfig:
    """Read a TOML file and put flags over it.

    Args:
        path: The file; None for defaults and flags alone.
        overrides: Dotted key (``"linear.w4a16.kernels.2..8"``) -> value. Text is read as TOML where the key does not
            hold text; None means that the flag was not given. A mapping for a section stands for the keys in it: it
            joins other flags and leaves the rest of the file's section alone. A mapping for pins or options is their
            whole value, which dotted keys below it join.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value has a wrong type or form. All faults are
            listed, each with file or flag, key, value, and what would be right.
    """
    given = _read(Path(path)) if path is not None else {}
    in_file = deepcopy(given)
    flagged: set[str] = set()
    for target, value in _flags(overrides or {}):
        _assign(given, target, value)
        flagged.add(_dotted(target))

    def origin(key: str) -> str:
        flag = any(key == f or key.startswith(f"{f}.") or f.startswith(f"{key}.") for f in flagged)
        whole = any(key == f or key.startswith(f"{f}.") for f in flagged)
        file = path is not None and not whole and _holds(in_file, key)
        return ", ".join([f"file {path}"] * file + ["flag"] * flag) or "default"

    data, faults = _shaped(given, Config, "")
    try:
        config = converter().structure(data, Config)
    except cattrs.BaseValidationError as error:
        config = Config()
        faults += _faults(error, "")
    config = _fitted(config, asked_for_chunk=origin("scheduler.prefill_chunk_tokens") != "default")
    faults += _contradictions(config)
    if faults:
        lines = [f"{origin(key).removeprefix('file ')}: {text}" for key, text in faults]
        raise ConfigError("\n".join(lines))
    keys = [_dotted(p) for p, _ in _leaves(config, ())] + [f"linear.{scheme}" for scheme in config.linear]
    return ResolvedConfig(config=config, origins={key: origin(key) for key in keys})


def locate(key: str) -> tuple[tuple[str, ...], Any]:
    """Return the path of a dotted key and its declared type; a scheme or a range of M in it may hold dots.

    Raises:
        ConfigError: There is no such key.
    """
    if not key:
        raise ConfigError("flag: an empty key was given a value; write it like cache.page_size")
    path: tuple[str, ...] = ()
    hint: Any = Config
    rest = key
    while rest:
        if attrs.has(hint):
            name, _, rest = rest.partition(".")
            hints = get_type_hints(hint, include_extras=True)
            if name not in hints:
                raise ConfigError(f"flag: {_unknown(hint, name, _dotted(path))}")
            path, hint = (*path, name), hints[name]
        elif get_origin(hint) is Mapping:
            hint = get_args(hint)[1]
            name = rest
            if attrs.has(hint):
                known = "|".join(a.name for a in attrs.fields(hint))
                match = re.match(rf"(.+?)\.(?=(?:{known})(?:\.|$))", rest)
                name = match[1] if match else rest.rpartition(".")[0] or rest
            path, rest = (*path, name), rest[len(name) + 1 :]
        else:
            raise ConfigError(f"flag: {key!r} goes below {_dotted(path)!r}, which is a single value")
    return path, hint


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _flags(overrides: Mapping[str, object]) -> list[tuple[tuple[str, ...], object]]:
    """Return path and value of every key that is given, in the order to assign them: a whole before its parts."""
    found: list[tuple[tuple[str, ...], object]] = []
    for key, value in overrides.items():
        if value is not None:
            path, hint = locate(key)
            found += _keys_in(path, hint, from_flag(value, hint))
    return sorted(found, key=lambda flag: len(flag[0]))


def _keys_in(path: tuple[str, ...], hint: Any, value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield path and value of each key in a section's mapping; a key that does not exist is for `_faults` to name."""
    hints = get_type_hints(hint, include_extras=True) if attrs.has(hint) else {}
    sections = get_origin(hint) is Mapping and attrs.has(get_args(hint)[1])
    if not isinstance(value, Mapping) or not (hints or sections):
        yield path, value
        return
    for name, inner in value.items():
        below = get_args(hint)[1] if sections else hints.get(name)
        yield from _keys_in((*path, str(name)), below, inner)


def _assign(data: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    """Put a value below tables, which are copied; what is no table there stays, for the checks to name."""
    table = data
    for name in path[:-1]:
        below = table.get(name, {})
        if not isinstance(below, Mapping):
            return
        table[name] = below = dict(below)
        table = below
    table[path[-1]] = value


def _holds(data: Mapping[str, Any], key: str) -> bool:
    try:
        path, _ = locate(key)
    except ConfigError:
        return True  # an unknown key stands somewhere, and flags were checked before
    table: Any = data
    for name in path:
        if not isinstance(table, Mapping) or name not in table:
            return False
        table = table[name]
    return True


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if attrs.has(type(value)):
        for attribute in attrs.fields(type(value)):
            yield from _leaves(getattr(value, attribute.name), (*path, attribute.name))
    elif path == ("linear",):
        for scheme, settings in value.items():
            yield from _leaves(settings, (*path, scheme))
    else:
        yield path, value


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _shaped(data: Any, hint: Any, path: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return the data without what is no table or list where one belongs, and a fault for each such value."""
    faults: list[tuple[str, str]] = []
    shaped: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{path}.{name}" if path else name
        below: Any = get_type_hints(hint, include_extras=True).get(name) if attrs.has(hint) else get_args(hint)[1]
        table = attrs.has(below) or get_origin(below) is Mapping
        if table and not isinstance(value, Mapping):
            faults.append((key, f"{key}: expected a table, got {toml_text(value)}"))
        elif get_origin(below) is tuple and not isinstance(value, list | tuple):
            faults.append((key, f'{key}: expected a list such as ["name"], got {toml_text(value)}'))
        elif table:
            shaped[name], inside = _shaped(value, below, key)
            faults += inside
        else:
            shaped[name] = value
    return shaped, faults


def _fitted(config: Config, *, asked_for_chunk: bool) -> Config:
    """Let the default chunk follow a token limit that is smaller."""
    scheduler = config.scheduler
    if asked_for_chunk or scheduler.prefill_chunk_tokens <= scheduler.max_batched_tokens:
        return config
    return attrs.evolve(config, scheduler=attrs.evolve(scheduler, prefill_chunk_tokens=scheduler.max_batched_tokens))


def _contradictions(config: Config) -> Iterator[tuple[str, str]]:
    cache, scheduler = config.cache, config.scheduler
    if cache.memory is not None and cache.reserve is not None:
        yield "cache.reserve", "[cache] memory and reserve exclude each other; set one"
    if scheduler.prefill_chunk_tokens > scheduler.max_batched_tokens:
        yield (
            "scheduler.prefill_chunk_tokens",
            f"[scheduler] prefill_chunk_tokens = {scheduler.prefill_chunk_tokens} is more than "
            f"max_batched_tokens = {scheduler.max_batched_tokens}; lower the one or raise the other",
        )


def _unknown(cls: type, name: str, path: str) -> str:
    fields = [a.name for a in attrs.fields(cls)]
    where = f"[{path}]" if path else "the config"
    sections = {n: c for n, c in get_type_hints(Config).items() if attrs.has(c)}
    homes = [section for section, c in sections.items() if name in {a.name for a in attrs.fields(c)}]
    hint = f"it belongs under [{homes[0]}]" if homes and homes[0] != path else nearest(name, fields)
    return f"unknown key {name!r} in {where}; {hint}"


def _faults(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every leaf of cattrs' tree of errors."""
    if isinstance(error, ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield (f"{path}.{name}" if path else name), _unknown(error.cl, name, path)
    elif isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            notes = getattr(inner, "__notes__", ())
            names = [n.name for n in notes if isinstance(n, AttributeValidationNote)]
            names += [str(n.index) for n in notes if isinstance(n, IterableValidationNote)]
            yield from _faults(inner, ".".join([*([path] if path else []), *names[:1]]))
    else:
        yield path, f"{path}: {error}"
