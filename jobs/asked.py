"""What is left of a request once it is planned: all but the texts, which are token ids then."""

from nightjar.jobs.records import JsonObject

_TEXTS = frozenset({"prompt", "query", "documents", "chat_template_kwargs"})


def without_texts(body: JsonObject) -> JsonObject:
    """The fields of a validated body that its computing and its answer need.

    A ranking that returns its documents keeps them. What tells the kinds of requests apart stays:
    `query` as an empty text, and `messages` as an empty list.
    """
    asked = {name: value for name, value in body.items() if name not in _TEXTS}
    if "query" in body:
        asked["query"] = ""
    if "messages" in body:
        asked["messages"] = []
    if body.get("return_documents"):
        asked["documents"] = body["documents"]
    return asked
