"""The items of the conversation before a response, as OpenAI's clients list them: in pages."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import pydantic
from pydantic import Field
from starlette.datastructures import QueryParams

from ...chat.fields import Form, ListOf
from ...http.body import validation_error
from ...http.errors import ApiError
from ..answer import Json
from .body import Included
from .items import Item, MessageItem


class ItemPage(Form):
    """The parameters of a page. after: the id of the last item of the page before this one."""

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: ListOf[Included] = Field([], max_length=16)

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        """Return the parameters of a query. Raises ApiError."""
        given: dict[str, Any] = dict(query)
        if include := [*query.getlist("include"), *query.getlist("include[]")]:
            given = {name: value for name, value in given.items() if name != "include[]"} | {"include": include}
        try:
            return cls.model_validate(given)
        except pydantic.ValidationError as e:
            raise validation_error(given, e) from e

    def of_items(self, items: Sequence[Item]) -> Json:
        """Return the page of these items. Raises ApiError if none of them has the id `after`."""
        listed = [_listed(item, number) for number, item in enumerate(items)]
        if self.order == "desc":
            listed.reverse()
        first = 0
        if self.after is not None:
            ids = [item["id"] for item in listed]
            if self.after not in ids:
                raise ApiError(400, f"after: there is no item {self.after!r} before this response", param="after")
            first = ids.index(self.after) + 1
        page = listed[first : first + self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": first + self.limit < len(listed),
        }


def _listed(item: Item, number: int) -> Json:
    """Return an item in the form of an answer: with an id, and with the content of a message as parts."""
    listed = {"id": f"item_{number}"} | item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": item.content}]
    return listed
