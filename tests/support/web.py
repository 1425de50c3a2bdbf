"""A web server on loopback whose answers a test writes byte by byte."""

import contextlib
import socket
import ssl
import threading

# Self-signed for localhost, valid until 2126, and used by tests only.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBlTCCATugAwIBAgIUDD1XHMgRtZQGMbbO886sKDSZWiIwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNDE5NDE0NloYDzIxMjYxMDMx
MTk0MTQ2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATPQym0nEvq51np/I5qMdCQDUDtWTmeLScQsKvcZc6gkCvHaDv6fCcz
oZ1YzLeuGodgnBQ0LcarEBouiQ4J8drjo2kwZzAdBgNVHQ4EFgQUBuBAhh4B53F2
GkVVDv3ENwu+CukwHwYDVR0jBBgwFoAUBuBAhh4B53F2GkVVDv3ENwu+CukwDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
SAAwRQIhANKHaTYurOMIewrnbGsxDpbRPWewBjqaC7UyCOkGRmeaAiAAohNYgVdK
e0GzyEgUVwHsiCOe6z7m+/FoGCGPwq9SZQ==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghol3Fy6XMtuWN/ja
3PfA1Q9KhYVuLtpFGy/uL1TE7/qhRANCAATPQym0nEvq51np/I5qMdCQDUDtWTme
LScQsKvcZc6gkCvHaDv6fCczoZ1YzLeuGodgnBQ0LcarEBouiQ4J8drj
-----END PRIVATE KEY-----
"""


class Web:
    """A server on loopback that answers each path with the bytes of `answers`, or with none. asked: its requests.

    context: of TLS; None for HTTP alone.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://localhost:{self.port}"
        self._context = context
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), self._secure(connection) as connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1 << 16)
            self.asked.append(head)
            answer = self.answers.get(head.split()[1].decode())
            if answer is None:
                connection.recv(1)  # until the client hangs up
            else:
                connection.sendall(answer)

    def _secure(self, connection: socket.socket) -> socket.socket:
        return self._context.wrap_socket(connection, server_side=True) if self._context else connection


def ok(body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (*headers, f"Content-Length: {len(body)}"))
    return b"HTTP/1.1 200 OK\r\n" + head.encode() + b"\r\n" + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
