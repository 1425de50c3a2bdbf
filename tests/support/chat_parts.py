"""Messages with media, as clients send them."""

import base64
import zlib
from typing import Any

from media_files import encoded, picture


def data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def image(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data)}}


def clip(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def huge_picture() -> bytes:
    """A PNG whose header claims 60,000 x 60,000 pixels."""
    small = encoded(picture(60, 50))
    header = b"IHDR" + (60000).to_bytes(4, "big") * 2 + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]
