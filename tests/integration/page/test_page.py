"""The built-in page in a real browser: it streams, it draws, it can be driven by keys, and text is never markup."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from deepinfer_core.server.page import ASSETS, HEADERS

from .conftest import StandIn, engine_status, look

EVIL = (
    '<img src=x onerror="window.broken=1"><script>window.broken=1</script> `<b>x</b>`\n'
    '```html\n<iframe src="https://example.com"></iframe>\n```\n[a](javascript:window.broken=1)'
)


def wait(page: Chrome, done: Callable[[], Any], seconds: float = 10) -> Any:
    return WebDriverWait(page, seconds, poll_frequency=0.05).until(lambda _: done())


def text(page: Chrome, selector: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def say(page: Chrome, message: str) -> None:
    wait(page, lambda: text(page, "#state-text") == "ready")
    page.find_element(By.ID, "message").send_keys(message + Keys.ENTER)


def answers(page: Chrome) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll('.turn.assistant .words')].map((e) => e.textContent)"
    )
    return found


def errors(page: Chrome) -> list[str]:
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def test_an_answer_streams_and_says_what_it_took(page: Chrome, stand_in: StandIn) -> None:
    stand_in.pieces, stand_in.pause = [f"w{i} " for i in range(20)], 0.05
    say(page, "Count")
    wait(page, lambda: answers(page) and answers(page)[0].startswith("w0 w1"))
    assert len(answers(page)[0]) < len("".join(stand_in.pieces)), "seen before the whole answer is there"
    wait(page, lambda: "20 tokens," in text(page, ".cost"))
    assert answers(page) == ["".join(stand_in.pieces)]
    assert "first token after" in text(page, ".cost")
    assert errors(page) == []


def test_the_conversation_and_the_settings_are_sent(page: Chrome, stand_in: StandIn) -> None:
    wait(page, lambda: text(page, "#state-text") == "ready")
    page.find_element(By.ID, "open-settings").click()
    page.find_element(By.ID, "system").send_keys("Be brief.")
    temperature = page.find_element(By.ID, "temperature")
    temperature.clear()
    temperature.send_keys("0")
    page.find_element(By.ID, "max-tokens").send_keys("50")
    page.find_element(By.CSS_SELECTOR, "dialog button[value=done]").click()
    for number, message in enumerate(["Hi", "And again"], 1):
        say(page, message)
        wait(page, lambda n=number: len(page.find_elements(By.CSS_SELECTOR, ".cost")) == n)
    asked = stand_in.asked[1]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "And again"},
    ]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("tiny", 0, 50)
    page.find_element(By.ID, "new-chat").click()
    say(page, "New")
    wait(page, lambda: len(stand_in.asked) == 3)
    assert [m["role"] for m in stand_in.asked[2]["messages"]] == ["system", "user"]


def test_text_of_a_model_is_never_markup(page: Chrome, stand_in: StandIn) -> None:
    stand_in.pieces = [EVIL[i : i + 7] for i in range(0, len(EVIL), 7)]
    say(page, EVIL)
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".cost"))
    tags = page.execute_script(
        "return [...new Set([...document.querySelectorAll('.words *')].map((e) => e.tagName.toLowerCase()))].sort()"
    )
    assert tags == ["code", "pre"]
    assert page.execute_script("return window.broken") is None
    assert '<img src=x onerror="window.broken=1">' in answers(page)[0]
    assert text(page, ".turn.assistant pre code") == '<iframe src="https://example.com"></iframe>'
    assert errors(page) == []


def test_escape_stops_an_answer_and_the_server_hears_of_it(page: Chrome, stand_in: StandIn) -> None:
    stand_in.pieces, stand_in.pause = ["on "] * 500, 0.02
    say(page, "Go")
    wait(page, lambda: answers(page) and len(answers(page)[0]) > 6)
    assert page.find_element(By.ID, "stop").is_displayed()
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page, lambda: "stopped" in text(page, ".cost"))
    wait(page, lambda: stand_in.dropped == 1)
    assert page.find_element(By.ID, "send").is_displayed()
    assert page.execute_script("return document.activeElement.id") == "message"


def test_a_refusal_is_shown_as_the_server_puts_it(page: Chrome, stand_in: StandIn) -> None:
    stand_in.refuse = "the prompt has <b>9000</b> tokens; shorten it"
    say(page, "Long")
    wait(page, lambda: text(page, ".problem"))
    assert text(page, ".problem") == stand_in.refuse
    assert page.find_element(By.CSS_SELECTOR, ".problem").get_attribute("role") == "alert"
    stand_in.refuse = None
    say(page, "Short")
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".cost"))
    assert [m["content"] for m in stand_in.asked[-1]["messages"]] == ["Short"], "what was refused is not sent again"


def test_the_api_key_is_asked_for_kept_in_memory_and_sent(page: Chrome, stand_in: StandIn) -> None:
    stand_in.key = "sesame"
    wait(page, lambda: text(page, "#state-text") == "needs an API key")
    assert not page.find_element(By.ID, "send").is_enabled()
    page.find_element(By.ID, "open-settings").click()
    page.find_element(By.ID, "key").send_keys("sesame" + Keys.ENTER)
    say(page, "Hi")
    wait(page, lambda: answers(page) == ["Hello there."])
    kept = page.execute_script("return [document.cookie, localStorage.length, sessionStorage.length]")
    assert kept == ["", 0, 0]


def test_live_figures_follow_the_status(page: Chrome, stand_in: StandIn) -> None:
    wait(page, lambda: 60 < float(text(page, "#rate") or 0) < 160)
    wait(page, lambda: text(page, ".lane .head b") == "50%", 15)
    assert text(page, "#ttft") == "120 ms"
    assert text(page, "#tpot95") == "21 ms"
    assert text(page, "#pool") == "25"
    assert [text(page, f"#pool-{name}") for name in ("used", "cached", "total")] == ["50", "40", "200"]
    assert page.find_element(By.ID, "pool-meter").get_attribute("aria-valuenow") == "25"
    assert [text(page, f"#{name}") for name in ("running", "waiting", "done")] == ["3", "1", "5"]
    names = page.execute_script("return [...document.querySelectorAll('.lane .head span')].map((e) => e.textContent)")
    assert names == ["decode", "prefill"]
    chart = page.find_element(By.CSS_SELECTOR, "#plot-ttft svg")
    assert chart.get_attribute("aria-label") == "Time to first token, last two minutes: p50 120 ms, p95 310 ms"
    points = page.execute_script("return document.querySelector('#plot-rate .line').getAttribute('d')")
    assert points.count("L") >= 1
    assert errors(page) == []


def test_odd_figures_are_written_right(page: Chrome, stand_in: StandIn) -> None:
    latency = {
        "ttft_seconds": {"count": 1, "p50": 0.5, "p95": 12.3456},
        "tpot_seconds": {"count": 0},
    }
    stand_in.status = lambda: engine_status(0, latency=latency, prefill_decode_overlap=False)
    wait(page, lambda: text(page, "#ttft") == "500 ms")
    assert text(page, "#ttft95") == "12.35 s"
    assert text(page, "#tpot") == "\u2013"
    assert text(page, "#policy") == "policy dual_stream, no overlap"


def test_a_loading_server_is_waited_for(page: Chrome, stand_in: StandIn) -> None:
    stand_in.state = "loading"
    page.refresh()
    wait(page, lambda: text(page, "#state-text") == "loading")
    page.find_element(By.ID, "message").send_keys("Hi")
    assert not page.find_element(By.ID, "send").is_enabled()
    stand_in.state = "ready"
    wait(page, lambda: page.find_element(By.ID, "send").is_enabled())


def test_keys_alone_are_enough(page: Chrome) -> None:
    wait(page, lambda: text(page, "#state-text") == "ready")
    reached = []
    page.execute_script("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    for _ in range(14):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.execute_script("return document.activeElement.id || document.activeElement.className"))
        outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == "message", f"{reached[-1]} does not show that it has the focus"
        if reached[-1] == "message":
            break
    assert reached == ["skip", "new-chat", "open-settings", "theme", "log", "starter", "starter", "starter", "message"]
    page.execute_script("document.activeElement.blur()")
    page.find_element(By.TAG_NAME, "body").send_keys("/")
    assert page.execute_script("return [document.activeElement.id, document.activeElement.value]") == ["message", ""]
    page.switch_to.active_element.send_keys("two" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "lines")
    assert page.execute_script("return document.activeElement.value") == "two\nlines"


def test_everything_that_can_be_used_has_a_name(page: Chrome) -> None:
    nameless = page.execute_script(
        "return [...document.querySelectorAll('button, input, textarea, [role]:not([role=status])')].filter((e) =>"
        " !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute('aria-labelledby')))"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []
    assert page.execute_script("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True])
def test_words_can_be_read_in_both_colours(page: Chrome, dark: bool) -> None:
    """Every text has at least the contrast that WCAG AA asks of body text, 4.5 to 1."""
    look(page, width=1280, height=800, dark=dark)
    say(page, "Hi `code`")
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".cost"))
    time.sleep(0.6)  # transitions
    poor = page.execute_script(CONTRAST)
    assert poor == []
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 22, 20)" if dark else "rgb(246, 245, 242)")


CONTRAST = r"""
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function light([r, g, b]) {
  const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}
