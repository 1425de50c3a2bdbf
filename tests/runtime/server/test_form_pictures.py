"""Pictures in /v1/responses and /v1/messages, up to the prompt that the engine gets."""

import base64

from chat_parts import data_url, image, text, user

from tests.runtime.server.scripted import Server
from tests.runtime.server.test_media import SMALL, run, runs


def test_a_picture_in_the_forms_of_other_apis() -> None:
    """The prompt is that of a chat with the same picture."""

    async def ask(server: Server) -> None:
        await server.chat(user(image(SMALL), text("What?")))
        url, data = data_url(SMALL), base64.b64encode(SMALL).decode()
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"}]
        response = {"input": [{"role": "user", "content": parts}]}
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        message = {"max_tokens": 3, "messages": [{"role": "user", "content": blocks}]}
        assert (await server.http.post("/v1/responses", json=response)).status_code == 200
        assert (await server.http.post("/v1/messages", json=message)).status_code == 200
        chat, *others = server.submits
        assert runs(chat.prompt) and len(others) == 2
        for other in others:
            assert other.prompt.token_ids == chat.prompt.token_ids and other.digests == chat.digests

    run(ask)
