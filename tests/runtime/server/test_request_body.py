"""The memory of request bodies is bounded."""

import asyncio
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from tilerank.runtime.server.http.body import BodyMiddleware, read_pieces, release_body
from tilerank.runtime.server.http.errors import ApiError


def test_bodies_are_bounded_together_until_they_are_released() -> None:
    """Each request has 4 bytes, and those that do not run yet may have 10 together."""

    async def run() -> None:
        released, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope, receive)
            try:
                body = b"".join([piece async for piece in read_pieces(request, 100)])
            except ApiError as e:
                body = str(e).encode()
            else:
                if scope["path"] == "/released":
                    release_body(request)
                    released.set()
                await go_on.wait()
            await Response(body)(scope, receive, send)

        transport = httpx.ASGITransport(BodyMiddleware(app, 10))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asking = [asyncio.create_task(client.post("/released", content=b"1234"))]
            await released.wait()
            asking += [asyncio.create_task(client.post("/", content=b"1234")) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert (await client.post("/", content=b"1234")).text == "The server is reading too many large requests."
            go_on.set()
            assert [answer.text for answer in await asyncio.gather(*asking)] == ["1234"] * 3
            assert (await client.post("/", content=b"1234")).text == "1234"

    asyncio.run(asyncio.wait_for(run(), 60))