function ground(element) {
  for (let e = element; e; e = e.parentElement) {
    const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] > 250) return c;
  }
  return [255, 255, 255];
}
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
  if (element.closest("dialog, .skip, script, noscript, :disabled, .top")) continue;
  const a = light(rgba(getComputedStyle(element).color)), b = light(ground(element));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push(`${walker.currentNode.textContent.trim()}: ${ratio.toFixed(2)}`);
}
return poor;
"""


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_nothing_runs_out_of_the_window(page: Chrome, stand_in: StandIn, width: int) -> None:
    stand_in.pieces = ["x" * 500, "\n```\n", "y" * 400, "\n```\n"]
    look(page, width=width, height=800, dark=False)
    say(page, "z" * 300)
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".cost"))
    wide = page.execute_script(
        "return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()"
        " && !e.closest('pre, .hidden, .skip') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map((e) => e.className || e.tagName)"
    )
    assert wide == []
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_the_theme_button_goes_over_the_system(page: Chrome) -> None:
    grounds = []
    for _ in range(3):
        page.find_element(By.ID, "theme").click()
        grounds.append(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 245, 242)", "rgb(21, 22, 20)", "rgb(246, 245, 242)"]
    assert text(page, "#theme-name") == "Auto"


def test_only_the_pages_own_files_are_served_with_a_strict_policy(stand_in: StandIn) -> None:
    for path in ["/", *(f"/page/{name}" for name in ASSETS if name != "index.html")]:
        answer = httpx.get(stand_in.url + path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert "'unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ["/page/index.html", "/page/nothing.js", "/page/..%2fpage.py", "/page/%2e%2e/app.py"]:
        assert httpx.get(stand_in.url + path).status_code == 404


def test_no_file_of_the_page_asks_anything_of_outside() -> None:
    import deepinfer_core.server

    folder = Path(deepinfer_core.server.__file__).parent / "page"
    assert {file.name for file in folder.iterdir()} == set(ASSETS)
    for file in folder.iterdir():
        content = file.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert "http:" not in content, file
        assert "https:" not in content, file
        assert "innerHTML" not in content, file
        assert " style=" not in content, file
