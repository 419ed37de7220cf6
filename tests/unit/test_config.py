"""The config: strict about keys, types and sizes; flags over file over defaults, each value with its origin."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest

from deepinfer_core.cli.config import toml_lines
from deepinfer_core.config import Config, LinearConfig, load_config, locate
from deepinfer_core.config_parsing import parse_size, toml_text
from deepinfer_core.errors import ConfigError
from deepinfer_core.registry.choice import LinearChoice

EXAMPLE = Path(__file__).parents[2] / "deepinfer.example.toml"

DESIGN_EXAMPLE = """
model = "models/qwen2.5-3b-w4"
[linear.w4a16]
backend = "w4a16"
kernels = { "2..8" = "w4a16.batch_tile_gemv" }
allow_experimental = false
[attention]
backend = "paged"
kv_dtype = "int8"
[scheduler]
policy = "slo"
[scheduler.options]
tpot_p95_ms = 50
max_itl_ms = 120
[cache]
max_model_len = 4096
memory = "1.2GiB"
page_size = 16
[plugins]
disable = []
strict = false
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deepinfer.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_designed_example_is_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, DESIGN_EXAMPLE)).config
    assert config.model == "models/qwen2.5-3b-w4"
    assert config.linear["w4a16"].kernels == {"2..8": "w4a16.batch_tile_gemv"}
    assert (config.attention.backend, config.attention.kv_dtype) == ("paged", "int8")
    assert (config.scheduler.policy, config.scheduler.options) == ("slo", {"tpot_p95_ms": 50, "max_itl_ms": 120})
    assert (config.cache.max_model_len, config.cache.memory) == (4096, 1288490188)


def test_the_shipped_example_is_read_and_mentions_every_key() -> None:
    resolved = load_config(EXAMPLE)
    text = EXAMPLE.read_text(encoding="utf-8")
    for path, _, _ in resolved.rows():
        assert f"{path[-1]} = " in text or f"[{'.'.join(path)}]" in text, path


def test_the_shipped_example_changes_no_default_but_what_it_says() -> None:
    config = load_config(EXAMPLE).config
    plain = attrs.evolve(config, model=None, linear={}, cache=attrs.evolve(config.cache, max_model_len=None))
    assert plain == load_config().config


def test_nothing_given_is_all_defaults() -> None:
    resolved = load_config()
    assert resolved.config == Config()
    assert {origin for _, _, origin in resolved.rows()} == {"default"}


UNKNOWN: dict[str, tuple[str, str]] = {
    "top level": ('modle = "x"', "unknown key 'modle' in the config; did you mean 'model'"),
    "section": ("[schedular]\n", "unknown key 'schedular' in the config; did you mean 'scheduler'"),
    "in a section": ("[cache]\npage_sise = 16", "unknown key 'page_sise' in [cache]; did you mean 'page_size'"),
    "in a scheme": ('[linear.w4a16]\nbackand = "x"', "unknown key 'backand' in [linear.w4a16]; did you mean 'backend'"),
    "in the wrong section": ('policy = "slo"', "unknown key 'policy' in the config; it belongs under [scheduler]"),
    "of another section": (
        '[cache]\nkv_dtype = "int8"',
        "unknown key 'kv_dtype' in [cache]; it belongs under [attention]",
    ),
}


