"""Errors in the protocol's format."""

from typing import Any


class ApiError(Exception):
    """An error response.

    Attributes:
      status: the HTTP status.
      message: the message for people.
      param: the field of the request that caused the error, or None.
      code: the kind of error, for programs, or None.
      headers: headers of the response, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.headers = param, code, headers

    def text(self) -> str:
        """Returns the message, which UTF-8 can always encode."""
        return _whole(self.message)

    @property
    def field(self) -> str | None:
        """`param`, which UTF-8 can always encode."""
        return None if self.param is None else _whole(self.param)

    def body(self) -> dict[str, Any]:
        """Returns the JSON body, which UTF-8 can always encode."""
        return {
            "error": {
                "message": self.text(),
                "type": _type_of(self.status),
                "param": self.field,
                "code": self.code,
            }
        }


def _whole(text: str) -> str:
    """Returns a text with "?" for lone surrogates, which JSON allows but UTF-8 does
    not."""
    return text.encode("utf-8", "replace").decode()


def _type_of(status: int) -> str:
    """Returns the protocol's error type for an HTTP status."""
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


def invalid(
    message: str, param: str | None = None, code: str | None = None
) -> ApiError:
    """Returns the error for an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """Returns a value as text for a message, or the name of its type if the text is
    long."""
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
