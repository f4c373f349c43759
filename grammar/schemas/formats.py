"""Formats of JSON Schema's strings that are followed, as patterns. Pure."""

from __future__ import annotations

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_WORD = r"[0-9a-fA-F]{1,4}"
_IPV6 = (
    rf"(?:{_WORD}:){{7}}{_WORD}|::(?:{_WORD}(?::{_WORD}){{0,6}})?"
    rf"|{_WORD}::(?:{_WORD}(?::{_WORD}){{0,5}})?|{_WORD}:{_WORD}::(?:{_WORD}(?::{_WORD}){{0,4}})?"
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
_QUERY = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::\d{{1,4}})?(?:/{_PATH})?|{_PATH})"
    rf"(?:\?{_QUERY})?(?:#{_QUERY})?"
)
_NUMBER = r"\d{1,9}"
_OF_DAY = rf"T(?:{_NUMBER}H(?:{_NUMBER}M)?(?:{_NUMBER}S)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_OF_DATE = rf"(?:{_NUMBER}Y(?:{_NUMBER}M)?(?:{_NUMBER}D)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_HEX = "[0-9a-fA-F]"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_OF_DATE}(?:{_OF_DAY})?|{_OF_DAY}|{_NUMBER}W)",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|/{_PATH})",
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
}
"""By name; any other is an annotation."""
