"""The chat and the reference in a real browser, with an engine that gives scripted answers."""

import base64
import json
from collections.abc import Iterator

import browser
import pytest
from browser import Page
from media_files import DEMO_VL

from tests.clients.live import CALL, REASONING, live_server
from tests.runtime.server.scripted import ENOUGH, Server, make_model, reader

pytestmark = pytest.mark.skipif(
    browser.find() is None, reason="no browser is installed (Debian: chromium-headless-shell)"
)
PICTURE = base64.b64encode((DEMO_VL / "testset" / "t007_59x105.png").read_bytes()).decode()
TABLE = "| a | b |\n|---|--:|\n| 1 | **2** |\n"
CODE = "```python\ndef f(x):\n    return x\n```\n"
ENDED = "!document.querySelector('.running') && document.querySelector('.message.assistant:last-of-type')"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """A server with a key. Its model takes pictures, and says nothing of them."""
    model = make_model(tmp_path_factory.mktemp("chat_page") / "model")
    with reader(DEMO_VL) as media, live_server(model, api_keys=("secret",), media=media) as served:
        yield served


@pytest.fixture(scope="module")
def open_page(live: tuple[str, Server]) -> Iterator[Page]:
    """The chat in a browser, with the key entered."""
    with Page(width=1440) as page:
        page.open(live[0] + "/")
        page.await_true("document.querySelector('#key')", "it asks for no key")
        page.write("#key", "wrong")
        page.press("Enter")
        page.await_true("document.querySelector('#key-dialog .bad')", "it takes a wrong key")
        page.write("#key", "secret")
        page.press("Enter")
        page.await_true("document.querySelector('#model').textContent === 'it'", "it takes no key")
        yield page


@pytest.fixture
def server(live: tuple[str, Server]) -> Server:
    live[1].limit, live[1].answer = ENOUGH, "Moses came."
    return live[1]


@pytest.fixture
def page(open_page: Page, server: Server) -> Page:
    """The chat with a new conversation."""
    open_page.click("#new")
    return open_page


def ask(page: Page, text: str) -> None:
    page.write("#prompt", text)
    page.press("Enter")
    page.await_true(ENDED, "the answer does not end")


def messages(page: Page) -> list[list[str]]:
    """Return the kinds and texts of the messages that are shown."""
    found = "[...document.querySelectorAll('.message')]"
    return list(page.run(f"{found}.map((e) => [e.classList[1], e.querySelector('.text')?.innerText])"))


def press_button(page: Page, name: str, kind: str) -> None:
    """Press a button of the last message of a kind."""
    buttons = f"[...document.querySelectorAll('.message.{kind}')].at(-1).querySelectorAll('button')"
    page.run(f"[...{buttons}].find((e) => e.textContent === {json.dumps(name)}).click()")


def test_a_conversation_goes_on_and_is_changed(page: Page, server: Server) -> None:
    ask(page, "Who came?")
    server.answer = "Aaron came."
    ask(page, "And then?")
    assert [turn for turn in server.prompt.split("<|im_start|>") if turn][-4:] == [
        "user\nWho came?<|im_end|>\n",
        "assistant\nMoses came.<|im_end|>\n",
        "user\nAnd then?<|im_end|>\n",
        "assistant\n",
    ]
    assert f"{server.count('Aaron came.') + 1} tokens" in page.text(".message:last-child .note")
    server.answer = "Miriam came."
    press_button(page, "Regenerate", "assistant")
    page.await_true(f"{ENDED} && document.body.innerText.includes('Miriam')", "no other answer comes")
    asked = [["user", "Who came?"], ["assistant", "Moses came."], ["user", "And then?"]]
    assert messages(page) == [*asked, ["assistant", "Miriam came."]]
    press_button(page, "Edit", "user")
    page.run("document.querySelector('.editor textarea').value = 'And now?'")
    press_button(page, "Send", "editor")
    page.await_true(f"{ENDED} && document.body.innerText.includes('now?')", "the question stays")
    assert "user\nAnd now?<|im_end|>" in server.prompt and "And then?" not in server.prompt
    press_button(page, "Delete", "user")
    page.await_true("document.querySelectorAll('.message').length === 2", "the message stays")
    assert messages(page) == asked[:2]


