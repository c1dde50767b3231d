"""The header of a stored value, and every way in which a value is not the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.keys import StorageIdentity
from app.hicache.storage.base import BAD_VALUES, Outcome
from app.hicache.storage.doubles import of_another_model
from app.hicache.storage.value import HEADER_BYTES, ValueCodec
from tests.support.storage import IDENTITY, PAYLOAD_BYTES, codec, key, payload, value

OTHERS = [replace(IDENTITY, **{field.name: 7 if field.type == "int" else "other"}) for field in fields(StorageIdentity)]


def test_what_was_encoded_is_decoded_without_a_copy() -> None:
    page = bytearray(payload(1))
    header, body = codec().encode(key(1), page)
    whole = b"".join((header, body))

    got = codec().decode(key(1), whole)

    assert body is page
    assert len(header) == HEADER_BYTES
    assert len(whole) == codec().value_bytes
    assert got.outcome is Outcome.HIT
    assert got.value == page
    assert isinstance(got.value, memoryview)
    assert got.value.obj is whole


def test_the_form_does_not_change_by_accident() -> None:
    """Values that an older server wrote are read by a newer one. If this must change, the version must."""
    header, _ = ValueCodec(IDENTITY, 4).encode(key(1), b"page")

    assert header.hex() == (
        "5450554b5650010004000000000000004926aeebeae1142b99c0c09db96dc951"
        "b9af451e813558de3aa204c32df3c9af0621a1c111cfd4554a172d9ecd490a9a"
        "8d6e4e66e0f444491b716fb1d00ab1b97e2f9d6cfacb9f5c52623781b6c0b48e"
        "9bfc512178ee17759f570911e1f1bfc3"
    )


@pytest.mark.parametrize("other", OTHERS, ids=[field.name for field in fields(StorageIdentity)])
def test_another_identity_is_foreign(other: StorageIdentity) -> None:
    got = codec().decode(key(1), of_another_model(other, key(1))(value(1)))

    assert got == (Outcome.FOREIGN, None)


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (lambda whole: b"", Outcome.SHORT),
        (lambda whole: whole[: HEADER_BYTES - 1], Outcome.SHORT),
        (lambda whole: whole[:-1], Outcome.SHORT),
        (lambda whole: whole + b"\0", Outcome.LONG),
        (lambda whole: b"X" + whole[1:], Outcome.DAMAGED),
        (lambda whole: whole[:6] + b"\2\0" + whole[8:], Outcome.STALE),
        (lambda whole: bytes(len(whole)), Outcome.DAMAGED),
        (lambda whole: value(2), Outcome.MISPLACED),
        (lambda whole: b"".join(ValueCodec(IDENTITY, 10).encode(key(1), bytes(10))), Outcome.SHORT),
        (lambda whole: b"".join(ValueCodec(IDENTITY, 2000).encode(key(1), bytes(2000))), Outcome.LONG),
    ],
)
def test_what_is_wrong_with_a_value_is_named(damage: Callable[[bytes], bytes], outcome: Outcome) -> None:
    assert codec().decode(key(1), damage(value(1))) == (outcome, None)


@given(position=st.integers(0, HEADER_BYTES + PAYLOAD_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_a_hit(position: int, bit: int) -> None:
    damaged = bytearray(value(1))
    damaged[position] ^= 1 << bit

    got = codec().decode(key(1), damaged)

    assert got.outcome in BAD_VALUES
    assert got.value is None


@given(cut=st.integers(0, HEADER_BYTES + PAYLOAD_BYTES - 1))
def test_no_part_of_a_value_is_a_hit(cut: int) -> None:
    assert codec().decode(key(1), value(1)[:cut]) == (Outcome.SHORT, None)


def test_a_page_of_another_size_is_refused_by_the_writer() -> None:
    with pytest.raises(ValueError, match="a page has 1000 bytes, not 999"):
        codec().encode(key(1), bytes(999))
