"""Strict reading of JSON and the digest of a body: what is accepted, and what counts as the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import strict
from gateway.dialects.wire import digest_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
STYLES: list[dict[str, Any]] = [
    {"separators": (",", ":"), "ensure_ascii": False},
    {"separators": (",", ":")},
    {"ensure_ascii": False},
    {"indent": 1},
]


@given(VALUES, st.sampled_from(STYLES))
def test_a_value_is_read_as_the_standard_library_reads_it(value: Any, style: dict[str, Any]) -> None:
    text = json.dumps(value, **style)
    assert repr(strict.loads(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'{"a":1, "a":2}',
        b'{"a":[{"b":1,"c":2,"b":1}]}',
        b'{"a":1,"\\u0061":1}',
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b'{"a":-1e400}',
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'{"a":1}}',
        b"01",
        b"",
    ],
    ids=repr,
)
def test_what_is_not_strict_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict.loads(text)


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b"123456789012345678901234567890", b"-0", b"1E2", b"1.00", b"18446744073709551616"], ids=repr
)
def test_odd_but_strict_values_are_read_exactly(text: bytes) -> None:
    assert repr(strict.loads(text)) == repr(json.loads(text))


@given(st.dictionaries(st.text(), VALUES), st.sampled_from(STYLES))
def test_a_body_is_the_same_in_any_order(value: dict[str, Any], style: dict[str, Any]) -> None:
    texts = [json.dumps(dict(members), **style).encode() for members in (value.items(), reversed(value.items()))]
    one, other = (digest_of(text, strict.loads(text)) for text in texts)
    assert one == other


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a":0.5,"b":"1.2 é"}', '{ "b": "1.2 \\u00e9",\n"a": 0.5}', True),
        ('{"a":1.0}', '{"a":1.00}', False),
        ('{"a":1.0}', '{"a":1}', False),
        ('{"a":100.0}', '{"a":1e2}', False),
        ('{"a":0}', '{"a":-0}', False),
        ('{"a":"1.0"}', '{"a":"1.00"}', False),
        ('{"a":1.00,"b":[]}', '{"b":[], "a":1.00}', True),
        ('{"a":1e2,"b":"\\ud800"}', '{"b":"\\uD800","a":1e2}', True),
    ],
)
def test_numbers_count_as_written_and_texts_as_meant(one: str, other: str, same: bool) -> None:
    digests = [digest_of(text.encode(), strict.loads(text.encode())) for text in (one, other)]
    assert (digests[0] == digests[1]) == same
