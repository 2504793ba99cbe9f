"""What is refused, in the protocol's error object."""

from typing import Any


class ApiError(Exception):
    """A refusal: an HTTP status, and the object that says why.

    Attributes:
      status: of HTTP.
      param: the field of the request that is to blame, or None.
      code: a word for programs, or None.
      headers: of the response.
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

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the answer, which UTF-8 can spell whatever it quotes."""
        return {
            "error": {
                "message": _whole(self.message),
                "type": _type_of(self.status),
                "param": None if self.param is None else _whole(self.param),
                "code": self.code,
            }
        }


def _whole(text: str) -> str:
    """Returns a text with "?" for halves of characters, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()


def _type_of(status: int) -> str:
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
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """Returns a value for a refusal, or its type if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
