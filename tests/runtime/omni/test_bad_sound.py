"""Sound that is none, is cut off or is too much: refused by both APIs that take sound, before the engine sees it."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.omni.test_sound import BAD, wav
from tests.runtime.server.omni_model import TEMPLATE, make_omni, reader
from tests.runtime.server.scripted import Server, run
from tilerank.runtime.server.media.loader import MediaReader

SHORT = [(f"{n} samples", wav(np.zeros(n)), "at least 160 samples") for n in (1, 159)]
FILES = {name: (data, says) for name, data, says in [*BAD, *SHORT]}
FILES["empty"] = b"", "sound in base64|at least 1 byte"
FILES["long"] = FILES["long"][0], "may have 48 MiB together|larger than"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni(tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture(scope="module")
def media(model: Path) -> Iterator[MediaReader]:
    with reader(model) as found:
        yield found


def test_bad_sound_is_refused_by_chats_and_transcriptions(model: Path, media: MediaReader) -> None:
    async def test(server: Server) -> None:
        for name, (data, says) in FILES.items():
            sound = {"data": base64.b64encode(data).decode(), "format": "wav"}
            message = {"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}
            chat = await server.http.post("/v1/chat/completions", json={"messages": [message]})
            written = await server.http.post("/v1/audio/transcriptions", files={"file": ("a", data)})
            for answer in (chat, written):
                assert answer.status_code == (413 if name == "long" else 400), (name, answer.text)
                sentence = answer.json()["error"]["message"]
                assert re.search(says, sentence) and "\n" not in sentence, (name, sentence)
        assert not server.submits

    run(model, TEMPLATE, test, media=media)