@pytest.mark.parametrize(("text", "expected"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_key_is_an_error_with_file_and_nearest(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{path}: unknown key")
    assert caught.value.exit_code == 2


WRONG: dict[str, tuple[str, str]] = {
    "number for text": ("model = 3", "model: expected text, got 3"),
    "text for number": (
        '[cache]\npage_size = "16"',
        'cache.page_size: expected a whole number of at least 1, got "16"',
    ),
    "fraction": ("[cache]\npage_size = 16.5", "cache.page_size: expected a whole number of at least 1, got 16.5"),
    "zero": ("[scheduler]\nmax_requests = 0", "scheduler.max_requests: expected a whole number of at least 1, got 0"),
    "boolean for number": (
        "[cache]\npage_size = true",
        "cache.page_size: expected a whole number of at least 1, got true",
    ),
    "text for boolean": ('[plugins]\nstrict = "no"', 'plugins.strict: expected true or false, got "no"'),
    "number for boolean": ("batch_invariant = 1", "batch_invariant: expected true or false, got 1"),
    "dtype": ('dtype = "fp16"', "dtype: unknown value \"fp16\"; did you mean 'float16'"),
    "device": ('device = "cude"', "device: unknown value \"cude\"; did you mean 'cuda'"),
    "kv dtype": ('[attention]\nkv_dtype = "int4"', "attention.kv_dtype: unknown value \"int4\"; did you mean 'int8'"),
    "size": ('[cache]\nmemory = "1.2GiX"', "cache.memory: expected a size such as 384MiB or 1.2GiB"),
    "size of the wrong type": ("[cache]\nmemory = 1.5", "cache.memory: expected a size"),
    "table": ("cache = 3", "cache: expected a table, got 3"),
    "table of a scheme": ('[linear]\nw4a16 = "x"', 'linear.w4a16: expected a table, got "x"'),
    "pins": ('[linear.w4a16]\nkernels = "x"', 'linear.w4a16.kernels: expected a table, got "x"'),
    "a pin": ("[linear.w4a16]\nkernels = { 1 = 2 }", "linear.w4a16.kernels.1: expected text, got 2"),
    "list": ('[plugins]\ndisable = "x"', 'plugins.disable: expected a list such as ["name"], got "x"'),
    "in a list": ("[plugins]\ndisable = [3]", "plugins.disable.0: expected text, got 3"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_a_wrong_type_is_an_error_with_file_key_value_and_what_is_right(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}: {expected}" in str(caught.value)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = 'modle = "x"\ndtype = "fp8"\n[cache]\npage_size = 0\n[plugins]\ndisable = 3\n'
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for part in ("modle", "dtype", "cache.page_size", "plugins.disable"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"model = ", "not valid TOML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[a\n", "not valid TOML"),
        (None, "no such config"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, content: bytes | None, cause: str
) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=cause) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_directory_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbfmodel = "x"\n')
    assert load_config(path).config.model == "x"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.2GiB", 1288490188), ("384MiB", 384 << 20), ("384 MiB", 384 << 20), ("2GB", 2 * 10**9), ("1kB", 1000),
        ("64KiB", 65536), ("1TiB", 1 << 40), ("100B", 100), ("100", 100), (4096, 4096), ("1gib", 1 << 30),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1.2.3GiB",
        "0",
        "0MiB",
        "1 G i B",
        "nan",
        "1e3",
        -1,
        0,
        True,
        1.5,
        None,
        "9" * 400,
        "9" * 20 + "TiB",
        10**30,
    ],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_a_flag_does_not_hide_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache: expected a table, got 3"):
        load_config(write(tmp_path, "cache = 3"), {"cache.page_size": "8"})


def test_a_count_beyond_32_bits_is_named() -> None:
    with pytest.raises(ConfigError, match=r"page_size: expected .* at most 2147483647, got 9999999999"):
        load_config(None, {"cache.page_size": 9999999999})


def test_memory_and_reserve_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory and reserve exclude each other"):
        load_config(write(tmp_path, '[cache]\nmemory = "1GiB"\nreserve = "1GiB"\n'))


def test_a_chunk_above_the_token_limit_is_an_error_only_when_it_was_asked_for() -> None:
    assert load_config(None, {"scheduler.max_batched_tokens": 64}).config.scheduler.prefill_chunk_tokens == 64
    with pytest.raises(ConfigError, match=r"flag: .*prefill_chunk_tokens = 512 is more than max_batched_tokens = 64"):
        load_config(None, {"scheduler.max_batched_tokens": 64, "scheduler.prefill_chunk_tokens": 512})


# Flags


def test_flags_win_over_the_file_and_origins_say_so(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN_EXAMPLE)
    resolved = load_config(path, {"cache.page_size": "32", "scheduler.policy": "mixed", "attention.backend": None})
    assert (resolved.config.cache.page_size, resolved.config.scheduler.policy) == (32, "mixed")
    assert resolved.config.attention.backend == "paged"
    assert resolved.origins["cache.page_size"] == "flag"
    assert resolved.origins["cache.max_model_len"] == f"file {path}"
    assert resolved.origins["cache.reserve"] == "default"


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("model", "a/b", "a/b"),
        ("model", "3", "3"),
        ("batch_invariant", "true", True),
        ("batch_invariant", True, True),
        ("dtype", "bfloat16", "bfloat16"),
        ("cache.page_size", "32", 32),
        ("cache.page_size", 32, 32),
        ("cache.memory", "384MiB", 384 << 20),
        ("cache.memory", "1048576", 1 << 20),
        ("plugins.disable", "a,b", ("a", "b")),
        ("plugins.disable", '["a", "b"]', ("a", "b")),
        ("plugins.disable", ["a"], ("a",)),
        ("scheduler.options", {"x": 1}, {"x": 1}),
        ("scheduler.options.tpot_p95_ms", "50", {"tpot_p95_ms": 50}),
        ("scheduler.options.name", "fast", {"name": "fast"}),
        ("linear.w4a16.kernels.2..8", "w4a16.x", {"2..8": "w4a16.x"}),
        ("linear.w4a16.kernels", '{ "9.." = "w4a16.y" }', {"9..": "w4a16.y"}),
        ("linear.w4a16.backend", "acme", "acme"),
        ("linear.acme.w5.strict", "true", True),
        ("scheduler.prefill_decode_overlap", "false", False),
    ],
)
def test_every_key_is_a_flag(key: str, given: object, value: object) -> None:
    resolved = load_config(None, {key: given})
    rows = {".".join(path): (found, origin) for path, found, origin in resolved.rows()}
    name = next(name for name in rows if key == name or key.startswith(f"{name}."))
    assert rows[name] == (value, "flag")


def test_every_row_of_the_config_can_be_given_as_a_flag() -> None:
    resolved = load_config(EXAMPLE)
    flags: dict[str, object] = {".".join(path): value for path, value, _ in resolved.rows()}
    assert load_config(None, flags).config == resolved.config


def test_a_pin_from_a_flag_joins_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN_EXAMPLE)
    resolved = load_config(path, {"linear.w4a16.kernels.9..": "w4a16.tiled"})
    assert resolved.config.linear["w4a16"].kernels == {"2..8": "w4a16.batch_tile_gemv", "9..": "w4a16.tiled"}
    assert resolved.origins["linear.w4a16.kernels"] == f"file {path}, flag"


