"""Where the catalogue's database tells of changes, a key that is revoked elsewhere is refused at once."""

from __future__ import annotations

import contextlib

import pytest
from support import wait_until

import jpets.repeated
from checkpoints.access import Access
from checkpoints.catalog import Catalog
from jpets.errors import Unauthorized
from jpets.repeated import Repeated
from serving.tenants.keyring import Keyring


def test_a_key_that_is_revoked_elsewhere_is_refused_before_the_next_look(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpets.repeated, "CHECK_SECONDS", 3600.0)
    with contextlib.closing(Catalog(schema)) as here, contextlib.closing(Catalog(schema)) as there:
        keyring, others = Keyring(Access(here)), Access(there)
        follower = Repeated(keyring.refresh, "following the keys", 3600.0, Access(here).watch())
        follower.start()
        key, text = others.create("acme")

        def accepted() -> bool:
            try:
                return keyring.asker(text).tenant == "acme"
            except Unauthorized:
                return False

        wait_until(accepted)
        others.revoke(key.id)
        wait_until(lambda: not accepted())
        follower.close()