def test_conversations_are_kept(page: Page, server: Server, live: tuple[str, Server]) -> None:
    ask(page, "Kept one")
    page.click("#new")
    ask(page, "Kept two")
    page.open(live[0] + "/?again")  # the key is kept as well
    titles = "[...document.querySelectorAll('#conversations .title')].map((e) => e.textContent)"
    page.await_true(f"{titles}.length > 1", "nothing is kept")
    assert page.run(titles)[:2] == ["Kept two", "Kept one"] and messages(page) == []
    page.run("document.querySelectorAll('#conversations .title')[1].click()")
    page.await_true("document.querySelectorAll('.message').length === 2", "the conversation is not shown")
    assert messages(page) == [["user", "Kept one"], ["assistant", "Moses came."]]
    page.run("document.querySelectorAll('#conversations button')[1].click()")
    page.await_true(f"{titles}[0] === 'Kept one'", "the conversation is not deleted")


def test_markdown_of_an_answer(page: Page, server: Server) -> None:
    server.answer = f"A *word*.\n\n{TABLE}\n{CODE}\n[a link](https://example.org/a)"
    ask(page, "Show")
    answer = "document.querySelector('.message.assistant .text')"
    assert page.run(f"{answer}.querySelector('em').textContent") == "word"
    assert page.run(f"[...{answer}.querySelectorAll('td')].map((e) => e.textContent)") == ["1", "2"]
    assert page.run(f"{answer}.querySelector('td:last-child').getAttribute('align')") == "right"
    assert page.run(f"{answer}.querySelector('code.python .hljs-keyword').textContent") == "def"
    assert page.run(f"{answer}.querySelector('pre').textContent") == "def f(x):\n    return x"
    link = page.run(f"(({{ href, target, rel }}) => [href, target, rel])({answer}.querySelector('a'))")
    assert link == ["https://example.org/a", "_blank", "noopener noreferrer nofollow"]


