"""What URLs in messages may read, against a server of raw sockets and a directory with links."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_parts import data_url
from web import CERTIFICATE, KEY, Web, moved, ok

from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.server.http import fetch as fetch_module
from tilerank.runtime.server.http import get
from tilerank.runtime.server.http.errors import ApiError
from tilerank.runtime.server.http.fetch import Fetcher, FetchError
from tilerank.runtime.server.http.get import is_public
from tilerank.runtime.server.http.media_budget import MAX_DECODED, MAX_ENCODED, MAX_HELD, MediaBudget

BODY = bytes(range(256)) * 300


def read(fetcher: Fetcher, *urls: str, budget: MediaBudget | None = None) -> list[bytes]:
    async def reading() -> list[bytes]:
        with (budget or MediaBudget()).share() as share:
            return await fetcher.fetch(urls, share)

    return asyncio.run(reading())


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


def anywhere(address: str) -> bool:
    return True


def loopback_alone(address: str) -> bool:
    return address in ("127.0.0.1", "::1")


def test_data_urls_are_always_read() -> None:
    long = bytes(range(251)) * 1000
    assert read(Fetcher((), None), data_url(b"abc"), "DATA:;base64,", data_url(long)) == [b"abc", b"", long]


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:", "data:;base64,a!b=", "data:image/png;base64"])
def test_data_urls_that_are_none(url: str) -> None:
    with pytest.raises(MediaError):
        read(Fetcher((), None), url)


def test_a_picture_from_an_allowed_host(web: Web) -> None:
    web.answers["/a%20b/%C3%A9?x=1&y=%20"] = ok(BODY)
    web.answers["/chunks"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    web.answers["/close"] = b"HTTP/1.0 200 OK\r\n\r\nto the end"
    fetcher = Fetcher(["LOCALHOST"], None, anywhere)
    urls = [f"{web.url}/{path}" for path in ("a%20b/é?x=1&y=%20#part", "chunks", "close")]
    assert read(fetcher, *urls) == [BODY, b"abcde", b"to the end"]
    assert all(b"Host: localhost:%d\r\n" % web.port in head for head in web.asked)
    assert not any(b"ookie" in head or b"uthorization" in head for head in web.asked)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.com/x.png", "its host is not one of --allowed-media-domains"),
        ("http://localhost.example.com/x.png", "its host is not one of"),
        ("http://localhost@example.com/x.png", "without user name and password"),
        ("http://user:secret@localhost/x.png", "without user name and password"),
        ("http://localhost\\@example.com/x.png", "without user name and password"),
        ("http://localhost./x.png", "its host is not one of"),
        ("http:///x.png", "expected a host"),
        ("http://[::1/x.png", "not a valid URL"),
        ("http://localhost:99999/x.png", "not a valid URL"),
        ("http://localhost:0/x.png", "not a valid URL"),
        ("http://localhost/a b", "not a valid URL"),
        ("http://localhost/a\r\nX-Evil: 1", "not a valid URL"),
        (f"http://{'a' * 70}.com/", "not a valid URL"),
        ("ftp://localhost/x.png", "expected a data:, http:, https: or file: URL"),
        ("gopher://localhost/x.png", "expected a data:, http:, https: or file: URL"),
        ("x.png", "expected a data:, http:, https: or file: URL"),
        ("file:///etc/passwd", "this server has no --allowed-local-media-path"),
    ],
)
def test_urls_that_may_not_be_read(url: str, says: str) -> None:
    with pytest.raises(FetchError, match="(?s)" + says) as caught:
        read(Fetcher(["localhost"], None, lambda address: pytest.fail("it is connected to")), url)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.215.14", False),
        ("64:ff9b::7f00:1", False),  # NAT64
        ("2002:7f00:1::1", False),  # 6to4
        ("2001:0:7f00:1::1", False),  # Teredo
        ("2001:db8::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_private_addresses_are_never_connected_to(web: Web) -> None:
    """However the host is called, and if one of several addresses is private."""
    for host in ("localhost", "127.0.0.1", "0x7f000001", "2130706433"):
        with pytest.raises(FetchError, match=r"address that is not public|cannot be found"):
            read(Fetcher([host], None), f"http://{host}:{web.port}/x")
    assert not web.asked


def test_one_private_address_of_several_is_enough(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("93.184.215.14", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *a, **k: resolve(host, port))
    with pytest.raises(FetchError, match="leads to an address that is not public"):
        read(Fetcher(["example.com"], None), f"http://example.com:{web.port}/x")
    assert not web.asked


def test_the_checked_address_is_the_one_that_is_connected_to(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has another address the second time it is looked up gains nothing."""
    web.answers["/x"] = ok(b"abc")
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: Any, **options: Any) -> object:
        if host == "example.com":
            looked_up.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert read(Fetcher(["example.com"], None, loopback_alone), f"http://example.com:{web.port}/x") == [b"abc"]
    assert looked_up == ["example.com"]
    assert b"Host: example.com" in web.asked[0]


