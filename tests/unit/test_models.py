from __future__ import annotations

import pytest
from yunion_mps.core.models import Gpu


@pytest.mark.parametrize(
    ("pci_address", "shown"),
    [
        ("0000:00:06.0", "00:06.0"),
        ("0001:00:06.0", "0001:00:06.0"),
        ("10000:00:06.0", "10000:00:06.0"),
        ("ffff0000:00:06.0", "ffff0000:00:06.0"),
    ],
)
def test_an_address_is_shown_without_its_domain_where_that_is_0000(pci_address: str, shown: str) -> None:
    assert Gpu(pci_address).address == shown