def test_what_a_model_writes_is_no_program(page: Page, server: Server) -> None:
    """Nothing runs, nothing is loaded, and elements that are written are shown as text."""
    attacks = [
        "<img src=x onerror=\"document.title='taken'\">",
        "<script>document.title = 'taken'</script>",
        "[a](javascript:document.title='taken')",
        "[b](data:text/html,<script>1</script>)",
        "![c](https://example.org/?q=secret)",
        "<svg><a xlink:href=\"javascript:document.title='taken'\"><text>d</text></a></svg>",
        "<form action=https://example.org><input name=e></form>",
        '```python" onmouseover="x\n<b>f</b>\n```',
        "[g](status.html)",
    ]
    page.console.clear()
    server.answer = "\n\n".join(attacks)
    ask(page, "Attack")
    answer = "document.querySelector('.message.assistant .text')"
    tags = page.run(f"[...new Set([...{answer}.querySelectorAll('*')].map((e) => e.localName))].sort()")
    assert set(tags) <= {"a", "br", "button", "code", "div", "p", "pre", "span"}
    names = page.run(f"[...{answer}.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("src", "style", "action")]
    links = page.run(f"[...{answer}.querySelectorAll('a[href]')].map((e) => e.getAttribute('href'))")
    assert links == ["https://example.org/?q=secret"]  # to be followed by hand
    assert all(text in page.text(".message.assistant .text") for text in ("<script>", "onerror", "<form"))
    assert page.run("document.title") == "it" and page.console == []
    # Text becomes elements through the sanitiser only.
    writes = "try { document.body.innerHTML = '<b>'; } catch (error) { return String(error); }"
    assert "TrustedHTML" in page.run(f"(() => {{ {writes} }})()")


def test_reasoning_is_folded_and_calls_of_tools_are_shown(page: Page, server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    page.click("#open-parameters")
    page.write("#tools", "[")
    page.click("#parameters-form .buttons button")
    assert page.run("document.querySelector('#tools').validity.customError") is True
    page.run(f"document.querySelector('#tools').value = {json.dumps(json.dumps(tools))}")
    page.write("#system", "Be brief")
    page.write("#max_tokens", "99")
    page.click("#parameters-form .buttons button")
    page.await_true("!document.querySelector('#parameters').open", "the parameters are not taken")
    server.answer = REASONING + CALL
    ask(page, "What time is it?")
    assert "system\nBe brief<|im_end|>" in server.prompt and server.submits[-1].params.max_new_tokens == 99
    assert page.run("document.querySelector('.reasoning').open") is False
    assert page.run("document.querySelector('.reasoning .plain').textContent") == "The clock says it."
    assert "Call of now" in page.text(".call") and '"zone": "Köln"' in page.text(".call")
    server.answer = "It is noon."
    page.write("#results textarea", "noon")
    page.click("#results button")
    page.await_true(f"{ENDED} && document.body.innerText.includes('It is noon.')", "no answer to the result")
    assert "<|im_start|>tool\nnoon<|im_end|>" in server.prompt
    page.click("#open-parameters")
    page.click("#reset-parameters")
    page.click("#parameters-form .buttons button")


def test_an_answer_is_stopped_and_an_error_is_shown(page: Page, server: Server) -> None:
    server.limit = 2
    page.write("#prompt", "Go on")
    page.press("Enter")
    page.await_true("document.querySelector('.running .text').textContent .length > 0", "no text comes")
    page.click("#stop")
    page.await_true(f"{ENDED} && document.querySelector('.note').textContent.includes('stopped')", "it does not stop")
    begun = messages(page)[1][1]
    assert begun and "Moses came.".startswith(begun)
    server.resume()
    server.limit = ENOUGH
    ask(page, "word " * 4200)
    assert "context" in page.text(".message:last-child .bad")
    ask(page, "Again")
    assert "word" not in server.prompt and f"{begun}<|im_end|>" in server.prompt


def test_pictures_are_pasted_and_other_files_refused(page: Page, server: Server) -> None:
    """The engine gets no prompt: the tokenizer of this model has no placeholder, which the server says."""
    hooked = "window.fetch = (url, options) => { bodies.push(options.body); return sent(url, options); };"
    page.run(f"(() => {{ window.bodies = []; const sent = window.fetch; {hooked} }})()")
    for name, kind in (("x.png", "image/png"), ("x.pdf", "application/pdf")):
        page.run(
            "(() => { const files = new DataTransfer(); "
            f"const data = Uint8Array.from(atob('{PICTURE}'), (c) => c.charCodeAt(0)); "
            f"files.items.add(new File([data], '{name}', {{ type: '{kind}' }})); "
            "document.querySelector('#prompt').dispatchEvent("
            "new ClipboardEvent('paste', { clipboardData: files, cancelable: true })); })()"
        )
    page.await_true("document.querySelector('#attached img')", "the picture is not attached")
    page.await_true("document.querySelector('#refused').textContent", "the other file is not refused")
    assert page.text("#refused") == "x.pdf: the model takes pictures and videos."
    ask(page, "What is it?")
    (body,) = [json.loads(one) for one in page.run("bodies") if one]
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    assert body["messages"] == [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    assert page.run("document.querySelector('.message.user img').naturalWidth") == 59
    assert page.run("document.querySelectorAll('#attached img').length") == 0


def test_the_chat_fits_screens_in_light_and_dark(page: Page, server: Server) -> None:
    server.answer = f"{'long' * 80}\n\n{CODE.replace('x', 'x' * 200)}"
    ask(page, "wide" * 80)
    colours = set()
    for width in (320, 390, 1440):
        for dark in (False, True):
            page.look(width=width, dark=dark)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run("document.querySelector('#send').getBoundingClientRect().right") <= width
            colours.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    page.look(width=390)
    page.click("#open-side")
    assert page.run("getComputedStyle(document.querySelector('#side')).visibility") == "visible"
    page.click("#close-side")
    page.look(width=1440)
    labelled = "[...document.querySelectorAll('input, textarea, select')].every((e) => e.labels.length || e.ariaLabel)"
    assert page.run(labelled)


def test_the_reference_shows_every_operation(live: tuple[str, Server], open_page: Page) -> None:
    open_page.console.clear()
    open_page.open(live[0] + "/docs")
    open_page.await_true("document.querySelectorAll('.opblock').length > 20", "no operations are shown")
    assert "/v1/chat/completions" in open_page.text("#reference")
    assert open_page.console == []