def test_redirects_are_followed_where_they_may_lead(web: Web) -> None:
    web.answers["/a"] = moved("/b?c")
    web.answers["/b?c"] = moved(f"{web.url}/d")
    web.answers["/d"] = ok(b"abc")
    web.answers["/loop"] = moved("/loop")
    fetcher = Fetcher(["localhost"], None, anywhere)
    assert read(fetcher, f"{web.url}/a") == [b"abc"]
    with pytest.raises(FetchError, match="redirects more than 3 times"):
        read(fetcher, f"{web.url}/loop")
    assert len(web.asked) == 3 + 4


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://example.com/x", "its host is not one of"),
        ("//example.com/x", "its host is not one of"),
        ("http://127.0.0.1/x", "its host is not one of"),
        ("http://10.0.0.1/x", "leads to an address that is not public"),
        ("http://169.254.169.254/latest/meta-data", "its host is not one of"),
        ("file:///etc/passwd", "expected a data:, http:, https: or file: URL"),
        ("data:;base64,YWJj", "expected a data:, http:, https: or file: URL"),
        ("http://[::1", "not a valid URL"),
    ],
)
def test_redirects_elsewhere_are_not_followed(web: Web, target: str, says: str) -> None:
    web.answers["/a"] = moved(target)
    with pytest.raises(FetchError, match=says):
        read(Fetcher(["localhost", "10.0.0.1"], None, loopback_alone), f"{web.url}/a")
    assert len(web.asked) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "was answered with status 404"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "was answered with status 304"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "could not be read"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "could not be read"),
        (b"", "could not be read"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * (1 << 20), "could not be read"),
    ],
)
def test_answers_that_are_no_picture(web: Web, answer: bytes, says: str) -> None:
    web.answers["/x"] = answer
    with pytest.raises(FetchError, match=says):
        read(Fetcher(["localhost"], None, anywhere), f"{web.url}/x")


def test_nobody_listens(web: Web) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(FetchError, match="cannot be reached"):
        read(Fetcher(["localhost"], None, anywhere), f"http://localhost:{port}/x")


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the host of the URL, although an address is connected to."""
    (tmp_path / "localhost.pem").write_text(CERTIFICATE + KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "localhost.pem")
    web = Web(context)
    web.answers["/x"] = ok(b"abc")
    url = f"https://localhost:{web.port}/x"
    fetcher = Fetcher(["localhost", "127.0.0.1"], None, loopback_alone)
    with pytest.raises(FetchError, match="certificate is not valid: self-signed certificate"):
        read(fetcher, url)
    monkeypatch.setattr(get, "_tls", lambda: ssl.create_default_context(cadata=CERTIFICATE))
    assert read(fetcher, url) == [b"abc"]
    with pytest.raises(FetchError, match="certificate is not valid: IP address mismatch"):
        read(fetcher, url.replace("localhost", "127.0.0.1"))
    web.close()


def test_a_server_that_hangs(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline holds for all media of a request together, and names the one that is late."""
    web.answers["/x"] = ok(b"abc")
    monkeypatch.setattr(fetch_module, "FETCH_S", 1.0)
    with pytest.raises(FetchError, match="hangs' was not read within 1 s"):
        read(Fetcher(["localhost"], None, anywhere), f"{web.url}/x", f"{web.url}/hangs")


