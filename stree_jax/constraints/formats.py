"""Regular expressions of the string formats of JSON schema.

An expression accepts a part of a format's texts, each of them valid. It leaves out leap
seconds, hosts of more than four labels and internationalised names.
"""

from stree_jax.constraints.expressions import UnsupportedError, either

_HEX = "[0-9a-fA-F]"
_DIVISIBLE_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, without 00
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # without 0000
_LEAP_YEAR = f"(?:[0-9]{{2}}{_DIVISIBLE_BY_4}|{_DIVISIBLE_BY_4}00)"
_DAY_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
_MONTH_DAY = (
    f"(?:(?:0[1-9]|1[0-2])-{_DAY_28}"
    "|(?:0[13-9]|1[0-2])-(?:29|30)"
    "|(?:0[13578]|1[02])-31)"
)
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = (
    rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_HOUR}:[0-5][0-9])"
)

_COUNT = "(?:0|[1-9][0-9]{0,5})"
_DURATION_DATE = (
    f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
)
_DURATION_TIME = (
    f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
)
_DURATION = f"P(?:{_COUNT}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"

_UUID = f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Returns the expression of eight groups, or fewer around `::`."""
    options = [f"{_GROUP}(?::{_GROUP}){{7}}"]
    for before in range(8):
        start = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        after = 7 - before
        end = f"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?" if after else ""
        options.append(f"{start}::{end}")
    return either(options)


# At most 61 characters a label and 247 a name, where 63 and 253 are allowed. Names of
# two hyphens in a row have a meaning of their own, so they are left out.
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
_LAST_LABEL = "[A-Za-z](?:-?[A-Za-z0-9]){0,30}"
_HOSTNAME = rf"(?:{_LABEL}\.){{0,3}}{_LAST_LABEL}"
_ATOM = r"[A-Za-z0-9_+\-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:{_LABEL}\.){{1,2}}{_LAST_LABEL}"

# RFC 3986 sets no limit to the length of a host.
_URI_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9])*"
_URI_CHAR = rf"(?:[A-Za-z0-9._~!$\&'()*+,;=:@\-]|%{_HEX}{{2}})"
_AUTHORITY = rf"{_URI_LABEL}(?:\.{_URI_LABEL})*(?::[0-9]{{1,4}})?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]*:"
    f"(?://{_AUTHORITY}(?:/{_URI_CHAR}*)*|{_URI_CHAR}+(?:/{_URI_CHAR}*)*)"
    rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:\#(?:{_URI_CHAR}|[/?])*)?"
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "uuid": _UUID,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "uri": _URI,
}


def format_regex(name: str) -> str:
    """Returns the expression of a format's texts, which need no escapes in JSON.

    Raises:
      UnsupportedError: the format is unknown.
    """
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise UnsupportedError(f"the format {name!r:.60} is not one of {known}")
    return FORMATS[name]
