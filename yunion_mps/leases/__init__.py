"""Leases: requests, the allocator, the ledger, the queue, expiry and storage."""
