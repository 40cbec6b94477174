"""The page in a real browser: seen, used by keyboard, kept apart by tenant, closed to other sites; `make browser`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from adapters.openai.loopback import serving
from architecture.sources import PACKAGE_PARENTS
from pagedcore import AsyncEngine
from pagedcore.cli.demo_web import Pause
from pagedcore_openai import ApiKeys, openai_app
from support.async_helpers import SlowBackend, wait_until
from support.engine_builders import make_engine
from support.letters import WritesLetters

# Why no skip: `make test` reads this file without the library and runs nothing of it; `make browser` must not pass so.
if find_spec("playwright") is not None:
    from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.browser
CHROMIUM = "/usr/bin/chromium"
PICTURES = Path(__file__).resolve().parents[3] / "build" / "browser"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ONE, TWO, ADMIN = "key-of-tenant-one", "key-of-tenant-two", "key-of-the-operator"
HOSTILE = "<img src=x onerror=\"window.wasHurt = 1\"><script>window.wasHurt = 1</script>&amp;"
PATIENCE_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium without a window; its user is root on a build machine, which its sandbox refuses."""
    # Why RenderDocument is off: with it, closing a page beside its reload never returns (playwright issue 42068).
    words = ["--host-resolver-rules=MAP evil.example 127.0.0.1", "--disable-features=RenderDocument",
             *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        yield found
        found.close()


@contextmanager
def visit(browser: Browser, url: str, *, is_quiet: bool = True, **how: Any) -> Iterator[Page]:
    """Open a page in a profile of its own; in its console is no error if it ``is_quiet``, and all it asks for is of its
    own server."""
    errors: list[str] = []
    settings: Any = {"viewport": {"width": 1360, "height": 900}, "color_scheme": "light", **how}
    with browser.new_context(**settings) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(url.partition("#")[0]) else errors.append(one.url))
        page.goto(url)
        yield page
        assert not is_quiet or errors == []
        assert not [error for error in errors if error.startswith("http") or "Content Security" in error]


@pytest.fixture(scope="module")
def pause() -> Pause:
    """How long a step of the demo model takes at least."""
    return Pause(0.02)


@pytest.fixture(scope="module")
def demo(pause: Pause) -> Iterator[str]:
    """The demo model, slow enough to be watched, with fewer rows and blocks than many requests want.

    Without guesses: an answer that another test has had already would come in one step.
    """
    with (AsyncEngine.from_pretrained("demo", num_kv_blocks=24, block_size=16, max_num_seqs=12, max_num_waiting=256,
                                      speculation="off", plugins=[pause]) as engine,
          serving(openai_app(engine, name="demo", hosts=LOOPBACK, origins=(), page=True)) as url):
        yield f"{url}/"


class Scribe(WritesLetters):
    """Writes markup that would run if a page took it for markup: a piece for each token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a token for each letter."""
        return [ord(letter) % 26 for letter in text][:20]

    def encode_chat(self, messages: Any) -> list[int]:
        """Return the tokens of the last message."""
        return self.encode(messages[-1]["content"])

    def decode(self, token_ids: Any) -> str:
        """Return the markup, for the first tokens."""
        return HOSTILE * len(token_ids)


class Endless(SlowBackend):
    """A slow toy that never ends by itself."""

    eos_token_ids = frozenset()