def test_more_bytes_than_a_request_may_have(web: Web) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    web.answers["/endless"] = head + bytes(MAX_ENCODED + (1 << 20))
    web.answers["/half"] = ok(bytes(MAX_ENCODED // 2 + 1))
    fetcher = Fetcher(["localhost"], None, anywhere)
    for urls in (
        [f"{web.url}/endless"],
        [f"{web.url}/half"] * 2,
        ["data:;base64," + "A" * (MAX_ENCODED // 3 * 4 + 64)],
    ):
        budget = MediaBudget()
        with pytest.raises(ApiError, match="may have 48 MiB together") as caught:
            read(fetcher, *urls, budget=budget)
        assert caught.value.status == 400
        assert (budget.encoded, budget.decoded) == (0, 0)


def test_all_requests_together_are_bounded() -> None:
    budget = MediaBudget()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_HELD // MAX_ENCODED):
            stack.enter_context(budget.share()).add_encoded(MAX_ENCODED)
        with pytest.raises(ApiError) as caught, budget.share() as share:
            share.add_encoded(MAX_ENCODED)
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert (budget.encoded, budget.decoded) == (0, 0)
    with budget.share() as share:
        share.add_encoded(1000)
        share.add_decoded(5000)
        share.drop_encoded()
        assert (budget.encoded, budget.decoded) == (0, 5000)
    assert (budget.encoded, budget.decoded) == (0, 0)


def test_no_more_is_decoded_than_the_engine_takes() -> None:
    async def waiting() -> None:
        budget = MediaBudget()
        with budget.share() as late, budget.share() as early:
            await late.wait_for_room()
            early.add_decoded(MAX_DECODED)
            await late.wait_for_room()
            with budget.share() as more:
                more.add_decoded(1)
                waits = asyncio.create_task(late.wait_for_room())
                await asyncio.sleep(0)
                assert not waits.done()
            await waits

    asyncio.run(waiting())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a file, links that stay in it and links that leave it."""
    inside = tmp_path / "media"
    (inside / "sub").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"abc")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"secret")
    os.mkfifo(inside / "pipe")
    (inside / "good").symlink_to(inside / "a b.png")
    (inside / "bad").symlink_to(tmp_path / "secret")
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "out").symlink_to(tmp_path)
    return inside


def test_files_below_the_directory(folder: Path) -> None:
    fetcher = Fetcher((), folder)
    urls = [f"file://{folder}/a%20b.png", f"file://localhost{folder}/sub/../good"]
    assert read(fetcher, *urls) == [b"abc", b"abc"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../secret", "not below --allowed-local-media-path"),
        ("%2e%2e/secret", "not below"),
        ("bad", "not below"),
        ("out/secret", "not below"),
        ("../media2/x", "not below"),
        ("../nothing", "not below"),
        ("nothing", "cannot be read"),
        ("loop", "cannot be read"),
        ("a%00b", "cannot be read"),
        ("sub", "cannot be read"),
        ("", "cannot be read"),
        ("pipe", "is not a file"),
    ],
)
def test_files_elsewhere(folder: Path, path: str, says: str) -> None:
    with pytest.raises(FetchError, match=says):
        read(Fetcher((), folder), f"file://{folder}/{path}")


def test_a_host_in_a_file_url(folder: Path) -> None:
    with pytest.raises(FetchError, match="without a host"):
        read(Fetcher((), folder), f"file://example.com{folder}/good")
