"""The reference of the API: /openapi.json, and /docs for people. It is made from the operations themselves."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pydantic
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..web.pages import page

Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
_REFERENCE = "#/components/schemas/{model}"


class Operation(NamedTuple):
    """The documentation of a method and a path.

    body: of the request, None for none. public: needs no key. takes: the content type of the body. tasks: those of the
    models that have it (--task); empty for all.
    """

    method: str
    path: str
    handler: Handler
    body: type[pydantic.BaseModel] | None = None
    public: bool = False
    takes: str = "application/json"
    tasks: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Return the handler's docstring without the method and the path that it begins with."""
        lines = (inspect.getdoc(self.handler) or "").split("\n\n")[0]
        return " ".join(lines.split()).partition(". ")[2] or lines


class ReferenceEndpoints:
    """Describes the operations."""

    def __init__(self, operations: Sequence[Operation], version: str, has_key: bool) -> None:
        self._operations = operations
        self._version = version
        self._has_key = has_key

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json. Describes the requests in the OpenAPI format."""
        return JSONResponse(self._openapi())

    async def page(self, request: Request) -> Response:
        """GET /docs. Shows the operations, and tries them out."""
        return page("reference")

    def _openapi(self) -> Json:
        bodies = list(dict.fromkeys(one.body for one in self._operations if one.body is not None))
        _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
        paths: Json = {}
        for one in self._operations:
            path = one.path.replace(":path}", "}")
            paths.setdefault(path, {})[one.method.lower()] = self._described(one, path)
        scheme = {"bearer": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "tilerank", "version": self._version},
            "paths": paths,
            "components": {"schemas": schemas.get("$defs", {})}
            | ({"securitySchemes": scheme} if self._has_key else {}),
        }

    def _described(self, one: Operation, path: str) -> Json:
        answers = {"200": {"description": "The answer."}, "4XX": {"description": "What is wrong with the request."}}
        described: Json = {"summary": one.summary, "responses": answers}
        if one.body is not None:
            schema = {"$ref": _REFERENCE.format(model=one.body.__name__)}
            described["requestBody"] = {"required": True, "content": {one.takes: {"schema": schema}}}
        if "{" in path:
            name = path.partition("{")[2].partition("}")[0]
            described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
        if self._has_key and not one.public:
            described["security"] = [{"bearer": []}]
        return described
