"""/v1/responses of OpenAI."""