def test_a_sections_mapping_joins_dotted_keys_beside_it_in_any_order() -> None:
    section = {"max_requests": 3, "options": {"max_itl_ms": 100}}
    dotted = {"scheduler.policy": "slo", "scheduler.options.tpot_p95_ms": 50}
    for flags in ({**dotted, "scheduler": section}, {"scheduler": section, **dotted}):
        resolved = load_config(None, flags)
        scheduler = resolved.config.scheduler
        assert (scheduler.policy, scheduler.max_requests) == ("slo", 3)
        assert scheduler.options == {"max_itl_ms": 100, "tpot_p95_ms": 50}
        assert resolved.origins["scheduler.max_requests"] == resolved.origins["scheduler.policy"] == "flag"
        assert resolved.origins["scheduler.max_batched_tokens"] == "default"


def test_a_sections_mapping_leaves_the_rest_of_the_files_section_alone(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN_EXAMPLE)
    schemes = {"w4a16": {"strict": True}, "acme.w5": {"backend": "acme"}}
    resolved = load_config(path, {"cache": {"page_size": 32, "memory": None}, "linear": schemes, "scheduler": {}})
    config = resolved.config
    assert (config.cache.max_model_len, config.cache.page_size, config.cache.memory) == (4096, 32, None)
    assert config.linear["w4a16"] == LinearConfig(
        backend="w4a16", kernels={"2..8": "w4a16.batch_tile_gemv"}, strict=True
    )
    assert config.linear["acme.w5"].backend == "acme"
    assert config.scheduler.policy == "slo"
    assert resolved.origins["cache.page_size"] == "flag"
    assert resolved.origins["cache.max_model_len"] == f"file {path}"


def test_options_given_whole_replace_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN_EXAMPLE)
    resolved = load_config(path, {"scheduler": {"options": {"ttft_ms": 900}}})
    assert resolved.config.scheduler.options == {"ttft_ms": 900}
    assert resolved.origins["scheduler.options"] == "flag"


@pytest.mark.parametrize("cache", [{"page_sise": 1}, {"page_size": "16"}, {1: 2}])
def test_a_wrong_key_in_a_sections_mapping_is_an_error_that_names_it(cache: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"flag: .*(page_sise|page_size|'1')"):
        load_config(None, {"cache": cache})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cache.page_sise", "1", "did you mean 'page_size'"),
        ("page_size", "1", "it belongs under [cache]"),
        ("cache.page_size.x", "1", "is a single value"),
        ("cache.page_size", "many", 'flag: cache.page_size: expected a whole number of at least 1, got "many"'),
        ("linear.w4a16.backand", "x", "unknown key 'backand' in [linear.w4a16]; did you mean 'backend'"),
        ("linear.w4a16", "x", 'flag: linear.w4a16: expected a table, got "x"'),
        ("", "x", "an empty key"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_it(key: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {key: value})
    assert expected in str(caught.value)
    assert "flag" in str(caught.value)


def test_locate_keeps_dots_in_schemes_and_ranges() -> None:
    assert locate("linear.acme.w5.kernels.2..8")[0] == ("linear", "acme.w5", "kernels", "2..8")


# What others read from it


def test_plugins_strict_makes_every_scheme_strict() -> None:
    config = load_config(None, {"plugins.strict": True, "linear.w4a16.backend": "acme"}).config
    assert config.linear_for("w4a16") == LinearConfig(backend="acme", strict=True)
    assert config.linear_for("w3a16") == LinearConfig(strict=True)


def test_a_scheme_table_becomes_a_choice_for_selection() -> None:
    config = load_config(None, {"linear.w4a16.kernels.2..8": "w4a16.x", "linear.w4a16.allow_experimental": True}).config
    assert LinearChoice.from_settings(config.linear_for("w4a16")) == LinearChoice(
        kernels={"2..8": "w4a16.x"}, allow_experimental=True
    )


def test_what_config_show_prints_reads_back_to_the_same_config(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "linear.acme.w5.kernels.2..8": 'odd "name"',
        "linear.w4a16.backend": "back\\slash\n",
        "scheduler.options": {"nested": {"a b": [1, 2.5, True]}},
        "cache.memory": "1.2GiB",
        "plugins.disable": ["x"],
    }
    resolved = load_config(None, flags)
    text = "\n".join(toml_lines(resolved))
    tomllib.loads(text)
    assert load_config(write(tmp_path, text)).config == resolved.config


def test_toml_text_of_what_is_not_set() -> None:
    assert toml_text(None) == "unset"