@contextmanager
def toy(**options: Any) -> Iterator[tuple[str, Any]]:
    """A toy model behind the page; yield its address and the app."""
    with AsyncEngine(make_engine(Endless(), tokenizer=Scribe(), num_kv_blocks=400, max_num_seqs=8)) as engine:
        app = openai_app(engine, name="toy", hosts=LOOPBACK, origins=(), page=True, **options)
        with serving(app) as url:
            yield f"{url}/", app


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def colours_of(page: Page, name: str) -> int:
    """Count the pixels of the timeline that have a colour of the style sheet."""
    count: int = page.evaluate("""(name) => {
        const canvas = document.getElementById("timeline");
        const probe = document.createElement("canvas").getContext("2d");
        probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
        probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return count;
    }""", name)
    return count


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_visitor_sees_forty_requests_share_the_batch(
    browser: Browser, demo: str, pause: Pause, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened as the demo opens it, the page asks forty questions: rows fill up, the queue says why it waits, bars are
    drawn, figures appear, and the answers that can be checked are right."""
    # Why: what is looked at lasts for ten seconds, however late a browser beside other work is.
    monkeypatch.setattr(pause, "_seconds", 0.2)
    with visit(browser, f"{demo}#demo=40", color_scheme=scheme) as page:
        expect(page.locator("#lead")).to_contain_text(re.compile(r"^\d+ of 12 rows busy, \d+ requests? waits?\."))
        expect(page.locator("#queue tbody tr").first).to_contain_text(re.compile(r"a row|memory blocks"))
        expect(page.locator("#queue-summary")).to_contain_text("wait for")
        page.locator("#rows-summary").click()
        expect(page.locator("#rows tbody tr").nth(5)).to_be_visible()
        expect(page.locator("#rows tbody tr").first).to_contain_text(re.compile("generates|reads|computes"))
        page.locator("#rows-summary").click()
        monkeypatch.undo()
        expect(page.locator("#ended")).to_have_text(re.compile(r"^(1[6-9]|[23]\d|40)$"))
        assert min(colours_of(page, name) for name in ("prefill", "decode", "running", "waiting")) > 50
        picture(page, scheme)
        right = re.compile(r"^40 of 40 answered, (\d+) of \1 checked ones right")
        expect(page.locator("#many-status")).to_have_text(right)
        expect(page.locator("#lead")).to_have_text("Idle. All requests have ended.")
        expect(page.locator("#ended")).to_have_text("40")
        for figure in ("#rate", "#ttft", "#itl"):
            assert re.match(r"\d", page.inner_text(figure))
        assert page.locator("#answers li").count() == 40


def test_a_chat_streams_and_remembers(browser: Browser, demo: str) -> None:
    """The answer is right and comes in several pieces; it is announced when it is whole; a new chat begins empty."""
    with visit(browser, demo) as page:
        page.evaluate("""() => {
            window.lengths = new Set();
            const note = () => window.lengths.add(document.querySelector(".turn.assistant p")?.textContent.length);
            const log = document.getElementById("log");
            new MutationObserver(note).observe(log, {subtree: true, childList: true, characterData: true});
        }""")
        page.get_by_label("Message").fill("Please list the numbers from 12 to 19.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
        answer = page.locator(".turn.assistant p")
        expect(answer).to_have_text("12, 13, 14, 15, 16, 17, 18, 19.")
        expect(page.locator("#log")).not_to_have_attribute("aria-busy", "true")
        assert len(page.evaluate("[...window.lengths]")) >= 3
        page.get_by_label("Message").fill("What is 2 + 3?")
        page.get_by_label("Message").press("Enter")
        expect(answer.nth(1)).to_have_text("2 + 3 = 5.")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)


def test_all_of_it_works_by_keyboard(browser: Browser, demo: str) -> None:
    """Tab reaches every control in order, each shows that it has the focus; the first one leads to the chat, where
    Enter sends; a details opens by Enter."""
    with visit(browser, demo) as page:
        expect(page.locator("#connection")).to_have_text("live")
        reached = []
        for _ in range(9):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
            style, width = page.evaluate("""() => {
                const {outlineStyle, outlineWidth} = getComputedStyle(document.activeElement);
                return [outlineStyle, parseFloat(outlineWidth)];
            }""")
            assert style != "none", reached
            assert width >= 2, reached
        assert reached == ["Skip to the chat", "model", "rows-summary", "ask-many", "The questions, one per line",
                           "log", "message", "send", "clear"]
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.keyboard.type("What is 2 + 3?")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.assistant p")).to_have_text("2 + 3 = 5.")
        page.locator("#rows-summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#rows")).to_be_visible()


CONTRASTS = """() => {
    const light = ([r, g, b]) => {
        const linear = (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
        const [x, y, z] = [r, g, b].map((one) => linear(one / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgb = (colour) => {
        probe.clearRect(0, 0, 1, 1);
        probe.fillStyle = colour;
        probe.fillRect(0, 0, 1, 1);
        return [...probe.getImageData(0, 0, 1, 1).data];
    };
    const ratio = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((one, other) => other - one);
        return (x + 0.05) / (y + 0.05);
    };
    const behind = (element) => {
        for (let one = element; one; one = one.parentElement) {
            const colour = rgb(getComputedStyle(one).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return [255, 255, 255];
    };
    const bad = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const isShown = element.checkVisibility() && !element.closest("script, .unseen, noscript");
        if (!walker.currentNode.textContent.trim() || !isShown) continue;
        const style = getComputedStyle(element);
        const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        const found = ratio(rgb(style.color), behind(element));
        if (found < (isLarge ? 3 : 4.5)) bad.push([walker.currentNode.textContent.trim(), found]);
    }
    const style = getComputedStyle(document.documentElement);
    const of = (name) => rgb(style.getPropertyValue(`--${name}`).trim());
    for (const kind of ["prefill", "decode", "recompute"]) {
        if (ratio(of("bar-ink"), of(kind)) < 4.5) bad.push([`label on ${kind}`, ratio(of("bar-ink"), of(kind))]);
        if (ratio(of("card"), of(kind)) < 3) bad.push([kind, ratio(of("card"), of(kind))]);
    }
    if (ratio(of("card"), of("muted")) < 4.5) bad.push(["muted", ratio(of("card"), of("muted"))]);
    return bad;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, canvas, [role], dialog, section")]
    .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()
        || document.getElementById(one.getAttribute("aria-labelledby"))?.textContent.trim()))
    .filter((one) => !["many-status", "key-error", "connection"].includes(one.id)).map((one) => one.outerHTML)"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 360)])
def test_it_can_be_read(browser: Browser, demo: str, scheme: Any, width: int) -> None:
    """All text has a contrast of 4.5 (3 where it is large), bars one of 3, in both schemes; every control has a name; a
    telephone needs no sideways scrolling; with reduced motion bars are still drawn."""
    how: Any = {"color_scheme": scheme, "viewport": {"width": width, "height": 740}, "reduced_motion": "reduce"}
    with visit(browser, f"{demo}#demo=6", **how) as page:
        expect(page.locator("#many-status")).to_contain_text("6 of 6 answered")
        page.get_by_label("Message").fill("What is 2 + 3?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.assistant p")).to_have_text("2 + 3 = 5.")
        assert colours_of(page, "decode") > 50
        assert page.evaluate(CONTRASTS) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.lang") == "en"
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        picture(page, f"{scheme}-{width}")


def give_key(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    """Without a key the page asks; a wrong one is said, the right one opens it; it is in no address, cookie or lasting
    store, survives a reload of the tab, and can be changed."""
    with toy(api_keys=ApiKeys([ONE], ADMIN)) as (url, _), visit(browser, url, is_quiet=False) as page:
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        give_key(page, "not-a-known-key-at-all")
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        give_key(page, ONE)
        expect(dialog).to_be_hidden()
        expect(page.locator("#connection")).to_have_text("live")
        picture(page, "key")
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        expect(dialog).to_be_hidden()
        assert page.evaluate("[document.cookie, localStorage.length, location.href.includes('key')]") == ["", 0, False]
        page.get_by_role("button", name="Change key").click()
        give_key(page, ADMIN)
        expect(page.locator("#lead")).to_have_text(re.compile("^Nothing runs"))


def test_two_tenants_do_not_see_one_another(browser: Browser) -> None:
    """What one asks is on its own page and the operator's, and on the other's page there is nothing of it."""
    with toy(api_keys=ApiKeys([ONE, TWO], ADMIN)) as (url, _), visit(browser, url, is_quiet=False) as one, \
            visit(browser, url, is_quiet=False) as two, visit(browser, url, is_quiet=False) as operator:
        for page, key in ((one, ONE), (two, TWO), (operator, ADMIN)):
            give_key(page, key)
            expect(page.locator("#connection")).to_have_text("live")
        one.get_by_label("Message").fill("a")
        one.get_by_role("button", name="Send").click()
        expect(one.locator("#lead")).to_have_text("Your requests have 1 row, 0 requests wait.")
        expect(operator.locator("#lead")).to_have_text("1 of 8 rows busy, 0 requests wait.")
        expect(two.locator("#lead")).to_have_text("Nothing runs. Ask something, and watch it here.")
        assert two.locator("#rows tbody tr").count() == 0
        assert two.inner_text("#blocks").split() == ["Held", "by", "your", "rows", "0", "In", "all", "400"]
        assert two.inner_text("#rate") == "0"


def test_what_a_model_writes_is_text(browser: Browser) -> None:
    """Markup in a completion is shown as it is, in the chat and among many answers, and nothing of it runs or is asked
    for; an answer that is stopped ends its request."""
    with toy() as (url, app), visit(browser, url) as page:
        page.get_by_label("Message").fill(HOSTILE)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.user p")).to_have_text(HOSTILE)
        expect(page.locator(".turn.assistant p")).to_contain_text(HOSTILE)
        page.locator("#many summary").click()
        page.get_by_label("Questions, one per line").fill(f"{HOSTILE}\n{HOSTILE}")
        page.get_by_role("button", name="Ask 2 questions at once").click()
        expect(page.locator("#answers li").first).to_contain_text(HOSTILE * 2)
        assert page.evaluate("window.wasHurt ?? 0") == page.locator("main img, main script").count() == 0
        page.locator("#stop").click()
        (served,) = app.service.models.values()
        wait_until(lambda: served.engine.stats().num_running == 0)


def test_a_view_that_is_left_costs_nothing(browser: Browser) -> None:
    """A page that is closed has no viewer at the server."""
    with toy() as (url, app):
        with visit(browser, url) as page:
            expect(page.locator("#connection")).to_have_text("live")
            (view,) = app.service.live.values()
            assert view.num_viewers == 1
        wait_until(lambda: view.num_viewers == 0)


def test_the_demo_opens_and_ends_with_ctrl_c(browser: Browser) -> None:
    """``pagedcore demo --web`` says where the page is; there the questions are asked and answered, and Ctrl-C beside an
    open page ends the process with 0 and without a traceback."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGE_PARENTS)), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pagedcore", "demo", "--web", "--no-open", "--requests", "8", "--slow", "0.01"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/#demo=8", line)
            assert address is not None, line + process.stderr.read()
            with visit(browser, address[0], is_quiet=False) as page:
                expect(page.locator("#many-status")).to_contain_text("8 of 8 answered")
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_other_sites_are_kept_out(browser: Browser) -> None:
    """A page of another site can neither read nor change anything, nor show the page in a frame; a name that was
    rebound to this machine gets nothing."""
    foreign = Starlette(routes=[Route("/", lambda _: HTMLResponse("<title>foreign</title>"))])
    with toy() as (url, app), serving(foreign) as other, browser.new_context() as context:
        page = context.new_page()
        page.goto(other)
        tried = page.evaluate("""async (url) => {
            const body = JSON.stringify({prompt: "a", max_tokens: 5});
            const calls = [fetch(url + "live"), fetch(url + "v1/models"),
                fetch(url + "v1/completions", {method: "POST", body, headers: {"Content-Type": "application/json"}}),
                fetch(url + "v1/completions", {method: "POST", body})];
            const frame = document.body.appendChild(document.createElement("iframe"));
            const loaded = new Promise((resolve) => { frame.onload = resolve; });
            frame.src = url;
            await loaded;
            return (await Promise.allSettled(calls)).map((one) => one.status);
        }""", url)
        assert tried == ["rejected"] * 4
        assert page.frames[1].evaluate("document.getElementById('timeline')") is None
        blind = page.evaluate("""(url) => fetch(url + "v1/completions", {method: "POST", mode: "no-cors",
            body: JSON.stringify({prompt: "a", max_tokens: 5})}).then((one) => one.type)""", url)
        assert blind == "opaque"
        (served,) = app.service.models.values()
        assert served.engine.stats().num_prompt_tokens == 0
        response = page.goto(url.replace("127.0.0.1", "evil.example"))
        assert response is not None
        assert response.status == 403
