"""Keys of stored pages: equal for equal pages of one model in one namespace, and for nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, StorageIdentity, page_hashes
from tests.support.storage import IDENTITY

TOKENS = RadixKey.of(np.arange(64, dtype=np.int32))

texts = st.none() | st.text(max_size=3)
namespaces = st.builds(Namespace, texts, texts, texts, st.integers(0, 2))
identities = st.builds(
    StorageIdentity,
    model=st.text("ab1,", max_size=3),
    weights=st.text("ab1,", max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    layout=st.text("ab1,", max_size=3),
    page_size=st.integers(1, 12),
    tp_size=st.integers(1, 12),
    first_kv_head=st.integers(0, 12),
    end_kv_head=st.integers(0, 12),
)


def keys(identity: StorageIdentity, namespace: Namespace, raw: bytes = TOKENS.raw) -> list[bytes]:
    return page_hashes(identity.seed(namespace), raw, identity.page_size)


def test_keys_do_not_change_between_restarts() -> None:
    """Else a server would not find what it stored before. If these must change, so must the seed's name."""
    assert [each.hex() for each in keys(IDENTITY, DEFAULT_NAMESPACE)[:2]] == [
        "dd8b88fa71a9e7f7d31741ec5a6f657168954987be2f4a98e56d413a553a5dce",
        "b315096bcf843e9f33603e748371b10887d22ead2642e2c912c588a334ccec2b",
    ]


def test_salts_give_keys_of_their_own_at_every_page() -> None:
    chains = [
        keys(IDENTITY, namespace)
        for namespace in (
            DEFAULT_NAMESPACE,
            Namespace(salt="1"),
            Namespace(salt="2"),
            Namespace(salt=""),
            Namespace(adapter="1"),
            Namespace(extra_key="1"),
            Namespace(dp_rank=1),
        )
    ]

    assert len({each for chain in chains for each in chain}) == 7 * 4


@pytest.mark.parametrize("field", [field.name for field in fields(StorageIdentity) if field.name != "page_size"])
def test_every_field_of_the_identity_gives_keys_of_its_own(field: str) -> None:
    value = getattr(IDENTITY, field)
    other = replace(IDENTITY, **{field: value + "x" if isinstance(value, str) else value + 1})

    assert not set(keys(IDENTITY, DEFAULT_NAMESPACE)) & set(keys(other, DEFAULT_NAMESPACE))


def test_keys_of_storage_are_no_keys_of_a_tree() -> None:
    assert not set(keys(IDENTITY, DEFAULT_NAMESPACE)) & set(page_hashes(DEFAULT_NAMESPACE.seed(), TOKENS.raw, 16))


def test_a_key_stands_for_everything_before_it() -> None:
    changed = np.arange(64, dtype=np.int32)
    changed[0] = 99

    assert not set(keys(IDENTITY, DEFAULT_NAMESPACE)) & set(keys(IDENTITY, DEFAULT_NAMESPACE, changed.tobytes()))
    assert keys(IDENTITY, DEFAULT_NAMESPACE)[:2] == keys(IDENTITY, DEFAULT_NAMESPACE, TOKENS.raw[: 2 * 64])


@given(one=st.tuples(identities, namespaces), other=st.tuples(identities, namespaces))
def test_seeds_are_equal_only_for_equal_identities_and_namespaces(
    one: tuple[StorageIdentity, Namespace], other: tuple[StorageIdentity, Namespace]
) -> None:
    assert (one[0].seed(one[1]) == other[0].seed(other[1])) == (one == other)


hashes = st.binary(min_size=32, max_size=32)


@given(one=st.tuples(identities, hashes), other=st.tuples(identities, hashes))
def test_keys_beside_pages_are_equal_only_for_equal_pools_and_pages(
    one: tuple[StorageIdentity, bytes], other: tuple[StorageIdentity, bytes]
) -> None:
    assert (one[0].part_keys([one[1]]) == other[0].part_keys([other[1]])) == (one == other)


def test_keys_beside_pages_do_not_change_between_restarts_and_are_no_keys_of_pages() -> None:
    of_pages = keys(IDENTITY, DEFAULT_NAMESPACE)
    window = replace(IDENTITY, layout="window")

    beside = window.part_keys(of_pages)

    assert beside[0].hex() == "c28508b1b64c6f7cc0824fd7b33c410f6e8aa83a7eada67df84a010203104847"
    assert len({*beside, *of_pages, *IDENTITY.part_keys(of_pages)}) == 3 * len(of_pages)
