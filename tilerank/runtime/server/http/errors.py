"""Errors in the format of the OpenAI API."""

from typing import Any

from starlette.responses import JSONResponse, Response

RETRY_AFTER_S = 5
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_AFTER_S)}}


class ApiError(Exception):
    """An error for the client: an HTTP status, a sentence, and the request field that is wrong (`param`)."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def error_response(error: ApiError, body: dict[str, Any] | None = None) -> Response:
    """Return the HTTP response for an error. body: by default OpenAI's. Two statuses have a header of their own."""
    return JSONResponse(body or error.body(), error.status, _HEADERS.get(error.status))
